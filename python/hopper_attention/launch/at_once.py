"""Several launches as one function, which gets a few tensors and finds the others in their memory.

Python hands an argument over to a kernel in a tenth of a microsecond or two, and torch makes a tensor in two. So what
the launches of a call share, and what never changes, lies ready in a script (``cute_kernels.launches``), and their
results are made by one allocation, of which each kernel gets its part.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.launches.config import FIRST_CONSTANT, LISTED, MAX_ARGUMENTS, PIECE, LaunchesConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.device_memory import Facts, Pieces

NONE, INTEGER, FLOAT, TENSOR = 0, 1, 3, 70
"""Type indices of TVM FFI."""

DL_CODES = {torch.float8_e4m3fn: 10, torch.bfloat16: 4, torch.float16: 2, torch.float32: 2, torch.int32: 0}
"""DLPack's kinds of dtypes that pieces have."""


class Given(NamedTuple):
    """The argument of this number of a call."""

    number: int


class Part(NamedTuple):
    """A tensor in the memory of an argument, from this byte on."""

    number: int
    byte: int
    facts: Facts


class ListedPart(NamedTuple):
    """The same with facts that change from call to call. The call's argument ``listed`` is the address of words of 64
    bits, of which that number ``word`` is the byte; behind it are as many sizes as ``dimensions``, and strides."""

    number: int
    listed: int
    word: int
    dimensions: int
    dtype: torch.dtype


def parts_of(pieces: Pieces, number: int) -> tuple[Part, ...]:
    """Pieces in the memory of that argument, which has room for them (``device_memory.room_for``)."""
    begins = device_memory.first_bytes(pieces)
    return tuple(Part(number, byte, piece.facts) for byte, piece in zip(begins, pieces, strict=True))


class Step(NamedTuple):
    """A launch, and its arguments: ``Given``, ``Part``, ``ListedPart``, None, numbers, and tensors that are kept."""

    kernel: Kernel
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """``run`` makes the launches, one after the other; ``kept`` is what its native code points to."""

    run: Callable[..., Any]
    kept: tuple[Any, ...]


def make_script(steps: Sequence[Step]) -> Script:
    """What launches ``steps``; one of the tensors that a call gives is torch's, whose current stream it is."""
    import tvm_ffi

    kept: list[Any] = []
    constants: list[int] = []
    launches: list[int] = []
    for kernel, arguments in steps:
        if len(arguments) > MAX_ARGUMENTS:
            raise ValueError(f"a launch takes {len(arguments)} arguments, allowed: {MAX_ARGUMENTS}")
        function = kernel if isinstance(kernel, tvm_ffi.Function) else tvm_ffi.convert(kernel)
        kept.append(function)
        places = [_place_of(argument, constants, kept) for argument in arguments]
        launches += [function.__chandle__(), len(places), *places]
    values = _words(constants, kept)
    script = _words([len(steps), values, 0, 0, *launches], kept)
    return Script(compile_cache.get_serving(LaunchesConfig())(script), tuple(kept))


def _words(words: Sequence[int], kept: list[Any]) -> int:
    """The address of words of 64 bits."""
    memory = array("q", words)
    kept.append(memory)
    return memory.buffer_info()[0]


def _place_of(argument: Any, constants: list[int], kept: list[Any]) -> int:
    """Where a launch finds an argument; constants are appended to ``constants``, two words each."""
    if isinstance(argument, Given):
        return argument.number
    place = FIRST_CONSTANT - len(constants) // 2
    constants += _constant_of(argument, kept)
    return place


def _constant_of(argument: Any, kept: list[Any]) -> tuple[int, int]:
    if argument is None:
        return NONE, 0
    if isinstance(argument, Part):
        number, byte, (shape, strides, dtype) = argument
        kind = _kind_of(len(shape), dtype)
        return PIECE, _words([number, byte, kind, _words(shape, kept), _words(strides, kept)], kept)
    if isinstance(argument, ListedPart):
        *places, dimensions, dtype = argument
        return LISTED, _words([*places, _kind_of(dimensions, dtype)], kept)
    if isinstance(argument, int):
        return INTEGER, argument
    if isinstance(argument, float):
        return FLOAT, array("q", array("d", [argument]).tobytes())[0]
    import tvm_ffi

    tensor = argument if isinstance(argument, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(argument)
    kept.append(tensor)
    return TENSOR, tensor.__chandle__()


def _kind_of(dimensions: int, dtype: torch.dtype) -> int:
    """The word of a ``DLTensor`` with its number of dimensions and its dtype."""
    return dimensions | DL_CODES[dtype] << 32 | dtype.itemsize * 8 << 40 | 1 << 48
