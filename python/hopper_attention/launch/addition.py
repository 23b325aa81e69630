"""Adds tensors of 16 bits to one on a GPU, in place and in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.addition.config import PARTS, VECTOR, AdditionConfig
from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.problem import MAX_TILES
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import target_of, why_not_ampere
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import lies_in_vectors

MOST_PARTS = PARTS[-1]


@dataclass(frozen=True)
class AdditionLauncher(Launcher):
    """Adds so many tensors of one dtype, for all sizes."""

    config: AdditionConfig
    kernel: Kernel

    def __call__(self, total: Tensor, parts: Sequence[Tensor]) -> None:
        """As ``add_parts``, of (batch, rows, columns) that the kernel can address."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(total, parts)
        self.kernel(total, *parts, *[parts[-1]] * (MOST_PARTS - len(parts)))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(dtype: torch.dtype, parts: int, device: torch.device) -> AdditionLauncher | None:
    """The launcher, or None where there is no kernel; compiles or loads it the first time."""
    target = target_of(device)
    if dtype not in DTYPE_NAMES or parts not in PARTS or why_not_ampere(target):
        return None
    major, minor = target.capability
    config = AdditionConfig(ARCH_OF_CAPABILITY[major, minor], DTYPE_NAMES[dtype], parts)
    return AdditionLauncher(index_of(device), config, compile_cache.get_serving(config))


def _by_row(x: Tensor) -> Tensor:
    """(batch, rows, heads * head_dim), without a copy; or x itself, whose heads lie apart."""
    heads, head_dim = x.shape[2:]
    return x.view(*x.shape[:2], heads * head_dim) if x.stride()[2:] == (head_dim, 1) else x


def add_parts(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Add ``parts``, one or more, to ``total`` in place, in float32 and rounded once, on torch's current stream.

    Args:
        total, parts: (batch, rows, heads, head_dim), float16 or bfloat16, all of one shape.
    """
    if len(parts) == 1:
        # In 16 bits PyTorch too adds in float32 and rounds.
        total.add_(parts[0])
        return
    launcher = find(total.dtype, len(parts), total.device)
    flat = [_by_row(x) for x in (total, *parts)]
    fits = 0 < total.numel() // VECTOR < MAX_TILES
    if launcher is None or not fits or not all(x.dim() == 3 and lies_in_vectors(x, VECTOR) for x in flat):
        total.copy_(sum((x.float() for x in parts), start=total.float()))
        return
    launcher(flat[0], flat[1:])
