"""The oracle of the kernels' tests: attention as it is defined, in float64, by brute force over every pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.window import Window


def sees(seqlen_q: int, seqlen_k: int, window: Window) -> Tensor:
    """(seqlen_q, seqlen_k): which query sees which key."""
    level = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window.has_left:
        visible &= key >= level - window.left
    if window.has_right:
        visible &= key <= level + window.right
    return visible


def attend(q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, heads, head_dim_v) and lse (heads, seqlen_q) of one sequence, (seqlen, heads, head_dim) each.

    A query that sees no key gives 0 and -inf. Differentiable by torch.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    visible = sees(q.shape[0], k.shape[0], window)
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~visible, -math.inf)
    empty = ~visible.any(-1)
    scores = scores.masked_fill(empty[:, None], 0.0)
    p = torch.softmax(scores, -1).masked_fill(empty[:, None], 0.0) if k.shape[0] else scores
    lse = torch.logsumexp(scores, -1).masked_fill(empty, -math.inf)
    return torch.einsum("hqk,khd->qhd", p, v), lse
