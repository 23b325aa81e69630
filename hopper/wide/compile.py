"""Compile the forward kernel for wide values for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import (
    VECTOR_ELEMENTS,
    attention_shapes,
    compile_for_torch,
    mask_arguments,
    plan_arguments,
    sinks_argument,
    slopes_argument,
    strided,
    words,
)
from cute_kernels.dtypes import DSL_DTYPES
from hopper.wide.config import WideForwardConfig
from hopper.wide.kernel import WideForwardKernel


def compile_wide(config: WideForwardConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, qv, out, lse, tile_counter, softmax_scale, window_left, window_right,
    attention_chunk, plan, sequences, softcap, alibi_slopes, sinks, num_ctas)`` that launches on torch's current stream.
    All but qv are as for ``hopper.forward.compile.compile_forward``, with None for what the config has no use for; d is
    at most the config's head_dim, dv its head_dim_v. qv has the shape of out and the properties of q; None without
    ``qv``.
    """
    c = config
    return compile_for_torch(
        WideForwardKernel(c),
        *_tensors(c),
        words(2),
        Float32(0.0),
        *mask_arguments(c),
        *plan_arguments(c),
        Float32(0.0) if c.softcap else None,
        slopes_argument(c),
        sinks_argument(c),
        Int32(0),
        options=options,
    )


def _tensors(config: WideForwardConfig) -> tuple:
    """q, k, v, qv, out and lse, dense or packed."""
    dtype, shapes = DSL_DTYPES[config.dtype], attention_shapes(config.layout)
    q, k, v, qv, out = (strided(dtype, shape, VECTOR_ELEMENTS) for shape in (*shapes[:4], shapes.out))
    lse = strided(Float32, (*shapes.rows, cute.sym_int()), 1)
    return q, k, v, qv if config.qv else None, out, lse
