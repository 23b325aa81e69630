"""What a small call costs: host time, device time, waiting for the result, and replay in a CUDA graph.

Host time is the wall clock of many calls that are queued while the GPU works on them. The device must be the faster
side, or the queue fills and the host waits; so its time a launch stands beside it. The time of the first call is
taken in fresh processes.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hopper_attention.compile_cache import CACHE_DIR_VARIABLE
from hopper_attention.experiments.bench.peers import Peer, Setting, inspect_peers
from hopper_attention.experiments.bench.results import Failed, relative_spread
from hopper_attention.experiments.bench.run import (
    Progress,
    check_affordable,
    describe_error,
    describe_run,
    draw_inputs,
    ignore_progress,
)
from hopper_attention.experiments.bench.spec import Problem, parse_problem
from hopper_attention.experiments.bench.timing import (
    BALANCED,
    Launch,
    Stopwatch,
    order_of_round,
    stopwatch_for,
)

KIND = "latency"
PROBLEM = Problem("bfloat16", 1, 128, 128, 2, 2, 128, 128, causal=False)
"""What host time is promised on: nothing but overhead."""

SMALL_SHAPES = (
    PROBLEM.name,
    "bf16-b1-s512-h16-d128-causal",
    "bf16-b1-s1024-h16-d128-causal",
    "bf16-b8-s256-h16-d64-full",
    "bf16-b1-s1-sk4096-h32-hk8-d128-full",
)
"""Short prompts, a batch of short sequences, and one query against a cache."""

WARM_UP_CALLS = 20
GRAPH_CALLS = 20
"""Calls in the graph that is replayed."""

CACHE_VARIABLES = (CACHE_DIR_VARIABLE, "CUTE_DSL_CACHE_DIR")
"""Environment variables that say where compiled kernels are kept: by us, and by the DSL."""

FIRST_CALL = Path(__file__).with_name("first_call.py")
FIRST_CALL_TIMEOUT_S = 180


@dataclass(frozen=True)
class CallTimes:
    """Microseconds a call of one peer on one problem.

    ``host_us`` to queue it (``host_spread``: interquartile range over the median), ``device_us`` on the device,
    ``wait_us`` from the call until its result is there, ``graph_us`` in a replayed CUDA graph. The last is NaN where
    it could not be captured, and ``no_graph`` says why.
    """

    host_us: float
    host_spread: float
    device_us: float
    wait_us: float
    graph_us: float
    no_graph: str = ""


@dataclass(frozen=True)
class Calls:
    """How much to measure: calls a measurement, and interleaved rounds."""

    calls: int = 300
    rounds: int = 11

    def __post_init__(self) -> None:
        if self.calls < 1 or self.rounds < 1:
            raise ValueError(f"calls is {self.calls}, rounds is {self.rounds}, allowed: 1 or more")


def time_calls(launch: Launch, calls: int, synchronize: Callable[[], None]) -> float:
    """Microseconds of host time a call, over ``calls`` calls that start with an empty queue."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        launch()
    stop = time.perf_counter()
    synchronize()
    return (stop - start) / calls * 1e6


def time_waits(launch: Launch, calls: int, wait: Callable[[], None]) -> float:
    """Median microseconds from a call until its result is there, with nothing else queued."""
    samples = []
    for _ in range(calls):
        wait()
        start = time.perf_counter()
        launch()
        wait()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e6


def waiter(setting: Setting) -> Callable[[], None]:
    """Waits for the device without sleeping in between."""
    return torch.cuda.synchronize if setting.is_cuda else (lambda: None)


