"""Compile the kernel that merges partial results, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.combine.config import VECTOR, CombineConfig
from cute_kernels.combine.few_kernel import FewCombineKernel
from cute_kernels.combine.kernel import CombineKernel
from cute_kernels.dtypes import DSL_DTYPES


def compile_combine(config: CombineConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(parts, part_lse, out, lse)``: parts float32 (splits, b, s, h, d) with 1 to MAX_SPLITS splits, or up
    to FEW_SPLITS with ``few_splits``, and part_lse float32 (splits, b, s, h) are merged into out (b, s, h, d) in the
    config's dtype and lse float32 (b, s, h). d and all strides of parts and out but the last, which is 1, are multiples
    of VECTOR elements; the strides of part_lse and lse are free. The product of b, s, h and the blocks of COLUMNS
    columns fits 31 bits.
    """
    splits, d = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
    rows = tuple(cute.sym_int() for _ in range(3))
    return compile_for_torch(
        FewCombineKernel(config) if config.few_splits else CombineKernel(config),
        strided(Float32, (splits, *rows, d), VECTOR),
        _any_strides((splits, *rows)),
        strided(DSL_DTYPES[config.dtype], (*rows, d), VECTOR),
        _any_strides(rows),
        options=options,
    )


def _any_strides(shape: tuple):
    """float32."""
    strides = tuple(cute.sym_int(64) for _ in shape)
    return make_fake_tensor(Float32, shape, strides, assumed_align=4)
