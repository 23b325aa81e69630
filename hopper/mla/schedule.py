"""How the key blocks of tiles over a latent are shared out: as in hopper/decode/schedule.py, and by what they are."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import divide, maximum, minimum
from hopper.decode.operands import CacheLists, Work
from hopper.decode.schedule import HeadsTogether, Pieces
from hopper.mla.batch import LatentBatch
from hopper.mla.config import MlaConfig

TILE_COST = {1: 2, 2: 3}
"""Key blocks that CTAs could visit in the time that a tile takes beside its own, for Q, the first scores, the last
product and O: by the CTAs of a cluster. With 128 heads 3 were faster than 6 once Q and O went by TMA
(``mla_tiles.json``, ``box3`` beside ``box``)."""

SHORTENED = 8
"""A tile counts as a block more for every so many that a piece has, up to TILE_COST."""

PIECE_STEP = 16
"""Pieces are a multiple of it where all of them then are as long as each other, and at most 1 of 16 less."""


MOST_TOGETHER = 8
"""Neighbouring tiles of a K/V head: all that 1024 rows have, the most that this kernel is given."""


def tiles_together(row_tiles: Any, pieces: Any) -> Any:
    """The most tiles of a K/V head with ``row_tiles`` of them, up to MOST_TOGETHER, such that as many clusters visit
    each of them at the same time, and no more than 1 of PIECE_STEP ``pieces`` is left over: a divisor of the tiles."""
    most = 1
    for count in range(2, MOST_TOGETHER + 1):
        left = pieces % count
        is_near = 1 - minimum(divide(left * PIECE_STEP, pieces + 1), 1)
        divides = (1 - minimum(row_tiles % count, 1)) * is_near
        most = maximum(most, count * divides)
    return most


@dataclass(frozen=True)
class TilesTogether(HeadsTogether):
    """``count`` neighbouring tiles of a K/V head, which as many neighbouring clusters visit at the same keys; ``own``
    is the number of this cluster's among them. The keys of such tiles are the same: who reads them first brings them to
    L2, for the others."""

    def head(self, number: Any) -> Any:
        return number

    def row_tile(self, number: Any) -> Any:
        return number * self.count + self.own


@dataclass(frozen=True)
class LeadingPieces(Pieces):
    """Of CTAs of which those behind ``ctas`` have none."""

    def begin(self, cta: Any) -> Any:
        return minimum(Pieces.begin(self, cta), self.units)


def shares(units: Any, tiles: Any, most: Any, most_cost: int) -> tuple[Any, Any]:
    """Pieces that ``units`` key blocks of some tiles are cut into, at most ``most``, and the blocks that a tile counts
    as beside its own, at most ``most_cost``.

    Where both come to like pieces, as they do where all sequences are of a length, these are taken, and no tile is cut
    that need not be. Else there are as many pieces as can be, each shorter for every tile that ends in it.
    """
    behind = most % PIECE_STEP
    is_near = 1 - minimum(divide(behind * PIECE_STEP, most + 1), 1)
    alike = most - is_near * behind
    is_alike = 1 - minimum(units % alike + (tiles % alike) * (alike % tiles), 1)
    tile_cost = (1 - is_alike) * minimum(divide(units, most * SHORTENED), most_cost)
    return most - is_alike * (most - alike), tile_cost


def mla_work(
    config: MlaConfig,
    lists: CacheLists,
    mQ: cute.Tensor,
    place: tuple[Int32, Int32],
    tiles_of_head: TilesTogether,
    lane: Int32,
) -> Work:
    """The work of one CTA, or cluster; ``place`` are its piece of a row and the most pieces of that."""
    batch = replace(lists.batch(config, mQ, LatentBatch), together=tiles_of_head.count)
    scanned = batch.scan_all(lane)
    units, tiles = scanned.groups.totals
    ctas, tile_cost = shares(units, maximum(tiles, 1), place[1], TILE_COST[config.cluster])
    pieces = LeadingPieces(units + tile_cost * tiles, ctas)
    batch, counted = replace(batch, tile_cost=tile_cost), scanned.with_cost(tile_cost)
    return Work(batch, pieces, lists.most_parts, place[0], tiles_of_head, scanned=(counted,))
