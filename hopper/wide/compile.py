"""Compile the forward kernel for wide values for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, plan_argument, strided, words
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
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
        *((Int32(0), Int32(0)) if c.window else (None, None)),
        Int32(0) if c.chunk else None,
        *((plan_argument(), Int32(0)) if c.layout == VARLEN else (None, None)),
        Float32(0.0) if c.softcap else None,
        strided(Float32, (cute.sym_int(), cute.sym_int()), 1) if c.alibi else None,
        strided(Float32, (cute.sym_int(),), 1) if c.sinks else None,
        Int32(0),
        options=options,
    )


def _tensors(config: WideForwardConfig) -> tuple:
    """q, k, v, qv, out and lse, dense or packed."""
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))
    is_packed = config.layout == VARLEN
    rows_q, rows_k = ((sq,), (sk,)) if is_packed else ((b, sq), (b, sk))
    shapes = (*rows_q, h, d), (*rows_k, hk, d), (*rows_k, hk, dv), (*rows_q, h, dv), (*rows_q, h, dv)
    q, k, v, qv, out = (strided(dtype, shape, VECTOR_ELEMENTS) for shape in shapes)
    heads = (h,) if is_packed else (b, h)
    lse = strided(Float32, (*heads, cute.sym_int()), 1)
    return q, k, v, qv if config.qv else None, out, lse
