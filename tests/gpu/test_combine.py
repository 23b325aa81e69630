"""The kernel that merges partial results on the GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper_attention.launch.combine import combine
from tests.cute_kernels.test_combine import check, draw

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher allocates starts as NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(math.nan))


def merged(parts: Tensor, lse: Tensor, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """On the GPU, from tensors laid out as these."""
    there = parts.transpose(2, 3).to(device).transpose(2, 3), lse.transpose(2, 3).to(device).transpose(2, 3)
    out, log_sum = combine(*there, dtype)
    return out.cpu(), log_sum.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 3, 8, 9, 55, 133, 256])
@pytest.mark.parametrize("columns", [59, 64, 128, 256, 512])
def test_kernel_merges_parts(splits: int, columns: int, dtype: torch.dtype, device: str) -> None:
    parts, lse = draw(splits, (2, 13, 3), columns, seed=splits)
    check(merged(parts, lse, dtype, device), parts, lse)


@pytest.mark.parametrize("splits", [2, 33])
def test_many_rows(splits: int, device: str) -> None:
    generator = torch.Generator(device).manual_seed(splits)
    parts = torch.randn(splits, 5, 1031, 16, 64, generator=generator, device=device)
    lse = torch.randn(splits, 5, 1031, 16, generator=generator, device=device)
    out, log_sum = combine(parts, lse, torch.float32)
    exact = lse.double().logsumexp(0)
    wanted = ((lse.double() - exact).exp().unsqueeze(-1) * parts).sum(0)
    assert bool(((out - wanted).abs() <= 2e-6 * parts.abs().amax(0)).all())
    assert bool(((log_sum - exact).abs() <= 2e-6).all())


def test_in_a_graph_and_the_same_bits_each_time(device: str) -> None:
    parts, lse = (x.to(device) for x in draw(20, (1, 64, 8), 128, seed=0))
    out = torch.zeros(1, 64, 8, 128, dtype=torch.bfloat16, device=device)
    first = combine(parts, lse, torch.bfloat16, out)[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine(parts, lse, torch.bfloat16, out)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, first)
