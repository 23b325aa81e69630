"""How attention scales with the sequence: time and memory from 1k to 1M tokens, beside the formula written plainly.

Two series share one grid of lengths: a fixed number of tokens, where the batch shrinks as sequences grow, and batch 1.
Plain attention holds all scores at once; where that exceeds the memory of the GPU, it is not started, and what it
would need is said instead.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hopper_attention.experiments.bench.checks import Oracle, Rounding, compute_row_oracles
from hopper_attention.experiments.bench.machine import find_gauge
from hopper_attention.experiments.bench.peers import Peer, Setting, inspect_peers
from hopper_attention.experiments.bench.results import Cell, Failed, relative_spread
from hopper_attention.experiments.bench.run import (
    Bench,
    CellLostError,
    Entry,
    Progress,
    check_affordable,
    count_input_sets,
    describe_error,
    describe_run,
    draw_inputs,
    ignore_progress,
    open_bench,
)
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import (
    BALANCED,
    CudaStopwatch,
    Effort,
    GpuLostError,
    Interval,
    describe_effort,
    plan_rounds,
    play_rounds,
)
from hopper_attention.experiments.reports import dump_rows, load_figures, rounded

KIND = "scaling"
PLAIN = "torch"
TOKENS = 8 * 16_384
LENGTHS = tuple(1024 << doubling for doubling in range(11))
DEFAULT_PEERS = f"ours,{PLAIN}"

LONG_LAUNCH_S = 0.5
"""A launch that takes longer is timed by itself: one measurement, no batch."""

DEADLINE_S = 180.0
"""Until a measurement counts as hung; two launches at 1M tokens take half a minute."""


@dataclass(frozen=True)
class Scaling:
    """The problems: ``lengths`` at ``tokens`` tokens and at batch 1."""

    lengths: tuple[int, ...] = LENGTHS
    tokens: int = TOKENS
    heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths is {self.lengths}, allowed: sequence lengths of 1 or more")
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}, allowed: 1 or more")

    def problem(self, batch: int, seqlen: int) -> Problem:
        h, d = self.heads, self.head_dim
        return Problem(self.dtype, batch, seqlen, seqlen, h, h, d, d, self.causal)

    def series(self) -> dict[str, tuple[Problem, ...]]:
        """Problems by series. A length that does not divide the tokens is left out of the first."""
        fixed = tuple(
            self.problem(self.tokens // length, length)
            for length in self.lengths
            if self.tokens % length == 0
        )
        return {
            f"{self.tokens} tokens": fixed,
            "batch 1": tuple(self.problem(1, length) for length in self.lengths),
        }

    def problems(self) -> tuple[Problem, ...]:
        """Every problem once, the small ones first."""
        every = dict.fromkeys(problem for problems in self.series().values() for problem in problems)
        return tuple(sorted(every, key=lambda problem: problem.flops))


def parse_lengths(text: str) -> tuple[int, ...]:
    """Comma-separated lengths, with k and M for 1024 and 1024²; LENGTHS if empty.

    Raises:
        ValueError: a part is no length.
    """
    factors = {"k": 1024, "m": 1024**2}
    lengths = []
    for part in text.split(",") if text else ():
        word = part.strip().lower()
        factor = factors.get(word[-1:], 1)
        digits = word[:-1] if factor > 1 else word
        if not digits.isdecimal() or int(digits) == 0:
            raise ValueError(
                f"lengths is {text!r}, allowed: comma-separated lengths such as 1k,16k,1M or 3000"
            )
        lengths.append(int(digits) * factor)
    return tuple(dict.fromkeys(lengths)) or LENGTHS


@dataclass(frozen=True)
class Scaled:
    """One peer on one problem. ``memory_bytes`` is what a call adds to its inputs at its peak, the output included;
    NaN where the device does not count it."""

    median_ms: float
    tflops: float
    spread: float
    rounds: int
    memory_bytes: float
    error: float


@dataclass(frozen=True)
class ScalingCell:
    """All peers on one problem."""

    problem: Problem
    peers: dict[str, Scaled | Failed]

    def measured(self, peer: str) -> Scaled | None:
        result = self.peers.get(peer)
        return result if isinstance(result, Scaled) else None


@dataclass(frozen=True)
class ScalingReport:
    """One run on one machine; ``head`` is what ``describe_run`` says, with the method."""

    head: dict[str, Any]
    spec: Scaling
    cells: tuple[ScalingCell, ...]

    def cell(self, problem: Problem) -> ScalingCell | None:
        return next((cell for cell in self.cells if cell.problem == problem), None)

    @property
    def peers(self) -> list[str]:
        """Peers that were there."""
        return [name for name, info in self.head["peers"].items() if not info["unavailable"]]


def plain_bytes(problem: Problem) -> float:
    """What plain attention holds at its peak beside its inputs: two matrices of scores, and boolean masks."""
    p = problem
    scores = p.seqlen_q * p.seqlen_k
    groups = p.heads // p.heads_kv
    element = 4 if p.dtype == "float32" else 2
    return 2.0 * element * p.batch * p.heads * scores + (2 + groups) * scores


def free_bytes(setting: Setting) -> float:
    """Memory that a call may still take on the device; no limit is known of a CPU's."""
    if not setting.is_cuda:
        return math.inf
    free, _ = torch.cuda.mem_get_info(setting.device)
    cached = torch.cuda.memory_reserved(setting.device) - torch.cuda.memory_allocated(setting.device)
    return free + cached


