"""The public function: FlashAttention-3's name, argument order and conventions. Packed forms are in ``packed``."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from hopper_attention import autograd, checks, dense_again, descaled_again, features
from hopper_attention.autocast import cast_inputs
from hopper_attention.checks import FP8_DTYPE, FULL_WINDOW, Result, TensorSpec
from hopper_attention.function_autograd import DenseCall, attend_with_functions
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.qv import QvInputs, run_qv
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.plain_calls import (
    are_plain_constants,
    is_plain_16_bit_call,
    needs_gradient,
    wants_only_a_launch,
)
from hopper_attention.qv import check_qv, check_qv_scores, scale_with_qv
from hopper_attention.scores import NO_SCORES, Scores, check_scores

Window = tuple[int | None, int | None] | list[int] | Tensor

NOTHING, ONE, NO_FACTOR = 0, 1, 0.0
"""Defaults of numbers."""
"""(left, right); see :func:`flash_attn_func`."""


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_mask: Any = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_mask: Any = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    block_mask: Any = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = NO_FACTOR,
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
    block_mask: Any = None,
    dropout_p: float = NO_FACTOR,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    backend: str | None = None,
) -> Result:
    """softmax(softmax_scale * Q K^T) V, exact, with memory linear in the sequence lengths.

    Query head i reads key/value head i // (heads / kv_heads). A query that sees no key gives 0, with LSE
    -inf or its sink. 16-bit inputs are differentiable, once; gradients flow through the output and through the LSE.
    NaN or infinity in K at a key that a query may not see never reaches that query. In V it can, on the Hopper
    kernel, where causal queries share a tile with one that may see the key: 0 times NaN is NaN. Gradients come from
    the backend's backward kernel, and where it cannot give them from the tiled reference, with a warning on a GPU;
    ``explain`` says which.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float8_e4m3fn. head_dim is a multiple
            of 8, at most 256. Strides are free. A tensor that a kernel cannot address (last stride other than 1,
            other strides that are not multiples of 8 elements, address not a multiple of 16 bytes, expanded
            dimensions) is copied first for it; ``explain`` says so. Under torch.autocast float32 inputs are cast to its
            dtype, and inputs that differ in dtype too; their gradients have the dtypes that they came with.
        k: (batch, seqlen_k, kv_heads, head_dim), of q's dtype and device; heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v), likewise; head_dim_v may differ from head_dim, and be at most 512.
            Above 256 the kernels attend to its columns in two parts, and compute Q K^T for each; not so that of
            Hopper for a head_dim of at most 64.
        softmax_scale: factor of the scores, from 1e-37 to 1e5; head_dim**-0.5 by default. P is exact to its dtype where
            scaled scores are below 2^12 in magnitude; above, keys that tie for the largest score can cost half a step
            of the dtype more, and gradients lose as many bits as the scores have above 2^12.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (the mask is aligned bottom-right).
        q_descale, k_descale, v_descale: for float8_e4m3fn only: float32 (batch, kv_heads) factors that
            the data is multiplied by; ones by default. Where that of q or k is negative,
            the FP8 kernel gives NaN. FP8 gives a bfloat16 output and has no gradient: tensors that require one are
            taken, and a backward pass through the result raises. The "ampere" backend
            dequantizes the tensors to bfloat16 first, which gives no speed-up; so does every backend with a softcap,
            alibi_slopes or sinks, of which a GPU warns once.
        window_size: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1 or None is no limit, and (-1, 0) is causal. With ``causal`` the right
            side is 0 whatever it says.
        attention_chunk: c above 0 cuts the keys into chunks of c. Query i sees none outside of the chunk of key
            p = i + seqlen_k - seqlen_q, which begins at p // c * c, rounded down (Llama 4's chunked attention), and of
            that chunk what ``causal`` and ``window_size`` leave it. Where seqlen_q is larger, queries come before all
            keys and see none.
        num_splits, pack_gqa: hints of FlashAttention-3 for its schedule, without an effect here.
        deterministic: gradients of the same bits in every run. The backward kernel then sums dQ in a fixed
            order, for which key tiles wait for each other; else in the order in which they finish. The output has
            the same bits in every run either way. torch.use_deterministic_algorithms(True) does the same.
        sm_margin: streaming multiprocessors that the Hopper kernel of the forward pass leaves to others, fewer than the
            GPU has. The other backends and the backward pass use all.
        return_attn_probs: also return the LSE (FlashAttention's name for it, kept). For float8_e4m3fn another Hopper
            kernel then attends (``exact_lse``): with it a call is slower, and its output differs in the last digits.
        two_level_accumulation: for float8_e4m3fn on the Hopper kernel: add the products of its key tiles in float32,
            as in :func:`hopper_attention.flash_attn_fp8_func`. Changes nothing elsewhere.
        exact_lse: for float8_e4m3fn on the Hopper kernel, as there: None makes the LSE exact where it is returned;
            with False it comes from scores in float32 that the tensor cores add up with fewer bits, faster and off by
            up to 8e-2. Changes nothing elsewhere.
        backend: "hopper", "ampere" (runs on Hopper GPUs too), "torch" (torch's fused attention, without windows
            or changes of scores), "reference", or None to have one chosen; see
            ``explain``.
        softcap: c above 0, from 1e-30 to 1e30, makes of a scaled score s c tanh(s / c), before masks; 0 is none.
        alibi_slopes: float32 (heads,) or (batch, heads) on the device of q: the bias
            -slope |i + seqlen_k - seqlen_q - j| is added after the softcap (FlashAttention-2's). It has no gradient.
        sinks: (heads,), float32 or of the output's dtype, on the device of q: a logit of each head, natural log and not
            scaled, that joins the sum of a row and has no value (gpt-oss's). The LSE includes it; it is differentiable.
        score_mod: FlexAttention's: (score, b, h, q_idx, kv_idx) -> score, of a scaled score, natural log, after softcap
            and alibi_slopes and before masks. The indices count from 0 in each sequence; b is its number. It is traced
            at every call into the kernel, which is compiled once for functions that do the same: it may use
            operators, ``hopper_attention.mods`` or torch's functions of the same names, and elements of tensors on the
            device of q, whose values are no part of the kernel. Numbers that it captures are. Integers have 32 bits;
            an index outside of a tensor is taken for the nearest inside. Gradients flow through it to q and k, not to
            the tensors that it reads. Not for float8_e4m3fn.
        mask_mod: (b, h, q_idx, kv_idx) -> whether the query sees the key, likewise, beside the other masks.
        block_mask: FlexAttention's BlockMask in place of a mask_mod, beside the other masks. Where there are none,
            kernels visit no block that it hides, forward and backward.
        qv: (batch, seqlen_q, heads, head_dim_v), of q's dtype and device: a second query, which multiplies V: scores
            are softmax_scale (Q K^T + QV V^T), and softmax_scale is (head_dim + head_dim_v)**-0.5 by default
            (FlashAttention-3's, for attention over a latent, MLA). 16 bits, forward only: a backward pass through the
            result raises. On the Hopper kernel with a head_dim of at most 64; elsewhere with backend="reference".
        dropout_p: this much of P is dropped, from 0 on, below 1, and what is kept is multiplied by 1 / (1 - p)
            (FlashAttention-2's). 1 - p is rounded to a multiple of 1/256. The mask comes from torch's generator of the
            device of q, which moves on; the same seed gives the same mask on every backend. The LSE is that without.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), contiguous; with ``return_attn_probs``, (out, lse),
        where lse is the natural log of the sum of exp(scores), float32 (batch, heads, seqlen_q).

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is
            allowed.
        NotImplementedError: a feature is not implemented; the message says what to use instead.
    """
    if causal is not False and causal is not True:
        causal = checks.check_flag("causal", causal)
    sides, scores = FULL_SIDES, NO_SCORES
    # A default is most often the very object, which takes less time to see than to ask what a value is.
    if (
        (window_size is not FULL_WINDOW and not features.is_full(window_size))
        or (attention_chunk is not NOTHING and features.is_given(attention_chunk, 0))
        or (softcap is not NO_FACTOR and features.is_given(softcap, 0.0))
        or (
            (num_splits is not ONE or pack_gqa is not None)
            and not features.are_plain_hints(num_splits, pack_gqa)
        )
        or alibi_slopes is not None
        or sinks is not None
    ):
        mask = features.resolve_mask(
            q,
            k,
            causal,
            window_size=window_size,
            attention_chunk=attention_chunk,
            num_splits=num_splits,
            pack_gqa=pack_gqa,
        )
        causal, sides = mask.causal, mask.sides
        if sinks is not None and getattr(q, "dtype", None) == FP8_DTYPE:
            sinks = features.sinks_in_float32(q, sinks)
        scores = features.resolve_scores(softcap, alibi_slopes, sinks)
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        scores = features.with_functions(scores, score_mod, mask_mod, block_mask, qv)
        features.check_lists(scores, q, k)
    if dropout_p is not NO_FACTOR and features.is_given(dropout_p, 0.0):
        scores = features.with_dropout(scores, dropout_p, q)
    if backend is not None:
        checks.check_backend(backend)
    if sm_margin is not NOTHING and features.is_given(sm_margin, 0):
        sm_margin = checks.check_sm_margin(sm_margin)
    if two_level_accumulation is not False:
        checks.check_two_level_accumulation(two_level_accumulation)
    if exact_lse is not None:
        exact_lse = checks.check_exact_lse(exact_lse, return_attn_probs)
    if deterministic is not False:
        deterministic = checks.check_flag("deterministic", deterministic)
    if return_attn_probs is not False:
        return_attn_probs = checks.check_flag("return_attn_probs", return_attn_probs)
    if qv is not None:
        descales = (q_descale, k_descale, v_descale)
        options = (MaskSpec(causal, *sides), scores, backend, sm_margin, deterministic)
        results = _attend_with_qv(q, k, v, qv, softmax_scale, descales, options)
        return results if return_attn_probs else results[0]
    flags = causal, backend, sm_margin, sides
    has_tensors_alone = q_descale is k_descale is v_descale is None
    if has_tensors_alone and scores is NO_SCORES:
        found = dense_again.find(q, k, v, flags)
        if found is not None:
            again: Any = found(q, k, v, softmax_scale, deterministic, return_attn_probs)
            return again if return_attn_probs else again[0]
    if (
        has_tensors_alone
        and is_plain_16_bit_call(q, k, v)
        # On a CPU an output alone may take less than one with an LSE.
        and (q.is_cuda or (not return_attn_probs and _needs_only_output(q, k, v)))
        and (scores is NO_SCORES or are_plain_constants(*scores.tensors))
    ):
        # The dispatcher of torch costs more than the rest of a call on a short sequence.
        if not needs_gradient(q, k, v):
            results = run_forward(q, k, v, softmax_scale, *flags[:3], return_attn_probs, sides, scores)
            if scores is NO_SCORES and q.is_cuda:
                dense_again.remember(q, k, v, flags, records_gradient=False)
            return results if return_attn_probs else results[0]
        if scores is NO_SCORES and q.dim() == 4:
            scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
            options_16 = causal, backend, sm_margin, deterministic, *sides
            results = autograd.forward(q, k, v, scale, *options_16, *NO_SCORES.values)
            dense_again.remember(q, k, v, flags, records_gradient=True)
            return results if return_attn_probs else results[0]
    descales = (q_descale, k_descale, v_descale)
    is_exact = checks.check_exact_lse(exact_lse, return_attn_probs)
    flags_8 = causal, backend, two_level_accumulation, sm_margin, return_attn_probs, is_exact, sides
    may_be_found = descaled_again.may_serve(scores)
    if may_be_found:
        found_8 = descaled_again.attend(q, k, v, descales, softmax_scale, flags_8, scores)
        if found_8 is not None:
            return found_8 if return_attn_probs else found_8[0]
    options = (MaskSpec(causal, *sides), scores, backend, sm_margin, deterministic)
    of_fp8 = two_level_accumulation, return_attn_probs, is_exact
    results = _call_operator(q, k, v, softmax_scale, descales, options, of_fp8)
    if may_be_found and q.dtype == FP8_DTYPE:
        descaled_again.remember(q, k, v, descales, flags_8, scores)
    return results if return_attn_probs else results[0]


def _needs_only_output(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these lie on a CPU as rows of numbers and need no gradient."""
    return all(x.is_cpu and x.layout is torch.strided for x in (q, k, v)) and not needs_gradient(q, k, v)


def _attend_with_qv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor,
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
        return run_qv(inputs, softmax_scale, mask.causal, *flags, mask.sides, scores)
    q, k, v, qv = cast_inputs(q, k, v, qv)
    specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
    checks.check_qkv(*specs)
    check_qv(specs[0], specs[2], TensorSpec.of(qv))
    checks.check_descales(q, k, *descales)
    scale = scale_with_qv(softmax_scale, q.shape[3], v.shape[3])
    check_scores(scores, q.shape[0], q.shape[2], q.dtype, q.device)
    return autograd.forward_qv(q, k, v, qv, scale, mask.causal, *flags, *mask.sides, *scores.changes)


def _call_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[MaskSpec, Scores, str | None, int, bool],
    of_fp8: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor]:
    """Through torch's dispatcher, which traces, differentiates and transforms.

    ``options`` are the mask, what is done to scores, backend, sm_margin and deterministic, ``of_fp8`` what counts for
    e4m3 tensors alone: two levels of sums, whether the LSE is wanted, which may else lack its rows, and whether it is
    to be exact.
    """
    mask, scores, backend, sm_margin, deterministic = options
    checks.check_are_tensors(q=q, k=k, v=v)
    q, k, v = cast_inputs(q, k, v)
    checks.check_qkv(TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v))
    checks.check_descales(q, k, *descales)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    if scores is not NO_SCORES:
        check_scores(scores, q.shape[0], q.shape[2], q.dtype, q.device)
    if q.dtype == FP8_DTYPE:
        features.check_fp8_scores(q.dtype, scores)
        two_level, *of_lse = of_fp8
        options_8 = mask.causal, backend, two_level, sm_margin, *of_lse, *mask.sides
        return autograd.forward_fp8(q, k, v, *descales, scale, *options_8, *scores.changes)
    flags = backend, sm_margin, deterministic
    if scores.captured:
        return attend_with_functions(DenseCall(scale, mask, scores, *flags), q, k, v)
    return autograd.forward(q, k, v, scale, mask.causal, *flags, *mask.sides, *scores.values)
