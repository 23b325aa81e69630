"""Gradients of attention to a single key, which need no softmax. Not with sinks, beside which P of the key is not 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def differentiate_one_key(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    softmax_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv where seqlen_k is 1, contiguous: P of the only key is 1 whatever its score.

    So the output is V, a constant to Q and K, which have a gradient through the LSE alone: it is the score. As a
    difference of two sums, which the backward pass by tiles makes of it, the zero would be off by their rounding.

    Args:
        dout: (batch, seqlen_q, heads, head_dim_v).
        dlse: (batch, heads, seqlen_q); None means zero.
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, 1, kv_heads, head_dim) and (..., head_dim_v).
        lse: float32 (batch, heads, seqlen_q); -inf where a mask hides the key.
        softcap: of the score, which has a slope then; 0 is none.
    """
    # 1, 0 for a query that does not see the key, NaN where the score is not finite.
    p = (lse - lse).masked_fill(lse == -math.inf, -math.inf).exp()
    ds = p * (
        softmax_scale * (torch.zeros_like(p) if dlse is None else dlse).masked_fill(lse == -math.inf, 0.0)
    )
    p, ds = (x.transpose(1, 2).unsqueeze(-1) for x in (p, ds))

    def sum_for_key(x: Tensor) -> Tensor:
        """Of (batch, seqlen_q, heads, ...) over the queries and heads that read a key."""
        return x.sum(1, keepdim=True).unflatten(2, (k.shape[2], -1)).sum(3).to(q.dtype)

    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    if softcap:
        scores = softmax_scale * (q.to(ds.dtype) * keys).sum(-1, keepdim=True)
        ds = ds * (1.0 - torch.tanh(scores / softcap).square())
    return (ds * keys).to(q.dtype).contiguous(), sum_for_key(ds * q), sum_for_key(p * dout)