def too_large(peer: Peer, problem: Problem, free: float) -> str:
    """Why a peer cannot run a problem in the memory that is free; empty if it can, as far as is known."""
    needed = plain_bytes(problem) if peer.name == PLAIN else 0.0
    if needed <= free:
        return ""
    return f"needs {needed / 2**30:.0f} GiB for its scores, and {free / 2**30:.0f} GiB are free"


def added_memory(launch: Callable[[], Any], setting: Setting) -> float:
    """Bytes that a call adds at its peak; NaN on a CPU."""
    if not setting.is_cuda:
        return math.nan
    torch.cuda.synchronize(setting.device)
    torch.cuda.reset_peak_memory_stats(setting.device)
    before = torch.cuda.memory_allocated(setting.device)
    launch()
    torch.cuda.synchronize(setting.device)
    return float(torch.cuda.max_memory_allocated(setting.device) - before)


def time_entries(bench: Bench, entries: dict[str, Entry], cells_left: int) -> dict[str, list[Interval]]:
    """Interleaved rounds of what is quick; of what is long, one measurement."""
    taken: dict[str, list[Interval]] = {}
    for name, entry in entries.items():
        with entry.peer.context():
            once = bench.stopwatch.measure(entry.launches, 1, 0.0)
        if once.seconds > LONG_LAUNCH_S:
            taken[name] = [once]
    turns = {name: bench.plan(entry) for name, entry in entries.items() if name not in taken}
    if turns:
        rounds = plan_rounds(list(turns.values()), bench.budget.share(cells_left), bench.effort)
        taken |= play_rounds(turns, rounds, lambda name, turn: bench.take_turn(entries[name], turn))
    return taken


def run_cell(bench: Bench, problem: Problem, peers: Sequence[Peer], cells_left: int) -> ScalingCell:
    """Check, weigh and time the peers on one problem.

    Raises:
        CellLostError: a kernel hangs or broke the CUDA context.
    """
    sets = count_input_sets(problem, bench.l2_bytes)
    inputs = [draw_inputs(problem, seed, bench.setting.device) for seed in range(sets)]
    oracles: list[Oracle] = []

    def oracles_of(rounding: Rounding) -> Sequence[Oracle]:
        # No peer here rounds its inputs, so one oracle serves them all.
        if not oracles:
            oracles.extend(compute_row_oracles(problem, rounding(inputs[0])))
        return oracles

    results: dict[str, Scaled | Failed] = {}
    entries: dict[str, Entry] = {}
    memory: dict[str, float] = {}
    try:
        for peer in peers:
            reason = too_large(peer, problem, free_bytes(bench.setting))
            admitted = Failed(reason) if reason else bench.admit(peer, problem, inputs, oracles_of)
            if isinstance(admitted, Failed):
                results[peer.name] = admitted
            else:
                entries[peer.name] = admitted
                with peer.context():
                    memory[peer.name] = added_memory(admitted.launches[0], bench.setting)
        taken = time_entries(bench, entries, cells_left)
    except GpuLostError as lost:
        reason = describe_error(lost)
        raise CellLostError(Cell(problem, sets, None, None, {}), reason) from lost
    for name, intervals in taken.items():
        seconds = [interval.seconds for interval in intervals]
        median = statistics.median(seconds)
        rate = problem.flops / median * 1e-12
        figures = relative_spread(seconds), len(seconds), memory[name], entries[name].error
        results[name] = Scaled(median * 1e3, rate, *figures)
    return ScalingCell(problem, {peer.name: results[peer.name] for peer in peers})


