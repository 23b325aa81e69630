"""Throughput as a picture, in the paper's manner: a panel for each head_dim and mask."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hopper_attention.experiments.bench_render import measured_peers, short_length
from hopper_attention.experiments.bench_results import (
    OURS,
    PAPER_HEAD_DIMS,
    PAPER_SEQLENS,
    Cell,
    ForwardReport,
    grid_cells,
)
from hopper_attention.experiments.plots import INK, MUTED, PALETTE, house_style, save_figure

COLOURS = {
    OURS: PALETTE["ours"],
    "fa3": PALETTE["blue"],
    "fa4": PALETTE["blue-light"],
    "cudnn": PALETTE["sand"],
    "fa2": PALETTE["grey"],
    "torch": PALETTE["red"],
}
DRAWN = ("fa2", "cudnn", "fa4", "fa3", OURS)
"""Peers from left to right within a group: slow to fast, ours last."""

GROUP_WIDTH = 0.86


def plot_forward(report: ForwardReport, path: Path) -> Path:
    """Draw the paper's grid into ``path``; returns where the file lies."""
    available = measured_peers(report)
    peers = [name for name in DRAWN if name in available]
    cells = {(c.problem.head_dim, c.problem.causal, c.problem.seqlen_q): c for c in grid_cells(report)}
    with house_style():
        width, height = 14.0, 7.6
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 1 - 0.95 / height), hspace=0.07)
        figure = Figure(figsize=(width, height), layout=layout)
        figure.text(0.018, 1 - 0.2 / height, "Attention forward, bf16", size=14, weight="bold", va="top")
        note = f"{report.machine['gpu']} · 16384 tokens · heads × head_dim = 2048 · TFLOP/s, higher is better"
        figure.text(0.018, 1 - 0.5 / height, note, size=9.5, color=MUTED, va="top")
        panels = figure.subplots(2, len(PAPER_HEAD_DIMS), sharey="row")
        for row, causal in enumerate((False, True)):
            for column, head_dim in enumerate(PAPER_HEAD_DIMS):
                panel = [cells.get((head_dim, causal, seqlen)) for seqlen in PAPER_SEQLENS]
                draw_panel(panels[row][column], panel, peers)
                title = f"head_dim {head_dim}, {'causal' if causal else 'not causal'}"
                panels[row][column].set_title(title, loc="left", size=10.5, color=INK)
        handles, _ = panels[0][0].get_legend_handles_labels()
        titles = [report.peers[name].title for name in peers]
        figure.legend(
            handles, titles, loc="upper right", ncols=len(peers), bbox_to_anchor=(0.99, 0.985), fontsize=9
        )
        return save_figure(figure, path)


def draw_panel(axes: Axes, cells: list[Cell | None], peers: list[str]) -> None:
    """Bars of every peer at every length, each with its figure above it."""
    bar = GROUP_WIDTH / len(peers)
    for position, peer in enumerate(peers):
        heights = [cell.tflops(peer) if cell else 0.0 for cell in cells]
        at = [group + (position + 0.5) * bar - GROUP_WIDTH / 2 for group in range(len(cells))]
        axes.bar(at, heights, width=bar * 0.94, color=COLOURS[peer], label=peer, zorder=2)
        for x, value in zip(at, heights, strict=True):
            if value:
                weight = "bold" if peer == OURS else "normal"
                axes.annotate(
                    f"{value:.0f}", (x, value), (0, 2), textcoords="offset points", ha="center", va="bottom",
                    size=6.2, rotation=90, color=INK if peer == OURS else MUTED, weight=weight,
                )  # fmt: skip
    axes.set_xticks(range(len(cells)), [short_length(seqlen) for seqlen in PAPER_SEQLENS])
    axes.margins(y=0.12)
    axes.grid(axis="y", zorder=0)
    axes.spines["left"].set_visible(False)
