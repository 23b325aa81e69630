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

AT_ONCE = 4
"""Lengths that a lane has under way together, where there are more than two for each. With 8 calls of some 100 short
sequences are slower by 0.5 %, those of 2000 faster by 7 (``decode_many.json``)."""


@dataclass(frozen=True)
class LaneCounts(LoopInvariant):
    """What each lane of a warp has counted of one sequence, or of some neighbours: the key blocks of all their tiles,
    and perhaps the tiles; 0 where there is no sequence. ``upto`` are the sums with those of the lanes before."""

    own: tuple[Int32, ...]
    upto: tuple[Int32, ...]

    @property
    def units(self) -> Int32:
        return self.own[0]

    @property
    def units_upto(self) -> Int32:
        return self.upto[0]

    @property
    def totals(self) -> tuple[Int32, ...]:
        """Of all lanes."""
        return tuple(cute.arch.shuffle_sync(count, offset=LANES - 1) for count in self.upto)

    def with_cost(self, tile_cost: Int32) -> "LaneCounts":
        """Where a tile counts as so many blocks more."""
        own, upto = ((units + tile_cost * tiles,) for units, tiles in (self.own, self.upto))
        return LaneCounts(own, upto)


@dataclass(frozen=True)
class Scanned(LoopInvariant):
    """All sequences. ``first`` are LANES of them, one a lane, and each of their tiles has ``blocks``. Where there are
    more, ``groups`` are all, ``sequences`` neighbours a lane; else they are the same as ``first``."""

    blocks: Int32
    first: LaneCounts
    groups: LaneCounts
    sequences: Int32

    def with_cost(self, tile_cost: Int32) -> "Scanned":
        """Where a tile counts as so many blocks more."""
        first, groups = (counts.with_cost(tile_cost) for counts in (self.first, self.groups))
        return Scanned(self.blocks + tile_cost, first, groups, self.sequences)


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

    def counts(self, seqlens: SeqlenInfo) -> tuple[Any, ...]:
        """What is added up of all sequences: the key blocks of their tiles."""
        return (self.blocks(seqlens).units * self.tiles(seqlens),)

    def scan(self, first: Int32, lane: Int32) -> tuple[Int32, LaneCounts]:
        """LANES sequences from ``first`` on, one a lane, and the blocks that each of their tiles has."""
        blocks, own = self._of(first + lane)
        return blocks, LaneCounts(own, tuple(self._upto(count, lane) for count in own))

    @cute.jit
    def scan_all(self, lane: Int32) -> Scanned:
        """All sequences, by the lanes of a warp. Where there are many, AT_ONCE lengths are loaded side by side: one
        after another, each takes as long."""
        blocks, first = self.scan(Int32(0), lane)
        rows = divide(self.batch + LANES - 1, LANES)
        rows_of_group = divide(rows + LANES - 1, LANES)
        own, upto = (cute.make_rmem_tensor(len(first.own), Int32) for _ in range(2))
        for i in cutlass.range_constexpr(len(first.own)):
            own[i], upto[i] = first.own[i], first.upto[i]
        if self.batch > LANES:
            for i, total in enumerate(first.totals):
                own[i] = total if lane == 0 else Int32(0)
            if rows == 2:
                self._add_rows(own, (Int32(1), 1), rows_of_group, lane)
            else:
                for row in cutlass.range(1, rows, AT_ONCE, unroll=1):
                    self._add_rows(own, (row, AT_ONCE), rows_of_group, lane)
            for i in cutlass.range_constexpr(len(first.own)):
                upto[i] = self._upto(own[i], lane)
        groups = LaneCounts(*(tuple(x[i] for i in range(len(first.own))) for x in (own, upto)))
        return Scanned(blocks, first, groups, rows_of_group * LANES)

    @cute.jit
    def _add_rows(self, own: cute.Tensor, span: tuple[Int32, int], rows_of_group: Int32, lane: Int32):
        """Add ``span``, a first row of LANES sequences and how many rows, to what the lanes of their groups counted."""
        first, count = span
        counted = tuple(self._of((first + i) * LANES + lane)[1] for i in range(count))
        begin = lane * rows_of_group
        for i in cutlass.range_constexpr(count):
            is_own = begin <= first + i and first + i < begin + rows_of_group
            for j in cutlass.range_constexpr(len(counted[0])):
                of_row = cute.arch.warp_redux_sync(counted[i][j], "add")
                own[j] += of_row if is_own else Int32(0)

    @cute.jit
    def _of(self, sequence: Int32) -> tuple[Int32, tuple[Int32, ...]]:
        """The blocks of each tile of a sequence, and its counts, which are 0 behind the last one."""
        seqlens = self.seqlens(minimum(sequence, self.batch - 1))
        counts = self.counts(seqlens)
        is_there = Int32(1) if sequence < self.batch else Int32(0)
        return Int32(self.blocks(seqlens).units), tuple(count * is_there for count in counts)

    @cute.jit
    def _upto(self, count: Int32, lane: Int32) -> Int32:
        """The sum of what a lane and those before have counted."""
        upto = count
        if self.batch > 1:
            for i in cutlass.range_constexpr(LANES.bit_length() - 1):
                below = cute.arch.shuffle_sync_up(upto, offset=1 << i)
                upto += below if lane >= (1 << i) else Int32(0)
        else:
            upto = cute.arch.shuffle_sync(count, offset=0)
        return upto

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
    def locate(self, unit: Int32, scanned: Scanned, lane: Int32) -> tuple[Int32, Int32, Int32]:
        """The sequence and number of the tile that has a block, and the first block of that tile; (batch, 0, all
        blocks) for one behind all. ``scanned`` are all sequences."""
        sequence, before, blocks = Int32(0), Int32(0), scanned.blocks
        units, upto = scanned.first.units, scanned.first.units_upto
        if self.batch > LANES:
            groups = scanned.groups
            group = cute.arch.popc(cute.arch.vote_ballot_sync(groups.units_upto <= unit))
            group = minimum(group, LANES - 1)
            before = cute.arch.shuffle_sync(groups.units_upto - groups.units, offset=group)
            sequence = group * scanned.sequences
            if group > 0:
                blocks, of_group = self.scan(sequence, lane)
                units, upto = of_group.units, of_group.units_upto
        # Lanes behind the last sequence have no block, and so are passed with it.
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= unit))
        while passed == LANES and sequence + LANES < self.batch:
            before += cute.arch.shuffle_sync(upto, offset=LANES - 1)
            sequence += LANES
            blocks, following = self.scan(sequence, lane)
            units, upto = following.units, following.units_upto
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
