"""Rows of all heads for all rows of some heads, written into the memory of the ranks that want them.

One launch writes all tensors of an exchange to where they belong on every rank, over NVLink and in their final order.
Then all ranks meet, and what they were given lies in a buffer of their own. It has two rooms, which exchanges use in
turns. So whoever writes into a room has met its owner since the owner read it, provided that what reads a room is
launched before the next exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.copies.config import MOST_COPIES, VECTOR
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange
from hopper_attention.distributed.layout import CHUNKS_A_RANK, CONTIGUOUS
from hopper_attention.distributed.peers import PeerMemory
from hopper_attention.launch.copies import copy_known

MOST_BYTES = 1 << 27
"""That a rank is given in an exchange: Q, K and V, or their gradients. 32k tokens on four ranks have 101 MB with 16
heads of 128 columns, and as many with 32 over 8. What is larger takes long enough to hide what messages cost, and the
rooms are kept."""

LEAST_BYTES = 1 << 24
ROOMS = 2
ALIGNED = 256
REMEMBERED_PLACES = 1024

CTAS = 192
"""That write an exchange together. On four H200 as many as there are tiles took a fifth longer, and 24 as long."""

Part = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of a tensor in a buffer: sizes, strides, and elements to its first."""

Copy = tuple[Tensor, Tensor]
"""Target and source."""


class Chunks(NamedTuple):
    """Chunks of a whole sequence that a rank has: the first, how far on the next is, and how many."""

    first: int
    step: int
    number: int

    @classmethod
    def of(cls, rank: int, size: int, layout: str) -> Chunks:
        if layout == CONTIGUOUS:
            return cls(rank, 1, 1)
        return cls(rank, 2 * size - 1 - 2 * rank, 2)


