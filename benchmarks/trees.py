"""Two checkouts of this project on one GPU, in interleaved rounds: whether a change made anything slower.

    python benchmarks/trees.py OLD NEW --json report.json    folders with python/, hopper/ and cute_kernels/

Each checkout runs in a process of its own, and both hold the same cell at a time. In each round either process times a
burst of calls in turn, so that clocks and temperature are the same for both. A cell's figure is the ratio of the median
times, old over new: above 1 the new checkout is faster. Kernels only: the forward, the FP8 forward on parts quantized
before and on e4m3 tensors with a descale for each head, with and without an LSE, and the backward of the public
functions, on the paper's 36 shapes, inputs N(0, 1) or of another family; FP8 end to end; and the quantizer, which knows
no mask.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trees_worker import (
    BACKWARD,
    BURST_S,
    DROP_IN,
    DROP_IN_LSE,
    FORWARD,
    FP8,
    FP8_END_TO_END,
    QUANTIZE,
)
from hopper_attention.experiments.bench.machine import Gauge, NoGauge, describe_machine, find_gauge, today
from hopper_attention.experiments.families.draws import FAMILIES
from hopper_attention.experiments.reports import write_text

HEAD_DIMS, SEQLENS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16_384)
KINDS = (FORWARD, FP8, DROP_IN, DROP_IN_LSE, FP8_END_TO_END, QUANTIZE, BACKWARD)
WORKER = Path(__file__).with_name("trees_worker.py")


def list_cells(
    kinds: Sequence[str],
    dtype: str,
    queries: float = 1.0,
    seqlens: Sequence[int] = SEQLENS,
    family: str = FAMILIES[0].name,
) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        for head_dim in HEAD_DIMS:
            for seqlen in seqlens:
                for causal in (False,) if kind == QUANTIZE else (False, True):
                    yield {
                        "kind": kind,
                        "dtype": dtype,
                        "head_dim": head_dim,
                        "seqlen": seqlen,
                        "causal": causal,
                        "queries": queries,
                        "family": family,
                    }


def start_worker(tree: Path) -> subprocess.Popen[str]:
    tree = tree.resolve()
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join([str(tree / "python"), str(tree), *others])
    command = [sys.executable, str(WORKER.resolve())]
    return subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(worker: subprocess.Popen[str], line: str) -> float:
    assert worker.stdin and worker.stdout
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"the worker of {worker.args} ended; its message stands above")
    return float(answer)


def compare(
    trees: Sequence[Path], cells: Sequence[dict[str, Any]], rounds: int, gauge: Gauge
) -> list[dict[str, Any]]:
    """Every cell with the median times of both checkouts in microseconds, old over new, and the state of the card."""
    workers = [start_worker(tree) for tree in trees]
    rows = []
    for worker in workers:
        ask(worker, json.dumps(cells[0]))
    for cell in cells:
        for worker in workers:
            ask(worker, json.dumps(cell))
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                times[i].append(ask(workers[i], ""))
        old, new = (statistics.median(seconds) * 1e6 for seconds in times)
        reading = None if isinstance(gauge, NoGauge) else gauge.read()
        rows.append(
            {
                **cell,
                "old_us": round(old, 2),
                "new_us": round(new, 2),
                "ratio": round(old / new, 4),
                "clock_mhz": reading.clock_mhz if reading else None,
                "power_w": reading.power_w if reading else None,
            }
        )
    for worker in workers:
        worker.terminate()
    return rows


def main(arguments: list[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trees", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of kernels; all by default")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the inputs")
    names = [family.name for family in FAMILIES]
    parser.add_argument("--family", choices=names, default=names[0], help="of inputs")
    parser.add_argument("--queries", type=float, default=1.0, help="so many times as large")
    parser.add_argument("--seqlens", type=int, nargs="+", default=SEQLENS, help="all by default")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--commits", nargs=2, default=("", ""), help="of both, for the report")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if len(options.trees) != 2:
        parser.error(f"trees are {len(options.trees)} folders, allowed: two, the old and the new checkout")
    gauge = find_gauge("cuda:0")
    cells = tuple(list_cells(options.kinds, options.dtype, options.queries, options.seqlens, options.family))
    rows = compare(options.trees, cells, options.rounds, gauge)
    for kind in options.kinds:
        ratios = [row["ratio"] for row in rows if row["kind"] == kind]
        mean = statistics.geometric_mean(ratios)
        print(
            f"{kind}: {len(ratios)} cells, old over new {mean:.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
        )
    for row in rows:
        if row["ratio"] < 0.98:
            print("slower by more than 2 %:", row)
    if options.json:
        report = {
            "date": today(),
            "old": options.commits[0],
            "new": options.commits[1],
            "machine": describe_machine("cuda:0", gauge),
            "method": f"{options.rounds} rounds in turns, bursts of {BURST_S} s, {options.dtype}, "
            f"inputs {options.family}, queries times {options.queries:g}",
            "cells": rows,
        }
        write_text(options.json, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
