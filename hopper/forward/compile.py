"""Compile a forward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.arguments import (
    captured_arguments,
    compile_for_torch,
    forward_tensors,
    key_lists_argument,
    mask_arguments,
    philox_argument,
    plan_arguments,
    sinks_argument,
    slopes_argument,
    strided,
    words,
)
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.kernel import (
    Fp8ForwardKernel,
    GeneralFp8ForwardKernel,
    LongFp8ForwardKernel,
    PagedFp8ForwardKernel,
    ScoredFp8ForwardKernel,
)
from hopper.forward.kernel import ForwardKernel, GeneralForwardKernel
from hopper.forward.parts import KernelParts

TMA_BYTES = 16
"""That strides are multiples of."""

FLOATS = 4
"""Columns of partial results, and strides, are multiples of so many."""


def compile_forward(config: ForwardConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, out, lse, tile_counter, softmax_scale, num_ctas)`` that launches on torch's
    current stream. q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv) in the config's dtype with
    last stride 1, other strides in multiples of 8 elements and 16-byte aligned addresses; lse float32 (b, h, sq), or
    (b, h, 0) to have none written; tile_counter int32 (2,), zeros; softmax_scale a positive float; num_ctas the size of
    the persistent grid, usually the number of SMs.

    Unless the config ``is_plain``, it is ``fn(q, k, v, out, lse, tile_counter, softmax_scale, window_left,
    window_right, attention_chunk, plan, sequences, page_table, leftpad, softcap, alibi_slopes, sinks, philox, kept,
    *captured, num_ctas)``, as ``GeneralForwardKernel`` has them, with None for what the config has no use for. With the
    layout "varlen" q and out are (total_q, h, ...), k and v (total_k, hk, ...), lse (h, total_q or 0); plan is int32,
    of query tiles, with ``sequences`` sequences, one more than the caller's (``cute_kernels/plan``). With ``page_box``
    k and v are (pages, page_size, hk, ...), their first strides the same multiple of their second ones; page_table
    int32 (b, pages of a sequence) and leftpad int32 (b,) or (0,) are those of ``Pages``. alibi_slopes float32 (b, h),
    the stride of b may be 0; sinks float32 (h,); philox int64 (2,) and kept 1 to 256 are of dropout
    (``cute_kernels/philox.py``); captured are the tensors that the functions of the config read, and with
    ``block_lists`` one more, the lists.

    What the function does not check, and its callers must: no other size is 0, h is a multiple of hk, d and dv are
    at most the config's, no dimension larger than 1 has stride 0, the sizes pass ``check_problem_size``, and no
    launch that may run at the same time has the same tile_counter.

    With ``split`` out is float32 (parts, b, sq, h, dv) and lse float32 (parts, b, sq, h), both contiguous and there,
    with the layout "varlen" (parts, 1, total_q, h) and so on; parts are at most 127, b below 2^24, dv a multiple of 4.

    Without a GPU, set ``CUTE_DSL_ARCH=sm_90a`` in the environment first. ``options`` go to ``cute.compile``.
    """
    parts = KernelParts.of_16_bits(config)
    c, scale, ctas = config, Float32(0.0), Int32(0)
    if c.is_plain:
        kernel = ForwardKernel(c, parts)
        return compile_for_torch(kernel, *forward_tensors(c), words(2), scale, ctas, options=options)
    return compile_for_torch(
        GeneralForwardKernel(c, parts),
        *(split_tensors(c) if c.split else forward_tensors(c, in_pages=c.page_box > 0)),
        words(2),
        scale,
        *mask_arguments(c),
        *plan_arguments(c),
        *((_page_table(), words(cute.sym_int())) if c.page_box else (None, None)),
        Float32(0.0) if c.softcap else None,
        slopes_argument(c),
        sinks_argument(c),
        *((philox_argument(), Int32(0)) if c.dropout else (None, None)),
        *captured_arguments(c.functions),
        *([key_lists_argument()] if c.block_lists else []),
        ctas,
        options=options,
    )


