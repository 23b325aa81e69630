"""Compile a forward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.ampere.forward.kernel import AmpereForwardKernel
from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES


def compile_ampere_forward(config: AmpereForwardConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives a TVM FFI function ``fn(q, k, v, out, lse, softmax_scale)`` that launches on torch's current stream. q (b, sq,
    h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv) in the config's dtype with last stride 1, other
    strides in multiples of 8 elements and 16-byte aligned addresses; lse float32 (b, h, sq), or (b, h, 0) to have none
    written; softmax_scale a positive float.

    What the function does not check, and its callers must: no other size is 0, h is a multiple of hk, d and dv are
    at most the config's, and the sizes pass ``check_problem_size``.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    return compile_for_torch(
        AmpereForwardKernel(config),
        strided(dtype, (b, sq, h, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, dv), VECTOR_ELEMENTS),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (b, h, cute.sym_int()), 1),
        Float32(0.0),
        options=options,
    )
