"""Host time a call of every peer, and the time of the first call in a fresh process.

    python benchmarks/latency.py --out latency.json [--fa3-library PATH] [--peers ours,fa3,fa4,cudnn,fa2]

Host time is the wall clock of many calls on a small problem, queued while the GPU works on them; the device
must be the faster side, or the queue would fill and the host would wait: its time a launch is reported too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hopper_attention.compile_cache import CACHE_DIR_VARIABLE
from hopper_attention.experiments.bench import describe_error, describe_run, draw_inputs
from hopper_attention.experiments.bench_peers import DEFAULT_PEERS, Peer, Setting, inspect_peers, parse_peers
from hopper_attention.experiments.bench_render import target_table
from hopper_attention.experiments.bench_results import (
    Problem,
    dump_figures,
    relative_spread,
    write_text,
)
from hopper_attention.experiments.bench_targets import latency_targets
from hopper_attention.experiments.bench_timing import Launch, stopwatch_for

PROBLEM = Problem("bfloat16", 1, 128, 128, 2, 2, 128, 128, causal=False)
FIRST_CALL = Path(__file__).resolve().parent / "first_call.py"
WARM_UP_CALLS = 20
CACHE_VARIABLES = (CACHE_DIR_VARIABLE, "CUTE_DSL_CACHE_DIR")
"""Environment variables that say where compiled kernels are kept: by us, and by the DSL."""

FIRST_CALL_TIMEOUT_S = 180


def time_calls(launch: Launch, calls: int, synchronize: Callable[[], None]) -> float:
    """Microseconds of host time a call, over ``calls`` calls that start with an empty queue."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        launch()
    stop = time.perf_counter()
    synchronize()
    return (stop - start) / calls * 1e6


def measure_host(peers: list[Peer], setting: Setting, calls: int, rounds: int) -> dict[str, Any]:
    """Median and spread over interleaved rounds, by peer."""
    stopwatch = stopwatch_for(setting.device)
    inputs = draw_inputs(PROBLEM, 0, setting.device)
    launches: dict[str, tuple[Peer, Launch]] = {}
    figures: dict[str, Any] = {}
    for peer in peers:
        try:
            launch = peer.prepare(PROBLEM, inputs, setting).launch
            with peer.context():
                time_calls(launch, WARM_UP_CALLS, stopwatch.synchronize)
                device_us = stopwatch.calibrate([launch]).device_s * 1e6
        except Exception as error:
            figures[peer.name] = {"failed": describe_error(error)}
        else:
            launches[peer.name] = (peer, launch)
            figures[peer.name] = {"device_us": device_us}
    samples: dict[str, list[float]] = {name: [] for name in launches}
    gc.disable()
    try:
        for _ in range(rounds):
            for name, (peer, launch) in launches.items():
                with peer.context():
                    samples[name].append(time_calls(launch, calls, stopwatch.synchronize))
    finally:
        gc.enable()
    for name, values in samples.items():
        figures[name] |= {"median": statistics.median(values), "spread": relative_spread(values)}
    return figures


def first_call_seconds(device: str, cache: str) -> float:
    """Run ``first_call.py`` in a fresh process whose caches lie in the folder ``cache``."""
    environment = {**os.environ, **dict.fromkeys(CACHE_VARIABLES, cache)}
    # Installed packages have their bytecode beside them. Where none may be written, what would be timed is
    # Python's own compiler.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(FIRST_CALL), device]
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
    """Fresh processes, each with an empty cache folder and then with the filled one.

    A process before them, whose time is not kept, makes Python write its bytecode.
    """
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS))
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300, help="calls a measurement")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--first-calls", type=int, default=3, help="fresh processes of each kind; 0: none")
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)

    setting = Setting(options.device, options.fa3_library)
    peers = parse_peers(options.peers)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    figures = {
        **describe_run("latency", infos, setting, options.commit),
        "problem": PROBLEM.name,
        "host_us": measure_host(present, setting, options.calls, options.rounds),
        "first_call_s": {},
    }
    write_text(options.out, dump_figures(figures))
    if options.first_calls:
        figures["first_call_s"] = measure_first_call(options.device, options.first_calls)
        write_text(options.out, dump_figures(figures))
    for name, entry in figures["host_us"].items():
        if "median" in entry:
            spread = f"spread {100 * entry['spread']:.1f} %, {entry['device_us']:.1f} us on the device"
            console.print(f"{name:6} {entry['median']:8.1f} us a call  ({spread})", highlight=False)
        else:
            console.print(f"{name:6} failed: {entry['failed']}", style="red", markup=False)
    for state, entry in figures["first_call_s"].items():
        console.print(f"first call, {state}: {entry['median']:.2f} s", highlight=False)
    console.print(target_table(latency_targets(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
