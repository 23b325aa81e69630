"""Quantizing, and attention to parts, with a number of keys that is new: what served another number serves it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    compile_cache,
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    fp8,
    fused_again,
    parts_again,
    quantization,
    quantize_qkv,
)
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch import quantize
from hopper_attention.packing_rules import MOST_QUERIES
from hopper_attention.quantized import DEFAULT_QUANTIZATION, E4M3, MEMORY, QuantizedQKV, TransposedV
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.test_calls_again import Seen, draw, facts_of, refuse


def keys_of(rows: int, batch: int = 2, heads: int = 2) -> Tensor:
    """The first rows of a larger tensor, as of a cache."""
    return draw(batch, 2200, heads, 64)[:, :rows]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Arguments of the kernels of a pretended H200, which compute nothing."""
    found: Seen = []
    pretend(monkeypatch, quantize, fp8_launch)
    for name in ("get_forward", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, lambda config: lambda *given: found.append(given))
    # What adds up parts of few queries' keys.
    monkeypatch.setattr(compile_cache, "get_serving", lambda config: lambda *given: None)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def test_keys_that_are_new_in_number_are_quantized_by_an_earlier_call(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = draw(2, 3, 2, 64)

    def given_by(rows: int) -> list[tuple[Any, ...]]:
        seen.clear()
        parts = quantize_qkv(q, keys_of(rows), keys_of(rows))
        assert parts.k.data.shape == (2, rows, 2, 64) and parts.v.seqlen == rows and parts.dtype == q.dtype
        assert parts.v.data.data_ptr() == seen[-1][5].data_ptr()
        return [facts_of(x) for launch in seen for x in launch]

    lengths = 60, 1, 35, 64
    wanted = []
    for rows in lengths:
        fused_again.quantizing.cache_clear()
        wanted.append(given_by(rows))
    fused_again.quantizing.cache_clear()
    given_by(33), given_by(34)
    monkeypatch.setattr(quantization, "quantize_plain", refuse)
    for _ in range(3):
        assert [given_by(rows) for rows in lengths] == wanted
    for rows in (65, 0):
        with pytest.raises(AssertionError, match="found anew"):
            given_by(rows)
    options = DEFAULT_QUANTIZATION, None
    assert fused_again.quantizing.find(q, keys_of(41), keys_of(41), *options) is not None
    for k, v in (
        (keys_of(41), keys_of(42)),
        (keys_of(41), keys_of(41).half()),
        (keys_of(41, batch=1), keys_of(41, batch=1)),
        (keys_of(41, heads=1), keys_of(41, heads=1)),
        (keys_of(41), draw(2 * 41 * 128 + 1)[1:].view(2, 41, 2, 64)),
        (draw(2 * 6001).as_strided((2, 41, 2, 64), (6001, 128, 64, 1)), keys_of(41)),
        (keys_of(41)[0], keys_of(41)[0]),
        (draw(), draw()),
        (keys_of(41), None),
    ):
        assert fused_again.quantizing.find(q, k, v, *options) is None


@pytest.mark.parametrize("queries", [3, 300])
def test_parts_with_keys_that_are_new_in_number_are_attended_to_by_an_earlier_call(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    q, options = draw(2, queries, 2, 64), (False, False, False, None, None)

    def parts_of(rows: int) -> QuantizedQKV:
        return quantize_qkv(q, keys_of(rows), keys_of(rows)).opened()

    def given_for(rows: int) -> list[Any]:
        parts = parts_of(rows)
        seen.clear()
        assert flash_attn_quantized_func(parts).shape == q.shape
        (given,) = seen
        assert given[1].data_ptr() == parts.k.data.data_ptr() and given[2] is parts.v.data
        return [facts_of(x) for x in given]

    # One scale of K and of V, several, and lengths at which another tile begins: of few queries others than of many.
    of_few = queries <= MOST_QUERIES
    short, long = ((60, 33, 35, 64), (2099, 2049)) if of_few else ((60, 1, 35, 64), (2099, 2048))
    for known, lengths in (((33, 34), short), ((2100, 2101), long)):
        wanted = []
        for rows in lengths:
            forget_launchers()
            wanted.append(given_for(rows))
        forget_launchers()
        for rows in known:
            given_for(rows)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "attend_and_undo", refuse)
            for _ in range(3):
                assert [given_for(rows) for rows in lengths] == wanted
            for rows in (65, 1100, *((1, 32, 2048) if of_few else ())):
                with pytest.raises(AssertionError, match="found anew"):
                    given_for(rows)
    parts = parts_of(2098)
    assert parts_again.find(parts, options) is not None
    k, v = parts.k, parts.v
    assert isinstance(v, TransposedV)
    odd = draw(2 * 2098 * 128 + 16, dtype=E4M3).as_strided(k.shape, (2098 * 128 + 8, 128, 64, 1))
    for other in (
        replace(parts, k=replace(k, largest=200.0)),
        replace(parts, k=replace(k, data=odd)),
        replace(parts, k=replace(k, scale=k.scale.clone().transpose(1, 2).contiguous().transpose(1, 2))),
        replace(parts, dtype=torch.float16),
    ):
        assert parts_again.find(other, options) is None


def test_parts_of_one_head_with_odd_strides_are_not_like_others(seen: Seen) -> None:
    # Strides of dimensions of size 1, which make no tensor less contiguous.
    q, options = draw(1, 3, 1, 64), (False, False, False, None, None)
    for rows in (33, 34):
        flash_attn_quantized_func(quantize_qkv(q, *[keys_of(rows, 1, 1)] * 2).opened())
    parts = quantize_qkv(q, *[keys_of(35, 1, 1)] * 2).opened()
    assert isinstance(parts.v, TransposedV)
    assert parts_again.find(parts, options) is not None
    for dim in (0, 1):
        odd = parts.v.data.squeeze(dim).clone().unsqueeze(-1).movedim(-1, dim)
        assert odd.is_contiguous() and odd.stride(dim) == 1
        assert parts_again.find(replace(parts, v=replace(parts.v, data=odd)), options) is None


WINDOWS: list[dict[str, Any]] = [
    {"window_size": (20, 5)},
    {"window_size": (20, 0)},
    {"window_size": (20, 7), "causal": True, "return_attn_probs": True, "exact_lse": False},
    {"window_size": (-1, 3)},
    {"attention_chunk": 24},
    {"window_size": (9, 2), "attention_chunk": 24, "causal": True},
]


@pytest.mark.parametrize("how", ["in memory", "made"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_parts_in_a_window_are_found_again(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, head_dim: int, how: str
) -> None:
    """Kernels get what the first call gave them; what was found for a window serves no other, nor a call without."""
    q, k, v = draw(2, 70, 4, head_dim), draw(2, 90, 2, head_dim), draw(2, 90, 2, head_dim)

    def given_for(window: dict[str, Any]) -> list[Any]:
        parts = quantize_qkv(q, k, v)
        parts = parts.opened() if how == "made" else parts
        seen.clear()
        flash_attn_quantized_func(parts, **window)
        assert (MEMORY in vars(parts)) == (how != "made")
        (given,) = seen
        assert given[0].data_ptr() == parts.q.data.data_ptr()
        return [facts_of(x) for x in given]

    def refused(window: dict[str, Any]) -> None:
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="found anew"):
            patch.setattr(fp8, "attend_and_undo", refuse)
            given_for(window)

    for _ in range(3):
        quantize_qkv(q, k, v)
    known = []
    for window in [*WINDOWS, {}]:
        refused(window)
        known.append(given_for(window))
        assert given_for(window) == known[-1]
    assert len({len(given) for given in known}) == 2 and not any(known.count(given) > 1 for given in known)
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "attend_and_undo", refuse)
        for _ in range(2):
            assert [given_for(window) for window in [*WINDOWS, {}]] == known
        # Sides that hide nothing are none, and (20, 0) is causal.
        assert given_for({"window_size": (89, 70)}) == known[-1]
        assert given_for({"window_size": (20, 9), "causal": True}) == known[1]
    for window in ({"window_size": (21, 5)}, {"window_size": [20, 5]}, {"attention_chunk": 25}):
        refused(window)
    for window in ({"window_size": (-2, 5)}, {"window_size": (1, 2, 3)}, {"attention_chunk": -1}):
        with pytest.raises((TypeError, ValueError), match=r"window_size is|attention_chunk is"):
            given_for(window)


def test_parts_in_a_window_with_keys_that_are_new_in_number(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, window = draw(2, 300, 2, 64), {"window_size": (40, 10)}

    def given_for(rows: int) -> list[Any]:
        parts = quantize_qkv(q, keys_of(rows), keys_of(rows)).opened()
        seen.clear()
        flash_attn_quantized_func(parts, **window)
        (given,) = seen
        return [facts_of(x) for x in given]

    wanted = {}
    for rows in (50, 60, 35):
        forget_launchers()
        wanted[rows] = given_for(rows)
    forget_launchers()
    given_for(51), given_for(52)
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "attend_and_undo", refuse)
        for _ in range(2):
            assert [given_for(rows) for rows in (50, 60)] == [wanted[rows] for rows in (50, 60)]
        # The left side hides none of so few keys, and there are others of these.
        for rows in (35, 1100):
            with pytest.raises(AssertionError, match="found anew"):
                given_for(rows)


def test_16_bit_tensors_in_a_window_are_found_again(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window by what was found for it, with the arguments that the kernels had at first."""
    q, k, v = draw(2, 300, 4, 64), draw(2, 320, 2, 64), draw(2, 320, 2, 64)

    def given_for(window: dict[str, Any]) -> list[list[Any]]:
        seen.clear()
        flash_attn_fp8_func(q, k, v, **window)
        return [[facts_of(x) for x in given] for given in seen]

    def refused(window: dict[str, Any]) -> None:
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="found anew"):
            patch.setattr(fp8, "find_at_once", refuse)
            given_for(window)

    known = []
    for window in [*WINDOWS, {}]:
        refused(window)
        known.append(given_for(window))
        assert given_for(window) == known[-1]
    assert all(len(given) > 1 for given in known) and not any(known.count(given) > 1 for given in known)
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "find_at_once", refuse)
        for _ in range(2):
            assert [given_for(window) for window in [*WINDOWS, {}]] == known
        assert given_for({"window_size": (319, 299)}) == known[-1]
    for window in ({"window_size": (21, 5)}, {"window_size": [20, 5]}, {"attention_chunk": 25}):
        refused(window)
    for window in ({"window_size": (-2, 5)}, {"window_size": (1, 2, 3)}, {"attention_chunk": -1}):
        with pytest.raises((TypeError, ValueError), match=r"window_size is|attention_chunk is"):
            given_for(window)
