"""Where the time of one call on several GPUs goes: its kernels by stream, as the profiler saw them on each rank.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/context_timeline.py --json timeline.json [--tokens 32768]

A forward and a backward pass after a barrier, the third of three. Times are microseconds from the beginning of the
call on the host, so that what comes before the first kernel is the host's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_parallel import Run, Setting, Shape, both, connect, ours
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from hopper_attention.distributed import shard_sequence
from hopper_attention.experiments.reports import SCHEMA, dump_rows, write_text

CALL = "one call"
WARM_UPS = 2


def kernels_of(run: Run) -> list[dict[str, Any]]:
    """Kernels and copies of a run on this rank's GPU, by their beginning."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        dist.barrier()
        with record_function(CALL):
            run()
        torch.cuda.synchronize()
    events = list(profiler.profiler.kineto_results.events())
    began = min(event.start_ns() for event in events if event.name() == CALL)
    on_gpu = [event for event in events if event.device_type() == DeviceType.CUDA]
    rows = [
        {
            "name": event.name()[:80],
            "stream": event.device_resource_id(),
            "start_us": round((event.start_ns() - began) * 1e-3, 1),
            "us": round(event.duration_ns() * 1e-3, 1),
        }
        for event in on_gpu
        if event.start_ns() > began and event.name() != CALL
    ]
    return sorted(rows, key=lambda row: row["start_us"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the kernels go")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 16), help="of q, and of k and v")
    parser.add_argument("--method", default="ring")
    options = parser.parse_args(arguments)
    device, mesh = connect()
    if device.type != "cuda":
        raise SystemExit("a timeline of kernels needs GPUs")
    s, shape = Setting(device, torch.bfloat16, mesh, rounds=1), Shape(options.tokens, *options.heads)
    local = [shard_sequence(x, mesh) for x in shape.tensors(device, s.dtype)]
    run = both(ours(s, options.method), local)
    for _ in range(WARM_UPS):
        run()
        s.wait()
    kernels = kernels_of(run)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, kernels)
    if dist.get_rank() == 0:
        rows = [{"rank": rank} | row for rank, found in enumerate(of_ranks) for row in found]
        for row in rows:
            print(json.dumps(row), flush=True)
        if options.json:
            head = {
                "schema": SCHEMA,
                "kind": "context_timeline",
                "shape": shape.name,
                "method": options.method,
            }
            write_text(options.json, dump_rows(head, "kernels", rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
