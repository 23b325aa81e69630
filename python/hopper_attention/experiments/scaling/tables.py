"""Scaling as a table for the terminal, and as a page for docs/results."""

from __future__ import annotations

import math

from hopper_attention.experiments.bench.results import Failed, PeerInfo
from hopper_attention.experiments.bench.words import failures
from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    lines_text,
    markdown_table,
    measured_on,
    method_text,
    number,
    page,
    section,
    short_length,
)
from hopper_attention.experiments.scaling.run import Scaled, ScalingCell, ScalingReport
from hopper_attention.experiments.tables import FittedTable, figures, names


def memory_text(value: float) -> str:
    """Bytes in MiB or GiB."""
    if math.isnan(value):
        return NOTHING
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def time_text(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def scaling_cells(result: Scaled | Failed | None) -> list[str]:
    """Time, TFLOP/s and memory of one peer; in place of the time, why there is none."""
    if isinstance(result, Scaled):
        return [time_text(result.median_ms), number(result.tflops, 1), memory_text(result.memory_bytes)]
    is_too_large = isinstance(result, Failed) and result.reason.startswith("needs ")
    return ["too large" if is_too_large else "failed" if result else NOTHING, NOTHING, NOTHING]


def scaling_headings(report: ScalingReport) -> list[str]:
    return [f"{peer}{what}" for peer in report.peers for what in (", time", ", TFLOP/s", ", memory")]


def scaling_row(cell: ScalingCell, report: ScalingReport) -> list[str]:
    problem = cell.problem
    figures = [text for peer in report.peers for text in scaling_cells(cell.peers.get(peer))]
    return [f"{short_length(problem.seqlen_q)}, batch {problem.batch}", *figures]


def scaling_series(report: ScalingReport) -> dict[str, list[ScalingCell]]:
    """The cells that were measured, by series."""
    found = {name: [report.cell(p) for p in problems] for name, problems in report.spec.series().items()}
    return {name: [cell for cell in cells if cell is not None] for name, cells in found.items()}


def scaling_table(report: ScalingReport) -> FittedTable:
    """Every length of both series."""
    title = f"Scaling · {report.head['machine']['gpu']} · {report.head['commit'][:12]}"
    rows = [[scaling_row(cell, report) for cell in cells] for cells in scaling_series(report).values()]
    return FittedTable(title, (*names("seqlen"), *figures(*scaling_headings(report))), rows)


def scaling_problems(report: ScalingReport) -> list[str]:
    """What did not run and why, a line each."""
    infos = {name: PeerInfo(**entry) for name, entry in report.head["peers"].items()}
    return failures(infos, ((cell.problem.name, cell.peers) for cell in report.cells))


def render_scaling(report: ScalingReport, figure: str) -> str:
    """docs/results/scaling.md. ``figure`` is the plot's file name beside it."""
    spec = report.spec
    mask = "causal" if spec.causal else "not causal"
    subject = (
        f"{spec.dtype}, {spec.heads} heads of {spec.head_dim}, {mask}. `memory` is what a call adds to its inputs "
        "at its peak, its output included."
    )
    plot = f"![time and memory]({figure})"
    parts = [
        "# Scaling with the sequence",
        RENDERED,
        measured_on(report.head["date"], report.head["commit"], report.head["machine"]),
        subject,
        plot,
    ]
    for name, cells in scaling_series(report).items():
        rows = [scaling_row(cell, report) for cell in cells]
        parts += [f"## {name}", markdown_table(["seqlen", *scaling_headings(report)], rows)]
    parts.append(section("What did not run", lines_text(scaling_problems(report))))
    return page([*parts, "## Method", method_text(report.head["method"])])
