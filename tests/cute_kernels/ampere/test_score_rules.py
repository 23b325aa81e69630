"""Softcap, ALiBi and sinks in the forward kernel without WGMMA, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.window import Window, window_of
from tests.cute_kernels.ampere.test_forward_packed import packed_inputs, run_packed
from tests.cute_kernels.ampere.test_forward_windows import EPSILON, LATE, config_of, draw
from tests.cute_kernels.exact import attend
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import Rules, ampere_forward_on_numpy

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
    (torch.bfloat16, 64, True, (70, 150), (2, 1), (), ("softcap",)),
    (torch.bfloat16, 64, True, (70, 150), (4, 2), (), ("alibi",)),
    (torch.float16, 64, True, (70, 40), (4, 2), (), ("sinks",)),
    (torch.float16, 128, True, (90, 140), (2, 2), (), ALL),
    (torch.bfloat16, 64, False, (100, 200), (2, 1), (40, 20), ALL),
]


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,heads,sides,names", FORWARD, ids=str)
def test_forward(dtype, head_dim, causal, seqlens, heads, sides, names) -> None:
    batch = 1 + ("alibi" in names)  # which has slopes of its own in each
    rules = rules_of(names, heads[0], batch)
    config = with_rules(config_of(dtype, (head_dim, head_dim), causal, bool(sides)), rules)
    (sq, sk), (h, hk) = seqlens, heads
    inputs = draw(0, dtype, (batch, sq, h, head_dim), *[(batch, sk, hk, head_dim)] * 2)
    out, lse = ampere_forward_on_numpy(config, *inputs, head_dim**-0.5, LATE, sides, rules)
    window = window_of(causal, sides)
    for i in range(batch):
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


LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (70, 31)]


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
