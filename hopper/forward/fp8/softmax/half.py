"""The softmax of FP8 scores that Q K^T leaves in float16, two in a register."""

import struct
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, const_expr

from cute_kernels.fast_math import (
    exp2,
    max_over_lanes,
    maximum_of_halves,
    maximum_or_nan,
    multiply_add_halves,
    multiply_rounded,
    pack,
    permute_bytes,
    pin,
    positive_difference_of_halves,
    reduce_by_threes,
    round_to_e4m3,
    subtract_halves,
    unpack,
)
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, words_of_pairs
from cute_kernels.integers import maximum, minimum
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.softmax import scale_row
from hopper.forward.fp8.exp2 import (
    CEILING,
    EXPONENTS,
    add_halves,
    ceiling_of_offset,
    exp2_of_halves,
    exp2_of_halves_by_chords,
    is_polynomial,
    scale_of_slope,
    scale_words,
    sum_of_words,
)
from hopper.forward.fp8.lowered_queries import LoweredQueries
from hopper.forward.fp8.operand_a import store_words_as_operand_a_e4m3
from hopper.forward.fp8.row_maximum import larger_as_integers, ordered_over_lanes, over_lanes
from hopper.forward.fp8.softmax.exact import P_EXPONENT
from hopper.forward.fp8.softmax.stale_maximum import (
    FAR_RISE,
    LARGEST_P,
    LEAST_MAXIMUM_EXPONENT,
    NEARLY,
    StaleMaximumSoftmax,
    octaves_over,
)

SMALL_EXPONENT = -6.0
"""The largest exponent of a row in a block, below which e4m3 has its P in fewer bits."""

LITTLE = 2.0**-7
"""Octaves by which the largest P of a row is aimed above a power of two."""

LEAST_SHARE = 2.0**-5
"""Keys to come count if, were each as large as a block's are in the mean, they would add up to so much of the row."""

MOST_APART = 3.0
"""A tail is flat where the largest score of a block is no more octaves above the mean."""

MEAN_CHAINS = 4
"""Sums side by side, for a mean that waits for none of them."""

FLAT_OCTAVES = 6.0
"""The largest score of a tile's first block lies over a flat tail if it is so many octaves above those of three lanes,
and twice as many more as these lie apart."""

LONG = 24
"""Blocks of a tile that has time to look for flat tails at its beginning."""

FLAT_RISE = 2.0**-7
"""A block that was made again and had what came before multiplied by less than this may have a flat tail behind it."""

ALMOST_ONE = 1.0 - 2.0**-6
"""With this, a sum that is about a power of two counts as less, whichever way it was rounded."""

NANS = 0x7FFF7FFF
"""A pair of NaN in float16."""


def pair_of(x: float) -> int:
    """The word of two float16."""
    return int.from_bytes(2 * struct.pack(">e", x), "big", signed=True)


CEILINGS, SIGNLESS = pair_of(CEILING), 0x7FFF7FFF
"""A pair of ``CEILING``, and what leaves the signs of a pair out."""

NOTHING, ONES = pair_of(-float("inf")), pair_of(1.0)
"""Exponents of 0, and a scale that changes nothing."""

SLOPES_OF_ONE, CEILING_OF_0 = pair_of(-1.0 / EXPONENTS), pair_of(CEILING / EXPONENTS)
"""What chords want of exponents as they are."""

ALONE = 1.0 + 2.0**-5
"""A sum of so many times the largest P has next to nothing beside it."""

LOWER_HALVES, UPPER_HALVES = 0x5410, 0x7632
"""Of two words, side by side."""

BOTH_FROM = 0x1010, 0x3232
"""A half of a word in both."""


