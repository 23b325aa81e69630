"""The ablation: the full kernel against kernels without its optimisations, each tuned for what it has left.

Candidates of every row are compiled and checked, and one is chosen in two heats (``ablation.choice``). Those that stand
for the rows then take turns in longer rounds, each between two measurements of the full kernel: its ratio is to the
mean of those two, which met the same clock. Last, each runs alone, one right after the other, for its clock and power.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch

from hopper.config import ForwardConfig
from hopper.forward.tilings import select_plain_config
from hopper_attention.backends import target_of, why_not_hopper
from hopper_attention.compile_cache import Compilation
from hopper_attention.experiments.ablation.choice import (
    FAR_BEHIND,
    SECOND_HEAT,
    Heats,
    paired_ratio,
    run_first_heat,
    run_second_heat,
    survivors,
)
from hopper_attention.experiments.ablation.code import MachineCode, inspect_config
from hopper_attention.experiments.ablation.results import (
    FP8,
    AblationReport,
    Elapsed,
    Row,
    Soak,
    Trial,
    Won,
)
from hopper_attention.experiments.ablation.variants import (
    FULL,
    Field,
    Variant,
    gather,
)
from hopper_attention.experiments.bench.config_peers import compile_missing, label, peers_of
from hopper_attention.experiments.bench.fp8_peers import shipped_fp8_config
from hopper_attention.experiments.bench.machine import (
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.run import (
    Admitted,
    Bench,
    Entry,
    Progress,
    ignore_progress,
    open_bench,
)
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.suites import FORWARD, SUITES
from hopper_attention.experiments.bench.timing import Budget, Effort, Interval, Turn, beside, describe_effort

PHASES = 9
"""Of a run, each told to ``progress``."""

INSPECTORS = 8
"""Kernels that are disassembled at a time."""

SOAK_STEP_S = 0.05
SETTLED = 0.75
"""Share of a soak after which clock and power are read: the driver averages power over about a second."""


@dataclass(frozen=True)
class Ablation:
    """What to run: a problem, its precision (one of PRECISIONS), the rows, and how long to measure."""

    problem: Problem
    precision: str
    variants: tuple[Variant, ...]
    first_heat: Effort = field(default_factory=lambda: Effort(0.005, 2, 2, 10.0))
    second_heat: Effort = field(default_factory=lambda: Effort(0.005, 5, 5, 10.0))
    final: Effort = field(default_factory=lambda: Effort(0.005, 7, 21, 10.0))
    soak_s: float = 0.8

    @property
    def shipped(self) -> ForwardConfig:
        """The config that serves the problem. With blocks of 176 keys it has the paper's turns, without which it ships
        where that is a little faster: else there would be no row to take them away in."""
        p = self.problem
        if self.precision == FP8:
            return shipped_fp8_config(p)
        config = select_plain_config(p.dtype, p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
        return replace(config, ping_pong=config.ping_pong or (config.tile_n == 176 and config.walks_apart))

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

    phases = Phases(progress)
    fields = ablation.fields()
    configs = all_configs(fields)
    with phases("compiling what is missing"):
        broken = compile_missing(configs, jobs, count)
    with phases("the machine"):
        gauge = find_gauge(setting.device)
        machine = describe_machine(setting.device, gauge)
    suite = SUITES.get(ablation.precision, FORWARD)
    with open_bench(setting, ablation.final, gauge, machine.get("l2_bytes", 0), suite) as bench:
        with phases("loading and checking"):
            built = [config for config in configs if config.name not in broken]
            admitted = bench.admit_all(ablation.problem, peers_of(built))
        failed = {name: Failed(f"does not compile: {error}") for name, error in broken.items()}
        with admitted.or_lost():
            rows = measure_rows(ablation, bench, fields, admitted, failed, phases)
    return AblationReport(
        machine=machine,
        commit=commit or find_commit(repository_root()),
        date=today(),
        method=describe_method(ablation),
        problem=ablation.problem,
        precision=ablation.precision,
        rows=tuple(rows),
        elapsed=Elapsed(time.perf_counter() - start, compiled, phases.seconds),
    )


class Phases:
    """Wall-clock seconds of the parts of a run, by name; ``progress`` is told as each starts."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.seconds = progress, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def describe_method(ablation: Ablation) -> dict[str, object]:
    """How the figures came about, for the report."""
    return {
        "flops": "4*b*h*sq*sk*d, halved if causal",
        "inputs": "N(0, 1)",
        "candidates": "each checked against float64",
        "first heat": f"all in {ablation.first_heat.max_rounds} interleaved rounds; of each row at most {SECOND_HEAT} "
        f"go on, those with {FAR_BEHIND:g} of its best rate or more",
        "second heat": f"{ablation.second_heat.max_rounds} rounds, each between two measurements of the full kernel; "
        "the best ratio to it stands for the row",
        "rows": "median over interleaved rounds of device time a launch, batches back to back",
        "ratio": "to the mean of the full kernel's measurements just before and just after, median over rounds",
        "spread of a ratio": "interquartile range of the ratios of single rounds over their median",
        "clock and power": f"of the kernel alone, at the end of {ablation.soak_s:g} s of launches, which follow those "
        "of another row without a pause",
        "machine code": "of the compiled object that was timed",
        "final": describe_effort(ablation.final),
    }


