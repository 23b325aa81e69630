"""Ulysses over the memory of peers, as one differentiable function: attention reads what they wrote where it lies."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hopper_attention import dense_again
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.pieces import Piece, Problem
from hopper_attention.distributed.pushed import (
    FEW_CTAS,
    Brought,
    Guest,
    Offered,
    PushedExchange,
)
from hopper_attention.distributed.waves import (
    EVERY_HEAD,
    EVERY_HEAD_AT_ONCE,
    HeadShare,
    Waves,
    divide_in_waves,
)
from hopper_attention.launch.backward import find_for_call
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.forward import ReadyLaunch, run_forward
from hopper_attention.launch.gradient_launchers import FinishedLauncher
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

LEAST_IN_WAVES = 1 << 26
"""Bytes of Q, K and V that a rank gives: of fewer, copies take less time than another launch is worth. 32k tokens on
four ranks have 101 MB, with 16 heads of 128 columns or with 32 over 8."""


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
    return launcher is None or (isinstance(launcher, FinishedLauncher) and may_replace_keys(launcher))


def may_take_their_places(shapes: tuple[torch.Size, ...], q: Tensor, mask: MaskSpec, call: Call) -> bool:
    """Whether gradients of Q, K and V of these shapes, like ``q`` else, may be written to where these lie: not where a
    kernel still reads them then."""
    return _serves(shapes, q.dtype, q.device, mask, _is_deterministic(call), call.backend)


def _is_deterministic(call: Call) -> bool:
    return call.deterministic or torch.are_deterministic_algorithms_enabled()


def shares_of(qkv: tuple[Tensor, ...], ranks: int, mask: MaskSpec, call: Call) -> tuple[HeadShare, ...]:
    """The heads of a rank that come together: one share after the other where they may stay for the backward pass,
    whose gradients take their places. All ranks find the same."""
    if call.softcap:
        return EVERY_HEAD_AT_ONCE
    q, k, v = qkv
    like = q.dtype, q.device, mask, _is_deterministic(call), call.backend
    return _shares_of((q.shape, k.shape, v.shape), ranks, LEAST_IN_WAVES, *like)


@lru_cache(maxsize=REMEMBERED_CALLS)
def _shares_of(
    shapes: tuple[torch.Size, ...], ranks: int, least: int, dtype: torch.dtype, *options: Any
) -> tuple[HeadShare, ...]:
    if dtype.itemsize * sum(shape.numel() for shape in shapes) < least:
        return EVERY_HEAD_AT_ONCE
    shares = divide_in_waves(shapes[1][2] // ranks)
    # The backward pass has all heads at once.
    of_each = (heads_of(shapes, ranks, share) for share in (EVERY_HEAD, *shares))
    return shares if all(_serves(of_share, dtype, *options) for of_share in of_each) else EVERY_HEAD_AT_ONCE


def heads_of(rows: tuple[torch.Size, ...], ranks: int, share: HeadShare) -> tuple[torch.Size, ...]:
    """The shapes that rows come in as some heads of a rank."""
    return tuple([torch.Size((b, ranks * s, share.of(h // ranks), d)) for b, s, h, d in rows])


def attend_in_waves(lent: Brought, waves: Waves, mask: MaskSpec, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of all that is lent; the attention to heads that are here leaves SMs to copies of the others."""
    q, _, v = lent.tensors
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), empty_lse(q)
    heads = [of_q.shape[2] for of_q, *_ in lent.waves]
    # Tensor.split does the same, and takes three times as long.
    results = zip(out.split_with_sizes(heads, 2), lse.split_with_sizes(heads, 1), strict=True)
    first, then = zip(lent.waves, results, strict=True)
    beside_copies = call._replace(sm_margin=max(call.sm_margin, FEW_CTAS))
    waves.run(
        partial(attend_into, first[0], mask, beside_copies, first[1]),
        partial(attend_into, then[0], mask, call, then[1]),
    )
    return out, lse


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
        mask, layout = whole_mask(problem), problem.layout
        may_stay = exchange.takes_turns and not saves_elsewhere()
        shares = EVERY_HEAD_AT_ONCE
        # Not where all heads are copied, which is done beside attention, before others have come.
        if may_stay or not is_kept:
            shares = shares_of((q, k, v), exchange.ranks.size, mask, call)
        if len(shares) > 1:
            lent, waves = exchange.lend_in_waves((q, k, v), layout, shares)
        else:
            lent = exchange.lend_heads((q, k, v), layout)
        kept: list[Tensor] = []
        if is_kept:
            shapes = tuple([x.shape for x in lent.tensors])
            guest = exchange.receive(lent, may_stay and may_take_their_places(shapes, q, mask, call))
            ctx.way = exchange, problem, call, guest
            # Beside the kernel, which reads the same.
            kept = [] if guest is exchange.guest else [exchange.memory.copy_aside(lent.room)]
        try:
            if len(shares) > 1:
                out, lse = attend_in_waves(lent, waves, mask, call)
            else:
                out, lse = attend_apart(lent.tensors, mask, call)
        finally:
            if kept:
                exchange.memory.wait()
        rows = exchange.lend_rows(exchanged(out, lse, wants_lse), layout).tensors
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
    mask, layout, is_here = whole_mask(problem), problem.layout, exchange.see_again(guest)
    if is_here:
        if not is_last:
            guest.copy()
        q, k, v = guest.brought.tensors
        lent, offered = exchange.lend_beside(grads, layout), exchange.offer_over(guest, layout)
    else:
        lent = exchange.lend_heads(grads, layout)
        q, k, v = guest.brought.found_in(copy[0]) if copy else guest.copied()
        if is_last:
            guest.copies.clear()
        offered = exchange.offer((q, k, v), layout)
    dout, *of_lse = lent.tensors
    dlse = of_lse[0].squeeze(-1).mT.contiguous() if of_lse else None
    differentiate_heads(ForGradients(dout, q, k, v, out, lse), dlse, mask, call, offered.tensors)
    return offered


def attend_heads(qkv: tuple[Tensor, ...], mask: MaskSpec, call: Call, into: Tensor) -> Tensor:
    """The lse; out, which may lie where Q does, is written to ``into``."""
    q, _, _ = qkv
    if into.shape == q.shape:
        lse = empty_lse(q)
        attend_into(qkv, mask, call, (into, lse))
        return lse
    # A tile of it would lie where another CTA reads Q.
    out, lse = attend_apart(qkv, mask, call)
    into.copy_(out)
    return lse


def empty_lse(q: Tensor) -> Tensor:
    """(batch, heads, seqlen_q), float32."""
    batch, seqlen, heads, _ = q.shape
    return torch.empty(batch, heads, seqlen, dtype=torch.float32, device=q.device)


def attend_into(qkv: tuple[Tensor, ...], mask: MaskSpec, call: Call, results: tuple[Tensor, Tensor]) -> None:
    """out and lse, by what served an earlier call of tensors like these."""
    q, k, v = qkv
    if not call.softcap:
        found = dense_again.find(q, k, v, _flags_of(mask, call))
        launch = None if found is None else found.launch
        if isinstance(launch, ReadyLaunch) and launch.fill(q, k, v, results, call.softmax_scale):
            return
    for target, result in zip(results, attend_apart(qkv, mask, call), strict=True):
        target.copy_(result)


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
