"""P from the accumulator of Q K^T to the register A operand of an FP8 WGMMA, all without moving a register."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.fast_math import join, pack_e4m3, pack_e4m3_of_float16
from cute_kernels.fragments import ROWS_PER_THREAD, as_rows
from hopper.forward.fp8.exp2 import is_polynomial


@cute.jit
def store_row_as_operand_a_e4m3(
    operand: cute.Tensor,
    acc: cute.Tensor,
    r: cutlass.Constexpr[int],
    polynomial_pairs: cutlass.Constexpr[int],
):
    """``store_groups_as_operand_a_e4m3`` of a whole row."""
    groups = tuple(range(as_rows(acc).shape[1][1]))
    store_groups_as_operand_a_e4m3(operand, acc, r, groups, polynomial_pairs)


@cute.jit
def store_groups_as_operand_a_e4m3(
    operand: cute.Tensor,
    acc: cute.Tensor,
    r: cutlass.Constexpr[int],
    groups: cutlass.Constexpr[tuple[int, ...]],
    polynomial_pairs: cutlass.Constexpr[int],
):
    """Round neighbouring groups of 8 columns of row ``r`` into the register A operand of the next FP8 WGMMA (k = 32).

    A thread's four bytes of a word should be the keys 4 t .. 4 t + 3 of 16, with t its lane in the row, but it
    holds the keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t. Those are stored as they are; V comes with its keys in the
    same order within each 32, so that no register has to change hands. Pairs that ``is_polynomial`` picks
    lie as two float16 in the place of the first.
    """
    words = cute.recast_tensor(operand, Int32)
    rows = as_rows(acc)
    packed = as_rows(cute.recast_tensor(acc, Int32))
    for word in cutlass.range_constexpr(groups[0] // 2, (groups[-1] + 1) // 2):
        halves = []
        for j in cutlass.range_constexpr(2 * word, 2 * word + 2):
            if const_expr(is_polynomial(j, polynomial_pairs)):
                halves.append(pack_e4m3_of_float16(packed[r, (0, j)]))
            else:
                halves.append(pack_e4m3(rows[r, (0, j)], rows[r, (1, j)]))
        words[r + rows.shape[0] * word] = join(*halves)


@cute.jit
def store_words_as_operand_a_e4m3(operand: cute.Tensor, pairs: cute.Tensor, r: cutlass.Constexpr[int]):
    """``store_row_as_operand_a_e4m3`` of pairs of float16 in words, (row, j)."""
    words = cute.recast_tensor(operand, Int32)
    for word in cutlass.range_constexpr(pairs.shape[1] // 2):
        halves = [pack_e4m3_of_float16(pairs[r, 2 * word + i]) for i in range(2)]
        words[r + ROWS_PER_THREAD * word] = join(*halves)
