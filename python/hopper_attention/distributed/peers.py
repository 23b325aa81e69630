"""Memory of each other that ranks of one host read and write: symmetric memory of torch.distributed.

What a peer wants is written there by an ordinary kernel, over NVLink. There is no message, so nothing that waits on an
SM for the other side, and nothing to put in order when it has come.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.store import tell_each_other
from hopper_attention.launch.base import current_device

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""PyTorch's own switch. Its memory is bound to an NVLink multicast object otherwise, which these copies do not use."""

MEETING_TIMEOUT_S = 600.0
"""How long a GPU waits for its peers, where the group does not say."""

REMEMBERED_VIEWS = 1024

HEAD_START_CYCLES = 6_000
"""How long attention waits behind copies that go beside it, in cycles of an SM: about 3 us. The copies are next on
their stream, and the attention's has to wait for an event of it."""


class PeerMemory(ABC):
    """A buffer on each rank of a group, which the others can read and write.

    Attributes:
        nbytes: of each.
    """

    nbytes: int

    @abstractmethod
    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """A contiguous tensor in the buffer of a rank, from so many bytes on."""

    @abstractmethod
    def begin(self) -> None:
        """Before the first copy of an exchange: it comes after all of the exchanges before, on whatever stream."""

    @abstractmethod
    def meet(self) -> None:
        """What is launched from now on runs when every rank has done what it launched before its call of this."""

    @abstractmethod
    def copy_aside(self, x: Tensor) -> Tensor:
        """A copy that comes after all before, and is made beside what follows until :meth:`wait`: on the stream of the
        exchange."""

    @abstractmethod
    def wait(self) -> None:
        """What is launched from now on comes after the copy that was made aside last."""

    @abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """What is launched within goes beside what is launched outside of it, and in its own order."""

    @abstractmethod
    def mark(self) -> Any:
        """All that was launched before, on this side, for :meth:`after`."""

    @abstractmethod
    def after(self, mark: Any) -> None:
        """What is launched from now on, on this side, comes after what was marked."""

    @abstractmethod
    def give_head_start(self) -> None:
        """What is launched next waits for a moment, so that what goes beside it gets its SMs first."""


class SymmetricMemory(PeerMemory):
    """On GPUs. Ranks meet by a kernel of one warp, on the current stream."""

    def __init__(self, ranks: Ranks, device: torch.device, nbytes: int) -> None:
        """All ranks of the group make it together.

        Raises:
            RuntimeError: the driver, or the system, does not let processes share memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        self.nbytes = nbytes
        with _without_multicast():
            self.buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
            self.handle = symmetric.rendezvous(self.buffer, ranks.group)
        self.timeout_ms = int(_timeout_of(ranks, device) * 1e3)
        self.views: dict[tuple[Any, ...], Tensor] = {}
        self.stream = torch.cuda.current_stream(device)
        self.side = torch.cuda.Stream(device, priority=-1)
        self.is_aside = False
        self.before, self.copied = torch.cuda.Event(), torch.cuda.Event()

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        key = rank, shape, dtype, offset
        found = self.views.get(key)
        if found is None:
            if len(self.views) >= REMEMBERED_VIEWS:
                self.views.clear()
            # Kept from inference mode, it could not be written to outside of it.
            with torch.inference_mode(False):
                found = self.handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
            self.views[key] = found
        return found

    def begin(self) -> None:
        # An object of the current stream takes ten times as long as its number.
        if torch._C._cuda_getCurrentRawStream(self.buffer.device.index) != self.stream.cuda_stream:
            stream = torch.cuda.current_stream(self.buffer.device)
            stream.wait_stream(self.stream)
            self.stream = stream

    def meet(self) -> None:
        # Those who meet aside do not meet those who do so here.
        self.handle.barrier(channel=int(self.is_aside), timeout_ms=self.timeout_ms)

    def copy_aside(self, x: Tensor) -> Tensor:
        copy = torch.empty_like(x)
        self.before.record(self.stream)
        self.side.wait_event(self.before)
        with self.aside():
            copy.copy_(x)
        self.copied.record(self.side)
        return copy

    def wait(self) -> None:
        self.stream.wait_event(self.copied)

    @contextmanager
    def aside(self) -> Iterator[None]:
        device = current_device()
        # torch.cuda.stream asks for the current stream, which takes longer than the rest.
        torch.cuda.set_stream(self.side)
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
            torch.cuda.set_stream(self.stream)
            if device != self.buffer.device.index:
                torch.cuda.set_device(device)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(self._current())
        return event

    def after(self, mark: Any) -> None:
        self._current().wait_event(mark)

    def _current(self) -> torch.cuda.Stream:
        return self.side if self.is_aside else self.stream

    def give_head_start(self) -> None:
        torch.cuda._sleep(HEAD_START_CYCLES)


def _timeout_of(ranks: Ranks, device: torch.device) -> float:
    """Seconds that the group lets its own transfers take."""
    options = getattr(ranks.group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return MEETING_TIMEOUT_S if timeout is None else float(timeout.total_seconds())


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before


def share_memory(ranks: Ranks, device: torch.device, nbytes: int) -> PeerMemory | str:
    """The memory, or in words why there is none: the same on all ranks, whichever of them cannot.

    Raises:
        PeerError: a rank did not come in time; it names the ranks.
    """
    said = [why_not(device), _place()]
    told = tell_each_other(ranks, said, "say whether it can share memory")
    for rank, (reason, place) in enumerate(told):
        if reason:
            return f"{reason} on {ranks.name(rank)}"
        if place != told[0][1]:
            return f"{ranks.name(rank)} is in another place than {ranks.name(0)}"
    failed = ""
    try:
        memory = SymmetricMemory(ranks, device, nbytes)
    except (RuntimeError, OSError) as error:
        failed = f"{type(error).__name__}: {str(error)[:200]}"
    for rank, reason in enumerate(tell_each_other(ranks, failed, "share memory")):
        if reason:
            return f"{reason} on {ranks.name(rank)}"
    return memory


def why_not(device: torch.device) -> str:
    """What keeps this process from sharing memory of a device, as far as it knows alone; empty if nothing."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, which has no memory that peers read"
    try:
        import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    try:
        _send_to_myself()
    except OSError as error:
        return f"this system passes no file descriptors ({error})"
    return ""


def _send_to_myself() -> None:
    """A file descriptor through a socket, which is how memory gets from process to process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        there.settimeout(5.0)
        socket.send_fds(here, [b"-"], [here.fileno()])
        _, descriptors, _, _ = socket.recv_fds(there, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        if not descriptors:
            raise OSError("none came")


def _place() -> str:
    """The same where processes can pass each other file descriptors: host, boot, and what a container sees."""
    found = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        found.append(boot.read_text().strip())
        found += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]
    except OSError:
        found.append("unknown")
    return " ".join(found)
