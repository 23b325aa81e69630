"""Decoding on a cache of e4m3, whose rows of no key are NaN, against float64 on the dequantized cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper_attention import explain_kvcache, flash_attn_with_kvcache
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference import attention_naive, attention_standard

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Each test compiles the one kernel that it needs."""


@dataclass(frozen=True)
class Keys:
    """A cache in pages, the pages of each sequence, its lengths, its numbers, and factors (batch, kv_heads)."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    rows: list[tuple[Tensor, Tensor]]
    factors: tuple[Tensor, Tensor]


def draw_keys(lengths: tuple[int, ...], page_size: int, kv_heads: int, dims: tuple[int, int]) -> Keys:
    generator = torch.Generator("cuda").manual_seed(sum(lengths))
    per_sequence = -(-max(lengths) // page_size)
    order = torch.randperm(len(lengths) * per_sequence + 2, generator=generator, device="cuda")
    table = order[: len(lengths) * per_sequence].view(len(lengths), per_sequence).int()
    caches = [torch.full((len(order), page_size, kv_heads, d), math.nan, device="cuda").to(FP8) for d in dims]
    rows = []
    for number, length in enumerate(lengths):
        numbers = tuple(
            torch.randn(length, kv_heads, d, device="cuda", generator=generator).mul_(2).to(FP8) for d in dims
        )
        for cache, x in zip(caches, numbers, strict=True):
            for page, part in zip(table[number].tolist(), x.split(page_size), strict=False):
                cache[page, : part.shape[0]] = part
        rows.append(numbers)
    factors = tuple(
        torch.rand(len(lengths), kv_heads, device="cuda", generator=generator) + 0.5 for _ in range(2)
    )
    found = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Keys(*caches, table, found, rows, (factors[0], factors[1]))


@pytest.mark.parametrize("of_queries", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(
    ("dims", "heads", "queries"),
    [
        ((128, 128), (8, 2), 1),
        ((128, 128), (2, 2), 1),
        ((64, 64), (8, 1), 1),
        ((96, 64), (16, 2), 2),
        ((192, 128), (4, 1), 4),
        ((192, 192), (8, 1), 5),
        ((64, 192), (16, 1), 4),
        ((128, 128), (32, 1), 1),
        ((256, 256), (8, 2), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_decoding(
    dims: tuple[int, int], heads: tuple[int, int], queries: int, mask: str, of_queries: torch.dtype
) -> None:
    keys = draw_keys((1000, 0, 77, 4097, 128), 64, heads[1], dims)
    torch.manual_seed(1)
    q = torch.randn(5, queries, heads[0], dims[0], device="cuda").to(of_queries)
    dtype = torch.bfloat16 if of_queries == FP8 else of_queries
    sides = (100, 0) if mask == "window" else (-1, -1)
    options: dict[str, Any] = {"causal": mask != "full", "window_size": sides, "return_softmax_lse": True}
    options |= {"k_descale": keys.factors[0], "v_descale": keys.factors[1]}
    of_q = torch.ones(5, heads[1], device="cuda")
    if of_queries == FP8:
        of_q = torch.rand(5, heads[1], device="cuda") + 0.5
        options["q_descale"] = of_q
    given = {"cache_seqlens": keys.lengths, "page_table": keys.table, **options}
    out, lse = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
    for _ in range(5):
        again, lse_again = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)
    assert out.dtype == dtype
    of_mask = {"causal": mask != "full", "softmax_scale": dims[0] ** -0.5}
    of_mask |= {"window_left": 100 if mask == "window" else UNLIMITED}
    for number, rows in enumerate(keys.rows):
        scaled = q[number].double() * of_q[number].repeat_interleave(heads[0] // heads[1])[None, :, None]
        k, v = (x.double() * of[number][:, None].double() for x, of in zip(rows, keys.factors, strict=True))
        exact, exact_lse = attention_naive(scaled[None], k[None], v[None], **of_mask)
        rounded = [x.to(dtype)[None] for x in (scaled, k, v)]
        (plain,) = (attention_standard(*rounded, **of_mask),)
        of_rounded, _ = attention_naive(*(x.double() for x in rounded), **of_mask)
        allowed = 2 * (plain.double() - of_rounded).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (out[number].double() - exact[0]).abs().max() <= allowed, number
        seen = exact_lse[0] > -math.inf
        assert bool((lse[number][~seen] == -math.inf).all()) and bool((out[number][~seen.T] == 0).all())
        error = (lse[number].double() - exact_lse[0])[seen].abs()
        # For wide heads of float16 there is no kernel, and the cache is rounded to float16.
        rounded_keys = 2e-2 if dims[0] > 192 and dtype == torch.float16 else 1e-3
        assert bool((error <= rounded_keys + 2e-4 * exact_lse[0][seen].abs()).all()), number


@pytest.mark.parametrize("of_queries", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(
    ("dims", "heads", "queries"),
    [((128, 128), (8, 2), 1), ((128, 128), (16, 2), 1), ((64, 64), (16, 1), 1), ((256, 128), (8, 2), 3)],
    ids=str,
)
def test_the_lse_of_peaky_scores(
    dims: tuple[int, int], heads: tuple[int, int], queries: int, of_queries: torch.dtype
) -> None:
    """Rows of very different sizes, whose softmax is of one key or of many: the bound is a tenth of what a merge of
    parts needs."""
    keys = draw_keys((1000, 77, 4097), 64, heads[1], dims)
    torch.manual_seed(2)
    sizes = torch.tensor([1.0, 8.0] if of_queries == FP8 else [1e-20, 1.0, 8.0, 20.0], device="cuda")
    q = torch.randn(3, queries, heads[0], dims[0], device="cuda")
    q = (q * sizes.repeat(heads[0] // len(sizes))[:, None]).to(of_queries)
    options = {"k_descale": keys.factors[0], "v_descale": keys.factors[1], "return_softmax_lse": True}
    given = {"cache_seqlens": keys.lengths, "page_table": keys.table, "causal": True, **options}
    _, lse = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
    for number, rows in enumerate(keys.rows):
        k, v = (x.double() * of[number][:, None].double() for x, of in zip(rows, keys.factors, strict=True))
        of_row = {"causal": True, "softmax_scale": dims[0] ** -0.5}
        _, exact = attention_naive(q[number].double()[None], k[None], v[None], **of_row)
        error = (lse[number].double() - exact[0]).abs()
        assert bool((error <= 1e-4 * exact[0].abs().div(64).clamp(min=1.0)).all()), number


CAP, SPREAD = 4.0, 6.0
"""Of scores: what a softcap keeps them below, and their standard deviation without descales."""


@pytest.mark.parametrize("of_queries", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(
    ("dims", "heads", "queries", "tile_m"),
    [
        ((128, 128), (8, 2), 1, 4),
        ((64, 64), (2, 2), 3, 4),
        ((256, 256), (4, 1), 1, 4),
        ((128, 128), (8, 1), 1, 8),
        ((256, 256), (16, 2), 1, 8),
        ((64, 64), (16, 1), 1, 16),
        ((128, 128), (8, 2), 3, 16),
        ((256, 256), (8, 2), 3, 16),
        ((128, 128), (32, 1), 1, 32),
        ((64, 64), (8, 1), 3, 32),
        ((128, 128), (16, 1), 4, 64),
        ((64, 64), (10, 1), 5, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", ["plain", "window", "sinks", "window and sinks"])
def test_a_softcap(
    dims: tuple[int, int],
    heads: tuple[int, int],
    queries: int,
    tile_m: int,
    more: str,
    of_queries: torch.dtype,
) -> None:
    """Scores on both sides of where the tanh bends; the LSE is that of capped ones."""
    if of_queries == torch.float16 and max(dims) > 192:
        pytest.skip("no kernel has wide heads of float16 and e4m3")
    keys = draw_keys((1000, 0, 77, 4097, 128), 64, heads[1], dims)
    torch.manual_seed(1)
    q = torch.randn(5, queries, heads[0], dims[0], device="cuda").to(of_queries)
    dtype = torch.bfloat16 if of_queries == FP8 else of_queries
    # Keys are drawn from twice N(0, 1).
    scale = SPREAD / 2.0 * dims[0] ** -0.5
    given: dict[str, Any] = {"cache_seqlens": keys.lengths, "page_table": keys.table, "causal": True}
    given |= {
        "k_descale": keys.factors[0],
        "v_descale": keys.factors[1],
        "softcap": CAP,
        "softmax_scale": scale,
    }
    of_mask: dict[str, Any] = {"causal": True, "softmax_scale": scale, "softcap": CAP}
    if "window" in more:
        given["window_size"], of_mask["window_left"] = (100, 0), 100
    if "sinks" in more:
        given["sinks"] = of_mask["sinks"] = torch.randn(heads[0], device="cuda") + 4.0
    of_q = torch.ones(5, heads[1], device="cuda")
    if of_queries == FP8:
        of_q = given["q_descale"] = torch.rand(5, heads[1], device="cuda") + 0.5
    plan = explain_kvcache(q, keys.k, keys.v, **given, return_softmax_lse=True)
    assert plan.path == "decode" and isinstance(plan.config, DecodeConfig) and plan.config.softcap
    assert plan.config.tile_m == max(tile_m, 32 if dtype == torch.float16 else 0)
    out, lse = flash_attn_with_kvcache(q, keys.k, keys.v, **given, return_softmax_lse=True)
    again, lse_again = flash_attn_with_kvcache(q, keys.k, keys.v, **given, return_softmax_lse=True)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)
    for number, rows in enumerate(keys.rows):
        scaled = q[number].double() * of_q[number].repeat_interleave(heads[0] // heads[1])[None, :, None]
        k, v = (x.double() * of[number][:, None].double() for x, of in zip(rows, keys.factors, strict=True))
        exact, exact_lse = attention_naive(scaled[None], k[None], v[None], **of_mask)
        rounded = [x.to(dtype)[None] for x in (scaled, k, v)]
        plain = attention_standard(*rounded, **of_mask)
        of_rounded, _ = attention_naive(*(x.double() for x in rounded), **of_mask)
        allowed = 2 * (plain.double() - of_rounded).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (out[number].double() - exact[0]).abs().max() <= allowed, number
        seen = exact_lse[0] > -math.inf
        assert bool((lse[number][~seen] == -math.inf).all())
        # In bfloat16 the tanh has a relative error of 2^-11.
        of_tanh = CAP * 2.0**-11 if dtype == torch.bfloat16 else 0.0
        error = (lse[number].double() - exact_lse[0])[seen].abs()
        assert bool((error <= of_tanh + 1e-3).all()), number


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_a_query_that_is_not_finite_gives_nan_in_its_row_alone(value: float) -> None:
    keys = draw_keys((300, 40), 64, 2, (128, 128))
    q = torch.randn(2, 1, 8, 128, device="cuda").bfloat16()
    given = {"cache_seqlens": keys.lengths, "page_table": keys.table}
    expected = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
    q[0, 0, 3, 5] = value
    out = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
    assert bool(out[0, 0, 3].isnan().all())
    expected[0, 0, 3] = out[0, 0, 3]
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
