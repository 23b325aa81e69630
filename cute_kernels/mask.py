"""Masks of a score tile. Presence is decided when tracing, bounds when running."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fragments import COLUMNS_PER_GROUP, ROW_STRIDE, ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant


@dataclass(frozen=True)
class TileMask(LoopInvariant):
    """Which keys the two rows of a thread may see: those below ``seqlen_k``, and with ``causal`` those not after
    the row when the last query is aligned with the last key.

    ``row`` is the query index of the thread's first row, ``col`` the offset of its first column in a key block.
    """

    causal: bool
    tile_n: int
    seqlen_q: Int32
    seqlen_k: Int32
    row: Int32
    col: Int32

    @cute.jit
    def apply(self, acc_S: cute.Tensor, n_block: Int32):
        """Set the hidden scores of key block ``n_block`` to -inf."""
        scores = as_rows(acc_S)
        first_key = n_block * self.tile_n + self.col
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            visible = self.seqlen_k - first_key
            if const_expr(self.causal):
                keys_of_row = self.row + r * ROW_STRIDE + 1 + self.seqlen_k - self.seqlen_q
                visible = cutlass.min(visible, keys_of_row - first_key)
            for j in cutlass.range_constexpr(scores.shape[1][1]):
                for e in cutlass.range_constexpr(scores.shape[1][0]):
                    hidden = visible <= COLUMNS_PER_GROUP * j + e
                    scores[r, (e, j)] = -Float32.inf if hidden else scores[r, (e, j)]
