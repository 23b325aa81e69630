"""``window_size`` from the public functions to the reference and to the place where a kernel takes it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from cute_kernels.window import NO_LIMIT
from hopper_attention import (
    compile_cache,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from hopper_attention.backward_rules import BackwardProblem, choose_backward
from hopper_attention.launch import backward, forward
from hopper_attention.launch.forward import run_forward
from hopper_attention.launch.gradient_launchers import BackwardLauncher
from hopper_attention.masks import MAX_WINDOW_LENGTH, MaskSpec
from hopper_attention.reference import attention_naive
from tests.python.dense_cases import qkv
from tests.python.fake_gpu import H200, SMS

OPS = torch.ops.hopper_attention
WINDOWS = ((4, -1), (-1, 3), (6, 0), (5, 2), (0, 0))


def oracle(*tensors: Tensor, causal: bool, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    left, right = window
    return attention_naive(*tensors, causal=causal, window_left=left, window_right=right)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(21, 33), (33, 21), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("head_dim_v", [24, 264])
def test_results_and_gradients(
    lengths: tuple[int, int], window: tuple[int, int], causal: bool, head_dim_v: int
) -> None:
    inputs = [x.requires_grad_() for x in qkv(*lengths, head_dim_v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = flash_attn_func(*inputs, causal=causal, window_size=window, return_attn_probs=True)
    wanted, wanted_lse = oracle(*exact, causal=causal, window=window)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator).masked_fill(wanted_lse == -torch.inf, 0.0)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    gradients = torch.autograd.grad((wanted, wanted_lse), exact, (dout.double(), dlse.double()))
    for mine, theirs in zip(got, gradients, strict=True):
        assert (mine.double() - theirs).abs().max() <= 0.02 * max(theirs.abs().max(), 1.0)


@pytest.mark.parametrize("window", [(5, 2), [5, 2], torch.tensor([5, 2])], ids=str)
def test_every_spelling_and_every_packed_form(window: Any) -> None:
    q, k, v = qkv(21, 21, 32)
    expected = flash_attn_func(q, k, v, window_size=(5, 2))
    assert not torch.equal(expected, flash_attn_func(q, k, v))
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), window_size=window), expected)
    heads = torch.cat([q, k, v], 2)
    assert torch.equal(flash_attn_qkvpacked_func(heads, num_heads_q=4, window_size=window), expected)


def test_one_side_may_be_none() -> None:
    tensors = qkv()
    for given, meant in (((None, 3), (-1, 3)), ((4, None), (4, -1))):
        got = flash_attn_func(*tensors, window_size=given)
        assert torch.equal(got, flash_attn_func(*tensors, window_size=meant))


# Torch


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_opcheck(window: tuple[int, int]) -> None:
    mask = MaskSpec.canonical(False, *window, 21, 33)
    q, k, v = (x.requires_grad_() for x in qkv())
    options = (0.2, mask.causal, None, 0, False, *mask.sides)
    torch.library.opcheck(OPS.forward.default, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = OPS.forward(q, k, v, *options)
    gradient = (0.2, mask.causal, None, False, *mask.sides)
    torch.library.opcheck(OPS.backward.default, (torch.randn_like(out), None, q, k, v, out, lse, *gradient))


@pytest.mark.parametrize(
    ("causal", "left", "right", "message"),
    [
        (True, 3, 2, "the right side of the window is 2 with causal=True, allowed: -1 with"),
        (False, 3, 0, "the right side of the window is 0 with causal=False"),
        (False, -2, -1, r"the window is \(-2, -1\), allowed: a pair \(left, right\) of ints from -1"),
        (False, -1, -7, r"the window is \(-1, -7\), allowed"),
    ],
)
def test_operators_take_the_canonical_form_alone(causal: bool, left: int, right: int, message: str) -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=message):
        OPS.forward(q, k, v, 0.2, causal, None, 0, False, left, right)
    out, lse = OPS.forward(q, k, v, 0.2, causal, None, 0)
    with pytest.raises(ValueError, match=message):
        OPS.backward(out, None, q, k, v, out, lse, 0.2, causal, None, False, left, right)


@pytest.mark.parametrize(("dynamic", "lengths"), [(False, (9,)), (True, (9, 40, 4))])
def test_compiles_as_one_graph(dynamic: bool, lengths: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen, window in itertools.product(lengths, ((3, 0), (2, 4), (-1, -1))):
        leaves = [x.requires_grad_() for x in qkv(seqlen, seqlen)]
        got, wanted = (f(*leaves, window_size=window) for f in (compiled, flash_attn_func))
        assert torch.equal(got, wanted)
        gradients = [torch.autograd.grad(x.float().square().sum(), leaves) for x in (got, wanted)]
        assert all(map(torch.equal, *gradients))


def test_torch_func() -> None:
    tensors = [torch.stack([x, 2 * x]) for x in qkv()]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, window_size=(5, 2)).float().square().sum()

    found = vmap(grad(loss, (0, 1, 2)))(*tensors)
    for i in range(2):
        leaves = [x[i].clone().requires_grad_() for x in tensors]
        assert all(map(torch.equal, [x[i] for x in found], torch.autograd.grad(loss(*leaves), leaves)))


# What is refused


@pytest.mark.parametrize("lengths", [(MAX_WINDOW_LENGTH + 1, 9), (9, MAX_WINDOW_LENGTH + 1)])
def test_long_sequences_are_refused(lengths: tuple[int, int]) -> None:
    q, k = (torch.empty(1, n, 1, 64, dtype=torch.half, device="meta") for n in lengths)
    with pytest.raises(
        NotImplementedError, match="windows are implemented up to 536870912 of each; use window_"
    ):
        flash_attn_func(q, k, k, window_size=(2, 2))
    assert flash_attn_func(q, k, k, window_size=(-1, 0)).shape == q.shape


# Kernels

ABSENT = (None,) * 10
"""A chunk, a plan, what changes scores and dropout, of which these kernels have none."""


@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_the_gradient_has_a_kernel_with_a_window(backend: str) -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    plan = explain(*tensors, window_size=(5, 2), backend=backend, device_capability=(9, 0))
    assert plan.notes[-1].startswith("the backward pass runs on the ") and "_window" in plan.notes[-1]
    problem = BackwardProblem(*(x.shape for x in tensors), torch.bfloat16, False, has_window=True)
    assert choose_backward(problem, H200, backend).backend == backend


def test_sides_reach_a_kernel_and_are_no_part_of_a_key(
    kernel_calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    select, problems = forward.select_for, []
    monkeypatch.setattr(forward, "select_for", lambda p, *where: problems.append(p) or select(p, *where))
    tensors = qkv()
    run_forward(*tensors, None, False, None, 0)
    for window, sides in (((5, 2), (5, 2)), ((7, -1), (7, NO_LIMIT))):
        run_forward(*tensors, None, False, None, 0, window=(*window, 0))
        assert kernel_calls[-1][1][6:] == (32**-0.5, *sides, *ABSENT, 3 * SMS)
    assert kernel_calls[0][1][6:] == (32**-0.5, 3 * SMS)
    assert [p.has_window for p in problems] == [False, True]
    run_forward(*qkv(head_dim_v=264), None, True, "ampere", 0, window=(5, -1, 0))
    assert [call[5:] for _, call in kernel_calls[-2:]] == [(32**-0.5, 5, NO_LIMIT)] * 2


def test_sides_reach_a_backward_kernel(kernel_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: lambda *a: seen.append(a))
    q, k, v = qkv()
    out, lse = q[..., :24], torch.zeros(2, 4, 21)
    for window in ((-1, -1, 0), (5, 2, 0)):
        backward.run_backward(out, q, k, v, out, lse, 0.5, False, backend="hopper", window=window)
    plain, windowed = (call for call in seen if len(call) > 6)
    assert plain[10:] == (0.5, SMS) and windowed[10:] == (0.5, 5, 2, *(None,) * 7, SMS)
    launchers = [
        backward.find(
            BackwardProblem(q.shape, k.shape, v.shape, q.dtype, False, False, w).kind, q.device, "hopper"
        )
        for w in (False, True)
    ]
    assert all(isinstance(x, BackwardLauncher) for x in launchers) and launchers[0] is not launchers[1]


def test_explain_says_what_a_query_sees() -> None:
    tensors = qkv()
    for window, causal, note in (
        ((5, 2), False, "window: a query sees 5 of the keys before its own and 2 after it"),
        ((5, 2), True, "window: a query sees 5 of the keys before its own and 0 after it"),
        ((-1, 2), False, "window: a query sees all of the keys before its own and 2 after it"),
    ):
        plan = explain(*tensors, causal=causal, window_size=window)
        assert plan.backend == "torch" and note in plan.notes
    assert explain(*tensors, window_size=(-1, -1)).notes == ()
