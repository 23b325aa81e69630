"""Scripts of launches, run by their native code: what each launch is given, and whose tile counter."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="JAX needs Python 3.11 or newer")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi needs Python 3.11 or newer")

import jax
import jax.numpy as jnp

from hopper_attention.integrations.jax import ffi, script
from hopper_attention.integrations.jax.script import COUNTER, Given, Step, make_function, name_of

jax.config.update("jax_platforms", "cpu")


@dataclasses.dataclass(frozen=True)
class Config:
    name: str


@pytest.fixture(autouse=True)
def fresh_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that a test makes up take no counter from others; what native code points to stays."""
    script._kept.append(counters := {})
    monkeypatch.setattr(script, "_counters", counters)


def view(tensor: Any) -> np.ndarray:
    """The memory of a tensor of TVM FFI, of 32 bits."""
    kind = {"int32": ctypes.c_int32, "float32": ctypes.c_float}[str(tensor.dtype)]
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(kind))
    return np.ctypeslib.as_array(pointer, tuple(tensor.shape))


def step(kernel: Callable[..., None], *arguments: Any) -> Step:
    return Step(Config(kernel.__name__), lambda config: kernel, arguments)


def test_launches_get_their_arguments_in_their_order() -> None:
    seen: list[tuple[Any, ...]] = []

    def first(*arguments: Any) -> None:
        seen.append(arguments)

    def second(*arguments: Any) -> None:
        seen.append(arguments)

    a, b = torch.zeros(3), torch.ones(4, dtype=torch.int32)
    steps = step(first, Given(1), None, 0.1, Given(0), -7, 2**40), step(second, Given(0))
    make_function(steps, "cpu")(0, a, b)
    tensor, *between, other, negative, large = seen[0]
    assert (tensor.data_ptr(), other.data_ptr()) == (b.data_ptr(), a.data_ptr())
    assert [*between, negative, large] == [None, 0.1, -7, 2**40]
    assert [x.data_ptr() for x in seen[1]] == [a.data_ptr()]


def test_each_stream_has_a_counter_of_zeros_until_there_are_too_many() -> None:
    seen: list[int] = []

    def kernel(counter: Any) -> None:
        assert tuple(counter.shape) == (2,) and str(counter.dtype) == "int32"
        assert view(counter).tolist() == [0, 0]
        seen.append(counter.data_ptr())

    run, tensor = make_function((step(kernel, COUNTER),), "cpu"), torch.zeros(1)
    for stream in (0, 7, 0, 9, 7):
        run(stream, tensor)
    zero, seven, again, nine, seven_again = seen
    assert (again, seven_again) == (zero, seven) and len({zero, seven, nine}) == 3
    assert min(abs(x - y) for x, y in ((zero, seven), (seven, nine))) >= 32
    for stream in range(100, 100 + script.STREAMS - 3):
        run(stream, tensor)
    with pytest.raises(RuntimeError, match="more streams of a GPU"):
        run(99, tensor)
    assert len(set(seen)) == script.STREAMS


def test_an_error_ends_a_call() -> None:
    def fails(x: Any) -> None:
        raise ValueError("no such size")

    def never(x: Any) -> None:
        raise AssertionError

    run = make_function((step(fails, Given(0)), step(never, Given(0))), "cpu")
    with pytest.raises(ValueError, match="no such size"):
        run(0, torch.zeros(1))


def test_names_tell_calls_apart_and_are_those_of_every_process() -> None:
    def kernel() -> None: ...

    arguments = [(Given(0), 1.0), (Given(0), 1), (Given(1), 1.0), (Given(0), None), (COUNTER, 1.0)]
    names = [name_of([step(kernel, *x)]) for x in arguments]
    assert len(set(names)) == len(names)
    assert names[0] == "kernel.b2b8f89d29a8cb92"


def test_there_is_an_end_to_calls_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*arguments: Any) -> None: ...

    monkeypatch.setattr(ffi, "PLATFORM", "cpu")
    monkeypatch.setattr(ffi, "PREFIX", "limited")
    monkeypatch.setattr(ffi, "_registered", set())
    monkeypatch.setattr(ffi, "MAX_CALLS", 2)

    def call(number: int) -> jax.Array:
        out = ffi.Written((2,))
        launch = ffi.Launch(Config("kernel"), lambda config: kernel, (out, number))
        return ffi.call((launch,), out)[0]

    for number in (1, 2, 1):
        jax.eval_shape(lambda number=number: call(number))
    with pytest.raises(NotImplementedError, match="2 calls of attention in JAX that differ"):
        jax.eval_shape(lambda: call(3))


def test_a_call_is_one_custom_call_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(x: Any, out: Any, number: int) -> None:
        view(out)[...] = view(x) * number

    def add(out: Any, total: Any, x: Any) -> None:
        view(total)[...] += view(out)
        view(total)[...] += view(x)

    monkeypatch.setattr(ffi, "PLATFORM", "cpu")
    monkeypatch.setattr(ffi, "PREFIX", "counted")
    monkeypatch.setattr(ffi, "_registered", set())

    def both(x: jax.Array, *before: jax.Array) -> jax.Array:
        between, total = ffi.Written((3,)), ffi.Written((3,), before=before)
        launches = (
            ffi.Launch(Config("fill"), lambda config: fill, (x, between, 5)),
            ffi.Launch(Config("add"), lambda config: add, (between, total, x)),
        )
        return ffi.call(launches, total)[0]

    x = jnp.arange(3.0)
    # What a tensor was before is written where it lies, once nobody else needs it.
    assert jax.jit(both)(x, x).tolist() == [0.0, 7.0, 14.0] and x.tolist() == [0.0, 1.0, 2.0]
    assert jax.jit(lambda x: both(x, jnp.zeros(3)))(x).tolist() == [0.0, 6.0, 12.0]
    text = jax.jit(both).lower(x).compile().as_text()
    _, _, entry = text.partition("ENTRY")
    kinds = "custom-call", "fusion", "broadcast", "copy", "call"
    assert [entry.count(f" {kind}(") for kind in kinds] == [1, 0, 0, 0, 0]
    assert "counted.fill+add." in entry and "backend_config={}" in entry
