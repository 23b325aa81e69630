"""Key tiles under a causal mask, the shortest of which come last: in which order, packed and of pairs of CTAs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.plan.packed import PackedTileOrder
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import TailedTileOrder, TileOrder
from hopper.backward.batch import DenseBatch, PackedTailedOrder, order_of_keys
from hopper.backward.config import BackwardConfig, select_backward_config
from hopper.backward.pair_batch import DensePairBatch
from hopper_attention.reference import attention_naive
from tests.hopper.on_numpy import backward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, LATE, draw

HEADS = 16
PACKED = select_backward_config("bfloat16", 128, 128, True, layout="varlen")
PACKED_PAIRS = select_backward_config("bfloat16", 256, 256, True, layout="varlen")


def order(config: BackwardConfig, seqlen: int, shared: int = 1) -> TailedTileOrder:
    """Of the key tiles of a packed sequence of so many queries and keys."""
    of_tiles = None, 2, 0, HEADS, 1, config.tile_n
    found = order_of_keys(config, of_tiles, shared)
    assert isinstance(found, PackedTailedOrder)
    return found.order_of(SeqlenInfo(seqlen, seqlen, is_packed=True))


@pytest.mark.parametrize("config", [PACKED, PACKED_PAIRS])
@pytest.mark.parametrize("seqlen", [1, 129, 1024, 1025, 2048, 5000])
def test_each_tile_comes_once_and_none_begins_late(config, seqlen) -> None:
    of_sequence = order(config, seqlen)
    tiles = [of_sequence.coordinates(tile)[:2] for tile in range(of_sequence.num_tiles)]
    assert sorted(tiles) == sorted(itertools.product(range(of_sequence.num_m_blocks), range(HEADS)))
    # Of the last heads those that are left come from the longest to the shortest.
    tail = tiles[len(tiles) - of_sequence.tail_heads * (of_sequence.num_m_blocks - of_sequence.full_blocks) :]
    assert [n_block for n_block, _ in tail] == sorted(n_block for n_block, _ in tail)


def test_tails_are_those_of_dense_sequences() -> None:
    """Heads, and tiles of each that come before: half of them where the tail is long and none share K and V."""
    tails = [(o.tail_heads, o.full_blocks) for o in (order(PACKED, s) for s in (512, 2048, 8192, 32768))]
    assert tails == [(16, 2), (16, 8), (8, 32), (4, 0)]
    shared = [(o.tail_heads, o.full_blocks) for o in (order(PACKED, s, 4) for s in (512, 2048, 8192))]
    assert shared == [(16, 0), (8, 0), (4, 0)]
    # A sequence without queries is divided by nothing.
    assert order(PACKED, 0).num_tiles == 0


def test_pairs_have_none_in_short_sequences() -> None:
    assert [order(PACKED_PAIRS, s).tail_heads for s in (128, 1024, 1025, 4096)] == [0, 0, 16, 16]
    dense = DensePairBatch(select_backward_config("bfloat16", 256, 256, True))
    for seqlen, tail in ((1024, (0, 0)), (1025, (8, 4)), (16384, (4, 0))):
        views = [SimpleNamespace(shape=(seqlen, 256, 8, 1)) for _ in "qk"]
        assert dense.tail(*views) == tail
    # 66 tiles or more of heads that share K and V.
    shared = [SimpleNamespace(shape=(2048, 256, heads, 4)) for heads in (32, 4)]
    assert dense.tail(*shared) == (5, 0)


@pytest.mark.parametrize(
    ("seqlens", "heads", "tail"),
    [
        # Of heads that share none as many as before, whose longer halves come head by head.
        ((1024, 1024), (16, 16), (64, 4)),
        ((16384, 1024), (32, 32), (4, 0)),
        ((2411, 2411), (28, 28), (27, 9)),
        # 132 tiles or more of heads that share K and V.
        ((1024, 1024), (28, 4), (17, 0)),
        ((2411, 2411), (28, 4), (7, 0)),
        ((2411, 2411), (28, 7), (7, 0)),
        ((4096, 4096), (16, 2), (5, 0)),
        ((2048, 2048), (32, 16), (16, 0)),
        ((300, 8192), (64, 8), (27, 0)),
        ((16384, 16384), (32, 8), (4, 0)),
    ],
)
def test_a_tail_has_a_tile_for_each_cta(seqlens, heads, tail) -> None:
    batch = DenseBatch(select_backward_config("bfloat16", 128, 128, True))
    views = [SimpleNamespace(shape=(n, 128, h, 40)) for n, h in zip(seqlens, heads, strict=True)]
    assert batch.tail(*views) == tail
    # In a fixed order it does not go by that.
    ordered = DenseBatch(select_backward_config("bfloat16", 128, 128, True, ordered=True))
    rows = seqlens[0] * heads[0] // heads[1]
    late = max(65536 // rows, 4) // (2 if rows <= 1024 else 1)
    assert ordered.late_heads(*views) == (late if seqlens[0] <= 2**20 // ordered.config.tile_m else 0)


def test_where_there_are_tails() -> None:
    def has_tail(head_dim: int, **changes) -> bool:
        return select_backward_config("bfloat16", head_dim, head_dim, **changes).shortens_packed

    for head_dim in (64, 128, 256):
        assert has_tail(head_dim, causal=True, layout="varlen")
        assert not has_tail(head_dim, causal=False, layout="varlen") and not has_tail(head_dim, causal=True)
        for other in ({"ordered": True}, {"window": True}):
            assert not has_tail(head_dim, causal=True, layout="varlen", **other)
    pairs = {"head_dim": 256, "head_dim_v": 256}
    assert select_backward_config("bfloat16", causal=True, **pairs).shortens
    assert not select_backward_config("bfloat16", causal=True, window=True, **pairs).shortens
    assert not select_backward_config("bfloat16", causal=False, **pairs).shortens
    plain = order_of_keys(
        select_backward_config("bfloat16", 128, 128, False, layout="varlen"), (None, 2, 0, 4, 1, 128), 1
    )
    assert type(plain) is PackedTileOrder
    assert isinstance(plain.order_of(SeqlenInfo(300, 300, is_packed=True)), TileOrder)


def test_gradients_of_pairs_with_a_tail() -> None:
    """Nine key tiles of two heads, on the NumPy machine."""
    config = select_backward_config("bfloat16", 192, 192, True)
    inputs = draw(torch.bfloat16, (70, 1030), (2, 2), 192)
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*leaves, causal=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = torch.autograd.grad(out, leaves, dout.double())
    rounded, lse = out.detach().bfloat16(), lse.detach().float()
    ours = backward_on_numpy(config, (dout, *inputs), rounded, lse, 192**-0.5, LATE)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert (a.double() - e).norm() <= EPSILON[torch.bfloat16] * e.norm(), name