def measure_rows(
    ablation: Ablation,
    bench: Bench,
    fields: Sequence[Field],
    admitted: Admitted,
    broken: Mapping[str, Failed],
    phases: Phases,
) -> list[Row]:
    """The heats, then interleaved rounds and a soak of the candidate that won each row.

    Raises:
        GpuLostError: a kernel hangs or broke the CUDA context.
    """
    turns, heats = run_heats(ablation, bench, fields, admitted, phases)
    chosen = {f.variant.name: config for f in fields for config in heats.pick(f)}
    final = replace(bench, budget=Budget(ablation.final.budget_s), order=beside(FULL))
    with phases("the rows in turns"):
        played = play_rows(final, admitted, turns, chosen)
    with phases("clock and power"):
        soaks = {name: soak(final, ablation, *played.of(name)) for name in played.turns}
    with phases("machine code"):
        codes = inspect_all(chosen.values())
    rows = []
    for f in fields:
        name, variant = f.variant.name, f.variant
        trials = heats.trials(f, {**admitted.failed, **broken}, ablation.shipped)
        outcome: Won | Failed = Failed(why_nobody(f, trials))
        if name in chosen:
            config = chosen[name]
            outcome = conclude(ablation, final, played, (name, config), soaks[name], codes[config.name])
        figures = variant.name, variant.title, variant.differs, papers_figure(ablation, variant)
        rows.append(Row(*figures, outcome, trials))
    return rows


def run_heats(
    ablation: Ablation, bench: Bench, fields: Sequence[Field], admitted: Admitted, phases: Phases
) -> tuple[dict[str, Turn], Heats]:
    """What each candidate does in a round, and the figures by which one of each row is chosen."""
    with phases("calibration"):
        turns = bench.plan_all(admitted.entries)
    with phases("first heat"):
        rates = run_first_heat(bench, admitted, turns, ablation.first_heat)
    names = list(dict.fromkeys(name for f in fields for name in survivors(f, rates)))
    with phases("second heat"):
        anchor = ablation.shipped.name
        ratios = run_second_heat(bench, admitted, turns, ablation.second_heat, names, anchor)
    return turns, Heats(rates, ratios)


@dataclass(frozen=True)
class Played:
    """The rows in their rounds: entries, turns and intervals, by name of the row."""

    entries: dict[str, Entry]
    turns: dict[str, Turn]
    intervals: dict[str, list[Interval]]

    def of(self, name: str) -> tuple[Entry, Turn]:
        return self.entries[name], self.turns[name]


def play_rows(
    bench: Bench, admitted: Admitted, turns: Mapping[str, Turn], chosen: Mapping[str, ForwardConfig]
) -> Played:
    """Interleaved rounds of the kernels that stand for the rows."""
    entries = {name: admitted.entries[config.name] for name, config in chosen.items()}
    of_rows = {name: turns[config.name] for name, config in chosen.items()}
    return Played(entries, of_rows, bench.play_turns(entries, of_rows, 1))


def inspect_all(configs: Iterable[ForwardConfig]) -> dict[str, MachineCode]:
    """Machine code of some configs, by name. Disassemblers are processes: several run at a time."""
    unique = {config.name: config for config in configs}
    with ThreadPoolExecutor(INSPECTORS) as pool:
        return dict(zip(unique, pool.map(inspect_config, unique.values()), strict=True))


def papers_figure(ablation: Ablation, variant: Variant) -> float:
    """The paper's figure of a row, 0.0 where it is of another problem."""
    empty = AblationReport({}, "", "", {}, ablation.problem, ablation.precision, ())
    return variant.paper_tflops if empty.is_papers else 0.0


def why_nobody(field: Field, trials: Sequence[Trial]) -> str:
    """Why a row has no figure."""
    return field.reason or next((trial.reason for trial in trials if trial.reason), "no candidates")


def conclude(
    ablation: Ablation,
    bench: Bench,
    played: Played,
    row: tuple[str, ForwardConfig],
    soaked: Soak,
    code: MachineCode,
) -> Won:
    """The figures of a row, once its rounds and its soak are played. ``row`` is its name and its kernel."""
    name, config = row
    intervals = played.intervals
    ratio, spread = (1.0, 0.0) if name == FULL else paired_ratio(intervals.get(FULL, ()), intervals[name])
    return Won(
        config=config.name,
        label=label(config, ablation.shipped),
        measured=bench.summarize(ablation.problem, *played.of(name), intervals[name]),
        ratio=ratio,
        ratio_spread=spread,
        soak=soaked,
        code=code,
    )


def soak(bench: Bench, ablation: Ablation, entry: Entry, turn: Turn) -> Soak:
    """Run one kernel alone for a while; its rate, clock and power in the last part.

    Nothing may be done between two of these: a GPU that has idled starts with a higher clock, and the power that the
    driver averages is too low for a second.
    """
    problem, seconds = ablation.problem, ablation.soak_s
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