def run_scaling(
    spec: Scaling,
    peers: tuple[Peer, ...],
    setting: Setting,
    effort: Effort,
    *,
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[ScalingReport], None] = lambda report: None,
) -> ScalingReport:
    """Run every problem, from small to large; returns the report.

    Args:
        spec: the problems.
        peers: rows of the registry; those that are not available are listed in the report with the reason.
        setting: device and library paths.
        effort: how long to measure. A launch longer than LONG_LAUNCH_S is measured once, whatever it says.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line as each problem starts.
        save: called with the report so far after each problem.

    Raises:
        ValueError: the device is a CPU, and the problems are too large for it.
        CellLostError: a kernel hangs or broke the CUDA context. The report up to it has been saved.
    """
    problems = spec.problems()
    check_affordable(problems, setting.device)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    head = describe_run(KIND, infos, setting, commit) | {"method": describe_method(effort)}
    report = ScalingReport(head, spec, ())
    l2_bytes = head["machine"].get("l2_bytes", 0)
    with open_bench(setting, effort, find_gauge(setting.device), l2_bytes) as bench:
        if setting.is_cuda:
            bench = replace(bench, stopwatch=CudaStopwatch(DEADLINE_S))
        for index, problem in enumerate(problems):
            progress(f"[{index + 1}/{len(problems)}] {problem.name}")
            cell = run_cell(bench, problem, present, len(problems) - index)
            report = replace(report, cells=(*report.cells, cell))
            save(report)
            gc.collect()
            if setting.is_cuda:
                torch.cuda.empty_cache()
    return report


def describe_method(effort: Effort) -> dict[str, Any]:
    """How the figures came about, for the report."""
    return {
        "flops": "4*b*h*sq*sk*d, halved if causal",
        "inputs": "N(0, 1)",
        "timing": "median over interleaved rounds of device time a launch; a launch longer than "
        f"{LONG_LAUNCH_S:g} s is timed once",
        "order": BALANCED,
        "memory": "what a call adds to its inputs at its peak, its output included, by torch's allocator",
        "error": "of three heads against float64, from 8k keys on of evenly spaced rows",
        **describe_effort(effort),
    }


# JSON


def cell_record(cell: ScalingCell) -> dict[str, Any]:
    peers = {name: {"ok": isinstance(r, Scaled), **asdict(r)} for name, r in cell.peers.items()}
    return rounded({**asdict(cell.problem), "peers": peers})


def read_cell(record: dict[str, Any]) -> ScalingCell:
    def read_peer(entry: dict[str, Any]) -> Scaled | Failed:
        fields = {key: value for key, value in entry.items() if key != "ok"}
        if not entry["ok"]:
            return Failed(**fields)
        numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in fields.items()}
        return Scaled(**numbers)

    problem = Problem(**{key: record[key] for key in Problem.__dataclass_fields__})
    return ScalingCell(problem, {name: read_peer(entry) for name, entry in record["peers"].items()})


def dump_scaling(report: ScalingReport) -> str:
    """JSON text of a report, one line a cell."""
    head = {**report.head, "spec": asdict(report.spec)}
    return dump_rows(head, "cells", [cell_record(cell) for cell in report.cells])


def load_scaling(text: str) -> ScalingReport:
    """Read what :func:`dump_scaling` wrote.

    Raises:
        ValueError: the text is not a scaling report of this schema.
    """
    data = load_figures(text, KIND)
    spec = Scaling(**{**data["spec"], "lengths": tuple(data["spec"]["lengths"])})
    cells = tuple(read_cell(record) for record in data["cells"])
    head = {key: value for key, value in data.items() if key not in ("spec", "cells")}
    return ScalingReport(head, spec, cells)
