"""Softcap, ALiBi and sinks in the kernels without WGMMA, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.window import Window, window_of
from tests.cute_kernels.ampere.test_backward_windows import PackedCase, select
from tests.cute_kernels.ampere.test_backward_windows import check as check_gradients
from tests.cute_kernels.ampere.test_forward_windows import (
    EPSILON,
    LATE,
    config_of,
    draw,
    packed_inputs,
    run_packed,
)
from tests.cute_kernels.exact import attend
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import Rules, ampere_forward_on_numpy, backward_on_numpy

Config = AmpereForwardConfig | AmpereBackwardConfig
ALL = ("softcap", "alibi", "sinks")


def rules_of(names: tuple[str, ...], heads: int, batch: int, cap: float = 1.5) -> Rules:
    """Of up to four heads; other slopes in each batch, and none but zero in the last head. The last sink outweighs all
    keys."""
    slopes = torch.tensor([0.5, 0.03, 0.25, 0.0])[-heads:] * (1 + torch.arange(batch))[:, None]
    sinks = torch.tensor([-30.0, 0.0, 2.0, 9.0])[-heads:]
    return Rules(
        cap if "softcap" in names else 0.0,
        slopes.contiguous() if "alibi" in names else None,
        sinks.contiguous() if "sinks" in names else None,
    )


def with_rules(config: Config, rules: Rules) -> Config:
    changed = replace(config, softcap=bool(rules.softcap), alibi=rules.slopes is not None)
    if isinstance(changed, AmpereForwardConfig):
        return replace(changed, sinks=rules.sinks is not None)
    return changed


def check(out: Tensor, lse: Tensor, exact: tuple[Tensor, Tensor]) -> None:
    exact_out, exact_lse = exact
    visible = exact_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(0, 1)[~visible] == 0).all())
    assert (out.double() - exact_out).norm().item() <= EPSILON[out.dtype] * exact_out.norm().item()
    assert bool(((lse.double() - exact_lse)[visible].abs() < 1e-5).all())


FORWARD = [
    (torch.bfloat16, 64, True, (150, 200), (2, 1), (), ("softcap",)),
    (torch.float16, 64, False, (150, 200), (2, 1), (), ("softcap",)),
    (torch.bfloat16, 64, True, (150, 200), (4, 2), (), ("alibi",)),
    (torch.float16, 64, False, (70, 200), (2, 1), (), ("alibi",)),
    (torch.bfloat16, 64, True, (200, 150), (4, 2), (), ("sinks",)),
    (torch.float16, 128, True, (90, 140), (2, 2), (), ALL),
    (torch.bfloat16, 64, False, (200, 330), (2, 1), (40, 20), ALL),
    (torch.float16, 64, True, (330, 200), (2, 1), (33, 0), ALL),
    (torch.bfloat16, 256, False, (70, 90), (2, 1), (), ALL),
]


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,heads,sides,names", FORWARD, ids=str)
def test_forward(dtype, head_dim, causal, seqlens, heads, sides, names) -> None:
    rules = rules_of(names, heads[0], 2)
    config = with_rules(config_of(dtype, (head_dim, head_dim), causal, bool(sides)), rules)
    (sq, sk), (h, hk) = seqlens, heads
    inputs = draw(0, dtype, (2, sq, h, head_dim), *[(2, sk, hk, head_dim)] * 2)
    out, lse = ampere_forward_on_numpy(config, *inputs, head_dim**-0.5, LATE, sides, rules)
    window = window_of(causal, sides)
    for i in range(2):
        check(out[i], lse[i], attend(*(x[i] for x in inputs), window, head_dim**-0.5, rules, i))


def test_a_sink_is_all_that_a_row_without_keys_has() -> None:
    """None at all, if it is -inf."""
    q, k, v = draw(0, torch.float16, (1, 100, 3, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    rules = Rules(sinks=torch.tensor([3.0, -1e4, -math.inf]))
    config = with_rules(config_of(torch.float16, (64, 64), True, False), rules)
    out, lse = ampere_forward_on_numpy(config, q, k, v, 0.125, LATE, rules=rules)
    assert bool((out[0, :60] == 0).all())
    torch.testing.assert_close(lse[0, :, :60], rules.sinks[:, None].expand(3, 60), rtol=1e-6, atol=0)
    check(out[0], lse[0], attend(q[0], k[0], v[0], Window(right=0), 0.125, rules))


LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (140, 31), (40, 200)]


@pytest.mark.parametrize("dtype,causal,sides", [(torch.bfloat16, True, ()), (torch.float16, False, (50, 17))])
def test_packed_forward(dtype, causal, sides) -> None:
    packing = Packing.of(LENGTHS, tail=(70, 9))
    rules = rules_of(ALL, 2, len(LENGTHS))
    config = with_rules(config_of(dtype, (64, 64), causal, bool(sides), "varlen"), rules)
    inputs = packed_inputs(packing, dtype, (2, 1), (64, 64))
    out, lse = run_packed(config, packing, inputs, sides, rules=rules)
    for i in range(len(LENGTHS)):
        rows, keys = (slice(x.start, x.stop) for x in (packing.rows_q(i), packing.rows_k(i)))
        parts = (inputs[0][rows], inputs[1][keys], inputs[2][keys])
        check(out[rows], lse[:, rows], attend(*parts, window_of(causal, sides), 0.125, rules, i))


BACKWARD = [
    (torch.bfloat16, 64, True, (150, 200), (2, 1), (), ("softcap",), False),
    (torch.float16, 64, False, (150, 140), (2, 1), (), ("softcap",), True),
    (torch.bfloat16, 64, False, (150, 140), (4, 2), (), ("alibi",), False),
    (torch.float16, 64, True, (200, 150), (2, 1), (), ("alibi", "sinks"), False),
    (torch.float16, 128, True, (90, 140), (2, 2), (), ALL, False),
    (torch.bfloat16, 64, False, (200, 150), (2, 1), (40, 20), ALL, False),
    (torch.bfloat16, 96, True, (70, 140), (2, 1), (33, 0), ALL, True),
    (torch.bfloat16, 256, False, (70, 90), (1, 1), (), ALL, False),
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
    check_gradients(tuple(x[0] for x in ours), exact)


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
