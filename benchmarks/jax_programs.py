"""Host time of attention inside of jitted programs, beside as many calls in PyTorch: what each further call costs.

    python benchmarks/jax_programs.py --out jax_programs.json
    python benchmarks/jax_programs.py --device cpu --out out/tiny.json   # by the formula, to try the script

A model is one jitted program with many calls of attention in it, and what JAX takes for a program it takes once. So
programs of 1, 8 and 32 calls, each of which reads the result of the one before, are timed in turns:

    caller        until the call returns, with nothing queued before it: what the thread that calls waits for
    caller's CPU  of that, what the thread computed itself
    done          until the result is there
    in flight     a program, of 20 that are called before one is waited for

"A call" is the slope from 1 to 32 calls. Kinds are ours, ours with gradients, a custom call that launches nothing, an
addition that XLA may not fuse with the next, and PyTorch's of each. ``--graphs`` lets XLA take custom calls into its
CUDA graphs, for a trial, as they are not to be in them (``integrations.jax.ffi``). "torch" is to be among the programs
then, as it loads the kernel.
"""

from __future__ import annotations

import argparse
import functools
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

from benchmarks.jax_calls import (
    SMALL,
    Peer,
    empty_call,
    jax_inputs,
    register_empty_call,
    torch_inputs,
    wait_for_torch,
)
from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.reports import dump_figures, write_text
from hopper_attention.integrations.jax import ffi, flash_attention

KIND = "jax_programs"
NUMBERS = (1, 8, 32)
"""Of calls in a program."""

IN_FLIGHT = 20

Program = Callable[[int], Peer]
"""By the number of its calls."""


def chain(call: Callable[..., Any], number: int, q: Any, k: Any, v: Any) -> Any:
    """``number`` calls, each on the result of the one before."""
    for _ in range(number):
        q = call(q, k, v)
    return q


def jax_program(call: Callable[..., Any], **options: Any) -> Program:
    arrays = jax_inputs(SMALL)

    def of(number: int) -> Peer:
        program = jax.jit(functools.partial(chain, call, number), **options)
        return Peer(lambda: program(*arrays), jax.block_until_ready)

    return of


def jax_gradients(call: Callable[..., Any]) -> Program:
    arrays = jax_inputs(SMALL)

    def of(number: int) -> Peer:
        def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, vjp = jax.vjp(functools.partial(chain, call, number), q, k, v)
            return vjp(jnp.ones_like(out))

        program = jax.jit(gradients)
        return Peer(lambda: program(*arrays), jax.block_until_ready)

    return of


def torch_program(call: Callable[..., Any], device: str) -> Program:
    held = torch_inputs(SMALL, device)
    return lambda number: Peer(lambda: chain(call, number, *held), wait_for_torch)


def torch_gradients(device: str) -> Program:
    held = [x.requires_grad_() for x in torch_inputs(SMALL, device)]
    dout = torch.ones(SMALL, device=device, dtype=torch.bfloat16)

    def of(number: int) -> Peer:
        ours = functools.partial(flash_attn_func, causal=True)
        return Peer(lambda: torch.autograd.grad(chain(ours, number, *held), held, dout), wait_for_torch)

    return of


def allow_graphs() -> None:
    """Have this process register custom calls that CUDA graphs may hold. Their kernels are to be loaded before."""
    import jax_tvm_ffi

    jax_tvm_ffi.register_ffi_target = functools.partial(
        jax_tvm_ffi.register_ffi_target, allow_cuda_graph=True
    )


def add(x: jax.Array, *_: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x + 1)


def programs(device: str) -> dict[str, Program]:
    """By the names above."""
    is_gpu = device == "cuda"
    ours = functools.partial(flash_attention, causal=True, backend="hopper" if is_gpu else None)
    no_graphs = {"compiler_options": {"xla_gpu_enable_command_buffer": ""}} if is_gpu else {}
    return {
        "torch": torch_program(functools.partial(flash_attn_func, causal=True), device),
        "torch gradients": torch_gradients(device),
        "torch addition": torch_program(lambda q, k, v: q + 1, device),
        "jax": jax_program(ours),
        "jax, no graphs": jax_program(ours, **no_graphs),
        "jax gradients": jax_gradients(ours),
        "jax empty call": jax_program(empty_call),
        "jax addition": jax_program(add),
        "jax addition, no graphs": jax_program(add, **no_graphs),
    }


