"""A maximum that may lag behind: for a softmax that stands between products and has little to hide behind."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.fast_math import max_over_lanes, maximum_of, multiply_rounded
from cute_kernels.fragments import LANES_PER_ROW, ROWS_PER_THREAD, as_rows
from cute_kernels.softmax import LEAST, OnlineSoftmax

LAG = 8.0
"""Octaves by which a maximum may be above what exponents are measured from: P is at most 2^8, which float16 holds."""


class Lagging(OnlineSoftmax):
    """Mixin, to be put before a ``RoundingSoftmax``, with sinks or without: exponents are measured from an earlier
    maximum until some row of the warp has one ``LAG`` octaves above it. Till then no lane need know of another one's
    scores, and O is not shrunk. (FlashAttention-4 leaves such steps out as well.)

    ``row_max`` is the largest score that this thread has seen of a row, or that others had when ``shift`` moved. The
    largest P is then no longer 1, so that what is divided by takes it as it is rounded, in bfloat16 too.
    """

    rows = ROWS_PER_THREAD

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        scores = as_rows(acc_S)
        has_moved = Boolean(True)
        if const_expr(not is_first):
            has_moved = Boolean(False)
            for r in cutlass.range_constexpr(self.rows):
                self.row_max[r] = maximum_of(scores[r, None], self.row_max[r])
                ahead = self.row_max[r] * self.scale_log2 - self.shift[r]
                has_moved = has_moved or ahead > Float32(LAG)
                self.row_scale[r] = Float32(1.0)
            has_moved = cute.arch.vote_any_sync(has_moved)
        if has_moved:
            for r in cutlass.range_constexpr(self.rows):
                if const_expr(is_first):
                    self.row_max[r] = maximum_of(scores[r, None], -Float32.inf)
                self.row_max[r] = max_over_lanes(self.row_max[r], LANES_PER_ROW)
                shift = cute.arch.fmax(multiply_rounded(self.row_max[r], self.scale_log2), Float32(LEAST))
                self._move_shift(r, shift, is_first)

    def finalize(self, inverse_sum: cute.Tensor, lse: cute.Tensor, head_kv: Int32, batch: Int32) -> None:
        for r in range(self.rows):
            self.join_maxima(r)
        super().finalize(inverse_sum, lse, head_kv, batch)

    def join_maxima(self, r: int) -> None:
        """Of a row, so that all its lanes know the largest. By all lanes of a warp, whether their rows have keys or
        not: a shuffle waits for each."""
        self.row_max[r] = max_over_lanes(self.row_max[r], LANES_PER_ROW)
