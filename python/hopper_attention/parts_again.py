"""FP8 attention to quantized tensors like those of an earlier call: what that found serves again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.checks import FULL_WINDOW
from hopper_attention.device_memory import Facts, Piece, Pieces
from hopper_attention.features import with_mask
from hopper_attention.few_blocks import class_of_keys
from hopper_attention.fp8_rules import block_of
from hopper_attention.launch import at_once, fp8
from hopper_attention.launch.at_once import Given, ListedPart, Part, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, current_device, no_vectors
from hopper_attention.launch.fp8 import Fp8HopperLauncher
from hopper_attention.layout import TMA_BYTES
from hopper_attention.like_calls import NO_LENGTHS, Remembered, may_be_like
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.parts_memory import AnyLengthLayout, LengthLayout, PartsLayout
from hopper_attention.problem import longest_alike
from hopper_attention.quantized import MEMORY, PartsMemory, QuantizedQKV, TransposedV

Key = tuple[Any, ...]
Window = tuple[Any, Any]
NO_WINDOW: Window = (FULL_WINDOW, 0)

FIRST_PIECE = 7
"""Of the arguments of a script, the first of results in parts."""


@dataclass(frozen=True, slots=True)
class PartsCall:
    """What serves calls like an earlier one. ``rows_q`` rows of Q share a scale; ``no_mean``, ``no_lse`` and
    ``no_runs`` are what the kernel takes where there is none. ``window`` are the sides of the mask, ``of_window`` what
    the kernel takes of them."""

    launcher: Fp8HopperLauncher
    out: Facts
    lse: Facts
    ones: Any
    no_mean: Any
    no_lse: Any
    no_runs: tuple[Any, ...]
    rows_q: int
    default_scale: float
    has_mean: bool
    has_lone_scale: bool
    parts: Pieces
    window: Sides
    of_window: tuple[Any, ...]

    @classmethod
    def of(cls, launcher: Fp8HopperLauncher, parts: QuantizedQKV, window: Sides) -> PartsCall:
        """That of calls with parts like these."""
        (batch, seqlen_q, heads, head_dim), kv_heads, device = (
            parts.q.shape,
            parts.k.shape[2],
            parts.q.data.device,
        )
        out = Piece((batch, seqlen_q, heads, launcher.result.head_dim_v), launcher.result.dtype)
        ones = kept_argument(device_memory.unit_scales(batch, kv_heads, device))
        no_mean, no_lse = (kept_argument(no_vectors(batch, n, device)) for n in (kv_heads, heads))
        rows_q = parts.q.block if parts.q.block < seqlen_q else fp8.ALL_ROWS
        lse, scale = Piece((batch, heads, seqlen_q)), head_dim**-0.5
        options = rows_q, scale, parts.mean_v.numel() > 0, launcher.block_k == fp8.ALL_ROWS
        no_runs = tuple(map(kept_argument, fp8.no_runs_of(launcher, batch, device)))
        of_parts = launcher.pieces_of(out.shape)
        of_mask = window, launcher.of_window(window)
        made = out.facts, lse.facts, ones, no_mean, no_lse, no_runs
        return cls(launcher, *made, *options, of_parts, *of_mask)

    def __call__(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements."""
        q, k, v, make, launcher = parts.q, parts.k, parts.v, device_memory.empty_on_gpu, self.launcher
        out, lse = make(*self.out), make(*self.lse) if wants_lse else self.no_lse
        v_scale, o_scale = v.scale, self.ones
        if self.has_lone_scale:
            v_scale, o_scale = o_scale, v_scale
        mean = parts.mean_v if self.has_mean else self.no_mean
        if self.parts:
            tensors, scales = (q.data, k.data, v.data, out, lse), (q.scale, k.scale, v.scale, self.ones)
            launcher.queue(tensors, scales, mean, self.rows_q, softmax_scale, self.window, ())
            return out, lse
        # As ``Fp8HopperLauncher.arguments``.
        launcher.kernel(
            q.data,
            k.data,
            v.data,
            out,
            lse,
            device_memory.tile_counter(launcher.device_index),
            q.scale,
            k.scale,
            v_scale,
            o_scale,
            mean,
            self.rows_q,
            launcher.block_k,
            softmax_scale,
            *self.of_window,
            *self.no_runs,
            launcher.num_ctas,
        )
        return out, lse


