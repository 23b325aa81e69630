"""Attention of sequences of different lengths in one tensor: the tiled reference, once for each sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences

import torch

from hopper_attention.functions import NO_CAPTURED, CapturedFunctions
from hopper_attention.masks import UNLIMITED
from hopper_attention.one_key import differentiate_one_key
from hopper_attention.reference.joined import join_qv
from hopper_attention.reference.tiled import tiled_forward
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.reference.tiles import Span, accumulator_dtype

SequenceSpans = Sequences[tuple[Span, Span]]
"""Of each sequence the rows in q, and those in k and v."""


@torch.no_grad()
def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: SequenceSpans,
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
    functions: CapturedFunctions = NO_CAPTURED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`hopper_attention.reference.tiled_forward` of each sequence.

    Args:
        q: (total_q, heads, head_dim).
        k, v: (total_k, kv_heads, head_dim) and (..., head_dim_v).
        sequences: the rows of each sequence, which do not overlap. All other rows are never read.
        causal, softmax_scale, window_left, window_right, attention_chunk, softcap, sinks, dropout_p,
            philox, functions: as there.
        alibi_slopes: as there; the batch of (batch, heads) are the sequences.
        qv: (total_q, heads, head_dim_v), or None: a second query, which multiplies V.

    Returns:
        out (total_q, heads, head_dim_v) and the LSE (heads, total_q), float32 (float64 for float64 inputs); 0 and -inf
        for rows that are of no sequence. Rows that see no key have 0 and their sink, or -inf.
    """
    q, k = join_qv(q, k, v, qv)
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=accumulator_dtype(q.dtype))
    for b, (rows, keys) in enumerate(sequences):
        q_s, k_s, v_s = q[None, rows.slice], k[None, keys.slice], v[None, keys.slice]
        results = tiled_forward(
            q_s,
            k_s,
            v_s,
            causal=causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            attention_chunk=attention_chunk,
            softcap=softcap,
            alibi_slopes=_slopes_of(alibi_slopes, b),
            sinks=sinks,
            dropout_p=dropout_p,
            philox=philox,
            first_batch=b,
            functions=functions,
        )
        out[rows.slice], lse[:, rows.slice] = (x[0] for x in results)
    return out, lse


@torch.no_grad()
def varlen_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: SequenceSpans,
    *,
    causal: bool,
    softmax_scale: float,
    window_left: int = UNLIMITED,
    window_right: int = UNLIMITED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    philox: torch.Tensor | None = None,
    functions: CapturedFunctions = NO_CAPTURED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`varlen_forward`, sequence by sequence as for a batch of one.

    Args:
        dout: gradient of out, (total_q, heads, head_dim_v).
        dlse: gradient of lse, (heads, total_q); None means zero.
        q, k, v, sequences: the inputs of the forward pass.
        out, lse: its results.
        causal, softmax_scale, window_left, window_right, attention_chunk, softcap, alibi_slopes, sinks, dropout_p,
            philox, functions: as there.

    Returns:
        dq, dk, dv with the shapes and dtype of q, k, v, contiguous; 0 for rows of no sequence.
    """
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    for b, (rows, keys) in enumerate(sequences):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        q_s, dout_s, out_s = (x[None, rows.slice] for x in (q, dout, out))
        k_s, v_s = (x[None, keys.slice] for x in (k, v))
        lse_s = lse[None, :, rows.slice]
        dlse_s = None if dlse is None else dlse[None, :, rows.slice]
        is_plain_sum = sinks is None and not dropout_p and not functions
        if keys.stop - keys.start == 1 and is_plain_sum:
            gradients = differentiate_one_key(dout_s, dlse_s, q_s, k_s, v_s, lse_s, softmax_scale, softcap)
        else:
            gradients = tiled_backward(
                dout_s,
                dlse_s,
                q_s,
                k_s,
                v_s,
                out_s,
                lse_s,
                causal=causal,
                softmax_scale=softmax_scale,
                window_left=window_left,
                window_right=window_right,
                attention_chunk=attention_chunk,
                softcap=softcap,
                alibi_slopes=_slopes_of(alibi_slopes, b),
                dropout_p=dropout_p,
                philox=philox,
                first_batch=b,
                functions=functions,
            )
        for whole, span, part in zip((dq, dk, dv), (rows, keys, keys), gradients, strict=True):
            whole[span.slice] = part[0]
    return dq, dk, dv


def _slopes_of(alibi_slopes: torch.Tensor | None, sequence: int) -> torch.Tensor | None:
    """(heads,) slopes of a sequence, from (heads,) or (batch, heads)."""
    return alibi_slopes[sequence] if alibi_slopes is not None and alibi_slopes.dim() > 1 else alibi_slopes
