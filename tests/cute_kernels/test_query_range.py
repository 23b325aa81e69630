"""Query tiles of a key tile against brute force over every (query, key) pair."""

import itertools

import pytest

from cute_kernels.key_blocks import BlockRange
from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import CAUSAL, EVERYTHING, NO_LIMIT, Window

SIZES = [SeqlenInfo(*size) for size in itertools.product((1, 5, 64, 130), (1, 7, 128, 200, 420))]
WINDOWS = [EVERYTHING, CAUSAL, Window(0, 0), Window(5, 0), Window(70, 0), Window(40, 90), Window(1000, 17)]
WINDOWS += [Window(33, None), Window(None, 20), Window(NO_LIMIT, NO_LIMIT), Window(0, NO_LIMIT)]
WINDOWS += [Window(NO_LIMIT, 3)]
WINDOWS += [Window(NO_LIMIT, 0, 7), Window(NO_LIMIT, NO_LIMIT, 64), Window(NO_LIMIT, NO_LIMIT, 100)]
WINDOWS += [Window(NO_LIMIT, 0, 1000), Window(20, 0, 32), Window(9, 40, 128), Window(NO_LIMIT, NO_LIMIT, 1)]
TILES = [(16, 32), (64, 128), (128, 64)]


def sees(query: int, key: int, seqlens: SeqlenInfo, window: Window) -> bool:
    level = query + seqlens.seqlen_k - seqlens.seqlen_q
    distance = key - level
    return (
        key < seqlens.seqlen_k
        and (window.chunk is None or key // window.chunk == level // window.chunk)
        and (window.left is None or distance >= -window.left)
        and (window.right is None or distance <= window.right)
    )


def key_tiles(queries: QueryRange, seqlens: SeqlenInfo) -> range:
    return range(-(-seqlens.seqlen_k // queries.tile_n))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("tile_m,tile_n", TILES)
def test_visited_tiles_are_those_with_a_query_that_sees_a_key(tile_m, tile_n, window):
    queries, with_one = (QueryRange(tile_m, tile_n, window, least) for least in (0, 1))
    for seqlens in SIZES:
        for n_block in key_tiles(queries, seqlens):
            keys = range(n_block * tile_n, (n_block + 1) * tile_n)
            seeing = [i for i in range(seqlens.seqlen_q) if any(sees(i, j, seqlens, window) for j in keys)]
            visited = range(queries.begin(n_block, seqlens), queries.end(n_block, seqlens))
            if not seeing:
                assert not visited
                assert (with_one.begin(n_block, seqlens), with_one.end(n_block, seqlens)) == (0, 1)
                continue
            assert visited == range(min(seeing) // tile_m, max(seeing) // tile_m + 1)
            assert visited == range(with_one.begin(n_block, seqlens), with_one.end(n_block, seqlens))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("tile_m,tile_n", TILES)
def test_unmasked_tiles_are_those_whose_queries_see_every_key(tile_m, tile_n, window):
    queries = QueryRange(tile_m, tile_n, window)
    for seqlens in SIZES:
        for n_block in key_tiles(queries, seqlens):
            keys = range(n_block * tile_n, (n_block + 1) * tile_n)
            begin, end = queries.begin(n_block, seqlens), queries.end(n_block, seqlens)
            unmasked = range(queries.unmasked_begin(n_block, seqlens), queries.unmasked_end(n_block, seqlens))
            assert begin <= unmasked.start <= unmasked.stop <= end
            for m_block in range(begin, end):
                rows = range(m_block * tile_m, (m_block + 1) * tile_m)
                of_sequence = rows[: seqlens.seqlen_q - rows.start]
                if m_block in unmasked:
                    assert all(sees(i, j, seqlens, window) for i in of_sequence for j in keys)
                else:
                    # Rows past the end of a ragged last tile count as rows.
                    assert not all(sees(i, j, seqlens, window) for i in rows for j in keys)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_it_is_the_transpose_of_the_block_range(window):
    blocks, queries = BlockRange(64, 128, window), QueryRange(64, 128, window)
    for seqlens in SIZES:
        forward = {
            (m, n)
            for m in range(queries.tiles(seqlens))
            for n in range(blocks.begin(m, seqlens), blocks.end(m, seqlens))
        }
        backward = {
            (m, n)
            for n in key_tiles(queries, seqlens)
            for m in range(queries.begin(n, seqlens), queries.end(n, seqlens))
        }
        # The forward visits a block for a tile without keys, and one for rows past the end that would see its keys.
        assert backward <= forward
        for m, n in forward - backward:
            rows = range(m * 64, min((m + 1) * 64, seqlens.seqlen_q))
            assert not any(sees(i, j, seqlens, window) for i in rows for j in range(n * 128, n * 128 + 128))


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("tile_m,tile_n", TILES)
def test_turns_are_the_order_in_which_key_tiles_are_claimed(tile_m, tile_n, window, least):
    """Each key tile waits for those alone that are claimed before it and visit the same query tile."""
    queries = QueryRange(tile_m, tile_n, window, least)
    for seqlens in SIZES:
        tiles = key_tiles(queries, seqlens)
        claimed = reversed(tiles) if queries.last_keys_first else tiles
        count = [0] * queries.tiles(seqlens)
        for n_block in claimed:
            for m_block in range(queries.begin(n_block, seqlens), queries.end(n_block, seqlens)):
                assert queries.turn(n_block, m_block, len(tiles), seqlens) == count[m_block]
                count[m_block] += 1


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_key_tiles_of_a_sequence_without_queries(window):
    none, one = (QueryRange(64, 128, window, least) for least in (0, 1))
    for seqlens in (SeqlenInfo(0, 1), SeqlenInfo(0, 420)):
        for turn, n_block in enumerate(key_tiles(one, seqlens)):
            assert none.end(n_block, seqlens) == 0
            assert (one.begin(n_block, seqlens), one.end(n_block, seqlens)) == (0, 1)
            tiles = len(key_tiles(one, seqlens))
            expected = tiles - 1 - turn if one.last_keys_first else turn
            assert one.turn(n_block, 0, tiles, seqlens) == expected
