"""Host time of calls of ulysses over peer memory on a CPU, with kernels, links and peers that do nothing.

    python benchmarks/context_host.py [--calls 300] [--rounds 9] [--profile] [--out context_host.json]

One process is rank 0 of four by name, and tensors of the CPU stand for those of a GPU: torch's own work on a tensor
and the project's Python are there, and neither a driver, nor streams, nor barriers. Kinds of calls take turns for some
rounds, of which the least counts, as others may use the machine. Backward is what ``torch.autograd.grad`` takes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import tvm_ffi
from torch import Tensor
from torch._C._dynamo import guards
from torch.testing._internal.distributed.fake_pg import FakeStore

from cute_kernels.launches.config import LaunchesConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention.backends import Target
from hopper_attention.distributed import checks, context_parallel_attention, ulysses
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.layout import ZIGZAG
from hopper_attention.distributed.peers import PeerMemory
from hopper_attention.distributed.pushed import PushedExchange, bytes_for
from hopper_attention.launch import backward, copies, forward, gradients_again

Call = Callable[[], Any]
WORLD = 4
TARGET = Target("named H200", (9, 0), assume_installed=True)
MULTIPROCESSORS = 132
SHAPE = 1, 64, 16, 64
"""Of the rows of a rank. What the CPU copies in place of a GPU, out of a buffer, is meant to be little."""


class OneBuffer(PeerMemory):
    """Stands for the memory of all ranks."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self.views: dict[tuple[Any, ...], Tensor] = {}

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        key = rank, shape, dtype, offset
        if key not in self.views:
            room = self.buffer[offset : offset + math.prod(shape) * dtype.itemsize]
            self.views[key] = room.view(dtype).view(shape)
        return self.views[key]

    def begin(self) -> None:
        pass

    def meet(self) -> None:
        pass

    def copy_aside(self, x: Tensor) -> Tensor:
        return x.clone()

    def wait(self) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        pass

    def after(self, mark: None) -> None:
        pass

    def give_head_start(self) -> None:
        pass


def pretend() -> PushedExchange:
    """Let the project take this process for rank 0 of four with a GPU each; what exchanges heads."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    exchange = PushedExchange(Ranks.of(None), OneBuffer(bytes_for(1)), lambda nbytes: OneBuffer(nbytes))
    replaced: list[tuple[Any, str, Any]] = [
        (ulysses, "_pushes_between", lambda group, ranks, device: exchange),
        (checks, "tell_each_other", lambda ranks, said, doing: [json.loads(json.dumps(said))] * WORLD),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda index: mock.Mock(multi_processor_count=MULTIPROCESSORS)),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (device_memory, "_bytes_of_current_stream", lambda index, size: torch.empty(size, dtype=torch.uint8)),
        (device_memory, "empty_on_gpu", guards._empty_strided_cpu),
        (device_memory, "tile_counter", lambda index: counter),
    ]
    # It takes arguments as kernels do, tensors of torch among them.
    nop = tvm_ffi.get_global_func("testing.nop")
    counter = torch.zeros(2, dtype=torch.int32)
    replaced += [(module, "target_of", lambda device: TARGET) for module in (forward, backward, copies)]
    replaced += [(module, "current_device", lambda: 0) for module in (copies, gradients_again)]
    getters = [name for name in vars(compile_cache) if name.startswith("get_")]
    get_serving = compile_cache.get_serving

    def get(config: Any, *options: Any) -> Any:
        # What makes several launches one needs no GPU.
        return get_serving(config) if isinstance(config, LaunchesConfig) else nop

    replaced += [(compile_cache, name, get) for name in getters]
    replaced.append((Tensor, "is_cuda", True))
    for owner, name, stand_in in replaced:
        setattr(owner, name, stand_in)
    return exchange


def calls_of(exchange: PushedExchange, causal: bool) -> dict[str, Call]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE).bfloat16() for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn(SHAPE).bfloat16()

    def both(memory: str = "auto") -> None:
        out = context_parallel_attention(*leaves, method="ulysses", causal=causal, memory=memory)
        torch.autograd.grad(out, leaves, dout)

    of_heads = torch.randn(1, WORLD * SHAPE[1], SHAPE[2] // WORLD, SHAPE[3]).bfloat16()

    def attend(*qkv: Tensor) -> Any:
        return context_parallel_attention(*qkv, method="ulysses", causal=causal)

    return {
        "forward and backward, in parts": lambda: both("least"),
        "forward": lambda: attend(q, k, v),
        "forward, with gradients": lambda: attend(*leaves),
        "forward and backward": both,
        "of it: Q, K, V to heads": lambda: exchange.lend_heads((q, k, v), ZIGZAG),
        "of it: out to rows": lambda: exchange.to_rows([of_heads], ZIGZAG),
        "of it: dO to heads": lambda: exchange.lend_heads((dout,), ZIGZAG),
        "of it: dQ, dK, dV to rows": lambda: exchange.take_rows(exchange.offer([of_heads] * 3, ZIGZAG)),
    }


def time_calls(call: Call, number: int) -> float:
    """Microseconds of one."""
    began = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - began) / number * 1e6


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    torch.set_num_threads(1)
    calls = calls_of(pretend(), causal=True)
    for call in calls.values():
        time_calls(call, 20)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(o.rounds):
        for name, call in calls.items():
            found[name].append(time_calls(call, o.calls))
    least = {name: round(min(times), 1) for name, times in found.items()}
    for name, times in found.items():
        print(f"{name:30} {least[name]:8.1f} us, median {statistics.median(times):8.1f}")
    if o.profile:
        for name, call in calls.items():
            profile = cProfile.Profile()
            profile.runcall(time_calls, call, 500)
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    if o.out:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        o.out.write_text(json.dumps(versions | {"shape": SHAPE, "microseconds": least}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
