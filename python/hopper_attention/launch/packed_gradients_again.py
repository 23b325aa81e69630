"""``gradients_again`` of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.gradients_again import ForGradients, GradientOptions
from hopper_attention.launch.packed_backward import PackedBackwardLauncher
from hopper_attention.launch.varlen import find_varlen_backward, gradient_problem, is_empty
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import Sides


@dataclass(frozen=True, slots=True)
class PackedGradientCall:
    """What serves backward passes like an earlier one."""

    launcher: PackedBackwardLauncher
    softmax_scale: float

    def __call__(self, tensors: ForGradients, lengths: Lengths, sides: Sides) -> tuple[Tensor, ...]:
        """dq, dk and dv."""
        dout, q, k, v, out, lse = tensors
        return self.launcher(dout, None, q, k, v, out, lse, *lengths, self.softmax_scale, *sides)


remembered: Remembered[PackedGradientCall] = Remembered(REMEMBERED_CALLS)


def differentiate_packed_again(
    tensors: ForGradients, lengths: Lengths, options: GradientOptions
) -> tuple[Tensor, ...] | None:
    """dq, dk and dv, if an earlier backward pass was like this one; else None."""
    if torch.is_grad_enabled() or 0 in lengths[4:] or not may_be_like():
        return None
    call = remembered.find(_key_of(tensors, lengths, options), *tensors, *lengths.different)
    return None if call is None else call(tensors, lengths, options.sides)


def remember_packed(tensors: ForGradients, lengths: Lengths, options: GradientOptions) -> None:
    """Keep a backward pass that was made, if ``differentiate_packed_again`` can make others like it."""
    q, k, v = tensors[1:4]
    if not q.is_cuda or torch.is_grad_enabled() or not may_be_like() or is_empty(q, k, lengths):
        return
    key = _key_of(tensors, lengths, options)
    if not remembered.comes_again(key):
        return
    scale, causal, backend, deterministic, sides = options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    problem = gradient_problem(q, v, causal, sides, deterministic)
    launcher = find_varlen_backward(problem, q.device, backend)
    if isinstance(launcher, PackedBackwardLauncher):
        remembered.keep(key, PackedGradientCall(launcher, scale), *tensors, *lengths.different)


def _key_of(tensors: ForGradients, lengths: Lengths, options: GradientOptions) -> tuple[Any, ...]:
    in_order = torch.are_deterministic_algorithms_enabled()
    return tensors.q.shape, tensors.k.shape, options, lengths.pattern, in_order
