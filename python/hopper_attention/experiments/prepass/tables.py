"""The FP8 pre-pass as a table for the terminal, and as a page for docs/results."""

from __future__ import annotations

from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.prepass.run import (
    COPY,
    QUANTIZE,
    QuantizeCell,
    QuantizeReport,
    quantize_targets,
)
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
    targets_text,
)
from hopper_attention.experiments.tables import FittedTable, figures, names

QUANTIZE_HEADINGS = ("quantize, us", "TB/s", "copy, us", "TB/s", "share of the copy", "error")


def quantize_row(cell: QuantizeCell) -> list[str]:
    if isinstance(cell.passes, Failed):
        return [cell.problem.name, "failed", *[NOTHING] * 4, number(cell.error, 3)]
    passes = [cell.passes[name] for name in (QUANTIZE, COPY)]
    figures = [text for p in passes for text in (f"{p.median_us:.1f}", f"{p.tb_per_s:.2f}")]
    return [cell.problem.name, *figures, f"{100 * cell.share:.0f} %", f"{cell.error:.1e}"]


def quantize_table(report: QuantizeReport) -> FittedTable:
    """The pre-pass beside the copy."""
    title = f"FP8 pre-pass · {report.head['machine']['gpu']} · {report.head['commit'][:12]}"
    columns = (*names("problem"), *figures(*QUANTIZE_HEADINGS))
    return FittedTable(title, columns, [[quantize_row(cell) for cell in report.cells]])


def quantize_problems(report: QuantizeReport) -> list[str]:
    return [f"{c.problem.name}: {c.passes.reason}" for c in report.cells if isinstance(c.passes, Failed)]


def render_quantize(report: QuantizeReport) -> str:
    """docs/results/prepass.md."""
    subject = (
        "`quantize_qkv` reads q, k and v in 16 bits, rotates Q and K, and writes e4m3 and its scales; the copy beside "
        "it, in the same interleaved rounds, reads and writes the same tensors. TB/s are of the bytes that each moves. "
        "`error`: of the worst of q, k and v against the rotated inputs."
    )
    rows = [[f"`{row[0]}`", *row[1:]] for row in map(quantize_row, report.cells)]
    parts = [
        "# The FP8 pre-pass",
        RENDERED,
        measured_on(report.head["date"], report.head["commit"], report.head["machine"]),
        subject,
    ]
    parts.append(markdown_table(["problem", *QUANTIZE_HEADINGS], rows))
    parts.append(section("Targets", targets_text(quantize_targets(report))))
    parts.append(section("What did not run", lines_text(quantize_problems(report))))
    return page([*parts, "## Method", method_text(report.head["method"])])
