"""Dense attention to 16-bit tensors like those of an earlier call: what that found is used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper_attention import autograd, checks, device_memory, few_queries
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.few_queries import FewQueriesLaunch, ReadyFewQueries
from hopper_attention.launch.forward import ForwardLauncher, Launch, ReadyLaunch, find_launch
from hopper_attention.launch.gradients_again import GradientOptions, Passes, Served
from hopper_attention.launch.split_forward import ReadySplit, SplitLauncher
from hopper_attention.layout import TMA_BYTES
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.problem import longest_alike

ELEMENTS = TMA_BYTES // 2
"""Of 16 bits, in which strides are multiples."""

Flags = tuple[bool, "str | None", int, Sides]
"""causal, backend, sm_margin and the sides of a mask, all checked."""

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class DenseCall:
    """What serves calls like an earlier one. ``passes`` are the backward passes of those with the default scale which
    do not ask for equal bits."""

    launch: Launch
    window: tuple[int, ...]
    records_gradient: bool
    passes: Passes[Served]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any, deterministic: bool, wants_lse: bool
    ) -> tuple[Tensor, ...]:
        """out, and lse where it is wanted; else it may be there too, without its rows."""
        scale = None if softmax_scale is None else checks.check_scale(softmax_scale)
        if not self.records_gradient:
            # Python takes longer to unpack what is empty than to see that it is.
            if self.window:
                return self.launch(q, k, v, scale, wants_lse, *self.window)
            return self.launch(q, k, v, scale, wants_lse)
        passes = self.passes
        if scale is not None or deterministic:
            passes = passes.of_others(scale, deterministic)
        if not wants_lse:
            return (autograd.forward_out_by(q, k, v, self.launch, passes),)
        out, lse = autograd.forward_by(q, k, v, self.launch, passes)
        return out, lse


remembered: Remembered[DenseCall] = Remembered(REMEMBERED_CALLS)

of_any_length: Remembered[DenseCall] = Remembered(REMEMBERED_CALLS)
"""The same by ``_class_key``: calls with other numbers of keys that are served alike."""


def find(q: Any, k: Any, v: Any, flags: Flags) -> DenseCall | None:
    """What serves a call without descales whose scores nothing changes: one like it was made, perhaps with another
    number of keys; or None."""
    if not may_be_like():
        return None
    group = v is k, flags, torch.is_grad_enabled()
    kept = remembered.latest(group)
    # What is no tensor is like none.
    if kept is not None and (kept.is_like(q, k) if v is k else kept.is_like(q, k, v)):
        return kept.call
    if type(q) is not Tensor or type(k) is not Tensor:
        return None
    key = q.shape, k.shape, *group
    given = _distinct(q, k, v)
    found = remembered.find(key, *given, group=group)
    return _find_of_any_length(key, given) if found is None else found


def remember(q: Tensor, k: Tensor, v: Tensor, flags: Flags, records_gradient: bool) -> None:
    """Keep a call that was made, of tensors of 16 bits on a GPU."""
    if type(q) is not Tensor or type(k) is not Tensor or not may_be_like():
        return
    if device_memory.is_capturing(q.device):
        return
    key = q.shape, k.shape, v is k, flags, torch.is_grad_enabled()
    comes_again = remembered.comes_again(key)
    # Whose keys grow comes again with others: the first of each class is kept then.
    grows = of_any_length.comes_again((q.shape, *key[2:]))
    with_others = _class_keys(key) if grows else ()
    if not comes_again and not with_others:
        return
    causal, backend, sm_margin, sides = flags
    facts = [fact for x in (q, k, v) for fact in (x.shape, x.stride(), x.dtype, x.device)]
    launch = find_launch(*facts, causal, backend, sm_margin, sides)
    window = () if sides == FULL_SIDES else sides
    if isinstance(launch, ForwardLauncher) and not launch.repairs:
        launch = ReadyLaunch.of(launch, q, k, window)
    if isinstance(launch, SplitLauncher):
        launch = ReadySplit.of(launch, q, k, v) or launch
    if isinstance(launch, FewQueriesLaunch):
        launch = launch.ready(q, k, v) or launch
    options = GradientOptions(q.shape[3] ** -0.5, causal, backend, False, sides)
    call = DenseCall(launch, window, records_gradient, Passes(options))
    given = _distinct(q, k, v)
    if comes_again:
        remembered.keep(key, call, *given)
    for class_key in with_others:
        serves = ReadyFewQueries if class_key[0] else (ReadyLaunch, ReadySplit)
        if isinstance(launch, serves) and of_any_length.find(class_key, *given) is None:
            of_any_length.keep(class_key, call, *given, of_any_length=dict.fromkeys(range(1, len(given)), 1))


def _distinct(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The tensors, each once; ``like`` knows no others."""
    return (q, k) if v is k else (q, k, v)


def _find_of_any_length(key: Key, given: tuple[Tensor, ...]) -> DenseCall | None:
    """What serves a call by one with another number of keys, which does not decide on how it is served."""
    found = None
    for class_key in _class_keys(key):
        found = of_any_length.find(class_key, *given)
        if found is not None:
            break
    if found is None:
        return None
    seqlen_k = given[1].shape[1]
    for x in given[1:]:
        if x.shape[1] != seqlen_k or (step := x.stride()[0]) <= 0 or step % ELEMENTS:
            return None
    if remembered.comes_again(key):
        remembered.keep(key, found, *given)
    return found


def _class_keys(key: Key) -> tuple[Key, ...]:
    """Those of all numbers of keys for which a kernel is chosen alike, each behind whether it is that of few queries,
    which is so whatever the tiles of the forward kernel are; none where they decide on more."""
    q_shape, k_shape, is_shared, flags, grad_mode = key
    if len(k_shape) != 4 or not 0 < k_shape[1] <= MAX_SEQLEN or flags[3] != FULL_SIDES:
        return ()
    longest = longest_alike(k_shape[1])
    if not few_queries.may_serve(q_shape, k_shape):
        return ((False, q_shape, longest, is_shared, flags, grad_mode),)
    few = few_queries.longest_alike(k_shape[1])
    of_tiles = False, q_shape, min(few, longest), is_shared, flags, grad_mode
    return (True, q_shape, few, is_shared, flags, grad_mode), of_tiles
