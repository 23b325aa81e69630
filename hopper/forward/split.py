"""Tiles whose keys several CTAs visit, a part each: where there are fewer tiles than multiprocessors.

Each part leaves O, normalised, and LSE in float32, and the kernel of ``cute_kernels/combine`` adds the parts up. (The
idea is that of Flash-Decoding.) The number of a sequence says which part of the keys is meant too. Dense sequences have
as many parts as each other, packed ones as many as their plan says (``cute_kernels/plan/parts.py``).
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.combine.config import END
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    COLUMNS_PER_PAIR,
    LANES_PER_ROW,
    ROW_STRIDE,
    ROWS_PER_THREAD,
    as_rows,
    first_column_of_thread,
    pair_of_quads,
    store_2,
)
from cute_kernels.integers import maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import BlockRange, KeyBlocks
from cute_kernels.plan.parts import (
    PartPackedSeqlens,
    PartTileOrder,
    part_of_number,
    parts_of_number,
    sequence_of_number,
)
from cute_kernels.seqlen import DenseSeqlens, SeqlenInfo
from cute_kernels.window import Window
from hopper.forward.grouped import GroupedBatch, GroupedPackedBatch, place_of_row
from hopper.forward.store import DenseTmaStore

PART_SHIFT = 24
"""Bits of the number of a dense sequence that are the sequence's. Those above are the part's."""


@dataclass(frozen=True)
class PartSeqlenInfo(SeqlenInfo):
    """``SeqlenInfo`` of number ``part`` of the parts of a dense sequence."""

    part: Any = 0


def part_of(seqlens: SeqlenInfo) -> Any:
    """Of packed sequences, which the mailbox tells of, the number has it still."""
    return part_of_number(seqlens.batch) if seqlens.is_packed else seqlens.part


def sequence_of(seqlens: SeqlenInfo) -> Any:
    """The number of the sequence itself, of tiles in parts."""
    return sequence_of_number(seqlens.batch) if seqlens.is_packed else seqlens.batch


class PartDenseSeqlens(DenseSeqlens):
    def of_tile(self, m_block: Any, batch: Any) -> PartSeqlenInfo:
        part = batch >> PART_SHIFT
        sequence = batch & ((1 << PART_SHIFT) - 1)
        return PartSeqlenInfo(self.seqlen_q, self.seqlen_k, sequence, part=part)


@dataclass(frozen=True)
class SplitRange(BlockRange):
    """``BlockRange`` of tiles in ``splits`` parts, of which packed sequences may have fewer."""

    splits: Any = 1

    def of(self, m_block: Any, seqlens: SeqlenInfo) -> "SplitBlocks":
        """Those of a part: as many as the others have, or one more. Where there are none, one behind all, whose keys no
        row sees."""
        begin, part = self.begin(m_block, seqlens), part_of(seqlens)
        number = self.end(m_block, seqlens) - begin
        parts = parts_of_number(seqlens.batch) if seqlens.is_packed else self.splits
        each = number // parts
        longer = number - each * parts
        first = begin + part * each + minimum(part, longer)
        count = each + minimum(maximum(longer - part, 0), 1)
        return SplitBlocks(self, m_block, seqlens, first + maximum(count, 1), first)


class SplitBlocks(KeyBlocks):
    """``KeyBlocks`` of a part, which begins behind the first key of its sequence."""

    def right_masked(self, unmasked: Any) -> Any:
        return maximum(self.last - maximum(unmasked, self.begin), 0)

    @property
    def left_masked(self) -> Any:
        """No less than where the part begins, as the walk does not mask below it."""
        return maximum(self.block_range.left_masked_end(self.m_block, self.seqlens), self.begin)


@dataclass(frozen=True)
class SplitOrder(LoopInvariant):
    """The tiles of an ``order`` of dense sequences once for each of ``splits`` parts, those of a part behind each
    other."""

    order: Any
    splits: Any

    @property
    def divisors(self) -> tuple:
        return self.order.divisors

    def with_group(self, group: Any) -> "SplitOrder":
        return replace(self, order=self.order.with_group(group))

    @property
    def num_tiles(self) -> Any:
        return self.order.num_tiles * self.splits

    def coordinates(self, tile: Any) -> tuple[Any, Any, Any]:
        """(m_block, head, batch and part) of a tile number below ``num_tiles``."""
        tiles = self.order.num_tiles
        part = tile // tiles
        m_block, head, batch = self.order.coordinates(tile - part * tiles)
        return m_block, head, batch + (part << PART_SHIFT)


@dataclass(frozen=True)
class PartStore(DenseTmaStore):
    """O and LSE in float32 from registers: (parts, batch, seqlen_q, heads, head_dim_v) without its last dimension for
    LSE, batch 1 for packed sequences. ``mLSE`` is that of LSE."""

    @cute.jit
    def lse(self, values: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        if lane % LANES_PER_ROW == 0:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                query, place = self._place(head, seqlens, row + r * ROW_STRIDE)
                if query < seqlens.seqlen_q:
                    self.mLSE[place] = values[r]
                    if const_expr(seqlens.is_packed):
                        self._leave_out_others(place, seqlens)

    @cute.jit
    def _leave_out_others(self, place: tuple, seqlens: SeqlenInfo):
        """The last part of a sequence says that there are no more."""
        part, *of_row = place
        parts = parts_of_number(seqlens.batch)
        if part == parts - 1 and parts < self.mLSE.shape[0]:
            self.mLSE[(parts, *of_row)] = Int32(END).bitcast(Float32)

    @cute.jit
    def rows(self, acc: cute.Tensor, head: Int32, seqlens: SeqlenInfo, row: Int32, lane: Int32):
        (mO,) = self.outputs
        rows = as_rows(acc)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            query, place = self._place(head, seqlens, row + r * ROW_STRIDE)
            if query < seqlens.seqlen_q:
                target = mO[(*place, None)]
                for j in cutlass.range_constexpr(rows.shape[1][1]):
                    column = self._column(j, lane)
                    if column < target.shape[0]:
                        store_2(target, (column,), rows[r, (0, j)], rows[r, (1, j)])

    def _column(self, j: int, lane: Int32) -> Int32:
        """The first of the thread's pair ``j`` of columns."""
        if self.has_quads:
            return COLUMNS_PER_PAIR * pair_of_quads(j, lane)
        return j * COLUMNS_PER_GROUP + first_column_of_thread(lane)

    def _place(self, head: Int32, seqlens: SeqlenInfo, row: Int32) -> tuple[Int32, tuple]:
        """Of a row of a tile of ``head``: the query, and where its results are."""
        group = self.o.group
        (query, of_group), number = place_of_row(row, group), 0 if seqlens.is_packed else seqlens.batch
        return query, (part_of(seqlens), number, seqlens.offset_q + query, head * group + of_group)


