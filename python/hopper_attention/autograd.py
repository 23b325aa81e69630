"""Gradients of the custom operators, and what calls them. Importing this module registers the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopper_attention import ops, varlen_ops
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.transforms import differentiable


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.backend, _, ctx.deterministic, *ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)
    # An unused LSE has no gradient; None saves adding zeros.
    ctx.set_materialize_grads(False)


def _forward_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    options = (ctx.softmax_scale, ctx.causal, ctx.backend, ctx.deterministic, *ctx.window)
    return *backward(dout, dlse, q, k, v, out, lse, *options), *[None] * 7


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


def _save_varlen_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *lengths = inputs[:7]
    *ctx.max_seqlens, ctx.softmax_scale, ctx.causal, ctx.backend, _, ctx.deterministic = inputs[7:14]
    ctx.window = inputs[14:]
    ctx.save_for_backward(q, k, v, *output, *lengths)
    ctx.set_materialize_grads(False)


def _varlen_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    options = (ctx.softmax_scale, ctx.causal, ctx.backend, ctx.deterministic, *ctx.window)
    tensors = (dout, dlse, q, k, v, out, lse, *lengths)
    return *backward_varlen(*tensors, *ctx.max_seqlens, *options), *[None] * 13


# What calls the operators, also under torch.func.
backward = differentiable(ops.backward, refuse_second_derivative)
forward = differentiable(ops.forward, _forward_gradients, _save_for_backward)
backward_varlen = differentiable(varlen_ops.backward_varlen, refuse_second_derivative, has_batch=False)
forward_varlen = differentiable(
    varlen_ops.forward_varlen, _varlen_gradients, _save_varlen_for_backward, has_batch=False
)
forward_fp8 = differentiable(ops.forward_fp8, _refuse_fp8_gradient)
