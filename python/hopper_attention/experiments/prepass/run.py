"""The FP8 pre-pass against a device copy in the same run: how near it comes to the bandwidth that it cannot beat.

``quantize_qkv`` reads q, k and v in 16 bits and writes e4m3 and scales; the copy reads and writes q, k and v. Both
are judged by the bytes that they move.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.bench.machine import find_gauge
from hopper_attention.experiments.bench.peers import Inputs, Setting
from hopper_attention.experiments.bench.results import Cell, Failed, relative_spread
from hopper_attention.experiments.bench.run import (
    CellLostError,
    Progress,
    check_affordable,
    count_input_sets,
    describe_error,
    describe_run,
    draw_inputs,
    ignore_progress,
    open_bench,
)
from hopper_attention.experiments.bench.spec import Problem, paper_grid
from hopper_attention.experiments.bench.timing import (
    BALANCED,
    Effort,
    GpuLostError,
    Interval,
    Launch,
    Stopwatch,
    Turn,
    describe_effort,
    plan_rounds,
    plan_turn,
    play_rounds,
)
from hopper_attention.experiments.reports import Target, dump_rows, load_figures, rounded
from hopper_attention.fp8 import DEFAULT_QUANTIZATION
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv, restore_values
from hopper_attention.rotation import rotate_head_dim

KIND = "prepass"
QUANTIZE, COPY = "quantize", "copy"
LEAST_SHARE = 0.8
"""Of the copy's bandwidth, promised on every size."""

ERROR_LIMIT = 4e-2
"""Relative error of a tensor; rounding N(0, 1) to e4m3 in blocks costs 2.6e-2."""


@dataclass(frozen=True)
class Pass:
    """Time of one pass over q, k and v, the bytes it moves, and their rate."""

    median_us: float
    spread: float
    rounds: int
    moved_bytes: int

    @property
    def tb_per_s(self) -> float:
        return self.moved_bytes / self.median_us * 1e-6


@dataclass(frozen=True)
class QuantizeCell:
    """The pre-pass and the copy on one problem, in interleaved rounds, or why there is no figure."""

    problem: Problem
    passes: dict[str, Pass] | Failed
    error: float

    @property
    def share(self) -> float:
        """Bandwidth of the pre-pass over that of the copy; 0.0 without figures."""
        if isinstance(self.passes, Failed):
            return 0.0
        return self.passes[QUANTIZE].tb_per_s / self.passes[COPY].tb_per_s


@dataclass(frozen=True)
class QuantizeReport:
    """One run on one machine; ``head`` is what ``describe_run`` says, with the method."""

    head: dict[str, Any]
    cells: tuple[QuantizeCell, ...]


def paper_sizes() -> tuple[Problem, ...]:
    """The sizes of the paper's grid, each once: the mask is none of the pre-pass's business."""
    return tuple(problem for problem in paper_grid() if not problem.causal)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantized_bytes(parts: QuantizedQKV) -> int:
    """Bytes of the e4m3 data and of the scales."""
    return bytes_of(*(tensor for part in (parts.q, parts.k, parts.v) for tensor in (part.data, part.scale)))


def quantization_error(parts: QuantizedQKV, inputs: Inputs) -> float:
    """Largest relative error (Frobenius) of q, k and v: of q and k against the inputs rotated as they are, of v with
    everything undone."""
    c = parts.quantization
    pairs = (
        (parts.q.dequantize(), inputs.q, c.rotate),
        (parts.k.dequantize(), inputs.k, c.rotate),
        (restore_values(parts.v.dequantize(), parts, causal=False), inputs.v, False),
    )
    errors = []
    for found, source, is_rotated in pairs:
        exact = rotate_head_dim(source, c.seed) if is_rotated else source.float()
        errors.append(((found - exact).norm() / exact.norm()).item())
    return max(errors)


def make_launches(sets: Sequence[Inputs], quantization: Fp8Quantization) -> dict[str, list[Launch]]:
    """Launches of both passes, one an input set."""

    def quantizing(inputs: Inputs) -> Launch:
        return lambda: quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=quantization).q.data

    def copying(inputs: Inputs) -> Launch:
        sources = inputs.q, inputs.k, inputs.v
        targets = tuple(torch.empty_like(tensor) for tensor in sources)

        def launch() -> Tensor:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return targets[0]

        return launch

    return {QUANTIZE: [quantizing(s) for s in sets], COPY: [copying(s) for s in sets]}


def measure(
    problem: Problem,
    sets: Sequence[Inputs],
    quantization: Fp8Quantization,
    stopwatch: Stopwatch,
    effort: Effort,
) -> QuantizeCell:
    """Check the pre-pass, then time it and the copy in interleaved rounds.

    Raises:
        GpuLostError: a kernel hangs or broke the CUDA context.
    """
    first = sets[0]
    parts = quantize_qkv(first.q, first.k, first.v, quantization=quantization)
    stopwatch.synchronize()
    error = quantization_error(parts, first)
    if not error <= ERROR_LIMIT:
        reason = f"wrong result: error {error:.2e} against the inputs, allowed {ERROR_LIMIT:.1e}"
        return QuantizeCell(problem, Failed(reason), error)
    read = bytes_of(first.q, first.k, first.v)
    # The mean of V is found in a pass of its own.
    twice = bytes_of(first.v) if quantization.smooth_v else 0
    moved = {QUANTIZE: read + twice + quantized_bytes(parts), COPY: 2 * read}
    launches = make_launches(sets, quantization)
    turns = {name: plan_turn(each, stopwatch.calibrate(each), effort) for name, each in launches.items()}

    def play(name: str, turn: Turn) -> Interval:
        return stopwatch.measure(turn.launches, turn.repeats, turn.spin_s)

    taken = play_rounds(turns, plan_rounds(list(turns.values()), effort.budget_s, effort), play)
    passes = {}
    for name, intervals in taken.items():
        seconds = [interval.seconds for interval in intervals]
        median_us = statistics.median(seconds) * 1e6
        passes[name] = Pass(median_us, relative_spread(seconds), len(seconds), moved[name])
    return QuantizeCell(problem, passes, error)


