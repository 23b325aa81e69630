"""The throughput benchmarks: every peer on every problem, checked first, then timed in interleaved rounds.

Correctness comes before speed: a peer whose result is not finite everywhere, or is off on the heads that are
checked against float64, is shown as a failure and not timed. The first call of a peer on a problem, which may
compile, is outside the time budget.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NoReturn, Protocol

import torch

from hopper_attention.experiments.bench.checks import Rounding
from hopper_attention.experiments.bench.machine import (
    ClockSampler,
    Gauge,
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.bench.peers import (
    Inputs,
    Limits,
    Peer,
    Prepared,
    Setting,
    inspect_peers,
)
from hopper_attention.experiments.bench.results import (
    Cell,
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    PeerResult,
    Sustained,
    relative_spread,
)
from hopper_attention.experiments.bench.spec import LONG_DTYPES, Problem
from hopper_attention.experiments.bench.suites import FORWARD, Suite
from hopper_attention.experiments.bench.sustained import NO_ROWS, SustainedRows
from hopper_attention.experiments.bench.timing import (
    BALANCED,
    Budget,
    Effort,
    GpuLostError,
    Interval,
    Launch,
    Order,
    Stopwatch,
    Turn,
    describe_effort,
    is_vague,
    once_each,
    plan_rounds,
    plan_turn,
    play_rounds,
    stopwatch_for,
    without_pause,
)
from hopper_attention.experiments.reports import SCHEMA

MAX_INPUT_SETS = 8
L2_MULTIPLE = 3
"""Launches rotate over as many input sets as it takes to exceed the L2 cache this many times over."""

CPU_FLOPS = 1e11
"""What a benchmark on the CPU may ask for: seconds, not hours."""

GPU_LOST = 3
"""Exit code of a benchmark that a kernel brought down."""

Progress = Callable[[str], None]


def ignore_progress(line: str) -> None:
    """The progress callback that shows nothing."""


class Work(Protocol):
    """A problem, as far as measuring it goes: a name, operations, and bytes of q, k and v."""

    @property
    def name(self) -> str: ...

    @property
    def flops(self) -> float: ...

    @property
    def input_bytes(self) -> int: ...


class Row(Protocol):
    """A peer, as far as measuring it goes: a name, and what is entered once around a batch of launches."""

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> Callable[[], AbstractContextManager[Any]]: ...


def draw_inputs(problem: Problem, seed: int, device: str) -> Inputs:
    """One set of N(0, 1) inputs, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    shapes = problem.shapes
    return Inputs(*(torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes))


def check_affordable(problems: Sequence[Work], device: str, repeats: int = 1) -> None:
    """Refuse what would take hours.

    Raises:
        ValueError: the device is a CPU, and ``repeats`` launches of the problems need more than CPU_FLOPS together.
    """
    work = repeats * sum(problem.flops for problem in problems)
    if torch.device(device).type == "cpu" and work > CPU_FLOPS:
        times = f"{work / CPU_FLOPS:,.1f} times"
        raise ValueError(
            f"the problems are {times} what a CPU may be given and device is cpu, allowed there: small ones, as "
            "bf16-b1-s256-h2-d64-full; on a GPU there is no limit"
        )


def count_input_sets(problem: Work, l2_bytes: int, compression: int = 1) -> int:
    """Sets of q, k, v to rotate over, so that a launch finds nothing of its inputs in L2."""
    wanted = L2_MULTIPLE * l2_bytes * compression / problem.input_bytes
    return max(1, min(MAX_INPUT_SETS, math.ceil(wanted)))


def describe_error(error: Exception) -> str:
    """First line of an exception, with its type, for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


class CellLostError(RuntimeError):
    """The GPU was lost in this cell; ``cell`` holds what is known of it."""

    def __init__(self, cell: Cell, reason: str) -> None:
        super().__init__(reason)
        self.cell = cell


def exit_with_lost_gpu() -> NoReturn:
    """End the process with GPU_LOST, at once: the interpreter's own exit would wait for the hung device too."""
    sys.stdout.flush()
    os._exit(GPU_LOST)


