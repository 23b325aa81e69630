"""Compile the kernel that makes several copies at once, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.copies.config import VECTOR, CopiesConfig
from cute_kernels.copies.kernel import CopiesKernel
from cute_kernels.dtypes import DSL_DTYPES


def compile_copies(config: CopiesConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(*targets, *sources, most_ctas)``, as many of either as ``config.copies``, all (a, b, n, w) of the
    config's dtype and each target of its source's shape; at most so many CTAs work on each copy. w and all strides but
    the last, which is 1, are multiples of VECTOR elements. The vectors of each fit 31 bits.
    """

    def tensor():
        sizes = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return strided(DSL_DTYPES[config.dtype], sizes, VECTOR)

    tensors = [tensor() for _ in range(2 * config.copies)]
    return compile_for_torch(CopiesKernel(config), *tensors, Int32(1), options=options)
