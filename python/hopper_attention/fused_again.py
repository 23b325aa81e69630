"""FP8 of 16-bit tensors like those of an earlier call, which the kernel quantized: what that found serves again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from hopper_attention.device_memory import no_floats
from hopper_attention.launch.base import REMEMBERED_CALLS, Launcher, current_device
from hopper_attention.launch.quantize import QuantizeLauncher, addressable
from hopper_attention.layout import TMA_BYTES
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.quantized import Fp8Quantization, Means, QuantizedQKV


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """A call of ``quantize_qkv``; ``made`` is its quantization with numbers."""

    launcher: QuantizeLauncher
    given: Fp8Quantization
    made: Fp8Quantization

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> QuantizedQKV:
        """As ``quantizers.quantize_plain``."""
        means = Means(no_floats(q.device), self.launcher.find_mean_v(v))
        parts = self.launcher.launch(q, k, v, self.made.seed, means)
        return QuantizedQKV.unchecked(*parts, self.made, q.dtype, means)


class FusedCall(Protocol):
    """What serves calls. ``given`` is their quantization, by whose identity they are found, so that it has to live."""

    @property
    def launcher(self) -> Launcher: ...

    @property
    def given(self) -> Fp8Quantization: ...


Fused = TypeVar("Fused", bound=FusedCall)


class FusedCalls(Generic[Fused]):
    """Calls of tensors that nothing differentiates. Options count with their types."""

    def __init__(self) -> None:
        self._remembered: Remembered[Fused] = Remembered(REMEMBERED_CALLS)
        self.cache_clear = self._remembered.cache_clear

    def find(self, q: Any, k: Any, v: Any, quantization: Any, *options: Any) -> Fused | None:
        """What serves a call of these arguments: one like it was made, and its GPU is the current one; or None."""
        if type(q) is not Tensor or type(k) is not Tensor or not may_be_like():
            return None
        call = self._remembered.find(_key_of(q, k, quantization, options), q, k, v)
        if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES:
            return None
        return call if current_device() == call.launcher.device_index else None

    def keep(self, call: Fused, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> None:
        """Let ``find`` with these arguments find a call that was made, if the kernel takes the tensors as they are."""
        if any(x.requires_grad or addressable(x) is not x for x in (q, k, v)):
            return
        key = _key_of(q, k, call.given, options)
        if self._remembered.comes_again(key):
            self._remembered.keep(key, call, q, k, v)


def _key_of(q: Tensor, k: Tensor, quantization: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
    return q.shape, k.shape, id(quantization), options, tuple(map(type, options))


quantizing: FusedCalls[QuantizeCall] = FusedCalls()
