"""Compile the kernel that transposes V, for any sizes and strides, with or without a GPU."""

import cutlass.cute as cute
from cutlass import Float8E4M3FN

from cute_kernels.arguments import compile_for_torch, strided, words
from cute_kernels.problem import VARLEN
from hopper.transpose.config import TransposeConfig
from hopper.transpose.kernel import VECTOR, PackedTransposeKernel, TransposeKernel


def compile_transpose(config: TransposeConfig, options: str = ""):
    """Compile the kernel of ``config`` for sm_90a.

    Returns a TVM FFI function ``fn(v, vt)``, of packed sequences ``fn(v, vt, cu_seqlens, seqused)``, that launches on
    torch's current stream.

    - v e4m3 (b, s, h, dv), dv a multiple of the config's ``columns``.
    - vt e4m3 (b, h, dv, keys), keys a multiple of 32 that covers s, each 32 in the order ``FP8_KEY_ORDER``, zeros from
      s on.
    - Packed sequences have a b of 1; cu_seqlens int32 (sequences + 1,) are the rows of v at which they begin, and
      seqused int32 (sequences,) how many of each are used, or (0,) where all are. Sequence n begins with the key
      cu_seqlens[n] // 32 * 32 + 32 n of vt. Keys of no sequence become zeros.
    - The last stride of v and vt is 1, other strides are multiples of 16, and addresses are 16-byte aligned.

    What its callers must check: no size is 0, and there are no more than 2^30 tiles.
    """
    b, s, h = (cute.sym_int() for _ in range(3))
    dv = cute.sym_int(divisibility=config.columns)
    is_packed = config.layout == VARLEN
    lengths = tuple(words(cute.sym_int()) for _ in range(2)) if is_packed else ()
    return compile_for_torch(
        PackedTransposeKernel(config) if is_packed else TransposeKernel(config),
        strided(Float8E4M3FN, (b, s, h, dv), VECTOR),
        strided(Float8E4M3FN, (b, h, dv, cute.sym_int(divisibility=32)), VECTOR),
        *lengths,
        options=options,
    )
