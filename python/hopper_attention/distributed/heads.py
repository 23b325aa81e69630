"""How rows of all heads become all rows of some heads, and back: what ulysses needs of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hopper_attention.distributed.exchange import Ranks, Transfer, all_to_all
from hopper_attention.distributed.layout import shard, unshard


class HeadExchange(ABC):
    """Between the ranks of a group; all exchange the same tensors in the same order.

    Attributes:
        name: of what carries it, as ``explain_context_parallel`` has it.
    """

    name: str

    @abstractmethod
    def to_heads(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        """Each (batch, rows, heads, d) -> (batch, positions, heads / size, d), of the heads of this rank."""

    @abstractmethod
    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        """The inverse: each (batch, positions, heads / size, d) -> (batch, rows, heads, d)."""


class MessageExchange(HeadExchange):
    """By all-to-all of the group's backend, a tensor at a time."""

    name = "messages"

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def to_heads(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        size = self.ranks.size
        posted = [self._post(x.unflatten(2, (size, -1)).movedim(2, 0), "heads") for x in tensors]
        found = []
        for received, transfer in posted:
            transfer.wait()
            found.append(unshard(received.movedim(0, 1).flatten(1, 2), size, layout).contiguous())
        return found

    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        size = self.ranks.size
        # Stacking keeps an order of strides that may not be that of rows, as of shards of two rows of an LSE.
        posted = [
            self._post(torch.stack([shard(x, r, size, layout) for r in range(size)]), "rows") for x in tensors
        ]
        found = []
        for received, transfer in posted:
            transfer.wait()
            found.append(received.movedim(0, 2).flatten(2, 3).contiguous())
        return found

    def _post(self, by_rank: Tensor, what: str) -> tuple[Tensor, Transfer]:
        return all_to_all(self.ranks, by_rank.contiguous(), what)
