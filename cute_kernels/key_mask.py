"""Masks of a transposed score tile, whose rows are keys and whose columns are queries."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fragments import COLUMNS_PER_GROUP, ROW_STRIDE, ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo


@dataclass(frozen=True)
class KeyMask(LoopInvariant):
    """Which queries may see the two keys of a thread: all if the key is of the sequence, and with ``causal`` those
    not before it when the last query is aligned with the last key.

    ``key`` is the index of the thread's first key, ``col`` the offset of its first column in a query tile.
    """

    causal: bool
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
        first_query = m_block * self.tile_m + self.col
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            key = self.key + r * ROW_STRIDE
            # The first query of the tile that sees the key, as an offset; past the tile if none does.
            first_visible = Int32(self.tile_m) if key >= self.seqlens.seqlen_k else Int32(-1)
            if const_expr(self.causal):
                first_visible = cutlass.max(
                    first_visible, key - self.seqlens.seqlen_k + self.seqlens.seqlen_q - first_query
                )
            for j in cutlass.range_constexpr(scores.shape[1][1]):
                for e in cutlass.range_constexpr(scores.shape[1][0]):
                    hidden = COLUMNS_PER_GROUP * j + e < first_visible
                    scores[r, (e, j)] = -Float32.inf if hidden else scores[r, (e, j)]
