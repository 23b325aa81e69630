"""Adds a partial result of attention to a sum of such on a GPU, in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.merge.config import VECTOR, MergeConfig
from cute_kernels.problem import MAX_TILES
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import target_of, why_not_ampere
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import lies_in_vectors


@dataclass(frozen=True)
class MergeLauncher(Launcher):
    """Adds parts of one dtype to sums of one, for all sizes."""

    config: MergeConfig
    kernel: Kernel

    def __call__(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """As ``merge``, of tensors that the kernel can address."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(out, lse, part, part_lse)
        self.kernel(out, lse.mT, part, part_lse.mT)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(dtype: torch.dtype, sum_dtype: torch.dtype, device: torch.device) -> MergeLauncher | None:
    """The launcher for parts of a dtype and sums of float32 or that dtype, or None where there is no kernel; compiles
    or loads it the first time."""
    target = target_of(device)
    if dtype not in DTYPE_NAMES or sum_dtype not in (torch.float32, dtype) or why_not_ampere(target):
        return None
    major, minor = target.capability
    in_float32 = sum_dtype == torch.float32
    config = MergeConfig(ARCH_OF_CAPABILITY[major, minor], DTYPE_NAMES[dtype], in_float32)
    return MergeLauncher(index_of(device), config, compile_cache.get_serving(config))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Add a part to a sum in place, on torch's current stream, if there is a kernel for it.

    Args:
        out: (batch, rows, heads, head_dim_v), float32 or of the dtype of ``part``, where ``lse`` is -inf 0.
        lse: float32 (batch, heads, rows), natural log.
        part, part_lse: what is added, float16 or bfloat16 and float32, of the same shapes. A row whose LSE is -inf
            is left as it is.

    Returns:
        Whether it was done. Nothing has changed where it was not.
    """
    rows = lse.numel()
    launcher = find(part.dtype, out.dtype, part.device) if 0 < rows < MAX_TILES else None
    if launcher is None or not all(lies_in_vectors(x, VECTOR) for x in (out, part)):
        return False
    launcher(out, lse, part, part_lse)
    return True
