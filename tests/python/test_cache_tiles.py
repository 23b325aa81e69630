"""Calls on a cache that the forward kernels serve with several heads in a tile, keys in parts, or e4m3 by e4m3: which
these are, and what kernels are given, by stand-ins that attend in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.window import NO_LIMIT
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import cache_tiles, explain_kvcache, flash_attn_with_kvcache
from hopper_attention.few_queries import FewQueries
from hopper_attention.kvcache_rules import RULES
from hopper_attention.launch import cache_tiles as launcher
from hopper_attention.launch import forward, fp8, kvcache
from hopper_attention.masks import UNLIMITED, MaskSpec
from hopper_attention.reference import attention_naive
from tests.python.fake_gpu import SMS, forget_launchers
from tests.python.kvcache_cases import FP8, CacheCase, int32
from tests.python.packed_fp8_kernels import Kernels as PackedKernels
from tests.python.packed_fp8_kernels import sequences_of, serving
from tests.python.test_kvcache_launch import in_pytorch
from tests.python.test_split_forward import attend_to_part

BF16 = torch.bfloat16
HEADS = {"4 a head": (32, 8), "7 a head": (28, 4), "8 a head": (64, 8)}
"""Of real models."""


def plan(
    queries: int,
    heads: tuple[int, int] = (32, 8),
    *,
    batch: int = 4,
    capacity: int = 8192,
    page_size: int = 0,
    dtype: torch.dtype = BF16,
    head_dims: tuple[int, int] = (128, 128),
    **options: Any,
) -> Any:
    """What would run on a Hopper GPU."""
    rows = (batch * capacity // page_size, page_size) if page_size else (batch, capacity)
    k, v = (torch.empty(*rows, heads[1], d, dtype=dtype, device="meta") for d in head_dims)
    q = torch.empty(batch, queries, heads[0], head_dims[0], dtype=dtype, device="meta")
    given: dict[str, Any] = {"cache_seqlens": torch.empty(batch, dtype=torch.int32, device="meta")}
    if page_size:
        given["page_table"] = torch.empty(batch, capacity // page_size, dtype=torch.int32, device="meta")
    return explain_kvcache(q, k, v, device_capability=(9, 0), **(given | {"causal": True} | options))


@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_e4m3_calls_of_more_rows_than_decoding_takes_in_e4m3(heads: tuple[int, int], page_size: int) -> None:
    """No key is copied, and none is multiplied in 16 bits."""
    group = heads[0] // heads[1]
    for queries in (8, 64, 200, 512):
        found = plan(queries, heads, page_size=page_size, dtype=FP8)
        config = found.config
        assert found.path == "tiles" and isinstance(config, Fp8ForwardConfig) and found.steps == ()
        assert (config.layout, config.v_rows, config.lone_scales, config.causal) == ("varlen", *[True] * 3)
        assert config.group in (1, group) and config.used_head_dim == 0 and not config.window
        assert config.page_box == (math.gcd(config.tile_n, page_size) if page_size else 0)
        assert [text.split(":")[0] for text in found.refused] == ["decode", "mla"]


@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_16_bit_calls(heads: tuple[int, int], page_size: int) -> None:
    """Few queries are decoded, and many fill tiles of a head each; those of one sequence between are in parts."""
    group, options = heads[0] // heads[1], {"page_size": page_size}
    for queries in (1, 2):
        assert plan(queries, heads, **options).path == "decode"
    for queries in (1025, 2048):
        assert plan(queries, heads, **options).path == "paged"
    for queries in (96, 128):
        found = plan(queries, heads, batch=1, capacity=65536, **options)
        config = found.config
        assert found.path == "tiles" and isinstance(config, ForwardConfig) and found.steps == ()
        assert config.split and config.group in (1, group) and config.layout == "varlen"
        assert config.page_box == (math.gcd(config.tile_n, page_size) if page_size else 0)


def test_a_single_query_of_16_bits_is_decoded() -> None:
    for batch in (1, 4, 64, 512):
        for capacity in (512, 8192, 131072):
            for heads in (*HEADS.values(), (32, 32)):
                found = plan(1, heads, batch=batch, capacity=capacity)
                assert found.path == "decode" and isinstance(found.config, DecodeConfig)


def test_single_queries_see_all_keys() -> None:
    """Under a causal mask too, of packed sequences as well, which has kernels of its own."""
    for dtype, few in ((BF16, FewQueries(group=4)), (FP8, FewQueries(group=4, tile_rows=64))):
        for queries in (1, 2):
            call = replace(call_of({"queries": queries, "dtype": dtype}), mask=MaskSpec(True))
            assert cache_tiles.problem_of_tiles(call, few).causal == (queries > 1)
            single = replace(call, shape=replace(call.shape, is_packed_q=True))
            assert cache_tiles.problem_of_tiles(single, few).causal == (queries > 1)
            tiles = cache_tiles.tiles_of(call)
            assert tiles.call is None or tiles.call.mask.causal == (queries > 1)


OF_TILES = {"batch": 1, "capacity": 65536}
"""What makes tiles in parts the fastest for some tens of queries."""

OF_HEADS = torch.empty(32, device="meta")

REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "ampere": ({"backend": "ampere"}, "its kernels are for Hopper GPUs, and the backend is ampere"),
    "slopes": ({"alibi_slopes": OF_HEADS}, "there is a qv, or there are alibi_slopes"),
    "e4m3, slopes": ({"dtype": FP8, "alibi_slopes": OF_HEADS}, "there is a qv, or there are alibi_slopes"),
    "sinks": ({"sinks": OF_HEADS}, "there are sinks, which rows of several heads have in e4m3 alone"),
    "a short window": ({"window_size": (100, 0)}, "by count a tile for each head takes less time"),
    "short chunks": ({"attention_chunk": 128}, "by count a tile for each head takes less time"),
    "e4m3, sinks and LSE": (
        {"dtype": FP8, "sinks": OF_HEADS, "return_softmax_lse": True},
        "the LSE is wanted, and that of FP8 scores",
    ),
    "e4m3, softcap, a window and LSE": (
        {"dtype": FP8, "softcap": 30.0, "window_size": (100, 0), "return_softmax_lse": True},
        "the LSE is wanted, and that of FP8 scores",
    ),
    "one query": (
        {"queries": 1, "pack_gqa": False},
        "a sequence has 1 queries, and tiles are counted for 2 to",
    ),
    "many queries": ({"queries": 1025}, "a sequence has 1025 queries, and tiles are counted for 2 to 1024"),
    "wide values": ({"head_dims": (128, 264)}, "head_dim 128 or head_dim_v 264 is above 256"),
    "packing is asked for": ({"pack_gqa": True}, "pack_gqa is True"),
    "short pages": ({"page_size": 4}, "pages have 4 rows"),
    "few tiles": ({"queries": 2, "batch": 4}, "by count the decode kernel takes less time"),
    "full tiles": (
        {"queries": 200, "batch": 16, "capacity": 1024},
        "by count a tile for each head takes less",
    ),
    "e4m3, LSE": ({"dtype": FP8, "return_softmax_lse": True}, "the LSE is wanted, and that of FP8 scores"),
    "e4m3, odd head_dim": ({"dtype": FP8, "head_dims": (72, 64)}, "its stride in dimension 2 is 72"),
    "e4m3, wide values": ({"dtype": FP8, "head_dims": (128, 272)}, "is no multiple of 16 up to 256"),
    "e4m3, decoded": (
        {"dtype": FP8, "queries": 2, "capacity": 2048},
        "by count the decode kernel takes less time",
    ),
}


def call_of(options: dict[str, Any]) -> Any:
    """The checked call that ``plan`` of these would explain."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hopper_attention.kvcache_plan.choose_path", lambda call, target: seen.append(call))
        with pytest.raises(AttributeError):
            plan(**({"queries": 40} | OF_TILES | options))
    return seen[0]


