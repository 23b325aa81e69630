"""Dropout in the kernels without WGMMA, run from their PTX without a GPU, against float64 with the mask of the
reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import select_ampere_backward_config
from hopper_attention.dropout import kept_steps
from hopper_attention.reference import attention_naive
from tests.cute_kernels.ampere.test_backward_on_numpy import SMALL
from tests.cute_kernels.ampere.test_backward_windows import check as check_gradients
from tests.cute_kernels.ampere.test_forward_packed import packed_inputs, run_packed
from tests.cute_kernels.ampere.test_forward_windows import LATE, NAMES, config_of, draw
from tests.cute_kernels.ampere.test_score_rules import check, rules_of, with_rules
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import Rules, ampere_forward_on_numpy, backward_on_numpy

PHILOX = torch.tensor([0x123456789ABCDEF, 0x7EDCBA9876543210])


def drops(p: float, rules: Rules | None = None) -> Rules:
    return replace(rules or Rules(), philox=PHILOX, kept=kept_steps(p))


def options_of(rules: Rules, p: float, sides: tuple[int, ...]) -> dict:
    """What the oracle takes."""
    windows = dict(zip(("window_left", "window_right"), sides, strict=False))
    scores = {"softcap": rules.softcap, "alibi_slopes": rules.slopes, "sinks": rules.sinks}
    return windows | scores | {"dropout_p": p, "philox": PHILOX}


FORWARD = [
    (torch.bfloat16, 64, False, (70, 150), (2, 1), (), (), 0.1),
    (torch.float16, 64, True, (90, 70), (2, 1), (33, 0), ("softcap", "alibi", "sinks"), 0.5),
]


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,heads,sides,names,p", FORWARD, ids=str)
def test_forward(dtype, head_dim, causal, seqlens, heads, sides, names, p) -> None:
    rules = drops(p, rules_of(names, heads[0], 2))
    config = replace(
        with_rules(config_of(dtype, (head_dim, head_dim), causal, bool(sides)), rules), dropout=True
    )
    (sq, sk), (h, hk) = seqlens, heads
    inputs = draw(0, dtype, (2, sq, h, head_dim), *[(2, sk, hk, head_dim)] * 2)
    out, lse = ampere_forward_on_numpy(config, *inputs, head_dim**-0.5, LATE, sides, rules)
    exact = attention_naive(*inputs, causal=causal, **options_of(rules, p, sides))
    for number in range(2):
        check(out[number], lse[number], (exact[0][number], exact[1][number]))


def test_packed_forward() -> None:
    packing = Packing.of([(70, 90), (0, 33), (33, 100)], tail=(9, 3))
    config = replace(config_of(torch.float16, (64, 64), True, False, "varlen"), dropout=True)
    inputs = packed_inputs(packing, torch.float16, (2, 1), (64, 64))
    out, lse = run_packed(config, packing, inputs, (), rules=drops(0.5))
    for number in (0, 2):
        rows, keys = (slice(x.start, x.stop) for x in (packing.rows_q(number), packing.rows_k(number)))
        batch = [
            x[part].expand(number + 1, -1, -1, -1) for x, part in zip(inputs, (rows, keys, keys), strict=True)
        ]
        exact = attention_naive(*batch, causal=True, dropout_p=0.5, philox=PHILOX)
        check(out[rows], lse[:, rows], (exact[0][number], exact[1][number]))


BACKWARD = [
    (torch.bfloat16, "sm_80", 64, True, (100, 150), (2, 1), (), 0.1),
    # Warps with 16 queries of a tile.
    (torch.bfloat16, "sm_86", 256, False, (70, 50), (1, 1), ("softcap",), 0.7),
]


@pytest.mark.parametrize("dtype,arch,head_dim,causal,seqlens,heads,names,p", BACKWARD, ids=str)
def test_backward(dtype, arch, head_dim, causal, seqlens, heads, names, p) -> None:
    rules = drops(p, rules_of(names, heads[0], 1))
    config = select_ampere_backward_config(NAMES[dtype], head_dim, head_dim, causal, arch)
    config = replace(with_rules(config, rules), dropout=True, **vars(SMALL) if head_dim == 64 else {})
    (sq, sk), (h, hk) = seqlens, heads
    q, dout, k, v = draw(0, dtype, *[(1, sq, h, head_dim)] * 2, *[(1, sk, hk, head_dim)] * 2)
    leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    out, lse = attention_naive(*leaves, causal=causal, **options_of(rules, p, ()))
    exact = torch.autograd.grad(out, leaves, dout.double())
    rows: tuple[Tensor, Tensor] = out.detach().to(dtype), lse.detach().float()
    ours = backward_on_numpy(config, (dout, q, k, v), *rows, head_dim**-0.5, LATE, rules=rules)
    check_gradients(ours, exact)
