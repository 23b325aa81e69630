"""The accuracy experiment as tables for the terminal: by method, and by number of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hopper_attention.experiments.rmse.run import PAPER_NOTE, LeftOut, RmseReport, gain_over_baseline
from hopper_attention.experiments.rmse.spec import describe
from hopper_attention.experiments.rmse.sweep import (
    LONG,
    SHORT,
    SweepPoint,
    SweepReport,
    describe_sweep,
    summarize,
)
from hopper_attention.experiments.tables import ACCENT, QUIET, quiet_table

OURS = ("flash", "fp8-both")
"""Rows of the accuracy table to point out: what this library would run for you."""


def rmse_table(report: RmseReport) -> RenderableType:
    """The accuracy table, a row a method, with the paper's figures where they may be compared."""
    has_paper = report.experiment.is_papers
    has_spread = report.experiment.seeds > 1
    table = quiet_table()
    table.add_column("method", min_width=36)
    table.add_column("RMSE", justify="right")
    if has_spread:
        table.add_column("± seeds", justify="right", style=QUIET)
    if has_paper:
        table.add_column("paper", justify="right", style=QUIET)
    table.add_column("median query", justify="right")
    table.add_column("computed by", style=QUIET)
    for above, row in zip((report.rows[0], *report.rows), report.rows, strict=False):
        if row.group != above.group:
            table.add_section()
        figures = [Text(f"{row.rmse:.2e}", style=ACCENT if row.method in OURS else "")]
        figures += [Text(f"{row.spread:.0e}")] * has_spread
        figures += [Text(f"{row.paper:.1e}" if row.paper is not None else "")] * has_paper
        table.add_row(row.label, *figures, f"{100 * row.row_error:.2g} %", row.implementation)
    lines: list[RenderableType] = [
        Text("Attention error against float64", style="bold"),
        Text(f"{describe(report.experiment)} · output RMS {report.oracle_rms:.2g}", style=QUIET),
        table,
        *conclusions(report),
        Text("Median query: |error| over |output| of one query, the median over all.", style=QUIET),
        *left_out_lines(report.left_out),
    ]
    return Group(*lines, *([Text(PAPER_NOTE, style=QUIET)] if has_paper else []))


def conclusions(report: RmseReport) -> Iterator[Text]:
    """What the figures of our FP8 come to, as far as its rows are there."""
    if report.has("fp8-per-tensor", "fp8-both"):
        papers = "; the paper has 2.6" if report.experiment.is_papers else ""
        times = f"{gain_over_baseline(report):.1f} times"
        yield Text(f"Block scales with rotation: {times} less error than the FP8 baseline{papers}.")
    if report.has("fp8-both", "fp8-float64"):
        ratio = report.row("fp8-both").rmse / report.row("fp8-float64").rmse
        yield Text(f"Ours over its emulation in float64: {ratio:.3f}.")


def left_out_lines(left_out: Sequence[LeftOut]) -> Iterator[Text]:
    """The rows that are not there, one line a reason."""
    for reason in dict.fromkeys(entry.reason for entry in left_out):
        labels = ", ".join(entry.method for entry in left_out if entry.reason == reason)
        yield Text(f"Left out: {labels} ({reason}).", style=QUIET)


def sweep_table(report: SweepReport) -> RenderableType:
    """Error over the output, a line a length, a column a method, and how it grows."""
    table = quiet_table()
    table.add_column("keys", justify="right")
    for method in report.methods:
        last = report.curve(method)[-1]
        table.add_column(f"{last.label}\n{last.implementation}", justify="right")
    has_ratio = {"fp8-both", "fp8-emulated"} <= set(report.methods)
    if has_ratio:
        table.add_column("kernel over\nemulation", justify="right", style=ACCENT)
    for length in report.sweep.lengths:
        points = {point.method: point for point in report.points if point.seqlen == length}
        cells = [error_cell(points[name]) if name in points else "" for name in report.methods]
        if has_ratio:
            cells.append(f"{points['fp8-both'].error / points['fp8-emulated'].error:.3f}")
        table.add_row(str(length), *cells)
    growth = ", ".join(f"{name} {factor:.3f}" for name, factor in summarize(report).items())
    growth_line = f"FP8 error at {LONG} keys over that at {SHORT}, relative to the output: {growth}."
    return Group(
        Text("Attention error over the root mean square of the output", style="bold"),
        Text(describe_sweep(report.sweep), style=QUIET),
        table,
        *([Text(growth_line)] if growth else []),
        *left_out_lines(report.left_out),
    )


def error_cell(point: SweepPoint) -> str:
    return f"{point.error:.2e} ± {point.spread:.0e}" if point.spread else f"{point.error:.2e}"
