"""Rows of all heads for all rows of some heads, written into the memory of the ranks that want them, or read from it.

One launch writes all tensors of an exchange to where they belong on every rank, over NVLink and in their final order.
Then all ranks meet, and what they were given lies in a buffer of their own. Gradients go the other way: each rank makes
them in its buffer, all meet, and one launch reads those of its rows from every rank, to where they stay.

What is given lies at the begin of the buffer as heads and at its end as rows, so that an exchange does not touch what
the one before has left. So one meeting is enough: whoever writes into a room has met its owner, and those who read of
it, since they did, provided that what reads a room is launched before the next exchange. Where two exchanges in a row
do touch, as of a backward pass and the next forward pass, all ranks meet once more between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.copies.config import MOST_COPIES, THREADS, THREADS_OF_FEW
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange
from hopper_attention.distributed.layout import CHUNKS_A_RANK, CONTIGUOUS
from hopper_attention.distributed.peers import PeerMemory
from hopper_attention.distributed.waves import EVERY_HEAD, EVERY_HEAD_AT_ONCE, HeadShare, Waves
from hopper_attention.launch import copies
from hopper_attention.launch.copies import CopiesLauncher, Piece
from hopper_attention.like_calls import Remembered

MOST_BYTES = 1 << 28
"""That a rank is given in an exchange: Q, K and V, or their gradients. 32k tokens on two ranks have 201 MB with 16
heads of 128 columns, and as many with 32 over 8; on four half of it. What is larger takes long enough to hide what
messages cost, and the buffer is kept."""

LEAST_BYTES = 1 << 25
"""Of a buffer."""

STEPS = 8
"""Sizes of a buffer from one power of two to the next."""

ALIGNED = 256
REMEMBERED_SENDINGS = 256

ADDRESSED = 16
"""Bytes of a vector, at multiples of which tensors begin that a kernel copies."""

CTAS = 192
"""That write an exchange together. On four H200 as many as there are tiles took a fifth longer, and 24 as long."""

FEW_CTAS = 12
"""About so many beside attention, which gets the other SMs: there is one for each copy of a launch, and else they are
shared out evenly. With ``THREADS_OF_FEW`` they keep the links of a GPU busy."""

Shape = tuple[int, ...]

Launches = tuple[tuple[CopiesLauncher, tuple[int, ...], tuple[Any, ...]], ...]
"""Of a kernel, for which tensors, and what it takes behind them."""

Pieces = tuple[tuple[int, Piece], ...]
"""With the tensor of each."""


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


class Region(NamedTuple):
    """Bytes of the buffer that an exchange uses."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def touches(self, other: Region) -> bool:
        return self.first < other.end and other.first < self.end


NOTHING = Region(0, 0)


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies between tensors of rows and the rooms of all ranks: by kernels, and pieces that none moves."""

    launches: Launches
    by_torch: Pieces

    def write(self, rows: Sequence[Tensor]) -> None:
        """From the rows."""
        self._launch(rows)
        for i, piece in self.by_torch:
            piece.target.copy_(piece.of(rows[i]))

    def read(self, rows: Sequence[Tensor]) -> None:
        """Into the rows."""
        self._launch(rows)
        for i, piece in self.by_torch:
            piece.of(rows[i]).copy_(piece.target)

    def _launch(self, rows: Sequence[Tensor]) -> None:
        for launcher, which, behind in self.launches:
            launcher([rows[i] for i in which], behind)


@dataclass(frozen=True, slots=True)
class Brought:
    """What all ranks give this one in an exchange, where it lies: until the next but one writes there.

    Attributes:
        tensors: in the buffer.
        waves: the heads of them that come together, share by share.
        room: all of them as bytes, one behind the other.
        firsts: where each begins in it, in elements of its own.
    """

    tensors: tuple[Tensor, ...]
    waves: tuple[tuple[Tensor, ...], ...]
    room: Tensor
    firsts: tuple[int, ...]

    def found_in(self, copy: Tensor) -> list[Tensor]:
        """The tensors, of a copy of the room."""
        of_dtype = {dtype: copy.view(dtype) for dtype in {x.dtype for x in self.tensors}}
        each = zip(self.tensors, self.firsts, strict=True)
        return [of_dtype[x.dtype].as_strided(x.shape, x.stride(), first) for x, first in each]


class Guest:
    """What a forward pass was brought, until its backward pass: in the buffer as long as nothing else wants the room,
    and in a copy of it then.

    Attributes:
        region: of the buffer, as long as it is there.
        copies: of the room; one, or none.
    """

    def __init__(self, brought: Brought, region: Region) -> None:
        self.brought = brought
        self.region = region
        self.copies: list[Tensor] = []

    def copy(self) -> None:
        self.copies.append(self.brought.room.clone())

    def copied(self) -> list[Tensor]:
        """The tensors, of the copy, which may have been made on another stream."""
        (copy,) = self.copies
        if copy.is_cuda:
            copy.record_stream(torch.cuda.current_stream(copy.device))
        return self.brought.found_in(copy)


NOBODY = Guest(Brought((), (), torch.empty(0, dtype=torch.uint8, device="cpu"), ()), NOTHING)


@dataclass(frozen=True, slots=True)
class Sending:
    """What exchanges do whose tensors are like those of an earlier one: all of it but where these lie.

    Attributes:
        scattered: which tensors have heads that do not lie side by side, and are copied first.
        waves: the copies of each share of the heads.
        region: where they go.
        brought: what comes.
    """

    scattered: tuple[int, ...]
    waves: tuple[Moves, ...]
    region: Region
    brought: Brought

    def side_by_side(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors, with the heads of each row side by side."""
        if not self.scattered:
            return tensors
        return [x.contiguous() if i in self.scattered else x for i, x in enumerate(tensors)]


