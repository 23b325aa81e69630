"""Packed and dense calls in chains without a pause: each reads what the one before has written, also where its kernel
starts before that one has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hopper_attention import explain_kvcache, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

STEPS, STEPS_OF_GRADIENTS, TOKENS, HEADS = 24, 8, 3000, 8
LENGTHS = torch.tensor([[0, 700, 701, 1900, 3000], [0, 10, 1500, 2990, 3000], [0, 750, 1500, 2250, 3000]])


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


def tensors(head_dim: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    shape = TOKENS, HEADS, head_dim
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)]


def packed(q: Tensor, k: Tensor, v: Tensor, step: int, lengths: Tensor, deterministic: bool) -> Tensor:
    # The offsets are written by the kernel just before, into memory that a call before has read.
    offsets = lengths[step % 3] + 0
    options = {"causal": step % 2 == 0, "deterministic": deterministic}
    return flash_attn_varlen_func(q, k, v, offsets, offsets, 2000, 2000, **options)


def dense(q: Tensor, k: Tensor, v: Tensor, step: int, lengths: Tensor, deterministic: bool) -> Tensor:
    q, k, v = (x.unflatten(0, (3, -1)) for x in (q, k, v))
    out = flash_attn_func(q, k, v, causal=step % 2 == 0, deterministic=deterministic)
    return out.flatten(0, 1)


Attend = Callable[[Tensor, Tensor, Tensor, int, Tensor, bool], Tensor]


def forward_chain(attend: Attend, head_dim: int, pause: bool) -> Tensor:
    """Each call reads what the one before it wrote."""
    (q, k, v, _), lengths = tensors(head_dim), LENGTHS.int().cuda()
    for step in range(STEPS):
        v = attend(q, k, v, step, lengths, False)
        q = v + q
        if pause:
            torch.cuda.synchronize()
    return v


def gradient_chain(attend: Attend, head_dim: int, pause: bool, deterministic: bool) -> Tensor:
    (q, k, v, dout), lengths = tensors(head_dim), LENGTHS.int().cuda()
    for step in range(STEPS_OF_GRADIENTS):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, step, lengths, deterministic)
        gradients = torch.autograd.grad(out, leaves, dout)
        # Of about the size that they had.
        q, k, v = (x + y.clamp(-1, 1) for x, y in zip((q, k, v), gradients, strict=True))
        q, k, v = (x * 0.75 for x in (q, k, v))
        if pause:
            torch.cuda.synchronize()
    return torch.stack((q, k, v))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_packed_forwards(captured: bool, head_dim: int) -> None:
    expected = forward_chain(packed, head_dim, pause=True)
    if not captured:
        assert all(torch.equal(forward_chain(packed, head_dim, pause=False), expected) for _ in range(4))
        return
    (q, k, v, _), lengths = tensors(head_dim), LENGTHS.int().cuda()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        first, values = q, v
        for step in range(STEPS):
            values = packed(first, k, values, step, lengths, False)
            first = values + first
    for _ in range(4):
        values.fill_(float("nan"))
        graph.replay()
        assert torch.equal(values, expected)


KEYS_OF_CACHE = torch.tensor([[30, 9000, 1, 2500], [8192, 5, 640, 9000], [2000, 2001, 2002, 2003]])


def cache_chain(dtype: torch.dtype, pause: bool) -> Tensor:
    """Calls on a cache whose keys are in parts by a plan of lengths that the kernel before has written."""
    generator = torch.Generator("cuda").manual_seed(4)
    shapes = (4, 24, 16, 128), (4, 9000, 2, 128), (4, 9000, 2, 128)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes)
    lengths = KEYS_OF_CACHE.int().cuda()
    plan = explain_kvcache(q, k, v, cache_seqlens=lengths[0], causal=True)
    assert plan.path == "tiles" and plan.config.split
    out = q
    for step in range(STEPS):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths[step % 3] + 0, causal=True)
        q = (0.5 * q.float() + out.float()).to(dtype)
        if pause:
            torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_parts_of_a_cache(dtype: torch.dtype) -> None:
    expected = cache_chain(dtype, pause=True)
    assert bool(expected.isfinite().all())
    assert all(torch.equal(cache_chain(dtype, pause=False), expected) for _ in range(4))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("attend", [packed, dense], ids=["packed", "dense"])
def test_gradients(attend: Attend, head_dim: int, deterministic: bool) -> None:
    expected = gradient_chain(attend, head_dim, True, deterministic)
    assert bool(expected.isfinite().all())
    # Sums of dQ are added in another order each time, unless they are to be deterministic.
    again = [gradient_chain(attend, head_dim, True, deterministic) for _ in range(3)]
    by_chance = max(difference(other, expected) for other in again)
    assert by_chance < 0.05 and not (deterministic and by_chance)
    for _ in range(3):
        assert difference(gradient_chain(attend, head_dim, False, deterministic), expected) <= 3 * by_chance


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).float().norm() / expected.float().norm()).item()
