"""Other ways for heads to go in ulysses, to be timed beside what is done (``context_parallel.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hopper_attention.distributed import over_peers, ulysses
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange, MessageExchange
from hopper_attention.distributed.peers import PeerMemory, share_memory
from hopper_attention.distributed.pushed import LEAST_BYTES, Brought, Guest, PushedExchange
from hopper_attention.distributed.waves import EVERY_HEAD_AT_ONCE


@dataclass(frozen=True)
class OwnMemory:
    """Gradients of heads that nobody reads where they are made."""

    tensors: tuple[Tensor, ...]
    layout: str


class CopyingExchange(PushedExchange):
    """Q, K and V of the heads are always copied out of the buffer, beside the attention to them."""

    def receive(self, brought: Brought, may_stay: bool) -> Guest:
        return super().receive(brought, False)


class WrittenExchange(CopyingExchange):
    """Gradients are written into the memory of those that want them too, and copied out of it: not over Q, K and V,
    so that these are copied as well."""

    def offer(self, like: Sequence[Tensor], layout: str) -> Any:
        return OwnMemory(tuple(x.new_empty(x.shape) for x in like), layout)

    def take_rows(self, offered: Any) -> list[Tensor]:
        return self.to_rows(offered.tensors, offered.layout)


def shared(ranks: Ranks, device: torch.device, nbytes: int) -> PeerMemory:
    found = share_memory(ranks, device, nbytes)
    assert not isinstance(found, str)
    return found


@lru_cache(maxsize=4)
def of_any_length(kind: type[PushedExchange], ranks: Ranks, device: torch.device) -> HeadExchange:
    """With a memory of its own; messages where there is none."""
    found = share_memory(ranks, device, LEAST_BYTES)
    return (
        MessageExchange(ranks)
        if isinstance(found, str)
        else kind(ranks, found, partial(shared, ranks, device))
    )


@contextmanager
def messages_only() -> Iterator[None]:
    """Ulysses as where ranks have no memory in common; a backward pass does what its forward pass did."""
    with mock.patch.object(ulysses, "exchange_for", lambda ranks, nbytes, device: MessageExchange(ranks)):
        yield


@contextmanager
def by_peer_memory(kind: type[PushedExchange]) -> Iterator[None]:
    """Ulysses over peer memory also where shards are long."""
    with mock.patch.object(
        ulysses, "exchange_for", lambda ranks, nbytes, device: of_any_length(kind, ranks, device)
    ):
        yield


@contextmanager
def heads_at_once() -> Iterator[None]:
    """Ulysses over peer memory whose attention waits for all heads."""
    with mock.patch.object(over_peers, "shares_of", lambda *given: EVERY_HEAD_AT_ONCE):
        yield


VARIANTS = {
    "ulysses, heads at once": heads_at_once,
    "ulysses by messages": messages_only,
    "ulysses, gradients written": partial(by_peer_memory, WrittenExchange),
    "ulysses, heads copied": partial(by_peer_memory, CopyingExchange),
    "ulysses by peer memory, of any length": partial(by_peer_memory, PushedExchange),
}
"""By name."""
