"""Block ranges against brute force over every (row, key) pair."""

import pytest

from cute_kernels.key_blocks import BlockRange, PartOfBlocks
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import CAUSAL, EVERYTHING, NO_LIMIT, Window

SIZES = [(1, 1), (1, 239), (113, 203), (199, 3), (256, 256), (300, 130), (130, 300)]
WINDOWS = [EVERYTHING, CAUSAL, Window(0, 0), Window(5, 0), Window(70, 0), Window(40, 90), Window(1000, 17)]
WINDOWS += [Window(33, None), Window(NO_LIMIT, NO_LIMIT), Window(0, NO_LIMIT), Window(NO_LIMIT, 3)]
WINDOWS += [Window(NO_LIMIT, right, chunk) for right in (0, NO_LIMIT) for chunk in (1, 7, 64, 100, 1000)]
WINDOWS += [Window(20, 0, 32), Window(9, 40, 80)]
TILE_M = 64


def visible_keys(row: int, seqlens: SeqlenInfo, window: Window) -> range:
    level = row + seqlens.seqlen_k - seqlens.seqlen_q
    first = 0 if window.left is None else max(level - window.left, 0)
    end = seqlens.seqlen_k if window.right is None else min(level + window.right + 1, seqlens.seqlen_k)
    if window.has_chunk:
        begin = level // window.chunk * window.chunk
        first, end = max(first, begin), min(end, begin + window.chunk)
    return range(first, max(end, first))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("tile_n", [32, 80])
@pytest.mark.parametrize("seqlen_q,seqlen_k", SIZES)
def test_blocks_visited_are_those_with_a_visible_key(seqlen_q, seqlen_k, tile_n, window):
    seqlens = SeqlenInfo(seqlen_q, seqlen_k)
    for m_block in range((seqlen_q + TILE_M - 1) // TILE_M):
        blocks = BlockRange(TILE_M, tile_n, window).of(m_block, seqlens)
        rows = range(m_block * TILE_M, min((m_block + 1) * TILE_M, seqlen_q))
        seen = [key for row in rows for key in visible_keys(row, seqlens, window)]
        assert 0 <= blocks.begin < blocks.end and blocks.count == blocks.end - blocks.begin
        if not seen:
            continue
        assert blocks.begin == min(seen) // tile_n
        # Rows past the end of a ragged last tile count as rows, so a block more than needed may be visited there.
        is_ragged = (m_block + 1) * TILE_M > seqlen_q
        assert blocks.end == max(seen) // tile_n + 1 or (is_ragged and blocks.end > max(seen) // tile_n)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("tile_n", [32, 80])
@pytest.mark.parametrize("seqlen_q,seqlen_k", SIZES)
def test_unmasked_blocks_are_seen_by_every_row(seqlen_q, seqlen_k, tile_n, window):
    seqlens = SeqlenInfo(seqlen_q, seqlen_k)
    for m_block in range((seqlen_q + TILE_M - 1) // TILE_M):
        blocks = BlockRange(TILE_M, tile_n, window).of(m_block, seqlens)
        rows = [visible_keys(row, seqlens, window) for row in (m_block * TILE_M, (m_block + 1) * TILE_M - 1)]
        # Of rows that are there or not, the first has the least right end and the last the greatest left one.
        right = range(rows[0].stop) if window.has_right else range(seqlen_k)
        left = rows[1].start if window.has_left else 0
        full = [n for n in range(seqlen_k // tile_n + 1) if (n + 1) * tile_n <= len(right)]
        assert blocks.unmasked == len(full)
        assert blocks.left_masked == -(-left // tile_n)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", SIZES)
def test_a_part_of_a_tile_visits_the_blocks_that_its_own_rows_see(seqlen_q, seqlen_k, window):
    """As a tile of so few rows would, and leaves out the others of its tile; without a query it visits one."""
    seqlens, parts, tile_n = SeqlenInfo(seqlen_q, seqlen_k), 3, 32
    own = BlockRange(TILE_M, tile_n, window)
    for m_block in range(-(-seqlen_q // (parts * TILE_M))):
        tile = BlockRange(parts * TILE_M, tile_n, window).of(m_block, seqlens)
        for part in range(parts):
            blocks = PartOfBlocks.of(tile, part, parts)
            alone = own.of(parts * m_block + part, seqlens)
            assert min(blocks.left_out_before, blocks.left_out_behind) >= 0 < blocks.count
            assert blocks.left_out_before + blocks.count + blocks.left_out_behind == tile.count
            if (parts * m_block + part) * TILE_M < seqlen_q:
                assert (blocks.begin, blocks.end) == (alone.begin, alone.end)
                # The last row, whether it is there or not, sees the last keys.
                seen = visible_keys((parts * m_block + part + 1) * TILE_M - 1, seqlens, window)
                assert not seen or blocks.last * tile_n + blocks.keys_of_first == seen.stop
                assert (blocks.unmasked, blocks.left_masked) == (alone.unmasked, alone.left_masked)
            else:
                assert blocks.count == 1 and blocks.right_masked(blocks.unmasked) == 0
                assert blocks.number_from(blocks.end - 2) == 0 >= blocks.end - 1 - blocks.left_masked
