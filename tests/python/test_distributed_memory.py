"""What the ring keeps in memory on each rank: the tensors of its steps, without kernels and messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import compile_cache
from hopper_attention.distributed import gradients, ring
from hopper_attention.distributed.attend import Call, Saved
from hopper_attention.distributed.exchange import Message, Ranks, Transfer
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Group, Problem, length
from hopper_attention.launch import backward
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.live_bytes import LiveBytes

HEAD_DIM = 128
CALL = Call(HEAD_DIM**-0.5)


def nothing(*arguments: Any) -> None:
    """A kernel."""


def attend(q: Tensor, k: Tensor, v: Tensor, group: Group, call: Call) -> tuple[Tensor, Tensor]:
    """What a forward kernel allocates."""
    batch, _, heads, _ = q.shape
    rows = length(group.rows)
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
    return q.new_empty(batch, rows, heads, v.shape[3]), lse


def exchange(ranks: Ranks, sends: list[Message], receives: list[Message]) -> Transfer:
    """Holds what it has to."""
    return Transfer(ranks, [], [x for message in (*sends, *receives) for x in message.tensors])


@pytest.fixture
def bare_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(monkeypatch, backward)
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: nothing)
    monkeypatch.setattr(ring, "attend", attend)
    monkeypatch.setattr(ring, "exchange", exchange)
    monkeypatch.setattr(gradients, "add_parts", nothing)
    monkeypatch.setattr(Merged, "add", nothing)
    yield
    forget_launchers()


def peaks(world: int, rank: int, heads: tuple[int, int]) -> tuple[float, float]:
    """Of the forward and the backward pass, with their results, in bytes of one rank's Q."""
    rows = 1024
    problem = Problem(world, world * rows, world * rows, "zigzag", right=0)
    counts = heads[0], heads[1], heads[1], heads[0], heads[0]
    q, k, v, out, dout = (torch.empty(1, rows, n, HEAD_DIM, dtype=torch.bfloat16) for n in counts)
    lse = torch.empty(1, heads[0], rows)
    ranks = Ranks(None, rank, world)  # type: ignore[arg-type]  # no message is sent
    found = []
    for run in (
        lambda: ring.ring_forward(ranks, problem, CALL, (q, k, v), None),
        lambda: ring.ring_backward(ranks, problem, CALL, Saved(q, out, lse, dout, None), (k, v)),
    ):
        with LiveBytes() as memory:
            memory.forget(q, k, v, out, dout, lse)
            run()
        found.append(memory.peak / (q.numel() * q.element_size()))
    return found[0], found[1]


def row_of(world: int, heads: tuple[int, int]) -> str:
    """Of the page, by the rank that holds the most. What there is of 128 columns, as LSEs, is below its digits."""
    found = [peaks(world, rank, (heads[0] // 4, heads[1] // 4)) for rank in range(world)]
    forward, backward = (max(passes) for passes in zip(*found, strict=True))
    gradients = 1 + 2 * heads[1] / heads[0]
    return f"| {world} | {heads[0]} over {heads[1]} | {forward:.1f} | {backward:.1f} | {gradients:.1f} |"


def test_what_a_ring_holds_is_as_the_page_says(bare_ring: None) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text()
    table = page.partition("<!-- memory -->")[2].partition("<!-- /memory -->")[0].split("\n")[3:-1]
    assert table == [row_of(world, heads) for world in (2, 4) for heads in ((16, 16), (32, 8))]


def test_storages_are_counted_until_nothing_holds_them() -> None:
    with LiveBytes() as memory:
        x = torch.zeros(1000)
        view = x[500:]
        del x
        assert memory.live == 4000
        del view
        assert memory.live == 0
        y = torch.zeros(8).double()
    assert (memory.live, memory.peak) == (y.numel() * 8, 4000)
