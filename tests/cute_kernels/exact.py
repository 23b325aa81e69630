"""The oracle of the kernels' tests: attention as it is defined, in float64, by brute force over every pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.window import Window
from tests.hopper.on_numpy import NO_RULES, Rules


def sees(seqlen_q: int, seqlen_k: int, window: Window) -> Tensor:
    """(seqlen_q, seqlen_k): which query sees which key."""
    level = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window.has_left:
        visible &= key >= level - window.left
    if window.has_right:
        visible &= key <= level + window.right
    if window.has_chunk:
        visible &= level // window.chunk == key // window.chunk
    return visible


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    scale: float,
    rules: Rules = NO_RULES,
    sequence: int = 0,
) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q) of one sequence, (seqlen, heads, head_dim) each,
    number ``sequence`` in the slopes of ``rules``.

    A query that sees no key gives 0, and its sink or -inf. Differentiable by torch.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    visible = sees(q.shape[0], k.shape[0], window)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.slopes is not None:
        level = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        slopes = rules.slopes[sequence].double()[:, None, None]
        scores = scores - slopes * (level - torch.arange(k.shape[0])).abs()
    scores = scores.masked_fill(~visible, -math.inf)
    empty = ~visible.any(-1)
    scores = scores.masked_fill(empty[:, None], 0.0)
    lse = torch.logsumexp(scores, -1)
    # What stands in for the scores of an empty row is not part of its LSE.
    without_keys = torch.full_like(lse, -math.inf)
    if rules.sinks is not None:
        sinks = rules.sinks.double()[:, None].expand_as(lse)
        lse, without_keys = torch.logaddexp(lse, sinks), sinks
    p = torch.exp(scores - lse[..., None]).masked_fill(empty[:, None], 0.0) if k.shape[0] else scores
    lse = torch.where(empty, without_keys, lse)
    return torch.einsum("hqk,khd->qhd", p, v), lse
