"""Attention written as its definition: the float64 oracle, and the 16-bit formula a user would write.

Both walk over the queries in chunks, so that only a bounded part of the score matrix exists at a time;
a row of the result does not depend on the chunk it was computed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from hopper_attention.autocast import ignores_autocast
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference.dropout import DropoutMask, dropped
from hopper_attention.reference.function_terms import Places, PlainFunctions
from hopper_attention.reference.joined import join_qv
from hopper_attention.reference.score_terms import ScoreTerms
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
from hopper_attention.shapes import AttentionShape, attention_shape

CHUNK_SCORES = 1 << 24
"""Scores held at a time, over batch and heads."""


class Chunk(NamedTuple):
    """Queries ``rows`` that meet all keys ``cols``; which pairs are seen, None if all; what is done to scores; which
    pairs are kept, None if all, and the factor of these."""

    rows: Span
    cols: Span
    visible: torch.Tensor | None
    terms: ScoreTerms
    kept: torch.Tensor | None
    factor: float


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Chunk], tuple[torch.Tensor, torch.Tensor]]
"""(q rows, keys, values, chunk) -> (out, lse (..., 1)), each (b, kv_heads, rows, ...)."""


Sides = tuple[bool, int, int, int]
"""causal, window_left, window_right and attention_chunk."""

ScoreOptions = tuple[
    "float | None", float, "torch.Tensor | None", "torch.Tensor | None", float, "torch.Tensor | None"
]
"""softmax_scale, softcap, alibi_slopes, sinks, dropout_p and philox."""

Mods = tuple["ScoreMod | None", "MaskMod | None"]
"""score_mod and mask_mod."""


@ignores_autocast
def _by_query_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sides: Sides,
    options: ScoreOptions,
    mods: Mods,
    dtype: torch.dtype,
    attend: Attend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``attend`` to chunks of queries, computing in ``dtype``: out (b, sq, h, dv), lse (b, h, sq)."""
    shape = attention_shape(q, k, v)
    softmax_scale, softcap, alibi_slopes, sinks, dropout_p, philox = options
    scale = default_scale(softmax_scale, shape.head_dim)
    user = PlainFunctions(*mods, Places(shape, q.device))
    terms = ScoreTerms.of(shape, dtype, scale, softcap, alibi_slopes, sinks, user)
    drops = DropoutMask.of(dropout_p, philox, shape.batch, shape.heads)
    row_scores = shape.batch * shape.heads * shape.seqlen_k
    if row_scores == 0 or shape.seqlen_q == 0:
        return _without_keys(q, shape, terms, dtype)
    q_rows = fold_heads(q, shape.kv_heads, dtype)
    keys, values = (fold_heads(x, shape.kv_heads, dtype).squeeze(2) for x in (k, v))
    mask = Mask(shape.seqlen_q, shape.seqlen_k, *sides)
    outs, lses = [], []
    for rows in spans(0, shape.seqlen_q, max(1, CHUNK_SCORES // row_scores)):
        cols = Span(0, shape.seqlen_k)
        kept, factor = None, 1.0
        if drops is not None:
            kept, factor = drops.of_group(rows, cols, shape.kv_heads), drops.factor
        visible = terms.visible(mask.visible(rows, cols, shape.group, q.device), rows, cols)
        chunk = Chunk(rows, cols, visible, terms, kept, factor)
        out, lse = attend(query_tile(q_rows, rows), keys, values, chunk)
        outs.append(out.unflatten(2, (shape.group, -1)))
        lses.append(lse.squeeze(-1).unflatten(2, (shape.group, -1)))
    return unfold_heads(torch.cat(outs, 3), dtype), torch.cat(lses, 3).flatten(1, 2)


def _without_keys(
    q: torch.Tensor, shape: AttentionShape, terms: ScoreTerms, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """out, which is 0, and the LSE, which is the sink alone."""
    rows = q.new_zeros(shape.batch, shape.kv_heads, shape.group * shape.seqlen_q, 1, dtype=dtype)
    lse = terms.sink_column(rows).reshape(shape.batch, shape.heads, shape.seqlen_q)
    return q.new_zeros(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v, dtype=dtype), lse


def attention_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int = UNLIMITED,
    window_right: int = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    philox: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
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
        attention_chunk: c above 0: query i sees keys of its own chunk alone, which begins at
            (i + seqlen_k - seqlen_q) // c * c, rounded down; 0 is none.
        softcap: c above 0 makes of a scaled score s c tanh(s / c); 0 is none.
        alibi_slopes: (heads,) or (batch, heads): the bias -slope |i + seqlen_k - seqlen_q - j| is added after that.
        sinks: (heads,): a logit of each head that joins the sum of a row and has no value.
        qv: (batch, seqlen_q, heads, head_dim_v), or None: a second query. Scores are then softmax_scale times
            Q K^T + QV V^T, and softmax_scale is 1/sqrt(head_dim + head_dim_v) by default.
        dropout_p: how much of P is dropped (:func:`hopper_attention.reference.dropout_mask`). The LSE is that without.
        philox: int64 (2,), what the mask is made of; needed where dropout_p is not 0.
        score_mod, mask_mod: as of :func:`hopper_attention.flash_attn_func`, called on tensors that broadcast to
            (batch, kv_heads, rows, seqlen_k). They may do what torch can; indices have to lie in a tensor.

    Returns:
        out float64 (batch, seqlen_q, heads, head_dim_v) and the log-sum-exp, natural log, float64
        (batch, heads, seqlen_q), which includes the sink. A query that sees no key gives 0 and its sink, or -inf.
        Differentiable by torch, with respect to slopes, sinks and what the functions read too.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together.
        TypeError: q, k and v differ in dtype.
    """

    def attend(
        q_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = chunk.terms.scores(q_rows @ keys.mT, chunk.rows, chunk.cols)
        sinks_of_rows = chunk.terms.sink_column(q_rows)
        scores = masked(scores, chunk.visible)
        row_max = torch.maximum(scores.detach().amax(-1, keepdim=True), sinks_of_rows.detach())
        shift = row_max.masked_fill(row_max == -math.inf, 0.0)
        p = torch.exp(scores - shift)
        row_sum = p.sum(-1, keepdim=True) + torch.exp(sinks_of_rows - shift)
        no_key = row_sum == 0
        row_sum = row_sum.masked_fill(no_key, 1.0)
        p = dropped(p, chunk.kept, chunk.factor)
        # The maximum of a row without keys and sink is -inf, and so is its LSE.
        return masked_matmul(p, values, chunk.visible) / row_sum, row_sum.log() + row_max

    sides = causal, window_left, window_right, attention_chunk
    options = softmax_scale, softcap, alibi_slopes, sinks, dropout_p, philox
    q, k = join_qv(q, k, v, qv)
    return _by_query_chunks(q, k, v, sides, options, (score_mod, mask_mod), torch.float64, attend)


def attention_standard(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_left: int = UNLIMITED,
    window_right: int = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    philox: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> torch.Tensor:
    """Standard attention at the input dtype: the "Baseline FP16" of the paper's section 4.3.

    As plain PyTorch computes ``softmax(q @ k.T * scale) @ v``: the scores, the scaled scores, the
    probabilities and the output are each rounded to the input dtype. Products accumulate in float32, and the
    softmax is computed in float32 from the rounded scores. Arguments and errors are those of
    :func:`attention_naive`.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q; 0 for a query that sees no key.
    """
    dtype = q.dtype
    accum = torch.float64 if dtype == torch.float64 else torch.float32

    def attend(
        q_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms = chunk.terms
        scores = round_to(round_to(q_rows @ keys.mT, dtype) * terms.scale, dtype)
        if terms.changes_scores:
            scores = round_to(terms.capped(scores), dtype)
            scores = round_to(terms.biased(scores, chunk.rows, chunk.cols), dtype)
            scores = round_to(terms.functions.changed(scores, chunk.rows, chunk.cols), dtype)
        scores, seqlen_k = masked(scores, chunk.visible), keys.shape[2]
        if sinks is not None:
            scores = torch.cat([scores, round_to(terms.sink_column(q_rows), dtype)], -1)
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        p = round_to(torch.softmax(scores, -1), dtype).masked_fill(nothing, 0.0)[..., :seqlen_k]
        weights = round_to(dropped(p, chunk.kept, chunk.factor), dtype)
        return masked_matmul(weights, values, chunk.visible), p.sum(-1, keepdim=True)

    sides = causal, window_left, window_right, attention_chunk
    options = softmax_scale, softcap, alibi_slopes, sinks, dropout_p, philox
    q, k = join_qv(q, k, v, qv)
    return _by_query_chunks(q, k, v, sides, options, (score_mod, mask_mod), accum, attend)[0].to(dtype)
