"""Runs the Hopper kernel for wide values on packed sequences, by a plan of their tiles that the GPU makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper_attention import device_memory
from hopper_attention.forward_rules import Config
from hopper_attention.launch import packed_forward
from hopper_attention.launch.planners import Planner, find_planner
from hopper_attention.launch.wide import WideInputs, WideKernel, launcher_parts
from hopper_attention.layout import make_packed_addressable
from hopper_attention.lengths import Lengths, rows_of_sequences
from hopper_attention.masks import Sides
from hopper_attention.scores import NO_SCORES, Scores


@dataclass(frozen=True)
class PackedWideLauncher(WideKernel):
    """On packed sequences, whose tiles a plan has."""

    planner: Planner

    def __call__(
        self,
        inputs: WideInputs,
        lengths: Lengths,
        softmax_scale: float,
        sides: Sides,
        scores: Scores,
        wants_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(inputs, lengths, softmax_scale, sides, scores, wants_lse)
        q, k = inputs[:2]
        (total_q, heads, _), batch = q.shape, lengths.cu_seqlens_q.shape[0] - 1
        totals = total_q, k.shape[0]
        check_packed_size("kernel", heads, batch, totals, self.config.tile_m)
        out, lse = packed_forward.empty_results(q, self.head_dim_v, wants_lse)
        if lengths.seqused_q is not None:
            # The kernel writes the rows of sequences, and those behind the last one.
            out.zero_()
            lse.fill_(-math.inf)
        tensors = (None if x is None else make_packed_addressable(x) for x in inputs)
        plan = self.planner(*lengths[:4], totals, self.config.tile_m)
        counter = device_memory.tile_counter(self.device_index)
        options = *self.sides(sides), plan, batch + 1, *scores.changes_for_kernel(batch, heads)
        self.kernel(*tensors, out, lse, counter, softmax_scale, *options, self.num_ctas)
        if wants_lse and scores.sinks is not None:
            # To the kernel rows behind the last sequence are rows without keys, which have their sink.
            lse.masked_fill_(~rows_of_sequences(lengths.cu_seqlens_q, None, total_q), -math.inf)
        return out, lse


@dataclass(frozen=True)
class PackedWithoutQv:
    """A launcher as ``launch.varlen`` calls it, without a second query."""

    launch: PackedWideLauncher

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        wants_lse: bool,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        sides = window_left, window_right, attention_chunk
        return self.launch((q, k, v, None), lengths, softmax_scale, sides, scores, wants_lse)


def make_packed_wide_launcher(
    config: Config, device: torch.device, head_dim_v: int, sm_margin: int
) -> PackedWideLauncher:
    """The launcher of the kernel of ``config``, which is compiled or loaded.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    return PackedWideLauncher(*launcher_parts(config, device, head_dim_v, sm_margin), find_planner(config))
