"""Chunks in the Hopper kernels, forward and backward, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.window import NO_LIMIT, window_of
from hopper.config import validate_forward_config
from hopper.forward.tilings import select_forward_config
from tests.cute_kernels.exact import attend
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import backward_on_numpy, forward_on_numpy, packed_forward_on_numpy
from tests.hopper.packed_backward import packed_backward_on_numpy
from tests.hopper.test_backward_windows import select as select_backward
from tests.hopper.test_score_rules import select as select_forward
from tests.plans import Packed, plan_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LATE = Timing(is_late=True, seed=1)

FORWARD = [
    ("bfloat16", 64, True, (140, 300), (NO_LIMIT, NO_LIMIT, 100)),
    ("bfloat16", 64, True, (140, 200), (NO_LIMIT, NO_LIMIT, 7)),
    ("bfloat16", 64, True, (200, 140), (40, NO_LIMIT, 64)),
    ("bfloat16", 64, True, (5, 300), (NO_LIMIT, NO_LIMIT, 1)),
    ("float16", 128, False, (70, 400), (NO_LIMIT, NO_LIMIT, 100)),
    ("float16", 128, False, (200, 90), (NO_LIMIT, NO_LIMIT, 1000)),
    ("float16", 128, False, (130, 200), (30, 50, 128)),
]
BACKWARD = [
    ("bfloat16", 64, True, (140, 300), (NO_LIMIT, NO_LIMIT, 100), True),
    ("bfloat16", 64, True, (300, 140), (20, NO_LIMIT, 64), True),
    ("float16", 128, False, (70, 300), (NO_LIMIT, NO_LIMIT, 100), False),
    ("float16", 128, False, (150, 70), (NO_LIMIT, NO_LIMIT, 1000), False),
    ("float16", 128, False, (130, 140), (30, 50, 32), False),
    ("bfloat16", 256, False, (70, 200), (NO_LIMIT, NO_LIMIT, 60), True),
]


def draw(seed: int, dtype: str, *sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).to(DTYPES[dtype]) for size in sizes]


def check_rows(out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor) -> None:
    """Of one sequence: out (seqlen_q, heads, head_dim), lse (heads, seqlen_q)."""
    visible = exact_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(0, 1)[~visible] == 0).all())
    assert (out.double() - exact).norm() <= EPSILON[out.dtype] * exact.norm()
    assert bool(((lse.double() - exact_lse)[visible].abs() < 3e-6).all())


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,sides", FORWARD, ids=str)
def test_forward(dtype, head_dim, causal, seqlens, sides) -> None:
    config = select_forward(dtype, head_dim, causal, 300, window=True)
    (sq, sk), scale = seqlens, head_dim**-0.5
    q, k, v = draw(sk, dtype, (1, sq, 2, head_dim), (1, sk, 1, head_dim), (1, sk, 1, head_dim))
    out, lse = forward_on_numpy(replace(config, chunk=True), q, k, v, scale, 2, LATE, sides)
    check_rows(out[0], lse[0], *attend(q[0], k[0], v[0], window_of(causal, sides), scale))


def test_keys_of_other_chunks_are_not_read() -> None:
    """NaN in key blocks in which no row of a tile sees a key."""
    config = replace(select_forward("bfloat16", 64, True, 300, window=True), chunk=True)
    q, k, v = draw(0, "bfloat16", (1, 128, 1, 64), (1, 640, 1, 64), (1, 640, 1, 64))
    # The queries are level with the keys from 512 on, whose chunk begins at 450.
    first = 450 // config.tile_n * config.tile_n
    assert first > 0
    exact = attend(q[0], k[0], v[0], window_of(True, (NO_LIMIT, 0, 225)), 0.125)
    k[:, :first], v[:, :first] = math.nan, math.nan
    out, lse = forward_on_numpy(config, q, k, v, 0.125, 1, LATE, (NO_LIMIT, 0, 225))
    check_rows(out[0], lse[0], *exact)


Q = Packed.of((70, 0, 140, 5), behind=9)
K = Packed.of((90, 33, 30, 200), behind=3)


def test_packed_sequences() -> None:
    config = select_forward("bfloat16", 64, True, 300, window=True, layout="varlen")
    config, sides = replace(config, chunk=True), (NO_LIMIT, 0, 64)
    q, k, v = draw(2, "bfloat16", (Q.total, 2, 64), (K.total, 1, 64), (K.total, 1, 64))
    plan = plan_of(Q, K, config.tile_m)
    out, lse = packed_forward_on_numpy(config, (q, k, v), plan, Q.batch + 1, 0.125, 2, LATE, sides)
    dout, exact_rows, exact = draw(3, "bfloat16", q.shape)[0], [], []
    for sequence in range(Q.batch):
        (row, rows), (key, keys) = Q.rows(sequence), K.rows(sequence)
        parts = (q[row : row + rows], k[key : key + keys], v[key : key + keys])
        leaves = [x.double().requires_grad_() for x in parts]
        result = attend(*leaves, window_of(True, sides), 0.125)
        gradients = torch.autograd.grad(result[0], leaves, dout[row : row + rows].double())
        exact_rows.append([x.detach() for x in result])
        exact.append(gradients)
        check_rows(out[row : row + rows], lse[:, row : row + rows], *exact_rows[-1])

    config = replace(select_backward("bfloat16", 64, True, False, True, "varlen"), chunk=True)
    ours = packed_backward_on_numpy(config, (dout, q, k, v), (out, lse), (Q, K), LATE, sides=sides)
    for i, packed in enumerate((Q, K, K)):
        wanted = torch.cat([gradients[i] for gradients in exact])
        found = torch.cat([ours[i][slice(*span_of(packed, n))] for n in range(Q.batch)]).double()
        assert (found - wanted).norm() <= 2 * EPSILON[torch.bfloat16] * wanted.norm(), "qkv"[i]


def span_of(packed: Packed, sequence: int) -> tuple[int, int]:
    row, rows = packed.rows(sequence)
    return row, row + rows


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,sides,ordered", BACKWARD, ids=str)
def test_backward(dtype, head_dim, causal, seqlens, sides, ordered) -> None:
    config = replace(select_backward(dtype, head_dim, causal, ordered, window=True), chunk=True)
    (sq, sk), scale = seqlens, head_dim**-0.5
    q, dout, k, v = draw(sq, dtype, *[(sq, 1, head_dim)] * 2, *[(sk, 1, head_dim)] * 2)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, window_of(causal, sides), scale)
    exact = torch.autograd.grad(out, leaves, dout.double())
    rows = out.detach()[None].to(DTYPES[dtype]), lse.detach()[None].float()
    ours = backward_on_numpy(config, tuple(x[None] for x in (dout, q, k, v)), *rows, scale, LATE, sides=sides)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert (a[0].double() - e).norm() <= 2 * EPSILON[DTYPES[dtype]] * e.norm() + 1e-4, name


def test_a_chunk_is_part_of_a_window() -> None:
    config = select_forward_config("bfloat16", 64, 64, True, 300)
    with pytest.raises(ValueError, match="window is False, allowed with chunk=True: True"):
        validate_forward_config(replace(config, chunk=True))
