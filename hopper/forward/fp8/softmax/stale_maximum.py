"""What softmaxes of FP8 scores share that measure P from a maximum of earlier blocks while that will do."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.fragments import ROWS_PER_THREAD
from hopper.forward.fp8.softmax.exact import ExactSoftmax

LARGEST_P = 448.0
"""Of e4m3."""

LARGEST_SUM_EXPONENT = 6
"""Wherever a maximum is taken, no thread's sum of a row stays above 2^6: those of later blocks may be seven times as
large."""

DOMINATES = 4.0, 16.0
"""A thread's sum of a row that is this many times its sum of earlier blocks, and this more, has a P that may outweigh
all others: one that should not be rounded."""

LEAST_MAXIMUM_EXPONENT = 3
"""No P is lowered for that where it would leave the row's largest below 2^3: what is small beside it counts too."""

FLOAT32_BIAS, FLOAT32_MANTISSA_BITS = 127, 23


class StaleMaximumSoftmax(ExactSoftmax):
    """``ExactSoftmax`` that learns from sums of P, which are taken anyway, whether a block needs a maximum.

    ``totals`` are the thread's sums of a block, for each row; ``new_unit`` is the unit of its O.
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
        """Whether the block's P, and O as it is, will do."""
        is_new_unit = self.new_unit[0] != self.unit[0]
        return not cute.arch.vote_any_sync(is_new_unit or self._needs_maximum(0) or self._needs_maximum(1))

    @cute.jit
    def _needs_maximum(self, r: cutlass.Constexpr[int]) -> Boolean:
        """Whether a P of the thread's row may exceed what e4m3 holds or outweigh all others, or is NaN."""
        times, more = DOMINATES
        towers = self.totals[r] - Float32(times) * self.row_sum[r] > Float32(more)
        return (not self.totals[r] <= Float32(LARGEST_P)) | towers

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
