"""``gradients_again`` of packed sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.plan.config import plan_words
from hopper.backward.config import BackwardConfig
from hopper_attention import device_memory
from hopper_attention.backward_rules import are_short, keys_within, packed_in_faster_order
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Facts, Piece, Pieces
from hopper_attention.head_parts import REMEMBERED_LENGTHS, PackedSizes, packed_with_head_parts
from hopper_attention.launch import at_once, gradient_launchers
from hopper_attention.launch.at_once import Given, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, current_device
from hopper_attention.launch.gradients_again import ForGradients, GradientOptions, Passes
from hopper_attention.launch.packed_backward import PackedBackwardLauncher, no_rows
from hopper_attention.launch.planners import OF_KEYS
from hopper_attention.launch.varlen import (
    find_for_lengths,
    gradient_kind,
    gradient_problem,
    is_empty,
    sizes_of,
)
from hopper_attention.layout import TMA_BYTES, repairs_for
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import Sides, kernel_sides
from hopper_attention.problem import PackedKeys
from hopper_attention.scores import NO_SCORES


@dataclass(frozen=True, slots=True)
class PackedGradientCall:
    """What serves backward passes like an earlier one: ``launcher``; or ``script``, which makes all launches, with
    ``room`` for its memory, where the kernels can address the tensors and leave nothing of the gradients to be filled.
    ``gradients`` are what to make for those of q, k and v."""

    launcher: PackedBackwardLauncher
    softmax_scale: float
    gradients: tuple[Facts, ...]
    room: Pieces
    script: Script | None

    @classmethod
    def of(
        cls,
        launcher: PackedBackwardLauncher,
        options: GradientOptions,
        tensors: ForGradients,
        lengths: Lengths,
    ) -> PackedGradientCall:
        """That of backward passes like the one of ``tensors``, which ``launcher`` served."""
        _, q, k, v, _, lse = tensors
        config, scale = launcher.config, options.softmax_scale
        facts = tuple(Piece(x.shape, x.dtype).facts for x in (q, k, v))
        batch = lengths.cu_seqlens_q.shape[0] - 1
        pieces = launcher.pieces(q.shape, k.shape, batch)
        plan = Piece((plan_words(k.shape[0], batch, config.tile_n),), torch.int32)
        work = *pieces[:3], plan, *pieces[3:]
        script = None
        if (
            isinstance(config, BackwardConfig)
            and not config.ordered
            and lengths.seqused_k is None
            and lse.is_contiguous()
            and not repairs_for(*(TensorSpec.of(x.unsqueeze(0)) for x in tensors[:5]))
        ):
            script = at_once.make_script(_steps(launcher, config, options, tensors, lengths, work))
        return cls(launcher, scale, facts, (device_memory.room_for(work),), script)

    def __call__(
        self, tensors: tuple[Tensor, ...], lengths: Lengths, different: tuple[Tensor, ...], sides: Sides
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv; ``tensors`` are those of ``ForGradients``, ``different`` those of the lengths."""
        dout, q, k, v, out, lse = tensors
        index, make = self.launcher.device_index, device_memory.empty_on_gpu
        addresses = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if self.script is None or addresses % TMA_BYTES or current_device() != index:
            return self.launcher(dout, None, q, k, v, out, lse, *lengths, self.softmax_scale, *sides)
        of_q, of_k, of_v = self.gradients
        gradients = make(*of_q), make(*of_k), make(*of_v)
        room = device_memory.stream_memory(index, self.room).arguments
        # That of a kernel that clears sums itself lies in the room.
        counter = () if self.launcher.config.clears_ahead else (device_memory.tile_counter(index),)
        self.script.run(*(tensors + gradients + room + counter + different))
        return gradients


def _steps(
    launcher: PackedBackwardLauncher,
    config: BackwardConfig,
    options: GradientOptions,
    tensors: ForGradients,
    lengths: Lengths,
    work: Pieces,
) -> list[Step]:
    """Its launches, of a call that gives ``ForGradients``, dq, dk and dv, room for ``work``, a tile counter unless that
    is the last piece of it, and the lengths that are different tensors."""
    dout, q, k, v, out, lse, dq, dk, dv = map(Given, range(9))
    lse_log2, delta, sums, plan, *others = at_once.parts_of(work, 9)
    *divided, counter = others if config.clears_ahead else (*others, Given(10))
    first = 10 if config.clears_ahead else 11
    places = {id(x): Given(first + i) for i, x in enumerate(lengths.different)}
    unused = device_memory.no_lengths(tensors.q.device)
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = (unused if x is None else places[id(x)] for x in lengths[:4])
    sequences, scale = lengths.cu_seqlens_q.shape[0], options.softmax_scale
    of_plan = tensors.q.shape[0], tensors.k.shape[0], config.tile_n, OF_KEYS
    sides = kernel_sides(*options.sides) if config.window else ()
    behind = gradient_launchers.kernel_options(config, sides, (plan, sequences), NO_SCORES, tensors.q)
    no_dlse = no_rows(tensors.lse.shape[0], tensors.lse.device)
    memory = lse_log2, delta, sums
    cleared = counter if config.clears_ahead else None
    left, of_finish = (divided, (*divided, dk, dv)) if divided else ((dk, dv), ())
    return [
        Step(launcher.planner.kernel, (cu_seqlens_q, cu_seqlens_k, used_q, used_k, plan, *of_plan)),
        Step(launcher.prepare, (out, dout, lse, no_dlse, *memory, plan, sequences, cleared)),
        Step(launcher.kernel, (q, k, v, dout, *memory, *left, counter, scale, *behind, *launcher.grid)),
        Step(launcher.finish, (sums, dq, *of_finish, plan, sequences, scale)),
    ]


