"""How the rows of a tile leave: to O where one CTA has all of its keys, else to the partial results."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.fast_math import exp2, pack
from cute_kernels.fragments import store_2
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import LN_2
from hopper.decode.config import PARTS_PER_CTA, DecodeConfig
from hopper.decode.consumer import Consumer
from hopper.decode.rows import HeadRows, TileRows
from hopper.decode.schedule import HeadsTogether, TileParts

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
    def inverse(self, shift: Float32) -> Float32:
        """What O is multiplied by whose exponents are measured from ``shift``; 0 for a row without keys."""
        factor = exp2(shift - self.shift) * cute.arch.rcp_approx(self.rounded)
        return Float32(0.0) if self.total == Float32(0.0) else factor


@cute.jit
def store_columns(outputs: tuple, rows: TileRows, row: Int32, column: Int32, o: list, of_keys: RowSum):
    """Some neighbouring columns of a row of O, which ``of_keys`` belongs to, and by the first one the LSE of the row.
    ``outputs`` are O, LSE, sinks and factors, as ``Results`` has them."""
    mO, mLSE, sinks, factors = outputs
    row_sum = of_keys.with_sink(sinks, rows.place(row)[1])
    inverse = row_sum.inverse(of_keys.shift) * rows.factor(factors)
    target = rows.of(mO, row)
    if column < target.shape[0]:
        words = cute.recast_tensor(target, Int32)
        for e in cutlass.range_constexpr(0, len(o), 2):
            words[(column + e) // 2] = pack(o[e] * inverse, o[e + 1] * inverse, mO.element_type)
    if column == 0:
        rows.lse_of(mLSE, row)[0] = row_sum.lse()


@dataclass(frozen=True)
class PartialResults(LoopInvariant):
    """float32 (PARTS_PER_CTA * CTAs, part_floats), each with the rows of O, not normalised, and behind them a
    ``RowSum`` and a number without meaning for each row."""

    config: DecodeConfig
    tensor: cute.Tensor
    heads: HeadsTogether

    @cute.jit
    def slot(self, piece: Int32, begins_tile: Boolean) -> Int32:
        """That of the CTA with a piece of this CTA's row: of the tile that it begins, or of the one that it finds
        begun."""
        return PARTS_PER_CTA * self.heads.cta(piece) + (Int32(1) if begins_tile else Int32(0))

    def rows(self, slot: Int32) -> cute.Tensor:
        """(head_dim_v, tile_m)"""
        c = self.config
        return cute.make_tensor(self.tensor[slot, None].iterator, cute.make_layout((c.head_dim_v, c.tile_m)))

    def sums(self, slot: Int32) -> cute.Tensor:
        """(4, tile_m)"""
        c = self.config
        first = self.tensor[slot, None].iterator + c.head_dim_v * c.tile_m
        return cute.make_tensor(first, cute.make_layout((4, c.tile_m)))


@dataclass(frozen=True)
class Results(LoopInvariant):
    """Where O and LSE go, and what lies between the parts of a tile.

    ``parts`` has the partial results of a launch, for ``Combine``.
    """

    config: DecodeConfig
    mO: cute.Tensor
    mLSE: cute.Tensor
    sinks: tuple[cute.Tensor, ...]
    factors: tuple[cute.Tensor, ...]
    parts: PartialResults
    cta: Int32

    @property
    def outputs(self) -> tuple:
        """As ``store_columns`` has them."""
        return self.mO, self.mLSE, self.sinks, self.factors

    @cute.jit
    def leave(self, consumer: Consumer, rows: HeadRows, parts: TileParts):
        """Store the rows of a tile of which this CTA has all blocks, or what is known of them by its part."""
        first, end = parts.begin(self.cta), parts.begin(self.cta + 1)
        if first == 0 and end == parts.blocks:
            self._store(consumer, rows)
        else:
            self._leave_part(consumer, rows, self.parts.slot(self.cta, first == 0))

    @cute.jit
    def leave_nothing(self, rows: HeadRows):
        """Say that this CTA has none of the blocks of a tile which it finds begun, where its part would be."""
        sums = self.parts.sums(self.parts.slot(self.cta, Boolean(False)))
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            if rows.leads:
                sums[1, rows.row(r)] = Float32(0.0)

    @cute.jit
    def _store(self, consumer: Consumer, rows: HeadRows):
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            of_keys = RowSum(*consumer.row_sum(r))
            if rows.exists(r):
                row_sum = of_keys.with_sink(self.sinks, rows.tile.place(rows.row(r))[1])
                inverse = row_sum.inverse(of_keys.shift) * rows.tile.factor(self.factors)
                target = rows.of(self.mO, r)
                words = cute.recast_tensor(target, Int32)
                for j in cutlass.range_constexpr(consumer.pairs):
                    column = consumer.column(j)
                    if column < target.shape[0]:
                        low, high = consumer.pair(r, j)
                        words[column // 2] = pack(low * inverse, high * inverse, self.mO.element_type)
                if rows.leads:
                    rows.tile.lse_of(self.mLSE, rows.row(r))[0] = row_sum.lse()

    @cute.jit
    def _leave_part(self, consumer: Consumer, rows: HeadRows, slot: Int32):
        o, sums = self.parts.rows(slot), self.parts.sums(slot)
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            row_sum = RowSum(*consumer.row_sum(r))
            if rows.exists(r):
                row = rows.row(r)
                for j in cutlass.range_constexpr(consumer.pairs):
                    store_2(o, (consumer.column(j), row), *consumer.pair(r, j))
                if rows.leads:
                    store_2(sums, (0, row), row_sum.shift, row_sum.total)
                    sums[2, row] = row_sum.rounded
