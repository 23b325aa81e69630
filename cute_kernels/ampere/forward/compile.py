"""Compile a forward kernel for any sizes and strides, with or without a GPU."""

from cutlass import Float32

from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.ampere.forward.kernel import AmpereForwardKernel, PackedAmpereForwardKernel
from cute_kernels.ampere.options import option_arguments
from cute_kernels.arguments import compile_for_torch, forward_tensors, key_lists_argument, plan_arguments
from cute_kernels.problem import VARLEN


def compile_ampere_forward(config: AmpereForwardConfig, options: str = ""):
    """Compile the kernel of ``config``; ``options`` go to ``cute.compile`` and name the architecture.

    Gives a TVM FFI function ``fn(q, k, v, out, lse, softmax_scale)`` that launches on torch's current stream. q (b, sq,
    h, d), k (b, sk, hk, d), v (b, sk, hk, dv), out (b, sq, h, dv) in the config's dtype with last stride 1, other
    strides in multiples of 8 elements and 16-byte aligned addresses; lse float32 (b, h, sq), or (b, h, 0) to have none
    written; softmax_scale a positive float.

    With ``window`` two more int32 follow, ``window_left`` and ``window_right``, neither negative and ``NO_LIMIT`` for
    none; the right one counts for nothing in a causal kernel. With ``chunk`` its keys follow them, 1 or more. If the
    config changes scores, five more follow, (softcap, alibi_slopes, sinks, philox, kept), with None for what it has no
    use for: a positive float; float32 (b, h), whose first stride may be 0; float32 (h,); int64 (2,); 1 to 256. Then
    come the tensors that the functions of the config read, and with ``block_lists`` the lists (``key_lists_argument``).

    With ``layout`` "varlen" it is ``fn(q, k, v, out, lse, plan, sequences, softmax_scale, ...)``: q (total_q, h, d), k
    (total_k, hk, d), v (total_k, hk, dv), out (total_q, h, dv); lse (h, total_q), or (h, 0); plan int32, that of tiles
    of ``tile_m`` rows of Q (``cute_kernels.plan``); sequences int32, b + 1. Rows in no sequence of the plan are neither
    read nor written.

    What the function does not check, and its callers must: no other size is 0 (total_k may be), h is a multiple of hk,
    d and dv are at most the config's, and the sizes pass ``check_problem_size``, or ``check_packed_size``.
    """
    lists = [key_lists_argument()] if config.block_lists else []
    given = *option_arguments(config, config.sinks), *lists
    tensors, scale = forward_tensors(config), Float32(0.0)
    if config.layout == VARLEN:
        kernel, plan = PackedAmpereForwardKernel(config), plan_arguments(config)
        return compile_for_torch(kernel, *tensors, *plan, scale, *given, options=options)
    return compile_for_torch(AmpereForwardKernel(config), *tensors, scale, *given, options=options)
