"""A GPU by name, whose tensors are the CPU's: what tests of launchers put in place of one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C._dynamo import guards

from hopper_attention import (
    cache_again,
    cache_tiles,
    compile_cache,
    dense_again,
    descaled_again,
    device_memory,
    few_blocks,
    few_packed_queries,
    few_queries,
    fp8_at_once,
    fused_again,
    kvcache_again,
    kvcache_schedule,
    packed_at_once,
    packed_descaled_again,
    packed_parts_again,
    parts_again,
    quantizers,
    varlen_again,
)
from hopper_attention.backends import Target
from hopper_attention.distributed import parts_over_peers
from hopper_attention.launch import (
    addition,
    append,
    at_once,
    backward,
    cache_copy,
    combine,
    copies,
    decode,
    dequantized,
    forward,
    fp8,
    gradients_again,
    kvcache,
    merge,
    packed_fp8,
    packed_gradients_again,
    packed_quantize,
    paged_forward,
    quantize,
    qv,
    rotation,
    transpose,
    value_mean,
    varlen,
    widen,
)
from hopper_attention.launch import cache_tiles as launch_of_tiles
from hopper_attention.layout import TMA_BYTES

Serving = TypeVar("Serving", bound=Any)
H200 = Target("fake H200", (9, 0), assume_installed=True)
SMS = 132
MORE_THAN_A_TILE = 140
"""Keys, of which a backward pass takes three launches."""
ADDRESSED = torch.float16, torch.bfloat16, torch.float8_e4m3fn

NUMPY_DTYPES = {torch.float32: np.float32, torch.int32: np.int32}
"""Of what lies in room for pieces."""

REMEMBERING = (
    addition,
    append,
    backward,
    cache_again,
    cache_copy,
    cache_tiles,
    combine,
    copies,
    decode,
    dense_again,
    dequantized,
    descaled_again,
    few_packed_queries,
    few_blocks,
    few_queries,
    forward,
    fp8,
    fp8_at_once,
    fused_again,
    gradients_again,
    kvcache,
    kvcache_again,
    kvcache_schedule,
    launch_of_tiles,
    merge,
    packed_at_once,
    packed_descaled_again,
    packed_fp8,
    packed_parts_again,
    packed_quantize,
    paged_forward,
    parts_again,
    parts_over_peers,
    quantize,
    quantizers,
    packed_gradients_again,
    qv,
    rotation,
    transpose,
    value_mean,
    varlen,
    varlen_again,
    widen,
)
"""Modules of launchers that are remembered."""


def new_memory(device_index: int, pieces: device_memory.Pieces) -> device_memory.Work:
    """Stands for ``device_memory.stream_memory``."""
    tensors = tuple(piece.empty("cpu") for piece in pieces)
    return device_memory.Work(tensors, tensors)


def made_anew(
    device_index: int,
    pieces: device_memory.Pieces,
    owner: Any,
    make: Callable[[device_memory.Work], Serving],
) -> Serving:
    """Stands for ``device_memory.made_of_memory``."""
    return make(new_memory(device_index, pieces))


def run_in_python(steps: Sequence[at_once.Step]) -> at_once.Script:
    """Stands for ``at_once.make_script``: kernels here are functions that compute nothing, of any tensors."""

    def run(*given: Any) -> None:
        for kernel, arguments in steps:
            kernel(*[argument_of(x, given) for x in arguments])

    return at_once.Script(run, ())


@lru_cache(maxsize=64)
def words_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """So many bytes as numbers. Kept, as tests count operators of torch, of which this takes one."""
    room = (ctypes.c_uint8 * count).from_address(address)
    return torch.from_numpy(np.frombuffer(room, NUMPY_DTYPES[dtype]))


def argument_of(x: Any, given: tuple[Any, ...]) -> Any:
    if isinstance(x, at_once.Given):
        return given[x.number]
    if isinstance(x, at_once.Part):
        (shape, strides, dtype), whole = x.facts, given[x.number]
        # What is kept is a view of TVM FFI's own.
        is_room = not isinstance(whole, Tensor) or whole.dtype == torch.uint8
        step = TMA_BYTES if is_room or dtype.itemsize < 4 else dtype.itemsize
        whole = words_at(whole.data_ptr(), math.prod(whole.shape), dtype) if is_room else whole
        assert whole.dtype == dtype and x.byte % step == 0
        return guards._reinterpret_tensor(whole, shape, strides, x.byte // dtype.itemsize)
    if isinstance(x, at_once.ListedPart):
        count = 1 + 2 * x.dimensions
        first = given[x.listed] + 8 * x.word
        byte, *facts = (ctypes.c_int64 * count).from_address(first)
        sizes, strides = tuple(facts[: x.dimensions]), tuple(facts[x.dimensions :])
        return argument_of(at_once.Part(x.number, byte, (sizes, strides, x.dtype)), given)
    return x


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *kinds: ModuleType,
    target: Callable[[], Target] = lambda: H200,
    multiprocessors: int = SMS,
) -> list[int]:
    """Let the launchers of these modules believe that every device is ``target()``.

    What was remembered before is forgotten; a fixture calls ``forget_launchers`` when it ends. The list that comes back
    gets the number of each GPU that becomes current for a launch.
    """
    entered: list[int] = []

    class Guard:
        """Stands for ``torch.cuda.device``."""

        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: self.index)

        def __exit__(self, *error: Any) -> None:
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    for module in kinds:
        monkeypatch.setattr(module, "target_of", lambda device: target(), raising=False)
    monkeypatch.setattr(device_memory, "empty_on_gpu", guards._empty_strided_cpu)
    monkeypatch.setattr(device_memory, "stream_memory", new_memory)
    monkeypatch.setattr(device_memory, "made_of_memory", made_anew)
    monkeypatch.setattr(device_memory, "records_graph", lambda index: False)
    monkeypatch.setattr(at_once, "make_script", run_in_python)
    monkeypatch.setattr(device_memory, "tile_counter", lambda index: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    forget_launchers()
    return entered


def noting(found: list[tuple[Any, ...]], *before: Any) -> Callable[..., None]:
    """A kernel that notes its arguments, behind ``before``, and refuses addresses as compiled ones do before they
    launch anything: tensors of 16 bits, and of e4m3, begin at multiples of 16 bytes."""

    def kernel(*given: Any) -> None:
        for number, x in enumerate(given):
            if isinstance(x, torch.Tensor) and x.dtype in ADDRESSED and x.data_ptr() % 16:
                raise ValueError(f"Misaligned Tensor data on argument #{number}")
        found.append(before + given)

    return kernel


def forget_launchers() -> None:
    """Make every launcher be found anew."""
    for module in REMEMBERING:
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and not isinstance(function, type):
                function.cache_clear()


def serve_by(kernel: Serving, monkeypatch: pytest.MonkeyPatch, launch: ModuleType) -> Iterator[Serving]:
    """For a fixture: that serving kernels of a launcher's module are what ``kernel.get`` gives for a config."""
    pretend(monkeypatch, launch)
    monkeypatch.setattr(compile_cache, "get_serving", kernel.get)
    monkeypatch.setattr(launch, "index_of", lambda device: 0)
    yield kernel
    forget_launchers()
