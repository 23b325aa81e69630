"""Compile what runs before and after a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided
from cute_kernels.backward.finish import FinishKernel
from cute_kernels.backward.prepare import PrepareKernel
from cute_kernels.backward.step import BackwardStep, SteppedConfig
from cute_kernels.dtypes import DSL_DTYPES

"""Of 16 bits, in the 16 bytes to which rows are aligned."""


def compile_step(step: BackwardStep, options: str = ""):
    """Compile the kernel of ``step``."""
    return (compile_prepare if step.step == "prepare" else compile_finish)(step.config, options)


def compile_prepare(config: SteppedConfig, options: str = ""):
    """Compile what runs before the kernel of ``config``: ``fn(out, dout, lse, lse_log2, delta)``.

    out and dout (b, sq, h, dv) as for the kernel, lse float32 (b, h, sq) in base e. lse_log2 and delta
    float32 (b, h, padded sq) are written, for the kernel.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, h, padded = (cute.sym_int() for _ in range(4))
    dv = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return compile_for_torch(
        PrepareKernel(config),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (b, h, sq), 1),
        strided(Float32, (b, h, padded), 1),
        strided(Float32, (b, h, padded), 1),
        options=options,
    )


def compile_finish(config: SteppedConfig, options: str = ""):
    """Compile what runs after the kernel of ``config``: ``fn(sums, dq, softmax_scale)``.

    sums is what the kernel adds dQ to, float32 (b, h, query tiles, dq_parts, dq_words) in the order of
    ``config.dq_order``; dq (b, sq, h, d) in the config's dtype is written.
    """
    b, sq, h, tiles = (cute.sym_int() for _ in range(4))
    d = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return compile_for_torch(
        FinishKernel(config),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        strided(DSL_DTYPES[config.dtype], (b, sq, h, d), VECTOR_ELEMENTS),
        Float32(0.0),
        options=options,
    )
