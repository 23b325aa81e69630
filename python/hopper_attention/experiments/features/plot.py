"""The features' benchmark as a picture: a panel for each topic and pass, bars of each peer on each workload."""

from __future__ import annotations

from pathlib import Path

from hopper_attention.experiments.bench.plot import COLOURS, DRAWN
from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.features.results import OURS_DENSE, FeatureCell, FeatureReport
from hopper_attention.experiments.features.spec import PASSES, Workload
from hopper_attention.experiments.features.tables import LAYOUT
from hopper_attention.experiments.plots import PALETTE
from hopper_attention.experiments.workloads.plot import Picture

FEATURE_COLOURS = {**COLOURS, OURS_DENSE: PALETTE["ours-light"]}
ORDER = (*(name for name in DRAWN if name != OURS), OURS_DENSE, OURS)


def panels_of(report: FeatureReport) -> dict[str, list[FeatureCell]]:
    """The cells of each panel, by its title."""
    panels = {}
    for topic, cells in LAYOUT.cells_by_topic(report).items():
        for direction in PASSES:
            found = [cell for cell in cells if cell.workload.direction == direction]
            if found:
                panels[f"{topic}, {direction}"] = found
    return panels


def label_of(workload: Workload) -> str:
    """A workload in three or four short lines."""
    w = workload
    lines = [w.batch_name, f"{w.heads_name} heads of {w.columns_name.removeprefix('d')}", w.mask_name]
    return "\n".join([*lines, *([w.scores_name] if w.changes_scores else [])])


PICTURE = Picture(
    title="Packed sequences, windows and changed scores", order=ORDER, colours=FEATURE_COLOURS, label_of=label_of,
    width=12.0, head=1.6, time=".0f", time_size=6.2, legend_columns=3,
)  # fmt: skip


def plot_features(report: FeatureReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies.

    Raises:
        ValueError: the report has no cells.
    """
    return PICTURE.plot(report, panels_of(report), lambda cells: report.available, path)
