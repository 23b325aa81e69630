"""Quantized inputs of attention, made here and now: by the kernel or by PyTorch, or from e4m3 tensors with descales."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import no_floats
from hopper_attention.fused_again import QuantizeCall, quantizing
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.quantize import (
    QuantizeLauncher,
    addressable,
    find_launch,
    known_target,
    mean_of_values,
    quantize_fused,
    why_not_fused,
    why_not_fused_here,
)
from hopper_attention.plain_calls import needs_gradient
from hopper_attention.quantization_rules import (
    Quantizer,
    check_sources,
    quantize_by_torch,
    quantize_with,
    with_numbers,
)
from hopper_attention.quantized import E4M3, Fp8Quantization, Means, QuantizedQKV, QuantizedTensor
from hopper_attention.shapes import attention_shape
from hopper_attention.value_mean_rules import mean_worth_subtracting

QUANTIZERS = ("fused", "torch")


def check_quantizer(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is a quantizer or None."""
    if backend is not None and not (isinstance(backend, str) and backend in QUANTIZERS):
        raise ValueError(f"backend is {backend!r}, allowed: {', '.join(map(repr, QUANTIZERS))} or None")


def quantize_here(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> QuantizedQKV:
    """:func:`hopper_attention.quantize_qkv` of checked tensors, without torch's dispatcher. ``block_k`` is a number.

    Raises:
        ValueError: ``backend`` cannot do the problem.
    """
    return quantize_with(*_choose_quantizer(q, k, v, quantization, backend), q, k, v, quantization)


def quantize_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> QuantizedQKV:
    """:func:`hopper_attention.quantize_qkv` of plain tensors, which are checked. Of a mean that nothing
    lost, ``shift`` and ``mean_v`` of what the kernel made are one kept tensor, which an operator may not return.

    Raises:
        ValueError: the tensors do not fit together, or ``backend`` cannot do the problem.
        TypeError: they are of another dtype, or of several.
    """
    facts = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    c, launch = _find(*facts, quantization, backend)
    if launch is None or c.smooth_k or needs_gradient(q, k, v):
        return quantize_here(q, k, v, c, backend)
    # Kept until the quantizer is queued, which may write its outputs while the mean is being found.
    readable_v = addressable(v)
    means = Means(no_floats(q.device), launch.find_mean_v(readable_v))
    parts = launch(q, k, readable_v, c.seed, means)
    quantizing.keep(lambda: QuantizeCall.of(launch, quantization, c, q, k, v), q, k, v, quantization, backend)
    return QuantizedQKV.unchecked(*parts, c, q.dtype, means)


@lru_cache(maxsize=REMEMBERED_CALLS)
def _find(
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    quantization: Fp8Quantization,
    backend: str | None,
) -> tuple[Fp8Quantization, QuantizeLauncher | None]:
    """For q, k and v like these, which are checked: ``quantization`` with ``block_k`` as a number, and the kernel if it
    does the problem."""
    facts = zip(shapes, dtypes, devices, strict=True)
    q, k, v = (TensorSpec(shape, (), dtype, device) for shape, dtype, device in facts)
    shape = check_sources(q, k, v)
    c = with_numbers(quantization, shape)
    if backend == "torch" or why_not_fused(q, k, v, c, known_target(q.device)):
        return c, None
    return c, find_launch(q.dtype, shape.head_dim, shape.head_dim_v, shape.seqlen_k, c, q.device)


def _choose_quantizer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> tuple[Quantizer, Callable[[torch.Tensor], torch.Tensor]]:
    """What does a problem, and what finds the mean of V: kernels where they can, unless PyTorch is asked for."""
    by_torch = quantize_by_torch, mean_worth_subtracting
    if backend == "torch":
        return by_torch
    reason = why_not_fused_here(q, k, v, quantization)
    if not reason:
        return quantize_fused, mean_of_values
    if backend == "fused":
        raise ValueError(f"backend is 'fused', but {reason}; allowed here: 'torch' or None")
    return by_torch


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
            descale = torch.ones(shape.batch, shape.kv_heads, dtype=torch.float32, device=data.device)
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
        seqlen, group = data.shape[1], data.shape[2] // shape.kv_heads
        # A copy is a kernel of its own, and short calls take no longer than some of those.
        of_heads = descale if group == 1 else descale.repeat_interleave(group, 1)
        return QuantizedTensor(data, of_heads.unsqueeze(-1)[:, :, : min(seqlen, 1)], max(seqlen, 1))

    return QuantizedQKV(
        q=per_head("q_descale", q_descale, q),
        k=per_head("k_descale", k_descale, k),
        v=per_head("v_descale", v_descale, v),
        quantization=Fp8Quantization(rotate=False, granularity="head", smooth_v=False),
        dtype=out_dtype,
    )
