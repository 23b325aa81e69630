"""Rotary embedding by its public function on a CPU: values, transforms, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hopper_attention.rotary import apply_rotary
from tests.cute_kernels.test_rotation import check, draw


def exact(half: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of float64, with tables for all sequences."""
    q, k, cos, sin = (x.double() for x in draw(half=half))
    return q, k, cos[:1], sin[:1]


def test_one_table_serves_all_sequences() -> None:
    q, k, cos, sin = exact()
    for found, x in zip(apply_rotary(q, k, cos, sin), (q, k), strict=True):
        check(found, x, cos, sin)


def test_gradients_of_any_order() -> None:
    q, k, cos, sin = exact()
    learned = [x[:, :2, :1, :10].clone().requires_grad_() for x in (q, k)]
    tables = cos[:, :2], sin[:, :2]
    assert gradcheck(lambda q, k: apply_rotary(q, k, *tables), learned)
    assert gradgradcheck(lambda q, k: apply_rotary(q, k, *tables), learned)


def test_samples_and_compiled_calls() -> None:
    q, k, cos, sin = exact()
    wanted, _ = apply_rotary(q, k, cos, sin)
    mapped, _ = torch.vmap(partial(apply_rotary, cos=cos, sin=sin))(q[:, None], k[:, None])
    assert torch.equal(mapped[:, 0], wanted)
    compiled = torch.compile(apply_rotary, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, cos, sin)[0], wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": torch.zeros(5, 3, 48)},
            r"q has shape \(5, 3, 48\), allowed: \(batch, seqlen, heads, head_dim\)",
        ),
        ({"k": torch.zeros(2, 5, 2, 40)}, r"k has shape \(2, 5, 2, 40\), allowed: \(2, 5, 'any heads', 48\)"),
        ({"k": torch.zeros(2, 5, 2, 48)}, "k has dtype torch.float32, allowed: torch.bfloat16"),
        (
            {"cos": torch.zeros(2, 5, 25)},
            r"cos has shape \(2, 5, 25\), allowed: \(1 or 2, 5, 1 to 24 columns\)",
        ),
        ({"sin": torch.zeros(3, 5, 16)}, r"sin has shape \(3, 5, 16\), allowed: \(1 or 2, 5"),
        ({"sin": torch.zeros(2, 5, 16).half()}, "sin has dtype torch.float16, allowed: torch.float32"),
        (
            {"q": torch.zeros(2, 5, 3, 48, dtype=torch.int32)},
            "q has dtype torch.int32, allowed: torch.float16",
        ),
        (
            {"sin": torch.zeros(2, 5, 16, device="meta")},
            "cos and sin are on cpu, cpu and meta, allowed: .* cpu",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    arguments = dict(zip(("q", "k", "cos", "sin"), draw(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        apply_rotary(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "cos", "sin"])
def test_what_is_no_tensor_is_named(name: str) -> None:
    arguments: dict[str, Any] = dict(zip(("q", "k", "cos", "sin"), draw(), strict=True)) | {name: None}
    with pytest.raises(TypeError, match=f"{name} is a NoneType, allowed: a torch.Tensor"):
        apply_rotary(**arguments)


def test_tables_have_no_gradient() -> None:
    q, k, cos, sin = draw()
    with pytest.raises(NotImplementedError, match="cos or sin needs a gradient"):
        apply_rotary(q, k, cos.requires_grad_(), sin)
