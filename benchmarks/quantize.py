"""Bandwidth of the fused FP8 quantizer, against a device copy measured in the same run.

    python benchmarks/quantize.py --out quantize.json
    python benchmarks/quantize.py --head-dims 128 --seqlens 16384 --no-rotate

Shapes have 16384 tokens and heads * head_dim = 2048, as the paper's. Bandwidth counts one read of 2 bytes and one write
of 1 byte an element of Q, K and V; a copy reads and writes what it moves. Launches rotate over input sets that exceed
the L2 cache together. Kernel and copy take turns, and a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hopper_attention.experiments.bench_machine import (
    ClockSampler,
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.bench_results import SCHEMA, dump_figures, write_text
from hopper_attention.experiments.bench_timing import CudaStopwatch, Interval, Launch
from hopper_attention.quantization import Fp8Quantization
from hopper_attention.quantization_launch import empty_outputs, fill, select_quantize_config

TOKENS = 16384
WIDTH = 2048
"""Heads times head_dim."""

L2_MULTIPLE = 3
LAUNCHES = 20
TARGET = 0.8
"""Share of the copy's bandwidth that the kernel is to reach."""


@dataclass(frozen=True)
class Row:
    """One shape: microseconds a launch, TB/s of kernel and copy, SM clock in MHz during the run."""

    name: str
    config: str
    bytes: int
    us: float
    tb_per_s: float
    copy_tb_per_s: float
    share: float
    spread: float
    clock_mhz: float | None


def make_launches(
    dtype: torch.dtype, head_dim: int, seqlen: int, c: Fp8Quantization, sets: int
) -> tuple[str, int, list[Launch]]:
    """(config, bytes a launch moves, launches that each have tensors of their own)."""
    heads = WIDTH // head_dim
    shape = TOKENS // seqlen, seqlen, heads, head_dim
    config = select_quantize_config(dtype, head_dim, head_dim, seqlen, c)
    none = torch.empty(0, device="cuda")

    def launch_on_own_tensors() -> Launch:
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        outputs = empty_outputs(config, q, k, v)

        def launch() -> Tensor:
            fill(outputs, config, c.seed, q, k, v, none)
            return outputs.q8

        return launch

    moved = 3 * TOKENS * WIDTH * (dtype.itemsize + 1)
    return config.name, moved, [launch_on_own_tensors() for _ in range(sets)]


def make_copies(moved: int, sets: int) -> list[Launch]:
    """Copies that move as many bytes, half of them read and half written."""

    def copy() -> Launch:
        source = torch.randint(0, 255, (moved // 2,), device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return [copy() for _ in range(sets)]


def measure(launches: dict[str, list[Launch]], rounds: int) -> dict[str, list[Interval]]:
    """Every kind in turn, once a round."""
    stopwatch = CudaStopwatch()
    for kind in launches.values():
        for launch in kind:
            launch()
    stopwatch.synchronize()
    taken: dict[str, list[Interval]] = {name: [] for name in launches}
    for _ in range(rounds):
        for name, kind in launches.items():
            taken[name].append(stopwatch.measure(kind, LAUNCHES, spin_s=0.002))
    return taken


def measure_row(options: argparse.Namespace, head_dim: int, seqlen: int, sampler: ClockSampler) -> Row:
    c = Fp8Quantization(rotate=options.rotate, rotate_v=options.rotate_v, block_k=options.block_k or "tile")
    dtype = getattr(torch, options.dtype)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(2, -(-L2_MULTIPLE * l2_bytes // (3 * TOKENS * WIDTH * 3)))
    config, moved, launches = make_launches(dtype, head_dim, seqlen, c, sets)
    taken = measure({"kernel": launches, "copy": make_copies(moved, sets)}, options.rounds)
    seconds = {name: statistics.median(i.seconds for i in intervals) for name, intervals in taken.items()}
    kernel = [interval.seconds for interval in taken["kernel"]]
    clock, _ = sampler.window((interval.start, interval.stop) for interval in taken["kernel"])
    return Row(
        name=f"{options.dtype}-b{TOKENS // seqlen}-s{seqlen}-h{WIDTH // head_dim}-d{head_dim}",
        config=config,
        bytes=moved,
        us=seconds["kernel"] * 1e6,
        tb_per_s=moved / seconds["kernel"] * 1e-12,
        copy_tb_per_s=moved / seconds["copy"] * 1e-12,
        share=seconds["copy"] / seconds["kernel"],
        spread=(max(kernel) - min(kernel)) / seconds["kernel"],
        clock_mhz=clock,
    )


def table_of(rows: list[Row]) -> Table:
    table = Table(title=f"fused quantizer; target: {TARGET:.0%} of a copy's bandwidth")
    for column in ("shape", "config", "us", "TB/s", "copy TB/s", "share", "spread", "MHz"):
        table.add_column(column, justify="left" if column in ("shape", "config") else "right")
    for row in rows:
        clock = "" if row.clock_mhz is None else f"{row.clock_mhz:.0f}"
        figures = (f"{row.us:.1f}", f"{row.tb_per_s:.2f}", f"{row.copy_tb_per_s:.2f}", f"{row.share:.3f}")
        table.add_row(row.name, row.config, *figures, f"{row.spread:.3f}", clock)
    return table


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--seqlens", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16"))
    parser.add_argument("--rotate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rotate-v", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--block-k", type=int, default=0, help="0: the attention kernel's key tile")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    gauge = find_gauge("cuda")
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "quantize",
        "date": today(),
        "commit": options.commit or find_commit(repository_root()),
        "machine": describe_machine("cuda", gauge),
        "rows": [],
    }
    with ClockSampler(gauge) as sampler:
        for head_dim in options.head_dims:
            for seqlen in options.seqlens:
                progress(f"head_dim {head_dim}, {seqlen} tokens a sequence")
                figures["rows"].append(asdict(measure_row(options, head_dim, seqlen, sampler)))
                if options.out:
                    write_text(options.out, dump_figures(figures))
    return figures


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        console.print("the fused quantizer needs a GPU of compute capability 9.0", style="red")
        return 2
    figures = run(options, lambda line: console.print(line, style="dim"))
    console.print(table_of([Row(**row) for row in figures["rows"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
