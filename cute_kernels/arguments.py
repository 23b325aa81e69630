"""The arguments that kernels are compiled for: tensors of free sizes and strides, without a GPU."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
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


class AttentionShapes(NamedTuple):
    """Of q, k, v and out; ``rows`` are the sizes that come before those of rows in an LSE."""

    q: tuple
    k: tuple
    v: tuple
    out: tuple
    rows: tuple


def attention_shapes(layout: str, in_pages: bool = False) -> AttentionShapes:
    """Of sequences of one length, with a batch, or of packed ones; ``in_pages`` k and v are (pages, page_size, ...)."""
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    batch = () if layout == VARLEN else (b,)
    keys = (sk, cute.sym_int()) if in_pages else (*batch, sk)
    return AttentionShapes(
        (*batch, sq, h, d), (*keys, hk, d), (*keys, hk, dv), (*batch, sq, h, dv), (*batch, h)
    )


def forward_tensors(config: Any, in_pages: bool = False) -> tuple:
    """q, k, v, out and lse."""
    shapes = attention_shapes(config.layout, in_pages)
    tensors = (strided(DSL_DTYPES[config.dtype], shape, VECTOR_ELEMENTS) for shape in shapes[:4])
    return *tensors, strided(Float32, (*shapes.rows, cute.sym_int()), 1)


def backward_tensors(config: Any, sums_of_dq: bool = True) -> tuple:
    """q, k, v, dout, lse, delta, dq, dk, dv and counter; dq float32 sums, or without ``sums_of_dq`` like q; dk and dv
    float32 parts where the config ``divides_heads``."""
    dtype, shapes = DSL_DTYPES[config.dtype], attention_shapes(config.layout)
    padded, tiles = (cute.sym_int() for _ in range(2))
    q, k, v, dout, dk, dv = (
        strided(dtype, shape, VECTOR_ELEMENTS) for shape in (*shapes[:4], shapes.k, shapes.v)
    )
    lse, delta = (strided(Float32, (*shapes.rows, padded), 4) for _ in range(2))
    if sums_of_dq:
        dq = strided(Float32, (*shapes.rows, tiles, config.dq_parts, config.dq_words), 4)
    else:
        dq = strided(dtype, shapes.q, VECTOR_ELEMENTS)
    if config.divides_heads:
        dk, dv = divided_tensors(config, shapes.rows[:-1])
    return q, k, v, dout, lse, delta, dq, dk, dv, words(cute.sym_int())


def divided_tensors(config: Any, batch: tuple) -> tuple:
    """dK and dV of a kernel that ``divides_heads``: (b, kv_heads times parts, key tiles, parts of a tile, words), or
    without a batch."""
    shape = *batch, cute.sym_int(), cute.sym_int(), config.dq_parts, config.dk_words
    return tuple(strided(Float32, shape, 4) for _ in range(2))


def piece_tensors(config: Any) -> tuple:
    """What a kernel that ``divides_visits`` leaves of divided key tiles: parts of dK and dV, (tiles, pieces, parts of a
    tile, words), and where these tiles lie."""
    shape = cute.sym_int(), cute.sym_int(), config.dq_parts, config.dk_words
    return *(strided(Float32, shape, 4) for _ in range(2)), words(cute.sym_int())


def one_tile_tensors(config: Any) -> tuple:
    """The same with dq like q, and out in the place of delta."""
    q, k, v, dout, lse, _, *rest = backward_tensors(config, sums_of_dq=False)
    return q, k, v, dout, lse, strided(DSL_DTYPES[config.dtype], dout.shape, VECTOR_ELEMENTS), *rest


def mask_arguments(config: Any) -> tuple:
    """The sides of a window and the keys of a chunk, None for what the config has no use for."""
    sides = (Int32(0), Int32(0)) if config.window else (None, None)
    return *sides, Int32(0) if config.chunk else None


def plan_arguments(config: Any) -> tuple:
    """A plan and its number of sequences, or None twice."""
    return (plan_argument(), Int32(0)) if config.layout == VARLEN else (None, None)


def slopes_argument(config: Any):
    """float32 (b, h) of ALiBi, or None."""
    return strided(Float32, (cute.sym_int(), cute.sym_int()), 1) if config.alibi else None


def sinks_argument(config: Any):
    """float32 (h,), or None."""
    return strided(Float32, (cute.sym_int(),), 1) if config.sinks else None


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
