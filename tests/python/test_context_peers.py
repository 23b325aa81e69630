"""What stands for flash-attn in the benchmark of context parallelism, against float64, and ring-flash-attn over it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from hopper_attention.reference import attention_naive

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "context_peers.py"
OF_FORWARD = "q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right"
OF_BACKWARD = "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("context_peers", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors() -> list[torch.Tensor]:
    """q, k, v and dout, of grouped heads."""
    g = torch.Generator().manual_seed(3)
    return [torch.randn(1, 32, heads, 16, generator=g) for heads in (4, 2, 2, 4)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """out, dq, dk and dv under a causal mask."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = attention_naive(*leaves, causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def test_the_stand_in_takes_what_flash_attn_takes_and_writes_where_it_is_asked_to(peers: ModuleType) -> None:
    flash = peers.flash_attn_of(peers.PLAIN)
    forward, backward = flash._flash_attn_forward, flash._flash_attn_backward
    assert tuple(inspect.signature(forward).parameters)[: len(OF_FORWARD)] == OF_FORWARD
    assert tuple(inspect.signature(backward).parameters)[: len(OF_BACKWARD)] == OF_BACKWARD
    q, k, v, dout = tensors()
    out, lse, _, _ = forward(q, k, v, 0.0, 0.25, True)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    backward(dout, q, k, v, out, lse, *gradients, 0.0, 0.25, True)
    for found, right in zip((out, *gradients), exact(q, k, v, dout), strict=True):
        torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="dropout"):
        forward(q, k, v, 0.1, 0.25, True)


def test_ring_flash_attn_runs_over_the_stand_in(peers: ModuleType, tmp_path: Path) -> None:
    if peers.why_no_ring_flash_attn():
        pytest.skip(
            f"{peers.why_no_ring_flash_attn()}, and no test needs it: pip install --no-deps ring-flash-attn"
        )
    # A single rank has no messages to wait for in the forward pass; benchmarks/context_parallel.py has both on several.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        q, k, v, dout = tensors()
        out = peers.ring_flash_attn(peers.PLAIN)(q, k, v, causal=True)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(out.double(), exact(q, k, v, dout)[0], atol=1e-5, rtol=1e-4)
