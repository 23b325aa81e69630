"""Softcap and ALiBi in the Hopper backward kernels, from their PTX without a GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.hopper.on_numpy import Rules, backward_on_numpy
from tests.hopper.test_backward_windows import DTYPES, EPSILON, LATE, draw, select, visible


def attend(q, k, v, mask: torch.Tensor, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64."""
    group, shift = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.slopes is not None:
        distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - shift
        scores = scores - rules.slopes.double()[:, :, None, None] * distance.abs()
    scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(scores - lse[..., None]), v), lse


@pytest.mark.parametrize(
    "dtype,head_dim,names,causal",
    [
        ("bfloat16", 64, "softcap alibi", True),
        ("bfloat16", 128, "alibi", False),
    ],
)
def test_gradients(dtype: str, head_dim: int, names: str, causal: bool) -> None:
    slopes = torch.tensor([[0.05, 0.5]]) if "alibi" in names else None
    rules = Rules(1.5 if "softcap" in names else 0.0, slopes)
    flags = {"softcap": "softcap" in names, "alibi": "alibi" in names}
    config = select(dtype, head_dim, causal, **flags)
    inputs = draw(DTYPES[dtype], (70, 150), (2, 1), head_dim, 1)
    leaves = [x.double().requires_grad_() for x in inputs[1:]]
    mask = visible(70, 150, 1000, 0 if causal else 1000)
    out, lse = attend(*leaves, mask, rules)
    exact = torch.autograd.grad(out, leaves, inputs[0].double())
    rows = out.detach().to(DTYPES[dtype]), lse.detach().float()
    ours = backward_on_numpy(config, tuple(inputs), *rows, head_dim**-0.5, LATE, rules=rules)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        error = (a.double() - e).norm().item()
        assert error <= 1.5 * EPSILON[DTYPES[dtype]] * e.norm().item() + 1e-5, name
