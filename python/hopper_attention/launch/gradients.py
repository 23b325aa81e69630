"""Gradients of dense attention, by what serves a problem: a kernel, torch's fused attention, the tiled reference, or
exactly where there is one key."""

from __future__ import annotations

import torch
from torch import Tensor

from hopper_attention.backends import KERNELS
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.launch.backward import find_choice, find_for_call, run_backward
from hopper_attention.masks import MaskSpec
from hopper_attention.one_key import differentiate_one_key
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.scores import NO_SCORES, Scores, check_scores
from hopper_attention.sdpa import attention
from hopper_attention.sdpa.terms import Terms
from hopper_attention.value_parts import Gradients, differentiate_in_parts, needs_parts


def differentiate(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    mask: MaskSpec,
    scores: Scores,
    backend: str | None,
    deterministic: bool,
) -> Gradients:
    """dq, dk, dv of a forward pass of 16 bits, with the shapes and dtype of q, k, v. No ``dlse`` means zero.

    ``backend`` is what the forward was asked for. ``deterministic``, or torch.use_deterministic_algorithms, asks for
    the same bits in every run.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    if scores is NO_SCORES:
        sizes, sides = (q.shape, k.shape, v.shape), mask.sides
        of_call = mask.causal, deterministic, backend, sides, dlse is not None
        launch = find_for_call(*sizes, q.dtype, q.device, *of_call)
        if launch is not None:
            window = sides if mask.has_window else ()
            dq, dk, dv = launch(dout, q, k, v, out, lse, softmax_scale, dlse, *window)
            return dq, dk, dv
    else:
        check_scores(scores, q.shape[0], q.shape[2], q.dtype, q.device)
    if 0 in (*out.shape, k.shape[1]):
        return _zeros_like(q), _zeros_like(k), _zeros_like(v)
    is_plain_sum = scores.sinks is None and not scores.captured and not scores.dropout_p
    if k.shape[1] == 1 and is_plain_sum:
        return differentiate_one_key(dout, dlse, q, k, v, lse, softmax_scale, scores.softcap)
    if needs_parts(v.shape[3]):

        def of_part(dout: Tensor, dlse: Tensor | None, v: Tensor, out: Tensor) -> Gradients:
            options = softmax_scale, mask, scores, backend, deterministic
            return differentiate(dout, dlse, q, k, v, out, lse, *options)

        return differentiate_in_parts(dout, dlse, v, out, of_part)
    problem = BackwardProblem(q.shape, k.shape, v.shape, q.dtype, mask.causal, deterministic, mask.has_window)
    if mask.attention_chunk:
        problem = problem._replace(has_chunk=True)
    if scores is not NO_SCORES:
        problem = problem._replace(scores=scores.kind)
    choice = find_choice(problem, q.device, backend)
    if choice.backend in KERNELS:
        options = softmax_scale, mask.causal, dlse, deterministic, choice.backend, mask.sides
        return run_backward(dout, q, k, v, out, lse, *options, scores)
    choice.advise("the backward pass of attention")
    if choice.backend == "torch":
        terms = Terms(mask.causal, softmax_scale, mask.sides, *scores.changes)
        return attention.differentiate(dout, dlse, q, k, v, out, lse, terms)
    return tiled_backward(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        causal=mask.causal,
        softmax_scale=softmax_scale,
        window_left=mask.window_left,
        window_right=mask.window_right,
        attention_chunk=mask.attention_chunk,
        softcap=scores.softcap,
        alibi_slopes=scores.alibi_slopes,
        dropout_p=scores.dropout_p,
        philox=scores.philox,
        functions=scores.captured,
    )


def _zeros_like(x: Tensor) -> Tensor:
    """Contiguous; ``zeros_like`` would keep the strides of x."""
    return x.new_zeros(x.shape)
