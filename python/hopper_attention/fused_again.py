"""FP8 of 16-bit tensors like those of an earlier call, which the kernel quantized: what that found serves again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from hopper_attention import device_memory, parts_memory
from hopper_attention.device_memory import Facts, Piece
from hopper_attention.launch import at_once, value_mean
from hopper_attention.launch.at_once import Given, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, Launcher, current_device
from hopper_attention.launch.quantize import (
    Extras,
    Outputs,
    QuantizeLauncher,
    addressable,
    no_words,
    output_pieces,
)
from hopper_attention.launch.value_mean import ValueMeanLauncher
from hopper_attention.layout import TMA_BYTES
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.parts_memory import PartsLayout
from hopper_attention.quantized import Fp8Quantization, Means, QuantizedQKV


@dataclass(frozen=True, slots=True)
class QuantizeCall:
    """A call of ``quantize_qkv``; ``made`` is its quantization with numbers. Where it subtracts the mean of V,
    ``finder`` finds it, ``mean`` is what to make for it. Where the results are small, ``layout`` is how they lie in two
    tensors, and ``script`` fills these."""

    launcher: QuantizeLauncher
    given: Fp8Quantization
    made: Fp8Quantization
    extras: Extras
    outputs: tuple[Facts, ...]
    finder: ValueMeanLauncher | None
    mean: Facts
    no_floats: Tensor
    layout: PartsLayout | None
    script: Script | None

    @classmethod
    def of(
        cls,
        launcher: QuantizeLauncher,
        given: Fp8Quantization,
        made: Fp8Quantization,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> QuantizeCall:
        """That of calls with tensors like these."""
        c, (batch, _, kv_heads, head_dim_v), nothing = launcher.config, v.shape, no_words(v.device)
        extras = launcher.extras(made.seed, Means(nothing, nothing), q.device).kept()
        pieces = output_pieces(c.block_q, c.block_k, q.shape, k.shape, v.shape)
        outputs, mean = tuple(piece.facts for piece in pieces), Piece((batch, kv_heads, head_dim_v))
        finder = value_mean.find(v) if c.smooth_v else None
        no_floats = device_memory.no_floats(v.device)
        layout = script = None
        if sum(piece.bytes for piece in pieces[:3]) <= parts_memory.MAX_BYTES:
            if finder is not None:
                pieces = *pieces, mean
            rows = c.block_q, c.block_k
            layout = PartsLayout.of(pieces, rows, launcher.largest_codes, k.shape[1], no_floats)
            script = at_once.make_script(_steps(layout, launcher, finder, extras))
        return cls(launcher, given, made, extras, outputs, finder, mean.facts, no_floats, layout, script)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> QuantizedQKV:
        """As ``quantizers.quantize_plain``."""
        make, nothing, layout = device_memory.empty_on_gpu, self.no_floats, self.layout
        if layout is not None and self.script is not None:
            codes, floats = make(*layout.codes), make(*layout.floats)
            self.script.run(q, k, v, codes, floats)
            return QuantizedQKV.in_memory((layout, codes, floats), self.made, q.dtype, nothing)
        extras, means = self.extras, Means(nothing, nothing)
        if self.finder is not None:
            mean = make(*self.mean)
            self.finder.fill(v, mean)
            extras, means = Extras(*extras[:3], mean), Means(nothing, mean)
        outputs = Outputs(*[make(*facts) for facts in self.outputs])
        self.launcher.fill(outputs, q, k, v, extras)
        parts = self.launcher.parts(outputs, k.shape[1])
        return QuantizedQKV.unchecked(*parts, self.made, q.dtype, means)


def _steps(
    layout: PartsLayout, launcher: QuantizeLauncher, finder: ValueMeanLauncher | None, extras: Extras
) -> list[Step]:
    """The launches of a call that gives q, k, v, codes and floats."""
    q, k, v = map(Given, range(3))
    *parts, mean = layout.parts(3, 4) if finder is not None else (*layout.parts(3, 4), None)
    before = []
    if finder is not None:
        before.append(Step(finder.kernel, (v, mean)))
        extras = Extras(*extras[:3], mean)
    return [*before, Step(launcher.kernel, (q, k, v, *parts, *extras, launcher.num_ctas))]


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
        """What serves a call of these arguments: one like it was made, and its GPU is the current one; or None. None in
        a CUDA graph too, which outlives the constants that are kept with a call, and where time does not count."""
        if type(q) is not Tensor or type(k) is not Tensor or not may_be_like():
            return None
        call = self._remembered.find(_key_of(q, k, quantization, options), q, k, v)
        if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES:
            return None
        index = call.launcher.device_index
        return call if current_device() == index and not device_memory.records_graph(index) else None

    def keep(
        self, make: Callable[[], Fused], q: Tensor, k: Tensor, v: Tensor, quantization: Any, *options: Any
    ) -> None:
        """Let ``find`` with these arguments find what ``make`` makes of a call that was made, if the kernel takes the
        tensors as they are."""
        if any(x.requires_grad or addressable(x) is not x for x in (q, k, v)):
            return
        if device_memory.is_capturing(q.device):
            return
        key = _key_of(q, k, quantization, options)
        if self._remembered.comes_again(key):
            self._remembered.keep(key, make(), q, k, v)


def _key_of(q: Tensor, k: Tensor, quantization: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
    return q.shape, k.shape, id(quantization), options, tuple(map(type, options))


quantizing: FusedCalls[QuantizeCall] = FusedCalls()
