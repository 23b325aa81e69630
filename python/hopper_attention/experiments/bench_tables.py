"""Latency, scaling and quantization as tables: for the terminal, and as pages for docs/results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hopper_attention.experiments.bench_quantize import (
    COPY,
    QUANTIZE,
    QuantizeCell,
    QuantizeReport,
    quantize_targets,
)
from hopper_attention.experiments.bench_render import (
    LATENCY_HEADINGS,
    NOTHING,
    latency_rows,
    markdown_table,
    number,
    short_length,
)
from hopper_attention.experiments.bench_results import Failed
from hopper_attention.experiments.bench_scaling import Scaled, ScalingCell, ScalingReport

RENDERED = "Rendered by `python benchmarks/render.py` from `benchmarks/results/`; do not edit by hand."

QUANTIZE_HEADINGS = ("quantize, us", "TB/s", "copy, us", "TB/s", "share of the copy", "error")


def text_table(title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first columns are aligned left and whose others are aligned right."""
    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


# Latency


def latency_table(latency: Mapping[str, Any]) -> Table:
    """Microseconds a call, and below it the first call of a fresh process."""
    title = f"Latency, us a call · {latency['machine']['gpu']} · {latency['commit'][:12]}"
    rows = latency_rows(latency)
    for state, entry in latency["first_call_s"].items():
        rows.append([f"first call, {state}", "ours", f"{entry['median']:.2f} s", *[NOTHING] * 3])
    return text_table(title, ("problem", "peer"), LATENCY_HEADINGS, rows)


# Scaling


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
    return [f"{length_text(problem.seqlen_q)}, batch {problem.batch}", *figures]


def length_text(seqlen: int) -> str:
    """512, 16k, 1M."""
    return f"{seqlen // 2**20}M" if seqlen % 2**20 == 0 else short_length(seqlen)


def scaling_series(report: ScalingReport) -> dict[str, list[ScalingCell]]:
    """The cells that were measured, by series."""
    found = {name: [report.cell(p) for p in problems] for name, problems in report.spec.series().items()}
    return {name: [cell for cell in cells if cell is not None] for name, cells in found.items()}


def scaling_table(report: ScalingReport) -> Table:
    """Every length of both series."""
    title = f"Scaling · {report.head['machine']['gpu']} · {report.head['commit'][:12]}"
    rows = [scaling_row(cell, report) for cells in scaling_series(report).values() for cell in cells]
    return text_table(title, ("seqlen",), scaling_headings(report), rows)


def scaling_problems(report: ScalingReport) -> list[str]:
    """What did not run and why, a line each."""
    infos = report.head["peers"].items()
    lines = [f"{name}: {info['unavailable']}" for name, info in infos if info["unavailable"]]
    for cell in report.cells:
        for name, result in cell.peers.items():
            if isinstance(result, Failed):
                lines.append(f"{name} on {cell.problem.name}: {result.reason}")
    return lines


def render_scaling(report: ScalingReport, figure: str) -> str:
    """docs/results/scaling.md. ``figure`` is the plot's file name beside it."""
    spec = report.spec
    mask = "causal" if spec.causal else "not causal"
    subject = (
        f"{spec.dtype}, {spec.heads} heads of {spec.head_dim}, {mask}. `memory` is what a call adds to its inputs "
        "at its peak, its output included."
    )
    plot = f"![time and memory]({figure})"
    parts = ["# Scaling with the sequence", RENDERED, measured_on(report.head), subject, plot]
    for name, cells in scaling_series(report).items():
        rows = [scaling_row(cell, report) for cell in cells]
        parts += [f"## {name}", markdown_table(["seqlen", *scaling_headings(report)], rows)]
    lines = scaling_problems(report)
    parts += ["## What did not run", "\n".join(f"- {line}" for line in lines)] if lines else []
    return page([*parts, *method_of(report.head)])


# Quantization


def quantize_row(cell: QuantizeCell) -> list[str]:
    if isinstance(cell.passes, Failed):
        return [cell.problem.name, "failed", *[NOTHING] * 4, number(cell.error, 3)]
    passes = [cell.passes[name] for name in (QUANTIZE, COPY)]
    figures = [text for p in passes for text in (f"{p.median_us:.1f}", f"{p.tb_per_s:.2f}")]
    return [cell.problem.name, *figures, f"{100 * cell.share:.0f} %", f"{cell.error:.1e}"]


def quantize_table(report: QuantizeReport) -> Table:
    """The pre-pass beside the copy."""
    title = f"FP8 pre-pass · {report.head['machine']['gpu']} · {report.head['commit'][:12]}"
    return text_table(title, ("problem",), QUANTIZE_HEADINGS, [quantize_row(cell) for cell in report.cells])


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
    parts = ["# The FP8 pre-pass", RENDERED, measured_on(report.head), subject]
    parts.append(markdown_table(["problem", *QUANTIZE_HEADINGS], rows))
    targets = [[t.what, t.required, t.measured, "yes" if t.met else "no"] for t in quantize_targets(report)]
    parts += (
        ["## Targets", markdown_table(["what", "required", "measured", "met"], targets)] if targets else []
    )
    lines = quantize_problems(report)
    parts += ["## What did not run", "\n".join(f"- {line}" for line in lines)] if lines else []
    return page([*parts, *method_of(report.head)])


# Pages


def measured_on(head: Mapping[str, Any]) -> str:
    """When, at which commit and on what a report was measured."""
    machine = ", ".join(f"{key} {value}" for key, value in head["machine"].items() if value != "")
    return f"Measured {head['date'][:10]} at commit `{head['commit'][:12]}` on {machine}."


def method_of(head: Mapping[str, Any]) -> list[str]:
    return ["## Method", "\n".join(f"- {key}: {value}" for key, value in head["method"].items())]


def page(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
