"""Compile a forward kernel for any sizes and strides, with or without a GPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dtypes import DSL_DTYPES
from hopper.config import ForwardConfig, Fp8ForwardConfig
from hopper.forward.fp8_kernel import Fp8ForwardKernel, Fp8RowsForwardKernel
from hopper.forward.kernel import ForwardKernel

TMA_ALIGNMENT_BYTES = 16
TMA_ALIGNMENT_ELEMENTS = 8


def _dense(dtype: type[cutlass.Numeric], batch, seqlen, heads, head_dim):
    """A (batch, seqlen, heads, head_dim) tensor of free strides, as far as TMA can address them."""
    strides = tuple(cute.sym_int(64, divisibility=TMA_ALIGNMENT_ELEMENTS) for _ in range(3))
    return make_fake_tensor(
        dtype, (batch, seqlen, heads, head_dim), (*strides, 1), assumed_align=TMA_ALIGNMENT_BYTES
    )


def compile_forward(config: ForwardConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    An e4m3 config gives what ``compile_forward_fp8`` does. Any other gives a TVM FFI function ``fn(q, k, v, out, lse,
    tile_counter, softmax_scale, num_ctas)`` that launches on torch's current stream. q (b, sq, h, d), k (b, sk, hk,
    d), v (b, sk, hk, dv), out (b, sq, h, dv) in the
    config's dtype with last stride 1, other strides in multiples of 8 elements and 16-byte aligned addresses;
    lse float32 (b, h, sq), or (b, h, 0) to have none written; tile_counter int32 (2,), zeros; softmax_scale a
    positive float; num_ctas the size of the persistent grid, usually the number of SMs.

    What the function does not check, and its callers must: no other size is 0, h is a multiple of hk, d and dv are
    at most the config's, no dimension larger than 1 has stride 0, the sizes pass ``check_problem_size``, and no
    launch that may run at the same time has the same tile_counter.

    Without a GPU, set ``CUTE_DSL_ARCH=sm_90a`` in the environment first. ``options`` go to ``cute.compile``.
    """
    if isinstance(config, Fp8ForwardConfig):
        return compile_forward_fp8(config, options)
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk = (cute.sym_int() for _ in range(5))
    d, dv = (cute.sym_int(divisibility=TMA_ALIGNMENT_ELEMENTS) for _ in range(2))
    lse_strides = (cute.sym_int(64), cute.sym_int(64), 1)
    return cute.compile(
        ForwardKernel(config),
        _dense(dtype, b, sq, h, d),
        _dense(dtype, b, sk, hk, d),
        _dense(dtype, b, sk, hk, dv),
        _dense(dtype, b, sq, h, dv),
        make_fake_tensor(Float32, (b, h, cute.sym_int()), lse_strides, assumed_align=4),
        make_fake_tensor(Int32, (2,), (1,), assumed_align=4),
        Float32(0.0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )


def compile_forward_fp8(config: Fp8ForwardConfig, options: str = ""):
    """Compile the e4m3 kernel of ``config`` for sm_90a.

    Returns ``fn(q, k, vt, out, lse, tile_counter, q_scale, k_scale, v_scale, o_scale, addend, block_q, block_k,
    softmax_scale, num_ctas)``. vt is V transposed, (b, hk, dv, keys), its keys in the order of ``FP8_KEY_ORDER`` within
    each 32 and padded with zeros to a multiple of 32; with ``v_rows`` it is V as it is, (b, sk, hk, dv). Strides and
    head_dims are multiples of 16.
    The scales and the addend are those of ``BlockScales``: block_q any number of rows, block_k a multiple of tile_n or
    at least the sequence; the addend 16-byte aligned, its strides multiples of 4 elements. The rest is as for
    ``compile_forward``.
    """
    e4m3, out = DSL_DTYPES[config.dtype], DSL_DTYPES[config.out_dtype]
    b, sq, sk, sk_padded, h, hk, nq, nk = (cute.sym_int() for _ in range(8))
    d, dv = (cute.sym_int(divisibility=16) for _ in range(2))

    def strided(dtype, shape, divisibility):
        strides = tuple(cute.sym_int(64, divisibility=divisibility) for _ in shape[1:])
        return make_fake_tensor(
            dtype, shape, (*strides, 1), assumed_align=max(4, divisibility * dtype.width // 8)
        )

    v_shape = (b, sk, hk, dv) if config.v_rows else (b, hk, dv, sk_padded)
    return cute.compile(
        Fp8RowsForwardKernel(config) if config.v_rows else Fp8ForwardKernel(config),
        strided(e4m3, (b, sq, h, d), 16),
        strided(e4m3, (b, sk, hk, d), 16),
        strided(e4m3, v_shape, 16),
        strided(out, (b, sq, h, dv), 8),
        strided(Float32, (b, h, cute.sym_int()), 1),
        make_fake_tensor(Int32, (2,), (1,), assumed_align=4),
        strided(Float32, (b, h, nq), 1),
        strided(Float32, (b, hk, nk), 1),
        strided(Float32, (b, hk, cute.sym_int()), 1),
        strided(Float32, (b, hk, cute.sym_int()), 1),
        strided(Float32, (b, hk, cute.sym_int()), 4),
        Int32(0),
        Int32(0),
        Float32(0.0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )
