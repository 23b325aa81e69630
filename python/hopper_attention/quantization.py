"""FP8 (e4m3) inputs for attention: 16-bit tensors quantized, or e4m3 tensors with descales taken as they are.

The types of what comes out are in :mod:`hopper_attention.quantized`, the rules by which it is made, and PyTorch that
follows them, in :mod:`hopper_attention.quantization_rules`; their public names are importable from here.
"""

from __future__ import annotations

import torch

from hopper_attention.checks import check_are_tensors
from hopper_attention.launch.quantize import quantize_fused, why_not_fused_here
from hopper_attention.quantization_rules import (
    Quantizer,
    check_sources,
    quantize_by_torch,
    quantize_with,
    restore_values,
    to_e4m3,
)
from hopper_attention.quantized import (
    DEFAULT_QUANTIZATION,
    E4M3,
    TILE,
    Fp8Quantization,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
    check_quantization,
    default_block_k,
)
from hopper_attention.shapes import attention_shape

__all__ = [
    "E4M3",
    "QUANTIZERS",
    "TILE",
    "Fp8Quantization",
    "QuantizedQKV",
    "QuantizedTensor",
    "TransposedV",
    "default_block_k",
    "from_descales",
    "quantize_qkv",
    "restore_values",
    "to_e4m3",
]

QUANTIZERS = ("fused", "torch")


def _choose_quantizer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> Quantizer:
    """What does a problem: the kernel where it can, unless PyTorch is asked for.

    Raises:
        ValueError: there is no such ``backend``, or it cannot do the problem.
    """
    if backend not in (None, *QUANTIZERS):
        raise ValueError(f"backend is {backend!r}, allowed: {', '.join(map(repr, QUANTIZERS))} or None")
    if backend == "torch":
        return quantize_by_torch
    reason = why_not_fused_here(q, k, v, quantization)
    if not reason:
        return quantize_fused
    if backend == "fused":
        raise ValueError(f"backend is 'fused', but {reason}; allowed here: 'torch' or None")
    return quantize_by_torch


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    quantization: Fp8Quantization = DEFAULT_QUANTIZATION,
    backend: str | None = None,
) -> QuantizedQKV:
    """Quantize the inputs of attention to e4m3 by the rules of :mod:`hopper_attention.quantization_rules`.

    What is asked for is done in this order: the means of K and V are subtracted, Q and K are rotated, V is rotated. All
    is computed in float32.

    On a Hopper GPU one kernel does it in one pass, reading float16 or bfloat16 and writing e4m3, where ``granularity``
    is "block" (the other two need a maximum before anything is written) and the sizes suit it
    (:func:`hopper_attention.launch.quantize.why_not_fused`). Elsewhere PyTorch does it, in several passes, with
    the same bits. The means of K and V may differ in their last bit between devices. A CUDA graph can be captured of
    the kernel once a call with the same head_dim, options and device has been made, and of PyTorch's passes not at all.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, on any device.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        quantization: rotation, what shares a scale, and the block sizes.
        backend: "fused" for the kernel, "torch" for PyTorch, or None for the kernel where it can do the problem.

    Returns:
        The quantized tensors, V transposed; ``dtype`` is the dtype of q, and ``quantization`` what was asked for with
        ``block_k`` as a number. Not differentiable.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together, or ``backend`` cannot do the problem.
        TypeError: q, k and v differ in dtype, or it is not one of the three above.
        RuntimeError: a CUDA graph is being captured and the signs of the rotation are not on the GPU yet.
    """
    check_are_tensors(q=q, k=k, v=v)
    check_quantization(quantization)
    c = check_sources(q, k, v, quantization)
    return quantize_with(_choose_quantizer(q, k, v, c, backend), q, k, v, c)


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
