"""How a ring goes over heads and shards: what it holds at a time, against how full its kernels are.

Long shards go by one at a time, and some heads after the other, so that all buffers of a pass together take no more
than two shards of K and V. Short ones come all at once, to all heads: their kernels are too short to hide an exchange
each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from hopper_attention.distributed.pieces import Problem, length
from hopper_attention.distributed.steps import distances_of, most_keys, steps_of
from hopper_attention.launch.addition import MOST_PARTS

REMEMBERED = 1024

FULL_ROWS = 1 << 17
"""Rows of Q, counted once a head, that a call on a part of the heads keeps: 1024 tiles of 128. A step with half of the
rows has 512 then, 16 less than four for each of 132 SMs."""

AT_ONCE_ROWS, AT_ONCE_BYTES = 1 << 13, 1 << 28
"""The most that a rank may have, and that K and V of the other ranks may take, to come at once: 32k tokens with 16
heads of 128 columns on four ranks have 8192, and 201 MB. Above, a step takes longer than an exchange, and a shard at a
time loses little. Within, one part of all heads is the fastest, forward and backward (docs/distributed.md)."""

LARGE_BYTES = 1 << 29
"""Two shards of K and V and the output, from which on heads go in parts. Below, memory is not what a GPU lacks, and
calls on all heads have shorter tails beside their work."""

FEW_MERGES = 8
"""Ranks up to which a forward pass in e4m3 keeps sums in 16 bits, one rounding more for each."""

UNITS_OF_PIECES = 3
"""Of a shard, from which on some are done early, and two pieces late."""

SHARDS_AT_A_TIME = 2
"""Of K and V in a ring: the one at work and the one on its way."""


class RowBytes(NamedTuple):
    """What a rank has of 16-bit tensors: its rows, entries of the batch, heads, and bytes of a row of the output and of
    K and V."""

    batch: int
    rows: int
    rows_of_k: int
    heads: int
    kv_heads: int
    of_out: int
    of_keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> RowBytes:
        batch, rows, heads, head_dim = q.shape
        _, rows_of_k, kv_heads, head_dim_v = v.shape
        of_out = 2 * batch * heads * max(head_dim, head_dim_v)
        of_keys = 2 * batch * kv_heads * (head_dim + head_dim_v)
        return cls(batch, rows, rows_of_k, heads, kv_heads, of_out, of_keys)

    @property
    def out(self) -> int:
        return self.rows * self.of_out

    @property
    def shard(self) -> int:
        """Of K and V."""
        return self.rows_of_k * self.of_keys

    @property
    def aim(self) -> int:
        """Of what a rank is to hold beside its tensors and their gradients: two shards of K and V, and the output."""
        return self.out + SHARDS_AT_A_TIME * self.shard

    def taken(self, problem: Problem) -> int:
        """Of K and V that come in a step, at most; of a shard under a window not all does."""
        return most_keys(problem) * self.of_keys

    def count_parts(self, is_least: bool = False) -> list[int]:
        """Numbers of equal parts of the heads, in ascending order, that leave enough rows of Q to a call; all of them
        if what is held is to be the least."""
        most = self.kv_heads if is_least else max(1, self.batch * self.rows * self.heads // FULL_ROWS)
        return [n for n in range(1, min(most, self.kv_heads) + 1) if self.kv_heads % n == 0]


@dataclass(frozen=True)
class Schedule:
    """How a pass goes. The same on all ranks, which have tensors of the same sizes.

    Attributes:
        parts: of the heads, one after the other.
        at_once: whether the shards of all other ranks come together.
        halves: whether a backward pass with one other shard has sums of dQ of some rows for half of the heads at a
            time, and sends the last gradients of K and of V apart: less memory and more launches.
    """

    parts: int = 1
    at_once: bool = False
    halves: bool = False


class OwnShares(NamedTuple):
    """Units of a rank's own shard (``gradients.units_of_work``) that are done before the keys of others come, beside
    each call for these, and after that."""

    early: tuple[int, ...]
    beside: tuple[int, ...]
    late: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.early + self.beside + self.late


def share_own(units: int, keys: int, calls: int, pieces: int, is_first: bool, is_last: bool) -> OwnShares:
    """Of a part of the heads, whose units have so many keys, that makes ``calls`` calls for the keys of others.

    Each of these has tiles of one length, and leaves SMs idle at its end: there some of the own shard is done, with at
    least FULL_ROWS keys, as it ends itself. More of it is done while the first keys come, before the first part of all,
    and while the last gradients go, in so many pieces, behind the last part.
    """
    if not is_first and not is_last:
        return OwnShares((), _even(units, min(calls, max(1, units * keys // FULL_ROWS))), ())
    few, most = -(-FULL_ROWS // keys), units // (4 if is_first and is_last else 2)
    beside = (few,) * min(calls, most // few)
    rest = units - sum(beside)
    early = max(1, rest // 2) if is_first and is_last else rest * is_first
    return OwnShares((early,) * is_first, beside, _even(rest - early, pieces))


def _even(units: int, count: int) -> tuple[int, ...]:
    """The units in so many shares, or in as many as there are units."""
    shares = (units * (i + 1) // count - units * i // count for i in range(count))
    return tuple(n for n in shares if n)


def forward_bytes(problem: Problem, sizes: RowBytes, parts: int, at_once: bool = False) -> int:
    """What a forward pass holds at most beside the output.

    The sum of partial results is in float32, or where there is one merge the first of them, which with one part is the
    output itself; the other partial result; two shards, or with ``at_once`` all others; and a copy of what is sent, for
    heads of a part do not lie together.
    """
    others = len(distances_of(problem))
    sums = 2 * sizes.out if others > 1 and not at_once else sizes.out * (parts > 1)
    shards = others if at_once else min(SHARDS_AT_A_TIME, others)
    return (sums + sizes.out + (shards + (parts > 1)) * sizes.taken(problem)) // parts


def backward_bytes(problem: Problem, sizes: RowBytes, parts: int, at_once: bool = False) -> int:
    """What a backward pass holds at most beside the output and dQ, dK and dV.

    Float32 sums of dQ of all rows, and of half of them, or where there is one step of half of their heads; two shards,
    of which the next may be the next part's, and whose places their gradients take; gradients that are sent, while as
    many come back; what came back before, of which more than three shards become float32 sums, as large as two; and a
    copy of keys that are sent. With ``at_once`` each of these shards but the copy is all others.
    """
    others = len(distances_of(problem))
    if parts == others == 1:
        return _backward_bytes_of_two(problem, sizes)
    at_a_time = SHARDS_AT_A_TIME if parts > 1 else min(SHARDS_AT_A_TIME, others)
    back = min(max(others - 1, 0), MOST_PARTS)
    shards = (2 * at_a_time * others if at_once else 2 * at_a_time + back) + (parts > 1)
    some_rows = sizes.out if others > 1 else sizes.out // 2
    return (2 * sizes.out + some_rows + shards * sizes.taken(problem)) // parts


def _backward_bytes_of_two(problem: Problem, sizes: RowBytes) -> int:
    """``backward_bytes`` of a ring with one step and one part: that of the rank that holds the most.

    A rank whose later rows alone see the other's keys takes all of these, and gets the gradients of half of its own.
    There is no dQ before the sums are done, which counts against these.
    """
    units = sizes.batch if sizes.batch > 1 else sizes.kv_heads
    # Gradients of K and of V come back apart if there are two pieces of work to hide them.
    pieces = 2 if units >= UNITS_OF_PIECES else 1
    held = []
    for rank in range(problem.world):
        (step,) = steps_of(problem, rank)
        taken = step.keys * sizes.of_keys
        back = sum(length(share.rows) for share in step.gives) * sizes.of_keys
        has_some_rows = any(length(group.rows) < sizes.rows for group in step.groups)
        held += [has_some_rows * sizes.out // 2 + taken, taken + back // pieces, taken // pieces + back]
    return sizes.out + max(held)


def fp8_bytes(problem: Problem, sizes: RowBytes, parts: int) -> int:
    """What a forward pass in e4m3 holds at most beside the output, but for scales.

    The sum, a partial result of all rows and Q; K and V of this rank, these as they are sent, and two shards.
    """
    sums = sizes.out if problem.world <= FEW_MERGES else 2 * sizes.out
    return (sums + sizes.out + sizes.out // 2 + 4 * sizes.shard // 2) // parts


@lru_cache(maxsize=REMEMBERED)
def forward_schedule(problem: Problem, sizes: RowBytes, is_least: bool = False) -> Schedule:
    """Short shards at once, in one part; or one at a time in as few parts as fit. With ``is_least`` these fit at any
    length, where there are as many heads."""
    return _schedule(problem, sizes, forward_bytes, is_least)


@lru_cache(maxsize=REMEMBERED)
def backward_schedule(problem: Problem, sizes: RowBytes, is_least: bool = False) -> Schedule:
    """As ``forward_schedule``, by what a backward pass holds."""
    schedule = _schedule(problem, sizes, backward_bytes, is_least)
    has_one_shard = problem.sees_all and len(distances_of(problem)) == 1
    return replace(schedule, halves=has_one_shard and (is_least or not _is_small(sizes)))


@lru_cache(maxsize=REMEMBERED)
def fp8_parts(problem: Problem, sizes: RowBytes, is_least: bool = False) -> int:
    """Of the heads, in a forward pass in e4m3; ``sizes`` are of 16 bits."""
    return _fewest(problem, sizes, lambda parts: fp8_bytes(problem, sizes, parts), is_least)


def comes_at_once(problem: Problem, sizes: RowBytes) -> bool:
    """Whether there is more than one other shard, and all are small. Several in one tensor want one batch entry."""
    others = len(distances_of(problem))
    is_short = max(sizes.rows, sizes.rows_of_k) <= AT_ONCE_ROWS
    return others > 1 and sizes.batch == 1 and is_short and others * sizes.taken(problem) <= AT_ONCE_BYTES


def _schedule(
    problem: Problem, sizes: RowBytes, count: Callable[[Problem, RowBytes, int, bool], int], is_least: bool
) -> Schedule:
    at_once = comes_at_once(problem, sizes)
    if at_once and not is_least:
        return Schedule(at_once=True)
    parts = _fewest(problem, sizes, lambda parts: count(problem, sizes, parts, False), is_least)
    if at_once:
        # With fewer exchanges, where that fits too.
        together = _fewest(problem, sizes, lambda parts: count(problem, sizes, parts, True), is_least)
        if (
            together <= parts * len(distances_of(problem))
            and count(problem, sizes, together, True) <= SHARDS_AT_A_TIME * sizes.shard
        ):
            return Schedule(together, at_once=True)
    return Schedule(parts)


def _is_small(sizes: RowBytes) -> bool:
    return sizes.out + SHARDS_AT_A_TIME * sizes.shard < LARGE_BYTES


def _fewest(problem: Problem, sizes: RowBytes, held: Callable[[int], int], is_least: bool) -> int:
    """Parts that hold no more than two shards, or the most there can be; ``held`` is of a number of parts."""
    if not distances_of(problem) or (_is_small(sizes) and not is_least):
        return 1
    numbers, aim = sizes.count_parts(is_least), SHARDS_AT_A_TIME * sizes.shard
    return next((n for n in numbers if held(n) <= aim), numbers[-1])
