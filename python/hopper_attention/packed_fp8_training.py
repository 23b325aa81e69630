"""FP8 attention of packed sequences that can be differentiated: :mod:`hopper_attention.fp8_training`, for them.

The gradient is the one explained there. ``hopper_attention::forward_fp8_varlen`` and ``::backward_fp8_varlen`` are
functional. Blocks go by no length, so that shapes follow from the sizes of the tensors alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.quantize.config import largest_codes
from hopper_attention import varlen_ops
from hopper_attention.autograd import refuse_second_derivative
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.fp8_ops import CALL, OPTIONS, Call, Options
from hopper_attention.fp8_training import Gradients, quantizer_of
from hopper_attention.launch.packed_fp8 import attend_packed
from hopper_attention.lengths import Lengths
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.packed_quantization import with_packed_blocks
from hopper_attention.packed_quantized import (
    ONE_PER_SEQUENCE,
    PackedQuantizedQKV,
    PackedQuantizedTensor,
    PackedTransposedV,
    RowPlaces,
    count_units,
)
from hopper_attention.packed_quantizers import quantize_packed_here
from hopper_attention.quantized import Fp8Quantization
from hopper_attention.rotation import rotate_back_alike, rotate_head_dim
from hopper_attention.transforms import differentiable

LENGTHS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k"
)
"""``Lengths`` in the schema of an operator."""


class Saved(NamedTuple):
    """What the gradient needs of packed quantized tensors."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor
    mean_v: Tensor

    @classmethod
    def of(cls, x: PackedQuantizedQKV) -> Saved:
        return cls(x.q.data, x.q.scale, x.k.data, x.k.scale, x.v.data, x.v.scale, x.mean_v)

    def parts(self, lengths: Lengths, c: Fp8Quantization, dtype: torch.dtype) -> PackedQuantizedQKV:
        """The quantized tensors again; ``block_k`` of their options is a number."""
        block_q, block_k = _blocks(c)
        largest_q, largest_k = largest_codes(self.q.shape[2], c.scales_rows)
        return PackedQuantizedQKV(
            PackedQuantizedTensor(self.q, self.q_scale, block_q, largest_q),
            PackedQuantizedTensor(self.k, self.k_scale, block_k, largest_k),
            PackedTransposedV(self.v, self.v_scale, block_k, self.k.shape[0]),
            lengths=lengths,
            quantization=c,
            dtype=dtype,
            mean_v=self.mean_v,
        )


SAVED = ", ".join(f"Tensor {name}" for name in Saved._fields)


def _blocks(c: Fp8Quantization) -> tuple[int, int]:
    """Rows of Q, and of K and V, that share a scale."""
    if c.granularity != "block":
        return ONE_PER_SEQUENCE, ONE_PER_SEQUENCE
    return min(c.block_q, ONE_PER_SEQUENCE), min(cast(int, c.block_k), ONE_PER_SEQUENCE)


class Arguments(NamedTuple):
    """What operators take behind their tensors."""

    lengths: Lengths
    options: Options
    call: Call

    @classmethod
    def of(cls, *arguments: Any) -> Arguments:
        return cls(Lengths(*arguments[:6]), Options(*arguments[6:14]), Call(*arguments[14:]))

    def quantization(self, head_dims: tuple[int, int]) -> Fp8Quantization:
        """With ``block_k`` as a number."""
        c = self.options.quantization()
        return with_packed_blocks(c, head_dims, self.call.two_level, self.call.mask)


