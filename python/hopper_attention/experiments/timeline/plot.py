"""A recording as a picture: a row for each warpgroup and unit, over clocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from hopper_attention.experiments.plots import PALETTE, house_style, save_figure, titled_figure
from hopper_attention.experiments.timeline.spec import (
    GEMM_0,
    GEMM_1,
    SOFTMAX,
    TITLES,
    UNITS,
    Event,
    Recording,
    TimelineReport,
    busy_share,
    hidden_share,
)

COLOURS = {GEMM_0: PALETTE["blue"], SOFTMAX: PALETTE["sand"], GEMM_1: PALETTE["ours"]}

BAR_HEIGHT = 0.72
LABEL_SHARE = 0.015
"""Width of a bar, of the whole drawing's, from which on the number of its block fits in."""

GROUP_GAP = 0.5
"""Room between the rows of two warpgroups, in rows."""


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


def plot_recording(report: TimelineReport, recording: Recording, folder: Path) -> Path:
    """Draw one recording into a folder; returns where the file lies."""
    note = f"{report.head['problem']} · {report.head['machine']['gpu']}"
    return plot_timeline(recording.events, folder / recording.figure, recording.title, note)
