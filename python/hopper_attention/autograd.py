"""Gradients of the custom operators, and what calls them. Importing this module registers the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopper_attention import ops, qv_ops, varlen_ops
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.launch.forward import Launch
from hopper_attention.launch.gradients_again import (
    ForGradients,
    GradientOptions,
    Passes,
    Served,
    differentiate_again,
    passes_of,
    remember,
)
from hopper_attention.launch.packed_gradients_again import (
    PackedGradientCall,
    differentiate_packed_again,
    packed_passes_of,
    remember_packed,
)
from hopper_attention.launch.varlen import VarlenLaunch
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import may_be_like
from hopper_attention.masks import FULL_SIDES
from hopper_attention.qv import NO_QV_GRADIENT
from hopper_attention.scores import NO_SCORES, NO_SLOPES_GRADIENT, sinks_gradient
from hopper_attention.transforms import differentiable, recorded

NO_MORE_GRADIENTS = (None,) * 13
"""Of what ``ops.forward`` takes beside q, k and v."""


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.backend, _, ctx.deterministic = inputs[:8]
    ctx.sides = inputs[8:11]
    ctx.softcap, alibi_slopes, sinks, ctx.dropout_p, philox = inputs[11:]
    ctx.save_for_backward(q, k, v, *output, alibi_slopes, sinks, philox)
    # An unused LSE has no gradient; None saves adding zeros.
    ctx.set_materialize_grads(False)


def _forward_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, alibi_slopes, sinks, philox = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = ForGradients(dout, q, k, v, out, lse)
    if alibi_slopes is sinks is philox is None and not ctx.softcap:
        options = GradientOptions(ctx.softmax_scale, ctx.causal, ctx.backend, ctx.deterministic, ctx.sides)
        return *_plain_gradients(tensors, dlse, options), *NO_MORE_GRADIENTS
    scores = ctx.softcap, alibi_slopes, sinks, ctx.dropout_p, philox
    given = (ctx.softmax_scale, ctx.causal, ctx.backend, ctx.deterministic, *ctx.sides, *scores)
    dq, dk, dv = backward(dout, dlse, *tensors[1:], *given)
    dsinks = _gradient_of_sinks(ctx.needs_input_grad[12:], dout, dlse, out, lse, sinks)
    return dq, dk, dv, *[None] * 10, dsinks, None, None


def _plain_gradients(
    tensors: ForGradients, dlse: Tensor | None, options: GradientOptions
) -> tuple[Tensor, ...]:
    """dq, dk and dv where nothing changes the scores."""
    # Options of a call that is traced may be symbols, which have no hash.
    if dlse is None and may_be_like():
        found = differentiate_again(tensors, passes_of(options))
        if found is not None:
            return found
    return _new_gradients(tensors, dlse, options)


def _new_gradients(
    tensors: ForGradients, dlse: Tensor | None, options: GradientOptions
) -> tuple[Tensor, ...]:
    """The same, of a pass that is like none that was made before, or has a gradient of the LSE."""
    dout, q, k, v, out, lse = tensors
    *flags, sides = options
    dq, dk, dv = backward(dout, dlse, q, k, v, out, lse, *flags, *sides, *NO_SCORES.values)
    if dlse is None:
        remember(tensors, options)
    return dq, dk, dv


def _gradient_of_sinks(
    wanted: tuple[bool, ...],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
) -> Tensor | None:
    """That of the sinks, if it is wanted.

    ``wanted`` says whether the gradients of the slopes and of the sinks are, and may lack what was left to its default.

    Raises:
        NotImplementedError: that of the slopes is wanted.
    """
    of_slopes, of_sinks, *_ = (*wanted, False, False)
    if of_slopes:
        raise NotImplementedError(NO_SLOPES_GRADIENT)
    if sinks is None or not of_sinks:
        return None
    return sinks_gradient(dout, dlse, out, lse, sinks)


def refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        "the gradient of attention was differentiated again (double backward), which no backend does; "
        "use hopper_attention.reference.attention_naive, which torch "
        "differentiates any number of times"
    )


def _refuse_fp8_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(
        f"a backward pass reached attention of {FP8_DTYPE} tensors, which have no gradient: train with 16-bit tensors, "
        "which flash_attn_fp8_func quantizes and differentiates, or call under torch.no_grad()"
    )


def _refuse_qv_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError(NO_QV_GRADIENT)


def _save_varlen_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *lengths = inputs[:7]
    ctx.max_seqlens, ctx.sides = inputs[7:9], inputs[14:17]
    ctx.softmax_scale, ctx.causal, ctx.backend, _, ctx.deterministic = inputs[9:14]
    ctx.softcap, alibi_slopes, sinks, ctx.dropout_p, philox = inputs[17:]
    ctx.save_for_backward(q, k, v, *output, *lengths, alibi_slopes, sinks, philox)
    ctx.set_materialize_grads(False)


def _varlen_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *lengths, alibi_slopes, sinks, philox = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    scores = ctx.softcap, alibi_slopes, sinks, ctx.dropout_p, philox
    options = (ctx.softmax_scale, ctx.causal, ctx.backend, ctx.deterministic, *ctx.sides, *scores)
    again = None
    if dlse is alibi_slopes is sinks is philox is None and not ctx.softcap:
        given, where = ForGradients(dout, q, k, v, out, lse), Lengths(*lengths, *ctx.max_seqlens)
        again = GradientOptions(ctx.softmax_scale, ctx.causal, ctx.backend, ctx.deterministic, ctx.sides)
        # As of ``_plain_gradients``.
        found = differentiate_packed_again(given, where, packed_passes_of(again)) if may_be_like() else None
        if found is not None:
            return *found, *[None] * 19
    tensors = (dout, dlse, q, k, v, out, lse, *lengths)
    dq, dk, dv = backward_varlen(*tensors, *ctx.max_seqlens, *options)
    if again is not None:
        remember_packed(given, where, again)
    dsinks = _gradient_of_sinks(ctx.needs_input_grad[18:], dout, dlse, out, lse, sinks)
    return dq, dk, dv, *[None] * 16, dsinks, None, None


def _have_tensors_without_batch(*arguments: Any) -> bool:
    """Of the operators of one length: whether there are slopes, sinks or seeds of a mask, which come last."""
    *_, alibi_slopes, sinks, _, philox = arguments
    return any(x is not None for x in (alibi_slopes, sinks, philox))


def _end_with_tensors_of_heads(*arguments: Any) -> bool:
    """Whether there are slopes or sinks, which come last."""
    *_, alibi_slopes, sinks = arguments
    return alibi_slopes is not None or sinks is not None


def _forward_by(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, launch: Launch, passes: Passes[Served]
) -> tuple[Tensor, Tensor]:
    """``ops.forward`` of scores that nothing changes, by what serves them; ``passes`` are those of calls like it."""
    scale, _, _, _, sides = passes.options
    out, lse = launch(q, k, v, scale, True, *(() if sides == FULL_SIDES else sides))
    ctx.passes = passes
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.set_materialize_grads(False)
    return out, lse


def _forward_out_by(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, launch: Launch, passes: Passes[Served]
) -> Tensor:
    """``_forward_by`` of a call that has no use for the LSE: autograd has one result less to look after."""
    out, _ = _forward_by(ctx, q, k, v, launch, passes)
    return out


def _gradients_by(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if dlse is None:
        found = differentiate_again((dout, q, k, v, out, lse), ctx.passes)
        if found is not None:
            return *found, None, None
    return *_new_gradients(ForGradients(dout, q, k, v, out, lse), dlse, ctx.passes.options), None, None


def _forward_varlen_by(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    launch: VarlenLaunch,
    passes: Passes[PackedGradientCall],
) -> tuple[Tensor, Tensor]:
    """``varlen_ops.forward_varlen`` of scores that nothing changes, by what serves them; ``passes`` are those of calls
    like it."""
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    bounds, options = (max_seqlen_q, max_seqlen_k), passes.options
    out, lse = launch(q, k, v, *lengths, *bounds, options.softmax_scale, *options.sides, True)
    ctx.bounds, ctx.passes = bounds, passes
    ctx.save_for_backward(q, k, v, out, lse, *lengths)
    ctx.set_materialize_grads(False)
    return out, lse


def _varlen_gradients_by(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *saved = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    lengths = Lengths(*saved, *ctx.bounds)
    if dlse is None:
        found = differentiate_packed_again((dout, q, k, v, out, lse), lengths, ctx.passes)
        if found is not None:
            return *found, *NO_MORE_GRADIENTS[:8]
    options = ctx.passes.options
    *flags, sides = options
    given = dlse, q, k, v, out, lse, *lengths, *flags, *sides, *NO_SCORES.values
    dq, dk, dv = backward_varlen(dout, *given)
    if dlse is None:
        remember_packed(ForGradients(dout, q, k, v, out, lse), lengths, options)
    return dq, dk, dv, *NO_MORE_GRADIENTS[:8]


# What calls the operators, also under torch.func.
backward = differentiable(ops.backward, refuse_second_derivative, mixes_samples=_have_tensors_without_batch)
forward = differentiable(
    ops.forward, _forward_gradients, _save_for_backward, mixes_samples=_have_tensors_without_batch
)
forward_by = recorded("hopper_attention::forward", _forward_by, _gradients_by)
forward_out_by = recorded("hopper_attention::forward", _forward_out_by, _gradients_by)
forward_varlen_by = recorded("hopper_attention::forward_varlen", _forward_varlen_by, _varlen_gradients_by)
backward_varlen = differentiable(varlen_ops.backward_varlen, refuse_second_derivative, has_batch=False)
forward_varlen = differentiable(
    varlen_ops.forward_varlen, _varlen_gradients, _save_varlen_for_backward, has_batch=False
)
forward_qv = differentiable(qv_ops.forward_qv, _refuse_qv_gradient, mixes_samples=_have_tensors_without_batch)
forward_qv_varlen = differentiable(qv_ops.forward_qv_varlen, _refuse_qv_gradient, has_batch=False)
forward_fp8 = differentiable(ops.forward_fp8, _refuse_fp8_gradient, mixes_samples=_end_with_tensors_of_heads)
forward_varlen_fp8 = differentiable(varlen_ops.forward_varlen_fp8, _refuse_fp8_gradient, has_batch=False)
