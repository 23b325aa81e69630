"""Many queries whose tiles have several heads: when turns are saved by count, and that all calls go by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.plan.config import PlanConfig
from hopper.config import ForwardConfig
from hopper_attention import (
    api,
    compile_cache,
    explain,
    explain_varlen,
    flash_attn_func,
    flash_attn_varlen_func,
    tile_turns,
)
from hopper_attention import varlen as api_varlen
from hopper_attention.launch import forward, packed_again, packed_forward, varlen
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.tile_turns import count_turns
from tests.python.fake_gpu import forget_launchers, noting, pretend

BF16 = torch.bfloat16
Sizes = tuple[int, int]
"""Sequences, and the length of each."""


def dense(sizes: Sizes, heads: tuple[int, int], head_dim: int = 128, **like: Any) -> list[Tensor]:
    of_k = heads[1]
    return [torch.empty(*sizes, n, head_dim, dtype=BF16, **like) for n in (heads[0], of_k, of_k)]


def packed(sizes: Sizes, heads: tuple[int, int], head_dim: int = 128, **like: Any) -> tuple[Any, ...]:
    """q, k, v and lengths, all of which are those of ``sizes``."""
    seqlen, bounds = sizes[1], torch.arange(sizes[0] + 1, dtype=torch.int32)
    starts = (bounds * seqlen).to(like.get("device", "cpu"))
    return *(x.flatten(0, 1) for x in dense(sizes, heads, head_dim, **like)), starts, starts, seqlen, seqlen


def group_of(sizes: Sizes, heads: tuple[int, int], head_dim: int = 128, **given: Any) -> tuple[int, int]:
    """Heads in the tiles of a dense call, and of a packed one, on a Hopper GPU."""
    like, on = {"device": "meta"}, {"device_capability": (9, 0)}
    plans = (
        explain(*dense(sizes, heads, head_dim, **like), **given, **on),
        explain_varlen(*packed(sizes, heads, head_dim, **like), **given, **on),
    )
    for plan in plans:
        assert isinstance(plan.config, ForwardConfig) and not plan.config.split
        assert (tile_turns.NOTE in plan.notes) == (plan.config.group > 1)
    of_dense, of_packed = (plan.config.group for plan in plans)
    return of_dense, of_packed


def test_turns() -> None:
    # A tile of 50 rows is short: those who had one begin one of the other 4 tiles early.
    assert count_turns(128, 8, 2098, 132) == pytest.approx(1.6, abs=0.1)
    assert count_turns(128, 4, 4196, 132) == 1
    assert count_turns(128, 8, 2048, 132) == 1 and count_turns(128, 8, 2048, 127) == 2
    assert count_turns(128, 8, 2048 + 65, 132) == 2
    # Nobody begins early where tiles of the last turn are more than short ones.
    assert count_turns(128, 4, 128 * 65 + 1, 132) == 2
    # Many short tiles are what they take.
    assert count_turns(128, 1320, 129, 132) == pytest.approx(16.5)
    assert count_turns(192, 132, 192, 132) == 1


@pytest.mark.parametrize(
    ("sizes", "heads", "head_dim", "groups"),
    [
        ((1, 2098), (8, 4), 128, (2, 2)),
        ((1, 2098), (8, 4), 256, (2, 2)),
        ((1, 2098), (8, 4), 192, (2, 2)),
        ((2, 1100), (16, 4), 128, (4, 4)),
        # Tiles are 192 rows of dense tensors, and of packed ones 64, three times on a multiprocessor.
        ((1, 2098), (8, 4), 64, (1, 1)),
        ((1, 3136), (8, 1), 64, (8, 1)),
        # Whole tiles, and a turn anyway; one of many.
        ((1, 2048), (8, 4), 128, (1, 1)),
        ((1, 500), (32, 8), 128, (1, 1)),
        ((16, 4100), (32, 8), 128, (1, 1)),
        # Heads with keys of their own, and 3 that share some.
        ((1, 2098), (8, 8), 128, (1, 1)),
        ((1, 2098), (9, 3), 128, (1, 1)),
    ],
)
def test_who_has_groups(sizes: Sizes, heads: tuple[int, int], head_dim: int, groups: tuple[int, int]) -> None:
    assert group_of(sizes, heads, head_dim) == groups
    assert group_of(sizes, heads, head_dim, softcap=3.0) == groups


def test_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, heads = (1, 2098), (8, 4)
    for given in (
        {"causal": True},
        {"window_size": (1000, 1000)},
        {"alibi_slopes": torch.ones(8, device="meta")},
        {"sinks": torch.ones(8, device="meta")},
        {"dropout_p": 0.5},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 1.0},
    ):
        assert group_of(sizes, heads, **given) == (1, 1), given
    # 132 tiles take two turns of fewer multiprocessors.
    assert group_of(sizes, heads, sm_margin=4) == (1, 1)
    monkeypatch.setattr(tile_turns, "LEAST_GAIN", math.inf)
    tile_turns.saves_turns.cache_clear()
    assert group_of(sizes, heads) == (1, 1)
    tile_turns.saves_turns.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_many_tiles(causal: bool) -> None:
    """More than two turns of tiles of a head, of sequences that are not longer than those that were timed."""

    def group(batch: int, mean: int, heads: tuple[int, int], **given: Any) -> int:
        tensors = packed((batch, mean), heads, device="meta")
        bounds = 2 * mean, 2 * mean
        plan = explain_varlen(*tensors[:5], *bounds, causal=causal, device_capability=(9, 0), **given)
        assert isinstance(plan.config, ForwardConfig) and plan.config.causal == causal
        return plan.config.group

    assert group(8, 500, (32, 8)) == 4 and group(16, 4096, (16, 1)) == 16
    assert group(16, 4097, (16, 1)) == group(8, 500, (32, 32)) == group(8, 500, (24, 8)) == 1
    # 8 heads of 4 sequences are 8 * (4 * 990 / 128 + 2) tiles, one fewer than two turns of 132.
    assert group(4, 990, (8, 2)) == 1 and group(4, 990, (8, 2), sm_margin=1) == group(4, 1000, (8, 2)) == 4
    assert group(2, 2000, (8, 2), window_size=(100, 3)) == 1


def test_lengths_that_are_not_known() -> None:
    q, k, v, starts, _, seqlen, _ = packed((2, 1100), (16, 4), device="meta")
    used = torch.empty(2, dtype=torch.int32, device="meta")
    for longest, given, group in (
        (seqlen, {}, 4),
        (seqlen, {"seqused_k": used}, 4),
        (seqlen, {"seqused_q": used}, 1),
        (seqlen + 1, {}, 4),
        (4000, {}, 4),
    ):
        plan = explain_varlen(q, k, v, starts, starts, longest, longest, **given, device_capability=(9, 0))
        assert isinstance(plan.config, ForwardConfig) and plan.config.group == group
    # Of fewer heads tiles are few, and then only one length can be counted.
    few = packed((2, 1100), (8, 4), device="meta")
    for longest, group in ((1100, 2), (1101, 1)):
        plan = explain_varlen(*few[:5], longest, longest, device_capability=(9, 0))
        assert isinstance(plan.config, ForwardConfig) and plan.config.group == group
    # A sequence is as long as the tensor, whatever its bound.
    alone = packed((1, 2098), (8, 4), device="meta")
    plan = explain_varlen(*alone[:5], 4096, 4096, device_capability=(9, 0))
    assert isinstance(plan.config, ForwardConfig) and plan.config.group == 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The launches of forward kernels on a pretended H200: their config, and arguments."""
    found: list[Any] = []

    def load(config: Any) -> Any:
        return (lambda *_: None) if isinstance(config, PlanConfig) else noting(found, config)

    pretend(monkeypatch, forward, varlen, packed_forward, packed_again)
    for module in (forward, packed_forward):
        monkeypatch.setattr(module, "index_of", lambda device: 0)
    for name in ("get_forward", "get_serving"):
        monkeypatch.setattr(compile_cache, name, load)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    forget_launchers()
    yield found
    forget_launchers()


