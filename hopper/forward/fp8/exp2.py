"""Exponentials on the FMA pipe, two at a time, for probabilities that are rounded to e4m3 anyway.

MUFU gives 16 exponentials a clock and SM, fewer than FP8 attention needs; so some column pairs take theirs from
here. With y = 15 + x, the bits of a float16 of value 2^x are about 1024 y: exponent and mantissa are the integer and
the fraction of y (Schraudolph's trick). The mantissa is then 1 + f instead of 2^f, so this is a chord of 2^x between
two integers. Half an octave further is 512 more in bits, and the weighted sum of two such chords is one between half
integers, which is within 1 % of 2^x but for a factor; and a factor is a shift of x. For less error, the product with a
quadratic in the mantissa that is near 2^f / (1 + f) corrects a single chord. e4m3 rounds by up to 6 %.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

PAIRS_PER_PATTERN = 8
"""The choice of the pairs repeats after so many."""

ONE = 15 * 1024
"""Bits of float16's 1. 2^-15 and everything below becomes 0."""

ONE_BY_CHORDS = ONE - 1126
"""Bits of a chord of 2^0: 1.1 octaves less, which is what two chords are more than one."""

UNIT = f"0f{1024:08x}"
"""1024 smallest float32, for PTX."""

LONGEST_SUM = 8
"""So many pairs are added in half precision."""

QUADRATIC = ("0x338a338a", "0xb9a5b9a5", "0x3de13de1")
"""Coefficients of m^2, m and 1 as pairs of float16: 0.2356, -0.7056, 1.4697. They add up to 1, so that 1 stays 1."""

HALF_OCTAVE = "0x02000200"
"""What half an octave is in the bits of a pair of chords."""

SECOND_CHORD = "0x3a003a00"
"""The weight of the chord half an octave ahead, a pair of float16: 3/4, with which sums are right at integers."""

CEILING = 18.0
"""Of exponents that ``exp2_of_halves_by_chords`` tells apart, which are this minus 0 to 32: a power of two above all of
float16, and with 32 less so far below that what is there vanishes."""

EXPONENTS = 32.0
"""Of float16, octaves."""

PER_OCTAVE, CEILING_PER_OCTAVE = "0xa800a800", "0x38803880"
"""Pairs of float16: -1 / 32 and 18 / 32."""

STEPS, TOP = "0xbbfdbbfd", "0x3fff3fff"
"""-(1 - 3 * 2^-11) and 2 - 2^-10, likewise: what 32 octaves are in a float16 below 2, and where they begin. Being
less than 1 keeps it from falling below 1; and it brings the borders between steps of 1/32 octave near to those
between numbers of e4m3."""

CHORD = 0x00160016 + 0x80008000 - (8 << 16)
"""What is added to the bits of a chord: 22 to make up for what two chords are off on average, the sign, which becomes
positive, and in the upper half -8 for what shifting and adding carry there from the lower one."""

SECOND_COARSE_CHORD = "0x391f391f"
"""As ``SECOND_CHORD``, for chords with 32 steps an octave: 0.64."""


def is_polynomial(pair: int, polynomial_pairs: int) -> bool:
    """Whether a column pair of a row is one of the ``polynomial_pairs`` in 8, which are spread evenly."""
    return pair * polynomial_pairs % PAIRS_PER_PATTERN < polynomial_pairs


def exp2_of_pair(low: Float32, high: Float32, scale: Float32, offset: Float32) -> Int32:
    """2^(scale s + offset) of two scores s, as float16 in one word: within 0.6 % (0.36 % RMS), exact where that is an
    integer, 0 up to 2^-15, infinite or NaN from 2^16 on.

    A NaN stays one. 1024 y is a multiple of the smallest float32, so that its bits are the integer. Those of a negative
    number, as an integer, are below every int16, and those of a NaN above: the saturating pack makes them -0 and NaN.
    """
    c2, c1, c0 = QUADRATIC
    correct = (
        "lop3.b32 y, x, 0x03ff03ff, 0x3c003c00, 0xea; "
        f"mov.b32 g, {c2}; mov.b32 k, {c1}; fma.rn.f16x2 g, g, y, k; "
        f"mov.b32 k, {c0}; fma.rn.f16x2 g, g, y, k; mul.rn.f16x2 {{$w0}}, x, g; "
    )
    return _pair_by_bits(ONE, correct, (low, high, scale, offset))


