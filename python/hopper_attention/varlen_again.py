"""Attention of packed 16-bit tensors like those of an earlier call: what that found is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper_attention import autograd, checks
from hopper_attention.checks import TensorSpec
from hopper_attention.features import with_mask
from hopper_attention.few_packed_queries import served_alike
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.few_packed_queries import FewPackedLaunch, ReadyFewPacked
from hopper_attention.launch.gradients_again import GradientOptions, Passes
from hopper_attention.launch.packed_again import ReadyPackedLaunch
from hopper_attention.launch.packed_forward import PackedForwardLauncher
from hopper_attention.launch.packed_gradients_again import PackedGradientCall
from hopper_attention.launch.split_forward import PackedSplitLauncher, ReadyPackedSplit
from hopper_attention.launch.varlen import VarlenLaunch, find_for
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.packing_rules import MOST_QUERIES

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """What serves calls like an earlier one, with tokens and keys. ``passes`` are the backward passes of those with the
    default scale; their options have the sides of the mask."""

    launch: VarlenLaunch
    records_gradient: bool
    passes: Passes[PackedGradientCall]

    def __call__(
        self, tensors: tuple[Tensor, Tensor, Tensor], lengths: Lengths, softmax_scale: Any, options: Key
    ) -> tuple[Tensor, Tensor]:
        """out and lse, which may lack its rows where it is not wanted; ``options`` as for ``find_again``."""
        passes, sides = self.passes, self.passes.options.sides
        if softmax_scale is not None:
            passes = passes.of_others(checks.check_scale(softmax_scale), passes.options.deterministic)
        if self.records_gradient:
            out, lse = autograd.forward_varlen_by(*tensors, *lengths, self.launch, passes)
            return out, lse
        _, _, wants_lse, _, _ = options
        return self.launch(*tensors, *lengths, passes.options.softmax_scale, *sides, bool(wants_lse))


remembered: Remembered[VarlenCall] = Remembered(REMEMBERED_CALLS)


def find_again(
    q: Any, k: Any, v: Any, lengths: Lengths, options: Key, window: tuple[Any, Any]
) -> VarlenCall | None:
    """What serves a call of plain tensors without descales, whose scores nothing changes.

    Args:
        options: causal, deterministic, whether the LSE is wanted, backend and sm_margin, which count with their types.
        window: window_size and attention_chunk.
    """
    longest_q, longest_k = lengths[4:]
    if not (type(q) is type(k) is Tensor and type(longest_q) is type(longest_k) is int and may_be_like()):
        return None
    if longest_q < 1 or longest_k < 1:
        return None
    masked = with_mask(options, window, longest_q, longest_k)
    if masked is None:
        return None
    return remembered.find(_key_of(q, k, lengths, masked), q, k, v, *lengths.different)


def remember(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    options: Key,
    window: tuple[Any, Any],
    records_gradient: bool,
) -> None:
    """Keep such a call, which was made: of tensors of 16 bits on a GPU, with tokens and keys."""
    q, k, v = tensors
    has_no_bounds = 0 in lengths[4:]
    if has_no_bounds or not q.shape[0] or not k.shape[0] or lengths.cu_seqlens_q.shape[0] < 2:
        return
    masked = with_mask(options, window, *lengths[4:])
    if masked is None:
        return
    key = _key_of(q, k, lengths, masked)
    if not remembered.comes_again(key):
        return
    causal, deterministic, _, backend, sm_margin, *of_window = masked
    sides: Sides = of_window[0] if of_window else FULL_SIDES
    specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
    launch = find_for(specs, lengths, MaskSpec(bool(causal), *sides), backend, sm_margin)
    if isinstance(launch, PackedForwardLauncher):
        launch = ReadyPackedLaunch.of(launch, tensors, lengths, sides) or launch
    if isinstance(launch, PackedSplitLauncher):
        launch = ReadyPackedSplit.of(launch, tensors, lengths) or launch
    if isinstance(launch, FewPackedLaunch):
        launch = ReadyFewPacked.of(launch, tensors, lengths) or launch
    # The flags are 0 or 1, or True or False.
    flags = bool(causal), backend, bool(deterministic)
    passes: Passes[PackedGradientCall] = Passes(GradientOptions(q.shape[2] ** -0.5, *flags, sides))
    call = VarlenCall(launch, records_gradient, passes)
    remembered.keep(key, call, *tensors, *lengths.different)


def _key_of(q: Tensor, k: Tensor, lengths: Lengths, options: Key) -> Key:
    """``options`` are those ``with_mask``. Where queries are few, bounds of lengths decide on the kernel and its mask,
    and count too; else that of queries does where all sequences may be as long (``tile_turns``)."""
    longest_q, longest_k = lengths[4:]
    bounds: Any = None
    if longest_q <= MOST_QUERIES and k.shape[0]:
        bounds = served_alike(longest_q, longest_k, k.shape[0])
    elif q.dim() and q.shape[0] % longest_q == 0:
        bounds = longest_q
    kinds = tuple(map(type, options))
    return q.shape, k.shape, bounds, options, kinds, lengths.pattern, torch.is_grad_enabled()
