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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import (
    Call,
    Gradients,
    Saved,
    add_group,
    attend,
    differentiate_group,
    sums_for,
)
from hopper_attention.distributed.exchange import Message, Ranks, Transfer, exchange, give_head_start
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Group, Problem, groups_between, hull, length, rows_of_none
from hopper_attention.reference.tiles import Span
from hopper_attention.scores import sinks_gradient

REMEMBERED = 1024

NOTHING = Span(0, 0)

Pair = tuple[Tensor, Tensor]
"""K and V, or their gradients."""


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
    results = _Results(q, v.shape[3])
    for step, pair, held in Shards(ranks, (k, v)).along(steps_of(problem, ranks.rank)):
        for group in step.groups:
            # That of the call before, now that the next transfer is posted.
            results.merge()
            results.put(group.rows, *attend(q, *_keys_of(pair, group, held), group, call))
    whole = results.finish()
    if sinks is not None:
        whole.add_sinks(sinks, rows_of_none(problem, ranks.rank))
    return whole.out.to(q.dtype), whole.lse


class _Results:
    """Partial results, of which the last waits to be merged."""

    def __init__(self, q: Tensor, head_dim_v: int) -> None:
        self.q = q
        self.head_dim_v = head_dim_v
        self.merged: list[Merged] = []
        self.waiting: list[tuple[Span, Tensor, Tensor]] = []

    def put(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        self.waiting.append((rows, out, lse))

    def merge(self) -> None:
        """What waits."""
        while self.waiting:
            rows, out, lse = self.waiting.pop()
            if not self.merged and length(rows) == self.q.shape[1]:
                self.merged.append(Merged(out, lse))
                continue
            if not self.merged:
                self.merged.append(Merged.empty(self.q, self.head_dim_v))
            self.merged[0].add(rows, out, lse)

    def finish(self) -> Merged:
        self.merge()
        return self.merged[0] if self.merged else Merged.empty(self.q, self.head_dim_v)


def ring_backward(ranks: Ranks, problem: Problem, call: Call, saved: Saved, own: Pair) -> Gradients:
    """dq, dk and dv in the dtype of q; ``own`` are K and V of this rank, contiguous."""
    steps = steps_of(problem, ranks.rank)
    dq, dk, dv = sums_for(saved.q), sums_for(own[0]), sums_for(own[1])
    work = _BackwardRing(ranks, call, saved, own, (dq, dk, dv))
    work.run(steps)
    dtype = saved.q.dtype
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _BackwardRing:
    """The steps of a backward pass. Half of the heads of its own shard come first, the others last, so that a rank has
    work while the first keys come and the last gradients go."""

    def __init__(self, ranks: Ranks, call: Call, saved: Saved, own: Pair, sums: Gradients) -> None:
        self.ranks = ranks
        self.call = call
        self.saved = saved
        self.shards = Shards(ranks, own)
        self.sums = sums

    def run(self, steps: tuple[Step, ...]) -> None:
        local, *others = steps
        kv_heads = self.shards.own[0].shape[2]
        half = kv_heads // 2 if others else 0
        arriving, transfer = self._post(others[:1], [])
        self._own_heads(local, slice(half, kv_heads))
        done: list[tuple[Step, Pair]] = []
        for number, step in enumerate(others):
            pair, incoming = arriving, transfer
            self._wait(incoming)
            arriving, transfer = self._post(others[number + 1 : number + 2], done)
            done = [(step, self._shard_gradients(step, pair))]
        _, last = self._post([], done)
        if half:
            self._own_heads(local, slice(0, half))
        self._wait(transfer)
        self._wait(last)

    def _post(
        self, following: list[Step], done: list[tuple[Step, Pair]]
    ) -> tuple[Pair, tuple[Transfer, list[tuple[Step, Pair]]]]:
        """Post keys of the step that follows, if there is one, and gradients of what is done.

        Returns:
            Where the keys arrive, and the transfer with where gradients of own keys arrive.
        """
        rank, size = self.ranks.rank, self.ranks.size
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
        transfer = exchange(self.ranks, sends, receives)
        if sends:
            give_head_start(arriving[0].device)
        return arriving, (transfer, returns)

    def _wait(self, posted: tuple[Transfer, list[tuple[Step, Pair]]]) -> None:
        """Until a transfer is there; gradients of own keys are added up."""
        transfer, returns = posted
        transfer.wait()
        for step, pair in returns:
            for total, part in zip(self.sums[1:], pair, strict=True):
                total[:, step.gives.start : step.gives.stop].add_(part)

    def _own_heads(self, step: Step, kv_heads: slice) -> None:
        own = self.shards.own
        each = self.saved.q.shape[2] // own[0].shape[2]
        heads = slice(kv_heads.start * each, kv_heads.stop * each)
        saved = self.saved.of_heads(heads)
        sums = self.sums[0][:, :, heads], self.sums[1][:, :, kv_heads], self.sums[2][:, :, kv_heads]
        pair = own[0][:, :, kv_heads], own[1][:, :, kv_heads]
        for group in step.groups:
            add_group(sums, saved, pair, Span(0, own[0].shape[1]), group, self.call)

    def _shard_gradients(self, step: Step, pair: Pair) -> Pair:
        """Those of the keys that a step took, as they travel: in the dtype of the keys."""
        if len(step.groups) == 1:
            # Its keys are all that the step took, and its gradients go as the kernel made them.
            (group,) = step.groups
            dq, *ours = differentiate_group(self.saved, *pair, group, self.call)
            self.sums[0][:, group.rows.start : group.rows.stop].add_(dq)
            return ours[0], ours[1]
        dk, dv = sums_for(pair[0]), sums_for(pair[1])
        for group in step.groups:
            add_group((self.sums[0], dk, dv), self.saved, pair, step.takes, group, self.call)
        return dk.to(pair[0].dtype), dv.to(pair[1].dtype)


class RingAttention(torch.autograd.Function):
    """``ring_forward`` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ranks: Ranks,
        problem: Problem,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        k, v = k.contiguous(), v.contiguous()
        out, lse = ring_forward(ranks, problem, call, (q, k, v), sinks)
        ctx.ranks, ctx.problem, ctx.call = ranks, problem, call
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout, dlse = grads
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        saved = Saved(q, out, lse, dout, dlse)
        dq, dk, dv = ring_backward(ctx.ranks, ctx.problem, ctx.call, saved, (k, v))
        wants_sinks = sinks is not None and ctx.needs_input_grad[3]
        dsinks = sinks_gradient(dout, dlse, out, lse, sinks) if wants_sinks else None
        return dq, dk, dv, dsinks, None, None, None
