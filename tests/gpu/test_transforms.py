"""torch.compile, CUDA graphs, fake tensors and torch.func on a GPU: all give what a plain call gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

from hopper_attention import (
    Fp8Quantization,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    quantize_qkv,
)

pytestmark = pytest.mark.gpu

Attention = Callable[..., Tensor]

REDUCE_OVERHEAD = {"fullgraph": True, "mode": "reduce-overhead"}
LENGTHS = (300, 517, 1024)
TWELVE_LENGTHS = (70, 128, 130, 257, 300, 512, 700, 1025, 1500, 2000, 3000, 5000)
DQ_LIMIT = 1e-3
"""Relative difference of dQ, whose last bits depend on the order of its sums; other gradients are the same."""


def sixteen_bit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def fp8(q: Tensor, k: Tensor, v: Tensor, c: Fp8Quantization | None = None) -> Tensor:
    return flash_attn_fp8_func(q, k, v, causal=True, quantization=c or Fp8Quantization())


def in_two_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_quantized_func(quantize_qkv(q, k, v), causal=True)


def rotated_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fp8(q, k, v, Fp8Quantization(rotate_v=True, smooth_k=True, smooth_v=True))


EVERY_FUNCTION = pytest.mark.parametrize("attention", [sixteen_bit, fp8, in_two_steps, rotated_values])
DIFFERENTIABLE = pytest.mark.parametrize("attention", [sixteen_bit, fp8, rotated_values])


def tensors(draw, seqlen: int, head_dim: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(torch.bfloat16, 3, (seqlen, seqlen), (4, 2), head_dim)
    return x.q, x.k, x.v


def leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in inputs)


def loss_of(attention: Attention) -> Attention:
    return lambda *inputs: attention(*inputs).float().square().sum()


def assert_same_gradients(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    (dq, *others), (expected_dq, *expected_others) = found, expected
    assert (dq.double() - expected_dq).norm() / expected_dq.double().norm() < DQ_LIMIT
    assert all(torch.equal(x, y) for x, y in zip(others, expected_others, strict=True))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


# torch.compile(mode="reduce-overhead")


def run_three_times(compiled: Attention, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """A graph is warmed up, then captured, then replayed."""
    outs = []
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        outs.append(compiled(*inputs).clone())
    return outs


@EVERY_FUNCTION
def test_reduced_overhead(draw, attention: Attention) -> None:
    compiled = torch.compile(attention, dynamic=False, **REDUCE_OVERHEAD)
    drawn = [tensors(draw, seqlen) for seqlen in LENGTHS]
    for inputs in drawn:
        expected = attention(*inputs)
        assert all(torch.equal(out, expected) for out in run_three_times(compiled, inputs))
    # The graph of a length is replayed after others, with other numbers in its inputs.
    fresh = tensors(draw, LENGTHS[0])
    assert all(torch.equal(out, attention(*fresh)) for out in run_three_times(compiled, fresh))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_reduced_overhead_where_the_first_call_of_all_is_compiled(draw) -> None:
    """Whatever is made once and kept is then first asked for while a graph is warmed up in memory of its own."""
    inputs = tensors(draw, 300, 64)
    attention = partial(fp8, c=Fp8Quantization(seed=4321, rotate_v=True))
    compiled = torch.compile(attention, dynamic=False, **REDUCE_OVERHEAD)
    outs = run_three_times(compiled, inputs)
    other = torch.compile(lambda x: (x * 2).relu(), dynamic=False, **REDUCE_OVERHEAD)
    run_three_times(other, (torch.full((1 << 20,), 7.0, device="cuda"),))
    expected = attention(*inputs)
    assert all(torch.equal(out, expected) for out in outs)
    assert all(torch.equal(out, expected) for out in run_three_times(compiled, inputs))


@pytest.mark.parametrize("attend", [flash_attn_func, flash_attn_fp8_func])
def test_reduced_overhead_with_gradients(draw, attend: Callable[..., Any]) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True).float().square().sum()

    compiled = torch.compile(loss, dynamic=False, **REDUCE_OVERHEAD)
    for seqlen in LENGTHS:
        inputs = tensors(draw, seqlen)
        eager = leaves(inputs)
        expected = torch.autograd.grad(loss(*eager), eager)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            traced = leaves(inputs)
            compiled(*traced).backward()
            assert_same_gradients(tuple(x.grad.clone() for x in traced), expected)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_reduced_overhead_with_deterministic_gradients(draw) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, deterministic=True).float().square().sum()

    compiled = torch.compile(loss, dynamic=False, **REDUCE_OVERHEAD)
    for seqlen in LENGTHS:
        inputs = tensors(draw, seqlen)
        eager = leaves(inputs)
        expected = torch.autograd.grad(loss(*eager), eager)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            traced = leaves(inputs)
            compiled(*traced).backward()
            assert all(torch.equal(x.grad, y) for x, y in zip(traced, expected, strict=True))


# Captured graphs


@pytest.mark.parametrize(
    "c",
    [
        Fp8Quantization(seed=11),
        Fp8Quantization(seed=12, rotate_v=True, smooth_k=True, smooth_v=True),
        Fp8Quantization(seed=13, granularity="head"),
    ],
    ids=["kernel", "rotated values", "PyTorch's passes"],
)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_captured_graph_outlives_other_rotations(draw, c: Fp8Quantization, needs_grad: bool) -> None:
    """What it points to is still there after 100 other (head_dim, seed) pairs and whatever lay where they were."""
    inputs = tensors(draw, 300)

    def run() -> tuple[Tensor, ...]:
        if not needs_grad:
            return (fp8(*inputs, c=c),)
        used = leaves(inputs)
        out = fp8(*used, c=c)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), used)[1:]

    expected = [x.clone() for x in run()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for seed in range(1000, 1050):
        for head_dim in (64, 96):
            flash_attn_fp8_func(*tensors(draw, 64, head_dim), quantization=Fp8Quantization(seed=seed))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filler = [torch.full((128,), -1, dtype=torch.int32, device="cuda") for _ in range(1000)]
    for _ in range(5):
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert len(filler) == 1000


# Fake tensors, lengths


class Counter:
    """The default compiler, which keeps its graphs."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return compile_fx(graph, inputs)

    def count(self) -> int:
        """Graphs with attention in them. One that was given up, for torch to start anew, has nothing left in it."""
        nodes = ([str(node.target) for node in graph.graph.nodes] for graph in self.graphs)
        return sum(any("hopper_attention" in target for target in targets) for targets in nodes)


