"""Scaling as a picture: time and memory by length, a column for each series."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hopper_attention.experiments.bench.plot import COLOURS
from hopper_attention.experiments.plots import INK, MUTED, house_style, save_figure
from hopper_attention.experiments.scaling.run import PLAIN, Scaled, ScalingCell, ScalingReport, plain_bytes
from hopper_attention.experiments.scaling.tables import scaling_series, short_length


def plot_scaling(report: ScalingReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies."""
    with house_style():
        width, height = 11.0, 7.0
        layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 1 - 0.95 / height), hspace=0.06)
        figure = Figure(figsize=(width, height), layout=layout)
        spec = report.spec
        mask = "causal" if spec.causal else "not causal"
        note = (
            f"{report.head['machine']['gpu']} · {spec.heads} heads of {spec.head_dim}, {spec.dtype}, {mask}"
        )
        title = "Attention by length of the sequence"
        figure.text(0.018, 1 - 0.2 / height, title, size=14, weight="bold", va="top")
        figure.text(0.018, 1 - 0.5 / height, note, size=9.5, color=MUTED, va="top")
        series = scaling_series(report)
        panels = figure.subplots(2, len(series), sharex="col", sharey="row", squeeze=False)
        for column, (name, cells) in enumerate(series.items()):
            draw_curves(panels[0][column], cells, report.peers, lambda scaled: scaled.median_ms)
            draw_curves(panels[1][column], cells, report.peers, lambda scaled: scaled.memory_bytes / 2**30)
            draw_unmet_need(panels[1][column], cells)
            panels[0][column].set_title(name, loc="left", size=10.5, color=INK)
            panels[1][column].set_xlabel("tokens in a sequence")
        panels[0][0].set_ylabel("ms a call")
        panels[1][0].set_ylabel("GiB that a call adds")
        panels[0][0].legend(loc="upper left", fontsize=9)
        return save_figure(figure, path)


def draw_curves(
    axes: Axes, cells: list[ScalingCell], peers: list[str], value_of: Callable[[Scaled], float]
) -> None:
    """A line for each peer, as far as it got."""
    for peer in peers:
        points = [(cell.problem.seqlen_q, cell.measured(peer)) for cell in cells]
        drawn = [(x, value_of(scaled)) for x, scaled in points if scaled is not None]
        drawn = [(x, y) for x, y in drawn if not math.isnan(y) and y > 0]
        if drawn:
            axes.plot(*zip(*drawn, strict=True), marker="o", markersize=4, color=COLOURS[peer], label=peer)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    lengths = [cell.problem.seqlen_q for cell in cells]
    axes.set_xticks(lengths, [short_length(length) for length in lengths])
    axes.grid(axis="y", zorder=0)


def draw_unmet_need(axes: Axes, cells: list[ScalingCell]) -> None:
    """Where plain attention does not fit, what it would take, as open circles."""
    unmet = [c.problem for c in cells if PLAIN in c.peers and not isinstance(c.peers[PLAIN], Scaled)]
    if unmet:
        needs = [plain_bytes(problem) / 2**30 for problem in unmet]
        lengths = [problem.seqlen_q for problem in unmet]
        axes.plot(
            lengths, needs, linestyle=":", marker="o", markersize=4, markerfacecolor="none", color=COLOURS[PLAIN],
            label=f"{PLAIN} would need",
        )  # fmt: skip
        axes.legend(loc="upper left", fontsize=9)
