"""Score and mask functions that use everything that kernels can do, for tests of all backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hopper_attention import mods

LENGTH = 160
"""Of no sequence more."""


@dataclass(frozen=True)
class Example:
    """What a user writes."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def draw_example(heads: int = 4, batch: int = 2) -> Example:
    """A score function with every kind of value and of tensor, and documents with holes as a mask."""
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(heads, 2 * LENGTH, generator=generator).bfloat16().t()
    weights = torch.rand(batch, generator=generator).double().float()
    words = torch.randint(0, 3, (batch, LENGTH), generator=generator)
    is_there = torch.rand(LENGTH, generator=generator) > 0.1
    temperature = torch.tensor(0.7)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        capped = 5.0 * mods.tanh(score / 5.0) * temperature + bias[q_idx - kv_idx + LENGTH, h]
        bent = mods.where(q_idx > kv_idx, mods.exp(-score * score), mods.sqrt(abs(score) + 0.1))
        steps = (kv_idx - q_idx) // 5 * 0.1 - (q_idx - kv_idx) % 7 * weights[b]
        return capped + bent + mods.minimum(steps, 1.0) + (words[b, kv_idx] == 2)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (words[b, q_idx] == words[b, kv_idx]) & is_there[kv_idx] | (kv_idx < 2)

    return Example(score_mod, mask_mod)


def relative_bias(heads: int = 4, of_sequences: int = 8) -> Example:
    """A bias that indices outside of the tensor take from its ends, and a number for each sequence."""
    generator = torch.Generator().manual_seed(6)
    bias, numbers = (torch.randn(shape, generator=generator) for shape in ((heads, 65), (of_sequences,)))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = mods.minimum(mods.maximum(kv_idx - q_idx + 32, 0), 64)
        return score + bias[h, distance] * numbers[b]

    return Example(score_mod)
