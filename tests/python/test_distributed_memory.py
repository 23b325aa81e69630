"""What the ring keeps in memory on each rank, in shards of Q: the tensors of its steps, without any kernel or message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import compile_cache
from hopper_attention.distributed import ring
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
    monkeypatch.setattr(Merged, "add", nothing)
    yield
    forget_launchers()


def peaks(world: int, rank: int, heads: tuple[int, int]) -> tuple[float, float]:
    """Of the forward and the backward pass, results included, in bytes of one rank's Q."""
    rows = 1024
    problem = Problem(world, world * rows, world * rows, "zigzag", right=0)
    q, k, v, out, dout = (
        torch.empty(1, rows, n, HEAD_DIM, dtype=torch.bfloat16) for n in (heads[0], *heads[1:] * 2, *heads[:1] * 2)
    )
    lse = torch.empty(1, heads[0], rows)
    ranks = Ranks(None, rank, world)  # type: ignore[arg-type]  # no message is sent
    found = []
    for run in (
        lambda: ring.ring_forward(ranks, problem, CALL, (q, k, v), None),
        lambda: ring.ring_backward(ranks, problem, CALL, Saved(q, out, lse, dout, None), (k, v)),
    ):
        with LiveBytes() as memory:
            memory.forget(q, k, v, out, dout, lse)
            results = run()
        del results
        found.append(memory.peak / (q.numel() * q.element_size()))
    return found[0], found[1]


@pytest.mark.parametrize("world", [2,3,4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_show(bare_ring: None, world: int, heads: tuple[int, int]) -> None:
    for rank in range(world):
        print(world, heads, rank, peaks(world, rank, heads))
