"""What waits for what where heads go beside attention to others, without kernels and messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.distributed import over_peers, parts_over_peers
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.division import divide
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.over_peers import AttentionOverPeers
from hopper_attention.distributed.parts_over_peers import AttentionInParts
from hopper_attention.distributed.pushed import FEW_CTAS, LEAST_BYTES, Moves, PushedExchange, Region
from tests.python.live_bytes import LiveBytes
from tests.python.test_distributed_memory import (
    CALL,
    BareMemory,
    attend_in_place,
    problem_of,
    tensors_of,
)


class OrderedMemory(BareMemory):
    """Buffers that say what waits for what: marks, by the side that they are of and their number."""

    def __init__(self, nbytes: int, memory: LiveBytes) -> None:
        super().__init__(nbytes, memory)
        self.side, self.marks = "main", 0
        self.waits: list[tuple[str, tuple[str, int]]] = []
        self.met: list[str] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.side = "aside"
        try:
            yield
        finally:
            self.side = "main"

    def mark(self) -> Any:
        self.marks += 1
        return self.side, self.marks

    def meet(self) -> None:
        super().meet()
        self.met.append(self.side)

    def after(self, mark: Any) -> None:
        self.waits.append((self.side, mark))


def test_a_part_that_fails_is_waited_for_and_kept_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    q, k, v, *_ = tensors_of(2, 1 << 15, (16, 16))
    with LiveBytes() as live:
        exchange = PushedExchange(
            Ranks(None, 1, 2),  # type: ignore[arg-type]  # no message is sent
            OrderedMemory(LEAST_BYTES, live),
            lambda nbytes: OrderedMemory(nbytes, live),
        )
        given = q, k, v, exchange, problem_of(2, 1 << 15), CALL, divide(8), False, False
        monkeypatch.setattr(parts_over_peers, "attend_heads", attend_in_place)
        AttentionInParts.apply(*given)
        memory = exchange.memory
        assert isinstance(memory, OrderedMemory) and exchange.last.size < memory.nbytes
        with monkeypatch.context() as patch:
            patch.setattr(parts_over_peers, "attend_heads", fail)
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                AttentionInParts.apply(*given)
        assert memory.waits[-1] == ("main", ("aside", memory.marks)) and exchange.last == Region(
            0, memory.nbytes
        )
        meetings = []
        for _ in range(2):
            before = memory.meetings
            AttentionInParts.apply(*given)
            meetings.append(memory.meetings - before)
        # One more, before anything is written.
        assert meetings == [5, 4]


class Watched:
    """A forward pass of four ranks that exchange heads in waves: what is launched, on which side and in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, live: LiveBytes, heads: tuple[int, int]) -> None:
        self.live, self.log, self.fails = live, [], False
        self.rows = tensors_of(4, 1 << 15, heads)[:3]
        self.exchange = PushedExchange(
            Ranks(None, 1, 4),  # type: ignore[arg-type]  # no message is sent
            self.make(LEAST_BYTES),
            self.make,
        )
        monkeypatch.setattr(over_peers, "attend_into", self.attend)
        monkeypatch.setattr(Moves, "write", lambda moves, rows: self.log.append((self.memory.side, "copies")))

    def make(self, nbytes: int) -> OrderedMemory:
        return OrderedMemory(nbytes, self.live)

    @property
    def memory(self) -> OrderedMemory:
        assert isinstance(self.exchange.memory, OrderedMemory)
        return self.exchange.memory

    def attend(self, qkv: tuple[Tensor, ...], mask: Any, call: Call, results: tuple[Tensor, Tensor]) -> None:
        (q, k, _), (out, lse) = qkv, results
        assert out.shape == q.shape and lse.shape == (1, q.shape[2], q.shape[1])
        self.log.append((self.memory.side, f"{q.shape[2]} over {k.shape[2]}, {call.sm_margin} SMs free"))
        if self.fails and self.memory.side == "aside":
            raise torch.OutOfMemoryError("no room")

    def run(self) -> None:
        AttentionOverPeers.apply(*self.rows, self.exchange, problem_of(4, 1 << 15), CALL, False, False)


@pytest.mark.parametrize(
    ("heads", "first", "then"), [((16, 16), "1 over 1", "3 over 3"), ((32, 8), "4 over 1", "4 over 1")]
)
def test_attention_to_the_first_heads_goes_beside_the_copies_of_the_others(
    heads: tuple[int, int], first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveBytes() as live:
        watched = Watched(monkeypatch, live, heads)
        watched.run()
        memory = watched.memory
        # The output follows when both are done.
        assert watched.log == [
            ("main", "copies"),
            ("main", f"{first}, {FEW_CTAS} SMs free"),
            ("aside", "copies"),
            ("aside", f"{then}, 0 SMs free"),
            ("main", "copies"),
        ]
        assert memory.met == ["main", "aside", "main"]
        # Copies of the others do not wait for ranks to meet, which is behind the mark; what went aside is waited for.
        assert memory.waits == [("aside", ("main", 1)), ("main", ("aside", 2))]


def test_what_went_aside_is_waited_for_where_attention_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveBytes() as live:
        watched = Watched(monkeypatch, live, (16, 16))
        watched.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            watched.run()
        assert watched.memory.waits[-1] == ("main", ("aside", watched.memory.marks))