def test_dense_calls(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = dense((1, 2098), (8, 4))
    for _ in range(3):
        out = flash_attn_func(*tensors)
    monkeypatch.setattr(api, "run_forward", None)
    flash_attn_func(*tensors)
    for config, q, *_ in calls:
        assert (config.group, config.causal, config.layout) == (2, False, "dense") and q.shape[1] == 2098
    assert len(calls) == 4 and out.shape == (1, 2098, 8, 128)
    # Another number of keys is served by the same.
    flash_attn_func(tensors[0], *(x[:, :2000] for x in tensors[1:]))
    assert calls[-1][0] == calls[0][0]


def test_packed_calls(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = packed((2, 1100), (16, 4))
    for _ in range(3):
        out = flash_attn_varlen_func(*tensors)
    # With other bounds nobody knows that sequences have one length; tiles are many whatever it is.
    for _ in range(3):
        flash_attn_varlen_func(*tensors[:5], 2000, 2000)
    monkeypatch.setattr(api_varlen, "run_varlen", None)
    flash_attn_varlen_func(*tensors)
    flash_attn_varlen_func(*tensors[:5], 2000, 2000)
    assert [config.group for config, *_ in calls] == [4] * 8
    assert all(config.layout == "varlen" for config, *_ in calls) and out.shape == (2200, 16, 128)


def test_kernels_of_a_model() -> None:
    for causal, groups in (((False,), {1, 4}), ((True,), {1, 4})):
        model = ModelShape(BF16, 32, 8, 128, 128, causal)
        found = [c for c in kernels_of(model, "sm_90a") if type(c) is ForwardConfig and not c.split]
        many = [c for c in found if not c.causal] if causal == (False,) else found
        assert groups <= {c.group for c in many}
        if causal == (False,):
            layouts = {(c.layout, c.tile_n) for c in many if c.group == 4}
            assert layouts >= {("varlen", 128), ("dense", 128), ("dense", 176)}
