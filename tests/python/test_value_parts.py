"""V with more columns than a kernel takes: its parts, their results and gradients, and what explain says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import compile_cache, explain, flash_attn_func
from hopper_attention.launch import forward
from hopper_attention.launch.forward import PartsLaunch, find_launch, run_forward
from hopper_attention.reference import attention_naive
from hopper_attention.value_parts import part_widths
from tests.python.fake_gpu import forget_launchers, pretend

HALF_STEP = 2.0**-8
"""Half the distance between neighbouring bfloat16 numbers around 1."""


def qkv(head_dim: int, head_dim_v: int, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = (2, 21, 4, head_dim), (2, 30, 2, head_dim), (2, 30, 2, head_dim_v)
    drawn = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in drawn)


@pytest.mark.parametrize(
    ("head_dim_v", "widths"),
    [(8, (8,)), (256, (256,)), (264, (144, 120)), (320, (160, 160)), (504, (256, 248)), (512, (256, 256))],
)
def test_parts_are_few_and_of_like_width(head_dim_v: int, widths: tuple[int, ...]) -> None:
    assert part_widths(head_dim_v) == widths


def test_parts_of_every_width_fit_a_kernel_and_add_up() -> None:
    for head_dim_v in range(264, 513, 8):
        first, last = part_widths(head_dim_v)
        assert first + last == head_dim_v and 0 < last <= first <= 256 and first % 16 == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 512), (64, 264), (256, 512), (8, 504)])
def test_wide_values_match_the_oracle(head_dims: tuple[int, int], causal: bool) -> None:
    q, k, v = qkv(*head_dims)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    wanted, wanted_lse = attention_naive(q, k, v, causal=causal)
    assert out.shape == (2, 21, 4, head_dims[1]) and out.is_contiguous() and out.dtype == torch.bfloat16
    assert (out.double() - wanted).abs().max().item() <= 2 * HALF_STEP * v.abs().max().item()
    assert (lse.double() - wanted_lse).abs().max().item() <= 1e-5
    assert torch.equal(out, flash_attn_func(q, k, v, causal=causal))


@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_through_wide_values(with_lse: bool) -> None:
    tensors = qkv(64, 512, True)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(2, 21, 4, 512, generator=generator).bfloat16()
    dlse = with_lse * torch.randn(2, 4, 21, generator=generator)
    out, lse = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    torch.autograd.backward([out, lse], [dout, dlse])
    wanted, wanted_lse = attention_naive(*exact, causal=True)
    torch.autograd.backward([wanted, wanted_lse], [dout.double(), dlse.double()])
    for got, expected in zip(tensors, exact, strict=True):
        # P, dS, the gradient of a part and the sum of the parts are rounded: four half steps of the largest.
        error = (got.grad.double() - expected.grad).abs().max().item()
        assert got.grad.dtype == torch.bfloat16
        assert error <= 4 * HALF_STEP * expected.grad.abs().max().item()


def test_wide_e4m3_values_match_their_narrow_parts() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(64, 512))
    descale = torch.rand(2, 2) + 0.5
    out, lse = flash_attn_func(q, k, v, v_descale=descale, return_attn_probs=True)
    parts = [flash_attn_func(q, k, x, v_descale=descale, return_attn_probs=True) for x in v.split(256, 3)]
    assert torch.equal(out, torch.cat([x for x, _ in parts], 3))
    assert torch.equal(lse, parts[0][1]) and torch.equal(lse, parts[1][1])


def test_wide_values_compile_and_may_be_empty() -> None:
    tensors = qkv(64, 512, True)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), flash_attn_func(*tensors))
    q, k, v = tensors
    out, lse = flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert out.shape == (2, 21, 4, 512) and not out.any() and (lse == -math.inf).all()


class FakeKernel:
    """Fills the output with the number of columns that it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        # The kernel for wide values has a place for a second query before it.
        out = arguments[4] if arguments[3] is None else arguments[3]
        out.fill_(arguments[2].shape[3])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """A Hopper GPU by name, whose tensors are the CPU's and whose kernels are all this one."""
    fake = FakeKernel()
    pretend(monkeypatch, forward)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: fake)
    yield fake
    forget_launchers()


def test_a_kernel_gets_the_parts_where_they_lie(kernel: FakeKernel) -> None:
    q, k, v = qkv(72, 264)
    out, _ = run_forward(q, k, v, None, False, None, 0)
    parts = [call[2] for call in kernel.calls]
    assert [x.shape[3] for x in parts] == [144, 120] and all(x.stride() == v.stride() for x in parts)
    assert [x.data_ptr() - v.data_ptr() for x in parts] == [0, 2 * 144]
    assert (out[..., :144] == 144).all() and (out[..., 144:] == 120).all()
    arguments = (a for x in (q, k, v) for a in (x.shape, x.stride(), x.dtype, x.device))
    assert isinstance(find_launch(*arguments, False, None, 0), PartsLaunch)


def test_explain_says_so() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in qkv(128, 512))
    plan = explain(q, k, v, device_capability=(9, 0))
    note, gradients = plan.notes
    assert (
        note == "the 512 columns of v are attended to in parts of 256 and 256, and Q K^T is computed for each"
    )
    assert plan.backend == "hopper" and plan.config.head_dim_v == 256
    assert gradients.startswith("the backward pass runs on the Hopper kernel hopper_bwd_")
    assert "parts" not in str(explain(q, k, v[..., :256], device_capability=(9, 0)))
    assert note in explain(q, k, v).notes


def test_one_hopper_kernel_takes_all_columns_of_narrow_heads(kernel: FakeKernel) -> None:
    q, k, v = qkv(64, 264)
    run_forward(q, k, v, None, True, None, 0, window=(5, -1, 0))
    (call,) = kernel.calls
    assert call[2].shape == v.shape and call[3] is None and call[4].shape == (2, 21, 4, 264)
    assert call[7:10] == (0.125, 5, 1 << 29) and call[10:] == (None,) * 6 + (132,)


def test_explain_names_that_kernel() -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in qkv(64, 512))
    plan = explain(q, k, v, causal=True, device_capability=(9, 0))
    assert plan.config.name == "hopper_wide_bf16_d64v512_causal_m128n64s2_r232_40_c2"
    (gradients,) = plan.notes
    assert gradients.startswith("the backward pass runs on the Hopper kernel hopper_bwd_")
    for options in ({"backend": "ampere"}, {"device_capability": (8, 0)}):
        plan = explain(q, k, v, **({"device_capability": (9, 0)} | options))
        assert "in parts of 256 and 256" in plan.notes[0]
