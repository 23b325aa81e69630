"""Ulysses with the heads of a rank in parts: one is attended to while the next comes and the one before goes back.

There is one launch of attention a part. So the first exchange of the first part and the last of the last are all that
nothing hides, of a forward pass and of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.pieces import Piece, Problem
from hopper_attention.distributed.pulled import Coming, Going, PulledExchange
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import MaskSpec
from hopper_attention.reference.tiles import Span
from hopper_attention.scores import Scores

TENSORS_A_PART = 5


def whole_mask(problem: Problem) -> MaskSpec:
    """Of all rows and all keys."""
    whole = Span(0, problem.seqlen_q), Span(0, problem.seqlen_k)
    return Piece(*whole, problem.left, problem.right).mask


def attend_by_parts(
    exchange: PulledExchange,
    tensors: Sequence[Tensor],
    layout: str,
    parts: int,
    attend: Callable[..., Sequence[Tensor]],
) -> list[Tensor]:
    """Rows of what ``attend`` makes of the number of each part and its tensors, which come out of rows."""
    coming = Coming(exchange, tensors, layout, parts)
    going = Going(exchange, layout, parts)
    for part in range(parts):
        going.give(attend(part, *coming.take(part)))
    return going.finish()


def exchanged(out: Tensor, lse: Tensor, wants_lse: bool) -> list[Tensor]:
    """What goes back to rows: out, and lse (batch, heads, positions) in its order."""
    return [out, lse.mT.unsqueeze(-1)] if wants_lse else [out]


class AttentionByParts(torch.autograd.Function):
    """out (batch, rows, heads, head_dim_v), from q, k and v of the rows of this rank; with ``wants_lse`` also the LSE,
    (batch, rows, heads, 1). ``parts`` divides the key/value heads that a rank attends to."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: PulledExchange,
        problem: Problem,
        call: Call,
        parts: int,
        wants_lse: bool,
    ) -> tuple[Tensor, ...]:
        mask = whole_mask(problem)
        saved: list[Tensor] = []

        def attend(part: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            options = call.softmax_scale, mask.causal, call.backend, call.sm_margin, True
            out, lse = run_forward(q, k, v, *options, mask.sides, Scores.of(call.softcap, None, None))
            saved.extend((q, k, v, out, lse))
            return exchanged(out, lse, wants_lse)

        rows = attend_by_parts(exchange, (q, k, v), problem.layout, parts, attend)
        ctx.save_for_backward(*saved)
        ctx.way = exchange, problem, call, parts
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, problem, call, parts = ctx.way
        # Of the output, and of the LSE where it is wanted: zeros on a rank that uses only the other, as all ranks
        # exchange the same.
        mask, saved = whole_mask(problem), ctx.saved_tensors
        scores = Scores.of(call.softcap, None, None)
        options = call.softmax_scale, mask, scores, call.backend, call.deterministic

        def differentiate_part(part: int, dout: Tensor, *of_lse: Tensor) -> Sequence[Tensor]:
            q, k, v, out, lse = saved[part * TENSORS_A_PART : (part + 1) * TENSORS_A_PART]
            dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
            return differentiate(dout, dlse, q, k, v, out, lse, *options)

        of_rows = attend_by_parts(exchange, grads, problem.layout, parts, differentiate_part)
        return *of_rows, None, None, None, None, None
