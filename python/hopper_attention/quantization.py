"""FP8 (e4m3) inputs for attention: 16-bit tensors quantized, or e4m3 tensors with descales taken as they are.

The types of what comes out are in :mod:`hopper_attention.quantized`, the rules by which it is made, and PyTorch that
follows them, in :mod:`hopper_attention.quantization_rules`; their public names are importable from here.
"""

from __future__ import annotations

from typing import overload

import torch

from hopper_attention.checks import check_are_tensors
from hopper_attention.fp8_ops import quantize_traced
from hopper_attention.fused_again import quantizing
from hopper_attention.lengths import Lengths, read_sequences
from hopper_attention.packed_quantization import (
    check_packed_sources,
    resolve_lengths,
    with_packed_blocks,
)
from hopper_attention.packed_quantized import (
    PACKED_IN_TWO_STEPS,
    PackedQuantizedQKV,
    PackedQuantizedTensor,
    PackedTransposedV,
)
from hopper_attention.packed_quantizers import quantize_packed_here
from hopper_attention.plain_calls import is_plain_call
from hopper_attention.quantization_rules import (
    check_sources,
    restore_values,
    to_e4m3,
    with_numbers,
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
from hopper_attention.quantizers import QUANTIZERS, check_quantizer, from_descales, quantize_plain

__all__ = [
    "E4M3",
    "QUANTIZERS",
    "TILE",
    "Fp8Quantization",
    "PackedQuantizedQKV",
    "PackedQuantizedTensor",
    "PackedTransposedV",
    "QuantizedQKV",
    "QuantizedTensor",
    "TransposedV",
    "default_block_k",
    "from_descales",
    "quantize_qkv",
    "restore_values",
    "to_e4m3",
]


@overload
def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    quantization: Fp8Quantization = ...,
    backend: str | None = ...,
) -> QuantizedQKV: ...


@overload
def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    quantization: Fp8Quantization = ...,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
    backend: str | None = ...,
) -> PackedQuantizedQKV: ...


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    quantization: Fp8Quantization = DEFAULT_QUANTIZATION,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    backend: str | None = None,
) -> QuantizedQKV | PackedQuantizedQKV:
    """Quantize the inputs of attention to e4m3 by the rules of :mod:`hopper_attention.quantization_rules`.

    What is asked for is done in this order: the means of K and V are subtracted, Q and K are rotated, V is rotated. All
    is computed in float32.

    On a Hopper GPU one kernel does it in one pass, reading float16 or bfloat16 and writing e4m3, where ``granularity``
    is "block" (the other two need a maximum before anything is written) and the sizes suit it
    (:func:`hopper_attention.launch.quantize.why_not_fused`). Elsewhere PyTorch does it, in several passes, with
    the same bits. The means of K and V may differ in their last bit between devices, before that of V is rounded to a
    step of its spread. A CUDA graph can be captured of
    either once a call with the same head_dim, options and device has been made. torch.compile takes the call as an
    operator; with ``block_k="tile"`` it compiles one graph for the lengths that have the same blocks.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, on any device.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        quantization: rotation, what shares a scale, and the block sizes.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: for packed sequences, as for
            :func:`hopper_attention.flash_attn_varlen_func`. q is (total_q, heads, head_dim) then, k and v (total_k,
            kv_heads, ...), and each sequence becomes what it would be by itself, without waiting for the GPU. Rows of
            no sequence become anything.
        backend: "fused" for the kernel, "torch" for PyTorch, or None for the kernel where it can do the problem.

    Returns:
        The quantized tensors, V transposed; ``dtype`` is the dtype of q, and ``quantization`` what was asked for with
        ``block_k`` as a number. Not differentiable: autograd takes them for constants, torch.func is refused. Of packed
        sequences they are a :class:`PackedQuantizedQKV`.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together, or ``backend`` cannot do the problem.
        TypeError: q, k and v differ in dtype, or it is not one of the three above.
        RuntimeError: a CUDA graph is being captured and the signs of the rotation are not on the GPU yet.
        NotImplementedError: packed sequences are to lose the mean of K, or torch.compile or torch.func is at work on
            them.
    """
    if cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is seqused_q is seqused_k is None:
        found = quantizing.find(q, k, v, quantization, backend)
        if found is not None:
            return found(q, k, v)
    check_are_tensors(q=q, k=k, v=v)
    check_quantization(quantization)
    check_quantizer(backend)
    lengths = resolve_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    if lengths is not None:
        return _quantize_packed(q, k, v, lengths, quantization, backend)
    if is_plain_call(q, k, v):
        return quantize_plain(q, k, v, quantization, backend)
    return quantize_traced(q, k, v, with_numbers(quantization, check_sources(q, k, v)), backend)


def _quantize_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    quantization: Fp8Quantization,
    backend: str | None,
) -> PackedQuantizedQKV:
    check_packed_sources(q, k, v, lengths, quantization)
    if not is_plain_call(q, k, v):
        raise NotImplementedError(PACKED_IN_TWO_STEPS)
    if q.device.type == "cpu":
        read_sequences(lengths, q.shape[0], k.shape[0])
    c = with_packed_blocks(quantization, (k.shape[2], v.shape[2]))
    return quantize_packed_here(q, k, v, lengths, c, backend)