def run_quantize(
    problems: Sequence[Problem],
    setting: Setting,
    effort: Effort,
    *,
    quantization: Fp8Quantization = DEFAULT_QUANTIZATION,
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[QuantizeReport], None] = lambda report: None,
) -> QuantizeReport:
    """Run every problem; returns the report.

    Args:
        problems: sizes of q, k and v; the mask plays no part.
        setting: the device.
        effort: how long to measure, its budget shared out evenly.
        quantization: what the pre-pass does; without ``smooth_k``, whose result is not held against the inputs.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line as each problem starts.
        save: called with the report so far after each problem.

    Raises:
        ValueError: the device is a CPU, and the problems are too large for it; or ``smooth_k`` is asked for.
        CellLostError: a kernel hangs or broke the CUDA context. The report up to it has been saved.
    """
    if quantization.smooth_k:
        raise ValueError("quantization has smooth_k True, allowed here: False")
    check_affordable(problems, setting.device)
    head = describe_run(KIND, {}, setting, commit) | {"method": describe_method(quantization, effort)}
    report = QuantizeReport(head, ())
    share = replace(effort, budget_s=effort.budget_s / max(len(problems), 1))
    l2_bytes = head["machine"].get("l2_bytes", 0)
    with open_bench(setting, effort, find_gauge(setting.device), l2_bytes) as bench:
        for index, problem in enumerate(problems):
            progress(f"[{index + 1}/{len(problems)}] {problem.name}")
            count = count_input_sets(problem, l2_bytes)
            sets = [draw_inputs(problem, seed, setting.device) for seed in range(count)]
            try:
                cell = measure(problem, sets, quantization, bench.stopwatch, share)
            except GpuLostError as lost:
                raise CellLostError(Cell(problem, count, None, None, {}), describe_error(lost)) from lost
            report = replace(report, cells=(*report.cells, cell))
            save(report)
            gc.collect()
    return report


def describe_method(quantization: Fp8Quantization, effort: Effort) -> dict[str, Any]:
    """How the figures came about, for the report."""
    return {
        "inputs": "N(0, 1)",
        "quantization": ", ".join(f"{key} {value}" for key, value in asdict(quantization).items()),
        "timing": "median over interleaved rounds of device time a launch, batches back to back",
        "order": BALANCED,
        "bytes": "quantize: 16-bit inputs read, e4m3 and scales written; copy: inputs read and written",
        "l2": "launches rotate over sets of q, k, v, in all 3 times the L2 or more",
        **describe_effort(effort),
    }


def quantize_targets(report: QuantizeReport) -> list[Target]:
    """What is promised of the pre-pass, as far as this report can answer."""
    timed = [cell for cell in report.cells if not isinstance(cell.passes, Failed)]
    if not timed:
        return []
    worst = min(timed, key=lambda cell: cell.share)
    measured = f"{worst.share:.2f} ({worst.problem.name})"
    required = f">= {LEAST_SHARE:.2f}"
    return [Target("pre-pass, share of a copy's bandwidth", required, measured, worst.share >= LEAST_SHARE)]


# JSON


def cell_record(cell: QuantizeCell) -> dict[str, Any]:
    ok = not isinstance(cell.passes, Failed)
    passes = (
        asdict(cell.passes)
        if isinstance(cell.passes, Failed)
        else {n: asdict(p) for n, p in cell.passes.items()}
    )
    return rounded({**asdict(cell.problem), "error": cell.error, "ok": ok, "passes": passes})


def read_cell(record: dict[str, Any]) -> QuantizeCell:
    problem = Problem(**{key: record[key] for key in Problem.__dataclass_fields__})
    passes, error = record["passes"], math.nan if record["error"] is None else record["error"]
    if record["ok"]:
        return QuantizeCell(problem, {name: Pass(**entry) for name, entry in passes.items()}, error)
    return QuantizeCell(problem, Failed(**passes), error)


def dump_quantize(report: QuantizeReport) -> str:
    """JSON text of a report, one line a cell."""
    return dump_rows(report.head, "cells", [cell_record(cell) for cell in report.cells])


def load_quantize(text: str) -> QuantizeReport:
    """Read what :func:`dump_quantize` wrote.

    Raises:
        ValueError: the text is not a report of this kind and schema.
    """
    data = load_figures(text, KIND)
    cells = tuple(read_cell(record) for record in data["cells"])
    return QuantizeReport({key: value for key, value in data.items() if key != "cells"}, cells)
