"""Memory that ranks share without GPUs: files that all of them map; and what writes there in place of a kernel."""

from __future__ import annotations

import math
import random
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.copies.config import THREADS, CopiesConfig
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.peers import PeerMemory
from hopper_attention.launch.copies import CopiesLauncher


class MemoryWithoutStreams(PeerMemory):
    """Of a CPU, where what is launched has been done."""

    def begin(self) -> None:
        pass

    def copy_aside(self, x: Tensor) -> Tensor:
        return x.clone()

    def wait(self) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> None:
        pass

    def after(self, mark: None) -> None:
        pass

    def give_head_start(self) -> None:
        pass


class FileMemory(MemoryWithoutStreams):
    """Files that all ranks map, in place of memory of GPUs. Ranks are late at random, once they have met."""

    def __init__(self, ranks: Ranks, folder: str, nbytes: int) -> None:
        self.ranks = ranks
        self.nbytes = nbytes
        name = "-".join(map(str, [*dist.get_process_group_ranks(ranks.group), nbytes]))
        paths = [Path(folder) / f"{name}-of-{rank}" for rank in range(ranks.size)]
        paths[ranks.rank].write_bytes(bytes(nbytes))
        dist.barrier(ranks.group)
        self.buffers = [
            torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8) for path in paths
        ]

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        room = self.buffers[rank][offset : offset + math.prod(shape) * dtype.itemsize]
        return room.view(dtype).view(shape)

    def meet(self) -> None:
        dist.barrier(self.ranks.group)
        time.sleep(random.uniform(0, 2e-3))


def copies_by_torch(
    dtype: torch.dtype,
    sources: int,
    pieces: int,
    device: torch.device,
    gathers: bool = False,
    threads: int = THREADS,
) -> CopiesLauncher:
    """Stands for ``launch.copies.find``."""

    def kernel(*given: Any) -> None:
        xs, targets = given[:sources], given[sources:][: sources * pieces]
        places = given[sources + len(targets) : -1]
        for i, target in enumerate(targets):
            x, (first, step) = xs[i // pieces], places[2 * i : 2 * i + 2]
            strides = x.stride(0), step, x.stride(1), 1
            piece = torch.as_strided(x, target.shape, strides, x.storage_offset() + first)
            piece.copy_(target) if gathers else target.copy_(piece)

    name = str(dtype).removeprefix("torch.")
    return CopiesLauncher(0, CopiesConfig("sm_90a", name, sources, pieces, gathers, threads), kernel)
