"""Dense inputs, which of their pairs a query sees, and what attention to these is, by definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hopper_attention.reference.tiles import Mask, Span


def qkv(
    seqlen_q: int = 21, seqlen_k: int = 33, head_dim_v: int = 24, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """N(0, 1): 4 heads of 32 columns, 2 of K and V."""
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = (2, seqlen_q, 4, 32), (2, seqlen_k, 2, 32), (2, seqlen_k, 2, head_dim_v)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def sees(
    seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int] = (-1, -1), chunk: int = 0
) -> Tensor:
    """Boolean (seqlen_q, seqlen_k), every pair, with a division that rounds down; a chunk of 0 is none."""
    own = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if chunk:
        seen &= own // chunk == j // chunk
    if left >= 0:
        seen &= j >= own - left
    if right >= 0:
        seen &= j <= own + right
    return seen


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out and LSE of the pairs that are seen; out is 0 and LSE the sink, or -inf, where there is none."""
    group, scale = q.shape[2] // k.shape[2], scale or q.shape[3] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (p @ v).transpose(1, 2), lse


def assert_defined(results: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], seen: Tensor) -> None:
    """That float64 results are ``by_definition``, and those of rows that see nothing 0 and -inf."""
    for found, right in zip(results, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    unseen = ~seen.any(1)
    assert (results[0][:, unseen] == 0).all() and (results[1][:, :, unseen] == -math.inf).all()


def assert_tiles_hold(mask: Mask, wanted: Tensor, tile_m: int, tile_n: int) -> None:
    """That the tiles of a mask, by queries and by keys, have every pair of ``wanted``, and each one at least."""
    seqlen_q, seqlen_k = wanted.shape
    by_queries, by_keys = torch.zeros_like(wanted), torch.zeros_like(wanted)

    def take(found: Tensor, rows: Span, cols: Span) -> None:
        assert wanted[rows.slice, cols.slice].any()
        visible = mask.visible(rows, cols, 1, wanted.device)
        found[rows.slice, cols.slice] = True if visible is None else visible

    for at in range(0, seqlen_q, tile_m):
        rows = Span(at, min(at + tile_m, seqlen_q))
        for cols in mask.key_tiles(rows, tile_n):
            take(by_queries, rows, cols)
    for at in range(0, seqlen_k, tile_n):
        cols = Span(at, min(at + tile_n, seqlen_k))
        for rows in mask.query_tiles(cols, tile_m):
            take(by_keys, rows, cols)
    assert torch.equal(by_queries, wanted) and torch.equal(by_keys, wanted)


def assert_nan_reaches(
    poisoned: tuple[Tensor, Tensor], clean: tuple[Tensor, Tensor], first: int, stop: int
) -> None:
    """That only rows ``first`` to ``stop`` are NaN, and all others as without it."""
    reached = torch.zeros(poisoned[0].shape[1], dtype=torch.bool)
    reached[first:stop] = True
    assert torch.isnan(poisoned[0][:, reached]).all()
    torch.testing.assert_close(poisoned[0][:, ~reached], clean[0][:, ~reached])
    torch.testing.assert_close(poisoned[1][:, :, ~reached], clean[1][:, :, ~reached])