@pytest.mark.parametrize("name", REASONS)
def test_what_speaks_against_tiles(name: str) -> None:
    options, reason = REASONS[name]
    call = call_of(options)
    assert reason in cache_tiles.why_not_tiles(call, options.get("backend", "hopper"))


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_nothing_speaks_against_tiles(dtype: torch.dtype) -> None:
    for options in ({}, {"page_size": 64}, {"page_size": 8}, {"sm_margin": 8}, {"num_splits": 64}):
        assert cache_tiles.why_not_tiles(call_of(options | {"dtype": dtype}), "hopper") == ""
    assert cache_tiles.why_not_tiles(call_of({"dtype": BF16, "return_softmax_lse": True}), "hopper") == ""


def test_leftpads_are_of_caches_of_one_page() -> None:
    pad = torch.empty(1, dtype=torch.int32, device="meta")
    reason = "there is a leftpad, which its kernels take for caches of one page a sequence"
    assert cache_tiles.why_not_tiles(call_of({"cache_leftpad": pad, "page_size": 64}), "hopper") == reason
    for dtype in (BF16, FP8):
        assert cache_tiles.why_not_tiles(call_of({"cache_leftpad": pad, "dtype": dtype}), "hopper") == ""


def test_scales_of_rows_and_mixed_dtypes_are_not_for_tiles() -> None:
    q = torch.empty(1, 40, 32, 128, dtype=FP8, device="meta")
    k = torch.empty(64, 64, 8, 128, dtype=FP8, device="meta")
    table = torch.empty(1, 64, dtype=torch.int32, device="meta")
    scale = torch.empty(64, 64, 8, dtype=torch.float32, device="meta")
    given = {"page_table": table, "device_capability": (9, 0)}
    by_token = explain_kvcache(q, k, k, k_descale=scale, v_descale=scale, **given)
    by_page = explain_kvcache(q, k, k, k_descale=scale[:, :1], v_descale=scale[:, :1], **given)
    mixed = explain_kvcache(q.bfloat16(), k, k, **given)
    assert "tiles" not in (by_token.path, by_page.path, mixed.path)
    assert explain_kvcache(q, k, k, **given).path == "tiles"


