"""Attention of float32 tensors on a CPU by torch's kernels, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention import compiled
from hopper_attention.scores import sinks_gradient
from hopper_attention.sdpa.attention import attend, differentiate
from hopper_attention.sdpa.terms import Terms


class ExactAttention(torch.autograd.Function):
    """``attend``, once differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, terms: Terms) -> Tensor:
        out, lse = attend(q, k, v, terms)
        ctx.terms = terms
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dsinks = None if sinks is None else sinks_gradient(dout, None, out, lse, sinks)
        return *differentiate(dout, None, q, k, v, out, lse, ctx.terms), dsinks, None


@compiled.disable
def attend_exactly(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """out of :func:`attend`, through which gradients pass, to ``terms.sinks`` too.

    Args:
        q, k, v, terms: as there, on a CPU.
    """
    out: Tensor = ExactAttention.apply(q, k, v, terms.sinks, terms)
    return out
