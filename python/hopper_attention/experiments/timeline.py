"""Who works when inside a CTA: intervals of each warpgroup on each unit, in clocks of one SM, and their drawing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes

from hopper_attention.experiments.plots import PALETTE, house_style, save_figure, titled_figure

GEMM_0, SOFTMAX, GEMM_1 = "gemm0", "softmax", "gemm1"
UNITS = (GEMM_0, SOFTMAX, GEMM_1)
TITLES = {GEMM_0: "S = Q Kᵀ", SOFTMAX: "softmax", GEMM_1: "O += P V"}
COLOURS = {GEMM_0: PALETTE["blue"], SOFTMAX: PALETTE["sand"], GEMM_1: PALETTE["ours"]}
GEMMS = (GEMM_0, GEMM_1)

BAR_HEIGHT = 0.72
LABEL_SHARE = 0.015
"""Width of a bar, of the whole drawing's, from which on the number of its block fits in."""

GROUP_GAP = 0.5
"""Room between the rows of two warpgroups, in rows."""


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


def dump_events(events: Iterable[Event]) -> str:
    """JSON text, one line an event."""
    return "[\n" + ",\n".join(json.dumps(asdict(event)) for event in events) + "\n]\n"


def load_events(text: str) -> list[Event]:
    """Read what :func:`dump_events` wrote.

    Raises:
        ValueError: an event is not one.
    """
    return [Event(**record) for record in json.loads(text)]


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


def plot_timeline(events: Sequence[Event], path: Path, title: str, note: str = "") -> Path:
    """Draw a row for each warpgroup and unit, over clocks from the first event on; returns where the file lies.

    Raises:
        ValueError: there are no events.
    """
    if not events:
        raise ValueError("events is empty, allowed to draw: one event or more")
    warpgroups = sorted({event.warpgroup for event in events})
    rows = [(warpgroup, unit) for warpgroup in warpgroups for unit in UNITS]
    heights = {row: i + GROUP_GAP * warpgroups.index(row[0]) for i, row in enumerate(rows)}
    origin = min(event.start for event in events)
    shares = f"{100 * hidden_share(events):.0f} % of the softmax under a GEMM, a GEMM in flight "
    shares += f"{100 * busy_share(events):.0f} % of the time"
    with house_style():
        subtitle = f"{note} · {shares}" if note else shares
        figure, axes = titled_figure(title, subtitle, 12.0, 1.4 + 0.36 * (len(rows) + len(warpgroups)))
        for event in events:
            y, width = heights[event.warpgroup, event.unit], event.stop - event.start
            axes.barh(y, width, BAR_HEIGHT, left=event.start - origin, color=COLOURS[event.unit], zorder=2)
        label_blocks(axes, events, heights, origin)
        labels = [f"warpgroup {warpgroup}   {TITLES[unit]}" for warpgroup, unit in rows]
        axes.set_yticks([heights[row] for row in rows], labels)
        axes.invert_yaxis()
        axes.set_xlabel("clocks")
        axes.grid(axis="x", zorder=0)
        axes.spines["left"].set_visible(False)
        return save_figure(figure, path)


def label_blocks(
    axes: Axes, events: Sequence[Event], heights: dict[tuple[int, str], float], origin: int
) -> None:
    """The number of the key block in each bar that is wide enough for it."""
    span = max(event.stop for event in events) - origin
    for event in events:
        if event.stop - event.start >= LABEL_SHARE * span:
            middle = (event.start + event.stop) / 2 - origin
            y = heights[event.warpgroup, event.unit]
            axes.text(middle, y, str(event.block), ha="center", va="center", size=7, color="white", zorder=3)
