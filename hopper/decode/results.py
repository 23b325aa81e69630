"""How the rows of a tile leave: at once where one CTA has all of its keys, else by way of partial results."""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.fast_math import exp2, pack
from cute_kernels.fragments import (
    COLUMNS_PER_GROUP,
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    as_rows,
    first_column_of_thread,
)
from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import LEAST, LN_2
from hopper.config import WARPGROUP_THREADS
from hopper.decode.config import PARTS_PER_CTA, DecodeConfig
from hopper.decode.consumer import Consumer, sync_consumers
from hopper.decode.rows import HeadRows, TileRows
from hopper.decode.schedule import TileParts

COLUMNS = 4
"""Of O, that a thread adds up at a time: 16 bytes of a partial result."""

AT_A_TIME = 4
"""Partial results whose loads are under way together."""

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class RowSum(LoopInvariant):
    """What a row of O is to be divided by, and what its LSE is made of.

    ``shift`` is what exponents of 2 are measured from, ``total`` the sum of P, ``rounded`` the same with the largest P
    as it is rounded in P V (``RoundingSoftmax``).
    """

    shift: Float32
    total: Float32
    rounded: Float32

    def with_sink(self, sinks: tuple[cute.Tensor, ...], head: Int32) -> "RowSum":
        """With the logit of a head in the sum, if there is one."""
        for sink in sinks:
            of_sink = sink[head] * Float32(LOG2_E)
            shift = cute.arch.fmax(self.shift, of_sink)
            shrink, more = exp2(self.shift - shift), exp2(of_sink - shift)
            return RowSum(shift, self.total * shrink + more, self.rounded * shrink + more)
        return self

    @cute.jit
    def lse(self) -> Float32:
        log_sum = (self.shift + cute.math.log2(self.total, fastmath=True)) * Float32(LN_2)
        return -Float32.inf if self.total == Float32(0.0) else log_sum

    @cute.jit
    def inverse(self) -> Float32:
        """0 for a row without keys."""
        return Float32(0.0) if self.total == Float32(0.0) else cute.arch.rcp_approx(self.rounded)


