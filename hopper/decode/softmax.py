"""Online softmax of the rows that a thread has of a decode tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from cute_kernels.fast_math import max_over_lanes, maximum_of, maximum_or_nan, multiply_rounded
from cute_kernels.fragments import LANES_PER_ROW, as_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.score_tile import SoftCap
from cute_kernels.softmax import LEAST, SMALLEST_SCALE, RoundingSoftmax, scale_row


@cute.jit
def scale_of_scores(scale: Float32) -> Float32:
    """A scale that descales are part of, and not 0, as a hidden score is -inf times it. NaN where it is negative, which
    would turn maxima into minima."""
    least = maximum_or_nan(scale, Float32(SMALLEST_SCALE))
    return least if scale >= Float32(0.0) else Float32.nan


class TileSoftCap(LoopInvariant):
    """``SoftCap`` whose ``factor`` may differ from tile to tile, with the descale of its K/V head."""

    def __init__(self, is_precise: bool):
        self.is_precise, self.factor = is_precise, cute.make_rmem_tensor(1, Float32)

    def apply(self, acc_S: cute.Tensor, n_block: Int32) -> None:
        SoftCap(self.factor[0], self.is_precise).apply(acc_S, n_block)


class RowSoftmax(RoundingSoftmax):
    """``OnlineSoftmax`` of the first ``rows`` rows of a thread, one or both. What is divided by takes the largest P as
    it is rounded in float16, and as it is in bfloat16, where that error is below others."""

    def __init__(self, scale_log2: Float32, dtype: type[cutlass.Numeric], rows: int):
        self._scale_log2 = cute.make_rmem_tensor(1, Float32)
        super().__init__(scale_log2, dtype)
        self.rows = rows

    @property
    def scale_log2(self) -> Float32:
        """May differ from tile to tile, with the descale of its K/V head."""
        return self._scale_log2[0]

    @scale_log2.setter
    def scale_log2(self, scale_log2: Float32):
        self._scale_log2[0] = scale_log2

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        scores = as_rows(acc_S)
        for r in cutlass.range_constexpr(self.rows):
            row_max = max_over_lanes(maximum_of(scores[r, None], self.row_max[r]), LANES_PER_ROW)
            shift = cute.arch.fmax(multiply_rounded(row_max, self.scale_log2), Float32(LEAST))
            self._move_shift(r, shift, is_first)
            self.row_max[r] = row_max

    @cute.jit
    def rescale_if_needed(self, acc_O: cute.Tensor):
        has_new_max = self.row_scale[0] != Float32(1.0)
        if const_expr(self.rows == 2):
            has_new_max = has_new_max or self.row_scale[1] != Float32(1.0)
        if cute.arch.vote_any_sync(has_new_max):
            for r in cutlass.range_constexpr(self.rows):
                scale_row(acc_O, r, self.row_scale[r])

    def sum_of_rounded(self, r: int, total: Float32) -> Float32:
        return self._sum_of_rounded(r, total) if self.dtype is Float16 else total
