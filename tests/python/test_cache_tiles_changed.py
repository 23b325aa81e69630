"""Calls on a cache by tiles of several heads that have a window, a softcap or, of e4m3, sinks: which these are, what
kernels are given, and what comes of it by stand-ins that attend in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.window import NO_LIMIT
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import cache_tiles, explain_kvcache, flash_attn_with_kvcache
from hopper_attention.few_queries import FewQueries, keys_that_count
from tests.python.kvcache_cases import FP8
from tests.python.test_cache_tiles import (
    BF16,
    CASES,
    MANY,
    OF_HEADS,
    OF_TILES,
    WAYS_16_BITS,
    WAYS_E4M3,
    Kernels,
    call_of,
    descales,
    kernels,
    plan,
    serve_as,
)

__all__ = ["kernels"]

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window_size": (3000, 0)},
    "two sides": {"window_size": (100, 7), "causal": False},
    "chunk": {"attention_chunk": 4096},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [0, 64])
def test_windows_and_scores_of_e4m3_are_for_tiles(mask: str, page_size: int) -> None:
    """In parts, unless a window leaves few keys."""
    for scores in ({}, {"softcap": 30.0}, {"sinks": OF_HEADS}, {"softcap": 30.0, "sinks": OF_HEADS}):
        options = MASKS[mask] | scores | {"dtype": FP8, "page_size": page_size}
        found = plan(40, **OF_TILES, **options)
        config = found.config
        assert found.path == "tiles" and isinstance(config, Fp8ForwardConfig) and found.steps == ()
        assert (config.softcap, config.sinks) == ("softcap" in scores, "sinks" in scores)
        assert (config.window, config.chunk) == (mask != "none", mask == "chunk")
        assert config.split == (mask != "two sides")
        assert bool(config.page_box) == (page_size > 0)


def test_windows_and_softcap_of_16_bits() -> None:
    """A softcap goes with parts, a window with whole tiles of all heads where that is fastest by count."""
    capped = plan(64, **OF_TILES, softcap=30.0)
    assert capped.path == "tiles" and capped.config.split and capped.config.softcap
    call = call_of({"softcap": 30.0, "window_size": (3000, 0)})
    problem = cache_tiles.problem_of_tiles(call, FewQueries(group=4))
    assert problem.scores.has_softcap and problem.has_window and not problem.has_chunk and problem.causal
    for options in ({"window_size": (3000, 0)}, {"attention_chunk": 4096}):
        assert cache_tiles.tiles_of(call_of(options)).splits == 1


def keys_of(options: dict[str, Any]) -> int:
    call = call_of(options)
    return keys_that_count(call.shape, call.mask)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_keys_that_count(dtype: torch.dtype) -> None:
    """Those that the queries of a tile see: no more than there are."""
    expected = {
        (40, ()): 65536,
        (40, ("window_size", (100, 0))): 101 + 40,
        (40, ("window_size", (100, -1))): 101 + 40,
        (200, ("window_size", (100, 0))): 101 + 128,
        (40, ("attention_chunk", 256)): 256 + 40,
        (40, ("window_size", (65530, 0))): 65536,
    }
    for (queries, option), keys in expected.items():
        options = dict([option]) if option else {}
        assert keys_of({"queries": queries, "dtype": dtype} | options) == keys
    both = {"causal": False, "window_size": (100, 20), "dtype": dtype}
    assert keys_of(both) == 121 + 40
    assert keys_of(both | {"window_size": (100, -1)}) == 101 + 39 + 40
    # A single query is the last, behind which there is none, whatever its right side is.
    for window in ((100, 0), (100, 20), (100, -1)):
        assert keys_of({"queries": 1, "dtype": dtype, "window_size": window}) == 101 + 1


SINKS = torch.tensor([0.5, -math.inf, 6.0, -1.0])
CHANGES: dict[str, dict[str, Any]] = {
    "a window": {"window_size": (5, 2)},
    "a causal window": {"window_size": (5, -1), "causal": True},
    "a chunk": {"attention_chunk": 8},
    "softcap": {"softcap": 1.5, "causal": True},
    "softcap and a window": {"softcap": 1.5, "window_size": (4, 0)},
    "sinks": {"sinks": SINKS},
    "sinks of 16 bits": {"sinks": SINKS.bfloat16(), "causal": True},
    "all": {"sinks": torch.stack((SINKS, SINKS), 1)[:, 1], "softcap": 1.5, "window_size": (4, 3)},
}


@pytest.mark.parametrize("way", ["heads", "parts of heads", "e4m3", "e4m3 heads", "e4m3 parts"])
@pytest.mark.parametrize("name", ["end to end", "pages", "packed queries", "leftpad", "single queries"])
@pytest.mark.parametrize("change", CHANGES)
def test_windows_and_scores(
    change: str, name: str, way: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels are given, and what comes of it. Parts know a softcap alone, and 16 bits no sinks."""
    options, is_e4m3 = CHANGES[change], way in WAYS_E4M3
    few, has_window = (WAYS_16_BITS | WAYS_E4M3)[way], {"window_size", "attention_chunk"} & options.keys()
    if (few.splits > 1 and (has_window or "sinks" in options)) or ("sinks" in options and not is_e4m3):
        few = replace(few, splits=1, split_rows=0)
    serve_as(few, monkeypatch)
    case = replace(MANY, queries=(1, 1, 1)) if name == "single queries" else CASES[name]
    call = case.build(FP8 if is_e4m3 else BF16, **(descales() if is_e4m3 else {}), **options)
    explained = explain_kvcache(**call, device_capability=(9, 0))
    if not is_e4m3 and ("sinks" in options or name == "single queries"):
        assert explained.path != "tiles"
        return
    assert explained.path == "tiles"
    assert (flash_attn_with_kvcache(**call) - case.expected(call)[0]).abs().max() <= 2e-2
    (given,) = kernels.calls
    assert explained.config == given["config"] and given["softcap"] == options.get("softcap")
    left, right = (NO_LIMIT if side < 0 else side for side in options.get("window_size", (-1, -1)))
    if has_window:
        # Where no key is behind a query, because of a causal mask too, any right side will do.
        assert given["sides"][::2] == [left, options.get("attention_chunk")]
        assert given["sides"][1] == right or given["config"].causal or name == "single queries"
    if "sinks" in options:
        assert torch.equal(given["sinks"], options["sinks"].float())
