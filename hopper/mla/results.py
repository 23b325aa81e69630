"""How the rows of a tile leave: to O where one piece has all of their keys, else to the partial results."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.fast_math import pack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    first_column_of_thread,
    store_2,
)
from cute_kernels.invariant import LoopInvariant
from hopper.decode.results import PartialResults, RowSum
from hopper.decode.rows import HeadRows
from hopper.decode.schedule import TileParts
from hopper.decode.softmax import RowSoftmax
from hopper.mla.config import MlaConfig

OF_A_STORE = 4
"""float32 of a partial result that a thread stores at once."""


@dataclass(frozen=True)
class CtaRows(HeadRows):
    """The rows of a thread, among those of a tile that its CTA has from ``first`` on."""

    first: Int32 | int

    def row(self, r: int) -> Int32:
        return self.first + HeadRows.row(self, r)


@dataclass(frozen=True)
class MlaResults(LoopInvariant):
    """Where O and LSE go, and what lies between the parts of a tile.

    ``parts`` has the partial results of a launch, for ``Combine``; ``piece`` is the number of this CTA's.
    """

    config: MlaConfig
    mO: cute.Tensor
    mLSE: cute.Tensor
    sinks: tuple[cute.Tensor, ...]
    parts: PartialResults
    piece: Int32

    @cute.jit
    def leave_nothing(self, rows: CtaRows):
        """Say that this piece has none of the blocks of a tile which it finds begun, where its part would be."""
        sums = self.parts.sums(self.parts.slot(self.piece, Boolean(False)))
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            if rows.lane % LANES_PER_ROW == 0:
                sums[1, rows.row(r)] = Float32(0.0)

    @cute.jit
    def leave_sums(self, softmax: RowSoftmax, rows: CtaRows, tile: TileParts) -> cute.Tensor:
        """By the scores' warpgroup: the LSE, or the sums of a part. Gives what the thread's rows of O are multiplied
        by."""
        factors = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        factors.fill(1.0)
        is_whole, slot = self.is_whole(tile), self._slot(tile)
        sums = self.parts.sums(slot)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            total = cute.arch.warp_reduction_sum(softmax.row_sum[r], threads_in_group=LANES_PER_ROW)
            of_keys = RowSum(softmax.shift[r], total, softmax.sum_of_rounded(r, total))
            is_first_lane = rows.lane % LANES_PER_ROW == 0
            if rows.exists(r):
                row = rows.row(r)
                if is_whole:
                    row_sum = of_keys.with_sink(self.sinks, rows.tile.place(row)[1])
                    factors[r] = row_sum.inverse(of_keys.shift)
                    if is_first_lane:
                        rows.tile.lse_of(self.mLSE, row)[0] = row_sum.lse()
                elif is_first_lane:
                    store_2(sums, (0, row), of_keys.shift, of_keys.total)
                    sums[2, row] = of_keys.rounded
        return factors

    @cute.jit
    def leave_columns(
        self,
        acc: cute.Tensor,
        part: cutlass.Constexpr[int],
        factors: cute.Tensor,
        rows: CtaRows,
        tile: TileParts,
    ):
        """By each warpgroup: its columns of the thread's rows, of a part of V, multiplied by ``factors``."""
        if self.is_whole(tile):
            values, first = as_rows(acc), self._first_column(part, rows)
            for r in cutlass.range_constexpr(self.config.rows_per_thread):
                if rows.exists(r):
                    factor, target = factors[r], rows.tile.of(self.mO, rows.row(r))
                    words = cute.recast_tensor(target, Int32)
                    for j in cutlass.range_constexpr(self.config.parts[part] // COLUMNS_PER_GROUP):
                        column = first + j * COLUMNS_PER_GROUP
                        if column < target.shape[0]:
                            low, high = values[r, (0, j)] * factor, values[r, (1, j)] * factor
                            words[column // 2] = pack(low, high, self.mO.element_type)
        else:
            self.leave_partial(acc, part, rows, tile)

    @cute.jit
    def leave_partial(self, acc: cute.Tensor, part: cutlass.Constexpr[int], rows: CtaRows, tile: TileParts):
        """``leave_columns`` of a tile that other pieces have keys of."""
        if const_expr(self.config.query_box == 0):
            self._leave_pairs(acc, part, rows, tile)
        else:
            self._leave_fours(acc, part, rows, tile)

    @cute.jit
    def _leave_pairs(self, acc: cute.Tensor, part: cutlass.Constexpr[int], rows: CtaRows, tile: TileParts):
        """As they lie: to swap them would spill a register where threads copy Q."""
        o, values, first = self.parts.rows(self._slot(tile)), as_rows(acc), self._first_column(part, rows)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            if rows.exists(r):
                for j in cutlass.range_constexpr(self.config.parts[part] // COLUMNS_PER_GROUP):
                    place = first + j * COLUMNS_PER_GROUP, rows.row(r)
                    store_2(o, place, values[r, (0, j)], values[r, (1, j)])

    @cute.jit
    def _leave_fours(self, acc: cute.Tensor, part: cutlass.Constexpr[int], rows: CtaRows, tile: TileParts):
        """By 16 bytes, of which lanes swap pairs."""
        o, values = self.parts.rows(self._slot(tile)), as_rows(acc)
        own, is_odd = rows.lane % LANES_PER_ROW, rows.lane % 2 == 1
        first = sum(self.config.parts[:part]) + own % 2 * COLUMNS_PER_GROUP + own // 2 * OF_A_STORE
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            is_row = rows.exists(r)
            for j in cutlass.range_constexpr(0, self.config.parts[part] // COLUMNS_PER_GROUP, 2):
                four = swap_pairs([values[r, (i % 2, j + i // 2)] for i in range(OF_A_STORE)], is_odd)
                if is_row:
                    store_4(o, (first + COLUMNS_PER_GROUP * j, rows.row(r)), four)

    def _first_column(self, part: int, rows: CtaRows) -> Int32:
        """Of the thread's columns of a part of V."""
        return sum(self.config.parts[:part]) + first_column_of_thread(rows.lane)

    @cute.jit
    def is_whole(self, tile: TileParts) -> Boolean:
        """Whether this piece has all keys of a tile."""
        return tile.begin(self.piece) == 0 and tile.begin(self.piece + 1) == tile.blocks

    @cute.jit
    def _slot(self, tile: TileParts) -> Int32:
        """Where the part of this piece is left."""
        return self.parts.slot(self.piece, tile.begin(self.piece) == 0)


@cute.jit
def swap_pairs(pairs: list, is_odd: Boolean) -> list:
    """Two pairs of neighbouring columns, of neighbouring groups, for four neighbouring columns of one group: an even
    lane gives its second pair for the first of the lane behind it, which gives that one."""
    given = [pairs[i] if is_odd else pairs[2 + i] for i in range(2)]
    got = [cute.arch.shuffle_sync_bfly(x, offset=1) for x in given]
    low = [got[i] if is_odd else pairs[i] for i in range(2)]
    high = [pairs[2 + i] if is_odd else got[i] for i in range(2)]
    return low + high


def store_4(tensor: cute.Tensor, place: tuple, numbers: list) -> None:
    """Elements of a tensor in global memory, from one at a multiple of 16 bytes on."""
    address = (tensor.iterator + cute.crd2idx(place, tensor.layout)).toint()
    cute.arch.inline_ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *numbers]
    )
