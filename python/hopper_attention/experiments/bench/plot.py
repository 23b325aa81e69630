"""Throughput as a picture, in the paper's manner: a panel for each head_dim and mask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hopper_attention.experiments.bench.results import (
    AMPERE,
    OURS,
    OURS_16_BIT,
    OURS_DETERMINISTIC,
    OURS_DROP_IN,
    OURS_END_TO_END,
    OURS_TWO_LEVEL,
    Cell,
    ForwardReport,
    grid_cells,
    main_row,
)
from hopper_attention.experiments.bench.words import measured_peers, wording_of
from hopper_attention.experiments.plots import INK, MUTED, PALETTE, house_style, save_figure
from hopper_attention.experiments.reports import short_length

COLOURS = {
    OURS: PALETTE["ours"],
    OURS_END_TO_END: PALETTE["ours-light"],
    OURS_16_BIT: PALETTE["grey"],
    OURS_TWO_LEVEL: PALETTE["blue-light"],
    OURS_DROP_IN: "#4d9684",
    OURS_DETERMINISTIC: "#56a08c",
    AMPERE: PALETTE["ours-light"],
    "fa3": PALETTE["blue"],
    "fa4": PALETTE["blue-light"],
    "cudnn": PALETTE["sand"],
    "fa2": PALETTE["grey"],
    "flex": "#e3d3ae",
    "torch": PALETTE["red"],
}
DRAWN = (
    *("torch", "flex", "fa2", OURS_16_BIT, "cudnn", "fa4", "fa3"),
    *(OURS_END_TO_END, AMPERE, OURS_TWO_LEVEL, OURS_DROP_IN, OURS_DETERMINISTIC, OURS),
)
"""Peers from left to right within a group: slow to fast, ours last."""

GROUP_WIDTH = 0.86
LEGEND_INCHES = 2.2
"""Width of a peer's title in the legend, which stands beside the plot's title if there is room, else below."""


@dataclass(frozen=True)
class Grid:
    """The cells that are drawn, by (head_dim, causal, seqlen), and what they have in common, in words."""

    cells: dict[tuple[int, bool, int], Cell]
    note: str

    @property
    def head_dims(self) -> list[int]:
        return sorted({key[0] for key in self.cells})

    @property
    def masks(self) -> list[bool]:
        return sorted({key[1] for key in self.cells})

    @property
    def seqlens(self) -> list[int]:
        return sorted({key[2] for key in self.cells})


def grid_of(report: ForwardReport) -> Grid:
    """The paper's grid as far as it was measured; without any of it, all cells, the last of those that share a place.

    Raises:
        ValueError: the report has no cells.
    """
    papers = grid_cells(report)
    if not report.cells:
        raise ValueError("the report has no cells, allowed to draw: one or more")
    cells = {(c.problem.head_dim, c.problem.causal, c.problem.seqlen_q): c for c in papers or report.cells}
    return Grid(cells, "16384 tokens · heads × head_dim = 2048 · " if papers else "")


def plot_forward(report: ForwardReport, path: Path) -> Path:
    """Draw a panel for each head_dim and mask into ``path``; returns where the file lies.

    Raises:
        ValueError: the report has no cells.
    """
    available = measured_peers(report)
    peers = [name for name in DRAWN if name in available]
    grid = grid_of(report)
    with house_style():
        width, height = 2.0 + 4.0 * len(grid.head_dims), 1.4 + 3.1 * len(grid.masks)
        title = f"Attention, {wording_of(report).subject}"
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 1 - 0.95 / height), hspace=0.07)
        figure = Figure(figsize=(width, height), layout=layout)
        figure.text(0.018, 1 - 0.2 / height, title, size=14, weight="bold", va="top")
        note = f"{report.machine['gpu']} · {grid.note}TFLOP/s, higher is better"
        figure.text(0.018, 1 - 0.5 / height, note, size=9.5, color=MUTED, va="top")
        panels = figure.subplots(len(grid.masks), len(grid.head_dims), sharey="row", squeeze=False)
        for row, causal in enumerate(grid.masks):
            for column, head_dim in enumerate(grid.head_dims):
                cells = [grid.cells.get((head_dim, causal, seqlen)) for seqlen in grid.seqlens]
                draw_panel(panels[row][column], cells, peers)
                labels = [short_length(seqlen) for seqlen in grid.seqlens]
                panels[row][column].set_xticks(range(len(cells)), labels)
                panel_title = f"head_dim {head_dim}, {'causal' if causal else 'not causal'}"
                panels[row][column].set_title(panel_title, loc="left", size=10.5, color=INK)
        handles, _ = panels[0][0].get_legend_handles_labels()
        titles = [report.peers[name].title for name in peers]
        if width >= LEGEND_INCHES * (len(peers) + 1):
            figure.legend(
                handles, titles, loc="upper right", ncols=len(peers), bbox_to_anchor=(0.99, 0.985), fontsize=9
            )
        else:
            figure.legend(handles, titles, ncols=2, fontsize=9, loc="outside lower left")
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
                is_main = peer == main_row(peers)
                weight = "bold" if is_main else "normal"
                axes.annotate(
                    f"{value:.0f}", (x, value), (0, 2), textcoords="offset points", ha="center", va="bottom",
                    size=6.2, rotation=90, color=INK if is_main else MUTED, weight=weight,
                )  # fmt: skip
    axes.margins(y=0.12)
    axes.grid(axis="y", zorder=0)
    axes.spines["left"].set_visible(False)
