"""Arithmetic with control over the instruction that is emitted, and over its place."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

PACKED_CONVERSION = {cutlass.Float16: "cvt.rn.f16x2.f32", cutlass.BFloat16: "cvt.rn.bf16x2.f32"}


def exp2(x: Float32) -> Float32:
    """2^x by one MUFU.EX2, kept where it is written.

    ``cute.math.exp2`` has no side effects, so LLVM sinks it to its first use; in the attention loop that is past
    the wait for the GEMM under which it is meant to run.
    """
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def multiply_rounded(a: Float32, b: Float32) -> Float32:
    """a b, rounded before anything is added to it: this product is never contracted into an FMA."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def maximum_or_nan(a: Float32, b: Float32) -> Float32:
    """The larger, or NaN if one of them is: ``cute.arch.fmax`` gives the other one then."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def minimum_or_nan(a: Float32, b: Float32) -> Float32:
    """The smaller, or NaN if one of them is."""
    return cute.arch.inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def maximum_of_halves(a: Int32, b: Int32) -> Int32:
    """``maximum_or_nan`` of two pairs of float16 in words."""
    return cute.arch.inline_ptx(
        "max.NaN.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
    )


def minimum_of_halves(a: Int32, b: Int32) -> Int32:
    """``minimum_or_nan`` of two pairs of float16 in words."""
    return cute.arch.inline_ptx(
        "min.NaN.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
    )


def multiply_add_halves(a: Int32, b: Int32, c: Int32) -> Int32:
    """a b + c of pairs of float16 in words, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, c]
    )


def subtract_halves(a: Int32, b: Int32) -> Int32:
    """a - b of pairs of float16 in words."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b, k; mov.b32 a, {$r0}; mov.b32 b, {$r1}; mov.b32 k, 0xbc00bc00; "
        "fma.rn.f16x2 {$w0}, b, k, a; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def positive_difference_of_halves(a: Int32, b: Int32) -> Int32:
    """a - b of pairs of float16 in words where that is positive, else 0; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b, k; mov.b32 a, {$r0}; mov.b32 b, {$r1}; mov.b32 k, 0xbc00bc00; "
        "fma.rn.relu.f16x2 {$w0}, b, k, a; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def tanh_approx(x: Float32) -> Float32:
    """By one instruction, with a relative error of 2^-11."""
    return cute.arch.inline_ptx(
        "tanh.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def tanh(x: Float32) -> Float32:
    """1 - 2 / (1 + e^2x), good to the last bits of 1: an exponential and a reciprocal."""
    return Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(
        Float32(1.0) + exp2(x * Float32(2.0 * math.log2(math.e)))
    )


def shift_left(word: Int32, bits: Int32) -> Int32:
    """``word`` times 2^``bits``; 0 from 32 bits on."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, bits]
    )


def pin(x: Float32 | Int32, dtype: type[cutlass.Numeric] = Float32) -> Float32 | Int32:
    """``x``, computed no later than here: the move is volatile, so LLVM keeps it in order with the waits around."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[dtype], read_only_args=[x])


def pack(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two values rounded to a 16-bit type in one register, ``low`` in its lower half.

    Packed words are what a loop should carry; left to itself LLVM carries the float32 values around the loop,
    twice the registers, and converts them on the other side.
    """
    return cute.arch.inline_ptx(
        f"{PACKED_CONVERSION[dtype]} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def unpack(word: Int32, dtype: type[cutlass.Numeric]) -> tuple[Float32, Float32]:
    """The two values of ``pack``: what is in the lower half, and in the upper."""
    widen = {
        cutlass.Float16: "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        cutlass.BFloat16: "{ .reg .b32 l, h; shl.b32 l, {$r0}, 16; and.b32 h, {$r0}, 0xffff0000; "
        "mov.b32 {$w0}, l; mov.b32 {$w1}, h; }",
    }
    return cute.arch.inline_ptx(widen[dtype], write_only_types=[Float32, Float32], read_only_args=[word])


def pack_e4m3(low: Float32, high: Float32) -> cutlass.Int16:
    """Two values rounded to e4m3, saturating, ``low`` in the lower byte."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[cutlass.Int16],
        read_only_args=[high, low],
    )


def pack_e4m3_of_float16(pair: Int32) -> cutlass.Int16:
    """``pack_e4m3`` of two float16 in a word."""
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f16x2 {$w0}, {$r0};",
        write_only_types=[cutlass.Int16],
        read_only_args=[pair],
    )


def round_to_e4m3(pair: Int32) -> Int32:
    """Two float16 in a word, as e4m3 has them."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 x; cvt.rn.satfinite.e4m3x2.f16x2 x, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, x; }",
        write_only_types=[Int32],
        read_only_args=[pair],
    )


def unpack_e4m3(pair: cutlass.Int16) -> tuple[Float32, Float32]:
    """The two values of ``pack_e4m3``."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 w; .reg .b16 l, h; cvt.rn.f16x2.e4m3x2 w, {$r0}; mov.b32 {l, h}, w;"
        " cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def split_e4m3(low: Float32, high: Float32, scale: float) -> tuple[cutlass.Int16, cutlass.Int16]:
    """Two values as ``pack_e4m3`` has them, and ``scale`` times what they lose by that."""
    rounded = pack_e4m3(low, high)
    rounded_low, rounded_high = unpack_e4m3(rounded)
    factor = Float32(scale)
    return rounded, pack_e4m3((low - rounded_low) * factor, (high - rounded_high) * factor)


def join(low: cutlass.Int16, high: cutlass.Int16) -> Int32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, { {$r0}, {$r1} };", write_only_types=[Int32], read_only_args=[low, high]
    )


def permute_bytes(a: Int32, b: Int32, selector: int) -> Int32:
    """Four of the eight bytes of a (0 to 3) and b (4 to 7), by the digits of ``selector``, the lowest first."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


@cute.jit
def maximum_of(values: cute.Tensor, start: Float32) -> Float32:
    """Largest of some registers and ``start``, as a tree of FMNMX that skips NaN (their exponentials stay NaN)."""
    level = [start] + [values[i] for i in range(cute.size(values))]
    while const_expr(len(level) > 1):
        pairs = [cute.arch.fmax(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def as_float(bits: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def as_bits(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def largest_bits(values: list) -> Int32:
    """Of signed integers, three at a time. Bits of floats have that order wherever one of them is not negative."""
    return reduce_by_threes(values, cutlass.max)


def reduce_by_threes(values: list, operation):
    """A tree of threes: Hopper takes the maximum of three words in one instruction, floats (FMNMX) excepted."""
    while len(values) > 1:
        values = [_reduce_three(values[i : i + 3], operation) for i in range(0, len(values), 3)]
    return values[0]


def _reduce_three(values: list, operation):
    first, *others = values
    for other in others:
        first = operation(first, other)
    return first


@cute.jit
def max_over_lanes(x: Float32, lanes: cutlass.Constexpr[int]) -> Float32:
    """Largest ``x`` of a group of ``lanes`` neighbouring lanes, in every one of them."""
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=lanes >> (i + 1)))
    return x
