"""Packed sequences in the forward kernel without WGMMA, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.window import Window, window_of
from tests.cute_kernels.ampere.test_forward_windows import LATE, check, config_of, draw
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import NO_RULES, Rules
from tests.hopper.packed_ampere import packed_ampere_forward_on_numpy

LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (70, 31), (3, 3), (0, 0)]
PACKED = [
    (torch.bfloat16, (64, 64), True, (2, 1), ()),
    (torch.bfloat16, (64, 64), False, (1, 1), ()),
    (torch.bfloat16, (64, 64), False, (2, 2), (50, 17)),
    (torch.bfloat16, (64, 64), True, (1, 1), (20, 9)),
    (torch.float16, (128, 128), True, (1, 1), ()),
    (torch.bfloat16, (80, 72), True, (1, 1), (30, 0)),
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
        [(100, 150), (140, 90), (130, 129)], seqused_q=(31, 140, 129), seqused_k=(100, 0, 128)
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
