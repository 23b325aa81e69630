"""Tiles of the query heads of a K/V head together: where queries are few, their heads are rows of one tile.

Row i of a warpgroup is query i // group of head i % group. (FlashAttention-2 packs one query so, FlashAttention-3 any
number; TMA brings such rows as a box of ``group`` heads by 64 // ``group`` queries.) Where heads do not divide the 64
rows the last ones are nobody's: what they hold is anything, goes nowhere, and counts in no other row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.fragments import (
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROW_STRIDE,
    ROWS_PER_THREAD,
    as_rows,
    pack,
    pair_of_quads,
)
from cute_kernels.mask import TileMask
from cute_kernels.seqlen import LedRows, PackedRows, SeqlenInfo
from cute_kernels.window import Window
from hopper.config import WARPGROUP_ROWS
from hopper.forward.batch import DenseBatch, PackedBatch
from hopper.forward.store import DenseTmaStore
from hopper.group_rows import used_rows
from hopper.tiles import RAGGED_ROWS, TmaOperand

NOBODYS_QUERY = 2**29
"""Behind all queries."""


def place_of_row(row: Int32, group: int) -> tuple[Int32, Int32]:
    """Of a row of a sequence's tiles the query, and the head of its group; of a row that is nobody's a query from
    ``NOBODYS_QUERY`` on."""
    if WARPGROUP_ROWS % group == 0:
        return row // group, row % group
    warpgroups, own = row // WARPGROUP_ROWS, row % WARPGROUP_ROWS
    query = warpgroups * (WARPGROUP_ROWS // group) + own // group
    return query + own // used_rows(group) * NOBODYS_QUERY, own % group


def first_rows(layout: cute.Layout, rows: int) -> cute.Layout:
    """The first ``rows`` of a layout of rows, columns and stages, in which rows are equally far from each other."""
    modes = [cute.get(layout, mode=[i]) for i in range(cute.rank(layout))]
    modes[0] = cute.composition(modes[0], cute.make_layout(rows))
    shape, stride = (tuple(getattr(each, name) for each in modes) for name in ("shape", "stride"))
    return cute.make_layout(shape, stride=stride)


@dataclass(frozen=True)
class GroupedOperand(TmaOperand):
    """``gmem`` is ((heads, rows), columns, batch), or of packed sequences ((heads, rows), columns, ...) with the last
    two modes of a ``ragged_view``. What others call a head is a group of ``group`` heads here."""

    group: int = 1

    def of_rows(self, rows: PackedRows | Int32) -> cute.Tensor:
        """((heads, rows), columns) of a sequence; ``rows`` is as ``SeqlenInfo`` gives it."""
        if not isinstance(rows, PackedRows):
            return self.gmem[None, None, rows]
        tensor = self.gmem[None, None, RAGGED_ROWS, rows.offset + rows.length]
        return cute.domain_offset(((0, RAGGED_ROWS - rows.length), 0), tensor)

    def partition(
        self,
        tiler: tuple,
        coord: tuple,
        head: Int32,
        rows: PackedRows | LedRows | Int32,
        share: tuple[Int32 | int, int] = (0, 1),
    ) -> tuple[cute.Tensor, cute.Tensor]:
        (tile_rows, columns), (row_block, column_block) = tiler, coord
        box = (self.group, tile_rows // self.group), columns
        tiles = cute.local_tile(self.of_rows(rows), box, ((head, row_block), column_block))
        smem = cute.make_tensor(self.smem.iterator, first_rows(self.smem.layout, used_rows(self.group)))
        return cpasync.tma_partition(
            self.atom,
            share[0],
            cute.make_layout(share[1]),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )


@dataclass(frozen=True)
class GroupedMask(TileMask):
    """``TileMask`` where each query has ``group`` rows; ``row`` counts rows."""

    group: int = 1

    def level(self, r: int) -> Int32:
        query, _ = place_of_row(self.row + r * ROW_STRIDE, self.group)
        return query + self.seqlens.seqlen_k - self.seqlens.seqlen_q


class GroupedTmaStore(DenseTmaStore):
    """O goes as it came, LSE to (seqlen_q or 0, heads, batch), or of packed sequences (total_q or 0, heads)."""

    @cute.jit
    def lse(self, values: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        group = self.o.group
        queries = cutlass.min(seqlens.seqlen_q, self.mLSE.shape[0])
        if lane % LANES_PER_ROW == 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                query, of_group = place_of_row(row + r * ROW_STRIDE, group)
                if query < queries:
                    of_head = self._lse_of(head * group + of_group, seqlens)
                    of_head[query] = values[r]

    @cute.jit
    def rows(self, acc: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        """Columns are in the order of ``pair_of_quads``; four lanes store 32 bytes of a row together."""
        (mO,), group = self.outputs, self.o.group
        rows = as_rows(acc)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            query, of_group = place_of_row(row + r * ROW_STRIDE, group)
            if query < seqlens.seqlen_q:
                target = mO[((head * group + of_group, query), None, seqlens.batch)]
                for j in cutlass.range_constexpr(0, rows.shape[1][1], 2):
                    column = COLUMNS_PER_PAIR * pair_of_quads(j, lane)
                    if column < target.shape[0]:
                        pairs = [(rows[r, (0, j + i)], rows[r, (1, j + i)]) for i in range(2)]
                        words = [pack(*pair, target.element_type) for pair in pairs]
                        _store_words((target.iterator + column).toint(), *words)

    def _lse_of(self, head: Int32, seqlens: SeqlenInfo) -> cute.Tensor:
        if seqlens.is_packed:
            return cute.domain_offset((seqlens.offset_q,), self.mLSE[None, head])
        return super()._lse_of(head, seqlens)


def _store_words(address: Int64, first: Int32, second: Int32) -> None:
    """To global memory, at a multiple of 8 bytes."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


