"""The features' benchmark as a table for the terminal, and as a page for docs/results."""

from __future__ import annotations

from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.features.results import FeatureCell, FeatureReport, feature_targets
from hopper_attention.experiments.features.spec import TOPICS, Workload
from hopper_attention.experiments.reports import (
    NOTHING,
    lines_text,
    method_text,
    number,
    page,
    section,
    targets_text,
)
from hopper_attention.experiments.tables import FittedTable
from hopper_attention.experiments.workloads.tables import Layout, failures_of, head_of_page, share_text

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


def own_figures(cell: FeatureCell, gpu: str) -> list[str]:
    """Of ours, under OWN_HEADINGS."""
    limit = number(cell.workload.limit_us(gpu), 1)
    return [number(cell.ratio, 3), number(cell.tflops(OURS)), limit, share_text(cell, gpu)]


LAYOUT = Layout(WORKLOAD_HEADINGS, describe, OWN_HEADINGS, own_figures, TOPICS)


def feature_table(report: FeatureReport) -> FittedTable:
    """Microseconds of every peer, and of ours its ratio to the best of the others, rate, and share of the limit."""
    return LAYOUT.table("Features, us", report, report.available)


def lengths_text(report: FeatureReport) -> str:
    """The skewed lengths, each list once."""
    skewed = {c.workload.lengths for c in report.cells if not c.workload.has_equal_lengths}
    lists = (", ".join(map(str, lengths)) for lengths in sorted(skewed))
    return "\n".join(f"Skewed lengths, {len(lengths.split(','))} in all: {lengths}." for lengths in lists)


def render_features(report: FeatureReport, figure: str) -> str:
    """docs/results/features.md. ``figure`` is the plot's file name beside it."""
    subject = (
        "Microseconds a call of every peer, in interleaved rounds of one run. `ratio`: how many times as fast as the "
        "best peer ours is. TFLOP/s of ours count the keys that a query sees, and no others. `limit`: what one H200 "
        "cannot go below; see the method."
    )
    parts = head_of_page("Packed sequences, windows and changed scores", report, subject, figure)
    parts += LAYOUT.sections(report, lambda cells: report.available)
    parts += [
        lengths_text(report),
        section("Targets", targets_text(feature_targets(report))),
        section("What did not run", lines_text(failures_of(report))),
        section("Method", method_text(report.head["method"])),
    ]
    return page(parts)