@dataclass(frozen=True)
class Entry:
    """A peer that gave the right output: its launches, one an input set, and what is known before timing."""

    peer: Row
    launches: list[Launch]
    note: str
    error: float


@dataclass(frozen=True)
class Admitted:
    """The peers of a problem, by ``names``: those that may be timed, and why the others may not."""

    problem: Problem
    sets: int
    names: tuple[str, ...]
    entries: dict[str, Entry]
    failed: dict[str, Failed]

    @contextmanager
    def or_lost(self) -> Iterator[None]:
        """Turn a lost GPU into the loss of this cell: what had failed before keeps its reason."""
        try:
            yield
        except GpuLostError as lost:
            reason = describe_error(lost)
            failed: dict[str, PeerResult] = {n: self.failed.get(n, Failed(reason)) for n in self.names}
            raise CellLostError(Cell(self.problem, self.sets, None, None, failed), reason) from lost


@dataclass(frozen=True)
class Bench:
    """What a cell is measured with, in which order, and the suite that it is a cell of. ``sustained`` says who then
    runs without a pause, outside of the budget."""

    setting: Setting
    effort: Effort
    stopwatch: Stopwatch
    sampler: ClockSampler
    budget: Budget
    l2_bytes: int
    suite: Suite = FORWARD
    order: Order = once_each
    sustained: SustainedRows = NO_ROWS

    def admit(
        self,
        peer: Peer,
        problem: Problem,
        sets: Sequence[Inputs],
        oracles_of: Callable[[Rounding], Sequence[Any]],
    ) -> Entry | Failed:
        """Prepare a peer and check its output. What the peer itself raises becomes a failure of its own."""

        def judge(prepared: Prepared, out: Any) -> tuple[float, str]:
            if not peer.is_attention:
                return 0.0, ""
            oracles = oracles_of(peer.rounding)
            return self.suite.check.compare(problem, prepared.read(out), oracles, peer.limits(problem.dtype))

        return self.try_out(
            peer, lambda: [peer.prepare(problem, inputs, self.setting) for inputs in sets], judge
        )

    def try_out(
        self,
        row: Row,
        prepare: Callable[[], list[Prepared]],
        judge: Callable[[Prepared, Any], tuple[float, str]],
    ) -> Entry | Failed:
        """Prepare a row, launch it once, and have the result judged: its error, and what is wrong with it."""
        try:
            with self.budget.pause():
                prepared = prepare()
                with row.context():
                    out = prepared[0].launch()
                self.stopwatch.synchronize()
            error, wrong = judge(prepared[0], out)
        except GpuLostError as lost:
            raise GpuLostError(f"{row.name}: {lost}") from lost
        except Exception as raised:
            self.stopwatch.synchronize()
            return Failed(describe_error(raised))
        if wrong:
            return Failed(f"wrong result: {wrong}")
        return Entry(row, [p.launch for p in prepared], prepared[0].note, error)

    def plan(self, entry: Entry) -> Turn:
        with entry.peer.context():
            return plan_turn(entry.launches, self.stopwatch.calibrate(entry.launches), self.effort)

    def take_turn(self, entry: Entry, turn: Turn) -> Interval:
        """One measurement of one peer."""
        try:
            with entry.peer.context():
                return self.stopwatch.measure(turn.launches, turn.repeats, turn.spin_s)
        except GpuLostError as lost:
            raise GpuLostError(f"{entry.peer.name}: {lost}") from lost

    def plan_all(self, entries: Mapping[str, Entry]) -> dict[str, Turn]:
        """What each peer does in a round, from a few launches of it."""
        return {name: self.plan(entry) for name, entry in entries.items()}

    def play_turns(
        self, entries: Mapping[str, Entry], turns: dict[str, Turn], cells_left: int
    ) -> dict[str, list[Interval]]:
        """Interleaved rounds of the admitted peers, as many as this cell's share of the budget allows."""
        if not turns:
            return {}
        effort, a_round = self.effort, [turns[name] for name in self.order(list(turns))]
        patient = replace(effort, max_rounds=effort.patience * effort.max_rounds)
        rounds, most = (
            plan_rounds(a_round, self.budget.share(cells_left), each) for each in (effort, patient)
        )

        def play(name: str, turn: Turn) -> Interval:
            return self.take_turn(entries[name], turn)

        taken = play_rounds(turns, rounds, play, self.order)
        played = rounds
        while played < most and is_vague(taken):
            more = min(rounds, most - played)
            for name, intervals in play_rounds(turns, more, play, self.order, first=played).items():
                taken[name] += intervals
            played += more
        return taken

    def sustain_some(self, cell: Cell, entries: Mapping[str, Entry], turns: Mapping[str, Turn]) -> Cell:
        """The cell with what some peers do without a pause, one behind the other."""
        results = dict(cell.peers)
        with self.budget.pause():
            for name in self.sustained.peers_of(cell):
                measured = results[name]
                assert isinstance(measured, Measured)
                speed = self.sustain(cell.problem, entries[name], turns[name])
                results[name] = replace(measured, sustained=speed)
        return replace(cell, peers=results)

    def sustain(self, problem: Work, entry: Entry, turn: Turn) -> Sustained:
        """One peer without a pause."""
        longer = without_pause(turn, self.sustained.seconds)
        interval = self.take_turn(entry, longer)
        # In the first half the card may still be cool.
        middle = (interval.start + interval.stop) / 2
        gauges = self.sampler.window([(middle, interval.stop)])
        tflops = self.suite.work * problem.flops / interval.seconds * 1e-12
        return Sustained(tflops, longer.repeats * interval.seconds, *gauges)

    def admit_all(self, problem: Problem, peers: Sequence[Peer]) -> Admitted:
        """Prepare and check the peers.

        Raises:
            CellLostError: a kernel hangs or broke the CUDA context.
        """
        sets = count_input_sets(problem, self.l2_bytes, self.suite.compression)
        inputs = [draw_inputs(problem, seed, self.setting.device) for seed in range(sets)]

        @cache
        def oracles_of(rounding: Rounding) -> Sequence[Any]:
            return self.suite.check.oracles(problem, rounding(inputs[0]))

        found = Admitted(problem, sets, tuple(peer.name for peer in peers), {}, {})
        with found.or_lost():
            for peer in peers:
                admitted = self.admit(peer, problem, inputs, oracles_of)
                if isinstance(admitted, Failed):
                    found.failed[peer.name] = admitted
                else:
                    found.entries[peer.name] = admitted
        return found

    def run_cell(self, problem: Problem, peers: Sequence[Peer], cells_left: int) -> Cell:
        """Check and time the peers on one problem.

        Raises:
            CellLostError: a kernel hangs or broke the CUDA context.
        """
        admitted = self.admit_all(problem, peers)
        with admitted.or_lost():
            turns = self.plan_all(admitted.entries)
            taken = self.play_turns(admitted.entries, turns, cells_left)
        results: dict[str, PeerResult] = dict(admitted.failed)
        for name, intervals in taken.items():
            results[name] = self.summarize(problem, admitted.entries[name], turns[name], intervals)
        gauges = self.sampler.window((i.start, i.stop) for intervals in taken.values() for i in intervals)
        cell = Cell(problem, admitted.sets, *gauges, {peer.name: results[peer.name] for peer in peers})
        with admitted.or_lost():
            return self.sustain_some(cell, admitted.entries, turns)

    def summarize(self, problem: Work, entry: Entry, turn: Turn, intervals: Sequence[Interval]) -> Measured:
        seconds = [interval.seconds for interval in intervals]
        median = statistics.median(seconds)
        clock, power = self.sampler.window((interval.start, interval.stop) for interval in intervals)
        return Measured(
            tflops=self.suite.work * problem.flops / median * 1e-12,
            median_ms=median * 1e3,
            spread=relative_spread(seconds),
            rounds=len(seconds),
            repeats=turn.repeats,
            error=entry.error,
            clock_mhz=clock,
            power_w=power,
            note=entry.note,
        )


