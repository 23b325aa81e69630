"""What an ablation measured, as data, and its JSON. Nothing here needs torch or a GPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hopper_attention.experiments.ablation.code import MachineCode
from hopper_attention.experiments.ablation.variants import FULL, VARIANTS
from hopper_attention.experiments.bench.results import Failed, Measured
from hopper_attention.experiments.bench.spec import ABLATION, LONG_DTYPES, Problem, parse_problem
from hopper_attention.experiments.reports import SCHEMA, Target, dump_rows, load_figures, rounded

KIND = "ablation"
FP8 = "fp8"
PRECISIONS = ("float16", "bfloat16", FP8)
FP8_SOURCE = "bfloat16"
"""What FP8 inputs are quantized from, as in the FP8 benchmark."""

PAPER_SIZES = "b4-s8448-h16-d128"
FULL_TFLOPS = 661.0
SPREAD = 0.02
"""Allowed spread of a ratio."""

WHOLE_RUN_S = 60.0
CACHED_RUN_S = 20.0
"""Seconds that a run may take, with kernels to compile and with all of them in the cache."""

RATIO_GAP = 0.05
"""A speed-up that is further from the paper's wants an explanation."""


def ablation_problem(sizes: str, precision: str, causal: bool) -> Problem:
    """A problem from sizes such as ``b4-s8448-h16-d128``; dtype and mask come separately.

    Raises:
        ValueError: the sizes cannot be read.
    """
    dtype = FP8_SOURCE if precision == FP8 else precision
    try:
        return parse_problem(f"{LONG_DTYPES[dtype]}-{sizes}-{'causal' if causal else 'full'}")
    except ValueError:
        raise ValueError(
            f"shape is {sizes!r}, allowed: sizes such as {PAPER_SIZES} (sk, hk, dv optional); the dtype and the mask "
            "have options of their own"
        ) from None


@dataclass(frozen=True)
class Trial:
    """A candidate for a row: its TFLOP/s in the first heat, or 0.0 and the reason why it has none.

    ``ratio`` is its rate over the full kernel's in the second heat; 0.0 if it was not in that.
    """

    config: str
    label: str
    tflops: float
    reason: str = ""
    ratio: float = 0.0


@dataclass(frozen=True)
class Soak:
    """A kernel alone on the GPU until the power settles: TFLOP/s, SM clock (MHz) and board power (W) at the end."""

    seconds: float
    tflops: float
    clock_mhz: float | None
    power_w: float | None


@dataclass(frozen=True)
class Won:
    """The candidate that stands for a row, and what it measured.

    ``ratio`` is its rate over the full kernel's, the median over rounds of the two in the same round, and
    ``ratio_spread`` the interquartile range of that over the median. It is of single rounds, so it says how far the
    ratio of one round lies from the next, and not how far the median of one run lies from that of another.
    """

    config: str
    label: str
    measured: Measured
    ratio: float
    ratio_spread: float
    soak: Soak
    code: MachineCode


@dataclass(frozen=True)
class Row:
    """A row of the ablation. ``paper_tflops`` is 0.0 where the paper has no figure for it."""

    variant: str
    title: str
    differs: str
    paper_tflops: float
    outcome: Won | Failed
    trials: tuple[Trial, ...]

    @property
    def tflops(self) -> float:
        return self.outcome.measured.tflops if isinstance(self.outcome, Won) else 0.0


@dataclass(frozen=True)
class Elapsed:
    """Wall-clock seconds of a run, from before the first compilation on, and the number of kernels it compiled.

    ``phases`` are the seconds of its parts, in their order; empty in reports from before they were recorded.
    """

    seconds: float
    compiled: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AblationReport:
    """One run on one machine. ``precision`` is one of PRECISIONS; the problem has the dtype of the inputs.

    ``elapsed`` is None in reports from before it was recorded.
    """

    machine: dict[str, Any]
    commit: str
    date: str
    method: dict[str, Any]
    problem: Problem
    precision: str
    rows: tuple[Row, ...]
    elapsed: Elapsed | None = None

    @property
    def is_papers(self) -> bool:
        """Whether the paper's figures are of this problem."""
        return self.precision == "float16" and self.problem == ABLATION

    @property
    def slug(self) -> str:
        """What a file of this report is called after: ``ablation`` for the paper's problem, else with its name."""
        if self.is_papers:
            return KIND
        name = self.problem.name.replace(LONG_DTYPES[self.problem.dtype], self.precision, 1)
        return f"{KIND}_{name.replace('-', '_')}"

    def row(self, variant: str) -> Row | None:
        return next((row for row in self.rows if row.variant == variant), None)

    def won(self) -> list[tuple[Row, Won]]:
        """The rows that have figures."""
        return [(row, row.outcome) for row in self.rows if isinstance(row.outcome, Won)]


