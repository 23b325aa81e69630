"""Sequences of a cache over a latent: a warp finds a tile among them in two steps, however many they are."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.decode.batch import LANES, CacheBatch, LaneBlocks


@dataclass(frozen=True)
class LaneTiles(LoopInvariant):
    """What each lane of a warp knows of its sequences: their ``units`` of the row of blocks, and their tiles, both with
    the sum up to its own of those of all lanes; ``blocks`` are those of a tile of its first sequence."""

    blocks: Int32
    units: Int32
    units_upto: Int32
    tiles: Int32
    tiles_upto: Int32

    @property
    def all_units(self) -> Int32:
        return cute.arch.shuffle_sync(self.units_upto, offset=LANES - 1)

    @property
    def all_tiles(self) -> Int32:
        return cute.arch.shuffle_sync(self.tiles_upto, offset=LANES - 1)

    def with_cost(self, tile_cost: Int32) -> LaneBlocks:
        """Where a tile counts as so many blocks more."""
        units, upto = self.units + tile_cost * self.tiles, self.units_upto + tile_cost * self.tiles_upto
        return LaneBlocks(self.blocks + tile_cost, units, upto)


@dataclass(frozen=True)
class LatentBatch(CacheBatch):
    """``CacheBatch`` where each lane of a warp adds up the blocks of ``of_a_lane`` neighbouring sequences, whose
    lengths are loaded independently of each other; the warp then looks through those of one lane. A K/V head has the
    tiles of this CTA alone, where ``together`` of them are visited at the same time."""

    together: Any = 1

    def row_tiles(self, seqlens: SeqlenInfo) -> Any:
        """Tiles of a K/V head that this CTA visits."""
        return divide(CacheBatch.row_tiles(self, seqlens), self.together)

    @property
    def of_a_lane(self) -> Int32:
        return divide(self.batch + LANES - 1, LANES)

    def before(self, lane: Int32) -> Int32:
        """Sequences of all lanes before one."""
        return minimum(lane * self.of_a_lane, self.batch)

    @cute.jit
    def scan_all(self, lane: Int32) -> LaneTiles:
        """All sequences, some a lane."""
        first, end = self.before(lane), self.before(lane + 1)
        blocks, units, tiles = Int32(self.blocks(self._seqlens(first)).units), Int32(0), Int32(0)
        for sequence in cutlass.range(first, end, unroll=4):
            seqlens = self._seqlens(sequence)
            of_sequence = self.tiles(seqlens)
            units += self.blocks(seqlens).units * of_sequence
            tiles += of_sequence
        units_upto, tiles_upto = units, tiles
        if self.batch > 1:
            for i in cutlass.range_constexpr(LANES.bit_length() - 1):
                units_below, tiles_below = (
                    cute.arch.shuffle_sync_up(x, offset=1 << i) for x in (units_upto, tiles_upto)
                )
                units_upto += units_below if lane >= (1 << i) else Int32(0)
                tiles_upto += tiles_below if lane >= (1 << i) else Int32(0)
        else:
            units_upto, tiles_upto = (cute.arch.shuffle_sync(x, offset=0) for x in (units, tiles))
        return LaneTiles(blocks, units, units_upto, tiles, tiles_upto)

    def _seqlens(self, sequence: Int32) -> SeqlenInfo:
        """Of the last sequence, for those behind it."""
        return self.seqlens(minimum(sequence, self.batch - 1))

    @cute.jit
    def locate(self, unit: Int32, scanned: LaneBlocks, lane: Int32) -> tuple[Int32, Int32, Int32]:
        """As that of ``CacheBatch``; ``scanned`` are all sequences."""
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(scanned.upto <= unit))
        is_behind, owner = passed == LANES, minimum(passed, LANES - 1)
        sequence, begin = self.before(owner), scanned.upto - scanned.units
        blocks = scanned.blocks
        if self.batch > LANES:
            begin = cute.arch.shuffle_sync(begin, offset=owner)
            sequence, blocks, begin = self._search(sequence, begin, unit, lane)
        else:
            begin, blocks = (cute.arch.shuffle_sync(x, offset=owner) for x in (begin, blocks))
        tile = divide(maximum(unit - begin, 0), blocks)
        start = begin + tile * blocks
        all_units = cute.arch.shuffle_sync(scanned.upto, offset=LANES - 1)
        return (
            self.batch if is_behind else sequence,
            Int32(0) if is_behind else tile,
            all_units if is_behind else start,
        )

    @cute.jit
    def _search(self, first: Int32, begin: Int32, unit: Int32, lane: Int32) -> tuple[Int32, Int32, Int32]:
        """The sequence that has a unit, among those from ``first`` on, whose first unit is ``begin``, the blocks of a
        tile of it, and its first unit."""
        found = self.scan(first, lane)
        blocks, units, upto = found.blocks, found.units, begin + found.upto
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= unit))
        while passed == LANES and first + LANES < self.batch:
            first += LANES
            following = self.scan(first, lane)
            upto = cute.arch.shuffle_sync(upto, offset=LANES - 1) + following.upto
            blocks, units = following.blocks, following.units
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= unit))
        owner = minimum(passed, LANES - 1)
        blocks, begin = (cute.arch.shuffle_sync(x, offset=owner) for x in (blocks, upto - units))
        return first + passed, blocks, begin
