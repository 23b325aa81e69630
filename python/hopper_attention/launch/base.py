"""What the launchers of all kinds of kernels share.

A launcher holds a compiled kernel and what of its arguments is the same in every call. It serves all sizes: result
shapes are read off the tensors of a call, and a grid is as large as the GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper_attention.checks import check_sm_margin_fits
from hopper_attention.device_memory import make_apart

REMEMBERED_CALLS = 4096
"""Calls of which it is remembered what serves them, least recently used first out."""

REMEMBERED_LAUNCHERS = 1024
"""Launchers kept of each kind."""

NO_SIDES, NO_PLAN, NO_PAGES = (None, None, None), (None, None), (None, None)
"""In place of the sides of a window and a chunk, of a plan and the number of its sequences, and of a table of pages and
left pads, which the forward kernel of 16 bits takes behind a plan."""


@dataclass(frozen=True)
class Launcher(ABC):
    """A compiled kernel, to be run on torch's current stream of ``device_index``."""

    device_index: int

    @abstractmethod
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Allocate the results, queue the kernel, return the results; ``call_there`` if another GPU is current."""

    def call_there(self, *arguments: Any, **options: Any) -> Any:
        """Call this launcher while ``device_index`` is current, as a kernel starts on the current GPU."""
        with torch.cuda.device(self.device_index):
            return self(*arguments, **options)


@dataclass(frozen=True)
class ResultSpec:
    """What out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q) are, whatever their sizes.

    ``is_like_q`` says that out is laid out as q is, which makes it a microsecond cheaper to allocate.
    """

    dtype: torch.dtype
    head_dim_v: int
    is_like_q: bool = False

    def empty_out(self, q: Tensor) -> Tensor:
        if self.is_like_q:
            return torch.empty_like(q)
        batch, seqlen_q, heads, _ = q.shape
        return torch.empty(batch, seqlen_q, heads, self.head_dim_v, dtype=self.dtype, device=q.device)

    def empty_lse(self, q: Tensor) -> Tensor:
        batch, seqlen_q, heads, _ = q.shape
        return torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)


@lru_cache(maxsize=REMEMBERED_CALLS)
def no_vectors(batch: int, heads: int, device: torch.device) -> Tensor:
    """float32 (batch, heads, 0), which tells a kernel to write no LSE, or that there is no mean of V.

    It has no memory. Its strides are what kernels ask for of vectors, multiples of 16 bytes.
    """
    shape, strides = (batch, heads, 0), (4 * heads, 4, 1)
    return make_apart(lambda: torch.empty_strided(shape, strides, dtype=torch.float32, device=device))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def no_runs(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel with runs takes where no mean of V changes: differences at no edges, int32 (batch, 0, 1, 128),
    changes of no heads, int32 (batch, 0, 4), and no notes, float32 (0, 0, 128)."""

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return make_apart(lambda: torch.empty(shape, dtype=dtype, device=device))

    return (
        make(batch, 0, 1, 128, dtype=torch.int32),
        make(batch, 0, 4, dtype=torch.int32),
        make(0, 0, 128, dtype=torch.float32),
    )


def without_rows(lse: Tensor) -> Tensor:
    """What operators return in place of an ``lse`` that nobody wants: a new tensor (..., 0)."""
    return lse.new_empty((*lse.shape[:-1], 0))


def _current_device() -> int:
    return torch.cuda.current_device()


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _current_device)
"""The number of the current GPU, once there are tensors on one: torch's function asks first whether CUDA is there."""


def index_of(device: torch.device) -> int:
    """The number of a GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


def count_ctas(device_index: int, sm_margin: int = 0) -> int:
    """CTAs of a persistent grid: as many as the GPU has multiprocessors, but for ``sm_margin`` of them.

    Raises:
        ValueError: none is left.
    """
    multiprocessors = int(torch.cuda.get_device_properties(device_index).multi_processor_count)
    check_sm_margin_fits(sm_margin, multiprocessors)
    return multiprocessors - sm_margin
