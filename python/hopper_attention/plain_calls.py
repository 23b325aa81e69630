"""Whether a call may leave torch's dispatcher out, which costs more than the rest of a call on a short sequence.

The public functions launch a kernel by themselves where it may, and call a custom operator where it may not: torch
alone knows what is to happen with tensors that are no plain ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hopper_attention.checks import HALF_DTYPES


def is_plain_call(q: Any, k: Any, v: Any) -> bool:
    """Whether these are plain tensors, and nothing traces or transforms the call.

    It is none under torch.compile, export and torch.jit.trace, on fake tensors and other subclasses, in dispatch modes,
    under the transforms of torch.func, and where a level of forward-mode derivatives is open.
    """
    return (
        not torch.compiler.is_compiling()
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not is_transformed()
        and torch._C._get_tracing_state() is None
    )


def wants_only_a_launch(q: Any, k: Any, v: Any) -> bool:
    """Whether these are plain 16-bit tensors that nothing traces, transforms or differentiates."""
    return (
        is_plain_call(q, k, v)
        and (dtype := q.dtype) in HALF_DTYPES
        and k.dtype is dtype
        and v.dtype is dtype
        and not needs_gradient(q, k, v)
    )


def are_plain_constants(*tensors: Tensor) -> bool:
    """Whether these, which come with q, k and v, are plain tensors or parameters that nothing differentiates."""
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors) and not needs_gradient(*tensors)


def is_transformed() -> bool:
    """Whether torch.func or forward mode is at work. torch.compile knows the answer too."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        # Not any(), whose generator takes as long as all the rest.
        for x in tensors:
            if x.requires_grad:
                return True
    return False
