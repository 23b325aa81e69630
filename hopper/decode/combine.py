"""Puts the rows of tiles together of which several CTAs have a part, and writes those of packed O that are of none."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr

from cute_kernels.fast_math import exp2
from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import VARLEN
from cute_kernels.softmax import LEAST
from hopper.decode.config import DecodeConfig
from hopper.decode.operands import Work
from hopper.decode.results import PartialResults, RowSum, store_columns
from hopper.decode.rows import TileRows

COLUMNS = 4
"""Of O, that a thread adds up: 16 bytes of a partial result."""

COLUMNS_OF_A_CTA = 128
"""Of a row, that a CTA adds up at a time."""

AT_A_TIME = (1, 4, 8)
"""Partial results whose loads a thread has under way together: the fewest of these that are all of a tile's for a warp,
else the most, several times over. Up to 4 parts a warp has one, up to 16 at most four."""

WARPS = 4
LANES = 32


@dataclass(frozen=True)
class Combine(LoopInvariant):
    """Rows of one tile, by a CTA of WARPS warps, of which each adds up every WARPS-th part, in the order of keys.

    With ``by_tile`` it is tile ``work.cta`` of its row, all sequences having as many tiles as each other; else it is
    the tile that piece ``work.cta`` begins and another ends, if there is one.
    """

    config: DecodeConfig
    work: Work
    parts: PartialResults
    mO: cute.Tensor
    mLSE: cute.Tensor
    sinks: tuple[cute.Tensor, ...]
    factors: tuple[cute.Tensor, ...]
    smem: cute.Tensor
    warp: Int32
    lane: Int32

    @cute.jit
    def run(self, by_tile: Boolean, first_row: Int32, row_step: Int32, columns: tuple):
        """Every ``row_step``-th row from ``first_row`` on, and of it COLUMNS_OF_A_CTA columns from each of ``columns``
        on. What is known without the parts is worked out before they
        are waited for; every CTA waits, so that this kernel does not end before the one that it depends on."""
        work, c = self.work, self.config
        sequence, number, start = Int32(0), Int32(0), Int32(0)
        if by_tile:
            tiles = work.batch.tiles(work.batch.seqlens(sequence))
            sequence = divide(work.cta, tiles)
            number = work.cta - sequence * tiles
            start = work.batch.units_before(sequence, self.lane)
            start += number * work.batch.blocks(work.batch.seqlens(sequence)).units
        else:
            unit = work.pieces.begin(work.cta + 1) - 1
            if const_expr(c.layout == VARLEN):
                # Perhaps no sequence has a query.
                unit = maximum(unit, 0)
            sequence, number, start = work.tile_of(unit, self.lane)
        has_tile = sequence < work.batch.batch
        seqlens = work.batch.seqlens(minimum(sequence, work.batch.batch - 1))
        blocks = work.batch.blocks(seqlens).count
        tile = work.parts(start, blocks)
        row_tiles = maximum(work.batch.row_tiles(seqlens), 1)
        head = divide(number, row_tiles)
        first_of_tile = work.heads.row_tile(number - head * row_tiles) * c.tile_m
        rows = TileRows(seqlens, first_of_tile, work.heads.head(head), work.batch.group)
        first_cta, last_cta = tile.first_cta, tile.last_cta
        is_split = has_tile and tile.begin(first_cta + 1) < blocks
        if not by_tile:
            is_split = is_split and first_cta == work.cta
        end_row = minimum(rows.count, c.tile_m) if is_split else Int32(0)
        # Always so, which the compiler does not know: it would work all of this out behind the wait.
        if first_cta >= 0 and last_cta >= 0 and end_row >= 0:
            cute.arch.griddepcontrol_wait()
        self._add_rows((first_cta, last_cta), rows, (first_row, end_row, row_step), columns)
        if const_expr(c.layout == VARLEN):
            ctas = work.pieces.ctas * work.heads.count * row_step
            self._clear_rows_of_none(work.heads.cta(work.cta) * row_step + first_row, ctas)

    @cute.jit
    def _add_rows(self, ctas: tuple[Int32, Int32], rows: TileRows, span: tuple, columns: tuple):
        """Rows of a tile, ``span`` as of a range, out of the parts of the first to the last CTA."""
        first_row, end_row, row_step = span
        for row in cutlass.range(first_row, end_row, row_step, unroll=1):
            for first in columns:
                self._add_columns(ctas, rows, row, first + COLUMNS * self.lane)

    @cute.jit
    def _clear_rows_of_none(self, first: Int32, step: Int32):
        """Rows of packed O behind the last sequence get 0, and an LSE of -inf: every ``step``-th from number ``first``
        on."""
        batch = self.work.batch
        for row in cutlass.range(batch.rows_end + first, batch.seqlen_q, step, unroll=1):
            for head in cutlass.range(self.warp, self.mO.shape[1], WARPS, unroll=1):
                words = cute.recast_tensor(self.mO[row, head, None], Int32)
                for word in cutlass.range(self.lane, cute.size(words), LANES, unroll=1):
                    words[word] = Int32(0)
                if self.lane == 0:
                    self.mLSE[head, row] = -Float32.inf

    @cute.jit
    def _add_columns(self, ctas: tuple[Int32, Int32], rows: TileRows, row: Int32, column: Int32):
        """Some columns of the row, by the lanes that have some."""
        is_in = column < self.config.head_dim_v
        o, row_sum = self._sum_of_parts(ctas, row, column if is_in else Int32(0))
        for i in cutlass.range_constexpr(COLUMNS):
            self.smem[i, self.lane, self.warp] = o[i]
        for i, number in enumerate((row_sum.shift, row_sum.total, row_sum.rounded)):
            self.smem[COLUMNS + i, self.lane, self.warp] = number
        cute.arch.sync_threads()
        if self.warp == 0 and is_in:
            self._store(rows, row, column)
        cute.arch.sync_threads()

    @cute.jit
    def _sum_of_parts(
        self, ctas: tuple[Int32, Int32], row: Int32, column: Int32
    ) -> tuple[cute.Tensor, RowSum]:
        """Of those that this warp adds up, out of the parts of the first to the last CTA."""
        shift, total, rounded = Float32(LEAST), Float32(0.0), Float32(0.0)
        o = cute.make_rmem_tensor(COLUMNS, Float32)
        o.fill(0.0)
        before, few, some = ctas[1] - ctas[0], *(WARPS * count for count in AT_A_TIME[:2])
        sums = shift, total, rounded
        if before < few:
            sums = self._add_parts(o, ctas, row, column, sums, AT_A_TIME[0])
        elif before < some:
            sums = self._add_parts(o, ctas, row, column, sums, AT_A_TIME[1])
        else:
            sums = self._add_parts(o, ctas, row, column, sums, AT_A_TIME[2])
        return o, RowSum(*sums)

    @cute.jit
    def _add_parts(
        self,
        o: cute.Tensor,
        ctas: tuple[Int32, Int32],
        row: Int32,
        column: Int32,
        before: tuple[Float32, Float32, Float32],
        at_a_time: cutlass.Constexpr[int],
    ) -> tuple[Float32, Float32, Float32]:
        """Those that this warp adds up, ``at_a_time`` of them at a time."""
        shift, total, rounded = before
        first_cta, last_cta = ctas
        step = WARPS * at_a_time
        for cta in cutlass.range(first_cta + self.warp, last_cta + 1, step, unroll=1):
            loaded = []
            for n in cutlass.range_constexpr(at_a_time):
                own = minimum(cta + n * WARPS, last_cta)
                slot = self.parts.slot(own, own == first_cta)
                address = self.parts.rows(slot).iterator + (row * self.config.head_dim_v + column)
                loaded.append((load_4(address), load_4(self.parts.sums(slot).iterator + 4 * row)))
            for n in cutlass.range_constexpr(at_a_time):
                values, sums = loaded[n]
                part_shift, part_total, part_rounded = sums[0], sums[1], sums[2]
                # Of a part without a key that the row sees there is no O.
                is_there = cta + n * WARPS <= last_cta and part_total != Float32(0.0)
                part_shift = part_shift if is_there else Float32(LEAST)
                greater = cute.arch.fmax(shift, part_shift)
                old, new = exp2(shift - greater), exp2(part_shift - greater)
                shift = greater
                total = total * old + (part_total * new if is_there else Float32(0.0))
                rounded = rounded * old + (part_rounded * new if is_there else Float32(0.0))
                for e in cutlass.range_constexpr(COLUMNS):
                    o[e] = o[e] * old + (values[e] * new if is_there else Float32(0.0))
        return shift, total, rounded

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
        outputs = self.mO, self.mLSE, self.sinks, self.factors
        store_columns(
            outputs, rows, row, column, [o[e] for e in range(COLUMNS)], RowSum(shift, total, rounded)
        )


def load_4(pointer: cute.Pointer) -> cute.Tensor:
    """Four neighbouring float32."""
    found = cute.make_rmem_tensor(4, Float32)
    aligned = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(4)), found)
    return found
