"""How key blocks are shared out, by the kernels' own formulas in Python ints, against what follows from brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import CAUSAL, EVERYTHING, NO_LIMIT, Window
from hopper.decode.schedule import (
    MOST_TOGETHER,
    HeadsTogether,
    Pieces,
    SequenceBlocks,
    TileParts,
    heads_together,
    launched_together,
)

TILE_N = 4


def rows_of_blocks() -> Iterator[tuple[int, list[int]]]:
    """CTAs, and the blocks of each tile of a row: few of each, all of a kind, and as they come."""
    yield from ((ctas, [blocks] * tiles) for ctas, blocks, tiles in product(range(1, 9), range(1, 6), (1, 3)))
    draw = random.Random(0)
    for _ in range(60):
        yield draw.randint(1, 40), [draw.choice((1, 2, 9, 100)) for _ in range(draw.randint(1, 30))]


@pytest.mark.parametrize("ctas", range(1, 10))
def test_pieces_are_alike_and_lie_end_to_end(ctas: int) -> None:
    for units in (*range(40), 10_007):
        pieces = Pieces(units, ctas)
        begins = [pieces.begin(cta) for cta in range(ctas + 1)]
        lengths = [end - begin for begin, end in pairwise(begins)]
        assert begins[0] == 0 and begins[-1] == units
        assert sorted(lengths, reverse=True) == lengths and lengths[0] - lengths[-1] <= 1
        for unit in range(min(units, 40)):
            assert pieces.owner(unit) == max(cta for cta in range(ctas) if begins[cta] <= unit)


def parts_of(ctas: int, tiles: list[int], max_splits: int) -> Iterator[TileParts]:
    pieces, start = Pieces(sum(tiles), ctas), 0
    for blocks in tiles:
        yield TileParts.of(pieces, start, blocks, max_splits)
        start += blocks


@pytest.mark.parametrize("max_splits", [1, 2, 3, 7, 2**20])
def test_every_block_of_a_tile_is_in_one_part(max_splits: int) -> None:
    """Parts are in the order of CTAs, and no more than are allowed."""
    for ctas, tiles in rows_of_blocks():
        for parts in parts_of(ctas, tiles, max_splits):
            begins = [parts.begin(cta) for cta in range(ctas + 1)]
            assert begins[0] == 0 and begins[-1] == parts.blocks and sorted(begins) == begins
            assert 1 <= len({begin for begin in begins if begin < parts.blocks}) <= max_splits


@pytest.mark.parametrize("max_splits", [1, 2, 3, 2**20])
def test_a_part_is_of_a_cta_that_comes_by_and_is_looked_for(max_splits: int) -> None:
    """The tile's first part is that of the CTA in whose piece the tile begins, and no other begins with block 0: by
    that the two places for partial results of a CTA are told apart."""
    for ctas, tiles in rows_of_blocks():
        for parts in parts_of(ctas, tiles, max_splits):
            pieces, end = parts.pieces, parts.start + parts.blocks
            assert pieces.begin(parts.first_cta) <= parts.start < pieces.begin(parts.first_cta + 1)
            assert pieces.begin(parts.last_cta) < end <= pieces.begin(parts.last_cta + 1)
            for cta in range(ctas):
                first, behind = parts.begin(cta), parts.begin(cta + 1)
                comes_by = pieces.begin(cta) < end and pieces.begin(cta + 1) > parts.start
                assert comes_by == (parts.first_cta <= cta <= parts.last_cta)
                assert comes_by or first == behind
                assert (first == 0 < behind) == (cta == parts.first_cta)


def test_a_part_is_the_piece_where_parts_are_not_limited() -> None:
    for ctas, tiles in rows_of_blocks():
        for parts in parts_of(ctas, tiles, 2**20):
            for cta in range(ctas + 1):
                inside = parts.pieces.begin(cta) - parts.start
                assert parts.begin(cta) == min(max(inside, 0), parts.blocks)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 6, 8, 12, 32, 40])
@pytest.mark.parametrize("ctas", [1, 6, 64, 112, 128, 132])
def test_neighbouring_ctas_visit_the_same_keys_of_neighbouring_heads(kv_heads: int, ctas: int) -> None:
    """All blocks of all heads are visited once, by CTAs with as many blocks as each other."""
    lengths = [7, 1, 30, 2, 11]
    count = heads_together(kv_heads, ctas)
    assert count % launched_together(count) == 0 and launched_together(count) == (1 if count % 2 else 2)
    assert count == max(n for n in range(1, MOST_TOGETHER + 1) if math.gcd(kv_heads, ctas) % n == 0)
    together = [HeadsTogether(count, cta % count) for cta in range(ctas)]
    row = [
        (sequence, number, block)
        for sequence, blocks in enumerate(lengths)
        for number in range(kv_heads // count)
        for block in range(blocks)
    ]
    pieces = Pieces(len(row), ctas // count)
    visited, work = [], []
    for cta, heads in enumerate(together):
        assert heads.cta(cta // count) == cta
        own = row[pieces.begin(cta // count) : pieces.begin(cta // count + 1)]
        visited += [(sequence, heads.head(number), block) for sequence, number, block in own]
        work.append(own)
    everything = (
        (s, head, block) for s, n in enumerate(lengths) for head in range(kv_heads) for block in range(n)
    )
    assert sorted(visited) == sorted(everything)
    assert max(map(len, work)) - min(map(len, work)) <= 1
    for first in range(0, ctas, count):
        assert all(own == work[first] for own in work[first : first + count])
        assert [heads.head(0) for heads in together[first : first + count]] == list(range(count))


WINDOWS = {
    "everything": EVERYTHING,
    "causal": CAUSAL,
    "sides": Window(3, 2),
    "itself": Window(0, 0),
    "left": Window(5, NO_LIMIT),
    "right": Window(NO_LIMIT, 1),
    "chunks": Window(NO_LIMIT, 0, 6),
    "short chunks and sides": Window(2, 1, 3),
    "chunks as long as a block": Window(NO_LIMIT, NO_LIMIT, 4),
}


def seen(window: Window, seqlens: SeqlenInfo, query: int) -> set[int]:
    """The keys that a query sees, by the words of ``Window``."""
    level = query + seqlens.seqlen_k - seqlens.seqlen_q
    keys = set(range(seqlens.seqlen_k))
    if window.has_left:
        keys = {key for key in keys if key >= level - window.left}
    if window.has_right:
        keys = {key for key in keys if key <= level + window.right}
    if window.has_chunk:
        keys = {key for key in keys if key // window.chunk == level // window.chunk}
    return keys


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_blocks_of_a_sequence(window: Window) -> None:
    """No visible key is left out, the first block is one that the first query has to visit, and where nothing is masked
    every query sees every key."""
    for queries, keys in product(range(1, 8), range(30)):
        seqlens = SeqlenInfo(queries, keys)
        blocks = SequenceBlocks(seqlens, window, TILE_N)
        assert 0 <= blocks.begin < blocks.end and blocks.count == blocks.end - blocks.begin
        assert blocks.end == max(-(-keys // TILE_N), 1)
        of_each = [seen(window, seqlens, query) for query in range(queries)]
        visited = set(range(blocks.begin * TILE_N, blocks.end * TILE_N))
        assert set().union(*of_each) <= visited
        if of_each[0]:
            assert blocks.begin == min(of_each[0]) // TILE_N
        for block in range(max(blocks.begin, blocks.left_masked_end), min(blocks.end, blocks.unmasked_end)):
            assert set(range(block * TILE_N, (block + 1) * TILE_N)) <= set.intersection(*of_each)


def test_long_sequences_have_blocks_without_a_mask() -> None:
    seqlens = SeqlenInfo(2, 101)
    for window, unmasked in ((EVERYTHING, (0, 25)), (CAUSAL, (0, 25)), (Window(40, 3), (15, 25))):
        blocks = SequenceBlocks(seqlens, window, TILE_N)
        assert (blocks.left_masked_end, blocks.unmasked_end) == unmasked
