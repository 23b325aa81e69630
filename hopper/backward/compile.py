"""Compile a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from hopper.backward.config import BackwardConfig, BackwardStep, PairedBackwardConfig
from hopper.backward.finish import FinishKernel
from hopper.backward.kernel import BackwardKernel
from hopper.backward.pair_kernel import PairedBackwardKernel
from hopper.backward.prepare import PrepareKernel
from hopper.forward.compile import TMA_ALIGNMENT_ELEMENTS
from hopper.forward.kernel import DSL_DTYPES


def compile_step(step: BackwardStep, options: str = ""):
    """Compile the kernel of ``step``."""
    return (compile_prepare if step.step == "prepare" else compile_finish)(step.config, options)


def compile_prepare(config: BackwardConfig, options: str = ""):
    """Compile what runs before the kernel of ``config``: ``fn(out, dout, lse, lse_log2, delta)``.

    out and dout (b, sq, h, dv) as for ``compile_backward``, lse float32 (b, h, sq) in base e. lse_log2 and delta
    float32 (b, h, padded sq) are written, for ``compile_backward``.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, h, padded = (cute.sym_int() for _ in range(4))
    dv = cute.sym_int(divisibility=TMA_ALIGNMENT_ELEMENTS)
    return cute.compile(
        PrepareKernel(config),
        _strided(dtype, (b, sq, h, dv), TMA_ALIGNMENT_ELEMENTS),
        _strided(dtype, (b, sq, h, dv), TMA_ALIGNMENT_ELEMENTS),
        _strided(Float32, (b, h, sq), 1),
        _strided(Float32, (b, h, padded), 1),
        _strided(Float32, (b, h, padded), 1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )


def compile_finish(config: BackwardConfig, options: str = ""):
    """Compile what runs after the kernel of ``config``: ``fn(sums, dq, softmax_scale)``.

    sums is the dq of ``compile_backward``; dq (b, sq, h, d) in the config's dtype is written.
    """
    b, sq, h, tiles = (cute.sym_int() for _ in range(4))
    d = cute.sym_int(divisibility=TMA_ALIGNMENT_ELEMENTS)
    return cute.compile(
        FinishKernel(config),
        _strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        _strided(DSL_DTYPES[config.dtype], (b, sq, h, d), TMA_ALIGNMENT_ELEMENTS),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )


def _strided(dtype: type[cutlass.Numeric], shape: tuple, divisibility: int):
    """A tensor of free strides in multiples of ``divisibility`` elements, its last one 1."""
    strides = tuple(cute.sym_int(64, divisibility=divisibility) for _ in shape[1:])
    return make_fake_tensor(
        dtype, shape, (*strides, 1), assumed_align=max(4, divisibility * dtype.width // 8)
    )


def compile_backward(config: BackwardConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, dout, lse, delta, dq, dk, dv, softmax_scale)`` that launches on torch's
    current stream; where ``config.is_persistent``, ``fn(..., dk, dv, counter, softmax_scale, num_ctas)`` with two int32
    zeros, which are zero again afterwards, and as many CTAs as there are SMs. With ``config.ordered`` there is a further
    zero for each query tile of all heads, which counts the key tiles. q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv), dout (b, sq, h, dv), dk and dv like k and v,
    in the config's dtype with last stride 1, other strides in multiples of 8 elements and 16-byte aligned addresses.
    lse and delta float32 (b, h, padded sq), contiguous, padded to a multiple of tile_m: the base-2 log-sum-exp of
    each row, +inf for rows without keys and past the end, and rowsum(dout * out), 0 past the end. dq float32 (b, h,
    query tiles, dq_parts, dq_words), zeros, contiguous, is added to in the order of
    ``hopper.backward.dq.row_and_column``, without softmax_scale.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk, padded, tiles = (cute.sym_int() for _ in range(7))
    d, dv = (cute.sym_int(divisibility=TMA_ALIGNMENT_ELEMENTS) for _ in range(2))

    def dense(seqlen, heads, columns):
        return _strided(dtype, (b, seqlen, heads, columns), TMA_ALIGNMENT_ELEMENTS)

    kernel = PairedBackwardKernel if isinstance(config, PairedBackwardConfig) else BackwardKernel
    counter = (make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),) if config.is_persistent else ()
    return cute.compile(
        kernel(config),
        dense(sq, h, d),
        dense(sk, hk, d),
        dense(sk, hk, dv),
        dense(sq, h, dv),
        _strided(Float32, (b, h, padded), 4),
        _strided(Float32, (b, h, padded), 4),
        _strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        dense(sk, hk, d),
        dense(sk, hk, dv),
        *counter,
        Float32(0.0),
        *((Int32(1),) if config.is_persistent else ()),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )
