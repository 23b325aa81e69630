"""The features' benchmark as a table for the terminal, and as a page for docs/results."""

from __future__ import annotations

import math

from hopper_attention.experiments.bench.results import OURS, Failed
from hopper_attention.experiments.bench.words import FAILED, NO_KERNEL
from hopper_attention.experiments.features.results import FeatureCell, FeatureReport, feature_targets
from hopper_attention.experiments.features.spec import TOPICS, Workload
from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    markdown_table,
    measured_on,
    method_text,
    number,
    page,
    targets_text,
)
from hopper_attention.experiments.tables import FittedTable, figures, names, spare

WORKLOAD_HEADINGS = ("pass", "batch", "heads", "d", "mask", "scores")
OWN_HEADINGS = ("ratio", "TFLOP/s", "limit, us", "of the limit")


def describe(workload: Workload) -> list[str]:
    """A workload, as table cells under WORKLOAD_HEADINGS."""
    w = workload
    direction = f"{w.direction}, FP8" if w.is_fp8 else w.direction
    return [
        direction,
        w.batch_name,
        w.heads_name,
        w.columns_name.removeprefix("d"),
        w.mask_name,
        w.scores_name or NOTHING,
    ]


def time_of(cell: FeatureCell, peer: str) -> str:
    """Microseconds of a peer, or why there are none."""
    result = cell.peers.get(peer)
    if isinstance(result, Failed):
        return NO_KERNEL if result.lacks_kernel else FAILED
    return number(cell.us(peer), 1)


def own_figures(cell: FeatureCell) -> list[str]:
    """Of ours, under OWN_HEADINGS."""
    share = cell.share_of_limit
    of_limit = NOTHING if math.isnan(share) else f"{100 * share:.0f} %"
    return [number(cell.ratio, 3), number(cell.tflops(OURS)), number(cell.workload.limit_us, 1), of_limit]


def row_of(cell: FeatureCell, peers: list[str]) -> list[str]:
    return [*describe(cell.workload), *(time_of(cell, peer) for peer in peers), *own_figures(cell)]


def cells_by_topic(report: FeatureReport) -> dict[str, list[FeatureCell]]:
    """The cells of each part that has any."""
    found = {topic: [c for c in report.cells if belongs(c.workload)] for topic, belongs in TOPICS.items()}
    return {topic: cells for topic, cells in found.items() if cells}


def feature_table(report: FeatureReport) -> FittedTable:
    """Microseconds of every peer, and of ours its ratio to the best of the others, rate, and share of the limit."""
    title = f"Features, us · {report.head['machine']['gpu']} · {report.head['commit'][:12]}"
    peers = report.available
    gauges = spare(*figures("MHz", "W"))
    columns = (*names(*WORKLOAD_HEADINGS), *figures(*peers, *OWN_HEADINGS), *gauges)
    rows = [
        [[*row_of(cell, peers), number(cell.clock_mhz), number(cell.power_w)] for cell in cells]
        for cells in cells_by_topic(report).values()
    ]
    return FittedTable(title, columns, rows)


def feature_problems(report: FeatureReport) -> list[str]:
    """What did not run and why, a line each: absent peers, then failures."""
    lines = [f"{name}: {info.unavailable}" for name, info in report.peers.items() if info.unavailable]
    for cell in report.cells:
        for name, result in cell.peers.items():
            if isinstance(result, Failed):
                lines.append(f"{name} on {cell.workload.name}: {result.reason}")
    return lines


def lengths_text(report: FeatureReport) -> str:
    """The skewed lengths, each list once."""
    skewed = {c.workload.lengths for c in report.cells if not c.workload.has_equal_lengths}
    lists = (", ".join(map(str, lengths)) for lengths in sorted(skewed))
    return "\n".join(f"Skewed lengths, {len(lengths.split(','))} in all: {lengths}." for lengths in lists)


def render_features(report: FeatureReport, figure: str) -> str:
    """docs/results/features.md. ``figure`` is the plot's file name beside it."""
    head, peers = report.head, report.available
    titles = "; ".join(f"{name}: {report.peers[name].title}, {report.peers[name].version}" for name in peers)
    subject = (
        "Microseconds a call of every peer, in interleaved rounds of one run. `ratio`: how many times as fast as the "
        "best peer ours is. TFLOP/s of ours count the keys that a query sees, and no others. `limit`: what one H200 "
        f"cannot go below; see the method. {titles}."
    )
    parts = [
        "# Packed sequences, windows and changed scores",
        RENDERED,
        measured_on(head["date"], head["commit"], head["machine"]),
    ]
    parts += [subject, f"![share of the limit]({figure})"]
    for topic, cells in cells_by_topic(report).items():
        headings = [*WORKLOAD_HEADINGS, *(f"{peer}, us" for peer in peers), *OWN_HEADINGS]
        parts += [f"## {topic}", markdown_table(headings, [row_of(cell, peers) for cell in cells])]
    parts.append(lengths_text(report))
    targets, lines = feature_targets(report), feature_problems(report)
    parts += ["## Targets", targets_text(targets)] if targets else []
    parts += ["## What did not run", "\n".join(f"- {line}" for line in lines)] if lines else []
    return page([*parts, "## Method", method_text(head["method"])])
