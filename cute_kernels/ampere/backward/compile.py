"""Compile a backward kernel for any sizes and strides, with or without a GPU."""

from cutlass import Float32

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.kernel import AmpereBackwardKernel, PackedAmpereBackwardKernel
from cute_kernels.ampere.options import option_arguments
from cute_kernels.arguments import backward_tensors, compile_for_torch, plan_arguments, query_lists_argument
from cute_kernels.problem import VARLEN


def compile_ampere_backward(config: AmpereBackwardConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives a TVM FFI function ``fn(q, k, v, dout, lse, delta, dq, dk, dv, counter, softmax_scale)`` that launches on
    torch's current stream, with arguments as those of ``hopper.backward.compile.compile_backward``: lse and delta
    padded to a multiple of tile_m, dq float32 (b, h, query tiles, dq_parts, dq_words), zeros, added to in the order of
    ``config.dq_order``. Only with ``config.ordered`` is counter read: two zeros, and
    ``config.counts_per_tile`` for each query tile of all heads, which are not zero afterwards.

    With ``window`` two more int32 follow, ``window_left`` and ``window_right``, neither negative and ``NO_LIMIT`` for
    none; the right one counts for nothing in a causal kernel. With ``chunk`` its keys follow them, 1 or more. If the
    config changes scores, four more follow, (softcap, alibi_slopes, philox, kept), with None for what it has no use
    for: a positive float; float32 (b, h), whose first stride may be 0; int64 (2,); 1 to 256. Then come the tensors that
    the functions of the config read, and with ``block_lists`` the lists (``query_lists_argument``).

    With ``layout`` "varlen" it is ``fn(q, k, v, dout, lse, delta, dq, dk, dv, counter, plan, sequences, softmax_scale,
    ...)``: q (total_q, h, d), k (total_k, hk, d), and so on. Sequence i has query tiles of its own, from ``offset_q //
    tile_m + i`` on (``SeqlenInfo.first_query_tile``), of ``total_q // tile_m + b + 1`` in all: lse and delta are (h,
    query tiles * tile_m), dq is (h, query tiles, dq_parts, dq_words). plan is int32, that of tiles of ``tile_n`` rows
    of K (``cute_kernels.plan``, with ``of_keys``); sequences int32, b + 1. dk and dv of keys behind all sequences are
    0; rows in no sequence of the plan are neither read nor written.
    """
    tensors, scale = backward_tensors(config), Float32(0.0)
    given = *option_arguments(config), *([query_lists_argument()] if config.block_lists else [])
    if config.layout == VARLEN:
        kernel, plan = PackedAmpereBackwardKernel(config), plan_arguments(config)
        return compile_for_torch(kernel, *tensors, *plan, scale, *given, options=options)
    return compile_for_torch(AmpereBackwardKernel(config), *tensors, scale, *given, options=options)
