"""The kernels that add a partial result to a sum, and gradients to others, on the GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopper_attention.launch.addition import add_parts
from hopper_attention.launch.merge import merge
from tests.cute_kernels.test_merge import draw, exact

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """No others than those that are met."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 64, 128, 136, 256])
def test_a_part_is_added(columns: int, dtype: torch.dtype, device: str) -> None:
    given = draw((2, 131, 3), columns, dtype)
    wanted, merged = exact(*given)
    total, lse, part, part_lse = (x.to(device) for x in given)
    assert merge(total, lse, part, part_lse)
    assert bool(((total.cpu() - wanted).abs() <= 4e-6 * (1 + wanted.abs())).all())
    assert torch.equal(lse.cpu() == -torch.inf, merged == -torch.inf)
    error = (lse.cpu().double() - merged).nan_to_num(0.0).abs()
    assert bool((error <= 4e-6 * merged.nan_to_num(0.0, 0.0, 0.0).abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_of_16_bits_is_rounded_once(dtype: torch.dtype, device: str) -> None:
    given = draw((2, 131, 3), 136, dtype)
    total, lse, part, part_lse = (given[0].to(dtype), *given[1:])
    wanted, _ = exact(total, lse, part, part_lse)
    total, lse, part, part_lse = (x.to(device) for x in (total, lse, part, part_lse))
    assert merge(total, lse, part, part_lse) and total.dtype == dtype
    bound = (0.5 * torch.finfo(dtype).eps + 4e-6) * wanted.abs() + 1e-6
    assert bool(((total.cpu() - wanted).abs() <= bound).all())


def test_rows_of_a_longer_sum_are_added_to_and_no_others(device: str) -> None:
    total, lse, part, part_lse = (x.to(device) for x in draw((1, 64, 4), 128, torch.bfloat16))
    before: tuple[Tensor, Tensor] = (total.clone(), lse.clone())
    assert merge(total[:, 32:], lse[:, :, 32:], part[:, :32], part_lse[:, :, :32])
    assert torch.equal(total[:, :32], before[0][:, :32]) and torch.equal(lse[..., :32], before[1][..., :32])
    assert not torch.equal(total[:, 32:], before[0][:, 32:])


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_added_and_rounded_once(dtype: torch.dtype, parts: int, device: str) -> None:
    given = [torch.randn(2, 700, 3, 72, device=device).to(dtype) for _ in range(1 + parts)]
    total = given[0].clone()
    add_parts(total[:, 100:], [x[:, 100:] for x in given[1:]])
    wanted = sum(x.double() for x in given)
    wanted[:, :100] = given[0][:, :100].double()
    bound = (0.5 * torch.finfo(dtype).eps + 4e-6) * wanted.abs() + 1e-6
    assert bool(((total.double() - wanted).abs() <= bound).all())
