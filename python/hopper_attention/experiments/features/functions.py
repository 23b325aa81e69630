"""The score functions of the features' benchmark, for ours, for FlexAttention and for float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.features.spec import BIAS, Workload

FARTHEST = 128
"""Keys that are farther away than this share a bias."""

BIAS_SEED = 11


@lru_cache(maxsize=4)
def bias_table(heads: int, device: str) -> Tensor:
    """float32 (heads, distances): the bias of a key so far behind a query, N(0, 1), the same numbers at every call."""
    generator = torch.Generator(device).manual_seed(BIAS_SEED)
    return torch.randn(heads, 2 * FARTHEST + 1, generator=generator, device=device)


def score_mod_of(workload: Workload, device: str) -> Any:
    """The function of a workload, or None."""
    if workload.functions != BIAS:
        return None
    table = bias_table(workload.heads, device)

    def relative_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.clamp(kv_idx - q_idx, -FARTHEST, FARTHEST)
        return score + table[h, distance + FARTHEST]

    return relative_bias


def bias_of(workload: Workload, head: int, distance: Tensor) -> Tensor | float:
    """What is added to the scaled scores of a head, of keys at this distance from queries; float64."""
    if workload.functions != BIAS:
        return 0.0
    table = bias_table(workload.heads, str(distance.device))
    return table[head].double()[distance.clamp(-FARTHEST, FARTHEST) + FARTHEST]
