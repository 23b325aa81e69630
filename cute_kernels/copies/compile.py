"""Compile the kernel that copies pieces of several tensors at once, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.copies.config import VECTOR, CopiesConfig
from cute_kernels.copies.kernel import CopiesKernel
from cute_kernels.dtypes import DSL_DTYPES


def compile_copies(config: CopiesConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(*sources, *targets, *places, most_ctas)`` of tensors of the config's dtype; at most so many CTAs work on
    each copy. A source is (batch, rows, heads, d), whose heads lie side by side. Of each in turn, ``config.pieces``
    targets (a, b, n, w) and as many places follow, each of two numbers of elements: where a piece begins in its source,
    and how far it is from one of its b blocks to the next; its strides along a and n are those of batch and rows. All
    of these, w and all strides of a target but the last, which is 1, are multiples of VECTOR elements. The vectors of
    each target fit 31 bits. Where ``config.gathers``, targets are read and sources written.
    """
    dtype = DSL_DTYPES[config.dtype]

    def source():
        # Heads are not addressed one by one, so that their size is free.
        strides = *(cute.sym_int(64, divisibility=VECTOR) for _ in range(2)), cute.sym_int(64), 1
        shape = tuple(cute.sym_int() for _ in range(4))
        return make_fake_tensor(dtype, shape, strides, assumed_align=VECTOR * dtype.width // 8)

    def target():
        sizes = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
        return strided(dtype, sizes, VECTOR)

    tensors = *(source() for _ in range(config.sources)), *(target() for _ in range(config.copies))
    places = [Int64(VECTOR)] * (2 * config.copies)
    return compile_for_torch(CopiesKernel(config), *tensors, *places, Int32(1), options=options)
