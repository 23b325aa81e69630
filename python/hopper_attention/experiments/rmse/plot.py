"""The accuracy experiment as pictures: the table as bars, and error against the number of keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from hopper_attention.experiments.plots import (
    INK,
    MUTED,
    PALETTE,
    PAPER,
    house_style,
    save_figure,
    scientific,
    titled_figure,
)
from hopper_attention.experiments.reports import short_length
from hopper_attention.experiments.rmse.methods import EMULATION, PEERS
from hopper_attention.experiments.rmse.run import RmseReport, RmseRow
from hopper_attention.experiments.rmse.spec import describe
from hopper_attention.experiments.rmse.sweep import SweepReport, describe_sweep

BAR_COLOURS = {
    "flash": (PALETTE["ours"], "white"),
    "fp8-both": (PALETTE["ours"], "white"),
    "standard": (PALETTE["grey"], INK),
    "fa2": (PALETTE["grey"], INK),
    "fp8-per-tensor": (PALETTE["grey"], INK),
}
"""Bar and ink on it: what this library runs for you dark green, baselines grey."""

PEER_COLOUR = (PALETTE["blue-light"], INK)
PART_COLOUR = (PALETTE["ours-light"], INK)
"""Peers blue; variants and emulations of ours light green."""

CURVE_COLOURS = {
    "flash": PALETTE["sand"],
    "fp8-both": PALETTE["ours"],
    "fp8-two-level": PALETTE["blue"],
    "fp8-smooth-v": PALETTE["blue-light"],
    "fp8-emulated": PALETTE["ours-light"],
    "fp8-float64": PALETTE["red"],
}

EMULATED = ("fp8-emulated", "fp8-float64")
DASHED = (0, (4, 2))
"""Emulations lie on the kernel's curve where it loses nothing: dashes show both."""

GAP = 0.45
"""Extra space between two groups of rows, in bars."""

BAR_INCHES = 0.52
MARGIN_INCHES = 1.75
"""Height of a bar with its space, and of what stands above and below the bars."""

OVER_GRID = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
"""Backs text that may fall on a grid line."""


def plot_rmse(report: RmseReport, path: Path) -> Path:
    """Draw the table into ``path``, a bar a row on a log scale; returns where the file lies."""
    rows = report.rows
    y = bar_positions(rows)
    shown = [row.rmse for row in rows] + [row.paper for row in rows if row.paper is not None]
    # A bar holds its own figure, so the shortest one must be about a decade long.
    left = min(shown) / 12
    right = max(shown) * 9
    height = MARGIN_INCHES + BAR_INCHES * (1 - y[-1])

    with house_style():
        figure, axes = titled_figure(
            "Attention error against float64", describe(report.experiment), 9.4, height
        )
        axes.set_xscale("log")
        axes.set_xlim(left, right)
        axes.set_ylim(y[-1] - 0.55, y[0] + 0.55)
        for row, at in zip(rows, y, strict=True):
            draw_bar(axes, row, at, left)
            draw_label(axes, row.label, row.implementation, at)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(LogLocator(base=10))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: scientific(v).removeprefix("1.0 × ")))
        axes.grid(axis="x", zorder=0)
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(axis_label(report), size=9.5, labelpad=6)
        return save_figure(figure, path)


def bar_positions(rows: Sequence[RmseRow]) -> list[float]:
    """Downwards from 0, one a bar, and ``GAP`` more wherever another group begins."""
    y, group = 1.0, rows[0].group
    positions = []
    for row in rows:
        y -= 1.0 + GAP * (row.group != group)
        group = row.group
        positions.append(y)
    return positions


def draw_bar(axes: Axes, row: RmseRow, at: float, left: float) -> None:
    """The bar with its figure inside, its spread over the seeds as a line, the paper's figure as a marker."""
    colour, ink = BAR_COLOURS.get(row.method, PEER_COLOUR if row.group == PEERS else PART_COLOUR)
    hatch = "///" if row.group == EMULATION else ""
    axes.barh(
        at, row.rmse - left, left=left, height=0.66, color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0,
        zorder=2,
    )  # fmt: skip
    if row.spread:
        axes.errorbar(
            row.rmse,
            at,
            xerr=min(row.spread, 0.9 * row.rmse),
            color=INK,
            linewidth=1.1,
            capsize=2.5,
            zorder=4,
        )
    inner = max(row.rmse - row.spread, 0.1 * row.rmse)
    axes.annotate(
        scientific(row.rmse), (inner, at), (-9, 0), textcoords="offset points",
        ha="right", va="center_baseline", weight="bold", color=ink, size=10.5, zorder=3,
    )  # fmt: skip
    if row.paper is not None:
        draw_papers_figure(axes, row.paper, max(row.rmse + row.spread, row.paper), at)


def axis_label(report: RmseReport) -> str:
    has_paper = any(row.paper is not None for row in report.rows)
    marker = "   ◇ the paper's table 3" if has_paper else ""
    spread = "   ├┤ spread over seeds" if report.experiment.seeds > 1 else ""
    return f"root mean square error, shorter is better{spread}{marker}"


def draw_label(axes: Axes, label: str, implementation: str, at: float) -> None:
    """A row's name, and below it in small what computed it, to the left of the bars."""
    beside: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    axes.annotate(label, (0, at), (-10, 5.5), ha="right", va="center", size=10.5, **beside)
    axes.annotate(implementation, (0, at), (-10, -8), ha="right", va="center", size=8, color=MUTED, **beside)


def draw_papers_figure(axes: Axes, value: float, clear_of: float, at: float) -> None:
    """A marker where the paper's figure lies, and its text to the right of both bar and marker."""
    axes.scatter([value], [at], marker="D", s=30, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=5)
    axes.annotate(
        f"paper {scientific(value)}", (clear_of, at), (10, 0), textcoords="offset points",
        va="center_baseline", size=9, color=MUTED, bbox=OVER_GRID, zorder=3,
    )  # fmt: skip


def plot_sweep(report: SweepReport, path: Path) -> Path:
    """Draw error against the number of keys into ``path``, both axes log; returns where the file lies."""
    lengths = report.sweep.lengths
    with house_style():
        title = "Attention error against the number of keys"
        figure, axes = titled_figure(title, describe_sweep(report.sweep), 8.4, 4.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for method in report.methods:
            curve = report.curve(method)
            axes.errorbar(
                [point.seqlen for point in curve],
                [point.error for point in curve],
                yerr=[min(point.spread, 0.9 * point.error) for point in curve],
                label=f"{curve[-1].label} ({curve[-1].implementation})",
                color=CURVE_COLOURS.get(method, MUTED),
                linestyle=DASHED if method in EMULATED else "-",
                marker="o", markersize=5, linewidth=2.0, capsize=3,
            )  # fmt: skip
        axes.xaxis.set_major_locator(FixedLocator([float(length) for length in lengths]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: short_length(int(v))))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: scientific(v).removeprefix("1.0 × ")))
        axes.grid(axis="y", zorder=0)
        axes.set_xlabel("keys", size=9.5)
        axes.set_ylabel("RMSE over the output's RMS", size=9.5)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)
        return save_figure(figure, path)
