"""Query tiles counted from the end of a sequence, against brute force."""

import pytest

from cute_kernels.key_blocks import BlockRange, PartOfBlocks
from cute_kernels.seqlen import CutSeqlens, LedSeqlens, lead_of_queries
from cute_kernels.window import CAUSAL

TILE = 128
SIZES = [(1, 1), (3, 3), (128, 128), (129, 129), (259, 259), (384, 384), (257, 271), (130, 515), (5, 400)]
SIZES += [(400, 399), (700, 3)]


@pytest.mark.parametrize(
    "seqlens,expected", [((8200, 8200), 120), ((8192, 9000), 0), ((100, 9000), 28), ((8201, 8200), 0)]
)
def test_queries_lead_wherever_each_sees_a_key(seqlens, expected):
    assert lead_of_queries(seqlens, TILE) == expected


@pytest.mark.parametrize("tile_n", [80, 128])
@pytest.mark.parametrize("seqlens", SIZES)
def test_tiles_from_the_end_visit_each_visible_key(seqlens, tile_n):
    """Each query is in one tile, and each warpgroup visits all that its rows see."""
    (seqlen_q, seqlen_k), own_tile = seqlens, TILE // 2
    info = LedSeqlens(*seqlens, lead_of_queries(seqlens, TILE)).of(3)
    assert info.batch == 3 and info.seqlen_q - info.lead_q == seqlen_q
    rows_of_tiles = []
    for m_block in range(-(-seqlen_q // TILE)):
        tile = BlockRange(TILE, tile_n, CAUSAL).of(m_block, info)
        for part in range(2):
            blocks = PartOfBlocks.of(tile, part, 2)
            assert blocks.left_out_before >= 0 == blocks.begin == tile.begin
            first = (2 * m_block + part) * own_tile - info.lead_q
            rows = range(max(first, 0), min(first + own_tile, seqlen_q))
            rows_of_tiles += rows
            for row in rows:
                level = row + seqlen_k - seqlen_q
                assert row + info.lead_q + info.seqlen_k - info.seqlen_q == level
                assert level < blocks.end * tile_n and blocks.unmasked * tile_n <= max(level + 1, 0)
    assert sorted(rows_of_tiles) == list(range(seqlen_q))


def test_odd_lengths_leave_one_short_tile():
    """Blocks of 80 keys that tiles visit: three rows more than whole tiles see few keys, or all of them."""

    def blocks(lead):
        info = LedSeqlens(4099, 4099, lead).of(0)
        return sum(BlockRange(TILE, 80, CAUSAL).of(m_block, info).count for m_block in range(33))

    assert blocks(lead_of_queries((4099, 4099), TILE)) < 0.98 * blocks(0)


@pytest.mark.parametrize("seqlens", SIZES)
def test_the_first_tile_is_a_sequence_of_its_own(seqlens):
    """Each query is in one tile, none lead those of the first, and each warpgroup visits the keys that its rows see."""
    (seqlen_q, seqlen_k), own_tile, rows_of_tiles = seqlens, TILE // 2, []
    cut = CutSeqlens(*seqlens, lead_of_queries(seqlens, TILE), TILE)
    assert cut.first_rows == (seqlen_q if not cut.lead_q else TILE - cut.lead_q)
    for m_block in range(-(-seqlen_q // TILE)):
        info = cut.of_tile(m_block, 3)
        tile = BlockRange(TILE, 160, CAUSAL).of(m_block, info)
        assert info.batch == 3 and (m_block or not info.lead_q)
        for part in range(2):
            blocks = PartOfBlocks.of(tile, part, 2)
            first = (2 * m_block + part) * own_tile - info.lead_q
            rows = range(first, min(first + own_tile, info.seqlen_q - info.lead_q))
            assert first >= 0
            rows_of_tiles += rows
            for row in rows:
                level = row + seqlen_k - seqlen_q
                assert row + info.lead_q + info.seqlen_k - info.seqlen_q == level
                assert level < blocks.end * 160 and blocks.unmasked * 160 <= max(level + 1, 0)
    assert rows_of_tiles == list(range(seqlen_q))
