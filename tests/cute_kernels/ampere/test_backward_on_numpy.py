"""The backward kernel of GPUs without WGMMA, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels.ampere.backward.config import (
    AmpereBackwardConfig,
    Tiling,
    select_ampere_backward_config,
    validate_ampere_backward_config,
)
from hopper_attention.reference import attention_naive
from tests.cute_kernels.ampere.test_forward_on_numpy import EPSILON, LATE, NAMES, draw
from tests.hopper import on_numpy
from tests.hopper.hopper_machine import AT_ONCE, Timing, parse
from tests.hopper.on_numpy import backward_on_numpy
from tests.ptx import ptx_of

SMALL = Tiling(32, 64, 4, 4, 4, 2, 2, 2)
"""Tiles for head_dims up to 64 that compile in half of the time of what is shipped."""


def select(
    dtype, head_dims, causal: bool, arch: str = "sm_80", ordered: bool = False
) -> AmpereBackwardConfig:
    return select_ampere_backward_config(NAMES[dtype], *head_dims, causal, arch, ordered)


def check(config: AmpereBackwardConfig, inputs: list[torch.Tensor], with_lse: bool = False) -> None:
    """Gradients of out, and of the LSE too, which in rows without keys may hold anything."""
    dtype = inputs[0].dtype
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*leaves, causal=config.causal)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    dlse = torch.randn(lse.shape, generator=generator) if with_lse else torch.zeros(lse.shape)
    hidden = lse == -math.inf
    exact = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double().masked_fill(hidden, 0)))
    dlse[hidden] = math.nan
    rows = out.detach().to(dtype), lse.detach().float()
    scale = inputs[0].shape[3] ** -0.5
    ours = backward_on_numpy(config, (dout, *inputs), *rows, scale, LATE, dlse if with_lse else None)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        error = (a.double() - e).norm().item()
        assert error <= EPSILON[dtype] * e.norm().item() + 1e-5, name
        assert a.shape == e.shape and a.dtype == dtype
    if hidden.any():
        assert not ours[0].transpose(1, 2)[hidden].any()


CASES = [
    (torch.bfloat16, (64, 64), True, (90, 300), (2, 1), "sm_80"),
    (torch.bfloat16, (128, 128), True, (130, 150), (2, 2), "sm_90a"),
    (torch.bfloat16, (24, 8), False, (30, 70), (1, 1), "sm_90a"),
    (torch.float16, (192, 192), True, (70, 100), (1, 1), "sm_86"),
    (torch.bfloat16, (256, 136), True, (100, 60), (1, 1), "sm_86"),
    (torch.bfloat16, (256, 256), False, (65, 70), (1, 1), "sm_90a"),
]


@pytest.mark.parametrize("dtype,head_dims,causal,seqlens,heads,arch", CASES, ids=str)
def test_backward(dtype, head_dims, causal, seqlens, heads, arch) -> None:
    """In the fixed order of dQ on one architecture, whose kernel is read for newer instructions too."""
    with_lse = head_dims[0] != head_dims[1]
    check(
        select(dtype, head_dims, causal, arch, arch == "sm_90a"),
        draw(dtype, seqlens, heads, head_dims),
        with_lse,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_an_exponent_is_no_larger_than_its_row_allows(causal: bool) -> None:
    """Keys past the end score 0, which is far above the LSE of a row whose scores are all very low."""
    q, k, v = draw(torch.bfloat16, (70, 70), (1, 1), (64, 64))
    q, k = q.abs() * 8, -k.abs() * 8
    config = replace(select(torch.bfloat16, (64, 64), causal), **vars(SMALL))
    out, lse = attention_naive(q, k, v, causal=causal)
    assert lse.min() < -200
    dout = torch.ones_like(v)
    gradients = backward_on_numpy(config, (dout, q, k, v), out.bfloat16(), lse.float(), 0.125, LATE)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_fixed_order_of_dq() -> None:
    """Key tiles beside each other, which wait for their turns."""
    inputs = draw(torch.float16, (100, 300), (2, 1), (64, 64))
    check(replace(select(torch.float16, (64, 64), True, ordered=True), **vars(SMALL)), inputs)


@pytest.mark.parametrize("stages,shares", [(1, (4, 4, 2)), (1, (8, 8, 4)), (2, (2, 2, 2))], ids=str)
def test_shares_of_the_warps(stages: int, shares: tuple[int, int, int]) -> None:
    score, gradient, dq = shares
    tiles = {"tile_m": 64, "tile_n": 128, "warps": 8, "stages": stages, "ctas_per_sm": 1}
    config = replace(select(torch.bfloat16, (64, 64), True), **tiles)
    config = replace(config, score_warps=score, gradient_warps=gradient, dq_warps=dq)
    validate_ampere_backward_config(config)
    assert config.keeps_probabilities == (score == 8)
    check(config, draw(torch.bfloat16, (150, 140), (1, 1), (64, 64)))


def test_the_bits_do_not_depend_on_timing() -> None:
    """Of one key tile, since dQ is summed over them in the order in which they come."""
    q, k, v = draw(torch.bfloat16, (150, 60), (1, 1), (128, 128))
    out, lse = attention_naive(q, k, v, causal=True)
    config = select(torch.bfloat16, (128, 128), True, "sm_90a", ordered=True)
    results = [
        backward_on_numpy(config, (q, q, k, v), out.bfloat16(), lse.float(), 0.1, timing)
        for timing in (AT_ONCE, LATE, Timing(is_late=True, seed=2))
    ]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("instruction", ["cp.async.wait_group", "bar.sync"])
def test_a_kernel_without_its_waits_is_caught(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(select(torch.bfloat16, (64, 64), False), **vars(SMALL))
    steps = {config: "\n".join(x for x in ptx_of(config).splitlines() if instruction not in x)}
    program_of = on_numpy.program_of
    monkeypatch.setattr(on_numpy, "program_of", lambda c: parse(steps[c]) if c in steps else program_of(c))
    with pytest.raises(AssertionError):
        check(config, draw(torch.bfloat16, (70, 140), (1, 1), (64, 64)))


def test_keys_past_the_end_have_no_part_in_large_gradients() -> None:
    """P of a key that is not there would be 1 where the LSE is negative, and its dS too large for float16."""
    q, k, v = draw(torch.float16, (70, 70), (1, 1), (64, 64))
    q, k, v = q.abs() + 1, -k.abs() - 1, 2 + v / 64
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention_naive(*leaves)
    assert lse.max() < 0
    dout = torch.full_like(v, 1000)
    exact = torch.autograd.grad(out, leaves, dout.double())
    config = replace(select(torch.float16, (64, 64), False), **vars(SMALL))
    rows = out.detach().half(), lse.detach().float()
    assert (dout * rows[0].float()).sum(-1).min() > torch.finfo(torch.float16).max
    ours = backward_on_numpy(config, (dout, q, k, v), *rows, 0.125, LATE)
    assert ours[0].isfinite().all() and ours[1].isfinite().all()
    assert (ours[2].double() - exact[2]).norm() < 2**-9 * exact[2].norm()
