"""Decoding whose tiles are put together by a second kernel, or by the clusters of the first one, and cuDNN, in turns.

    python benchmarks/decode_clusters.py [--out FILE] [--rows WORD ...] [--commit C] [--compile-only JOBS]

A launch is a graph of calls on several caches in turn, so many that none is found in L2. "apart" has a kernel of
another kind in front of each call, which does not let it start early; its time is in all columns of such a row.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hopper.decode.config import E4M3, PARTS_PER_CTA, DecodeConfig, select_decode_config
from hopper_attention import compile_cache
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.reports import dump_rows, write_text

KV_BYTES, READ_BYTES, MAX_SETS, MAX_CALLS, ROUNDS, HEAD_DIM = 400e6, 1.2e9, 128, 200, 9, 128
SCALE = HEAD_DIM**-0.5
METHOD = f"median and least of {ROUNDS} replays of graphs, in turns; of kernels, without what a call takes on the host"
E4M3_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True)
class Row:
    """One query each of sequences with the same number of keys, or with ``lengths``."""

    name: str
    batch: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    e4m3: bool = False
    lengths: tuple[int, ...] = ()
    apart: bool = False
    clusters: tuple[int, ...] = ()

    @property
    def tiles(self) -> int:
        return self.batch * self.kv_heads

    def config(self, cluster: int) -> DecodeConfig:
        found = select_decode_config(
            "bfloat16",
            HEAD_DIM,
            HEAD_DIM,
            False,
            self.keys,
            1,
            self.heads // self.kv_heads,
            paged=False,
            cache_dtype=E4M3 if self.e4m3 else "",
            cluster=cluster,
        )
        assert found is not None
        return found

    def ways(self) -> dict[str, tuple[DecodeConfig, int]]:
        """Configs and CTAs, by name."""
        found = {"two kernels": (self.config(1), 128)}
        for cluster in self.clusters:
            found[f"clusters of {cluster}"] = self.config(cluster), self.tiles * cluster
        return found


RAGGED = (11000, 300, 16384, 5000, 8192, 1, 13000, 9000)

ROWS = (
    Row("b1 1k", 1, 1024, clusters=(8,)),
    Row("b1 2k", 1, 2048, clusters=(8,)),
    Row("b1 4k", 1, 4096, clusters=(8,)),
    Row("b1 8k", 1, 8192, clusters=(8,)),
    Row("b1 64k", 1, 65536),
    Row("b1 128k", 1, 131072),
    Row("b8 1k", 8, 1024, clusters=(2,)),
    Row("b8 8k", 8, 8192, clusters=(2,)),
    Row("MQA b8 8k", 8, 8192, kv_heads=1, clusters=(8,)),
    Row("MQA b1 64k", 1, 65536, kv_heads=1),
    Row("MHA b1 8k", 1, 8192, kv_heads=32, clusters=(2,)),
    Row("e4m3 b1 8k", 1, 8192, e4m3=True, clusters=(8,)),
    Row("e4m3 b1 64k", 1, 65536, e4m3=True),
    Row("e4m3 b8 8k", 8, 8192, e4m3=True, clusters=(2,)),
    Row("b2 8k", 2, 8192, clusters=(6,)),
    Row("b8 8170", 8, 8170, clusters=(2,)),
    Row("b1 8k apart", 1, 8192, apart=True),
    Row("b8 1k apart", 8, 1024, apart=True, clusters=(2,)),
    Row("b7 1k", 7, 1024, clusters=(2,)),
    Row("b7 8k", 7, 8192, clusters=(2,)),
    Row("b8 64k", 8, 65536, clusters=(2,)),
    Row("b8 to 1k", 8, 1024, lengths=(1000, 700, 1024, 300, 800, 200, 900, 1), clusters=(2,)),
    Row("b8 1k, one long", 8, 1024, lengths=(1024, *7 * (1,)), clusters=(2,)),
    Row("b8 to 2k", 8, 2048, lengths=(2000, 1400, 2048, 600, 1600, 400, 1800, 1), clusters=(2,)),
    Row("b8 2k, one long", 8, 2048, lengths=(2048, *7 * (1,)), clusters=(2,)),
    Row("b8 ragged", 8, 16384, lengths=RAGGED, clusters=(2,)),
    Row("64 x 8k", 64, 8192),
    Row("256 x 8k", 256, 8192),
    Row("e4m3 64 x 8k", 64, 8192, e4m3=True),
)


def draw(row: Row) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """q, caches and lengths."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = row.batch, row.keys, row.kv_heads, HEAD_DIM
    dtype = E4M3_DTYPE if row.e4m3 else torch.bfloat16
    size = 2 * dtype.itemsize * math.prod(shape)
    sets = max(2, min(MAX_SETS, int(KV_BYTES // size) + 1))

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)

    caches = [(new(*shape).to(dtype), new(*shape).to(dtype)) for _ in range(sets)]
    lengths = torch.tensor(row.lengths or [row.keys] * row.batch, dtype=torch.int32, device="cuda")
    return new(row.batch, 1, row.heads, HEAD_DIM), caches, lengths


def bind(row: Row, config: DecodeConfig, ctas: int, q: Tensor, lengths: Tensor) -> tuple[Any, Tensor, Tensor]:
    """A call on a cache, with the tensors that it writes."""
    out, lse = torch.empty_like(q), torch.empty(row.batch, row.heads, 1, device="cuda")
    parts = torch.empty(PARTS_PER_CTA * ctas, config.part_floats, device="cuda")
    kernel = compile_cache.get_serving(config)
    ones = torch.ones(row.batch, row.kv_heads, device="cuda") if row.e4m3 else None
    # No table, left pads, offsets, limit of splits, sides, softcap, sinks or scale of Q.
    behind = parts, SCALE, None, None, None, None, None, None, None, ones, ones, ctas

    def call(k: Tensor, v: Tensor) -> None:
        kernel(q, k, v, out, lse, lengths, None, None, None, *behind)

    return call, out, lse


def bind_cudnn(row: Row, q: Tensor) -> Callable[[Tensor, Tensor], Any] | None:
    if row.e4m3 or row.lengths:
        return None

    def call(k: Tensor, v: Tensor) -> Tensor:
        given = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*given, enable_gqa=row.heads != row.kv_heads)

    return call


def exact(row: Row, q: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Out and LSE in float64."""
    out = torch.zeros(row.batch, 1, row.heads, HEAD_DIM, device="cuda", dtype=torch.float64)
    lse = torch.empty(row.batch, row.heads, 1, device="cuda", dtype=torch.float64)
    group = row.heads // row.kv_heads
    for b in range(row.batch):
        keys = row.lengths[b] if row.lengths else row.keys
        for head in range(row.kv_heads):
            of = slice(head * group, (head + 1) * group)
            k, v = (x[b, :keys, head].to(torch.float32).double() for x in cache)
            scores = q[b, 0, of].double() @ k.T * SCALE
            lse[b, of, 0] = scores.logsumexp(-1)
            out[b, 0, of] = scores.softmax(-1) @ v
    return out, lse


def graph_of(call: Callable[..., Any], caches: list[tuple[Tensor, Tensor]], calls: int, spacer: Any) -> Any:
    call(*caches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            if spacer is not None:
                spacer.add_(1)
            call(*caches[i % len(caches)])
    return graph


def measure(row: Row) -> dict[str, Any]:
    """Microseconds a call, errors, and whether a second call gives the same bits."""
    q, caches, lengths = draw(row)
    size = sum(x.numel() * x.element_size() for x in caches[0])
    calls = max(4, min(MAX_CALLS, int(READ_BYTES // size)))
    spacer = torch.zeros(64, device="cuda") if row.apart else None
    want = exact(row, q, caches[0])
    # Graphs do not hold the memory that their kernels write.
    graphs, held, found = {}, [], {"row": asdict(row), "calls": calls, "sets": len(caches), "ways": {}}
    for name, (config, ctas) in row.ways().items():
        call, out, lse = bind(row, config, ctas, q, lengths)
        held.append((out, lse, call))
        call(*caches[0])
        got = out.clone(), lse.clone()
        call(*caches[0])
        entry = {
            "config": config.name,
            "ctas": ctas,
            "error": float((got[0].double() - want[0]).norm() / want[0].norm()),
            "lse error": float((got[1].double() - want[1]).abs().max()),
            "same bits": bool((got[0] == out).all() and (got[1] == lse).all()),
        }
        found["ways"][name] = entry
        graphs[name] = graph_of(call, caches, calls, spacer)
    cudnn = bind_cudnn(row, q)
    if cudnn is not None:
        try:
            graphs["cuDNN"] = graph_of(cudnn, caches, calls, spacer)
            found["ways"]["cuDNN"] = {}
        except RuntimeError as error:
            found["cuDNN error"] = str(error)[:200]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS + 1):
        for name in list(graphs) if number % 2 else list(graphs)[::-1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / calls)
    for name, values in times.items():
        found["ways"][name] |= {"us": statistics.median(values[1:]), "least": min(values[1:])}
    return found


def show(found: dict[str, Any]) -> None:
    ways = found["ways"]
    parts = [f"{name} {way['us']:.2f} ({way['least']:.2f})" for name, way in ways.items()]
    errors = " ".join(
        f"{w['error']:.1e}/{w['lse error']:.0e}/{w['same bits']}" for w in ways.values() if "error" in w
    )
    print(
        f"{found['row']['name']:16} | {' | '.join(parts)} | {errors} {found.get('cuDNN error', '')}",
        flush=True,
    )


def active_clusters() -> dict[int, int]:
    """Of CTAs with all shared memory, by their size."""
    from cutlass.utils import HardwareInfo

    info = HardwareInfo()
    return {size: info.get_max_active_clusters(size) for size in range(1, 17)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--compile-only", type=int, metavar="JOBS")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    if options.compile_only:
        configs = list(dict.fromkeys(config for row in rows for config, _ in row.ways().values()))
        for done in compile_cache.compile_all(configs, options.compile_only):
            print(done.config.name, done.error)
        return
    torch.zeros(1, device="cuda")
    head = describe_place("decode_clusters", "cuda", options.commit)
    head |= {"method": METHOD, "clusters": active_clusters()}
    print(head, flush=True)
    measured = []
    for row in rows:
        try:
            found = measure(row)
            show(found)
        except (RuntimeError, AssertionError) as error:
            found = {"row": asdict(row), "failed": repr(error)[:300]}
            print(row.name, found["failed"], flush=True)
        measured.append(found)
        torch.cuda.empty_cache()
        if options.out:
            write_text(options.out, dump_rows(head, "rows", measured))


if __name__ == "__main__":
    main()
