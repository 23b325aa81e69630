"""The accuracy experiment as Markdown: the README's table, and a page with every row and the sweeps over lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hopper_attention.experiments.bench.render import measured_at
from hopper_attention.experiments.reports import NOTHING, RENDERED, markdown_table, page, targets_text
from hopper_attention.experiments.rmse.methods import DEFAULT, EMULATION
from hopper_attention.experiments.rmse.run import PAPER_NOTE, RmseReport, RmseRow, report_from_data
from hopper_attention.experiments.rmse.spec import RmseExperiment, describe_heads, describe_inputs
from hopper_attention.experiments.rmse.sweep import SweepReport, describe_sweep, sweep_from_data
from hopper_attention.experiments.rmse.targets import fp8_targets, sweep_targets

FORMULAS = {
    "outliers": "N(0, 1) + N(0, 100) · Bernoulli(0.001)",
    "offset": "N(1, 1)",
    "normal": "N(0, 1)",
}
"""The distributions that a formula says better than their name."""

PAGE = "accuracy.md"
SWEEPS = ("lengths", "lengths_offset")
"""Where a report has its sweeps over the number of keys."""

README_PEERS = ("fa3-fp8-head", "fa3-fp8-head-rotated", "cudnn-fp8", "cudnn-fp8-rotated")
"""Rows of other libraries that the README shows, beside those that the paper has too."""

HEADINGS = ("method", "RMSE", "± seeds", "paper", "median query", "computed by")


def distribution(experiment: RmseExperiment) -> str:
    """The inputs as a formula where there is one, else in words."""
    return FORMULAS.get(experiment.distribution, describe_inputs(experiment))


def figures_of(row: RmseRow) -> list[str]:
    """A row's cells, in the order of HEADINGS."""
    paper = f"{row.paper:.1e}" if row.paper is not None else NOTHING
    median = f"{100 * row.row_error:.2g} %"
    return [row.label, f"{row.rmse:.2e}", f"{row.spread:.0e}", paper, median, row.implementation]


def rows_table(rows: Sequence[RmseRow]) -> str:
    return markdown_table(HEADINGS, [figures_of(row) for row in rows])


def describe(report: RmseReport) -> str:
    """Inputs, shape and what the columns are, in three sentences."""
    e = report.experiment
    return (
        f"Inputs: {distribution(e)} in {e.dtype}, {e.seqlen_q} queries and {e.seqlen} keys, {describe_heads(e)}, mean "
        f"of {e.seeds} seeds; root mean square of the output {report.oracle_rms:.2f}. `RMSE` is against float64, "
        "`± seeds` its standard deviation between seeds. `median query`: |error| over |output| of one query, the "
        "median over all."
    )


def render_readme(rmse: Mapping[str, Any]) -> str:
    """The rows that the paper has too, and those of other libraries."""
    report = report_from_data(rmse["fp8"])
    rows = [row for row in report.rows if row.paper is not None or row.method in README_PEERS]
    ours = report.row("fp8-both").rmse
    gain = report.row("fp8-per-tensor").rmse / ours
    default = report.row(DEFAULT).rmse
    sentence = (
        f"Block scales with rotation have **{gain:.1f} times** less error than one scale a tensor (the paper: 2.6 "
        f"times). The default takes the mean out of V too: {default:.2e}. {PAPER_NOTE}"
    )
    path = f"docs/results/{PAGE}"
    link = f"Emulations, other lengths and inputs: [{path}]({path})."
    return "\n\n".join([describe(report), rows_table(rows), f"{sentence} {link}"])


def render_sweep(sweep: SweepReport) -> str:
    """Error over the root mean square of the output: a line a number of keys, a column a row of the table."""
    labels = {point.method: point.label for point in sweep.points}
    rows = []
    for length in sweep.sweep.lengths:
        errors = {point.method: point.error for point in sweep.points if point.seqlen == length}
        rows.append([str(length), *(f"{100 * errors[name]:.3g} %" for name in labels)])
    return markdown_table(["keys", *labels.values()], rows)


def render_page(rmse: Mapping[str, Any]) -> str:
    """docs/results/accuracy.md: every row, the promises, and the error against the number of keys."""
    report = report_from_data(rmse["fp8"])
    sweeps = [sweep_from_data(rmse[key]) for key in SWEEPS if key in rmse]
    targets = fp8_targets(report) + [t for sweep in sweeps[:1] for t in sweep_targets(sweep)]
    machine = ", ".join(f"{key} {value}" for key, value in rmse["machine"].items() if value != "")
    emulated = [row for row in report.rows if row.group == EMULATION]
    parts = [
        "# Accuracy of FP8: results",
        f"{RENDERED} `python benchmarks/rmse.py` measures it; `hopper-attention rmse` is the same table on any "
        "machine.",
        f"Measured {rmse['date'][:10]}{measured_at(rmse).removeprefix(', measured')} on {machine}.",
        describe(report),
        rows_table([row for row in report.rows if row.group != EMULATION]),
        PAPER_NOTE,
        "## Emulated" if emulated else "",
        "The same computation in PyTorch, where every sum has float32 or float64." if emulated else "",
        rows_table(emulated) if emulated else "",
        "## Against the promises",
        targets_text(targets),
        "## Error against the number of keys" if sweeps else "",
    ]
    for sweep in sweeps:
        experiment = sweep.sweep.experiment
        parts += [
            f"### Inputs {distribution(experiment)}",
            f"{describe_sweep(sweep.sweep)}. Error over the root mean square of the output.",
            render_sweep(sweep),
        ]
    return page(parts)
