"""num_splits and pack_gqa, which change nothing: a call with them is found again as one without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper_attention import (
    api,
    dense_again,
    features,
    flash_attn_func,
    flash_attn_varlen_func,
    packed_descaled_again,
    varlen_again,
)

E4M3 = torch.float8_e4m3fn
PLAIN: list[dict[str, Any]] = [
    {},
    {"num_splits": None},
    {"num_splits": 0},
    {"num_splits": 7},
    {"pack_gqa": True},
    {"num_splits": 0, "pack_gqa": False},
]
OTHERS: list[dict[str, Any]] = [
    {"num_splits": np.int32(2)},
    {"num_splits": True},
    {"num_splits": -1},
    {"num_splits": 1.0},
    {"pack_gqa": 1},
    {"pack_gqa": np.False_},
]


class FoundAgain(Exception):
    """In place of a result."""


@pytest.mark.parametrize("hints", PLAIN, ids=str)
def test_plain_hints(hints: dict[str, Any]) -> None:
    given = {"num_splits": 1, "pack_gqa": None} | hints
    assert features.are_plain_hints(**given)
    features.check_hints(**given)


@pytest.mark.parametrize("hints", OTHERS, ids=str)
def test_others_are_left_to_their_check(hints: dict[str, Any]) -> None:
    assert not features.are_plain_hints(**({"num_splits": 1, "pack_gqa": None} | hints))


def packed(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k = torch.randn(5, 4, 64), torch.randn(9, 2, 64)
    starts = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 9])
    return *(x.to(dtype) for x in (q, k, k)), *(x.int() for x in starts), 3, 5


@pytest.mark.parametrize("hints", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_packed_calls_are_looked_up(
    dtype: torch.dtype, hints: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*given: Any) -> None:
        raise FoundAgain

    monkeypatch.setattr(varlen_again, "find_again", find)
    monkeypatch.setattr(packed_descaled_again, "attend", find)
    descales = {"k_descale": torch.ones(2, 2)} if dtype == E4M3 else {}
    with pytest.raises(FoundAgain):
        flash_attn_varlen_func(*packed(dtype), **descales, **hints)


@pytest.mark.parametrize("hints", PLAIN, ids=str)
def test_dense_calls_are_looked_up_at_once(hints: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*given: Any) -> None:
        raise FoundAgain

    def resolve(*given: Any, **others: Any) -> None:
        raise AssertionError("a mask is made where there is none")

    monkeypatch.setattr(dense_again, "find", find)
    monkeypatch.setattr(api.features, "resolve_mask", resolve)
    q, k = torch.randn(1, 5, 4, 64), torch.randn(1, 9, 2, 64)
    with pytest.raises(FoundAgain):
        flash_attn_func(q, k, k, causal=True, **hints)


@pytest.mark.parametrize("hints", [*PLAIN, OTHERS[0], *OTHERS[4:]], ids=str)
def test_they_change_nothing(hints: dict[str, Any]) -> None:
    given = packed(torch.float32)[:3]
    q, k, v = (x.half() for x in given)
    starts = packed(torch.float16)[3:]
    usual: Tensor = flash_attn_varlen_func(q, k, v, *starts)
    assert torch.equal(flash_attn_varlen_func(q, k, v, *starts, **hints), usual)


@pytest.mark.parametrize("hints", OTHERS[1:4], ids=str)
def test_bad_ones_raise(hints: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="num_splits is"):
        flash_attn_varlen_func(*packed(torch.float16), **hints)
