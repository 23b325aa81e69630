"""Puts the rows of tiles over a latent together: many rows, mostly of two parts each."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.fast_math import exp2, max_over_lanes
from cute_kernels.integers import minimum
from cute_kernels.softmax import LEAST
from hopper.decode.combine import COLUMNS, LANES, WARPS, Combine, load_4
from hopper.decode.results import RowSum, store_columns
from hopper.decode.rows import TileRows

FEW_PARTS = (2, 4, 8)
"""That a warp adds up by itself: the fewest that are all of a tile."""

COMBINING_CTAS = 132
"""That put parts together, or a little less, for each COLUMNS_OF_A_CTA columns of a row: 528 with 512 columns, which
fit on 132 multiprocessors at once. Two for each of 66 pieces."""

AT_A_TIME = 8
"""Parts of rows whose loads a warp has under way together."""

MANY_AT_A_TIME = 16
"""The same, of a row of more parts than the most of FEW_PARTS."""


class MlaCombine(Combine):
    """``Combine``, but rows of few parts are shared out over the warps of a CTA, which need not wait for each other: a
    tile has up to 128 rows, and a batch of them takes as long as its loads."""

    @cute.jit
    def _add_rows(self, ctas: tuple[Int32, Int32], rows: TileRows, span: tuple, columns: tuple):
        before = ctas[1] - ctas[0]
        if before < FEW_PARTS[0]:
            self._add_rows_of_few(ctas, rows, span, columns, FEW_PARTS[0])
        elif before < FEW_PARTS[1]:
            self._add_rows_of_few(ctas, rows, span, columns, FEW_PARTS[1])
        elif before < FEW_PARTS[2]:
            self._add_rows_of_few(ctas, rows, span, columns, FEW_PARTS[2])
        elif before < LANES and span[0] + span[2] < span[1]:
            self._add_rows_of_many(ctas, rows, span, columns)
        else:
            Combine._add_rows(self, ctas, rows, span, columns)

    @cute.jit
    def _add_rows_of_few(
        self,
        ctas: tuple[Int32, Int32],
        rows: TileRows,
        span: tuple,
        columns: tuple,
        most: cutlass.Constexpr[int],
    ):
        """Rows of up to ``most`` parts, by each warp its own, AT_A_TIME // ``most`` together."""
        first_row, end_row, row_step = span
        together, own_step = AT_A_TIME // most, WARPS * row_step
        own_first = first_row + self.warp * row_step
        for row in cutlass.range(own_first, end_row, together * own_step, unroll=1):
            own = [row + i * own_step for i in range(together)]
            for first in columns:
                column = first + COLUMNS * self.lane
                loaded = [self._load_parts(ctas, minimum(o, end_row - 1), column, most) for o in own]
                for i in cutlass.range_constexpr(together):
                    if own[i] < end_row:
                        self._store_sum(ctas, rows, own[i], column, loaded[i])

    def _load_parts(self, ctas: tuple[Int32, Int32], row: Int32, column: Int32, most: int) -> list:
        """Of a row, some columns and the sums of each part, the last one again in place of those that there are not."""
        first_cta, last_cta = ctas
        loaded = []
        for n in range(most):
            slot = self.parts.slot(minimum(first_cta + n, last_cta), Boolean(n == 0))
            address = self.parts.rows(slot).iterator + (row * self.config.head_dim_v + column)
            loaded.append((load_4(address), load_4(self.parts.sums(slot).iterator + 4 * row)))
        return loaded

    @cute.jit
    def _store_sum(self, ctas: tuple[Int32, Int32], rows: TileRows, row: Int32, column: Int32, loaded: list):
        """Some columns of a row of O, out of what was loaded of its parts."""
        first_cta, last_cta = ctas
        is_there, shift = [], Float32(LEAST)
        for n in cutlass.range_constexpr(len(loaded)):
            # Of a part without a key that the row sees there is no O.
            is_there.append(first_cta + n <= last_cta and loaded[n][1][1] != Float32(0.0))
            shift = cute.arch.fmax(shift, loaded[n][1][0] if is_there[n] else Float32(LEAST))
        total, rounded, o = Float32(0.0), Float32(0.0), [Float32(0.0)] * COLUMNS
        for n in cutlass.range_constexpr(len(loaded)):
            values, sums = loaded[n]
            new = exp2(sums[0] - shift)
            total += sums[1] * new if is_there[n] else Float32(0.0)
            rounded += sums[2] * new if is_there[n] else Float32(0.0)
            for e in cutlass.range_constexpr(COLUMNS):
                o[e] += values[e] * new if is_there[n] else Float32(0.0)
        outputs = self.mO, self.mLSE, self.sinks, self.factors
        store_columns(outputs, rows, row, column, o, RowSum(shift, total, rounded))

    @cute.jit
    def _add_rows_of_many(self, ctas: tuple[Int32, Int32], rows: TileRows, span: tuple, columns: tuple):
        """Several rows of up to LANES parts, by each warp its own: a lane has the sums of a part."""
        first_row, end_row, row_step = span
        outputs = self.mO, self.mLSE, self.sinks, self.factors
        for row in cutlass.range(first_row + self.warp * row_step, end_row, WARPS * row_step, unroll=1):
            factor, of_keys = self._factor_of_part(ctas, row)
            for first in columns:
                column = first + COLUMNS * self.lane
                o = self._sum_of_many(ctas, row, column, factor)
                store_columns(outputs, rows, row, column, [o[e] for e in range(COLUMNS)], of_keys)

    @cute.jit
    def _factor_of_part(self, ctas: tuple[Int32, Int32], row: Int32) -> tuple[Float32, RowSum]:
        """What O of this lane's part is multiplied by, 0 where there is none, and the sum of all parts."""
        first_cta, last_cta = ctas
        own = first_cta + self.lane
        slot = self.parts.slot(minimum(own, last_cta), Boolean(self.lane == 0))
        sums = load_4(self.parts.sums(slot).iterator + 4 * row)
        is_there = own <= last_cta and sums[1] != Float32(0.0)
        shift = max_over_lanes(sums[0] if is_there else Float32(LEAST), LANES)
        factor = exp2(sums[0] - shift) if is_there else Float32(0.0)
        total, rounded = (
            cute.arch.warp_reduction_sum(number * factor if is_there else Float32(0.0))
            for number in (sums[1], sums[2])
        )
        return factor, RowSum(shift, total, rounded)

    @cute.jit
    def _sum_of_many(
        self, ctas: tuple[Int32, Int32], row: Int32, column: Int32, factor: Float32
    ) -> cute.Tensor:
        """Some columns of a row, of all parts; lanes have the ``factor`` of one each."""
        first_cta, last_cta = ctas
        o = cute.make_rmem_tensor(COLUMNS, Float32)
        o.fill(0.0)
        for before in cutlass.range(0, last_cta + 1 - first_cta, MANY_AT_A_TIME, unroll=1):
            loaded = []
            for n in cutlass.range_constexpr(MANY_AT_A_TIME):
                slot = self.parts.slot(minimum(first_cta + before + n, last_cta), before + n == 0)
                loaded.append(
                    load_4(self.parts.rows(slot).iterator + (row * self.config.head_dim_v + column))
                )
            for n in cutlass.range_constexpr(MANY_AT_A_TIME):
                of_part = cute.arch.shuffle_sync(factor, offset=before + n)
                for e in cutlass.range_constexpr(COLUMNS):
                    # Of a part without a key that the row sees there is no O.
                    o[e] += loaded[n][e] * of_part if of_part != Float32(0.0) else Float32(0.0)
        return o