@contextmanager
def open_bench(
    setting: Setting,
    effort: Effort,
    gauge: Gauge,
    l2_bytes: int,
    suite: Suite = FORWARD,
    sustained: SustainedRows = NO_ROWS,
) -> Iterator[Bench]:
    """A bench whose clock is read while the context lasts. Its budget starts now."""
    with ClockSampler(gauge) as sampler:
        stopwatch = stopwatch_for(setting.device)
        budget = Budget(effort.budget_s)
        yield Bench(setting, effort, stopwatch, sampler, budget, l2_bytes, suite, sustained=sustained)


def describe_method(suite: Suite, effort: Effort) -> dict[str, Any]:
    """How the figures came about, for the report."""
    return {
        "flops": f"{4 * suite.work:g}*b*h*sq*sk*d, halved if causal",
        "inputs": suite.inputs,
        "timing": "median over interleaved rounds of device time a launch, batches back to back",
        "order": BALANCED,
        "l2": f"launches rotate over input_sets sets of q, k, v, in all {L2_MULTIPLE} times the L2 or more",
        "power": "board power as the driver averages it over about a second; clock as sampled",
        **describe_effort(effort),
    }


def describe_limits(peers: Sequence[Peer], problems: Sequence[Problem]) -> str:
    """Which error is allowed to whom, by dtype of the problems."""
    names: dict[tuple[str, Limits], list[str]] = {}
    for dtype in dict.fromkeys(problem.dtype for problem in problems):
        for peer in peers:
            names.setdefault((LONG_DTYPES[dtype], peer.limits(dtype)), []).append(peer.name)
    lines = (
        f"{dtype} {', '.join(group)}: {limits.head:.1e} of a head, {limits.row:.1e} of a row"
        for (dtype, limits), group in names.items()
    )
    return "; ".join(lines)


