"""What the mean of V does to the error of FP8 attention by input, and what it costs.

    python benchmarks/fp8_value_mean.py --out F.json [--lengths 512,...] [--head-dims 64,...] [--only errors|times]

Errors are those of ``flash_attn_fp8_func`` with and without ``smooth_v``, and of the emulation on the parts of both,
from float64 on the 16-bit inputs, over the root mean square of the output. Times are of 16384 tokens and heads x
head_dim = 2048, with and without in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopper_attention import Fp8Quantization, flash_attn_fp8_func, quantize_qkv
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.bench.timing import Effort, seconds_in_turns, stopwatch_for
from hopper_attention.experiments.reports import dump_rows, write_text
from hopper_attention.launch.fp8 import EmulationLaunch
from hopper_attention.launch.quantize import mean_of_values
from hopper_attention.reference import attention_naive

TOKENS, WIDTH = 16384, 2048
QUERIES, HEADS = 128, 4
KEYS = (1024, 8192, 65536)
WITHOUT, WITH = Fp8Quantization(smooth_v=False), Fp8Quantization(smooth_v=True)

Draw = Callable[[Tensor], Tensor]


def channel_means(v: Tensor) -> Tensor:
    """Every eighth column has a mean of 4, the others have one below 0.3."""
    column = torch.arange(v.shape[3], device=v.device)
    return v + torch.where(column % 8 == 0, 4.0, 0.3 * torch.sin(column.float()))


def large_tokens(v: Tensor) -> Tensor:
    """One key of 128 is 20 times as large."""
    key = torch.arange(v.shape[1], device=v.device)[:, None, None]
    return v * torch.where(key % 128 == 77, 20.0, 1.0) + 1.0


FAMILIES: dict[str, Draw] = {
    "N(0, 1)": lambda v: v,
    "N(0.02, 1)": lambda v: v + 0.02,
    "N(0.1, 1)": lambda v: v + 0.1,
    "N(1, 1)": lambda v: v + 1.0,
    "N(4, 1)": lambda v: v + 4.0,
    "channel means": channel_means,
    "N(0, 1) above 0": torch.relu,
    "lognormal": torch.exp,
    "large tokens + 1": large_tokens,
    "mean from 0 to 2 along the keys": lambda v: (
        v + torch.linspace(0, 2, v.shape[1], device=v.device)[:, None, None]
    ),
}


def draw(keys: int, head_dim: int, family: Draw) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(keys)

    def normal(rows: int) -> Tensor:
        return torch.randn(1, rows, HEADS, head_dim, generator=generator, device="cuda")

    q, k, v = normal(QUERIES), normal(keys), family(normal(keys))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def measure_errors(keys: int, head_dim: int, name: str) -> dict[str, Any]:
    q, k, v = draw(keys, head_dim, FAMILIES[name])
    exact, _ = attention_naive(q, k, v)
    size = exact.square().mean().sqrt()
    found = {}
    for label, c in (("without", WITHOUT), ("with", WITH)):
        parts = quantize_qkv(q, k, v, quantization=c)
        out = flash_attn_fp8_func(q, k, v, quantization=c)
        like, _ = EmulationLaunch(False)(parts, head_dim**-0.5, False)
        for who, x in ((label, out), (f"emulation {label}", like)):
            found[who] = ((x.double() - exact).square().mean().sqrt() / size).item()
    return {"keys": keys, "head_dim": head_dim, "family": name, "errors": found}


def measure_times(keys: int, head_dim: int, causal: bool) -> dict[str, Any]:
    shape = TOKENS // keys, keys, WIDTH // head_dim, head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "without": partial(flash_attn_fp8_func, q, k, v, causal=causal, quantization=WITHOUT),
        "with": partial(flash_attn_fp8_func, q, k, v, causal=causal, quantization=WITH),
        "quantizer without": partial(quantize_qkv, q, k, v, quantization=WITHOUT),
        "quantizer with": partial(quantize_qkv, q, k, v, quantization=WITH),
        "mean": partial(mean_of_values, v),
    }
    effort, stopwatch = Effort(max_rounds=7), stopwatch_for("cuda")
    seconds = seconds_in_turns({name: [call] for name, call in calls.items()}, stopwatch, effort)
    us = {name: 1e6 * s for name, s in seconds.items()}
    return {"keys": keys, "head_dim": head_dim, "causal": causal, "us": us}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--only", choices=("errors", "times"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    head_dims = [int(x) for x in options.head_dims.split(",")]
    cells = []
    for head_dim in head_dims if options.only != "times" else []:
        for keys in KEYS:
            for name in FAMILIES:
                cells.append(cell := measure_errors(keys, head_dim, name))
                found = cell["errors"]
                ratio = found["with"] / found["emulation with"]
                shown = "  ".join(f"{who} {100 * x:.3f} %" for who, x in found.items())
                print(f"d{head_dim} {keys:6} {name:32} {shown}  over the emulation {ratio:.2f}", flush=True)
    for head_dim in head_dims if options.only != "errors" else []:
        for keys in map(int, options.lengths.split(",")):
            for causal in (False, True):
                cells.append(cell := measure_times(keys, head_dim, causal))
                us = cell["us"]
                shown = "  ".join(f"{what} {x:.1f}" for what, x in us.items())
                ratio = us["with"] / us["without"]
                mask = "causal" if causal else "full"
                print(f"d{head_dim} {keys:6} {mask:6} us: {shown}  with / without {ratio:.3f}", flush=True)
    head = {
        **describe_place("fp8_value_mean", "cuda"),
        "method": {
            "errors": f"{QUERIES} queries, {HEADS} heads; RMS of the difference from float64 over that of the output",
            "us": "median of 7 rounds in turns",
        },
    }
    write_text(options.out, dump_rows(head, "cells", cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
