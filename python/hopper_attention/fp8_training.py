"""FP8 attention that can be differentiated: an FP8 forward with a 16-bit backward.

The gradient is that of the attention which was computed, of the dequantized inputs, passed on to the inputs as if
quantization were the identity (a straight-through estimator). Saved are the e4m3 tensors with their scales, half the
memory of the 16-bit ones, the output and the LSE; the backward dequantizes them to 16 bits. Taking the 16-bit
inputs instead would not fit the LSE of the FP8 scores: where logits are large, probabilities would not add up to 1.

``hopper_attention::forward_fp8_of_16_bits`` and ``::backward_fp8_of_16_bits`` are functional, and blocks that the
kernel's tile decides on are found where they run, so that torch.compile need not know how many keys there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hopper_attention import ops
from hopper_attention.autograd import refuse_second_derivative
from hopper_attention.fp8_ops import (
    CALL,
    OF_THE_TILE,
    OPTIONS,
    Call,
    Options,
    Parts,
    attend_and_undo,
    count_blocks,
    empty_parts,
    layout_of,
    mixes_samples,
    put_together,
)
from hopper_attention.launch.base import without_rows
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.quantization_rules import add_mean
from hopper_attention.quantized import (
    TILE,
    Fp8Quantization,
    default_block_k,
    default_block_widths,
)
from hopper_attention.quantizers import quantize_here
from hopper_attention.rotation import rotate_back_alike, rotate_head_dim
from hopper_attention.transforms import differentiable

Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk, dv."""


