"""Compile a forward kernel for any sizes and strides, with or without a GPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.ampere.config import CHUNK_BYTES, ELEMENT_BYTES, AmpereForwardConfig
from cute_kernels.ampere.forward.kernel import AmpereForwardKernel
from cute_kernels.dtypes import DSL_DTYPES

CHUNK_ELEMENTS = CHUNK_BYTES // ELEMENT_BYTES


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
    d, dv = (cute.sym_int(divisibility=CHUNK_ELEMENTS) for _ in range(2))
    return cute.compile(
        AmpereForwardKernel(config),
        _dense(dtype, b, sq, h, d),
        _dense(dtype, b, sk, hk, d),
        _dense(dtype, b, sk, hk, dv),
        _dense(dtype, b, sq, h, dv),
        make_fake_tensor(
            Float32, (b, h, cute.sym_int()), (cute.sym_int(64), cute.sym_int(64), 1), assumed_align=4
        ),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}".strip(),
    )


def _dense(dtype: type[cutlass.Numeric], batch, seqlen, heads, head_dim):
    """A (batch, seqlen, heads, head_dim) tensor of free strides, as far as chunks stay aligned."""
    strides = tuple(cute.sym_int(64, divisibility=CHUNK_ELEMENTS) for _ in range(3))
    return make_fake_tensor(dtype, (batch, seqlen, heads, head_dim), (*strides, 1), assumed_align=CHUNK_BYTES)
