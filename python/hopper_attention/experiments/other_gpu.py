"""Reports of another GPU than that of the other pages, on one page: our figures beside those of the best peer there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hopper_attention.experiments.bench.render import (
    render_grid,
    render_peers_table,
    render_sustained,
    summary,
)
from hopper_attention.experiments.bench.results import OURS, ForwardReport, geometric_mean
from hopper_attention.experiments.bench.targets import throughput_targets
from hopper_attention.experiments.bench.words import problems_of, wording_of
from hopper_attention.experiments.features.results import FeatureCell, FeatureReport, feature_targets
from hopper_attention.experiments.features.tables import WORKLOAD_HEADINGS as FEATURE_HEADINGS
from hopper_attention.experiments.features.tables import describe as describe_feature
from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    Target,
    lines_text,
    markdown_table,
    measured_on,
    method_text,
    number,
    page,
    section,
    targets_text,
)
from hopper_attention.experiments.serving.results import ServingCell, ServingReport, serving_targets
from hopper_attention.experiments.serving.tables import (
    WORKLOAD_HEADINGS,
    describe,
    rate_of,
    serving_problems,
)

COMPARED = ("ours, us", "best peer", "us", "ratio")
SERVING_HEADINGS = (*WORKLOAD_HEADINGS, *COMPARED, "rate")
LEGEND = "Microseconds a call, in interleaved rounds of one run. `ratio`: time of the best peer over ours."


def render_other_gpu(
    gpu: str,
    reports: Sequence[ForwardReport],
    features: Sequence[FeatureReport],
    servings: Sequence[ServingReport],
) -> str:
    """docs/results/<gpu>.md; ``reports`` are those of throughput. Of targets it has those that compare with a peer or
    with ourselves, and not that of the host's time, which is another host's."""
    parts = [
        f"# On an {gpu}",
        RENDERED,
        f"The other pages are of an H200; what is here was measured on an {gpu}.",
    ]
    for report in reports:
        parts += _of_throughput(report)
    for feature in features:
        parts += _of_features(feature)
    for serving in servings:
        parts += _of_serving(serving)
    return page(parts)


def _of_throughput(report: ForwardReport) -> list[str]:
    return [
        f"## {wording_of(report).title}",
        measured_on(report.date, report.commit, report.machine),
        render_grid(report),
        summary(report),
        targets_text(throughput_targets(report)),
        render_peers_table(report, report.cells),
        render_sustained(report),
        lines_text(problems_of(report)),
    ]


def _of_features(report: FeatureReport) -> list[str]:
    head = report.head
    headings = (*FEATURE_HEADINGS, *COMPARED)
    rows = [[*describe_feature(cell.workload), *_compared(cell)] for cell in report.cells]
    return [
        "## Packed sequences, windows and changed scores",
        measured_on(head["date"], head["commit"], head["machine"]),
        f"{LEGEND} {_mean_of(report.cells)}",
        markdown_table(headings, rows),
        targets_text(feature_targets(report)),
    ]


def _of_serving(report: ServingReport) -> list[str]:
    head = report.head
    rate = "`rate`, of ours: keys and values read, of a prefill useful operations."
    return [
        "## Attention on a key/value cache",
        measured_on(head["date"], head["commit"], head["machine"]),
        f"{LEGEND} {rate} {_mean_of(report.cells)}",
        markdown_table(SERVING_HEADINGS, [_row_of(cell) for cell in report.cells]),
        targets_text([target for target in serving_targets(report) if _is_of_gpu(target)]),
        section("What did not run", lines_text(serving_problems(report))),
        section(
            "Method", method_text({name: text for name, text in head["method"].items() if name != "limit"})
        ),
    ]


def _mean_of(cells: Sequence[FeatureCell] | Sequence[ServingCell]) -> str:
    """That of the ratios, or nothing where no peer ran."""
    rated = [cell.ratio for cell in cells if not math.isnan(cell.ratio)]
    if not rated:
        return ""
    return f"Geometric mean of the ratios: **{geometric_mean(rated):.3f}** of {len(rated)} workloads."


def _compared(cell: FeatureCell | ServingCell) -> list[str]:
    """Under COMPARED."""
    best = cell.best_peer
    peer = [best, number(cell.us(best), 1)] if best else [NOTHING, NOTHING]
    return [number(cell.us(OURS), 1), *peer, number(cell.ratio, 3)]


def _row_of(cell: ServingCell) -> list[str]:
    return [*describe(cell.workload), *_compared(cell), rate_of(cell, OURS)]


def _is_of_gpu(target: Target) -> bool:
    """Whether a promise is one of device time or of errors."""
    return not target.what.startswith("host time")
