"""The forward pass as the Hopper kernel does it, tile by tile, and its autograd function.

The order of the tiles, the base-2 online softmax and every rounding are those of the kernel, so this is at
once the CPU backend and the emulator that kernels are checked against. Memory is linear in the sequence
lengths.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from hopper_attention.autocast import ignores_autocast
from hopper_attention.functions import NO_CAPTURED, CapturedFunctions, MaskMod, ScoreMod, trace_functions
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference.dropout import DropoutMask, dropped
from hopper_attention.reference.function_terms import terms_of
from hopper_attention.reference.joined import join_qv
from hopper_attention.reference.score_terms import ScoreTerms
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.reference.tiles import (
    LOG2_E,
    Mask,
    OnlineSoftmax,
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
from hopper_attention.scores import check_slopes_are_constant, sinks_gradient
from hopper_attention.shapes import attention_shape


@torch.no_grad()
@ignores_autocast
def tiled_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    philox: torch.Tensor | None = None,
    first_batch: int = 0,
    functions: CapturedFunctions = NO_CAPTURED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention_tiled` without autograd; the results are new contiguous tensors.

    ``first_batch`` is the number of the first entry of the batch to dropout, which has a mask for each, and to the
    user's ``functions``.
    """
    q, k = join_qv(q, k, v, qv)
    shape = attention_shape(q, k, v)
    check_tiles(tile_m=tile_m, tile_n=tile_n)
    accum = accumulator_dtype(q.dtype)
    q_rows = fold_heads(q, shape.kv_heads, accum)
    keys, values = (fold_heads(x, shape.kv_heads, accum).squeeze(2) for x in (k, v))
    scale = default_scale(softmax_scale, shape.head_dim)
    user = terms_of(functions, shape, q.device, first_batch)
    terms = ScoreTerms.of(shape, accum, scale, softcap, alibi_slopes, sinks, user)
    mask = Mask(shape.seqlen_q, shape.seqlen_k, causal, window_left, window_right, attention_chunk)
    drops = DropoutMask.of(dropout_p, philox, shape.batch, shape.heads, first_batch)
    out = q.new_empty(*q_rows.shape[:-1], shape.head_dim_v)
    lse = q_rows.new_empty(q_rows.shape[:-1])

    for rows in spans(0, shape.seqlen_q if shape.heads else 0, tile_m):
        q_i = query_tile(q_rows, rows)
        softmax = OnlineSoftmax(q_i)
        acc_o = q_i.new_zeros(*q_i.shape[:-1], shape.head_dim_v)
        for cols in mask.key_tiles(rows, tile_n):
            k_j, v_j = keys[:, :, cols.slice], values[:, :, cols.slice]
            visible = terms.visible(mask.visible(rows, cols, shape.group, q.device), rows, cols)
            x = terms.scores_log2(q_i @ k_j.mT, rows, cols)
            p, rescale = softmax.step(masked(x, visible))
            softmax.add(p.sum(-1, keepdim=True), rescale)
            weights = round_to(p, q.dtype)
            if drops is not None:
                weights = dropped(weights, drops.of_group(rows, cols, shape.kv_heads))
            acc_o = acc_o * rescale + masked_matmul(weights, v_j, visible)
        if sinks is not None:
            column = terms.sink_column(q_i) * LOG2_E
            # Of an infinite sink exponents are inf - inf: it has all of the row's weight.
            has_all = column == math.inf
            p, rescale = softmax.step(column)
            softmax.add(p.masked_fill(has_all, 1.0), rescale)
            acc_o = acc_o * rescale
        o_i = softmax.normalize(acc_o) * (1.0 if drops is None else drops.factor)
        out[:, :, :, rows.slice] = o_i.unflatten(2, (shape.group, -1)).to(q.dtype)
        lse[:, :, :, rows.slice] = softmax.lse().unflatten(2, (shape.group, -1))
    return unfold_heads(out, q.dtype), lse.flatten(1, 2)


class TiledAttentionGradient(torch.autograd.Function):
    """The backward pass as a step of its own, so that differentiating it raises instead of giving zero."""

    @staticmethod
    def forward(
        ctx: Any, options: dict[str, Any], dout: torch.Tensor, dlse: torch.Tensor | None, *saved: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tiled_backward(dout, dlse, *saved, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(
            "double backward: the tiled reference is differentiable once; use attention_naive, which torch "
            "differentiates any number of times"
        )


class TiledAttention(torch.autograd.Function):
    """Forward and backward by tiles; gradients flow from the output and from the LSE."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        softmax_scale: float | None,
        tile_m: int,
        tile_n: int,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        dropout_p: float,
        philox: torch.Tensor | None,
        functions: CapturedFunctions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.options = {"causal": causal, "softmax_scale": softmax_scale, "tile_m": tile_m, "tile_n": tile_n}
        ctx.options |= {"window_left": window_left, "window_right": window_right}
        ctx.options |= {"attention_chunk": attention_chunk}
        ctx.options |= {"softcap": softcap, "alibi_slopes": alibi_slopes}
        ctx.options |= {"dropout_p": dropout_p, "philox": philox, "functions": functions}
        ctx.set_materialize_grads(False)
        out, lse = tiled_forward(q, k, v, **ctx.options, sinks=sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout, dlse = gradients
        dout = torch.zeros_like(out) if dout is None else dout
        dqkv = TiledAttentionGradient.apply(ctx.options, dout, dlse, q, k, v, out, lse)
        dsinks = None if sinks is None else sinks_gradient(dout, dlse, out, lse, sinks)
        return *dqkv, *[None] * 9, dsinks, None, None, None


def attention_tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    philox: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by tiles, rounded where the 16-bit Hopper kernel rounds (Algorithm 1 of the paper).

    Each tile of ``tile_m`` queries visits the tiles of ``tile_n`` keys from the last one it sees down to the
    first. S = Q K^T and O accumulate in float32; P is rounded to the input dtype before P V, the row sum is
    taken from the unrounded P, and the output is rounded once.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64, on any device.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: factor of the scores; 1/sqrt(head_dim) by default.
        tile_m: queries of a tile.
        tile_n: keys of a tile.
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
        score_mod, mask_mod: as of :func:`hopper_attention.flash_attn_func`.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q, and the log-sum-exp, natural log, float32
        (float64 for float64 inputs), (batch, heads, seqlen_q), which includes the sink. A query that sees no key gives
        0 and its sink, or -inf. Both are differentiable, once, but for the slopes.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together, or a tile size is below 1.
        TypeError: q, k and v differ in dtype, or it is not one of the four above.
        NotImplementedError: the gradients are themselves differentiated, or that of the slopes is wanted.
    """
    check_slopes_are_constant(alibi_slopes)
    q, k = join_qv(q, k, v, qv)
    options = causal, softmax_scale, tile_m, tile_n, window_left, window_right, attention_chunk
    functions = NO_CAPTURED
    if score_mod is not None or mask_mod is not None:
        functions = trace_functions(score_mod, mask_mod)
    result = TiledAttention.apply(
        q, k, v, *options, softcap, alibi_slopes, sinks, dropout_p, philox, functions
    )
    return cast("tuple[torch.Tensor, torch.Tensor]", result)
