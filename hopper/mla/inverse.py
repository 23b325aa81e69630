"""What O is multiplied by in the end, from the first consumer warpgroup to the second."""

import cutlass
import cutlass.cute as cute

from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE, ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from hopper.wide.exchange import Exchange


class InverseSums(LoopInvariant):
    """A factor of each row, told with P of the last block: float32 (64,) in shared memory."""

    def __init__(self, smem: cute.Tensor, exchange: Exchange):
        self.smem, self.lane, self.row = smem, exchange.lane, exchange.row

    @cute.jit
    def write(self, factors: cute.Tensor):
        """By the first warpgroup, when the second has READ what was there."""
        if self.lane % LANES_PER_ROW == 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                self.smem[self.row + r * ROW_STRIDE] = factors[r]

    @cute.jit
    def read(self, factors: cute.Tensor):
        """By the second, after ``wait(WRITTEN)``."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            factors[r] = self.smem[self.row + r * ROW_STRIDE]
