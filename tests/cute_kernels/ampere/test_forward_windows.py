"""Windows in the forward kernel without WGMMA, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig, select_ampere_forward_config
from cute_kernels.window import NO_LIMIT, Window, window_of
from tests.cute_kernels.exact import attend
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import ampere_forward_on_numpy

EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

LATE = Timing(is_late=True, seed=1)
"""Copies arrive as late as the waits allow: a missing one shows."""


def config_of(
    dtype: torch.dtype, head_dims: tuple[int, int], causal: bool, window: bool, layout: str = "dense"
) -> AmpereForwardConfig:
    """Small tiles of what is shipped, of one band of rows: they compile in a fifth of the time, and a sequence has more
    of them."""
    config = select_ampere_forward_config(NAMES[dtype], *head_dims, causal, "sm_80", window, layout)
    return replace(config, tile_m=64, tile_n=32)


def draw(seed: int, dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]


def check(out: Tensor, lse: Tensor, inputs: tuple[Tensor, Tensor, Tensor], window: Window) -> None:
    """Of one sequence: out (seqlen_q, heads, head_dim_v), lse (heads, seqlen_q)."""
    exact, exact_lse = attend(*inputs, window, inputs[0].shape[2] ** -0.5)
    visible = exact_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(0, 1)[~visible] == 0).all())
    error = (out.double() - exact).norm()
    assert error.item() <= EPSILON[out.dtype] * exact.norm().item()
    assert bool(((lse.double() - exact_lse)[visible].abs() < 3e-6).all())


WINDOWS = [
    (torch.bfloat16, (64, 64), False, (200, 200), (2, 1), (40, 20)),
    (torch.bfloat16, (64, 64), True, (200, 170), (1, 1), (33, 150)),
    (torch.bfloat16, (64, 64), True, (70, 300), (1, 1), (0, 0)),
    (torch.bfloat16, (64, 64), False, (70, 500), (1, 1), (200, 100)),
    (torch.bfloat16, (64, 64), False, (300, 70), (1, 1), (5, 0)),
    (torch.bfloat16, (64, 64), False, (100, 230), (1, 1), (NO_LIMIT, 3)),
    (torch.bfloat16, (64, 64), False, (100, 230), (1, 1), (3, NO_LIMIT)),
    (torch.bfloat16, (64, 64), True, (100, 230), (1, 1), (NO_LIMIT, 0)),
]


@pytest.mark.parametrize("dtype,head_dims,causal,seqlens,heads,sides", WINDOWS, ids=str)
def test_windows(dtype, head_dims, causal, seqlens, heads, sides) -> None:
    config = config_of(dtype, head_dims, causal, window=True)
    if head_dims == (64, 64) and not causal:
        config = replace(config, tile_m=128)  # two bands of rows
    (d, dv), (sq, sk) = head_dims, seqlens
    batch = heads[0]
    inputs = draw(0, dtype, (batch, sq, heads[0], d), (batch, sk, heads[1], d), (batch, sk, heads[1], dv))
    out, lse = ampere_forward_on_numpy(config, *inputs, d**-0.5, LATE, sides)
    for i in range(batch):
        check(out[i], lse[i], tuple(x[i] for x in inputs), window_of(causal, sides))


def test_blocks_outside_of_the_window_are_not_read() -> None:
    """NaN in keys of blocks in which no row of the CTA's tile sees a key."""
    config = replace(config_of(torch.bfloat16, (64, 64), False, window=True), tile_m=128)
    q, k, v = draw(0, torch.bfloat16, (1, 128, 1, 64), (1, 640, 1, 64), (1, 640, 1, 64))
    first, end = 640 - 128 - 40, 640 - 128 + 127 + 1
    clean = k.clone(), v.clone()
    for x in (k, v):
        x[:, : first // 32 * 32] = math.nan
        x[:, -(-end // 32) * 32 :] = math.nan
    out, lse = ampere_forward_on_numpy(config, q, k, v, 0.125, LATE, (40, 0))
    check(out[0], lse[0], (q[0], clean[0][0], clean[1][0]), Window(40, 0))


@pytest.mark.parametrize("stages,q_in_registers", [(2, False), (3, True)])
def test_schedules_with_a_window(stages: int, q_in_registers: bool) -> None:
    config = config_of(torch.bfloat16, (64, 64), False, window=True)
    config = replace(config, stages=stages, q_in_registers=q_in_registers)
    q, k, v = draw(0, torch.bfloat16, (1, 150, 1, 64), (1, 330, 1, 64), (1, 330, 1, 64))
    out, lse = ampere_forward_on_numpy(config, q, k, v, 0.125, LATE, (70, 10))
    check(out[0], lse[0], (q[0], k[0], v[0]), Window(70, 10))
