"""The ablation as a picture: a bar for each kernel, and a mark where the paper has its own."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from hopper_attention.experiments.ablation.results import AblationReport, Row, Won
from hopper_attention.experiments.ablation.tables import describe_problem
from hopper_attention.experiments.ablation.variants import FULL
from hopper_attention.experiments.plots import INK, MUTED, PALETTE, house_style, save_figure, titled_figure

BAR_HEIGHT = 0.62
ROOM_FOR_TEXT = 1.25
"""Width of the axis over that of the widest bar."""


def plot_ablation(report: AblationReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies. Rows without a figure are named, without a bar."""
    with house_style():
        height = 1.3 + 0.42 * len(report.rows)
        subtitle = f"{describe_problem(report)} · {report.machine['gpu']} · TFLOP/s, higher is better"
        figure, axes = titled_figure("What each optimisation is worth", subtitle, 9.5, height)
        for position, row in enumerate(report.rows):
            draw_row(axes, position, row)
        axes.set_yticks(range(len(report.rows)), [row.title for row in report.rows])
        axes.set_ylim(len(report.rows) - 0.5, -0.5)
        axes.grid(axis="x", zorder=0)
        axes.spines["left"].set_visible(False)
        widest = max([*(row.tflops for row in report.rows), *(row.paper_tflops for row in report.rows), 1.0])
        axes.set_xlim(0, ROOM_FOR_TEXT * widest)
        if any(row.paper_tflops for row in report.rows):
            axes.plot(
                [], [], color=PALETTE["red"], linewidth=2, label="FlashAttention-3 paper, table 2 (H100)"
            )
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        return save_figure(figure, path)


def draw_row(axes: Axes, position: int, row: Row) -> None:
    """One bar with its figure and its ratio to the full kernel, and the paper's figure as a line across it."""
    if not isinstance(row.outcome, Won):
        axes.annotate(
            "no figure", (0, position), (4, 0), textcoords="offset points", va="center", color=MUTED
        )
        return
    won = row.outcome
    colour = PALETTE["ours"] if row.variant == FULL else PALETTE["ours-light"]
    axes.barh(position, won.measured.tflops, BAR_HEIGHT, color=colour, zorder=2)
    text = f"{won.measured.tflops:.0f}" + ("" if row.variant == FULL else f"   {won.ratio:.3f} of full")
    furthest = max(won.measured.tflops, row.paper_tflops)
    axes.annotate(
        text, (furthest, position), (5, 0), textcoords="offset points", va="center", size=9, color=INK
    )
    if row.paper_tflops:
        span = position - BAR_HEIGHT / 2, position + BAR_HEIGHT / 2
        axes.plot([row.paper_tflops] * 2, span, color=PALETTE["red"], linewidth=2, zorder=3)
