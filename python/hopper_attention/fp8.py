"""Attention in FP8: quantize 16-bit tensors and attend, or the second half alone.

On a Hopper GPU one kernel quantizes and the FP8 kernel attends. Anywhere else PyTorch quantizes, with the same bits.
On NVIDIA GPUs of compute capability 8.x and 12.x the tensors are then dequantized to 16 bits for the kernel that those
have: the numbers of FP8 inputs, without a speed-up, as a call warns once. Elsewhere the FP8 kernel's emulation attends,
tile by tile.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from hopper_attention import checks, packed_at_once, packed_parts_again, parts_again
from hopper_attention.api import Window
from hopper_attention.autocast import cast_inputs
from hopper_attention.checks import FULL_WINDOW, Result
from hopper_attention.features import is_full, is_given, resolve_packed_mask, with_mask
from hopper_attention.fp8_at_once import AtOnceCall, calls_at_once, find_at_once
from hopper_attention.fp8_ops import Parts, attend_and_undo, attend_traced
from hopper_attention.fp8_training import differentiable_fp8, quantizer_of, with_blocks_of_the_tile
from hopper_attention.launch.fp8 import launch_for
from hopper_attention.launch.packed_fp8 import attend_packed, find_packed_fp8, packed_problem_of
from hopper_attention.lengths import Lengths
from hopper_attention.packed_fp8_plan import PackedCall
from hopper_attention.packed_fp8_training import differentiable_packed_fp8
from hopper_attention.packed_quantization import (
    check_packed_sources,
    resolve_lengths,
    with_packed_blocks,
)
from hopper_attention.packed_quantized import PACKED_IN_TWO_STEPS, PackedQuantizedQKV
from hopper_attention.packed_quantizers import quantize_packed_here
from hopper_attention.plain_calls import is_plain_call, is_transformed, needs_gradient
from hopper_attention.quantization_rules import check_sources
from hopper_attention.quantized import (
    DEFAULT_QUANTIZATION,
    Fp8Quantization,
    QuantizedQKV,
    check_quantization,
)
from hopper_attention.quantizers import quantize_here


@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    quantization: Fp8Quantization = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    *,
    return_attn_probs: Literal[True],
    quantization: Fp8Quantization = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool | int,
    return_attn_probs: Literal[True],
    *,
    quantization: Fp8Quantization = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    return_attn_probs: bool = ...,
    *,
    quantization: Fp8Quantization = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    return_attn_probs: bool = False,
    *,
    quantization: Fp8Quantization = DEFAULT_QUANTIZATION,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    backend: str | None = None,
) -> Result:
    """Quantize 16-bit q, k and v to e4m3 and attend (FlashAttention-3, section 3.3).

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16. Under torch.autocast float32 inputs are cast to its
            dtype, which the output then has.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        softmax_scale: factor of the scores, from 1e-37 to 1e5; head_dim**-0.5 by default.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        return_attn_probs: also return the LSE, natural log, float32 (batch, heads, seqlen_q).
        quantization: rotation, what shares a scale, and the block sizes.
        two_level_accumulation: add the products P V of the FP8 kernel's key tiles to the output in float32 (DeepGEMM's
            "promotion", the opposite of PyTorch's use_fast_accum). Otherwise the tensor cores add them, with fewer
            bits, which matters where V has an offset that changes along the keys. One that does not is subtracted, by
            ``smooth_v`` of the quantization; of more than 5120 keys, without a window and gradients, one of each 1024
            of them. The gradient stays that of 16 bits. The 16-bit kernels and the emulation
            add in float32 anyway: on the same blocks they give the same with it as without. Without ``block_k`` it
            decides on the blocks too.
        exact_lse: let another FP8 kernel attend, which takes every maximum, multiplies Q and K in 16 bits, and adds
            scores, their exponentials and P V up in float32. Its LSE is within 1e-4 of that of the e4m3 tensors, fit
            to merge partial results by. It takes 1.2 to 2 times as long, and twice the memory of Q and K in e4m3 beside
            them. None: where the LSE is returned. False: the fast kernel there too, whose LSE is off by 1e-3 where
            many keys count, and by up to 8e-2 where one does (docs/kernels/fp8-accuracy.md).
        window_size: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1 or None is no limit, and with ``causal`` the right side is 0.
        attention_chunk: as for :func:`hopper_attention.flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: for packed sequences, as for
            :func:`hopper_attention.flash_attn_varlen_func`. q is (total_q, heads, head_dim) then, k and v (total_k,
            kv_heads, ...), out (total_q, heads, head_dim_v) and lse (heads, total_q). No block has rows of two
            sequences, and no length is read on the host but by the reference.
        backend: "hopper", "ampere" (runs on Hopper GPUs too; attends in 16 bits), "reference" (quantizes in PyTorch),
            or None to have one chosen.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q; with ``return_attn_probs``, (out, lse).

    Raises:
        ValueError, TypeError: an argument is not allowed.
        NotImplementedError: packed sequences are to lose the mean of K.

    It can be differentiated: see :mod:`hopper_attention.fp8_training` for what the gradient is.
    """
    given, options = (q, k, v), (causal, return_attn_probs, backend, two_level_accumulation, exact_lse)
    is_packed = not (
        cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is seqused_q is seqused_k is None
    )
    window, masked = (window_size, attention_chunk), None
    if is_packed:
        of_lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
        results = packed_at_once.attend(given, of_lengths, quantization, softmax_scale, options, window)
        if results is not None:
            return results if return_attn_probs else results[0]
    else:
        masked = _with_mask_of(q, k, options, window)
        found = None if masked is None else calls_at_once.find(*given, quantization, *masked)
        if found is not None:
            scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
            out, lse = found(q, k, v, scale, bool(return_attn_probs))
            return (out, lse) if return_attn_probs else out
    checks.check_are_tensors(q=q, k=k, v=v)
    check_quantization(quantization)
    causal = checks.check_flag("causal", causal)
    return_attn_probs = checks.check_flag("return_attn_probs", return_attn_probs)
    checks.check_backend(backend)
    checks.check_two_level_accumulation(two_level_accumulation)
    exact_lse = checks.check_exact_lse(exact_lse, return_attn_probs)
    q, k, v = cast_inputs(q, k, v)
    two_level = two_level_accumulation
    lengths = resolve_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    if lengths is not None:
        check_packed_sources(q, k, v, lengths, quantization)
        mask = resolve_packed_mask(
            causal, window_size, attention_chunk, lengths.max_seqlen_q, lengths.max_seqlen_k
        )
        packed_scale = None if softmax_scale is None else checks.check_scale(softmax_scale)
        packed_call = PackedCall(two_level, mask, backend, exact_lse, not return_attn_probs)
        result = _attend_packed((q, k, v), lengths, quantization, packed_scale, packed_call)
        # Not where autocast made others of them.
        is_same = given[0] is q and given[1] is k and given[2] is v
        if is_same and is_plain_call(q, k, v) and not needs_gradient(q, k, v):
            packed_at_once.remember((q, k, v), lengths, quantization, options, window, packed_call)
        return result
    is_plain = is_plain_call(q, k, v) and not needs_gradient(q, k, v)
    shape = check_sources(q, k, v)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    mask = resolve_packed_mask(causal, window_size, attention_chunk, shape.seqlen_q, shape.seqlen_k)
    if is_plain:
        facts = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
        kinds = (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
        of_call = mask.sides, backend, two_level, exact_lse, not return_attn_probs
        launch = find_at_once(*facts, *kinds, quantization, mask.causal, *of_call)
        if launch is not None:
            out, lse = launch(q, k, v, scale, return_attn_probs)
            # Not where autocast made others of them.
            if masked is not None and given[0] is q and given[1] is k and given[2] is v:
                calls_at_once.keep(
                    lambda: AtOnceCall.of(launch, quantization, q.device), *given, quantization, *masked
                )
            return (out, lse) if return_attn_probs else out
        head_dims = shape.head_dim, shape.head_dim_v
        c = with_blocks_of_the_tile(quantization, head_dims, shape.seqlen_k, two_level, mask)
        parts = quantize_here(q, k, v, c, quantizer_of(backend))
        call = scale, mask.causal, backend, two_level, return_attn_probs, mask.sides
        out, lse = attend_and_undo(parts, *call, exact_lse)
    else:
        call_16 = scale, mask.causal, quantization, backend, two_level, mask.sides, exact_lse
        out, lse = differentiable_fp8(q, k, v, *call_16, return_attn_probs or _may_need_lse(q, k, v))
    return (out, lse) if return_attn_probs else out


def _with_mask_of(
    q: Any, k: Any, options: tuple[Any, ...], window: tuple[Any, Any]
) -> tuple[Any, ...] | None:
    """``with_mask`` of dense tensors, if these are such."""
    if is_full(window[0]) and not is_given(window[1], 0):
        return options
    if type(q) is not Tensor or type(k) is not Tensor or q.dim() != 4 or k.dim() != 4:
        return None
    return with_mask(options, window, q.shape[1], k.shape[1])


def _may_need_lse(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a gradient may need the LSE of a call that is not plain: not where torch.compile traces one without. What
    torch.export writes down may be called with tensors that need one."""
    # torch.compiler.is_exporting() says so of torch.compile too, in some versions.
    is_exported = getattr(torch.compiler, "_is_exporting_flag", True)
    return not torch.compiler.is_compiling() or is_exported or is_transformed() or needs_gradient(q, k, v)


def _attend_packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    quantization: Fp8Quantization,
    softmax_scale: float | None,
    call: PackedCall,
) -> Result:
    """``flash_attn_fp8_func`` of packed sequences."""
    q, k, v = tensors
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    two_level, mask, backend, exact_lse, without_lse = call
    if is_plain_call(q, k, v) and not q.is_meta and not needs_gradient(q, k, v):
        c = with_packed_blocks(quantization, (k.shape[2], v.shape[2]), two_level, mask)
        parts = quantize_packed_here(q, k, v, lengths, c, quantizer_of(backend))
        of_call = scale, mask.causal, backend, two_level, not without_lse
        out, lse = attend_packed(parts, *of_call, window=mask.sides, exact_lse=exact_lse)
    else:
        call_16 = scale, mask.causal, quantization, backend, two_level, mask.sides, exact_lse
        out, lse = differentiable_packed_fp8(q, k, v, lengths, *call_16)
    return out if without_lse else (out, lse)


@overload
def flash_attn_quantized_func(
    parts: QuantizedQKV | PackedQuantizedQKV,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_quantized_func(
    parts: QuantizedQKV | PackedQuantizedQKV,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    *,
    return_attn_probs: Literal[True],
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_quantized_func(
    parts: QuantizedQKV | PackedQuantizedQKV,
    softmax_scale: float | None,
    causal: bool | int,
    return_attn_probs: Literal[True],
    *,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_quantized_func(
    parts: QuantizedQKV | PackedQuantizedQKV,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    return_attn_probs: bool = ...,
    *,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_quantized_func(
    parts: QuantizedQKV | PackedQuantizedQKV,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    return_attn_probs: bool = False,
    *,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    backend: str | None = None,
) -> Result:
    """Attention on what ``quantize_qkv`` made; arguments and results as for :func:`flash_attn_fp8_func`.

    The output has the dtype that q had before it was quantized. What was done to V is undone: the FP8 kernel adds a
    mean that was subtracted, PyTorch undoes a rotation and then adds the mean itself. The mean of K goes back into the
    LSE. The same parts serve with and without ``two_level_accumulation``; with it the kernel is faster at head_dim 64
    on blocks of 128 keys, which :func:`flash_attn_fp8_func` then makes.

    Args:
        parts: of ``quantize_qkv``; those of packed sequences hold their lengths.
        others: as there.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v), of packed sequences (total_q, heads, head_dim_v); with
        ``return_attn_probs``, (out, lse), float32 (batch, heads, seqlen_q) or (heads, total_q). A constant to autograd.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: torch.func differentiates it, or packed parts are traced.
    """
    given = causal, return_attn_probs, two_level_accumulation, exact_lse, backend
    window = window_size, attention_chunk
    if type(parts) is PackedQuantizedQKV:
        results = packed_parts_again.attend(parts, softmax_scale, given, window)
        if results is not None:
            return results if return_attn_probs else results[0]
    if type(parts) is QuantizedQKV:
        found = parts_again.find(parts, given, window)
        if found is not None:
            scale = found.default_scale if softmax_scale is None else checks.check_scale(softmax_scale)
            out, lse = found(parts, scale, bool(return_attn_probs))
            return (out, lse) if return_attn_probs else out
    if not isinstance(parts, (QuantizedQKV, PackedQuantizedQKV)):
        raise TypeError(
            f"parts is a {type(parts).__name__}, allowed: a QuantizedQKV, which quantize_qkv makes"
        )
    if isinstance(parts, QuantizedQKV) and not torch.compiler.is_compiling():
        # The caller's stay as they are, so that the next call finds them where they lie.
        parts = parts.opened()
    causal = checks.check_flag("causal", causal)
    return_attn_probs = checks.check_flag("return_attn_probs", return_attn_probs)
    scale = parts.q.data.shape[-1] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    checks.check_backend(backend)
    checks.check_two_level_accumulation(two_level_accumulation)
    exact_lse = checks.check_exact_lse(exact_lse, return_attn_probs)
    if isinstance(parts, PackedQuantizedQKV):
        if not is_plain_call(parts.q.data, parts.k.data, parts.v.data):
            raise NotImplementedError(PACKED_IN_TWO_STEPS)
        bounds = parts.lengths.max_seqlen_q, parts.lengths.max_seqlen_k
        mask = resolve_packed_mask(causal, window_size, attention_chunk, *bounds)
        of_call = scale, mask.causal, backend, two_level_accumulation, return_attn_probs
        out, lse = attend_packed(parts, *of_call, window=mask.sides, exact_lse=exact_lse)
        of_problem = two_level_accumulation, mask.sides, exact_lse, not return_attn_probs
        problem = packed_problem_of(parts, mask.causal, *of_problem)
        launch = find_packed_fp8(problem, parts.q.data.device, backend, 0)
        packed_parts_again.remember(parts, given, window, mask.sides, launch)
        return (out, lse) if return_attn_probs else out
    mask = resolve_packed_mask(causal, window_size, attention_chunk, parts.q.shape[1], parts.k.shape[1])
    options = (scale, mask.causal, backend, two_level_accumulation)
    is_plain = is_plain_call(parts.q.data, parts.k.data, parts.v.data)
    if is_plain and not (torch.is_grad_enabled() and needs_gradient(*Parts.of(parts))):
        of_call = *options, return_attn_probs
        out, lse = attend_and_undo(parts, *of_call, mask.sides, exact_lse)
        flags = mask.causal, backend, two_level_accumulation, 0, mask.sides, exact_lse
        launcher = launch_for(parts, *flags, not return_attn_probs)
        parts_again.remember(parts, given, launcher, window, mask.sides)
    else:
        out, lse = attend_traced(parts, *options, mask.sides, exact_lse, return_attn_probs)
    return (out, lse) if return_attn_probs else out
