"""The order of tiles: every tile once, and the longest first where lengths differ."""

import heapq
import itertools
from dataclasses import replace

import pytest

from cute_kernels.tile_scheduler import (
    Sections,
    ShortTiles,
    TailedTileOrder,
    TileOrder,
    TurnedTileOrder,
    heads_in_turn,
    heads_of_last,
    short_m_blocks,
)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    "num_m_blocks,num_heads,num_batches,sections",
    [
        (1, 1, 1, Sections(1, 0)),
        (5, 6, 2, Sections(4, 2)),
        (5, 6, 2, Sections(2, 3)),
        (5, 6, 2, Sections(5, 1)),
        (3, 8, 3, Sections(100, 0)),
        (3, 8, 3, Sections(1, 23)),
    ],
)
def test_order_is_a_bijection(num_m_blocks, num_heads, num_batches, sections, longest_first):
    order = TileOrder(num_m_blocks, num_heads, num_batches, sections, longest_first)
    visited = [order.coordinates(tile) for tile in range(order.num_tiles)]
    expected = itertools.product(range(num_m_blocks), range(num_heads), range(num_batches))
    assert sorted(visited) == sorted(expected)
    divided = replace(order, divisors=(order.numbers_to_divide_by(group=1),))
    assert [divided.coordinates(tile) for tile in range(order.num_tiles)] == visited


@pytest.mark.parametrize(
    "sections,bounds",
    [(Sections(4, 1), (0, 16, 24)), (Sections(1, 2), (0, 4, 8, 24)), (Sections(6, 0), (0, 24))],
)
def test_longest_first_descends_within_a_section_of_heads(sections, bounds):
    order = TileOrder(num_m_blocks=4, num_heads=3, num_batches=2, sections=sections, longest_first=True)
    heads = []
    for section in itertools.starmap(range, itertools.pairwise(bounds)):
        visited = [order.coordinates(tile) for tile in section]
        m_blocks = [m for m, _, _ in visited]
        assert m_blocks == sorted(m_blocks, reverse=True)
        heads += sorted({batch * 3 + head for _, head, batch in visited})
    assert heads == list(range(6))


def test_neighbouring_tiles_share_a_head_without_a_mask():
    order = TileOrder(4, 3, 2, Sections(1, 5), longest_first=False)
    assert [order.coordinates(tile) for tile in range(5)] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
        (0, 1, 0),
    ]


