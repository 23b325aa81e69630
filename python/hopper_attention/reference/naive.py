"""Attention written as its definition: the float64 oracle, and the 16-bit formula a user would write.

Both walk over the queries in chunks, so that only a bounded part of the score matrix exists at a time;
a row of the result does not depend on the chunk it was computed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hopper_attention.autocast import ignores_autocast
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference.tiles import (
    Mask,
    Span,
    default_scale,
    fold_heads,
    masked,
    masked_matmul,
    query_tile,
    round_to,
    spans,
    unfold_heads,
)
from hopper_attention.shapes import attention_shape

CHUNK_SCORES = 1 << 24
"""Scores held at a time, over batch and heads."""

Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], tuple[torch.Tensor, torch.Tensor]
]
"""(q rows, keys, values, visible) -> (out, lse (..., 1)), each (b, kv_heads, rows, ...)."""


Sides = tuple[bool, int, int]
"""causal, window_left and window_right."""


@ignores_autocast
def _by_query_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sides: Sides, dtype: torch.dtype, attend: Attend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``attend`` to chunks of queries, computing in ``dtype``: out (b, sq, h, dv), lse (b, h, sq)."""
    shape = attention_shape(q, k, v)
    row_scores = shape.batch * shape.heads * shape.seqlen_k
    if row_scores == 0 or shape.seqlen_q == 0:
        out = q.new_zeros(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v, dtype=dtype)
        return out, out.new_full((shape.batch, shape.heads, shape.seqlen_q), -math.inf)
    q_rows = fold_heads(q, shape.kv_heads, dtype)
    keys, values = (fold_heads(x, shape.kv_heads, dtype).squeeze(2) for x in (k, v))
    mask = Mask(shape.seqlen_q, shape.seqlen_k, *sides)
    outs, lses = [], []
    for rows in spans(0, shape.seqlen_q, max(1, CHUNK_SCORES // row_scores)):
        visible = mask.visible(rows, Span(0, shape.seqlen_k), shape.group, q.device)
        out, lse = attend(query_tile(q_rows, rows), keys, values, visible)
        outs.append(out.unflatten(2, (shape.group, -1)))
        lses.append(lse.squeeze(-1).unflatten(2, (shape.group, -1)))
    return unfold_heads(torch.cat(outs, 3), dtype), torch.cat(lses, 3).flatten(1, 2)


def attention_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int = UNLIMITED,
    window_right: int = UNLIMITED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q K^T) V in float64: the oracle that every other path is measured against.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype, any device that has float64.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: factor of the scores; 1/sqrt(head_dim) by default.
        window_left, window_right: query i sees the keys from i + seqlen_k - seqlen_q - window_left to
            i + seqlen_k - seqlen_q + window_right; -1 is no limit. With ``causal`` the right side is 0 whatever it is.

    Returns:
        out float64 (batch, seqlen_q, heads, head_dim_v) and the log-sum-exp, natural log, float64
        (batch, heads, seqlen_q). A query that sees no key gives 0 and -inf. Differentiable by torch.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together.
        TypeError: q, k and v differ in dtype.
    """
    scale = default_scale(softmax_scale, q.shape[-1])

    def attend(
        q_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = masked(q_rows @ keys.mT * scale, visible)
        row_max = scores.detach().amax(-1, keepdim=True)
        p = torch.exp(scores - row_max.masked_fill(row_max == -math.inf, 0.0))
        row_sum = p.sum(-1, keepdim=True)
        no_key = row_sum == 0
        row_sum = row_sum.masked_fill(no_key, 1.0)
        # The maximum of a row without keys is -inf, and so is its LSE.
        return masked_matmul(p, values, visible) / row_sum, row_sum.log() + row_max

    return _by_query_chunks(q, k, v, (causal, window_left, window_right), torch.float64, attend)


def attention_standard(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int = UNLIMITED,
    window_right: int = UNLIMITED,
) -> torch.Tensor:
    """Standard attention at the input dtype: the "Baseline FP16" of the paper's section 4.3.

    As plain PyTorch computes ``softmax(q @ k.T * scale) @ v``: the scores, the scaled scores, the
    probabilities and the output are each rounded to the input dtype. Products accumulate in float32, and the
    softmax is computed in float32 from the rounded scores. Arguments and errors are those of
    :func:`attention_naive`.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q; 0 for a query that sees no key.
    """
    scale = default_scale(softmax_scale, q.shape[-1])
    dtype = q.dtype
    accum = torch.float64 if dtype == torch.float64 else torch.float32

    def attend(
        q_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = masked(round_to(round_to(q_rows @ keys.mT, dtype) * scale, dtype), visible)
        no_key = (scores == -math.inf).all(-1, keepdim=True)
        p = round_to(torch.softmax(scores, -1), dtype).masked_fill(no_key, 0.0)
        return masked_matmul(p, values, visible), p.sum(-1, keepdim=True)

    return _by_query_chunks(q, k, v, (causal, window_left, window_right), accum, attend)[0].to(dtype)
