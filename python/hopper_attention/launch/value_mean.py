"""Calls the kernel of the mean of V, ``hopper.mean``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.problem import DENSE, MAX_HEAD_DIM, VARLEN
from hopper.mean.config import (
    CLUSTERS,
    EDGES_AT_ONCE,
    MAX_CTAS,
    MOST_PARTS,
    WORDS_OF_EDGES,
    RunMeansConfig,
    count_mean_ctas,
    select_value_mean_config,
)
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.device_memory import Piece
from hopper_attention.launch.at_once import Part, Step
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import new_layout
from hopper_attention.lengths import Lengths


@dataclass(frozen=True)
class ValueMeanLauncher(Launcher):
    """Finds what ``value_mean_rules.mean_worth_subtracting`` does, of V of a dtype."""

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


BEHIND = WORDS_OF_EDGES * MAX_HEAD_DIM
"""Words that may be read behind differences of means."""


class RunShape(NamedTuple):
    """Of means of runs (batch, runs, kv_heads, head_dim_v), the run of the last keys first."""

    batch: int
    runs: int
    kv_heads: int
    head_dim_v: int

    @classmethod
    def of(cls, v_shape: Sequence[int], launcher: RunMeansLauncher) -> RunShape:
        batch, keys, kv_heads, head_dim_v = v_shape
        return cls(batch, -(-keys // (launcher.mean_blocks * launcher.block)), kv_heads, head_dim_v)

    @property
    def pieces(self) -> tuple[Piece, Piece, Piece, Piece]:
        """Room for what the means are found by, the means, their differences, and changes. Behind the differences a
        kernel of wider heads may read."""
        room, changes = math.prod(self.differences.shape) + BEHIND, (self.batch, self.kv_heads, MOST_PARTS)
        return Piece((2, *self)), Piece(self), Piece((room,), torch.int32), Piece(changes, torch.int32)

    @property
    def differences(self) -> Piece:
        """Of means, as ``compile_run_means`` has them."""
        batch, runs, *of_run, columns = self
        return Piece((batch, -(-runs // EDGES_AT_ONCE), *of_run, WORDS_OF_EDGES * columns), torch.int32)

    def parts(self, means: int, differences: int) -> tuple[Part, Part, Part, Part]:
        """In pieces that are arguments number so much: the means, those of all entries one after the other, those of
        the runs with the first keys, and the differences."""
        batch, runs, *of_run = self
        flat, (_, *strides), size = (batch * runs, *of_run), new_layout((1, *of_run))[1], math.prod(of_run)
        last = (batch, *of_run), (runs * size, *strides), torch.float32
        byte = 4 * (runs - 1) * size
        return (
            Part(means, 0, Piece(self).facts),
            Part(means, 0, Piece(flat).facts),
            Part(means, byte, last),
            Part(differences, 0, self.differences.facts),
        )

    def views(self, means: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``parts`` of these pieces, as tensors."""
        return means, means.flatten(0, 1), means[:, -1], room[:-BEHIND].view(self.differences.shape)


class RunMeans(NamedTuple):
    """What ``value_mean_rules.means_of_runs`` returns; what the mean of the run in front is more, as
    ``compile_run_means`` has it, 0 for the first; and what these are found by, which is still being read."""

    means: Tensor
    changes: Tensor
    differences: Tensor
    statistics: Tensor


@dataclass(frozen=True)
class RunMeansLauncher(Launcher):
    """Finds what ``value_mean_rules.means_of_runs`` does, of V of a dtype, with runs of ``mean_blocks`` blocks of
    ``block`` keys, by means and variances of runs, which ``statistics`` finds."""

    statistics: Kernel
    kernel: Kernel
    mean_blocks: int
    block: int

    def __call__(self, v: Tensor) -> RunMeans:
        """Those of v, which is ``addressable``, on the current GPU, which is that of this launcher."""
        runs = RunShape.of(v.shape, self)
        statistics, means, room, changes = (piece.empty(v.device) for piece in runs.pieces)
        differences = runs.views(means, room)[-1]
        self.fill(v, statistics, means, differences, changes)
        return RunMeans(means, changes, differences, statistics)

    def fill(self, v: Tensor, *found: Tensor) -> None:
        """The same into statistics, means, differences and changes."""
        for kernel, arguments in self.steps(v, *found, keys=v.shape[1]):
            kernel(*arguments)

    def steps(self, v: Any, statistics: Any, *found: Any, keys: int) -> list[Step]:
        """The two launches, of V with so many keys."""
        runs = self.mean_blocks * self.block, -(-keys // self.block) * self.block
        return [
            Step(self.statistics, (v, statistics, *runs)),
            Step(self.kernel, (v, statistics, *found, *runs)),
        ]


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
    config = select_value_mean_config(DTYPE_NAMES[dtype], runs, kv_heads, head_dim_v, keys_of_runs=keys)
    statistics = compile_cache.get_quantize(config)
    kernel = compile_cache.get_quantize(RunMeansConfig(DTYPE_NAMES[dtype]))
    return RunMeansLauncher(index_of(device), statistics, kernel, mean_blocks, block)


def why_too_many(sequences: int, kv_heads: int, head_dim_v: int) -> str:
    """What keeps the kernel from values of these sizes; empty if nothing does."""
    ctas = count_mean_ctas(sequences, kv_heads, head_dim_v, CLUSTERS[0])
    return f"the mean of V takes {ctas} CTAs, of which there may be {MAX_CTAS}" if ctas > MAX_CTAS else ""
