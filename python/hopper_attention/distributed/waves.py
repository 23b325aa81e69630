"""Heads that come one share after the other: attention to the first ones goes beside the copies of the others.

That attention leaves some SMs to the copies, which have few CTAs. Attention to the others goes aside, behind their
copies, and takes the SMs that the first leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from hopper_attention.distributed.peers import PeerMemory


class HeadShare(NamedTuple):
    """Some heads of those of a rank: from ``first`` on ``heads`` of ``all``, counted in key/value heads."""

    first: int
    heads: int
    all: int

    def of(self, number: int) -> int:
        """Its part of so many heads, columns or bytes of all."""
        return number * self.heads // self.all

    def part(self, x: Tensor) -> Tensor:
        """These heads of a tensor (batch, positions, heads, d)."""
        heads = x.shape[2]
        return x if self.heads == self.all else x.narrow(2, heads * self.first // self.all, self.of(heads))


EVERY_HEAD = HeadShare(0, 1, 1)
EVERY_HEAD_AT_ONCE: tuple[HeadShare, ...] = (EVERY_HEAD,)


def divide_in_waves(kv_heads: int) -> tuple[HeadShare, ...]:
    """A quarter, for which attention waits, and the others."""
    if kv_heads < 2:
        return EVERY_HEAD_AT_ONCE
    first = max(1, kv_heads // 4)
    return HeadShare(0, first, kv_heads), HeadShare(first, kv_heads - first, kv_heads)


@dataclass(frozen=True, slots=True)
class Waves:
    """Two shares of heads, of which the first has come.

    Attributes:
        memory: where they come.
        send: the other share, by a launch.
        begun: the moment from which that may go.
    """

    memory: PeerMemory
    send: Callable[[], None]
    begun: Any

    def run(self, first: Callable[[], None], then: Callable[[], None]) -> None:
        """Attention to the first share here, and aside to the other one, behind its copies."""
        memory, ended = self.memory, self.begun
        first()
        try:
            with memory.aside():
                memory.after(self.begun)
                try:
                    self.send()
                    memory.meet()
                    then()
                finally:
                    ended = memory.mark()
        finally:
            memory.after(ended)
