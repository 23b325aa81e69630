"""Calls of many queries with several heads in a tile, as the multiprocessors have fewer turns then: against float64."""

from __future__ import annotations

import pytest
import torch

from hopper_attention import explain, explain_varlen, flash_attn_func, flash_attn_varlen_func
from hopper_attention.reference import attention_naive
from tests.gpu.test_few_queries import BF16, F16, HEADS, Case, check, kernel_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


CASES = {
    "136 tiles": Case((1, 2098, 2098), (8, 4), (128, 128)),
    "short tiles of wide heads": Case((3, 344, 500), (16, 2), (256, 256)),
    "192 rows a tile": Case((1, 3140, 3140), (8, 2), (64, 64), {}, F16),
    "a softcap": Case((3, 342, 777), (16, 4), (128, 128), {"softcap": 3.0}),
    "odd head_dims": Case((1, 2098, 1400), (8, 4), (104, 72)),
    "many turns": Case((4, 1557, 300), (8, 1), (128, 128), {}, F16),
    # Heads that do not divide a warpgroup's rows.
    "3 heads": Case((5, 342, 777), (12, 4), (96, 96)),
    "7 heads": Case((19, 257, 500), (7, 1), (128, 128)),
    "12 heads of wide rows": Case((4, 260, 301), (24, 2), (256, 256)),
}


@pytest.mark.parametrize("name", CASES)
def test_dense(name: str) -> None:
    case = CASES[name]
    for seed in range(3):
        q, k, v = case.draw(seed)
        assert kernel_of(explain(q, k, v, **case.options).config) == HEADS
        found = flash_attn_func(q, k, v, return_attn_probs=True, **case.options)
        check(case, found, q, k, v, case.options)
        assert torch.equal(flash_attn_func(q, k, v, **case.options), found[0])


@pytest.mark.parametrize("name", CASES)
def test_packed(name: str) -> None:
    """The same sequences one behind the other, with rows of NaN that are in none."""
    case = CASES[name]
    (batch, seqlen_q, seqlen_k), q_k_v = case.sizes, case.draw(3)
    flat = [x.reshape(-1, *x.shape[2:]) for x in q_k_v]
    offsets = [torch.arange(batch + 1, device="cuda", dtype=torch.int32) * n for n in (seqlen_q, seqlen_k)]
    lengths = *offsets, seqlen_q, seqlen_k
    for _ in range(3):
        out, lse, *_ = flash_attn_varlen_func(*flat, *lengths, return_attn_probs=True, **case.options)
        of_each = out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
        check(case, of_each, *q_k_v, case.options)
        assert torch.equal(flash_attn_varlen_func(*flat, *lengths, **case.options), out)
    if case.dtype == BF16 and not case.options and case.head_dims == (128, 128):
        assert kernel_of(explain_varlen(*flat, *lengths).config) == HEADS


def test_gradients() -> None:
    """Of a forward pass with such tiles, by kernels that know nothing of them."""
    leaves = [x.clone().requires_grad_() for x in CASES["136 tiles"].draw(1)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    dout = torch.randn(leaves[0].shape, device="cuda", dtype=BF16)
    assert kernel_of(explain(*leaves).config) == HEADS
    found = torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)
    of_exact = torch.autograd.grad(attention_naive(*exact)[0], exact, dout.double())
    for name, a, e in zip(("dq", "dk", "dv"), found, of_exact, strict=True):
        assert (a.double() - e).norm() <= 1e-2 * e.norm(), name
