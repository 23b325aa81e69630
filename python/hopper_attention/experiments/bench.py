"""The forward benchmark: every peer on every problem, checked first, then timed in interleaved rounds.

Correctness comes before speed: a peer whose output is not finite everywhere, or is off on the heads that are
checked against float64, is shown as a failure and not timed. The first call of a peer on a problem, which may
compile, is outside the time budget.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from hopper_attention.experiments.bench_machine import (
    ClockSampler,
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.bench_peers import Inputs, Peer, Setting, inspect_peers
from hopper_attention.experiments.bench_results import (
    SCHEMA,
    Cell,
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    PeerResult,
    Problem,
    relative_spread,
)
from hopper_attention.experiments.bench_timing import (
    Budget,
    Effort,
    GpuLostError,
    Interval,
    Launch,
    Stopwatch,
    Turn,
    plan_rounds,
    plan_turn,
    play_rounds,
    stopwatch_for,
)

ERROR_LIMITS = {"float16": (8e-4, 4e-3), "bfloat16": (6e-3, 3e-2), "float32": (1e-5, 1e-4)}
"""Allowed relative error against float64, by dtype: of a whole head (Frobenius), and of its worst row.

The first is 1.4 times what the formula in plain PyTorch shows on N(0, 1) inputs; a single key too many or too
few among 16384 exceeds it. The second finds a single wrong row."""

MAX_INPUT_SETS = 8
L2_MULTIPLE = 3
"""Launches rotate over as many input sets as it takes to exceed the L2 cache this many times over."""

GPU_LOST = 3
"""Exit code of a benchmark that a kernel brought down."""

Progress = Callable[[str], None]


def ignore_progress(line: str) -> None:
    """The progress callback that shows nothing."""


def draw_inputs(problem: Problem, seed: int, device: str) -> Inputs:
    """One set of N(0, 1) inputs, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    p = problem
    shapes = (
        (p.batch, p.seqlen_q, p.heads, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_kv, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v),
    )
    dtype = getattr(torch, p.dtype)
    return Inputs(*(torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes))


def count_input_sets(problem: Problem, l2_bytes: int) -> int:
    """Sets of q, k, v to rotate over, so that a launch finds nothing of its inputs in L2."""
    return max(1, min(MAX_INPUT_SETS, math.ceil(L2_MULTIPLE * l2_bytes / problem.input_bytes)))


@dataclass(frozen=True)
class Oracle:
    """Float64 output of one (batch, head): (seqlen_q, head_dim_v)."""

    batch: int
    head: int
    out: Tensor


