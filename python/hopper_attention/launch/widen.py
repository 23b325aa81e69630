"""Calls the kernel that makes codes of e4m3 wider, ``hopper.widen``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hopper.forward.fp8.config import WIDE_CODES_DTYPE
from hopper.widen.config import MAX_VECTORS, VECTOR, WidenConfig
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of

WIDE_CODES: torch.dtype = getattr(torch, WIDE_CODES_DTYPE)


@dataclass(frozen=True)
class WidenLauncher(Launcher):
    """Widens Q and K of any sizes."""

    kernel: Kernel

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """As ``widened``, of contiguous tensors that the kernel can address."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(q, k)
        wide = torch.empty_like(q, dtype=WIDE_CODES), torch.empty_like(k, dtype=WIDE_CODES)
        self.kernel(*(x.view(-1, VECTOR) for x in (q, k, *wide)))
        return wide


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(device: torch.device) -> WidenLauncher:
    """The launcher; compiles or loads its kernel the first time."""
    return WidenLauncher(index_of(device), compile_cache.get_quantize(WidenConfig()))


def widened(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of Q and K, e4m3 (..., head_dim), head_dim a multiple of 16 and no size 0, on a Hopper GPU and torch's
    current stream, as float16, contiguous. By PyTorch where there are more than the kernel can count, or where they lie
    at an odd address."""
    q, k = q.contiguous(), k.contiguous()
    if not are_counted(q, k) or (q.data_ptr() | k.data_ptr()) % VECTOR:
        return q.to(WIDE_CODES), k.to(WIDE_CODES)
    return find(q.device)(q, k)


def are_counted(q: Tensor, k: Tensor) -> bool:
    """Whether Q and K have no more codes than the kernel can count."""
    return max(q.numel(), k.numel()) <= MAX_VECTORS * VECTOR