def times_of(peer: Peer, calls: int) -> dict[str, float]:
    """Medians of microseconds, by the names above."""
    caller, computed, done = [], [], []
    for _ in range(calls):
        start, cpu = time.perf_counter(), time.thread_time()
        result = peer.call()
        caller.append(time.perf_counter() - start)
        computed.append(time.thread_time() - cpu)
        peer.wait(result)
        done.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(IN_FLIGHT):
        result = peer.call()
    issued = time.perf_counter() - start
    peer.wait(result)
    last = time.perf_counter() - start
    times = {"caller": caller, "caller's CPU": computed, "done": done}
    medians = {name: statistics.median(found) * 1e6 for name, found in times.items()}
    return medians | {"in flight": last / IN_FLIGHT * 1e6, "in flight, caller": issued / IN_FLIGHT * 1e6}


def measure(
    named: dict[str, Program], calls: int, rounds: int
) -> tuple[dict[str, dict[int, dict[str, float]]], dict[str, str]]:
    """Medians over rounds in which all take turns, and why a program is not among them."""
    peers: dict[str, dict[int, Peer]] = {}
    failed = {}
    for name, make in named.items():
        try:
            peers[name] = {number: make(number) for number in NUMBERS}
            for peer in peers[name].values():
                for _ in range(3):
                    peer.wait(peer.call())
        except Exception as error:  # what a version of XLA does not do is a row that says so
            del peers[name]
            failed[name] = f"{type(error).__name__}: {error}"[:400]
    found: dict[str, dict[int, list[dict[str, float]]]] = {
        name: {number: [] for number in NUMBERS} for name in peers
    }
    for _ in range(rounds):
        for name, numbers in peers.items():
            for number, peer in numbers.items():
                found[name][number].append(times_of(peer, calls))
    return {
        name: {
            number: {what: round(statistics.median(x[what] for x in rows), 2) for what in rows[0]}
            for number, rows in numbers.items()
        }
        for name, numbers in found.items()
    }, failed


def slopes_of(times: dict[int, dict[str, float]]) -> dict[str, float]:
    """Microseconds a further call."""
    least, most = times[NUMBERS[0]], times[NUMBERS[-1]]
    return {what: round((most[what] - least[what]) / (NUMBERS[-1] - NUMBERS[0]), 2) for what in least}


def compare_results(device: str) -> float:
    """The largest difference of ours in JAX from PyTorch's call, eight in a chain, of a program that has run before."""
    held = torch_inputs(SMALL, device)
    expected = chain(functools.partial(flash_attn_func, causal=True), 8, *held).float()
    arrays = [jax.dlpack.from_dlpack(x) for x in held]
    wait_for_torch(None)
    ours = functools.partial(flash_attention, causal=True, backend="hopper" if device == "cuda" else None)
    program = jax.jit(functools.partial(chain, ours, 8))
    outs = [program(*arrays) for _ in range(5)]
    return max(
        float((torch.from_dlpack(jax.block_until_ready(x)).float() - expected).abs().max()) for x in outs
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--graphs", action="store_true", help="let XLA take custom calls into CUDA graphs")
    parser.add_argument("--only", nargs="*", default=(), help="programs; default: all")
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.graphs:
        allow_graphs()
    register_empty_call(ffi.PLATFORM if options.device == "cuda" else "cpu")
    named = {n: p for n, p in programs(options.device).items() if not options.only or n in options.only}
    times, failed = measure(named, options.calls, options.rounds)
    slopes = {name: slopes_of(found) for name, found in times.items()}
    for name, found in slopes.items():
        print(f"{name:25}", "  ".join(f"{what} {us:6.2f}" for what, us in found.items()), "us a call;",
              " ".join(f"{n}: {t['caller']:.1f}/{t['done']:.1f}" for n, t in times[name].items()))  # fmt: skip
    for name, why in failed.items():
        print(f"{name:25} {why}")
    figures = {
        "jax": jax.__version__, "shape": SMALL, "numbers": NUMBERS, "rounds": options.rounds, "calls": options.calls,
        "graphs": options.graphs, "us a call": slopes, "us": times, "failed": failed,
        "difference": compare_results(options.device),
    }  # fmt: skip
    print("largest difference from PyTorch's", figures["difference"])
    write_text(options.out, dump_figures(describe_place(KIND, options.device, options.commit) | figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
