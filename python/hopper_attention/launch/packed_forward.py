"""Runs the forward kernels on packed sequences: the GPU plans their tiles, then the kernel goes by the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.plan.config import check_packed_size
from hopper.config import ForwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.launch.base import NO_PAGES, NO_SIDES, Launcher, count_ctas, index_of
from hopper_attention.launch.planners import Planner, find_planner
from hopper_attention.layout import make_packed_addressable, new_layout
from hopper_attention.lengths import rows_of_sequences
from hopper_attention.masks import kernel_sides, present
from hopper_attention.scores import NO_SCORES, Scores


def empty_results(q: Tensor, head_dim_v: int, wants_lse: bool) -> tuple[Tensor, Tensor]:
    """Memory for out (total_q, heads, head_dim_v) and lse (heads, total_q), which lacks its rows if not wanted."""
    (total_q, heads, _), make = q.shape, device_memory.empty_on_gpu
    out = make(*new_layout((total_q, heads, head_dim_v)), q.dtype)
    return out, make(*new_layout((heads, total_q if wants_lse else 0)), torch.float32)


NO_CHANGES = NO_SCORES.for_kernel(0, 0)
"""What the kernel takes of scores that nothing changes."""


@dataclass(frozen=True)
class PackedForwardLauncher(Launcher):
    """A forward kernel of 16 bits on packed sequences.

    ``num_ctas`` are those of a persistent grid; 0 for a kernel that has a CTA for each tile that there may be. A kernel
    of a kind of scores that is not plain takes ``Scores.for_kernel``.
    """

    config: ForwardConfig | AmpereForwardConfig
    kernel: Kernel
    planner: Planner
    head_dim_v: int
    num_ctas: int

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
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        if self.device_index != torch.cuda.current_device():
            bounds = max_seqlen_q, max_seqlen_k
            rest = softmax_scale, window_left, window_right, attention_chunk, wants_lse
            return self.call_there(q, k, v, *lengths, *bounds, *rest, scores=scores)
        total_q, heads, _ = q.shape
        batch = cu_seqlens_q.shape[0] - 1
        check_packed_size("kernel", heads, batch, (total_q, k.shape[0]), self.config.tile_queries)
        out, lse = empty_results(q, self.head_dim_v, wants_lse)
        if seqused_q is not None:
            # The kernel writes the rows of sequences, and those behind the last one.
            out.zero_()
            lse.fill_(-math.inf)
        q, k, v = make_packed_addressable(q), make_packed_addressable(k), make_packed_addressable(v)
        plan = self.planner(*lengths, (total_q, k.shape[0]), self.config.tile_queries)
        given = (window_left, window_right, attention_chunk) if self.config.window else ()
        sides = kernel_sides(*given)
        options: tuple[Any, ...]
        if self.num_ctas:
            counter = device_memory.tile_counter(self.device_index)
            options = *(sides or NO_SIDES), plan, batch + 1, *NO_PAGES
            options = *options, *(NO_CHANGES if scores is NO_SCORES else scores.for_kernel(batch, heads))
            self.kernel(q, k, v, out, lse, counter, softmax_scale, *options, self.num_ctas)
        else:
            options = softmax_scale, *present(sides)
            if scores is not NO_SCORES:
                options = *options, *scores.for_kernel(batch, heads)
            self.kernel(q, k, v, out, lse, plan, batch + 1, *options)
        if wants_lse and scores.sinks is not None:
            # To the kernel rows behind the last sequence are rows without keys, which have their sink.
            lse.masked_fill_(~rows_of_sequences(cu_seqlens_q, None, total_q), -math.inf)
        return out, lse


def make_packed_launcher(
    config: ForwardConfig | AmpereForwardConfig, device: torch.device, head_dim_v: int, sm_margin: int
) -> PackedForwardLauncher:
    """The launcher of the kernel of ``config``, which is compiled or loaded.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    index = index_of(device)
    num_ctas = count_ctas(index, sm_margin) * config.ctas_per_sm
    if isinstance(config, AmpereForwardConfig):
        num_ctas = 0
    kernel = compile_cache.get_forward(config)
    return PackedForwardLauncher(index, config, kernel, find_planner(config), head_dim_v, num_ctas)
