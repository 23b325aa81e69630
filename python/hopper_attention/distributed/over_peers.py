"""Ulysses over the memory of peers, as one differentiable function: attention reads what they wrote where it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.pieces import Piece, Problem
from hopper_attention.distributed.pushed import Coming, Going, PushedExchange, bytes_of
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import MaskSpec
from hopper_attention.reference.tiles import Span
from hopper_attention.scores import Scores

OF_HEADS = 3
"""Of the arguments: q, k and v."""

ROOM_FOR_LSE = 4
"""Elements of 16 bits a row and head: a float32, and what aligns it."""


def whole_mask(problem: Problem) -> MaskSpec:
    """Of all rows and all keys."""
    whole = Span(0, problem.seqlen_q), Span(0, problem.seqlen_k)
    return Piece(*whole, problem.left, problem.right).mask


def exchanged(out: Tensor, lse: Tensor, wants_lse: bool) -> list[Tensor]:
    """What goes back to rows: out, and lse (batch, heads, positions) in its order."""
    return [out, lse.mT.unsqueeze(-1)] if wants_lse else [out]


def attend_by_parts(
    exchange: PushedExchange,
    tensors: Sequence[Tensor],
    layout: str,
    parts: int,
    attend: Callable[..., Sequence[Tensor]],
) -> Going:
    """Rows, to be finished, of what ``attend`` makes of the number of each part and its tensors, which come of rows."""
    coming = Coming(exchange, tensors, layout, parts)
    going = Going(exchange, layout, parts)
    for part in range(parts):
        going.give(attend(part, *coming.take(part)))
    return going


class AttentionOverPeers(torch.autograd.Function):
    """out (batch, rows, heads, head_dim_v), from q, k and v of the rows of this rank; with ``wants_lse`` also the LSE,
    (batch, rows, heads, 1). ``parts`` divides the key/value heads that a rank attends to."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exchange: PushedExchange,
        problem: Problem,
        call: Call,
        parts: int,
        wants_lse: bool,
    ) -> tuple[Tensor, ...]:
        of_out = q.nbytes // q.shape[3] * v.shape[3] + ROOM_FOR_LSE * q.nbytes // q.shape[3]
        exchange.reserve(max(bytes_of((q, k, v)), of_out))
        mask, memory = whole_mask(problem), exchange.memory
        is_kept = any(ctx.needs_input_grad[:OF_HEADS])
        kept: list[Tensor] = []
        copies: list[Any] = []

        def attend(part: int, *lent: Tensor) -> list[Tensor]:
            own = [torch.empty_like(x) for x in lent] if is_kept else []

            def keep() -> None:
                for x, y in zip(own, lent, strict=True):
                    x.copy_(y)

            if is_kept:
                # Beside the kernel, which reads the same.
                copies.append(memory.launch_aside(keep))
            options = call.softmax_scale, mask.causal, call.backend, call.sm_margin, True
            q, k, v = lent
            out, lse = run_forward(q, k, v, *options, mask.sides, Scores.of(call.softcap, None, None))
            if is_kept:
                kept.extend((*own, out, lse))
            return exchanged(out, lse, wants_lse)

        going = attend_by_parts(exchange, (q, k, v), problem.layout, parts, attend)
        for copy in copies:
            memory.wait(copy)
        rows = going.finish()
        if is_kept:
            ctx.save_for_backward(*kept)
        ctx.way = exchange, problem, call, parts
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, problem, call, parts = ctx.way
        mask, kept = whole_mask(problem), ctx.saved_tensors
        options = (
            call.softmax_scale,
            mask,
            Scores.of(call.softcap, None, None),
            call.backend,
            call.deterministic,
        )

        def differentiate_part(part: int, dout: Tensor, *of_lse: Tensor) -> Sequence[Tensor]:
            count = len(kept) // parts
            q, k, v, out, lse = kept[part * count : (part + 1) * count]
            dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
            return differentiate(dout, dlse, q, k, v, out, lse, *options)

        # Of the output, and of the LSE where it is wanted: zeros on a rank that uses only the other, as all ranks
        # exchange the same.
        return *attend_by_parts(exchange, grads, problem.layout, parts, differentiate_part).finish(), *[
            None
        ] * 5
