"""Quantized inputs of attention, made here and now: by the kernel or by PyTorch, or from e4m3 tensors with descales."""

from __future__ import annotations

import torch

from hopper_attention.device_memory import no_floats
from hopper_attention.launch.quantize import quantize_fused, why_not_fused_here
from hopper_attention.plain_calls import needs_gradient
from hopper_attention.quantization_rules import Quantizer, quantize_by_torch, quantize_with
from hopper_attention.quantized import E4M3, Fp8Quantization, Means, QuantizedQKV, QuantizedTensor
from hopper_attention.shapes import attention_shape

QUANTIZERS = ("fused", "torch")


def check_quantizer(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is a quantizer or None."""
    if backend not in (None, *QUANTIZERS):
        raise ValueError(f"backend is {backend!r}, allowed: {', '.join(map(repr, QUANTIZERS))} or None")


def quantize_here(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> QuantizedQKV:
    """:func:`hopper_attention.quantize_qkv` of checked tensors, without torch's dispatcher. ``block_k`` is a number.

    Raises:
        ValueError: ``backend`` cannot do the problem.
    """
    return quantize_with(_choose_quantizer(q, k, v, quantization, backend), q, k, v, quantization)


def quantize_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> QuantizedQKV:
    """``quantize_here`` for those who call it by name: without a mean, ``shift`` and ``mean_v`` are one kept tensor,
    which an operator may not return."""
    c = quantization
    run = _choose_quantizer(q, k, v, c, backend)
    if run is not quantize_fused or c.smooth_k or c.smooth_v or needs_gradient(q, k, v):
        return quantize_with(run, q, k, v, c)
    nothing = no_floats(q.device)
    parts = quantize_fused(q, k, v, c, Means(nothing, nothing))
    return QuantizedQKV.unchecked(*parts, c, q.dtype, nothing)


def _choose_quantizer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> Quantizer:
    """What does a problem: the kernel where it can, unless PyTorch is asked for."""
    if backend == "torch":
        return quantize_by_torch
    reason = why_not_fused_here(q, k, v, quantization)
    if not reason:
        return quantize_fused
    if backend == "fused":
        raise ValueError(f"backend is 'fused', but {reason}; allowed here: 'torch' or None")
    return quantize_by_torch


def from_descales(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> QuantizedQKV:
    """FP8 tensors with descales, as FlashAttention-3 takes them, as quantized inputs of attention.

    Args:
        q: float8_e4m3fn (batch, seqlen_q, heads, head_dim).
        k: float8_e4m3fn (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: float8_e4m3fn (batch, seqlen_k, kv_heads, head_dim_v).
        q_descale, k_descale, v_descale: float32 (batch, kv_heads), any strides; the data times its descale is
            the value, and that of q holds for the group of query heads. None means ones.
        out_dtype: dtype of attention's output.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: a tensor is not e4m3, or a descale is not float32.
    """
    shape = attention_shape(q, k, v)
    if q.dtype != E4M3:
        raise TypeError(f"q has dtype {q.dtype}, allowed: {E4M3}")

    def per_head(name: str, descale: torch.Tensor | None, data: torch.Tensor) -> QuantizedTensor:
        if descale is None:
            descale = torch.ones(shape.batch, shape.kv_heads, device=data.device)
        if descale.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {descale.dtype}, allowed: torch.float32")
        if descale.shape != (shape.batch, shape.kv_heads):
            raise ValueError(
                f"{name} has shape {tuple(descale.shape)}, allowed: (batch, kv_heads) = "
                f"({shape.batch}, {shape.kv_heads})"
            )
        if descale.device != data.device:
            raise ValueError(
                f"{name} is on {descale.device}, allowed: the device of its tensor, {data.device}"
            )
        seqlen, heads = data.shape[1], data.shape[2]
        scale = descale.repeat_interleave(heads // shape.kv_heads, 1).unsqueeze(-1)
        return QuantizedTensor(data, scale[:, :, : min(seqlen, 1)].contiguous(), max(seqlen, 1))

    return QuantizedQKV(
        q=per_head("q_descale", q_descale, q),
        k=per_head("k_descale", k_descale, k),
        v=per_head("v_descale", v_descale, v),
        quantization=Fp8Quantization(rotate=False, granularity="head", smooth_v=False),
        dtype=out_dtype,
    )
