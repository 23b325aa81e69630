"""FP8 of 16-bit tensors like those of an earlier call, which the kernel quantized: what that found serves again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper.quantize.config import CHUNK
from hopper_attention import device_memory, parts_memory
from hopper_attention.device_memory import Facts, Piece, Pieces
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
from hopper_attention.layout import TMA_BYTES, new_strides
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.parts_memory import AnyLengthLayout, PartsLayout
from hopper_attention.problem import longest_alike
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
        outputs, mean = facts_of(pieces), Piece((batch, kv_heads, head_dim_v))
        finder = value_mean.find(v) if c.smooth_v else None
        no_floats = device_memory.no_floats(v.device)
        layout = script = None
        if sum(piece.bytes for piece in pieces[:3]) <= parts_memory.MAX_BYTES:
            if finder is not None:
                pieces = *pieces, mean
            rows = c.block_q, c.block_k
            layout = PartsLayout.of(pieces, rows, launcher.largest_codes, k.shape[1], no_floats)
            script = at_once.make_script(_steps(layout.parts(3, 4), launcher, finder, extras))
        return cls(launcher, given, made, extras, outputs, finder, mean.facts, no_floats, layout, script)

    def with_keys_of(self, q: Tensor, k: Tensor, v: Tensor) -> QuantizeCall:
        """That of calls with as many keys as these have, and else like those of this one. It has no script, which takes
        longer to make than one call takes without."""
        c = self.launcher.config
        outputs = facts_of(output_pieces(c.block_q, c.block_k, q.shape, k.shape, v.shape))
        of_any_length = self.launcher, self.given, self.made, self.extras
        return QuantizeCall(*of_any_length, outputs, self.finder, self.mean, self.no_floats, None, None)

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


@dataclass(frozen=True, slots=True)
class QuantizeAnyLength:
    """``QuantizeCall`` for calls with any number of keys, of which ``one`` served some."""

    one: QuantizeCall
    launcher: QuantizeLauncher
    given: Fp8Quantization
    layout: AnyLengthLayout | None
    script: Script | None

    @classmethod
    def of(cls, one: QuantizeCall) -> QuantizeAnyLength:
        """That of calls like those of ``one`` but for their keys."""
        layout = script = None
        if one.layout is not None:
            layout = AnyLengthLayout(one.layout)
            script = at_once.make_script(_steps(layout.parts(3, 4, 5), one.launcher, one.finder, one.extras))
        return cls(one, one.launcher, one.given, layout, script)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> QuantizedQKV:
        """As that of ``QuantizeCall``."""
        one, make = self.one, device_memory.empty_on_gpu
        layout = None if self.layout is None else self.layout.of(k.shape[1])
        if layout is None or self.script is None:
            return one.with_keys_of(q, k, v)(q, k, v)
        codes, floats = make(*layout.codes), make(*layout.floats)
        self.script.run(q, k, v, codes, floats, layout.listed.buffer_info()[0])
        return QuantizedQKV.in_memory((layout, codes, floats), one.made, q.dtype, one.no_floats)


def facts_of(pieces: Pieces) -> tuple[Facts, ...]:
    """Those of ``Piece.facts``. Nothing is kept of them: a length that is new in every call would fill memory."""
    return tuple([(tuple(piece.shape), new_strides(piece.shape), piece.dtype) for piece in pieces])


def _steps(
    parts: Sequence[Any], launcher: QuantizeLauncher, finder: ValueMeanLauncher | None, extras: Extras
) -> list[Step]:
    """The launches of a call that gives q, k and v, and then what ``parts`` lie in."""
    q, k, v = map(Given, range(3))
    *parts, mean = parts if finder is not None else (*parts, None)
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

Key = tuple[Any, ...]


class FusedCalls(Generic[Fused]):
    """Calls of tensors that nothing differentiates. Options count with their types."""

    def __init__(self) -> None:
        self._remembered: Remembered[Fused] = Remembered(REMEMBERED_CALLS)

    def cache_clear(self) -> None:
        """Forget all."""
        self._remembered.cache_clear()

    def find(self, q: Any, k: Any, v: Any, quantization: Any, *options: Any) -> Fused | None:
        """What serves a call of these arguments: one like it was made, and its GPU is the current one; or None. None in
        a CUDA graph too, which outlives the constants that are kept with a call, and where time does not count."""
        if type(q) is not Tensor or type(k) is not Tensor or not may_be_like():
            return None
        key = _key_of(q, k, quantization, options)
        call = self._remembered.find(key, q, k, v)
        known = call is not None
        if call is None:
            call = self._find_of_any_length(key, q, k, v)
        if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES:
            return None
        index = call.launcher.device_index
        if current_device() != index or device_memory.records_graph(index):
            return None
        return call if known else self._with_keys_of(call, key, q, k, v)

    def _find_of_any_length(self, key: Key, q: Tensor, k: Tensor, v: Any) -> Fused | None:
        """A call that is like this one but for its number of keys, which does not decide on how it is served."""
        return None

    def _with_keys_of(self, call: Fused, key: Key, q: Tensor, k: Tensor, v: Tensor) -> Fused:
        """What serves this one, by what ``_find_of_any_length`` found."""
        return call

    def keep(
        self, make: Callable[[], Fused], q: Tensor, k: Tensor, v: Tensor, quantization: Any, *options: Any
    ) -> None:
        """Let ``find`` with these arguments find what ``make`` makes of a call that was made, if the kernel takes the
        tensors as they are."""
        if any(x.requires_grad or addressable(x) is not x for x in (q, k, v)):
            return
        if not device_memory.is_capturing(q.device):
            self._keep(make, _key_of(q, k, quantization, options), q, k, v)

    def _keep(self, make: Callable[[], Fused], key: Key, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self._remembered.comes_again(key):
            self._remembered.keep(key, make(), q, k, v)


class QuantizeCalls(FusedCalls[QuantizeCall | QuantizeAnyLength]):
    """Those of ``quantize_qkv``, which serve other numbers of keys too."""

    def __init__(self) -> None:
        super().__init__()
        self._of_any_length: Remembered[QuantizeAnyLength] = Remembered(REMEMBERED_CALLS)

    def cache_clear(self) -> None:
        super().cache_clear()
        self._of_any_length.cache_clear()

    def _find_of_any_length(self, key: Key, q: Tensor, k: Tensor, v: Any) -> QuantizeAnyLength | None:
        class_key = _class_key(key)
        found = None if class_key is None else self._of_any_length.find(class_key, q, k, v)
        if found is None or v.shape[1] != k.shape[1] or (k.stride()[0] | v.stride()[0]) % CHUNK:
            return None
        return found

    def _with_keys_of(
        self, call: QuantizeCall | QuantizeAnyLength, key: Key, q: Tensor, k: Tensor, v: Tensor
    ) -> QuantizeCall | QuantizeAnyLength:
        if isinstance(call, QuantizeCall) or not self._remembered.comes_again(key):
            return call
        known = QuantizeCall.of(call.launcher, call.given, call.one.made, q, k, v)
        self._remembered.keep(key, known, q, k, v)
        return known

    def _keep(
        self,
        make: Callable[[], QuantizeCall | QuantizeAnyLength],
        key: Key,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        class_key = _class_key(key)
        comes_again = self._remembered.comes_again(key)
        has_others = class_key is not None and self._of_any_length.comes_again(class_key)
        if not comes_again and not has_others:
            return
        call = make()
        if comes_again:
            self._remembered.keep(key, call, q, k, v)
        is_known = not has_others or self._of_any_length.find(class_key, q, k, v) is not None
        if isinstance(call, QuantizeCall) and not is_known:
            of_any, lengths = QuantizeAnyLength.of(call), {1: 1, 2: 1}
            self._of_any_length.keep(class_key, of_any, q, k, v, of_any_length=lengths)


def _key_of(q: Tensor, k: Tensor, quantization: Any, options: tuple[Any, ...]) -> Key:
    return q.shape, k.shape, id(quantization), options, tuple(map(type, options))


def _class_key(key: Key) -> Key | None:
    """That of all numbers of keys for which a quantizer is chosen alike; None where there is none."""
    q_shape, k_shape, *others = key
    if len(k_shape) != 4 or not 0 < k_shape[1] <= MAX_SEQLEN:
        return None
    return q_shape, longest_alike(k_shape[1]), *others


quantizing = QuantizeCalls()