def exp2_of_pair_by_chords(low: Float32, high: Float32, scale: Float32, offset: Float32) -> Int32:
    """As ``exp2_of_pair`` with two instructions less: within 1.1 % (0.46 % RMS) from 2^-12 to 2^16, exact where the
    exponent is one of these integers; below it falls short, and is 0 up to 2^-13.9."""
    add = f"add.s32 y, x, {HALF_OCTAVE}; mov.b32 k, {SECOND_CHORD}; fma.rn.relu.f16x2 {{$w0}}, y, k, x; "
    return _pair_by_bits(ONE_BY_CHORDS, add, (low, high, scale, offset))


def _pair_by_bits(one: int, finish: str, operands: tuple[Float32, Float32, Float32, Float32]) -> Int32:
    """``finish`` on x, a pair of chords, of which 2^0 has the bits ``one``; y, g and k are free."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 a, b; .reg .b32 x, y, g, k; "
        "fma.rn.f32 a, {$r0}, {$r2}, {$r3}; fma.rn.f32 b, {$r1}, {$r2}, {$r3}; "
        f"fma.rn.f32 a, a, {UNIT}, 0f{one:08x}; fma.rn.f32 b, b, {UNIT}, 0f{one:08x}; "
        f"mov.b32 x, a; mov.b32 y, b; cvt.pack.sat.s16.s32 x, y, x; {finish}}}",
        write_only_types=[Int32],
        read_only_args=list(operands),
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


def exp2_of_halves_by_chords(pair: Int32, slope: Int32, ceiling: Int32) -> Int32:
    """2^x of exponents x = scale s + offset without MUFU: pairs of float16, as are slope = -scale / 32 and ceiling =
    (18 - offset) / 32.

    What is below 2^-13.5 is 0; what is above 2^16.1, or NaN, is infinite or NaN. With u = (18 - x) / 32 in [0, 1],
    the ten last bits of z = 2 - u are five of x's integer part and five of its fraction, and those of a chord when
    shifted by five. That makes 32 steps of an octave, 2.2 % each. 93 % of all x become the number of e4m3 that 2^x
    itself becomes: its rounding error grows from 2.65 to some 2.7 % RMS.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 u, z, v, w, k, c; fma.rn.sat.f16x2 u, {$r0}, {$r1}, {$r2}; "
        f"mov.b32 k, {STEPS}; mov.b32 c, {TOP}; fma.rn.f16x2 z, u, k, c; "
        f"mad.lo.s32 v, z, 32, {CHORD:#x}; add.s32 w, v, {HALF_OCTAVE}; "
        f"mov.b32 k, {SECOND_COARSE_CHORD}; fma.rn.ftz.f16x2 {{$w0}}, w, k, v; }}",
        write_only_types=[Int32],
        read_only_args=[pair, slope, ceiling],
    )


def scale_of_slope(slope: Int32) -> Int32:
    """The scale that ``exp2_of_halves`` wants, exactly that of ``slope``; NaN where float16 does not hold it."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 s, c; mov.b32 c, 0xd000d000; mul.rn.f16x2 s, {$r0}, c; "
        "mov.b32 c, 0; fma.rn.f16x2 {$w0}, s, c, s; }",
        write_only_types=[Int32],
        read_only_args=[slope],
    )


def ceiling_of_offset(offset: Int32) -> Int32:
    """(18 - offset) / 32, pairs of float16."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 k, c; mov.b32 k, {PER_OCTAVE}; mov.b32 c, {CEILING_PER_OCTAVE}; "
        "fma.rn.f16x2 {$w0}, {$r0}, k, c; }",
        write_only_types=[Int32],
        read_only_args=[offset],
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
