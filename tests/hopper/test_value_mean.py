"""The kernel of the mean of V: run from PTX on NumPy it finds what its twin in PyTorch does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper.mean.config import (
    CLUSTER,
    ValueMeanConfig,
    count_mean_ctas,
    shipped_value_mean_configs,
)
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.quantization_rules import mean_worth_subtracting
from tests.hopper.on_numpy import Arguments, program_of

COMPILED = shipped_value_mean_configs()


def mean_on_numpy(v: Tensor) -> Tensor:
    batch, keys, heads, columns = v.shape
    mean = torch.full((batch, heads, columns), math.nan)
    arguments = Arguments()
    arguments.tensor(v, (batch, keys, heads, columns), v.stride()[:-1])
    arguments.tensor(mean, (batch, heads, columns), mean.stride()[:-1])
    grid = count_mean_ctas(batch, heads, columns), 1, 1
    arguments.launch(program_of(ValueMeanConfig(DTYPE_NAMES[v.dtype])), grid, cluster=CLUSTER)
    return mean


def draw(batch: int, keys: int, heads: int, columns: int) -> Tensor:
    """N(m, 1), where m is chance, small or large by the column, between other elements."""
    generator = torch.Generator().manual_seed(keys)
    v = torch.randn(batch, keys, 2 * heads, columns, generator=generator)
    offsets = torch.tensor([0.0, 0.5, -3.0, 0.0, 1.0, 40.0, -0.25, 0.0])
    return (v + offsets.repeat(columns // 8))[:, :, ::2]


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "columns", "dtype"),
    [
        (1, 1500, 1, 64, torch.bfloat16),
        (1, 70, 2, 80, torch.float16),
        (2, 1, 1, 16, torch.bfloat16),
        (1, 2, 1, 16, torch.bfloat16),
    ],
)
def test_kernel_finds_what_its_twin_does(
    batch: int, keys: int, heads: int, columns: int, dtype: torch.dtype
) -> None:
    v = draw(batch, keys, heads, columns).to(dtype)
    found, twin = mean_on_numpy(v), mean_worth_subtracting(v)
    assert torch.equal(found, twin)
    assert found.any()
