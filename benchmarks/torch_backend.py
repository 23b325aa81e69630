"""The backend "torch" against the tiled reference whose place it takes, on this machine's CPU.

    python benchmarks/torch_backend.py --out benchmarks/results/torch_backend_cpu.json

Forward alone, and forward with gradients, by ``backend=``; beside them ``scaled_dot_product_attention``, as one would
call it, with a boolean mask for a window. Calls of all take turns, and the shortest time of each counts: on a machine
that does other work too, that is what the code takes. With one thread it is time of the CPU, which other processes do
not add to. ``least_ms`` is the time of what no forward pass out of torch's operators can do without, at the rates
measured here: the products, by the fastest that torch has, and a softmax for each score that is seen.
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
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.machine import find_commit

ROOT = Path(__file__).resolve().parent.parent


class Case(NamedTuple):
    """Sizes (batch, seqlen, heads, head_dim), heads of K and V, the dtype, and options of the call."""

    shape: tuple[int, ...]
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def visible(self) -> Tensor:
        """Boolean (queries, keys)."""
        i = torch.arange(self.shape[1])[:, None]
        seen = torch.ones(self.shape[1], self.shape[1], dtype=torch.bool)
        if self.options.get("causal"):
            left, _ = self.options.get("window_size", (self.shape[1], 0))
            seen = (i >= i.T) & (i - left <= i.T)
        return seen

    @property
    def is_for_sdpa(self) -> bool:
        return "softcap" not in self.options


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
SDPA, SOFTMAX = "sdpa", "softmax"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default=f"1,{torch.get_num_threads()}", help="comma-separated numbers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows = []
    rates = {}
    for threads in sorted({int(n) for n in options.threads.split(",")}):
        torch.set_num_threads(threads)
        best = dict.fromkeys(measure_rates(threads), 0.0)
        found = []
        for name in CASES:
            # Again each time: on a machine that does other work too, some moments are better.
            best = {what: max(rate, best[what]) for what, rate in measure_rates(threads).items()}
            found.append(measure(name, threads, options.rounds))
            print(found[-1], flush=True)
        for row in found:
            row["forward"]["least_ms"] = least_ms(CASES[row["name"]], best)
        rates[threads] = best
        rows += found
    figures = {"machine": describe(), "rounds": options.rounds, "rates": rates, "rows": rows}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of both backends and of SDPA for a case, and how many times faster than those torch's backend is."""
    case = CASES[name]
    batch, seqlen, heads, head_dim = case.shape
    sizes = [(batch, seqlen, n, head_dim) for n in (heads, case.kv_heads, case.kv_heads, heads)]
    q, k, v, dout = (torch.randn(size).to(case.dtype) for size in sizes)
    learned = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, backend=backend, **case.options)
        return out

    def sdpa(*qkv: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": bool(case.options.get("causal"))}
        if "window_size" in case.options:
            options = {"attn_mask": visible}
        heads_first = (x.transpose(1, 2) for x in qkv)
        return scaled_dot_product_attention(*heads_first, enable_gqa=True, **options).transpose(1, 2)

    visible = case.visible
    calls = {backend: partial(ours, backend) for backend in BACKENDS}
    if case.is_for_sdpa:
        calls[SDPA] = sdpa

    def forward(attend: Callable[..., Tensor]) -> None:
        attend(q, k, v)

    def train(attend: Callable[..., Tensor]) -> None:
        torch.autograd.grad(attend(*learned), learned, dout)

    row: dict[str, Any] = {"name": name, "shape": case.shape, "kv_heads": case.kv_heads, "threads": threads}
    row["dtype"] = str(case.dtype).removeprefix("torch.")
    for what, call in (("forward", forward), ("forward_and_backward", train)):
        times = shortest({name: partial(call, attend) for name, attend in calls.items()}, rounds, threads)
        row[what] = {f"{name}_ms": round(1e3 * times[name], 1) for name in calls}
        row[what]["times_faster"] = round(times["reference"] / times["torch"], 2)
        if SDPA in times:
            row[what]["times_sdpa"] = round(times[SDPA] / times["torch"], 2)
    return row


def measure_rates(threads: int) -> dict[str, float]:
    """Of a block, 256 queries by 2048 keys of 64 columns: GFLOP/s of its scores by what torch has, and billions of
    scores a second that a softmax takes."""
    q, k = torch.randn(256, 64), torch.randn(2048, 64)
    q_half, k_half = q.bfloat16(), k.bfloat16()
    scores = q @ k.T
    calls = {
        "float32 by BLAS": lambda: q @ k.T,
        "float32 by oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(q, k, None, "none", [], ""),
        "bfloat16": lambda: q_half @ k_half.T,
        SOFTMAX: lambda: softmax_of_block(scores),
    }
    times = shortest(calls, 50, threads)
    work = dict.fromkeys(calls, 2 * 256 * 2048 * 64) | {SOFTMAX: 256 * 2048}
    return {name: round(work[name] / time / 1e9, 3) for name, time in times.items()}


def softmax_of_block(scores: Tensor) -> tuple[Tensor, Tensor]:
    """P in bfloat16, not yet divided by its sums, and the sums. It overwrites the scores, with what serves as well."""
    p = scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
    return p.bfloat16(), p.sum(-1)


def least_ms(case: Case, rates: Mapping[str, float]) -> float:
    """Q K^T in float32, P V in the dtype, and the softmax, of the scores that are seen."""
    batch, _, heads, head_dim = case.shape
    scores = int(case.visible.sum()) * batch * heads
    exact = max(rate for name, rate in rates.items() if name.startswith("float32"))
    rounded = max(exact, rates["bfloat16"]) if case.dtype == torch.bfloat16 else exact
    a_score = 2 * head_dim / exact + 2 * head_dim / rounded + 1 / rates[SOFTMAX]
    return round(scores * a_score * 1e-6, 1)


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
