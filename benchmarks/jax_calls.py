"""Host time and device time of a call in JAX beside the same call in PyTorch, on a GPU.

    python benchmarks/jax_calls.py --out jax_calls.json

Host time is that of a call which waits for nothing, after the first ones, of jitted JAX and of plain PyTorch, in turns.
Device time is that of many calls until the last result is there, of a problem that is large enough to hide the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

from hopper_attention import flash_attn_func
from hopper_attention.integrations.jax import flash_attention

SMALL, LARGE = (1, 128, 2, 128), (1, 16384, 16, 128)
"""(batch, seqlen, heads, head_dim) for host time, and for device time."""


def torch_call(shape: tuple[int, ...]) -> tuple[Callable[[], Any], Callable[[], None]]:
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return functools.partial(flash_attn_func, *inputs, causal=True), torch.cuda.synchronize


def jax_call(shape: tuple[int, ...]) -> tuple[Callable[[], Any], Callable[[], None]]:
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    call = jax.jit(functools.partial(flash_attention, causal=True, backend="hopper"))
    last: list[Any] = []

    def run() -> None:
        last[:] = [call(*inputs)]

    return run, lambda: jax.block_until_ready(last)


def host_us(call: Callable[[], Any], wait: Callable[[], None], calls: int) -> float:
    """Median time of a call, with nothing queued before it."""
    times = []
    for _ in range(calls):
        wait()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    wait()
    return statistics.median(times) * 1e6


def device_us(call: Callable[[], Any], wait: Callable[[], None], calls: int) -> float:
    """Mean time of calls back to back."""
    call()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls * 1e6


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    figures: dict[str, Any] = {"jax": jax.__version__, "torch": torch.__version__, "rounds": options.rounds}
    for what, shape, measure, calls in (("host", SMALL, host_us, 300), ("device", LARGE, device_us, 20)):
        peers = {"torch": torch_call(shape), "jax": jax_call(shape)}
        for call, wait in peers.values():
            call()
            wait()
        rounds = [
            {name: measure(*peer, calls) for name, peer in peers.items()} for _ in range(options.rounds)
        ]
        medians = {name: statistics.median(each[name] for each in rounds) for name in peers}
        ratio = statistics.median(each["jax"] / each["torch"] for each in rounds)
        figures[what] = {"shape": shape, "us": medians, "jax over torch": ratio, "each round": rounds}
        print(
            f"{what} time a call, us: torch {medians['torch']:.1f}, jax {medians['jax']:.1f}, ratio {ratio:.2f}"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
