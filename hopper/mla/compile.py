"""Compile the kernel for decoding over a latent for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
from hopper.decode.arguments import cache_arguments, score_arguments
from hopper.mla.config import MlaConfig
from hopper.mla.kernel import MlaKernel


def compile_mla(config: MlaConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, qv, k, v, out, lse, lengths, table, leftpad, cu_seqlens_q, parts, softmax_scale,
    max_splits, window_left, window_right, attention_chunk, softcap, sinks, num_pieces)``, as ``MlaKernel`` has them,
    that launches on torch's current stream. Strides of q, qv, k, v and out are multiples of 8 elements and the last one
    is 1; parts float32 (2 num_pieces, part_floats).
    """
    c = config
    dtype = DSL_DTYPES[c.dtype]
    b, sq, h, hk, pages, page_size = (cute.sym_int() for _ in range(6))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    is_packed = c.layout == VARLEN
    rows = (sq,) if is_packed else (b, sq)
    queries = (strided(dtype, (*rows, h, columns), VECTOR_ELEMENTS) for columns in (d, dv))
    caches = (strided(dtype, (pages, page_size, hk, columns), VECTOR_ELEMENTS) for columns in (d, dv))
    return compile_for_torch(
        MlaKernel(c),
        *queries,
        *caches,
        strided(dtype, (*rows, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (h, sq) if is_packed else (b, h, sq), 1),
        *cache_arguments(c, b),
        *score_arguments(c),
        Int32(0),
        options=options,
    )
