"""Compiled kernels as XLA's custom calls, by jax-tvm-ffi.

A kernel takes its arguments in one order, tensors that it reads and writes among each other, while XLA hands over all
inputs and then all outputs. So what a kernel writes goes in as well, in its place, and the output is an alias of it:
XLA's buffer is written where it lies. What is empty before is not filled.

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
import numpy as np
from jax import Array

PLATFORM = "gpu"
"""What custom calls are registered for, by jax-tvm-ffi's name."""


PREFIX = "hopper_attention"
"""Of the names of custom calls."""


@dataclass(frozen=True, eq=False)
class Written:
    """A tensor that a kernel writes, with what is in it before."""

    before: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Written:
        """With whatever is in memory."""
        return cls(jax.lax.empty(shape, dtype))

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: Any) -> Written:
        return cls(jnp.zeros(shape, dtype))


def is_missing() -> bool:
    """Whether jax-tvm-ffi cannot be imported."""
    return importlib.util.find_spec("jax_tvm_ffi") is None


@dataclass(frozen=True)
class Target:
    """The kernel that ``get`` has for a config."""

    config: Any
    get: Callable[[Any], Callable[..., Any]]

    def __call__(self, *arguments: Any) -> tuple[Array, ...]:
        """Call the kernel while JAX traces, with tensors, ``Written`` among them, then numbers and None, in its order.

        Returns what is written.
        """
        tensors = [x for x in arguments if isinstance(x, (Array, Written))]
        options = arguments[len(tensors) :]
        numbers = {_name_of(i): _sized(x) for i, x in enumerate(x for x in options if x is not None)}
        inputs = _varying_alike([x.before if isinstance(x, Written) else x for x in tensors])
        places = [place for place, x in enumerate(tensors) if isinstance(x, Written)]
        call = jax.ffi.ffi_call(
            self._register(len(tensors), tuple(x is None for x in options)),
            [jax.typeof(inputs[place]) for place in places],
            input_output_aliases={place: number for number, place in enumerate(places)},
        )
        return tuple(call(*inputs, **numbers))

    def _register(self, tensors: int, are_none: tuple[bool, ...]) -> str:
        """The name under which XLA knows the kernel, which takes so many tensors, and then numbers or None."""
        import jax_tvm_ffi

        name = f"{PREFIX}.{self.config.name}"
        with _lock:
            if name not in _registered:
                kernel = self.get(self.config)
                function = _with_gaps(kernel, tensors, are_none) if any(are_none) else kernel
                numbers = (f"attrs.{_name_of(i)}" for i in range(are_none.count(False)))
                jax_tvm_ffi.register_ffi_target(name, function, ["args", *numbers], PLATFORM)
                _registered.add(name)
        return name


_lock = Lock()
_registered: set[str] = set()
"""Names that XLA knows."""


def _varying_alike(arrays: list[Array]) -> list[Array]:
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


def _name_of(number: int) -> str:
    """Of an attribute; XLA sorts them by name."""
    return f"n{number:02}"


def _sized(number: float) -> Any:
    """A number as kernels take it."""
    return np.float32(number) if isinstance(number, float) else np.int32(number)


def _with_gaps(kernel: Callable[..., Any], tensors: int, are_none: tuple[bool, ...]) -> Callable[..., None]:
    """``kernel`` without the arguments that are None, which XLA cannot hand over."""

    def call(*given: Any) -> None:
        numbers = iter(given[tensors:])
        kernel(*given[:tensors], *(None if is_none else next(numbers) for is_none in are_none))

    return call
