"""Ring attention: every rank keeps its Q, and the shards of K and V come by one after the other.

At distance t a rank attends to the shard of the rank t places before it, which sends it straight from where it lives,
and only what is seen of it. While the kernel works on one shard the next is on its way. What a kernel makes of the
gradients of a shard are 16 bits: they go back to its owner as they are, which adds them up in float32 in the order of
distances. So no bits are lost on the way, and every run has the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hopper_attention.distributed.attend import Call, Gradients, Saved, attend
from hopper_attention.distributed.exchange import Message, Ranks, Transfer, exchange, give_head_start
from hopper_attention.distributed.gradients import (
    EVERYTHING,
    KeyGradients,
    Pair,
    Part,
    RowGradients,
    differentiate_keys,
    parts_of_work,
    row_gradients,
)
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Group, Problem, groups_between, hull, length, rows_of_none
from hopper_attention.reference.tiles import Span

REMEMBERED = 1024

NOTHING = Span(0, 0)


@dataclass(frozen=True)
class Step:
    """What a rank does at one distance.

    Attributes:
        distance: the keys are those of the rank so many places before this one.
        groups: what attends to them.
        takes: rows of that rank's K and V that are needed here.
        gives: rows of this rank's that are needed by the rank ``distance`` places after it.
    """

    distance: int
    groups: tuple[Group, ...]
    takes: Span
    gives: Span


def _needed(groups: tuple[Group, ...]) -> Span:
    return hull([group.keys for group in groups]) if groups else NOTHING


@lru_cache(maxsize=REMEMBERED)
def _distances(problem: Problem) -> tuple[int, ...]:
    """Those at which any rank has work, as every rank must know: messages are matched by their order."""
    world = problem.world
    if problem.sees_all:
        return tuple(range(world))
    return tuple(
        t for t in range(world) if any(groups_between(problem, r, (r - t) % world) for r in range(world))
    )


@lru_cache(maxsize=REMEMBERED)
def steps_of(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Those of a rank, in the order in which it makes them. Distance 0, its own keys, is the first."""

    def step(distance: int) -> Step:
        before, after = (rank - distance) % problem.world, (rank + distance) % problem.world
        groups = groups_between(problem, rank, before)
        return Step(
            distance,
            groups,
            _needed(groups),
            _needed(groups_between(problem, after, rank)) if distance else NOTHING,
        )

    others = (t for t in _distances(problem) if t)
    return tuple(step(t) for t in (0, *others))


def _rows(pair: Pair, span: Span) -> Pair:
    k, v = (x[:, span.start : span.stop].contiguous() for x in pair)
    return k, v


def _room(pair: Pair, span: Span) -> Pair:
    k, v = (x.new_empty((x.shape[0], length(span), *x.shape[2:])) for x in pair)
    return k, v


class Shards:
    """K and V of a ring, sent ahead: a step's are posted while the step before it works."""

    def __init__(self, ranks: Ranks, own: Pair) -> None:
        self.ranks = ranks
        self.own = own

    def messages(self, step: Step) -> tuple[list[Message], list[Message], Pair]:
        """What is sent and received for a step, and where it arrives."""
        rank, size = self.ranks.rank, self.ranks.size
        arriving = _room(self.own, step.takes)
        gives = _rows(self.own, step.gives)
        return (
            [Message((rank + step.distance) % size, gives, "K and V")],
            [Message((rank - step.distance) % size, arriving, "K and V")],
            arriving,
        )

    def along(self, steps: tuple[Step, ...]) -> Iterator[tuple[Step, Pair, Span]]:
        """Each step with the keys for it and the rows of their shard that these are."""
        coming = self.own, Transfer(self.ranks, [], [])
        for number, step in enumerate(steps):
            pair, transfer = coming
            transfer.wait()
            if number + 1 < len(steps):
                sends, receives, arriving = self.messages(steps[number + 1])
                coming = arriving, exchange(self.ranks, sends, receives)
                give_head_start(pair[0].device)
            yield step, pair, step.takes if step.distance else Span(0, pair[0].shape[1])


def _keys_of(pair: Pair, group: Group, held: Span) -> Pair:
    keys = slice(group.keys.start - held.start, group.keys.stop - held.start)
    return pair[0][:, keys], pair[1][:, keys]


