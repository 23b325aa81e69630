"""What a call of XLA launches, as a function of TVM FFI that runs without Python.

``cute_kernels.launches`` has the layout of a script and the native code that reads it. Here one is made: the kernels of
a call, and where each of their arguments comes from. What is made stays for the life of the process, as XLA may run it
at any time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from cute_kernels.launches.config import (
    COUNTER_PLACE,
    COUNTER_WORDS,
    FIRST_CONSTANT,
    MAX_ARGUMENTS,
    LaunchesConfig,
)
from hopper_attention import compile_cache

STREAMS = 64
"""Of a GPU that may run kernels: XLA has one for computations, and borrows others where a program asks for it."""

COUNTER_STEP = 8
"""int32 words from a counter to the next, a sector of memory."""

CPU, CUDA = 1, 2
"""Kinds of devices in DLPack."""

NONE, INTEGER, FLOAT = 0, 1, 3
"""Kinds of constants in TVM FFI."""

INT32 = 32 << 8 | 1 << 16
"""DLPack's data type: its kind 0, 32 bits, one lane."""


class Given(NamedTuple):
    """The tensor of this number among inputs and then outputs of a call."""

    number: int


class Counter(NamedTuple):
    """Two int32 zeros by which the CTAs of a launch share out its tiles, and which it leaves zero.

    Launches on one stream run one after the other and so share them; each stream has its own.
    """


COUNTER = Counter()


class Counters(NamedTuple):
    """Those of all GPUs of a process: what scripts know of them, and their memory."""

    words: np.ndarray
    memory: tuple[Array, ...]
    extent: np.ndarray


Argument = Given | Counter | int | float | None


@dataclass(frozen=True)
class Step:
    """A launch: the kernel that ``get`` has for ``config``, and its arguments in its order."""

    config: Any
    get: Callable[[Any], Callable[..., Any]]
    arguments: tuple[Argument, ...]


def name_of(steps: Iterable[Step]) -> str:
    """The same in every process for the same launches, as programs that XLA has kept on disk have it in them."""
    steps = tuple(steps)
    digest = hashlib.sha256(repr([(step.config.name, step.arguments) for step in steps]).encode())
    return f"{'+'.join(step.config.name for step in steps)}.{digest.hexdigest()[:16]}"


def make_function(steps: tuple[Step, ...], platform: str) -> Any:
    """The TVM FFI function (stream, inputs and outputs...) that launches ``steps`` one after the other."""
    import tvm_ffi

    needs_counter = any(argument is COUNTER for step in steps for argument in step.arguments)
    counters = find_counters(platform).words if needs_counter else np.zeros(0, np.int64)
    constants: list[int] = []
    launches: list[int] = []
    for step in steps:
        if len(step.arguments) > MAX_ARGUMENTS:
            raise ValueError(
                f"{step.config.name} takes {len(step.arguments)} arguments, allowed: {MAX_ARGUMENTS}"
            )
        kernel = step.get(step.config)
        function = kernel if isinstance(kernel, tvm_ffi.Function) else tvm_ffi.convert(kernel)
        places = [_place_of(argument, constants) for argument in step.arguments]
        launches += [function.__chandle__(), len(places), *places]
        _kept.append(function)
    values = np.array(constants, np.int64)
    head = len(steps), values.ctypes.data, counters.ctypes.data, counters.size // COUNTER_WORDS
    script = np.array([*head, *launches], np.int64)
    _kept.extend((values, script))
    return compile_cache.get_serving(LaunchesConfig())(script.ctypes.data)


_kept: list[Any] = []
"""What scripts point to."""

_counters: dict[str, Counters] = {}


def _place_of(argument: Argument, constants: list[int]) -> int:
    """Where a launch finds an argument; constants are appended to ``constants``, two words each."""
    if isinstance(argument, Given):
        return 1 + argument.number  # the stream comes first
    if argument is COUNTER:
        return COUNTER_PLACE
    place = FIRST_CONSTANT - len(constants) // 2
    if argument is None:
        constants += [NONE, 0]
    elif isinstance(argument, float):
        constants += [FLOAT, int(np.float64(argument).view(np.int64))]
    else:
        assert isinstance(argument, int)
        constants += [INTEGER, argument]
    return place


def find_counters(platform: str) -> Counters:
    """Those of a platform; made the first time."""
    if platform not in _counters:
        # A thread of its own is in no trace, no mesh and no guard of JAX's.
        with ThreadPoolExecutor(max_workers=1) as thread:
            _counters[platform] = thread.submit(make_counters, platform).result()
    return _counters[platform]


def make_counters(platform: str) -> Counters:
    """New ones on all devices of a platform that this process has."""
    is_cpu = platform == "cpu"
    # XLA knows a CPU's devices as one, by jax-tvm-ffi.
    devices = jax.local_devices(backend="cpu")[:1] if is_cpu else jax.local_devices(backend="cuda")
    extent = np.array([2, 1], np.int64)
    zeros = np.zeros(STREAMS * COUNTER_STEP, np.int32)
    memory = tuple(jax.device_put(zeros, device) for device in devices)
    words = []
    for device, counters in zip(devices, jax.block_until_ready(memory), strict=True):
        number = 0 if is_cpu else device.local_hardware_id
        on_device = (CPU if is_cpu else CUDA) | number << 32
        for stream in range(STREAMS):
            data = counters.unsafe_buffer_pointer() + stream * COUNTER_STEP * zeros.itemsize
            shape, strides = extent.ctypes.data, extent.ctypes.data + extent.itemsize
            words += [0, number, data, on_device, 1 | INT32 << 32, shape, strides, 0]
    return Counters(np.array(words, np.int64), memory, extent)
