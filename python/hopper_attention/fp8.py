"""Attention in FP8: quantize 16-bit tensors and attend, or the second half alone.

On a Hopper GPU the FP8 kernel attends; anywhere else its emulation does, tile by tile. Quantization runs in
PyTorch on the device of the inputs, in several passes: it is not fused yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hopper.config import (
    FP8_KEY_ORDER,
    FP8_KEYS_PER_STEP,
    WARPGROUP_ROWS,
    check_problem_size,
    select_fp8_forward_config,
)
from hopper_attention import checks, compile_cache, launch
from hopper_attention.backends import Choice, Target, target_of, why_not_hopper
from hopper_attention.dispatch import DTYPE_NAMES
from hopper_attention.layout import make_addressable
from hopper_attention.notices import warn_once
from hopper_attention.quantization import (
    Fp8Quantization,
    QuantizedQKV,
    QuantizedTensor,
    quantize_qkv,
    rotate_back,
)
from hopper_attention.reference.fp8 import MIN_V_RATIO, attention_tiled_fp8

DEFAULT_QUANTIZATION = Fp8Quantization()

HEAD_DIM_STEP = 16
"""TMA counts in 16 bytes, which a row of the output and of the inputs must fill."""


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    *,
    quantization: Fp8Quantization = DEFAULT_QUANTIZATION,
    backend: str | None = None,
) -> Any:
    """Quantize 16-bit q, k and v to e4m3 and attend (FlashAttention-3, section 3.3).

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        softmax_scale: factor of the scores, positive; head_dim**-0.5 by default.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        return_attn_probs: also return the LSE, natural log, float32 (batch, heads, seqlen_q).
        quantization: rotation, what shares a scale, and the block sizes.
        backend: "hopper", "reference", or None to have one chosen.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q; with ``return_attn_probs``, (out, lse).

    Raises:
        NotImplementedError: a tensor requires grad; FP8 attention has no gradient yet.
        ValueError, TypeError: an argument is not allowed.
    """
    checks.check_are_tensors(q=q, k=k, v=v)
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{name} requires grad, and FP8 attention has no gradient yet: use flash_attn_func, or detach"
                )
    parts = quantize_qkv(q, k, v, quantization=quantization)
    return flash_attn_quantized_func(parts, softmax_scale, causal, return_attn_probs, backend=backend)


def flash_attn_quantized_func(
    parts: QuantizedQKV,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """Attention on what ``quantize_qkv`` made; arguments and results as for :func:`flash_attn_fp8_func`.

    The output has the dtype that q had before it was quantized. A rotation of V is undone here, in PyTorch, and the
    mean of K goes back into the LSE.
    """
    scale = parts.q.data.shape[3] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    checks.check_backend(backend)
    choice = choose_fp8_backend(parts, target_of(parts.q.data.device), backend)
    if choice.advice:
        warn_once(f"FP8 attention on its emulation, which is slow: {choice.reason}; {choice.advice}")
    if choice.backend == "hopper":
        out, lse = _run_kernel(parts, scale, causal)
    else:
        out, lse = attention_tiled_fp8(parts, causal=causal, softmax_scale=scale)
    # A row without keys stays at -inf and 0: both steps below leave those as they are.
    if parts.shift.numel():
        lse = lse + scale * parts.shift
    if parts.quantization.rotate_v:
        out = rotate_back(out, parts.quantization.seed).to(out.dtype)
    return (out, lse) if return_attn_probs else out


def choose_fp8_backend(parts: QuantizedQKV, target: Target, requested: str | None) -> Choice:
    """The kernel where it runs and can do the problem, else the emulation.

    Raises:
        ValueError: the kernel is asked for and cannot run.
    """
    if requested == "reference":
        return Choice("reference", "asked for with backend='reference'")
    blocked = why_not_hopper(target) or why_not_kernel(parts)
    if not blocked:
        return Choice("hopper", f"{target.name} has compute capability 9.0")
    if requested == "hopper":
        raise ValueError(f"backend is 'hopper', but {blocked}; allowed here: 'reference' or None")
    return Choice("reference", blocked, "flash_attn_func on bfloat16 may be faster" if target.is_gpu else "")


def why_not_kernel(parts: QuantizedQKV) -> str:
    """What about a problem keeps the FP8 kernel from doing it; empty if nothing does."""
    q, k, v = parts.q, parts.k, parts.v
    head_dim, head_dim_v = q.data.shape[3], v.data.shape[3]
    if parts.dtype not in DTYPE_NAMES:
        return f"the kernel writes float16 or bfloat16, not {parts.dtype}"
    if head_dim % HEAD_DIM_STEP or head_dim_v % HEAD_DIM_STEP:
        return f"head_dim {head_dim} and head_dim_v {head_dim_v} must be multiples of {HEAD_DIM_STEP}"
    if 0 in (*q.data.shape, *k.data.shape):
        return "the problem is empty"
    tile_n = select_fp8_forward_config(head_dim, head_dim_v, False, DTYPE_NAMES[parts.dtype]).tile_n
    for name, tensor, rows in (("q", q, WARPGROUP_ROWS), ("k", k, tile_n), ("v", v, tile_n)):
        if tensor.block % rows and tensor.block < tensor.data.shape[1]:
            return f"{name} has blocks of {tensor.block} rows, which must be a multiple of {rows}"
    if v.block != k.block:
        return f"k has blocks of {k.block} rows and v of {v.block}, which must be the same"
    return ""


def transpose_for_kernel(v: Tensor) -> Tensor:
    """e4m3 V (b, s, hk, dv) -> (b, hk, dv, keys), each 32 keys in the kernel's order, the last padded with zeros."""
    keys = v.view(torch.uint8).permute(0, 2, 3, 1)
    steps = pad(keys, (0, -v.shape[1] % FP8_KEYS_PER_STEP)).unflatten(-1, (-1, FP8_KEYS_PER_STEP))
    order = torch.tensor(FP8_KEY_ORDER, device=v.device)
    return steps[..., order].flatten(-2).contiguous().view(v.dtype)


def v_scales_for_kernel(v: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """(log2 of each V block's scale over the largest of its head, that largest scale)."""
    largest = v.scale.amax(-1)
    ratio = (v.scale / largest.unsqueeze(-1)).clamp_min(MIN_V_RATIO)
    ratio = torch.where(v.scale == largest.unsqueeze(-1), 1.0, ratio)
    return ratio.log2().contiguous(), largest.contiguous()


def _run_kernel(parts: QuantizedQKV, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = parts.q.data, parts.k.data, parts.v.data
    batch, seqlen_q, heads, head_dim = q.shape
    config = select_fp8_forward_config(head_dim, v.shape[3], causal, DTYPE_NAMES[parts.dtype])
    check_problem_size(config, batch, heads, seqlen_q, k.shape[1])
    kernel = compile_cache.get_forward(config)
    index = q.device.index if q.device.index is not None else torch.cuda.current_device()
    with torch.cuda.device(index):
        v_log2, v_max = v_scales_for_kernel(parts.v)
        out = torch.empty((batch, seqlen_q, heads, v.shape[3]), dtype=parts.dtype, device=q.device)
        lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
        kernel(
            make_addressable(q),
            make_addressable(k),
            transpose_for_kernel(v),
            out,
            lse,
            launch.tile_counter(index),
            parts.q.scale,
            parts.k.scale,
            v_log2,
            v_max,
            min(parts.q.block, 2**30),
            min(parts.k.block, 2**30),
            softmax_scale,
            torch.cuda.get_device_properties(index).multi_processor_count,
        )
    return out, lse
