"""Key tiles whose visits are divided among CTAs, so that none is waited for at the end of a launch.

A launch has some key tiles a CTA, of equal walks without a mask: with 2.2 of them two CTAs of ten work on a third one
while the others have nothing to do. So the visits of the last tiles are cut into pieces, about one for each CTA, and
dK and dV of these leave in float32, to be added up by ``finish``. Under a causal mask, where few tiles are waited for
that are longer than the mean, all are cut.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.backward.step import NUMBERS_OF_A_PLACE
from cute_kernels.fast_math import pin
from cute_kernels.integers import maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import Visit
from cute_kernels.tile_scheduler import TileScheduler
from cute_kernels.window import Window
from hopper.backward.batch import DenseBatch
from hopper.backward.consumer import BackwardConsumer
from hopper.backward.epilogue import store_words
from hopper.backward.parts import head_of_part
from hopper.backward.work import BackwardWork


@dataclass(frozen=True)
class DividedTiles(LoopInvariant):
    """Which tiles of a launch are divided: ``count`` of them from number ``first`` on, into ``each`` pieces, of which
    ``reciprocal`` is ``reciprocal_of``. The launch has items then: a piece, or a tile that is not divided.

    ``sums`` are dK and dV, float32 (words, warpgroups, pieces, divided tiles), ``places`` int32, for each divided tile
    n_block, head of K and V, and batch.
    """

    first: Int32 | int
    count: Int32 | int
    each: Int32 | int
    reciprocal: Int32 | int
    sums: tuple = ()
    places: tuple = ()

    def items(self, num_tiles: Int32 | int) -> Int32 | int:
        """Of so many tiles."""
        return num_tiles + self.count * (self.each - 1)

    def tile(self, item: Int32 | int) -> Int32 | int:
        """The tile of an item."""
        inside = minimum(maximum(item - self.first, 0), self.count * self.each)
        return item - inside + head_of_part(inside, self.reciprocal)

    def piece(self, item: Int32 | int) -> Int32 | int:
        """The number of an item among the pieces of its tile, if that is divided."""
        inside = item - self.first
        return inside - head_of_part(inside, self.reciprocal) * self.each

    def is_piece(self, item: Int32 | int) -> Boolean | bool:
        """Whether it is one."""
        inside = item - self.first
        return (inside >= 0) & (inside < self.count * self.each)

    def begin(self, piece: Int32 | int, blocks: Int32 | int) -> Int32 | int:
        """The first of ``blocks`` query tiles that a piece visits; the next one's is where it ends."""
        return head_of_part(blocks * piece, self.reciprocal)


def blocks_between(span: tuple, head: Int32 | int, visit: Visit) -> Visit:
    """Of what a key tile visits of each query head those of number ``head`` that are within ``span``, the first and
    the end of a range of all query tiles that it visits, head by head."""
    begin, end = span
    blocks = visit.end - visit.begin
    first, last = (visit.begin + minimum(maximum(x - head * blocks, 0), blocks) for x in (begin, end))
    unmasked = minimum(maximum(visit.unmasked, first), last)
    return Visit(first, unmasked, last, last)


@dataclass(frozen=True)
class PieceWork(BackwardWork):
    """``BackwardWork`` some of whose tiles are divided, by ``divided``."""

    divided: DividedTiles | None = None

    @property
    def num_items(self) -> Int32:
        return self.divided.items(self.num_tiles)

    @cute.jit
    def span(self, item: Int32, visit: Visit) -> tuple[Int32, Int32]:
        """What an item visits of the query tiles of all heads, ``visit`` being that of its key tile and a head."""
        begin, end = Int32(0), (visit.end - visit.begin) * self.query_heads.shared
        if self.divided.is_piece(item):
            blocks, piece = end, self.divided.piece(item)
            begin, end = self.divided.begin(piece, blocks), self.divided.begin(piece + 1, blocks)
        return begin, end

    @cute.jit
    def leave(self, item: Int32, consumer: BackwardConsumer, wg: Int32, scale: Float32):
        """A consumer warpgroup's dK and dV of a piece, and once for each tile where that lies."""
        p = self.divided
        inside, piece = p.tile(item) - p.first, p.piece(item)
        scaled = consumer.acc_dK.load() * scale
        consumer.acc_dK.store(scaled)
        accumulators = consumer.acc_dK, consumer.acc_dV
        for i in cutlass.range_constexpr(2):
            store_words(accumulators[i], p.sums[i][None, wg, piece, inside], pin(consumer.thread, Int32))
        if piece == 0 and wg == 0 and consumer.thread == 0:
            for i, number in enumerate(self.coordinates(p.tile(item))):
                p.places[0][NUMBERS_OF_A_PLACE * inside + i] = number


class PieceBatch(DenseBatch):
    """``DenseBatch``, whose plan are the fields of ``DividedTiles``."""

    def lengths(self, mQ: cute.Tensor, mK: cute.Tensor, plan: tuple) -> tuple:
        return *super().lengths(mQ, mK, plan), plan

    def work(
        self,
        window: Window,
        scheduler: TileScheduler,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sizes: tuple[tuple, tuple],
    ) -> PieceWork:
        *seqlens, plan = lengths
        work = super().work(window, scheduler, seqlens, heads_per_kv_head, sizes)
        return PieceWork(**vars(work), divided=DividedTiles(*plan))
