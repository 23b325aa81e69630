"""Puts the rows of tiles together of which several CTAs have a part."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32

from cute_kernels.fast_math import exp2, pack
from cute_kernels.integers import divide, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import LEAST
from hopper.decode.config import DecodeConfig
from hopper.decode.operands import Work
from hopper.decode.results import PartialResults, RowSum
from hopper.decode.rows import TileRows
from hopper.decode.schedule import TileParts

COLUMNS = 4
"""Of O, that a thread adds up: 16 bytes of a partial result."""

AT_A_TIME = 8
"""Partial results whose loads a thread has under way together."""

WARPS = 4
LANES = 32


@dataclass(frozen=True)
class Combine(LoopInvariant):
    """One row of one tile, by a CTA of WARPS warps, of which each adds up every WARPS-th part, in the order of keys.

    The tile is the one that piece ``work.cta`` begins and another ends, if there is one.
    """

    config: DecodeConfig
    work: Work
    parts: PartialResults
    mO: cute.Tensor
    mLSE: cute.Tensor
    sinks: tuple[cute.Tensor, ...]
    smem: cute.Tensor
    warp: Int32
    lane: Int32

    @cute.jit
    def run(self, row: Int32):
        """Row ``row`` of the tile. What is known without the parts is worked out before they are waited for."""
        work, c = self.work, self.config
        unit = work.pieces.begin(work.cta + 1) - 1
        sequence, start = work.batch.locate(unit, self.lane)
        if sequence < work.batch.batch:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens).count
            number = divide(unit - start, blocks)
            tile = work.parts(start + number * blocks, blocks)
            row_tiles = work.batch.row_tiles(seqlens)
            head = divide(number, row_tiles)
            rows = TileRows(seqlens, (number - head * row_tiles) * c.tile_m, head, work.batch.group)
            is_begun = tile.first_cta == work.cta and tile.begin(work.cta + 1) < blocks
            if is_begun and row < minimum(rows.count, c.tile_m):
                cute.arch.griddepcontrol_wait()
                for first in cutlass.range_constexpr(0, c.head_dim_v, COLUMNS * LANES):
                    self._add_columns(tile, rows, row, first + COLUMNS * self.lane)

    @cute.jit
    def _add_columns(self, tile: TileParts, rows: TileRows, row: Int32, column: Int32):
        """Some columns of the row, by the lanes that have some."""
        is_in = column < self.config.head_dim_v
        o, row_sum = self._sum_of_parts(tile, row, column if is_in else Int32(0))
        for i in cutlass.range_constexpr(COLUMNS):
            self.smem[i, self.lane, self.warp] = o[i]
        for i, number in enumerate((row_sum.shift, row_sum.total, row_sum.rounded)):
            self.smem[COLUMNS + i, self.lane, self.warp] = number
        cute.arch.sync_threads()
        if self.warp == 0 and is_in:
            self._store(rows, row, column)
        cute.arch.sync_threads()

    @cute.jit
    def _sum_of_parts(self, tile: TileParts, row: Int32, column: Int32) -> tuple[cute.Tensor, RowSum]:
        """Those of this warp."""
        shift, total, rounded = Float32(LEAST), Float32(0.0), Float32(0.0)
        o = cute.make_rmem_tensor(COLUMNS, Float32)
        o.fill(0.0)
        first_cta, last_cta = tile.first_cta, tile.last_cta
        step = WARPS * AT_A_TIME
        for cta in cutlass.range(first_cta + self.warp, last_cta + 1, step, unroll=1):
            loaded = []
            for n in cutlass.range_constexpr(AT_A_TIME):
                own = minimum(cta + n * WARPS, last_cta)
                slot = self.parts.slot(own, own == first_cta)
                address = self.parts.rows(slot).iterator + (row * self.config.head_dim_v + column)
                loaded.append((load_4(address), load_4(self.parts.sums(slot).iterator + 4 * row)))
            for n in cutlass.range_constexpr(AT_A_TIME):
                own = cta + n * WARPS
                # A CTA whose part begins where that of the next one does has none.
                is_there = own <= last_cta and tile.begin(own) < tile.begin(own + 1)
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

    @cute.jit
    def _store(self, rows: TileRows, row: Int32, column: Int32):
        """The sum of what the warps have, with the sink."""
        shift, total, rounded = Float32(LEAST), Float32(0.0), Float32(0.0)
        o = cute.make_rmem_tensor(COLUMNS, Float32)
        o.fill(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            of_warp = [self.smem[i, self.lane, warp] for i in range(COLUMNS + 3)]
            greater = cute.arch.fmax(shift, of_warp[COLUMNS])
            old, new = exp2(shift - greater), exp2(of_warp[COLUMNS] - greater)
            shift = greater
            total = total * old + of_warp[COLUMNS + 1] * new
            rounded = rounded * old + of_warp[COLUMNS + 2] * new
            for e in cutlass.range_constexpr(COLUMNS):
                o[e] = o[e] * old + of_warp[e] * new
        row_sum = RowSum(shift, total, rounded).with_sink(self.sinks, rows.place(row)[1])
        inverse = row_sum.inverse(shift)
        target = rows.of(self.mO, row)
        if column < target.shape[0]:
            words = cute.recast_tensor(target, Int32)
            for e in cutlass.range_constexpr(0, COLUMNS, 2):
                words[(column + e) // 2] = pack(o[e] * inverse, o[e + 1] * inverse, self.mO.element_type)
        if column == 0:
            rows.lse_of(self.mLSE, row)[0] = row_sum.lse()


def load_4(pointer: cute.Pointer) -> tuple[Float32, Float32, Float32, Float32]:
    """Four neighbouring float32 from L2, where other CTAs have left them."""
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[pointer.toint()],
    )
