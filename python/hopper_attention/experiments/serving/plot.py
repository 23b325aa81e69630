"""The serving benchmark as a picture: a panel for each topic, bars of each peer on each workload."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hopper_attention.experiments.bench.plot import COLOURS, GROUP_WIDTH
from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.plots import INK, MUTED, PALETTE, house_style, save_figure
from hopper_attention.experiments.serving.results import (
    OURS_FP8_QUERIES,
    OURS_PLAIN,
    ServingCell,
    ServingReport,
)
from hopper_attention.experiments.serving.spec import ServingWorkload
from hopper_attention.experiments.serving.tables import cells_by_topic, peers_of

SERVING_COLOURS = {
    **COLOURS,
    "fa3_best": "#274b80",
    "flashmla": PALETTE["sand"],
    OURS_PLAIN: PALETTE["ours-light"],
    OURS_FP8_QUERIES: PALETTE["ours-light"],
}
ORDER = ("torch", "fa2", "cudnn", "fa4", "fa3", "fa3_best", "flashmla", OURS_PLAIN, OURS_FP8_QUERIES, OURS)
"""Peers from left to right within a group, ours last."""


def plot_serving(report: ServingReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies.

    Raises:
        ValueError: the report has no cells.
    """
    panels = cells_by_topic(report)
    if not panels:
        raise ValueError("the report has no cells, allowed to draw: one or more")
    with house_style():
        width, height = 14.0, 1.7 + 2.9 * len(panels)
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 1 - 0.95 / height), hspace=0.06)
        figure = Figure(figsize=(width, height), layout=layout)
        title = "Attention on a key/value cache"
        figure.text(0.018, 1 - 0.2 / height, title, size=14, weight="bold", va="top")
        note = f"{report.head['machine']['gpu']} · percent of what its peak rates allow, higher is better"
        figure.text(0.018, 1 - 0.5 / height, note, size=9.5, color=MUTED, va="top")
        rows = figure.subplots(len(panels), 1, squeeze=False)
        handles: dict[str, Artist] = {}
        for (axes,), (name, cells) in zip(rows, panels.items(), strict=True):
            present = peers_of(report, cells)
            draw_panel(axes, cells, [peer for peer in ORDER if peer in present])
            axes.set_title(name, loc="left", size=10.5, color=INK)
            drawn, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
        shown = [peer for peer in ORDER if peer in handles]
        titles = [report.peers[peer].title for peer in shown]
        figure.legend(
            [handles[peer] for peer in shown], titles, ncols=2, fontsize=9, loc="outside lower left"
        )
        return save_figure(figure, path)


def label_of(workload: ServingWorkload) -> str:
    """A workload in two to four short lines."""
    w = workload
    lines = [w.batch_name, w.heads_name, *([f"{w.queries} queries"] if w.queries > 1 else [])]
    return "\n".join([*lines, *([w.cache_name] if w.cache_name else [])])


def draw_panel(axes: Axes, cells: list[ServingCell], peers: list[str]) -> None:
    """Bars of every peer on every workload, each with its time in microseconds above it."""
    bar = GROUP_WIDTH / max(len(peers), 1)
    for position, peer in enumerate(peers):
        shares = [100 * cell.workload.limit_us / cell.us(peer) for cell in cells]
        heights = [0.0 if math.isnan(share) else share for share in shares]
        at = [group + (position + 0.5) * bar - GROUP_WIDTH / 2 for group in range(len(cells))]
        axes.bar(at, heights, width=bar * 0.94, color=SERVING_COLOURS[peer], label=peer, zorder=2)
        for x, height, cell in zip(at, heights, cells, strict=True):
            if height:
                axes.annotate(
                    f"{cell.us(peer):.4g} us", (x, height), (0, 2), textcoords="offset points", ha="center",
                    va="bottom", size=5.8, rotation=90, color=INK if peer == OURS else MUTED,
                    weight="bold" if peer == OURS else "normal",
                )  # fmt: skip
    axes.set_xticks(range(len(cells)), [label_of(cell.workload) for cell in cells], size=8)
    axes.set_ylabel("% of the limit")
    axes.margins(y=0.22)
    axes.set_ylim(bottom=0.0)
    axes.grid(axis="y", zorder=0)
    axes.spines["left"].set_visible(False)
