"""FP8 softmaxes that go on with a stale maximum: P of a block is measured from the row maximum of an earlier block.

A row maximum only keeps exponentials in range. e4m3 holds P up to 448, and the sum of P, which is taken anyway, tells
whether any P may be above that. So most blocks need no maximum, no shuffles and no rescaling of O. A block takes a new
maximum in three cases:

1. A P may exceed 448, e4m3's largest: the thread's sum of a row does.
2. A P may dominate the row. Where the sum of this block exceeds 4 times the running sum by more than 16, one P may
   outweigh all others, and e4m3 would round it, and the output with it. Measured from itself it is a power of two,
   which e4m3 has.
3. V's scale changes, and with it the unit of O.

FlashAttention-4 skips rescaling by a threshold on the maximum; here the maximum itself is skipped.

Where scores are peaky, most blocks need a new maximum, and to find that out from P, and to make P again, takes longer
than to take it first. So a warp that needed some at short intervals is wary for a few blocks: it looks at the scores
before it makes exponentials of them, and goes on being wary as long as that was worth it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.fast_math import exp2, maximum_or_nan
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import scale_rows
from hopper.forward.fp8.softmax.exact import P_EXPONENT, ExactSoftmax

LARGEST_P = 448.0
"""Of e4m3."""

LARGEST_SUM_EXPONENT = 6
"""With a new maximum P is lowered until no thread's sum of a row is above 2^6, so that the sums of later blocks may be
seven times as large before they reach 448."""

DOMINATES = 4.0, 16.0
"""A block's sum that is so many times the running sum, and so much more, may hold one P that outweighs all others."""

LEAST_MAXIMUM_EXPONENT = 3
"""But P is never lowered so far that the row's largest is below 2^3: what is small beside it counts too."""

NEARLY = 2.0**-5
"""Octaves: e4m3 rounds what is that near to a power of two to it."""

ALARM, ALARM_LIMIT = 4, 12
"""What a block that was made again adds to a warp's alarm, from which each block that was not takes 1. Above the limit
the warp is wary."""

FIRST_WARY_BLOCKS, KEYS_A_WARY_BLOCK = 3, 1024
"""For so many blocks a tile is wary at its beginning, but for no more than one in so many keys. To be so late costs
peaky inputs more than to be so for nothing costs others: without it the drop-in path took 1.5 times as long where some
tokens are large."""

WARY_EXPONENT = 4
"""The largest P of a row that takes its maximum first is 2^4. None that is less dominates, by ``DOMINATES``."""

WARY_LIMIT = WARY_EXPONENT + NEARLY
"""Up to this exponent such a row keeps its maximum."""

FAR_EXPONENT = 7.0
"""A maximum above this was worth being taken first."""

FLOAT32_BIAS, FLOAT32_MANTISSA_BITS = 127, 23


