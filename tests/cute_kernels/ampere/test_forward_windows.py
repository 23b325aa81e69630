"""Windows and packed sequences in the forward kernel without WGMMA, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig, select_ampere_forward_config
from cute_kernels.window import NO_LIMIT, Window, window_of
from tests.cute_kernels.exact import attend
from tests.cute_kernels.packing import Packing
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import NO_RULES, Rules, ampere_forward_on_numpy, packed_ampere_forward_on_numpy

EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

LATE = Timing(is_late=True, seed=1)
"""Copies arrive as late as the waits allow: a missing one shows."""


def config_of(
    dtype: torch.dtype, head_dims: tuple[int, int], causal: bool, window: bool, layout: str = "dense"
) -> AmpereForwardConfig:
    return select_ampere_forward_config(NAMES[dtype], *head_dims, causal, "sm_80", window, layout)


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
    (torch.bfloat16, (64, 64), False, (300, 300), (2, 1), (40, 20)),
    (torch.bfloat16, (64, 64), True, (300, 260), (2, 1), (33, 150)),
    (torch.bfloat16, (64, 64), True, (150, 600), (1, 1), (0, 0)),
    (torch.bfloat16, (64, 64), False, (70, 500), (1, 1), (200, 100)),
    (torch.bfloat16, (64, 64), False, (500, 70), (1, 1), (5, 0)),
    (torch.bfloat16, (64, 64), False, (200, 330), (1, 1), (NO_LIMIT, 3)),
    (torch.bfloat16, (64, 64), False, (200, 330), (1, 1), (3, NO_LIMIT)),
    (torch.bfloat16, (64, 64), True, (200, 330), (1, 1), (NO_LIMIT, 0)),
    (torch.float16, (128, 128), True, (200, 230), (1, 1), (65, 0)),
    (torch.float16, (256, 256), False, (100, 90), (1, 1), (31, 5)),
    (torch.bfloat16, (80, 72), False, (140, 150), (1, 1), (20, 20)),
]


@pytest.mark.parametrize("dtype,head_dims,causal,seqlens,heads,sides", WINDOWS, ids=str)
def test_windows(dtype, head_dims, causal, seqlens, heads, sides) -> None:
    config = config_of(dtype, head_dims, causal, window=True)
    (d, dv), (sq, sk) = head_dims, seqlens
    inputs = draw(0, dtype, (2, sq, heads[0], d), (2, sk, heads[1], d), (2, sk, heads[1], dv))
    out, lse = ampere_forward_on_numpy(config, *inputs, d**-0.5, LATE, sides)
    for i in range(2):
        check(out[i], lse[i], tuple(x[i] for x in inputs), window_of(causal, sides))


def test_blocks_outside_of_the_window_are_not_read() -> None:
    """NaN in keys of blocks in which no row of the CTA's tile sees a key."""
    config = replace(config_of(torch.bfloat16, (64, 64), False, window=True), tile_n=32)
    q, k, v = draw(0, torch.bfloat16, (1, 128, 1, 64), (1, 640, 1, 64), (1, 640, 1, 64))
    first, end = 640 - 128 - 40, 640 - 128 + 127 + 1
    clean = k.clone(), v.clone()
    for x in (k, v):
        x[:, : first // 32 * 32] = math.nan
        x[:, -(-end // 32) * 32 :] = math.nan
    out, lse = ampere_forward_on_numpy(config, q, k, v, 0.125, LATE, (40, 0))
    check(out[0], lse[0], (q[0], clean[0][0], clean[1][0]), Window(40, 0))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("q_in_registers", [False, True])
def test_schedules_with_a_window(stages: int, q_in_registers: bool) -> None:
    config = config_of(torch.bfloat16, (64, 64), False, window=True)
    config = replace(config, stages=stages, q_in_registers=q_in_registers, tile_n=32)
    q, k, v = draw(0, torch.bfloat16, (1, 150, 1, 64), (1, 330, 1, 64), (1, 330, 1, 64))
    out, lse = ampere_forward_on_numpy(config, q, k, v, 0.125, LATE, (70, 10))
    check(out[0], lse[0], (q[0], k[0], v[0]), Window(70, 10))


LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (140, 31), (3, 3), (40, 200), (0, 0)]
PACKED = [
    (torch.bfloat16, (64, 64), True, (2, 1), ()),
    (torch.bfloat16, (64, 64), False, (1, 1), ()),
    (torch.bfloat16, (64, 64), False, (2, 2), (50, 17)),
    (torch.bfloat16, (64, 64), True, (1, 1), (20, 9)),
    (torch.float16, (128, 128), True, (2, 1), ()),
    (torch.float16, (256, 256), False, (1, 1), ()),
    (torch.bfloat16, (80, 72), True, (2, 1), (30, 0)),
]


def packed_inputs(packing: Packing, dtype, heads, head_dims) -> list[Tensor]:
    """NaN in the rows that no sequence has."""
    (d, dv), (h, hk) = head_dims, heads
    sizes = (packing.total_q, h, d), (packing.total_k, hk, d), (packing.total_k, hk, dv)
    inputs = draw(1, dtype, *sizes)
    for x, rows in zip(inputs, (packing.rows_q, packing.rows_k, packing.rows_k), strict=True):
        used = torch.zeros(x.shape[0], dtype=torch.bool)
        for i in range(packing.sequences - 1):
            used[rows(i).start : rows(i).stop] = True
        x[~used] = math.nan
    return inputs


def run_packed(
    config: AmpereForwardConfig,
    packing: Packing,
    inputs: list[Tensor],
    sides=(),
    wants_lse: bool = True,
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    return packed_ampere_forward_on_numpy(
        config,
        tuple(inputs),
        packing.plan(config.tile_m),
        packing.sequences,
        inputs[0].shape[2] ** -0.5,
        LATE,
        sides,
        wants_lse,
        rules,
    )


def check_sequences(packing: Packing, inputs, out: Tensor, lse: Tensor, window: Window) -> None:
    """Every row of a sequence, and those behind the last one, which see no key; nothing else is written."""
    q, k, v = inputs
    written = torch.zeros(packing.total_q, dtype=torch.bool)
    for i in range(packing.sequences):
        rows, keys = packing.rows_q(i), packing.rows_k(i)
        written[rows.start : rows.stop] = True
        part = slice(rows.start, rows.stop)
        if i == packing.sequences - 1:
            assert bool((out[part] == 0).all()) and bool((lse[:, part] == -math.inf).all())
            continue
        of_sequence = (q[part], *(x[keys.start : keys.stop] for x in (k, v)))
        check(out[part], lse[:, part], of_sequence, window)
    assert bool(out[~written].isnan().all()) and bool(lse[:, ~written].isnan().all())


@pytest.mark.parametrize("dtype,head_dims,causal,heads,sides", PACKED, ids=str)
def test_packed_sequences(dtype, head_dims, causal, heads, sides) -> None:
    packing = Packing.of(LENGTHS, tail=(70, 9))
    config = config_of(dtype, head_dims, causal, bool(sides), "varlen")
    inputs = packed_inputs(packing, dtype, heads, head_dims)
    out, lse = run_packed(config, packing, inputs, sides)
    check_sequences(packing, inputs, out, lse, window_of(causal, sides))


@pytest.mark.parametrize("sides", [(), (40, 0)], ids=str)
def test_parts_of_sequences(sides: tuple[int, ...]) -> None:
    """Rows beyond those in use are neither read nor written."""
    packing = Packing.of(
        [(100, 150), (200, 90), (130, 129)], seqused_q=(31, 200, 129), seqused_k=(100, 0, 128)
    )
    config = config_of(torch.bfloat16, (64, 64), True, bool(sides), "varlen")
    inputs = packed_inputs(packing, torch.bfloat16, (2, 1), (64, 64))
    out, lse = run_packed(config, packing, inputs, sides)
    check_sequences(packing, inputs, out, lse, window_of(True, sides))


def test_sequences_do_not_leak_into_each_other() -> None:
    packing = Packing.of([(70, 70), (50, 50), (90, 90)])
    config = config_of(torch.bfloat16, (64, 64), False, False, "varlen")
    inputs = packed_inputs(packing, torch.bfloat16, (1, 1), (64, 64))
    for x in inputs:
        x[70:120] = math.nan
    out, lse = run_packed(config, packing, inputs)
    assert bool(out[70:120].isnan().all())
    for rows in (slice(0, 70), slice(120, 210)):
        check(out[rows], lse[:, rows], tuple(x[rows] for x in inputs), Window())


def test_heads_of_one_tensor_without_lse() -> None:
    packing = Packing.of([(90, 90), (33, 33)])
    config = config_of(torch.bfloat16, (64, 64), True, False, "varlen")
    (qkv,) = draw(2, torch.bfloat16, (123, 3, 2, 64))
    inputs = list(qkv.unbind(1))
    out, lse = run_packed(config, packing, inputs)
    check_sequences(packing, inputs, out, lse, Window(right=0))
    again, none = run_packed(config, packing, inputs, wants_lse=False)
    assert torch.equal(out, again) and none.numel() == 0