class SplitBatch(GroupedBatch):
    """``GroupedBatch`` of tiles in parts. Results are those of ``PartStore``."""

    store_type = PartStore

    def view_outputs(self, mO: cute.Tensor) -> cute.Tensor:
        return mO

    def view_lse(self, mLSE: cute.Tensor) -> cute.Tensor:
        return mLSE

    def make_o_atom(self, mO: cute.Tensor, layout: cute.ComposedLayout) -> tuple:
        return None, None

    def num_ctas(self, mQ: cute.Tensor, num_ctas: Int32) -> Int32:
        return num_ctas

    def heads_and_sequences(self, mLSE: cute.Tensor) -> tuple[Int32, Int32]:
        return mLSE.shape[3] // self.config.group, mLSE.shape[1]

    def order(self, lengths: tuple, mLSE: cute.Tensor, *others: Any) -> SplitOrder:
        return SplitOrder(super().order(lengths, mLSE, *others), mLSE.shape[0])

    def seqlens(self, lengths: tuple) -> PartDenseSeqlens:
        return PartDenseSeqlens(*lengths)

    def block_range(self, window: Window, mLSE: cute.Tensor) -> SplitRange:
        return SplitRange(self.config.tile_queries, self.config.tile_n, window, 0, mLSE.shape[0])


class SplitPackedBatch(GroupedPackedBatch):
    """``GroupedPackedBatch`` of tiles in parts. Results are those of ``PartStore``."""

    store_type = PartStore
    view_outputs = SplitBatch.view_outputs
    view_lse = SplitBatch.view_lse
    make_o_atom = SplitBatch.make_o_atom
    heads_and_sequences = SplitBatch.heads_and_sequences
    block_range = SplitBatch.block_range
    order_type = PartTileOrder

    def seqlens(self, lengths: tuple) -> PartPackedSeqlens:
        return PartPackedSeqlens(lengths[0])
