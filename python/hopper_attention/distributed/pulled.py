"""Rows of all heads for all rows of some heads, pulled out of the memory of the ranks that have them.

A rank puts what it gives into its buffer, in one copy: sorted by who takes it where rows become heads, as it is where
heads become rows. Then all ranks meet, and each copies what it needs to where it belongs, so that nothing is put in
order afterwards. The buffer has two rooms, which exchanges use in turns. Whoever writes to a room has met the others
since it was read: each of them came to that meeting behind its copies of the exchange before the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange
from hopper_attention.distributed.layout import CHUNKS_A_RANK
from hopper_attention.distributed.peers import PeerMemory

MOST_BYTES = 1 << 27
"""That a rank gives in an exchange: Q, K and V, or their gradients. 32k tokens on four ranks have 101 MB with 16 heads
of 128 columns, and as many with 32 over 8. What is larger takes long enough to hide what messages cost, and the rooms
are kept."""

LEAST_BYTES = 1 << 24
ROOMS = 2
ALIGNED = 256


class PulledExchange(HeadExchange):
    """By copies out of each other's memory; all of a call at once."""

    name = "peer memory"

    def __init__(self, ranks: Ranks, memory: PeerMemory, make: Callable[[int], PeerMemory]) -> None:
        """``make`` is asked for a larger memory when an exchange needs one, by all ranks together."""
        self.ranks = ranks
        self.memory = memory
        self.make = make
        self.turn = 0

    def to_heads(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        size, me = self.ranks.size, self.ranks.rank
        offsets = self._rooms_for(tensors)
        for x, offset in zip(tensors, offsets, strict=True):
            by_rank = x.unflatten(2, (size, -1)).movedim(2, 0)
            self._view(me, tuple(by_rank.shape), x.dtype, offset).copy_(by_rank)
        self.memory.meet()
        found = []
        for x, offset in zip(tensors, offsets, strict=True):
            batch, rows, heads, head_dim = x.shape
            part = batch, rows, heads // size, head_dim
            skipped = me * prod(part) * x.dtype.itemsize
            whole = x.new_empty(batch, size * rows, *part[2:])
            chunks = _by_owner(whole, size, layout)
            for owner in self._others_first():
                source = self._view(owner, part, x.dtype, offset + skipped)
                sources = source.chunk(CHUNKS_A_RANK[layout], 1)
                for into, chunk in zip(chunks[owner], sources, strict=True):
                    into.copy_(chunk)
            found.append(whole)
        return found

    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        size, me = self.ranks.size, self.ranks.rank
        offsets = self._rooms_for(tensors)
        for x, offset in zip(tensors, offsets, strict=True):
            self._view(me, tuple(x.shape), x.dtype, offset).copy_(x)
        self.memory.meet()
        found = []
        for x, offset in zip(tensors, offsets, strict=True):
            batch, positions, heads, head_dim = x.shape
            mine = x.new_empty(batch, positions // size, size, heads, head_dim)
            chunks = mine.unflatten(1, (CHUNKS_A_RANK[layout], -1))
            for owner in self._others_first():
                source = self._view(owner, tuple(x.shape), x.dtype, offset)
                chunks[:, :, :, owner].copy_(_rows_of(source, me, size, layout))
            found.append(mine.flatten(2, 3))
        return found

    def _others_first(self) -> list[int]:
        """The ranks in an order in which no two ranks copy from the same one at a time."""
        return [(self.ranks.rank + t) % self.ranks.size for t in range(1, self.ranks.size + 1)]

    def _rooms_for(self, tensors: Sequence[Tensor]) -> list[int]:
        """Where in the buffer each of an exchange lies."""
        sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors]
        total = sum(sizes)
        if ROOMS * total > self.memory.nbytes:
            self.memory = self.make(bytes_for(total))
        self.memory.begin()
        self.turn = (self.turn + 1) % ROOMS
        start = self.turn * (self.memory.nbytes // ROOMS)
        return [start + sum(sizes[:i]) for i in range(len(sizes))]

    def _view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        return self.memory.view(rank, shape, dtype, offset)


def bytes_for(total: int) -> int:
    """Of a buffer with room for exchanges of ``total`` bytes."""
    return ROOMS * max(LEAST_BYTES, 1 << (total - 1).bit_length())


def _by_owner(whole: Tensor, size: int, layout: str) -> list[list[Tensor]]:
    """The chunks of a whole sequence that each rank has, in its order."""
    count = CHUNKS_A_RANK[layout]
    chunks = whole.chunk(size * count, 1)
    if count == 1:
        return [[chunk] for chunk in chunks]
    return [[chunks[rank], chunks[2 * size - 1 - rank]] for rank in range(size)]


def _rows_of(whole: Tensor, rank: int, size: int, layout: str) -> Tensor:
    """(batch, chunks of the rank, rows of a chunk, ...) of a whole sequence: a view, since a rank has two at most."""
    count = CHUNKS_A_RANK[layout]
    by_chunk = whole.unflatten(1, (size * count, -1))
    if count == 1:
        return by_chunk[:, rank : rank + 1]
    return by_chunk[:, rank : 2 * size - rank : 2 * size - 1 - 2 * rank]
