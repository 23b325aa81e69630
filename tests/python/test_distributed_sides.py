"""What waits for what where parts of the heads go beside attention, without kernels and messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.distributed import parts_over_peers
from hopper_attention.distributed.division import divide
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.parts_over_peers import AttentionInParts
from hopper_attention.distributed.pushed import LEAST_BYTES, PushedExchange, Region
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
