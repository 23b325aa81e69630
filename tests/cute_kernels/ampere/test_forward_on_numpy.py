"""The forward kernel of GPUs without WGMMA, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels.ampere.config import AmpereForwardConfig, select_ampere_forward_config
from hopper_attention.reference import attention_naive
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import ampere_forward_on_numpy

EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

LATE = Timing(is_late=True, seed=1)
"""Copies arrive as late as the waits allow: a missing one shows."""


def draw(dtype, seqlens, heads, head_dims, batch=1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (seqlens[0], heads[0], head_dims[0]),
        (seqlens[1], heads[1], head_dims[0]),
        (seqlens[1], heads[1], head_dims[1]),
    )
    return [torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes]


def check(config: AmpereForwardConfig, inputs: list[torch.Tensor]) -> None:
    out, lse = ampere_forward_on_numpy(config, *inputs, inputs[0].shape[3] ** -0.5, LATE)
    exact, exact_lse = attention_naive(*inputs, causal=config.causal)
    assert ((out.double() - exact).norm() / exact.norm()).item() < EPSILON[out.dtype]
    visible = exact_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(1, 2)[~visible] == 0).all())
    assert (lse.double() - exact_lse)[visible].abs().max() < 3e-6


CASES = [
    (torch.bfloat16, (64, 64), True, (90, 300), (2, 1)),
    (torch.float16, (128, 128), True, (200, 130), (1, 1)),
    (torch.bfloat16, (8, 24), False, (30, 70), (1, 1)),
    (torch.float16, (256, 256), True, (70, 100), (1, 1)),
    (torch.bfloat16, (192, 128), False, (40, 65), (1, 1)),
]


@pytest.mark.parametrize("dtype,head_dims,causal,seqlens,heads", CASES, ids=str)
def test_forward(dtype, head_dims, causal, seqlens, heads) -> None:
    """With 32 keys in a tile, as is shipped for the largest head_dims: it compiles in half of the time or less."""
    config = select_ampere_forward_config(NAMES[dtype], *head_dims, causal, "sm_90a")
    config = replace(config, tile_n=32)
    check(config, draw(dtype, seqlens, heads, head_dims))


def test_tiles_for_small_shared_memory() -> None:
    config = select_ampere_forward_config("bfloat16", 80, 72, True, "sm_86")
    assert config.tile_n == 32
    check(config, draw(torch.bfloat16, (90, 100), (1, 1), (80, 72)))


@pytest.mark.parametrize("stages,fused", [(2, True), (2, False), (3, True), (4, False)])
def test_schedules(stages: int, fused: bool) -> None:
    config = select_ampere_forward_config("bfloat16", 64, 64, False, "sm_80")
    config = replace(config, stages=stages, fused_exponentials=fused, q_in_registers=fused)
    config = replace(config, tile_m=64, tile_n=32)
    check(config, draw(torch.bfloat16, (20, 330), (1, 1), (64, 64)))
