"""Chunked prefill: 512 queries a sequence on a cache of many keys, contiguous and in pages, beside the dense kernel.

    python benchmarks/prefill.py [--keys 8192,32768] [--pages 0,16,64,256] [--tiles 128x3,160] [--fa3-library PATH]

Pages are in a random order; 0 is a contiguous cache. ``--tiles`` are keys of a block, and stages, to try beside those
of the table. Each row is checked against the dense kernel before it is timed. That kernel is timed without a mask too:
what its walk takes where all tiles are alike. ``--compile-only`` fills the compile cache and needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hopper.config import ForwardConfig
from hopper.forward.tilings import ONE_PAGE, select_forward_config, select_paged_config
from hopper_attention import compile_cache, device_memory, flash_attn_func
from hopper_attention.compile_cache import get_forward
from hopper_attention.experiments.bench.peers import Inputs, Setting, call_of_fa3, why_no_fa3
from hopper_attention.experiments.bench.timing import Effort, Launch, seconds_in_turns, stopwatch_for
from hopper_attention.launch.base import count_ctas
from hopper_attention.launch.paged_forward import PagedForwardLauncher, page_rows_of, paged_forward
from hopper_attention.launch.planners import find_planner
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import NO_SCORES

DENSE, UNMASKED = "dense kernel", "the same without a mask"


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


@dataclass(frozen=True)
class Tile:
    """Keys of a block, and stages of blocks."""

    keys: int
    stages: int = 2

    @staticmethod
    def of(text: str) -> Tile:
        """Out of 128x3, or 160."""
        keys, _, stages = text.partition("x")
        return Tile(int(keys), int(stages or 2))

    def config(self, shape: Shape, page_size: int) -> ForwardConfig:
        """The kernel with this tile, on pages, or with 0 on a contiguous cache."""
        rows = page_rows_of(page_size, 2) if page_size else ONE_PAGE
        config = select_paged_config("bfloat16", shape.head_dim, shape.head_dim, True, rows)
        box = self.keys if rows == ONE_PAGE else math.gcd(self.keys, rows)
        return replace(config, tile_n=self.keys, stages=self.stages, page_box=box)


def with_config(
    shape: Shape,
    config: ForwardConfig,
    tensors: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
) -> Launch:
    """The kernel of a config; ``tensors`` are q and the two caches."""
    q, k, v = tensors
    num_ctas = count_ctas(0) * config.ctas_per_sm
    launcher = PagedForwardLauncher(0, config, get_forward(config), find_planner(config), num_ctas)
    packed, starts = q.flatten(0, 1), device_memory.multiples(shape.batch + 1, shape.queries, q.device)
    out, no_lse = torch.empty_like(packed), torch.empty(shape.heads, 0, device=q.device)

    def launch() -> Tensor:
        rest = shape.head_dim**-0.5, MaskSpec(True), NO_SCORES, (out, no_lse)
        launcher(packed, k, v, (table, None), (starts, lengths), *rest)
        return out.view(q.shape)

    return launch


def launches_of(
    shape: Shape, page_sizes: list[int], tiles: list[Tile], setting: Setting
) -> dict[str, Launch]:
    """By name, each of which returns out."""
    s = shape
    sizes = (s.queries, s.heads), (s.keys, s.kv_heads), (s.keys, s.kv_heads)
    q, k, v = (torch.randn(s.batch, n, h, s.head_dim, device="cuda", dtype=torch.bfloat16) for n, h in sizes)
    lengths = torch.full((s.batch,), s.keys, dtype=torch.int32, device="cuda")
    launches: dict[str, Launch] = {
        DENSE: partial(flash_attn_func, q, k, v, causal=True),
        UNMASKED: partial(flash_attn_func, q, k, v),
    }
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
        one_page = torch.arange(s.batch, dtype=torch.int32, device="cuda")[:, None]
        for tile in tiles:
            tensors, pages = (q, k_cache, v_cache), one_page if table is None else table
            config = tile.config(s, page_size)
            launches[f"{name}, {tile.keys} x {tile.stages}"] = with_config(s, config, tensors, pages, lengths)
        if has_fa3:
            inputs = Inputs(q, k_cache, v_cache)
            launches[f"fa3, {name}"] = call_of_fa3(inputs, True, seqused_k=lengths, **of_fa3)
    return launches


def run(shape: Shape, page_sizes: list[int], tiles: list[Tile], setting: Setting, effort: Effort) -> None:
    """Check and time; prints a line for each."""
    launches = launches_of(shape, page_sizes, tiles, setting)
    wanted = launches[DENSE]()
    for name, launch in launches.items():
        if name != UNMASKED:
            torch.testing.assert_close(launch(), wanted, rtol=0.02, atol=0.02)
    stopwatch = stopwatch_for("cuda")
    taken = seconds_in_turns({name: [each] for name, each in launches.items()}, stopwatch, effort)
    print(
        f"{shape.batch} x {shape.queries} queries on {shape.keys} keys, {shape.heads}/{shape.kv_heads} heads"
    )
    for name, seconds in taken.items():
        print(f"  {name:24} {seconds * 1e6:9.1f} us {shape.flops / seconds * 1e-12:7.1f} TFLOP/s")


def compile_all(shape: Shape, page_sizes: list[int], tiles: list[Tile]) -> None:
    """The kernels of this project that ``run`` times, but for those of plans."""
    d = shape.head_dim
    configs = [select_forward_config("bfloat16", d, d, causal, shape.keys) for causal in (True, False)]
    for page_size in page_sizes:
        rows = page_rows_of(page_size, 2) if page_size else ONE_PAGE
        configs.append(select_paged_config("bfloat16", d, d, True, rows))
        configs.extend(tile.config(shape, page_size) for tile in tiles)
    compile_cache.compile_all(tuple(dict.fromkeys(configs)), os.cpu_count() or 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", default="8192,32768")
    parser.add_argument("--pages", default="0,16,64,256")
    parser.add_argument("--tiles", default="", help="comma-separated keys of a block, or keys x stages")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    options = parser.parse_args(arguments)
    page_sizes = [int(size) for size in options.pages.split(",")]
    tiles = [Tile.of(text) for text in options.tiles.split(",") if text]
    for keys in options.keys.split(","):
        shape = Shape(keys=int(keys), head_dim=options.head_dim)
        if options.compile_only:
            compile_all(shape, page_sizes, tiles)
            continue
        run(shape, page_sizes, tiles, Setting("cuda", options.fa3_library), Effort())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
