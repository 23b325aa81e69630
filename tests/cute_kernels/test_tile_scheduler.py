"""The order of tiles: every tile once, and the longest first where lengths differ."""

import itertools

import pytest

from cute_kernels.tile_scheduler import TileOrder


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    "num_m_blocks,num_heads,num_batches,per_section", [(1, 1, 1, 1), (5, 6, 2, 4), (3, 8, 3, 100)]
)
def test_order_is_a_bijection(num_m_blocks, num_heads, num_batches, per_section, longest_first):
    order = TileOrder(num_m_blocks, num_heads, num_batches, per_section, longest_first)
    visited = [order.coordinates(tile) for tile in range(order.num_tiles)]
    expected = itertools.product(range(num_m_blocks), range(num_heads), range(num_batches))
    assert sorted(visited) == sorted(expected)


def test_longest_first_descends_within_a_section_of_heads():
    order = TileOrder(num_m_blocks=4, num_heads=3, num_batches=2, heads_per_section=4, longest_first=True)
    sections = [
        [order.coordinates(tile) for tile in range(start, stop)] for start, stop in [(0, 16), (16, 24)]
    ]
    for section in sections:
        m_blocks = [m for m, _, _ in section]
        assert m_blocks == sorted(m_blocks, reverse=True)
    assert {(head, batch) for _, head, batch in sections[0]} == {(0, 0), (1, 0), (2, 0), (0, 1)}


def test_neighbouring_tiles_share_a_head_without_a_mask():
    order = TileOrder(num_m_blocks=4, num_heads=3, num_batches=2, heads_per_section=1, longest_first=False)
    assert [order.coordinates(tile) for tile in range(5)] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
        (0, 1, 0),
    ]


def test_a_head_too_large_for_the_l2_is_a_section_of_its_own():
    order = TileOrder(num_m_blocks=3, num_heads=2, num_batches=1, heads_per_section=1, longest_first=True)
    assert [order.coordinates(tile) for tile in range(6)] == [
        (2, 0, 0), (1, 0, 0), (0, 0, 0), (2, 1, 0), (1, 1, 0), (0, 1, 0),
    ]  # fmt: skip
