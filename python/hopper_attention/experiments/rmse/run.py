"""Error of every precision this library offers, on inputs with outliers.

The experiment of FlashAttention-3 (section 4.3, table 3): Q, K and V are drawn from
N(0, 1) + N(0, 100) * Bernoulli(0.001), so that one element in a thousand has a standard deviation of
ten, and the root mean square error of each implementation's output is taken against a float64 oracle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.rmse.methods import METHODS, PEERS, Attended, Method
from hopper_attention.experiments.rmse.oracle import compute_oracle, oracle_steps
from hopper_attention.experiments.rmse.spec import Problem, RmseExperiment, draw_problems

PAPER_NOTE = (
    "The paper does not state the shape and normalisation of its table: its 16-bit figures compare with each "
    "other, not with ours."
)


@dataclass(frozen=True)
class RmseRow:
    """One line of the table.

    ``rmse`` is the mean over the seeds and ``spread`` the standard deviation between them, 0 for one seed;
    ``by_seed`` has each. ``row_error`` is the median, over the queries, of the length of the error over the length
    of the output: what a typical query loses, however large the outputs of others are. ``paper`` is the figure
    printed in the paper's table 3, or None where it has none for these inputs; ``implementation`` says what
    computed the row; ``seconds`` is the time that took, the oracle left out.
    """

    method: str
    label: str
    group: str
    rmse: float
    spread: float
    by_seed: tuple[float, ...]
    row_error: float
    paper: float | None
    implementation: str
    seconds: float


@dataclass(frozen=True)
class LeftOut:
    """A row that this machine or these inputs do not have, and why."""

    method: str
    label: str
    reason: str


@dataclass(frozen=True)
class RmseReport:
    experiment: RmseExperiment
    rows: tuple[RmseRow, ...]
    left_out: tuple[LeftOut, ...]
    rms_by_seed: tuple[float, ...]
    """Root mean square of the oracle's output, seed by seed: what the errors are small against."""

    @property
    def oracle_rms(self) -> float:
        return statistics.fmean(self.rms_by_seed)

    def row(self, method: str) -> RmseRow:
        """The row of that name.

        Raises:
            ValueError: the report has none.
        """
        found = [row for row in self.rows if row.method == method]
        if not found:
            raise ValueError(f"method is {method!r}, allowed: {', '.join(row.method for row in self.rows)}")
        return found[0]

    def has(self, *methods: str) -> bool:
        return set(methods) <= {row.method for row in self.rows}


class Progress(Protocol):
    def __call__(self, done: int, total: int, label: str) -> None:
        """``done`` of ``total`` steps are finished and ``label`` is the next one; empty after the last."""


def ignore_progress(done: int, total: int, label: str) -> None:
    """The progress callback that shows nothing."""


@dataclass
class Measurements:
    """What is gathered for one row, seed by seed."""

    errors: list[float] = field(default_factory=list)
    row_errors: list[float] = field(default_factory=list)
    seconds: float = 0.0
    by: str = ""
    failure: str = ""

    def add(self, attended: Attended, oracle: Tensor) -> None:
        difference = attended.out.double() - oracle
        self.errors.append(root_mean_square(difference))
        self.row_errors.append(median_row_error(difference, oracle))
        self.by = attended.by


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt().item())


def median_row_error(difference: Tensor, oracle: Tensor) -> float:
    """Median over the rows of |difference| / |oracle|; a row of zeros has no error."""
    length = oracle.norm(dim=-1)
    return float((difference.norm(dim=-1) / length.masked_fill(length == 0, 1.0)).median().item())


def measure(method: Method, problem: Problem, oracle: Tensor, into: Measurements) -> None:
    """Run one row on one draw. A peer that fails loses its row; ours and the baselines must not fail."""
    p = problem
    start = time.perf_counter()
    try:
        into.add(method.run(p.q, p.k, p.v, p.causal), oracle)
    except Exception as error:
        if method.group != PEERS:
            raise
        into.failure = f"failed: {str(error).strip().partition(chr(10))[0][:200] or type(error).__name__}"
    into.seconds += time.perf_counter() - start


def run_rmse(
    experiment: RmseExperiment,
    progress: Progress = ignore_progress,
    *,
    methods: Sequence[Method] = METHODS,
    fa3_library: str = "",
) -> RmseReport:
    """Measure every method that can run here, on every seed.

    Args:
        experiment: the inputs.
        progress: is told before every step, and after the last.
        methods: the rows.
        fa3_library: path of FlashAttention-3's operators; empty: look in the installed packages.
    """
    setting = Setting(experiment.device, fa3_library)
    obstacles = {m.name: m.why_unavailable(experiment, setting) for m in methods}
    present = [m for m in methods if not obstacles[m.name]]
    total = experiment.seeds * (oracle_steps(experiment) + len(present))
    done = 0

    def oracle_step() -> None:
        nonlocal done
        done += 1
        progress(done, total, "float64 oracle")

    gathered = {m.name: Measurements() for m in present}
    rms_by_seed = []
    for problem in draw_problems(experiment):
        progress(done, total, "float64 oracle")
        oracle = compute_oracle(problem, oracle_step)
        rms_by_seed.append(root_mean_square(oracle))
        for method in present:
            progress(done, total, method.label)
            if not gathered[method.name].failure:
                measure(method, problem, oracle, gathered[method.name])
            done += 1
    progress(done, total, "")
    failures = {name: g.failure for name, g in gathered.items() if g.failure}
    reasons = {name: reason for name, reason in obstacles.items() if reason} | failures
    return RmseReport(
        experiment,
        rows=tuple(make_row(m, gathered[m.name], experiment) for m in present if m.name not in reasons),
        left_out=tuple(LeftOut(m.name, m.label, reasons[m.name]) for m in methods if m.name in reasons),
        rms_by_seed=tuple(rms_by_seed),
    )


def make_row(method: Method, measured: Measurements, experiment: RmseExperiment) -> RmseRow:
    errors = measured.errors
    return RmseRow(
        method=method.name,
        label=method.label,
        group=method.group,
        rmse=statistics.fmean(errors),
        spread=spread_of(errors),
        by_seed=tuple(errors),
        row_error=statistics.fmean(measured.row_errors),
        paper=method.paper if experiment.is_papers else None,
        implementation=measured.by,
        seconds=measured.seconds,
    )


def spread_of(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 where there is but one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def gain_over_baseline(report: RmseReport) -> float:
    """How many times the error of the full FP8 method goes into that of the FP8 baseline (paper: 2.6)."""
    return report.row("fp8-per-tensor").rmse / report.row("fp8-both").rmse


def report_as_data(report: RmseReport) -> dict[str, Any]:
    """The report as JSON's own types."""
    data = {**asdict(report), "rows": [asdict(row) for row in report.rows], "oracle_rms": report.oracle_rms}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}


def report_from_data(data: dict[str, Any]) -> RmseReport:
    """The report that :func:`report_as_data` wrote."""
    return RmseReport(
        experiment=RmseExperiment(**data["experiment"]),
        rows=tuple(RmseRow(**{**row, "by_seed": tuple(row["by_seed"])}) for row in data["rows"]),
        left_out=tuple(LeftOut(**entry) for entry in data["left_out"]),
        rms_by_seed=tuple(data["rms_by_seed"]),
    )
