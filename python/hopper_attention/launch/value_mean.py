"""Calls the kernel of the mean of V, ``hopper.mean``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hopper.mean.config import (
    MAX_CTAS,
    ValueMeanConfig,
    count_mean_ctas,
    validate_value_mean_config,
)
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import new_layout


@dataclass(frozen=True)
class ValueMeanLauncher(Launcher):
    """Finds what ``quantization_rules.mean_worth_subtracting`` does, of V of a dtype and of all sizes."""

    kernel: Kernel

    def __call__(self, v: Tensor) -> Tensor:
        """float32 (b, hk, dv) of v (b, s, hk, dv), which is ``addressable``; no size is 0."""
        if self.device_index != torch.cuda.current_device():
            mean: Tensor = self.call_there(v)
            return mean
        batch, _, kv_heads, head_dim_v = v.shape
        mean = device_memory.empty_on_gpu(*new_layout((batch, kv_heads, head_dim_v)), torch.float32)
        self.fill(v, mean)
        return mean

    def fill(self, v: Tensor, mean: Tensor) -> None:
        """The same into ``mean``, on the current GPU, which is that of this launcher."""
        self.kernel(v, mean)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(dtype: torch.dtype, device: torch.device) -> ValueMeanLauncher:
    """The launcher for V of ``dtype``; compiles or loads its kernel the first time."""
    config = ValueMeanConfig(DTYPE_NAMES[dtype])
    validate_value_mean_config(config)
    return ValueMeanLauncher(index_of(device), compile_cache.get_quantize(config))


def why_too_large(v_shape: tuple[int, ...]) -> str:
    """What keeps the kernel from values of a shape; empty if nothing does."""
    batch, _, kv_heads, head_dim_v = v_shape
    ctas = count_mean_ctas(batch, kv_heads, head_dim_v)
    return f"the mean of V takes {ctas} CTAs of at most {MAX_CTAS}" if ctas > MAX_CTAS else ""
