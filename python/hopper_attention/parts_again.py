"""FP8 attention to quantized tensors like those of an earlier call: what that found serves again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.device_memory import Facts, Piece
from hopper_attention.launch import fp8
from hopper_attention.launch.base import REMEMBERED_CALLS, current_device, no_vectors
from hopper_attention.launch.fp8 import Fp8HopperLauncher
from hopper_attention.layout import TMA_BYTES
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import FULL_SIDES
from hopper_attention.quantized import QuantizedQKV, TransposedV

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PartsCall:
    """What serves calls like an earlier one, without a window. ``rows_q`` rows of Q share a scale; ``no_mean`` and
    ``no_lse`` are what the kernel takes where there is none."""

    launcher: Fp8HopperLauncher
    out: Facts
    lse: Facts
    ones: Any
    no_mean: Any
    no_lse: Any
    rows_q: int
    default_scale: float

    @classmethod
    def of(cls, launcher: Fp8HopperLauncher, parts: QuantizedQKV) -> PartsCall:
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
        return cls(launcher, out.facts, lse.facts, ones, no_mean, no_lse, rows_q, scale)

    def __call__(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements."""
        q, k, v, make = parts.q, parts.k, parts.v, device_memory.empty_on_gpu
        out, lse = make(*self.out), make(*self.lse) if wants_lse else self.no_lse
        mean = parts.mean_v if parts.mean_v.numel() else self.no_mean
        tensors, scales = (q.data, k.data, v.data, out, lse), (q.scale, k.scale, v.scale, self.ones)
        self.launcher.queue(tensors, scales, mean, self.rows_q, softmax_scale, FULL_SIDES)
        return out, lse


remembered: Remembered[PartsCall] = Remembered(REMEMBERED_CALLS)


def find(parts: QuantizedQKV, options: tuple[Any, ...]) -> PartsCall | None:
    """What serves a call without a window: one like it was made, and its GPU is the current one; or None. None in a
    CUDA graph too, as of ``FusedCalls``.

    Args:
        options: all other arguments of the call but the scale. They count with their types.
    """
    v = parts.v
    if not may_be_like() or type(v) is not TransposedV or _is_undone_by_pytorch(parts):
        return None
    tensors = _tensors_of(parts)
    call = remembered.find((len(tensors), *_key_of(parts, v.seqlen, options)), *tensors)
    if call is None or _addresses(parts) % TMA_BYTES:
        return None
    index = call.launcher.device_index
    return call if current_device() == index and not device_memory.records_graph(index) else None


def remember(parts: QuantizedQKV, options: tuple[Any, ...], launch: Any) -> None:
    """Let ``find`` find a call of plain tensors without a window, which ``launch`` served, if the kernel takes its
    tensors as they are and PyTorch has no part in the result."""
    v, tensors = parts.v, _tensors_of(parts)
    if (
        not isinstance(launch, Fp8HopperLauncher)
        or launch.repairs
        or launch.has_window
        or type(v) is not TransposedV
        or _is_undone_by_pytorch(parts)
        or not may_be_like()
        or any(x.requires_grad or not x.is_contiguous() for x in tensors)
        or device_memory.is_capturing(parts.q.data.device)
    ):
        return
    key = len(tensors), *_key_of(parts, v.seqlen, options)
    if remembered.comes_again(key):
        remembered.keep(key, PartsCall.of(launch, parts), *tensors)


def _is_undone_by_pytorch(parts: QuantizedQKV) -> bool:
    """Whether V is rotated, which is undone in the output, or K lost its mean, which is in the LSE."""
    return parts.quantization.rotate_v or parts.shift.numel() > 0


def _key_of(parts: QuantizedQKV, seqlen_k: int, options: tuple[Any, ...]) -> Key:
    q, k = parts.q, parts.k
    quantized = q.block, q.largest, k.block, k.largest, parts.v.block, seqlen_k, parts.dtype
    return q.data.shape, k.data.shape, quantized, options, tuple(map(type, options))


def _tensors_of(parts: QuantizedQKV) -> tuple[Tensor, ...]:
    """All that the kernel reads."""
    q, k, v, mean = parts.q, parts.k, parts.v, parts.mean_v
    given = q.data, k.data, v.data, q.scale, k.scale, v.scale
    return (*given, mean) if mean.numel() else given


def _addresses(parts: QuantizedQKV) -> int:
    """Of what TMA, or a vector access, reads: a multiple of 16 bytes if all are."""
    data = parts.q.data.data_ptr() | parts.k.data.data_ptr() | parts.v.data.data_ptr()
    return data | parts.mean_v.data_ptr()