class PushedExchange(HeadExchange):
    """By writes into each other's memory; all tensors of a call at once."""

    name = "peer memory"

    def __init__(self, ranks: Ranks, memory: PeerMemory, make: Callable[[int], PeerMemory]) -> None:
        """``make`` is asked for a larger memory when an exchange needs one, by all ranks together."""
        self.ranks = ranks
        self.memory = memory
        self.make = make
        self.turn = 0
        self.places: dict[tuple[Any, ...], Tensor] = {}

    def to_heads(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        return [x.clone() for x in self.lend_heads(tensors, layout)]

    def lend_heads(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        """``to_heads`` in the buffer itself: what reads them is launched before the next exchange."""
        return self._exchange(
            tensors, [self._of_heads(x) for x in tensors], partial(self._to_heads, layout=layout)
        )

    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        places = [self._of_rows(x) for x in tensors]
        return [x.clone() for x in self._exchange(tensors, places, partial(self._to_rows, layout=layout))]

    def _exchange(
        self,
        tensors: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        copies_of: Callable[[Tensor, tuple[int, ...], int], list[Copy]],
    ) -> list[Tensor]:
        """What all ranks give this one, of these shapes, in the buffer."""
        offsets = self._rooms_for(tensors)
        # What one launch can do: copies of one dtype, whose rows are whole vectors.
        kinds: dict[tuple[torch.dtype, bool], list[Copy]] = {}
        for given, shape, offset in zip(tensors, shapes, offsets, strict=True):
            x = _with_dense_rows(given)
            copies = copies_of(x, shape, offset)
            kinds.setdefault((x.dtype, _has_vectors(x, copies[0][1])), []).extend(copies)
        for (_, has_vectors), found in kinds.items():
            for i in range(0, len(found), MOST_COPIES):
                targets, sources = zip(*found[i : i + MOST_COPIES], strict=True)
                copy_known(targets, sources, has_vectors, CTAS // len(targets))
        self.memory.meet()
        mine = zip(tensors, shapes, offsets, strict=True)
        return [self.memory.view(self.ranks.rank, shape, x.dtype, offset) for x, shape, offset in mine]

    def _of_heads(self, x: Tensor) -> tuple[int, ...]:
        """The shape that rows come in."""
        batch, rows, heads, head_dim = x.shape
        return batch, self.ranks.size * rows, heads // self.ranks.size, head_dim

    def _of_rows(self, x: Tensor) -> tuple[int, ...]:
        """The shape that heads come back in."""
        batch, positions, heads, head_dim = x.shape
        return batch, positions // self.ranks.size, self.ranks.size * heads, head_dim

    def _to_heads(self, x: Tensor, shape: tuple[int, ...], offset: int, layout: str) -> list[Copy]:
        """For each rank, where its heads of the rows of this one belong, and where they are."""
        mine = Chunks.of(self.ranks.rank, self.ranks.size, layout)
        batch, rows = x.shape[:2]
        of_batch, of_row = x.stride()[:2]
        columns, chunk = shape[2] * shape[3], rows // mine.number
        sizes = batch, mine.number, chunk, columns
        strides = of_batch, chunk * of_row, of_row, 1
        there = self.ranks.size * rows * columns, mine.step * chunk * columns, columns, 1
        target = sizes, there, mine.first * chunk * columns
        found = []
        for owner in self._others_first():
            source = x.as_strided(sizes, strides, x.storage_offset() + owner * columns)
            found.append((self._place(owner, shape, x.dtype, offset, target), source))
        return found

    def _to_rows(self, x: Tensor, shape: tuple[int, ...], offset: int, layout: str) -> list[Copy]:
        """For each rank, where the heads of this one belong in its rows, and where they are."""
        batch, rows, heads, head_dim = shape
        of_batch, of_row = x.stride()[:2]
        width, columns = heads * head_dim, x.shape[2] * x.shape[3]
        chunk = rows // CHUNKS_A_RANK[layout]
        there = rows * width, chunk * width, width, 1
        found = []
        for owner in self._others_first():
            theirs = Chunks.of(owner, self.ranks.size, layout)
            sizes = batch, theirs.number, chunk, columns
            strides = of_batch, theirs.step * chunk * of_row, of_row, 1
            source = x.as_strided(sizes, strides, x.storage_offset() + theirs.first * chunk * of_row)
            target = sizes, there, self.ranks.rank * columns
            found.append((self._place(owner, shape, x.dtype, offset, target), source))
        return found

    def _rooms_for(self, tensors: Sequence[Tensor]) -> list[int]:
        """Where in the buffer each tensor of a new exchange lies. A rank gets as many bytes as it gives."""
        sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors]
        total = sum(sizes)
        self.memory.begin()
        if ROOMS * total > self.memory.nbytes:
            self.memory = self.make(bytes_for(total))
            self.places.clear()
        self.turn = (self.turn + 1) % ROOMS
        start = self.turn * (self.memory.nbytes // ROOMS)
        return [start + sum(sizes[:i]) for i in range(len(sizes))]

    def _others_first(self) -> list[int]:
        """The ranks in an order in which no two ranks begin with the same one."""
        return [(self.ranks.rank + t) % self.ranks.size for t in range(1, self.ranks.size + 1)]

    def _place(
        self, owner: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int, part: Part
    ) -> Tensor:
        """A part of a tensor in the buffer of a rank."""
        key = owner, shape, dtype, offset, part
        found = self.places.get(key)
        if found is None:
            if len(self.places) >= REMEMBERED_PLACES:
                self.places.clear()
            whole = self.memory.view(owner, shape, dtype, offset)
            sizes, strides, first = part
            found = whole.as_strided(sizes, strides, whole.storage_offset() + first)
            self.places[key] = found
        return found


def bytes_for(total: int) -> int:
    """Of a buffer with room for exchanges of ``total`` bytes."""
    return ROOMS * max(LEAST_BYTES, 1 << (total - 1).bit_length())


def _with_dense_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy of one whose heads do not lie side by side."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def _has_vectors(x: Tensor, piece: Tensor) -> bool:
    """Whether what is copied of a tensor with dense rows, in pieces like this one, can be moved in vectors."""
    in_vectors = not any(n % VECTOR for n in (*x.stride()[:2], piece.shape[3]))
    return in_vectors and x.numel() > 0 and not x.data_ptr() % (VECTOR * x.element_size())
