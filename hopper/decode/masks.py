"""Masks of score tiles whose rows are heads of a token."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.mask import TileMask
from hopper.config import WARPGROUP_ROWS


@dataclass(frozen=True)
class RowMask(TileMask):
    """``TileMask`` where rows are heads of a token: ``levels`` are those of the thread's rows."""

    levels: tuple[Int32, ...] = ()

    def level(self, r: int) -> Int32:
        return self.levels[min(r, len(self.levels) - 1)]


@dataclass(frozen=True)
class SwappedMask(RowMask):
    """``RowMask`` of scores (keys, rows) of a thread, whose first key in a block is ``col``."""

    @cute.jit
    def apply(self, scores: cute.Tensor, n_block: Int32):
        """Set the hidden scores of key block ``n_block`` to -inf."""
        for r in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            visible = self._visible(r, n_block)
            begin = self._hidden(r, n_block) if const_expr(self.window.has_left) else Int32(0)
            for n in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                key = n // 2 * WARPGROUP_ROWS + n % 2 * 8
                is_hidden = visible <= key
                if const_expr(self.window.has_left):
                    is_hidden = is_hidden or begin > key
                scores[n, r] = -Float32.inf if is_hidden else scores[n, r]