def split_tensors(config: ForwardConfig) -> tuple:
    """Those of ``forward_tensors``, with parts of out and lse."""
    q, k, v, *_ = forward_tensors(config, in_pages=config.page_box > 0)
    return q, k, v, *_results_in_parts()


def _results_in_parts() -> tuple:
    parts, *rows = (cute.sym_int() for _ in range(4))
    columns = cute.sym_int(divisibility=FLOATS)
    return strided(Float32, (parts, *rows, columns), FLOATS), strided(Float32, (parts, *rows), 1)


def _page_table():
    """int32 (b, pages of a sequence)."""
    return strided(Int32, (cute.sym_int(), cute.sym_int()), 1)


def compile_forward_fp8(config: Fp8ForwardConfig, options: str = ""):
    """Compile the e4m3 kernel of ``config`` for sm_90a.

    Returns ``fn(q, k, vt, out, lse, tile_counter, q_scale, k_scale, v_scale, o_scale, mean_v, block_q, block_k,
    softmax_scale, num_ctas)``. vt is V transposed, (b, hk, dv, keys), its keys in the order of ``FP8_KEY_ORDER`` within
    each 32 and padded with zeros to a multiple of 32; with ``v_rows`` it is V as it is, (b, sk, hk, dv). Strides and
    head_dims are multiples of 16.
    The scales and mean_v are those of ``BlockScales``: block_q any number of rows, block_k a multiple of tile_n or
    at least the sequence, which it is to be where the config has ``lone_scales``; mean_v 16-byte aligned, its strides
    multiples of 4 elements. The rest is as for ``compile_forward``.

    With ``run_blocks`` differences, int32 (b, steps, hk, 8 dv), changes int32 (b, hk, 4), contiguous, and notes float32
    (num_ctas, runs, note_floats of the config) stand before num_ctas, all of them 16-byte aligned; or no steps,
    (b, 0, 4) and no notes (``MeansOfRuns``). Unless the config
    ``is_plain``, window_left, window_right, attention_chunk, plan and sequences do, as for ``compile_forward``. With
    the layout "varlen" q and out are (total_q, h, ...), k (total_k, hk, d), vt (hk, dv, keys) with whole steps of 32
    keys for each sequence, or with ``v_rows`` (total_k, hk, dv), and lse (h, total_q or 0); sizes of the batch are
    those of ``BlockScales``. With ``split`` out and lse are those of ``compile_forward``.

    With ``softcap`` or ``sinks`` these two stand behind sequences.

    With ``page_box`` it is ``fn(q, k, v, out, lse, tile_counter, q_scale, k_scale, v_scale, o_scale, mean_v,
    softmax_scale, window_left, window_right, attention_chunk, plan, sequences, page_table, leftpad, softcap, sinks,
    num_ctas)``, k and v (pages, page_size, hk, ...), and the rest as for ``compile_forward``.
    """
    c = config
    is_packed = c.layout == VARLEN
    if c.page_box:
        of_pages = *mask_arguments(c), *plan_arguments(c), _page_table(), words(cute.sym_int())
        given = *_packed_fp8_tensors(c), Float32(0.0), *of_pages, *_score_arguments(c), Int32(0)
        return compile_for_torch(PagedFp8ForwardKernel(c), *given, options=options)
    plain = (
        *(_packed_fp8_tensors(c) if is_packed else _dense_fp8_tensors(c)),
        Int32(0),
        Int32(0),
        Float32(0.0),
    )
    if c.run_blocks:
        b, steps, hk, words_of_head, heads, ctas, runs, numbers = (cute.sym_int() for _ in range(8))
        of_runs = (
            strided(Int32, (b, steps, hk, words_of_head), 4),
            strided(Int32, (b, heads, 4), 4),
            strided(Float32, (ctas, runs, numbers), 4),
        )
        return compile_for_torch(LongFp8ForwardKernel(c), *plain, *of_runs, Int32(0), options=options)
    if c.is_plain:
        return compile_for_torch(Fp8ForwardKernel(c), *plain, Int32(0), options=options)
    general = *plain, *mask_arguments(c), *plan_arguments(c)
    if c.softcap or c.sinks:
        given = *general, *_score_arguments(c), Int32(0)
        return compile_for_torch(ScoredFp8ForwardKernel(c), *given, options=options)
    return compile_for_torch(GeneralFp8ForwardKernel(c), *general, Int32(0), options=options)


