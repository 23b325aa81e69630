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
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.fragments import ROWS_PER_THREAD
from hopper.forward.fp8.softmax.exact import ExactSoftmax

LARGEST_P = 448.0
"""Of e4m3."""

LARGEST_SUM_EXPONENT = 6
"""With a new maximum P is lowered until no thread's sum of a row is above 2^6, so that the sums of later blocks may be
seven times as large before they reach 448."""

DOMINATES = 4.0, 16.0
"""A block's sum that is so many times the running sum, and so much more, may hold one P that outweighs all others."""

LEAST_MAXIMUM_EXPONENT = 3
"""But P is never lowered so far that the row's largest is below 2^3: what is small beside it counts too."""

FLOAT32_BIAS, FLOAT32_MANTISSA_BITS = 127, 23


class StaleMaximumSoftmax(ExactSoftmax):
    """What ``LaggingSoftmax`` and ``HalfScoresSoftmax`` share: when a block needs a new maximum.

    ``totals`` are the thread's sums of P of the block, one for each row; ``new_unit`` is the scale of the block's V, in
    which its P V is measured.
    """

    def __init__(self, scale_log2: Float32, tile_scales: tuple, slots: cute.Tensor, polynomial_pairs: int):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.new_unit = cute.make_rmem_tensor(1, Float32)
        self.totals = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    @cute.jit
    def enter_block(self, slot: Int32):
        scale_k, self.new_unit[0] = self._read_slot(slot)
        self._take_scale(scale_k)

    @cute.jit
    def maximum_suffices(self) -> Boolean:
        """Whether P of the block, as it is, and O, in the unit that it has, are right for all rows of the warp."""
        is_new_unit = self.new_unit[0] != self.unit[0]
        return not cute.arch.vote_any_sync(is_new_unit or self._needs_maximum(0) or self._needs_maximum(1))

    @cute.jit
    def _needs_maximum(self, r: cutlass.Constexpr[int]) -> Boolean:
        """Whether a P of the thread's row may exceed e4m3's range or dominate the row, or is NaN."""
        times, more = DOMINATES
        dominates = self.totals[r] - Float32(times) * self.row_sum[r] > Float32(more)
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
