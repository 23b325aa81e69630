"""Host and device time of a call in JAX beside the same call in PyTorch, on a GPU, and what the host time is made of.

    python benchmarks/jax_calls.py --out jax_calls.json
    python benchmarks/jax_calls.py --device cpu --out out/tiny.json   # by the formula, to try the script

Host time is that of a call which waits for nothing, after the first ones, in turns. Its parts, each a row of "host":

    jax addition        a jitted x + 1: one kernel of XLA's, which is the least that a jitted call takes
    torch addition      the same in PyTorch
    jax empty call      a jitted custom call of q, k and v with our results that launches nothing
    jax                 our call, jitted
    jax with lse        the same, which returns the LSE too
    jax window          the same with a window
    jax not jitted      our call as it is, which looks at its arguments in Python
    jax gradients       jitted value and gradients
    torch               our call in PyTorch
    torch gradients     the same, forward and backward
    kernel              the compiled kernel alone, called from Python with tensors that are there

So "jax" less "jax empty call" is what a launch costs, and "jax empty call" less "jax addition" what a custom call costs
beyond one kernel of XLA's. Device time is that of many calls until the last result is there, of a problem that is large
enough to hide the host.
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
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.bench.timing import BALANCED, order_of_round
from hopper_attention.experiments.calls import JAX_KIND
from hopper_attention.experiments.reports import dump_figures, write_text
from hopper_attention.integrations.jax import ffi, flash_attention, script
from hopper_attention.launch.forward import ForwardLauncher, find_launch

SMALL, LARGE = (1, 128, 2, 128), (1, 16384, 16, 128)
"""(batch, seqlen, heads, head_dim) for host time, and for device time."""

Shape = tuple[int, ...]


class Peer(NamedTuple):
    """Something to time: a call that returns what it waits for, and what waits for it."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any]


def wait_for_torch(_: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def torch_inputs(shape: Shape, device: str) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]


def jax_inputs(shape: Shape) -> list[jax.Array]:
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3)]


def of_jax(function: Callable[..., Any], arrays: list[jax.Array]) -> Peer:
    return Peer(functools.partial(function, *arrays), jax.block_until_ready)


def empty_call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A custom call that takes and gives what that of a forward pass does."""
    batch, seqlen_q, heads, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, seqlen_q), jnp.float32),
    )
    out, _ = jax.ffi.ffi_call("hopper_attention_empty", shapes)(q, k, v)
    return out


def register_empty_call(platform: str) -> None:
    import jax_tvm_ffi

    nothing = script.make_function((), platform)
    jax_tvm_ffi.register_ffi_target(
        "hopper_attention_empty", nothing, ["ctx.stream", "args", "rets"], platform
    )


def kernel_alone(shape: Shape, device: str) -> Peer:
    """The kernel of the call in PyTorch, with everything that it takes made before."""
    q, k, v = torch_inputs(shape, device)
    specs = (x for t in (q, k, v) for x in (t.shape, t.stride(), t.dtype, t.device))
    launcher = find_launch(*specs, True, "hopper", 0)
    assert isinstance(launcher, ForwardLauncher)
    out, lse = launcher.result.empty_out(q), launcher.result.empty_lse(q)
    counter = torch.zeros(2, dtype=torch.int32, device=device)
    arguments = q, k, v, out, lse, counter, launcher.default_scale, launcher.num_ctas
    return Peer(functools.partial(launcher.kernel, *arguments), wait_for_torch)


def torch_gradients(shape: Shape, device: str) -> Peer:
    inputs = [x.requires_grad_() for x in torch_inputs(shape, device)]
    dout = torch.ones(shape, device=device, dtype=torch.bfloat16)

    def call() -> Any:
        return torch.autograd.grad(flash_attn_func(*inputs, causal=True), inputs, dout)

    return Peer(call, wait_for_torch)


def host_peers(shape: Shape, device: str) -> dict[str, Peer]:
    """By the names above; those of the kernels of a GPU only on one."""
    arrays = jax_inputs(shape)
    backend = "hopper" if device == "cuda" else None
    ours = functools.partial(flash_attention, causal=True, backend=backend)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, vjp = jax.vjp(ours, q, k, v)
        return vjp(jnp.ones_like(out))

    peers = {
        "torch": Peer(
            functools.partial(flash_attn_func, *torch_inputs(shape, device), causal=True), wait_for_torch
        ),
        "torch gradients": torch_gradients(shape, device),
        "torch addition": Peer(
            functools.partial(torch.add, torch_inputs(shape, device)[0], 1), wait_for_torch
        ),
        "jax addition": of_jax(jax.jit(lambda x: x + 1), arrays[:1]),
        "jax empty call": of_jax(jax.jit(empty_call), arrays),
        "jax": of_jax(jax.jit(ours), arrays),
        "jax with lse": of_jax(jax.jit(functools.partial(ours, return_lse=True)), arrays),
        "jax window": of_jax(jax.jit(functools.partial(ours, window_size=(64, 0))), arrays),
        "jax not jitted": of_jax(ours, arrays),
        "jax gradients": of_jax(jax.jit(gradients), arrays),
    }
    return peers | ({"kernel": kernel_alone(shape, device)} if device == "cuda" else {})


def device_peers(shape: Shape, device: str) -> dict[str, Peer]:
    names = ("torch", "jax", "torch gradients", "jax gradients")
    peers = host_peers(shape, device)
    return {name: peers[name] for name in names}


def host_us(peer: Peer, calls: int) -> float:
    """Median time of a call, with nothing queued before it."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        result = peer.call()
        times.append(time.perf_counter() - start)
        peer.wait(result)
    return statistics.median(times) * 1e6


