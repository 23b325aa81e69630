"""Ulysses over the memory of peers, as one differentiable function: attention reads what they wrote where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.pieces import Piece, Problem
from hopper_attention.distributed.pushed import PushedExchange
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import MaskSpec
from hopper_attention.reference.tiles import Span
from hopper_attention.scores import Scores

OF_HEADS = 3
"""Of the arguments: q, k and v."""


def whole_mask(problem: Problem) -> MaskSpec:
    """Of all rows and all keys."""
    whole = Span(0, problem.seqlen_q), Span(0, problem.seqlen_k)
    return Piece(*whole, problem.left, problem.right).mask


def exchanged(out: Tensor, lse: Tensor, wants_lse: bool) -> list[Tensor]:
    """What goes back to rows: out, and lse (batch, heads, positions) in its order."""
    return [out, lse.mT.unsqueeze(-1)] if wants_lse else [out]


class AttentionOverPeers(torch.autograd.Function):
    """out (batch, rows, heads, head_dim_v), from q, k and v of the rows of this rank; with ``wants_lse`` also the LSE,
    (batch, rows, heads, 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: PushedExchange,
        problem: Problem,
        call: Call,
        wants_lse: bool,
    ) -> tuple[Tensor, ...]:
        mask = whole_mask(problem)
        q, k, v = lent = exchange.lend_heads((q, k, v), problem.layout)
        memory = exchange.memory
        kept = [torch.empty_like(x) for x in lent] if any(ctx.needs_input_grad[:OF_HEADS]) else []

        def keep() -> None:
            for x, y in zip(kept, lent, strict=True):
                x.copy_(y)

        # Beside the kernel, which reads the same.
        keeping = [memory.launch_aside(keep)] if kept else []
        options = call.softmax_scale, mask.causal, call.backend, call.sm_margin, True
        out, lse = run_forward(q, k, v, *options, mask.sides, Scores.of(call.softcap, None, None))
        for copies in keeping:
            memory.wait(copies)
        rows = exchange.to_rows(exchanged(out, lse, wants_lse), problem.layout)
        if kept:
            ctx.save_for_backward(*kept, out, lse)
        ctx.way = exchange, problem, call
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, problem, call = ctx.way
        # Of the output, and of the LSE where it is wanted: zeros on a rank that uses only the other, as all ranks
        # exchange the same.
        dout, *of_lse = exchange.lend_heads(grads, problem.layout)
        dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
        scores = Scores.of(call.softcap, None, None)
        options = call.softmax_scale, whole_mask(problem), scores, call.backend, call.deterministic
        q, k, v, out, lse = ctx.saved_tensors
        gradients = differentiate(dout, dlse, q, k, v, out, lse, *options)
        return *exchange.to_rows(gradients, problem.layout), *[None] * 4
