"""The serving benchmark as a table for the terminal, and as a page for docs/results."""

from __future__ import annotations

import math

from hopper_attention.experiments.bench.results import OURS, Failed
from hopper_attention.experiments.bench.words import FAILED, NO_KERNEL
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
from hopper_attention.experiments.tables import FittedTable, figures, names, spare

WORKLOAD_HEADINGS = ("batch", "queries", "heads", "cache")
OWN_HEADINGS = ("ratio", "rate", "limit, us", "of the limit", "target")
HOST_HEADINGS = ("peer", "host time, us", "spread", "target")


def describe(workload: ServingWorkload) -> list[str]:
    """A workload, as table cells under WORKLOAD_HEADINGS."""
    w = workload
    return [w.batch_name, str(w.queries), w.heads_name, w.cache_name or NOTHING]


def time_of(cell: ServingCell, peer: str) -> str:
    """Microseconds of a peer, or why there are none."""
    result = cell.peers.get(peer)
    if isinstance(result, Failed):
        return NO_KERNEL if result.lacks_kernel else FAILED
    return number(cell.us(peer), 1)


def rate_of(cell: ServingCell, peer: str) -> str:
    """GB/s of keys and values, TFLOP/s of a prefill."""
    rate, unit = (cell.tflops(peer), "TFLOP/s") if cell.workload.is_prefill else (cell.gbs(peer), "GB/s")
    return NOTHING if math.isnan(rate) else f"{rate:.0f} {unit}"


def target_of(workload: ServingWorkload) -> str:
    """What is promised: a ratio, microseconds, or either against our plain call."""
    promise = promise_of(workload)
    if promise.least_of_best:
        return f"ratio {promise.least_of_best:.2f}"
    if promise.least_of_plain:
        return f"{promise.least_of_plain:.2f} of {OURS_PLAIN}"
    if math.isfinite(promise.most_over_plain_us):
        return f"{OURS_PLAIN} + {promise.most_over_plain_us:g} us"
    return f"{promise.most_us:g} us" if math.isfinite(promise.most_us) else NOTHING


def own_figures(cell: ServingCell) -> list[str]:
    """Of ours, under OWN_HEADINGS."""
    share, limit = cell.share_of_limit, number(cell.workload.limit_us, 1)
    of_limit = NOTHING if math.isnan(share) else f"{100 * share:.0f} %"
    return [number(cell.ratio, 3), rate_of(cell, OURS), limit, of_limit, target_of(cell.workload)]


def row_of(cell: ServingCell, peers: list[str]) -> list[str]:
    return [*describe(cell.workload), *(time_of(cell, peer) for peer in peers), *own_figures(cell)]


def cells_by_topic(report: ServingReport) -> dict[str, list[ServingCell]]:
    """The cells of each part that has any."""
    found = {topic: [c for c in report.cells if belongs(c.workload)] for topic, belongs in TOPICS.items()}
    return {topic: cells for topic, cells in found.items() if cells}


def peers_of(report: ServingReport, cells: list[ServingCell]) -> list[str]:
    """Those that were there and are meant for some of these cells."""
    return [peer for peer in report.available if any(peer in cell.peers for cell in cells)]


def serving_table(report: ServingReport) -> FittedTable:
    """Microseconds of every peer, and of ours its ratio to the best of the others, rate, share of the limit, target."""
    title = f"Serving, us · {report.head['machine']['gpu']} · {report.head['commit'][:12]}"
    peers = peers_of(report, list(report.cells))
    gauges = spare(*figures("MHz", "W"))
    columns = (*names(*WORKLOAD_HEADINGS), *figures(*peers, *OWN_HEADINGS), *gauges)
    rows = [
        [[*row_of(cell, peers), number(cell.clock_mhz), number(cell.power_w)] for cell in cells]
        for cells in cells_by_topic(report).values()
    ]
    return FittedTable(title, columns, rows)


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
    lines = [f"{name}: {info.unavailable}" for name, info in report.peers.items() if info.unavailable]
    lines += [
        f"{name} on {cell.workload.name}: {result.reason}"
        for cell in report.cells
        for name, result in cell.peers.items()
        if isinstance(result, Failed)
    ]
    return lines + [
        f"host time of {name}: {entry.reason}"
        for name, entry in report.host.items()
        if isinstance(entry, Failed)
    ]


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
    head = report.head
    titles = "; ".join(
        f"{name}: {report.peers[name].title}, {report.peers[name].version}" for name in report.available
    )
    subject = (
        "Microseconds a call of every peer, in interleaved rounds of one run. `ratio`: how many times as fast as the "
        "best peer ours is. `rate`, of ours: keys and values read, of a prefill useful operations. `limit`: what the "
        f"H200's peak rates give; see the method. {titles}."
    )
    parts = [
        "# Attention on a key/value cache",
        RENDERED,
        measured_on(head["date"], head["commit"], head["machine"]),
    ]
    parts += [subject, f"![share of the limit]({figure})"]
    for topic, cells in cells_by_topic(report).items():
        peers = peers_of(report, cells)
        headings = [*WORKLOAD_HEADINGS, *(f"{peer}, us" for peer in peers), *OWN_HEADINGS]
        parts += [f"## {topic}", markdown_table(headings, [row_of(cell, peers) for cell in cells])]
    parts.append(lengths_text(report))
    if report.host:
        parts += ["## Host time a call", markdown_table(HOST_HEADINGS, host_rows(report))]
    targets, lines, notes = serving_targets(report), serving_problems(report), notes_table(report)
    parts += ["## Targets", targets_text(targets)] if targets else []
    parts += ["## What did not run", "\n".join(f"- {line}" for line in lines)] if lines else []
    parts += ["## What ran", notes] if notes else []
    return page([*parts, "## Method", method_text(head["method"])])
