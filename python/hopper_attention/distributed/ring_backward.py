"""The backward pass of ring attention: keys come as in the forward pass, and their gradients go back.

What a kernel makes of the gradients of a shard are 16 bits: they go back to its owner as they are, which adds them up
in float32, always in the same order. So no bits are lost on the way, and every run has the same.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hopper_attention.distributed.attend import Call, Gradients, Saved
from hopper_attention.distributed.exchange import Message, Ranks, Transfer, exchange, give_head_start
from hopper_attention.distributed.gradients import (
    EVERYTHING,
    KeyGradients,
    Pair,
    Part,
    differentiate_keys,
    parts_of_heads,
    parts_of_work,
    row_gradients,
)
from hopper_attention.distributed.pieces import Problem, length
from hopper_attention.distributed.ring import messages_of, places_of, room_for, view_of
from hopper_attention.distributed.schedule import RowBytes, Schedule, backward_schedule
from hopper_attention.distributed.steps import Share, Step, own_step, steps_of
from hopper_attention.reference.tiles import Span


def ring_backward(ranks: Ranks, problem: Problem, call: Call, saved: Saved, own: Pair) -> Gradients:
    """dq, dk and dv in the dtype of q; ``own`` are K and V of this rank, contiguous."""
    schedule = backward_schedule(problem, RowBytes.of(saved.q, *own), call.is_least)
    return scheduled_backward(ranks, problem, call, saved, own, schedule=schedule)


def scheduled_backward(
    ranks: Ranks, problem: Problem, call: Call, saved: Saved, own: Pair, *, schedule: Schedule
) -> Gradients:
    """``ring_backward`` by a schedule, the same on all ranks."""
    others = steps_of(problem, ranks.rank, schedule.at_once, by_key=True)
    work = _Work(saved, own, call, own_step(problem, ranks.rank), others, schedule.parts)
    _BackwardRing(ranks, work).run()
    return work.dq[0], work.dk, work.dv


class _Own(NamedTuple):
    """What is done of a rank's own shard before the keys of others come, and what after that."""

    early: list[Part]
    late: list[Part]


class _Work:
    """A backward pass in parts of the heads.

    Of the first part the own shard is done before anything has come, and of the last when everything has, so that there
    is work while the first keys come and the last gradients go. With a single part each is a half of it.

    Attributes:
        parts: of the heads, in the order in which they are done.
        others: steps for the keys of other ranks, which each part makes.
        dq: of all heads, when there is some; dk and dv are there from the beginning.
    """

    def __init__(
        self, saved: Saved, own: Pair, call: Call, local: Step, others: tuple[Step, ...], count: int
    ) -> None:
        self.saved = saved
        self.own = own
        self.call = call
        self.local = local
        self.others = others
        self.parts = parts_of_heads(saved.q, own[0], count)
        self.dk, self.dv = (x.new_empty(x.shape) for x in own)
        self.dq: list[Tensor] = []

    def own_of(self, number: int) -> _Own:
        """What part ``number`` does of its own shard, and when."""
        last = len(self.parts) - 1
        if not last:
            first, *later = parts_of_work(self.saved.q, self.own[0], 2 if self.others else 1)
            return _Own([first], later)
        return _Own([], [EVERYTHING]) if number == last else _Own([EVERYTHING], [])

    def take_dq(self, part: Part, dq: Tensor) -> None:
        """Keep that of a part."""
        if len(self.parts) == 1:
            self.dq.append(dq)
            return
        if not self.dq:
            self.dq.append(self.saved.q.new_empty(self.saved.q.shape))
        self.dq[0][:, :, part.heads] = dq