def paper_ratio(row: Row) -> float:
    """The paper's figure of a row over its figure of the full kernel; NaN where it has none."""
    return row.paper_tflops / FULL_TFLOPS if row.paper_tflops else math.nan


def ablation_targets(report: AblationReport) -> list[Target]:
    """What the ablation promises, as far as this report can answer."""
    targets = []
    full = report.row(FULL)
    if report.is_papers and full is not None and full.tflops:
        met = full.tflops >= FULL_TFLOPS
        targets.append(Target("full", f">= {FULL_TFLOPS:.0f} TFLOP/s", f"{full.tflops:.0f} TFLOP/s", met))
    compared = [(row, won) for row, won in report.won() if row.variant != FULL and not math.isnan(won.ratio)]
    if report.is_papers:
        for row, won in compared:
            if row.paper_tflops:
                ours, papers = 1 / won.ratio, 1 / paper_ratio(row)
                within = abs(ours - papers) <= RATIO_GAP
                required = f"{papers:.2f} ± {RATIO_GAP}, or explained"
                targets.append(Target(f"full over {row.title}", required, f"{ours:.3f}", within))
        targets += alone_targets(report)
    if compared:
        row, won = max(compared, key=lambda pair: pair[1].ratio_spread)
        worst = f"{100 * won.ratio_spread:.1f} % ({row.title})"
        met = won.ratio_spread <= SPREAD
        targets.append(Target("spread of each ratio to full", f"<= {100 * SPREAD:.0f} %", worst, met))
    return targets + elapsed_targets(report)


def alone_targets(report: AblationReport) -> list[Target]:
    """The paper's speed-ups once more, each kernel alone at the clock that its own power allows."""
    full, targets = report.row(FULL), []
    for row, won in report.won():
        if full is not None and isinstance(full.outcome, Won) and row.variant != FULL and row.paper_tflops:
            ours, papers = full.outcome.soak.tflops / won.soak.tflops, 1 / paper_ratio(row)
            within = abs(ours - papers) <= RATIO_GAP
            required = f"{papers:.2f} ± {RATIO_GAP}"
            targets.append(Target(f"full over {row.title}, each alone", required, f"{ours:.3f}", within))
    return targets


def elapsed_targets(report: AblationReport) -> list[Target]:
    """What is promised of the time of a run of all rows."""
    if report.elapsed is None or len(report.rows) < len(VARIANTS):
        return []
    seconds, compiled = report.elapsed.seconds, report.elapsed.compiled
    what = f"whole run, {compiled} kernels compiled" if compiled else "whole run, all kernels cached"
    allowed = WHOLE_RUN_S if compiled else CACHED_RUN_S
    return [Target(what, f"<= {allowed:.0f} s", f"{seconds:.1f} s", seconds <= allowed)]


# JSON


def row_record(row: Row) -> dict[str, Any]:
    return rounded(
        {**asdict(row), "ok": isinstance(row.outcome, Won), "trials": [asdict(t) for t in row.trials]}
    )


def read_number(value: float | None) -> float:
    return math.nan if value is None else value


def read_row(record: dict[str, Any]) -> Row:
    outcome = record["outcome"]
    kept = {key: record[key] for key in ("variant", "title", "differs", "paper_tflops")}
    return Row(
        **kept,
        outcome=read_won(outcome) if record["ok"] else Failed(**outcome),
        trials=tuple(Trial(**trial) for trial in record["trials"]),
    )


def read_won(record: dict[str, Any]) -> Won:
    return Won(
        config=record["config"],
        label=record["label"],
        measured=Measured(**record["measured"]),
        ratio=read_number(record["ratio"]),
        ratio_spread=read_number(record["ratio_spread"]),
        soak=Soak(**record["soak"]),
        code=MachineCode(**record["code"]),
    )


def dump_ablation(report: AblationReport) -> str:
    """JSON text of a report, one line a row."""
    head = {
        "schema": SCHEMA,
        "kind": KIND,
        "date": report.date,
        "commit": report.commit,
        "machine": report.machine,
        "method": report.method,
        "problem": asdict(report.problem),
        "precision": report.precision,
        "elapsed": None if report.elapsed is None else rounded(asdict(report.elapsed)),
    }
    return dump_rows(head, "rows", [row_record(row) for row in report.rows])


def load_ablation(text: str) -> AblationReport:
    """Read what :func:`dump_ablation` wrote.

    Raises:
        ValueError: the text is not an ablation report of this schema.
    """
    data = load_figures(text, KIND)
    return AblationReport(
        machine=data["machine"],
        commit=data["commit"],
        date=data["date"],
        method=data["method"],
        problem=Problem(**data["problem"]),
        precision=data["precision"],
        rows=tuple(read_row(record) for record in data["rows"]),
        elapsed=Elapsed(**data["elapsed"]) if data.get("elapsed") else None,
    )
