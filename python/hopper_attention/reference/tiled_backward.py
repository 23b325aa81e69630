"""The backward pass of attention by tiles: P is recomputed from the log-sum-exp, never stored."""

from __future__ import annotations

import math

import torch

from hopper_attention.autocast import ignores_autocast
from hopper_attention.functions import NO_CAPTURED, CapturedFunctions
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference.dropout import DropoutMask, dropped
from hopper_attention.reference.function_terms import terms_of
from hopper_attention.reference.score_terms import ScoreTerms
from hopper_attention.reference.tiles import (
    LOG2_E,
    Mask,
    accumulator_dtype,
    check_tiles,
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


@torch.no_grad()
@ignores_autocast
def tiled_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    tile_m: int = 128,
    tile_n: int = 128,
    window_left: int = UNLIMITED,
    window_right: int = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    philox: torch.Tensor | None = None,
    first_batch: int = 0,
    functions: CapturedFunctions = NO_CAPTURED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`attention_tiled`, tile by tile (the paper's appendix B.1, Algorithm 3).

    With P = exp(S - LSE) and D = rowsum(dO * O) - dLSE, dS = P * (dO V^T - D), times 1 - tanh^2 under a softcap and
    the slope of a score function; then
    dV = P^T dO, dQ = scale * dS K and dK = scale * dS^T Q. P and dS are rounded to the input dtype before these
    products, which accumulate in float32 (float64 for float64 inputs), over the query heads of a group too. Memory is
    linear in the sequence lengths.

    Args:
        dout: gradient of out, (batch, seqlen_q, heads, head_dim_v).
        dlse: gradient of lse, (batch, heads, seqlen_q); None means zero.
        q, k, v: the inputs of the forward pass.
        out, lse: its results.
        causal, softmax_scale, tile_m, tile_n, window_left, window_right, attention_chunk: as in the forward pass; the
            tiles may differ.
        softcap, alibi_slopes, functions: as in the forward pass. Sinks are in its LSE, and need not be known.
        dropout_p, philox, first_batch: as in the forward pass. P of dV, and dO V^T, are dropped as P was there.

    Returns:
        dq, dk, dv with the shapes and dtype of q, k, v: new contiguous tensors. A query that sees no key
        gives and receives zero.

    Raises:
        ValueError, TypeError: as the forward pass.
    """
    shape = attention_shape(q, k, v)
    check_tiles(tile_m=tile_m, tile_n=tile_n)
    accum = accumulator_dtype(q.dtype)
    scale = default_scale(softmax_scale, shape.head_dim)
    user = terms_of(functions, shape, q.device, first_batch)
    terms = ScoreTerms.of(shape, accum, scale, softcap, alibi_slopes, functions=user)
    mask = Mask(shape.seqlen_q, shape.seqlen_k, causal, window_left, window_right, attention_chunk)
    drops = DropoutMask.of(dropout_p, philox, shape.batch, shape.heads, first_batch)
    factor = 1.0 if drops is None else drops.factor
    q_rows, do_rows, o_rows = (fold_heads(x, shape.kv_heads, accum) for x in (q, dout, out))
    keys, values = (fold_heads(x, shape.kv_heads, accum).squeeze(2) for x in (k, v))
    delta = (do_rows * o_rows).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse.view_as(delta)
    # +inf in place of the LSE of a row without keys makes its P zero instead of NaN.
    lse_log2 = (lse.to(accum) * LOG2_E).masked_fill(lse == -math.inf, math.inf).view_as(delta)

    dq, dk, dv = torch.zeros_like(q_rows), torch.zeros_like(keys), torch.zeros_like(values)
    for cols in spans(0, shape.seqlen_k, tile_n):
        k_j, v_j = keys[:, :, cols.slice], values[:, :, cols.slice]
        for rows in mask.query_tiles(cols, tile_m):
            q_i, do_i = query_tile(q_rows, rows), query_tile(do_rows, rows)
            visible = terms.visible(mask.visible(rows, cols, shape.group, q.device), rows, cols)
            seen_by = None if visible is None else visible.mT
            products = q_i @ k_j.mT
            x = masked(terms.scores_log2(products, rows, cols), visible)
            p = torch.exp2(x - query_tile(lse_log2, rows))
            kept = None if drops is None else drops.of_group(rows, cols, shape.kv_heads)
            dp = dropped(do_i @ v_j.mT, kept, factor)
            ds = p * (dp - query_tile(delta, rows))
            ds = terms.through_changes(ds, products, rows, cols)
            ds = masked(ds, visible, fill=0.0)
            p, ds = dropped(round_to(p, q.dtype), kept), round_to(ds, q.dtype)
            dv[:, :, cols.slice] += masked_matmul(p.mT, do_i, seen_by)
            dk[:, :, cols.slice] += masked_matmul(ds.mT, q_i, seen_by)
            dq[:, :, :, rows.slice] += masked_matmul(ds, k_j, visible).unflatten(2, (shape.group, -1))
    return (
        unfold_heads(dq * scale, q.dtype),
        unfold_heads((dk * scale).unsqueeze(2), q.dtype),
        unfold_heads((dv * factor).unsqueeze(2), q.dtype),
    )
