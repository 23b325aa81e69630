"""The FP8 forward pass as the Hopper kernel does it, tile by tile, and the paper's FP8 baseline."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hopper.quantize.config import E4M3_MAX
from hopper_attention.autocast import without_autocast
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.quantization_rules import (
    check_sources,
    quantize_by_torch,
    quantize_with,
    to_e4m3,
    with_numbers,
)
from hopper_attention.quantized import Fp8Quantization, QuantizedQKV, QuantizedTensor, row_scale
from hopper_attention.reference.tiles import (
    LOG2_E,
    Mask,
    OnlineSoftmax,
    Span,
    default_scale,
    fold_heads,
    masked,
    masked_matmul,
    query_tile,
    spans,
    unfold_heads,
)
from hopper_attention.shapes import attention_shape
from hopper_attention.value_mean_rules import mean_worth_subtracting

P_EXPONENT = 8
"""P in [0, 1] times 2^8 uses e4m3's range up to 256 of 448: fewer of its small values become subnormal."""

ROUNDED_P_EXPONENT = 7 + math.log2(1.285)
"""Of a largest P that is rounded by 2.7 %, which is what e4m3 rounds a value by on average (RMS)."""

TILE_QUERIES = 128
"""Queries of a tile on a CPU; it changes the result by the rounding of float32 sums alone."""

TILE_SCORES = 1 << 22
"""Scores of a tile elsewhere, over batch and heads. A GPU is done with a small tile before the next one is queued."""


