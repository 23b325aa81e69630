"""The online softmax in as few registers as it needs."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cute_kernels.fast_math import max_over_lanes, maximum_of, multiply_rounded
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, as_rows
from cute_kernels.softmax import OnlineSoftmax, WithSinks


class ShiftSoftmax(OnlineSoftmax):
    """Keeps no maximum beside the shift.

    The scale is positive, so that rounded products with it rise with the scores: the greatest of the blocks' shifts is
    the shift of the greatest score, to the bit. It never falls below ``LEAST``, from which it starts.
    """

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Take a block's scores into the running shift; sets ``row_scale`` and shrinks ``row_sum``."""
        assert const_expr(not is_first)
        scores = as_rows(acc_S)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            block_max = max_over_lanes(maximum_of(scores[r, None], -Float32.inf), LANES_PER_ROW)
            shift = cute.arch.fmax(multiply_rounded(block_max, self.scale_log2), self.shift[r])
            self._move_shift(r, shift, is_first)


class ShiftSinkSoftmax(WithSinks, ShiftSoftmax):
    """``ShiftSoftmax`` with sinks."""
