"""Ring attention: every rank keeps its Q, and the shards of K and V come by one after the other, or all at once.

At distance t a rank attends to the shard of the rank t places before it, which sends it straight from where it lives,
and only what is seen of it. While the kernel works on one shard the next is on its way. ``schedule.py`` says which
heads go at a time, and whether shards come together. The backward pass is in ``ring_backward.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hopper_attention.distributed.attend import Call, attend
from hopper_attention.distributed.exchange import Message, Ranks, Transfer, exchange, give_head_start
from hopper_attention.distributed.gradients import EVERYTHING, Pair, Part, parts_of_heads
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Problem, length, rows_of_none
from hopper_attention.distributed.schedule import RowBytes, Schedule, forward_schedule
from hopper_attention.distributed.steps import Share, Step, most_calls, own_step, steps_of
from hopper_attention.reference.tiles import Span


def rows_of(pair: Pair, span: Span) -> Pair:
    """Some rows of both, contiguous; a copy where they are not."""
    k, v = view_of(pair, span)
    return k.contiguous(), v.contiguous()


def room_for(pair: Pair, keys: int) -> Pair:
    """Memory for so many rows of both."""
    k, v = pair
    return room_like(k, keys), room_like(v, keys)


def room_like(x: Tensor, rows: int) -> Tensor:
    """Memory for so many rows of one."""
    return x.new_empty((x.shape[0], rows, *x.shape[2:]))


def messages_of(step: Step, own: Pair) -> tuple[list[Message], list[Message], Pair]:
    """What is sent and received for a step, and where it arrives; ``own`` are K and V of this rank."""
    arriving = room_for(own, step.keys)
    what = "K and V"
    sends: list[Message] = []
    if step.gives:
        # Heads of a part do not lie together: they are copied once, for all ranks.
        given = step.given
        together = rows_of(own, given)
        sends = [
            Message(share.rank, rows_of(together, _from(share.rows, given.start)), what)
            for share in step.gives
        ]
    receives = [Message(share.rank, view_of(arriving, rows), what) for share, rows in places_of(step.takes)]
    return sends, receives, arriving


def view_of(pair: Pair, span: Span) -> Pair:
    """Some rows of both where they lie."""
    k, v = pair
    return rows_at(k, span), rows_at(v, span)


def rows_at(x: Tensor, span: Span) -> Tensor:
    """Some rows of one where they lie."""
    return x.narrow(1, span.start, length(span))


def _from(span: Span, start: int) -> Span:
    return Span(span.start - start, span.stop - start)


def places_of(shares: tuple[Share, ...]) -> Iterator[tuple[Share, Span]]:
    """Each with its rows where they lie one behind the other."""
    first = 0
    for share in shares:
        yield share, Span(first, first + length(share.rows))
        first += length(share.rows)


def _post(ranks: Ranks, step: Step, own: Pair) -> tuple[Pair, Transfer]:
    """Where the keys of a step arrive, and their transfer, which alone holds what is sent."""
    sends, receives, arriving = messages_of(step, own)
    return arriving, exchange(ranks, sends, receives)


def along(ranks: Ranks, steps: tuple[Step, ...], own: Pair) -> Iterator[tuple[Step, Pair]]:
    """Each step with its keys; those of a step are posted while the step before it works."""
    coming = own, Transfer(ranks, [], [])
    for number, step in enumerate(steps):
        pair, transfer = coming
        transfer.wait()
        if number + 1 < len(steps):
            coming = _post(ranks, steps[number + 1], own)
            give_head_start(pair[0].device)
        yield step, pair


def ring_forward(
    ranks: Ranks, problem: Problem, call: Call, tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out of q's dtype and lse, of the local rows; ``tensors`` are q, k and v, the last two contiguous."""
    schedule = forward_schedule(problem, RowBytes.of(*tensors), call.is_least)
    return scheduled_forward(ranks, problem, call, tensors, sinks, schedule=schedule)


def scheduled_forward(
    ranks: Ranks,
    problem: Problem,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    *,
    schedule: Schedule,
) -> tuple[Tensor, Tensor]:
    """``ring_forward`` by a schedule, the same on all ranks."""
    q, k, v = tensors
    steps = own_step(problem, ranks.rank), *steps_of(problem, ranks.rank, schedule.at_once)
    nowhere = rows_of_none(problem, ranks.rank)
    # One merge is rounded as often in 16 bits as in float32, and takes half the memory and less than half the traffic.
    is_one_merge = sinks is None and most_calls(problem, ranks.rank, schedule.at_once) <= 2
    sums = q.dtype if is_one_merge else torch.float32

    def attend_to_all(part: Part) -> Merged:
        results = Results(part.of_rows(q), v.shape[3], sums)
        whole = _attend_along(ranks, steps, call, results, part.of_keys((k, v)))
        if sinks is not None:
            whole.add_sinks(sinks[part.heads], nowhere)
        return whole

    return joined_heads(attend_to_all, q, k, v.shape[3], schedule.parts)


def joined_heads(
    attend_to_all: Callable[[Part], Merged], q: Tensor, k: Tensor, head_dim_v: int, count: int
) -> tuple[Tensor, Tensor]:
    """out in the dtype of q and lse of all heads, which are done in ``count`` parts."""
    if count == 1:
        whole = attend_to_all(EVERYTHING)
        return whole.out.to(q.dtype), whole.lse
    batch, rows, heads, _ = q.shape
    out = q.new_empty(batch, rows, heads, head_dim_v)
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
    for part in parts_of_heads(q, k, count):
        whole = attend_to_all(part)
        out[:, :, part.heads] = whole.out
        lse[:, part.heads] = whole.lse
        # Its sums would be kept until those of the next part are there.
        del whole
    return out, lse


def _attend_along(ranks: Ranks, steps: tuple[Step, ...], call: Call, results: Results, own: Pair) -> Merged:
    """Attention to own keys and those that come; own ones are first, while the next are on their way."""
    for step, pair in along(ranks, steps, own):
        for group in step.groups:
            # That of the call before, now that the next transfer is posted.
            results.merge()
            results.put(group.rows, *attend(results.q, *view_of(pair, group.keys), group, call))
        # Or it would be kept until the step after the next has room.
        del pair
    return results.finish()


class Results:
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
