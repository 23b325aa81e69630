"""Gradients of keys that are one tile, on a GPU: one launch, the same bits in every run, whoever asks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper_attention import device_memory, flash_attn_func
from hopper_attention.launch import backward
from hopper_attention.launch.gradient_launchers import OneTileLauncher
from hopper_attention.masks import FULL_SIDES
from tests.gpu.gradients import find_gradient_errors

pytestmark = pytest.mark.gpu

DTYPES = torch.bfloat16, torch.float16
LENGTHS = (128, 128), (100, 128), (4, 6), (60, 77), (68, 68)
LONGER = (1000, 128), (4096, 77)
MORE_QUERIES = (68, 3), *LONGER
"""Than keys, of calls without a mask."""


def of_one_tile(x, causal: bool) -> bool:
    """Whether the kernel of one tile serves a pass."""
    shapes = x.q.shape, x.k.shape, x.v.shape
    found = backward.find_for_call(*shapes, x.q.dtype, x.q.device, causal, False, None, FULL_SIDES)
    return isinstance(found, OneTileLauncher)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_gradients(draw, monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool) -> None:
    make, failures = device_memory.empty_on_gpu, {}
    # Whatever is not written shows.
    monkeypatch.setattr(device_memory, "empty_on_gpu", lambda *facts: make(*facts).fill_(math.nan))
    for dtype in DTYPES:
        for seqlens in (*LENGTHS, *(() if causal else MORE_QUERIES)):
            for batch, heads in ((2, (2, 2)), (2, (4, 2)), (8, (8, 8))):
                x = draw(dtype, batch, seqlens, heads, head_dim)
                # Long walks are for as many heads as fill the GPU.
                assert of_one_tile(x, causal) == (seqlens not in LONGER or batch == 8)
                leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
                dout, passes = torch.randn_like(x.q), []
                for _ in range(4):
                    out = flash_attn_func(*leaves, causal=causal)
                    passes.append(torch.autograd.grad(out, leaves, dout))
                wrong = find_gradient_errors(x, passes[0], dout, causal)
                same = all(
                    torch.equal(*pair) for other in passes[1:] for pair in zip(passes[0], other, strict=True)
                )
                if wrong or not same:
                    failures[dtype, seqlens, batch, heads] = wrong, same
    assert failures == {}


def gradients(x, causal: bool, **options) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
    return torch.autograd.grad(flash_attn_func(*leaves, causal=causal, **options), leaves, x.q)


@pytest.mark.parametrize("causal", [False, True])
def test_an_order_is_there_without_being_asked_for(draw, causal: bool) -> None:
    x = draw(torch.bfloat16, 8, (128, 128), (8, 2), 128)
    first, second = gradients(x, causal), gradients(x, causal, deterministic=True)
    assert all(map(torch.equal, first, second))


def test_it_is_replayed_by_a_graph(draw) -> None:
    x = draw(torch.bfloat16, 2, (128, 128), (4, 4), 128)
    leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = torch.autograd.grad(flash_attn_func(*leaves), leaves, x.q)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(flash_attn_func(*leaves), leaves, x.q)
    for _ in range(3):
        for part in found:
            part.fill_(math.nan)
        graph.replay()
        assert all(map(torch.equal, found, expected))


def test_a_gradient_of_the_lse_is_that_of_the_kernel_with_sums(draw) -> None:
    x = draw(torch.bfloat16, 2, (128, 128), (4, 4), 128)
    leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
    dout, dlse = torch.randn_like(x.q), torch.randn(2, 4, 128, device="cuda")
    results = flash_attn_func(*leaves, return_attn_probs=True)
    ours = torch.autograd.grad(results, leaves, (dout, dlse))
    assert find_gradient_errors(x, ours, dout, False, dlse) == []
