"""Which calls on a cache pack query heads: what pack_gqa says, and what is chosen where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper_attention import explain_kvcache
from hopper_attention.kvcache_plan import CachePlan

FP8 = torch.float8_e4m3fn


def plan(
    tokens: int,
    heads: tuple[int, int] = (32, 8),
    batch: int = 4,
    keys: int = 8192,
    page_size: int = 0,
    cache_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> CachePlan:
    """Of a Hopper GPU; queries of each sequence, and head_dim 128."""
    pages, rows = (batch * keys // page_size, page_size) if page_size else (batch, keys)
    cache = torch.empty(pages, rows, heads[1], 128, dtype=cache_dtype, device="meta")
    q = torch.empty(batch, tokens, heads[0], 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    if page_size:
        options["page_table"] = torch.empty(batch, keys // page_size, dtype=torch.int32, device="meta")
    given = {"cache_seqlens": lengths, "causal": True, "device_capability": (9, 0)} | options
    return explain_kvcache(q, cache, cache, **given)


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize(
    ("tokens", "heads"), [(1, (32, 8)), (17, (32, 8)), (40, (64, 8)), (100, (32, 1)), (512, (32, 8))]
)
def test_pack_gqa_is_honoured(tokens: int, heads: tuple[int, int], page_size: int) -> None:
    packed, unpacked = (plan(tokens, heads, page_size=page_size, pack_gqa=hint) for hint in (True, False))
    assert packed.path == "decode" and isinstance(packed.config, DecodeConfig)
    assert unpacked.path in ("paged", "tiles") and isinstance(unpacked.config, ForwardConfig)
    # Few tiles of a head each may be in parts, of caches whose lengths differ.
    assert unpacked.config.group == 1 and unpacked.config.split == (unpacked.path == "tiles")
    if unpacked.path == "paged":
        assert (
            unpacked.refused[0]
            == "decode: pack_gqa is False, and the forward kernel reads the cache where it lies"
        )
    rows = tokens * heads[0] // heads[1]
    assert packed.config.tile_m == next(n for n in (32, 64, 128) if rows <= n or n == 128)


def test_a_cache_is_not_copied_because_of_a_hint() -> None:
    for options in ({"cache_dtype": FP8}, {"page_size": 8}):
        assert plan(1, pack_gqa=False, **options).path == ("paged" if "page_size" in options else "decode")
    assert plan(40, cache_dtype=FP8, pack_gqa=False).path == "decode"


def test_what_is_chosen() -> None:
    """As many rows as a tile has are packed; more by the forward kernel, where that leaves fewer tiles or parts fill
    the GPU."""
    for tokens in (1, 4, 16):
        assert plan(tokens, batch=64).path == "decode"
    for tokens in (17, 32):
        packed = plan(tokens, batch=64)
        assert (
            packed.path == "tiles" and isinstance(packed.config, ForwardConfig) and packed.config.group == 4
        )
        assert packed.refused[0] == "decode: by count tiles of the forward kernel take less time"
    full = plan(128, batch=64)
    assert full.path == "paged" and full.refused[0] == "decode: by count a tile for each head takes less time"
    full = plan(512, batch=64)
    assert full.path == "paged" and full.refused[0] == "decode: by count a tile for each head takes less time"
    full = plan(2000, batch=64)
    reason = "decode: a sequence may have 2000 queries, which fill tiles of the forward kernel; "
    assert full.path == "paged" and full.refused[0] == f"{reason}pack_gqa=True packs them all the same"
    # One sequence has 32 tiles of the forward kernel, of which each would walk over all keys.
    alone = plan(128, batch=1)
    assert alone.path == "tiles" and isinstance(alone.config, ForwardConfig) and alone.config.split
    assert plan(128, batch=16).path == "paged"
    windowed = plan(128, batch=64, window_size=(4096, 0))
    assert (
        windowed.path == "paged"
        and windowed.refused[0] == "decode: by count a tile for each head takes less time"
    )
    # Beyond what tiles are counted for, as where there are sinks, the decode kernel's own count decides.
    reason = "decode: 512 query rows share a K/V head, and by count its tiles take "
    with_sinks = plan(128, batch=64, sinks=torch.empty(32, device="meta"))
    assert with_sinks.path == "paged" and with_sinks.refused[0].startswith(reason)


def test_what_is_chosen_on_e4m3() -> None:
    """The forward kernel needs a copy, which few queries do not make up for."""
    assert plan(32, batch=16, cache_dtype=FP8).path == "decode"
    assert plan(512, cache_dtype=FP8).path == "copied"