class _Lane:
    """The gradients of one part of the heads, from its first keys until what other ranks make of its own is back."""

    def __init__(self, work: _Work, number: int) -> None:
        self.work = work
        self.part = work.parts[number]
        self.own = self.part.of_keys(work.own)
        self.when = work.own_of(number)
        saved = work.saved.of_part(self.part.batch, self.part.heads)
        times = len(self.when.early) + len(self.when.late)
        groups = [
            *work.local.groups * times,
            *(group for step in work.others for group in step.groups),
        ]
        self.rows = row_gradients(saved, self.own, groups, work.call)
        returns = sum(len(step.gives) for step in work.others)
        self.keys = KeyGradients(self.part.of_keys((work.dk, work.dv)), returns)
        self.steps_away = len(work.others)
        self._differentiate_own(self.when.early)

    def gradients_of(self, step: Step, pair: Pair) -> Pair:
        """Those of the keys that a step took, as they travel: in the dtype of the keys, and where these were."""
        into = pair if self.rows.may_replace_keys else room_for(pair, step.keys)
        differentiate_keys(self.rows, step.groups, EVERYTHING, pair, Span(0, step.keys), into)
        return into

    def differentiate_rest(self) -> None:
        """What is left of the own shard."""
        self._differentiate_own(self.when.late)

    def end_rows(self) -> None:
        """No more keys come: round dQ."""
        self.work.take_dq(self.part, self.rows.finish())

    def take_back(self, returned: list[tuple[Share, Pair]]) -> None:
        """What other ranks made of the keys of a step."""
        for share, pair in returned:
            self.keys.add(share.rows, pair)
        self.steps_away -= 1

    def _differentiate_own(self, parts: list[Part]) -> None:
        local, held = self.work.local, Span(0, self.own[0].shape[1])
        for part in parts:
            into = part.of_keys(self.keys.own)
            differentiate_keys(self.rows, local.groups, part, part.of_keys(self.own), held, into)


class _Visit(NamedTuple):
    """A step of one part, by its number."""

    part: int
    step: Step


class _Posted(NamedTuple):
    """Messages on their way; of each visit whose gradients are among them, where those of own keys arrive."""

    transfer: Transfer
    returns: list[tuple[_Visit, list[tuple[Share, Pair]]]]


class _BackwardRing:
    """The steps of all parts, one after the other. While one is computed the keys of the next are on their way, of
    whatever part, and the gradients of the one before. The gradients of a shard take the place of its keys.
    """

    def __init__(self, ranks: Ranks, work: _Work) -> None:
        self.ranks = ranks
        self.work = work
        self.lanes: dict[int, _Lane] = {}

    def run(self) -> None:
        work = self.work
        visits = [_Visit(number, step) for number in range(len(work.parts)) for step in work.others]
        arriving, posted = self._post(visits[:1], [])
        lane = self._lane_of(0)
        done: list[tuple[_Visit, Pair]] = []
        for place, visit in enumerate(visits):
            pair = arriving
            self._wait(posted)
            arriving, posted = self._post(visits[place + 1 : place + 2], done)
            if visit.part not in self.lanes:
                lane.end_rows()
            lane = self._lane_of(visit.part)
            done = [(visit, lane.gradients_of(visit.step, pair))]
            del pair
        _, last = self._post([], done)
        done.clear()
        lane.differentiate_rest()
        self._wait(posted)
        self._wait(last)
        if not visits:
            lane.keys.finish()
        # Last, when what came back is added up and its memory free.
        lane.end_rows()

    def _lane_of(self, number: int) -> _Lane:
        """That of a part, begun where it has not been."""
        if number not in self.lanes:
            self.lanes[number] = _Lane(self.work, number)
        return self.lanes[number]

    def _post(self, following: list[_Visit], done: list[tuple[_Visit, Pair]]) -> tuple[Pair, _Posted]:
        """Post keys of the step that follows, if there is one, and gradients of what is done.

        Returns:
            Where the keys arrive, and what was posted.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        arriving = self.work.own
        for visit in following:
            own = self.work.parts[visit.part].of_keys(self.work.own)
            gives, takes, arriving = messages_of(self.ranks, visit.step, own)
            sends += gives
            receives += takes
        returns = []
        what = "gradients of K and V"
        for visit, gradients in done:
            places = places_of(visit.step.takes)
            sends += [Message(share.rank, view_of(gradients, rows), what) for share, rows in places]
            own = self.work.parts[visit.part].of_keys(self.work.own)
            backs = [(share, room_for(own, length(share.rows))) for share in visit.step.gives]
            receives += [Message(share.rank, pair, what) for share, pair in backs]
            returns.append((visit, backs))
        transfer = exchange(self.ranks, sends, receives)
        if sends:
            give_head_start(arriving[0].device)
        return arriving, _Posted(transfer, returns)

    def _wait(self, posted: _Posted) -> None:
        """Until a transfer is there; gradients of own keys are taken over."""
        posted.transfer.wait()
        while posted.returns:
            visit, returned = posted.returns.pop()
            lane = self.lanes[visit.part]
            lane.take_back(returned)
            if not lane.steps_away:
                lane.keys.finish()
                del self.lanes[visit.part]
