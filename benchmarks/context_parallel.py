"""Attention over several GPUs of one host beside one GPU on its share, and beside the ways of others.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/context_parallel.py --json report.json [--quick]

``--short`` is about what ``auto`` takes, beside torch and ring-flash-attn (``context_peers.py``): 32k tokens, with
ulysses by peer memory and by messages, then 128k with the ring alone. The report is written anew as each part ends.

Every rank also runs the whole problem alone, all at once, so that clocks are the same: an efficiency is the time
of one GPU over ranks times that of all. A round measures each way once, in an order of its own; a time is the median
of the rounds, each the slowest rank's. It is that of a call on idle GPUs, which wait for the host. Short shapes are
called some times more in a row, as by the layers of a model, which has a time of its own. Errors are root mean squares
against float64. Without a GPU tiny sizes run on gloo, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from context_peers import ROTATIONS, Peer, ring_flash_attns, torchs_own, why_no_ring_flash_attn
from context_variants import VARIANTS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hopper_attention import flash_attn_fp8_func, flash_attn_func
from hopper_attention.distributed import (
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
    ulysses,
    unshard_sequence,
)
from hopper_attention.distributed.auto import ULYSSES
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange
from hopper_attention.distributed.pushed import PushedExchange
from hopper_attention.experiments.bench.machine import (
    ClockSampler,
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.reports import SCHEMA, dump_rows, write_text
from hopper_attention.quantized import DEFAULT_QUANTIZATION
from hopper_attention.reference import attention_naive

HEAD_DIM = 128
METHODS = ("ring", "all_gather", "ulysses")
LEAST_MEMORY = {f"{method}, least memory": method for method in ("ring", "auto", ULYSSES)}
"""By name, the method."""
SHORT_METHODS = ("auto", "ring", *LEAST_MEMORY, "ulysses", *VARIANTS)
LONG = 131_072
MORE_IN_A_ROW = 4
"""Calls of a short shape behind the first one of a round."""
FORWARD, BOTH = "forward", "forward + backward"

Run = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A causal problem of one sequence."""

    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int = HEAD_DIM

    @property
    def name(self) -> str:
        return f"s{self.seqlen}-h{self.heads}-hk{self.kv_heads}-d{self.head_dim}-causal"

    def flops(self, kind: str) -> float:
        products = 2 if kind == FORWARD else 7
        return 1.0 * products * self.seqlen**2 * self.heads * self.head_dim

    def tensors(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and dout of the whole, the same on every rank."""
        g = torch.Generator(device).manual_seed(5)
        counts = self.heads, self.kv_heads, self.kv_heads, self.heads
        sizes = ((1, self.seqlen, n, self.head_dim) for n in counts)
        return [torch.randn(size, generator=g, device=device, dtype=dtype) for size in sizes]


@dataclass(frozen=True)
class Setting:
    """Where and how long to measure."""

    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh
    rounds: int
    margins: tuple[int, ...] = ()
    is_short: bool = False
    only: tuple[str, ...] = ()

    def wants(self, *ways: str) -> bool:
        """Whether one of these ways is to be measured: by its name, with the pass behind a comma or without."""
        names = {name for way in ways for name in (way, way.rpartition(", ")[0])}
        return not self.only or not names.isdisjoint(self.only)

    def methods(self, shape: Shape) -> tuple[str, ...]:
        """What runs a shape."""
        if not self.is_short:
            return METHODS
        return SHORT_METHODS if shape.seqlen < LONG else ("ring",)

    def methods_of_fp8(self, shape: Shape) -> tuple[str, ...]:
        """What runs a forward pass in FP8."""
        if not self.is_short:
            return ("ring",)
        return ("ring", "ulysses") if shape.seqlen < LONG else ("ring",)

    @property
    def beside_peers(self) -> str:
        """The method that takes turns with those of others."""
        return "auto" if self.is_short else "ring"

    def rounds_of(self, shape: Shape) -> int:
        """Long shapes vary less, and take long."""
        return min(self.rounds, 3) if self.is_short and shape.seqlen >= LONG else self.rounds

    def more_in_a_row(self, shape: Shape) -> int:
        """Long shapes have long calls, which do not wait for the host."""
        return MORE_IN_A_ROW if self.is_short and shape.seqlen < LONG else 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def moment(self) -> Any:
        """When all that was launched before has been done."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Seconds from one moment to another."""
        return start.elapsed_time(stop) * 1e-3 if self.on_gpu else stop - start


@dataclass
class Cell:
    """Rounds of one way to run one shape, and when each was."""

    kind: str
    run: Run
    more: int = 0
    seconds: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    extra_bytes: int = 0
    result_bytes: int = 0


def both(call: Callable[..., Tensor], tensors: list[Tensor]) -> Run:
    """A forward and a backward pass; returns out and the gradients."""
    *inputs, dout = tensors
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def run() -> list[Tensor]:
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return run


def forward(call: Callable[..., Tensor], tensors: list[Tensor]) -> Run:
    """A forward pass alone."""
    inputs = tensors[:3]

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [call(*inputs)]

    return run


def ours(s: Setting, method: str, **options: Any) -> Callable[..., Tensor]:
    name = ULYSSES if method in VARIANTS else method
    if method in LEAST_MEMORY:
        name, options = LEAST_MEMORY[method], options | {"memory": "least"}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with VARIANTS[method]() if method in VARIANTS else nullcontext():
            found = context_parallel_attention(q, k, v, s.mesh, method=name, causal=True, **options)
        assert isinstance(found, Tensor)
        return found

    return call


def one_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def one_gpu_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_fp8_func(q, k, v, causal=True)


def cells_of(s: Setting, shape: Shape, kinds: tuple[str, ...]) -> dict[str, Cell]:
    """One GPU on the whole, and every method of ours on the shards."""
    whole = shape.tensors(s.device, s.dtype)
    local = [shard_sequence(x, s.mesh) for x in whole]
    found = {}
    for kind in kinds:
        make = forward if kind == FORWARD else both
        found[f"one GPU, {kind}"] = Cell(kind, make(one_gpu, whole))
        for method in s.methods(shape):
            found[f"{method}, {kind}"] = Cell(kind, make(ours(s, method), local))
        for margin in s.margins:
            found[f"ring, {margin} SMs free, {kind}"] = Cell(
                kind, make(ours(s, "ring", sm_margin=margin), local)
            )
    methods_of_fp8 = s.methods_of_fp8(shape)
    if FORWARD in kinds and methods_of_fp8:
        found["one GPU FP8, forward"] = Cell(FORWARD, forward(one_gpu_fp8, whole))
        for method in methods_of_fp8:
            of_fp8 = ours(s, method, quantization=DEFAULT_QUANTIZATION)
            found[f"{method} FP8, forward"] = Cell(FORWARD, forward(of_fp8, local))
    wanted = [way for way in found if s.wants(way)]
    # One GPU is what efficiency is over.
    beside = {f"one GPU{' FP8' * (' FP8' in way)}, {found[way].kind}" for way in wanted}
    return {way: cell for way, cell in found.items() if way in wanted or way in beside}


def largest(s: Setting, value: float) -> float:
    """Of all ranks."""
    worst = torch.tensor([value], dtype=torch.float64, device=s.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def measure(s: Setting, cell: Cell) -> None:
    """One round of a cell, on all ranks at once."""
    s.wait()
    dist.barrier()
    clock = [s.moment()]
    began = time.perf_counter()
    cell.run()
    clock.append(s.moment())
    cell.host_seconds.append(time.perf_counter() - began)
    for _ in range(cell.more):
        cell.run()
    clock.append(s.moment())
    s.wait()
    start, stop, end = clock
    cell.spans.append((began, time.perf_counter()))
    cell.seconds.append(largest(s, s.between(start, stop)))
    if cell.more:
        cell.in_a_row.append(largest(s, s.between(stop, end) / cell.more))


def warm_up(s: Setting, cell: Cell) -> None:
    """Compile and connect; then the memory that a call needs beside what was there, results included, and theirs.

    It is that of the third call: the second is the last one that is not known to be made again."""
    for _ in range(2):
        cell.result_bytes = sum(x.numel() * x.element_size() for x in cell.run())
    s.wait()
    dist.barrier()
    if s.on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cell.run()
        s.wait()
        cell.extra_bytes = int(largest(s, torch.cuda.max_memory_allocated() - before))


def play(s: Setting, shape: Shape, kinds: tuple[str, ...], sampler: ClockSampler) -> list[dict[str, Any]]:
    """All cells of a shape in turns, as rows of the report."""
    cells = cells_of(s, shape, kinds)
    for cell in cells.values():
        cell.more = s.more_in_a_row(shape)
        warm_up(s, cell)
    for number in range(s.rounds_of(shape)):
        # What ran just before is worth as much as a method: each round has another order, the same on all ranks.
        for cell in Random(number).sample(list(cells.values()), len(cells)):
            measure(s, cell)
    rows = [row_of(s, shape, name, cell, sampler) for name, cell in cells.items()]
    for row in rows:
        alone = next(r for r in rows if r["way"] == f"one GPU, {row['kind']}")
        if not row["way"].startswith("one GPU"):
            for way in ("", "_in_a_row")[: 1 + ("seconds_in_a_row" in row)]:
                times = alone[f"seconds{way}"], row[f"seconds{way}"]
                row[f"efficiency{way}"] = times[0] / dist.get_world_size() / times[1]
        if row["way"].endswith("FP8, forward"):
            of_16_bits = next(r for r in rows if r["way"] == row["way"].replace(" FP8", ""))
            row["over_16_bits"] = of_16_bits["seconds"] / row["seconds"]
    return rows


def play_peers(s: Setting, shape: Shape, peers: list[Peer], sampler: ClockSampler) -> list[dict[str, Any]]:
    """Each peer in turns with one of our methods; what it cannot do is in the report."""
    whole = shape.tensors(s.device, s.dtype)
    local = [shard_sequence(x, s.mesh) for x in whole]
    mine = Cell(BOTH, both(ours(s, s.beside_peers), local))
    warm_up(s, mine)
    rows = []
    for peer in peers:
        try:
            with peer.prepare(s.mesh, whole, local) as run:
                cell = Cell(BOTH, run)
                warm_up(s, cell)
                mine.more = cell.more = s.more_in_a_row(shape)
                mine.seconds.clear()
                mine.in_a_row.clear()
                for _ in range(s.rounds_of(shape)):
                    measure(s, cell)
                    measure(s, mine)
        except (ImportError, RuntimeError, NotImplementedError) as error:
            rows.append(
                {"shape": shape.name, "way": peer.name, "kind": BOTH, "unavailable": str(error)[:200]}
            )
            continue
        row = row_of(s, shape, peer.name, cell, sampler)
        row["ours"] = s.beside_peers
        row["ours_seconds"] = statistics.median(mine.seconds)
        row["ours_over_it"] = row["seconds"] / row["ours_seconds"]
        if mine.in_a_row:
            row["ours_seconds_in_a_row"] = statistics.median(mine.in_a_row)
            row["ours_over_it_in_a_row"] = row["seconds_in_a_row"] / row["ours_seconds_in_a_row"]
        rows.append(row)
    return rows


def peers_of(s: Setting, shape: Shape, without_torch: bool) -> list[Peer]:
    """Those that are measured beside ours."""
    backends = ("CUDNN_ATTENTION", "FLASH_ATTENTION") if s.on_gpu else ("FLASH_ATTENTION",)
    rotations, rings = ROTATIONS, [] if why_no_ring_flash_attn() else ring_flash_attns()
    if s.is_short:
        # FlashAttention-2 took half as long again in every shape.
        backends = backends[:1]
    if s.is_short and shape.seqlen >= LONG:
        # They take long: of each the one that should be the fastest, and ring-flash-attn as it is published.
        rotations, rings = rotations[:1], list(dict.fromkeys((*rings[:1], *rings[-1:])))
    found = rings if without_torch else rings + torchs_own(backends, rotations)
    return [peer for peer in found if s.wants(peer.name)]


def row_of(s: Setting, shape: Shape, name: str, cell: Cell, sampler: ClockSampler) -> dict[str, Any]:
    seconds = statistics.median(cell.seconds)
    clock, power = sampler.window(cell.spans)
    ranks = 1 if name.startswith("one GPU") else dist.get_world_size()
    kv_shard = 2 * 2 * shape.seqlen // dist.get_world_size() * shape.kv_heads * shape.head_dim
    return {
        "shape": shape.name,
        "way": name,
        "kind": cell.kind,
        "seconds": seconds,
        **({"seconds_in_a_row": statistics.median(cell.in_a_row)} if cell.in_a_row else {}),
        "host_seconds": statistics.median(cell.host_seconds or [0.0]),
        "spread": (max(cell.seconds) - min(cell.seconds)) / seconds,
        "tflops_a_gpu": shape.flops(cell.kind) / ranks / seconds * 1e-12,
        "extra_bytes": cell.extra_bytes,
        "result_bytes": cell.result_bytes,
        "kv_shard_bytes": kv_shard,
        "out_bytes": 2 * shape.seqlen // ranks * shape.heads * shape.head_dim,
        "clock_mhz": clock,
        "power_w": power,
    }


def errors(s: Setting, shape: Shape) -> list[dict[str, Any]]:
    """Of every method and of one GPU against float64: root mean square over that of the exact values."""
    whole = shape.tensors(s.device, s.dtype)
    *inputs, dout = (x.double() for x in whole)
    leaves = [x.requires_grad_() for x in inputs]
    out, _ = attention_naive(*leaves, causal=True)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    local = [shard_sequence(x, s.mesh) for x in whole]
    ways = {"one GPU": both(one_gpu, whole)()}
    for method in s.methods(shape):
        if s.wants(f"{method}, {FORWARD}", f"{method}, {BOTH}"):
            ways[method] = [unshard_sequence(x, s.mesh) for x in both(ours(s, method), local)()]
    for peer in peers_of(s, shape, without_torch=True):
        with suppress(RuntimeError), peer.prepare(s.mesh, whole, local) as run:
            ways[peer.name] = [unshard_sequence(x, s.mesh) for x in run()]
    with torch.no_grad():
        ways["one GPU FP8"] = [one_gpu_fp8(*whole[:3])]
        for method in s.methods_of_fp8(shape):
            if s.wants(f"{method} FP8, forward"):
                fp8 = ours(s, method, quantization=DEFAULT_QUANTIZATION)
                ways[f"{method} FP8"] = [unshard_sequence(fp8(*local[:3]), s.mesh)]
    return differences(shape, ways, exact)


def differences(shape: Shape, ways: dict[str, list[Tensor]], right: list[Tensor]) -> list[dict[str, Any]]:
    """Of each way's output and gradients from the right ones: root mean square over that of these."""
    names = "out", "dq", "dk", "dv"
    return [
        {"shape": shape.name, "way": way}
        | {
            f"{name}_error": float((x.double() - y.double()).norm() / y.double().norm())
            for name, x, y in zip(names, found, right, strict=False)
        }
        for way, found in ways.items()
    ]


def beside_one_gpu(s: Setting, shape: Shape) -> list[dict[str, Any]]:
    """How far the methods are from one GPU on a whole problem that is too long for float64."""
    whole = shape.tensors(s.device, s.dtype)
    alone = both(one_gpu, whole)()
    local = [shard_sequence(x, s.mesh) for x in whole]
    ways = {
        f"{method} from one GPU": [unshard_sequence(x, s.mesh) for x in both(ours(s, method), local)()]
        for method in s.methods(shape)
        if s.wants(f"{method}, {FORWARD}", f"{method}, {BOTH}")
    }
    return differences(shape, ways, alone)


def connect() -> tuple[torch.device, DeviceMesh]:
    """Join the ranks that torchrun started. Transfers get streams of high priority, and NVLink multicast stays off."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        return torch.device("cpu"), init_device_mesh("cpu", (dist.get_world_size(),))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), pg_options=options, device_id=device)
    return device, init_device_mesh("cuda", (dist.get_world_size(),))


def main(arguments: list[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--quick", action="store_true", help="32k tokens of 16 heads and few rounds")
    parser.add_argument(
        "--short", action="store_true", help="what auto takes beside others, short shards first"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[131_072, 32_768], help="of the shapes")
    parser.add_argument("--without-torch", action="store_true", help="leave torch's context_parallel out")
    parser.add_argument("--heads", nargs="+", default=["16,16", "32,8"], help="of Q and of K and V")
    parser.add_argument("--only", nargs="+", default=[], help="ways of these names, and one GPU beside them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--margins", default="8", help="numbers of SMs to leave to transfers, to try beside 0"
    )
    parser.add_argument("--commit", default="", help="for the report, where git cannot tell")
    options = parser.parse_args(arguments)
    device, mesh = connect()
    on_gpu = device.type == "cuda"
    rounds = 3 if options.quick else options.rounds
    margins = tuple(int(n) for n in options.margins.split(",") if n) if on_gpu else ()
    margins = () if options.short else margins
    s = Setting(device, torch.bfloat16, mesh, rounds, margins, options.short, tuple(options.only))
    heads = [tuple(map(int, pair.split(","))) for pair in options.heads]
    shapes = [Shape(n, *pair) for n in options.tokens for pair in heads]
    shapes = [Shape(32_768, 16, 16)] if options.quick else shapes
    if options.short:
        shapes.sort(key=lambda shape: shape.seqlen)
    shapes = shapes if on_gpu else [Shape(256, 4, 2, 64)]
    of_errors = Shape(4096, 4, 2) if on_gpu else Shape(256, 4, 2, 64)
    gauge = find_gauge(str(device))
    rows: list[dict[str, Any]] = []
    carried = carrier(s)
    about = describe(device, gauge, shapes) | {"ulysses_by": carried.name}
    with ClockSampler(gauge) as sampler:
        found_errors = errors(s, of_errors)
        for shape in shapes:
            rows += play(s, shape, (FORWARD, BOTH), sampler)
            # Rooms grow with what is exchanged; short shapes come first.
            about[f"room_bytes_after_{shape.name}"] = room_bytes(carried)
            if s.is_short and shape.seqlen < LONG:
                found_errors += beside_one_gpu(s, shape)
            save(options, s, rows, found_errors, about)
            rows += play_peers(s, shape, peers_of(s, shape, options.without_torch), sampler)
            save(options, s, rows, found_errors, about)
            of_shape = [row for row in rows if row["shape"] == shape.name]
            if not of_shape:
                allowed = (
                    f"{'; '.join(s.methods(shape))}; each with its pass or without, and peers by their names"
                )
                raise ValueError(f"--only is {'; '.join(s.only)}, allowed: {allowed}")
            if dist.get_rank() == 0:
                show(of_shape)
    if dist.get_rank() == 0:
        show_errors(found_errors)
        print("ulysses by", carried.name, "in a room of", room_bytes(carried), "bytes", flush=True)
    dist.destroy_process_group()
    return 0


def describe(device: torch.device, gauge: Any, shapes: list[Shape]) -> dict[str, Any]:
    """The machine, and what ``auto`` would choose."""
    ranks = dist.get_world_size()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
    plans = {
        shape.name: str(
            explain_context_parallel(
                ranks, shape.seqlen, shape.heads, shape.kv_heads, shape.head_dim, causal=True
            )
        )
        for shape in shapes
    }
    return {"ranks": ranks, "machine": describe_machine(str(device), gauge) | {"nccl": nccl}, "auto": plans}


def carrier(s: Setting) -> HeadExchange:
    """What carries the heads of ulysses between short shards. All ranks ask together."""
    return ulysses.exchange_for(Ranks.of(s.mesh.get_group(0)), 1, s.device)


def room_bytes(carried: HeadExchange) -> int:
    """Of the memory that a group keeps beside what calls take; it is not in ``extra_bytes``."""
    return carried.memory.nbytes if isinstance(carried, PushedExchange) else 0


def report(
    commit: str,
    s: Setting,
    rows: list[dict[str, Any]],
    found_errors: list[dict[str, Any]],
    about: dict[str, Any],
) -> str:
    head = {
        "schema": SCHEMA,
        "kind": "context_parallel",
        "date": today(),
        "commit": commit or find_commit(repository_root()),
        **about,
        "method": f"median of {s.rounds} rounds in turns, the slowest rank's time, {s.dtype}, inputs N(0, 1), zigzag",
        "errors": found_errors,
    }
    return dump_rows(head, "cells", rows)


def save(options: argparse.Namespace, s: Setting, *found: Any) -> None:
    """The report so far."""
    if options.json and dist.get_rank() == 0:
        write_text(options.json, report(options.commit, s, *found))


def show(rows: list[dict[str, Any]]) -> None:
    print(rows[0]["shape"], flush=True)
    for row in rows:
        if "unavailable" in row:
            print(f"  {row['way']:52} {row['unavailable']}", flush=True)
            continue
        other = {"efficiency": "efficiency", "ours_over_it": "ours over it", "over_16_bits": "over 16 bits"}
        other |= {f"{key}_in_a_row": "in a row" for key in ("efficiency", "ours_over_it")}
        notes = "".join(f"  {title} {row[key]:.3f}" for key, title in other.items() if key in row)
        print(
            f"  {row['way']:52} {row['seconds'] * 1e3:9.3f} ms {row['tflops_a_gpu']:7.1f} TFLOP/s a GPU "
            f"{row['extra_bytes'] / 2**20:8.0f} MiB  host {row['host_seconds'] * 1e3:.2f} ms{notes}",
            flush=True,
        )


def show_errors(found: list[dict[str, Any]]) -> None:
    for row in found:
        values = "  ".join(f"{key[:-6]} {value:.2e}" for key, value in row.items() if key.endswith("_error"))
        print(f"error on {row['shape']}, {row['way']:12} {values}", flush=True)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Not by sys.exit: a thread of gloo that still lets go of the last exchange's tensors wants Python's lock for it,
    # and aborts the process if Python ends meanwhile.
    os._exit(status)
