"""Compile the kernel that rotates queries and keys, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.rotation.config import VECTOR, RotationConfig
from cute_kernels.rotation.kernel import RotationKernel


def compile_rotation(config: RotationConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives ``fn(q, k, low_cos, low_sin, high_cos, high_sin, q_rotated, k_rotated, sign)``. q (b, s, h, d) and
    k (b, s, hk, d) are read, the rotated ones, of the same shapes, are written, and the tables are (b, s, r / 2). Of a
    row, column x below r / 2 and column y that is r / 2 behind it become

        x low_cos - sign y low_sin        and        y high_cos + sign x high_sin

    Columns from r on are copied.

    What it does not check, and its callers must: r is at most d; d, r / 2 and all strides but the last, which is 1, are
    multiples of VECTOR elements; the vectors of q and of k fit 31 bits; nothing that is written overlaps what is read.
    """
    b, s, h, hk = (cute.sym_int() for _ in range(4))
    d, half = (cute.sym_int(divisibility=VECTOR) for _ in range(2))
    number, of_table = DSL_DTYPES[config.dtype], DSL_DTYPES[config.table_dtype]
    rows = [strided(number, (b, s, heads, d), VECTOR) for heads in (h, hk)]
    tables = [strided(of_table, (b, s, half), VECTOR) for _ in range(4)]
    rotated = [strided(number, (b, s, heads, d), VECTOR) for heads in (h, hk)]
    return compile_for_torch(RotationKernel(config), *rows, *tables, *rotated, Float32(1.0), options=options)
