"""Compile the kernel that copies a cache of e4m3 to 16 bits, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.arguments import compile_for_torch, strided, words
from cute_kernels.dequantize.config import VECTOR, DequantizeConfig
from cute_kernels.dequantize.kernel import DequantizeKernel
from cute_kernels.dtypes import DSL_DTYPES


def compile_dequantize(config: DequantizeConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(k_cache, v_cache, lengths, first, batch_idx, page_table, k_descale, v_descale, k, v)``: caches (pages,
    page_size, hk, d or dv) of e4m3, one page an entry where page_table is (0, 0). Key i of sequence b, for i from 0 to
    lengths[b] and within k, is that at position first[b] + i, or i where first is (0,), of entry batch_idx[b], or b
    where that is (0,): row position % page_size of page page_table[entry, position // page_size]. Times its descale,
    float32 (b, hk), or with ``row_scales`` (pages, page_size, hk) of any strides, it goes to k[b, i] and v[b, i], (b,
    room, hk, d or dv) of the config's dtype. A key whose place is outside of the cache is zeros. Lengths and tables are
    int32.

    What it does not check, and its callers must: sizes of the tensors agree, none is 0, d, dv and all strides but the
    last are multiples of VECTOR elements.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, hk, room = (cute.sym_int() for _ in range(3))
    d, dv = (cute.sym_int(divisibility=VECTOR) for _ in range(2))
    pages = cute.sym_int(), cute.sym_int()

    def descale():
        shape = (*pages, hk) if config.row_scales else (b, hk)
        strides = tuple(cute.sym_int(64) for _ in shape)
        return make_fake_tensor(Float32, shape, strides, assumed_align=4)

    return compile_for_torch(
        DequantizeKernel(config),
        strided(Float8E4M3FN, (*pages, hk, d), VECTOR),
        strided(Float8E4M3FN, (*pages, hk, dv), VECTOR),
        words(b),
        *(words(cute.sym_int()) for _ in range(2)),
        strided(Int32, (cute.sym_int(), cute.sym_int()), 1),
        descale(),
        descale(),
        strided(dtype, (b, room, hk, d), VECTOR),
        strided(dtype, (b, room, hk, dv), VECTOR),
        options=options,
    )
