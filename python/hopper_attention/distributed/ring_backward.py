"""The backward pass of ring attention: keys come as in the forward pass, and their gradients go back.

What a kernel makes of the gradients of a shard are 16 bits: they go back to its owner as they are, which adds them up
in float32, always in the same order. So no bits are lost on the way, and every run has the same.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from hopper_attention.distributed.attend import Call, Gradients, Saved
from hopper_attention.distributed.beside import launch_beside
from hopper_attention.distributed.exchange import Message, Ranks, Transfer, exchange, give_head_start
from hopper_attention.distributed.gradients import (
    EVERYTHING,
    KeyGradients,
    Pair,
    Part,
    differentiate_keys,
    halves_of_work,
    parts_of_heads,
    parts_of_work,
    row_gradients,
    units_of_work,
)
from hopper_attention.distributed.pieces import Problem, length
from hopper_attention.distributed.ring import messages_of, places_of, room_like, rows_at
from hopper_attention.distributed.schedule import (
    OwnShares,
    RowBytes,
    Schedule,
    backward_schedule,
    share_own,
)
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
    work = _Work(saved, own, call, own_step(problem, ranks.rank), others, schedule)
    _BackwardRing(ranks, work).run()
    return work.dq[0], work.dk, work.dv


class _Work:
    """A backward pass in parts of the heads.

    Attributes:
        parts: of the heads, in the order in which they are done.
        others: steps for the keys of other ranks, which each part makes.
        schedule: the same on all ranks.
        dq: of all heads, when there is some; dk and dv are there from the beginning.
    """

    def __init__(
        self,
        saved: Saved,
        own: Pair,
        call: Call,
        local: Step,
        others: tuple[Step, ...],
        schedule: Schedule,
    ) -> None:
        self.saved = saved
        self.own = own
        self.call = call
        self.local = local
        self.others = others
        self.schedule = schedule
        self.parts = parts_of_heads(saved.q, own[0], schedule.parts)
        self.dk, self.dv = (x.new_empty(x.shape) for x in own)
        self.dq: list[Tensor] = []

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
        saved = work.saved.of_part(self.part.batch, self.part.heads)
        self.halves = halves_of_work(saved.q, self.own[0])
        calls = [(step, part) for step in work.others for part in self._calls_of(step)]
        shares = self._share_own(calls, not number, number == len(work.parts) - 1)
        parts = parts_of_work(saved.q, self.own[0], shares.all)
        early, late = len(shares.early), len(shares.early) + len(shares.beside)
        self.beside, self.late = parts[early:late], parts[late:]
        adds = [(group, part) for part in parts for group in work.local.groups]
        adds += [(group, part) for step, part in calls for group in step.groups]
        self.rows = row_gradients(saved, self.own, adds, work.call)
        returns = sum(len(step.gives) for step in work.others)
        self.keys = KeyGradients(self.part.of_keys((work.dk, work.dv)), returns)
        self.steps_away = len(work.others)
        self._differentiate_own(parts[:early])

    def _calls_of(self, step: Step) -> list[Part]:
        own_rows = self.work.saved.q.shape[1]
        has_all_rows = all(length(group.rows) == own_rows for group in step.groups)
        return self.halves if self.work.schedule.halves and not has_all_rows else [EVERYTHING]

    def _share_own(self, calls: list[tuple[Step, Part]], is_first: bool, is_last: bool) -> OwnShares:
        k, schedule = self.own[0], self.work.schedule
        units = units_of_work(k)
        if not calls:
            return OwnShares((units,), (), ())
        keys = k.shape[1] * (k.shape[2] if k.shape[0] > 1 else 1)
        return share_own(units, keys, len(calls), 2 if schedule.halves else 1, is_first, is_last)

    def gradients_of(self, step: Step, pair: Pair) -> Pair:
        """Those of the keys that a step took, as they travel: in the dtype of the keys, and where these were."""
        k, v = pair
        into = pair if self.rows.may_replace_keys else (k.new_empty(k.shape), v.new_empty(v.shape))
        for part in self._calls_of(step):
            keys = part.of_keys(pair), Span(0, step.keys), part.of_keys(into)
            call = partial(differentiate_keys, self.rows, step.groups, part, *keys)
            own = [self.beside.pop()] if self.beside else []
            of_own = partial(self._differentiate_own, own)
            if own and self.rows.may_overlap:
                self.rows.begin(step.groups, part)
                self.rows.begin(self.work.local.groups, own[0])
                launch_beside(k.device, call, of_own)
            else:
                call()
                of_own()
            self.rows.close()
        return into

    def differentiate_late(self) -> None:
        """A piece of what is left of the own shard, if there is one."""
        self._differentiate_own([self.late.pop()] if self.late else [])

    def end_rows(self) -> None:
        """No more keys come: round dQ."""
        self.work.take_dq(self.part, self.rows.finish())

    def take_back(self, returned: list[tuple[Share, list[Tensor]]]) -> None:
        """What other ranks made of the keys of a step."""
        for share, (dk, dv) in returned:
            self.keys.add(share.rows, (dk, dv))
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


Returned = list[tuple[Share, list[Tensor]]]
"""Where gradients of own keys arrive: of K and V, or of one of them so far."""


class _Done(NamedTuple):
    """The gradients that a visit made, of K and V."""

    visit: _Visit
    gradients: list[Tensor]


class _Posted(NamedTuple):
    """Messages on their way; of each visit whose gradients are among them, where those of own keys arrive."""

    transfer: Transfer
    returns: list[tuple[_Visit, Returned]]


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
        done: list[_Done] = []
        for place, visit in enumerate(visits):
            pair = arriving
            self._wait(posted)
            arriving, posted = self._post(visits[place + 1 : place + 2], done)
            if visit.part not in self.lanes:
                lane.end_rows()
            lane = self._lane_of(visit.part)
            done = [_Done(visit, list(lane.gradients_of(visit.step, pair)))]
            del pair
        if not done:
            lane.keys.finish()
        while done:
            self._give_last(lane, done.pop(), posted)
        # Last, when what came back is added up and its memory free.
        lane.end_rows()

    def _lane_of(self, number: int) -> _Lane:
        """That of a part, begun where it has not been."""
        if number not in self.lanes:
            self.lanes[number] = _Lane(self.work, number)
        return self.lanes[number]

    def _post(self, following: list[_Visit], done: list[_Done]) -> tuple[Pair, _Posted]:
        """Post keys of the step that follows, if there is one, and gradients of what is done.

        Returns:
            Where the keys arrive, and what was posted.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        arriving = self.work.own
        for visit in following:
            gives, takes, arriving = messages_of(visit.step, self._own_of(visit))
            sends += gives
            receives += takes
        returns = []
        for each in done:
            gives, takes, returned = self._give_back(each, (0, 1))
            sends += gives
            receives += takes
            returns.append((each.visit, returned))
        return arriving, _Posted(self._exchange(sends, receives), returns)

    def _exchange(self, sends: list[Message], receives: list[Message]) -> Transfer:
        transfer = exchange(self.ranks, sends, receives)
        if sends:
            give_head_start(self.work.dk.device)
        return transfer

    def _own_of(self, visit: _Visit) -> Pair:
        return self.work.parts[visit.part].of_keys(self.work.own)

    def _give_back(
        self, done: _Done, which: tuple[int, ...]
    ) -> tuple[list[Message], list[Message], Returned]:
        """Messages of the gradients of K, 0, and of V, 1, or of one of them, which go from here and to here, and where
        these arrive."""
        visit, what = done.visit, "gradients of K and V"
        own, places = self._own_of(visit), places_of(visit.step.takes)
        sends = [
            Message(share.rank, tuple(rows_at(done.gradients[i], rows) for i in which), what)
            for share, rows in places
        ]
        returned = [
            (share, [room_like(own[i], length(share.rows)) for i in which]) for share in visit.step.gives
        ]
        return sends, [Message(share.rank, tuple(rooms), what) for share, rooms in returned], returned

    def _give_last(self, lane: _Lane, done: _Done, posted: _Posted) -> None:
        """Post the gradients of the last step, and do what is left of the own shard. Where that is two pieces,
        gradients of K go beside the first, and those of V beside the second, in half of the memory."""
        returned: Returned = [(share, []) for share in done.visit.step.gives]
        for which in ((0,), (1,)) if len(lane.late) > 1 else ((0, 1),):
            sends, receives, rooms = self._give_back(done, which)
            transfer = self._exchange(sends, receives)
            for (_, tensors), (_, more) in zip(returned, rooms, strict=True):
                tensors += more
            del sends, receives, rooms
            lane.differentiate_late()
            self._wait(posted)
            transfer.wait()
            for i in which:
                done.gradients[i] = done.gradients[i].new_empty(0)
        self._take_back(done.visit, returned)

    def _wait(self, posted: _Posted) -> None:
        """Until a transfer is there; gradients of own keys are taken over."""
        posted.transfer.wait()
        while posted.returns:
            self._take_back(*posted.returns.pop())

    def _take_back(self, visit: _Visit, returned: Returned) -> None:
        lane = self.lanes[visit.part]
        lane.take_back(returned)
        if not lane.steps_away:
            lane.keys.finish()
            del self.lanes[visit.part]
