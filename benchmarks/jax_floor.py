"""What a call in JAX cannot do without on the host, piece by piece, on a GPU.

    python benchmarks/jax_floor.py --out jax_floor.json

Two ways lead from arrays of JAX to a kernel. One is XLA's: a program, however it is called. Rows "xla ..." are the
smallest programs, called in every way that JAX has, down to the bare executable. The other is DLPack: inputs are lent
out, memory for the result comes from elsewhere, the kernel is launched from outside, and the result is handed in. Rows
"dlpack ..." are its steps, and all of them together. A piece that a version of JAX does not have is a row without time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax._src.lib import _jax

from benchmarks.jax_calls import SMALL, Peer, host_us, jax_inputs, kernel_alone, torch_inputs, wait_for_torch
from hopper_attention import flash_attn_func
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.reports import dump_figures, write_text

KIND = "jax_floor"

OPTIONS = {
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
    "no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
}
"""Of XLA, each for a program of its own."""

Pieces = dict[str, Callable[[], Peer]]


def xla_pieces(device: str) -> Pieces:
    """Programs that do next to nothing."""
    q, k, v = jax_inputs(SMALL)

    def add(x: jax.Array) -> jax.Array:
        return x + 1

    def of(call: Callable[[], Any]) -> Peer:
        return Peer(call, jax.block_until_ready)

    def donated() -> Peer:
        program, held = jax.jit(add, donate_argnums=0), [q + 0]

        def call() -> Any:
            held[0] = program(held[0])
            return held[0]

        return of(call)

    def ahead() -> Peer:
        program = jax.jit(add).lower(q).compile()
        return of(lambda: program(q))

    def bare() -> Peer:
        program = jax.jit(add).lower(q).compile().runtime_executable()
        return of(lambda: program.execute_sharded([q]).disassemble_into_single_device_arrays())

    def bare_of_three() -> Peer:
        program = jax.jit(lambda *x: (x[0] + x[1], x[2] * 1.5)).lower(q, k, v).compile().runtime_executable()
        return of(lambda: program.execute_sharded([q, k, v]).disassemble_into_single_device_arrays())

    def constant() -> Peer:
        program = jax.jit(lambda: jnp.zeros(SMALL, jnp.bfloat16))
        return of(program)

    def with_options(options: dict[str, Any]) -> Peer:
        program = jax.jit(add, compiler_options=options if device == "cuda" else None)
        return of(lambda: program(q))

    def jitted() -> Peer:
        program = jax.jit(add)
        return of(lambda: program(q))

    def forwarded() -> Peer:
        program = jax.jit(lambda x: x)
        return of(lambda: program(q))

    named = {f"xla x + 1, {name}": (lambda x=x: with_options(x)) for name, x in OPTIONS.items()}
    return {
        "xla x + 1": jitted,
        "xla x": forwarded,
        "xla zeros": constant,
        "xla x + 1, donated": donated,
        "xla x + 1, compiled ahead": ahead,
        "xla x + 1, bare executable": bare,
        "xla two results of three, bare executable": bare_of_three,
        **named,
    }


def dlpack_pieces(device: str) -> Pieces:
    """Steps of a call that XLA takes no part in, with memory of PyTorch's."""
    import tvm_ffi

    arrays = jax_inputs(SMALL)
    q, on = arrays[0], arrays[0].devices().pop()
    stream = on.get_stream_for_external_ready_events() if device == "cuda" else None
    out = torch_inputs(SMALL, device)[0]
    sharding = q.sharding

    def of(call: Callable[[], Any]) -> Peer:
        return Peer(call, wait_for_torch)

    def hand_in(x: torch.Tensor) -> Any:
        kind = (int(x.__dlpack_device__()[0]),)
        capsule = x.__dlpack__(stream=stream) if stream else x.__dlpack__()
        try:
            return _jax.dlpack_managed_tensor_to_buffer(capsule, on, stream, None, *kind)
        except TypeError:
            capsule = x.__dlpack__(stream=stream) if stream else x.__dlpack__()
            return _jax.dlpack_managed_tensor_to_buffer(capsule, on, stream)

    def lend(x: jax.Array) -> Any:
        return _jax.buffer_to_dlpack_managed_tensor(x, stream=stream)

    return {
        "dlpack x.unsafe_buffer_pointer()": lambda: of(q.unsafe_buffer_pointer),
        "dlpack x.is_ready()": lambda: of(q.is_ready),
        "dlpack x.devices()": lambda: of(q.devices),
        "dlpack x.__dlpack__()": lambda: of(q.__dlpack__),
        "dlpack lend": lambda: of(lambda: lend(q)),
        "dlpack lend, as a tensor of TVM FFI": lambda: of(lambda: tvm_ffi.from_dlpack(q)),
        "dlpack lend, as a tensor of PyTorch": lambda: of(lambda: torch.from_dlpack(q)),
        "dlpack memory": lambda: of(lambda: torch.empty_like(out)),
        "dlpack x.__dlpack__() of PyTorch": lambda: of(out.__dlpack__),
        "dlpack hand in": lambda: of(lambda: hand_in(out)),
        "dlpack hand in, by jax.dlpack": lambda: of(lambda: jax.dlpack.from_dlpack(out)),
        "dlpack an array of a buffer": lambda: of(
            lambda: jax.make_array_from_single_device_arrays(q.shape, sharding, [q])
        ),
        "dlpack all but the kernel": lambda: of(lambda: ([lend(x) for x in arrays], hand_in(out))),
    }


def whole_pieces(device: str) -> Pieces:
    """PyTorch's call, the kernel alone, and the kernel on arrays of JAX by DLPack."""
    arrays = jax_inputs(SMALL)

    def by_torch() -> Peer:
        """With all that PyTorch's call looks at: what can be had without code of our own."""

        def call() -> Any:
            return jax.dlpack.from_dlpack(flash_attn_func(*map(torch.from_dlpack, arrays), causal=True))

        return Peer(call, jax.block_until_ready)

    held = torch_inputs(SMALL, device)
    found: Pieces = {
        "torch": lambda: Peer(lambda: flash_attn_func(*held, causal=True), wait_for_torch),
        "dlpack whole, by PyTorch's call": by_torch,
    }
    return found | ({"kernel": lambda: kernel_alone(SMALL, device)} if device == "cuda" else {})


def measure(pieces: Pieces, calls: int, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Medians over rounds in which all take turns, and why a piece is not among them."""
    peers, failed = {}, {}
    for name, make in pieces.items():
        try:
            peer = make()
            peer.wait(peer.call())
        except Exception as error:  # a piece that this version of JAX has not, or has otherwise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            peers[name] = peer
    found = [{name: host_us(peer, calls) for name, peer in peers.items()} for _ in range(rounds)]
    return {name: round(statistics.median(each[name] for each in found), 2) for name in peers}, failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    pieces = xla_pieces(options.device) | dlpack_pieces(options.device) | whole_pieces(options.device)
    us, failed = measure(pieces, options.calls, options.rounds)
    for name, time in us.items():
        print(f"{name:45} {time:8.2f} us")
    for name, why in failed.items():
        print(f"{name:45} {why}")
    place = describe_place(KIND, options.device, options.commit)
    figures = {"jax": jax.__version__, "shape": SMALL, "rounds": options.rounds, "us": us, "failed": failed}
    write_text(options.out, dump_figures(place | figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
