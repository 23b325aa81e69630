"""Ulysses over the memory of peers, as one differentiable function: attention reads what they wrote where it lies."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention import dense_again
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.pieces import Piece, Problem
from hopper_attention.distributed.pushed import PushedExchange
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.forward import ReadyLaunch, run_forward
from hopper_attention.launch.gradients import differentiate
from hopper_attention.launch.gradients_again import (
    ForGradients,
    GradientOptions,
    differentiate_again,
    passes_of,
    remember,
)
from hopper_attention.masks import MaskSpec
from hopper_attention.reference.tiles import Span
from hopper_attention.scores import Scores


@lru_cache(maxsize=REMEMBERED_CALLS)
def whole_mask(problem: Problem) -> MaskSpec:
    """Of all rows and all keys."""
    whole = Span(0, problem.seqlen_q), Span(0, problem.seqlen_k)
    return Piece(*whole, problem.left, problem.right).mask


def exchanged(out: Tensor, lse: Tensor, wants_lse: bool) -> list[Tensor]:
    """What goes back to rows: out, and lse (batch, heads, positions) in its order."""
    return [out, lse.mT.unsqueeze(-1)] if wants_lse else [out]


class AttentionOverPeers(torch.autograd.Function):
    """out (batch, rows, heads, head_dim_v), from q, k and v of the rows of this rank; with ``wants_lse`` also the LSE,
    (batch, rows, heads, 1).

    ``is_kept`` says that there may be a backward pass: within, tensors that need gradients do also where none are
    recorded.
    """

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
        is_kept: bool,
    ) -> tuple[Tensor, ...]:
        lent = exchange.lend_heads((q, k, v), problem.layout)
        memory = exchange.memory
        # Beside the kernel, which reads the same.
        kept = [memory.copy_aside(lent.room)] if is_kept else []
        try:
            out, lse = attend_apart(lent.tensors, whole_mask(problem), call)
        finally:
            if kept:
                memory.wait()
        rows = exchange.lend_rows(exchanged(out, lse, wants_lse), problem.layout).tensors
        if kept:
            ctx.save_for_backward(*kept, out, lse)
            ctx.way = exchange, problem, call, lent
        # The copies may take the memory of an output that nobody keeps.
        del out, lse
        return tuple([x.clone() for x in rows])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, problem, call, lent = ctx.way
        # Of the output, and of the LSE where it is wanted: zeros on a rank that uses only the other, as all ranks
        # exchange the same.
        dout, *of_lse = exchange.lend_heads(grads, problem.layout).tensors
        dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
        copy, out, lse = ctx.saved_tensors
        q, k, v = lent.found_in(copy)
        tensors = ForGradients(dout, q, k, v, out, lse)
        offered = exchange.offer((q, k, v), problem.layout)
        differentiate_heads(tensors, dlse, whole_mask(problem), call, offered.tensors)
        return *exchange.take_rows(offered), *[None] * 5


def attend_heads(qkv: tuple[Tensor, ...], mask: MaskSpec, call: Call, into: Tensor) -> Tensor:
    """The lse; out, which may lie where Q does, is written to ``into``, by what served an earlier call of tensors like
    these."""
    q, k, v = qkv
    # Of another shape, a tile of it would lie where another CTA reads Q.
    if not call.softcap and into.shape == q.shape:
        found = dense_again.find(q, k, v, _flags_of(mask, call))
        if found is not None and isinstance(found.launch, ReadyLaunch):
            lse = found.launch.fill(q, k, v, into, call.softmax_scale)
            if lse is not None:
                return lse
    out, lse = attend_apart(qkv, mask, call)
    into.copy_(out)
    return lse


def _flags_of(mask: MaskSpec, call: Call) -> dense_again.Flags:
    return mask.causal, call.backend, call.sm_margin, mask.sides


def attend_apart(qkv: tuple[Tensor, ...], mask: MaskSpec, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse, by what served an earlier call of tensors like these."""
    q, k, v = qkv
    if call.softcap:
        options = call.softmax_scale, mask.causal, call.backend, call.sm_margin, True, mask.sides
        return run_forward(q, k, v, *options, Scores.of(call.softcap, None, None))
    flags = _flags_of(mask, call)
    found = dense_again.find(q, k, v, flags)
    if found is not None:
        out, lse = found(q, k, v, call.softmax_scale, call.deterministic, True)
        return out, lse
    out, lse = run_forward(q, k, v, call.softmax_scale, *flags[:3], True, mask.sides)
    if q.is_cuda:
        dense_again.remember(q, k, v, flags, False)
    return out, lse


def differentiate_heads(
    tensors: ForGradients, dlse: Tensor | None, mask: MaskSpec, call: Call, into: tuple[Tensor, ...]
) -> None:
    """dq, dk and dv, in ``into``, by what served an earlier call of tensors like these."""
    options = GradientOptions(call.softmax_scale, mask.causal, call.backend, call.deterministic, mask.sides)
    is_plain = dlse is None and not call.softcap
    if is_plain and differentiate_again(tensors, passes_of(options), into) is not None:
        return
    dout, q, k, v, out, lse = tensors
    others = call.softmax_scale, mask, Scores.of(call.softcap, None, None), call.backend, call.deterministic
    gradients = differentiate(dout, dlse, q, k, v, out, lse, *others)
    for target, gradient in zip(into, gradients, strict=True):
        target.copy_(gradient)
    if is_plain:
        remember(tensors, options)
