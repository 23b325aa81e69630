"""Query tiles of a key tile against brute force."""

import itertools

import pytest

from cute_kernels.key_blocks import BlockRange
from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import CAUSAL

SIZES = list(itertools.product((1, 5, 64, 130), (1, 7, 128, 200)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_m,tile_n", [(16, 32), (64, 128), (128, 64)])
def test_visited_and_unmasked_tiles(tile_m, tile_n, causal):
    queries = QueryRange(tile_m, tile_n, causal)
    for seqlen_q, seqlen_k in SIZES:
        seqlens = SeqlenInfo(seqlen_q, seqlen_k)
        tiles = -(-seqlen_q // tile_m)

        def sees(i, j, shift=seqlen_k - seqlen_q, last=seqlen_k):
            return j < last and (not causal or j <= i + shift)

        for n_block in range(-(-seqlen_k // tile_n)):
            keys = range(n_block * tile_n, (n_block + 1) * tile_n)
            begin = queries.begin(n_block, seqlens)
            unmasked = queries.unmasked_begin(n_block, seqlens)
            assert 0 <= begin <= unmasked <= queries.end(seqlens) == tiles and begin < tiles
            for m_block in range(tiles):
                rows = range(m_block * tile_m, min((m_block + 1) * tile_m, seqlen_q))
                if any(sees(i, j) for i in rows for j in keys):
                    assert m_block >= begin
                elif causal:
                    assert m_block < begin
                if m_block >= unmasked:
                    assert all(sees(i, j) for i in rows for j in keys)


def test_it_is_the_transpose_of_the_block_range():
    blocks, queries = BlockRange(64, 128, CAUSAL), QueryRange(64, 128, True)
    for seqlen_q, seqlen_k in SIZES:
        seqlens = SeqlenInfo(seqlen_q, seqlen_k)
        forward = {
            (m, n)
            for m in range(-(-seqlen_q // 64))
            for n in range(blocks.end(m, seqlens))
            if (m + 1) * 64 + seqlen_k - seqlen_q > 0
        }
        backward = {
            (m, n)
            for n in range(-(-seqlen_k // 128))
            for m in range(queries.begin(n, seqlens), queries.end(seqlens))
        }
        assert forward == backward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_m,tile_n", [(16, 32), (64, 128), (128, 64)])
def test_visitors_of_a_query_tile_are_the_first_key_tiles(tile_m, tile_n, causal):
    queries = QueryRange(tile_m, tile_n, causal)
    for seqlen_q, seqlen_k in SIZES:
        seqlens = SeqlenInfo(seqlen_q, seqlen_k)
        key_tiles = range(-(-seqlen_k // tile_n))
        for m_block in range(queries.end(seqlens)):
            visitors = queries.visitors(m_block, len(key_tiles), seqlens)
            visiting = [n for n in key_tiles if queries.begin(n, seqlens) <= m_block]
            assert visiting == list(range(visitors))
