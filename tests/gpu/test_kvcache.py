"""Attention on a key/value cache on a GPU: against float64, NaN wherever no key is, and in CUDA graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper_attention import explain_kvcache, flash_attn_combine, flash_attn_with_kvcache
from hopper_attention.reference import attention_naive
from tests.python.kvcache_cases import FP8, CacheCase, bits, int32
from tests.python.test_kvcache import LAYOUTS, SCORES

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

LONG = CacheCase(
    lengths=(150, 0, 277, 64),
    queries=(3, 3, 3, 3),
    capacity=288,
    heads=(8, 2),
    head_dims=(128, 128),
    page_size=16,
)
NEW = replace(LONG, new=(3, 1, 2, 3), packed_new=True, rotary_dim=64)


def on(device: str, call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}


def check(case: CacheCase, backend: str | None, dtype: torch.dtype = torch.bfloat16, **given: Any) -> None:
    """Caches as they are on a CPU, bit by bit, but for what rounding of rotated keys allows; results as in float64."""
    call = case.build(dtype, **given)
    there = on("cuda", call)
    k_after, v_after = case.caches_after(call)
    out, lse = flash_attn_with_kvcache(**there, backend=backend, return_softmax_lse=True)
    after = on("cpu", there)
    assert torch.equal(bits(after["v_cache"]), bits(v_after))
    differs = bits(after["k_cache"]) != bits(k_after)
    assert not differs.any() or (
        case.rotary_dim and differs.sum() <= 0.02 * (~k_after.double().isnan()).sum()
    )
    exact, exact_lse = case.expected(after)
    assert (out.cpu().double() - exact).abs().max() <= 1.6e-2 * max(1.0, exact.abs().max())
    assert torch.equal(lse.cpu() == -math.inf, exact_lse == -math.inf)
    assert (lse.cpu().double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= 1e-2


@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 96])
@pytest.mark.parametrize("causal", [False, True])
def test_pages_of_any_size(backend: str, page_size: int, causal: bool) -> None:
    check(replace(LONG, page_size=page_size), backend, causal=causal)
    check(replace(NEW, page_size=page_size, interleaved=causal), backend, causal=causal)


@pytest.mark.parametrize("sequences", [33, 64, 65, 300, 1100])
def test_many_sequences(sequences: int) -> None:
    """Of up to two to a lane of a warp, up to 32, and more; some without a key."""
    lengths = tuple(37 * n % 150 for n in range(sequences))
    case = replace(LONG, lengths=lengths, queries=(1,) * sequences, capacity=160, head_dims=(64, 64))
    check(case, "hopper", causal=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(backend: str, name: str) -> None:
    check(LAYOUTS[name], backend, causal=True)


@pytest.mark.parametrize("name", SCORES)
def test_what_is_done_to_scores(backend: str, name: str) -> None:
    check(CacheCase(page_size=3, options=SCORES[name]), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_a_cache_of_e4m3(backend: str, dtype: torch.dtype) -> None:
    descales = {
        name: torch.tensor([[0.5, 2.0], [1.0, 0.25], [2.0, 1.0], [1.0, 1.0]])
        for name in ("k_descale", "v_descale")
    }
    check(replace(NEW, rotary_dim=0), backend, dtype, cache_dtype=FP8, causal=True, **descales)
    check(NEW, backend, dtype, cache_dtype=FP8, causal=True)


MANY = replace(LONG, queries=(40, 40, 40, 40), head_dims=(128, 64))
PACKED: dict[str, tuple[CacheCase, dict[str, Any]]] = {
    "two tiles": (MANY, {"causal": True}),
    "no pages": (replace(MANY, page_size=0), {"sinks": torch.randn(8)}),
    "one token": (replace(MANY, queries=(1, 1, 1, 1)), {}),
    "one K/V head, a window": (replace(MANY, heads=(16, 1)), {"window_size": (70, 3)}),
    "packed queries": (replace(MANY, queries=(70, 0, 1, 9), packed_q=True), {"causal": True, "softcap": 3.0}),
    "wide heads": (replace(MANY, head_dims=(192, 256)), {"causal": True}),
    "new tokens": (replace(NEW, lengths=(150, 0, 240, 64), queries=(40, 40, 40, 40)), {"causal": True}),
    "parts that are limited": (MANY, {"num_splits": 2}),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("pack_gqa", [True, False])
def test_pack_gqa_takes_the_kernel_and_changes_no_result(name: str, pack_gqa: bool) -> None:
    case, given = PACKED[name]
    call = case.build(torch.bfloat16, pack_gqa=pack_gqa, **given)
    plan = explain_kvcache(**on("cuda", call))
    assert plan.path == ("decode" if pack_gqa else "paged")
    check(case, None, pack_gqa=pack_gqa, **given)


@pytest.mark.parametrize("page_size", [0, 3, 16])
@pytest.mark.parametrize("queries", [20, 300])
def test_many_queries_on_a_cache_of_e4m3(page_size: int, queries: int) -> None:
    """By the kernel that widens it, and on a copy."""
    case = replace(MANY, page_size=page_size, queries=(queries,) * 4)
    factors = {name: torch.rand(4, 2) + 0.5 for name in ("k_descale", "v_descale")}
    check(case, None, cache_dtype=FP8, causal=True, **factors)
    softcap = explain_kvcache(**on("cuda", case.build(torch.bfloat16, cache_dtype=FP8, softcap=5.0)))
    is_copied = queries == 300 or page_size == 3
    assert softcap.path == ("copied" if is_copied else "decode")
    assert any("dequantize_sm" in step for step in softcap.steps) == is_copied
    check(case, None, cache_dtype=FP8, causal=True, softcap=5.0, **factors)


def test_a_second_query() -> None:
    case = CacheCase(heads=(16, 1), head_dims=(64, 256), page_size=4, lengths=(9, 0, 21), new=(3, 3, 3))
    check(case, None, qv=torch.randn(3, 3, 16, 256).bfloat16(), causal=True)


@pytest.mark.parametrize("queries", [(1, 0, 3, 2), (70, 0, 3, 1)], ids=["few", "many"])
def test_rows_behind_the_last_sequence_are_zero(backend: str, queries: tuple[int, ...]) -> None:
    call = on("cuda", replace(LONG, queries=queries, packed_q=True).build(torch.bfloat16))
    total, behind = sum(queries), 300
    call["q"] = torch.cat((call["q"], call["q"].new_full((behind, *call["q"].shape[1:]), math.nan)))
    for _ in range(2):
        # Memory that is freed full of NaN is given to the next call.
        torch.full((total + behind, 8, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        out, lse = flash_attn_with_kvcache(**call, backend=backend, causal=True, return_softmax_lse=True)
        assert bool((out[total:] == 0).all()) and bool((lse[:, total:] == -math.inf).all())
        assert bool(out[:total].isfinite().all())


def test_a_graph_decodes_one_token_at_each_replay(backend: str) -> None:
    """Lengths, pages and tokens change between replays of one graph."""
    case = replace(NEW, new=(1, 1, 1, 1), packed_new=False, queries=(1, 1, 1, 1), lengths=(150, 0, 250, 64))
    steps = 4
    full = replace(case, new=(steps,) * 4).build(torch.bfloat16)
    tokens = {name: full[name] for name in ("k", "v")}
    graphed, plain = (on("cuda", dict(full)) for _ in range(2))
    for call in (graphed, plain):
        call |= {name: x[:, :1].contiguous().cuda() for name, x in tokens.items()}
        call["q"] = call["q"][:, :1].contiguous()
    options = {"causal": True, "backend": backend, "return_softmax_lse": True}
    saved = {name: graphed[name].clone() for name in ("k_cache", "v_cache")}
    flash_attn_with_kvcache(**graphed, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(**graphed, **options)
    for name, cache in saved.items():
        graphed[name].copy_(cache)
    for step in range(steps):
        for name, x in tokens.items():
            for call in (graphed, plain):
                call[name].copy_(x[:, step : step + 1])
        out.fill_(math.nan)
        graph.replay()
        wanted, wanted_lse = flash_attn_with_kvcache(**plain, **options)
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse) and not out.isnan().any()
        for call in (graphed, plain):
            call["cache_seqlens"] += 1
    assert torch.equal(bits(graphed["k_cache"]), bits(plain["k_cache"]))


def test_no_call_waits_for_the_gpu(backend: str) -> None:
    calls = [on("cuda", case.build(torch.bfloat16)) for case in (LONG, NEW, replace(NEW, packed_q=True))]
    calls += [
        on("cuda", NEW.build(torch.bfloat16, FP8)),
        on("cuda", replace(NEW, leftpad=(3, 0, 9, 1)).build(FP8)),
    ]
    for call in calls:
        flash_attn_with_kvcache(**call, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            flash_attn_with_kvcache(**call, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_numbers_that_make_no_sense_stay_in_the_cache(backend: str, cache_dtype: torch.dtype) -> None:
    call = on("cuda", NEW.build(torch.bfloat16, cache_dtype))
    wild = int32([-7, 1 << 30, 287, -(1 << 31)]).cuda()
    for name, x in (
        ("cache_seqlens", wild),
        ("cache_batch_idx", wild),
        ("cache_leftpad", wild),
        ("cu_seqlens_k_new", int32([5, -9, 1 << 30, 2, 1]).cuda()),
        ("page_table", torch.full_like(call["page_table"], 1 << 30)),
    ):
        given = call | {name: x}
        before = given["v_cache"].clone()
        flash_attn_with_kvcache(**given, backend=backend)
        torch.cuda.synchronize()
        if name in ("page_table", "cache_batch_idx"):
            assert torch.equal(bits(before), bits(given["v_cache"]))
        call["v_cache"].copy_(before)


def filled(
    lengths: list[int], page_size: int, cache_dtype: torch.dtype, head_dim: int = 128
) -> dict[str, Tensor]:
    """Caches of NaN but for the keys of some sequences, in pages of any order, and their table."""
    width = -(-(max(lengths) + 64) // page_size)
    table = torch.randperm(len(lengths) * width, device="cuda").view(len(lengths), width).int()
    found: dict[str, Tensor] = {"page_table": table}
    for name in ("k_cache", "v_cache"):
        rows = torch.full((len(lengths), width * page_size, 2, head_dim), math.nan, device="cuda")
        for row, length in zip(rows, lengths, strict=True):
            row[:length].normal_()
        pages = rows.to(cache_dtype).view(-1, page_size, 2, head_dim)
        found[name] = pages.new_empty(pages.shape)
        found[name].view(torch.uint8)[table.flatten().long()] = pages.view(torch.uint8)
    return found


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("page_size", [0, 64])
def test_more_elements_than_31_bits_count(page_size: int, cache_dtype: torch.dtype) -> None:
    """Sequences, or their pages, at the end of the cache; a token is appended there."""
    torch.manual_seed(4)
    entries, rows = (70_000, page_size) if page_size else (5, 900_000)
    cache = torch.empty(2, entries, rows, 4, 128, device="cuda", dtype=cache_dtype)
    assert cache[0].numel() > 2**31
    places = torch.tensor([[-1, -7, 3], [-2, 66_001, -5]] if page_size else [[-1], [-2]], device="cuda")
    places %= entries
    q, new = torch.randn(2, 1, 16, 128, device="cuda").bfloat16(), torch.randn(2, 2, 1, 4, 128, device="cuda")
    given = {
        "page_table" if page_size else "cache_batch_idx": places.int() if page_size else places[:, 0].int()
    }
    exact, lengths = [], [130, 187]
    for sequence, length in enumerate(lengths):
        keys = torch.randn(2, length, 4, 128, device="cuda").to(cache_dtype)
        at, row = places[sequence][torch.arange(length) // rows], torch.arange(length) % rows
        cache.view(torch.uint8)[:, at, row.cuda()] = keys.view(torch.uint8)
        rounded = new[:, sequence].bfloat16().to(cache_dtype)
        k, v = torch.cat((keys.float(), rounded.float()), 1)[:, None]
        exact.append(attention_naive(q[sequence : sequence + 1].float(), k, v, causal=True)[0])
    given |= {"k": new[0].bfloat16(), "v": new[1].bfloat16(), "cache_seqlens": int32(lengths).cuda()}
    out = flash_attn_with_kvcache(q, *cache, **given, causal=True)
    wanted = torch.cat(exact)
    assert (out.double() - wanted).abs().max() <= 1.6e-2 * max(1.0, wanted.abs().max())


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_streams_append_and_read_at_once(cache_dtype: torch.dtype) -> None:
    """Two streams append to sequences of their own in one cache and attend to them; a third one attends to the keys
    that all sequences had. Each has the bits of its calls alone."""
    torch.manual_seed(3)
    lengths, steps = [17, 2300, 64, 900, 5, 1250], 40
    cache = filled(lengths, 16, cache_dtype)
    q, k, v = (torch.randn(steps, 6, 1, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    angles = torch.rand(max(lengths) + steps, 64, device="cuda").mul(2 * math.pi)
    rotary = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    at_step = [int32(lengths).cuda() + step for step in range(steps)]

    def append(caches: dict[str, Tensor], step: int, own: slice) -> Tensor:
        new = {"k": k[step, own], "v": v[step, own], "cache_seqlens": at_step[step][own], **rotary}
        given = caches | {"page_table": cache["page_table"][own]}
        return flash_attn_with_kvcache(q[step, own], **given, **new, causal=True)

    def read(caches: dict[str, Tensor], step: int) -> Tensor:
        return flash_attn_with_kvcache(q[step], **caches, cache_seqlens=at_step[0])

    def copied() -> dict[str, Tensor]:
        return {name: x.clone() for name, x in cache.items()}

    halves = slice(0, 3), slice(3, 6)
    alone, before = copied(), copied()
    appended = [[append(alone, step, own) for own in halves] for step in range(steps)]
    seen = [read(before, step) for step in range(steps)]
    together, streams = copied(), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        for number, own in enumerate(halves):
            with torch.cuda.stream(streams[number]):
                found.append((append(together, step, own), appended[step][number]))
        with torch.cuda.stream(streams[2]):
            found.append((read(together, step), seen[step]))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) and not wanted.isnan().any() for out, wanted in found)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(bits(together[name]), bits(alone[name]))
    # What a step writes counts in it.
    assert not torch.equal(appended[0][0], seen[0][halves[0]])


@pytest.mark.parametrize(("queries", "head_dim"), [(1, 128), (3, 128), (90, 64)])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_pages_change_no_bit(cache_dtype: torch.dtype, queries: int, head_dim: int) -> None:
    """Of a step, and of many queries where wide pages have no tiles of their own."""
    torch.manual_seed(4)
    lengths = [3000, 1, 777, 128, 2049]
    q = torch.randn(5, queries, 8, head_dim, device="cuda").bfloat16()
    of_step = {"cache_seqlens": int32(lengths).cuda(), "causal": True, "return_softmax_lse": True}
    # By one kernel: of many queries pages may have another by count.
    of_step["pack_gqa"] = False if queries == 90 else None
    for page_size in (8, 16, 64, 3072):
        cache = filled(lengths, page_size, cache_dtype, head_dim)
        table = cache["page_table"].long()
        rows = [
            cache[name].view(torch.uint8)[table].flatten(1, 2).view(cache_dtype)
            for name in ("k_cache", "v_cache")
        ]
        out, lse = flash_attn_with_kvcache(q, **cache, **of_step)
        plain, plain_lse = flash_attn_with_kvcache(q, *rows, **of_step)
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and not out.isnan().any(), page_size


@pytest.mark.parametrize(("head_dim", "queries"), [(128, 1), (128, 4), (64, 1), (256, 1)])
def test_small_pages_of_long_caches_change_no_bit(head_dim: int, queries: int) -> None:
    """Where another block of keys is under way than without pages."""
    torch.manual_seed(4)
    lengths = [33_000, 1, 777, 9_001]
    q = torch.randn(4, queries, 8, head_dim, device="cuda").bfloat16()
    of_step = {"cache_seqlens": int32(lengths).cuda(), "causal": True}
    for page_size in (8, 16):
        cache = filled(lengths, page_size, torch.bfloat16, head_dim)
        plan = explain_kvcache(q, **cache, **of_step)
        assert isinstance(plan.config, DecodeConfig) and plan.config.stages == 3
        rows = [cache[name][cache["page_table"].long()].flatten(1, 2) for name in ("k_cache", "v_cache")]
        out, lse = flash_attn_with_kvcache(q, **cache, **of_step, return_softmax_lse=True)
        plain, plain_lse = flash_attn_with_kvcache(q, *rows, **of_step, return_softmax_lse=True)
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and not out.isnan().any(), page_size


def test_compiled_with_a_graph(backend: str) -> None:
    call, other = (on("cuda", NEW.build(torch.bfloat16)) for _ in range(2))

    def step(call: dict[str, Any]) -> Tensor:
        return flash_attn_with_kvcache(**call, causal=True, backend=backend)

    wanted = step(call)
    assert torch.equal(torch.compile(step, fullgraph=True)(other), wanted)
    assert torch.equal(bits(call["k_cache"]), bits(other["k_cache"]))


@pytest.mark.parametrize("splits", [1, 3, 17])
def test_combine(splits: int) -> None:
    torch.manual_seed(0)
    out_partial = torch.randn(splits * 2, 5, 16, 113, 64).transpose(2, 3)[:splits]
    lse_partial = torch.randn(splits, 5, 32, 113).transpose(-1, -2)[..., :16]
    lse_partial[splits // 2 :, :2] = -math.inf
    out, lse = flash_attn_combine(out_partial.cuda(), lse_partial.cuda(), out_dtype=torch.bfloat16)
    exact_lse = lse_partial.double().logsumexp(0)
    weights = torch.exp(lse_partial.double() - exact_lse).nan_to_num(0.0)
    exact = (weights[..., None] * out_partial).sum(0)
    assert (out.cpu() - exact).abs().max() <= 8e-3 * exact.abs().max()
    assert torch.allclose(lse.cpu().double(), exact_lse, atol=1e-5)
