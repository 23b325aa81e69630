"""Compile a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES
from hopper.backward.config import BackwardConfig, PairedBackwardConfig
from hopper.backward.kernel import BackwardKernel, WindowBackwardKernel
from hopper.backward.pair_kernel import PairedBackwardKernel, WindowPairedBackwardKernel

KERNELS = {
    (False, False): BackwardKernel,
    (False, True): WindowBackwardKernel,
    (True, False): PairedBackwardKernel,
    (True, True): WindowPairedBackwardKernel,
}
"""By whether the config is of pairs, and whether it has a window."""


def compile_backward(config: BackwardConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, dout, lse, delta, dq, dk, dv, counter, softmax_scale)`` that launches on
    torch's current stream. Further arguments follow, those that the config asks for, in this order:

    - with ``config.window`` window_left and window_right, the sides of the window, and ``NO_LIMIT`` for none
      (``cute_kernels.window``); with ``config.causal`` the right one is not read,
    - where ``config.is_persistent`` num_ctas, as many as there are SMs.

    counter int32 has two zeros, which are zero again afterwards, and with ``config.ordered``
    ``config.counts_per_tile`` further zeros for each query tile of all heads. q (b, sq, h, d), k (b, sk, hk, d), v
    (b, sk, hk, dv), dout (b, sq, h, dv), dk and dv like k and v, in the config's dtype with last stride 1, other
    strides in multiples of 8 elements and 16-byte aligned addresses. lse and delta float32 (b, h, padded sq),
    contiguous, padded to a multiple of tile_m: the base-2 log-sum-exp of each row, +inf for rows without keys and
    past the end, and rowsum(dout * out), 0 past the end. dq float32 (b, h, query tiles, dq_parts, dq_words), zeros,
    contiguous, is added to in the order of ``config.dq_order``, without softmax_scale.
    """
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk, padded, tiles = (cute.sym_int() for _ in range(7))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))

    def dense(seqlen, heads, columns):
        return strided(dtype, (b, seqlen, heads, columns), VECTOR_ELEMENTS)

    kernel = KERNELS[isinstance(config, PairedBackwardConfig), config.window]
    return compile_for_torch(
        kernel(config),
        dense(sq, h, d),
        dense(sk, hk, d),
        dense(sk, hk, dv),
        dense(sq, h, dv),
        strided(Float32, (b, h, padded), 4),
        strided(Float32, (b, h, padded), 4),
        strided(Float32, (b, h, tiles, config.dq_parts, config.dq_words), 4),
        dense(sk, hk, d),
        dense(sk, hk, dv),
        words(cute.sym_int()),
        Float32(0.0),
        *((Int32(0), Int32(0)) if config.window else ()),
        *((Int32(1),) if config.is_persistent else ()),
        options=options,
    )
