"""Packed quantized inputs of attention, made here and now: by the kernel or by PyTorch."""

from __future__ import annotations

from torch import Tensor

from hopper_attention.launch.packed_quantize import quantize_packed_fused, why_not_fused_packed
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantization import quantize_packed_by_torch
from hopper_attention.packed_quantized import PackedQuantizedQKV
from hopper_attention.quantized import Fp8Quantization


def quantize_packed_here(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, quantization: Fp8Quantization, backend: str | None
) -> PackedQuantizedQKV:
    """:func:`hopper_attention.quantize_qkv` of checked packed tensors, without torch's dispatcher. ``block_k`` is a
    number.

    Raises:
        ValueError: ``backend`` cannot do the problem.
    """
    if backend == "torch":
        return quantize_packed_by_torch(q, k, v, lengths, quantization)
    reason = why_not_fused_packed(q, k, v, lengths, quantization)
    if not reason:
        return quantize_packed_fused(q, k, v, lengths, quantization)
    if backend == "fused":
        raise ValueError(f"backend is 'fused', but {reason}; allowed here: 'torch' or None")
    return quantize_packed_by_torch(q, k, v, lengths, quantization)
