"""Attention of sequences of different lengths that lie one after another in one tensor: FlashAttention-3's function.

The packed forms are in ``varlen_packed``.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from hopper_attention import autograd, checks, features, packed_descaled_again, varlen_again
from hopper_attention.api import Window
from hopper_attention.autocast import cast_inputs
from hopper_attention.checks import FP8_DTYPE, FULL_WINDOW, Result, TensorSpec
from hopper_attention.function_autograd import VarlenCall, attend_with_functions
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.launch.qv import QvInputs, run_packed_qv
from hopper_attention.launch.varlen import check_packed_scores, run_varlen
from hopper_attention.lengths import Lengths, check_kinds, check_packed, specs_of
from hopper_attention.masks import MaskSpec
from hopper_attention.plain_calls import are_plain_constants, is_plain_16_bit_call, wants_only_a_launch
from hopper_attention.qv import check_qv, check_qv_scores, scale_with_qv
from hopper_attention.scores import NO_SCORES, Scores


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    qv: Tensor | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    num_splits: int | None = ...,
    pack_gqa: bool | None = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    mask_mod: MaskMod | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    qv: Tensor | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    num_splits: int | None = ...,
    pack_gqa: bool | None = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    *,
    return_attn_probs: Literal[True],
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    mask_mod: MaskMod | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    qv: Tensor | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    num_splits: int | None = ...,
    pack_gqa: bool | None = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    return_attn_probs: bool = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    mask_mod: MaskMod | None = ...,
    dropout_p: float = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    dropout_p: float = 0.0,
    exact_lse: bool | None = None,
    backend: str | None = None,
) -> Result:
    """:func:`hopper_attention.flash_attn_func` of each of many sequences, which lie one after another in one tensor.

    Sequence b has the rows of q from cu_seqlens_q[b] up to cu_seqlens_q[b + 1], and those of k and v from
    cu_seqlens_k[b] up to cu_seqlens_k[b + 1]. Any sequence may be empty, and no sequence sees another. Rows behind the
    last sequence, and behind the used ones of a sequence, are of none: what they hold is never used, their output is 0
    with an LSE of -inf, sinks or not, and their gradients are 0. 16-bit inputs are differentiable, once.

    The Hopper kernels and those of older GPUs take variable lengths forward and backward. They read the lengths on the
    GPU: a call waits for nothing, other lengths compile nothing, and a CUDA graph takes the lengths that the tensors
    hold when it is replayed. The reference reads them on the host, for which it waits for the GPU.

    Args:
        q: (total_q, heads, head_dim), float16, bfloat16 or float8_e4m3fn; head_dim is a multiple of 8, at most 256.
            Strides are free.
        k: (total_k, kv_heads, head_dim), of q's dtype and device; heads is a multiple of kv_heads.
        v: (total_k, kv_heads, head_dim_v), likewise; head_dim_v is at most 512.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,) on the device of q, contiguous: sums of lengths, from 0 to at
            most total_q and total_k. Their values are checked on a CPU, and on a GPU by nothing.
        max_seqlen_q, max_seqlen_k: no sequence is longer; upper bounds will do.
        seqused_q, seqused_k: int32 (batch,) on the device of q: how many rows of each sequence are used, from its
            first; all by default.
        softmax_scale: factor of the scores, from 1e-37 to 1e5; head_dim**-0.5 by default.
        causal: query i of a sequence sees the keys j <= i + seqlen_k - seqlen_q, of the used lengths.
        q_descale, k_descale, v_descale: for float8_e4m3fn only, as for ``flash_attn_func``: float32 (batch, kv_heads)
            factors, whose batch are the sequences.
        window_size: (left, right), as for ``flash_attn_func``, with the used lengths of each sequence.
        attention_chunk: as there, with the used lengths of each sequence.
        num_splits, pack_gqa, sm_margin, deterministic, softcap, sinks: as for ``flash_attn_func``.
        qv: (total_q, heads, head_dim_v), as there.
        alibi_slopes: as there, with the used lengths of each sequence; the batch of (batch, heads) are the sequences.
        score_mod, mask_mod: as there; indices count from 0 in each sequence, and b is its number.
        dropout_p: as there. A sequence has the mask that it would have in a batch of one length.
        return_attn_probs: also return the LSE.
        exact_lse: for float8_e4m3fn, as there.
        backend: "hopper", "ampere", "torch", "reference", or None to have one chosen.

    Returns:
        out (total_q, heads, head_dim_v), contiguous; with ``return_attn_probs``, (out, lse), where lse is the natural
        log of the sum of exp(scores), float32 (heads, total_q).

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: a feature is not implemented; the message says what to use instead.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    again = causal, deterministic, return_attn_probs, backend, sm_margin
    may_be_8 = (
        qv is alibi_slopes is score_mod is mask_mod is None
        and features.are_plain_hints(num_splits, pack_gqa)
        and not features.is_given(dropout_p, 0.0)
    )
    if sinks is not None and getattr(q, "dtype", None) == FP8_DTYPE:
        sinks = features.sinks_in_float32(q, sinks)
    of_scores = packed_descaled_again.NO_CHANGES
    if sinks is not None or features.is_given(softcap, 0.0):
        of_scores = softcap, sinks
    is_bare = may_be_8 and of_scores is packed_descaled_again.NO_CHANGES
    window = window_size, attention_chunk
    has_descales = q_descale is not None or k_descale is not None or v_descale is not None
    if is_bare and not has_descales:
        found = varlen_again.find_again(q, k, v, lengths, again, window)
        if found is not None:
            results = found((q, k, v), lengths, softmax_scale, again)
            return results if return_attn_probs else results[0]
    descales = (q_descale, k_descale, v_descale)
    flags_8 = causal, deterministic, backend, sm_margin, return_attn_probs, exact_lse
    again_8 = flags_8, window
    if may_be_8 and (has_descales or getattr(q, "dtype", None) == FP8_DTYPE):
        of_call_8 = q, k, v, descales, lengths, softmax_scale
        found_8 = packed_descaled_again.attend(*of_call_8, *again_8, of_scores)
        if found_8 is not None:
            return found_8 if return_attn_probs else found_8[0]
    lengths = check_kinds(lengths)
    features.check_hints(num_splits, pack_gqa)
    scores = NO_SCORES
    if features.is_given(softcap, 0.0) or alibi_slopes is not None or sinks is not None:
        scores = features.resolve_scores(softcap, alibi_slopes, sinks)
    if score_mod is not None or mask_mod is not None:
        scores = features.with_functions(scores, score_mod, mask_mod, qv=qv)
    if features.is_given(dropout_p, 0.0):
        scores = features.with_dropout(scores, dropout_p, q)
    causal = checks.check_flag("causal", causal)
    mask = features.resolve_packed_mask(
        causal, window_size, attention_chunk, lengths.max_seqlen_q, lengths.max_seqlen_k
    )
    checks.check_backend(backend)
    sm_margin = checks.check_sm_margin(sm_margin)
    deterministic = checks.check_flag("deterministic", deterministic)
    return_attn_probs = checks.check_flag("return_attn_probs", return_attn_probs)
    exact_lse = checks.check_exact_lse(exact_lse, return_attn_probs)
    options = (mask, scores, backend, sm_margin, deterministic)
    if qv is not None:
        results = _attend_with_qv(q, k, v, qv, lengths, softmax_scale, descales, options)
        return results if return_attn_probs else results[0]
    if (
        not has_descales
        and wants_only_a_launch(q, k, v)
        and q.is_cuda
        and (scores is NO_SCORES or are_plain_constants(*scores.tensors))
    ):
        flags = mask.causal, backend, sm_margin, return_attn_probs
        results = run_varlen(q, k, v, lengths, softmax_scale, *flags, mask.sides, scores)
        if is_bare:
            varlen_again.remember((q, k, v), lengths, again, window, records_gradient=False)
    else:
        of_fp8 = exact_lse, return_attn_probs
        results = _call_operator(q, k, v, lengths, softmax_scale, descales, options, of_fp8)
        if is_bare and q.is_cuda and is_plain_16_bit_call(q, k, v):
            varlen_again.remember((q, k, v), lengths, again, window, records_gradient=True)
        elif may_be_8 and q.dtype == FP8_DTYPE:
            checked_8 = mask, backend, sm_margin, return_attn_probs, exact_lse
            packed_descaled_again.remember((q, k, v), descales, lengths, *again_8, checked_8, of_scores)
    return results if return_attn_probs else results[0]


