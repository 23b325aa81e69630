"""The ablation: the full kernel against kernels without its optimisations, each tuned for what it has left.

Candidates of every row are compiled, checked and timed briefly in one interleaved run. The fastest of each row then
take turns in longer rounds, each between two measurements of the full kernel: its ratio is to the mean of those two,
which met the same clock. Last, each runs alone, one right after the other, for its clock and power.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from hopper.config import ForwardConfig, select_forward_config
from hopper_attention.backends import target_of, why_not_hopper
from hopper_attention.compile_cache import Compilation
from hopper_attention.experiments.ablation_code import MachineCode, inspect_config
from hopper_attention.experiments.ablation_results import (
    FP8,
    AblationReport,
    Elapsed,
    Row,
    Soak,
    Trial,
    Won,
)
from hopper_attention.experiments.ablation_variants import (
    FULL,
    Field,
    Variant,
    gather,
)
from hopper_attention.experiments.bench import (
    Bench,
    Entry,
    Played,
    Progress,
    ignore_progress,
    open_bench,
)
from hopper_attention.experiments.bench_fp8_peers import shipped_fp8_config
from hopper_attention.experiments.bench_machine import (
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.bench_peers import Setting
from hopper_attention.experiments.bench_results import Cell, Failed, Measured, Problem, relative_spread
from hopper_attention.experiments.bench_suites import FORWARD, SUITES
from hopper_attention.experiments.bench_timing import Budget, Effort, Interval, Turn, beside
from hopper_attention.experiments.bench_variants import compile_missing, label, peers_of, variant_peer

SOAK_STEP_S = 0.05
SETTLED = 0.75
"""Share of a soak after which clock and power are read: the driver averages power over about a second."""


@dataclass(frozen=True)
class Ablation:
    """What to run: a problem, its precision (one of PRECISIONS), the rows, and how long to measure."""

    problem: Problem
    precision: str
    variants: tuple[Variant, ...]
    trial: Effort = field(default_factory=lambda: Effort(0.004, 3, 5, 30.0))
    final: Effort = field(default_factory=lambda: Effort(0.005, 7, 21, 10.0))
    soak_s: float = 1.0

    @property
    def shipped(self) -> ForwardConfig:
        """The config that serves the problem."""
        p = self.problem
        if self.precision == FP8:
            return shipped_fp8_config(p)
        return select_forward_config(p.dtype, p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)

    def fields(self) -> list[Field]:
        """Who competes for each row."""
        return [gather(variant, self.shipped) for variant in self.variants]


def check_can_run(device: str) -> None:
    """Refuse a machine on which no kernel of the ablation runs.

    Raises:
        ValueError: the device is not a Hopper GPU, or packages are missing.
    """
    blocked = why_not_hopper(target_of(torch.device(device)))
    if blocked:
        raise ValueError(
            f"device is {device!r}, allowed for timing kernels: a Hopper GPU ({blocked}); with --compile-only they are "
            "compiled and inspected without one"
        )


def all_configs(fields: Sequence[Field]) -> list[ForwardConfig]:
    """Every config of some rows, each once."""
    return list({config.name: config for field in fields for config in field.configs}.values())


def run_ablation(
    ablation: Ablation,
    setting: Setting,
    *,
    jobs: int,
    commit: str = "",
    progress: Progress = ignore_progress,
    on_compiled: Callable[[Compilation], None] = lambda compilation: None,
) -> AblationReport:
    """Compile, choose, measure; returns the report.

    Args:
        ablation: what to run.
        setting: the device.
        jobs: processes that compile.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line as each phase starts.
        on_compiled: called with each kernel that had to be compiled.

    Raises:
        CellLostError: a kernel hangs or broke the CUDA context.
    """
    start, compiled = time.perf_counter(), 0

    def count(compilation: Compilation) -> None:
        nonlocal compiled
        compiled += 1
        on_compiled(compilation)

    fields = ablation.fields()
    configs = all_configs(fields)
    progress(f"compiling what is missing of {len(configs)} kernels")
    failures = compile_missing(configs, jobs, count)
    gauge = find_gauge(setting.device)
    machine = describe_machine(setting.device, gauge)
    suite = SUITES.get(ablation.precision, FORWARD)
    with open_bench(setting, ablation.trial, gauge, machine.get("l2_bytes", 0), suite) as bench:
        progress(f"choosing among {len(configs) - len(failures)} kernels")
        built = [config for config in configs if config.name not in failures]
        tried = bench.run_cell(ablation.problem, peers_of(built), 1)
        gc.collect()
        progress("measuring the rows")
        rows = measure_rows(ablation, bench, fields, tried, failures, progress)
    return AblationReport(
        machine=machine,
        commit=commit or find_commit(repository_root()),
        date=today(),
        method=describe_method(ablation),
        problem=ablation.problem,
        precision=ablation.precision,
        rows=tuple(rows),
        elapsed=Elapsed(time.perf_counter() - start, compiled),
    )


def describe_method(ablation: Ablation) -> dict[str, object]:
    """How the figures came about, for the report."""
    return {
        "flops": "4*b*h*sq*sk*d, halved if causal",
        "inputs": "N(0, 1)",
        "candidates": f"each checked against float64, then timed in {ablation.trial.max_rounds} interleaved rounds; "
        "the fastest stands for its row",
        "rows": "median over interleaved rounds of device time a launch, batches back to back",
        "ratio": "to the mean of the full kernel's measurements just before and just after, median over rounds",
        "spread of a ratio": "interquartile range of the ratios of single rounds over their median",
        "clock and power": f"of the kernel alone, at the end of {ablation.soak_s:g} s of launches, which follow those "
        "of another row without a pause",
        "machine code": "of the compiled object that was timed",
        "trial": asdict(ablation.trial),
        "final": asdict(ablation.final),
    }


def measure_rows(
    ablation: Ablation,
    bench: Bench,
    fields: Sequence[Field],
    tried: Cell,
    failures: dict[str, str],
    progress: Progress,
) -> list[Row]:
    """Interleaved rounds and a soak of the candidate that won each row."""
    shipped = ablation.shipped
    trials = {f.variant.name: hold_trials(f, tried, failures, shipped) for f in fields}
    winners = {f.variant.name: pick(f, trials[f.variant.name]) for f in fields}
    chosen = {name: config for name, found in winners.items() for config in found}
    budget = Budget(ablation.final.budget_s)
    final = replace(bench, effort=ablation.final, budget=budget, order=beside(FULL))
    peers = [variant_peer(name, config) for name, config in chosen.items()]
    played = final.play(ablation.problem, peers, 1)
    soaks = run_soaks(ablation, final, played, progress)
    rows = []
    for f in fields:
        name, variant = f.variant.name, f.variant
        outcome: Won | Failed = Failed(why_nobody(f, trials[name]))
        if name in chosen:
            outcome = conclude(ablation, played, soaks, name, chosen[name])
        figures = variant.name, variant.title, variant.differs, papers_figure(ablation, variant)
        rows.append(Row(*figures, outcome, trials[name]))
    return rows


def papers_figure(ablation: Ablation, variant: Variant) -> float:
    """The paper's figure of a row, 0.0 where it is of another problem."""
    empty = AblationReport({}, "", "", {}, ablation.problem, ablation.precision, ())
    return variant.paper_tflops if empty.is_papers else 0.0


def hold_trials(
    field: Field, tried: Cell, failures: dict[str, str], shipped: ForwardConfig
) -> tuple[Trial, ...]:
    """What became of each candidate for a row."""
    found = []
    for config in field.configs:
        result = tried.peers.get(config.name, Failed(f"does not compile: {failures.get(config.name, '')}"))
        name = label(config, shipped)
        if isinstance(result, Measured):
            found.append(Trial(config.name, name, result.tflops))
        else:
            found.append(Trial(config.name, name, 0.0, result.reason))
    found += [Trial(name, name, 0.0, reason) for name, reason in field.left_out.items()]
    return tuple(found)


def pick(field: Field, trials: Sequence[Trial]) -> tuple[ForwardConfig, ...]:
    """The fastest candidate of a row; none if none has a figure."""
    best = max(trials, key=lambda trial: trial.tflops, default=Trial("", "", 0.0))
    return tuple(config for config in field.configs if best.tflops and config.name == best.config)


def why_nobody(field: Field, trials: Sequence[Trial]) -> str:
    """Why a row has no figure."""
    return field.reason or next((trial.reason for trial in trials if trial.reason), "no candidates")


def run_soaks(ablation: Ablation, bench: Bench, played: Played, progress: Progress) -> dict[str, Soak]:
    """The soak of each row that was timed. Nothing is done between two of them: a GPU that has idled starts with a
    higher clock, and the power that the driver averages is too low for a second."""
    titles, soaks = {variant.name: variant.title for variant in ablation.variants}, {}
    for name, turn in played.turns.items():
        progress(f"clock and power: {titles[name]}")
        soaks[name] = soak(bench, ablation.problem, played.entries[name], turn, ablation.soak_s)
    return soaks


