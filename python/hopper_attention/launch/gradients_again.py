"""Gradients of tensors like those of an earlier backward pass: what that found is used again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hopper.backward.config import BackwardConfig
from hopper_attention import device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Facts, Piece, Pieces, Work
from hopper_attention.launch import at_once, backward, gradient_launchers
from hopper_attention.launch.at_once import Given, Script
from hopper_attention.launch.base import NO_PLAN, REMEMBERED_CALLS, current_device
from hopper_attention.launch.gradient_launchers import OneTileLauncher, PreparedLauncher
from hopper_attention.layout import TMA_BYTES, new_strides, repairs_for
from hopper_attention.like_calls import Kept, Remembered, may_be_like
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


@dataclass(frozen=True, slots=True, eq=False)
class GradientCall:
    """What serves backward passes like an earlier one; ``options`` is what its kernel takes behind the scale,
    ``gradients`` are what to make for those of q, k and v. Where no counter belongs to a single pass, ``script`` makes
    all launches, with ``room`` for ``work``; a script of its own does, which has that memory, where it is kept."""

    launcher: PreparedLauncher
    softmax_scale: float
    options: tuple[Any, ...]
    gradients: tuple[Facts, ...]
    work: Pieces
    room: Pieces
    script: Script | None

    @classmethod
    def of(
        cls, launcher: PreparedLauncher, softmax_scale: float, options: tuple[Any, ...], tensors: ForGradients
    ) -> GradientCall:
        """That of backward passes like the one of ``tensors``, which ``launcher`` served."""
        _, q, k, v, _, _ = tensors
        facts = tuple(Piece(x.shape, x.dtype).facts for x in (q, k, v))
        work = launcher.pieces(q.shape, k.shape)
        script = None
        config = launcher.config
        if isinstance(config, BackwardConfig) and not config.ordered:
            memory = *at_once.parts_of(work, 9), Given(10)
            script = at_once.make_script(launcher.steps(softmax_scale, options, memory))
        room = (device_memory.room_for(work),)
        return cls(launcher, softmax_scale, options, facts, work, room, script)

    def __call__(
        self, tensors: tuple[Tensor, ...], into: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...] | None:
        """dq, dk and dv, in ``into`` if there is any; None if TMA cannot address the tensors, or another GPU is
        current."""
        dout, q, k, v, out, lse = tensors
        # Not left to the kernels, as one of them would have run before another refuses.
        addresses = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        index, make = self.launcher.device_index, device_memory.empty_on_gpu
        if addresses % TMA_BYTES or current_device() != index:
            return None
        of_q, of_k, of_v = self.gradients
        gradients = into or (make(*of_q), make(*of_k), make(*of_v))
        if self.script is None:
            options = self.softmax_scale, None, self.options
            self.launcher.launch(dout, q, k, v, out, lse, gradients, *options)
            return gradients
        script = device_memory.made_of_memory(index, self.work, self, self._with_memory)
        if script is not None:
            script.run(*tensors, *gradients)
        else:
            room = device_memory.stream_memory(index, self.room).arguments
            self.script.run(*(tensors + gradients + room + (device_memory.tile_counter(index),)))
        return gradients

    def _with_memory(self, work: Work) -> Script:
        """``script`` for calls on the current stream, in ``work``."""
        memory = *work.arguments, device_memory.tile_counter(self.launcher.device_index)
        return at_once.make_script(self.launcher.steps(self.softmax_scale, self.options, memory))


@dataclass(frozen=True, slots=True, eq=False)
class OneTileCall:
    """The same of passes of one launch, whose kernel looks at addresses before it launches anything, and raises
    ValueError."""

    kernel: Kernel
    device_index: int
    ctas: int
    softmax_scale: float
    gradients: tuple[Facts, ...]

    @classmethod
    def of(cls, launcher: OneTileLauncher, softmax_scale: float, tensors: ForGradients) -> OneTileCall:
        """As ``GradientCall.of``."""
        facts = tuple(Piece(x.shape, x.dtype).facts for x in tensors[1:4])
        (ctas,) = launcher.grid
        return cls(launcher.kernel, launcher.device_index, ctas, softmax_scale, facts)

    def __call__(
        self, tensors: tuple[Tensor, ...], into: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...] | None:
        """As that of ``GradientCall``."""
        dout, q, k, v, out, lse = tensors
        index, make = self.device_index, device_memory.empty_on_gpu
        if current_device() != index:
            return None
        of_q, of_k, of_v = self.gradients
        gradients = into or (make(*of_q), make(*of_k), make(*of_v))
        dq, dk, dv = gradients
        counter = device_memory.tile_counter(index)
        try:
            self.kernel(q, k, v, dout, lse, out, dq, dk, dv, counter, self.softmax_scale, self.ctas)
        except ValueError:
            return None
        return gradients


Served = GradientCall | OneTileCall

Pass = TypeVar("Pass")
"""What serves backward passes."""

remembered: Remembered[Served] = Remembered(REMEMBERED_CALLS)


KEPT_OPTIONS = 16
"""Scales, each with equal bits or without, whose passes one kind of calls knows at most."""


class Passes(Generic[Pass]):
    """The backward passes of calls of one kind and these options. ``latest`` has what served the latest of them, by
    what of torch's state, and of a pass, decides besides. Each kind of calls has its own, so that layers of several
    kinds, which take turns in a model, do not drive each other out."""

    __slots__ = ("_others", "latest", "options")

    def __init__(self, options: GradientOptions) -> None:
        self.options = options
        self.latest: dict[Hashable, Kept[Pass]] = {}
        self._others: dict[tuple[float | None, bool], Passes[Pass]] = {}

    def of_others(self, softmax_scale: float | None, deterministic: bool) -> Passes[Pass]:
        """Those of calls that are alike but for these options. Without a scale, with this one's."""
        found = self._others.get((softmax_scale, deterministic))
        if found is not None:
            return found
        scale, causal, backend, _, sides = self.options
        # Calls whose scale is another each time have no use for what is kept.
        if len(self._others) >= KEPT_OPTIONS:
            self._others.clear()
        scale = scale if softmax_scale is None else softmax_scale
        made: Passes[Pass] = Passes(GradientOptions(scale, causal, backend, deterministic, sides))
        return self._others.setdefault((softmax_scale, deterministic), made)


