"""Dropout on the kernels: the mask of the reference to the bit, results against float64, graphs."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func, flash_attn_varlen_func
from hopper_attention.dropout import draw_philox, kept_steps
from hopper_attention.reference import attention_naive, attention_standard, dropout_mask
from tests.python.varlen_cases import CASES

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

DTYPES = (torch.float16, torch.bfloat16)
CUDA = torch.device("cuda")
SEED = 5


def seeded(function: Any, *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(SEED)
    return function(*arguments, **options)


def philox() -> Tensor:
    """What a call draws right after the seed."""
    return seeded(draw_philox, CUDA)


def identity(heads: int, size: int, batch: int, dtype: torch.dtype) -> Tensor:
    """(batch, size, heads, size)"""
    return torch.eye(size, device=CUDA, dtype=dtype)[None, :, None].repeat(batch, 1, heads, 1)


def masks_of(
    batch: int, heads: int, size: int, rows: int, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, Tensor]:
    """What a forward pass keeps of ``rows`` queries and ``size`` keys, and its backward pass of ``size`` queries.

    With queries of 0 all P are alike, and with V an identity they are the output, dropped or not. So is dV with dO an
    identity.
    """
    q = torch.zeros(batch, rows, heads, size, device=CUDA, dtype=dtype, requires_grad=True)
    k = torch.randn(batch, size, heads, size, device=CUDA).to(dtype).requires_grad_()
    v = identity(heads, size, batch, dtype).requires_grad_()
    out = seeded(flash_attn_func, q, k, v, **options)
    dout = torch.zeros_like(out)
    dout[:, :size] = identity(heads, size, batch, dtype)
    (dv,) = torch.autograd.grad(out, v, dout)
    return out.permute(0, 2, 1, 3) != 0, dv.permute(0, 2, 3, 1) != 0


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_that_of_the_reference(backend: str, head_dim: int, p: float) -> None:
    rows = 333
    for dtype in DTYPES:
        forward, backward = masks_of(2, 3, head_dim, rows, dtype, dropout_p=p, backend=backend)
        expected = dropout_mask(philox(), p, 2, 3, rows, head_dim)
        assert torch.equal(forward, expected)
        assert torch.equal(backward, expected[:, :, :head_dim])


def test_how_much_is_kept(backend: str) -> None:
    for p in (0.1, 0.5, 0.9):
        kept, _ = masks_of(4, 8, 128, 2048, torch.bfloat16, dropout_p=p, backend=backend)
        expected = kept_steps(p) / 256
        sigma = math.sqrt(expected * (1 - expected) / kept.numel())
        assert abs(kept.double().mean().item() - expected) < 4 * sigma


def results(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, attend: Any, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    return out, lse, *torch.autograd.grad(out, leaves, dout.to(out.dtype))


@pytest.mark.parametrize(
    "more", [{}, {"softcap": 2.5, "window_size": (100, 30)}], ids=["plain", "softcap, window"]
)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_results_and_gradients(draw, backend: str, head_dim: int, more: dict[str, Any]) -> None:
    failures = {}
    window = more.get("window_size", (-1, -1))
    terms = {"softcap": more.get("softcap", 0.0), "window_left": window[0], "window_right": window[1]}
    for dtype, seqlens, causal in product(DTYPES, ((113, 203), (203, 113), (640, 700)), (False, True)):
        x = draw(dtype, 2, seqlens, (4, 2), head_dim)
        dout = torch.randn(2, seqlens[0], 4, head_dim, device=CUDA).to(dtype)
        options = {"dropout_p": 0.2, "philox": philox(), "causal": causal, **terms}

        def ours(*tensors: Tensor, causal: bool = causal) -> Any:
            call = {"dropout_p": 0.2, "backend": backend, "return_attn_probs": True, "causal": causal, **more}
            return seeded(flash_attn_func, *tensors, **call)

        def plain(*tensors: Tensor, options: dict[str, Any] = options) -> Any:
            return attention_standard(*tensors, **options), None

        def naive(*tensors: Tensor, options: dict[str, Any] = options) -> Any:
            return attention_naive(*tensors, **options)

        tensors = x.q, x.k, x.v, dout
        mine, torchs = (results(*tensors, attend, dtype) for attend in (ours, plain))
        exact = results(*tensors, naive, torch.float64)
        seen = exact[1] > -math.inf
        if not bool(((mine[1].double() - exact[1])[seen].abs() < 2e-3).all()):
            failures[dtype, seqlens, causal, "lse"] = "off"
        for name, i in (("out", 0), ("dq", 2), ("dk", 3), ("dv", 4)):
            rounding = exact[i].abs().max() * torch.finfo(dtype).eps
            budget = 2 * (torchs[i] - exact[i]).abs().max() + rounding + 1e-4
            error = (mine[i] - exact[i]).abs().max()
            if not bool(error <= budget):
                failures[dtype, seqlens, causal, name] = (error.item(), budget.item())
    assert failures == {}


def test_a_seed_gives_the_same_bits(draw, backend: str) -> None:
    x = draw(torch.bfloat16, 2, (300, 400), (4, 2), 128)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    options = {"causal": True, "dropout_p": 0.3, "deterministic": True, "backend": backend}

    def run() -> tuple[Tensor, ...]:
        out = seeded(flash_attn_func, *leaves, **options)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)
    other = flash_attn_func(*leaves, **options)
    assert not torch.equal(run()[0], other)


def test_each_replay_of_a_graph_has_a_mask_of_its_own(backend: str) -> None:
    size = 128
    q = torch.zeros(1, size, 2, size, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn_like(q).requires_grad_()
    v = identity(2, size, 1, torch.bfloat16).requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        out = flash_attn_func(q, k, v, dropout_p=0.5, backend=backend)
        return out, *torch.autograd.grad(out, v, identity(2, size, 1, torch.bfloat16))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = run()
    masks = []
    for _ in range(3):
        graph.replay()
        kept, kept_backward = out.permute(0, 2, 1, 3) != 0, dv.permute(0, 2, 3, 1) != 0
        assert torch.equal(kept, kept_backward)
        assert 0.4 < kept.double().mean().item() < 0.6
        masks.append(kept)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("case", ["many tiles", "used", "empty ones", "rows behind"])
def test_packed_sequences(backend: str, case: str) -> None:
    c = CASES[case]
    lengths = [x.cuda() if isinstance(x, Tensor) else x for x in c.lengths]
    leaves = [x.cuda().requires_grad_() for x in c.tensors(torch.bfloat16, poisoned=False)]
    options = {"causal": True, "dropout_p": 0.3}
    found, expected = [], []
    for of, chosen in ((found, backend), (expected, "reference")):
        out = seeded(flash_attn_varlen_func, *leaves, *lengths, backend=chosen, **options)
        dout = torch.randn(out.shape, generator=torch.Generator(CUDA).manual_seed(1), device=CUDA).bfloat16()
        of += [out, *torch.autograd.grad(out, leaves, dout)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.03)
