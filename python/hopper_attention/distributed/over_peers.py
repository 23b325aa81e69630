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
from hopper_attention.distributed.pushed import Guest, Offered, PushedExchange
from hopper_attention.launch.backward import BackwardLauncher, find_for_call
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.forward import ReadyLaunch, run_forward
from hopper_attention.launch.gradient_sums import may_replace_keys
from hopper_attention.launch.gradients import differentiate
from hopper_attention.launch.gradients_again import (
    ForGradients,
    GradientOptions,
    differentiate_again,
    passes_of,
    remember,
)
from hopper_attention.masks import MaskSpec
from hopper_attention.plain_calls import saves_elsewhere
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


@lru_cache(maxsize=REMEMBERED_CALLS)
def _serves(
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype,
    device: torch.device,
    mask: MaskSpec,
    deterministic: bool,
    backend: str | None,
) -> bool:
    launcher = find_for_call(*shapes, dtype, device, mask.causal, deterministic, backend, mask.sides)
    # What no such launcher serves makes them elsewhere.
    return launcher is None or (isinstance(launcher, BackwardLauncher) and may_replace_keys(launcher))


def may_take_their_places(shapes: tuple[torch.Size, ...], q: Tensor, mask: MaskSpec, call: Call) -> bool:
    """Whether gradients of Q, K and V of these shapes, like ``q`` else, may be written to where these lie: not where a
    kernel still reads them then."""
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return _serves(shapes, q.dtype, q.device, mask, deterministic, call.backend)


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
        memory, mask = exchange.memory, whole_mask(problem)
        lent = exchange.lend_heads((q, k, v), problem.layout)
        kept: list[Tensor] = []
        if is_kept:
            shapes = tuple([x.shape for x in lent.tensors])
            may_stay = exchange.takes_turns and not saves_elsewhere()
            may_stay = may_stay and may_take_their_places(shapes, q, mask, call)
            guest = exchange.receive(lent, may_stay)
            ctx.way = exchange, problem, call, guest
            # Beside the kernel, which reads the same.
            kept = [] if guest is exchange.guest else [memory.copy_aside(lent.room)]
        try:
            out, lse = attend_apart(lent.tensors, mask, call)
        finally:
            if kept:
                memory.wait()
        rows = exchange.lend_rows(exchanged(out, lse, wants_lse), problem.layout).tensors
        if is_kept:
            ctx.save_for_backward(out, lse, *kept)
        # The copies may take the memory of an output that nobody keeps.
        del out, lse
        return tuple([x.clone() for x in rows])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, problem, call, guest = ctx.way
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        offered = differentiate_guest(exchange, problem, call, guest, (grads, ctx.saved_tensors), is_last)
        # Rows of dQ, dK and dV take the memory of what is needed no more.
        ctx.maybe_clear_saved_tensors()
        return *exchange.take_rows(offered), *[None] * 5


def differentiate_guest(
    exchange: PushedExchange,
    problem: Problem,
    call: Call,
    guest: Guest,
    given: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    is_last: bool,
) -> Offered:
    """dQ, dK and dV of the heads of this rank, which offers them to all: over Q, K and V where these are in the buffer
    still.

    Args:
        given: gradients of the rows of the output, and of those of the LSE where it is wanted: zeros on a rank that
            uses only the other, as all ranks exchange the same. And what is saved of the heads: out, lse and, where one
            was made, a copy of the room of Q, K and V.
        is_last: whether there is no other backward pass of this call.
    """
    grads, (out, lse, *copy) = given
    is_here = exchange.see_again(guest)
    if is_here:
        if not is_last:
            guest.copy()
        lent, (q, k, v) = exchange.lend_beside(grads, problem.layout), guest.brought.tensors
        offered = exchange.offer_over(guest, problem.layout)
    else:
        lent = exchange.lend_heads(grads, problem.layout)
        q, k, v = guest.brought.found_in(copy[0]) if copy else guest.copied()
        if is_last:
            guest.copies.clear()
        offered = exchange.offer((q, k, v), problem.layout)
    dout, *of_lse = lent.tensors
    dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
    tensors = ForGradients(dout, q, k, v, out, lse)
    differentiate_heads(tensors, dlse, whole_mask(problem), call, offered.tensors)
    return offered


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
