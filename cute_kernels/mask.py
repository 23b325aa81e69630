"""Masks of a score tile. Presence is decided when tracing, bounds when running."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from cute_kernels.fast_math import shift_left
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    COLUMNS_PER_PAIR,
    ROW_STRIDE,
    ROWS_PER_THREAD,
    as_rows,
    words_of_pairs,
)
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.visible import first_key, keys_end
from cute_kernels.window import Window

LOWER_HALF, UPPER_HALF = 0xFFFF, -0x10000
GROUPS_PER_WORD = 16
"""Of columns, two of which a thread holds of a row, so that 32 bits stand for all that it holds of them."""

MINUS_INF_ABOVE, MINUS_INF_BELOW, MINUS_INFS = (0xFC00 << 16) - (1 << 32), 0xFC00, 0xFC00FC00 - (1 << 32)
"""float16 -inf in the upper half of a signed word, in the lower one, and in both."""


@dataclass(frozen=True)
class TileMask(LoopInvariant):
    """Which keys the two rows of a thread may see: those of the sequence that lie in ``window``.

    ``row`` is the query index of the thread's first row, ``col`` the offset of its first column in a key block.
    """

    window: Window
    tile_n: int
    seqlens: SeqlenInfo
    row: Int32
    col: Int32

    @cute.jit
    def apply(self, acc_S: cute.Tensor, n_block: Int32):
        """Set the hidden scores of key block ``n_block`` to -inf."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            visible = self._visible(r, n_block)
            if const_expr(acc_S.element_type is Float16):
                _hide_halves(words_of_pairs(acc_S), r, visible)
                if const_expr(self.window.has_left):
                    _hide_halves_before(words_of_pairs(acc_S), r, self._hidden(r, n_block))
            elif const_expr(self.window.has_left):
                _hide_outside(as_rows(acc_S), r, self._hidden(r, n_block), visible)
            else:
                _hide(as_rows(acc_S), r, visible)

    @cute.jit
    def _visible(self, r: cutlass.Constexpr[int], n_block: Int32) -> Int32:
        """Columns of the block that row ``r`` may see, from the thread's first."""
        column = n_block * self.tile_n + self.col
        visible = self.seqlens.seqlen_k - column
        if const_expr(self.window.has_right):
            keys_of_row = keys_end(self.window, self.level(r) + 1)
            visible = cutlass.min(visible, keys_of_row - column)
        return visible

    @cute.jit
    def _hidden(self, r: cutlass.Constexpr[int], n_block: Int32) -> Int32:
        """Columns of the block before the first key that row ``r`` sees, from the thread's first."""
        return first_key(self.window, self.level(r)) - (n_block * self.tile_n + self.col)

    def level(self, r: int) -> Int32:
        """The key that row ``r`` is level with."""
        return self.row + r * ROW_STRIDE + self.seqlens.seqlen_k - self.seqlens.seqlen_q


@cute.jit
def _hide(scores: cute.Tensor, r: cutlass.Constexpr[int], visible: Int32):
    """Hide the columns from ``visible`` on."""
    for j in cutlass.range_constexpr(scores.shape[1][1]):
        for e in cutlass.range_constexpr(scores.shape[1][0]):
            hidden = visible <= COLUMNS_PER_GROUP * j + e
            scores[r, (e, j)] = -Float32.inf if hidden else scores[r, (e, j)]


@cute.jit
def _hide_outside(scores: cute.Tensor, r: cutlass.Constexpr[int], begin: Int32, visible: Int32):
    """Hide the columns before ``begin`` and those from ``visible`` on."""
    for first in cutlass.range_constexpr(0, scores.shape[1][1], GROUPS_PER_WORD):
        at = COLUMNS_PER_GROUP * first
        _hide_by_bits(scores, r, first, bits_from(begin - at) & ~bits_from(visible - at))


def bits_from(column: Int32) -> Int32:
    """A bit for each of the thread's next 32 columns, set for those from ``column`` on."""
    column = cutlass.max(column, 0)
    pairs = column // COLUMNS_PER_GROUP * COLUMNS_PER_PAIR
    number = pairs + cutlass.min(column % COLUMNS_PER_GROUP, COLUMNS_PER_PAIR)
    return shift_left(Int32(-1), number)


@cute.jit
def _hide_by_bits(scores: cute.Tensor, r: cutlass.Constexpr[int], first: cutlass.Constexpr[int], bits: Int32):
    """Hide those of the 32 columns from group ``first`` on whose bit is not set.

    Tests of single bits become predicates seven at a time (R2P), where comparing columns takes one instruction each.
    """
    for j in cutlass.range_constexpr(first, min(first + GROUPS_PER_WORD, scores.shape[1][1])):
        for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
            bit = COLUMNS_PER_PAIR * (j - first) + e
            is_visible = (bits & Int32(1 << bit if bit < 31 else -(1 << 31))) != 0
            scores[r, (e, j)] = scores[r, (e, j)] if is_visible else -Float32.inf


@cute.jit
def _hide_halves(words: cute.Tensor, r: cutlass.Constexpr[int], visible: Int32):
    """The columns of a pair are neighbours, of which the second is hidden if the first is."""
    for j in cutlass.range_constexpr(words.shape[1]):
        word = words[r, j]
        left = (word & LOWER_HALF) | MINUS_INF_ABOVE
        word = Int32(left) if visible <= COLUMNS_PER_GROUP * j + 1 else word
        words[r, j] = Int32(MINUS_INFS) if visible <= COLUMNS_PER_GROUP * j else word


@cute.jit
def _hide_halves_before(words: cute.Tensor, r: cutlass.Constexpr[int], begin: Int32):
    """Hide the columns before ``begin``: of a pair the first one if the second is."""
    for j in cutlass.range_constexpr(words.shape[1]):
        word = words[r, j]
        right = (word & UPPER_HALF) | MINUS_INF_BELOW
        word = Int32(right) if begin > COLUMNS_PER_GROUP * j else word
        words[r, j] = Int32(MINUS_INFS) if begin > COLUMNS_PER_GROUP * j + 1 else word
