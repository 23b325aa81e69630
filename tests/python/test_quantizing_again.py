"""``quantize_qkv`` of a number of keys that is new: what served another number serves it too, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from hopper_attention import compile_cache, fused_again, quantization, quantize_qkv
from hopper_attention.launch import quantize
from hopper_attention.quantized import DEFAULT_QUANTIZATION
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.test_calls_again import draw, facts_of, keys_of, refuse


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of the kernels of a pretended H200, which compute nothing."""
    found: list[tuple[Any, ...]] = []
    pretend(monkeypatch, quantize)
    monkeypatch.setattr(compile_cache, "get_quantize", lambda config: lambda *given: found.append(given))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def test_keys_that_are_new_in_number_are_quantized_by_an_earlier_call(
    seen: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
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
