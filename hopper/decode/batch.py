"""Which sequence and which tile of it a block of the row belongs to, read off the lengths on the GPU."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import VARLEN
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import Window
from hopper.decode.config import DecodeConfig
from hopper.decode.schedule import SequenceBlocks

LANES = 32


@dataclass(frozen=True)
class LaneBlocks(LoopInvariant):
    """What each lane of a warp knows of a sequence: the key blocks of each of its tiles, one at least, those of all
    of its tiles, none where there is no sequence, and the sum of these with those of the lanes before."""

    blocks: Int32
    units: Int32
    upto: Int32


@dataclass(frozen=True)
class CacheBatch(LoopInvariant):
    """The sequences of a launch. ``lengths`` int32 (batch,) are rows of the cache that are filled; ``starts`` is empty
    or has the row of each with which its keys begin, ``offsets`` is empty or has cu_seqlens_q. ``seqlen_q`` is the
    queries of each sequence, or all of them where there are offsets. ``capacity`` is the rows that a sequence may have,
    ``kv_heads`` the K/V heads that are visited one after another, with ``group`` query heads each. A tile
    counts as ``tile_cost`` key blocks beside its own where they are shared out.

    Whatever the lengths and offsets say, what they come to lies in the tensors.
    """

    config: DecodeConfig
    window: Window
    lengths: cute.Tensor
    starts: tuple[cute.Tensor, ...]
    offsets: tuple[cute.Tensor, ...]
    seqlen_q: Int32
    capacity: Int32
    kv_heads: Int32
    group: Int32
    tile_cost: Any = 0

    def first_row(self, batch: Int32) -> Any:
        """Of the cache, that holds key 0."""
        for starts in self.starts:
            return minimum(maximum(starts[batch], 0), self.capacity)
        return 0

    def seqlens(self, batch: Int32) -> SeqlenInfo:
        filled = minimum(maximum(self.lengths[batch], 0), self.capacity)
        seqlen_k = maximum(filled - self.first_row(batch), 0)
        for offsets in self.offsets:
            first = minimum(maximum(offsets[batch], 0), self.seqlen_q)
            end = minimum(maximum(offsets[batch + 1], first), self.seqlen_q)
            return SeqlenInfo(end - first, seqlen_k, batch, first, is_packed=True)
        return SeqlenInfo(self.seqlen_q, seqlen_k, batch)

    def blocks(self, seqlens: SeqlenInfo) -> SequenceBlocks:
        return SequenceBlocks(seqlens, self.window, self.config.tile_n, self.tile_cost)

    def row_tiles(self, seqlens: SeqlenInfo) -> Any:
        """Tiles of a K/V head."""
        return divide(seqlens.seqlen_q * self.group + self.config.tile_m - 1, self.config.tile_m)

    def tiles(self, seqlens: SeqlenInfo) -> Any:
        return self.row_tiles(seqlens) * self.kv_heads

    @property
    def batch(self) -> Int32:
        return self.lengths.shape[0]

    @property
    def rows_end(self) -> Any:
        """One past the last row of packed Q that is of a sequence."""
        for offsets in self.offsets:
            return minimum(maximum(offsets[self.batch], 0), self.seqlen_q)
        return self.seqlen_q

    @cute.jit
    def units(self, sequence: Int32) -> Int32:
        """Key blocks of all tiles of a sequence; 0 behind the last one."""
        units = Int32(0)
        if sequence < self.batch:
            seqlens = self.seqlens(sequence)
            units = self.blocks(seqlens).units * self.tiles(seqlens)
        return units

    @cute.jit
    def scan(self, first: Int32, lane: Int32) -> "LaneBlocks":
        """Of LANES sequences from ``first`` on, one a lane."""
        blocks, units, sequence = Int32(1), Int32(0), first + lane
        if sequence < self.batch:
            seqlens = self.seqlens(sequence)
            blocks = Int32(self.blocks(seqlens).units)
            units = blocks * self.tiles(seqlens)
        upto = units
        if self.batch > 1:
            for i in cutlass.range_constexpr(LANES.bit_length() - 1):
                below = cute.arch.shuffle_sync_up(upto, offset=1 << i)
                upto += below if lane >= (1 << i) else Int32(0)
        else:
            upto = cute.arch.shuffle_sync(units, offset=0)
        return LaneBlocks(blocks, units, upto)

    @cute.jit
    def all_units(self, scanned: "LaneBlocks", lane: Int32) -> Int32:
        """Key blocks of all sequences, by the lanes of a warp; ``scanned`` are the first LANES of them."""
        units = cute.arch.shuffle_sync(scanned.upto, offset=LANES - 1)
        if self.batch > LANES:
            more = Int32(0)
            for first in cutlass.range(LANES, self.batch, LANES, unroll=1):
                more += self.units(first + lane)
            units += cute.arch.warp_reduction_sum(more)
        return units

    def tile_at(self, number: Int32) -> tuple[Int32, Int32]:
        """The sequence and number of a tile among those of all sequences, which have as many as each other."""
        tiles = self.tiles(self.seqlens(Int32(0)))
        sequence = divide(number, tiles)
        return sequence, number - sequence * tiles

    @cute.jit
    def units_before(self, sequence: Int32, lane: Int32) -> Int32:
        """Of all sequences before one, by the lanes of a warp."""
        units = Int32(0)
        for i in cutlass.range(lane, sequence, LANES, unroll=1):
            units += self.units(i)
        return cute.arch.warp_reduction_sum(units)

    @cute.jit
    def locate(self, unit: Int32, scanned: "LaneBlocks", lane: Int32) -> tuple[Int32, Int32, Int32]:
        """The sequence and number of the tile that has a block, and the first block of that tile; (batch, 0, all
        blocks) for one behind all. ``scanned`` are the first LANES sequences."""
        sequence, before = Int32(0), Int32(0)
        blocks, units, upto = scanned.blocks, scanned.units, scanned.upto
        # Lanes behind the last sequence have no block, and so are passed with it.
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= unit))
        while passed == LANES and sequence + LANES < self.batch:
            before += cute.arch.shuffle_sync(upto, offset=LANES - 1)
            sequence += LANES
            following = self.scan(sequence, lane)
            blocks, units, upto = following.blocks, following.units, following.upto
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= unit))
        # Every lane as if the block were of its sequence, before it is known of which.
        begin = before + upto - units
        tile = divide(maximum(unit - begin, 0), blocks)
        start = begin + tile * blocks
        is_behind = passed == LANES
        found = minimum(passed, LANES - 1)
        tile, start = (cute.arch.shuffle_sync(x, offset=found) for x in (tile, start))
        all_before = before + cute.arch.shuffle_sync(upto, offset=LANES - 1)
        return (
            self.batch if is_behind else sequence + passed,
            Int32(0) if is_behind else tile,
            all_before if is_behind else start,
        )

    @cute.jit
    def following(self, sequence: Int32, tile: Int32, tiles: Int32) -> tuple[Int32, Int32]:
        """The sequence and the number of the tile behind one of ``tiles``; sequences without queries have none."""
        tile += 1
        if tile >= tiles:
            tile = Int32(0)
            sequence += 1
            if const_expr(self.config.layout == VARLEN):
                while sequence < self.batch and self.units(sequence) == 0:
                    sequence += 1
        return sequence, tile
