"""scaled_dot_product_attention on our kernels, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention.integrations import torch as ours

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 72])
def test_our_kernels_serve_and_torch_has_the_rest(
    is_causal: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(2, heads, 300, head_dim, generator=g, device="cuda").bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    ]
    calls: list[str] = []
    for name in ("run_forward", "differentiate"):
        whole = getattr(ours, name)
        monkeypatch.setattr(
            ours, name, lambda *a, _name=name, _whole=whole: calls.append(_name) or _whole(*a)
        )
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = scaled_dot_product_attention(*doubles, is_causal=is_causal, enable_gqa=True)
    dout = torch.randn(exact.shape, generator=g, device="cuda").bfloat16()
    expected = torch.autograd.grad(exact, doubles, dout.double())
    with ours.activate():
        out = scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        found = torch.autograd.grad(out, leaves, dout)
        assert calls == ["run_forward", "differentiate"]
        for a, b in zip((out, *found), (exact, *expected), strict=True):
            assert (a.double() - b).abs().max() < 3e-2 * b.abs().max()
        q = leaves[0]
        scaled_dot_product_attention(q, q, q, dropout_p=0.2).sum().backward()
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(300, 300, device="cuda", dtype=torch.bool))
        assert len(calls) == 2
        compiled = torch.compile(scaled_dot_product_attention, fullgraph=True)
        again = compiled(*leaves, is_causal=is_causal, enable_gqa=True)
        assert calls[2:] == ["run_forward"] and (again - out).abs().max() < 1e-2
    scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    assert len(calls) == 3