@dataclass(frozen=True)
class Results(LoopInvariant):
    """Where O and LSE go, and what lies between the parts of a tile.

    ``parts`` float32 (PARTS_PER_CTA * CTAs, part_floats) has partial results: rows of O, and behind them a ``RowSum``
    and a zero for each row. ``counters`` int32 (CTAs,) are zero before and after a launch: blocks that are done of the
    tile of which a CTA has the first part, and no other tile has it. ``flag`` is a word of shared memory.
    """

    config: DecodeConfig
    mO: cute.Tensor
    mLSE: cute.Tensor
    sinks: tuple[cute.Tensor, ...]
    parts: cute.Tensor
    counters: cute.Tensor
    flag: cute.Tensor
    cta: Int32
    thread: Int32

    @cute.jit
    def leave(self, consumer: Consumer, rows: HeadRows, parts: TileParts):
        """Store the rows of a tile of which this CTA has all blocks, or add its part to those of the others."""
        first, end = parts.begin(self.cta), parts.begin(self.cta + 1)
        if first == 0 and end == parts.blocks:
            self._store(consumer, rows)
        else:
            self._leave_part(consumer, rows, first)
            if self._is_last(parts, end - first):
                self._put_together(rows.tile, parts)

    def _sum_of(self, consumer: Consumer, r: int) -> RowSum:
        softmax = consumer.softmax
        total = cute.arch.warp_reduction_sum(softmax.row_sum[r], threads_in_group=LANES_PER_ROW)
        return RowSum(softmax.shift[r], total, softmax._sum_of_rounded(r, total))

    @cute.jit
    def _store(self, consumer: Consumer, rows: HeadRows):
        acc = as_rows(consumer.acc)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_sum = self._sum_of(consumer, r)
            if rows.exists(r):
                row_sum = row_sum.with_sink(self.sinks, rows.tile.place(rows.row(r))[1])
                inverse = row_sum.inverse()
                target = rows.of(self.mO, r)
                words = cute.recast_tensor(target, Int32)
                for j in cutlass.range_constexpr(self.config.head_dim_v // COLUMNS_PER_GROUP):
                    column = j * COLUMNS_PER_GROUP + first_column_of_thread(rows.lane)
                    if column < target.shape[0]:
                        low, high = acc[r, (0, j)] * inverse, acc[r, (1, j)] * inverse
                        words[column // 2] = pack(low, high, self.mO.element_type)
                self._store_lse(rows.tile, rows.row(r), row_sum, rows.lane % LANES_PER_ROW)

    @cute.jit
    def _store_lse(self, tile: TileRows, row: Int32, row_sum: RowSum, is_not_writer: Int32):
        if is_not_writer == 0:
            tile.lse_of(self.mLSE, row)[0] = row_sum.lse()

    def _slot(self, cta: Int32, begins_tile: Any) -> cute.Tensor:
        """The partial result of a CTA: of the tile that it begins, or of the one that it finds begun."""
        return self.parts[PARTS_PER_CTA * cta + begins_tile, None]

    def _rows_of_part(self, part: cute.Tensor) -> cute.Tensor:
        """(head_dim_v, tile_m)"""
        c = self.config
        return cute.make_tensor(part.iterator, cute.make_layout((c.head_dim_v, c.tile_m)))

    def _sums_of_part(self, part: cute.Tensor) -> cute.Tensor:
        """(4, tile_m)"""
        c = self.config
        return cute.make_tensor(part.iterator + c.head_dim_v * c.tile_m, cute.make_layout((4, c.tile_m)))

    @cute.jit
    def _leave_part(self, consumer: Consumer, rows: HeadRows, first: Int32):
        part = self._slot(self.cta, Int32(1) if first == 0 else Int32(0))
        o, sums = self._rows_of_part(part), self._sums_of_part(part)
        acc = as_rows(consumer.acc)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_sum = self._sum_of(consumer, r)
            if rows.exists(r):
                row = rows.row(r)
                for j in cutlass.range_constexpr(self.config.head_dim_v // COLUMNS_PER_GROUP):
                    column = j * COLUMNS_PER_GROUP + first_column_of_thread(rows.lane)
                    for e in cutlass.range_constexpr(2):
                        o[column + e, row] = acc[r, (e, j)]
                if rows.lane % LANES_PER_ROW == 0:
                    sums[0, row], sums[1, row] = row_sum.shift, row_sum.total
                    sums[2, row] = row_sum.rounded

    @cute.jit
    def _is_last(self, parts: TileParts, blocks: Int32) -> Int32:
        """Whether no other part of the tile is still to come, once this CTA's, of ``blocks``, is there."""
        cute.arch.fence_acq_rel_gpu()
        sync_consumers()
        if self.thread == 0:
            counter = self.counters.iterator + parts.first_cta
            before = cute.arch.atomic_add(counter, blocks, sem="acq_rel", scope="gpu")
            is_last = before + blocks == parts.blocks
            if is_last:
                self.counters[parts.first_cta] = Int32(0)
            self.flag[0] = Int32(1) if is_last else Int32(0)
        sync_consumers()
        is_last = self.flag[0]
        cute.arch.fence_acq_rel_gpu()
        return is_last == 1

    @cute.jit
    def _put_together(self, tile: TileRows, parts: TileParts):
        """Add up all parts, in the order of their keys, and store the rows."""
        c = self.config
        columns = c.head_dim_v // COLUMNS
        rows = minimum(tile.count, c.tile_m)
        first_cta, last_cta = parts.first_cta, parts.last_cta
        for i in cutlass.range(self.thread, rows * columns, WARPGROUP_THREADS, unroll=1):
            row = i // columns
            column = (i - row * columns) * COLUMNS
            o, row_sum = self._sum_of_parts(parts, first_cta, last_cta, row, column)
            token, head = tile.place(row)
            row_sum = row_sum.with_sink(self.sinks, head)
            inverse = row_sum.inverse()
            target = tile.of(self.mO, row)
            if column < target.shape[0]:
                words = cute.recast_tensor(target, Int32)
                for e in cutlass.range_constexpr(COLUMNS // 2):
                    words[column // 2 + e] = pack(
                        o[2 * e] * inverse, o[2 * e + 1] * inverse, self.mO.element_type
                    )
            self._store_lse(tile, row, row_sum, column)

    @cute.jit
    def _sum_of_parts(
        self, parts: TileParts, first_cta: Int32, last_cta: Int32, row: Int32, column: Int32
    ) -> tuple[cute.Tensor, RowSum]:
        """Some columns of a row of O, not yet normalised, and the row's sum."""
        shift, total, rounded = Float32(LEAST), Float32(0.0), Float32(0.0)
        o = cute.make_rmem_tensor(COLUMNS, Float32)
        o.fill(0.0)
        for cta in cutlass.range(first_cta, last_cta + 1, AT_A_TIME, unroll=1):
            loaded = []
            for n in cutlass.range_constexpr(AT_A_TIME):
                own = minimum(cta + n, last_cta)
                part = self._slot(own, Int32(1) if own == first_cta else Int32(0))
                address = self._rows_of_part(part).iterator + (row * self.config.head_dim_v + column)
                of_sum = self._sums_of_part(part).iterator + 4 * row
                loaded.append((load_4(address), load_4(of_sum)))
            for n in cutlass.range_constexpr(AT_A_TIME):
                own = cta + n
                is_there = own <= last_cta and parts.begin(own) < parts.begin(own + 1)
                values, (part_shift, part_total, part_rounded, _) = loaded[n]
                part_shift = part_shift if is_there else Float32(LEAST)
                greater = cute.arch.fmax(shift, part_shift)
                old, new = exp2(shift - greater), exp2(part_shift - greater)
                shift = greater
                total = total * old + (part_total * new if is_there else Float32(0.0))
                rounded = rounded * old + (part_rounded * new if is_there else Float32(0.0))
                for e in cutlass.range_constexpr(COLUMNS):
                    o[e] = o[e] * old + (values[e] * new if is_there else Float32(0.0))
        return o, RowSum(shift, total, rounded)


def load_4(pointer: cute.Pointer) -> tuple[Float32, Float32, Float32, Float32]:
    """Four neighbouring float32 from L2, where other CTAs have left them."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[pointer.toint()],
    )
