"""The accuracy table as a picture: one bar a method, log scale, the paper's figures as markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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
from hopper_attention.experiments.rmse import RmseReport, describe

COLOURS = {
    "standard": (PALETTE["grey"], INK),
    "flash": (PALETTE["ours"], "white"),
    "fp8-per-tensor": (PALETTE["grey"], INK),
    "fp8-block": (PALETTE["ours-light"], INK),
    "fp8-rotation": (PALETTE["ours-light"], INK),
    "fp8-both": (PALETTE["ours"], "white"),
}
"""Bar and ink on it, by method: baselines grey, ours green, the full method dark and its parts light."""

GAP = 0.45
"""Extra space between the 16-bit rows and the FP8 rows, in bars."""

OVER_GRID = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
"""Backs text that may fall on a grid line."""


def plot_rmse(report: RmseReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies."""
    rows = report.rows
    y = [-(i + GAP * row.method.startswith("fp8")) for i, row in enumerate(rows)]
    shown = [row.rmse for row in rows] + [row.paper for row in rows if row.paper is not None]
    # A bar holds its own figure, so the shortest one must be about a decade long.
    left = min(shown) / 12
    right = max(shown) * 9

    with house_style():
        figure, axes = titled_figure("Attention error against float64", describe(report.experiment), 9.4, 5.0)
        axes.set_xscale("log")
        axes.set_xlim(left, right)
        axes.set_ylim(y[-1] - 0.55, y[0] + 0.55)
        for row, at in zip(rows, y, strict=True):
            colour, ink = COLOURS[row.method]
            axes.barh(at, row.rmse - left, left=left, height=0.66, color=colour, zorder=2)
            axes.annotate(
                scientific(row.rmse), (row.rmse, at), (-9, 0), textcoords="offset points",
                ha="right", va="center_baseline", weight="bold", color=ink, size=10.5, zorder=3,
            )  # fmt: skip
            draw_label(axes, row.label, row.implementation, at)
            if row.paper is not None:
                draw_papers_figure(axes, row.paper, max(row.rmse, row.paper), at)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(LogLocator(base=10))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: scientific(v).removeprefix("1.0 × ")))
        axes.grid(axis="x", zorder=0)
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(axis_label(report), size=9.5, labelpad=6)
        return save_figure(figure, path)


def axis_label(report: RmseReport) -> str:
    has_paper = any(row.paper is not None for row in report.rows)
    marker = "     ◇ FlashAttention-3 paper, table 3" if has_paper else ""
    return f"root mean square error, log scale; shorter is better{marker}"


def draw_label(axes: Axes, label: str, implementation: str, at: float) -> None:
    """A row's name, and below it in small what computed it, to the left of the bars."""
    beside: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    axes.annotate(label, (0, at), (-10, 5.5), ha="right", va="center", size=10.5, **beside)
    axes.annotate(implementation, (0, at), (-10, -8), ha="right", va="center", size=8, color=MUTED, **beside)


def draw_papers_figure(axes: Axes, value: float, clear_of: float, at: float) -> None:
    """A marker where the paper's figure lies, and its text to the right of both bar and marker."""
    axes.scatter([value], [at], marker="D", s=30, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=4)
    axes.annotate(
        f"paper {scientific(value)}", (clear_of, at), (10, 0), textcoords="offset points",
        va="center_baseline", size=9, color=MUTED, bbox=OVER_GRID, zorder=3,
    )  # fmt: skip
