"""Compile a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.kernel import AmpereBackwardKernel
from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES


def compile_ampere_backward(config: AmpereBackwardConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives a TVM FFI function ``fn(q, k, v, dout, lse, delta, dq, dk, dv, counter, softmax_scale)`` that launches on
    torch's current stream, with arguments as those of ``hopper.backward.compile.compile_backward``: lse and delta
    padded to a multiple of tile_m, dq float32 (b, h, query tiles, dq_parts, dq_words), zeros, added to in the order of
    ``config.dq_order``. Only with ``config.ordered`` is counter read: two zeros, and
    ``config.counts_per_tile`` for each query tile of all heads, which are not zero afterwards.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk, padded, tiles = (cute.sym_int() for _ in range(7))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    return compile_for_torch(
        AmpereBackwardKernel(config),
        strided(dtype, (b, sq, h, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, dv), VECTOR_ELEMENTS),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (b, h, padded), 4),
        strided(Float32, (b, h, padded), 4),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        strided(dtype, (b, sk, hk, d), VECTOR_ELEMENTS),
        strided(dtype, (b, sk, hk, dv), VECTOR_ELEMENTS),
        words(cute.sym_int()),
        Float32(0.0),
        options=options,
    )