def queries_of_tile(heads: int, block_k: int, device: torch.device) -> int:
    """Queries of a tile: ``heads`` (of the whole batch) times as many rows meet ``block_k`` keys."""
    if device.type == "cpu":
        return TILE_QUERIES
    return max(1, TILE_SCORES // max(1, heads * block_k * TILE_QUERIES)) * TILE_QUERIES


def _check_blocks(parts: QuantizedQKV, block_k: int) -> None:
    """Raise ValueError unless every tile of keys has one scale of K and one of V."""
    for name, tensor in (("k", parts.k), ("v", parts.v)):
        if tensor.block % block_k and tensor.block < tensor.shape[1]:
            raise ValueError(
                f"{name} has blocks of {tensor.block} rows, allowed: multiples of {block_k}, quantization.block_k"
            )


def _tile_scale(tensor: QuantizedTensor, span: Span) -> torch.Tensor:
    """The scale of a tile of keys, (b, h, 1, 1)."""
    return tensor.scale[:, :, span.start // tensor.block, None, None]


def _split_scales(v: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor]:
    """(v with the scales of its blocks, the factor of each head's output, (b, h)).

    A head's only scale is a factor, whatever its sign. Scales of blocks are positive.
    """
    if v.scale.shape[-1] == 1:
        return replace(v, scale=torch.ones_like(v.scale)), v.scale[..., 0]
    return v, v.scale.new_ones(v.scale.shape[:2])


@torch.no_grad()
def _forward(
    parts: QuantizedQKV,
    causal: bool,
    softmax_scale: float | None,
    out_dtype: torch.dtype,
    p_exponent: float,
    window: Sides,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile loop; P is multiplied by 2^p_exponent before it is rounded to e4m3."""
    q, k, (v, factor) = parts.q, parts.k, _split_scales(parts.v.row_major())
    shape = attention_shape(q.data, k.data, v.data)
    block_k = parts.quantization.keys_per_block(shape.head_dim, shape.head_dim_v, shape.seqlen_k)
    _check_blocks(parts, block_k)
    q_rows = fold_heads(q.data, shape.kv_heads, torch.float32)
    keys, values = (fold_heads(x.data, shape.kv_heads, torch.float32).squeeze(2) for x in (k, v))
    scale_log2 = default_scale(softmax_scale, shape.head_dim) * LOG2_E
    of_rows = row_scale(q.scale, q.block, shape.seqlen_q) * scale_log2
    q_scale = fold_heads(of_rows, shape.kv_heads, torch.float32)
    mask = Mask(shape.seqlen_q, shape.seqlen_k, causal, *window)
    out = q_rows.new_zeros(*q_rows.shape[:-1], shape.head_dim_v)
    lse = q_rows.new_full(q_rows.shape[:-1], -torch.inf)
    if shape.seqlen_k == 0:
        return unfold_heads(out, out_dtype), lse.flatten(1, 2)

    tile = queries_of_tile(shape.batch * shape.heads, block_k, q_rows.device)
    for rows in spans(0, shape.seqlen_q if shape.heads else 0, tile):
        q_i, s_q = query_tile(q_rows, rows), query_tile(q_scale, rows)
        softmax = OnlineSoftmax(q_i)
        acc_o = q_i.new_zeros(*q_i.shape[:-1], shape.head_dim_v)
        for cols in mask.key_tiles(rows, block_k):
            k_j, v_j = keys[:, :, cols.slice], values[:, :, cols.slice]
            visible = mask.visible(rows, cols, shape.group, q_i.device)
            s_v = _tile_scale(v, cols)
            x = q_i @ k_j.mT * (s_q * _tile_scale(k, cols))
            p, rescale = softmax.step(masked(x, visible), p_exponent)
            softmax.add(p.sum(-1, keepdim=True), rescale)
            acc_o = acc_o * rescale + masked_matmul(to_e4m3(p).float(), v_j, visible) * s_v
        o_i = softmax.normalize(acc_o) * factor[:, :, None, None]
        out[:, :, :, rows.slice] = o_i.unflatten(2, (shape.group, -1))
        lse[:, :, :, rows.slice] = softmax.lse(p_exponent).unflatten(2, (shape.group, -1))
    return unfold_heads(out, out_dtype), lse.flatten(1, 2)


def attention_tiled_fp8(
    parts: QuantizedQKV,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    out_dtype: torch.dtype | None = None,
    p_exponent: float = P_EXPONENT,
    window: Sides = FULL_SIDES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on e4m3 inputs, rounded where the FP8 Hopper kernel rounds (the paper's section 3.3).

    Tiles are :func:`queries_of_tile` queries, whatever of them share a scale, by ``block_k`` keys of
    ``parts.quantization``, keys from the last tile down to the first. The scales of the rows of Q and of the tile of K
    multiply S, giving base-2 scores x. P = exp2(x - m + p_exponent), where m is the exact running maximum of x, is
    rounded to e4m3. The row sum is taken from the unrounded P. The product of P with a V block is multiplied by the
    block's scale (the kernel keeps O in units of it, which is the same but for rounding); the output is rounded once.
    Where all of a head's V has one scale, it multiplies the output instead.

    With an integer ``p_exponent`` the P of the key with the largest score is a power of two and stays exact. A kernel
    that measures exponents from an older maximum rounds it like any other: ``ROUNDED_P_EXPONENT`` stands for that.

    This is the attention of the data in ``parts``: V stays rotated and without its mean, if it was.

    S and O accumulate in float32: what FP8 WGMMA drops in its accumulation is not emulated, so this stands for the
    kernel with ``two_level_accumulation`` as for that without. Memory is linear in the sequence lengths.

    Args:
        parts: from :func:`hopper_attention.quantize_qkv` or :func:`hopper_attention.quantization.from_descales`.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: factor of the scores; 1/sqrt(head_dim) by default.
        out_dtype: dtype of out; ``parts.dtype`` by default.
        p_exponent: P of the largest score is 2^p_exponent, at most 448, the largest of e4m3.
        window: (left, right, chunk), query i sees the keys from i + seqlen_k - seqlen_q - left to i + seqlen_k -
            seqlen_q + right; -1 is no limit. With ``causal`` the right side is 0. Of a chunk above 0 it sees its own.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) and the log-sum-exp, natural log, float32 (batch, heads,
        seqlen_q). A query that sees no key gives 0 and -inf. Not differentiable.

    Raises:
        ValueError: shapes do not fit together, a tile of keys would straddle two scales, or P would be too large.
    """
    if not 2.0**p_exponent <= E4M3_MAX:
        raise ValueError(f"p_exponent is {p_exponent}, allowed: at most log2({E4M3_MAX:.0f})")
    with without_autocast(parts.q.data.device):
        return _forward(parts, causal, softmax_scale, out_dtype or parts.dtype, p_exponent, window)


def attention_fp8_per_tensor(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """The "Baseline FP8" of the paper's section 4.3, which it does not define; ours, in words:

    Q, K and V are each quantized to e4m3 with one scale for the whole tensor, without rotation. Attention
    runs tile by tile with an exact running maximum. P = exp(score - running maximum), which lies in [0, 1],
    is cast to e4m3 as it is, with no factor to use the format's range; its row sum is taken before the cast,
    and the output is divided by it at the end. Products accumulate in float32.

    With the scaled cast of :func:`attention_tiled_fp8` the error on the paper's inputs is the same within
    1 %. Casting P after the division by the row sum, as a cast of softmax's output does, makes it about 17 %
    larger.

    Args and errors are those of :func:`hopper_attention.quantize_qkv`; see :func:`attention_tiled_fp8` for the others.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q.
    """
    baseline = Fp8Quantization(rotate=False, granularity="tensor", smooth_v=False)
    c = with_numbers(baseline, check_sources(q, k, v))
    parts = quantize_with(quantize_by_torch, mean_worth_subtracting, q, k, v, c)
    return attention_tiled_fp8(parts, causal=causal, softmax_scale=softmax_scale, p_exponent=0)[0]
