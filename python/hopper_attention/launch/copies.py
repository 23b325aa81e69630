"""Pieces of several 16-bit tensors, copied on a GPU in one launch, also into the memory of its peers or out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.copies.config import MOST_COPIES, THREADS, VECTOR, CopiesConfig
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import target_of, why_not_ampere
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, current_device, index_of


class Piece(NamedTuple):
    """Of a tensor (batch, rows, heads, d) whose heads lie side by side: blocks of its rows, and some of their columns.

    Attributes:
        target: (batch, blocks, rows of each, columns), where the piece goes, or comes from.
        first: elements from the tensor's first to the piece's.
        step: elements from one block to the next.
    """

    target: Tensor
    first: int
    step: int

    def of(self, x: Tensor) -> Tensor:
        """The piece itself, of the shape of the target."""
        of_batch, of_row = x.stride()[:2]
        strides = of_batch, self.step, of_row, 1
        return x.as_strided(self.target.shape, strides, x.storage_offset() + self.first)


@dataclass(frozen=True)
class CopiesLauncher(Launcher):
    """Copies so many pieces of so many tensors of one dtype, of any sizes."""

    config: CopiesConfig
    kernel: Kernel

    def __call__(self, sources: Sequence[Tensor], behind: tuple[Any, ...]) -> None:
        """``behind`` is what the kernel takes behind the sources, as :func:`behind_sources` has it."""
        if self.device_index != current_device():
            return self.call_there(sources, behind)
        self.kernel(*sources, *behind)


def behind_sources(pieces: Sequence[Sequence[Piece]], most_ctas: int) -> tuple[Any, ...]:
    """Of the pieces of each source in turn: targets, places, and how many CTAs there are for each copy, at most."""
    all_pieces = [piece for of_source in pieces for piece in of_source]
    targets = [piece.target for piece in all_pieces]
    return *targets, *(n for piece in all_pieces for n in (piece.first, piece.step)), most_ctas


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(
    dtype: torch.dtype,
    sources: int,
    pieces: int,
    device: torch.device,
    gathers: bool = False,
    threads: int = THREADS,
) -> CopiesLauncher | None:
    """The launcher, or None where there is no kernel; compiles or loads it the first time.

    With ``gathers`` pieces come from their targets. ``threads`` are those of a CTA."""
    target = target_of(device)
    is_possible = min(sources, pieces) > 0 and sources * pieces <= MOST_COPIES
    if dtype not in DTYPE_NAMES or not is_possible or why_not_ampere(target):
        return None
    major, minor = target.capability
    arch, name = ARCH_OF_CAPABILITY[major, minor], DTYPE_NAMES[dtype]
    config = CopiesConfig(arch, name, sources, pieces, gathers, threads)
    return CopiesLauncher(index_of(device), config, compile_cache.get_serving(config))


def is_in_vectors(x: Tensor, pieces: Sequence[Piece]) -> bool:
    """Whether pieces of a tensor can be moved in vectors, but for where it lies in memory."""
    lengths = [n for p in pieces for n in (p.first, p.step, p.target.shape[3], *p.target.stride()[:3])]
    return x.numel() > 0 and x.stride(3) == 1 and not any(n % VECTOR for n in (*x.stride()[:2], *lengths))
