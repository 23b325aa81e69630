"""Chunks in the kernels without WGMMA, forward and backward, run from their PTX without a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.window import NO_LIMIT, window_of
from tests.cute_kernels.ampere.test_backward_windows import check_gradients, select
from tests.cute_kernels.ampere.test_forward_packed import check_sequences, packed_inputs, run_packed
from tests.cute_kernels.ampere.test_forward_windows import LATE, check, config_of, draw
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import ampere_forward_on_numpy

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (70, 31), (3, 3)]


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,sides",
    [
        (BFLOAT16, 64, True, (100, 230), (NO_LIMIT, NO_LIMIT, 100)),
        (BFLOAT16, 64, True, (200, 70), (NO_LIMIT, NO_LIMIT, 64)),
        (BFLOAT16, 64, True, (140, 140), (20, NO_LIMIT, 7)),
        (FLOAT16, 64, False, (70, 300), (NO_LIMIT, NO_LIMIT, 100)),
        (FLOAT16, 64, False, (150, 90), (30, 50, 1000)),
    ],
    ids=str,
)
def test_forward(dtype, head_dim, causal, seqlens, sides) -> None:
    config = replace(config_of(dtype, (head_dim, head_dim), causal, window=True), chunk=True)
    (sq, sk), scale = seqlens, head_dim**-0.5
    q, k, v = draw(0, dtype, (1, sq, 2, head_dim), (1, sk, 1, head_dim), (1, sk, 1, head_dim))
    out, lse = ampere_forward_on_numpy(config, q, k, v, scale, LATE, sides)
    check(out[0], lse[0], (q[0], k[0], v[0]), window_of(causal, sides))


def test_packed_sequences() -> None:
    config = replace(config_of(BFLOAT16, (64, 64), True, window=True, layout="varlen"), chunk=True)
    packing, sides = Packing.of(LENGTHS, tail=(70, 9)), (NO_LIMIT, 0, 64)
    inputs = packed_inputs(packing, BFLOAT16, (1, 1), (64, 64))
    out, lse = run_packed(config, packing, inputs, sides)
    check_sequences(packing, inputs, out, lse, window_of(True, sides))


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,sides,ordered",
    [
        (BFLOAT16, 64, True, (100, 230), (NO_LIMIT, NO_LIMIT, 100), True),
        (BFLOAT16, 64, True, (200, 70), (20, NO_LIMIT, 64), True),
        (FLOAT16, 64, False, (70, 200), (NO_LIMIT, NO_LIMIT, 70), False),
        (FLOAT16, 64, False, (150, 90), (30, 50, 32), False),
    ],
    ids=str,
)
def test_backward(dtype, head_dim, causal, seqlens, sides, ordered) -> None:
    config = replace(select(dtype, head_dim, causal, ordered, window=True), chunk=True)
    sq, sk = seqlens
    q, dout, k, v = draw(0, dtype, *[(sq, 1, head_dim)] * 2, *[(sk, 1, head_dim)] * 2)
    check_gradients(config, (q, k, v), dout, sides)
