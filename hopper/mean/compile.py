"""Compile the kernel of the mean of V, for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.arguments import compile_for_torch, strided
from cute_kernels.dtypes import DSL_DTYPES
from hopper.mean.config import CHUNK, ValueMeanConfig
from hopper.mean.kernel import ValueMeanKernel


def compile_value_mean(config: ValueMeanConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(v, mean)`` that launches on torch's current stream.

    - v (b, s, h, dv) in the config's dtype, dv a multiple of 8, the last stride 1, other strides in multiples of 8
      elements, 16-byte aligned.
    - mean float32 (b, h, dv): what to subtract from the columns of each head.

    What its callers must check: no size is 0, and ``count_mean_ctas`` is at most ``MAX_CTAS``.
    """
    b, s, h = (cute.sym_int() for _ in range(3))
    dv = cute.sym_int(divisibility=CHUNK)
    return compile_for_torch(
        ValueMeanKernel(config),
        strided(DSL_DTYPES[config.dtype], (b, s, h, dv), CHUNK),
        strided(Float32, (b, h, dv), 1),
        options=options,
    )