remembered: Remembered[PackedGradientCall] = Remembered(REMEMBERED_CALLS)


@lru_cache(maxsize=REMEMBERED_CALLS)
def packed_passes_of(options: GradientOptions) -> Passes[PackedGradientCall]:
    """Of packed calls of any kind that have these options."""
    return Passes(options)


def differentiate_packed_again(
    tensors: tuple[Tensor, ...], lengths: Lengths, passes: Passes[PackedGradientCall]
) -> tuple[Tensor, ...] | None:
    """dq, dk and dv, if an earlier backward pass was like this one; else None. ``tensors`` are those of
    ``ForGradients``."""
    if torch.is_grad_enabled() or 0 in lengths[4:] or not may_be_like():
        return None
    different, options = tuple(lengths.different), passes.options
    # Tensors of lengths that were saved may come back as others.
    in_order = torch.are_deterministic_algorithms_enabled()
    kind = in_order, _bounds(tensors, lengths, options, in_order), lengths.pattern
    kept = passes.latest.get(kind)
    if kept is None or not kept.is_like(*tensors, *different):
        kept = remembered.find_kept(_key_of(tensors, lengths, options), *tensors, *different)
        if kept is None:
            return None
        passes.latest[kind] = kept
    return kept.call(tensors, lengths, different, options.sides)


def remember_packed(tensors: ForGradients, lengths: Lengths, options: GradientOptions) -> None:
    """Keep a backward pass that was made, if ``differentiate_packed_again`` can make others like it."""
    q, k, v = tensors[1:4]
    if not q.is_cuda or torch.is_grad_enabled() or not may_be_like() or is_empty(q, k, lengths):
        return
    key = _key_of(tensors, lengths, options)
    if not remembered.comes_again(key):
        return
    _, causal, backend, deterministic, sides = options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    keys = keys_within(lengths.max_seqlen_k, has_sinks=False)
    problem = gradient_problem(q, v, causal, sides, deterministic, keys)
    launcher = find_for_lengths(problem, q, k, lengths, sides, backend)
    if isinstance(launcher, PackedBackwardLauncher):
        call = PackedGradientCall.of(launcher, options, tensors, lengths)
        remembered.keep(key, call, *tensors, *lengths.different)


def _key_of(tensors: tuple[Tensor, ...], lengths: Lengths, options: GradientOptions) -> tuple[Any, ...]:
    _, q, k, *_ = tensors
    in_order = torch.are_deterministic_algorithms_enabled()
    bounds = _bounds(tensors, lengths, options, in_order)
    return q.shape, k.shape, options, lengths.pattern, bounds, in_order


def _bounds(
    tensors: tuple[Tensor, ...], lengths: Lengths, options: GradientOptions, in_order: bool
) -> tuple[PackedKeys, bool, int]:
    """What lengths and their bounds decide on the kernels of a call without sinks."""
    _, q, k, v, *_ = tensors
    keys = keys_within(lengths.max_seqlen_k, has_sinks=False)
    parts = 1
    if q.shape[1] != k.shape[1]:
        head_dims = q.shape[2], v.shape[2]
        parts = _head_parts(q.dtype, head_dims, options, in_order, keys, sizes_of(q, k, lengths))
    return keys, are_short(lengths[4:], q.shape[2]), parts


@lru_cache(maxsize=REMEMBERED_LENGTHS)
def _head_parts(
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    options: GradientOptions,
    in_order: bool,
    keys: PackedKeys,
    sizes: PackedSizes,
) -> int:
    """Those of ``packed_with_head_parts``, without a problem to be made at each pass."""
    _, causal, _, deterministic, sides = options
    problem = gradient_kind(dtype, head_dims, causal, sides, deterministic or in_order, keys)
    problem = packed_in_faster_order(problem, math.prod(sizes.q_shape), sizes.bounds)
    return packed_with_head_parts(problem, sizes, sides)[1]