def device_us(peer: Peer, calls: int) -> float:
    """Mean time of calls back to back."""
    peer.wait(peer.call())
    start = time.perf_counter()
    for _ in range(calls):
        result = peer.call()
    peer.wait(result)
    return (time.perf_counter() - start) / calls * 1e6


RATIOS = {
    "jax over torch": ("jax", "torch"),
    "an addition, jax over torch": ("jax addition", "torch addition"),
    "gradients, jax over torch": ("jax gradients", "torch gradients"),
}


def measure(
    peers: dict[str, Peer], measure_one: Callable[[Peer, int], float], calls: int, rounds: int
) -> dict[str, Any]:
    """Medians over rounds in which all take turns."""
    for peer in peers.values():
        peer.wait(peer.call())
    orders = [order_of_round(list(peers), number) for number in range(rounds)]
    found = [{name: measure_one(peers[name], calls) for name in order} for order in orders]
    medians = {name: statistics.median(each[name] for each in found) for name in peers}
    ratios = {
        what: statistics.median(each[a] / each[b] for each in found)
        for what, (a, b) in RATIOS.items()
        if a in peers and b in peers
    }
    return {"us": medians, **ratios, "each round": found}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    is_gpu = options.device == "cuda"
    place = describe_place(JAX_KIND, options.device, options.commit)
    figures: dict[str, Any] = {**place, "jax": jax.__version__, "rounds": options.rounds, "order": BALANCED}
    large = LARGE if is_gpu else SMALL
    register_empty_call(ffi.PLATFORM if is_gpu else "cpu")
    for what, make, shape, measure_one, calls in (
        ("host", host_peers, SMALL, host_us, 300 if is_gpu else 20),
        ("device", device_peers, large, device_us, 20 if is_gpu else 2),
    ):
        found = measure(make(shape, options.device), measure_one, calls, options.rounds)
        figures[what] = {"shape": shape, **found}
        print(f"{what} time a call, us, for {shape}")
        for name, us in found["us"].items():
            print(f"  {name:18} {us:9.1f}")
        for name in filter(found.__contains__, RATIOS):
            print(f"  {name}: {found[name]:.2f}")
    write_text(options.out, dump_figures(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
