"""dQ: summed over key tiles in global memory, in float32 and in the order of the accumulators.

The part of a warp is made of fragments, 16 rows by 8 columns, of 128 words (``word_order``): element 0 of each lane,
then element 1 of each, so that the additions of a warp go to words next to each other.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.ampere.backward.batch import DenseTiles, PackedTiles
from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.backward.key_tile import KeyTile
from cute_kernels.ampere.config import WARP_THREADS
from cute_kernels.backward.turns import count_up, wait_for_count
from cute_kernels.fast_math import pin
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import DENSE

WORD_BYTES = 4


class GradientOfQ(LoopInvariant):
    """Adds a warp's part of dQ of a block to global memory.

    ``mdQ`` is float32 (batch, heads, query tiles, parts, words), or packed without the first, zero before the launch.
    With ``ordered``, ``turns`` is int32 (batch, heads, query tiles, parts), zero before the launch: how many key tiles
    have added to each part; they do so in the order of their turns. ``tiles`` finds those of the sequence in both.
    """

    def __init__(
        self,
        config: AmpereBackwardConfig,
        mdQ: cute.Tensor,
        turns: cute.Tensor,
        key_tile: KeyTile,
        tiles: DenseTiles | PackedTiles,
        warp_and_lane: tuple[Int32, Int32],
    ):
        self.config, self.mdQ, self.turns, self.key_tile = config, mdQ, turns, key_tile
        self.tiles = tiles
        self.warp, self.lane = warp_and_lane

    @cute.jit
    def add(self, make: Callable[[int], list[cute.Tensor]], place: tuple):
        """Add to the tile at ``place``, (head, query tile) and of a list its ``ListedQuery``, what ``make`` gives for
        each of ``dq_passes`` parts of the columns: accumulators of bands of 16 rows."""
        for part in cutlass.range_constexpr(self.config.dq_passes):
            accs = make(part)
            if const_expr(self.config.ordered and part == 0):
                wait_for_count(*self._count_and_turn(place), self._is_shared)
                cute.arch.sync_warp()
            self._add_part(accs, place, part)
        if const_expr(self.config.ordered):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if self.lane == 0:
                count_up(*self._count_and_turn(place), self._is_shared)

    @property
    def _is_shared(self) -> bool:
        return self.config.layout != DENSE

    def _pinned(self, place: tuple) -> tuple[Int32, ...]:
        """Where a warp's part lies, or else addresses are computed before the loop over blocks and held in registers
        throughout. Where dQ takes fewer, in passes, those for the warp are affordable, and it is faster."""
        return (*self.tiles.pinned(*place[:2]), self._pinned_if_scarce(self.warp))

    def _pinned_if_scarce(self, x: Int32) -> Int32:
        return pin(x, Int32) if self.config.dq_passes == 1 else x

    def _count_and_turn(self, place: tuple) -> tuple[cute.Pointer, Int32]:
        pinned = self._pinned(place)
        count = self.turns.iterator + self.turns.layout(pinned)
        for listed in place[2:]:
            return count, listed.turn
        return count, self.key_tile.turn(self.tiles.m_block_of(pinned))

    def _add_part(self, accs: list[cute.Tensor], place: tuple, part: int) -> None:
        c = self.config
        offset_of_lane = Int64(self._pinned_if_scarce(self.lane) * WORD_BYTES)
        first = self.mdQ[(*self._pinned(place), None)].iterator.toint() + offset_of_lane
        words_per_band = WARP_THREADS * cute.size(accs[0])
        for band, acc in enumerate(accs):
            start = (band * c.dq_passes + part) * words_per_band
            for i in range(cute.size(acc)):
                offset = (start + i * WARP_THREADS) * WORD_BYTES
                cute.arch.inline_ptx(
                    f"red.global.add.f32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[first, acc[i]]
                )