@dataclass(frozen=True, slots=True)
class Offered:
    """Heads that this rank makes for all, and how it takes its rows of those of all.

    Attributes:
        tensors: contiguous, in the buffer: to be written before the rows are taken.
        region: where they lie.
        rows: the shape of what is taken of each.
        moves: of the rows.
    """

    tensors: tuple[Tensor, ...]
    region: Region
    rows: tuple[Shape, ...]
    moves: Moves

    def take(self) -> list[Tensor]:
        each = zip(self.rows, self.tensors, strict=True)
        found = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape, x in each]
        self.moves.read(found)
        return found


class PushedExchange(HeadExchange):
    """By writes into each other's memory; all tensors of a call at once."""

    name = "peer memory"

    def __init__(self, ranks: Ranks, memory: PeerMemory, make: Callable[[int], PeerMemory]) -> None:
        """``make`` is asked for a larger memory when an exchange needs one, by all ranks together."""
        self.ranks = ranks
        self.memory = memory
        self.make = make
        self.last = NOTHING
        self.guest = self.awaited = NOBODY
        self.takes_turns = False
        self.outgrown: list[PeerMemory] = []
        self.sendings: Remembered[Sending] = Remembered(REMEMBERED_SENDINGS)
        self.offers: dict[tuple[Any, ...], Offered] = {}
        self.plans: dict[tuple[Any, ...], Any] = {}

    def to_heads(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        return [x.clone() for x in self.lend_heads(tensors, layout).tensors]

    def lend_heads(self, tensors: Sequence[Tensor], layout: str) -> Brought:
        """``to_heads`` in the buffer itself: what reads them is launched before the next exchange."""
        # Whose backward pass comes now comes later than others'.
        self.awaited = NOBODY
        return self._exchange(tensors, True, layout)

    def lend_in_waves(
        self, tensors: Sequence[Tensor], layout: str, shares: tuple[HeadShare, ...]
    ) -> tuple[Brought, Waves]:
        """``lend_heads`` of two shares of the heads, of which the second one is still to be sent."""
        self.awaited = NOBODY
        sending = self._find(tensors, True, layout, False, shares)
        first, second = sending.waves
        tensors = sending.side_by_side(tensors)
        first.write(tensors)
        begun = self.memory.mark()
        self.memory.meet()
        self.leave(sending.region)
        return sending.brought, Waves(self.memory, partial(second.write, tensors), begun)

    def receive(self, brought: Brought, may_stay: bool) -> Guest:
        """What was lent last, for a backward pass. It stays where it lies, if it may, where the last one that was
        received was differentiated before anything else came as heads: that is so of one layer at a time. All ranks
        find the same, as they make the same calls."""
        region = Region(0, brought.room.numel())
        guest = self.awaited = Guest(brought, region)
        if may_stay and self.takes_turns:
            self.guest = guest
        self.takes_turns = False
        return guest

    def see_again(self, guest: Guest) -> bool:
        """Whether a guest whose backward pass begins is still in the buffer."""
        self.takes_turns = guest is self.awaited
        self.awaited = NOBODY
        return guest is self.guest

    def lend_beside(self, tensors: Sequence[Tensor], layout: str) -> Brought:
        """``lend_heads`` of what is as large as the rows that went before, where these lay: beside the guest."""
        return self._exchange(tensors, True, layout, at_end=True)

    def to_rows(self, tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
        return [x.clone() for x in self.lend_rows(tensors, layout).tensors]

    def lend_rows(self, tensors: Sequence[Tensor], layout: str) -> Brought:
        """``to_rows`` in the buffer itself, as ``lend_heads``."""
        return self._exchange(tensors, False, layout)

    def offer(self, like: Sequence[Tensor], layout: str) -> Offered:
        """Room for heads like these, to be written and then given to ``take_rows`` as the next exchange."""
        self.memory.begin()
        total = sum(map(_room_of, like))
        # What the exchange before brought is still read while these are written.
        self._make_room(total, False, 0)
        return self._offer(like, self._region(total, True), layout)

    def offer_over(self, guest: Guest, layout: str) -> Offered:
        """The room of the guest, to be written over what lies there, as ``offer``."""
        self.memory.begin()
        self.guest = NOBODY
        return self._offer(guest.brought.tensors, guest.region, layout)

    def _offer(self, like: Sequence[Tensor], region: Region, layout: str) -> Offered:
        key = layout, region, *((x.shape, x.dtype) for x in like)
        offered = self.offers.get(key)
        if offered is None:
            if len(self.offers) >= REMEMBERED_SENDINGS:
                self.offers.clear()
            offered = self.offers[key] = self._plan_offer(like, region, layout)
        self.keep_off(region)
        return offered

    def take_rows(self, offered: Offered) -> list[Tensor]:
        """``to_rows`` of what was written to the room."""
        self.memory.meet()
        self.leave(offered.region)
        return offered.take()

    def _plan_offer(self, like: Sequence[Tensor], region: Region, layout: str) -> Offered:
        offsets = accumulate(map(_room_of, like), initial=region.first)
        places = [(tuple(x.shape), x.dtype, offset) for x, offset in zip(like, offsets, strict=False)]
        shapes = tuple(self._of_rows(x) for x in like)
        rows = [
            torch.empty(shape, dtype=x.dtype, device="meta") for shape, x in zip(shapes, like, strict=True)
        ]
        pieces = [
            self.pieces_of_heads(
                x, [self.memory.view(owner, *place) for owner in range(self.ranks.size)], layout
            )
            for x, place in zip(rows, places, strict=True)
        ]
        mine = tuple(self.memory.view(self.ranks.rank, *place) for place in places)
        moves = Moves(*launches_of(rows, pieces, like[0].device, gathers=True))
        return Offered(mine, region, shapes, moves)

    def _exchange(
        self, tensors: Sequence[Tensor], to_heads: bool, layout: str, at_end: bool = False
    ) -> Brought:
        """``at_end``: of heads that go where rows do."""
        sending = self._find(tensors, to_heads, layout, at_end, EVERY_HEAD_AT_ONCE)
        sending.waves[0].write(sending.side_by_side(tensors))
        self.memory.meet()
        self.leave(sending.region)
        return sending.brought

    def _find(
        self,
        tensors: Sequence[Tensor],
        to_heads: bool,
        layout: str,
        at_end: bool,
        shares: tuple[HeadShare, ...],
    ) -> Sending:
        """How these tensors go, to where nobody reads any more. ``shares``: of heads, one behind the other."""
        self.memory.begin()
        key = to_heads, at_end, layout, len(tensors), tensors[0].shape, tensors[-1].shape, shares
        # An address is not part of what is remembered.
        addresses = 0
        for x in tensors:
            addresses |= x.data_ptr()
        is_aligned = not addresses % ADDRESSED
        sending = self.sendings.find(key, *tensors) if is_aligned else None
        if sending is None or not self._has_room(sending.region.size, to_heads):
            sending = self._sending(tensors, to_heads, layout, at_end, shares)
            if is_aligned and self.sendings.comes_again(key):
                self.sendings.keep(key, sending, *tensors)
        self.keep_off(sending.region)
        return sending

    def _sending(
        self,
        given: Sequence[Tensor],
        to_heads: bool,
        layout: str,
        at_end: bool,
        shares: tuple[HeadShare, ...],
    ) -> Sending:
        scattered = tuple(i for i, x in enumerate(given) if not _has_dense_rows(x))
        tensors = [x.contiguous() if i in scattered else x for i, x in enumerate(given)]
        shape_of = self.shape_of_part if to_heads else self._of_rows
        # A rank gets as many bytes as it gives.
        *offsets, end = accumulate(map(_room_of, tensors), initial=0)
        # Heads are followed by an output, which is as large as Q.
        self._make_room(end, to_heads, max(map(_room_of, tensors)) if to_heads else 0)
        region = self._region(end, at_end or not to_heads)
        start = region.first
        places = [(shape_of(x), x.dtype, start + offset) for x, offset in zip(tensors, offsets, strict=True)]
        theirs = [[self.memory.view(owner, *place) for owner in range(self.ranks.size)] for place in places]
        waves = []
        for number, share in enumerate(shares):
            each = zip(tensors, theirs, strict=True)
            if to_heads:
                pieces = [
                    self.pieces_of_heads(x, [share.part(x) for x in whole], layout, share)
                    for x, whole in each
                ]
            else:
                pieces = [self._to_rows(x, whole, layout) for x, whole in each]
            ctas = FEW_CTAS if number else CTAS
            waves.append(Moves(*launches_of(tensors, pieces, tensors[0].device, ctas=ctas)))
        mine = tuple(whole[self.ranks.rank] for whole in theirs)
        brought = Brought(
            mine,
            tuple(tuple([share.part(x) for x in mine]) for share in shares),
            self.memory.view(self.ranks.rank, (end,), torch.uint8, start),
            tuple(offset // x.itemsize for x, offset in zip(tensors, offsets, strict=True)),
        )
        return Sending(scattered, tuple(waves), region, brought)

    def _has_room(self, total: int, to_heads: bool) -> bool:
        """Whether an exchange of so many bytes fits: rows beside what the one before left. All ranks find the same."""
        return total + (0 if to_heads else self.last.size) <= self.memory.nbytes

    def _make_room(self, total: int, to_heads: bool, more: int) -> None:
        """A larger buffer for an exchange that does not fit, with so many bytes more."""
        if not self._has_room(total, to_heads):
            self.reserve(total + more + (0 if to_heads else self.last.size))

    def reserve(self, total: int) -> None:
        """A buffer of so many bytes at least. All ranks ask for it together."""
        if total > self.memory.nbytes:
            # What the exchange before brought lies there, and its tensors do not hold it.
            self.outgrown.append(self.memory)
            if self.guest is not NOBODY:
                self.make_way()
            self.memory = self.make(bytes_for(total))
            self.last = NOTHING
            self.sendings.cache_clear()
            self.offers.clear()
            self.plans.clear()

    def _region(self, total: int, at_end: bool) -> Region:
        return Region(self.memory.nbytes - total, self.memory.nbytes) if at_end else Region(0, total)

    def make_way(self) -> None:
        """The guest's room may be written to, by those who keep off it."""
        self.guest.copy()
        self.last = Region(0, max(self.last.end, self.guest.region.end))
        self.guest = self.awaited = NOBODY

    def keep_off(self, region: Region) -> None:
        """Wait for all that the exchange before left in a region, and the guest."""
        if region.touches(self.guest.region):
            self.make_way()
        if region.touches(self.last):
            self.memory.meet()
            self.last = NOTHING

    def leave(self, region: Region) -> None:
        """All ranks have met, and what is launched until the next exchange may read of a region."""
        self.last = region
        self.outgrown.clear()

    def shape_of_part(self, x: Tensor, share: HeadShare = EVERY_HEAD) -> Shape:
        """The shape that rows of some heads come in."""
        batch, rows, heads, head_dim = x.shape
        return batch, self.ranks.size * rows, share.of(heads // self.ranks.size), head_dim

    def _of_rows(self, x: Tensor) -> Shape:
        """The shape that heads come back in."""
        batch, positions, heads, head_dim = x.shape
        return batch, positions // self.ranks.size, self.ranks.size * heads, head_dim

    def pieces_of_heads(
        self, x: Tensor, theirs: Sequence[Tensor], layout: str, share: HeadShare = EVERY_HEAD
    ) -> list[Piece]:
        """For each rank a share of its heads, of the rows of this one; ``theirs`` are the tensors that they become a
        part of, with as many heads."""
        mine = Chunks.of(self.ranks.rank, self.ranks.size, layout)
        batch, rows, heads, head_dim = x.shape
        of_rank = heads // self.ranks.size * head_dim
        columns, chunk = share.of(of_rank), rows // mine.number
        before = of_rank * share.first // share.all
        sizes = batch, mine.number, chunk, columns
        found = []
        for owner in self._others_first():
            whole = theirs[owner]
            of_batch, of_row = whole.stride()[:2]
            there = of_batch, mine.step * chunk * of_row, of_row, 1
            target = whole.as_strided(sizes, there, whole.storage_offset() + mine.first * chunk * of_row)
            found.append(Piece(target, owner * of_rank + before, chunk * x.stride(1)))
        return found

    def _to_rows(self, x: Tensor, theirs: Sequence[Tensor], layout: str) -> list[Piece]:
        """For each rank the heads of this one in its rows; ``theirs`` as for ``_to_heads``."""
        batch, positions, heads, head_dim = x.shape
        rows, columns = positions // self.ranks.size, heads * head_dim
        chunk, width = rows // CHUNKS_A_RANK[layout], self.ranks.size * columns
        there = rows * width, chunk * width, width, 1
        found = []
        for owner in self._others_first():
            whole, chunks = theirs[owner], Chunks.of(owner, self.ranks.size, layout)
            sizes = batch, chunks.number, chunk, columns
            target = whole.as_strided(sizes, there, whole.storage_offset() + self.ranks.rank * columns)
            of_chunk = chunk * x.stride(1)
            found.append(Piece(target, chunks.first * of_chunk, chunks.step * of_chunk))
        return found

    def _others_first(self) -> list[int]:
        """The ranks in an order in which no two ranks begin with the same one."""
        return [(self.ranks.rank + t) % self.ranks.size for t in range(1, self.ranks.size + 1)]


def bytes_for(total: int) -> int:
    """Of a buffer for ``total`` bytes. There are few sizes, as all ranks stop to make a larger one."""
    step = max(ALIGNED, (1 << (total - 1).bit_length()) // (2 * STEPS))
    return max(LEAST_BYTES, -(-total // step) * step)


def room_of(nbytes: int) -> int:
    """Bytes that a tensor of so many takes."""
    return -(-nbytes // ALIGNED) * ALIGNED


def _room_of(x: Tensor) -> int:
    return room_of(x.nbytes)


def _has_dense_rows(x: Tensor) -> bool:
    """Whether the heads of a row lie side by side."""
    return x.stride()[2:] == (x.shape[3], 1)


def launches_of(
    tensors: Sequence[Tensor],
    pieces: Sequence[list[Piece]],
    device: torch.device,
    gathers: bool = False,
    ctas: int = CTAS,
) -> tuple[Launches, Pieces]:
    """``launches`` and ``by_torch`` of a ``Sending``: a launch for pieces of one dtype that are moved in vectors, by so
    many CTAs together, or one for each piece."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, x in enumerate(tensors):
        in_vectors = copies.is_in_vectors(x, pieces[i]) and (x.is_meta or not x.data_ptr() % ADDRESSED)
        kinds.setdefault((x.dtype, in_vectors), []).append(i)
    launches, by_torch = [], []
    size = len(pieces[0])
    at_once = max(1, MOST_COPIES // size)
    threads = THREADS_OF_FEW if ctas <= FEW_CTAS else THREADS
    for (dtype, in_vectors), which in kinds.items():
        for i, j in product(range(0, len(which), at_once), range(0, size, MOST_COPIES)):
            some = tuple(which[i : i + at_once])
            parts = [pieces[n][j : j + MOST_COPIES] for n in some]
            number = len(parts[0])
            kind = dtype, len(some), number, device, gathers, threads
            launcher = copies.find(*kind) if in_vectors else None
            if launcher is None:
                by_torch += [(n, piece) for n, part in zip(some, parts, strict=True) for piece in part]
            else:
                behind = copies.behind_sources(parts, max(1, ctas // (len(some) * number)))
                launches.append((launcher, some, behind))
    return tuple(launches), tuple(by_torch)
