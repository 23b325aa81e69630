"""FP8 attention to packed quantized tensors like those of an earlier call: what that found serves again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.device_memory import Piece
from hopper_attention.features import with_mask
from hopper_attention.fp8_rules import classes_of_lengths
from hopper_attention.launch.at_once import Given, Part
from hopper_attention.launch.base import REMEMBERED_CALLS, no_vectors
from hopper_attention.launch.fp8 import vectors_of
from hopper_attention.launch.packed_fp8 import PackedFp8Launcher
from hopper_attention.launch.varlen import is_empty
from hopper_attention.layout import TMA_BYTES, make_packed_addressable
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import Sides
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE, PackedQuantizedQKV, PackedTransposedV
from hopper_attention.packed_scripts import (
    FIRST,
    LSE,
    OUT,
    K,
    PackedSteps,
    Q,
    ScriptedCall,
    V,
    find_again,
    serve,
)

remembered: Remembered[ScriptedCall] = Remembered(REMEMBERED_CALLS)


def attend(
    parts: PackedQuantizedQKV, softmax_scale: Any, options: tuple[Any, ...], window: tuple[Any, Any]
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call, if one like it was made and ``serve`` can; else None.

    Args:
        options: all other arguments of the call, causal first, ``return_attn_probs`` second. They count with their
            types.
        window: window_size and attention_chunk.
    """
    if type(parts.v) is not PackedTransposedV or parts.quantization.rotate_v or not may_be_like():
        return None
    tensors = _tensors_of(parts)
    if parts.mean_v.data_ptr() % TMA_BYTES:
        return None
    masked = with_mask(options, window, *parts.lengths[4:])
    if masked is None:
        return None
    call = find_again(remembered, _group_of(parts, masked), *tensors, *parts.lengths.different)
    return serve(call, tensors, parts.lengths, softmax_scale, bool(options[1]))


def remember(
    parts: PackedQuantizedQKV, options: tuple[Any, ...], window: tuple[Any, Any], sides: Sides, launch: Any
) -> None:
    """Let ``attend`` find a call of plain tensors, which ``launch`` served, if the kernel takes its tensors as they are
    and PyTorch has no part in the result; ``sides`` are those of its mask."""
    lengths = parts.lengths
    masked = with_mask(options, window, *lengths[4:])
    if not isinstance(launch, PackedFp8Launcher) or launch.config.wide_codes or masked is None:
        return
    if type(parts.v) is not PackedTransposedV or parts.quantization.rotate_v or not may_be_like():
        return
    tensors = _tensors_of(parts)
    compared = *tensors, *lengths.different
    if any(type(x) is not Tensor or x.requires_grad or not x.is_contiguous() for x in compared):
        return
    # A dimension of one head may have any stride, and be contiguous.
    codes, mean = tensors[:3], parts.mean_v
    if any(make_packed_addressable(x) is not x for x in codes) or vectors_of(mean) is not mean:
        return
    if (
        parts.v.block == ONE_PER_SEQUENCE
        or lengths.seqused_q is not None
        or device_memory.is_capturing(tensors[0].device)
    ):
        return
    if is_empty(parts.q.data, parts.k.data, lengths):
        return
    key = tensors[0].shape, tensors[1].shape, *_group_of(parts, masked)
    if remembered.comes_again(key) and remembered.has_room(key, *compared):
        remembered.keep(key, _call_of(parts, launch, sides), *compared)


def _tensors_of(parts: PackedQuantizedQKV) -> tuple[Tensor, ...]:
    """What the kernel reads of parts: codes, scales, and the mean of V, if that was subtracted."""
    q, k, v, mean = parts.q, parts.k, parts.v, parts.mean_v
    given = q.data, k.data, v.data, q.scale, k.scale, v.scale
    return (*given, mean) if mean.numel() else given


def _group_of(parts: PackedQuantizedQKV, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of calls that one would serve, but for the sizes of tensors. Bounds of lengths decide on the kernel."""
    q, k, v, lengths = parts.q, parts.k, parts.v, parts.lengths
    quantized = q.block, q.largest, k.block, k.largest, v.block, parts.dtype, parts.mean_v.numel() > 0
    classes = classes_of_lengths(*lengths[4:])
    return *quantized, classes, lengths.pattern, options, tuple(map(type, options))


def _call_of(parts: PackedQuantizedQKV, launcher: PackedFp8Launcher, sides: Sides) -> ScriptedCall:
    """That of calls with parts like these."""
    steps, kv_heads = PackedSteps.of(launcher, parts.q.data, parts.v.shape, parts.lengths), parts.k.shape[1]
    ones = kept_argument(device_memory.unit_scales(steps.batch + 1, kv_heads, steps.device))
    given = (parts.q.scale, parts.k.scale, parts.v.scale)
    of_q, of_k, of_v = (
        Part(FIRST + number, 0, Piece((1, *scale.shape)).facts) for number, scale in enumerate(given)
    )
    mean = kept_argument(no_vectors(steps.batch + 1, kv_heads, steps.device))
    if parts.mean_v.numel():
        mean = Given(FIRST + len(given))
    tensors, filled = (Given(Q), Given(K), Given(V)), (Given(OUT), Given(LSE))
    blocks = parts.q.block, parts.k.block
    attention = steps.attention(tensors, filled, (of_q, of_k, of_v, ones), mean, blocks, sides)
    return steps.call([steps.plan(), attention], (), parts.dtype)
