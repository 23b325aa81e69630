"""The count of how long a launch of a backward kernel takes, against the order that the kernel has, and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import TailedTileOrder
from cute_kernels.window import window_of
from hopper.backward import batch
from hopper.backward.config import select_backward_config
from hopper_attention import tile_rounds, visit_pieces
from hopper_attention.tile_rounds import (
    CAUSAL,
    PAIRED,
    around,
    causal_walks,
    time_in_order,
    time_of_rounds,
    time_of_walks,
)


@pytest.mark.parametrize(
    ("batches", "seqlens", "heads"),
    [
        (1, (2048, 2048), 8),
        (1, (2048, 2048), 3),
        (3, (1300, 700), 6),
        (2, (700, 1300), 5),
        (1, (16384, 16384), 2),
        (8, (129, 129), 16),
        (2, (4687, 4687), 2),
    ],
)
def test_walks_are_those_of_the_kernel_in_its_order(
    batches: int, seqlens: tuple[int, int], heads: int
) -> None:
    """But for whole query tiles, which the count has not."""
    config = select_backward_config("bfloat16", 128, 128, True)
    q, k = (SimpleNamespace(shape=(seqlen, 128, heads, batches)) for seqlen in seqlens)
    tiles = -(-seqlens[1] // config.tile_n)
    order = TailedTileOrder(tiles, heads, batches, *batch.DenseBatch(config).tail(q, k))
    visited, lengths = QueryRange(config.tile_m, config.tile_n, window_of(True)), SeqlenInfo(*seqlens)
    ours = causal_walks(seqlens, batches * heads)
    assert len(ours) == order.num_tiles == tiles * batches * heads
    for tile, walk in enumerate(ours):
        n_block, _, _ = order.coordinates(tile)
        blocks = visited.end(n_block, lengths) - visited.begin(n_block, lengths)
        assert abs(walk - blocks * config.tile_m) < 2 * config.tile_m


def test_the_order_is_counted_by_what_the_kernel_goes_by() -> None:
    assert tile_rounds.LONGER_HALF_FROM == batch.TAIL_HEADS + 1
    assert visit_pieces.TAIL_ROWS == batch.TAIL_ROWS
    for head_dim in (64, 96, 128, 192, 256):
        assert select_backward_config("float16", head_dim, head_dim, True).tile_n == tile_rounds.TILE


def test_rounds_by_hand() -> None:
    assert time_of_rounds(264, 1000, 1) == 2000
    # A last round of a third of the tiles costs as much as a full one, one of 13 not quite.
    assert time_of_rounds(308, 1000, 1) == 3000
    assert time_of_rounds(277, 1000, 1) == pytest.approx(2000 + 1000 * (0.7 + 13 / 132))
    assert time_of_rounds(66, 1000, 2) == pytest.approx(500 + 140 + 0.75 * 132 + 40 * 2)
    assert around(2, 1000, 8) == pytest.approx(250 + 0.0134 * 16000)


def test_order_by_hand() -> None:
    walks = [100.0] * 131 + [300.0, 50.0, 120.0]
    # The one of 300 is waited for; those behind it are begun by others.
    assert time_in_order(walks, 1) == 300
    assert time_in_order([*walks, 400.0], 1) == 500
    # Two CTAs begin and end two.
    assert time_in_order(walks, 2) == pytest.approx(100 + 120 + 2 * 140 + 0.75 * 134 + 40 * 2)


def test_walks_of_all_lengths_by_hand() -> None:
    # The longest is waited for, or ends behind the mean by a quarter of it.
    assert time_of_walks(66, 1000, 500, 1, CAUSAL) == 1000
    assert time_of_walks(264, 1000, 500, 1, CAUSAL) == 1250
    assert time_of_walks(264, 500, 250, 2, CAUSAL) == pytest.approx(2 * 390 + 640 / 4 + 0.75 * 264 + 40 * 2)
    # Half as many pairs are under way, and end at times that differ by more.
    assert time_of_walks(132, 1000, 500, 1, PAIRED) == 132 * 500 / 66 + 1000 / 2
