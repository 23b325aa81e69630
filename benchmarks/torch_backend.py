"""The backend "torch" against the tiled reference whose place it takes, on this machine's CPU.

    python benchmarks/torch_backend.py --out benchmarks/results/torch_backend_cpu.json

Forward alone, and forward with gradients, by ``backend=``. Calls of both take turns, and the shortest time of each
counts: on a machine that does other work too, that is what the code takes. With one thread it is time of the CPU, which
other processes do not add to. The rates of matrix products say what bounds both.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.machine import find_commit

ROOT = Path(__file__).resolve().parent.parent


class Case(NamedTuple):
    """Sizes (batch, seqlen, heads, head_dim), heads of K and V, the dtype, and options of the call."""

    shape: tuple[int, ...]
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = MappingProxyType({})


WIDE, CAUSAL = (1, 2048, 8, 64), {"causal": True}
CASES = {
    "full": Case(WIDE, 8),
    "causal": Case(WIDE, 8, options=CAUSAL),
    "causal, float16": Case(WIDE, 8, torch.float16, CAUSAL),
    "causal, head_dim 128": Case((1, 2048, 4, 128), 4, options=CAUSAL),
    "causal, 2 heads of K and V": Case(WIDE, 2, options=CAUSAL),
    "causal, window of 256": Case(WIDE, 8, options=CAUSAL | {"window_size": (255, 0)}),
    "causal, window of 64": Case(WIDE, 8, options=CAUSAL | {"window_size": (63, 0)}),
    "causal, softcap": Case(WIDE, 8, options=CAUSAL | {"softcap": 30.0}),
    "causal, 8 of 256": Case((8, 256, 8, 64), 8, options=CAUSAL),
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
    products = {}
    for threads in sorted({int(n) for n in options.threads.split(",")}):
        torch.set_num_threads(threads)
        products[threads] = measure_products(threads)
        print(threads, products[threads])
        for name in CASES:
            rows.append(measure(name, threads, options.rounds))
            print(rows[-1])
    figures = {"machine": describe(), "rounds": options.rounds, "gflops_of_products": products, "rows": rows}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of both backends for a case, and how many times faster torch is."""
    case = CASES[name]
    batch, seqlen, heads, head_dim = case.shape
    sizes = [(batch, seqlen, n, head_dim) for n in (heads, case.kv_heads, case.kv_heads, heads)]
    q, k, v, dout = (torch.randn(size).to(case.dtype) for size in sizes)
    learned = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward(backend: str) -> None:
        flash_attn_func(q, k, v, backend=backend, **case.options)

    def train(backend: str) -> None:
        torch.autograd.grad(flash_attn_func(*learned, backend=backend, **case.options), learned, dout)

    row: dict[str, Any] = {"name": name, "shape": case.shape, "kv_heads": case.kv_heads, "threads": threads}
    row["dtype"] = str(case.dtype).removeprefix("torch.")
    for what, call in (("forward", forward), ("forward_and_backward", train)):
        times = shortest({backend: partial(call, backend) for backend in BACKENDS}, rounds, threads)
        row[what] = {f"{backend}_ms": round(1e3 * times[backend], 1) for backend in BACKENDS}
        row[what]["times_faster"] = round(times["reference"] / times["torch"], 2)
    return row


def measure_products(threads: int) -> dict[str, float]:
    """GFLOP/s of a block's scores, 256 queries by 2048 keys of 64 columns, by what torch has."""
    q, k = torch.randn(256, 64), torch.randn(2048, 64)
    q_half, k_half = q.bfloat16(), k.bfloat16()
    calls = {
        "float32 by BLAS": lambda: q @ k.T,
        "float32 by oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(q, k, None, "none", [], ""),
        "bfloat16": lambda: q_half @ k_half.T,
    }
    times = shortest(calls, 50, threads)
    return {name: round(2 * 256 * 2048 * 64 / time / 1e9, 1) for name, time in times.items()}


def shortest(calls: dict[str, Callable[[], object]], rounds: int, threads: int) -> dict[str, float]:
    """Seconds of the shortest call by name."""
    clock = time.process_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
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
