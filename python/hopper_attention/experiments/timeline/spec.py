"""Who works when inside a CTA: intervals of each warpgroup on each unit, in clocks of one SM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hopper_attention.experiments.reports import dump_rows, load_figures

KIND = "timeline"
GEMM_0, SOFTMAX, GEMM_1 = "gemm0", "softmax", "gemm1"
UNITS = (GEMM_0, SOFTMAX, GEMM_1)
TITLES = {GEMM_0: "S = Q Kᵀ", SOFTMAX: "softmax", GEMM_1: "O += P V"}
GEMMS = (GEMM_0, GEMM_1)


@dataclass(frozen=True)
class Event:
    """One warpgroup at work on one unit.

    Attributes:
        warpgroup: number of the consumer warpgroup in its CTA.
        unit: one of UNITS.
        start, stop: clocks of the SM (``clock64``), on the same count for all events of a drawing.
        block: number of the key block, counted from the last one down, as the kernel visits them.
    """

    warpgroup: int
    unit: str
    start: int
    stop: int
    block: int

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit is {self.unit!r}, allowed: {', '.join(UNITS)}")
        if self.stop < self.start:
            raise ValueError(f"stop is {self.stop}, allowed: {self.start}, where the event starts, or later")


@dataclass(frozen=True)
class Recording:
    """What one kernel did in the middle of a tile.

    Attributes:
        variant, title: the row of the ablation.
        config: name of the kernel.
        slowdown: time of the kernel that records over that of the kernel, both of a whole launch.
        events: of some key blocks that follow each other, of every consumer warpgroup.
    """

    variant: str
    title: str
    config: str
    slowdown: float
    events: tuple[Event, ...]

    @property
    def figure(self) -> str:
        """File name of its drawing."""
        return f"{KIND}_{self.variant}.png"


@dataclass(frozen=True)
class TimelineReport:
    """Recordings of one problem on one machine; ``head`` is what ``describe_run`` says, with problem and method."""

    head: dict[str, Any]
    recordings: tuple[Recording, ...]


Stamps = Sequence[Sequence[Sequence[Sequence[int]]]]
"""``clock64`` by consumer warpgroup, visited key block, unit (in the order of UNITS), and start or stop; a pair of
zeros where nothing was recorded. ``tolist()`` of an int64 tensor (warpgroups, blocks, 3, 2) is one."""


def events_of(stamps: Stamps) -> list[Event]:
    """The events in what a kernel recorded of one tile, whose blocks it visits from the last one down."""
    return [
        Event(warpgroup, unit, start, stop, len(blocks) - 1 - visit)
        for warpgroup, blocks in enumerate(stamps)
        for visit, units in enumerate(blocks)
        for unit, (start, stop) in zip(UNITS, units, strict=True)
        if start or stop
    ]


def middle_blocks(stamps: Stamps, blocks: int) -> list[list[Sequence[Sequence[int]]]]:
    """``blocks`` key blocks in the middle of a tile, of every warpgroup: no first, no last.

    Raises:
        ValueError: a tile has no more blocks than that, or one of these was not recorded.
    """
    count = len(stamps[0])
    if count < blocks + 2:
        raise ValueError(
            f"a tile has {count} key blocks, allowed to record {blocks} of: {blocks + 2} or more"
        )
    first = (count - blocks) // 2
    chosen = [list(warpgroup[first : first + blocks]) for warpgroup in stamps]
    if not all(start and stop for visits in chosen for units in visits for start, stop in units):
        raise ValueError("the first CTA had too few tiles to record one, allowed: a larger problem")
    return chosen


def clocks_of_a_block(events: Sequence[Event]) -> float:
    """Median distance between the softmaxes of one warpgroup, in clocks; NaN if there are none."""
    starts = {
        warpgroup: sorted(e.start for e in events if e.unit == SOFTMAX and e.warpgroup == warpgroup)
        for warpgroup in {event.warpgroup for event in events}
    }
    distances = [after - before for each in starts.values() for before, after in pairwise(each)]
    return statistics.median(distances) if distances else math.nan


def dump_timeline(report: TimelineReport) -> str:
    """JSON text of a report, one line a recording."""
    return dump_rows(report.head, "recordings", [asdict(recording) for recording in report.recordings])


def load_timeline(text: str) -> TimelineReport:
    """Read what :func:`dump_timeline` wrote.

    Raises:
        ValueError: the text is not a report of this kind and schema, or an event is not one.
    """
    data = load_figures(text, KIND)
    recordings = tuple(
        Recording(**{**record, "events": tuple(Event(**event) for event in record["events"])})
        for record in data["recordings"]
    )
    return TimelineReport({key: value for key, value in data.items() if key != "recordings"}, recordings)


def merged(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Spans in which any of some events runs, in order, without overlaps."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted((event.start, event.stop) for event in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], stop)
        else:
            spans.append((start, stop))
    return spans


def hidden_share(events: Sequence[Event]) -> float:
    """Share of the softmaxes' time in which a GEMM, of any warpgroup, is in flight; 0.0 without a softmax."""
    softmaxes = [event for event in events if event.unit == SOFTMAX]
    gemms = merged(event for event in events if event.unit in GEMMS)
    total = sum(event.stop - event.start for event in softmaxes)
    hidden = sum(
        max(0, min(event.stop, stop) - max(event.start, start))
        for event in softmaxes
        for start, stop in gemms
    )
    return hidden / total if total else 0.0


def busy_share(events: Sequence[Event]) -> float:
    """Share of the time from the first event to the last in which a GEMM is in flight."""
    if not events:
        return 0.0
    span = max(event.stop for event in events) - min(event.start for event in events)
    return (
        sum(stop - start for start, stop in merged(e for e in events if e.unit in GEMMS)) / span
        if span
        else 0.0
    )
