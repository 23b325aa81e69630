"""Compile what runs before and after a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import (
    VECTOR_ELEMENTS,
    compile_for_torch,
    divided_tensors,
    piece_tensors,
    plan_argument,
    strided,
    words,
)
from cute_kernels.backward.finish import FinishKernel, PackedFinishKernel
from cute_kernels.backward.finish_divided import DividedFinishKernel, PackedDividedFinishKernel
from cute_kernels.backward.finish_pieces import PieceFinishKernel
from cute_kernels.backward.prepare import WORDS, PackedPrepareKernel, PrepareKernel
from cute_kernels.backward.step import BackwardStep, DividedConfig, SteppedConfig
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import DENSE


def compile_step(step: BackwardStep, options: str = ""):
    """Compile the kernel of ``step``."""
    is_dense = step.config.layout == DENSE
    if step.step == "prepare":
        return (compile_prepare if is_dense else compile_packed_prepare)(step.config, options)
    return (compile_finish if is_dense else compile_packed_finish)(step.config, options)


def compile_prepare(config: SteppedConfig, options: str = ""):
    """Compile what runs before the kernel of ``config``: ``fn(out, dout, lse, lse_log2, delta, sums)``.

    out and dout (b, sq, h, dv) as for the kernel, lse float32 (b, h, sq) in base e. lse_log2 and delta
    float32 (b, h, padded sq) are written, for the kernel. So is sums float32 (b, h, query tiles, parts, words), all of
    it with zeros, as many multiples of 4 words as there are.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, h, padded = (cute.sym_int() for _ in range(4))
    dv = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return compile_for_torch(
        PrepareKernel(config),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (b, h, sq), 1),
        strided(Float32, (b, h, padded), 1),
        strided(Float32, (b, h, padded), 1),
        sums_argument((b, h)),
        options=options,
    )


def compile_finish(config: SteppedConfig, options: str = ""):
    """Compile what runs after the kernel of ``config``: ``fn(sums, dq, softmax_scale)``.

    sums is what the kernel adds dQ to, float32 (b, h, query tiles, dq_parts, dq_words) in the order of
    ``config.dq_order``; dq (b, sq, h, d) in the config's dtype is written.
    """
    if config.divides_heads:
        return compile_divided_finish(config, options)
    if config.divides_visits:
        return compile_piece_finish(config, options)
    b, sq, h, tiles = (cute.sym_int() for _ in range(4))
    d = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return compile_for_torch(
        FinishKernel(config),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        strided(DSL_DTYPES[config.dtype], (b, sq, h, d), VECTOR_ELEMENTS),
        Float32(0.0),
        options=options,
    )


def compile_divided_finish(config: DividedConfig, options: str = ""):
    """The same of a kernel that ``divides_heads``: ``fn(sums, dq, key_sums, value_sums, dk, dv, softmax_scale)``.

    key_sums and value_sums are what the kernel has left of dK and dV, float32 (b, kv_heads times parts, key tiles,
    dq_parts, dk_words) in the order of ``config.dk_order``; dk (b, sk, kv_heads, d) and dv in the config's dtype are
    written.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, h, tiles, sk, kv_heads = (cute.sym_int() for _ in range(6))
    columns = [cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(3)]
    return compile_for_torch(
        DividedFinishKernel(config),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        strided(dtype, (b, sq, h, columns[0]), VECTOR_ELEMENTS),
        *divided_tensors(config, (b,)),
        *(strided(dtype, (b, sk, kv_heads, width), VECTOR_ELEMENTS) for width in columns[1:]),
        Float32(0.0),
        options=options,
    )


def compile_piece_finish(config: DividedConfig, options: str = ""):
    """The same of a kernel that ``divides_visits``:
    ``fn(sums, dq, key_sums, value_sums, places, dk, dv, softmax_scale)``.

    key_sums, value_sums and places are what the kernel has left of the key tiles that it divides, float32 (divided
    tiles, pieces, dq_parts, dk_words) in the order of ``config.dk_order``, and int32, three for each. dk (b, sk,
    kv_heads, d) and dv in the config's dtype are written in these tiles alone.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, h, tiles, sk, kv_heads = (cute.sym_int() for _ in range(6))
    columns = [cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(3)]
    return compile_for_torch(
        PieceFinishKernel(config),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        strided(dtype, (b, sq, h, columns[0]), VECTOR_ELEMENTS),
        *piece_tensors(config),
        *(strided(dtype, (b, sk, kv_heads, width), VECTOR_ELEMENTS) for width in columns[1:]),
        Float32(0.0),
        options=options,
    )


