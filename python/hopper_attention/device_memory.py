"""Tensors on a GPU that outlive the call which made them: tile counters, work memory, and constants that kernels read.

A captured graph points to what its launches read and write, and may be replayed at any time, on any stream. So what it
points to is never freed, and what is kept does not lie in memory of a graph: neither of one that is being captured nor
of the pool in which ``torch.compile(mode="reduce-overhead")`` runs a function before it captures it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import guards

from cute_kernels.backward.step import SCHEDULER_WORDS
from hopper_attention._kernels import kept_argument
from hopper_attention.layout import new_layout

MAX_KEPT = 4096
"""Constants kept at most, besides those of graphs. Each takes 512 bytes or more of a GPU."""


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream records a CUDA graph in place of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def records_graph(device_index: int) -> bool:
    """``is_capturing`` on a GPU, for less: no graph is ever captured on the default stream, 0, which is not asked."""
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    return bool(stream) and torch.cuda.is_current_stream_capturing()


def make_apart(make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` returns, called in a thread of its own.

    A new thread is in no memory pool and in no mode of torch (inference, fake tensors, a default device), and its
    stream is the default one, whatever the caller's are. For the result to be there for every stream, ``make`` copies
    it from the CPU, which waits.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make).result()


class Constants:
    """Tensors that kernels read, by key."""

    def __init__(self, limit: int = MAX_KEPT) -> None:
        self._limit = limit
        self._kept: dict[Hashable, Tensor] = {}
        self._of_graphs: dict[Hashable, Tensor] = {}

    def get(self, key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor | None:
        """The tensor of ``key`` on ``device``; ``make``, called by ``make_apart``, gives it on the CPU the first time.

        None if a graph is being captured and it is not there yet: CUDA does not allow to copy it then. Once a graph has
        asked for it, it is never freed. Others are, all at once and when the GPUs are done with them, where there are
        more than the limit.
        """
        tensor = self._of_graphs.get(key)
        if tensor is not None:
            return tensor
        if is_capturing(device):
            if key in self._kept:
                self._of_graphs[key] = self._kept[key]
            return self._of_graphs.get(key)
        tensor = self._kept.get(key)
        if tensor is None:
            if len(self._kept) >= self._limit:
                self._let_go()
            tensor = self._kept.setdefault(key, make_apart(lambda: make().to(device)))
        return tensor

    def _let_go(self) -> None:
        """Free what no graph points to, once no kernel that is queued reads it any more."""
        for device in {tensor.device for tensor in self._kept.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._kept.clear()


constants = Constants()

_tile_counters: dict[tuple[int, int], Any] = {}

GRAPH_COUNTERS, COUNTER_STEP = 2**15, 8
"""Counters of a GPU for launches in graphs, and the int32 words from one to the next: one in each sector of memory."""


class GraphCounters:
    """Counters for the launches of captured graphs, each handed out once and never taken back.

    A kernel leaves its counter zero, so a graph need not zero it at each replay, which would cost a node and as much
    time as a launch.
    """

    def __init__(self, count: int = GRAPH_COUNTERS) -> None:
        self._count = count
        self._free: dict[int, Iterator[Tensor]] = {}
        self._lock = threading.Lock()

    def prepare(self, device_index: int) -> None:
        """Make those of a GPU, which cannot be made while a graph is captured."""
        with self._lock:
            if device_index not in self._free:
                zeros = _zeros_apart(self._count * COUNTER_STEP, device_index)
                starts = range(0, zeros.numel(), COUNTER_STEP)
                self._free[device_index] = (zeros[start : start + SCHEDULER_WORDS] for start in starts)

    def take(self, device_index: int) -> Tensor | None:
        """One that nothing else has; None if none was made, or all are in use."""
        with self._lock:
            return next(self._free.get(device_index, iter(())), None)


_graph_counters = GraphCounters()


def tile_counter(device_index: int) -> Any:
    """SCHEDULER_WORDS int32 zeros with which the CTAs of one launch share out the tiles, as an argument of the
    kernel, which leaves them zero.

    Launches on one stream run one after the other and so can share a counter: it is kept, which saves a
    memset a call. Two streams may run at the same time, so each has its own. A captured graph may be replayed
    on any stream, alongside anything, so a launch in it gets a counter of its own. Where no kernel has run on this
    GPU before the capture, or graphs have taken all, the graph zeroes one.
    """
    # torch.cuda.current_stream() builds an object around this number, which takes ten times as long.
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    # As in ``WorkMemory.get``: a graph is never captured on stream 0.
    if stream and torch.cuda.is_current_stream_capturing():
        counter = _graph_counters.take(device_index)
        return (
            torch.zeros(SCHEDULER_WORDS, dtype=torch.int32, device=f"cuda:{device_index}")
            if counter is None
            else counter
        )
    key = device_index, stream
    counter = _tile_counters.get(key)
    if counter is None:
        counter = _tile_counters.setdefault(key, kept_argument(_zeros_apart(SCHEDULER_WORDS, device_index)))
        _graph_counters.prepare(device_index)
    return counter


def _zeros_apart(words: int, device_index: int) -> Tensor:
    return make_apart(lambda: torch.zeros(words, dtype=torch.int32, device="cpu").to(f"cuda:{device_index}"))


Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor, which ``empty_on_gpu`` makes one of."""


