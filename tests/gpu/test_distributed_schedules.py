"""All ranks of a ring in threads of one GPU, by each schedule, against attention of the whole sequence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from threading import Event, Lock

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func
from hopper_attention.distributed import ring, ring_backward
from hopper_attention.distributed import schedule as schedules
from hopper_attention.distributed.attend import Call, Saved
from hopper_attention.distributed.exchange import Message, Ranks, Transfer
from hopper_attention.distributed.layout import shard, unshard
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.schedule import Schedule
from hopper_attention.reference import attention_naive
from tests.gpu.conftest import compile_for_ranks

DEVICE = "cuda"
SEQLEN, WORLD = 2048, 4
ANSWER_S = 120.0
"""That a thread waits for another, kernels loaded meanwhile."""

PROBLEMS = {
    "causal zigzag": Problem(WORLD, SEQLEN, SEQLEN, "zigzag", right=0),
    "full": Problem(WORLD, SEQLEN, SEQLEN, "contiguous"),
    "window": Problem(WORLD, SEQLEN, SEQLEN, "contiguous", 600, 100),
}
SCHEDULES = [Schedule(n, at_once) for at_once in (False, True) for n in (1, 2, 4)]

Sent = tuple[tuple[Tensor, ...], Event]


@dataclass
class Post:
    """What ranks in threads send to each other, in order. All work on the same stream."""

    lock: Lock = field(default_factory=Lock)
    boxes: dict[tuple[int, int], Queue[Sent]] = field(default_factory=dict)

    def box(self, sender: int, receiver: int) -> Queue[Sent]:
        with self.lock:
            return self.boxes.setdefault((sender, receiver), Queue())

    def exchange(self, ranks: Ranks, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        taken = []
        for message in sends:
            taken.append(Event())
            self.box(ranks.rank, message.peer).put((message.tensors, taken[-1]))
        return Delivery(ranks, self, list(receives), taken)


class Delivery(Transfer):
    """Copies what came when it is waited for, and waits until what was sent has been copied."""

    def __init__(self, ranks: Ranks, post: Post, receives: list[Message], taken: list[Event]) -> None:
        super().__init__(ranks, [], [])
        self.post = post
        self.receives = receives
        self.taken = taken

    def wait(self) -> None:
        for message in self.receives:
            tensors, taken = self.post.box(message.peer, self.ranks.rank).get(timeout=ANSWER_S)
            for to, x in zip(message.tensors, tensors, strict=True):
                assert to.is_contiguous() and x.is_contiguous()
                to.copy_(x)
            taken.set()
        assert all(event.wait(ANSWER_S) for event in self.taken)
        self.receives.clear()


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Those of the problems. What is not shipped compiles as it is met."""
    compile_for_ranks("bfloat16", 128)


def both(p: Problem, call: Call, whole: list[Tensor], rank: int, schedule: Schedule) -> list[Tensor]:
    """out and the gradients of the rows of a rank."""
    ranks = Ranks(None, rank, WORLD)  # type: ignore[arg-type]  # threads have no group
    q, k, v, dout = (shard(x, rank, WORLD, p.layout).contiguous() for x in whole)
    out, lse = ring.scheduled_forward(ranks, p, call, (q, k, v), None, schedule=schedule)
    saved = Saved(q, out, lse, dout, None)
    return [out, *ring_backward.scheduled_backward(ranks, p, call, saved, (k, v), schedule=schedule)]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_ranks_in_threads_are_as_exact_as_one_call(
    monkeypatch: pytest.MonkeyPatch, name: str, schedule: Schedule
) -> None:
    p, call, post = PROBLEMS[name], Call(128**-0.5), Post()
    for module in (ring, ring_backward):
        monkeypatch.setattr(module, "exchange", post.exchange)
    # Short shards too have some of their own work beside a call, on another stream.
    monkeypatch.setattr(schedules, "FULL_ROWS", SEQLEN // WORLD)
    torch.manual_seed(3)
    whole = [torch.randn(1, SEQLEN, h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (8, 4, 4, 8)]
    with ThreadPoolExecutor(WORLD) as pool:
        asked = [pool.submit(both, p, call, whole, rank, schedule) for rank in range(WORLD)]
        of_ranks = [each.result() for each in asked]
    *leaves, dout = (x.double().requires_grad_() for x in whole)
    sides = {"window_left": p.left, "window_right": p.right, "causal": p.right == 0}
    out, _ = attention_naive(*leaves, **sides)
    right = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    *leaves, dout = (x.clone().requires_grad_() for x in whole)
    out = flash_attn_func(*leaves, window_size=(p.left, p.right))
    one = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for what, parts, alone, wanted in zip(
        ("out", "dq", "dk", "dv"), zip(*of_ranks, strict=True), one, right, strict=True
    ):
        got = unshard(torch.cat(list(parts), 1), WORLD, p.layout)
        error, error_of_one = ((x.double() - wanted).norm() for x in (got, alone))
        assert error <= 1.5 * error_of_one, (what, float(error), float(error_of_one))
