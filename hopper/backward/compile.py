"""Compile a backward kernel for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import VECTOR_ELEMENTS, compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.plan.compile import plan_argument
from cute_kernels.problem import VARLEN
from hopper.backward.config import BackwardConfig, PairedBackwardConfig
from hopper.backward.kernel import BackwardKernel, PackedBackwardKernel, WindowBackwardKernel
from hopper.backward.pair_kernel import (
    PackedPairedBackwardKernel,
    PairedBackwardKernel,
    WindowPairedBackwardKernel,
)


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

    With the layout "varlen" it is ``fn(q, k, v, dout, lse, delta, dq, dk, dv, counter, plan, sequences, softmax_scale,
    window_left, window_right, num_ctas)``, num_ctas again only where ``config.is_persistent``. The sides of the window
    are always given, and read only with ``config.window``. q and dout are (total_q, h, ...), k, v, dk and dv (total_k,
    hk, ...), lse and delta (h, tiles * tile_m), dq (h, tiles, dq_parts, dq_words). tiles is ``plan_entries`` of
    total_q, batch and tile_m: each sequence has whole tiles of its own (``cute_kernels/backward/packed.py``). plan is
    int32, made with ``of_keys`` for tiles of ``config.tile_n`` keys, of ``sequences`` sequences, one more than the
    caller's (``cute_kernels/plan``). Rows of dk and dv behind the last sequence are written, with zeros; those between
    the sequences are not.
    """
    kernel = _kernel_of(config)(config)
    scale, sides = Float32(0.0), (Int32(0), Int32(0))
    ctas = (Int32(1),) if config.is_persistent else ()
    if config.layout == VARLEN:
        arguments = (*_packed_tensors(config), plan_argument(), Int32(0), scale, *sides, *ctas)
    else:
        arguments = (*_dense_tensors(config), scale, *(sides if config.window else ()), *ctas)
    return compile_for_torch(kernel, *arguments, options=options)


def _kernel_of(config: BackwardConfig) -> type:
    """The class of kernels with the arguments that the config asks for."""
    dense, with_window, packed = BackwardKernel, WindowBackwardKernel, PackedBackwardKernel
    if isinstance(config, PairedBackwardConfig):
        dense, with_window, packed = (
            PairedBackwardKernel,
            WindowPairedBackwardKernel,
            PackedPairedBackwardKernel,
        )
    if config.layout == VARLEN:
        return packed
    return with_window if config.window else dense


def _dense_tensors(config: BackwardConfig) -> tuple:
    """q, k, v, dout, lse, delta, dq, dk, dv and counter of sequences of one length."""
    dtype = DSL_DTYPES[config.dtype]
    b, sq, sk, h, hk, padded, tiles = (cute.sym_int() for _ in range(7))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))

    def dense(seqlen, heads, columns):
        return strided(dtype, (b, seqlen, heads, columns), VECTOR_ELEMENTS)

    return (
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
    )


def _packed_tensors(config: BackwardConfig) -> tuple:
    """The same of packed sequences."""
    dtype = DSL_DTYPES[config.dtype]
    total_q, total_k, h, hk, padded, tiles = (cute.sym_int() for _ in range(6))
    d, dv = (cute.sym_int(divisibility=VECTOR_ELEMENTS) for _ in range(2))

    def packed(total, heads, columns):
        return strided(dtype, (total, heads, columns), VECTOR_ELEMENTS)

    return (
        packed(total_q, h, d),
        packed(total_k, hk, d),
        packed(total_k, hk, dv),
        packed(total_q, h, dv),
        strided(Float32, (h, padded), 4),
        strided(Float32, (h, padded), 4),
        strided(Float32, (h, tiles, config.dq_parts, config.dq_words), 4),
        packed(total_k, hk, d),
        packed(total_k, hk, dv),
        words(cute.sym_int()),
    )