class Piece(NamedTuple):
    """A contiguous tensor that a launch needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def facts(self) -> Facts:
        return *new_layout(self.shape), self.dtype

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(*self.shape, dtype=self.dtype, device=device)


Pieces = tuple[Piece, ...]


def room_for(pieces: Pieces) -> Piece:
    """One piece that all of them fit in, each from its byte of ``first_bytes`` on."""
    return Piece((sum(_rooms(pieces)),), torch.uint8)


def first_bytes(pieces: Pieces) -> tuple[int, ...]:
    """Where each of them begins in ``room_for`` them."""
    return tuple(accumulate(_rooms(pieces), initial=0))[:-1]


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty_on_gpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
empty_on_gpu = vars(guards).get("_empty_strided_cuda", _empty_strided)
"""A new tensor of a shape and strides on the current GPU. It is what code of torch.compile allocates with: half of the
host time of torch.empty, as it leaves the dispatcher out. A torch that has it no more takes that time."""

KEPT_BYTES = 2**24
"""Work memory that a thread keeps for a stream, at most."""

KEPT_STREAMS, KEPT_KINDS = 16, 1024
"""Streams with work memory, and sets of pieces that it was cut into, that a thread keeps at most."""

PIECE_BYTES = 256
"""Pieces begin at multiples of it."""


class Work(NamedTuple):
    """Pieces of work memory, whatever they hold: as tensors, and as arguments of kernels (``kept_argument``)."""

    tensors: tuple[Tensor, ...]
    arguments: tuple[Any, ...]


Made = TypeVar("Made")


class WorkMemory(threading.local):
    """Memory that the launches of a call fill and read, and the next call uses again.

    Launches on one stream run one after the other and so can share it; each stream has its own. So has each thread, as
    a call may have several launches, and those of two threads come to a stream in any order. It is memory that torch
    has for that stream, so that what takes its place once it is freed comes later too.
    """

    def __init__(self) -> None:
        self._of_streams: dict[tuple[int, int], Tensor] = {}
        self._cuts: dict[tuple[int, int, Pieces], Work] = {}
        self._made: dict[tuple[int, int, Hashable], Any] = {}

    def get(self, device_index: int, pieces: Pieces) -> Work:
        """For the launches of a call on the current stream of a GPU.

        In a graph they are new, and where they take more than ``KEPT_BYTES``.
        """
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        # CUDA captures no graph of the default stream, 0, and is not asked.
        if stream and torch.cuda.is_current_stream_capturing():
            return _new_pieces(f"cuda:{device_index}", pieces)
        cut = self._cuts.get((device_index, stream, pieces))
        return self._cut(device_index, stream, pieces) if cut is None else cut

    def made(
        self, device_index: int, pieces: Pieces, owner: Hashable, make: Callable[[Work], Made]
    ) -> Made | None:
        """What ``make`` makes of the pieces for launches of a call on the current stream, kept for ``owner``, which has
        no other pieces, as long as their memory is kept. None where it is not: in a graph, and where they take more
        than ``KEPT_BYTES``."""
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        if stream and torch.cuda.is_current_stream_capturing():
            return None
        found: Made | None = self._made.get((device_index, stream, owner))
        if found is None:
            if sum(_rooms(pieces)) > KEPT_BYTES:
                return None
            work = self.get(device_index, pieces)
            if len(self._made) >= KEPT_KINDS:
                self._made.clear()
            found = self._made[device_index, stream, owner] = make(work)
        return found

    def _cut(self, device_index: int, stream: int, pieces: Pieces) -> Work:
        """``get`` of pieces that the stream had not yet."""
        rooms = _rooms(pieces)
        size, key = sum(rooms), (device_index, stream)
        if size > KEPT_BYTES:
            return _new_pieces(f"cuda:{device_index}", pieces)
        if len(self._of_streams) >= KEPT_STREAMS or len(self._cuts) >= KEPT_KINDS:
            self._cuts.clear()
            self._made.clear()
            self._of_streams.clear()
        memory = self._of_streams.get(key)
        if memory is None or memory.numel() < size:
            memory = self._of_streams[key] = _bytes_of_current_stream(device_index, size)
            self._cuts = {known: cut for known, cut in self._cuts.items() if known[:2] != key}
            self._made = {known: made for known, made in self._made.items() if known[:2] != key}
        parts = zip(pieces, memory[:size].split(rooms), strict=True)
        tensors = tuple(part[: piece.bytes].view(piece.dtype).view(piece.shape) for piece, part in parts)
        cut = Work(tensors, tuple(map(kept_argument, tensors)))
        self._cuts[device_index, stream, pieces] = cut
        return cut


@lru_cache(maxsize=KEPT_KINDS)
def _rooms(pieces: Pieces) -> tuple[int, ...]:
    """The bytes that each takes of the memory of a stream."""
    return tuple(-(-piece.bytes // PIECE_BYTES) * PIECE_BYTES for piece in pieces)


def _new_pieces(device: torch.device | str, pieces: Pieces) -> Work:
    tensors = tuple(piece.empty(device) for piece in pieces)
    return Work(tensors, tensors)


def _bytes_of_current_stream(device_index: int, size: int) -> Tensor:
    """uint8 (size,), of the memory that torch has for the current stream, and of no pool."""
    stream = torch.cuda.current_stream(device_index)

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device_index}")

    return make_apart(make)


_work_memory = WorkMemory()


def stream_memory(device_index: int, pieces: Pieces) -> Work:
    """``WorkMemory.get`` of this thread."""
    return _work_memory.get(device_index, pieces)


def made_of_memory(
    device_index: int, pieces: Pieces, owner: Hashable, make: Callable[[Work], Made]
) -> Made | None:
    """``WorkMemory.made`` of this thread."""
    return _work_memory.made(device_index, pieces, owner, make)


def work_memory(device: torch.device, device_index: int, pieces: Pieces) -> Work:
    """``WorkMemory.get`` of this thread; on a device without streams new tensors."""
    if device.type != "cuda":
        return _new_pieces(device, pieces)
    return _work_memory.get(device_index, pieces)


@lru_cache(maxsize=64)
def no_floats(device: torch.device) -> Tensor:
    """float32 without elements."""
    return make_apart(lambda: torch.empty(0, dtype=torch.float32, device=device))


@lru_cache(maxsize=64)
def no_lengths(device: torch.device) -> Tensor:
    """int32 without elements, which tells a kernel that all rows of every sequence count."""
    return make_apart(lambda: torch.empty(0, dtype=torch.int32, device=device))


def unit_scales(batch: int, kv_heads: int, device: torch.device) -> Tensor:
    """float32 (batch, kv_heads, 1) ones."""
    shape = batch, kv_heads, 1
    ones = constants.get(
        ("ones", *shape, device), device, lambda: torch.ones(shape, dtype=torch.float32, device="cpu")
    )
    # A graph fills its own, at every replay.
    return torch.ones(shape, dtype=torch.float32, device=device) if ones is None else ones


def multiples(count: int, step: int, device: torch.device) -> Tensor:
    """int32 (count,): 0, step, 2 step, and so on; kept, as the offsets of sequences of one length."""

    def made(on: torch.device | str) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=on) * step

    kept = constants.get(("multiples", count, step, device), device, lambda: made("cpu"))
    # A graph makes its own, at every replay.
    return made(device) if kept is None else kept


TABLE_BYTES = 2**19
"""Of the numbers that ``filled`` keeps for vectors of one length, at most: 8 sequences of up to 16383 keys."""


def filled(number: int, count: int, most: int, device: torch.device) -> Tensor:
    """int32 (count,) of one number: of a table of those from 0 to ``most``, which is kept, so that no kernel fills it;
    or a new one, where the table would be too large or ``most`` is negative."""
    table, rows = None, 1 << max(most, 0).bit_length()
    # A power of two, as a cache that grows by a key a call would else make a table, and wait for it, at every call.
    if 0 <= number <= most and 4 * count * rows <= TABLE_BYTES:

        def make() -> Tensor:
            return torch.arange(rows, dtype=torch.int32, device="cpu")[:, None].repeat(1, count)

        table = constants.get(("filled", count, rows, device), device, make)
    # A graph that finds no table fills its own, at every replay.
    return torch.full((count,), number, dtype=torch.int32, device=device) if table is None else table[number]
