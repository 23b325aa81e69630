"""Views of a WGMMA accumulator fragment, all without moving a register.

One thread of a warpgroup holds, of a 64 x N float32 accumulator, two rows (lane // 4 and 8 below it) and in each
row the column pairs 8 j + 2 (lane % 4) + {0, 1}. CuTe gives that fragment the shape ((2, 2, N / 8), 1, 1): column in
the pair, row, j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.fast_math import pack

ROWS_PER_THREAD = 2
LANES_PER_ROW = 4
ROWS_PER_WARP = 16
COLUMNS_PER_PAIR = 2

ROW_STRIDE = 8
"""Distance between the two rows that one thread holds."""

COLUMNS_PER_GROUP = 8
"""Columns after which the pattern of pairs repeats (j above)."""


def first_row_of_thread(warp_in_group: Int32, lane: Int32) -> Int32:
    """Row, of the warpgroup's 64, of a thread's first element."""
    return warp_in_group * ROWS_PER_WARP + lane // LANES_PER_ROW


def first_column_of_thread(lane: Int32) -> Int32:
    """Column of a thread's first element."""
    return lane % LANES_PER_ROW * COLUMNS_PER_PAIR


def as_rows(acc: cute.Tensor) -> cute.Tensor:
    """The fragment as (row, (pair, j)): shape (2, (2, N / 8))."""
    pair, row, groups = acc.layout.shape[0]
    return cute.make_tensor(
        acc.iterator, cute.make_layout((row, (pair, groups)), stride=(pair, (1, pair * row)))
    )


def words_of_pairs(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator of float16 as words of two columns, (row, j): shape (2, N / 8)."""
    words = cute.recast_tensor(acc, Int32)
    row, groups = acc.layout.shape[0][1:]
    return cute.make_tensor(words.iterator, cute.make_layout((row, groups), stride=(1, row)))


@cute.jit
def store_rows(values: cute.Tensor, target: cute.Tensor, row: Int32, lane: Int32):
    """A value for each of the thread's rows, ``row`` and 8 below it, to a vector that may end before them."""
    if lane % LANES_PER_ROW == 0:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if row + r * ROW_STRIDE < target.shape[0]:
                target[row + r * ROW_STRIDE] = values[r]


@cute.jit
def store_row_as_operand_a(operand: cute.Tensor, acc: cute.Tensor, r: cutlass.Constexpr[int]):
    """Round row ``r`` of an accumulator into the register A operand of the next 16-bit WGMMA (k = 16).

    The two fragments hold the same elements in the same order, so a pair of columns becomes one 32-bit word.
    """
    words = cute.recast_tensor(operand, Int32)
    rows = as_rows(acc)
    for j in cutlass.range_constexpr(rows.shape[1][1]):
        words[r + rows.shape[0] * j] = pack(rows[r, (0, j)], rows[r, (1, j)], operand.element_type)
