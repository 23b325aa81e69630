"""Gradients of tensors like those of an earlier backward pass: what that found is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper_attention import device_memory
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Facts, Piece
from hopper_attention.launch import backward
from hopper_attention.launch.backward import GradientLauncher
from hopper_attention.launch.base import NO_PLAN, REMEMBERED_CALLS, current_device
from hopper_attention.layout import TMA_BYTES, repairs_for
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import FULL_SIDES, Sides, kernel_sides
from hopper_attention.scores import NO_SCORES


class GradientOptions(NamedTuple):
    """Of a backward pass whose scores nothing changes: as for ``gradients.differentiate``, ``sides`` of its mask."""

    softmax_scale: float
    causal: bool
    backend: str | None
    deterministic: bool
    sides: Sides


class ForGradients(NamedTuple):
    """What a backward pass reads, where there is no gradient of the LSE."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class GradientCall:
    """What serves backward passes like an earlier one; ``options`` is what its kernel takes behind the scale,
    ``gradients`` are what to make for those of q, k and v."""

    launcher: GradientLauncher
    softmax_scale: float
    options: tuple[Any, ...]
    gradients: tuple[Facts, ...]

    def __call__(self, tensors: ForGradients, into: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...] | None:
        """dq, dk and dv, in ``into`` if there is any; None if TMA cannot address the tensors, or another GPU is
        current."""
        dout, q, k, v, out, lse = tensors
        addresses = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if addresses % TMA_BYTES or current_device() != self.launcher.device_index:
            return None
        make, launcher = device_memory.empty_on_gpu, self.launcher
        gradients = into or tuple([make(*facts) for facts in self.gradients])
        launcher.launch(dout, q, k, v, out, lse, gradients, self.softmax_scale, None, self.options)
        return gradients


remembered: Remembered[GradientCall] = Remembered(REMEMBERED_CALLS)


def differentiate_again(
    tensors: ForGradients, options: GradientOptions, into: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...] | None:
    """dq, dk and dv, if an earlier backward pass was like this one; else None.

    ``into`` has contiguous tensors for them, or none."""
    # With create_graph the gradients would be differentiated.
    if torch.is_grad_enabled() or not may_be_like():
        return None
    call = remembered.find(_key_of(tensors, options), *tensors)
    return None if call is None else call(tensors, into)


def _key_of(tensors: ForGradients, options: GradientOptions) -> tuple[Any, ...]:
    return tensors.q.shape, tensors.k.shape, options, torch.are_deterministic_algorithms_enabled()


def remember(tensors: ForGradients, options: GradientOptions) -> None:
    """Keep a backward pass that was made, if ``differentiate_again`` can make others like it."""
    _, q, k, v, _, lse = tensors
    if not q.is_cuda or torch.is_grad_enabled() or not may_be_like():
        return
    key = _key_of(tensors, options)
    if not remembered.comes_again(key):
        return
    scale, causal, backend, deterministic, sides = options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    sizes = q.shape, k.shape, v.shape
    launcher = backward.find_for_call(*sizes, q.dtype, q.device, causal, deterministic, backend, sides)
    if launcher is None or not lse.is_contiguous() or repairs_for(*map(TensorSpec.of, tensors[:5])):
        return
    window = kernel_sides(*sides) if sides != FULL_SIDES else ()
    behind = backward.kernel_options(launcher.config, window, NO_PLAN, NO_SCORES, q)
    facts = tuple(Piece(x.shape, x.dtype).facts for x in (q, k, v))
    remembered.keep(key, GradientCall(launcher, scale, behind, facts), *tensors)
