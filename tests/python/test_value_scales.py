"""Scales of blocks of V: powers of 16, so that neighbours share one."""

from __future__ import annotations

import pytest
import torch

from hopper_attention.quantization import quantize_qkv
from hopper_attention.quantization_rules import scale_of_values


def test_scales_of_v_are_few_and_stay() -> None:
    """Powers of 16, rounded up: 1/16 and 1 are, and what is between them becomes 1."""
    scales = torch.tensor([0.0625, 0.0625001, 0.3, 0.5, 1.0, 1.0000001, 2.0**-80, 3e30, 7.5e35])
    found = scale_of_values(scales)
    exponents = [-4, 0, 0, 0, 0, 4, -80, 104, 120]
    assert found.tolist() == [2.0**e for e in exponents] and torch.equal(scale_of_values(found), found)


@pytest.mark.parametrize("spread", [0.55, 0.83, 0.85, 1.0, 4.0])
def test_blocks_of_v_share_a_scale(spread: float) -> None:
    """Where their spread is alike: the attention kernel has less to do."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4096, 1, 128, generator=generator) for _ in range(3))
    scales = quantize_qkv(q, k, spread * v).v.scale
    assert scales.shape[-1] == 32 and scales.unique().tolist() == [2.0**-4]