class HalfScoresSoftmax(StaleMaximumSoftmax):
    """``StaleMaximumSoftmax`` on scores in float16.

    While WGMMA runs, its accumulators take most of the registers' bandwidth: beside Q K^T into float32 other
    instructions run at half their rate, beside Q K^T into float16 at four fifths. Two scores also share the product
    with their scale, and they stay in their registers until P is known to do. The inputs promise that no product of a
    row of Q and one of K exceeds what float16 holds, or ``queries`` sees to it. A score is rounded by up to 2^-11 of
    itself, by each WGMMA that adds to it, by its scale, and once more when it has become an exponent. So exponents of
    scores that are large and alike are off by what all of them have in common, too: by 2^-5 octaves or so where that is
    100 octaves. A scale below 2^-9 is rounded by up to 2^-20 instead, since chords want 1/32 of it, which moves the
    exponents of a block by 1/36 octave at most where codes promise products below 28672, and by 1/16 where ``queries``
    leaves some of 63000. Chords are off by up to 3 % (1 % RMS), and so is the sum of a row in which a single one
    counts.

    ``offset`` is 8 - shift as two float16 in a word, and shift is such that this is exact. Beyond ``farthest``, as
    before the first maximum, it is NaN, and so are P and their sum: then P comes from float32. So it does where
    float16 does not hold the scale. ``slopes`` and ``scales`` are a block's, as the exponentials
    want them. ``words`` are P, (row, pair of columns), of ``pairs`` pairs in a row. ``risen`` are the exponents of the
    largest P of the rows in the last block in which a wary warp has raised a maximum.
    """

    wary_blocks = 12

    blocks_a_wary_block = 8
    """Where no block is masked a tile begins wary for no more than one in so many."""

    wary_exponent = 3
    """In place of 4: of 192 keys that are alike a thread's 48 then add up to less than 448, so that none has to be made
    again."""

    farthest = 2000.0
    """Up to here float16 has steps of an octave or less, for distances from the ceiling too: what is aimed at 2^3 is
    between 2^2.5 and 2^3.5."""

    def __init__(
        self,
        scale_log2: Float32,
        tile_scales: tuple,
        slots: cute.Tensor,
        polynomial_pairs: int,
        pairs: int,
        queries: tuple[LoweredQueries, ...] = (),
    ):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.queries = queries
        self.offset = cute.make_rmem_tensor(ROWS_PER_THREAD, Int32)
        self.words = cute.make_rmem_tensor((ROWS_PER_THREAD, pairs), Int32)
        self.slopes, self.scales = (cute.make_rmem_tensor(ROWS_PER_THREAD, Int32) for _ in range(2))
        self.largest, self.risen = (cute.make_rmem_tensor(1, Int32) for _ in range(2))

    @cute.jit
    def begin_walk(self, blocks: KeyBlocks):
        StaleMaximumSoftmax.begin_walk(self, blocks)
        self.risen[0] = Int32(NOTHING)

    def how_a_tile_begins(self, blocks: KeyBlocks) -> tuple[Any, Any]:
        """Wary in blocks whose end is masked, where rows have their first keys, and in two behind: what comes after a
        few keys is mostly more, so that only the second says something. Where none is masked, in up to three."""
        whole = minimum(blocks.unmasked, blocks.last)
        masked = minimum(blocks.end - blocks.unmasked, 1)
        wary = minimum(maximum(blocks.count // self.blocks_a_wary_block, 2 * masked), 3 - masked)
        return whole - 1 - masked, whole - 1 - wary

    def lower_queries(self):
        """Once Q of a tile has come."""
        for queries in self.queries:
            for r, factor in enumerate(queries.lower()):
                self.tile_scale[r] = self.tile_scale[r] * factor

    @cute.jit
    def exponentiate_by_stale_maximum(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        """P of row ``r`` by the maximum of the last block that has had one."""
        self._exponentials_of_halves(acc_S, r)
        self.totals[r] = pin(self._sum_of_words(r))

    @cute.jit
    def _exponentials_of_halves(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        """Those of row ``r`` in float16, by its shift."""
        scores = words_of_pairs(acc_S)
        slope, scale = self.slopes[r], self.scales[r]
        ceiling = ceiling_of_offset(self.offset[r])
        for j in cutlass.range_constexpr(scores.shape[1]):
            if const_expr(is_polynomial(j, self.polynomial_pairs)):
                self.words[r, j] = exp2_of_halves_by_chords(scores[r, j], slope, ceiling)
            else:
                self.words[r, j] = exp2_of_halves(scores[r, j], scale, self.offset[r])

    @cute.jit
    def store_P(self, operand: cute.Tensor, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        store_words_as_operand_a_e4m3(operand, self.words, r)

    @cute.jit
    def recover(self, operand: cute.Tensor, acc_S: cute.Tensor, acc_O: cute.Tensor, n_block: Int32):
        """Make P, ``row_sum`` and O right after a block that needs a new maximum."""
        self.rescale_if_needed(acc_O)
        self._note_new_maximum(n_block)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if cute.arch.vote_any_sync(self._needs_maximum(r)):
                self.take_maximum(acc_S, r, n_block > 0)
                self.store_P(operand, acc_S, r)
                scale_row(acc_O, r, self.row_scale[r])
                if cute.arch.vote_any_sync(self.row_scale[r] < Float32(FLAT_RISE)):
                    self.calm_from[0] = minimum(self.calm_from[0], n_block - 2)
            else:
                self.row_sum[r] = self.row_sum[r] + self.totals[r]

    @property
    def risen_exponent(self) -> float:
        """The largest P of a row whose maximum rises is aimed a little above 2^``wary_exponent``: the offset is
        rounded, and chords take a step of 2.5 % just below a power of two, which e4m3 rounds away and the sum of the
        row does not."""
        return self.wary_exponent + LITTLE

    @cute.jit
    def take_first_maxima(self, operand: cute.Tensor, acc_S: cute.Tensor):
        """P of a tile's first block, both rows by their maxima: made in float16 as in other blocks, the largest P of a
        row a little above 2^3. ``row_sum`` counts all of them as e4m3 rounds them: so a row that sees one key has its
        value, and few keys are off by what their P differ in alone. Where a row's P is lost, or a thread's sum of it
        448 or more, ``take_maximum`` makes them again. Where in a long tile a single key lies over a flat tail its P is
        2^8: e4m3 keeps more of the tail then, and what needs headroom comes of keys that are alike."""
        of_thread = self._find_largest(acc_S)
        top = unpack(over_lanes(of_thread, maximum_of_halves), Float16)
        scaled = [multiply_rounded(top[r], self.scale[r]) for r in range(ROWS_PER_THREAD)]
        headroom = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        headroom.fill(P_EXPONENT - self.risen_exponent)
        if self.settled_from[0] >= LONG:
            apart = unpack(_octaves_of_flat(*ordered_over_lanes(of_thread)), Float16)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                is_flat = apart[r] * self.scale[r] > Float32(FLAT_OCTAVES)
                headroom[r] = Float32(-LITTLE) if is_flat else headroom[r]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            wanted = scaled[r] + headroom[r]
            self._place_shift(r, wanted if scaled[r] > -Float32.inf else self.shift[r])
        self._measure_first(acc_S, top, scaled)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self._exponentials_of_halves(acc_S, r)
            for j in cutlass.range_constexpr(self.words.shape[1]):
                self.words[r, j] = round_to_e4m3(self.words[r, j])
            self.totals[r] = self._sum_of_words(r)
        # What e4m3 does not hold is 448. A row whose largest score is NaN has NaN for P, and needs no other.
        is_lost = [
            not self.totals[r] < Float32(LARGEST_P) and top[r] == top[r] for r in range(ROWS_PER_THREAD)
        ]
        if cute.arch.vote_any_sync(is_lost[0] or is_lost[1]):
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.take_maximum(acc_S, r, Boolean(True))
        else:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.row_sum[r] = self.totals[r]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.store_P(operand, acc_S, r)

    @cute.jit
    def take_maximum(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], has_more: Boolean):
        """P of row ``r`` by its maximum, and ``row_scale`` for what is older.

        The largest P is a power of two, at most 2^8, but for the rounding of ``offset``. Where the row ``has_more``
        keys to come, the sums of its threads are about 2^6 at most if that leaves it at 2^3. Where it would be below
        2^3 nothing is raised: other rows need this, perhaps in every block. ``row_sum`` counts that P as e4m3 rounds
        it: one that outweighs all others would be wrong by the difference.
        """
        before = self.shift[r]
        of_thread = self._largest_score(acc_S, r)
        of_row = over_lanes(of_thread, maximum_or_nan)
        top = multiply_rounded(of_row, self.scale[r]) + Float32(P_EXPONENT)
        exponent = top - before
        kept = cute.arch.fmin(cute.math.floor(exponent), Float32(P_EXPONENT))
        kept = cute.arch.fmax(kept, Float32(LEAST_MAXIMUM_EXPONENT))
        shift = top - kept if exponent > kept else before
        self._place_shift(r, shift)
        self._exponentials_in_float32(acc_S, r)
        total = self._sum_of_words(r)
        about = max_over_lanes(total, LANES_PER_ROW) * Float32(ALMOST_ONE)
        octaves = octaves_over(about, exp2(top - self.shift[r])) if has_more else Float32(0.0)
        lower = self.shift[r]
        self._place_shift(r, lower + octaves)
        self._lower_largest(r, -Float32.inf if exponent > kept else -octaves)
        factor = exp2(lower - self.shift[r])
        for j in cutlass.range_constexpr(self.words.shape[1]):
            self.words[r, j] = scale_words(self.words[r, j], factor)
        self.row_scale[r] = exp2(before - self.shift[r])
        total = total * factor
        rounding = rounding_of(exp2(top - self.shift[r]))
        total = total + rounding if of_thread == of_row else total
        self.row_sum[r] = self.row_sum[r] * self.row_scale[r] + total

    @cute.jit
    def _lower_maxima_of_flat_tails(self, acc_S: cute.Tensor, n_block: Int32):
        """In the first blocks of a long tile, and in the last one in which a warp is wary: measure rows from a lower
        maximum, as they are from a higher one, where all P of a block are so small that e4m3 loses them, but many such
        add up to what counts. O and ``row_sum`` are float32, and hold what was larger. What ``_count_largest`` has kept
        is dropped."""
        if (n_block >= maximum(self.settled_from[0], LONG) - 1) | (n_block == self.calm_from[0] + 1):
            largest = over_lanes(self.largest[0], maximum_of_halves)
            scales, offsets = self._words_of_rows()
            exponents = unpack(multiply_add_halves(largest, scales, offsets), Float16)
            is_small = cute.arch.fmin(*exponents) < Float32(SMALL_EXPONENT)
            if cute.arch.vote_any_sync(is_small):
                means = [self._mean_exponent(acc_S, r) for r in range(ROWS_PER_THREAD)]
                falls = [self._falls(r, exponents[r], means[r], n_block) for r in range(ROWS_PER_THREAD)]
                if cute.arch.vote_any_sync(falls[0] | falls[1]):
                    self.has_risen[0] = Int32(1)
                    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                        before = self.shift[r]
                        lower = before - cute.math.floor(Float32(self.wary_exponent) - exponents[r])
                        self._place_shift(r, lower if falls[r] else before)
                        self._lower_largest(r, -Float32.inf if falls[r] else Float32(0.0))
                        self.row_scale[r] = exp2(before - self.shift[r])
                        self.row_sum[r] = self.row_sum[r] * self.row_scale[r]

    @cute.jit
    def _falls(self, r: cutlass.Constexpr[int], largest: Float32, mean: Float32, n_block: Int32) -> Boolean:
        """Whether the maximum of row ``r`` is to fall in a block with these exponents of P. A row whose scores lie
        apart has larger ones in other blocks, which would raise it again, and count for more."""
        keys = Float32((n_block + 1) * (8 * self.words.shape[1]))
        total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
        counts = exp2(mean) * keys > total * Float32(LEAST_SHARE)
        is_flat = (largest < Float32(SMALL_EXPONENT)) & (largest - mean < Float32(MOST_APART))
        lower = self.shift[r] - cute.math.floor(Float32(self.wary_exponent) - largest)
        return counts & is_flat & (cute.math.absf(Float32(P_EXPONENT) - lower) < Float32(self.farthest))

    @cute.jit
    def _mean_exponent(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """The mean of the exponents of P of row ``r`` in a block; -inf where a key is masked."""
        scores, share = words_of_pairs(acc_S), pin(Int32(pair_of(0.5 / self.words.shape[1])), Int32)
        sums = [pin(Int32(0), Int32)] * MEAN_CHAINS
        for j in cutlass.range_constexpr(scores.shape[1]):
            sums[j % MEAN_CHAINS] = multiply_add_halves(scores[r, j], share, sums[j % MEAN_CHAINS])
        of_thread = sum((sum(unpack(x, Float16), Float32(0.0)) for x in sums), Float32(0.0))
        of_row = cute.arch.warp_reduction_sum(of_thread, threads_in_group=LANES_PER_ROW)
        return of_row * Float32(1.0 / LANES_PER_ROW) * self.scale[r] + Float32(P_EXPONENT) - self.shift[r]

    def _words_of_rows(self) -> list[Int32]:
        """Scales and offsets, those of both rows in a word each."""
        return [permute_bytes(x[0], x[1], LOWER_HALVES) for x in (self.scales, self.offset)]

    @cute.jit
    def enter_block(self, slot: Int32):
        StaleMaximumSoftmax.enter_block(self, slot)
        self._make_words_of_scales()

    @cute.jit
    def _make_words_of_scales(self):
        """``slopes`` and ``scales`` of ``scale``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            slope = self.scale[r] * Float32(-1.0 / EXPONENTS)
            self.slopes[r] = pack(slope, slope, Float16)
            # One that float16 does not hold would make 0 of P of any negative score.
            self.scales[r] = scale_of_slope(self.slopes[r])

    @cute.jit
    def _may_rise(self, acc_S: cute.Tensor) -> Boolean:
        """Whether a score of the thread is above a row's limit, or NaN. Leaves ``largest`` of the thread."""
        self.largest[0] = self._find_largest(acc_S)
        exponents = multiply_add_halves(self.largest[0], *self._words_of_rows())
        return _is_any_above(exponents, pair_of(self.wary_exponent + NEARLY))

    def _find_largest(self, acc_S: cute.Tensor) -> Int32:
        """The largest scores of the thread's rows; NaN if one is."""
        scores = words_of_pairs(acc_S)
        words = [
            reduce_by_threes([scores[r, j] for j in range(scores.shape[1])], maximum_of_halves)
            for r in range(ROWS_PER_THREAD)
        ]
        return maximum_of_halves(*(permute_bytes(*words, halves) for halves in (LOWER_HALVES, UPPER_HALVES)))

    @cute.jit
    def _raise_maxima(self, acc_S: cute.Tensor, n_block: Int32):
        """In float16, both rows in a word, unless an offset goes too far for that: the new one is the old one less what
        the largest exponent is above ``risen_exponent``, or the nearest that is exact (``_place_shift``)."""
        largest = over_lanes(self.largest[0], maximum_of_halves)
        scales, offsets = self._words_of_rows()
        exponents = multiply_add_halves(largest, scales, offsets)
        rise = positive_difference_of_halves(exponents, Int32(pair_of(self.risen_exponent)))
        lowered = subtract_halves(offsets, rise)
        distance = subtract_halves(Int32(CEILINGS), lowered)
        lowered = subtract_halves(Int32(CEILINGS), distance)
        if cute.arch.vote_any_sync(
            _is_any_above(lowered & Int32(SIGNLESS), pair_of(self.farthest) - 0x00010001)
        ):
            self._take_far_maxima(acc_S, n_block)
        else:
            wanted = unpack(lowered, Float16)
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.offset[r] = permute_bytes(lowered, lowered, BOTH_FROM[r])
                before, self.shift[r] = self.shift[r], Float32(P_EXPONENT) - wanted[r]
                self.row_scale[r] = exp2(before - self.shift[r])
                self.row_sum[r] = self.row_sum[r] * self.row_scale[r]
            self._count_largest(multiply_add_halves(largest, scales, lowered), rise)
            self._note_rise(_is_any_above(exponents, pair_of(self.wary_exponent + FAR_RISE)), n_block)

    def _measure_first(self, acc_S: cute.Tensor, tops: tuple, scaled: list):
        """Where no float16 is the offset of a first maximum: nothing here, so that P comes from float32."""

    @cute.jit
    def _count_largest(self, exponents: Int32, rise: Int32):
        """Keep the exponents of the largest P of both rows, a word, whose maxima have risen by ``rise``: ``finalize``
        counts what they become. A row without a rise may have had a larger one."""
        self.risen[0] = maximum_of_halves(subtract_halves(self.risen[0], rise), exponents)

    @cute.jit
    def _lower_largest(self, r: cutlass.Constexpr[int], octaves: Float32):
        """That of row ``r`` is now 2^``octaves`` of what it was, none beside a new maximum."""
        both = (octaves, Float32(0.0)) if const_expr(r == 0) else (Float32(0.0), octaves)
        self.risen[0] = add_halves(self.risen[0], pack(*both, Float16))

    @cute.jit
    def finalize(self, inverse_sum: cute.Tensor, lse: cute.Tensor, head_kv: Int32, batch: Int32):
        """Where the last key that raised a row's maximum outweighs all others, the output has it as e4m3 rounds it."""
        largest = unpack(
            exp2_of_halves(self.risen[0], pin(Int32(ONES), Int32), pin(Int32(0), Int32)), Float16
        )
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = cute.arch.warp_reduction_sum(self.row_sum[r], threads_in_group=LANES_PER_ROW)
            p = largest[r]
            if const_expr(self.polynomial_pairs > 0):
                p = self._of_either(p, r, total)
            # P may lie on another step of chords than p, whose exponent is rounded. It is no more than the sum.
            rounding = rounding_of(cute.arch.fmin(p, total))
            self.row_sum[r] = self.row_sum[r] + rounding * Float32(1.0 / LANES_PER_ROW)
        StaleMaximumSoftmax.finalize(self, inverse_sum, lse, head_kv, batch)

    @cute.jit
    def _of_either(self, p: Float32, r: cutlass.Constexpr[int], total: Float32) -> Float32:
        """The largest P of row ``r``, which is ``p`` if its column is MUFU's.

        Which columns these are nobody has kept. Where the row's sum is little more than the one or the other, it tells.
        Else P is taken for one of chords, however few there are: the first key lies in one, and inputs like a model's
        attend to that.
        """
        slopes, ceiling = (pin(Int32(x), Int32) for x in (SLOPES_OF_ONE, CEILING_OF_0))
        by_chord = unpack(exp2_of_halves_by_chords(self.risen[0], slopes, ceiling), Float16)[r]
        is_alone = total < cute.arch.fmax(by_chord, p) * Float32(ALONE)
        is_nearer = cute.math.absf(total - p) < cute.math.absf(total - by_chord)
        return p if is_alone and is_nearer else by_chord

    @cute.jit
    def _take_far_maxima(self, acc_S: cute.Tensor, n_block: Int32):
        """Where an offset goes beyond ``farthest``, or float16 does not hold a scale: P comes from float32 then."""
        self._take_maxima(self._scaled_maxima(acc_S), n_block)
        self.risen[0] = Int32(NOTHING)

    @cute.jit
    def _scaled_maxima(self, acc_S: cute.Tensor) -> tuple[Float32, Float32]:
        """Of both rows, from ``largest`` of the thread."""
        first, second = unpack(over_lanes(self.largest[0], maximum_of_halves), Float16)
        return multiply_rounded(first, self.scale[0]), multiply_rounded(second, self.scale[1])

    @cute.jit
    def _place_shift(self, r: cutlass.Constexpr[int], shift: Float32):
        """Make this the shift of row ``r``, or the nearest that leaves ``offset`` exact."""
        wanted = Float32(P_EXPONENT) - shift
        is_near = cute.math.absf(wanted) < Float32(self.farthest)
        # Its distance from the ceiling, as chords want it, is exact as well where it is the larger one.
        distance = Float32(CEILING) - wanted
        distance = unpack(pack(distance, distance, Float16), Float16)[0]
        offset = pack(Float32(CEILING) - distance, Float32(CEILING) - distance, Float16)
        self.offset[r] = offset if is_near else Int32(NANS)
        self.shift[r] = Float32(P_EXPONENT) - unpack(offset, Float16)[0] if is_near else shift

    @cute.jit
    def _largest_score(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
        """Of the thread's; NaN if one is."""
        scores = words_of_pairs(acc_S)
        top = scores[r, 0]
        for j in cutlass.range_constexpr(1, scores.shape[1]):
            top = maximum_of_halves(top, scores[r, j])
        return maximum_or_nan(*unpack(top, Float16))

    @cute.jit
    def _exponentials_in_float32(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int]):
        scores = words_of_pairs(acc_S)
        offset = Float32(P_EXPONENT) - self.shift[r]
        for j in cutlass.range_constexpr(scores.shape[1]):
            low, high = unpack(scores[r, j], Float16)
            low, high = exp2(low * self.scale[r] + offset), exp2(high * self.scale[r] + offset)
            self.words[r, j] = pack(low, high, Float16)

    def _sum_of_words(self, r: int) -> Float32:
        return sum_of_words([self.words[r, j] for j in range(self.words.shape[1])])


def rounding_of(x: Float32) -> Float32:
    """What e4m3 adds to a number that float16 has rounded."""
    pair = pack(x, x, Float16)
    return unpack(round_to_e4m3(pair), Float16)[0] - unpack(pair, Float16)[0]


def _octaves_of_flat(largest: Int32, second: Int32, least: Int32) -> Int32:
    """By how much more the largest score of pairs is above the second than twice what this is above the least; -inf or
    NaN where a lane has no key. Scores, which their scale makes octaves of."""
    spread = subtract_halves(second, least)
    return subtract_halves(subtract_halves(subtract_halves(largest, second), spread), spread)


def _is_any_above(pair: Int32, limits: int) -> Boolean:
    """Whether a half of a pair of float16 is above its positive limit, or NaN."""
    return larger_as_integers(pair, Int32(limits)) != Int32(limits)
