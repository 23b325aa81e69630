"""Key tiles whose parts of dQ are added in a fixed order: who is claimed when, and whom each waits for."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import TileOrder
from cute_kernels.window import window_of
from hopper.backward.batch import DenseBatch
from hopper.backward.config import select_backward_config
from hopper.backward.pair_batch import PAIRS_UNDER_WAY
from hopper.backward.work import BackwardWork


def heads_of_section(
    config, batch: int, heads: tuple[int, int], seqlens: tuple[int, int], workers: int
) -> int:
    """Of (Q's, K's) heads and lengths."""
    views = (
        SimpleNamespace(shape=(rows, config.head_dim, of, batch))
        for rows, of in zip(seqlens, heads, strict=True)
    )
    return DenseBatch(config).heads_of_section(*views, workers)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "batch,heads,seqlens",
    [(2, (3, 3), (300, 700)), (1, (8, 2), (700, 300)), (5, (2, 1), (128, 129)), (1, (1, 1), (1, 1))],
)
def test_key_tiles_wait_for_those_alone_that_were_claimed_before(
    head_dim, causal, batch, heads, seqlens
) -> None:
    config = select_backward_config("bfloat16", head_dim, head_dim, causal, ordered=True)
    tiles, group = -(-seqlens[1] // config.tile_n), heads[0] // heads[1]
    m_end = -(-seqlens[0] // config.tile_m)
    section = heads_of_section(config, batch, heads, seqlens, workers=3)
    order = TileOrder(tiles, heads[1], batch, section, longest_first=True)
    window = window_of(causal, ())
    work = BackwardWork(config, window, None, order, order.num_tiles, m_end, DenseSeqlens(*seqlens), group)
    claimed = [work.coordinates(tile) for tile in range(order.num_tiles)]
    assert sorted(claimed) == sorted(itertools.product(range(tiles), range(heads[1]), range(batch)))
    added: Counter = Counter()
    for n_block, head, b in claimed:
        visit = work.visit(n_block, b)
        for m_block in range(visit.begin, visit.end):
            assert work.turn(n_block, m_block, b) == added[m_block, head, b]
            added[m_block, head, b] += 1
    # So the first of each stores, and no sum is read that nobody wrote.
    assert config.stores_first and len(added) == m_end * heads[1] * batch


def test_key_tiles_of_a_head_begin_apart() -> None:
    """At 16384 tokens, by length: heads of a section on 132 SMs, of 132 or 264 key tiles; where heads share K and V
    those of Q count."""
    of = {
        causal: [
            heads_of_section(
                select_backward_config("bfloat16", 128, 128, causal, ordered=True),
                16384 // length,
                (16, 16 // group),
                (length, length),
                132,
            )
            for length, group in ((512, 1), (1024, 1), (4096, 1), (16384, 1), (512, 4), (4096, 4))
        ]
        for causal in (False, True)
    }
    assert of == {False: [64, 32, 8, 2, 16, 2], True: [32, 16, 4, 1, 8, 1]}
    pair = select_backward_config("bfloat16", 256, 256, False, ordered=True)
    assert heads_of_section(pair, 32, (8, 8), (512, 512), PAIRS_UNDER_WAY) == 16


def test_which_kernels_have_sections() -> None:
    plain = select_backward_config("bfloat16", 128, 128, True, ordered=True)
    assert plain.has_sections
    for changes in ({"ordered": False}, {"window": True}, {"layout": "varlen"}):
        others = {"ordered": True, **changes}
        assert not select_backward_config("bfloat16", 128, 128, True, **others).has_sections
