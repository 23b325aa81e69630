"""The softmax of scores in float16 of e4m3 tensors from elsewhere, of which nothing is promised."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_kernels.fragments import ROWS_PER_THREAD
from hopper.forward.fp8.softmax.half import HalfScoresSoftmax


class HalfScoresOfAnyCodes(HalfScoresSoftmax):
    """``HalfScoresSoftmax`` on e4m3 tensors from elsewhere, of which nothing is promised.

    P of a first block comes from float32, as after every maximum that a block did not keep: a row that sees a single
    key then has its value exactly, where float16 leaves an error of up to a per cent. It shows in such tensors alone,
    since their values were not rounded by us.
    """

    wary_exponent = 4
    farthest = 256.0

    def _lower_maxima_of_flat_tails(self, acc_S: cute.Tensor, n_block: Int32):
        """Nothing: a single key that is visited first has a P of 2^6 here, so that a flat tail has some down to 15
        octaves below it. To look for one cost head_dim 256 its lead where scores are peaky."""

    @cute.jit
    def take_first_maxima(self, operand: cute.Tensor, acc_S: cute.Tensor):
        """P of a tile's first block, both rows by their maxima."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.take_maximum(acc_S, r, Boolean(True))
            self.store_P(operand, acc_S, r)
