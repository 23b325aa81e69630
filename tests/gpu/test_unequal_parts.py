"""Backward kernels that divide query heads into parts of which some have a head more, on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.backward.step import steps_of
from hopper.backward.config import NATIVE_HEAD_DIMS, BackwardConfig, select_backward_config
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import flash_attn_func, flash_attn_varlen_func
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.launch import backward
from hopper_attention.launch.packed_backward import make_packed_backward_launcher
from tests.gpu.conftest import compile_together
from tests.gpu.gradients import find_gradient_errors, find_packed_errors, poison_work_memory
from tests.python.varlen_cases import Case

pytestmark = pytest.mark.gpu

HEADS = 7, 1
PARTS = range(2, HEADS[0] + 1)


def dividing(head_dim: int, causal: bool, layout: str) -> BackwardConfig:
    config = select_backward_config("bfloat16", head_dim, head_dim, causal, layout=layout)
    return replace(config, divides_heads=True)


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """All of them side by side, and what comes in front."""
    dense = [dividing(size, causal, "dense") for size in NATIVE_HEAD_DIMS for causal in (False, True)]
    packed = [dividing(size, causal, "varlen") for size in NATIVE_HEAD_DIMS for causal in (False, True)]
    configs = *dense, *packed
    compile_together((*shipped_forward_configs(), *configs, *steps_of(configs)))


@pytest.fixture(autouse=True)
def poisoned_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work memory holds NaN before it is given to a call."""
    poison_work_memory(monkeypatch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", NATIVE_HEAD_DIMS)
def test_dense(draw, head_dim: int, causal: bool) -> None:
    """Three batches, so that parts are counted over several."""
    x = draw(torch.bfloat16, 3, (333, 410), HEADS, head_dim)
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
    dout, scale = torch.randn_like(x.q), head_dim**-0.5
    asked = BackwardProblem(x.q.shape, x.k.shape, x.v.shape, x.q.dtype, causal)
    for parts in PARTS:
        launcher = backward.find_divided(asked._replace(head_parts=parts).kind, x.q.device, parts)
        ours = launcher(dout, x.q, x.k, x.v, out, lse, scale, None)
        assert find_gradient_errors(x, ours, dout, causal) == [], parts


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", NATIVE_HEAD_DIMS)
def test_packed(head_dim: int, causal: bool) -> None:
    """Sequences without queries or keys, of one row and of several tiles, and rows in no sequence."""
    rooms = (300, 1, 0, 129, 520), (310, 7, 40, 0, 333)
    case = Case(*rooms, behind=9, heads=HEADS, head_dims=(head_dim, head_dim))
    starts_q, starts_k, longest_q, longest_k = (
        x.cuda() if isinstance(x, torch.Tensor) else x for x in case.lengths[:4]
    )
    leaves = [x.cuda() for x in case.tensors(torch.bfloat16)]
    lengths = starts_q, starts_k, longest_q, longest_k
    out, lse = flash_attn_varlen_func(*leaves, *lengths, causal=causal, return_attn_probs=True)
    dout, scale = torch.randn_like(out), head_dim**-0.5
    device, of_call = leaves[0].device, (starts_q, starts_k, None, None, longest_q, longest_k)
    for parts in PARTS:
        launcher = make_packed_backward_launcher(dividing(head_dim, causal, "varlen"), device, parts)
        ours = launcher(dout, None, *leaves, out, lse, *of_call, scale, -1, -1, 0)
        assert find_packed_errors(case, leaves, ours, (dout, torch.zeros_like(lse)), causal) == [], parts
