"""The backend "torch" against the tiled reference whose place it takes, on this machine's CPU.

    python benchmarks/torch_backend.py --out benchmarks/results/torch_backend_cpu.json

Forward alone, and forward with gradients, by ``backend=``. Calls of both take turns, and the shortest time of each
counts: on a machine that does other work too, that is what the code takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.machine import find_commit

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "full": ((1, 2048, 8, 64), {}),
    "causal": ((1, 2048, 8, 64), {"causal": True}),
    "causal, head_dim 128": ((1, 2048, 4, 128), {"causal": True}),
}
BACKENDS = ("torch", "reference")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default=f"1,{torch.get_num_threads()}", help="comma-separated numbers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows = []
    for threads in sorted({int(n) for n in options.threads.split(",")}):
        torch.set_num_threads(threads)
        rows += [measure(name, threads, options.rounds) for name in SHAPES]
        for row in rows[-len(SHAPES) :]:
            print(row)
    figures = {"machine": describe(), "rounds": options.rounds, "rows": rows}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of both backends for a shape, and how many times faster torch is."""
    shape, mask = SHAPES[name]
    q, k, v, dout = (torch.randn(shape).bfloat16() for _ in range(4))
    learned = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward(backend: str) -> None:
        flash_attn_func(q, k, v, backend=backend, **mask)

    def train(backend: str) -> None:
        torch.autograd.grad(flash_attn_func(*learned, backend=backend, **mask), learned, dout)

    row: dict[str, Any] = {"name": name, "shape": shape, "dtype": "bfloat16", "threads": threads}
    for what, call in (("forward", forward), ("forward_and_backward", train)):
        times = shortest(call, rounds)
        row[what] = {f"{backend}_ms": round(1e3 * times[backend], 1) for backend in BACKENDS}
        row[what]["times_faster"] = round(times["reference"] / times["torch"], 2)
    return row


def shortest(call: Callable[[str], None], rounds: int) -> dict[str, float]:
    """Seconds of the shortest call by backend."""
    best = dict.fromkeys(BACKENDS, float("inf"))
    for backend in BACKENDS:
        call(backend)
    for _ in range(rounds):
        for backend in BACKENDS:
            start = time.perf_counter()
            call(backend)
            best[backend] = min(best[backend], time.perf_counter() - start)
    return best


def describe() -> dict[str, Any]:
    """The machine and the versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": find_commit(ROOT),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
