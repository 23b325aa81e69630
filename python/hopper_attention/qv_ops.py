"""The operators of attention with ``qv``: ``hopper_attention::forward_qv`` and ``::forward_qv_varlen``.

As those of :mod:`hopper_attention.ops`: functional, with shapes on fake tensors.
"""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

import torch
from torch import Tensor

from hopper_attention.launch.qv import QvInputs, run_packed_qv, run_qv
from hopper_attention.lengths import Lengths
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import Scores


@torch.library.custom_op("hopper_attention::forward_qv", mutates_args=())
def forward_qv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors with a second query: out (b, sq, h, dv) in the dtype of q, lse float32 (b, h, sq).

    ``causal``, the sides of the window and the chunk are those of a ``MaskSpec``; ``softcap``, ``alibi_slopes`` and
    ``sinks`` those of ``Scores``.
    """
    sides = MaskSpec(causal, window_left, window_right, attention_chunk).sides
    options = softmax_scale, causal, backend, sm_margin, sides
    return run_qv(QvInputs(q, k, v, qv), *options, Scores.of(softcap, alibi_slopes, sinks))


@forward_qv.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    return qv.new_empty(qv.shape), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("hopper_attention::forward_qv_varlen", mutates_args=())
def forward_qv_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``forward_qv`` of sequences of different lengths: out (total_q, h, dv), lse float32 (h, total_q)."""
    sides = MaskSpec(causal, window_left, window_right, attention_chunk).sides
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    options = softmax_scale, causal, backend, sm_margin, sides
    return run_packed_qv(QvInputs(q, k, v, qv), lengths, *options, Scores.of(softcap, alibi_slopes, sinks))


@forward_qv_varlen.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    sm_margin: int,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    total_q, heads, _ = q.shape
    return qv.new_empty(qv.shape), q.new_empty((heads, total_q), dtype=torch.float32)
