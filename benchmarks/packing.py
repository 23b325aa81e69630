"""Few queries on a cache of many keys: query heads packed (the decode kernel) and not (the forward kernel, or a copy).

    python benchmarks/packing.py [--out FILE] [--compile-only JOBS]

Each cell is timed with pack_gqa=True, with what stands against packing, and its two outputs are compared. Caches of one
cell are several, taken in turn, so that none is found in L2 where a model's would not be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.dequantize.config import DequantizeConfig
from cute_kernels.plan.config import PlanConfig
from hopper.decode.config import select_decode_config
from hopper.forward.tilings import END_TO_END, select_paged_config
from hopper_attention import compile_cache, flash_attn_with_kvcache, kvcache_rules
from hopper_attention.launch import kvcache as launch

FLUSHED_BYTES, REPLAYS, HEAD_DIM = 200_000_000, 5, 128
TOKENS = (1, 4, 8, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 512)
E4M3_TOKENS = (8, 16, 17, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Cell:
    """Sequences of one length under a causal mask, on a contiguous cache."""

    heads: int
    kv_heads: int
    batch: int
    keys: int
    tokens: int
    e4m3: bool = False


def cells() -> Iterator[Cell]:
    for heads in ((32, 8), (64, 8), (32, 1)):
        for batch in (1, 8, 64):
            for tokens in TOKENS:
                if batch * tokens <= 8192:
                    yield Cell(*heads, batch, 8192, tokens)
    for batch in (1, 4):
        for tokens in E4M3_TOKENS:
            yield Cell(32, 8, batch, 8192, tokens, e4m3=True)


def configs() -> list[Any]:
    """The kernels of all cells."""
    found: list[Any] = [PlanConfig("sm_90a"), DequantizeConfig("sm_90a", "bfloat16")]
    for causal in (False, True):
        found.append(select_paged_config("bfloat16", HEAD_DIM, HEAD_DIM, causal, END_TO_END))
    for rows in (1, 33, 65):
        for causal in (False, True):
            options = {"paged": False, "rows": rows}
            found.append(select_decode_config("bfloat16", HEAD_DIM, HEAD_DIM, causal, 8192, 1, **options))
    for rows in (32, 33):
        options = {"paged": False, "rows": rows, "cache_dtype": "float8_e4m3fn"}
        found.append(select_decode_config("bfloat16", HEAD_DIM, HEAD_DIM, True, 8192, 1, **options))
    return list({config.name: config for config in found}.values())


def tensors_of(cell: Cell) -> tuple[Tensor, list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """q, caches and what else a call takes."""
    c, generator = cell, torch.Generator("cuda").manual_seed(1)
    shape = c.batch, c.keys, c.kv_heads, HEAD_DIM
    dtype = torch.float8_e4m3fn if c.e4m3 else torch.bfloat16
    size = 2 * dtype.itemsize * c.batch * c.keys * c.kv_heads * HEAD_DIM

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    count = max(1, min(8, FLUSHED_BYTES // size))
    caches = [(draw(*shape).to(dtype), draw(*shape).to(dtype)) for _ in range(count)]
    lengths = torch.full((c.batch,), c.keys, dtype=torch.int32, device="cuda")
    return draw(c.batch, c.tokens, c.heads, HEAD_DIM), caches, {"cache_seqlens": lengths, "causal": True}


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one of the calls: the median of replays of a graph of all."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(kept))
    return statistics.median(times[1:])


def measure(cell: Cell) -> dict[str, Any]:
    q, caches, given = tensors_of(cell)
    outs, row = {}, asdict(cell)
    for name, reason in (("packed", ""), ("unpacked", "it is measured without")):
        # pack_gqa=False leaves calls to the decode kernel where no other reads the cache in place. So the rule is
        # replaced; mypy does not take a lambda with a default for it.
        kvcache_rules.why_not_packed = lambda call, in_place, reason=reason: reason  # type: ignore[assignment]  # a stand-in
        launch.find_way.cache_clear()
        options = given | {"pack_gqa": not reason}
        calls = [partial(flash_attn_with_kvcache, q, *cache, **options) for cache in caches]
        outs[name] = calls[0]().float()
        row[name] = round(microseconds(calls), 2)
    difference = (outs["packed"] - outs["unpacked"]).norm() / outs["unpacked"].norm()
    return row | {"difference": float(f"{difference.item():.3g}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--compile-only", type=int)
    arguments = parser.parse_args()
    if arguments.compile_only:
        results = compile_cache.compile_all(tuple(configs()), arguments.compile_only)
        print(len(results), "kernels", {r.config.name: r.error for r in results if r.error})
        return
    started, rows = time.monotonic(), []
    for cell in cells():
        rows.append(measure(cell))
        print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump({"kind": "packing", "us": rows}, file, indent=1)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