def _attend_with_qv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
    lengths: Lengths,
    softmax_scale: float | None,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[MaskSpec, Scores, str | None, int, bool],
) -> tuple[Tensor, Tensor]:
    """``_call_operator`` with a second query."""
    mask, scores, backend, sm_margin, _ = options
    flags = backend, sm_margin
    check_qv_scores(scores.dropout_p != 0.0)
    checks.check_are_tensors(q=q, k=k, v=v, qv=qv)
    if (
        descales == (None, None, None)
        and q.is_cuda
        and wants_only_a_launch(q, k, v)
        and are_plain_constants(qv, *scores.tensors)
    ):
        inputs = QvInputs(q, k, v, qv)
        return run_packed_qv(inputs, lengths, softmax_scale, mask.causal, *flags, mask.sides, scores)
    q, k, v, qv = cast_inputs(q, k, v, qv)
    specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
    check_packed(*specs, specs_of(lengths))
    check_qv(specs[0], specs[2], TensorSpec.of(qv))
    checks.check_descales(q, k, *descales)
    scale = scale_with_qv(softmax_scale, q.shape[2], v.shape[2])
    check_packed_scores(scores, q, lengths)
    return autograd.forward_qv_varlen(
        q, k, v, qv, *lengths, scale, mask.causal, *flags, *mask.sides, *scores.changes
    )


def _call_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    softmax_scale: float | None,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[MaskSpec, Scores, str | None, int, bool],
    of_fp8: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """Through torch's dispatcher.

    ``options`` are the mask, what is done to scores, backend, sm_margin and deterministic; ``of_fp8``, whether the LSE
    is to be exact and whether it is wanted, count for e4m3 tensors alone.
    """
    mask, scores, backend, sm_margin, deterministic = options
    flags = backend, sm_margin, deterministic
    checks.check_are_tensors(q=q, k=k, v=v)
    q, k, v = cast_inputs(q, k, v)
    check_packed(TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v), specs_of(lengths))
    checks.check_descales_of((lengths.cu_seqlens_q.shape[0] - 1, k.shape[1]), q, *descales)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    if scores is not NO_SCORES:
        check_packed_scores(scores, q, lengths)
    if q.dtype == FP8_DTYPE:
        features.check_fp8_scores(q.dtype, scores)
        exact_lse, wants_lse = of_fp8
        options_8 = mask.causal, *flags[:2], exact_lse, *mask.sides, *scores.changes, wants_lse
        return autograd.forward_varlen_fp8(q, k, v, *descales, *lengths, scale, *options_8)
    if scores.captured:
        call = VarlenCall(scale, mask, scores, *flags, lengths)
        return attend_with_functions(call, q, k, v)
    return autograd.forward_varlen(q, k, v, *lengths, scale, mask.causal, *flags, *mask.sides, *scores.values)
