"""One rank of a causal ring by itself on one GPU, with messages left out: what its kernels and copies take, and memory.

    python benchmarks/context_alone.py --json alone.json [--ranks 4] [--tokens 131072 32768]

Each schedule (``hopper_attention.distributed.schedule``) runs the steps of the first, the second and the last rank.
Keys that would arrive are whatever the memory holds, so that there is no result to check. Times are beside that of one
GPU on the whole, over the ranks: what is lost without any message is in tails, merges and copies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from context_parallel import BOTH, FORWARD, Shape, one_gpu
from context_schedules import LONG, chosen, name_of, schedules_of
from torch import Tensor

from hopper_attention.distributed import ring, ring_backward
from hopper_attention.distributed.attend import Call, Saved
from hopper_attention.distributed.exchange import Message, Ranks, Transfer
from hopper_attention.distributed.layout import ZIGZAG
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.schedule import Schedule
from hopper_attention.experiments.bench.machine import (
    describe_machine,
    find_commit,
    find_gauge,
    repository_root,
    today,
)
from hopper_attention.experiments.reports import SCHEMA, dump_rows, write_text

Run = Callable[[], Any]


def exchange(ranks: Ranks, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
    """Nothing is sent; as much memory is held."""
    return Transfer(ranks, [], [x for message in (*sends, *receives) for x in message.tensors])


def runs_of(shape: Shape, world: int, rank: int, schedule: Schedule, tensors: list[Tensor]) -> dict[str, Run]:
    """The passes of a rank, by kind."""
    ranks = Ranks(None, rank, world)  # type: ignore[arg-type]  # no message is sent
    problem = Problem(world, shape.seqlen, shape.seqlen, ZIGZAG, right=0)
    call = Call(shape.head_dim**-0.5)
    q, k, v, dout = tensors

    def forward() -> tuple[Tensor, Tensor]:
        return ring.scheduled_forward(ranks, problem, call, (q, k, v), None, schedule=schedule)

    def both() -> Any:
        saved = Saved(q, *forward(), dout, None)
        return saved.out, ring_backward.scheduled_backward(
            ranks, problem, call, saved, (k, v), schedule=schedule
        )

    return {FORWARD: forward, BOTH: both}


def whole_runs(shape: Shape, tensors: list[Tensor]) -> dict[str, Run]:
    """One GPU's own calls."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]

    def forward() -> Tensor:
        with torch.no_grad():
            return one_gpu(*leaves)

    def both() -> Any:
        out = one_gpu(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves, tensors[3])

    return {FORWARD: forward, BOTH: both}


def measure(run: Run, rounds: int) -> dict[str, Any]:
    """Median seconds, and bytes beside what was there."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    extra, seconds = torch.cuda.max_memory_allocated() - before, []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(stop) * 1e-3)
    return {"seconds": statistics.median(seconds), "extra_bytes": extra}


def play(shape: Shape, world: int, rounds: int) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    whole = shape.tensors(device, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    alone = {}
    for kind, run in whole_runs(shape, whole).items():
        alone[kind] = measure(run, rounds)["seconds"] / world
        rows.append({"shape": shape.name, "way": "one GPU", "kind": kind, "seconds": alone[kind]})
    # As many rows as a rank has; which ones makes no difference.
    local = [x[:, : shape.seqlen // world].contiguous() for x in whole]
    shard = 2 * local[1].nbytes
    del whole
    with (
        mock.patch.object(ring, "exchange", exchange),
        mock.patch.object(ring_backward, "exchange", exchange),
    ):
        for schedule in schedules_of(shape):
            for rank in sorted({0, 1, world - 1}):
                for kind, run in runs_of(shape, world, rank, schedule, local).items():
                    found = measure(run, rounds)
                    gradients = local[0].nbytes + shard if kind == BOTH else 0
                    rows.append(
                        {
                            "shape": shape.name,
                            "way": name_of(schedule),
                            "rank": rank,
                            "kind": kind,
                            "efficiency_without_messages": alone[kind] / found["seconds"],
                            "over_aim": (found["extra_bytes"] - gradients) / (local[0].nbytes + 2 * shard),
                            **found,
                        }
                    )
    return rows


def main(arguments: list[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--ranks", type=int, default=4, help="of the group that the rank would be of")
    parser.add_argument("--tokens", type=int, nargs="+", default=[LONG, 32_768], help="of the shapes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="for the report, where git cannot tell")
    options = parser.parse_args(arguments)
    shapes = [Shape(n, h, hk) for n in options.tokens for h, hk in ((16, 16), (32, 8))]
    rows = []
    for shape in shapes:
        found = play(shape, options.ranks, options.rounds)
        rows += found
        print(shape.name, "is done by", chosen(shape, options.ranks), flush=True)
        for row in found:
            notes = "".join(f"  {key} {row[key]:.3f}" for key in row if key.startswith(("eff", "over")))
            print(
                f"  {row['way']:40} rank {row.get('rank', '-')} {row['kind']:20}"
                f" {row['seconds'] * 1e3:9.3f} ms{notes}",
                flush=True,
            )
    if options.json:
        head = {
            "schema": SCHEMA,
            "kind": "context_alone",
            "date": today(),
            "commit": options.commit or find_commit(repository_root()),
            "ranks": options.ranks,
            "machine": describe_machine("cuda", find_gauge("cuda")),
            "chosen": {shape.name: chosen(shape, options.ranks) for shape in shapes},
            "method": f"median of {options.rounds}, bfloat16, one rank of a zigzag, messages left out",
        }
        write_text(options.json, dump_rows(head, "cells", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
