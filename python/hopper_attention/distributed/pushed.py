"""Rows of all heads for all rows of some heads, written into the memory of the ranks that want them.

One launch writes all tensors of an exchange to where they belong on every rank, over NVLink and in their final order.
Then all ranks meet, and what they were given lies in a buffer of their own. It has two rooms, which exchanges use in
turns. So whoever writes into a room has met its owner since the owner read it, provided that what reads a room is
launched before the end of the next exchange.

The heads of a rank may come and go in parts. Then what is written of one part runs beside the attention to another, on
few SMs.
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
from hopper_attention.launch.copies import ANY_CTAS, copy_known

MOST_BYTES = 1 << 27
"""That a rank is given in an exchange: Q, K and V, or their gradients. 32k tokens on four ranks have 101 MB with 16
heads of 128 columns, and as many with 32 over 8. What is larger takes long enough to hide what messages cost, and the
rooms are kept."""

LEAST_BYTES = 1 << 24
ROOMS = 2
ALIGNED = 256
REMEMBERED_PLACES = 1024

CTAS_BESIDE = 24
"""That write beside an attention kernel, each on an SM that the kernel has to do without meanwhile."""

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
        """``to_heads`` in the buffer itself: what reads them is launched before the end of the next exchange."""
        self.reserve(bytes_of(tensors))
        return Coming(self, tensors, layout).take(0)

    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        self.reserve(bytes_of(tensors))
        going = Going(self, layout)
        going.give(tensors)
        return going.finish()

    def reserve(self, nbytes: int) -> None:
        """Make sure that there is room for exchanges of so many bytes. None is under way."""
        self.memory.begin()
        if ROOMS * nbytes > self.memory.nbytes:
            self.memory = self.make(bytes_for(nbytes))
            self.places.clear()

    def rooms_for(self, sizes: Sequence[int]) -> list[int]:
        """Where in the buffer each tensor of a new exchange lies."""
        self.memory.begin()
        self.turn = (self.turn + 1) % ROOMS
        start = self.turn * (self.memory.nbytes // ROOMS)
        return [start + sum(sizes[:i]) for i in range(len(sizes))]

    def others_first(self) -> list[int]:
        """The ranks in an order in which no two ranks begin with the same one."""
        return [(self.ranks.rank + t) % self.ranks.size for t in range(1, self.ranks.size + 1)]

    def place(
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

    def write(
        self, copies_of_tensors: Sequence[tuple[Tensor, list[Copy]]], most_ctas: int = ANY_CTAS
    ) -> None:
        """Make copies of tensors with dense rows, in one launch where one dtype has vectors in all of them."""
        kinds: dict[tuple[torch.dtype, bool], list[Copy]] = {}
        for x, copies in copies_of_tensors:
            kinds.setdefault((x.dtype, _has_vectors(x, copies[0][1])), []).extend(copies)
        for (_, has_vectors), found in kinds.items():
            for i in range(0, len(found), MOST_COPIES):
                targets, sources = zip(*found[i : i + MOST_COPIES], strict=True)
                copy_known(targets, sources, has_vectors, max(1, most_ctas // len(targets)))


class Coming:
    """Tensors (batch, rows, heads, d) on their way to all positions of the heads of this rank, in parts of these."""

    def __init__(
        self, exchange: PushedExchange, tensors: Sequence[Tensor], layout: str, parts: int = 1
    ) -> None:
        """Write the first part; the others are written aside."""
        self.exchange = exchange
        self.layout = layout
        self.parts = parts
        offsets = exchange.rooms_for([_room(x) for x in tensors])
        self.tensors = list(zip(map(_with_dense_rows, tensors), offsets, strict=True))
        self._write(0, ANY_CTAS)
        launch = exchange.memory.launch_aside
        self.copies = [launch(partial(self._write, part, CTAS_BESIDE)) for part in range(1, parts)]

    def take(self, part: int) -> list[Tensor]:
        """Each (batch, positions, heads of the part, d), in the buffer."""
        memory = self.exchange.memory
        if part:
            memory.wait(self.copies[part - 1])
        memory.meet()
        return [
            memory.view(self.exchange.ranks.rank, *self._where(x, offset, part)) for x, offset in self.tensors
        ]

    def _where(self, x: Tensor, offset: int, part: int) -> tuple[tuple[int, ...], torch.dtype, int]:
        """Shape, dtype and bytes to the first of a part in the buffer."""
        size = self.exchange.ranks.size
        shape = x.shape[0], size * x.shape[1], x.shape[2] // size // self.parts, x.shape[3]
        return shape, x.dtype, offset + part * (x.nbytes // self.parts)

    def _write(self, part: int, most_ctas: int) -> None:
        copies = [(x, self._copies(x, *self._where(x, offset, part), part)) for x, offset in self.tensors]
        self.exchange.write(copies, most_ctas)

    def _copies(
        self, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int, part: int
    ) -> list[Copy]:
        """For each rank, where its heads of the rows of this one belong, and where they are."""
        ranks = self.exchange.ranks
        mine = Chunks.of(ranks.rank, ranks.size, self.layout)
        batch, rows = x.shape[:2]
        of_batch, of_row = x.stride()[:2]
        columns, chunk = shape[2] * shape[3], rows // mine.number
        sizes = batch, mine.number, chunk, columns
        strides = of_batch, chunk * of_row, of_row, 1
        there = ranks.size * rows * columns, mine.step * chunk * columns, columns, 1
        target = sizes, there, mine.first * chunk * columns
        found = []
        for owner in self.exchange.others_first():
            first = x.storage_offset() + (owner * self.parts + part) * columns
            source = x.as_strided(sizes, strides, first)
            found.append((self.exchange.place(owner, shape, dtype, offset, target), source))
        return found


class Going:
    """Tensors (batch, positions, heads of a part, d) on their way back to all heads of the rows of each rank."""

    def __init__(self, exchange: PushedExchange, layout: str, parts: int = 1) -> None:
        self.exchange = exchange
        self.layout = layout
        self.parts = parts
        self.places: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self.aside: list[Any] = []

    def give(self, tensors: Sequence[Tensor]) -> None:
        """The next part. Those before the last are written aside."""
        if not self.places:
            offsets = self.exchange.rooms_for([_room(x, self.parts) for x in tensors])
            for x, offset in zip(tensors, offsets, strict=True):
                batch, positions, heads, head_dim = x.shape
                size = self.exchange.ranks.size
                shape = batch, positions // size, size * self.parts * heads, head_dim
                self.places.append((shape, x.dtype, offset))
        dense, part = [_with_dense_rows(x) for x in tensors], len(self.aside)
        copies = [(x, self._copies(x, *where, part)) for x, where in zip(dense, self.places, strict=True)]
        if part + 1 == self.parts:
            self.exchange.write(copies)
            return
        launch = self.exchange.memory.launch_aside
        self.aside.append((launch(partial(self.exchange.write, copies, CTAS_BESIDE)), dense))

    def finish(self) -> list[Tensor]:
        """Each (batch, rows, heads, d), when all parts were given."""
        memory = self.exchange.memory
        for copies, _ in self.aside:
            memory.wait(copies)
        self.aside.clear()
        memory.meet()
        return [memory.view(self.exchange.ranks.rank, *where).clone() for where in self.places]

    def _copies(
        self, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, offset: int, part: int
    ) -> list[Copy]:
        """For each rank, where the heads of this one belong in its rows, and where they are."""
        ranks = self.exchange.ranks
        batch, rows, heads, head_dim = shape
        of_batch, of_row = x.stride()[:2]
        width, columns = heads * head_dim, x.shape[2] * x.shape[3]
        chunk = rows // CHUNKS_A_RANK[self.layout]
        there = rows * width, chunk * width, width, 1
        found = []
        for owner in self.exchange.others_first():
            theirs = Chunks.of(owner, ranks.size, self.layout)
            sizes = batch, theirs.number, chunk, columns
            strides = of_batch, theirs.step * chunk * of_row, of_row, 1
            source = x.as_strided(sizes, strides, x.storage_offset() + theirs.first * chunk * of_row)
            target = sizes, there, (ranks.rank * self.parts + part) * columns
            found.append((self.exchange.place(owner, shape, dtype, offset, target), source))
        return found


def bytes_for(total: int) -> int:
    """Of a buffer with room for exchanges of ``total`` bytes."""
    return ROOMS * max(LEAST_BYTES, 1 << (total - 1).bit_length())


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """That an exchange takes of a room."""
    return sum(map(_room, tensors))


def _room(x: Tensor, parts: int = 1) -> int:
    """Bytes that a tensor takes in the buffer, given one of equal parts. A rank gets as many as it gives."""
    return -(-x.nbytes * parts // ALIGNED) * ALIGNED


def _with_dense_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy of one whose heads do not lie side by side."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def _has_vectors(x: Tensor, piece: Tensor) -> bool:
    """Whether what is copied of a tensor with dense rows, in pieces like this one, can be moved in vectors."""
    in_vectors = not any(n % VECTOR for n in (*x.stride()[:2], piece.shape[3]))
    return in_vectors and x.numel() > 0 and not x.data_ptr() % (VECTOR * x.element_size())
