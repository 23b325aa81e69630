"""What the ablation says of a row, and its tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hopper_attention.experiments.ablation.code import MachineCode
from hopper_attention.experiments.ablation.results import AblationReport, Row, Won, paper_ratio
from hopper_attention.experiments.ablation.run import Inspected
from hopper_attention.experiments.ablation.variants import VARIANTS
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.reports import NOTHING, number
from hopper_attention.experiments.tables import Column, FittedTable, figures, texts


def ablation_table(report: AblationReport) -> FittedTable:
    """Every row with its figures, and which candidate stands for it."""
    title = f"Ablation, {describe_problem(report)} · {report.machine['gpu']} · {report.commit[:12]}"
    columns = (
        *texts("kernel"),
        *(Column(heading, is_spare=heading not in ESSENTIAL) for heading in HEADINGS),
        *texts("changed"),
    )
    rows = []
    for row in report.rows:
        label = row.outcome.label if isinstance(row.outcome, Won) else row.outcome.reason
        cells = [f"[red]{cell}[/red]" if cell == "failed" else cell for cell in figures_of(row)]
        rows.append([row.title, *cells, label])
    return FittedTable(title, columns, [rows])


def code_table(inspected: Sequence[Inspected]) -> FittedTable:
    """Machine code of every candidate."""
    counts = figures("registers", "stack", "shared", "instructions", "WGMMA", "MUFU.EX2", "MUFU", "STL, LDL")
    groups: dict[str, list[list[str]]] = {}
    for entry in inspected:
        rows = groups.setdefault(entry.variant, [])
        title = "" if rows else VARIANTS[entry.variant].title
        if isinstance(entry.code, Failed):
            rows.append([title, f"[yellow]{entry.code.reason}[/yellow]", *[NOTHING] * len(counts)])
        else:
            rows.append([title, entry.label, *code_cells(entry.code)])
    return FittedTable("Compiled for sm_90a", (*texts("kernel", "changed"), *counts), list(groups.values()))


def code_cells(code: MachineCode) -> list[str]:
    groups = ("all", "wgmma", "exp2", "mufu", "spill")
    counts = [str(code.instructions.get(group, NOTHING)) for group in groups]
    return [str(code.registers), str(code.stack_bytes), f"{code.shared_bytes / 1024:.1f} KiB", *counts]


HEADINGS = (
    "TFLOP/s", "spread", "/ full", "paper", "paper, / full", "MHz", "W", "hot TFLOP/s",
    "registers", "spills", "shared", "error",
)  # fmt: skip
ESSENTIAL = ("TFLOP/s", "/ full", "paper, / full", "registers", "spills")
"""Headings that a narrow terminal shows too."""


def percent(share: float) -> str:
    return NOTHING if math.isnan(share) else f"{100 * share:.1f} %"


def figures_of(row: Row) -> list[str]:
    """A row's cells, in the order of HEADINGS."""
    papers = [number(row.paper_tflops or math.nan), number(paper_ratio(row), 3)]
    if isinstance(row.outcome, Failed):
        return ["failed", *[NOTHING] * 2, *papers, *[NOTHING] * 7]
    won = row.outcome
    return [
        f"{won.measured.tflops:.1f}",
        percent(won.measured.spread),
        ratio_text(won),
        *papers,
        number(won.soak.clock_mhz),
        number(won.soak.power_w),
        number(won.soak.tflops, 1),
        str(won.code.registers),
        str(won.code.stack_bytes),
        f"{won.code.shared_bytes / 1024:.0f} KiB",
        f"{won.measured.error:.1e}",
    ]


def ratio_text(won: Won) -> str:
    return NOTHING if math.isnan(won.ratio) else f"{won.ratio:.3f} ± {100 * won.ratio_spread:.1f} %"


def describe_problem(report: AblationReport) -> str:
    """The problem and its precision, such as ``b4 s8448 h16 d128, not causal, float16``."""
    p = report.problem
    sizes = " ".join(p.name.split("-")[1:-1])
    return f"{sizes}, {'causal' if p.causal else 'not causal'}, {report.precision}"


def problems_of(report: AblationReport) -> list[str]:
    """Rows without figures and candidates that fell out, a line each with the reason."""
    lines = []
    for row in report.rows:
        if isinstance(row.outcome, Failed):
            lines.append(f"{row.title}: {row.outcome.reason}")
        lines += [
            f"{row.title}, candidate {trial.label}: {trial.reason}"
            for trial in row.trials
            if trial.reason and not (isinstance(row.outcome, Failed) and trial.reason in row.outcome.reason)
        ]
    return lines