@torch.library.custom_op(
    "hopper_attention::forward_fp8_varlen",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {LENGTHS}, {OPTIONS}, {CALL}) -> (Tensor out, Tensor lse, {SAVED})",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """out (total_q, h, dv), lse float32 (h, total_q), and what is ``Saved``."""
    given = Arguments.of(*arguments)
    call, c = given.call, given.quantization((k.shape[2], v.shape[2]))
    parts = quantize_packed_here(q, k, v, given.lengths, c, quantizer_of(call.backend))
    out, lse = attend_packed(parts, *call[:4], window=call.mask.sides, exact_lse=call.exact_lse)
    return out, lse, *Saved.of(parts)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = Arguments.of(*arguments)
    block_q, block_k = _blocks(given.quantization((k.shape[2], v.shape[2])))
    (total_q, heads, _), (total_k, kv_heads, head_dim_v) = q.shape, v.shape
    batch = given.lengths.cu_seqlens_q.shape[0] - 1

    def scales(of_heads: int, total: int, block: int) -> Tensor:
        return q.new_empty((of_heads, count_units(total, batch, block)), dtype=torch.float32)

    keys = count_units(total_k, batch, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
    saved = Saved(
        q.new_empty(q.shape, dtype=FP8_DTYPE),
        scales(heads, total_q, block_q),
        q.new_empty(k.shape, dtype=FP8_DTYPE),
        scales(kv_heads, total_k, block_k),
        q.new_empty((kv_heads, head_dim_v, keys), dtype=FP8_DTYPE),
        scales(kv_heads, total_k, block_k),
        q.new_empty(
            (batch + 1, kv_heads, head_dim_v) if given.options.smooth_v and total_k else 0,
            dtype=torch.float32,
        ),
    )
    out = q.new_empty((total_q, heads, head_dim_v))
    return out, q.new_empty((heads, total_q), dtype=torch.float32), *saved


@torch.library.custom_op(
    "hopper_attention::backward_fp8_varlen",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SAVED}, {LENGTHS}, {OPTIONS}, {CALL}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
)
def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Gradients:
    """dq, dk, dv of ``forward_fp8_varlen``, whose results are given."""
    saved, given = Saved(*arguments[: len(Saved._fields)]), Arguments.of(*arguments[len(Saved._fields) :])
    call, c = given.call, given.quantization((saved.k.shape[2], out.shape[2]))
    q, k, v = saved.parts(given.lengths, c, out.dtype).dequantize()
    if saved.mean_v.numel():
        # The output has the mean, and the gradient of a score compares V with it.
        mean = rotate_head_dim(saved.mean_v, c.seed) if c.rotate_v else saved.mean_v
        v = (v + mean[RowPlaces.of(given.lengths.cu_seqlens_k, None, v.shape[0]).sequence]).to(v.dtype)
    if c.rotate_v:
        dout, out = (rotate_head_dim(x, c.seed).to(out.dtype) for x in (dout, out))
    options = call.softmax_scale, call.causal, call.backend, False, *call.mask.sides
    dq, dk, dv = varlen_ops.backward_varlen(dout, dlse, q, k, v, out, lse, *given.lengths, *options)
    if c.rotate:
        dq, dk = (rotate_back_alike(x, c.seed) for x in (dq, dk))
    if c.rotate_v:
        dv = rotate_back_alike(dv, c.seed)
    return dq, dk, dv


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Gradients:
    saved = Saved(*arguments[: len(Saved._fields)])
    dv = out.new_empty((*saved.k.shape[:2], out.shape[2]))
    return out.new_empty(saved.q.shape), out.new_empty(saved.k.shape), dv


_call_backward = differentiable(_backward, refuse_second_derivative, has_batch=False)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.bounds, ctx.arguments = inputs[7:9], inputs[9:]
    ctx.save_for_backward(*output, *inputs[3:7])
    ctx.mark_non_differentiable(*output[2:])
    # An unused LSE has no gradient; None saves adding zeros.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    out, lse, *saved = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    found = _call_backward(dout, dlse, out, lse, *saved, *ctx.bounds, *ctx.arguments)
    return *found, *[None] * (6 + len(ctx.arguments))


_call_forward = differentiable(_forward, _gradients, _save_for_backward, has_batch=False)


def differentiable_packed_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    softmax_scale: float,
    causal: bool,
    quantization: Fp8Quantization,
    backend: str | None,
    two_level: bool,
    window: Sides = FULL_SIDES,
    exact_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and lse through torch's dispatcher, which differentiates, traces and transforms."""
    call = softmax_scale, causal, backend, two_level, *window, exact_lse
    out, lse, *_ = _call_forward(q, k, v, *lengths, *Options.of(quantization), *call)
    return out, lse
