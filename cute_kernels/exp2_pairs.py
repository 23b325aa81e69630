"""Exponentials on the FMA pipe, two at a time, for probabilities that are rounded to e4m3 anyway.

MUFU gives 16 exponentials a clock and SM, fewer than FP8 attention needs; so some column pairs take theirs from
here. With y = 15 + x, the bits of a float16 of value 2^x are about 1024 y: exponent and mantissa are the integer and
the fraction of y (Schraudolph's trick). The mantissa is then 1 + f instead of 2^f; the product with a quadratic in
the mantissa that is near 2^f / (1 + f) corrects it. The result is within 0.6 % (0.36 % RMS) of 2^x, and exact where
x is an integer; e4m3 rounds by up to 6 %.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

PAIRS_PER_PATTERN = 8
"""The choice of the pairs repeats after so many."""

PAIR_ZERO = 15
"""2^-15 and everything below becomes 0: the bits of float16's zero."""

UNIT, ZERO = f"0f{1024:08x}", f"0f{1024 * PAIR_ZERO:08x}"
"""1024 and 1024 * 15 smallest float32, for PTX."""

LONGEST_SUM = 8
"""So many pairs are added in half precision."""

QUADRATIC = ("0x338a338a", "0xb9a5b9a5", "0x3de13de1")
"""Coefficients of m^2, m and 1 as pairs of float16: 0.2356, -0.7056, 1.4697. They add up to 1, so that 1 stays 1."""


LARGEST_Y = "0x4fc04fc0"
"""31 as a pair of float16."""

INTEGERS = "0x66006600"
"""1536, likewise."""

SPILLED = -(0x6600 << 10 & 0xFFFF0000)
"""What the lower one leaves in the upper where both are shifted by 10 bits as one word."""

EXP2_QUADRATIC = ("0x33ae33ae", "0x399d399d", "0x3c003c00")
"""Coefficients of f^2, f and 1: 0.24, 0.7017, 1."""


def is_polynomial(pair: int, polynomial_pairs: int) -> bool:
    """Whether a column pair of a row is one of the ``polynomial_pairs`` in 8, which are spread evenly."""
    return pair * polynomial_pairs % PAIRS_PER_PATTERN < polynomial_pairs


def exp2_of_pair(low: Float32, high: Float32, scale: Float32, offset: Float32) -> Int32:
    """2^(scale s + offset) of two scores s, as float16 in one word: 0 up to 2^-15, infinite or NaN from 2^16 on.

    A NaN stays one. 1024 y is a multiple of the smallest float32, so that its bits are the integer. Those of a negative
    number, as an integer, are below every int16, and those of a NaN above: the saturating pack makes them -0 and NaN.
    """
    c2, c1, c0 = QUADRATIC
    return cute.arch.inline_ptx(
        "{ .reg .f32 a, b; .reg .b32 x, y, m, g; "
        "fma.rn.f32 a, {$r0}, {$r2}, {$r3}; fma.rn.f32 b, {$r1}, {$r2}, {$r3}; "
        f"fma.rn.f32 a, a, {UNIT}, {ZERO}; fma.rn.f32 b, b, {UNIT}, {ZERO}; "
        "mov.b32 x, a; mov.b32 y, b; cvt.pack.sat.s16.s32 x, y, x; "
        "lop3.b32 m, x, 0x03ff03ff, 0x3c003c00, 0xea; "
        f"mov.b32 g, {c2}; mov.b32 y, {c1}; fma.rn.f16x2 g, g, m, y; "
        f"mov.b32 y, {c0}; fma.rn.f16x2 g, g, m, y; "
        "mul.rn.f16x2 {$w0}, x, g; }",
        write_only_types=[Int32],
        read_only_args=[low, high, scale, offset],
    )


def exp2_of_halves(pair: Int32, scale: Int32, offset: Int32) -> Int32:
    """2^(scale s + offset) of two scores s: pairs of float16 in a word, all of them, and the product is not rounded."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 y, u, v; .reg .b16 l, h; fma.rn.f16x2 y, {$r0}, {$r1}, {$r2}; mov.b32 {l, h}, y; "
        "ex2.approx.f16 l, l; ex2.approx.f16 h, h; cvt.u32.u16 u, l; cvt.u32.u16 v, h; "
        "prmt.b32 {$w0}, u, v, 0x5410; }",
        write_only_types=[Int32],
        read_only_args=[pair, scale, offset],
    )


def exp2_of_halves_by_polynomial(pair: Int32, scale: Int32, offset: Int32) -> Int32:
    """As ``exp2_of_halves`` without MUFU; ``offset`` is 15 more: 0 below 2^-14.5, infinite or NaN from 2^15.5 on.

    With y = 15 + x = n + f, n an integer, the result is the product of a quadratic in f, which is within 0.3 % of 2^f
    (0.11 % RMS), and of the float16 with exponent field n. A float16 above 1024 has no fraction: the last bits of
    y + 1536 are n.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 y, v, n, f, g, c; fma.rn.relu.f16x2 y, {$r0}, {$r1}, {$r2}; "
        f"mov.b32 c, {LARGEST_Y}; min.NaN.f16x2 y, y, c; "
        f"mov.b32 c, {INTEGERS}; add.rn.f16x2 v, y, c; sub.rn.f16x2 n, v, c; sub.rn.f16x2 f, y, n; "
        f"mov.b32 g, {EXP2_QUADRATIC[0]}; mov.b32 c, {EXP2_QUADRATIC[1]}; fma.rn.f16x2 g, g, f, c; "
        f"mov.b32 c, {EXP2_QUADRATIC[2]}; fma.rn.f16x2 g, g, f, c; "
        f"mad.lo.s32 n, v, 1024, {SPILLED}; mul.rn.f16x2 {{$w0}}, g, n; }}",
        write_only_types=[Int32],
        read_only_args=[pair, scale, offset],
    )


def infinite_as_nan(pair: Int32) -> Int32:
    """A pair of float16 in which NaN stands for what was infinite."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 {$w0}, {$r0}, z, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[pair],
    )


@cute.jit
def sum_of_words(words: list) -> Float32:
    """Sum of pairs of float16, of 8 pairs at most in float16: each addition rounds to 2^-11, up or down."""
    parts = -(-len(words) // LONGEST_SUM)
    sums = []
    for i in cutlass.range_constexpr(parts):
        group = words[i::parts]
        while const_expr(len(group) > 1):
            group = [
                add_halves(*group[k : k + 2]) if k + 1 < len(group) else group[k]
                for k in range(0, len(group), 2)
            ]
        sums.append(_sum_of_pair(group[0]))
    return sum(sums[1:], sums[0])


def scale_words(word: Int32, factor: Float32) -> Int32:
    """A pair of float16 times a factor."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; .reg .b32 f; cvt.rn.f16.f32 h, {$r1}; mov.b32 f, {h, h}; mul.rn.f16x2 {$w0}, {$r0}, f; }",
        write_only_types=[Int32],
        read_only_args=[word, factor],
    )


@cute.jit
def largest_pair(words: list) -> Int32:
    """The largest of the low and of the high halves of pairs of float16 of which none but -0 is negative."""
    largest = words[0]
    for word in words[1:]:
        largest = cute.arch.inline_ptx(
            "max.s16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[largest, word]
        )
    return largest


def add_halves(a: Int32, b: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "{ .reg .b32 b; mov.b32 b, {$r1}; add.rn.f16x2 {$w0}, {$r0}, b; }",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


def _sum_of_pair(word: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; add.rn.f16 l, l, h; cvt.f32.f16 {$w0}, l; }",
        write_only_types=[Float32],
        read_only_args=[word],
    )
