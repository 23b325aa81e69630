"""Calls on a cache that are found again give the bits of calls that are read and checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopper_attention import cache_again, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
BATCH, ROOM, KV_HEADS = 3, 1024, 2

CASES: dict[str, tuple[torch.dtype, int, int, int, dict[str, Any]]] = {
    "tiles": (E4M3, 40, 8, 0, {"causal": True}),
    "tiles on pages": (E4M3, 40, 8, 16, {"causal": True, "softcap": 20.0}),
    "tiles in a window": (E4M3, 9, 8, 64, {"causal": True, "window_size": (200, 0)}),
    "tiles with sinks": (E4M3, 130, 2, 0, {"causal": True, "sinks": True}),
    "decoding": (E4M3, 1, 8, 0, {}),
    "decoding with sinks": (E4M3, 1, 16, 64, {"sinks": True, "window_size": (128, 0)}),
    "decoding with a softcap": (E4M3, 2, 8, 16, {"causal": True, "softcap": 20.0}),
    "16 bits": (BF16, 100, 8, 0, {"causal": True}),
    "16 bits on pages": (BF16, 100, 8, 16, {"causal": True}),
    "16 bits with sinks": (BF16, 1, 8, 16, {"sinks": True, "return_softmax_lse": True}),
}


def draw(case: tuple[torch.dtype, int, int, int, dict[str, Any]], head_dim: int) -> tuple[Any, ...]:
    dtype, queries, heads, page, options = case
    options, pages = dict(options), BATCH * ROOM // page if page else BATCH
    q = torch.randn(BATCH, queries, heads, head_dim, device="cuda").to(dtype)
    caches = [torch.randn(pages, page or ROOM, KV_HEADS, head_dim, device="cuda").to(dtype) for _ in "kv"]
    lengths = torch.randint(queries, ROOM + 1, (BATCH,), dtype=torch.int32, device="cuda")
    more: dict[str, Any] = {"cache_seqlens": lengths}
    if page:
        more["page_table"] = torch.randperm(pages, dtype=torch.int32, device="cuda").view(BATCH, -1)
    if dtype == E4M3:
        names = ("q_descale", "k_descale", "v_descale")
        more |= {name: torch.rand(BATCH, KV_HEADS, device="cuda") + 0.5 for name in names}
    if options.pop("sinks", False):
        more["sinks"] = torch.randn(heads, device="cuda")
    return (q, *caches), more | options


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_found_again(name: str, head_dim: int) -> None:
    """With other tensors each time: lengths, pages and descales are those of the call."""
    calls, wanted = [draw(CASES[name], head_dim) for _ in range(3)], []
    for given, options in calls:
        cache_again.remembered.cache_clear()
        wanted.append(flash_attn_with_kvcache(*given, **options))
    cache_again.remembered.cache_clear()
    for _ in range(3):
        for (given, options), first in zip(calls, wanted, strict=True):
            found = flash_attn_with_kvcache(*given, **options)
            pairs = zip(found, first, strict=True) if isinstance(first, tuple) else [(found, first)]
            assert all(torch.equal(x, y) for x, y in pairs)
    assert cache_again.remembered._calls or CASES[name][0] == BF16
