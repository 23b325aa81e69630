"""Workloads as a picture: a panel for each topic, bars of each peer on each workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hopper_attention.experiments.bench.plot import GROUP_WIDTH
from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.plots import INK, MUTED, house_style, save_figure
from hopper_attention.experiments.workloads.results import CellT, WorkloadReport
from hopper_attention.experiments.workloads.spec import WorkloadT


@dataclass(frozen=True)
class Picture(Generic[WorkloadT]):
    """What a kind of report looks like.

    Attributes:
        order: peers from left to right within a group, ours last.
        label_of: a workload in a few short lines.
        width: in inches, as is ``head``, the height of what lies above the panels.
        time: the format of microseconds above a bar; ``time_size`` is that of its letters.
    """

    title: str
    order: tuple[str, ...]
    colours: Mapping[str, str]
    label_of: Callable[[WorkloadT], str]
    width: float
    head: float
    time: str
    time_size: float
    legend_columns: int

    def plot(
        self,
        report: WorkloadReport[CellT],
        panels: Mapping[str, list[CellT]],
        peers_of: Callable[[list[CellT]], list[str]],
        path: Path,
    ) -> Path:
        """Draw cells by the title of their panel, with the peers that ``peers_of`` finds for them, into ``path``;
        returns where the file lies.

        Raises:
            ValueError: there are no cells.
        """
        if not panels:
            raise ValueError("the report has no cells, allowed to draw: one or more")
        with house_style():
            figure = self._titled_figure(report, len(panels))
            rows = figure.subplots(len(panels), 1, squeeze=False)
            handles: dict[str, Artist] = {}
            for (axes,), (name, cells) in zip(rows, panels.items(), strict=True):
                present = peers_of(cells)
                self._draw_panel(axes, cells, [peer for peer in self.order if peer in present], report.gpu)
                axes.set_title(name, loc="left", size=10.5, color=INK)
                drawn, labels = axes.get_legend_handles_labels()
                handles |= dict(zip(labels, drawn, strict=True))
            shown = [peer for peer in self.order if peer in handles]
            keys, titles = [handles[peer] for peer in shown], [report.peers[peer].title for peer in shown]
            figure.legend(keys, titles, ncols=self.legend_columns, fontsize=9, loc="outside lower left")
            return save_figure(figure, path)

    def _titled_figure(self, report: WorkloadReport[CellT], panels: int) -> Figure:
        height = self.head + 2.9 * panels
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 1 - 0.95 / height), hspace=0.06)
        figure = Figure(figsize=(self.width, height), layout=layout)
        figure.text(0.018, 1 - 0.2 / height, self.title, size=14, weight="bold", va="top")
        note = f"{report.gpu} · percent of what its peak rates allow, higher is better"
        figure.text(0.018, 1 - 0.5 / height, note, size=9.5, color=MUTED, va="top")
        return figure

    def _draw_panel(self, axes: Axes, cells: list[CellT], peers: list[str], gpu: str) -> None:
        """Bars of every peer on every workload, each with its time in microseconds above it."""
        bar = GROUP_WIDTH / max(len(peers), 1)
        for position, peer in enumerate(peers):
            shares = [100 * cell.workload.limit_us(gpu) / cell.us(peer) for cell in cells]
            heights = [0.0 if math.isnan(share) else share for share in shares]
            at = [group + (position + 0.5) * bar - GROUP_WIDTH / 2 for group in range(len(cells))]
            axes.bar(at, heights, width=bar * 0.94, color=self.colours[peer], label=peer, zorder=2)
            for x, height, cell in zip(at, heights, cells, strict=True):
                if height:
                    axes.annotate(
                        f"{cell.us(peer):{self.time}} us", (x, height), (0, 2), textcoords="offset points",
                        ha="center", va="bottom", size=self.time_size, rotation=90,
                        color=INK if peer == OURS else MUTED, weight="bold" if peer == OURS else "normal",
                    )  # fmt: skip
        axes.set_xticks(range(len(cells)), [self.label_of(cell.workload) for cell in cells], size=8)
        axes.set_ylabel("% of the limit")
        axes.margins(y=0.22)
        axes.set_ylim(bottom=0.0)
        axes.grid(axis="y", zorder=0)
        axes.spines["left"].set_visible(False)