def compute_oracles(problem: Problem, inputs: Inputs) -> list[Oracle]:
    """Float64 attention of the first, a middle and the last (batch, head)."""
    from hopper_attention.reference import attention_naive

    group = problem.heads // problem.heads_kv
    total = problem.batch * problem.heads
    oracles = []
    for index in sorted({0, total // 2, total - 1}):
        b, h = divmod(index, problem.heads)
        rows, head, head_kv = slice(b, b + 1), slice(h, h + 1), slice(h // group, h // group + 1)
        parts = inputs.q[rows, :, head], inputs.k[rows, :, head_kv], inputs.v[rows, :, head_kv]
        oracles.append(Oracle(b, h, attention_naive(*parts, causal=problem.causal)[0][0, :, 0]))
    return oracles


def check_output(problem: Problem, out: Tensor, oracles: Sequence[Oracle]) -> tuple[float, str]:
    """Relative error of the worst checked head, and what is wrong with the output (empty if nothing is)."""
    expected = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    if tuple(out.shape) != expected:
        return math.inf, f"the output is {tuple(out.shape)}, expected {expected}"
    if not bool(out.isfinite().all()):
        return math.inf, f"{int((~out.isfinite()).sum())} of {out.numel()} outputs are not finite"
    head_limit, row_limit = ERROR_LIMITS[problem.dtype]
    worst = 0.0
    for oracle in oracles:
        difference = out[oracle.batch, :, oracle.head].double() - oracle.out
        norms = oracle.out.norm(dim=-1)
        error = (difference.norm() / norms.norm()).item()
        row_errors = difference.norm(dim=-1) / norms.clamp_min(1e-3 * norms.max())
        row_error, row = row_errors.max(0)
        worst = max(worst, error)
        where = f"batch {oracle.batch}, head {oracle.head}"
        if not error <= head_limit:
            return worst, f"{where}: error {error:.2e} against float64, allowed {head_limit:.0e}"
        if not row_error <= row_limit:
            where = f"{where}, row {int(row)}"
            return worst, f"{where}: error {row_error:.2e} against float64, allowed {row_limit:.0e}"
    return worst, ""


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

    peer: Peer
    launches: list[Launch]
    note: str
    error: float


@dataclass(frozen=True)
class Bench:
    """What a cell is measured with."""

    setting: Setting
    effort: Effort
    stopwatch: Stopwatch
    sampler: ClockSampler
    budget: Budget
    l2_bytes: int

    def admit(
        self, peer: Peer, problem: Problem, sets: Sequence[Inputs], oracles: Sequence[Oracle]
    ) -> Entry | Failed:
        """Prepare a peer and check its output. What the peer itself raises becomes a failure of its own."""
        try:
            with self.budget.pause():
                prepared = [peer.prepare(problem, inputs, self.setting) for inputs in sets]
                with peer.context():
                    out = prepared[0].launch()
                self.stopwatch.synchronize()
            error, wrong = check_output(problem, out, oracles)
        except GpuLostError:
            raise
        except Exception as raised:
            self.stopwatch.synchronize()
            return Failed(describe_error(raised))
        if wrong:
            return Failed(f"wrong result: {wrong}")
        return Entry(peer, [p.launch for p in prepared], prepared[0].note, error)

    def plan(self, entry: Entry) -> Turn:
        with entry.peer.context():
            return plan_turn(entry.launches, self.stopwatch.calibrate(entry.launches), self.effort)

    def time_entries(
        self, entries: dict[str, Entry], cells_left: int
    ) -> tuple[dict[str, Turn], dict[str, list[Interval]]]:
        """Interleaved rounds of the admitted peers, as many as this cell's share of the budget allows."""
        turns = {name: self.plan(entry) for name, entry in entries.items()}

        def play(name: str, turn: Turn) -> Interval:
            with entries[name].peer.context():
                return self.stopwatch.measure(turn.launches, turn.repeats, turn.spin_s)

        rounds = plan_rounds(list(turns.values()), self.budget.share(cells_left), self.effort)
        return turns, play_rounds(turns, rounds, play)

    def run_cell(self, problem: Problem, peers: Sequence[Peer], cells_left: int) -> Cell:
        """Check and time the peers on one problem."""
        sets = count_input_sets(problem, self.l2_bytes)
        inputs = [draw_inputs(problem, seed, self.setting.device) for seed in range(sets)]
        oracles = compute_oracles(problem, inputs[0])
        results: dict[str, PeerResult] = {}
        entries: dict[str, Entry] = {}
        spans: dict[str, list[tuple[float, float]]] = {}
        try:
            for peer in peers:
                admitted = self.admit(peer, problem, inputs, oracles)
                if isinstance(admitted, Failed):
                    results[peer.name] = admitted
                else:
                    entries[peer.name] = admitted
            del oracles
            turns, taken = self.time_entries(entries, cells_left)
        except GpuLostError as lost:
            reason = describe_error(lost)
            failed = {peer.name: results.get(peer.name, Failed(reason)) for peer in peers}
            raise CellLostError(Cell(problem, sets, None, None, failed), reason) from lost
        for name, intervals in taken.items():
            spans[name] = [(interval.start, interval.stop) for interval in intervals]
            results[name] = self.summarize(problem, entries[name], turns[name], intervals)
        gauges = self.sampler.window(span for peer_spans in spans.values() for span in peer_spans)
        ordered = {peer.name: results[peer.name] for peer in peers}
        return Cell(problem, sets, *gauges, ordered)

    def summarize(
        self, problem: Problem, entry: Entry, turn: Turn, intervals: Sequence[Interval]
    ) -> Measured:
        seconds = [interval.seconds for interval in intervals]
        median = statistics.median(seconds)
        clock, power = self.sampler.window((interval.start, interval.stop) for interval in intervals)
        return Measured(
            tflops=problem.flops / median * 1e-12,
            median_ms=median * 1e3,
            spread=relative_spread(seconds),
            rounds=len(seconds),
            repeats=turn.repeats,
            error=entry.error,
            clock_mhz=clock,
            power_w=power,
            note=entry.note,
        )


def describe_method(effort: Effort) -> dict[str, Any]:
    """How the figures came about, for the report."""
    return {
        "flops": "4*b*h*sq*sk*d, halved if causal",
        "inputs": "N(0, 1)",
        "timing": "median over interleaved rounds of device time a launch, batches back to back",
        "l2": f"launches rotate over input_sets sets of q, k, v, in all {L2_MULTIPLE} times the L2 or more",
        "power": "board power as the driver averages it over about a second; clock as sampled",
        **asdict(effort),
    }


def describe_run(kind: str, peers: dict[str, PeerInfo], setting: Setting, commit: str) -> dict[str, Any]:
    """The head that latency and accuracy reports share with the forward report."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": today(),
        "commit": commit or find_commit(repository_root()),
        "machine": describe_machine(setting.device, find_gauge(setting.device)),
        "peers": {name: asdict(info) for name, info in peers.items()},
    }


def run_forward(
    problems: Sequence[Problem],
    peers: tuple[Peer, ...],
    setting: Setting,
    effort: Effort,
    *,
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[ForwardReport], None] = lambda report: None,
) -> ForwardReport:
    """Run the benchmark; returns its report.

    Args:
        problems: what to run, in this order.
        peers: rows of the registry; those that are not available are listed in the report with the reason.
        setting: device and library paths.
        effort: how long to measure. Time spent in first calls, which may compile, does not count.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line as each problem starts.
        save: called with the report so far after each problem.

    Raises:
        CellLostError: a kernel hangs or broke the CUDA context. The report up to it has been saved.
    """
    gauge = find_gauge(setting.device)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    report = ForwardReport(
        machine=describe_machine(setting.device, gauge),
        commit=commit or find_commit(repository_root()),
        date=today(),
        method=describe_method(effort),
        peers=infos,
        cells=(),
    )
    with ClockSampler(gauge) as sampler:
        budget, l2_bytes = Budget(effort.budget_s), report.machine.get("l2_bytes", 0)
        bench = Bench(setting, effort, stopwatch_for(setting.device), sampler, budget, l2_bytes)
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
