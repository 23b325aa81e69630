"""Compile what runs before and after a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.backward.finish import FinishKernel
from cute_kernels.backward.prepare import PrepareKernel
from cute_kernels.backward.step import BackwardStep, SteppedConfig
from cute_kernels.dtypes import DSL_DTYPES

VECTOR_ELEMENTS = 8
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
    return cute.compile(
        PrepareKernel(config),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(dtype, (b, sq, h, dv), VECTOR_ELEMENTS),
        strided(Float32, (b, h, sq), 1),
        strided(Float32, (b, h, padded), 1),
        strided(Float32, (b, h, padded), 1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )


def compile_finish(config: SteppedConfig, options: str = ""):
    """Compile what runs after the kernel of ``config``: ``fn(sums, dq, softmax_scale)``.

    sums is what the kernel adds dQ to, float32 (b, h, query tiles, dq_parts, dq_words) in the order of
    ``config.dq_order``; dq (b, sq, h, d) in the config's dtype is written.
    """
    b, sq, h, tiles = (cute.sym_int() for _ in range(4))
    d = cute.sym_int(divisibility=VECTOR_ELEMENTS)
    return cute.compile(
        FinishKernel(config),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        strided(DSL_DTYPES[config.dtype], (b, sq, h, d), VECTOR_ELEMENTS),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )


def strided(dtype: type[cutlass.Numeric], shape: tuple, divisibility: int):
    """A tensor of free strides in multiples of ``divisibility`` elements, its last one 1."""
    strides = tuple(cute.sym_int(64, divisibility=divisibility) for _ in shape[1:])
    return make_fake_tensor(
        dtype, shape, (*strides, 1), assumed_align=max(4, divisibility * dtype.width // 8)
    )
