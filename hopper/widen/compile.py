"""Compile the kernel that makes codes of e4m3 wider, for any sizes, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float8E4M3FN

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES
from hopper.forward.fp8.config import WIDE_CODES_DTYPE
from hopper.widen.config import VECTOR, WidenConfig
from hopper.widen.kernel import WidenKernel


def compile_widen(config: WidenConfig, options: str = ""):
    """Compile the kernel for sm_90a.

    Returns a TVM FFI function ``fn(q, k, wide_q, wide_k)`` that launches on torch's current stream: e4m3 q and k
    (vectors, VECTOR), each of any number of vectors from 1 to MAX_VECTORS, neighbours behind each other, and both in
    float16. Addresses are multiples of a vector.
    """
    sizes = [(cute.sym_int(), VECTOR) for _ in range(2)]
    dtypes = Float8E4M3FN, DSL_DTYPES[WIDE_CODES_DTYPE]
    tensors = [strided(dtype, size, VECTOR) for dtype in dtypes for size in sizes]
    return compile_for_torch(WidenKernel(), *tensors, options=options)
