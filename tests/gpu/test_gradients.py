"""Gradients through the public functions on the backward kernels: values, edges, memory, streams, graphs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from hopper_attention.launch.gradient_launchers import (
    BackwardLauncher,
    DividedLauncher,
    OneTileLauncher,
    PieceLauncher,
)
from hopper_attention.notices import warn_once
from hopper_attention.reference import attention_naive
from tests.gpu.gradients import find_gradient_errors
from tests.gpu.test_memory import (
    BIG,
    heads_first,
    inside_nan,
    misaligned,
    needs_memory,
    with_gap,
    with_odd_stride,
)

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

RELAYS = (heads_first, with_gap, with_odd_stride, misaligned, inside_nan)
DQ_ORDER = 2e-3
"""Relative difference of two runs of dQ, whose sums come in another order."""


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, backend: str) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of q of the backward passes that ran on the kernel under test; no test may warn that one did not."""
    seen: list[tuple[int, ...]] = []
    for kind in (BackwardLauncher, DividedLauncher, OneTileLauncher, PieceLauncher):

        def note(launcher: Any, dout: Tensor, q: Tensor, *others: Any, launch: Any = kind.launch) -> Any:
            assert isinstance(launcher.config, AmpereBackwardConfig) == (backend == "ampere")
            seen.append(tuple(q.shape))
            return launch(launcher, dout, q, *others)

        monkeypatch.setattr(kind, "launch", note)
    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the backward pass of attention")
        yield seen


def leaves_of(x) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]


def same_gradients(first, second) -> bool:
    """Equal dK and dV, and dQ but for the order of its sums."""
    (dq, *others), (dq2, *others2) = first, second
    difference = (dq.double() - dq2.double()).norm() / dq2.double().norm()
    return difference.item() < DQ_ORDER and all(
        torch.equal(a, b) for a, b in zip(others, others2, strict=True)
    )


# Values


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize(
    "head_dims", [(64, 64), (128, 128), (64, 128), (40, 64), (128, 72), (192, 128)], ids=str
)
def test_output_and_lse(draw, attend, runs, head_dims, heads, causal: bool) -> None:
    failures = {}
    for dtype in (torch.float16, torch.bfloat16):
        for seqlens in ((113, 203), (203, 113), (517, 517)):
            x = draw(dtype, 2, seqlens, heads, *head_dims)
            leaves = leaves_of(x)
            out, lse = attend(*leaves, causal=causal, return_attn_probs=True)
            dout, dlse = torch.randn_like(out), torch.randn_like(lse)
            ours = torch.autograd.grad((out, lse), leaves, (dout, dlse))
            wrong = find_gradient_errors(x, ours, dout, causal, dlse)
            if wrong:
                failures[dtype, seqlens] = wrong
    assert failures == {} and len(runs) == 6


def test_the_lse_alone(draw, attend, runs) -> None:
    x = draw(torch.float16, 2, (130, 300), (4, 2), 64)
    leaves = leaves_of(x)
    _, lse = attend(*leaves, causal=True, return_attn_probs=True)
    dlse = torch.randn_like(lse)
    ours = torch.autograd.grad(lse, leaves, dlse)
    assert find_gradient_errors(x, ours, torch.zeros_like(x.q), True, dlse) == []
    assert not ours[2].any() and len(runs) == 1


def test_backward_fills_grad(draw, attend, runs) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    leaves = leaves_of(x)
    out = attend(*leaves, causal=True)
    out.backward(torch.ones_like(out))
    ours = tuple(leaf.grad for leaf in leaves)
    assert find_gradient_errors(x, ours, torch.ones_like(out), True) == []
    assert len(runs) == 1 and all(gradient.is_contiguous() for gradient in ours)


def test_packed_inputs(draw, attend, runs, backend: str) -> None:
    x = draw(torch.float16, 2, (301, 301), (4, 4), 128)
    expected = leaves_of(x)
    attend(*expected, causal=True).float().square().sum().backward()
    gradients = [leaf.grad for leaf in expected]
    qkv = torch.stack((x.q, x.k, x.v), dim=2).requires_grad_()
    flash_attn_qkvpacked_func(qkv, causal=True, backend=backend).float().square().sum().backward()
    assert same_gradients(qkv.grad.unbind(2), gradients)
    q, kv = x.q.detach().requires_grad_(), torch.stack((x.k, x.v), dim=2).requires_grad_()
    flash_attn_kvpacked_func(q, kv, causal=True, backend=backend).float().square().sum().backward()
    assert same_gradients((q.grad, *kv.grad.unbind(2)), gradients)
    assert len(runs) == 3


