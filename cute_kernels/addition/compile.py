"""Compile the kernel that adds tensors to one, for any sizes, with or without a GPU."""

import cutlass.cute as cute

from cute_kernels.addition.config import VECTOR, AdditionConfig
from cute_kernels.addition.kernel import AdditionKernel
from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES


def compile_addition(config: AdditionConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(total, first, second, third)``, all (b, n, w) of the config's dtype: the parts are added to total, the
    third where ``config.parts`` is 3. w and all strides but the last, which is 1, are multiples of VECTOR elements. The
    vectors of total fit 31 bits.
    """
    sizes = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VECTOR)
    tensors = [strided(DSL_DTYPES[config.dtype], sizes, VECTOR) for _ in range(4)]
    return compile_for_torch(AdditionKernel(config), *tensors, options=options)