@lru_cache(maxsize=REMEMBERED_CALLS)
def passes_of(options: GradientOptions) -> Passes[Served]:
    """Of calls of any kind that have these options."""
    return Passes(options)


def differentiate_again(
    tensors: tuple[Tensor, ...], passes: Passes[Served], into: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...] | None:
    """dq, dk and dv, if an earlier backward pass was like this one; else None.

    ``tensors`` are those of ``ForGradients``; ``into`` has contiguous tensors for the gradients, or none."""
    # With create_graph the gradients would be differentiated.
    if torch.is_grad_enabled() or not may_be_like():
        return None
    in_order = torch.are_deterministic_algorithms_enabled()
    kept = passes.latest.get(in_order)
    if kept is None or not kept.is_like(*tensors):
        kept = remembered.find_kept(_key_of(tensors, passes.options), *tensors)
        if kept is None:
            return None
        passes.latest[in_order] = kept
    return kept.call(tensors, into)


def _key_of(tensors: tuple[Tensor, ...], options: GradientOptions) -> tuple[Any, ...]:
    _, q, k, _, _, lse = tensors
    # The LSE is a result of some calls, and of others no more than saved.
    return q.shape, k.shape, options, torch.are_deterministic_algorithms_enabled(), lse.requires_grad


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
    if (
        launcher is None
        or lse.stride() != new_strides(lse.shape)
        or repairs_for(*map(TensorSpec.of, tensors[:5]))
    ):
        return
    window = kernel_sides(*sides) if sides != FULL_SIDES else ()
    behind = gradient_launchers.kernel_options(launcher.config, window, NO_PLAN, NO_SCORES, q)
    call: Served
    if isinstance(launcher, OneTileLauncher):
        call = OneTileCall.of(launcher, scale, tensors)
    else:
        call = GradientCall.of(launcher, scale, behind, tensors)
    remembered.keep(key, call, *tensors)
    if lse.requires_grad:
        saved = tensors._replace(lse=lse.detach())
        remembered.keep(_key_of(saved, options), call, *saved)
