"""Compile a backward kernel for any sizes and strides, with or without a GPU."""

from cutlass import Float32, Int32

from cute_kernels.arguments import (
    backward_tensors,
    captured_arguments,
    compile_for_torch,
    mask_arguments,
    one_tile_tensors,
    philox_argument,
    piece_tensors,
    plan_arguments,
    query_lists_argument,
    slopes_argument,
)
from hopper.backward.config import BackwardConfig, PairedBackwardConfig
from hopper.backward.kernel import BackwardKernel, GeneralBackwardKernel
from hopper.backward.one_tile import OneTileBackwardKernel
from hopper.backward.pair_kernel import GeneralPairedBackwardKernel, PairedBackwardKernel
from hopper.backward.piece_kernel import PieceBackwardKernel
from hopper.backward.strip_kernel import StripBackwardKernel
from hopper.backward.walk import WalkingBackwardKernel


def compile_backward(config: BackwardConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, dout, lse, delta, dq, dk, dv, counter, softmax_scale)`` that launches on
    torch's current stream, with num_ctas as one more argument where ``config.is_persistent``, as many as there are SMs.
    Unless the config ``is_plain``, softmax_scale is followed by ``window_left, window_right, attention_chunk, plan,
    sequences, softcap, alibi_slopes, philox, kept, *captured``, None for what the config has no use for
    (``BackwardOptions``), and with ``config.block_lists`` by the lists (``BackwardWork``).

    counter int32 has two zeros, which are zero again afterwards, and with ``config.ordered``
    ``config.counts_per_tile`` further zeros for each query tile of all heads. q (b, sq, h, d), k (b, sk, hk, d), v
    (b, sk, hk, dv), dout (b, sq, h, dv), dk and dv like k and v, in the config's dtype with last stride 1, other
    strides in multiples of 8 elements and 16-byte aligned addresses. lse and delta float32 (b, h, padded sq),
    contiguous, padded to a multiple of tile_m: the base-2 log-sum-exp of each row, +inf for rows without keys and
    past the end, and rowsum(dout * out), 0 past the end. dq float32 (b, h, query tiles, dq_parts, dq_words), zeros,
    contiguous, is added to in the order of ``config.dq_order``, without softmax_scale; with
    ``config.strips`` or ``config.one_tile`` it is like q, and written. With ``config.one_tile`` lse is in base e, not
    padded and -inf for rows without keys, and in the place of delta comes out, like dout. With ``config.divides_heads``
    dk and dv are float32 (b, hk * parts, key tiles, dq_parts, dk_words), contiguous, and written in the order of
    ``config.dk_order``: those of a part of the query heads of each head of K and V, for any number of parts. With
    ``config.divides_visits`` dv is followed by key_sums and value_sums, float32 (divided tiles, pieces, dq_parts,
    dk_words), which are written like that, and places, int32, three for each of these tiles; and softmax_scale by the
    number of the first of them.

    With the layout "varlen" q and dout are (total_q, h, ...), k, v, dk and dv (total_k, hk, ...), lse and delta (h,
    tiles * tile_m), dq (h, tiles, dq_parts, dq_words). tiles is ``plan_entries`` of total_q, batch and tile_m: each
    sequence has whole tiles of its own (``cute_kernels/backward/packed.py``). plan is
    int32, made with ``of_keys`` for tiles of ``config.tile_n`` keys, of ``sequences`` sequences, one more than the
    caller's (``cute_kernels/plan``). Rows of dk and dv behind the last sequence are written, with zeros; those between
    the sequences are not.
    """
    c, scale = config, Float32(0.0)
    is_paired = isinstance(c, PairedBackwardConfig)
    tensors = one_tile_tensors(c) if c.one_tile else backward_tensors(c, not c.strips)
    ctas = (Int32(1),) if c.is_persistent else ()
    if c.divides_visits:
        tensors = *tensors[:-1], *piece_tensors(c), tensors[-1]
        return compile_for_torch(PieceBackwardKernel(c), *tensors, scale, Int32(0), *ctas, options=options)
    if c.is_plain:
        plain = OneTileBackwardKernel if c.one_tile else BackwardKernel
        plain = WalkingBackwardKernel if c.walks_back else plain
        kernel = (PairedBackwardKernel if is_paired else plain)(c)
        return compile_for_torch(kernel, *tensors, scale, *ctas, options=options)
    general = StripBackwardKernel if c.strips else GeneralBackwardKernel
    return compile_for_torch(
        (GeneralPairedBackwardKernel if is_paired else general)(c),
        *tensors,
        scale,
        *mask_arguments(c),
        *plan_arguments(c),
        Float32(0.0) if c.softcap else None,
        slopes_argument(c),
        *((philox_argument(), Int32(0)) if c.dropout else (None, None)),
        *captured_arguments(c.functions),
        *([query_lists_argument()] if c.block_lists else []),
        *ctas,
        options=options,
    )
