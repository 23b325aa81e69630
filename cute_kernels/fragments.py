"""Views of a WGMMA accumulator fragment, all without moving a register.

One thread of a warpgroup holds, of a 64 x N float32 accumulator, two rows (lane // 4 and 8 below it) and in each
row the column pairs 8 j + 2 (lane % 4) + {0, 1}. CuTe gives that fragment the shape ((2, 2, N / 8), 1, 1): column in
the pair, row, j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_kernels.fast_math import pack

ROWS_PER_THREAD = 2
LANES_PER_ROW = 4
ROWS_PER_WARP = 16
COLUMNS_PER_PAIR = 2
COLUMNS_PER_QUAD = 4

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
def store_rows(
    values: cute.Tensor,
    target: cute.Tensor,
    row: Int32,
    lane: Int32,
    may_lead: cutlass.Constexpr[bool] = False,
):
    """A value for each of the thread's rows, ``row`` and 8 below it, to a vector that may end before them, or with
    ``may_lead`` begin behind them."""
    if lane % LANES_PER_ROW == 0:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            is_there = row + r * ROW_STRIDE < target.shape[0]
            if cutlass.const_expr(may_lead):
                is_there = is_there and row + r * ROW_STRIDE >= 0
            if is_there:
                target[row + r * ROW_STRIDE] = values[r]


@cute.jit
def store_quads(acc: cute.Tensor, target: cute.Tensor, row: Int32, lane: Int32):
    """Round the thread's rows, ``row`` and 8 below it, into a 16-bit matrix that may end before them, or before their
    last columns, at a multiple of 16.

    The accumulator has its columns in the order of ``pair_of_quads``. Neighbouring lanes exchange quads of 32 columns,
    so that each has eight neighbours and four lanes store 64 bytes of a row together.
    """
    rows = as_rows(acc)
    is_odd = lane % 2 == 1
    column = lane % LANES_PER_ROW // 2 * COLUMNS_PER_GROUP + lane % 2 * (2 * COLUMNS_PER_GROUP)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        octets = [
            _exchange_quads(
                [pack(rows[r, (0, j + i)], rows[r, (1, j + i)], target.element_type) for i in range(4)],
                is_odd,
            )
            for j in range(0, rows.shape[1][1], 4)
        ]
        _store_octets_of_row(octets, target, row + r * ROW_STRIDE, column)


@cute.jit
def _exchange_quads(words: list, is_odd: Boolean) -> list:
    """Of two quads, two words each, an even lane keeps the first and an odd one the second; what comes back are eight
    neighbouring columns."""
    sent = [words[i] if is_odd else words[i + 2] for i in range(2)]
    kept = [words[i + 2] if is_odd else words[i] for i in range(2)]
    come = [cute.arch.shuffle_sync_bfly(word, offset=1) for word in sent]
    first = [come[i] if is_odd else kept[i] for i in range(2)]
    return first + [kept[i] if is_odd else come[i] for i in range(2)]


@cute.jit
def _store_octets_of_row(
    octets: list,
    target: cute.Tensor,
    row: Int32,
    column: Int32,
    may_lead: cutlass.Constexpr[bool] = False,
):
    """What ``store_quads`` and ``store_octets`` end with: eight columns from ``column`` on of each 32, four words, to a
    row and columns that there may not be; ``may_lead`` is that of ``store_rows``."""
    is_there = row < target.shape[0]
    if cutlass.const_expr(may_lead):
        is_there = is_there and row >= 0
    if is_there:
        start = target[row, None].iterator + column
        for j in cutlass.range_constexpr(len(octets)):
            first = j * 4 * COLUMNS_PER_GROUP
            if first + column < target.shape[1]:
                _store_four_words(start.toint(), octets[j], first * target.element_type.width // 8)


def _store_four_words(address: Int64, words: list, offset: int) -> None:
    """To global memory, ``offset`` bytes behind an address."""
    cute.arch.inline_ptx(
        f"st.global.v4.b32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


@cute.jit
def store_octets(
    acc: cute.Tensor,
    target: cute.Tensor,
    row: Int32,
    lane: Int32,
    may_lead: cutlass.Constexpr[bool] = False,
):
    """``store_quads`` of an accumulator in the order of the tensor cores, which the head of this file has: the four
    lanes of a row exchange pairs of 32 columns, so that each has eight neighbours. Rows end at a multiple of 8;
    ``may_lead`` is that of ``store_rows``."""
    rows = as_rows(acc)
    is_odd, is_upper = lane % 2 == 1, lane % LANES_PER_ROW >= 2
    column = lane % LANES_PER_ROW * COLUMNS_PER_GROUP
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        octets = [
            _transpose_words(
                [pack(rows[r, (0, j + i)], rows[r, (1, j + i)], target.element_type) for i in range(4)],
                is_odd,
                is_upper,
            )
            for j in range(0, rows.shape[1][1], 4)
        ]
        _store_octets_of_row(octets, target, row + r * ROW_STRIDE, column, may_lead)


@cute.jit
def _transpose_words(words: list, is_odd: Boolean, is_upper: Boolean) -> list:
    """Word i of lane l goes to lane i as its word l, among four lanes: the 4 x 4 words are transposed in two steps,
    between neighbours and then between pairs of them, and of each step a lane sends half of its words."""
    for is_second, offset, pairs in ((is_odd, 1, ((0, 1), (2, 3))), (is_upper, 2, ((0, 2), (1, 3)))):
        sent = [words[i] if is_second else words[j] for i, j in pairs]
        kept = [words[j] if is_second else words[i] for i, j in pairs]
        come = [cute.arch.shuffle_sync_bfly(word, offset=offset) for word in sent]
        words = list(words)
        for n, (i, j) in enumerate(pairs):
            words[i] = come[n] if is_second else kept[n]
            words[j] = kept[n] if is_second else come[n]
    return words


def pair_of_quads(j: int, lane: Int32) -> Int32:
    """Number of the pair of columns that a thread holds as pair ``j``, where an accumulator has columns such that a
    thread has four neighbours: of each 16 its first two in the first 8, the others in the second."""
    return j // 2 * COLUMNS_PER_GROUP + lane % LANES_PER_ROW * 2 + j % 2


@cute.jit
def store_row_as_operand_a(operand: cute.Tensor, acc: cute.Tensor, r: cutlass.Constexpr[int]):
    """Round row ``r`` of an accumulator into the register A operand of the next 16-bit WGMMA (k = 16).

    The two fragments hold the same elements in the same order, so a pair of columns becomes one 32-bit word.
    """
    words = cute.recast_tensor(operand, Int32)
    rows = as_rows(acc)
    for j in cutlass.range_constexpr(rows.shape[1][1]):
        words[r + rows.shape[0] * j] = pack(rows[r, (0, j)], rows[r, (1, j)], operand.element_type)


def store_2(tensor: cute.Tensor, place: tuple, low: Float32, high: Float32) -> None:
    """An element of a tensor in global memory, at a multiple of 8 bytes, and the one behind it."""
    address = (tensor.iterator + cute.crd2idx(place, tensor.layout)).toint()
    cute.arch.inline_ptx("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, low, high])
