"""The serving benchmark as a table for the terminal, and as a page for docs/results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hopper_attention.experiments.bench.results import OURS, Failed
from hopper_attention.experiments.bench.words import FAILED
from hopper_attention.experiments.reports import (
    NOTHING,
    lines_text,
    markdown_table,
    method_text,
    number,
    page,
    section,
    targets_text,
)
from hopper_attention.experiments.serving import spec
from hopper_attention.experiments.serving.results import (
    MOST_HOST_US,
    OURS_PLAIN,
    HostTime,
    ServingCell,
    ServingReport,
    promise_of,
    serving_targets,
)
from hopper_attention.experiments.serving.spec import TOPICS, ServingWorkload
from hopper_attention.experiments.tables import FittedTable, figures, names
from hopper_attention.experiments.workloads.tables import Layout, failures_of, head_of_page, share_text

WORKLOAD_HEADINGS = ("batch", "queries", "heads", "cache")
OWN_HEADINGS = ("ratio", "rate", "limit, us", "of the limit", "target")
HOST_HEADINGS = ("peer", "host time, us", "spread", "target")


def describe(workload: ServingWorkload) -> list[str]:
    """A workload, as table cells under WORKLOAD_HEADINGS."""
    w = workload
    return [w.batch_name, str(w.queries), w.heads_name, w.cache_name or NOTHING]


def rate_of(cell: ServingCell, peer: str) -> str:
    """GB/s of keys and values, TFLOP/s of a prefill."""
    rate, unit = (cell.tflops(peer), "TFLOP/s") if cell.workload.is_prefill else (cell.gbs(peer), "GB/s")
    return NOTHING if math.isnan(rate) else f"{rate:.0f} {unit}"


def target_of(workload: ServingWorkload, gpu: str) -> str:
    """What is promised: a ratio, microseconds, or either against our plain call."""
    promise = promise_of(workload, gpu)
    if promise.least_of_best:
        return f"ratio {promise.least_of_best:.2f}"
    if promise.least_of_plain:
        return f"{promise.least_of_plain:.2f} of {OURS_PLAIN}"
    if math.isfinite(promise.most_over_plain_us):
        return f"{OURS_PLAIN} + {promise.most_over_plain_us:g} us"
    return f"{promise.most_us:g} us" if math.isfinite(promise.most_us) else NOTHING


def own_figures(cell: ServingCell, gpu: str) -> list[str]:
    """Of ours, under OWN_HEADINGS."""
    limit, target = number(cell.workload.limit_us(gpu), 1), target_of(cell.workload, gpu)
    return [number(cell.ratio, 3), rate_of(cell, OURS), limit, share_text(cell, gpu), target]


LAYOUT = Layout(WORKLOAD_HEADINGS, describe, OWN_HEADINGS, own_figures, TOPICS)


def peers_of(report: ServingReport, cells: Sequence[ServingCell]) -> list[str]:
    """Those that were there and are meant for some of these cells."""
    return [peer for peer in report.available if any(peer in cell.peers for cell in cells)]


def serving_table(report: ServingReport) -> FittedTable:
    """Microseconds of every peer, and of ours its ratio to the best of the others, rate, share of the limit, target."""
    return LAYOUT.table("Serving, us", report, peers_of(report, report.cells))


def host_rows(report: ServingReport) -> list[list[str]]:
    """A row for each peer whose host time was measured, under HOST_HEADINGS."""
    rows = []
    for peer, entry in report.host.items():
        target = f"{MOST_HOST_US:g} us" if peer == OURS else NOTHING
        if isinstance(entry, HostTime):
            rows.append([peer, number(entry.median_us, 1), f"{100 * entry.spread:.0f} %", target])
        else:
            rows.append([peer, FAILED, NOTHING, target])
    return rows


def host_table(report: ServingReport) -> FittedTable:
    """Host time a call, where it was measured."""
    columns = (*names(HOST_HEADINGS[0]), *figures(*HOST_HEADINGS[1:]))
    return FittedTable(f"Host time a call, {spec.SHORT.name}", columns, [host_rows(report)])


def serving_problems(report: ServingReport) -> list[str]:
    """What did not run and why, a line each: absent peers, then failures."""
    failed = ((name, entry) for name, entry in report.host.items() if isinstance(entry, Failed))
    return failures_of(report) + [f"host time of {name}: {entry.reason}" for name, entry in failed]


def notes_table(report: ServingReport) -> str:
    """What ran, where a row can tell."""
    rows = [
        [cell.workload.name, peer, result.note]
        for cell in report.cells
        for peer, result in cell.peers.items()
        if not isinstance(result, Failed) and result.note
    ]
    return markdown_table(["workload", "peer", "what ran"], rows) if rows else ""


def lengths_text(report: ServingReport) -> str:
    """The ragged lengths, each list once."""
    ragged = {cell.workload.lengths for cell in report.cells if cell.workload.is_ragged}
    lists = (", ".join(map(str, lengths)) for lengths in sorted(ragged))
    return "\n".join(f"Ragged lengths, {len(text.split(','))} in all: {text}." for text in lists)


def render_serving(report: ServingReport, figure: str) -> str:
    """docs/results/serving.md. ``figure`` is the plot's file name beside it."""
    subject = (
        "Microseconds a call of every peer, in interleaved rounds of one run. `ratio`: how many times as fast as the "
        "best peer ours is. `rate`, of ours: keys and values read, of a prefill useful operations. `limit`: what the "
        "H200's peak rates give; see the method."
    )
    parts = head_of_page("Attention on a key/value cache", report, subject, figure)
    parts += LAYOUT.sections(report, partial(peers_of, report))
    parts += [
        lengths_text(report),
        section("Host time a call", markdown_table(HOST_HEADINGS, host_rows(report)) if report.host else ""),
        section("Targets", targets_text(serving_targets(report))),
        section("What did not run", lines_text(serving_problems(report))),
        section("What ran", notes_table(report)),
        section("Method", method_text(report.head["method"])),
    ]
    return page(parts)
