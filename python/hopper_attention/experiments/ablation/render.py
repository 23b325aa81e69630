"""The ablation as Markdown: the README's part and the page in docs/results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hopper_attention.experiments.ablation.clock import render_clock
from hopper_attention.experiments.ablation.results import (
    FULL_TFLOPS,
    RATIO_GAP,
    AblationReport,
    Won,
    ablation_targets,
    paper_ratio,
)
from hopper_attention.experiments.ablation.tables import HEADINGS, describe_problem, figures_of, problems_of
from hopper_attention.experiments.ablation.variants import FULL
from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    lines_text,
    markdown_table,
    measured_on,
    method_text,
    number,
    page,
    targets_text,
)

CONSUMER_COUNTS = ("one-consumer", "two-consumers", "three-consumers")
"""Rows that the page has and the README leaves out."""


def summary(report: AblationReport) -> str:
    """What each optimisation is worth, in a sentence each, beside the paper's figure where there is one."""
    full = report.row(FULL)
    sentences = []
    if full is not None and full.tflops:
        papers = f" (paper: {FULL_TFLOPS:.0f})" if report.is_papers else ""
        sentences.append(f"Full kernel: **{full.tflops:.0f} TFLOP/s**{papers}.")
    for row, won in report.won():
        if row.variant == FULL or math.isnan(won.ratio):
            continue
        papers = f" (paper: {1 / paper_ratio(row):.2f})" if row.paper_tflops else ""
        sentences.append(f"Full over {row.title}: **{1 / won.ratio:.3f}**{papers}.")
    return " ".join(sentences)


def render_readme(report: AblationReport, two_figures: str = "") -> str:
    """The README's results: a small table, and where the rest is.

    ``two_figures`` says why the forward report has another figure for the problem; empty if it has none.
    """
    rows = [
        [
            row.title,
            number(row.tflops or math.nan),
            number(row.outcome.ratio, 3) if isinstance(row.outcome, Won) else "failed",
            number(row.paper_tflops or math.nan),
            number(paper_ratio(row), 3),
        ]
        for row in report.rows
        if row.variant not in CONSUMER_COUNTS
    ]
    return "\n\n".join(
        [
            f"`hopper-attention ablation`, which needs a Hopper GPU: {describe_problem(report)}, inputs "
            f"{report.method.get('inputs', NOTHING)}, on one {report.machine['gpu']}, beside the paper's "
            "table 2 (H100). Every row is a kernel with the tile, stages and registers that suit it best."
            f"{run_time(report)}",
            markdown_table(["kernel", "TFLOP/s", "of full", "paper, TFLOP/s", "paper, of full"], rows),
            *([two_figures] if two_figures else []),
            "Clock, power, machine code and candidates: [docs/results/ablation.md](docs/results/ablation.md). "
            "Why the ratios differ from the paper's: [docs/kernels/ablation.md](docs/kernels/ablation.md).",
        ]
    )


def run_time(report: AblationReport) -> str:
    """How long the run took, as a sentence; empty if the report does not say."""
    if report.elapsed is None:
        return ""
    compiled = report.elapsed.compiled
    kernels = f"compiling {compiled} kernels" if compiled else "with all kernels compiled before"
    return f" The run took {report.elapsed.seconds:.0f} s, {kernels}."


def render_report(report: AblationReport, figure: str) -> list[str]:
    """The parts of a page about one report. ``figure`` is the plot's file name beside it."""
    rows = [[row.title, *figures_of(row)] for row in report.rows]
    targets = ablation_targets(report)
    parts = [
        f"## {describe_problem(report)}",
        measured_on(report.date, report.commit, report.machine),
        f"![TFLOP/s of each kernel]({figure})",
        summary(report),
        markdown_table(["kernel", *HEADINGS], rows),
        "`spread`: interquartile range of the rounds over their median. `/ full`: rate over the full kernel's in the "
        "same round, median over the rounds, ± the interquartile range of single rounds over it. That is how far one "
        "round lies from the next; how far one run lies from another, only two runs can tell (`bench --compare`). "
        "`MHz`, `W` and `hot TFLOP/s`: of the kernel alone, at the end of the time that *Method* gives it. "
        "`registers` at launch, `spills` in bytes of stack a thread, `shared` memory a CTA. `error`: of the output "
        "against float64. A row that the full kernel stands for shows the noise of the run.",
        "### Against the promises" if targets else "",
        targets_text(targets),
        render_elapsed(report),
        *render_clock(report),
        "### Which kernel stands for a row",
        render_trials(report),
    ]
    lines = problems_of(report)
    parts += ["### What fell out", lines_text(lines)] if lines else []
    return [*parts, "### Method", method_text(report.method)]


def render_trials(report: AblationReport) -> str:
    """Every candidate with its figures of the heats, the one that stands for the row in bold."""
    rows = []
    for row in report.rows:
        timed = sorted((t for t in row.trials if t.tflops), key=lambda trial: (-trial.ratio, -trial.tflops))
        chosen = row.outcome.config if isinstance(row.outcome, Won) else ""
        names = []
        for trial in timed:
            name = f"**{trial.label}**" if trial.config == chosen else trial.label
            names.append(f"{name} {trial.tflops:.0f}" + (f" ({trial.ratio:.3f})" if trial.ratio else ""))
        rows.append([row.title, ", ".join(names) or NOTHING])
    heading = "candidates, TFLOP/s of the first heat"
    if any(trial.ratio for row in report.rows for trial in row.trials):
        heading += " (of full in the second)"
    return markdown_table(["kernel", heading], rows)


def render_elapsed(report: AblationReport) -> str:
    """Where the time of a run went; empty if the report does not say."""
    if report.elapsed is None or not report.elapsed.phases:
        return ""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.elapsed.phases.items())
    return f"The run took {report.elapsed.seconds:.1f} s: {parts}."


def render_page(
    reports: Sequence[AblationReport], figures: Sequence[str], timeline: str = "", two_figures: str = ""
) -> str:
    """docs/results/ablation.md, from one report or more, each with its plot's file name.

    ``timeline`` is the file name of the page with the timelines of these kernels; empty if there is none.
    ``two_figures`` is as for :func:`render_readme`.
    """
    rows = {row.variant: row for report in reports for row in report.rows}
    parts = [
        "# Ablation",
        f"{RENDERED} `hopper-attention ablation` measures it on a Hopper GPU.",
        "What each optimisation of the forward kernel is worth, as in table 2 of the paper. A row is the kernel "
        "without an optimisation, compiled from the same source, with the tile, stages and registers that suit it "
        f"best. Where a speed-up differs from the paper's by more than {RATIO_GAP}, *Clock or cycles* below has the "
        "evidence of the run, and [the ablation explained](../kernels/ablation.md) what follows from it.",
        "\n".join(f"- **{row.title}**: {row.differs}" for row in rows.values()),
        f"What overlaps what in each of them, from clocks read in the kernel: [timeline]({timeline})."
        if timeline
        else "",
        two_figures,
    ]
    for report, figure in zip(reports, figures, strict=True):
        parts += render_report(report, figure)
    return page(parts)