class StaleMaximumSoftmax(ExactSoftmax):
    """What ``LaggingSoftmax`` and ``HalfScoresSoftmax`` share: when a block needs a new maximum.

    ``totals`` are the thread's sums of P of the block, one for each row; ``new_unit`` is the scale of the block's V, in
    which its P V is measured. ``wary`` is for how many more blocks the warp is, or, negative, its alarm; ``tolerance``
    by how much more than the running sum a block's may be.
    """

    wary_blocks: int
    """For so many blocks a warp is wary."""

    def __init__(self, scale_log2: Float32, tile_scales: tuple, slots: cute.Tensor, polynomial_pairs: int):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.new_unit, self.tolerance = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        self.totals = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.wary = cute.make_rmem_tensor(1, Int32)

    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        """Wary for a few blocks, if there are many. Which tile came before is chance, and must not show."""
        super().enter_tile(rows, head, seqlens)
        self.wary[0] = first_wary_blocks(seqlens.seqlen_k)

    @cute.jit
    def enter_block(self, slot: Int32):
        scale_k, self.new_unit[0] = self._read_slot(slot)
        self._take_scale(scale_k)

    @cute.jit
    def begin_scores(self, acc_S: cute.Tensor) -> Int32:
        """Take the maxima of a block's scores first if the warp is wary; returns whether it is."""
        is_wary = self.wary[0]
        self.tolerance[0] = Float32(DOMINATES[1])
        self.wary[0] = is_wary - 1 if is_wary > 1 else cutlass.min(is_wary + 1, 0)
        if is_wary == 1:
            self.wary[0] = -ALARM_LIMIT
        if is_wary > 0:
            self.tolerance[0] = Float32.inf
            self.row_scale.fill(1.0)
            if cute.arch.vote_any_sync(self._may_rise(acc_S)):
                self._take_maxima(self._scaled_maxima(acc_S))
        return is_wary

    @cute.jit
    def _take_maxima(self, tops: tuple[Float32, Float32]):
        """Make 2^4 of the largest P of a row that would be more. ``row_scale`` is what O is to be multiplied with."""
        exponents = [tops[r] + Float32(P_EXPONENT) - self.shift[r] for r in range(ROWS_PER_THREAD)]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if exponents[r] > Float32(WARY_LIMIT):
                before = self.shift[r]
                self._place_shift(r, tops[r] + Float32(P_EXPONENT - WARY_EXPONENT))
                self.row_scale[r] = exp2(before - self.shift[r])
                self.row_sum[r] = self.row_sum[r] * self.row_scale[r]
        if cute.arch.vote_any_sync(maximum_or_nan(*exponents) > Float32(FAR_EXPONENT)):
            self.wary[0] = self.wary_blocks

    @cute.jit
    def _note_new_maximum(self):
        """In a block that is made again, unless for the unit of O alone."""
        if cute.arch.vote_any_sync(self._needs_maximum(0) or self._needs_maximum(1)):
            alarm = ALARM - self.wary[0]
            self.wary[0] = self.wary_blocks if alarm > ALARM_LIMIT else -alarm

    @cute.jit
    def finish_wary(self, acc_O: cute.Tensor):
        """Bring O to the shifts and the unit of the block."""
        self._take_unit(self.new_unit[0])
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.row_scale[r] = self.row_scale[r] * self.unit_change[0]
        if cute.arch.vote_any_sync(self.row_scale[0] != Float32(1.0) or self.row_scale[1] != Float32(1.0)):
            scale_rows(acc_O, self.row_scale)

    @cute.jit
    def maximum_suffices(self, is_wary: Int32) -> Boolean:
        """Whether P of the block, as it is, and O, in the unit that it has, are right for all rows of the warp."""
        has_more = is_wary > 0 or self.new_unit[0] != self.unit[0]
        return not cute.arch.vote_any_sync(has_more or self._needs_maximum(0) or self._needs_maximum(1))

    @cute.jit
    def _needs_maximum(self, r: cutlass.Constexpr[int]) -> Boolean:
        """Whether a P of the thread's row may exceed e4m3's range or dominate the row, or is NaN."""
        dominates = self.totals[r] - Float32(DOMINATES[0]) * self.row_sum[r] > self.tolerance[0]
        return (not self.totals[r] <= Float32(LARGEST_P)) | dominates

    @cute.jit
    def add_totals(self):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.row_sum[r] = self.row_sum[r] + self.totals[r]


@cute.jit
def first_wary_blocks(seqlen_k: Int32) -> Int32:
    """What ``wary`` is at the beginning of a tile: with few keys not wary, but with the whole alarm."""
    blocks = cutlass.min(seqlen_k // KEYS_A_WARY_BLOCK, FIRST_WARY_BLOCKS)
    return blocks if blocks > 0 else Int32(-ALARM_LIMIT)


def octaves_over(total: Float32, largest: Float32) -> Float32:
    """By how many powers of two a row is to be divided: ``total`` below 2^6, but ``largest`` no less than 2^3."""
    over, above = (
        exponent_of(total) - (LARGEST_SUM_EXPONENT - 1),
        exponent_of(largest) - LEAST_MAXIMUM_EXPONENT,
    )
    return Float32(cutlass.max(cutlass.min(over, above), 0))


def exponent_of(x: Float32) -> Int32:
    """That of a positive number: its binary logarithm, rounded down."""
    return (x.bitcast(Int32) >> FLOAT32_MANTISSA_BITS) - FLOAT32_BIAS
