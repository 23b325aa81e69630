"""The rows of a decode tile: query heads of one K/V head, of one token after another."""

import math
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.fragments import LANES_PER_ROW, ROW_STRIDE
from cute_kernels.integers import divide, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.config import WARPGROUP_THREADS
from hopper.decode.config import ROWS_PER_GROUP, DecodeConfig


@dataclass(frozen=True)
class TileRows(LoopInvariant):
    """The rows of one tile from ``first`` on, of the ``group`` heads of K/V head ``head_kv``."""

    seqlens: SeqlenInfo
    first: Int32
    head_kv: Int32
    group: Int32

    @property
    def count(self) -> Any:
        """Rows of the tile and of those behind it."""
        return self.seqlens.seqlen_q * self.group - self.first

    def factor(self, factors: tuple[cute.Tensor, ...]) -> Any:
        """The product of those of the K/V head, of tensors (batch, kv_heads)."""
        return math.prod(tensor[self.seqlens.batch, self.head_kv] for tensor in factors)

    def place(self, row: Any) -> tuple[Any, Any]:
        """Token and head of a row of the tile; those of the last row for one that does not exist."""
        row = minimum(self.first + row, self.seqlens.seqlen_q * self.group - 1)
        token = divide(row, self.group)
        return token, self.head_kv * self.group + row - token * self.group

    def of(self, tensor: cute.Tensor, row: Any) -> cute.Tensor:
        """Its row of Q or O, (batch, seqlen_q, heads, columns) or packed (total_q, heads, columns)."""
        token, head = self.place(row)
        if self.seqlens.is_packed:
            return tensor[self.seqlens.offset_q + token, head, None]
        return tensor[self.seqlens.batch, token, head, None]

    def lse_of(self, mLSE: cute.Tensor, row: Any) -> cute.Tensor:
        """One element: of mLSE (batch, heads, seqlen_q), or packed (heads, total_q)."""
        token, head = self.place(row)
        if self.seqlens.is_packed:
            return cute.domain_offset((head, self.seqlens.offset_q + token), mLSE)
        return cute.domain_offset((self.seqlens.batch, head, token), mLSE)


@dataclass(frozen=True)
class HeadRows(LoopInvariant):
    """The rows of a thread of the warpgroup: one in the upper 8 rows of its warp, and one in the lower 8 where a tile
    has 64 rows."""

    config: DecodeConfig
    tile: TileRows
    warp: Int32
    lane: Int32

    def row(self, r: int) -> Int32:
        of_warp = ROW_STRIDE * self.config.rows_per_thread
        return self.warp * of_warp + self.lane // LANES_PER_ROW + r * ROW_STRIDE

    def exists(self, r: int) -> Any:
        return self.row(r) < self.tile.count

    @property
    def are_any(self) -> Any:
        """Whether the warp has a row that exists."""
        first = self.warp * (ROW_STRIDE * self.config.rows_per_thread)
        return cute.arch.make_warp_uniform(first) < self.tile.count

    def of(self, tensor: cute.Tensor, r: int) -> cute.Tensor:
        return self.tile.of(tensor, self.row(r))

    @property
    def leads(self) -> Any:
        """Whether this thread speaks for its rows: one of those that have them does."""
        return self.lane % LANES_PER_ROW == 0

    @property
    def place(self) -> tuple[Any, int]:
        """The number of this thread among those that have the same rows, and how many these are."""
        return self.lane % LANES_PER_ROW, LANES_PER_ROW

    def levels(self) -> tuple[Int32, ...]:
        """The keys that they are level with."""
        shift = self.tile.seqlens.seqlen_k - self.tile.seqlens.seqlen_q
        return tuple(self.tile.place(self.row(r))[0] + shift for r in range(self.config.rows_per_thread))


@dataclass(frozen=True)
class SwappedRows(HeadRows):
    """The rows of a thread where they are the columns of a WGMMA: one in each ``ROWS_PER_GROUP``, the same in all
    warps."""

    def row(self, r: int) -> Int32:
        return swapped_row(self.lane, r)

    @property
    def leads(self) -> Any:
        return self.warp * 32 + self.lane < LANES_PER_ROW

    @property
    def place(self) -> tuple[Any, int]:
        return (self.warp * 32 + self.lane) // LANES_PER_ROW, WARPGROUP_THREADS // LANES_PER_ROW


def swapped_row(lane: Int32, r: int) -> Int32:
    return ROWS_PER_GROUP * r + lane % LANES_PER_ROW
