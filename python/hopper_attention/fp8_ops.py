"""The custom operators behind ``quantize_qkv`` and ``flash_attn_quantized_func``, for calls that are no plain ones.

``hopper_attention::quantize`` and ``::forward_quantized`` are functional. Operators take tensors and numbers alone, so
the parts of a ``QuantizedQKV`` go in and come out one by one. Neither has a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hopper.quantize.config import largest_codes
from hopper_attention.launch.base import without_rows
from hopper_attention.launch.fp8 import attend
from hopper_attention.masks import FULL_SIDES, UNLIMITED, MaskSpec, Sides
from hopper_attention.plain_calls import is_transformed
from hopper_attention.quantized import (
    E4M3,
    TILE,
    Fp8Quantization,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
    padded_keys,
)
from hopper_attention.quantizers import quantize_here
from hopper_attention.transforms import differentiable

OF_THE_TILE = 0
"""``block_k`` of ``Options`` for the keys of the kernel's tile."""

OPTIONS = (
    "bool rotate, str granularity, SymInt block_q, SymInt block_k, SymInt seed, bool smooth_k, bool rotate_v, "
    "bool smooth_v"
)
"""``Options`` in the schema of an operator."""


class Options(NamedTuple):
    """``Fp8Quantization`` as operators take it."""

    rotate: bool
    granularity: str
    block_q: int
    block_k: int
    seed: int
    smooth_k: bool
    rotate_v: bool
    smooth_v: bool

    @classmethod
    def of(cls, c: Fp8Quantization) -> Options:
        block_k = c.block_k if isinstance(c.block_k, int) else OF_THE_TILE
        return cls(c.rotate, c.granularity, c.block_q, block_k, c.seed, c.smooth_k, c.rotate_v, c.smooth_v)

    def quantization(self) -> Fp8Quantization:
        values = self._asdict()
        return Fp8Quantization(**(values if self.block_k != OF_THE_TILE else values | {"block_k": TILE}))


CALL = (
    "float softmax_scale, bool causal, str? backend, bool two_level, SymInt window_left=-1, SymInt window_right=-1, "
    "SymInt attention_chunk=0, bool exact_lse=False"
)
"""How the operators are called; ``causal`` and the sides of the window are those of a ``MaskSpec``, ``exact_lse`` is
that of an ``Fp8AttentionProblem``."""


class Call(NamedTuple):
    """``CALL`` as operators take it."""

    softmax_scale: float
    causal: bool
    backend: str | None
    two_level: bool
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    attention_chunk: int = 0
    exact_lse: bool = False

    @property
    def mask(self) -> MaskSpec:
        return MaskSpec(self.causal, self.window_left, self.window_right, self.attention_chunk)


class Parts(NamedTuple):
    """The tensors of a ``QuantizedQKV``."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor
    shift: Tensor
    mean_v: Tensor

    @classmethod
    def of(cls, x: QuantizedQKV) -> Parts:
        return cls(x.q.data, x.q.scale, x.k.data, x.k.scale, x.v.data, x.v.scale, x.shift, x.mean_v)


class Layout(NamedTuple):
    """What else a ``QuantizedQKV`` says of its tensors: rows of each that share a scale, the largest codes of Q and K,
    the keys that are meant, whether V is transposed, and the dtype of the output."""

    rows_q: int
    rows_k: int
    rows_v: int
    largest_q: float
    largest_k: float
    seqlen_k: int
    is_transposed: bool
    dtype: torch.dtype


LAYOUT = (
    "SymInt rows_q, SymInt rows_k, SymInt rows_v, float largest_q, float largest_k, SymInt seqlen_k, "
    "bool is_transposed, ScalarType dtype"
)
"""``Layout`` in the schema of an operator."""


def take_apart(x: QuantizedQKV) -> tuple[Parts, Layout, Options]:
    q, k, v = x.q, x.k, x.v
    is_transposed = isinstance(v, TransposedV)
    layout = Layout(q.block, k.block, v.block, q.largest, k.largest, v.shape[1], is_transposed, x.dtype)
    return Parts.of(x), layout, Options.of(x.quantization)


def put_together(parts: Parts, layout: Layout, quantization: Fp8Quantization) -> QuantizedQKV:
    v: TransposedV | QuantizedTensor
    if layout.is_transposed:
        v = TransposedV(parts.v, parts.v_scale, layout.rows_v, layout.seqlen_k)
    else:
        v = QuantizedTensor(parts.v, parts.v_scale, layout.rows_v)
    return QuantizedQKV(
        QuantizedTensor(parts.q, parts.q_scale, layout.rows_q, layout.largest_q),
        QuantizedTensor(parts.k, parts.k_scale, layout.rows_k, layout.largest_k),
        v,
        quantization=quantization,
        dtype=layout.dtype,
        shift=parts.shift,
        mean_v=parts.mean_v,
    )


def count_blocks(seqlen: int, granularity: str, block: int) -> int:
    """Scales of a head of ``seqlen`` rows."""
    return -(-seqlen // block) if granularity == "block" else min(seqlen, 1)


def empty_parts(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Parts:
    """What quantization gives, without its values, on any kind of tensors."""
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, head_dim_v) = q.shape, v.shape

    def float32(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    blocks_k = count_blocks(seqlen_k, options.granularity, options.block_k)
    return Parts(
        q.new_empty(q.shape, dtype=E4M3),
        float32(batch, heads, count_blocks(seqlen_q, options.granularity, options.block_q)),
        q.new_empty(k.shape, dtype=E4M3),
        float32(batch, kv_heads, blocks_k),
        q.new_empty((batch, kv_heads, head_dim_v, padded_keys(seqlen_k)), dtype=E4M3),
        float32(batch, kv_heads, blocks_k),
        float32(batch, heads, seqlen_q) if options.smooth_k and seqlen_k else float32(0),
        float32(batch, kv_heads, head_dim_v) if options.smooth_v and seqlen_k else float32(0),
    )


def _refuse_gradient(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(
        "a backward pass reached quantize_qkv or flash_attn_quantized_func, which have no gradient: train with "
        "flash_attn_fp8_func, or call them under torch.no_grad()"
    )


@torch.library.custom_op(
    "hopper_attention::quantize",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, str? backend) -> ({', '.join(['Tensor'] * 8)})",
)
def _quantize(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Parts:
    *options, backend = arguments
    return take_apart(quantize_here(q, k, v, Options(*options).quantization(), backend))[0]


@_quantize.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Parts:
    return empty_parts(q, k, v, Options(*arguments[:-1]))


def mixes_samples(q: Tensor, k: Tensor, v: Tensor, rotate: bool, granularity: str, *others: Any) -> bool:
    """Whether entries of a batch share a scale."""
    return granularity == "tensor"


_call_quantize = differentiable(_quantize, _refuse_gradient, mixes_samples=mixes_samples)


def quantize_traced(
    q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization, backend: str | None
) -> QuantizedQKV:
    """``quantize_here`` by way of torch's dispatcher. ``block_k`` is a number."""
    if not is_transformed():
        # As under no_grad. Transforms would take what is detached for constant, without a word: they are refused.
        q, k, v = q.detach(), k.detach(), v.detach()
    parts = Parts(*_call_quantize(q, k, v, *Options.of(quantization), backend))
    return put_together(parts, layout_of(q, k, quantization), quantization)


