"""Softcap, ALiBi and sinks by the reference: results and gradients against one formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.one_key import differentiate_one_key
from hopper_attention.reference import attention_naive, attention_standard, attention_tiled, tiled_forward
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.scores import sinks_gradient
from tests.python.score_formula import CAP, COMBINATIONS, draw_scores, formula

LENGTHS = ((9, 14), (14, 9), (5, 1), (1, 6))
MASKS = ((False, (-1, -1)), (True, (-1, -1)), (True, (3, -1)), (False, (2, 4)))
SCALE = 0.7

tiled = partial(attention_tiled, tile_m=4, tile_n=3)


def qkv(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * seqlen_q + seqlen_k)
    shapes = (2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 24)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def sides(causal: bool, window: tuple[int, int]) -> dict[str, Any]:
    return {"causal": causal, "window_left": window[0], "window_right": window[1], "softmax_scale": SCALE}


def gradients_for(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of random gradients of out and LSE, the same for all ``results`` of some shapes."""
    out, lse = results
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    given = dout.to(out.dtype), dlse.to(lse.dtype).masked_fill(lse.detach() == -math.inf, 0.0)
    return torch.autograd.grad(results, leaves, given)


@pytest.mark.parametrize("attention", [attention_naive, attention_tiled, tiled])
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_results_and_gradients_in_float64(
    attention: Callable[..., Any], name: str, lengths: tuple[int, int], mask: tuple[bool, tuple[int, int]]
) -> None:
    leaves = [x.requires_grad_() for x in qkv(*lengths)]
    scores = draw_scores(name, 2, 4)
    if scores["sinks"] is not None:
        scores["sinks"] = scores["sinks"].double().requires_grad_()
        leaves.append(scores["sinks"])
    causal, window = mask
    wanted = formula(*leaves[:3], scale=SCALE, causal=causal, window=window, **scores)
    found = attention(*leaves[:3], **sides(*mask), **scores)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients_for(found, leaves), gradients_for(wanted, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_results_in_16_bits(dtype: torch.dtype, name: str, mask: tuple[bool, tuple[int, int]]) -> None:
    inputs, scores = qkv(37, 29, dtype), draw_scores(name, 2, 4)
    causal, window = mask
    wanted, wanted_lse = formula(*inputs, scale=SCALE, causal=causal, window=window, **scores)
    step = 2 * torch.finfo(dtype).eps
    out, lse = tiled_forward(*inputs, **sides(*mask), **scores, tile_m=16, tile_n=8)
    torch.testing.assert_close(out.double(), wanted, rtol=step, atol=step)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    standard = attention_standard(*inputs, **sides(*mask), **scores)
    assert standard.dtype == dtype
    assert (standard.double() - wanted).abs().max() < 20 * step


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_far_above_or_below_all_scores(causal: bool) -> None:
    q, k, v = qkv(6, 9, torch.float32)
    plain, plain_lse = tiled_forward(q, k, v, causal=causal)
    sinks = torch.tensor([500.0, -500.0, -math.inf, 300.0])
    for attention in (attention_naive, attention_tiled):
        out, lse = attention(q, k, v, causal=causal, sinks=sinks)
        torch.testing.assert_close(out[:, :, 1:3].float(), plain[:, :, 1:3], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[:, 1:3].float(), plain_lse[:, 1:3], rtol=1e-5, atol=1e-6)
        assert (out[:, :, [0, 3]].abs() < 1e-30).all()
        torch.testing.assert_close(lse[:, 0].float(), torch.full((2, 6), 500.0))


@pytest.mark.parametrize("seqlen_k", [0, 3])
def test_rows_without_keys_have_their_sink(seqlen_k: int) -> None:
    q, k, v = qkv(5, seqlen_k, torch.float32)
    sinks = torch.tensor([0.5, -1.25, 3.0, 0.0])
    hidden = 5 - seqlen_k
    for attention in (attention_naive, tiled_forward):
        out, lse = attention(q, k, v, causal=True, sinks=sinks)
        assert (out[:, :hidden] == 0).all()
        torch.testing.assert_close(
            lse[:, :, :hidden].float(), sinks[None, :, None].expand(2, 4, hidden), rtol=1e-6, atol=1e-6
        )
    assert (attention_standard(q, k, v, causal=True, sinks=sinks)[:, :hidden] == 0).all()


def test_a_hidden_nan_reaches_nothing() -> None:
    q, k, v = qkv(6, 9, torch.bfloat16)
    scores = draw_scores("all", 2, 4)
    clean = tiled_forward(q, k, v, window_left=2, window_right=1, **scores)
    k[:, 0], v[:, 0] = math.nan, math.nan
    poisoned = tiled_forward(q, k, v, window_left=2, window_right=1, **scores)
    assert all(map(torch.equal, clean, poisoned))


@pytest.mark.parametrize("softcap", [0.0, CAP])
def test_gradients_of_one_key(softcap: float) -> None:
    leaves = [x.requires_grad_() for x in qkv(5, 1)]
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(2))
    options = {"softcap": softcap, "alibi_slopes": slopes}
    wanted = formula(*leaves, scale=SCALE, causal=True, **options)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in wanted)
    dlse = dlse.masked_fill(wanted[1] == -math.inf, 0.0)
    expected = torch.autograd.grad(wanted, leaves, (dout, dlse))
    inputs = [x.detach() for x in leaves]
    lse = wanted[1].detach()
    found = differentiate_one_key(dout, dlse, *inputs, lse, SCALE, softcap)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    assert differentiate_one_key(dout, None, *inputs, lse, SCALE, softcap)[0].eq(0).all()


def test_the_backward_needs_no_sinks_beyond_the_lse() -> None:
    q, k, v = qkv(9, 14)
    scores = draw_scores("all", 2, 4)
    out, lse = tiled_forward(q, k, v, **scores)
    del scores["sinks"]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attention_naive(*leaves, **draw_scores("all", 2, 4))[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = tiled_backward(dout, None, q, k, v, out, lse, **scores)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, leaves, dout), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_the_gradient_of_the_sinks_passes_rows_of_no_sequence_over() -> None:
    generator = torch.Generator().manual_seed(0)
    out, dout = torch.randn(2, 7, 3, 8, generator=generator).unbind()
    lse, sinks = torch.randn(3, 7, generator=generator), torch.randn(3, generator=generator)
    dlse = torch.randn(3, 7, generator=generator)
    terms = torch.exp(sinks[:, None] - lse) * (dlse - (dout * out).sum(-1).T)
    lse[:, 5:], dout[5:], dlse[:, 5:] = -math.inf, math.nan, math.nan
    found = sinks_gradient(dout.bfloat16().float(), dlse, out, lse, sinks)
    torch.testing.assert_close(found, terms[:, :5].sum(1), rtol=0.02, atol=0.02)
    none = torch.full_like(sinks, -math.inf)
    assert (sinks_gradient(dout, dlse, out, lse, none) == 0).all()
    half = sinks_gradient(dout, dlse, out, lse, sinks.half())
    assert half.dtype == torch.float16 and half.isfinite().all()


def test_slopes_have_a_gradient_in_the_oracle_alone() -> None:
    q, k, v = qkv(6, 9)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    results = [
        f(q, k, v, alibi_slopes=slopes, **more)[0]
        for f, more in ((attention_naive, {}), (formula, {"scale": 8**-0.5}))
    ]
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), slopes)[0] for x in results))
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient, which is not impl"):
        attention_tiled(q, k, v, alibi_slopes=slopes)
