"""Throughput and latency as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hopper_attention.experiments.bench.results import ForwardReport, Measured
from hopper_attention.experiments.bench.words import (
    FAILED,
    LATENCY_HEADINGS,
    NO_KERNEL,
    describe,
    latency_rows,
    measured_peers,
    measured_ratios,
    peer_figure,
    ratio_headings,
    wording_of,
)
from hopper_attention.experiments.reports import NOTHING, number
from hopper_attention.experiments.tables import FittedTable, figures, names, spare


def latency_table(latency: Mapping[str, Any]) -> FittedTable:
    """Microseconds a call, and below it the first call of a fresh process."""
    title = f"Latency, us a call · {latency['machine']['gpu']} · {latency['commit'][:12]}"
    rows = latency_rows(latency)
    for state, entry in latency["first_call_s"].items():
        rows.append([f"first call, {state}", "ours", f"{entry['median']:.2f} s", *[NOTHING] * 3])
    return FittedTable(title, (*names("problem", "peer"), *figures(*LATENCY_HEADINGS)), [rows])


COLOURS = {FAILED: "red", NO_KERNEL: "yellow"}


def forward_table(report: ForwardReport) -> FittedTable:
    """TFLOP/s of every peer, ours over the best of the others, spread of ours, clock and power."""
    title = f"{wording_of(report).title}, TFLOP/s · {report.machine['gpu']} · {report.commit[:12]}"
    peers = measured_peers(report)
    columns = (
        *names("dtype", "d", "mask", "sizes"),
        *figures(*peers, *ratio_headings(report)),
        *spare(*figures("spread", "MHz", "W")),
    )
    rows = []
    for cell in report.cells:
        ours = cell.peers.get(cell.main_row)
        spread = number(100 * ours.spread, 1) + " %" if isinstance(ours, Measured) else "–"
        cells = [mark(peer_figure(cell, peer)) for peer in peers]
        cells += [ratio_mark(ratio) for ratio in measured_ratios(report, cell)]
        gauges = number(cell.clock_mhz), number(cell.power_w)
        rows.append([*describe(cell.problem), *cells, spread, *gauges])
    return FittedTable(title, columns, [rows])


def mark(figure: str) -> str:
    colour = COLOURS.get(figure)
    return f"[{colour}]{figure}[/{colour}]" if colour else figure


def ratio_mark(ratio: float) -> str:
    if math.isnan(ratio):
        return "–"
    colour = "green" if ratio >= 1 else "yellow" if ratio >= 0.9 else "red"
    return f"[{colour}]{ratio:.2f}[/{colour}]"