def conclude(
    ablation: Ablation, played: Played, soaks: Mapping[str, Soak], name: str, config: ForwardConfig
) -> Won | Failed:
    """The figures of a row, once its rounds and its soak are played."""
    result = played.cell.peers[name]
    if isinstance(result, Failed):
        return result
    full = played.intervals.get(FULL, ())
    ratio, spread = (1.0, 0.0) if name == FULL else paired_ratio(full, played.intervals[name])
    return Won(
        config=config.name,
        label=label(config, ablation.shipped),
        measured=result,
        ratio=ratio,
        ratio_spread=spread,
        soak=soaks[name],
        code=inspect_config(config),
    )


def paired_ratio(full: Sequence[Interval], row: Sequence[Interval]) -> tuple[float, float]:
    """Rate of a row over the full kernel's: median of the ratios of each round, and their interquartile range over
    it. The full kernel's time is the mean of its measurements just before and just after. NaN without any."""
    if not full or not row:
        return math.nan, math.nan
    ratios = [statistics.fmean(i.seconds for i in neighbours(full, each)) / each.seconds for each in row]
    return statistics.median(ratios), relative_spread(ratios)


def neighbours(full: Sequence[Interval], interval: Interval) -> list[Interval]:
    """The last of ``full`` that ended before ``interval`` and the first that began after it, as far as there are."""
    before = [each for each in full if each.stop <= interval.start]
    after = [each for each in full if each.start >= interval.stop]
    return before[-1:] + after[:1]


def soak(bench: Bench, problem: Problem, entry: Entry, turn: Turn, seconds: float) -> Soak:
    """Run one kernel alone for so long; its rate, clock and power in the last part."""
    launch_s = (turn.cost_s - turn.spin_s) / (turn.repeats + 1)
    # What its host is slower than keeps its spin, and with it the number of launches that fit behind that.
    steps = math.ceil(SOAK_STEP_S / launch_s) if turn.spin_s == 0 else turn.repeats
    long_turn = replace(turn, repeats=max(1, steps))
    start = time.perf_counter()
    intervals = [bench.take_turn(entry, long_turn)]
    while time.perf_counter() - start < seconds:
        intervals.append(bench.take_turn(entry, long_turn))
    settled = [i for i in intervals if i.start - start >= SETTLED * seconds] or intervals[-1:]
    clock, power = bench.sampler.window((interval.start, interval.stop) for interval in settled)
    median = statistics.median(interval.seconds for interval in settled)
    return Soak(seconds, problem.flops / median * 1e-12, clock, power)


@dataclass(frozen=True)
class Inspected:
    """A candidate of a row in machine code, or why there is none."""

    variant: str
    config: str
    label: str
    code: MachineCode | Failed


def inspect_variants(
    ablation: Ablation, jobs: int, on_compiled: Callable[[Compilation], None] = lambda compilation: None
) -> list[Inspected]:
    """Compile every candidate of every row and read its machine code. Needs no GPU."""
    fields, shipped = ablation.fields(), ablation.shipped
    failures = compile_missing(all_configs(fields), jobs, on_compiled)
    found = []
    for f in fields:
        if f.reason:
            found.append(Inspected(f.variant.name, "", "", Failed(f.reason)))
        for config in f.configs:
            error = failures.get(config.name, "")
            code = Failed(f"does not compile: {error}") if error else inspect_config(config)
            found.append(Inspected(f.variant.name, config.name, label(config, shipped), code))
    return found


def inspected_as_data(ablation: Ablation, inspected: Sequence[Inspected]) -> dict[str, object]:
    """The result of ``inspect_variants`` as plain data."""
    rows = [{**asdict(entry), "ok": isinstance(entry.code, MachineCode)} for entry in inspected]
    return {"problem": ablation.problem.name, "precision": ablation.precision, "candidates": rows}
