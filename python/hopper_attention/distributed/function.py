"""Attention of shards as one differentiable function, whatever way keys take to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import Call, Gradients, Saved
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.pieces import Problem
from hopper_attention.scores import sinks_gradient

QKV = tuple[Tensor, Tensor, Tensor]


class Passes(NamedTuple):
    """A way to attend to the keys of all ranks.

    Attributes:
        forward: out in the dtype of q and lse, of q, k and v of this rank, the last two contiguous, and sinks.
        backward: dq, dk and dv in the dtype of q, of what is saved of the rows, and k and v.
    """

    forward: Callable[[Ranks, Problem, Call, QKV, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[Ranks, Problem, Call, Saved, tuple[Tensor, Tensor]], Gradients]


class SharedAttention(torch.autograd.Function):
    """``Passes.forward`` with its gradient; that of sinks is of this rank's own rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        passes: Passes,
        ranks: Ranks,
        problem: Problem,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        k, v = k.contiguous(), v.contiguous()
        out, lse = passes.forward(ranks, problem, call, (q, k, v), sinks)
        ctx.way = passes.backward, ranks, problem, call
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout, dlse = grads
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        run, *where = ctx.way
        dq, dk, dv = run(*where, Saved(q, out, lse, dout, dlse), (k, v))
        wants_sinks = sinks is not None and ctx.needs_input_grad[3]
        dsinks = sinks_gradient(dout, dlse, out, lse, sinks) if wants_sinks else None
        return dq, dk, dv, dsinks, None, None, None, None