def compile_packed_prepare(config: SteppedConfig, options: str = ""):
    """Compile what runs before the kernel of ``config`` on packed sequences:
    ``fn(out, dout, lse, dlse, lse_log2, delta, sums, plan, sequences, counter)``.

    out and dout (total_q, h, dv) as for the kernel, lse float32 (h, total_q) in base e, dlse its gradient, or (h, 0)
    for none. lse_log2 and delta float32 (h, tiles * tile_m) are written, for the kernel: each sequence has whole tiles
    of its own in them, of total_q // tile_m + batch + 1 in all (``plan_entries``). So is sums float32 (h, tiles, parts,
    words), with zeros as by ``compile_prepare``. plan is int32, that of the kernel, with ``sequences`` sequences, one
    more than the caller's (``cute_kernels/plan``). counter is None; with ``config.clears_ahead`` that of the kernel,
    int32, which becomes zero, and sums are written of those tiles alone that no key tile visits.
    """
    dtype = DSL_DTYPES[config.dtype]
    total_q, h, padded = (cute.sym_int() for _ in range(3))
    dv = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return compile_for_torch(
        PackedPrepareKernel(config),
        strided(dtype, (total_q, h, dv), VECTOR_ELEMENTS),
        strided(dtype, (total_q, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (h, total_q), 1),
        strided(Float32, (h, cute.sym_int()), 1),
        strided(Float32, (h, padded), 1),
        strided(Float32, (h, padded), 1),
        sums_argument((h,)),
        plan_argument(),
        Int32(0),
        words(cute.sym_int()) if config.clears_ahead else None,
        options=options,
    )


def compile_packed_finish(config: SteppedConfig, options: str = ""):
    """Compile what runs after the kernel of ``config`` on packed sequences:
    ``fn(sums, dq, plan, sequences, softmax_scale)``.

    sums is what the kernel adds dQ to, float32 (h, query tiles, dq_parts, dq_words) in the order of
    ``config.dq_order``; dq (total_q, h, d) in the config's dtype is written, all of it: rows that are in no sequence
    with zeros. plan and sequences are as for ``compile_packed_prepare``.
    """
    if config.divides_heads:
        return compile_packed_divided_finish(config, options)
    total_q, h, tiles = (cute.sym_int() for _ in range(3))
    d = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return compile_for_torch(
        PackedFinishKernel(config),
        strided(Float32, (h, tiles, config.dq_parts, config.dq_words), 4),
        strided(DSL_DTYPES[config.dtype], (total_q, h, d), VECTOR_ELEMENTS),
        plan_argument(),
        Int32(0),
        Float32(0.0),
        options=options,
    )


def compile_packed_divided_finish(config: DividedConfig, options: str = ""):
    """The same of a kernel that ``divides_heads``:
    ``fn(sums, dq, key_sums, value_sums, dk, dv, plan, sequences, softmax_scale)``.

    key_sums and value_sums are float32 (kv_heads times parts, key tiles, dq_parts, dk_words), where each sequence has
    whole tiles of its own, of total_k // tile_n + batch + 1 in all. dk (total_k, kv_heads, d) and dv are written where
    sequences have keys, and behind the last one.
    """
    dtype = DSL_DTYPES[config.dtype]
    total_q, h, tiles, total_k, kv_heads = (cute.sym_int() for _ in range(5))
    columns = [cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(3)]
    return compile_for_torch(
        PackedDividedFinishKernel(config),
        strided(Float32, (h, tiles, config.dq_parts, config.dq_words), 4),
        strided(dtype, (total_q, h, columns[0]), VECTOR_ELEMENTS),
        *divided_tensors(config, ()),
        *(strided(dtype, (total_k, kv_heads, width), VECTOR_ELEMENTS) for width in columns[1:]),
        plan_argument(),
        Int32(0),
        Float32(0.0),
        options=options,
    )


def sums_argument(rows: tuple):
    """Sums of dQ of any number of query tiles, parts and words; ``rows`` are the sizes that come before those."""
    words = cute.sym_int(divisibility=WORDS)
    return strided(Float32, (*rows, cute.sym_int(), cute.sym_int(), words), WORDS)