@dataclass(frozen=True, slots=True)
class MemoryCall:
    """``PartsCall`` of parts that nobody has asked for yet: their kernel reads them where they lie."""

    made: PartsCall
    launcher: Fp8HopperLauncher
    script: Script
    out: Facts
    lse: Facts
    no_lse: Any
    default_scale: float

    @classmethod
    def of(cls, call: PartsCall, layout: PartsLayout | AnyLengthLayout) -> MemoryCall:
        """What ``call`` is where parts lie like this."""
        codes, floats, out, lse, counter, scale, listed = map(Given, range(FIRST_PIECE))
        places = codes.number, floats.number
        if isinstance(layout, PartsLayout):
            parts: Sequence[Part | ListedPart] = layout.parts(*places)
        else:
            parts = layout.parts(*places, listed.number)
        q, k, v, of_q, of_k, of_v, *means = parts
        filled, behind = call.launcher.merge_in_script(call.out, (out, lse), False, FIRST_PIECE)
        tensors, scales = (q, k, v, *filled), (of_q, of_k, of_v, call.ones)
        mean = means[0] if means else call.no_mean
        of_call = counter, scales, mean, call.rows_q, scale, call.window, call.no_runs
        attention = Step(call.launcher.kernel, call.launcher.arguments(tensors, *of_call))
        script = at_once.make_script([attention, *behind])
        results = call.out, call.lse, call.no_lse
        return cls(call, call.launcher, script, *results, call.default_scale)

    def __call__(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        """As that of ``PartsCall``."""
        make, memory = device_memory.empty_on_gpu, vars(parts).get(MEMORY)
        if memory is None:
            # Another thread has asked for them since they were looked at.
            return self.made(parts, softmax_scale, wants_lse)
        layout, codes, floats = memory
        out, lse = make(*self.out), make(*self.lse) if wants_lse else self.no_lse
        index, of_parts = self.launcher.device_index, self.made.parts
        counter = device_memory.tile_counter(index)
        listed = layout.listed.buffer_info()[0] if isinstance(layout, LengthLayout) else 0
        given = codes, floats, out, lse, counter, softmax_scale, listed
        if of_parts:
            self.script.run(*given, *device_memory.stream_memory(index, of_parts).arguments)
        else:
            self.script.run(*given)
        return out, lse


remembered: Remembered[PartsCall] = Remembered(REMEMBERED_CALLS)

of_any_length: Remembered[PartsCall] = Remembered(REMEMBERED_CALLS)
"""The same by ``_class_key``: calls with other numbers of keys that are served alike."""

LENGTHS = {1: 1, 2: 3, 4: 2, 5: 2}
"""Of ``_tensors_of``, those that have as many keys, or scales of keys, as a call has, and their dimension."""

in_memory: Remembered[MemoryCall] = Remembered(REMEMBERED_CALLS)


def find(
    parts: QuantizedQKV, options: tuple[Any, ...], window: Window = NO_WINDOW
) -> PartsCall | MemoryCall | None:
    """What serves a call: one like it was made, and its GPU is the current one; or None. None in a CUDA graph too, as
    of ``FusedCalls``.

    Args:
        options: all other arguments of the call but the scale, causal first. They count with their types.
        window: window_size and attention_chunk.
    """
    if not may_be_like():
        return None
    memory = vars(parts).get(MEMORY)
    call = (
        _find_made(parts, options, window)
        if memory is None
        else _find_in_memory(parts, memory, options, window)
    )
    if call is None:
        return None
    index = call.launcher.device_index
    return call if current_device() == index and not device_memory.records_graph(index) else None


def _find_made(parts: QuantizedQKV, options: tuple[Any, ...], window: Window) -> PartsCall | None:
    v, q_shape = parts.v, parts.q.data.shape
    if type(v) is not TransposedV or _is_undone_by_pytorch(parts) or len(q_shape) != 4:
        return None
    masked = with_mask(options, window, q_shape[1], v.seqlen)
    if masked is None:
        return None
    tensors = _tensors_of(parts)
    group = len(tensors), *_group_of(parts, v.seqlen, masked)
    call = remembered.find_latest(group, *tensors)
    if call is None:
        key = *_shapes_of(parts), *group
        call = remembered.find(key, *tensors, group=group)
        if call is None:
            call = _find_of_any_length(parts, v, tensors, masked, key)
    return None if call is None or _addresses(tensors) % TMA_BYTES else call


def _find_of_any_length(
    parts: QuantizedQKV, v: TransposedV, tensors: tuple[Tensor, ...], options: tuple[Any, ...], key: Key
) -> PartsCall | None:
    """What serves a call by one with another number of keys, which does not decide on how it is served."""
    class_key = _class_key(parts, v.seqlen, options)
    call = None if class_key is None else of_any_length.find(class_key, *tensors)
    if call is None:
        return None
    k, *others = (tensors[place] for place in LENGTHS)
    # A dimension of size 1 may have any stride, and is contiguous.
    steps = k.stride()[0] | v.data.stride()[0] | v.data.stride()[1]
    is_same = k.shape[1] == v.seqlen and not steps % TMA_BYTES
    if not is_same or not k.is_contiguous() or not all(x.is_contiguous() for x in others):
        return None
    if remembered.comes_again(key):
        remembered.keep(key, call, *tensors)
    return call


def _find_in_memory(
    parts: QuantizedQKV, memory: PartsMemory, options: tuple[Any, ...], window: Window
) -> MemoryCall | None:
    layout, codes, floats = memory
    if isinstance(layout, LengthLayout):
        # That of any number of keys for which a kernel is chosen alike, but for whether they share a scale.
        kind: PartsLayout | AnyLengthLayout = layout.of_any
        of_any_length: Mapping[int, int] = {0: 0, 1: 0}
        one = layout.of_any.one
        block = block_of(one.rows_k, layout.seqlen_k)
    elif isinstance(layout, PartsLayout):
        kind, one, of_any_length, block = layout, layout, NO_LENGTHS, layout.rows_k
    else:
        return None
    q_shape, *_ = one.offsets[0]
    masked = with_mask(options, window, q_shape[1], layout.seqlen_k)
    if masked is None:
        return None
    key = kind, block, class_of_keys(q_shape, layout.seqlen_k), masked, tuple(map(type, masked))
    found = in_memory.find(key, codes, floats)
    if found is None:
        call = _find_made(parts.opened(), options, window)
        if call is not None:
            found = MemoryCall.of(call, kind)
            in_memory.keep(key, found, codes, floats, of_any_length=of_any_length)
    return found


def remember(
    parts: QuantizedQKV,
    options: tuple[Any, ...],
    launch: Any,
    window: Window = NO_WINDOW,
    sides: Sides = FULL_SIDES,
) -> None:
    """Let ``find`` find a call of plain tensors, which ``launch`` served with the ``sides`` of its mask, if the kernel
    takes its tensors as they are and PyTorch has no part in the result."""
    v, tensors = parts.v, _tensors_of(parts)
    if (
        not isinstance(launch, Fp8HopperLauncher)
        or launch.repairs
        or launch.widens
        or type(v) is not TransposedV
        or _is_undone_by_pytorch(parts)
        or not may_be_like()
        or any(x.requires_grad or not x.is_contiguous() for x in tensors)
        or device_memory.is_capturing(parts.q.data.device)
    ):
        return
    masked = with_mask(options, window, parts.q.data.shape[1], v.seqlen)
    if masked is None:
        return
    key = *_shapes_of(parts), len(tensors), *_group_of(parts, v.seqlen, masked)
    class_key = _class_key(parts, v.seqlen, masked)
    comes_again = remembered.comes_again(key)
    has_others = class_key is not None and of_any_length.comes_again(class_key)
    if not comes_again and not has_others:
        return
    call = PartsCall.of(launch, parts, sides)
    if comes_again:
        remembered.keep(key, call, *tensors)
    if has_others and of_any_length.find(class_key, *tensors) is None:
        of_any_length.keep(class_key, call, *tensors, of_any_length=LENGTHS)


def _is_undone_by_pytorch(parts: QuantizedQKV) -> bool:
    """Whether V is rotated, which is undone in the output, or K lost its mean, which is in the LSE."""
    return parts.quantization.rotate_v or parts.shift.numel() > 0


def _shapes_of(parts: QuantizedQKV) -> Key:
    return parts.q.data.shape, parts.k.data.shape


def _group_of(parts: QuantizedQKV, seqlen_k: int, options: tuple[Any, ...]) -> Key:
    """What is compared of a call beside its tensors."""
    q, k = parts.q, parts.k
    quantized = q.block, q.largest, k.block, k.largest, parts.v.block, seqlen_k, parts.dtype
    return *quantized, options, tuple(map(type, options))


def _class_key(parts: QuantizedQKV, seqlen_k: int, options: tuple[Any, ...]) -> Key | None:
    """That of all numbers of keys for which a kernel is chosen alike; None where there is none."""
    q, k, v = parts.q, parts.k, parts.v
    if not 0 < seqlen_k <= MAX_SEQLEN:
        return None
    blocks = q.block, block_of(k.block, seqlen_k), block_of(v.block, seqlen_k)
    codes = q.largest, k.largest, parts.dtype, q.data.shape, parts.mean_v.numel()
    longest = longest_alike(seqlen_k), class_of_keys(q.data.shape, seqlen_k)
    return *longest, *blocks, *codes, options, tuple(map(type, options))


def _tensors_of(parts: QuantizedQKV) -> tuple[Tensor, ...]:
    """All that the kernel reads."""
    q, k, v, mean = parts.q, parts.k, parts.v, parts.mean_v
    given = q.data, k.data, v.data, q.scale, k.scale, v.scale
    return (*given, mean) if mean.numel() else given


def _addresses(tensors: tuple[Tensor, ...]) -> int:
    """Of what TMA, or a vector access, reads of ``_tensors_of``: a multiple of 16 bytes if all are."""
    data = tensors[0].data_ptr() | tensors[1].data_ptr() | tensors[2].data_ptr()
    return data | tensors[6].data_ptr() if len(tensors) > 6 else data
