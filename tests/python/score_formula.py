"""Attention with softcap, ALiBi and sinks as one formula in float64, and problems for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CAP = 1.5

COMBINATIONS: Mapping[str, tuple[float, int, bool]] = {
    "softcap": (CAP, 0, False),
    "slopes of heads": (0.0, 1, False),
    "slopes of a batch": (0.0, 2, False),
    "sinks": (0.0, 0, True),
    "all": (CAP, 2, True),
}
"""softcap, dimensions of the slopes and whether there are sinks."""


def draw_scores(name: str, batch: int, heads: int, seed: int = 3) -> dict[str, Any]:
    """The options of one of ``COMBINATIONS``, with float32 tensors."""
    softcap, dimensions, has_sinks = COMBINATIONS[name]
    generator = torch.Generator().manual_seed(seed)
    slopes, of_heads = (torch.rand(n, heads, generator=generator) for n in (batch, 1))
    sinks = torch.randn(heads, generator=generator)
    return {
        "softcap": softcap,
        "alibi_slopes": (None, of_heads[0], slopes)[dimensions],
        "sinks": sinks if has_sinks else None,
    }


def seen_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """Boolean (seqlen_q, seqlen_k)."""
    own, key = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    left, right = window[0], 0 if causal else window[1]
    return ((key >= own - left) | (left < 0)) & ((key <= own + right) | (right < 0))


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q) in float64.

    The sink is one more column of scores; a row with nothing to sum has out 0 and lse -inf.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    keys, values = (x.double().repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        own, key = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
        s = s - alibi_slopes.double().reshape(-1, heads, 1, 1) * (own - key).abs()
    s = s.masked_fill(~seen_pairs(seqlen_q, seqlen_k, causal, window), -math.inf)
    if sinks is not None:
        column = sinks.double().reshape(1, heads, 1, 1).expand(batch, heads, seqlen_q, 1)
        s = torch.cat([s, column], -1)
    nothing = (s == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(nothing, 0.0), -1, keepdim=True).masked_fill(nothing, -math.inf)
    p = torch.exp(s - lse.masked_fill(nothing, 0.0))[..., :seqlen_k]
    return torch.einsum("bhij,bjhd->bihd", p, values), lse.squeeze(-1)
