"""FP8 attention that can be differentiated: an FP8 forward with a 16-bit backward.

The gradient is that of the attention which was computed, of the dequantized inputs, passed on to the inputs as if
quantization were the identity (a straight-through estimator). Saved are the e4m3 tensors with their scales, half the
memory of the 16-bit ones, the output and the LSE; the backward dequantizes them to 16 bits. Taking the 16-bit
inputs instead would not fit the LSE of the FP8 scores: where logits are large, probabilities would not add up to 1.
"""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

from typing import Any

import torch
from torch import Tensor

from hopper_attention import ops
from hopper_attention.launch.fp8 import attend
from hopper_attention.quantization import (
    Fp8Quantization,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
    default_block_k,
    quantize_qkv,
)
from hopper_attention.quantization_rules import add_mean
from hopper_attention.rotation import rotate_back, rotate_head_dim

OF_THE_TILE = 0
"""``block_k`` as the operator is told to take the kernel's tile."""

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("hopper_attention::forward_fp8_of_16_bits", mutates_args=())
def forward_fp8_of_16_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    rotate: bool,
    granularity: str,
    block_q: int,
    block_k: int,
    seed: int,
    smooth_k: bool,
    rotate_v: bool,
    smooth_v: bool,
) -> Saved:
    """out (b, sq, h, dv), lse float32 (b, h, sq), and what the gradient needs: data and scales of q, of k, and of v
    transposed, what smooth K took from the scores, and the mean of v that smooth V took from its rows."""
    c = _quantization(
        k, v, (rotate, granularity, block_q, block_k, seed, smooth_k, rotate_v, smooth_v), two_level, causal
    )
    parts = quantize_qkv(q, k, v, quantization=c, backend=quantizer_of(backend))
    out, lse = attend_and_undo(parts, softmax_scale, causal, backend, two_level, wants_lse=True)
    data = (parts.q.data, parts.q.scale, parts.k.data, parts.k.scale, parts.v.data, parts.v.scale)
    return out, lse, *data, parts.shift, parts.mean_v


@forward_fp8_of_16_bits.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    rotate: bool,
    granularity: str,
    block_q: int,
    block_k: int,
    seed: int,
    smooth_k: bool,
    rotate_v: bool,
    smooth_v: bool,
) -> Saved:
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, head_dim_v) = q.shape, v.shape

    def blocks(seqlen: int, block: int) -> int:
        return -(-seqlen // (block if granularity == "block" else max(seqlen, 1)))

    def e4m3(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float8_e4m3fn)

    def float32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    c = _quantization(
        k, v, (rotate, granularity, block_q, block_k, seed, smooth_k, rotate_v, smooth_v), two_level, causal
    )
    blocks_k = blocks(seqlen_k, int(c.block_k))
    return (
        q.new_empty((batch, seqlen_q, heads, head_dim_v)),
        float32(batch, heads, seqlen_q),
        e4m3(*q.shape),
        float32(batch, heads, blocks(seqlen_q, block_q)),
        e4m3(*k.shape),
        float32(batch, kv_heads, blocks_k),
        e4m3(batch, kv_heads, head_dim_v, -(-seqlen_k // 32) * 32),
        float32(batch, kv_heads, blocks_k),
        float32(batch, heads, seqlen_q) if smooth_k and seqlen_k else float32(0),
        float32(batch, kv_heads, head_dim_v) if smooth_v and seqlen_k else float32(0),
    )


def quantizer_of(backend: str | None) -> str | None:
    """The backend of ``quantize_qkv`` that goes with one of attention: the reference calls no kernel at all."""
    return "torch" if backend == "reference" else None


def attend_and_undo(
    parts: QuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of quantized tensors, with the mean of K back in the LSE."""
    out, lse = attend(parts, softmax_scale, causal, backend, two_level, wants_lse)
    # The LSE of a row without keys stays at -inf.
    if wants_lse and parts.shift.numel():
        lse = lse + softmax_scale * parts.shift
    return out, lse


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Saved) -> None:
    _, k, v, ctx.softmax_scale, ctx.causal, ctx.backend, two_level, *options = inputs
    ctx.quantization, ctx.seqlen_k = _quantization(k, v, tuple(options), two_level, ctx.causal), v.shape[1]
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(*output[2:])
    # An unused LSE has no gradient; None saves adding zeros.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    out, lse, q8, q_scale, k8, k_scale, v8, v_scale, shift, mean_v = ctx.saved_tensors
    c: Fp8Quantization = ctx.quantization
    if shift.numel():
        if dlse is not None:
            raise NotImplementedError(
                "the LSE of FP8 attention was differentiated with smooth_k=True, whose mean of K is not kept: use "
                "Fp8Quantization(smooth_k=False)"
            )
        lse = lse - ctx.softmax_scale * shift
    block_q, block_k = _rows(c.block_q, out.shape[1], c), _rows(int(c.block_k), ctx.seqlen_k, c)
    q = QuantizedTensor(q8, q_scale, block_q).dequantize(out.dtype)
    k = QuantizedTensor(k8, k_scale, block_k).dequantize(out.dtype)
    v = TransposedV(v8, v_scale, block_k, ctx.seqlen_k).dequantize(out.dtype)
    if mean_v.numel():
        # The output has the mean, and the gradient of a score compares V with it.
        add_mean(v, rotate_head_dim(mean_v, c.seed) if c.rotate_v else mean_v)
    dout = torch.zeros_like(out) if dout is None else dout
    if c.rotate_v:
        dout, out = (rotate_head_dim(x, c.seed).to(out.dtype) for x in (dout, out))
    dq, dk, dv = ops.backward(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal, ctx.backend)
    if c.rotate:
        dq, dk = (rotate_back(x, c.seed).to(out.dtype) for x in (dq, dk))
    if c.rotate_v:
        dv = rotate_back(dv, c.seed).to(out.dtype)
    return dq, dk, dv, *[None] * 12


def _quantization(
    k: Tensor, v: Tensor, options: tuple[Any, ...], two_level: bool, causal: bool
) -> Fp8Quantization:
    """What the operator's arguments say, with ``block_k`` as a number."""
    rotate, granularity, block_q, block_k, *others = options
    # Numbers, also where sizes are symbols, which cannot be looked up.
    sizes = (int(n) for n in (k.shape[3], v.shape[3], k.shape[1]))
    block_k = block_k or default_block_k(*sizes, two_level, causal)
    return Fp8Quantization(rotate, granularity, block_q, block_k, *others)


def _rows(block: int, seqlen: int, c: Fp8Quantization) -> int:
    return block if c.granularity == "block" else max(seqlen, 1)


forward_fp8_of_16_bits.register_autograd(_gradients, setup_context=_save_for_backward)


def differentiable_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    quantization: Fp8Quantization,
    backend: str | None,
    two_level: bool,
) -> tuple[Tensor, Tensor]:
    """out and lse through torch's dispatcher, which differentiates and traces."""
    c = quantization
    block_k = c.block_k if isinstance(c.block_k, int) else OF_THE_TILE
    options = (c.rotate, c.granularity, c.block_q, block_k, c.seed, c.smooth_k, c.rotate_v, c.smooth_v)
    return forward_fp8_of_16_bits(q, k, v, softmax_scale, causal, backend, two_level, *options)[:2]
