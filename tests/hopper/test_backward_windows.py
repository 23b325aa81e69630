"""The backward kernels up to head_dim 128 with sliding windows, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.window import NO_LIMIT
from hopper.backward.config import BackwardConfig, select_backward_config
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import backward_on_numpy

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LATE = Timing(is_late=True, seed=1)


def select(dtype: str, head_dim: int, *options: Any, **features: Any) -> BackwardConfig:
    """What is shipped, but for head_dim 64 with fewer queries in a tile: it compiles in half of the time."""
    config = select_backward_config(dtype, head_dim, head_dim, *options, **features)
    return replace(config, tile_m=64)


def draw(dtype, seqlens, heads, head_dim, batch) -> list[torch.Tensor]:
    """dout, q, k, v."""
    generator = torch.Generator().manual_seed(0)
    (seqlen_q, seqlen_k), (heads_q, heads_kv) = seqlens, heads
    rows = (seqlen_q, heads_q), (seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    return [torch.randn(batch, *row, head_dim, generator=generator).to(dtype) for row in rows]


def visible(seqlen_q: int, seqlen_k: int, left: int, right: int) -> torch.Tensor:
    """(seqlen_q, seqlen_k): whether a query sees a key."""
    level = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k)[None, :]
    return (keys >= level - left) & (keys <= level + right)


def attend(q, k, v, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64; rows without keys are 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def check(dtype, head_dim, causal, seqlens, heads, sides, ordered, batch=1) -> list[torch.Tensor]:
    """Holds dq, dk and dv to float64, and returns them."""
    config = select(dtype, head_dim, causal, ordered, window=True)
    is_paired = head_dim > 128
    if is_paired:
        # By the kernel that runs in test_chunks too, with one chunk for all keys, and the queries level with them.
        config = replace(config, chunk=True)
    inputs = draw(DTYPES[dtype], seqlens, heads, head_dim, batch)
    leaves = [x.double().requires_grad_() for x in inputs[1:]]
    mask = visible(*seqlens, sides[0], 0 if causal else sides[1])
    out, lse = attend(*leaves, mask)
    exact = torch.autograd.grad(out, leaves, inputs[0].double())
    rows = out.detach().to(DTYPES[dtype]), lse.detach().float()
    given = (*sides, NO_LIMIT) if is_paired else sides
    ours = backward_on_numpy(config, tuple(inputs), *rows, head_dim**-0.5, LATE, sides=given)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        error = (a.double() - e).norm().item()
        # Of one key dP and delta, two sums in float32, cancel each other but for their rounding.
        cancelled = 2e-7 * a.numel() ** 0.5
        assert error <= EPSILON[DTYPES[dtype]] * e.norm().item() + cancelled, name
    return list(ours)


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,heads,sides,ordered",
    [
        ("bfloat16", 128, False, (100, 200), (2, 1), (40, 20), True),
        ("bfloat16", 64, False, (200, 150), (2, 2), (100, NO_LIMIT), False),
        ("float16", 64, True, (200, 200), (2, 1), (90, 7), True),
        ("bfloat16", 104, False, (100, 200), (1, 1), (NO_LIMIT, 25), True),
        ("bfloat16", 128, False, (70, 130), (1, 1), (NO_LIMIT, NO_LIMIT), True),
    ],
)
def test_gradients_in_a_window(dtype, head_dim, causal, seqlens, heads, sides, ordered) -> None:
    check(dtype, head_dim, causal, seqlens, heads, sides, ordered, batch=1 + (seqlens == (200, 200)))


@pytest.mark.parametrize("head_dim,ordered", [(64, False), (128, True)])
def test_keys_that_no_query_sees_have_zero_gradients(head_dim, ordered) -> None:
    check_keys_that_no_query_sees(head_dim, ordered)


def check_keys_that_no_query_sees(head_dim, ordered) -> None:
    _, dk, dv = check("bfloat16", head_dim, False, (60, 500), (2, 1), (30, 5), ordered)
    # The first query is level with key 440; two whole key tiles and more come before its window.
    assert not dk[:, :410].any() and not dv[:, :410].any()
    assert dk[:, 410].any() and dv[:, 410].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_that_see_no_key_have_zero_gradients(head_dim) -> None:
    check_queries_that_see_no_key(head_dim)


def check_queries_that_see_no_key(head_dim, right: int = 10) -> None:
    dq, _, _ = check("bfloat16", head_dim, False, (330, 100), (1, 1), (20, right), head_dim > 64)
    # This query sees key 0, as far ahead as it may be, and that alone; so its scores have no gradient but for rounding.
    first = 330 - 100 - right
    assert not dq[:, :first].any() and dq[:, first + 1].abs().max() > 1e-3


@pytest.mark.parametrize("sides,seqlen", [((0, 0), 150), ((63, 0), 200), ((64, 64), 200), ((190, 150), 330)])
def test_windows_as_wide_as_tiles_and_wider(sides, seqlen) -> None:
    check("bfloat16", 128, False, (seqlen, seqlen), (1, 1), sides, True)
