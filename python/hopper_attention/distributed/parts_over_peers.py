"""Ulysses over the memory of peers, some heads after the other: what comes and goes of a part does so beside the
attention to another part, and little is held at a time.

Each part has a room in the buffer of every rank. Its rows are written there as heads, attention reads them there and
writes its results in their place, and their owners read these. A room serves several parts by turns. Nothing of the
heads is kept for the backward pass: rows of Q, K, V and of the output are, and are exchanged again.

All exchanges go on a stream of their own, in one order on all ranks. A kernel that attends takes every SM that is free
until it ends. So copies beside it begin before it, and have few CTAs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.division import Division, HeadParts
from hopper_attention.distributed.over_peers import attend_heads, differentiate_heads, exchanged, whole_mask
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.pushed import (
    ADDRESSED,
    CTAS,
    FEW_CTAS,
    NOBODY,
    REMEMBERED_SENDINGS,
    Moves,
    PushedExchange,
    Region,
    launches_of,
    room_of,
)
from hopper_attention.launch.gradients_again import ForGradients


class Result(NamedTuple):
    """Of a part, what becomes rows again.

    Attributes:
        rows: the shape of all of it as rows of this rank.
        dtype: of it.
        place: which of the tensors that came it is written over, or their number for a place of its own.
    """

    rows: torch.Size
    dtype: torch.dtype
    place: int

    @property
    def nbytes(self) -> int:
        return self.rows.numel() * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A tensor of all of it, without memory."""
        return torch.empty(self.rows, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Of a part: where what comes and its results lie on this rank, and how they get there and back.

    ``given`` is what comes, and ``region`` all of its room.
    """

    region: Region
    given: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    come: Moves
    go: Moves


Attend = Callable[[int, PartPlan], None]
"""Fills the results of a part, by its number, from what came of it."""


@dataclass(frozen=True)
class PartedExchange:
    """One pass: tensors of rows become heads in parts, and what attention makes of them becomes rows."""

    exchange: PushedExchange
    layout: str
    parts: HeadParts
    results: tuple[Result, ...]

    def run(
        self, rows: Sequence[Tensor], attend: Attend, reserve: Callable[[], int] | None = None
    ) -> list[Tensor]:
        """The results as rows. All ranks call it with tensors alike; the buffer gets as many bytes as ``reserve``
        says, at least."""
        exchange, rooms = self.exchange, self.parts.rooms
        rows = [x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in rows]
        exchange.memory.begin()
        plans = self._plans_of(rows, reserve)
        memory = exchange.memory
        if exchange.guest is not NOBODY:
            # A copy is made here, and not aside.
            exchange.make_way()
        began = memory.mark()
        try:
            with memory.aside():
                memory.after(began)
                exchange.keep_off(plans[0].region)
                # Until the end, or for good where a part fails: the next exchange keeps off all rooms.
                exchange.last = Region(0, memory.nbytes)
                ready = [self._bring(plan, rows) for plan in plans[:rooms]]
            found = self._take_turns(plans, rows, ready, attend)
        finally:
            # Copies read rows that may be freed next.
            with memory.aside():
                ended = memory.mark()
            memory.after(ended)
        exchange.leave(plans[-1].region)
        return found

    def _take_turns(
        self, plans: Sequence[PartPlan], rows: Sequence[Tensor], ready: list[Any], attend: Attend
    ) -> list[Tensor]:
        """The results, which go aside, of parts of which the first are ``ready`` or on their way."""
        memory, found = self.exchange.memory, []
        for number, plan in enumerate(plans):
            memory.after(ready[number])
            memory.give_head_start()
            attend(number, plan)
            if not number:
                # Not sooner, for what the attention holds to be as little as it can.
                found = [rows[0].new_empty(x.rows, dtype=x.dtype) for x in self.results]
            done = memory.mark()
            with memory.aside():
                memory.after(done)
                memory.meet()
                begun = memory.mark()
                plan.go.read(found)
                if len(ready) < len(plans):
                    # The room is free when all have read of it.
                    memory.meet()
                    begun = memory.mark()
                    ready.append(self._bring(plans[len(ready)], rows))
            # Copies that have begun keep their SMs beside the next attention.
            memory.after(begun)
        return found

    def _bring(self, plan: PartPlan, rows: Sequence[Tensor]) -> Any:
        plan.come.write(rows)
        self.exchange.memory.meet()
        return self.exchange.memory.mark()

    def _plans_of(self, rows: Sequence[Tensor], reserve: Callable[[], int] | None) -> tuple[PartPlan, ...]:
        # Of each: which of them kernels move is part of a plan.
        are_aligned = tuple([not x.data_ptr() % ADDRESSED for x in rows])
        exchange, like = self.exchange, tuple([(x.shape, x.stride(), x.dtype) for x in rows])
        key = self.layout, self.parts, self.results, like, are_aligned, reserve is None
        found = exchange.plans.get(key)
        if found is None:
            sizes = [x.nbytes for x in rows]
            exchange.reserve(max(self.bytes_of(sizes), reserve() if reserve else 0))
            if len(exchange.plans) >= REMEMBERED_SENDINGS:
                exchange.plans.clear()
            found = tuple(self._plan(rows, number) for number in range(len(self.parts.shares)))
            exchange.plans[key] = found
        return found

    def bytes_of(self, rows: Sequence[int]) -> int:
        """Of the buffer, for tensors of so many bytes."""
        return sum(self._places(rows, room)[1] for room in range(self.parts.rooms))

    def _places(self, rows: Sequence[int], number: int) -> tuple[list[int], int]:
        """Where each tensor of a part begins in its room, those with a place of their own behind the others; and the
        room's size."""
        share = self.parts.part(number)
        sizes = [room_of(share.of(nbytes)) for nbytes in rows]
        for result in self.results:
            size = room_of(share.of(result.nbytes))
            if result.place < len(sizes):
                sizes[result.place] = max(sizes[result.place], size)
            else:
                sizes.append(size)
        *offsets, end = accumulate(sizes, initial=0)
        return offsets, end

    def _plan(self, rows: Sequence[Tensor], number: int) -> PartPlan:
        """The first room is at the end of the buffer: it does not touch what a pass has left in the last one."""
        memory, ranks, rooms = self.exchange.memory, self.exchange.ranks, self.parts.rooms
        room = number % rooms
        sizes = [self._places([x.nbytes for x in rows], n)[1] for n in range(rooms)]
        offsets, size = self._places([x.nbytes for x in rows], number)
        first = sum(sizes[1:room]) if room else memory.nbytes - size
        share = self.parts.part(number)
        made = [x.meta() for x in self.results]

        def lay(tensors: Sequence[Tensor], at: Sequence[int], gathers: bool, ctas: int) -> tuple[Any, Moves]:
            places = [
                (self.exchange.shape_of_part(x, share), x.dtype, first + offset)
                for x, offset in zip(tensors, at, strict=True)
            ]
            pieces = []
            for x, place in zip(tensors, places, strict=True):
                theirs = [memory.view(owner, *place) for owner in range(ranks.size)]
                pieces.append(self.exchange.pieces_of_heads(x, theirs, self.layout, share))
            mine = tuple(memory.view(ranks.rank, *place) for place in places)
            return mine, Moves(*launches_of(tensors, pieces, rows[0].device, gathers, ctas))

        comes, goes = (
            CTAS if is_alone else FEW_CTAS
            for is_alone in (self.parts.comes_alone(number), self.parts.goes_alone(number))
        )
        given, come = lay(rows, offsets[: len(rows)], False, comes)
        results, go = lay(made, [offsets[result.place] for result in self.results], True, goes)
        return PartPlan(Region(first, first + size), given, results, come, go)


class AttentionInParts(torch.autograd.Function):
    """As ``AttentionOverPeers``, with ``parts`` of the heads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: PushedExchange,
        problem: Problem,
        call: Call,
        parts: Division,
        wants_lse: bool,
        is_kept: bool,
    ) -> tuple[Tensor, ...]:
        mask = whole_mask(problem)
        lses: list[Tensor] = []
        of_out = Result(torch.Size((*q.shape[:3], v.shape[3])), q.dtype, 0)
        of_lse = Result(torch.Size((*q.shape[:3], 1)), torch.float32, 3)
        results = (of_out, of_lse) if wants_lse else (of_out,)

        def attend(number: int, plan: PartPlan) -> None:
            lse = attend_heads(plan.given, mask, call, plan.results[0])
            if is_kept:
                lses.append(lse)
            if wants_lse:
                plan.results[1].copy_(exchanged(plan.results[0], lse, True)[1])

        passes = PartedExchange(exchange, problem.layout, parts.forward, results)
        reserve = None
        if is_kept:
            # dQ, dK and dV take the places of Q, K and V.
            of_backward = tuple(Result(x.shape, x.dtype, i) for i, x in enumerate((q, k, v)))
            backward = PartedExchange(exchange, problem.layout, parts.backward, of_backward)
            # The output, and gradients of what there is.
            reserve = partial(bytes_for, backward, (q, k, v, of_out, *results))
            ctx.way = backward, mask, call
        found = passes.run((q, k, v), attend, reserve)
        if is_kept:
            ctx.save_for_backward(q, k, v, found[0], torch.cat(lses, 1))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        backward, mask, call = ctx.way
        *rows, lse = ctx.saved_tensors

        def differentiate(number: int, plan: PartPlan) -> None:
            (q, k, v, out, dout, *of_lse), share = plan.given, backward.parts.part(number)
            first, heads = lse.shape[1] * share.first // share.all, q.shape[2]
            own = lse[:, first : first + heads].contiguous()
            dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
            differentiate_heads(ForGradients(dout, q, k, v, out, own), dlse, mask, call, plan.results)

        return *backward.run((*rows, *grads), differentiate), *[None] * 6


def bytes_for(passes: PartedExchange, come: Sequence[Tensor | Result]) -> int:
    """Of the buffer."""
    return passes.bytes_of([x.nbytes for x in come])
