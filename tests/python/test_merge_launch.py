"""What reaches the kernel that adds a partial result to a sum, seen by a stand-in that does its work in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.merge.config import MergeConfig
from hopper_attention.distributed.merge import Merged
from hopper_attention.launch import merge as launch
from hopper_attention.reference.tiles import Span
from tests.python.fake_gpu import serve_by


class StandIn:
    """The kernel. It wants of its tensors what the kernel wants."""

    def __init__(self) -> None:
        self.calls = 0
        self.in_float32 = True

    def get(self, config: MergeConfig) -> StandIn:
        assert replace(config, sums_in_float32=True) == MergeConfig("sm_90a", "bfloat16")
        self.in_float32 = config.sums_in_float32
        return self

    def __call__(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        self.calls += 1
        assert out.dtype == (torch.float32 if self.in_float32 else part.dtype)
        assert out.shape == part.shape and lse.shape == part_lse.shape == out.shape[:-1]
        for x in (out, part):
            assert x.stride(-1) == 1 and x.data_ptr() % (4 * x.element_size()) == 0
            assert all(n % 4 == 0 for n in (x.shape[-1], *x.stride()[:-1]))
        merged = Merged(out.clone(), lse.mT, out.dtype)
        merged.add(Span(0, out.shape[1]), part, part_lse.mT)
        out.copy_(merged.out)
        lse.copy_(merged.lse.mT)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from serve_by(StandIn(), monkeypatch, launch)


def parts(columns: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """A sum of 8 rows, its LSE, a part of 3 of them, and its own."""
    g = torch.Generator().manual_seed(0)
    total, part = (torch.randn(2, n, 3, columns, generator=g) for n in (8, 3))
    lse, part_lse = (torch.randn(2, 3, n, generator=g) for n in (8, 3))
    return total, lse, part.to(dtype), part_lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_sum_are_added_to_in_place(kernel: StandIn, dtype: torch.dtype) -> None:
    total, lse, part, part_lse = parts()
    total = total.to(dtype)
    wanted = Merged(total.clone(), lse, dtype)
    wanted.add(Span(2, 5), part, part_lse)
    assert launch.merge(total[:, 2:5], lse[:, :, 2:5], part, part_lse) and kernel.calls == 1
    assert torch.equal(total, wanted.out) and torch.equal(lse, wanted.lse)


@pytest.mark.parametrize(
    "case",
    ["odd columns", "float32", "float16", "no rows", "odd address"],
    ids=lambda case: case.replace(" ", "_"),
)
def test_what_the_kernel_cannot_address_is_left_alone(case: str, kernel: StandIn) -> None:
    total, lse, part, part_lse = parts(columns=62 if case == "odd columns" else 64)
    if case == "float32":
        part = part.float()
    if case == "float16":
        total = total.half()
    if case == "no rows":
        total, lse, part, part_lse = total[:, :0], lse[:, :, :0], part[:, :0], part_lse[:, :, :0]
    if case == "odd address":
        part = torch.cat([part, part], -1)[..., 1:65]
    before = total.clone()
    assert not launch.merge(total[:, : part.shape[1]], lse[:, :, : part.shape[1]], part, part_lse)
    assert kernel.calls == 0 and torch.equal(total, before)


def test_there_is_none_on_a_cpu() -> None:
    total, lse, part, part_lse = parts()
    assert not launch.merge(total[:, :3], lse[:, :, :3], part, part_lse)


def test_a_row_without_keys_gets_the_first_that_come() -> None:
    q = torch.zeros(1, 2, 1, 8, dtype=torch.float16)
    merged = Merged.empty(q, 8)
    merged.add(Span(1, 2), torch.ones(1, 1, 1, 8, dtype=torch.float16), torch.full((1, 1, 1), 3.0))
    assert merged.lse.tolist() == [[[-math.inf, 3.0]]]
    assert torch.equal(merged.out[0, :, 0, 0], torch.tensor([0.0, 1.0]))
    merged.add_sinks(torch.tensor([3.0]), without=[Span(0, 1)])
    assert merged.lse.tolist() == [[[-math.inf, pytest.approx(3.0 + math.log(2.0))]]]
    assert torch.equal(merged.out[0, :, 0, 0], torch.tensor([0.0, 0.5]))
