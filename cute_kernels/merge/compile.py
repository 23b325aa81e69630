"""Compile the kernel that adds a partial result to a sum of such, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.merge.config import VECTOR, MergeConfig
from cute_kernels.merge.kernel import MergeKernel


def compile_merge(config: MergeConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(sum, sum_lse, part, part_lse)``: part (b, s, h, d) in the config's dtype and its part_lse float32
    (b, s, h) are added to sum (b, s, h, d), float32 or of that dtype, and sum_lse. d and all strides of sum and part
    but the last, which is 1, are multiples of VECTOR elements; the strides of the LSEs are free. The product of b, s
    and h fits 31 bits.
    """
    d = cute.sym_int(divisibility=VECTOR)
    rows = tuple(cute.sym_int() for _ in range(3))

    def any_strides():
        strides = tuple(cute.sym_int(64) for _ in rows)
        return make_fake_tensor(Float32, rows, strides, assumed_align=4)

    kernel = MergeKernel(config)
    return compile_for_torch(
        kernel,
        strided(kernel.sum_dtype, (*rows, d), VECTOR),
        any_strides(),
        strided(DSL_DTYPES[config.dtype], (*rows, d), VECTOR),
        any_strides(),
        options=options,
    )