def test_what_explain_says() -> None:
    text = str(plan(40, **OF_TILES, dtype=FP8))
    (rule,) = (rule for rule in RULES if rule.path == "tiles")
    assert text.startswith(f"path       tiles: {rule.what}\nbackend    hopper")
    assert "\nnot        decode: by count tiles of the forward kernel take less time\n" in text
    assert "\nbefore     nothing" in text and "_lone" in text
    names = [rule.path for rule in RULES]
    assert names.index("decode") < names.index("tiles") < names.index("paged")


class Kernels(PackedKernels):
    """``sizes`` are what attention was given beside its tensors: table, left pads and parts."""

    def load(self, config: Any) -> Any:
        if isinstance(config, ForwardConfig):
            return lambda *given: self.attend(config, *given)
        return super().load(config)

    @torch.no_grad()
    def attend(self, config: ForwardConfig, *given: Any) -> None:
        """As a kernel does: rows of no key are zeros, pages out of range the nearest."""
        self.launches.append("attend")
        q, k, v, out, lse, counter, *rest, ctas = given
        scales, (scale, *sides, plan, sequences, table, pads, softcap, sinks) = self.arguments_of(
            config, rest, q, k
        )
        assert (softcap is not None, sinks is not None) == (config.softcap, config.sinks)
        assert [x is not None for x in sides] == [config.window, config.window, config.chunk]
        if sinks is not None:
            assert sinks.dtype == torch.float32 and sinks.is_contiguous() and sinks.shape == (q.shape[1],)
        total_q, heads, columns = q.shape[0], q.shape[1], v.shape[-1]
        splits = out.shape[0] if config.split else 1
        assert counter.shape == (2,) and ctas % config.ctas_per_sm == 0 and q.stride(2) == 1
        assert out.shape == ((splits, 1) if config.split else ()) + (total_q, heads, columns)
        assert out.dtype == (torch.float32 if config.split else BF16) and lse.dtype == torch.float32
        assert tuple(lse.shape) in ([out.shape[:-1]] if config.split else [(heads, total_q), (heads, 0)])
        self.calls.append(
            {"config": config, "ctas": ctas, "splits": splits, "table": table, "pads": pads, "k": k, "v": v}
            | {"scale": scale, "scales": scales, "sides": sides, "softcap": softcap, "sinks": sinks}
        )
        if config.page_box:
            assert k.dim() == 4 and table.shape[0] == sequences - 1 and table.dtype == torch.int32
            assert table.stride(1) == 1 and pads.shape[0] in (0, sequences - 1)
        else:
            assert k.dim() == 3 and table is None and pads is None
        out.fill_(math.nan)
        of_tiles = total_q, config.tile_queries, splits
        for b, (record, parts) in enumerate(zip(*sequences_of(plan, sequences, *of_tiles), strict=True)):
            rows = slice(record[0], record[0] + record[1])
            keys = [self.keys_of(x, b, record[2:], table, pads) for x in (k, v)]
            of_q, of_k, of_v = self.factors_of(scales, b, heads, config.group)
            whole = q[rows].double() * of_q, keys[0].double() * of_k, keys[1].double() * of_v
            if config.split:
                lse[:, 0, rows] = -math.inf
            for part in range(parts):
                options = scale, config.causal, softcap, (part, parts)
                if config.window or config.sinks:
                    found, found_lse = attend_under(*whole, scale, config.causal, sides, softcap, sinks)
                else:
                    found, found_lse = attend_to_part(*whole, *options)
                if config.split:
                    out[part, 0, rows], lse[part, 0, rows] = found, found_lse
                else:
                    out[rows], lse[:, rows] = found, found_lse.T[:, : lse.shape[1]]

    def arguments_of(self, config: ForwardConfig, rest: list[Any], q: Tensor, k: Tensor) -> tuple[Any, Any]:
        """Scales, none of 16 bits, and softmax_scale, sides, plan, sequences, table and left pads, softcap, sinks."""
        if not isinstance(config, Fp8ForwardConfig):
            *others, softcap, slopes, sinks, philox, kept = rest
            assert len(others) == 8 and slopes is sinks is philox is kept is None
            return (), (*others, softcap, sinks)
        *scales, mean = rest[:5]
        batch, kv_heads = scales[1].shape[:2]
        assert [x.shape[:2] for x in (*scales, mean)] == [(batch, kv_heads)] * 5 and mean.shape[2] == 0
        assert kv_heads == k.shape[-2]
        assert [x.shape[2] for x in scales] == [q.shape[1] // (kv_heads * config.group), 1, 1, 1]
        assert all(x.stride(2) == 1 for x in scales[1:]) and bool((scales[2] == 1).all())
        if config.page_box:
            return scales, tuple(rest[5:])
        has_scores = config.softcap or config.sinks
        rows_q, rows_k, *others, softcap, sinks = rest[5:] if has_scores else [*rest[5:], None, None]
        assert rows_q == rows_k > 2**30 and len(others) == 6
        return scales, (*others, None, None, softcap, sinks)

    @staticmethod
    def factors_of(scales: Any, b: int, heads: int, group: int) -> list[Any]:
        """Of Q, K and V of a sequence; 1 behind the last."""
        if not scales or b >= scales[0].shape[0]:
            return [1.0, 1.0, 1.0]
        of_q, of_k, _, of_v = (x[b].double() for x in scales)
        return [of_q.flatten().repeat_interleave(group)[:, None], of_k, of_v]

    @staticmethod
    def keys_of(x: Tensor, b: int, record: list[int], table: Any, pads: Any) -> Tensor:
        offset, count = record
        if table is None:
            return x[offset : offset + count]
        if b >= table.shape[0]:
            return x[0, :0]
        size, first, end = x.shape[1], 0, count
        if pads.numel():
            first = min(max(int(pads[b]), 0), size)
            end = min(first + count, size)
        rows = torch.arange(first, first + count)
        pages = table[b, (rows // size).clamp(max=table.shape[1] - 1)].long().clamp(0, x.shape[0] - 1)
        return torch.where((rows < end)[:, None, None], x[pages, rows % size].float(), 0.0)


def attend_under(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    sides: list[int | None],
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``attend_to_part`` of all keys, under a window as kernels take it."""
    if not q.shape[0] or not k.shape[0]:
        lse = torch.full(q.shape[:2], -math.inf) if sinks is None else sinks.expand(q.shape[:2])
        return torch.zeros(*q.shape[:2], v.shape[2]), lse
    left, right, chunk = sides
    options: dict[str, Any] = {"attention_chunk": chunk or 0, "softcap": softcap or 0.0, "sinks": sinks}
    for name, side in (("window_left", left), ("window_right", right)):
        options[name] = UNLIMITED if side in (None, NO_LIMIT) else side
    groups = q.shape[1] // k.shape[1]
    of_heads = (x.double().repeat_interleave(groups, 1)[None] for x in (k, v))
    out, lse = attention_naive(q.double()[None], *of_heads, softmax_scale=scale, causal=causal, **options)
    return out[0], lse[0].T


def append_as_it_is(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """``in_pytorch``, where tokens of e4m3 are in the scale of the cache already."""
    if tensors[0].dtype == tensors[2].dtype:
        options |= {"k_descale": None, "v_descale": None}
    return in_pytorch(*tensors, **options)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200."""
    monkeypatch.setattr(kvcache, "append_by_kernel", append_as_it_is)
    monkeypatch.setitem(kvcache.PATHS, "general", None)
    yield from serving(Kernels(), monkeypatch, kvcache, forward, fp8)


def serve_as(few: FewQueries, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all calls that tiles can serve be served so."""
    for module in (cache_tiles, launcher):
        monkeypatch.setattr(module, "tiles_of", lambda call: few)
    forget_launchers()


MANY = CacheCase(queries=(9, 9, 9), lengths=(9, 0, 21), head_dims=(64, 32))
CASES = {
    "end to end": MANY,
    "pages": replace(MANY, page_size=8),
    "pages of a batch index": replace(MANY, page_size=8, batch_idx=(3, 1, 0)),
    "packed queries": replace(MANY, page_size=8, packed_q=True, queries=(1, 0, 34)),
    "packed queries, end to end": replace(MANY, packed_q=True, queries=(1, 0, 34)),
    "batch index": replace(MANY, batch_idx=(4, 0, 2)),
    "leftpad": replace(MANY, leftpad=(4, 0, 20)),
    "leftpad and batch index": replace(MANY, leftpad=(4, 0, 20), batch_idx=(4, 0, 2)),
    "odd pages, one each": replace(MANY, capacity=21, page_size=21),
    "new tokens": replace(MANY, new=(1, 3, 2), packed_new=True, page_size=8),
}
WAYS_16_BITS = {
    "heads": FewQueries(group=2),
    "parts": FewQueries(splits=3, split_rows=64),
    "parts of heads": FewQueries(group=2, splits=2, split_rows=64),
}
WAYS_E4M3 = {
    "e4m3": FewQueries(tile_rows=64),
    "e4m3 heads": FewQueries(group=2, tile_rows=64),
    "e4m3 parts": FewQueries(group=2, splits=3, tile_rows=64),
}


def descales(batch: int = 3, kv_heads: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = "q_descale", "k_descale", "v_descale"
    return {name: torch.rand(batch, kv_heads, generator=generator) + 0.5 for name in names}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", [*WAYS_16_BITS, *WAYS_E4M3])
@pytest.mark.parametrize("name", CASES)
def test_numbers(
    name: str, way: str, causal: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the cache that are no key are NaN, and the table is garbage behind a sequence's length."""
    case, is_e4m3 = CASES[name], way in WAYS_E4M3
    few, dtype = (WAYS_16_BITS | WAYS_E4M3)[way], FP8 if is_e4m3 else BF16
    serve_as(few, monkeypatch)
    call = case.build(dtype, causal=causal, **(descales() if is_e4m3 else {"return_softmax_lse": True}))
    assert explain_kvcache(**call, device_capability=(9, 0)).path == "tiles"
    found = flash_attn_with_kvcache(**call)
    out, *lse = found if isinstance(found, tuple) else (found,)
    exact, exact_lse = case.expected(call)
    assert out.shape == exact.shape and out.dtype == BF16 and out.is_contiguous()
    assert (out - exact).abs().max() <= 1.6e-2
    for x in lse:
        assert x.shape == exact_lse.shape and (x - exact_lse).nan_to_num(0.0).abs().max() <= 1e-3
        assert torch.equal(x.isinf(), exact_lse.isinf())
    (given,) = kernels.calls
    assert kernels.launches == ["plan", "attend"] + ["merge"] * (few.splits > 1)
    assert [given[x].data_ptr() for x in "kv"] == [call[f"{x}_cache"].data_ptr() for x in "kv"]
    config = given["config"]
    assert (config.group, config.split, given["splits"]) == (few.group, few.splits > 1, few.splits)
    assert config.causal == causal and bool(config.page_box) == ("end to end" not in name)


@pytest.mark.parametrize("lengths", [None, 24, 5, (30, 99, 24), (-3, 0, 1)], ids=str)
@pytest.mark.parametrize("way", ["parts of heads", "e4m3 parts"])
@pytest.mark.parametrize("page_size", [0, 8])
def test_lengths(
    lengths: Any, way: str, page_size: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None are all rows, and no length is longer than the cache, or shorter than 0."""
    serve_as((WAYS_16_BITS | WAYS_E4M3)[way], monkeypatch)
    used = tuple(min(max(n, 0), 24) for n in (lengths if isinstance(lengths, tuple) else [lengths or 24] * 3))
    case = replace(MANY, lengths=used, page_size=page_size)
    call = case.build(FP8 if way in WAYS_E4M3 else BF16, causal=True)
    exact, _ = case.expected(call)
    given = int32(lengths) if isinstance(lengths, tuple) else lengths
    out = flash_attn_with_kvcache(**(call | {"cache_seqlens": given}))
    assert (out - exact).abs().max() <= 1.6e-2 and len(kernels.calls) == 1


@pytest.mark.parametrize("length", [None, 24], ids=str)
def test_a_leftpad_counts_in_lengths(
    length: int | None, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows of a cache too."""
    serve_as(WAYS_16_BITS["heads"], monkeypatch)
    case = replace(MANY, lengths=(24, 24, 24), leftpad=(4, 0, 20))
    call = case.build(BF16, causal=True)
    exact, _ = case.expected(call)
    assert (flash_attn_with_kvcache(**(call | {"cache_seqlens": length})) - exact).abs().max() <= 1.6e-2


@pytest.mark.parametrize("way", ["parts", "e4m3 parts", "e4m3"])
@pytest.mark.parametrize("page_size", [0, 8])
def test_rows_of_no_sequence(
    way: str, page_size: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are 0, and -inf."""
    serve_as((WAYS_16_BITS | WAYS_E4M3)[way], monkeypatch)
    case = replace(MANY, packed_q=True, queries=(3, 0, 7), page_size=page_size)
    call = case.build(FP8 if way in WAYS_E4M3 else BF16)
    exact, _ = case.expected(call)
    call["q"] = torch.cat((call["q"], torch.full((4, 4, 64), math.nan).to(call["q"].dtype)))
    wants_lse = way not in WAYS_E4M3
    found = flash_attn_with_kvcache(**call, return_softmax_lse=wants_lse)
    out, *lse = found if wants_lse else (found,)
    assert (out[:10] - exact).abs().max() <= 1.6e-2 and not out[10:].any()
    assert all(bool((x[:, 10:] == -math.inf).all()) for x in lse)


SCALES_OF = {
    "none": {},
    "one": {name: descales()["q_descale"] for name in descales()},
    "of q alone": {"q_descale": descales()["q_descale"]},
    "of v alone": {"v_descale": descales()["v_descale"]},
    "expanded": {name: torch.tensor([[0.5, 1.5]]).expand(3, 2) for name in descales()},
    "one number": {name: torch.tensor(0.75).expand(3, 2) for name in descales()},
    "strided": {name: torch.stack((x, x + 1), 2)[..., 0] for name, x in descales().items()},
    "heads first": {name: x.t().contiguous().t() for name, x in descales().items()},
}


@pytest.mark.parametrize("name", SCALES_OF)
@pytest.mark.parametrize("page_size", [0, 8])
def test_descales(name: str, page_size: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any strides, or none."""
    serve_as(WAYS_E4M3["e4m3 heads"], monkeypatch)
    case = replace(MANY, page_size=page_size)
    call = case.build(FP8, **SCALES_OF[name])
    assert (flash_attn_with_kvcache(**call) - case.expected(call)[0]).abs().max() <= 2e-2
    (given,) = kernels.calls
    assert [tuple(x.shape) for x in given["scales"]] == [(3, 2, 1)] * 4


def test_out_and_another_gpu_and_a_margin(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_as(WAYS_16_BITS["parts"], monkeypatch)
    call = MANY.build(BF16)
    out = torch.full((3, 9, 4, 40), math.nan).bfloat16()[..., :32]
    entered: list[int] = []
    guard = torch.cuda.device
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or guard(index))
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        assert flash_attn_with_kvcache(**call, out=out.fill_(math.nan), sm_margin=32) is out
    assert (out - MANY.expected(call)[0]).abs().max() <= 1.6e-2 and entered == [0]
    given = kernels.calls[1]
    assert given["ctas"] == (SMS - 32) * given["config"].ctas_per_sm


def test_a_cache_at_an_odd_address_is_copied(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_as(WAYS_E4M3["e4m3"], monkeypatch)
    seen = []
    monkeypatch.setattr(kvcache, "attend_in_general", lambda *given: seen.append(given) or (given[1].q, None))
    call = MANY.build(FP8)
    apart = torch.empty(call["k_cache"].numel() + 1, dtype=torch.uint8)[1:].view(FP8)
    flash_attn_with_kvcache(**(call | {"k_cache": apart.view(call["k_cache"].shape)}))
    assert len(seen) == 1 and kernels.calls == []


def test_new_tokens_and_rotary(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are rotated before, the cache has the new tokens after."""
    serve_as(WAYS_16_BITS["parts of heads"], monkeypatch)
    case = replace(MANY, new=(3, 3, 3), queries=(3, 3, 3), page_size=8, rotary_dim=32)
    call = case.build(BF16, causal=True)
    after = case.caches_after(call)
    out = flash_attn_with_kvcache(**call)
    assert (out - case.expected(call)[0]).abs().max() <= 2e-2
    used = ~after[1].isnan()
    assert torch.equal(call["v_cache"][used], after[1][used])


def test_new_tokens_of_e4m3(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_as(WAYS_E4M3["e4m3 parts"], monkeypatch)
    case = replace(MANY, new=(3, 3, 3), queries=(3, 3, 3))
    call = case.build(FP8, causal=True, **descales())
    assert (flash_attn_with_kvcache(**call) - case.expected(call)[0]).abs().max() <= 2e-2
    assert len(kernels.calls) == 1


def test_queries_of_no_sequence_alone() -> None:
    """A bound of 0 queries, where rows of q are of no sequence, is served."""
    for dtype in (BF16, FP8):
        q = torch.empty(5, 32, 128, dtype=dtype, device="meta")
        k = torch.empty(2, 512, 8, 128, dtype=dtype, device="meta")
        starts = torch.empty(3, dtype=torch.int32, device="meta")
        given = {"cu_seqlens_q": starts, "max_seqlen_q": 0, "device_capability": (9, 0)}
        assert explain_kvcache(q, k, k, **given).path in ("decode", "tiles")


@pytest.mark.parametrize(("queries", "dtype"), [(8, BF16), (64, BF16), (8, FP8)], ids=str)
def test_more_keys_than_packed_kernels_count(queries: int, dtype: torch.dtype) -> None:
    """The decode kernel takes them."""
    options = {"batch": 600, "capacity": 2**20, "page_size": 64, "dtype": dtype}
    assert plan(queries, (64, 8), **options).path == "decode"


def test_what_no_kernel_counts_is_refused_before_anything_is_written() -> None:
    with pytest.raises(NotImplementedError, match="total_k is 629145600"):
        plan(64, (64, 8), batch=600, capacity=2**20, page_size=64, dtype=FP8)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("capacity", [1024, 65536])
def test_pack_gqa_is_honoured(capacity: int, dtype: torch.dtype) -> None:
    for queries in (8, 40, 200):
        options = {"batch": 1, "capacity": capacity, "dtype": dtype}
        unpacked = plan(queries, (28, 4), **options, pack_gqa=False)
        assert getattr(unpacked.config, "group", 1) == 1 and not isinstance(unpacked.config, DecodeConfig)
        packed = plan(queries, (28, 4), **options, pack_gqa=True)
        assert isinstance(packed.config, DecodeConfig) or packed.config.group == 7


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_tile_is_in_more_parts_than_it_may_be(most: int, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"batch": 1, "capacity": 65536, "page_size": 64, "dtype": dtype}
    usual, limited = (plan(96, (32, 8), **options, **hint) for hint in ({}, {"num_splits": most}))
    assert usual.path == "tiles" and usual.config.split
    if limited.path == "tiles":
        assert limited.config.split == (most > 1)
        said = [note for note in limited.notes if "CTAs visit a part" in note]
        assert [int(note.split()[2]) <= most for note in said] == [True] * (most > 1)
    else:
        assert dtype == BF16 and limited.path in ("decode", "paged")