def capture(launch: Launch, calls: int) -> Callable[[], Any]:
    """A CUDA graph of so many calls, as a function that replays it. The launch must be warm."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            launch()
    return graph.replay


def time_graph(launch: Launch, stopwatch: Stopwatch, setting: Setting) -> tuple[float, str]:
    """Device microseconds a call in a replayed graph; NaN and the reason where that does not work."""
    if not setting.is_cuda:
        return math.nan, "CUDA graphs need a CUDA device"
    try:
        replay = capture(launch, GRAPH_CALLS)
        device_s = stopwatch.calibrate([replay]).device_s
    except Exception as error:  # a peer may refuse to be captured in any way
        stopwatch.synchronize()
        return math.nan, describe_error(error)
    return device_s / GRAPH_CALLS * 1e6, ""


def measure_calls(
    problem: Problem, peers: Sequence[Peer], setting: Setting, calls: Calls
) -> dict[str, CallTimes | Failed]:
    """Times of every peer on one problem; host time in interleaved rounds."""
    stopwatch = stopwatch_for(setting.device)
    inputs = draw_inputs(problem, 0, setting.device)
    launches: dict[str, tuple[Peer, Launch]] = {}
    alone: dict[str, tuple[float, float, float, str]] = {}
    times: dict[str, CallTimes | Failed] = {}
    for peer in peers:
        try:
            launch = peer.prepare(problem, inputs, setting).launch
            with peer.context():
                time_calls(launch, WARM_UP_CALLS, stopwatch.synchronize)
                device_us = stopwatch.calibrate([launch]).device_s * 1e6
                wait_us = time_waits(launch, max(calls.calls // 10, 1), waiter(setting))
                alone[peer.name] = device_us, wait_us, *time_graph(launch, stopwatch, setting)
        except Exception as error:
            times[peer.name] = Failed(describe_error(error))
        else:
            launches[peer.name] = (peer, launch)
    samples: dict[str, list[float]] = {name: [] for name in launches}
    gc.disable()
    try:
        for number in range(calls.rounds):
            for name in order_of_round(list(launches), number):
                peer, launch = launches[name]
                with peer.context():
                    samples[name].append(time_calls(launch, calls.calls, stopwatch.synchronize))
    finally:
        gc.enable()
    for name, values in samples.items():
        times[name] = CallTimes(statistics.median(values), relative_spread(values), *alone[name])
    return {peer.name: times[peer.name] for peer in peers}


def first_call_seconds(device: str, cache: str) -> float:
    """Seconds of the first call in a fresh process whose caches lie in the folder ``cache``.

    Raises:
        RuntimeError: the process failed, or its output is wrong.
    """
    environment = {**os.environ, **dict.fromkeys(CACHE_VARIABLES, cache)}
    # Installed packages have their bytecode beside them. Where none may be written, what would be timed is
    # Python's own compiler.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # As text: run as a file, it would make this folder the first place where Python looks for modules.
    command = [sys.executable, "-c", FIRST_CALL.read_text(encoding="utf-8"), device]
    reply = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=FIRST_CALL_TIMEOUT_S, check=False
    )
    if reply.returncode:
        raise RuntimeError(f"the first call failed: {reply.stderr.strip()[-400:]}")
    figures = json.loads(reply.stdout.strip().splitlines()[-1])
    if not figures["ok"]:
        raise RuntimeError("the first call and the second one differ, or are not finite")
    return float(figures["total"])


def measure_first_call(device: str, runs: int) -> dict[str, Any]:
    """Fresh processes, each with an empty cache folder and then with the filled one; nothing for 0 runs.

    A process before them, whose time is not kept, makes Python write its bytecode.
    """
    if runs == 0:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        first_call_seconds(device, folder)
    cold, warm = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(first_call_seconds(device, folder))
            warm.append(first_call_seconds(device, folder))
    return {
        "nothing cached": {"median": statistics.median(cold), "runs": cold},
        "cached on disk": {"median": statistics.median(warm), "runs": warm},
    }


def run_latency(
    problems: Sequence[Problem],
    peers: tuple[Peer, ...],
    setting: Setting,
    calls: Calls,
    *,
    first_calls: int = 3,
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:
    """Measure every problem, then first calls in fresh processes; returns the report as plain data.

    Args:
        problems: what to run; the first is what ``host_us`` of the report is about.
        peers: rows of the registry; those that are not available are listed in the report with the reason.
        setting: device and library paths.
        calls: how much to measure.
        first_calls: fresh processes of each kind; 0 for none.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line as each problem starts.
        save: called with the report so far after each step.
    """
    check_affordable(problems, setting.device, calls.calls * calls.rounds)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    figures: dict[str, Any] = {
        **describe_run(KIND, infos, setting, commit),
        "problem": problems[0].name,
        "order": BALANCED,
        "host_us": {},
        "first_call_s": {},
        "small": [],
    }
    for index, problem in enumerate(problems):
        progress(f"[{index + 1}/{len(problems)}] {problem.name}")
        times = measure_calls(problem, present, setting, calls)
        if index == 0:
            figures["host_us"] = {name: host_record(entry) for name, entry in times.items()}
        rows = {name: call_record(entry) for name, entry in times.items()}
        figures = {**figures, "small": [*figures["small"], {"problem": problem.name, "peers": rows}]}
        save(figures)
    progress("first calls in fresh processes")
    figures = {**figures, "first_call_s": measure_first_call(setting.device, first_calls)}
    save(figures)
    return figures


def call_record(entry: CallTimes | Failed) -> dict[str, Any]:
    return {"ok": isinstance(entry, CallTimes), **asdict(entry)}


def host_record(entry: CallTimes | Failed) -> dict[str, Any]:
    if isinstance(entry, Failed):
        return {"failed": entry.reason}
    return {"device_us": entry.device_us, "median": entry.host_us, "spread": entry.host_spread}


def parse_small_shapes(text: str) -> tuple[Problem, ...]:
    """Comma-separated names of problems; SMALL_SHAPES if empty.

    Raises:
        ValueError: a name cannot be read.
    """
    names = text.split(",") if text else SMALL_SHAPES
    return tuple(dict.fromkeys(parse_problem(name) for name in names))
