"""Gradients at head dimensions between those of kernels, whose products leave out zeros, on a GPU, against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from cute_kernels.backward.step import steps_of
from hopper.backward.config import select_backward_config
from hopper.forward.tilings import select_plain_config, shipped_forward_configs
from hopper_attention import flash_attn_func, flash_attn_varlen_func
from hopper_attention.launch import backward
from hopper_attention.masks import FULL_SIDES
from tests.gpu.conftest import compile_together
from tests.gpu.gradients import find_gradient_errors, find_packed_errors, poison_work_memory
from tests.python.varlen_cases import Case, offsets

pytestmark = pytest.mark.gpu

DTYPES = torch.bfloat16, torch.float16
HEAD_DIMS = 8, 16, 32, 40, 72, 80, 88, 104, 120
SHAPES = (
    ((517, 517), (4, 4), 2),
    ((413, 203), (8, 2), 2),
    ((333, 77), (12, 1), 1),
    ((49, 49), (6, 6), 40),
)
"""Lengths, heads and batch."""


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """All of them side by side, and what comes in front."""
    sizes = list(product(("bfloat16", "float16"), HEAD_DIMS, (False, True)))
    configs = [
        select_backward_config(dtype, size, size, causal, ordered, layout=layout)
        for dtype, size, causal in sizes
        for ordered, layout in ((False, "dense"), (True, "dense"), (False, "varlen"))
    ]
    forward = [
        select_plain_config(dtype, size, size, causal, keys)
        for dtype, size, causal in sizes
        for (_, keys), _, _ in SHAPES
    ]
    every = *shipped_forward_configs(), *forward, *configs, *steps_of(configs)
    compile_together(tuple({config.name: config for config in every}.values()))


@pytest.fixture(autouse=True)
def poisoned_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work memory holds NaN before it is given to a call."""
    poison_work_memory(monkeypatch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients(draw, head_dim: int, deterministic: bool) -> None:
    """Calls that are found again have those of the first, in a fixed order to the bit."""
    failures = {}
    for dtype in DTYPES:
        for seqlens, heads, batch in SHAPES:
            for causal in (False, True):
                x = draw(dtype, batch, seqlens, heads, head_dim)
                shapes = x.q.shape, x.k.shape, x.v.shape
                found = backward.find_for_call(
                    *shapes, dtype, x.q.device, causal, deterministic, None, FULL_SIDES
                )
                assert found.config.used_head_dim == max(head_dim, 16)
                leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
                dout = torch.randn_like(x.q)
                passes = []
                for _ in range(3):
                    out = flash_attn_func(*leaves, causal=causal, deterministic=deterministic)
                    passes.append(torch.autograd.grad(out, leaves, dout))
                errors = [find_gradient_errors(x, ours, dout, causal) for ours in passes[::2]]
                if any(errors):
                    failures[dtype, seqlens, heads, causal] = errors
                if deterministic:
                    assert all(torch.equal(a, b) for a, b in zip(passes[0], passes[2], strict=True))
    assert failures == {}


@pytest.mark.parametrize("head_dims", [(96, 72), (40, 64), (128, 80), (72, 16)], ids=str)
def test_two_head_dims(draw, head_dims: tuple[int, int]) -> None:
    for causal in (False, True):
        x = draw(torch.bfloat16, 2, (301, 410), (4, 2), *head_dims)
        leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
        shapes = x.q.shape, x.k.shape, x.v.shape
        found = backward.find_for_call(*shapes, x.q.dtype, x.q.device, causal, False, None, FULL_SIDES)
        assert (found.config.used_head_dim, found.config.used_head_dim_v) == head_dims
        dout = torch.randn(*x.q.shape[:3], head_dims[1], device="cuda").bfloat16()
        out = flash_attn_func(*leaves, causal=causal)
        assert find_gradient_errors(x, torch.autograd.grad(out, leaves, dout), dout, causal) == []


@pytest.mark.parametrize("head_dim", [32, 72, 80, 104])
def test_packed_sequences(head_dim: int) -> None:
    """Calls that are found again at the third."""
    config = select_backward_config("bfloat16", head_dim, head_dim, False, layout="varlen")
    assert config.used_head_dim == head_dim
    rooms = (300, 1, 0, 129, 520), (310, 7, 40, 129, 333)
    case = Case(*rooms, behind=5, heads=(4, 2), head_dims=(head_dim, head_dim))
    starts_q, starts_k = (offsets(x).cuda() for x in rooms)
    leaves = [x.cuda().requires_grad_() for x in case.tensors(torch.bfloat16)]
    dout, no_dlse = torch.randn_like(leaves[0]), torch.zeros(4, leaves[0].shape[0], device="cuda")
    for causal in (False, True):
        for _ in range(3):
            out = flash_attn_varlen_func(*leaves, starts_q, starts_k, 520, 333, causal=causal)
            ours = torch.autograd.grad(out, leaves, dout)
            assert find_packed_errors(case, leaves, ours, (dout, no_dlse), causal) == []