def layout_of(q: Tensor, k: Tensor, quantization: Fp8Quantization) -> Layout:
    """What ``quantize_here`` makes of tensors like these. ``block_k`` is a number."""
    c, seqlen_q, seqlen_k = quantization, q.shape[1], k.shape[1]
    has_blocks = c.granularity == "block"
    rows_q = c.block_q if has_blocks else max(seqlen_q, 1)
    rows_k = cast(int, c.block_k) if has_blocks else max(seqlen_k, 1)
    largest = largest_codes(q.shape[3], c.scales_rows)
    return Layout(rows_q, rows_k, rows_k, *largest, seqlen_k, True, q.dtype)


def attend_and_undo(
    parts: QuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    wants_lse: bool,
    window: Sides = FULL_SIDES,
    exact_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of quantized tensors, with the mean of K back in the LSE."""
    options = causal, backend, two_level, wants_lse
    out, lse = attend(parts, softmax_scale, *options, window=window, exact_lse=exact_lse)
    # The LSE of a row without keys stays at -inf.
    if wants_lse and parts.shift.numel():
        lse = lse + softmax_scale * parts.shift
    return out, lse


@torch.library.custom_op(
    "hopper_attention::forward_quantized",
    mutates_args=(),
    schema=f"({', '.join(f'Tensor {name}' for name in Parts._fields)}, bool wants_lse, {LAYOUT}, {OPTIONS}, {CALL}) "
    "-> (Tensor, Tensor)",
)
def _forward_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    """out and lse; the lse has no rows if it is not wanted."""
    parts, wants_lse, layout = Parts(*arguments[:8]), arguments[8], Layout(*arguments[9:17])
    quantized = put_together(parts, layout, Options(*arguments[17:25]).quantization())
    call = Call(*arguments[25:])
    window = call.mask.sides
    out, lse = attend_and_undo(quantized, *call[:4], wants_lse, window=window, exact_lse=call.exact_lse)
    return out, lse if wants_lse else without_rows(lse)


@_forward_quantized.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    parts, wants_lse, layout = Parts(*arguments[:8]), arguments[8], Layout(*arguments[9:17])
    batch, seqlen_q, heads, _ = parts.q.shape
    head_dim_v = parts.v.shape[2] if layout.is_transposed else parts.v.shape[3]
    return (
        parts.q.new_empty((batch, seqlen_q, heads, head_dim_v), dtype=layout.dtype),
        parts.q.new_empty((batch, heads, seqlen_q if wants_lse else 0), dtype=torch.float32),
    )


_call_forward_quantized = differentiable(_forward_quantized, _refuse_gradient)


def attend_traced(
    quantized: QuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    window: Sides = FULL_SIDES,
    exact_lse: bool = False,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """``attend_and_undo`` by way of torch's dispatcher."""
    parts, layout, options = take_apart(quantized)
    call = softmax_scale, causal, backend, two_level, *window, exact_lse
    return _call_forward_quantized(*parts, wants_lse, *layout, *options, *call)
