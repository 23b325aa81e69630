"""Softcap, ALiBi and sinks in the backward kernel without WGMMA, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.window import Window, window_of
from tests.cute_kernels.ampere.test_backward_packed import PackedCase
from tests.cute_kernels.ampere.test_backward_windows import check, select
from tests.cute_kernels.ampere.test_forward_windows import LATE, draw
from tests.cute_kernels.ampere.test_score_rules import ALL, LENGTHS, rules_of, with_rules
from tests.cute_kernels.exact import attend
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import Rules, backward_on_numpy

BACKWARD = [
    (torch.bfloat16, 64, False, (100, 150), (1, 1), (), ("softcap",), False),
    (torch.float16, 64, False, (100, 140), (1, 1), (), ("softcap",), False),
    (torch.float16, 64, True, (140, 70), (4, 2), (), ("alibi", "sinks"), False),
    (torch.float16, 64, True, (90, 140), (2, 2), (), ALL, False),
    (torch.bfloat16, 64, False, (140, 100), (2, 1), (40, 20), ALL, False),
    (torch.bfloat16, 96, True, (70, 140), (2, 1), (33, 0), ALL, True),
]


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,heads,sides,names,ordered", BACKWARD, ids=str)
def test_backward(dtype, head_dim, causal, seqlens, heads, sides, names, ordered) -> None:
    rules = rules_of(names, heads[0], 1)
    config = with_rules(select(dtype, head_dim, causal, ordered, bool(sides)), rules)
    (sq, sk), (h, hk) = seqlens, heads
    q, dout, k, v = draw(0, dtype, *[(sq, h, head_dim)] * 2, *[(sk, hk, head_dim)] * 2)
    leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    out, lse = attend(*leaves, window_of(causal, sides), head_dim**-0.5, rules)
    exact = torch.autograd.grad(out, leaves, dout.double())
    batched = tuple(x[None] for x in (dout, q, k, v))
    rows = out.detach()[None].to(dtype), lse.detach()[None].float()
    ours = backward_on_numpy(config, batched, *rows, head_dim**-0.5, LATE, sides=sides, rules=rules)
    check(tuple(x[0] for x in ours), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_flat_softcap_has_no_gradient(dtype: torch.dtype) -> None:
    """Scores far beyond the cap: the tanh is 1 or -1, and its slope 0, to the bit in float32."""
    q, dout, k, v = draw(0, dtype, *[(1, 70, 1, 64)] * 4)
    q, k, rules = q.abs() * 8, k.abs() * 8, Rules(0.25)
    out, lse = attend(q[0], k[0], v[0], Window(), 0.125, rules)
    config = with_rules(select(dtype, 64, False, False, False), rules)
    rows = out[None].to(dtype), lse[None].float()
    dq, dk, dv = backward_on_numpy(config, (dout, q, k, v), *rows, 0.125, LATE, rules=rules)
    assert not dq.any() and not dk.any() and dv.norm() > 1


@pytest.mark.parametrize(
    "dtype,causal,sides,ordered", [(torch.bfloat16, True, (), False), (torch.float16, False, (50, 17), True)]
)
def test_packed_backward(dtype, causal, sides, ordered) -> None:
    rules = rules_of(ALL, 2, len(LENGTHS))
    config = with_rules(select(dtype, 64, causal, ordered, bool(sides), "varlen"), rules)
    case = PackedCase(config, Packing.of(LENGTHS, tail=(70, 9)), (2, 1), sides, rules)
    case.run()
    case.check()
