"""How key blocks of tiles over a latent are shared out, by the kernel's own formulas in Python ints."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hopper.decode.schedule import TileParts
from hopper.mla.schedule import (
    MOST_TOGETHER,
    PIECE_STEP,
    LeadingPieces,
    TilesTogether,
    shares,
    tiles_together,
)

CLUSTERS_OF_132 = 66

TILE_COST = 3


def parts_of(tiles: list[int], most: int) -> list[list[int]]:
    """Blocks of each part that each CTA has, checked to be all blocks of each tile once, in order."""
    ctas, tile_cost = shares(sum(tiles), len(tiles), most, TILE_COST)
    pieces, start = LeadingPieces(sum(tiles) + tile_cost * len(tiles), ctas), 0
    of_ctas: list[list[int]] = [[] for _ in range(most)]
    for blocks in tiles:
        parts = TileParts.of(pieces, start, blocks, None)
        begins = [parts.begin(cta) for cta in range(most + 1)]
        assert begins[0] == 0 and begins[-1] == blocks and sorted(begins) == begins
        assert begins[parts.first_cta + 1] > 0 and begins[parts.last_cta] < blocks
        for of_cta, (begin, end) in zip(of_ctas, pairwise(begins), strict=True):
            of_cta += [end - begin] if end > begin else []
        start += blocks + tile_cost
    assert pieces.begin(most) == start
    return of_ctas


@pytest.mark.parametrize(
    ("units", "tiles", "most", "found"),
    [
        (128 * 128, 128, 66, (64, 0)),
        (128 * 132, 128, 66, (64, 0)),
        (132 * 128, 132, 66, (66, TILE_COST)),
        (128 * 128 + 1, 128, 66, (66, TILE_COST)),
        (128 * 129, 128, 132, (128, 0)),
        (512 * 16, 16, 132, (128, 0)),
        (57 * 100, 57, 57, (57, 0)),
        (48 * 100, 48, 57, (57, TILE_COST)),
        (57 * 10 + 1, 57, 57, (57, 1)),
        (7 * 66 + 1, 2, 66, (66, 0)),
        (3, 1, 1, (1, 0)),
        (7, 2, 5, (5, 0)),
    ],
)
def test_pieces_and_cost(units: int, tiles: int, most: int, found: tuple[int, int]) -> None:
    assert shares(units, tiles, most, TILE_COST) == found


def test_lengths_alike_are_not_cut() -> None:
    assert parts_of([128] * 128, CLUSTERS_OF_132) == [[128, 128]] * 64 + [[]] * 2
    assert parts_of([128] * 132, CLUSTERS_OF_132) == [[128, 128]] * 66


def test_every_block_is_in_one_part() -> None:
    draw = random.Random(0)
    for _ in range(100):
        tiles = [draw.choice((1, 2, 40, 300)) for _ in range(draw.randint(1, 30))]
        parts_of(tiles, draw.randint(1, 2 * PIECE_STEP + 2))


def test_no_cta_has_much_more_than_the_mean() -> None:
    """Parts counted as TILE_COST blocks more, of lengths up to 16k as they come: 2 % at most, where pieces of as many
    blocks each would have 5 to 7."""
    draw = random.Random(1)
    for most in (66, 132):
        tiles = [draw.randint(1, 256) for _ in range(128)]
        costs = [sum(parts) + TILE_COST * len(parts) for parts in parts_of(tiles, most)]
        assert max(costs) <= 1.02 * sum(costs) / most


@pytest.mark.parametrize(
    ("row_tiles", "pieces", "count"),
    [
        *((n, 66, n) for n in range(1, 9)),
        *((n, 57, n) for n in (2, 4, 8)),
        (9, 66, 3),
        (16, 66, 8),
        (2, 3, 1),
        (2, 1, 1),
        (3, 17, 1),
        (2, 17, 2),
    ],
)
def test_tiles_together(row_tiles: int, pieces: int, count: int) -> None:
    """As many as divide the tiles, with no more than a sixteenth of the clusters left over."""
    assert tiles_together(row_tiles, pieces) == count
    assert row_tiles % count == 0 and count <= MOST_TOGETHER
    assert pieces % count * PIECE_STEP <= pieces


def test_clusters_side_by_side_have_all_tiles_of_a_head() -> None:
    """Each once, with places of their own for partial results."""
    row_tiles, pieces = 6, 4
    rows = [TilesTogether(3, own) for own in range(3)]
    assert sorted(row.row_tile(n) for row in rows for n in range(row_tiles // 3)) == list(range(row_tiles))
    assert sorted(row.cta(piece) for row in rows for piece in range(pieces)) == list(range(3 * pieces))
    assert [rows[1].head(n) for n in range(2)] == [0, 1]
