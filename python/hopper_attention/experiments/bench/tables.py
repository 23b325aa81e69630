"""Throughput and latency as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

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
from hopper_attention.experiments.tables import text_table


def latency_table(latency: Mapping[str, Any]) -> Table:
    """Microseconds a call, and below it the first call of a fresh process."""
    title = f"Latency, us a call · {latency['machine']['gpu']} · {latency['commit'][:12]}"
    rows = latency_rows(latency)
    for state, entry in latency["first_call_s"].items():
        rows.append([f"first call, {state}", "ours", f"{entry['median']:.2f} s", *[NOTHING] * 3])
    return text_table(title, ("problem", "peer"), LATENCY_HEADINGS, rows)


COLOURS = {FAILED: "red", NO_KERNEL: "yellow"}


def forward_table(report: ForwardReport) -> Table:
    """TFLOP/s of every peer, ours over the best of the others, spread of ours, clock and power."""
    title = f"{wording_of(report).title}, TFLOP/s · {report.machine['gpu']} · {report.commit[:12]}"
    table = Table(title=title, title_justify="left")
    for heading in ("dtype", "d", "mask", "sizes"):
        table.add_column(heading)
    peers = measured_peers(report)
    for heading in (*peers, *ratio_headings(report), "spread", "MHz", "W"):
        table.add_column(heading, justify="right")
    for cell in report.cells:
        ours = cell.peers.get(cell.main_row)
        spread = number(100 * ours.spread, 1) + " %" if isinstance(ours, Measured) else "–"
        figures = [mark(peer_figure(cell, peer)) for peer in peers]
        figures += [ratio_mark(ratio) for ratio in measured_ratios(report, cell)]
        gauges = number(cell.clock_mhz), number(cell.power_w)
        table.add_row(*describe(cell.problem), *figures, spread, *gauges)
    return table


def mark(figure: str) -> str:
    colour = COLOURS.get(figure)
    return f"[{colour}]{figure}[/{colour}]" if colour else figure


def ratio_mark(ratio: float) -> str:
    if math.isnan(ratio):
        return "–"
    colour = "green" if ratio >= 1 else "yellow" if ratio >= 0.9 else "red"
    return f"[{colour}]{ratio:.2f}[/{colour}]"
