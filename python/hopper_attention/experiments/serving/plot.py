"""The serving benchmark as a picture: a panel for each topic, bars of each peer on each workload."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hopper_attention.experiments.bench.plot import COLOURS
from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.plots import PALETTE
from hopper_attention.experiments.serving.results import (
    OURS_FP8_QUERIES,
    OURS_KNOWN,
    OURS_PLAIN,
    ServingReport,
)
from hopper_attention.experiments.serving.spec import ServingWorkload
from hopper_attention.experiments.serving.tables import LAYOUT, peers_of
from hopper_attention.experiments.workloads.plot import Picture

SERVING_COLOURS = {
    **COLOURS,
    "fa3_best": "#274b80",
    "flashmla": PALETTE["sand"],
    OURS_PLAIN: PALETTE["ours-light"],
    OURS_KNOWN: "#4d9684",
    OURS_FP8_QUERIES: PALETTE["ours-light"],
}
ORDER = (
    *("torch", "fa2", "cudnn", "fa4", "fa3", "fa3_best", "flashmla"),
    *(OURS_PLAIN, OURS_FP8_QUERIES, OURS_KNOWN, OURS),
)


def label_of(workload: ServingWorkload) -> str:
    """A workload in two to four short lines."""
    w = workload
    lines = [w.batch_name, w.heads_name, *([f"{w.queries} queries"] if w.queries > 1 else [])]
    return "\n".join([*lines, *([w.cache_name] if w.cache_name else [])])


PICTURE = Picture(
    title="Attention on a key/value cache", order=ORDER, colours=SERVING_COLOURS, label_of=label_of,
    width=14.0, head=1.7, time=".4g", time_size=5.8, legend_columns=2,
)  # fmt: skip


def plot_serving(report: ServingReport, path: Path) -> Path:
    """Draw the report into ``path``; returns where the file lies.

    Raises:
        ValueError: the report has no cells.
    """
    return PICTURE.plot(report, LAYOUT.cells_by_topic(report), partial(peers_of, report), path)
