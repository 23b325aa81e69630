"""Chunked prefill: 512 queries a sequence on a cache of many keys, contiguous and in pages, beside the dense kernel.

    python benchmarks/prefill.py [--keys 8192,32768] [--pages 0,16,64,256] [--fa3-library PATH]

Pages are in a random order; 0 is a contiguous cache. Each row is checked against the dense kernel before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.peers import Inputs, Setting, call_of_fa3, why_no_fa3
from hopper_attention.experiments.bench.timing import Effort, Launch, plan_turn, play_rounds, stopwatch_for
from hopper_attention.launch.paged_forward import paged_forward
from hopper_attention.masks import MaskSpec

DENSE = "dense kernel"


@dataclass(frozen=True)
class Shape:
    """Sequences of one length, causal: the last query sees all keys."""

    batch: int = 4
    queries: int = 512
    keys: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def flops(self) -> float:
        visible = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return 4.0 * self.batch * self.heads * self.head_dim * visible


def to_pages(x: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The cache of (batch, keys, ...) in pages, and its table; the same order for tensors of the same shape."""
    batch, keys = x.shape[:2]
    count = batch * keys // page_size
    generator = torch.Generator("cuda").manual_seed(page_size)
    order = torch.randperm(count, generator=generator, device=x.device)
    pages = torch.empty(count, page_size, *x.shape[2:], dtype=x.dtype, device=x.device)
    pages[order] = x.reshape(pages.shape)
    return pages, order.int().view(batch, -1)


def launches_of(shape: Shape, page_sizes: list[int], setting: Setting) -> dict[str, Launch]:
    """By name, each of which returns out."""
    s = shape
    sizes = (s.queries, s.heads), (s.keys, s.kv_heads), (s.keys, s.kv_heads)
    q, k, v = (torch.randn(s.batch, n, h, s.head_dim, device="cuda", dtype=torch.bfloat16) for n, h in sizes)
    lengths = torch.full((s.batch,), s.keys, dtype=torch.int32, device="cuda")
    launches: dict[str, Launch] = {DENSE: partial(flash_attn_func, q, k, v, causal=True)}
    has_fa3 = not why_no_fa3(setting)
    for page_size in page_sizes:
        if page_size:
            (k_cache, table), (v_cache, _) = to_pages(k, page_size), to_pages(v, page_size)
            of_fa3 = {"page_table": table}
        else:
            k_cache, v_cache, table, of_fa3 = k, v, None, {}
        options = {"page_table": table, "lengths": lengths, "mask": MaskSpec(True)}
        name = f"pages of {page_size}" if page_size else "contiguous"
        launches[name] = lambda k=k_cache, v=v_cache, options=options: paged_forward(q, k, v, **options)[0]
        if has_fa3:
            inputs = Inputs(q, k_cache, v_cache)
            launches[f"fa3, {name}"] = call_of_fa3(inputs, True, seqused_k=lengths, **of_fa3)
    return launches


def run(shape: Shape, page_sizes: list[int], setting: Setting, effort: Effort) -> None:
    """Check and time; prints a line for each."""
    launches = launches_of(shape, page_sizes, setting)
    wanted = launches[DENSE]()
    for launch in launches.values():
        torch.testing.assert_close(launch(), wanted, rtol=0.02, atol=0.02)
    stopwatch = stopwatch_for("cuda")
    turns = {name: plan_turn([each], stopwatch.calibrate([each]), effort) for name, each in launches.items()}
    taken = play_rounds(
        turns, effort.max_rounds, lambda _, turn: stopwatch.measure(turn.launches, turn.repeats, turn.spin_s)
    )
    print(
        f"{shape.batch} x {shape.queries} queries on {shape.keys} keys, {shape.heads}/{shape.kv_heads} heads"
    )
    for name, intervals in taken.items():
        seconds = statistics.median(interval.seconds for interval in intervals)
        print(f"  {name:24} {seconds * 1e6:9.1f} us {shape.flops / seconds * 1e-12:7.1f} TFLOP/s")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", default="8192,32768")
    parser.add_argument("--pages", default="0,16,64,256")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    options = parser.parse_args(arguments)
    page_sizes = [int(size) for size in options.pages.split(",")]
    for keys in options.keys.split(","):
        shape = Shape(keys=int(keys), head_dim=options.head_dim)
        run(shape, page_sizes, Setting("cuda", options.fa3_library), Effort())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
