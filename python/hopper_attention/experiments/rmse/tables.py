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
from hopper_attention.experiments.tables import ACCENT, QUIET, Column, FittedTable, texts

OURS = ("flash", "fp8-both")
"""Rows of the accuracy table to point out: what this library would run for you."""


def rmse_table(report: RmseReport) -> RenderableType:
    """The accuracy table, a row a method, with the paper's figures where they may be compared."""
    has_paper = report.experiment.is_papers
    has_spread = report.experiment.seeds > 1
    columns = [*texts("method"), Column("RMSE")]
    columns += [Column("± seeds", style=QUIET, is_spare=True)] * has_spread
    columns += [Column("paper", style=QUIET)] * has_paper
    columns += [Column("median query"), Column("computed by", is_left=True, wraps=True, style=QUIET)]
    groups: dict[str, list[list[str | Text]]] = {}
    for row in report.rows:
        cells: list[str | Text] = [Text(f"{row.rmse:.2e}", style=ACCENT if row.method in OURS else "")]
        cells += [f"{row.spread:.0e}"] * has_spread
        cells += [f"{row.paper:.1e}" if row.paper is not None else ""] * has_paper
        cells += [f"{100 * row.row_error:.2g} %", row.implementation]
        groups.setdefault(row.group, []).append([row.label, *cells])
    lines: list[RenderableType] = [
        Text("Attention error against float64", style="bold"),
        Text(f"{describe(report.experiment)} · output RMS {report.oracle_rms:.2g}", style=QUIET),
        FittedTable("", columns, list(groups.values())),
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
    columns = [Column("keys")]
    for method in report.methods:
        last = report.curve(method)[-1]
        columns.append(Column(f"{last.label}\n{last.implementation}"))
    has_ratio = {"fp8-both", "fp8-emulated"} <= set(report.methods)
    columns += [Column("kernel over\nemulation", style=ACCENT)] * has_ratio
    rows = []
    for length in report.sweep.lengths:
        points = {point.method: point for point in report.points if point.seqlen == length}
        cells = [error_cell(points[name]) if name in points else "" for name in report.methods]
        if has_ratio:
            cells.append(f"{points['fp8-both'].error / points['fp8-emulated'].error:.3f}")
        rows.append([str(length), *cells])
    growth = ", ".join(f"{name} {factor:.3f}" for name, factor in summarize(report).items())
    growth_line = f"FP8 error at {LONG} keys over that at {SHORT}, relative to the output: {growth}."
    return Group(
        Text("Attention error over the root mean square of the output", style="bold"),
        Text(describe_sweep(report.sweep), style=QUIET),
        FittedTable("", columns, [rows]),
        *([Text(growth_line)] if growth else []),
        *left_out_lines(report.left_out),
    )


def error_cell(point: SweepPoint) -> str:
    return f"{point.error:.2e} ± {point.spread:.0e}" if point.spread else f"{point.error:.2e}"
