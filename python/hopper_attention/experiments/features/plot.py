"""The features' benchmark as a picture: a panel for each topic and pass, bars of each peer on each workload."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hopper_attention.experiments.bench.plot import COLOURS, DRAWN, GROUP_WIDTH
from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.features.results import OURS_DENSE, FeatureCell, FeatureReport
from hopper_attention.experiments.features.spec import PASSES, Workload
from hopper_attention.experiments.features.tables import cells_by_topic
from hopper_attention.experiments.plots import INK, MUTED, PALETTE, house_style, save_figure

FEATURE_COLOURS = {**COLOURS, OURS_DENSE: PALETTE["ours-light"]}
ORDER = (*(name for name in DRAWN if name != OURS), OURS_DENSE, OURS)
"""Peers from left to right within a group, ours last."""


def panels_of(report: FeatureReport) -> dict[str, list[FeatureCell]]:
    """The cells of each panel, by its title."""
    panels = {}
    for topic, cells in cells_by_topic(report).items():
        for direction in PASSES:
            found = [cell for cell in cells if cell.workload.direction == direction]
            if found:
                panels[f"{topic}, {direction}"] = found
    return panels


def plot_features(report: FeatureReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies.

    Raises:
        ValueError: the report has no cells.
    """
    panels = panels_of(report)
    if not panels:
        raise ValueError("the report has no cells, allowed to draw: one or more")
    peers = [name for name in ORDER if name in report.available]
    with house_style():
        width, height = 12.0, 1.6 + 2.9 * len(panels)
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 1 - 0.95 / height), hspace=0.06)
        figure = Figure(figsize=(width, height), layout=layout)
        title = "Packed sequences, windows and changed scores"
        figure.text(0.018, 1 - 0.2 / height, title, size=14, weight="bold", va="top")
        note = f"{report.head['machine']['gpu']} · percent of what its peak rates allow, higher is better"
        figure.text(0.018, 1 - 0.5 / height, note, size=9.5, color=MUTED, va="top")
        rows = figure.subplots(len(panels), 1, squeeze=False)
        for (axes,), (name, cells) in zip(rows, panels.items(), strict=True):
            draw_panel(axes, cells, peers)
            axes.set_title(name, loc="left", size=10.5, color=INK)
        handles, _ = rows[0][0].get_legend_handles_labels()
        titles = [report.peers[name].title for name in peers]
        figure.legend(handles, titles, ncols=3, fontsize=9, loc="outside lower left")
        return save_figure(figure, path)


def label_of(workload: Workload) -> str:
    """A workload in three or four short lines."""
    w = workload
    lines = [w.batch_name, f"{w.heads_name} heads of {w.columns_name.removeprefix('d')}", w.mask_name]
    return "\n".join([*lines, *([w.scores_name] if w.changes_scores else [])])


def draw_panel(axes: Axes, cells: list[FeatureCell], peers: list[str]) -> None:
    """Bars of every peer on every workload, each with its time in microseconds above it."""
    bar = GROUP_WIDTH / len(peers)
    for position, peer in enumerate(peers):
        shares = [100 * cell.workload.limit_us / cell.us(peer) for cell in cells]
        heights = [0.0 if math.isnan(share) else share for share in shares]
        at = [group + (position + 0.5) * bar - GROUP_WIDTH / 2 for group in range(len(cells))]
        axes.bar(at, heights, width=bar * 0.94, color=FEATURE_COLOURS[peer], label=peer, zorder=2)
        for x, height, cell in zip(at, heights, cells, strict=True):
            if height:
                axes.annotate(
                    f"{cell.us(peer):.0f} us", (x, height), (0, 2), textcoords="offset points", ha="center",
                    va="bottom", size=6.2, rotation=90, color=INK if peer == OURS else MUTED,
                    weight="bold" if peer == OURS else "normal",
                )  # fmt: skip
    axes.set_xticks(range(len(cells)), [label_of(cell.workload) for cell in cells], size=8)
    axes.set_ylabel("% of the limit")
    axes.margins(y=0.22)
    axes.set_ylim(bottom=0.0)
    axes.grid(axis="y", zorder=0)
    axes.spines["left"].set_visible(False)
