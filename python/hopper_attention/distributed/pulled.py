"""Rows of all heads for all rows of some heads, pulled out of the memory of the ranks that have them.

A rank puts what it gives into its buffer, in one copy: sorted by who takes it where rows become heads, as it is where
heads become rows. Then all ranks meet, and each copies what it needs to where it belongs, so that nothing is put in
order afterwards. The buffer has two rooms, which exchanges use in turns. Whoever writes to a room has met the others
since it was read: each of them came to that meeting behind its copies of the exchange before the last.

The heads of a rank may come and go in parts. Then the copies of one part run beside the attention to another: they are
those of memory in one piece, which a copy engine does, since a kernel finds no SM free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
WIDE_WORD = torch.complex128
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
        return Coming(self, tensors, layout).take(0)

    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        going = Going(self, layout)
        going.give(tensors)
        return going.finish()

    def others_first(self) -> list[int]:
        """The ranks in an order in which no two ranks copy from the same one at a time."""
        return [(self.ranks.rank + t) % self.ranks.size for t in range(1, self.ranks.size + 1)]

    def rooms_for(self, tensors: Sequence[Tensor]) -> list[int]:
        """Where in the buffer each of a new exchange lies."""
        sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors]
        total = sum(sizes)
        self.memory.begin()
        self.memory.join()
        if ROOMS * total > self.memory.nbytes:
            self.memory = self.make(bytes_for(total))
        self.turn = (self.turn + 1) % ROOMS
        start = self.turn * (self.memory.nbytes // ROOMS)
        return [start + sum(sizes[:i]) for i in range(len(sizes))]

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        return self.memory.view(rank, shape, dtype, offset)


class Coming:
    """Tensors (batch, rows, heads, d) on their way to all positions of some heads, in parts of these."""

    def __init__(
        self, exchange: PulledExchange, tensors: Sequence[Tensor], layout: str, parts: int = 1
    ) -> None:
        """Give all of them, and have the first part copied here; the others are, aside."""
        self.exchange = exchange
        self.layout = layout
        size, me = exchange.ranks.size, exchange.ranks.rank
        self.sources = list(zip(tensors, exchange.rooms_for(tensors), strict=True))
        for x, offset in self.sources:
            sorted_out = x.unflatten(2, (size, parts, -1)).movedim((3, 2), (0, 1))
            copy(exchange.view(me, tuple(sorted_out.shape), x.dtype, offset), sorted_out)
        exchange.memory.meet()
        self.wholes = [
            [
                x.new_empty(x.shape[0], size * x.shape[1], x.shape[2] // size // parts, x.shape[3])
                for x in tensors
            ]
            for _ in range(parts)
        ]
        self._copy(0)
        launch = exchange.memory.launch_aside
        self.copies = [launch(partial(self._copy, part)) for part in range(1, parts)]

    def take(self, part: int) -> list[Tensor]:
        """Each (batch, positions, heads of the part, d)."""
        if part:
            self.exchange.memory.wait(self.copies[part - 1])
        wholes, self.wholes[part] = self.wholes[part], []
        return wholes

    def _copy(self, part: int) -> None:
        size, me = self.exchange.ranks.size, self.exchange.ranks.rank
        for (x, offset), whole in zip(self.sources, self.wholes[part], strict=True):
            shape = x.shape[0], x.shape[1], *whole.shape[2:]
            skipped = (part * size + me) * prod(shape) * x.dtype.itemsize
            chunks = _by_owner(whole, size, self.layout)
            for owner in self.exchange.others_first():
                source = self.exchange.view(owner, shape, x.dtype, offset + skipped)
                for into, chunk in zip(
                    chunks[owner], source.chunk(CHUNKS_A_RANK[self.layout], 1), strict=True
                ):
                    into.copy_(chunk)


class Going:
    """Tensors (batch, positions, heads of a part, d) on their way back to all heads of the rows of each rank."""

    def __init__(self, exchange: PulledExchange, layout: str, parts: int = 1) -> None:
        self.exchange = exchange
        self.layout = layout
        self.parts = parts
        self.rows: list[Tensor] = []
        self.aside: list[list[Tensor]] = []

    def give(self, tensors: Sequence[Tensor]) -> None:
        """The next part. The last is copied to where it belongs, those before aside."""
        offsets = self.exchange.rooms_for(tensors)
        for x, offset in zip(tensors, offsets, strict=True):
            self.exchange.view(self.exchange.ranks.rank, tuple(x.shape), x.dtype, offset).copy_(x)
        self.exchange.memory.meet()
        sources = [self._sources(x, offset) for x, offset in zip(tensors, offsets, strict=True)]
        if not self.rows:
            self.rows += [self._empty_rows(x) for x in tensors]
        if len(self.aside) + 1 == self.parts:
            self._copy_home(sources)
            return
        pieces = [x[0].new_empty((len(x), *x[0].shape)) for x in sources]
        self.exchange.memory.launch_aside(partial(self._copy_pieces, pieces, sources))
        self.aside.append(pieces)

    def _sources(self, x: Tensor, offset: int) -> list[Tensor]:
        """What each rank gives of the rows of this one: (batch, chunks, rows of a chunk, heads, d)."""
        size, me = self.exchange.ranks.size, self.exchange.ranks.rank
        given = (self.exchange.view(rank, tuple(x.shape), x.dtype, offset) for rank in range(size))
        return [_rows_of(whole, me, size, self.layout) for whole in given]

    def _empty_rows(self, x: Tensor) -> Tensor:
        """(batch, chunks, rows of a chunk, ranks, parts, heads of a part, d)."""
        size, count = self.exchange.ranks.size, CHUNKS_A_RANK[self.layout]
        batch, positions, heads, head_dim = x.shape
        return x.new_empty(batch, count, positions // size // count, size, self.parts, heads, head_dim)

    def _copy_home(self, sources: list[list[Tensor]]) -> None:
        for rows, given in zip(self.rows, sources, strict=True):
            for owner in self.exchange.others_first():
                copy(rows[:, :, :, owner, -1], given[owner])

    def _copy_pieces(self, pieces: list[Tensor], sources: list[list[Tensor]]) -> None:
        """Chunk by chunk, each of which is in one piece here and there."""
        for owner in self.exchange.others_first():
            for piece, given in zip(pieces, sources, strict=True):
                for i in range(given[owner].shape[1]):
                    piece[owner, :, i].copy_(given[owner][:, i])

    def finish(self) -> list[Tensor]:
        """Each (batch, rows, heads, d), when all parts were given."""
        if self.aside:
            self.exchange.memory.join()
        for part, pieces in enumerate(self.aside):
            for rows, piece in zip(self.rows, pieces, strict=True):
                copy(rows[:, :, :, :, part], piece.permute(1, 2, 3, 0, 4, 5))
        self.aside.clear()
        return [x.flatten(3, 5).flatten(1, 2) for x in self.rows]


def bytes_for(total: int) -> int:
    """Of a buffer with room for exchanges of ``total`` bytes."""
    return ROOMS * max(LEAST_BYTES, 1 << (total - 1).bit_length())


def copy(into: Tensor, source: Tensor) -> None:
    """Between tensors that do not lie in one piece, in words of 16 bytes where there are such: a kernel of PyTorch has
    a thread an element, and one of two bytes is a poor use of a link."""
    if _has_wide_words(into) and _has_wide_words(source):
        into, source = into.view(WIDE_WORD), source.view(WIDE_WORD)
    into.copy_(source)


def _has_wide_words(x: Tensor) -> bool:
    size = x.element_size()
    places = (
        x.data_ptr(),
        x.storage_offset() * size,
        x.shape[-1] * size,
        *(stride * size for stride in x.stride()[:-1]),
    )
    return x.stride(-1) == 1 and x.numel() > 0 and not any(place % WIDE_WORD.itemsize for place in places)


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
