"""The Hopper forward inside torch: autograd and torch.compile on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

GRADIENT_LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Allowed relative error (Frobenius) of a gradient against float64."""


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", GRADIENT_LIMIT, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_gradients_of_output_and_lse(
    draw, head_dims: tuple[int, int], causal: bool, dtype: torch.dtype
) -> None:
    x = draw(dtype, 2, (301, 517), (4, 2), *head_dims)
    ours = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    exact = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = flash_attn_func(*ours, causal=causal, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), ours, (dout, dlse))
    expected_out, expected_lse = attention_naive(*exact, causal=causal)
    expected = torch.autograd.grad((expected_out, expected_lse), exact, (dout.double(), dlse.double()))
    errors = {name: relative_error(g, e) for name, g, e in zip("qkv", gradients, expected, strict=True)}
    assert {name: error for name, error in errors.items() if not error < GRADIENT_LIMIT[dtype]} == {}
    assert [g.dtype for g in gradients] == [dtype] * 3


@pytest.mark.parametrize("causal", [False, True])
def test_torch_compile_takes_the_whole_graph(draw, causal: bool) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q * 2, k, v, causal=causal).flatten(2) + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    assert torch.equal(compiled(x.q, x.k, x.v), block(x.q, x.k, x.v))
    y = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    assert torch.equal(compiled(y.q, y.k, y.v), block(y.q, y.k, y.v))


def test_torch_compile_with_gradients(draw) -> None:
    x = draw(torch.bfloat16, 1, (130, 130), (2, 2), 64)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True).float().square().sum()

    torch._dynamo.reset()
    eager = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    traced = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True)(*traced).backward()
    for one, other in zip(eager, traced, strict=True):
        assert relative_error(other.grad, one.grad.double()) < 5e-3


def test_the_operator_passes_opcheck_on_the_gpu(draw) -> None:
    x = draw(torch.float16, 1, (33, 65), (2, 1), 64)
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    operator = torch.ops.hopper_attention.forward.default
    torch.library.opcheck(operator, (q, k, v, 0.125, True, None, 0))
