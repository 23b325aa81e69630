"""Decoding over a latent on a GPU: against float64, NaN wherever no key is, ragged lengths, splits, graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import explain_kvcache, flash_attn_with_kvcache
from tests.python.varlen_cases import offsets

pytestmark = pytest.mark.gpu

LATENT, ROPE = 512, 64
RAGGED = (1, 63, 64, 65, 0, 2049, 300)
SCALE = 192**-0.5
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
"""Of the norm of the error of a sequence's output, over that of the output."""


@dataclass(frozen=True)
class Step:
    """A decoding step: queries and a cache of rows of 576 columns in pages, whose other rows are NaN."""

    call: dict[str, Any]
    lengths: tuple[int, ...]
    queries: int
    rows: Tensor

    @staticmethod
    def draw(
        lengths: tuple[int, ...],
        heads: int,
        queries: int = 1,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        is_one_tensor: bool = True,
    ) -> Step:
        generator = torch.Generator("cuda").manual_seed(heads + queries)
        options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "generator": generator}
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 2, device="cuda", generator=generator).int()
        cache = torch.full((len(order), page_size, 1, LATENT + ROPE), math.nan, device="cuda", dtype=dtype)
        table = torch.full((len(lengths), max(counts)), 2**31 - 1, device="cuda", dtype=torch.int32)
        rows = torch.randn(len(lengths), max(lengths), LATENT + ROPE, **options)
        for b, (length, pages) in enumerate(zip(lengths, order[:-2].split(counts), strict=True)):
            table[b, : len(pages)] = pages
            number = torch.arange(length, device="cuda")
            cache[pages.long()[number // page_size], number % page_size, 0] = rows[b, :length]
        q = torch.randn(len(lengths), queries, heads, LATENT + ROPE, **options)
        k_cache, v_cache = cache[..., LATENT:], cache[..., :LATENT]
        if not is_one_tensor:
            k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        call = {"q": q[..., LATENT:], "qv": q[..., :LATENT], "k_cache": k_cache, "v_cache": v_cache}
        used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        call |= {"page_table": table, "cache_seqlens": used, "softmax_scale": SCALE, "causal": True}
        return Step(call, lengths, queries, rows)

    def exact(self, b: int) -> tuple[Tensor, Tensor]:
        """Float64 out (queries, heads, 512) and lse (heads, queries) of a sequence."""
        length, keys = self.lengths[b], self.rows[b, : self.lengths[b]].double()
        q = torch.cat((self.call["qv"][b], self.call["q"][b]), -1).double()
        last = length - self.queries + torch.arange(self.queries, device="cuda")
        hidden = torch.arange(length, device="cuda") > last[:, None]
        scores = torch.einsum("ihd,jd->hij", q, keys) * SCALE
        scores = scores.masked_fill(hidden, -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
        return torch.einsum("hij,jd->ihd", weights, keys[:, :LATENT]), lse

    def check(self, out: Tensor, lse: Tensor) -> None:
        for b in range(len(self.lengths)):
            exact, exact_lse = self.exact(b)
            assert bool(out[b].isfinite().all()), b
            assert (out[b].double() - exact).norm() <= LIMITS[out.dtype] * exact.norm(), b
            assert torch.equal(lse[b] == -math.inf, exact_lse == -math.inf), b
            assert (lse[b].double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= 1e-3, b


def run(step: Step, **given: Any) -> tuple[Tensor, Tensor]:
    call = step.call | given
    assert explain_kvcache(**call).path == "mla"
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "queries"),
    [(16, 1), (16, 4), (40, 1), (64, 1), (128, 1), (128, 2), (128, 3), (128, 8), (96, 4), (40, 13)],
)
def test_heads_and_tokens_of_a_step(heads: int, queries: int, dtype: torch.dtype) -> None:
    step = Step.draw(RAGGED, heads, queries, dtype=dtype)
    step.check(*run(step))


@pytest.mark.parametrize("page_size", [8, 16, 48, 256])
@pytest.mark.parametrize("heads", [16, 128])
def test_pages_of_other_sizes(heads: int, page_size: int) -> None:
    step = Step.draw(RAGGED, heads, 2, page_size, is_one_tensor=False)
    step.check(*run(step))


@pytest.mark.parametrize("heads", [16, 128])
def test_splits(heads: int) -> None:
    """One sequence over the whole GPU, or over as few parts as are asked for; the same bits every time."""
    step = Step.draw((20_001,), heads, 2)
    for splits in (0, 1, 3):
        out, lse = run(step, num_splits=splits)
        step.check(out, lse)
        again = run(step, num_splits=splits)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("batch", [1, 131, 300])
def test_more_and_fewer_sequences_than_multiprocessors(batch: int) -> None:
    step = Step.draw(tuple((37 * i) % 400 for i in range(1, batch + 1)), 16)
    step.check(*run(step))


@pytest.mark.parametrize("queries", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 5, 33, 70])
def test_tiles_that_visit_the_same_keys_at_the_same_time(batch: int, queries: int) -> None:
    """Whole tiles, tiles in parts, and more of them than clusters; lengths alike and not; the same bits every time."""
    for lengths in ((1024,) * batch, tuple(1 + (997 * i) % 3000 for i in range(1, batch + 1))):
        step = Step.draw(lengths, 128, queries)
        out, lse = run(step)
        step.check(out, lse)
        again = run(step)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_packed_queries() -> None:
    step = Step.draw(RAGGED, 16, 3)
    counts = (3, 1, 0, 2, 3, 1, 2)
    kept = [slice(3 - count, 3) for count in counts]
    call = {
        name: torch.cat([step.call[name][b, rows] for b, rows in enumerate(kept)]) for name in ("q", "qv")
    }
    call |= {"cu_seqlens_q": offsets(counts).cuda(), "max_seqlen_q": 3}
    out, lse = run(step, **call)
    whole, whole_lse = run(step)
    first = 0
    for b, (count, rows) in enumerate(zip(counts, kept, strict=True)):
        own = slice(first, first + count)
        error = (out[own].double() - whole[b, rows].double()).norm()
        assert error <= LIMITS[out.dtype] * whole[b, rows].double().norm()
        assert torch.allclose(lse[:, own], whole_lse[b][:, rows], atol=1e-3)
        first += count


def test_a_graph_takes_the_lengths_that_it_finds() -> None:
    step = Step.draw((300, 64, 129, 2000), 16)
    run(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(**step.call, return_softmax_lse=True)
    for lengths in ((300, 64, 129, 2000), (1, 0, 128, 1999)):
        step.call["cache_seqlens"].copy_(torch.tensor(lengths))
        out.fill_(math.nan)
        graph.replay()
        Step(step.call, lengths, 1, step.rows).check(out, lse)


def test_nothing_waits_for_the_gpu() -> None:
    step = Step.draw(RAGGED, 128, 2)
    run(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_with_kvcache(**step.call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
