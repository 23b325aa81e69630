"""Softmax of scores in float32 whose maxima are found by comparing integers: Hopper takes three at a time."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import (
    as_bits,
    as_float,
    largest_bits,
    max_over_lanes,
    maximum_of,
    multiply_rounded,
)
from cute_kernels.fragments import LANES_PER_ROW, as_rows
from cute_kernels.softmax import LEAST, OnlineSoftmax, RoundingSoftmax, WithSinks


class WithComparedBits(OnlineSoftmax):
    """Mixin, to be put before a softmax: a block's maxima by comparing the bits of its scores (VIMNMX3).

    Bits of floats have the order of signed integers wherever one of them is not negative. So they are compared in
    blocks before which all rows of the warp have a positive maximum, which is known before the scores come, and floats
    in the others: the maximum is exact for any scores. -0 would not do: its bits are the least of all integers. A row
    with a NaN among them is NaN in either case.

    With ``second_is_late`` only what the first row's exponentials need stands in front of them. The second row's scores
    are compared under them, as if by bits alone; where bits do not tell, ``take_second_row`` compares them as floats.
    """

    def __init__(self, second_is_late: bool, *softmax: Any):
        super().__init__(*softmax)
        self.second_is_late = second_is_late
        self.row_max.fill(-Float32.inf)

    def enter_block(self, slot: Int32):
        smaller = cute.arch.fmin(self.row_max[0], self.row_max[1])
        # A row's bias alone stands for scores that are all negative, and must not be taken for a maximum.
        least = cute.arch.fmax(Float32(0.0), cute.arch.fmax(*self.bias)) if self.bias else Float32(0.0)
        self.compares_bits = cute.arch.vote_all_sync(smaller > least)

    def take_scores(self, acc_S: cute.Tensor, is_first: bool):
        if is_first:
            OnlineSoftmax.take_scores(self, acc_S, True)
        elif self.second_is_late:
            self._take_first_row(acc_S)
        else:
            self._take_both_rows(acc_S)

    def take_second_row(self, acc_S: cute.Tensor):
        if self.second_is_late:
            self._take_second_row(acc_S)

    @cute.jit
    def _take_both_rows(self, acc_S: cute.Tensor):
        scores, bits = as_rows(acc_S), as_rows(cute.recast_tensor(acc_S, Int32))
        second = self._start_of_bits(1)
        row_max, shift = Float32(0.0), Float32(0.0)
        if self.compares_bits:
            first = self._largest_with(self._start_of_bits(0), bits[0, None])
            row_max = max_over_lanes(self._biased(0, as_float(first)), LANES_PER_ROW)
            shift = multiply_rounded(row_max, self.scale_log2)
            second = self._largest_with(second, bits[1, None])
        else:
            row_max, shift = self._of_all_lanes(self._biased(0, maximum_of(scores[0, None], self._start(0))))
            second = as_bits(maximum_of(scores[1, None], self._start(1)))
        self._take_maximum(0, row_max, shift)
        self._take_maximum(1, *self._of_all_lanes(self._biased(1, as_float(second))))

    @cute.jit
    def _take_first_row(self, acc_S: cute.Tensor):
        scores, bits = as_rows(acc_S), as_rows(cute.recast_tensor(acc_S, Int32))
        first = self._start_of_bits(0)
        if self.compares_bits:
            first = self._largest_with(first, bits[0, None])
        else:
            first = as_bits(maximum_of(scores[0, None], self._start(0)))
        self._take_maximum(0, *self._of_all_lanes(self._biased(0, as_float(first))))
        second = self._largest_with(self._start_of_bits(1), bits[1, None])
        self.second_row = self._of_all_lanes(self._biased(1, as_float(second)))

    @cute.jit
    def _take_second_row(self, acc_S: cute.Tensor):
        row_max, shift = self.second_row
        if not self.compares_bits:
            of_thread = maximum_of(as_rows(acc_S)[1, None], self._start(1))
            row_max, shift = self._of_all_lanes(self._biased(1, of_thread))
        self._take_maximum(1, row_max, shift)

    def _start(self, r: int) -> Float32:
        """What a block's scores of row ``r`` are compared with: the running maximum, which with a bias comes later."""
        return -Float32.inf if self.bias else self.row_max[r]

    def _start_of_bits(self, r: int) -> Int32:
        return Int32(0) if self.bias else as_bits(self.row_max[r])

    def _biased(self, r: int, largest: Float32) -> Float32:
        """The maximum so far, of ``largest`` in this thread's part of a block."""
        return cute.arch.fmax(largest + self.bias[r], self.row_max[r]) if self.bias else largest

    def _of_all_lanes(self, of_thread: Float32) -> tuple[Float32, Float32]:
        """A row's maximum, before scaling and after."""
        row_max = max_over_lanes(of_thread, LANES_PER_ROW)
        return row_max, cute.arch.fmax(multiply_rounded(row_max, self.scale_log2), Float32(LEAST))

    @cute.jit
    def _take_maximum(self, r: cutlass.Constexpr[int], row_max: Float32, shift: Float32):
        self._move_shift(r, shift, False)
        self.row_max[r] = row_max

    def _largest_with(self, start: Int32, row: cute.Tensor) -> Int32:
        return largest_bits([start, *(row[i] for i in range(cute.size(row)))])


class ComparingSoftmax(WithComparedBits, OnlineSoftmax):
    """``OnlineSoftmax`` that compares bits."""


class ComparingRoundingSoftmax(WithComparedBits, RoundingSoftmax):
    """``RoundingSoftmax`` that compares bits."""


class ComparingSinkSoftmax(WithSinks, ComparingRoundingSoftmax):
    """The same with sinks."""
