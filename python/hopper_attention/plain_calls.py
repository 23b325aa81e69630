"""Whether a call may leave torch's dispatcher out, which costs more than the rest of a call on a short sequence.

The public functions launch a kernel by themselves where it may, and call a custom operator where it may not: torch
alone knows what is to happen with tensors that are no plain ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hopper_attention.checks import HALF_DTYPES

PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))
"""Types of tensors that torch's dispatcher has nothing to do with."""

TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
"""Dispatch modes of torch in which new tensors have no memory, or operators alone are written down."""

_is_functorch = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor

PLAIN_VALUES = frozenset((bool, int, float, str, type(None), torch.dtype))
"""Types of the other arguments of an operator."""


def is_plain_call(q: Any, k: Any, v: Any) -> bool:
    """Whether these are plain tensors, and nothing traces or transforms the call.

    It is none under torch.compile, export and torch.jit.trace, on fake tensors and other subclasses, in dispatch modes,
    under the transforms of torch.func, and where a level of forward-mode derivatives is open.
    """
    return is_plain_moment() and type(q) is Tensor and type(k) is Tensor and type(v) is Tensor


def is_plain_moment() -> bool:
    """Whether nothing traces or transforms a call that is made now, whatever its tensors."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def are_fake(*tensors: Tensor) -> bool:
    """Whether these have no memory, or what is made of them would have none, as torch traces or runs a call without."""
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in TRACING_MODES):
        return True
    # No tensor is fake before somebody has imported what makes them so.
    fake_tensor = sys.modules.get("torch._subclasses.fake_tensor")
    return fake_tensor is not None and any(fake_tensor.is_fake(x) for x in tensors)


def is_plain_16_bit_call(q: Any, k: Any, v: Any) -> bool:
    """Whether these are plain tensors of one 16-bit dtype, and nothing traces or transforms the call."""
    return (
        is_plain_call(q, k, v) and (dtype := q.dtype) in HALF_DTYPES and k.dtype is dtype and v.dtype is dtype
    )


def wants_only_a_launch(q: Any, k: Any, v: Any) -> bool:
    """Whether these are plain 16-bit tensors that nothing traces, transforms or differentiates."""
    return is_plain_16_bit_call(q, k, v) and not needs_gradient(q, k, v)


def saves_elsewhere() -> bool:
    """Whether what passes save goes through hooks, as checkpoints do: it may come back as other tensors then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def are_plain_tensors(tensors: Iterable[Any]) -> bool:
    """Whether these, each of which may be None, are tensors or parameters and no subclass of them."""
    # Not all(), whose generator takes as long as all the rest.
    return not [x for x in tensors if x is not None and type(x) not in PLAIN_TENSORS]


def are_plain_arguments(arguments: tuple[Any, ...]) -> bool:
    """``is_plain_call`` of all that an operator takes: tensors or parameters with memory, and values of Python.

    The first is a tensor. One that a transform wrapped is not plain after its end either, as the gradient that
    torch.func.vjp returns has them, nor is a batch of gradients (``is_grads_batched`` of torch.autograd.grad).
    """
    if not is_plain_moment() or arguments[0].is_meta:
        return False
    for x in arguments:
        kind = type(x)
        if kind not in PLAIN_VALUES and (kind not in PLAIN_TENSORS or _is_functorch(x) or _is_batched(x)):
            return False
    return True


def records_gradient(arguments: tuple[Any, ...]) -> bool:
    """``needs_gradient`` of plain arguments."""
    if torch.is_grad_enabled():
        for x in arguments:
            if type(x) in PLAIN_TENSORS and x.requires_grad:
                return True
    return False


def are_plain_constants(*tensors: Tensor) -> bool:
    """Whether these, which come with q, k and v, are plain tensors or parameters that nothing differentiates."""
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors) and not needs_gradient(*tensors)


def is_transformed() -> bool:
    """Whether torch.func or forward mode is at work. torch.compile knows the answer too."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def check_no_tangent(what: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise NotImplementedError where forward mode is to differentiate a call on these, which an operator that knows no
    tangents would take for constants. ``what`` is the call, in words.

    One function, as torch.compile would trace another for itself, and what it traces has no tangents.
    """
    if forward_ad._current_level < 0:
        return
    functorch = torch._C._functorch
    for x in tensors:
        is_found = torch.compiler.is_compiling()
        while x is not None and not is_found:
            is_wrapped, is_batch = _is_functorch(x), functorch.is_batchedtensor(x)
            # Of a transform outside of the innermost, the tangent cannot be asked for.
            is_outer = is_wrapped and functorch.maybe_get_level(x) != functorch.maybe_current_level()
            is_found = not is_batch and (is_outer or forward_ad.unpack_dual(x).tangent is not None)
            x = functorch.get_unwrapped(x) if is_wrapped else None
        if is_found:
            raise NotImplementedError(
                f"forward-mode derivatives of {what} (torch.func.jvp, jacfwd and hessian, dual tensors) are not "
                "implemented; use hopper_attention.reference.attention_naive, which torch differentiates in every mode"
            )


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        # Not any(), whose generator takes as long as all the rest.
        for x in tensors:
            if x.requires_grad:
                return True
    return False
