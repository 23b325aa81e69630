"""The ring by each of its schedules: time, efficiency over one GPU, memory, and errors against float64.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 4 benchmarks/context_schedules.py --json schedules.json

A schedule says how many parts the heads are done in, and whether the shards of all other ranks come at once
(``hopper_attention.distributed.schedule``). "ring" is the one that is chosen. Units are those of
``context_parallel.py``. Without a GPU tiny sizes run on gloo, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from context_parallel import (
    BOTH,
    FORWARD,
    Cell,
    Setting,
    Shape,
    both,
    connect,
    describe,
    forward,
    measure,
    one_gpu,
    ours,
    row_of,
    show,
    warm_up,
)
from torch import Tensor

from hopper_attention.distributed import shard_sequence, unshard_sequence
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.function import Passes, SharedAttention
from hopper_attention.distributed.layout import ZIGZAG
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.ring import scheduled_forward
from hopper_attention.distributed.ring_backward import scheduled_backward
from hopper_attention.distributed.schedule import (
    RowBytes,
    Schedule,
    backward_schedule,
    forward_schedule,
)
from hopper_attention.experiments.bench.machine import (
    ClockSampler,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.reports import SCHEMA, dump_rows, write_text
from hopper_attention.reference import attention_naive

CHOSEN = "ring"
PARTS = 1, 2, 4, 8
LONG = 131_072


def name_of(schedule: Schedule) -> str:
    return f"{'all shards at once' if schedule.at_once else 'one shard at a time'}, {schedule.parts} parts"


def schedules_of(shape: Shape) -> list[Schedule]:
    """Parts pay where shards are long, and shards at once where they are short."""
    counts = [n for n in PARTS if shape.kv_heads % n == 0]
    if shape.seqlen >= LONG:
        return [Schedule(n) for n in counts]
    return [Schedule(n, at_once) for at_once in (False, True) for n in counts[:2]]


def scheduled(s: Setting, shape: Shape, schedule: Schedule) -> Callable[..., Tensor]:
    """The causal ring by one schedule in both passes."""
    ranks = Ranks.of(s.mesh.get_group(0))
    problem = Problem(ranks.size, shape.seqlen, shape.seqlen, ZIGZAG, right=0)
    passes = Passes(
        partial(scheduled_forward, schedule=schedule), partial(scheduled_backward, schedule=schedule)
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: tuple[Tensor, Tensor] = SharedAttention.apply(
            q, k, v, None, passes, ranks, problem, Call(shape.head_dim**-0.5)
        )
        return found[0]

    return call


def ways_of(s: Setting, shape: Shape) -> dict[str, Callable[..., Tensor]]:
    found = {CHOSEN: ours(s, "ring")}
    return found | {name_of(x): scheduled(s, shape, x) for x in schedules_of(shape)}


def chosen(shape: Shape, world: int) -> str:
    """What the ring does of itself, forward and backward."""
    problem = Problem(world, shape.seqlen, shape.seqlen, ZIGZAG, right=0)
    of_out, of_keys = (2 * shape.head_dim * n for n in (shape.heads, 2 * shape.kv_heads))
    rows = shape.seqlen // world
    sizes = RowBytes(1, rows, rows, shape.heads, shape.kv_heads, of_out, of_keys)
    return f"{name_of(forward_schedule(problem, sizes))}; {name_of(backward_schedule(problem, sizes))}"


def play(s: Setting, shape: Shape, sampler: ClockSampler) -> list[dict[str, Any]]:
    """One GPU on the whole and every schedule on the shards, in an order that changes by rounds."""
    whole = shape.tensors(s.device, s.dtype)
    local = [shard_sequence(x, s.mesh) for x in whole]
    cells = {}
    for kind, make in ((FORWARD, forward), (BOTH, both)):
        cells[f"one GPU, {kind}"] = Cell(kind, make(one_gpu, whole))
        for name, call in ways_of(s, shape).items():
            cells[f"{name}, {kind}"] = Cell(kind, make(call, local))
    for cell in cells.values():
        warm_up(s, cell)
    for number in range(s.rounds):
        # What ran just before is worth as much as a schedule: each round has another order, the same on all ranks.
        for cell in Random(number).sample(list(cells.values()), len(cells)):
            measure(s, cell)
    rows = [row_of(s, shape, name, cell, sampler) for name, cell in cells.items()]
    alone = {row["kind"]: row["seconds"] for row in rows if row["way"].startswith("one GPU")}
    for row in rows:
        if not row["way"].startswith("one GPU"):
            row["efficiency"] = alone[row["kind"]] / dist.get_world_size() / row["seconds"]
    return rows


def errors(s: Setting, shape: Shape) -> list[dict[str, Any]]:
    """Root mean squares of each schedule against float64, over those of the exact values."""
    whole = shape.tensors(s.device, s.dtype)
    *leaves, dout = (x.double().requires_grad_() for x in whole)
    out, _ = attention_naive(*leaves, causal=True)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    local = [shard_sequence(x, s.mesh) for x in whole]
    ways = {"one GPU": both(one_gpu, whole)()}
    for schedule in (Schedule(), Schedule(2), Schedule(at_once=True), Schedule(2, at_once=True)):
        parts = both(scheduled(s, shape, schedule), local)()
        ways[name_of(schedule)] = [unshard_sequence(x, s.mesh) for x in parts]
    names = "out", "dq", "dk", "dv"
    return [
        {"way": way}
        | {
            f"{name}_error": float((x.double() - right).norm() / right.norm())
            for name, x, right in zip(names, found, exact, strict=True)
        }
        for way, found in ways.items()
    ]


def main(arguments: list[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--tokens", type=int, nargs="+", default=[LONG, 32_768], help="of the shapes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="", help="for the report, where git cannot tell")
    options = parser.parse_args(arguments)
    device, mesh = connect()
    on_gpu = device.type == "cuda"
    s = Setting(device, torch.bfloat16, mesh, options.rounds)
    shapes = [Shape(n, h, hk) for n in options.tokens for h, hk in ((16, 16), (32, 8))]
    shapes = shapes if on_gpu else [Shape(256, 4, 2, 64)]
    gauge = find_gauge(str(device))
    found_errors = errors(s, Shape(4096, 4, 2) if on_gpu else Shape(256, 4, 2, 64))
    rows: list[dict[str, Any]] = []
    with ClockSampler(gauge) as sampler:
        for shape in shapes:
            found = play(s, shape, sampler)
            rows += found
            if dist.get_rank() == 0:
                show(found)
    if dist.get_rank() == 0:
        for row in found_errors:
            print("error", row, flush=True)
        if options.json:
            head = {
                "schema": SCHEMA,
                "kind": "context_schedules",
                "date": today(),
                "commit": options.commit or find_commit(repository_root()),
                **describe(device, gauge, shapes),
                "chosen": {shape.name: chosen(shape, dist.get_world_size()) for shape in shapes},
                "method": f"median of {s.rounds} rounds, each in its own order, the slowest rank's time, {s.dtype}",
                "errors": found_errors,
            }
            write_text(options.json, dump_rows(head, "cells", rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
