"""Compile the decode kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
from hopper.decode.arguments import cache_arguments, score_arguments
from hopper.decode.config import DecodeConfig
from hopper.decode.kernel import DecodeKernel


def compile_decode(config: DecodeConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, out, lse, lengths, table, leftpad, cu_seqlens_q, parts,
    softmax_scale, max_splits, window_left, window_right, attention_chunk, softcap, sinks,
    q_descale, k_descale, v_descale, num_ctas)``, as
    ``DecodeKernel`` has them, that launches on torch's current stream. Strides of q, k, v and out are multiples of 8
    elements and the last one is 1; parts float32 (2 num_ctas, part_floats), or of any number of rows with clusters,
    which leave it alone. With ``row_scales`` k_descale and v_descale are (pages, page_size, kv_heads) of any strides, 0
    among them.
    """
    c = config
    dtype = DSL_DTYPES[c.dtype]
    b, sq, h, hk, pages, page_size = (cute.sym_int() for _ in range(6))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    is_packed = c.layout == VARLEN
    rows = (sq,) if is_packed else (b, sq)
    of_cache = DSL_DTYPES[c.cache_dtype or c.dtype]
    vector = 16 * 8 // of_cache.width
    caches = (strided(of_cache, (pages, page_size, hk, columns), vector) for columns in (d, dv))
    q_descale = strided(Float32, (b, hk), 1) if c.e4m3_queries else None
    descales = (strided(Float32, (b, hk), 1) if c.cache_dtype else None for _ in range(2))
    if c.row_scales:
        descales = (_of_rows((pages, page_size, hk)) for _ in range(2))
    lse = (h, sq) if is_packed else (b, h, sq)
    return compile_for_torch(
        DecodeKernel(c),
        strided(of_cache if c.e4m3_queries else dtype, (*rows, h, d), VECTOR_ELEMENTS),
        *caches,
        strided(dtype, (*rows, h, dv), VECTOR_ELEMENTS),
        strided(Float32, lse, 1),
        *cache_arguments(c, b),
        *score_arguments(c),
        q_descale,
        *descales,
        Int32(0),
        options=options,
    )


def _of_rows(shape: tuple):
    """float32 of any strides."""
    strides = tuple(cute.sym_int(64) for _ in shape)
    return make_fake_tensor(Float32, shape, strides, assumed_align=4)
