"""Attention to one key: the output is its value, and gradients are exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func
from hopper_attention.reference import attention_naive

HALF_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def qkv(seqlen_q: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = (2, seqlen_q, 6, 64), (2, 1, 2, 64), (2, 1, 2, 40)
    return tuple(torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)


@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 239])
def test_scores_have_no_gradient(seqlen_q: int, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = qkv(seqlen_q, dtype)
    out = flash_attn_func(q, k, v, causal=causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not dq.any() and not dk.any()
    seen = dout[:, -1:] if causal else dout
    exact = seen.double().unflatten(2, (2, 3)).sum((1, 3)).unsqueeze(1)
    assert (dv.double() - exact).abs().max().item() <= HALF_STEP[dtype] * exact.abs().max().item()
    assert dq.is_contiguous() and dq.dtype == dk.dtype == dv.dtype == dtype


@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_has_one(causal: bool, dtype: torch.dtype) -> None:
    tensors = qkv(5, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn(2, 5, 6, 40, generator=generator).to(dtype)
    dlse = torch.randn(2, 6, 5, generator=generator)
    out, lse = flash_attn_func(*tensors, 0.3, causal, return_attn_probs=True)
    torch.autograd.backward([out, lse], [dout, dlse])
    wanted, wanted_lse = attention_naive(*exact, causal=causal, softmax_scale=0.3)
    torch.autograd.backward([wanted, wanted_lse], [dout.double(), dlse.double()])
    for got, expected in zip(tensors, exact, strict=True):
        error = (got.grad.double() - expected.grad).abs().max().item()
        assert error <= HALF_STEP[dtype] * expected.grad.abs().max().item() + 1e-6


def test_a_score_that_is_not_finite_spoils_its_gradients() -> None:
    q, k, v = qkv(5, torch.float16)
    with torch.no_grad():
        q[0, 2, 1] = math.nan
    flash_attn_func(q, k, v).float().sum().backward()
    of_head_1 = v.grad[0, 0, 0]
    assert bool(q.grad[0, 2, 1].isnan().all() and of_head_1.isnan().all())
    assert not q.grad[0, :2].any() and bool(v.grad[1].isfinite().all() and v.grad[0, 0, 1].isfinite().all())
