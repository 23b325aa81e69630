"""Words of 32 bits: loaded, widened to float32, their bytes transposed."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int16, Int32, Int64

from hopper.quantize.config import RECIPROCAL

HIGH_HALF = -0x10000


def load_async(shared: cute.Pointer, address: Int64, size: Int32):
    """Start a copy of 16 bytes from global to shared memory, past L1; those beyond ``size`` become zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared, address, size]
    )


def words_at(address: Int64, words: int) -> cute.Tensor:
    """``words`` words of global memory at an address in bytes that is aligned to them."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * words)
    return cute.make_tensor(pointer, cute.make_layout(words))


def widen(word: Int32, dtype: type[cutlass.Numeric]) -> tuple[Float32, Float32]:
    """The two elements of 16 bits in a word, in float32."""
    if dtype is BFloat16:
        return (word << 16).bitcast(Float32), (word & HIGH_HALF).bitcast(Float32)
    low, high = (half.to(Int16).bitcast(Float16).to(Float32) for half in (word, word >> 16))
    return low, high


def widen_codes(pair: Int16) -> Int32:
    """Two e4m3 in float16, which has every one of them."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair]
    )


def transpose_bytes(rows: list[Int32]) -> list[Int32]:
    """The 4 x 4 bytes of four words, transposed."""
    a, b, c, d = rows
    left = permute(a, b, 0x5140), permute(c, d, 0x5140)
    right = permute(a, b, 0x7362), permute(c, d, 0x7362)
    return [permute(*pair, selector) for pair in (left, right) for selector in (0x5410, 0x7632)]


def permute(low: Int32, high: Int32, selector: int) -> Int32:
    """Four of the eight bytes of two words, the lowest four bits of ``selector`` choosing the lowest byte."""
    return Int32(cute.arch.prmt(low, high, Int32(selector)))


def multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def reciprocal(x: Float32) -> Float32:
    """1 / x, correctly rounded."""
    return cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def coarse_reciprocal(x: Float32) -> Float32:
    """1 / x of an x > 0 that is no subnormal, to an eighth: the exponent is negated, and the mantissa with it."""
    return (RECIPROCAL - x.bitcast(Int32)).bitcast(Float32)