def sections_of(head_dim, seqlens, kv_heads, group):
    """As the host makes them for 16 bits, 132 CTAs and tiles of 128 queries."""
    last = heads_of_last(-(-seqlens[0] // 128), kv_heads, group, 132)
    return Sections.of_keys(4 * head_dim, seqlens[1], kv_heads, group, last)


@pytest.mark.parametrize(
    "head_dim,seqlen,kv_heads,group,expected",
    [
        (128, 512, 512, 1, (4, 111)),
        (128, 512, 512, 4, (16, 123)),
        (128, 1024, 256, 1, (2, 111)),
        (128, 4096, 64, 1, (1, 55)),
        (128, 4099, 32, 1, (1, 24)),
        (128, 16384, 16, 1, (1, 13)),
        (128, 10, 7, 2, (14, 0)),
        (256, 8193, 16, 1, (1, 11)),
        (64, 512, 1024, 1, (8, 119)),
        (128, 2**20, 3, 1, (1, 2)),
    ],
)
def test_sections_are_small_until_the_last(head_dim, seqlen, kv_heads, group, expected):
    assert sections_of(head_dim, (seqlen, seqlen), kv_heads, group) == expected
    last = kv_heads * group - expected[0] * expected[1]
    assert last == kv_heads * group or last * -(-seqlen // 128) >= 2 * 132


@pytest.mark.parametrize("heads,num_heads,expected", [(4, 12, (4, 2)), (5, 12, (5, 2)), (12, 12, (12, 0))])
def test_even_sections_are_alike_but_for_the_last(heads, num_heads, expected):
    assert Sections.even(heads, num_heads) == expected


@pytest.mark.parametrize("seqlen", [512, 1000, 2048, 4096, 4099, 8193, 12000, 16384, 20000])
@pytest.mark.parametrize("heads,head_dim", [(32, 64), (16, 128), (32, 128)])
def test_the_last_section_leaves_no_long_tiles_for_the_end(seqlen, heads, head_dim):
    """Time of the CTA that ends last over that of all on average, on 132 SMs; a tile takes as long as its blocks, and
    there are 32k tokens or one sequence."""
    num_m_blocks, batch = -(-seqlen // 128), max(32768 // seqlen, 1)
    sections = sections_of(head_dim, (seqlen, seqlen), heads * batch, 1)
    order = TileOrder(num_m_blocks, heads, batch, sections, longest_first=True)
    lengths = [order.coordinates(tile)[0] + 2 for tile in range(order.num_tiles)]
    ctas = [0] * 132
    for length in lengths:
        heapq.heappush(ctas, heapq.heappop(ctas) + length)
    assert max(ctas) < 1.05 * sum(lengths) / 132


@pytest.mark.parametrize("m_blocks", [0, 1, 3])
@pytest.mark.parametrize("sections", [Sections(1, 11), Sections(1, 8), Sections(4, 2), Sections(12, 0)])
def test_short_tiles_come_behind_all_sections(m_blocks, sections):
    order = TileOrder(5, 6, 2, sections, longest_first=True, short_tiles=(ShortTiles(m_blocks, 12),))
    order = replace(order, divisors=(order.numbers_to_divide_by(group=1),))
    visited = [order.coordinates(tile) for tile in range(order.num_tiles)]
    assert sorted(visited) == sorted(itertools.product(range(5), range(6), range(2)))
    long, short = visited[: 12 * (5 - m_blocks)], visited[12 * (5 - m_blocks) :]
    assert all(m >= m_blocks for m, _, _ in long) and all(m < m_blocks for m, _, _ in short)
    assert [m for m, _, _ in short] == sorted((m for m, _, _ in short), reverse=True)
    plain = TileOrder(5, 6, 2, sections, longest_first=True)
    all_tiles = [plain.coordinates(tile) for tile in range(plain.num_tiles)]
    assert long == [place for place in all_tiles if place[0] >= m_blocks]


def test_short_tiles_are_those_of_an_order_that_begins_with_the_longest():
    with pytest.raises(ValueError, match=r"^short_tiles is given and longest_first is False, allowed: True"):
        TileOrder(5, 6, 2, Sections(3, 3), longest_first=False, short_tiles=(ShortTiles(2, 12),))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("kv_heads,batch", [(1, 1), (3, 5), (16, 7)])
@pytest.mark.parametrize("seqlens", [(1, 1), (4099, 4099), (8192, 1), (700, 40000), (3000, 2**31 - 1)])
def test_the_order_of_any_problem_has_each_tile_once(seqlens, kv_heads, batch, group):
    """As the host makes it at head_dim 256, tiles have 128 queries."""
    m_blocks, heads = -(-seqlens[0] // 128), kv_heads * group
    sections = sections_of(256, seqlens, kv_heads * batch, group)
    short = ShortTiles(short_m_blocks(1024, seqlens, kv_heads * batch, 128), heads * batch)
    order = TileOrder(m_blocks, heads, batch, sections, longest_first=True, short_tiles=(short,))
    order = replace(order, divisors=(order.numbers_to_divide_by(group),))
    assert all(1 <= number < 2**31 for number in order.divisors[0])
    visited = {order.coordinates(tile) for tile in range(order.num_tiles)}
    assert visited == set(itertools.product(range(m_blocks), range(heads), range(batch)))


@pytest.mark.parametrize(
    "bytes_per_key,seqlens,kv_heads,expected",
    [
        (1024, (16384, 16384), 8, 32),
        (1024, (4096, 4096), 32, 8),
        (1024, (12000, 12000), 16, 16),
        (1024, (300, 300), 8, 0),
        (1024, (4096, 8192), 8, 0),
        (1024, (4096, 6000), 8, 8),
        (1024, (4096, 2048), 8, 8),
        (1024, (2**20, 2**20), 64, 4),
        (1024, (512, 512), 2**20, 0),
    ],
)
def test_short_tiles_of_all_heads_share_the_l2(bytes_per_key, seqlens, kv_heads, expected):
    assert short_m_blocks(bytes_per_key, seqlens, kv_heads, 128) == expected
    fewest = -(-seqlens[0] // 128)
    assert short_m_blocks(bytes_per_key, seqlens, kv_heads, 128, fewest) == expected
    assert short_m_blocks(bytes_per_key, seqlens, kv_heads, 128, fewest + 1) == 0


@pytest.mark.parametrize(
    "seqlen,heads,most", [(5000, 16, 1.04), (6147, 24, 1.01), (12000, 16, 1.01), (20000, 8, 1.01)]
)
def test_short_tiles_at_the_end_leave_ctas_less_to_wait_for(seqlen, heads, most):
    """Time of the CTA that ends last over that of all on average, on 132 SMs, at head_dim 256: with short tiles at the
    end, and without. A tile takes as long as its blocks of 80 keys, and 1.6 of them for its begin and its end."""
    num_m_blocks, sections = -(-seqlen // 128), sections_of(256, (seqlen, seqlen), heads, 1)
    ends = []
    for m_blocks in (short_m_blocks(1024, (seqlen, seqlen), heads, 128), 0):
        order = TileOrder(num_m_blocks, heads, 1, sections, True, (), (ShortTiles(m_blocks, heads),))
        order = replace(order, divisors=(order.numbers_to_divide_by(group=1),))
        lengths = [
            -(-128 * (m + 1) // 80) + 1.6 for m, _, _ in map(order.coordinates, range(order.num_tiles))
        ]
        ctas = [0.0] * 132
        for length in lengths:
            heapq.heapreplace(ctas, ctas[0] + length)
        ends.append(max(ctas) / (sum(lengths) / 132))
    assert ends[0] < most < ends[1]


@pytest.mark.parametrize("tail_heads,full_blocks", [(0, 0), (1, 0), (5, 0), (12, 3), (4, 2), (3, 5)])
def test_an_order_with_a_tail_is_a_bijection(tail_heads, full_blocks):
    order = TailedTileOrder(5, 6, 2, tail_heads, full_blocks)
    visited = [order.coordinates(tile) for tile in range(order.num_tiles)]
    assert sorted(visited) == sorted(itertools.product(range(5), range(6), range(2)))
    before = (12 - tail_heads) * 5
    plain = TileOrder(5, 6, 2, Sections(1, 11), longest_first=False)
    assert visited[:before] == [plain.coordinates(tile) for tile in range(before)]
    late = [n_block for n_block, _, _ in visited[before + tail_heads * full_blocks :]]
    assert late == sorted(late) and all(n_block >= full_blocks for n_block in late)


def test_a_tail_leaves_no_long_tiles_for_the_end():
    """Time of the CTA that ends last over that of all on average, on 132 SMs: 16k keys in a window of 4096."""
    walks = [min(2 * n_block + 66, 256) - 2 * n_block + 1.5 for n_block in range(128)]
    ends = []
    for tail_heads in (0, 4):
        order = TailedTileOrder(128, 16, 1, tail_heads, 96)
        ctas = [0.0] * 132
        for tile in range(order.num_tiles):
            heapq.heapreplace(ctas, ctas[0] + walks[order.coordinates(tile)[0]])
        ends.append(max(ctas) / (16 * sum(walks) / 132))
    assert ends[0] > 1.02 and ends[1] < 1.01


@pytest.mark.parametrize("section,tail_heads", [(1, 0), (3, 2), (4, 1), (12, 12), (2, 5), (5, 4)])
def test_an_order_of_turns_is_a_bijection(section, tail_heads):
    order = TurnedTileOrder(5, 6, 2, section, tail_heads)
    visited = [order.coordinates(tile) for tile in range(order.num_tiles)]
    assert sorted(visited) == sorted(itertools.product(range(5), range(6), range(2)))
    for head, batch in itertools.product(range(6), range(2)):
        in_tail = batch * 6 + head >= 12 - tail_heads
        assert order.in_tail(head, batch) == in_tail
        # Each waits for those claimed before it: from the last one on, or in the tail from the first one on.
        claimed = [n_block for n_block, *at in visited if at == [head, batch]]
        assert claimed == sorted(claimed, reverse=not in_tail)
    assert all(order.in_tail(*at) for _, *at in visited[(12 - tail_heads) * 5 :])


@pytest.mark.parametrize("seqlen,tail_heads", [(2048, 32), (4096, 16), (8192, 8), (16384, 4)])
def test_turns_leave_no_long_tiles_for_the_end(seqlen, tail_heads):
    """The same of causal gradients of 16384 tokens by 16 heads, where nobody waits for a turn."""
    tiles, heads, ends = seqlen // 128, 16 * 16384 // seqlen, []
    for late in (0, tail_heads):
        order = TurnedTileOrder(tiles, heads, 1, 132 * 128 // seqlen, late)
        ctas, total = [0.0] * 132, 0.0
        for tile in range(order.num_tiles):
            walk = 2 * (tiles - order.coordinates(tile)[0]) + 1.5
            heapq.heapreplace(ctas, ctas[0] + walk)
            total += walk
        ends.append(max(ctas) / (total / 132))
    assert ends[0] > 1.05 and ends[1] < 1.02


@pytest.mark.parametrize(
    "most,kv_heads,expected", [(66, 512, 64), (33, 512, 32), (0, 16, 1), (2, 16, 2), (100, 16, 16), (3, 7, 3)]
)
def test_sections_of_at_most_so_many_heads_are_about_alike(most, kv_heads, expected):
    heads = heads_in_turn(most, kv_heads)
    assert heads == expected <= max(most, 1)
    assert -(-kv_heads // heads) == -(-kv_heads // min(max(most, 1), kv_heads))
