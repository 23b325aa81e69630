"""Differences of means as ``hopper.mean.edges`` has them, by plain indexing."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention.launch.value_mean import BEHIND

EDGES = 4
NANS = -1
"""Two numbers of bfloat16."""


def steps_of(differences: Tensor) -> Tensor:
    """int32 (batch, steps, heads, 8 columns) of float32 (batch, runs, heads, columns)."""
    batch, runs, heads, columns = differences.shape
    if not differences.numel():
        return torch.empty(batch, 0, heads, 0, dtype=torch.int32)
    steps = -(-runs // EDGES)
    of_steps = pad(differences, (0, 0, 0, 0, 0, steps * EDGES - runs)).view(
        batch, steps, EDGES, heads, columns
    )
    larger = of_steps.bfloat16()
    smaller = (of_steps - larger.float()).bfloat16()
    # (batch, steps, heads, columns, larger and smaller, edges, twice each)
    parts = torch.stack([larger, smaller]).permute(1, 2, 4, 5, 0, 3)
    twice = parts.unsqueeze(-1).repeat(1, 1, 1, 1, 1, 1, 2)
    return _swapped(twice).flatten(3).view(torch.int32)


def memory_of_runs(config: Fp8ForwardConfig, means: Tensor, changes: Tensor) -> list[tuple[Tensor, int]]:
    """What a kernel with ``run_blocks`` takes of means of V, and in how many sizes: differences, changes, and notes of
    a CTA, which nobody may read before they are written. Behind differences a kernel of wider heads may read, and gets
    NaN."""
    steps = steps_of(torch.cat([0 * means[:, :1], means[:, :-1] - means[:, 1:]], 1))
    differences = pad(steps.flatten(), (0, BEHIND), value=NANS)[:-BEHIND].view(steps.shape)
    notes = torch.full((1, means.shape[1], config.note_floats), math.nan)
    return [(differences, 4), (changes, 2), (notes, 3)]


def differences_of(steps: Tensor, runs: int) -> Tensor:
    """What ``steps_of`` was given, as near as two numbers of bfloat16 come to it."""
    batch, count, heads, words = steps.shape
    shape = batch, count, heads, words // (2 * EDGES), 2, EDGES, 2
    parts = _swapped(steps.contiguous().view(torch.bfloat16).view(shape)).float()
    assert torch.equal(parts[..., 0], parts[..., 1])
    return parts[..., 0].sum(4).permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :runs]


def _swapped(parts: Tensor) -> Tensor:
    """With larger and smaller numbers the other way round in the last four of each eight columns."""
    is_swapped = torch.arange(parts.shape[3])[:, None, None, None] // 4 % 2 == 1
    return torch.where(is_swapped, parts.flip(4), parts)