def ring_forward(
    ranks: Ranks, problem: Problem, call: Call, tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out of q's dtype and lse, of the local rows; ``tensors`` are q, k and v, the last two contiguous."""
    q, k, v = tensors
    steps = steps_of(problem, ranks.rank)
    # One merge is rounded as often in 16 bits as in float32, and takes half the memory and less than half the traffic.
    is_one_merge = sinks is None and sum(len(step.groups) for step in steps) <= 2
    results = _Results(q, v.shape[3], q.dtype if is_one_merge else torch.float32)
    for step, pair, held in Shards(ranks, (k, v)).along(steps):
        for group in step.groups:
            # That of the call before, now that the next transfer is posted.
            results.merge()
            results.put(group.rows, *attend(q, *_keys_of(pair, group, held), group, call))
        # Or it would be kept until the step after the next has room.
        del pair
    whole = results.finish()
    if sinks is not None:
        whole.add_sinks(sinks, rows_of_none(problem, ranks.rank))
    return whole.out.to(q.dtype), whole.lse


class _Results:
    """Partial results, of which the last waits to be merged. Sums are in ``dtype`` where the first has all rows."""

    def __init__(self, q: Tensor, head_dim_v: int, dtype: torch.dtype) -> None:
        self.q = q
        self.head_dim_v = head_dim_v
        self.dtype = dtype
        self.merged: list[Merged] = []
        self.waiting: list[tuple[Span, Tensor, Tensor]] = []

    def put(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        self.waiting.append((rows, out, lse))

    def merge(self) -> None:
        """What waits."""
        while self.waiting:
            rows, out, lse = self.waiting.pop()
            if not self.merged and length(rows) == self.q.shape[1]:
                self.merged.append(Merged(out, lse, self.dtype))
                continue
            if not self.merged:
                self.merged.append(Merged.empty(self.q, self.head_dim_v))
            self.merged[0].add(rows, out, lse)

    def finish(self) -> Merged:
        self.merge()
        return self.merged[0] if self.merged else Merged.empty(self.q, self.head_dim_v)


def ring_backward(ranks: Ranks, problem: Problem, call: Call, saved: Saved, own: Pair) -> Gradients:
    """dq, dk and dv in the dtype of q; ``own`` are K and V of this rank, contiguous."""
    local, *others = steps_of(problem, ranks.rank)
    parts = parts_of_work(saved.q, own[0], 2 if others else 1)
    groups = [*local.groups * len(parts), *(group for step in others for group in step.groups)]
    rows = row_gradients(saved, own, groups, call)
    keys = KeyGradients(own, sum(length(step.gives) > 0 for step in others))
    work = _BackwardRing(Shards(ranks, own), parts, rows, keys)
    work.run(local, others)
    dk, dv = keys.finish()
    return rows.finish(), dk, dv


Returns = list[tuple[Step, Pair]]
"""Steps, and where the gradients of what this rank gave for them arrive."""


class _BackwardRing:
    """The steps of a backward pass. A half of what it does of its own shard comes first, the other last, so that a rank
    has work while the first keys come and the last gradients go. The gradients of a shard take the place of its keys.
    """

    def __init__(self, shards: Shards, parts: list[Part], rows: RowGradients, keys: KeyGradients) -> None:
        self.shards = shards
        self.parts = parts
        self.rows = rows
        self.keys = keys

    def run(self, local: Step, others: list[Step]) -> None:
        first, *later = self.parts
        arriving, posted = self._post(others[:1], [])
        self._own(local, first)
        done: list[tuple[Step, Pair]] = []
        for number, step in enumerate(others):
            pair = arriving
            self._wait(posted)
            arriving, posted = self._post(others[number + 1 : number + 2], done)
            done = [(step, self._gradients_of(step, pair))]
            del pair
        _, last = self._post([], done)
        for part in later:
            self._own(local, part)
        self._wait(posted)
        self._wait(last)

    def _post(
        self, following: list[Step], done: list[tuple[Step, Pair]]
    ) -> tuple[Pair, tuple[Transfer, Returns]]:
        """Post keys of the step that follows, if there is one, and gradients of what is done.

        Returns:
            Where the keys arrive, and the transfer with where gradients of own keys arrive.
        """
        ranks = self.shards.ranks
        rank, size = ranks.rank, ranks.size
        sends: list[Message] = []
        receives: list[Message] = []
        arriving = self.shards.own
        for step in following:
            gives, takes, arriving = self.shards.messages(step)
            sends += gives
            receives += takes
        returns = []
        for step, gradients in done:
            back = _room(self.shards.own, step.gives)
            sends.append(Message((rank - step.distance) % size, gradients, "gradients of K and V"))
            receives.append(Message((rank + step.distance) % size, back, "gradients of K and V"))
            returns.append((step, back))
        transfer = exchange(ranks, sends, receives)
        if sends:
            give_head_start(arriving[0].device)
        return arriving, (transfer, returns)

    def _wait(self, posted: tuple[Transfer, Returns]) -> None:
        """Until a transfer is there; gradients of own keys are taken over."""
        transfer, returns = posted
        transfer.wait()
        while returns:
            step, pair = returns.pop()
            if length(step.gives):
                self.keys.add(step.gives, pair)

    def _own(self, step: Step, part: Part) -> None:
        """A part of this rank's own shard."""
        own = self.shards.own
        into = part.of_keys(self.keys.own)
        differentiate_keys(self.rows, step.groups, part, part.of_keys(own), Span(0, own[0].shape[1]), into)

    def _gradients_of(self, step: Step, pair: Pair) -> Pair:
        """Those of the keys that a step took, as they travel: in the dtype of the keys, and where these were."""
        into = pair if self.rows.may_replace_keys else _room(pair, Span(0, length(step.takes)))
        differentiate_keys(self.rows, step.groups, EVERYTHING, pair, step.takes, into)
        return into
