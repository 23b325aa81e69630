"""What a rank of a ring takes, gives and attends to at each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hopper_attention.distributed.layout import spans_of
from hopper_attention.distributed.pieces import (
    Group,
    Problem,
    clip,
    groups_between,
    groups_by_key,
    groups_with,
    hull,
    length,
)
from hopper_attention.reference.tiles import Span

REMEMBERED = 1024


class Share(NamedTuple):
    """Rows of K and V that travel: ``rank`` is the other one, ``rows`` are local rows of the rank that owns them."""

    rank: int
    rows: Span


@dataclass(frozen=True)
class Step:
    """Some keys at a time, those of one shard or of several.

    Attributes:
        groups: what attends to them; their keys are counted from the first row that is held.
        takes: where they come from, in the order in which they lie in memory; empty for this rank's own.
        gives: what other ranks need of this one's meanwhile.
        keys: rows that are held.
    """

    groups: tuple[Group, ...]
    takes: tuple[Share, ...]
    gives: tuple[Share, ...]
    keys: int

    @cached_property
    def given(self) -> Span:
        """Own rows from the first to the last that others need; there are some."""
        return hull([share.rows for share in self.gives])


@lru_cache(maxsize=REMEMBERED)
def distances_of(problem: Problem) -> tuple[int, ...]:
    """Those above 0 at which any rank has work, as every rank must know: messages are matched by their order."""
    world = problem.world
    if problem.sees_all:
        return tuple(range(1, world))
    return tuple(
        t for t in range(1, world) if any(groups_between(problem, r, (r - t) % world) for r in range(world))
    )


@lru_cache(maxsize=REMEMBERED)
def own_step(problem: Problem, rank: int) -> Step:
    """A rank's own keys, all of them."""
    return Step(groups_between(problem, rank, rank), (), (), problem.seqlen_k // problem.world)


@lru_cache(maxsize=REMEMBERED)
def steps_of(problem: Problem, rank: int, at_once: bool = False, by_key: bool = False) -> tuple[Step, ...]:
    """Those of a rank for the keys of others.

    At distance t the keys are those of the rank t places before; each distance is a step, in ascending order, or with
    ``at_once`` all are one.

    Args:
        by_key: prefer groups of which no two have the same keys, as the backward pass does, over groups of which no two
            have the same rows. That makes a difference where a step has several shards.
    """
    distances = distances_of(problem)
    batches = [distances] if at_once and distances else [(t,) for t in distances]
    return tuple(_step(problem, rank, batch, by_key) for batch in batches)


@lru_cache(maxsize=REMEMBERED)
def most_calls(problem: Problem, rank: int, at_once: bool) -> int:
    """On a row of the rank's, at most: partial results that are merged into one."""
    steps = own_step(problem, rank), *steps_of(problem, rank, at_once)
    spans = [group.rows for step in steps for group in step.groups]
    return max((sum(a.start <= b.start < a.stop for a in spans) for b in spans), default=0)


@lru_cache(maxsize=REMEMBERED)
def most_keys(problem: Problem) -> int:
    """Rows of keys that a step of any rank has at most, where shards come one at a time."""
    return max((step.keys for rank in _asked(problem) for step in steps_of(problem, rank)), default=0)


def _asked(problem: Problem) -> set[int]:
    """Ranks of which one takes the most keys."""
    world = problem.world
    # Without windows and documents it is among these.
    return {0, world // 2, world - 1} if problem.sees_all else set(range(world))


def _step(problem: Problem, rank: int, distances: tuple[int, ...], by_key: bool) -> Step:
    before = sorted((rank - t) % problem.world for t in distances)
    after = sorted((rank + t) % problem.world for t in distances)
    takes = tuple(Share(r, rows) for r in before if length(rows := _needed(problem, rank, r)))
    gives = tuple(Share(r, rows) for r in after if length(rows := _needed(problem, r, rank)))
    positions = tuple(span for share in takes for span in _positions(problem, share))
    find = groups_by_key if by_key else groups_with
    return Step(find(problem, rank, positions), takes, gives, sum(map(length, positions)))


def _needed(problem: Problem, rank: int, owner: int) -> Span:
    """Rows of the owner's K and V that the rank attends to, from the first to the last."""
    groups = groups_between(problem, rank, owner)
    return hull([group.keys for group in groups]) if groups else Span(0, 0)


def _positions(problem: Problem, share: Share) -> list[Span]:
    """Those in the whole sequence that the rows of a share have."""
    found, first_row = [], 0
    for span in spans_of(share.rank, problem.world, problem.seqlen_k, problem.layout):
        here = clip(
            span, Span(span.start + share.rows.start - first_row, span.start + share.rows.stop - first_row)
        )
        if here.start < here.stop:
            found.append(here)
        first_row += length(span)
    return found
