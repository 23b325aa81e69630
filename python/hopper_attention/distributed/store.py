"""What ranks of a group tell each other through its store: nothing is launched, and no GPU is waited for."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from hopper_attention.distributed.exchange import PeerError, Ranks

AGREEMENT_TIMEOUT_S = 60.0
"""How long a rank waits for the others to say something, where the call sets no time-out."""


class Numbers:
    """Of what a group says: what was said once is not to be read again.

    Attributes:
        following: the next one.
    """

    def __init__(self) -> None:
        self.following = 0

    def take(self) -> int:
        self.following += 1
        return self.following - 1


@lru_cache(maxsize=64)
def _numbers_of(group: dist.ProcessGroup) -> Numbers:
    return Numbers()


def _key(number: int, rank: int) -> str:
    return f"hopper_attention/{number}/{rank}"


def tell(ranks: Ranks, said: Any) -> None:
    """Say what the others find in a ``tell_each_other`` that they make in place of this, and wait for nobody."""
    store, number = _get_process_group_store(ranks.group), _numbers_of(ranks.group).take()
    store.set(_key(number, ranks.rank), json.dumps(said))


def who_speaks(ranks: Ranks) -> list[int]:
    """Ranks that have said something to which this one has not come, as far as the store still answers."""
    store, number = _get_process_group_store(ranks.group), _numbers_of(ranks.group).following
    try:
        return [rank for rank in range(ranks.size) if store.check([_key(number, rank)])]
    except RuntimeError:
        return []


def tell_each_other(ranks: Ranks, said: Any, doing: str) -> list[Any]:
    """What all ranks say, in their order, as JSON has it. All call in the same order.

    Args:
        doing: what a rank that does not come should have done, for the error.

    Raises:
        PeerError: a rank said nothing in time; it names the ranks.
    """
    store, number = _get_process_group_store(ranks.group), _numbers_of(ranks.group).take()
    keys = [_key(number, rank) for rank in range(ranks.size)]
    store.set(keys[ranks.rank], json.dumps(said))
    try:
        store.wait(keys, timedelta(seconds=ranks.timeout or AGREEMENT_TIMEOUT_S))
    except RuntimeError as error:
        missing = [ranks.name(r) for r, key in enumerate(keys) if not store.check([key])]
        raise PeerError(
            f"{ranks.name(ranks.rank)} waited in vain for {', '.join(missing)} to {doing}: all ranks of a group make "
            "the same calls in the same order, and one that made a call before with others says nothing"
        ) from error
    return [json.loads(store.get(key)) for key in keys]
