"""Gradients where CTAs share what some key tiles visit, on a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.backward.step import steps_of
from hopper.backward.config import select_backward_config
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import flash_attn_func
from hopper_attention.launch import backward
from hopper_attention.launch.gradient_launchers import PieceLauncher
from hopper_attention.masks import FULL_SIDES
from tests.gpu.conftest import compile_together
from tests.gpu.gradients import find_gradient_errors, poison_work_memory

pytestmark = pytest.mark.gpu

DTYPES = torch.bfloat16, torch.float16
SHAPES = (
    ((3000, 3000), (7, 7), 1, False),
    ((1105, 1105), (8, 8), 4, False),
    ((700, 301), (6, 2), 1, False),
    ((640, 640), (40, 8), 1, False),
    ((2049, 2049), (8, 8), 1, True),
    ((777, 1517), (3, 3), 1, True),
    ((1300, 1100), (1, 1), 3, True),
)
"""Lengths, heads, batch, and whether there is a causal mask."""


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """All of them side by side, and what comes in front."""
    plain = [
        select_backward_config(dtype, size, size, causal)
        for dtype in ("bfloat16", "float16")
        for size in (40, 64, 96, 128)
        for causal in (False, True)
    ]
    configs = (*plain, *(replace(config, divides_visits=True) for config in plain))
    compile_together((*shipped_forward_configs(), *configs, *steps_of(configs)))


@pytest.fixture(autouse=True)
def poisoned_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work memory holds NaN before it is given to a call, and places that are far off."""
    poison_work_memory(monkeypatch)


def launcher_of(x: Any, causal: bool) -> Any:
    shapes = x.q.shape, x.k.shape, x.v.shape
    return backward.find_for_call(*shapes, x.q.dtype, x.q.device, causal, False, None, FULL_SIDES)


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_gradients(draw, head_dim: int) -> None:
    """Of the output, and of the LSE beside it; calls that are found again have those of the first."""
    failures, divided = {}, 0
    for dtype in DTYPES:
        for seqlens, heads, batch, causal in SHAPES:
            x = draw(dtype, batch, seqlens, heads, head_dim)
            divided += isinstance(launcher_of(x, causal), PieceLauncher)
            leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
            dout = torch.randn_like(x.q)
            dlse = torch.randn(batch, heads[0], seqlens[0], device="cuda")
            passes = []
            for _ in range(4):
                out = flash_attn_func(*leaves, causal=causal)
                passes.append(torch.autograd.grad(out, leaves, dout))
            wrong = find_gradient_errors(x, passes[0], dout, causal)
            wrong += find_gradient_errors(x, passes[3], dout, causal)
            # Of dQ the order of sums is free.
            wrong += [n for n in (1, 2) if not all(torch.equal(passes[0][n], other[n]) for other in passes)]
            results = flash_attn_func(*leaves, causal=causal, return_attn_probs=True)[:2]
            both = torch.autograd.grad(results, leaves, (dout, dlse))
            wrong += find_gradient_errors(x, both, dout, causal, dlse)
            if wrong:
                failures[dtype, seqlens, heads, batch] = wrong
    assert failures == {} and divided == len(DTYPES) * len(SHAPES)


def test_passes_on_several_streams_and_in_a_graph(draw) -> None:
    """Each has work memory of its own, and dK and dV have the bits of those on one stream."""
    x = draw(torch.bfloat16, 1, (1024, 1024), (8, 8), 128)
    assert isinstance(launcher_of(x, False), PieceLauncher)
    leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
    dout = torch.randn_like(x.q)

    def differentiate() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)

    expected, streams = differentiate(), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for stream in 4 * streams:
        with torch.cuda.stream(stream):
            found.append(differentiate())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiate()
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    for dq, dk, dv in (*found, captured):
        assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])
        torch.testing.assert_close(dq, expected[0], rtol=2e-2, atol=2e-3)
