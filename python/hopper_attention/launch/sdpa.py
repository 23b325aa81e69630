"""Runs a problem on torch's fused attention, dense or packed; packed sequences one after another.

The launchers have the arguments of those of the reference, whose place they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.lengths import Lengths, read_sequences
from hopper_attention.masks import FULL_SIDES
from hopper_attention.one_key import differentiate_one_key
from hopper_attention.scores import NO_SCORES, Scores
from hopper_attention.sdpa.attention import attend, differentiate
from hopper_attention.sdpa.terms import Terms


@dataclass(frozen=True)
class TorchLaunch:
    """Of dense tensors, on their device."""

    causal: bool
    default_scale: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *window: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        scale = self.default_scale if softmax_scale is None else softmax_scale
        left, right, chunk = window or FULL_SIDES
        terms = Terms(self.causal, scale, (left, right, chunk), *scores.changes)
        return attend(q, k, v, terms, wants_lse)


@dataclass(frozen=True)
class TorchVarlen:
    """Of packed sequences: a ``VarlenLaunch``. It reads the lengths, and checks them."""

    causal: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        wants_lse: bool,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
        sides = window_left, window_right, attention_chunk
        terms = Terms(self.causal, softmax_scale, sides, *scores.changes)
        for b, (rows, keys) in enumerate(read_sequences(lengths, q.shape[0], k.shape[0])):
            part = q[None, rows.slice], k[None, keys.slice], v[None, keys.slice]
            results = attend(*part, terms.of_sequence(b), wants_lse)
            out[rows.slice], lse[:, rows.slice] = (x[0] for x in results)
        return out, lse


@dataclass(frozen=True)
class TorchVarlenGradient:
    """The gradient of ``TorchVarlen``: a ``VarlenGradientLaunch``."""

    causal: bool

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        sides = window_left, window_right, attention_chunk
        terms = Terms(self.causal, softmax_scale, sides, *scores.changes)
        for b, (rows, keys) in enumerate(read_sequences(lengths, q.shape[0], k.shape[0])):
            if rows.start == rows.stop or keys.start == keys.stop:
                continue
            q_s, dout_s, out_s = (x[None, rows.slice] for x in (q, dout, out))
            k_s, v_s = (x[None, keys.slice] for x in (k, v))
            dlse_s = None if dlse is None else dlse[None, :, rows.slice]
            lse_s = lse[None, :, rows.slice]
            if keys.stop - keys.start == 1 and scores.sinks is None:
                parts = differentiate_one_key(
                    dout_s, dlse_s, q_s, k_s, v_s, lse_s, softmax_scale, scores.softcap
                )
            else:
                tensors = dout_s, dlse_s, q_s, k_s, v_s, out_s, lse_s
                parts = differentiate(*tensors, terms.of_sequence(b))
            for whole, span, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                whole[span.slice] = part[0]
        return dq, dk, dv