def test_softmax_scale(draw, attend) -> None:
    for scale in (1e-3, 0.5):
        x = draw(torch.bfloat16, 1, (200, 300), (2, 1), 64)
        leaves = leaves_of(x)
        out = attend(*leaves, scale, True)
        dout = torch.randn_like(out)
        ours = torch.autograd.grad(out, leaves, dout)
        exact = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
        expected = torch.autograd.grad(
            attention_naive(*exact, causal=True, softmax_scale=scale)[0], exact, dout.double()
        )
        for a, e in zip(ours, expected, strict=True):
            assert ((a - e).norm() / e.norm()).item() < 1.5e-2


def test_fp8_attention(draw, runs, backend: str) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    leaves, exact = leaves_of(x), [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attn_fp8_func(*leaves, causal=True, backend=backend)
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(attention_naive(*exact, causal=True)[0], exact, dout.double())
    assert len(runs) == 1
    for a, e in zip(ours, expected, strict=True):
        assert ((a - e).norm() / e.norm()).item() < 0.1


# Edges


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_without_keys_take_no_part(draw, attend, head_dim: int) -> None:
    seqlen_q, seqlen_k = 700, 300
    x = draw(torch.bfloat16, 2, (seqlen_q, seqlen_k), (4, 2), head_dim)
    leaves = leaves_of(x)
    out, lse = attend(*leaves, causal=True, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for bad in (0.0, math.nan, math.inf):
        dlse[:, :, : seqlen_q - seqlen_k] = bad
        ours = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
        assert find_gradient_errors(x, ours, dout, True, dlse) == []
        assert not ours[0][:, : seqlen_q - seqlen_k].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlens"), [(2, (0, 5)), (2, (5, 0)), (2, (0, 0)), (0, (5, 5))], ids=str)
def test_zero_lengths(draw, attend, runs, batch: int, seqlens: tuple[int, int], causal: bool) -> None:
    leaves = leaves_of(draw(torch.bfloat16, batch, seqlens, (4, 2), 64, 96))
    out, lse = attend(*leaves, causal=causal, return_attn_probs=True)
    gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]
    assert not any(g.any() for g in gradients) and runs == []


def test_deterministic_gradients_have_the_same_bits(draw, attend, runs) -> None:
    x = draw(torch.bfloat16, 1, (517, 517), (4, 2), 64)
    results = []
    for _ in range(3):
        leaves = leaves_of(x)
        attend(*leaves, causal=True, deterministic=True).float().square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    assert len(runs) == 3
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
    leaves = leaves_of(x)
    attend(*leaves, causal=True).float().square().sum().backward()
    assert ((leaves[0].grad - results[0][0]).float().norm() / results[0][0].float().norm()).item() < 1e-2


def test_wide_heads_run_on_the_kernel(draw, attend, runs) -> None:
    leaves = leaves_of(draw(torch.bfloat16, 1, (40, 50), (2, 2), 136))
    attend(*leaves).sum().backward()
    assert len(runs) == 1 and all(leaf.grad.isfinite().all() for leaf in leaves)


def test_the_reference_can_be_asked_for(draw, runs) -> None:
    leaves = leaves_of(draw(torch.bfloat16, 1, (40, 50), (2, 2), 64))
    flash_attn_func(*leaves, backend="reference").sum().backward()
    assert runs == []


# Memory


@pytest.mark.parametrize("relay", RELAYS)
@pytest.mark.parametrize("head_dim", [64, 104])
def test_strides_and_addresses_do_not_change_a_bit(draw, attend, relay: Callable, head_dim: int) -> None:
    # At most 128 keys: dQ is then one tile's, whose bits do not depend on any order.
    x = draw(torch.bfloat16, 2, (203, 113), (4, 2), head_dim)
    leaves = leaves_of(x)
    dout = torch.randn_like(x.q)
    expected = torch.autograd.grad(attend(*leaves, causal=True), leaves, dout)
    moved = [relay(t).requires_grad_() for t in (x.q, x.k, x.v)]
    for inputs, gradient in ((leaves, relay(dout)), (moved, dout), (moved, relay(dout))):
        ours = torch.autograd.grad(attend(*inputs, causal=True), inputs, gradient)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_expanded_gradients_of_the_output(draw, attend) -> None:
    x = draw(torch.bfloat16, 2, (203, 113), (4, 2), 64)
    leaves = leaves_of(x)
    for row in (torch.ones(1, 1, 1, 1), torch.randn(1, 1, 1, 64), torch.randn(1, 203, 1, 64)):
        dout = row.to(x.q).expand_as(x.q)
        out = attend(*leaves, causal=True)
        expected = torch.autograd.grad(out, leaves, dout.contiguous(), retain_graph=True)
        ours = torch.autograd.grad(out, leaves, dout)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    summed = torch.autograd.grad(attend(*leaves, causal=True).sum(), leaves)
    assert find_gradient_errors(x, summed, torch.ones_like(x.q), True) == []


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dimension", BIG)
def test_tensors_above_two_to_the_31_elements(
    draw, attend, runs, device: str, dimension: str, head_dim: int
) -> None:
    """Only the last rows of the last head, beyond what 32 bits can address, have a gradient; all others are zero."""
    needs_memory(device, 100)
    batch, seqlens, heads = BIG[dimension]
    heads = heads[0] * 64 // head_dim, heads[1] * 64 // head_dim
    x = draw(torch.bfloat16, batch, seqlens, heads, head_dim)
    assert max(x.q.numel(), x.k.numel()) > 2**31
    leaves = leaves_of(x)
    out = attend(*leaves)
    b, rows, h = slice(batch - 1, batch), slice(seqlens[0] - 64, seqlens[0]), slice(heads[0] - 1, heads[0])
    dout = torch.zeros_like(out)
    dout[b, rows, h] = torch.randn_like(dout[b, rows, h])
    gradients = torch.autograd.grad(out, leaves, dout)
    part = type(x)(x.q[b, rows, h].clone(), x.k[b, :, h].clone(), x.v[b, :, h].clone())
    ours = gradients[0][b, rows, h], gradients[1][b, :, h], gradients[2][b, :, h]
    assert find_gradient_errors(part, ours, dout[b, rows, h].clone(), False) == [] and len(runs) == 1
    for whole, piece in zip(gradients, ours, strict=True):
        nonzero = sum(int(chunk.count_nonzero()) for chunk in whole.flatten().split(2**28))
        assert nonzero == int(piece.count_nonzero()) > 0


# Streams, devices, graphs, torch


def test_a_side_stream_is_the_one_that_is_used(draw, attend) -> None:
    x = draw(torch.bfloat16, 2, (512, 512), (4, 4), 128)
    leaves, dout = leaves_of(x), torch.randn_like(x.q)
    expected = torch.autograd.grad(attend(*leaves, causal=True), leaves, dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attend(*leaves, causal=True)
        late = torch.full_like(dout, math.nan)
        torch.cuda._sleep(100_000_000)  # about 50 ms: a launch on another stream would read NaN
        late.copy_(dout)
        ours = torch.autograd.grad(out, leaves, late)
    stream.synchronize()
    assert same_gradients(ours, expected)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2,
    reason="needs a second GPU",
)
def test_another_device_index(draw, attend) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    leaves, dout = leaves_of(x), torch.randn_like(x.q)
    expected = torch.autograd.grad(attend(*leaves, causal=True), leaves, dout)
    there = [t.to("cuda:1").requires_grad_() for t in (x.q, x.k, x.v)]
    ours = torch.autograd.grad(attend(*there, causal=True), there, dout.to("cuda:1"))
    assert all(g.device == torch.device("cuda:1") for g in ours) and torch.cuda.current_device() == 0
    assert same_gradients([g.to("cuda:0") for g in ours], expected)


def test_a_captured_graph_computes_on_what_its_inputs_hold_then(draw, attend) -> None:
    static = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    leaves, dout = leaves_of(static), torch.randn_like(static.q)
    dlse = torch.randn(2, 4, 300, device=dout.device)

    def step() -> tuple[Tensor, ...]:
        results = attend(*leaves, causal=True, return_attn_probs=True)
        return torch.autograd.grad(results, leaves, (dout, dlse))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        fresh = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
        with torch.no_grad():
            for target, source in zip(leaves, (fresh.q, fresh.k, fresh.v), strict=True):
                target.copy_(source)
        graph.replay()
        assert same_gradients(captured, step())


def test_torch_compile_takes_the_whole_graph(draw, runs, backend: str) -> None:
    x = draw(torch.bfloat16, 2, (203, 113), (4, 2), 128)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = flash_attn_func(q, k, v, causal=False, return_attn_probs=True, backend=backend)
        return out.float().square().sum() + lse.sin().sum()

    torch._dynamo.reset()
    eager, traced = leaves_of(x), leaves_of(x)
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True)(*traced).backward()
    assert len(runs) == 2
    for one, other in zip(eager, traced, strict=True):
        assert ((other.grad - one.grad).float().norm() / one.grad.float().norm()).item() < 5e-3


@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_operator_passes_opcheck(draw, attend, runs, with_dlse: bool, backend: str) -> None:
    x = draw(torch.float16, 1, (33, 65), (2, 1), 64)
    out, lse = attend(x.q, x.k, x.v, 0.125, True, return_attn_probs=True)
    dlse = torch.randn_like(lse) if with_dlse else None
    arguments = (torch.randn_like(out), dlse, x.q, x.k, x.v, out, lse, 0.125, True, backend, False)
    torch.library.opcheck(torch.ops.hopper_attention.backward.default, arguments)
    assert runs
