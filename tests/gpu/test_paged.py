"""Attention to a cache where it lies, against float64 and against the dense kernel, NaN in all that is not in use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func
from hopper_attention.launch import paged_forward as launcher
from hopper_attention.launch.paged_forward import paged_forward
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import Scores
from tests.gpu.conftest import Inputs

pytestmark = pytest.mark.gpu

FULL, CAUSAL = MaskSpec(False), MaskSpec(True)
MASKS = (FULL, CAUSAL, MaskSpec(True, window_left=100), MaskSpec(False, 300, 200))


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_out_of", "_empty_lse"):
        monkeypatch.setattr(launcher, name, poisoned(getattr(launcher, name)))
    yield


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make``, whose tensors are NaN."""
    return lambda *given: make(*given).fill_(math.nan)


@dataclass(frozen=True)
class Cache:
    """``rows`` are K and V of each sequence, which lie in pages; all else of the cache is NaN."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    rows: list[tuple[Tensor, Tensor]]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_cache(
    lengths: list[int],
    page_size: int,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    pads: list[int] | None = None,
    heads_first: bool = False,
) -> Cache:
    """Pages in a random order, some unused; entries of the table that no key needs are out of range."""
    pads = pads or [0] * len(lengths)
    counts = [-(-(n + pad) // page_size) for n, pad in zip(lengths, pads, strict=True)]
    order = torch.randperm(sum(counts) + 3, device="cuda").int()
    shape = (len(order), kv_heads, page_size) if heads_first else (len(order), page_size, kv_heads)
    caches = [torch.full((*shape, d), math.nan, device="cuda", dtype=dtype) for d in dims]
    if heads_first:
        caches = [x.transpose(1, 2) for x in caches]
    table = torch.full((len(lengths), max(1, *counts)), 2**31 - 1, device="cuda", dtype=torch.int32)
    rows, first = [], 0
    for b, (length, pad, count) in enumerate(zip(lengths, pads, counts, strict=True)):
        table[b, :count] = order[first : first + count]
        first += count
        at = torch.arange(length, device="cuda") + pad
        new = [normal(length, kv_heads, d, dtype=dtype) for d in dims]
        for cache, x in zip(caches, new, strict=True):
            cache[table[b, at // page_size].long(), at % page_size] = x
        rows.append((new[0], new[1]))
    return Cache(caches[0], caches[1], table, ints(lengths), rows)


def errors(
    judge: Any, q: Tensor, cache: Cache, mask: MaskSpec, starts: list[int], **options: Any
) -> list[Any]:
    """Of packed q, by sequence."""
    given = {"page_table": cache.table, "lengths": cache.lengths, "mask": mask, "return_lse": True} | options
    out, lse = paged_forward(q, cache.k, cache.v, cu_seqlens_q=ints(starts), **given)
    wrong: list[Any] = []
    for b, (k, v) in enumerate(cache.rows):
        span = slice(starts[b], starts[b + 1])
        inputs = Inputs(q[None, span], k[None], v[None])
        found = judge(inputs, out[None, span], lse[None, :, span], mask.causal, None, mask.window)
        wrong += [(b, found)] if found else []
    behind = slice(starts[-1], None)
    if not bool((out[behind] == 0).all() and (lse[:, behind] == -math.inf).all()):
        wrong.append("rows of no sequence are not 0 with LSE -inf")
    return wrong


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (104, 40)], ids=str)
@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 256])
def test_random_batches(judge: Any, page_size: int, dims: tuple[int, int]) -> None:
    rng, failures = random.Random(page_size + sum(dims)), {}
    for number, mask in enumerate(MASKS):
        lengths = [rng.choice((0, 1, rng.randrange(200), rng.randrange(3000))) for _ in range(7)]
        queries = [rng.choice((0, 1, 7, rng.randrange(300))) for _ in range(7)]
        heads, kv_heads = rng.choice(((4, 4), (8, 2), (6, 1)))
        cache = make_cache(lengths, page_size, kv_heads, dims, heads_first=number % 2 == 1)
        starts = [sum(queries[:i]) for i in range(8)]
        q = normal(starts[-1] + 5, heads, dims[0])
        wrong = errors(judge, q, cache, mask, starts)
        failures |= {mask: wrong} if wrong else {}
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_page_a_sequence_from_any_row_on(judge: Any, head_dim: int) -> None:
    lengths, pads = [900, 0, 1, 333], [7, 1000, 999, 0]
    for mask in MASKS:
        cache = make_cache(lengths, 1000, 2, (head_dim, head_dim), torch.float16, pads)
        starts = [0, 70, 71, 80, 200]
        q = normal(200, 8, head_dim, dtype=torch.float16)
        assert errors(judge, q, cache, mask, starts, leftpad=ints(pads)) == []


@pytest.mark.parametrize(("page_size", "head_dim"), [(8, 128), (16, 256), (64, 256), (256, 256), (8192, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_of_the_dense_kernel(page_size: int, head_dim: int, causal: bool) -> None:
    """Where tiles are the same, and so is the order of sums; at head_dim 128 pages of 16 rows and more have tiles of
    their own."""
    cache = make_cache([8192] * 2, page_size, 2, (head_dim, head_dim))
    q = normal(2, 300, 8, head_dim)
    k, v = (torch.stack([rows[i] for rows in cache.rows]) for i in (0, 1))
    dense, dense_lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    given = {
        "page_table": cache.table,
        "lengths": cache.lengths,
        "mask": MaskSpec(causal),
        "return_lse": True,
    }
    out, lse = paged_forward(q, cache.k, cache.v, **given)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
    poisoned = torch.full_like(out, math.nan)
    result, _ = paged_forward(q, cache.k, cache.v, **given, out=poisoned)
    assert result is poisoned and torch.equal(poisoned, dense)


def test_scores_are_changed_as_in_the_dense_kernel() -> None:
    cache = make_cache([3000] * 2, 16, 2, (128, 128))
    q, slopes = normal(2, 300, 8, 128), torch.rand(2, 8, device="cuda")
    scores = Scores(30.0, slopes, torch.randn(8, device="cuda"))
    k, v = (torch.stack([rows[i] for rows in cache.rows]) for i in (0, 1))
    options = {"softcap": 30.0, "alibi_slopes": slopes, "sinks": scores.sinks}
    dense = flash_attn_func(q, k, v, causal=True, attention_chunk=700, **options)
    mask = MaskSpec(True, attention_chunk=700)
    out, _ = paged_forward(
        q, cache.k, cache.v, page_table=cache.table, lengths=cache.lengths, mask=mask, scores=scores
    )
    torch.testing.assert_close(out, dense, rtol=0.02, atol=0.02)


def test_a_graph_takes_the_lengths_and_pages_of_its_replay() -> None:
    cache = make_cache([500, 2000], 64, 2, (128, 128))
    q = normal(2, 130, 8, 128)
    given = {"page_table": cache.table, "lengths": cache.lengths, "mask": CAUSAL}
    paged_forward(q, cache.k, cache.v, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = paged_forward(q, cache.k, cache.v, **given)
    cache.lengths.copy_(ints([1999, 130]))
    cache.table.copy_(cache.table.flip(0))
    graph.replay()
    wanted, _ = paged_forward(q, cache.k, cache.v, **given)
    assert torch.equal(out, wanted) and bool(out.isfinite().all())


def test_nothing_waits_for_the_gpu() -> None:
    cache = make_cache([500, 2000], 64, 2, (64, 64))
    q = normal(2, 130, 8, 64)
    given = {"page_table": cache.table, "lengths": cache.lengths, "mask": CAUSAL}
    paged_forward(q, cache.k, cache.v, **given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_forward(q, cache.k, cache.v, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cache_of_many_gigabytes() -> None:
    """Offsets of elements, and of bytes, that 32 bits do not hold: the bits are those of the same pages alone."""
    pages, length = 200_000, 1600
    k, v = (torch.full((pages, 16, 8, 128), math.nan, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    table = torch.arange(pages - 1, pages - 101, -1, device="cuda", dtype=torch.int32)[None]
    new = [normal(length, 8, 128) for _ in "kv"]
    for cache, x in zip((k, v), new, strict=True):
        cache[table[0].long()] = x.view(100, 16, 8, 128)
    q = normal(1, 200, 32, 128)
    out, _ = paged_forward(q, k, v, page_table=table, lengths=ints([length]), mask=FULL)
    few = [x.view(100, 16, 8, 128) for x in new]
    alone, _ = paged_forward(q, *few, page_table=ints([list(range(100))]), lengths=ints([length]), mask=FULL)
    assert torch.equal(out, alone)
    # The dense kernel has tiles of other sizes, and so another order of sums: a bit of bfloat16 here and there.
    dense = flash_attn_func(q, *(x[None] for x in new))
    torch.testing.assert_close(out, dense, rtol=2**-7, atol=2**-10)


def test_numbers_out_of_range_read_nothing_outside() -> None:
    cache = make_cache([600, 700], 16, 2, (128, 128))
    q = normal(2, 100, 8, 128)
    k, v = (x.nan_to_num(0.5) for x in (cache.k, cache.v))
    table = torch.where(torch.rand(cache.table.shape, device="cuda") < 0.5, cache.table, -(2**31)).int()
    out, _ = paged_forward(q, k, v, page_table=table, lengths=ints([2**31 - 1, -5]), mask=FULL)
    assert bool(out[0].isfinite().all()) and bool((out[1] == 0).all())
