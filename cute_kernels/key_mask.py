"""Masks of a transposed score tile, whose rows are keys and whose columns are queries."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fragments import COLUMNS_PER_GROUP, ROW_STRIDE, ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.visible import first_query, queries_end
from cute_kernels.window import Window


@dataclass(frozen=True)
class KeyMask(LoopInvariant):
    """Which queries may see the two keys of a thread: those in whose ``window`` the key lies, if it is of the sequence.

    ``key`` is the index of the thread's first key, ``col`` the offset of its first column in a query tile.
    """

    window: Window
    tile_m: int
    seqlens: SeqlenInfo
    key: Int32
    col: Int32

    @cute.jit
    def bits(self, r: cutlass.Constexpr[int]) -> Int32:
        """All bits set if the thread's key number ``r`` is there, and none if it is past the end."""
        return Int32(-1) if self.key + r * ROW_STRIDE < self.seqlens.seqlen_k else Int32(0)

    @cute.jit
    def apply(self, acc_S: cute.Tensor, m_block: Int32):
        """Set the hidden scores of query tile ``m_block`` to -inf."""
        scores = as_rows(acc_S)
        column = m_block * self.tile_m + self.col
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            key = self.key + r * ROW_STRIDE
            # The first query of the tile that sees the key, as an offset; past the tile if none does.
            first_visible = Int32(self.tile_m) if key >= self.seqlens.seqlen_k else Int32(-1)
            if const_expr(self.window.has_right):
                first_visible = cutlass.max(
                    first_visible, first_query(self.window, key, self.seqlens) - column
                )
            if const_expr(self.window.has_left):
                end = queries_end(self.window, key, self.seqlens)
                _hide_outside(scores, r, first_visible, end - column)
            else:
                _hide_before(scores, r, first_visible)


@cute.jit
def _hide_before(scores: cute.Tensor, r: cutlass.Constexpr[int], first: Int32):
    for j in cutlass.range_constexpr(scores.shape[1][1]):
        for e in cutlass.range_constexpr(scores.shape[1][0]):
            hidden = COLUMNS_PER_GROUP * j + e < first
            scores[r, (e, j)] = -Float32.inf if hidden else scores[r, (e, j)]


@cute.jit
def _hide_outside(scores: cute.Tensor, r: cutlass.Constexpr[int], first: Int32, end: Int32):
    """Hide the columns before ``first`` and those from ``end`` on."""
    for j in cutlass.range_constexpr(scores.shape[1][1]):
        for e in cutlass.range_constexpr(scores.shape[1][0]):
            column = COLUMNS_PER_GROUP * j + e
            hidden = column < first or column >= end
            scores[r, (e, j)] = -Float32.inf if hidden else scores[r, (e, j)]
