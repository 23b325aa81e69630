"""Puts a tile together whose keys the CTAs of a cluster share, through their shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.fast_math import exp2
from cute_kernels.integers import minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import LEAST
from hopper.config import WARPGROUP_THREADS
from hopper.decode.config import DecodeConfig, cluster_columns
from hopper.decode.results import RowSum, store_columns
from hopper.decode.rows import HeadRows, TileRows

SUMS = 3
"""Of a row: what ``RowSum`` has."""


@dataclass(frozen=True)
class ClusterParts(LoopInvariant):
    """What the CTAs of a cluster know of one tile, each having some of its keys.

    Each CTA puts some columns of all rows together, and so gets these of every CTA: ``o`` is float32 (columns, tile_m,
    cluster), not normalised, and ``sums`` (tile_m, SUMS, cluster) has each row's ``RowSum``. Parts are added in the
    order of CTAs, which is that of keys. ``rank`` is the number of this CTA, ``parts`` the CTAs that have keys.
    """

    config: DecodeConfig
    o: cute.Tensor
    sums: cute.Tensor
    rank: Int32

    @staticmethod
    def of(config: DecodeConfig, memory: Any, rank: Int32) -> "ClusterParts":
        """In float32 memory of ``cluster_bytes``."""
        c = config
        o = cute.make_layout((cluster_columns(c.head_dim_v, c.cluster), c.tile_m, c.cluster))
        sums = cute.make_layout((c.tile_m, SUMS, c.cluster))
        whole = memory.get_tensor(cute.make_layout(cute.size(o) + cute.size(sums)))
        behind = whole.iterator + cute.size(o)
        return ClusterParts(c, cute.make_tensor(whole.iterator, o), cute.make_tensor(behind, sums), rank)

    @cute.jit
    def send(self, consumer: Any, rows: HeadRows):
        """The thread's part of each row, to the CTAs that put its columns together, and sums to all."""
        width = self.o.shape[0]
        first, step = rows.place
        for r in cutlass.range_constexpr(self.config.rows_per_thread):
            sums = consumer.row_sum(r)
            if rows.exists(r):
                row = rows.row(r)
                for j in cutlass.range_constexpr(consumer.pairs):
                    column = consumer.column(j)
                    to = column // width
                    send_2(self.o, (column - to * width, row, self.rank), to, *consumer.pair(r, j))
                for to in cutlass.range(first, self.config.cluster, step, unroll=1):
                    for i in cutlass.range_constexpr(SUMS):
                        send(self.sums, (row, i, self.rank), to, sums[i])

    @cute.jit
    def add_up(self, rows: TileRows, parts: Int32, thread: Int32, outputs: tuple):
        """What was sent to this CTA, when all has arrived, by the threads of a warpgroup: to ``outputs``, as
        ``store_columns`` has them."""
        c, width = self.config, self.o.shape[0]
        pairs = minimum(rows.count, c.tile_m) * (width // 2)
        for pair in cutlass.range(thread, pairs, WARPGROUP_THREADS, unroll=1):
            row, column = pair // (width // 2), pair % (width // 2) * 2
            shift, total, rounded = Float32(LEAST), Float32(0.0), Float32(0.0)
            low, high = Float32(0.0), Float32(0.0)
            for n in cutlass.range_constexpr(c.cluster):
                is_there = n < parts and self.sums[row, 1, n] != Float32(0.0)
                greater = cute.arch.fmax(shift, self.sums[row, 0, n] if is_there else Float32(LEAST))
                shift = greater
            for n in cutlass.range_constexpr(c.cluster):
                is_there = n < parts and self.sums[row, 1, n] != Float32(0.0)
                factor = exp2(self.sums[row, 0, n] - shift)
                total += self.sums[row, 1, n] * factor if is_there else Float32(0.0)
                rounded += self.sums[row, 2, n] * factor if is_there else Float32(0.0)
                low += self.o[column, row, n] * factor if is_there else Float32(0.0)
                high += self.o[column + 1, row, n] * factor if is_there else Float32(0.0)
            first = self.rank * width + column
            store_columns(outputs, rows, row, first, [low, high], RowSum(shift, total, rounded))


def send(tensor: cute.Tensor, place: tuple, to: Int32, value: Float32) -> None:
    """An element of a tensor in shared memory, to that of another CTA of the cluster."""
    cute.arch.inline_ptx(
        "{ .reg .b32 to; mapa.shared::cluster.u32 to, {$r0}, {$r1}; st.shared::cluster.f32 [to], {$r2}; }",
        read_only_args=[address_of(tensor, place), to, value],
    )


def send_2(tensor: cute.Tensor, place: tuple, to: Int32, low: Float32, high: Float32) -> None:
    """The same of two neighbours."""
    cute.arch.inline_ptx(
        "{ .reg .b32 to; mapa.shared::cluster.u32 to, {$r0}, {$r1}; "
        "st.shared::cluster.v2.f32 [to], {{$r2}, {$r3}}; }",
        read_only_args=[address_of(tensor, place), to, low, high],
    )


def address_of(tensor: cute.Tensor, place: tuple) -> Int32:
    """In shared memory, of the CTA itself."""
    return Int32((tensor.iterator + cute.crd2idx(place, tensor.layout)).toint())
