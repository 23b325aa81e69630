"""Compile a quantizer for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32

from cute_kernels.arguments import compile_for_torch, strided, words
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.problem import VARLEN
from hopper.quantize.config import CHUNK, QuantizeConfig
from hopper.quantize.kernel import ClaimingQuantizeKernel, PackedQuantizeKernel, QuantizeKernel


def compile_quantize(config: QuantizeConfig, options: str = ""):
    """Compile the quantizer of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(q, k, v, q8, k8, vt8, q_scale, k_scale, v_scale, signs, signs_v, mean_k, mean_v,
    counter, num_ctas)`` that launches on torch's current stream.

    - q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv): the config's dtype, the last stride 1, other strides in
      multiples of 8 elements, 16-byte aligned addresses.
    - q8, k8: e4m3, with ``wide_codes`` float16, of the shapes of q and k. vt8: e4m3 (b, hk, dv, keys), keys a multiple
      of 32 that covers sk, each 32 in the order ``FP8_KEY_ORDER``, zeros behind sk. Strides in multiples of 16, 16-byte
      aligned addresses.
    - q_scale (b, h, ceil(sq / block_q)), which is one a row with block_q = 1; k_scale and v_scale
      (b, hk, ceil(sk / block_k)): float32.
    - signs int32 (d / 2,), with ``rotate``: what to XOR pairs of columns with; signs_v (dv / 2,) with ``rotate_v``.
    - mean_k float32 (b, hk, d), with ``smooth_k``; mean_v (b, hk, dv) with ``smooth_v``. Both 16-byte aligned.
      With ``mean_blocks`` it is (b * runs, hk, dv), each entry's runs from its last keys to its first.
    - Whichever of these four a config does not use is int32 (any,).
    - counter: only if the config ``claims_items``; int32 (2,), zeros, which it leaves so. No launch that may run at the
      same time has the same.
    - num_ctas: most CTAs to launch, usually the number of SMs times ``ctas_per_sm``.

    With the layout "varlen" b is 1, sq and sk are rows of all sequences, and cu_seqlens_q, cu_seqlens_k int32 (batch +
    1,), seqused_q and seqused_k int32 (batch,) or (0,) stand before num_ctas. Blocks, and steps of 32 keys of vt8, are
    those that no two sequences share: x // rows + batch + 1 for x rows. Rows behind the last sequence are taken for
    one more sequence; rows and blocks that are of no sequence are not written. mean_v is (batch + 1, hk, dv).

    What its callers must check: no size is 0, h is a multiple of hk, ``config.q.rows`` of Q, ``config.k.rows`` of K and
    as many of V make no more than 2^30 items. With ``smooth_v`` this kernel starts early, and reads Q and K before it
    waits: the launch in front is that of ``compile_value_mean``, or one that lets no other start before it has ended.
    The V that it reads is not freed before this launch, so that no output lies there.
    """
    dtype = DSL_DTYPES[config.dtype]
    codes, (d, dv) = DSL_DTYPES[config.code_dtype], (config.head_dim, config.head_dim_v)
    b, sq, sk, h, hk, nq, nk = (cute.sym_int() for _ in range(7))
    signs, signs_v, no_mean_k, no_mean_v = (words(cute.sym_int()) for _ in range(4))
    is_packed = config.layout == VARLEN
    entries = cute.sym_int() if is_packed or config.mean_blocks else b
    batch, batch_and_one = cute.sym_int(), cute.sym_int()
    sizes = batch_and_one, batch_and_one, batch, cute.sym_int()
    plain = ClaimingQuantizeKernel if config.claims_items else QuantizeKernel
    return compile_for_torch(
        PackedQuantizeKernel(config) if is_packed else plain(config),
        strided(dtype, (b, sq, h, d), CHUNK),
        strided(dtype, (b, sk, hk, d), CHUNK),
        strided(dtype, (b, sk, hk, dv), CHUNK),
        strided(codes, (b, sq, h, d), 16),
        strided(codes, (b, sk, hk, d), 16),
        strided(Float8E4M3FN, (b, hk, dv, cute.sym_int(divisibility=32)), 16),
        strided(Float32, (b, h, nq), 1),
        strided(Float32, (b, hk, nk), 1),
        strided(Float32, (b, hk, nk), 1),
        signs,
        signs_v,
        strided(Float32, (b, hk, d), 4) if config.smooth_k else no_mean_k,
        strided(Float32, (entries, hk, dv), 4) if config.smooth_v else no_mean_v,
        *([words(2)] if config.claims_items else []),
        *(words(size) for size in sizes if is_packed),
        Int32(0),
        options=options,
    )
