"""The arguments that kernels are compiled for: tensors of free sizes and strides, without a GPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.user_functions import UserFunctions

VECTOR_ELEMENTS = 8
"""16-bit elements that one vector access or one unit of TMA moves, and so what strides are multiples of."""


def strided(dtype: type[cutlass.Numeric], shape: tuple, divisibility: int):
    """A tensor of free strides in multiples of ``divisibility`` elements. So is its address, and one of 4 bytes.
    The last stride is 1."""
    strides = tuple(cute.sym_int(64, divisibility=divisibility) for _ in shape[1:])
    return make_fake_tensor(
        dtype, shape, (*strides, 1), assumed_align=max(4, divisibility * dtype.width // 8)
    )


def words(number):
    """A vector of int32 of so many elements."""
    return make_fake_tensor(Int32, (number,), (1,), assumed_align=4)


CAPTURED_DTYPES = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": Int32,
    "int64": cutlass.Int64,
    "bool": cutlass.Uint8,
}
"""Of tensors that a user's functions read; truth values come as bytes."""


def captured_arguments(functions: UserFunctions) -> tuple:
    """The tensors that a user's functions read, of any sizes and strides."""

    def any_tensor(dtype: type[cutlass.Numeric], dimensions: int):
        shape = tuple(cute.sym_int() for _ in range(dimensions))
        strides = tuple(cute.sym_int(64) for _ in range(dimensions))
        return make_fake_tensor(dtype, shape, strides, assumed_align=dtype.width // 8)

    return tuple(any_tensor(CAPTURED_DTYPES[kind.dtype], kind.dimensions) for kind in functions.tensors)


def key_lists_argument():
    """What ``ListedBlocks`` are read from, int32 (b, h, query tiles, 1 + key tiles), of which the first two strides may
    be 0."""
    return strided(Int32, tuple(cute.sym_int() for _ in range(4)), 1)


def query_lists_argument():
    """What ``ListedQueries`` are read from, int32 (b, h, key tiles, 1 + query tiles, 2), rows of 8 bytes. The first two
    strides may be 0."""
    shape = (*(cute.sym_int() for _ in range(4)), 2)
    strides = (*(cute.sym_int(64, divisibility=2) for _ in range(3)), 2, 1)
    return make_fake_tensor(Int32, shape, strides, assumed_align=8)


def plan_argument():
    """A plan of packed sequences (``cute_kernels/plan``), 16-byte aligned."""
    return make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)


def philox_argument():
    """Seed and offset of a mask of dropout, int64 (2,)."""
    return make_fake_tensor(Int64, (2,), (1,), assumed_align=8)


def compile_for_torch(kernel, *arguments, options: str):
    """A TVM FFI function that takes torch tensors as ``arguments`` describe them, and launches on torch's current
    stream, which is the last argument of ``kernel``."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options=f"--enable-tvm-ffi {options}".strip())
