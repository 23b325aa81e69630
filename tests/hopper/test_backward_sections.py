"""Key tiles whose parts of dQ are added in a fixed order: who is claimed when, and whom each waits for."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import Sections, TileOrder, TurnedTileOrder
from cute_kernels.window import window_of
from hopper.backward.batch import DenseBatch
from hopper.backward.config import select_backward_config
from hopper.backward.pair_batch import PAIRS_UNDER_WAY
from hopper.backward.parts import QueryHeads
from hopper.backward.work import BackwardWork
from hopper_attention.reference import attention_naive
from tests.hopper.on_numpy import backward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw


def heads_of_section(
    config, batch: int, heads: tuple[int, int], seqlens: tuple[int, int], workers: int
) -> int:
    """Of (Q's, K's) heads and lengths."""
    views = (
        SimpleNamespace(shape=(rows, config.head_dim, of, batch))
        for rows, of in zip(seqlens, heads, strict=True)
    )
    return DenseBatch(config).heads_of_section(*views, workers)


@pytest.mark.parametrize("causal,tail_heads", [(False, 0), (True, 0), (True, 1), (True, 3), (True, 10)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "batch,heads,seqlens",
    [(2, (3, 3), (300, 700)), (1, (8, 2), (700, 300)), (5, (2, 1), (128, 129)), (1, (1, 1), (1, 1))],
)
def test_key_tiles_wait_for_those_alone_that_were_claimed_before(
    head_dim, causal, tail_heads, batch, heads, seqlens
) -> None:
    config = select_backward_config("bfloat16", head_dim, head_dim, causal, ordered=True)
    tiles, group = -(-seqlens[1] // config.tile_n), heads[0] // heads[1]
    m_end = -(-seqlens[0] // config.tile_m)
    section = heads_of_section(config, batch, heads, seqlens, workers=3)
    sizes = tiles, heads[1], batch
    order = TileOrder(*sizes, Sections.even(section, heads[1] * batch), longest_first=True)
    if config.has_late_heads:
        order = TurnedTileOrder(*sizes, section, min(tail_heads, heads[1] * batch))
    window = window_of(causal, ())
    work = BackwardWork(
        config, window, None, order, order.num_tiles, m_end, DenseSeqlens(*seqlens), QueryHeads(group)
    )
    claimed = [work.coordinates(tile) for tile in range(order.num_tiles)]
    assert sorted(claimed) == sorted(itertools.product(range(tiles), range(heads[1]), range(batch)))
    added: Counter = Counter()
    for n_block, head, b in claimed:
        visit, n_in_turn = work.visit(n_block, b), work.in_turn(n_block, head, b)
        for m_block in range(visit.begin, visit.end):
            assert work.turn(n_in_turn, m_block, b) == added[m_block, head, b]
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


def test_heads_whose_order_is_another_at_the_end() -> None:
    """At 16384 tokens, by length, heads of Q and K/V: none of few heads, and at head_dim 64 none of long ones."""
    found: dict[int, list[int]] = {}
    for head_dim, heads in ((128, 16), (64, 32)):
        batch = DenseBatch(select_backward_config("bfloat16", head_dim, head_dim, True, ordered=True))
        for length, group, b in (
            *((s, 1, 16384 // s) for s in (512, 1024, 2048, 4096, 8192, 16384)),
            *((s, 4, 16384 // s) for s in (512, 2048, 8192)),
            *((s, 1, 1) for s in (2048, 4096)),
        ):
            views = (SimpleNamespace(shape=(length, head_dim, count, b)) for count in (heads, heads // group))
            found.setdefault(head_dim, []).append(batch.late_heads(*views))
    assert found == {128: [64, 32, 32, 16, 8, 4, 32, 8, 4, 0, 0], 64: [64, 32, 32, 16, 8, 0, 32, 8, 4, 0, 16]}


@pytest.mark.parametrize("head_dim,late_heads", [(128, 1), (64, 2)])
def test_gradients_where_the_last_heads_have_another_order(head_dim, late_heads, monkeypatch) -> None:
    """One of two heads, and all, on the NumPy machine."""
    monkeypatch.setattr(DenseBatch, "late_heads", lambda *_: late_heads)
    config = select_backward_config("bfloat16", head_dim, head_dim, True, ordered=True)
    inputs = draw(torch.bfloat16, (200, 330), (4, 2), head_dim)
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*leaves, causal=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = torch.autograd.grad(out, leaves, dout.double())
    rounded, lse = out.detach().bfloat16(), lse.detach().float()
    ours = backward_on_numpy(config, (dout, *inputs), rounded, lse, head_dim**-0.5, LATE)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert (a.double() - e).norm() <= EPSILON[torch.bfloat16] * e.norm(), name


def test_tails_of_any_order() -> None:
    """Heads, and tiles of each that come before: half of them where the tail is long and none share K and V."""
    config = select_backward_config("bfloat16", 128, 128, True)

    def tail(length: int, group: int, batch: int, left: tuple = ()) -> tuple:
        views = (SimpleNamespace(shape=(length, 128, of, batch)) for of in (16, 16 // group))
        return DenseBatch(config).tail(*views, left)

    assert [tail(s, 1, 16384 // s) for s in (512, 2048, 8192, 16384)] == [(128, 2), (32, 8), (8, 32), (4, 0)]
    # Of heads that share K and V 132 tiles or more.
    assert [tail(s, 4, 16384 // s) for s in (512, 2048, 8192)] == [(33, 0), (9, 0), (4, 0)]
    assert tail(2048, 1, 1) == (16, 8) and tail(300, 8, 1) == (2, 0)
    assert tail(16384, 1, 1, (4096,)) == (4, 96) and tail(4096, 1, 4, (8192,)) == (16, 0)


def test_which_kernels_have_sections() -> None:
    plain = select_backward_config("bfloat16", 128, 128, True, ordered=True)
    assert plain.has_sections
    for changes in ({"ordered": False}, {"window": True}, {"layout": "varlen"}):
        others = {"ordered": True, **changes}
        assert not select_backward_config("bfloat16", 128, 128, True, **others).has_sections
