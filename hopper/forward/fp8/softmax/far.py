"""The softmax of FP8 scores in float16 whose maximum may lie thousands of octaves from 0."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32

from cute_kernels.fast_math import (
    maximum_of_halves,
    multiply_rounded,
    pack,
    subtract_halves,
    unpack,
)
from cute_kernels.fragments import ROWS_PER_THREAD, words_of_pairs
from cute_kernels.integers import maximum
from hopper.forward.fp8.row_maximum import over_lanes
from hopper.forward.fp8.softmax.exact import P_EXPONENT
from hopper.forward.fp8.softmax.half import NOTHING, HalfScoresSoftmax

IS_FAR = 2
"""``has_risen`` of a warp whose offsets are those of one block."""

SHIFT_STEP = 2.0**-23
"""What a float32 is rounded by, at most twice that."""

LEAST_OFFSET = -1000.0
"""Of a block all of whose P vanish."""

LEAST_SCALE = 2.0**-11
"""What is further below a row's largest score than float16 reaches vanishes with this, and may not with less."""

SLACK = 2.0**-3
"""Above ``wary_exponent``: so much more of 48 keys that are alike is still less than 448."""


class FarHalfScoresSoftmax(HalfScoresSoftmax):
    """``HalfScoresSoftmax`` without P from float32 where a row's maximum is beyond ``farthest``.

    No float16 is the offset of such a row. So a warp that has one takes the maxima of each block: less the block's own,
    which is exact for all scores that count beside it, scores have an offset near 0. That is the block's alone:
    ``offset`` is NaN again before the next one (``rescale_if_needed``). The scores of the block are lost with it, so
    no P of such a block may be made again: it is done where all largest scores and scales of the warp are numbers, or
    rows have no keys, and where no row near 0 has a scale below ``LEAST_SCALE`` or a shift so coarse that its largest P
    is above the aim by more than ``SLACK``.
    """

    @cute.jit
    def _measure_first(self, acc_S: cute.Tensor, tops: tuple, scaled: list):
        if self._has_far_rows(tops, scaled):
            self.calm_from[0], self.has_risen[0] = Int32(-1), Int32(IS_FAR)
            self.row_scale.fill(1.0)
            self._measure_from_own(acc_S, tops, scaled)

    @cute.jit
    def _take_far_maxima(self, acc_S: cute.Tensor, n_block: Int32):
        tops = unpack(over_lanes(self.largest[0], maximum_of_halves), Float16)
        scaled = [multiply_rounded(tops[r], self.scale[r]) for r in range(ROWS_PER_THREAD)]
        self._take_maxima(tuple(scaled), n_block)
        self.risen[0] = Int32(NOTHING)
        if self._has_far_rows(tops, scaled):
            self.calm_from[0] = n_block - 1 - self.wary_blocks
            self.has_risen[0] = Int32(IS_FAR)
            self._measure_from_own(acc_S, tops, scaled)

    @cute.jit
    def _has_far_rows(self, tops: tuple, scaled: list) -> Boolean:
        """Whether a row of the warp is beyond ``farthest``, and none has NaN or may have to be made again. ``tops`` are
        the largest scores of the thread's rows."""
        is_number, is_far = Boolean(True), Boolean(False)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            scale = unpack(self.scales[r], Float16)[0]
            is_fine = scaled[r] - self.shift[r] <= Float32(self.wary_exponent + SLACK - P_EXPONENT)
            is_number = is_number & (scale >= Float32(LEAST_SCALE)) & (tops[r] < Float32.inf)
            is_number = is_number & (is_fine | self._is_beyond(r))
            is_far = is_far | (self._is_beyond(r) & (tops[r] > -Float32.inf))
        return cute.arch.vote_all_sync(is_number) & cute.arch.vote_any_sync(is_far)

    def _is_beyond(self, r: int) -> Boolean:
        """As ``_place_shift`` has it."""
        return cute.math.absf(Float32(P_EXPONENT) - self.shift[r]) >= Float32(self.farthest)

    @cute.jit
    def _measure_from_own(self, acc_S: cute.Tensor, tops: tuple, scaled: list):
        """Take the block's maxima ``tops`` from its scores, and make ``offset`` that of what is left."""
        scores, aim = words_of_pairs(acc_S), Float32(self.wary_exponent)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            has_keys = tops[r] > -Float32.inf
            offset = scaled[r] - self.shift[r] + Float32(P_EXPONENT)
            # Float32 may have steps of octaves there. A score of float16 that is less is so by more.
            step = cute.math.absf(self.shift[r]) * Float32(SHIFT_STEP)
            offset = aim if self._is_beyond(r) & (offset + step >= aim) else offset
            offset = cute.arch.fmax(offset if has_keys else -Float32.inf, Float32(LEAST_OFFSET))
            self.offset[r] = pack(offset, offset, Float16)
            top = tops[r] if has_keys else Float32(0.0)
            own = pack(top, top, Float16)
            for j in cutlass.range_constexpr(scores.shape[1]):
                scores[r, j] = subtract_halves(scores[r, j], own)

    @cute.jit
    def change_unit(self):
        before = self.has_risen[0]
        HalfScoresSoftmax.change_unit(self)
        self.has_risen[0] = maximum(before, self.has_risen[0])

    @cute.jit
    def _leave_far_offsets(self):
        if self.has_risen[0] == IS_FAR:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self._place_shift(r, self.shift[r])
