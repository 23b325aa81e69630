"""FP8 softmaxes that go on with a stale maximum: P of a block is measured from the row maximum of an earlier block.

A row maximum only keeps exponentials in range. e4m3 holds P up to 448, and the sum of P, which is taken anyway, tells
whether any P may be above that. So most blocks need no maximum, no shuffles and no rescaling of O. A block takes a new
maximum in two cases:

1. A P may exceed 448, e4m3's largest: the thread's sum of a row does.
2. A P may dominate the row. Where the sum of this block exceeds 4 times the running sum by more than 16, one P may
   outweigh all others, and e4m3 would round it, and the output with it. Measured from itself it is a power of two,
   which e4m3 has.

Where V's scale changes, and with it the unit of O, O is multiplied like one with a risen maximum; P stays as it is.

Where scores are float16 a maximum may fall, too: far below a single key that a row has met, e4m3 would lose many that
together count (``HalfScoresSoftmax._lower_maxima_of_flat_tails``).

FlashAttention-4 skips rescaling by a threshold on the maximum; here the maximum itself is skipped.

Where scores are peaky, most blocks need a new maximum, and to find that out from P, and to make P again, takes longer
than to take it first. So a warp that needed some at short intervals is wary for a few blocks: it looks at the scores
before it makes exponentials of them, and goes on being wary as long as that was worth it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.fast_math import exp2, maximum_or_nan
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.key_blocks import KeyBlocks
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

FAR_RISE = 3.0
"""A maximum so many octaves above what wary warps aim at was worth being taken first, if the row has had one of a whole
block before."""

FLOAT32_BIAS, FLOAT32_MANTISSA_BITS = 127, 23


class StaleMaximumSoftmax(ExactSoftmax):
    """What ``LaggingSoftmax`` and ``HalfScoresSoftmax`` share: when a block needs a new maximum.

    ``totals`` are the thread's sums of P of the block, one for each row; ``new_unit`` is the scale of the block's V, in
    which its P V is measured. ``tolerance`` is by how much more than the running sum a block's may be. ``has_risen``
    says that O is still to be multiplied with ``row_scale``.

    The warp is wary in blocks behind ``calm_from``, which are those that the walk visits before it. One number in place
    of two counters: the alarm is by how much the number of the block is above ``calm_from`` - ``ALARM_LIMIT``, or 0. So
    a block that needs nothing takes 1 from either and no instruction for it, and a warp that is calm again has the
    whole alarm. From block ``settled_from`` on all rows have had a maximum of a whole block, and what rises far says
    something of the scores.
    """

    wary_blocks: int
    """For so many blocks a warp is wary once it is."""

    wary_exponent = 4
    """The largest P of a row that takes its maximum first is 2 to this. None that is less dominates, by ``DOMINATES``.
    Up to ``NEARLY`` above such a row keeps its maximum."""

    def __init__(self, scale_log2: Float32, tile_scales: tuple, slots: cute.Tensor, polynomial_pairs: int):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.new_unit, self.tolerance = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        self.totals = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.calm_from, self.settled_from, self.has_risen = (
            cute.make_rmem_tensor(1, Int32) for _ in range(3)
        )

    def begin_walk(self, blocks: KeyBlocks):
        """As the walk alone says: which tile came before is chance, and must not show. To be wary too late costs peaky
        inputs more than to be so for nothing costs others."""
        self.has_risen[0] = Int32(0)
        self.settled_from[0], self.calm_from[0] = self.how_a_tile_begins(blocks)

    def how_a_tile_begins(self, blocks: KeyBlocks) -> tuple[Any, Any]:
        """``settled_from`` and ``calm_from`` of a tile that visits ``blocks``."""
        raise NotImplementedError

    @cute.jit
    def _find_scales(self, slot: Int32):
        scale_k, self.new_unit[0] = self._read_slot(slot)
        self._take_scale(scale_k)

    def take_new_unit(self):
        """That of a block which takes its maximum as usual."""
        self._take_unit(self.new_unit[0])

    @cute.jit
    def begin_scores(self, acc_S: cute.Tensor, n_block: Int32):
        """Take the maxima of a block's scores first if the warp is wary. The block ends like any other, even where one
        has risen: O follows under Q K^T of the next block (``rescale_if_needed``)."""
        self.tolerance[0] = Float32(DOMINATES[1])
        if n_block > self.calm_from[0]:
            self.tolerance[0] = Float32.inf
            if cute.arch.vote_any_sync(self._may_rise(acc_S)):
                self.has_risen[0] = Int32(1)
                self._raise_maxima(acc_S, n_block)
            else:
                self._lower_maxima_of_flat_tails(acc_S, n_block)

    def _lower_maxima_of_flat_tails(self, acc_S: cute.Tensor, n_block: Int32):
        """In a block of a wary warp in which no maximum rises: nothing here."""

    @cute.jit
    def change_unit(self):
        """Take that of the block, if it is another: O follows as it does a risen maximum."""
        is_other = self.new_unit[0] != self.unit[0]
        self._take_unit(self.new_unit[0])
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            risen = self.row_scale[r] if self.has_risen[0] > 0 else Float32(1.0)
            self.row_scale[r] = risen * self.unit_change[0]
        self.has_risen[0] = Int32(1) if is_other else self.has_risen[0]

    @cute.jit
    def _raise_maxima(self, acc_S: cute.Tensor, n_block: Int32):
        """Take the maxima of a block that ``_may_rise``."""
        self._take_maxima(self._scaled_maxima(acc_S), n_block)

    @cute.jit
    def _take_maxima(self, tops: tuple[Float32, Float32], n_block: Int32):
        """Make 2^``wary_exponent`` of the largest P of a row that would be more. ``row_scale`` is what O is to be
        multiplied with.

        Both rows go through it together, without a branch: each step waits for the one before it.
        """
        exponents = [tops[r] + Float32(P_EXPONENT) - self.shift[r] for r in range(ROWS_PER_THREAD)]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            before = self.shift[r]
            risen = tops[r] + Float32(P_EXPONENT - self.wary_exponent)
            self._place_shift(r, risen if exponents[r] > Float32(self.wary_exponent + NEARLY) else before)
            self.row_scale[r] = exp2(before - self.shift[r])
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r]
        self._note_rise(maximum_or_nan(*exponents) > Float32(self.wary_exponent + FAR_RISE), n_block)

    @cute.jit
    def _note_rise(self, is_far: Boolean, n_block: Int32):
        """To be wary was worth it where a maximum has risen far, if the row has had one of a whole block before."""
        if cute.arch.vote_any_sync(is_far and n_block <= self.settled_from[0]):
            self.calm_from[0] = n_block - 1 - self.wary_blocks

    @cute.jit
    def _note_new_maximum(self, n_block: Int32):
        """In a block that is made again, unless of a warp that is wary as it is."""
        if n_block <= self.calm_from[0]:
            following = n_block - 1
            alarmed = cutlass.min(self.calm_from[0], following + ALARM_LIMIT) - ALARM
            self.calm_from[0] = following - self.wary_blocks if alarmed < following else alarmed

    @cute.jit
    def rescale_if_needed(self, acc_O: cute.Tensor):
        """Bring O to the shifts that a block has left behind, of a warp in which one has risen."""
        if self.has_risen[0] > 0:
            scale_rows(acc_O, self.row_scale)
            self._leave_far_offsets()
            self.has_risen[0] = Int32(0)

    def _leave_far_offsets(self):
        """Where a warp may have offsets of one block alone: nothing here."""

    @cute.jit
    def maximum_suffices(self, rows: cutlass.Constexpr[tuple[int, ...]]) -> Boolean:
        """Whether P of these of a thread's rows, as it is, is right for all of the warp; with the first, O as well, in
        the unit that it has. Where this vote stands, the sums of the rows are: ptxas moves none behind it."""
        has_more = Boolean(False)
        if const_expr(0 in rows):
            has_more = self._has_new_unit()
        for r in cutlass.range_constexpr(len(rows)):
            has_more = has_more | self._needs_maximum(rows[r])
        return not cute.arch.vote_any_sync(has_more)

    def _has_new_unit(self) -> Boolean:
        """Whether O is in another unit than the block's."""
        return self.new_unit[0] != self.unit[0]

    @cute.jit
    def needs_maximum(self) -> Boolean:
        """Whether P of the block is not right for some row of the warp."""
        return cute.arch.vote_any_sync(self._needs_maximum(0) or self._needs_maximum(1))

    @cute.jit
    def _needs_maximum(self, r: cutlass.Constexpr[int]) -> Boolean:
        """Whether a P of the thread's row may exceed e4m3's range or dominate the row, or is NaN."""
        dominates = self.totals[r] - Float32(DOMINATES[0]) * self.row_sum[r] > self.tolerance[0]
        return (not self.totals[r] <= Float32(LARGEST_P)) | dominates

    @cute.jit
    def add_totals(self):
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.row_sum[r] = self.row_sum[r] + self.totals[r]


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
