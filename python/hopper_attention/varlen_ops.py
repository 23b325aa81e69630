"""The operators of sequences of different lengths: ``hopper_attention::forward_varlen`` and ``::backward_varlen``.

As those of :mod:`hopper_attention.ops`: functional, with shapes on fake tensors. No tensor is read to know a shape.
"""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

import torch
from torch import Tensor

from hopper_attention.backends import target_of
from hopper_attention.checks import FP8_OUT_DTYPE
from hopper_attention.fp8_rules import serves_in_e4m3
from hopper_attention.launch.base import without_rows
from hopper_attention.launch.dequantized import attend_packed_dequantized
from hopper_attention.launch.few_packed_fp8 import find_packed_with_descales
from hopper_attention.launch.packed_fp8 import attend_packed
from hopper_attention.launch.varlen import run_varlen, run_varlen_backward
from hopper_attention.lengths import Lengths
from hopper_attention.masks import MaskSpec
from hopper_attention.packed_quantization import from_packed_descales
from hopper_attention.scores import NO_SCORES, Scores
from hopper_attention.value_parts import Gradients, attend_in_parts, differentiate_in_parts, needs_parts


@torch.library.custom_op("hopper_attention::forward_varlen", mutates_args=())
def forward_varlen(
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
    causal: bool,
    backend: str | None,
    sm_margin: int,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of 16-bit tensors: out (total_q, h, dv) in the dtype of q, lse float32 (h, total_q).

    ``deterministic`` is for the gradient. ``causal``, the sides of the window and the chunk are those of a
    ``MaskSpec``; from ``softcap`` on they are those of ``Scores``.
    """
    window = MaskSpec(causal, window_left, window_right, attention_chunk).sides
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    scores = Scores.of(softcap, alibi_slopes, sinks, dropout_p, philox)
    options = softmax_scale, causal, backend, sm_margin
    return run_varlen(q, k, v, lengths, *options, window=window, scores=scores)


@forward_varlen.register_fake
def _(
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
    causal: bool,
    backend: str | None,
    sm_margin: int,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    total_q, heads, _ = q.shape
    out = q.new_empty((total_q, heads, v.shape[2]))
    return out, q.new_empty((heads, total_q), dtype=torch.float32)


@torch.library.custom_op("hopper_attention::forward_varlen_fp8", mutates_args=())
def forward_varlen_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
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
    exact_lse: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of e4m3 tensors, with (batch, kv_heads) descales: out bfloat16 (total_q, h, dv), lse float32.

    ``exact_lse`` is that of an ``Fp8AttentionProblem``. From ``softcap`` to ``sinks`` the arguments are those of
    ``Scores``, with which 16 bits compute unless ``serves_in_e4m3``. Without ``wants_lse`` the lse is (h, 0), and the
    kernel may have another.
    """
    mask = MaskSpec(causal, window_left, window_right, attention_chunk)
    window = mask.sides
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    descales = q_descale, k_descale, v_descale
    scores = Scores.of(softcap, alibi_slopes, sinks)
    is_changed = scores is not NO_SCORES
    of_kernel = target_of(q.device), mask, scores.kind, backend, exact_lse
    if is_changed and not serves_in_e4m3(q.shape, v.shape, *of_kernel):
        whole = from_packed_descales(q, k, v, descales, lengths, FP8_OUT_DTYPE)
        options_16 = softmax_scale, causal, backend, sm_margin, window, scores
        out, lse = attend_packed_dequantized(whole, *options_16)
        return out, lse if wants_lse else without_rows(lse)

    few = find_packed_with_descales((q, k, v), lengths, mask, backend, sm_margin, not exact_lse, scores.kind)
    if few is not None:
        out, lse = few(
            *(q, k, v, *lengths, softmax_scale, *window),
            wants_lse=wants_lse,
            descales=descales,
            scores=scores,
        )
        return out, lse if wants_lse else q.new_empty((q.shape[1], 0), dtype=torch.float32)

    def attend_to(values: Tensor) -> tuple[Tensor, Tensor]:
        parts = from_packed_descales(q, k, values, descales, lengths, FP8_OUT_DTYPE)
        options = softmax_scale, causal, backend, False, wants_lse, sm_margin, window, exact_lse, scores
        return attend_packed(parts, *options)

    out, lse = attend_in_parts(v, attend_to) if needs_parts(v.shape[2]) else attend_to(v)
    return out, lse if wants_lse else without_rows(lse)


@forward_varlen_fp8.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
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
    exact_lse: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    total_q, heads, _ = q.shape
    out = q.new_empty((total_q, heads, v.shape[2]), dtype=FP8_OUT_DTYPE)
    return out, q.new_empty((heads, total_q if wants_lse else 0), dtype=torch.float32)


@torch.library.custom_op("hopper_attention::backward_varlen", mutates_args=())
def backward_varlen(
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
    causal: bool,
    backend: str | None = None,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``forward_varlen``: dq, dk, dv with the shapes and dtype of q, k, v. No ``dlse`` means zero.

    That of the sinks is ``hopper_attention.scores.sinks_gradient``. ``backend`` is what the forward was asked for.
    ``deterministic``, or torch.use_deterministic_algorithms, asks for the same bits in every run. ``lse`` is that of
    these keys alone; where other keys have a part in it give ``sinks`` too, zeros will do.
    """
    window = MaskSpec(causal, window_left, window_right, attention_chunk).sides
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    in_order = deterministic or torch.are_deterministic_algorithms_enabled()
    scores = Scores.of(softcap, alibi_slopes, sinks, dropout_p, philox)
    options = softmax_scale, causal, backend, in_order, window, scores

    def differentiate(dout: Tensor, dlse: Tensor | None, v: Tensor, out: Tensor) -> Gradients:
        return run_varlen_backward(dout, dlse, q, k, v, out, lse, lengths, *options)

    if needs_parts(v.shape[-1]):
        return differentiate_in_parts(dout, dlse, v, out, differentiate)
    return differentiate(dout, dlse, v, out)


@backward_varlen.register_fake
def _(
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
    causal: bool,
    backend: str | None = None,
    deterministic: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    philox: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv
