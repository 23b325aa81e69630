"""Dropout in the Hopper kernels from their PTX, against float64 with the mask of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.backward.config import select_backward_config
from hopper.forward.tilings import select_forward_config, with_dropout
from hopper_attention.dropout import kept_steps
from hopper_attention.reference import attention_naive
from tests.hopper.on_numpy import Rules, backward_on_numpy, forward_on_numpy, packed_forward_on_numpy
from tests.hopper.test_backward_windows import DTYPES, EPSILON
from tests.hopper.test_backward_windows import draw as draw_gradients
from tests.hopper.test_kernels_on_numpy import LATE, draw
from tests.hopper.test_score_rules import check
from tests.plans import Packed, plan_of

PHILOX = torch.tensor([0x123456789ABCDEF, 0x7EDCBA9876543210])


def rules_of(p: float, **others: object) -> Rules:
    return Rules(philox=PHILOX, kept=kept_steps(p), **others)


def exact(tensors: tuple[Tensor, Tensor, Tensor], p: float, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = attention_naive(*tensors, dropout_p=p, philox=PHILOX, **options)
    return out[0], lse[0]


@pytest.mark.parametrize(
    "head_dim,causal,seqlens,p",
    [(64, True, (200, 230), 0.1)],
)
def test_forward(head_dim: int, causal: bool, seqlens: tuple[int, int], p: float) -> None:
    # With fewer keys in a tile than are shipped, it compiles in half of the time.
    config = replace(select_forward_config("bfloat16", head_dim, head_dim, causal, 16384), tile_n=64)
    config = with_dropout(config)
    tensors = draw(torch.bfloat16, seqlens, (2, 1), head_dim)
    out, lse = forward_on_numpy(config, *tensors, head_dim**-0.5, 2, LATE, rules=rules_of(p))
    check(out[0], lse[0], exact(tensors, p, causal=causal))


def test_packed_sequences() -> None:
    lengths_q, lengths_k = Packed.of((70, 0, 33), behind=9), Packed.of((90, 33, 100), behind=3)
    config = replace(select_forward_config("bfloat16", 64, 64, False, 300, layout="varlen"), dropout=True)
    generator = torch.Generator().manual_seed(0)
    shapes = (lengths_q.total, 2, 64), (lengths_k.total, 1, 64), (lengths_k.total, 1, 64)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    plan = plan_of(lengths_q, lengths_k, config.tile_m)
    rules = rules_of(0.5)
    out, lse = packed_forward_on_numpy(
        config, (q, k, v), plan, lengths_q.batch + 1, 0.125, 2, LATE, rules=rules
    )
    for sequence in range(lengths_q.batch):
        (row, rows), (key, keys) = lengths_q.rows(sequence), lengths_k.rows(sequence)
        # A batch in which all sequences before have any lengths has the mask of this one in its place.
        batch = [
            x.expand(sequence + 1, *x.shape)
            for x in (q[row : row + rows], *(t[key : key + keys] for t in (k, v)))
        ]
        expected, expected_lse = attention_naive(*batch, dropout_p=0.5, philox=PHILOX)
        check(out[row : row + rows], lse[:, row : row + rows], (expected[sequence], expected_lse[sequence]))


def test_forward_with_all_rules() -> None:
    tensors = draw(torch.float16, (140, 100), (2, 2), 64)
    slopes, sinks = torch.tensor([[0.5, 0.03]]), torch.tensor([0.5, 2.0])
    config = replace(
        select_forward_config("float16", 64, 64, True, 100, True), softcap=True, alibi=True, sinks=True
    )
    rules = rules_of(0.25, softcap=1.5, slopes=slopes, sinks=sinks)
    out, lse = forward_on_numpy(with_dropout(config), *tensors, 0.125, 2, LATE, (50, 0), rules)
    options = {"softcap": 1.5, "alibi_slopes": slopes, "sinks": sinks, "window_left": 50}
    check(out[0], lse[0], exact(tensors, 0.25, causal=True, **options), 1e-5)


@pytest.mark.parametrize(
    "dtype,head_dim,causal,softcap,slopes,p",
    [
        ("bfloat16", 64, True, 0.0, None, 0.1),
        ("bfloat16", 192, False, 1.5, (0.05, 0.5), 0.75),
    ],
)
def test_gradients(
    dtype: str, head_dim: int, causal: bool, softcap: float, slopes: tuple[float, ...] | None, p: float
) -> None:
    alibi = None if slopes is None else torch.tensor([slopes])
    scores = {"softcap": bool(softcap), "alibi": alibi is not None}
    config = select_backward_config(dtype, head_dim, head_dim, causal, dropout=True, **scores)
    inputs = draw_gradients(DTYPES[dtype], (70, 150), (2, 1), head_dim, 1)
    leaves = [x.double().requires_grad_() for x in inputs[1:]]
    options = {"causal": causal, "softcap": softcap, "alibi_slopes": alibi}
    out, lse = attention_naive(*leaves, dropout_p=p, philox=PHILOX, **options)
    expected = torch.autograd.grad(out, leaves, inputs[0].double())
    rows = out.detach().to(DTYPES[dtype]), lse.detach().float()
    rules = rules_of(p, softcap=softcap, slopes=alibi)
    ours = backward_on_numpy(config, tuple(inputs), *rows, head_dim**-0.5, LATE, rules=rules)
    for name, a, e in zip(("dq", "dk", "dv"), ours, expected, strict=True):
        error = (a.double() - e).norm().item()
        assert error <= 1.5 * EPSILON[DTYPES[dtype]] * e.norm().item() + 1e-5, name
