"""Compiled kernels as XLA's custom calls, by jax-tvm-ffi.

A call of attention is one custom call, however many kernels it launches, with nothing around it that XLA would have to
launch: it has no attributes, which jax-tvm-ffi decodes anew and never lets go, and no tensor that XLA would have to
zero but the sums of dQ. ``script`` says what is launched, in a function that needs no Python.

jax-tvm-ffi makes XLA's stream the environment's of TVM FFI while a call lasts, and that is where kernels launch
(``cute_kernels.arguments.compile_for_torch``). A call is a part of no CUDA graph of XLA's: a kernel's first launch
loads its code, which a capture does not allow.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hopper_attention.integrations.jax.script import Argument, Given, Step, make_function, name_of

PLATFORM = "gpu"
"""What custom calls are registered for, by jax-tvm-ffi's name."""


PREFIX = "hopper_attention"
"""Of the names of custom calls."""

MAX_CALLS = 1000
"""That differ in more than sizes, of a process; jax-tvm-ffi has room for 1024 from all packages."""


@dataclass(frozen=True, eq=False)
class Written:
    """A tensor that kernels write; ``before`` is empty, or the array that it is in the beginning."""

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    before: tuple[Array, ...] = ()

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> Written:
        return cls(shape, dtype, (jnp.zeros(shape, dtype),))


@dataclass(frozen=True, eq=False)
class Launch:
    """The kernel that ``get`` has for ``config``, and what it takes in its order: arrays, ``Written``, COUNTER, numbers
    and None."""

    config: Any
    get: Callable[[Any], Callable[..., Any]]
    arguments: tuple[Any, ...]


def is_missing() -> bool:
    """Whether jax-tvm-ffi cannot be imported."""
    return importlib.util.find_spec("jax_tvm_ffi") is None


def call(launches: tuple[Launch, ...], *wanted: Written) -> tuple[Array, ...]:
    """Launch one after the other, as one custom call of the program that JAX traces; returns what is ``wanted``."""
    arguments = [x for launch in launches for x in launch.arguments]
    written: list[Any] = _distinct([x for x in arguments if isinstance(x, Written)])
    before = [x.before[0] for x in written if x.before]
    arrays = _distinct([x for x in arguments if isinstance(x, Array)])
    inputs = varying_alike(before + arrays)
    # An array in the place of each tensor that is written has its type, over a mesh too. XLA sees that nobody needs it.
    shapes = varying_alike([*inputs, *(jax.lax.empty(x.shape, x.dtype) for x in written)])[len(inputs) :]
    # What a tensor is before is never read as an input: it is written to.
    numbers = {id(x): len(before) + number for number, x in enumerate(arrays + written)}

    def argument_of(x: Any) -> Argument:
        return Given(numbers[id(x)]) if isinstance(x, (Array, Written)) else x

    steps = tuple(Step(x.config, x.get, tuple(map(argument_of, x.arguments))) for x in launches)
    filled = [number for number, x in enumerate(written) if x.before]
    run = jax.ffi.ffi_call(
        _register(steps), [jax.typeof(x) for x in shapes], input_output_aliases=dict(enumerate(filled))
    )
    results = dict(zip(map(id, written), run(*inputs), strict=True))
    return tuple(results[id(x)] for x in wanted)


def _distinct(things: list[Any]) -> list[Any]:
    """Each once, in the order in which they come."""
    return list({id(x): x for x in things}.values())


def _register(steps: tuple[Step, ...]) -> str:
    """The name under which XLA knows these launches.

    Raises:
        NotImplementedError: there are too many.
    """
    import jax_tvm_ffi

    name = f"{PREFIX}.{name_of(steps)}"
    with _lock:
        if name not in _registered:
            if len(_registered) >= MAX_CALLS:
                raise NotImplementedError(
                    f"a process has {MAX_CALLS} calls of attention in JAX that differ in scale, window, cap or kernel, "
                    "allowed: no more; multiply q by the scale instead"
                )
            function = make_function(steps, PLATFORM)
            jax_tvm_ffi.register_ffi_target(name, function, ["ctx.stream", "args", "rets"], PLATFORM)
            _registered.add(name)
    return name


_lock = Lock()
_registered: set[str] = set()
"""Names that XLA knows."""


def varying_alike(arrays: list[Array]) -> list[Array]:
    """Arrays that vary over the same axes of a mesh, which ``shard_map`` wants of a call."""
    axes = [_varying_axes(x) for x in arrays]
    everywhere = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(everywhere - own), to="varying") if everywhere - own else x
        for x, own in zip(arrays, axes, strict=True)
    ]


def _varying_axes(x: Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    # The former is JAX's name for it from 0.10 on.
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))
