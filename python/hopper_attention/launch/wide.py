"""Runs the Hopper kernel for wide values on dense tensors; ``launch.packed_wide`` has packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper.wide.config import WideForwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.forward_rules import Config
from hopper_attention.launch.base import (
    NO_PLAN,
    NO_SIDES,
    Launcher,
    ResultSpec,
    count_ctas,
    index_of,
    no_vectors,
)
from hopper_attention.layout import make_addressable
from hopper_attention.masks import kernel_sides
from hopper_attention.scores import NO_SCORES, Scores

WideInputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v and qv; None for a kernel without it."""


@dataclass(frozen=True)
class WideKernel(Launcher):
    """A kernel for wide values, ``head_dim_v`` as the caller has it, and the size ``num_ctas`` of its persistent
    grid."""

    config: WideForwardConfig
    kernel: Kernel
    head_dim_v: int
    num_ctas: int

    def sides(self, sides: tuple[int, ...]) -> tuple[Any, ...]:
        """Those of a ``MaskSpec`` as the kernel takes them."""
        return kernel_sides(*sides) if self.config.window else NO_SIDES


@dataclass(frozen=True)
class WideLauncher(WideKernel):
    """On dense tensors."""

    def __call__(
        self,
        inputs: WideInputs,
        softmax_scale: float,
        sides: tuple[int, ...],
        scores: Scores,
        wants_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            return self.call_there(inputs, softmax_scale, sides, scores, wants_lse)
        q = inputs[0]
        batch, _, heads, _ = q.shape
        result = ResultSpec(q.dtype, self.head_dim_v)
        out = result.empty_out(q)
        lse = result.empty_lse(q) if wants_lse else no_vectors(batch, heads, q.device)
        tensors = (None if x is None else make_addressable(x) for x in inputs)
        counter = device_memory.tile_counter(self.device_index)
        options = *self.sides(sides), *NO_PLAN, *scores.changes_for_kernel(batch, heads)
        self.kernel(*tensors, out, lse, counter, softmax_scale, *options, self.num_ctas)
        return out, lse


@dataclass(frozen=True)
class WithoutQv:
    """A launcher as ``launch.forward`` calls it, without a second query."""

    launch: WideLauncher
    default_scale: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *sides: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        scale = self.default_scale if softmax_scale is None else softmax_scale
        return self.launch((q, k, v, None), scale, sides, scores, wants_lse)


def make_wide_launcher(config: Config, device: torch.device, head_dim_v: int, sm_margin: int) -> WideLauncher:
    """The launcher of the kernel of ``config``, which is compiled or loaded.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    return WideLauncher(*launcher_parts(config, device, head_dim_v, sm_margin))


def launcher_parts(
    config: Config, device: torch.device, head_dim_v: int, sm_margin: int
) -> tuple[int, WideForwardConfig, Kernel, int, int]:
    """The fields of a ``WideKernel``."""
    assert isinstance(config, WideForwardConfig)
    index = index_of(device)
    num_ctas = count_ctas(index, sm_margin)
    return index, config, compile_cache.get_forward(config), head_dim_v, num_ctas