def describe_place(kind: str, device: str, commit: str = "") -> dict[str, Any]:
    """The head of every report: what it is, and of which commit, when and where."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": today(),
        "commit": commit or find_commit(repository_root()),
        "machine": describe_machine(device, find_gauge(device)),
    }


def describe_run(kind: str, peers: dict[str, PeerInfo], setting: Setting, commit: str) -> dict[str, Any]:
    """The head that latency and accuracy reports share with the forward report."""
    place = describe_place(kind, setting.device, commit)
    return place | {"peers": {name: asdict(info) for name, info in peers.items()}}


def run_forward(
    problems: Sequence[Problem],
    peers: tuple[Peer, ...],
    setting: Setting,
    effort: Effort,
    *,
    suite: Suite = FORWARD,
    sustained_s: float = 0.0,
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[ForwardReport], None] = lambda report: None,
) -> ForwardReport:
    """Run the benchmark; returns its report.

    Args:
        problems: what to run, in this order.
        peers: rows of the suite's registry; those that are not available are listed in the report with the reason, and
            told to ``progress`` before anything runs.
        setting: device and library paths.
        effort: how long to measure. Time spent in first calls, which may compile, does not count.
        suite: which benchmark this is a run of.
        sustained_s: seconds that ours and the fastest other peer run without a pause behind the rounds of some problems
            (``SustainedRows.of``), 0 for none.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line for each peer that is missing, and as each problem starts.
        save: called with the report so far after each problem.

    Raises:
        CellLostError: a kernel hangs or broke the CUDA context. The report up to it has been saved.
    """
    gauge = find_gauge(setting.device)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    for name, info in infos.items():
        if info.unavailable:
            progress(f"without {name}: {info.unavailable}")
    report = ForwardReport(
        machine=describe_machine(setting.device, gauge),
        commit=commit or find_commit(repository_root()),
        date=today(),
        method=describe_method(suite, effort)
        | {"allowed error": describe_limits(present, problems)}
        | ({"sustained_s": sustained_s} if sustained_s else {}),
        peers=infos,
        cells=(),
        kind=suite.kind,
    )
    l2_bytes = report.machine.get("l2_bytes", 0)
    sustained = SustainedRows.of(problems, sustained_s)
    with open_bench(setting, effort, gauge, l2_bytes, suite, sustained) as bench:
        for index, problem in enumerate(problems):
            progress(f"[{index + 1}/{len(problems)}] {problem.name}")
            try:
                cell = bench.run_cell(problem, present, len(problems) - index)
            except CellLostError as lost:
                report = replace(report, cells=(*report.cells, lost.cell))
                save(report)
                raise
            report = replace(report, cells=(*report.cells, cell))
            save(report)
            gc.collect()
    return report