def _score_arguments(config: Fp8ForwardConfig) -> tuple:
    """softcap and sinks, None for what there is not."""
    return Float32(0.0) if config.softcap else None, sinks_argument(config)


def _dense_fp8_tensors(config: Fp8ForwardConfig) -> tuple:
    """From q to mean_v, of sequences of one length."""
    e4m3, out = DSL_DTYPES[config.dtype], DSL_DTYPES[config.out_dtype]
    codes, step = DSL_DTYPES[config.qk_dtype], TMA_BYTES // config.qk_bytes
    b, sq, sk, sk_padded, h, hk = (cute.sym_int() for _ in range(6))
    d, dv = (cute.sym_int(divisibility=16) for _ in range(2))
    v_shape = (b, sk, hk, dv) if config.v_rows else (b, hk, dv, sk_padded)
    whole = strided(out, (b, sq, h, dv), 8), strided(Float32, (b, h, cute.sym_int()), 1)
    return (
        strided(codes, (b, sq, h, d), step),
        strided(codes, (b, sk, hk, d), step),
        strided(e4m3, v_shape, 16),
        *(_results_in_parts() if config.split else whole),
        words(2),
        *(_lone_scales(hk) if config.lone_scales else _scales(b, h, hk)),
        *_scales_of_outputs(b, hk),
    )


def _packed_fp8_tensors(config: Fp8ForwardConfig) -> tuple:
    """The same of packed sequences."""
    e4m3, out = DSL_DTYPES[config.dtype], DSL_DTYPES[config.out_dtype]
    codes, step = DSL_DTYPES[config.qk_dtype], TMA_BYTES // config.qk_bytes
    total_q, total_k, keys, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = (cute.sym_int(divisibility=16) for _ in range(2))
    of_k = (cute.sym_int(), cute.sym_int()) if config.page_box else (total_k,)
    v_shape = (*of_k, hk, dv) if config.v_rows else (hk, dv, keys)
    whole = strided(out, (total_q, h, dv), 8), strided(Float32, (h, cute.sym_int()), 1)
    return (
        strided(codes, (total_q, h, d), step),
        strided(codes, (*of_k, hk, d), step),
        strided(e4m3, v_shape, 16),
        *(_results_in_parts() if config.split else whole),
        words(2),
        *(_lone_scales(hk) if config.lone_scales else _scales(cute.sym_int(), h, hk)),
        *_scales_of_outputs(cute.sym_int(), hk),
    )


def _scales(batch, heads, kv_heads) -> tuple:
    """Of q, k and v."""
    return tuple(strided(Float32, (batch, h, cute.sym_int()), 1) for h in (heads, kv_heads, kv_heads))


def _lone_scales(kv_heads) -> tuple:
    """The same where all rows of a head share a scale."""
    batch = cute.sym_int()
    strides = tuple(cute.sym_int(64) for _ in range(3))
    of_q = make_fake_tensor(Float32, (batch, kv_heads, cute.sym_int()), strides, assumed_align=4)
    return of_q, *(strided(Float32, (batch, kv_heads, cute.sym_int()), 1) for _ in range(2))


def _scales_of_outputs(batch, kv_heads) -> tuple:
    """o_scale and mean_v."""
    return tuple(strided(Float32, (batch, kv_heads, cute.sym_int()), step) for step in (1, 4))