class Saved(NamedTuple):
    """What the gradient needs of quantized tensors: ``Parts``, but for the scales of K and V, which are side by side.

    ``kv_scale`` (batch, kv_heads, 2 n) has those of K, then those of V. n is the number of the narrowest blocks that
    the length may have, so that torch.compile need not compare the length; and never is a size 1, for which it would
    compile anew. Scales past the last block mean nothing.
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    v: Tensor
    kv_scale: Tensor
    shift: Tensor
    mean_v: Tensor

    @classmethod
    def of(cls, parts: Parts, blocks: int) -> Saved:
        p, missing = parts, blocks - parts.k_scale.shape[2]
        scales = (pad(x, (0, missing)) if missing else x for x in (p.k_scale, p.v_scale))
        return cls(p.q, p.q_scale, p.k, p.v, torch.cat(list(scales), 2), p.shift, p.mean_v)

    def parts(self, blocks: int) -> Parts:
        k_scale, v_scale = (x[..., :blocks] for x in self.kv_scale.chunk(2, 2))
        return Parts(self.q, self.q_scale, self.k, k_scale, self.v, v_scale, self.shift, self.mean_v)


ARGUMENTS = len(Options._fields) + len(Call._fields)
"""Of both operators, beside tensors."""

SAVED = ", ".join(f"Tensor {name}" for name in Saved._fields)


@torch.library.custom_op(
    "hopper_attention::forward_fp8_of_16_bits",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, {CALL}, bool wants_lse=True) "
    f"-> (Tensor out, Tensor lse, {SAVED})",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """out (b, sq, h, dv), lse float32 (b, h, sq), and what is ``Saved``. Without ``wants_lse`` the lse has no rows, and
    there is no gradient."""
    options, call, wants_lse = Options(*arguments[:8]), Call(*arguments[8:ARGUMENTS]), _wants_lse(arguments)
    head_dims = k.shape[3], v.shape[3]
    c = with_blocks_of_the_tile(options.quantization(), head_dims, k.shape[1], call.two_level, call.mask)
    quantized = quantize_here(q, k, v, c, quantizer_of(call.backend))
    of_call = *call[:4], wants_lse, call.mask.sides, call.exact_lse
    out, lse = attend_and_undo(quantized, *of_call)
    lse = lse if wants_lse else without_rows(lse)
    narrowest = _narrowest_blocks(options, head_dims, call)
    blocks = count_blocks(k.shape[1], c.granularity, narrowest.block_k)
    return out, lse, *Saved.of(Parts.of(quantized), blocks)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    options, call = Options(*arguments[:8]), Call(*arguments[8:ARGUMENTS])
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, seqlen_q if _wants_lse(arguments) else 0), dtype=torch.float32)
    p = empty_parts(q, k, v, _narrowest_blocks(options, (k.shape[3], v.shape[3]), call))
    batch, kv_heads, blocks = p.k_scale.shape
    kv_scale = p.k_scale.new_empty((batch, kv_heads, 2 * blocks))
    return out, lse, *Saved(p.q, p.q_scale, p.k, p.v, kv_scale, p.shift, p.mean_v)


def _wants_lse(arguments: tuple[Any, ...]) -> bool:
    """The last argument, where it is given."""
    return len(arguments) <= ARGUMENTS or bool(arguments[ARGUMENTS])


def _narrowest_blocks(options: Options, head_dims: tuple[int, int], call: Call) -> Options:
    """``options`` with the fewest rows that a block of K and V may have at any length."""
    if options.block_k != OF_THE_TILE:
        return options
    kind = call.two_level, call.causal
    return options._replace(block_k=default_block_widths(*head_dims, *kind).narrowest())


def with_blocks_of_the_tile(
    quantization: Fp8Quantization,
    head_dims: tuple[int, int],
    seqlen_k: int,
    two_level: bool,
    mask: MaskSpec,
) -> Fp8Quantization:
    """Blocks of K and V as wide as the tile of the kernel that will attend, where nothing else was asked for.

    Those of ``quantize_qkv``, which knows neither the mask nor the levels, would do; but that kernel might
    then go through them in halves, or have a tile of another width.
    """
    if quantization.block_k != TILE:
        return quantization
    seen = mask.most_keys(seqlen_k)
    return replace(quantization, block_k=default_block_k(*head_dims, seen, two_level, mask.causal))


def quantizer_of(backend: str | None) -> str | None:
    """The backend of ``quantize_qkv`` that goes with one of attention: the reference calls no kernel at all."""
    return "torch" if backend == "reference" else None


@torch.library.custom_op(
    "hopper_attention::backward_fp8_of_16_bits",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SAVED}, {OPTIONS}, {CALL}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
)
def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Gradients:
    """dq, dk, dv of ``forward_fp8_of_16_bits``, whose results are given."""
    saved, options = Saved(*arguments[:7]), Options(*arguments[7:15])
    call = Call(*arguments[15:])
    head_dims, seqlen_k = (saved.k.shape[3], out.shape[3]), saved.k.shape[1]
    c = with_blocks_of_the_tile(options.quantization(), head_dims, seqlen_k, call.two_level, call.mask)
    q, k, v = _dequantize(saved, c, out.dtype)
    if saved.shift.numel():
        lse = lse - call.softmax_scale * saved.shift
    if c.rotate_v:
        dout, out = (rotate_head_dim(x, c.seed).to(out.dtype) for x in (dout, out))
    options_16 = call.softmax_scale, call.causal, call.backend, False, *call.mask.sides
    dq, dk, dv = ops.backward(dout, dlse, q, k, v, out, lse, *options_16)
    if c.rotate:
        dq, dk = (rotate_back_alike(x, c.seed) for x in (dq, dk))
    if c.rotate_v:
        dv = rotate_back_alike(dv, c.seed)
    return dq, dk, dv


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> Gradients:
    saved = Saved(*arguments[:7])
    batch, seqlen_k, kv_heads, _ = saved.k.shape
    dv = out.new_empty((batch, seqlen_k, kv_heads, out.shape[3]))
    return out.new_empty(saved.q.shape), out.new_empty(saved.k.shape), dv


def _dequantize(saved: Saved, c: Fp8Quantization, dtype: torch.dtype) -> Gradients:
    """q, k and v as they were attended to, still rotated. ``block_k`` is a number."""
    layout = layout_of(saved.q, saved.k, c)._replace(dtype=dtype)
    parts = saved.parts(blocks=-(-layout.seqlen_k // layout.rows_k))
    quantized = put_together(parts, layout, c)
    q, k, v = (x.dequantize(dtype) for x in (quantized.q, quantized.k, quantized.v))
    if parts.mean_v.numel():
        # The output has the mean, and the gradient of a score compares V with it.
        add_mean(v, rotate_head_dim(parts.mean_v, c.seed) if c.rotate_v else parts.mean_v)
    return q, k, v


_call_backward = differentiable(_backward, refuse_second_derivative)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.arguments, ctx.given = inputs[3 : 3 + ARGUMENTS], len(inputs)
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(*output[2:])
    # An unused LSE has no gradient; None saves adding zeros.
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    if dlse is not None and Options(*ctx.arguments[:8]).smooth_k:
        raise NotImplementedError(
            "the LSE of FP8 attention was differentiated with smooth_k=True, whose mean of K is not kept: use "
            "Fp8Quantization(smooth_k=False)"
        )
    out, lse, *saved = ctx.saved_tensors
    if lse.shape[2] < out.shape[1]:
        raise NotImplementedError(
            "a backward pass reached FP8 attention that left out its LSE, as hopper_attention::forward_fp8_of_16_bits "
            "does with wants_lse=False: call it with wants_lse=True"
        )
    dout = torch.zeros_like(out) if dout is None else dout
    return *_call_backward(dout, dlse, out, lse, *saved, *ctx.arguments), *[None] * (ctx.given - 3)


_call_forward = differentiable(_forward, _gradients, _save_for_backward, mixes_samples)


def differentiable_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    quantization: Fp8Quantization,
    backend: str | None,
    two_level: bool,
    window: Sides = FULL_SIDES,
    exact_lse: bool = False,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """out and lse through torch's dispatcher, which differentiates, traces and transforms. Without ``wants_lse`` the
    lse has no rows, and there is no gradient."""
    options = Options.of(quantization)
    call = Call(softmax_scale, causal, backend, two_level, *window, exact_lse)
    out, lse, *_ = _call_forward(q, k, v, *options, *call, wants_lse)
    return out, lse
