"""Block ranges against brute force over every (row, key) pair."""

import pytest

from cute_kernels.key_blocks import BlockRange
from cute_kernels.seqlen import SeqlenInfo

SIZES = [(1, 1), (1, 239), (113, 203), (199, 3), (256, 256), (300, 130), (130, 300)]


def sees(row: int, key: int, seqlen_q: int, seqlen_k: int, causal: bool) -> bool:
    return key < seqlen_k and (not causal or key <= row + seqlen_k - seqlen_q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_n", [32, 80])
@pytest.mark.parametrize("seqlen_q,seqlen_k", SIZES)
def test_blocks_visited_are_those_with_a_visible_key(seqlen_q, seqlen_k, tile_n, causal):
    tile_m = 64
    blocks = BlockRange(tile_m, tile_n, causal)
    for m_block in range((seqlen_q + tile_m - 1) // tile_m):
        rows = range(m_block * tile_m, min((m_block + 1) * tile_m, seqlen_q))
        last = max(
            (k for r in rows for k in range(seqlen_k) if sees(r, k, seqlen_q, seqlen_k, causal)), default=-1
        )
        end = blocks.end(m_block, SeqlenInfo(seqlen_q, seqlen_k))
        assert end >= max(last // tile_n + 1, 1)
        # Rows past the end of a ragged last tile count as rows, so a block more than needed may be visited there.
        ragged = (m_block + 1) * tile_m > seqlen_q
        assert ragged or end == max(last // tile_n + 1, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile_n", [32, 80])
@pytest.mark.parametrize("seqlen_q,seqlen_k", SIZES)
def test_unmasked_blocks_are_seen_by_every_row(seqlen_q, seqlen_k, tile_n, causal):
    tile_m = 64
    blocks = BlockRange(tile_m, tile_n, causal)
    for m_block in range((seqlen_q + tile_m - 1) // tile_m):
        first_row = m_block * tile_m
        full = [
            n
            for n in range(seqlen_k // tile_n + 1)
            if all(
                sees(first_row, k, seqlen_q, seqlen_k, causal) for k in range(n * tile_n, (n + 1) * tile_n)
            )
        ]
        assert blocks.unmasked_end(m_block, SeqlenInfo(seqlen_q, seqlen_k)) == len(full)
