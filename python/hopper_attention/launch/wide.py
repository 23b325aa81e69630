"""Runs the Hopper kernel for wide values, dense and on packed sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper.wide.config import WideForwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.forward_rules import Config
from hopper_attention.launch import packed_forward
from hopper_attention.launch.base import Launcher, ResultSpec, count_ctas, index_of
from hopper_attention.launch.forward import NO_PLAN, NO_SIDES
from hopper_attention.launch.packed_forward import Planner, find_planner
from hopper_attention.layout import make_addressable, make_packed_addressable
from hopper_attention.lengths import Lengths, rows_of_sequences
from hopper_attention.masks import kernel_sides
from hopper_attention.scores import Scores

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and qv."""


@dataclass(frozen=True)
class WideKernel(Launcher):
    """A kernel for wide values; ``num_ctas`` are those of a persistent grid."""

    config: WideForwardConfig
    kernel: Kernel
    head_dim_v: int
    num_ctas: int

    def sides(self, window: tuple[int, int]) -> tuple[Any, ...]:
        """Of a window, as the kernel takes them."""
        return kernel_sides(*window) if self.config.window else NO_SIDES


@dataclass(frozen=True)
class WideLauncher(WideKernel):
    """On dense tensors."""

    def __call__(
        self, inputs: Inputs, softmax_scale: float, window: tuple[int, int], scores: Scores
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(inputs, softmax_scale, window, scores)
        q = inputs[0]
        batch, _, heads, _ = q.shape
        result = ResultSpec(q.dtype, self.head_dim_v)
        out, lse = result.empty_out(q), result.empty_lse(q)
        tensors = (make_addressable(x) for x in inputs)
        counter = device_memory.tile_counter(self.device_index)
        options = *self.sides(window), *NO_PLAN, *scores.for_kernel(batch, heads)
        self.kernel(*tensors, out, lse, counter, softmax_scale, *options, self.num_ctas)
        return out, lse


@dataclass(frozen=True)
class PackedWideLauncher(WideKernel):
    """On packed sequences, whose tiles a plan has."""

    planner: Planner

    def __call__(
        self,
        inputs: Inputs,
        lengths: Lengths,
        softmax_scale: float,
        window: tuple[int, int],
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(inputs, lengths, softmax_scale, window, scores)
        q, k = inputs[:2]
        (total_q, heads, _), batch = q.shape, lengths.cu_seqlens_q.shape[0] - 1
        totals = total_q, k.shape[0]
        check_packed_size("kernel", heads, batch, totals, self.config.tile_m)
        out, lse = packed_forward.empty_results(q, self.head_dim_v, True)
        if lengths.seqused_q is not None:
            # The kernel writes the rows of sequences, and those behind the last one.
            out.zero_()
            lse.fill_(-math.inf)
        tensors = (make_packed_addressable(x) for x in inputs)
        plan = self.planner(*lengths[:4], totals, self.config.tile_m)
        counter = device_memory.tile_counter(self.device_index)
        options = *self.sides(window), plan, batch + 1, *scores.for_kernel(batch, heads)
        self.kernel(*tensors, out, lse, counter, softmax_scale, *options, self.num_ctas)
        if scores.sinks is not None:
            # To the kernel rows behind the last sequence are rows without keys, which have their sink.
            lse.masked_fill_(~rows_of_sequences(lengths.cu_seqlens_q, None, total_q), -math.inf)
        return out, lse


def make_wide_launcher(config: Config, device: torch.device, head_dim_v: int, sm_margin: int) -> WideLauncher:
    """The launcher of the kernel of ``config``, which is compiled or loaded.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    return WideLauncher(*_launcher_parts(config, device, head_dim_v, sm_margin))


def make_packed_wide_launcher(
    config: Config, device: torch.device, head_dim_v: int, sm_margin: int
) -> PackedWideLauncher:
    """``make_wide_launcher`` for packed sequences."""
    return PackedWideLauncher(*_launcher_parts(config, device, head_dim_v, sm_margin), find_planner(config))


def _launcher_parts(
    config: Config, device: torch.device, head_dim_v: int, sm_margin: int
) -> tuple[int, WideForwardConfig, Kernel, int, int]:
    assert isinstance(config, WideForwardConfig)
    index = index_of(device)
    num_ctas = count_ctas(index, sm_margin)
    return index, config, compile_cache.get_forward(config), head_dim_v, num_ctas