@EVERY_FUNCTION
def test_fake_tensors_launch_nothing(draw, attention: Attention) -> None:
    inputs = tensors(draw, 300)
    expected = attention(*inputs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        made = [torch.empty_like(x) for x in fakes]
        for group in (fakes, made):
            out = attention(*group)
            assert out.shape == expected.shape and out.stride() == expected.stride()
            assert out.dtype == expected.dtype and out.device == expected.device
        learned = [x.requires_grad_() for x in made]
        if attention is not in_two_steps:
            attention(*learned).float().sum().backward()
            assert [x.grad.shape for x in learned] == [x.shape for x in inputs]
    torch.cuda.synchronize()
    assert torch.equal(attention(*inputs), expected)


@EVERY_FUNCTION
def test_few_graphs_serve_twelve_lengths(draw, attention: Attention) -> None:
    counter = Counter()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in TWELVE_LENGTHS:
        inputs = tensors(draw, seqlen)
        assert torch.equal(compiled(*inputs), attention(*inputs)), seqlen
    # In two steps, one block of keys is a case of its own.
    assert counter.count() == 1 + (attention is in_two_steps)


@DIFFERENTIABLE
def test_few_graphs_serve_twelve_lengths_with_gradients(draw, attention: Attention) -> None:
    counter = Counter()
    compiled = torch.compile(loss_of(attention), fullgraph=True, dynamic=True, backend=counter)
    for seqlen in TWELVE_LENGTHS:
        inputs = tensors(draw, seqlen)
        eager, traced = leaves(inputs), leaves(inputs)
        expected = torch.autograd.grad(loss_of(attention)(*eager), eager)
        assert_same_gradients(torch.autograd.grad(compiled(*traced), traced), expected)
    assert counter.count() == 1


# torch.func


@DIFFERENTIABLE
def test_reverse_mode(draw, attention: Attention) -> None:
    inputs = tensors(draw, 300)
    eager = leaves(inputs)
    expected = torch.autograd.grad(loss_of(attention)(*eager), eager)
    assert_same_gradients(grad(loss_of(attention), (0, 1, 2))(*inputs), expected)
    assert_same_gradients(jacrev(loss_of(attention), (0, 1, 2))(*inputs), expected)
    loss, pull = vjp(loss_of(attention), *inputs)
    assert_same_gradients(pull(torch.ones_like(loss)), expected)


@DIFFERENTIABLE
def test_gradients_by_sample(draw, attention: Attention) -> None:
    inputs = tensors(draw, 300)
    eager = leaves(inputs)
    expected = torch.autograd.grad(loss_of(attention)(*eager), eager)

    def one(*entries: Tensor) -> Tensor:
        return loss_of(attention)(*(x[None] for x in entries))

    assert_same_gradients(vmap(grad(one, (0, 1, 2)))(*inputs), expected)
    assert_same_gradients(grad(lambda *x: vmap(one)(*x).sum(), (0, 1, 2))(*inputs), expected)


@EVERY_FUNCTION
def test_samples(draw, attention: Attention) -> None:
    q, k, v = tensors(draw, 300)
    expected = attention(q, k, v)
    assert torch.equal(vmap(lambda *x: attention(*(t[None] for t in x))[0])(q, k, v), expected)
    several = torch.stack([q, 2 * q], 2)
    found = vmap(attention, in_dims=(2, None, None))(several, k, v)
    assert torch.equal(found[0], expected) and torch.equal(found[1], attention(2 * q, k, v))


@EVERY_FUNCTION
def test_forward_mode_is_refused(draw, attention: Attention) -> None:
    q, k, v = tensors(draw, 70)
    refused = pytest.raises(NotImplementedError, match="forward-mode derivatives")
    with refused:
        jvp(lambda x: attention(x, k, v), (q,), (q,))
    with refused, forward_ad.dual_level():
        attention(forward_ad.make_dual(q, q), k, v)
