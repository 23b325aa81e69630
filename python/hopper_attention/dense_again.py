"""Dense attention to 16-bit tensors like those of an earlier call: what that found is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper_attention import autograd, checks
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.forward import ForwardLauncher, Launch, ReadyLaunch, find_launch
from hopper_attention.launch.gradients_again import GradientOptions
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import FULL_SIDES, Sides

Flags = tuple[bool, "str | None", int, Sides]
"""causal, backend, sm_margin and the sides of a mask, all checked."""

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class DenseCall:
    """What serves calls like an earlier one."""

    launch: Launch
    flags: Flags
    records_gradient: bool
    default_scale: float

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any, deterministic: bool, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse, which may lack its rows where it is not wanted."""
        scale = self.default_scale if softmax_scale is None else checks.check_scale(softmax_scale)
        causal, backend, _, sides = self.flags
        if self.records_gradient:
            options = GradientOptions(scale, causal, backend, deterministic, sides)
            out, lse = autograd.forward_by(q, k, v, self.launch, options)
            return out, lse
        window = () if sides == FULL_SIDES else sides
        return self.launch(q, k, v, scale, wants_lse, *window)


remembered: Remembered[DenseCall] = Remembered(REMEMBERED_CALLS)


def key_of(q: Any, k: Any, flags: Flags) -> Key | None:
    """Under what calls are remembered whose tensors may be plain: without descales, and nothing changes scores."""
    if type(q) is not Tensor or type(k) is not Tensor or not may_be_like():
        return None
    return q.shape, k.shape, flags, torch.is_grad_enabled()


def remember(key: Key, q: Tensor, k: Tensor, v: Tensor, flags: Flags, records_gradient: bool) -> None:
    """Keep a call that was made, of tensors of 16 bits on a GPU; ``key`` is that of ``key_of``."""
    if remembered.comes_again(key):
        causal, backend, sm_margin, sides = flags
        facts = [fact for x in (q, k, v) for fact in (x.shape, x.stride(), x.dtype, x.device)]
        launch = find_launch(*facts, causal, backend, sm_margin, sides)
        if isinstance(launch, ForwardLauncher) and not launch.repairs:
            launch = ReadyLaunch.of(launch, q, k, () if sides == FULL_SIDES else sides)
        remembered.keep(key, DenseCall(launch, flags, records_gradient, q.shape[3] ** -0.5), q, k, v)
