"""The backward kernel against float64, beside the same formula in PyTorch at the inputs' dtype."""

from __future__ import annotations

import pytest
import torch

from hopper_attention import flash_attn_func
from hopper_attention.backward_launch import run_backward
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

LENGTHS = [(1, 1), (113, 203), (203, 113), (640, 640), (1023, 1024), (64, 300)]


def gradients_of(attention, q, k, v, dout, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def plain(causal: bool):
    """softmax(q k^T) v in PyTorch, every step in the dtype of the inputs."""

    def attention(q, k, v):
        group = q.shape[2] // k.shape[2]
        q, k, v = (
            x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
        )
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(1 + k.shape[2] - q.shape[2]), -torch.inf)
        return (torch.softmax(scores, -1).nan_to_num() @ v).transpose(1, 2)

    return attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 104, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients(draw, dtype, head_dim: int, causal: bool) -> None:
    failures = {}
    for seqlens in LENGTHS:
        for heads in ((2, 2), (4, 2), (8, 1)):
            x = draw(dtype, 2, seqlens, heads, head_dim)
            out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
            dout = torch.randn_like(out)
            ours = run_backward(dout, x.q, x.k, x.v, out, lse, head_dim**-0.5, causal)
            exact = gradients_of(
                lambda q, k, v: attention_naive(q, k, v, causal=causal)[0], x.q, x.k, x.v, dout, torch.float64
            )
            torchs = gradients_of(plain(causal), x.q, x.k, x.v, dout, dtype)
            for name, a, b, e in zip(("dq", "dk", "dv"), ours, torchs, exact, strict=True):
                error, budget = (a - e).abs().max().item(), 2 * (b - e).abs().max().item() + 1e-4
                if not error <= budget:
                    failures[seqlens, heads, name] = f"{error:.3e} > {budget:.3e}"
    assert failures == {}


def test_a_long_sequence_and_its_repeats_agree(draw) -> None:
    x = draw(torch.bfloat16, 1, (4096, 4096), (4, 4), 128)
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    first = run_backward(dout, x.q, x.k, x.v, out, lse, 128**-0.5, True)
    for _ in range(5):
        again = run_backward(dout, x.q, x.k, x.v, out, lse, 128**-0.5, True)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        # dQ is summed in the order in which key tiles finish.
        assert ((first[0] - again[0]).float().norm() / first[0].float().norm()).item() < 2e-3
