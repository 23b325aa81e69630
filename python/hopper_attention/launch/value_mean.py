"""Calls the kernel of the mean of V, ``hopper.mean``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.problem import DENSE, MAX_HEAD_DIM, VARLEN
from hopper.mean.config import (
    CLUSTERS,
    MAX_CTAS,
    MOST_PARTS,
    RunMeansConfig,
    count_mean_ctas,
    select_value_mean_config,
)
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import new_layout
from hopper_attention.lengths import Lengths


@dataclass(frozen=True)
class ValueMeanLauncher(Launcher):
    """Finds what ``quantization_rules.mean_worth_subtracting`` does, of V of a dtype."""

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

    def fill(self, v: Tensor, mean: Any) -> None:
        """The same into ``mean``, on the current GPU, which is that of this launcher."""
        self.kernel(v, mean)

    def fill_packed(self, v: Tensor, lengths: Lengths, mean: Tensor) -> None:
        """That of each sequence of v (1, total, hk, dv) into mean (batch + 1, hk, dv); its last entry is of the rows
        behind the last sequence."""
        used = device_memory.no_lengths(v.device) if lengths.seqused_k is None else lengths.seqused_k
        self.kernel(v, mean, lengths.cu_seqlens_k, used)


class RunMeans(NamedTuple):
    """What ``quantization_rules.means_of_runs`` returns, and what it is found by, which is still being read."""

    means: Tensor
    changes: Tensor
    statistics: Tensor


@dataclass(frozen=True)
class RunMeansLauncher(Launcher):
    """Finds what ``quantization_rules.means_of_runs`` does, of V of a dtype, with runs of ``mean_blocks`` blocks of
    ``block`` keys, by means and variances of runs, which ``statistics`` finds."""

    statistics: Kernel
    kernel: Kernel
    mean_blocks: int
    block: int

    def __call__(self, v: Tensor) -> RunMeans:
        """Those of v, which is ``addressable``, on the current GPU, which is that of this launcher. A kernel of wider
        heads may read behind the means."""
        batch, keys, kv_heads, head_dim_v = v.shape
        blocks = -(-keys // self.block)
        shape = batch, -(-blocks // self.mean_blocks), kv_heads, head_dim_v
        statistics = torch.empty((2, *shape), dtype=torch.float32, device=v.device)
        room = torch.empty(math.prod(shape) + MAX_HEAD_DIM, dtype=torch.float32, device=v.device)
        means = room[:-MAX_HEAD_DIM].view(shape)
        changes = torch.empty(batch, kv_heads, MOST_PARTS, dtype=torch.int32, device=v.device)
        runs = self.mean_blocks * self.block, blocks * self.block
        self.statistics(v, statistics, *runs)
        self.kernel(v, statistics, means, changes, *runs)
        return RunMeans(means, changes, statistics)


def find(v: Tensor) -> ValueMeanLauncher:
    """The launcher for v (b, s, hk, dv); compiles or loads its kernel the first time."""
    batch, _, kv_heads, head_dim_v = v.shape
    return find_for(v.dtype, batch, kv_heads, head_dim_v, v.device)


def find_for(
    dtype: torch.dtype, batch: int, kv_heads: int, head_dim_v: int, device: torch.device
) -> ValueMeanLauncher:
    """The same by what a call tells."""
    return _find(dtype, batch, kv_heads, head_dim_v, DENSE, device)


def find_packed(v: Tensor, sequences: int) -> ValueMeanLauncher:
    """The same of packed v (total, hk, dv), where those behind the last are one of the sequences."""
    _, kv_heads, head_dim_v = v.shape
    return _find(v.dtype, sequences, kv_heads, head_dim_v, VARLEN, v.device)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find(
    dtype: torch.dtype, sequences: int, kv_heads: int, head_dim_v: int, layout: str, device: torch.device
) -> ValueMeanLauncher:
    config = select_value_mean_config(DTYPE_NAMES[dtype], sequences, kv_heads, head_dim_v, layout)
    return ValueMeanLauncher(index_of(device), compile_cache.get_quantize(config))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_of_runs(
    dtype: torch.dtype, v_shape: tuple[int, ...], mean_blocks: int, block: int, device: torch.device
) -> RunMeansLauncher:
    """The launcher for V of this shape; compiles or loads its kernel the first time."""
    batch, keys, kv_heads, head_dim_v = v_shape
    runs = batch * -(-keys // (mean_blocks * block))
    config = select_value_mean_config(DTYPE_NAMES[dtype], runs, kv_heads, head_dim_v, of_runs=True)
    statistics = compile_cache.get_quantize(config)
    kernel = compile_cache.get_quantize(RunMeansConfig(DTYPE_NAMES[dtype]))
    return RunMeansLauncher(index_of(device), statistics, kernel, mean_blocks, block)


def why_too_many(sequences: int, kv_heads: int, head_dim_v: int) -> str:
    """What keeps the kernel from values of these sizes; empty if nothing does."""
    ctas = count_mean_ctas(sequences, kv_heads, head_dim_v, CLUSTERS[0])
    return f"the mean of V takes {ctas} CTAs, of which there may be {MAX_CTAS}" if ctas > MAX_CTAS else ""