class GroupedBatch(DenseBatch):
    """``DenseBatch`` with tiles of ``config.group`` heads."""

    store_type = GroupedTmaStore

    @property
    def rows_of_box(self) -> tuple[int, int]:
        group = self.config.group
        return group, WARPGROUP_ROWS // group

    def layout_of_box(self, layout: cute.ComposedLayout) -> cute.ComposedLayout:
        rows = first_rows(layout.outer, used_rows(self.config.group))
        return cute.make_composed_layout(layout.inner, 0, rows)

    def view_queries(self, tensor: cute.Tensor) -> cute.Tensor:
        return with_heads_in_rows(self.view(tensor))

    def queries_and_heads(self, mQ: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        (heads, seqlen_q), _, batch = mQ.shape
        return seqlen_q, heads // self.config.group, batch

    def mask(self, window: Window, seqlens: SeqlenInfo, row: Int32, col: Int32) -> GroupedMask:
        return GroupedMask(window, self.config.tile_n, seqlens, row, col, self.config.group)

    def operand(self, *parts) -> GroupedOperand:
        return GroupedOperand(*parts, group=self.config.group)


class GroupedPackedBatch(PackedBatch):
    """``PackedBatch`` with tiles of ``config.group`` heads."""

    store_type = GroupedTmaStore
    rows_of_box = GroupedBatch.rows_of_box
    layout_of_box = GroupedBatch.layout_of_box
    view_queries = GroupedBatch.view_queries
    operand = GroupedBatch.operand
    mask = GroupedBatch.mask

    def queries_and_heads(self, mQ: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        (heads, rows), _, *_ = mQ.shape
        return rows, heads // self.config.group, Int32(1)


def with_heads_in_rows(view: cute.Tensor) -> cute.Tensor:
    """((heads, rows), columns, ...) of (rows, columns, heads, ...)."""
    rows, columns, heads, *others = view.shape
    of_rows, of_columns, of_heads, *of_others = view.stride
    layout = cute.make_layout(
        ((heads, rows), columns, *others), stride=((of_heads, of_rows), of_columns, *of_others)
    )
    return cute.make_tensor(view.iterator, layout)
