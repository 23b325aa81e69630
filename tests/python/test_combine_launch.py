"""What reaches the kernel that merges partial results, seen by a stand-in that does its work in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import CombineConfig
from hopper_attention.backends import Target
from hopper_attention.launch import combine as launch
from hopper_attention.launch.combine import combine, why_not_combine
from hopper_attention.reference.combine import combine_parts
from tests.python.fake_gpu import H200, pretend, serve_by

BF16 = torch.bfloat16


class StandIn:
    """The kernel, by the reference. It wants what the kernel wants of its tensors."""

    def __init__(self) -> None:
        self.configs: list[CombineConfig] = []
        self.arguments: tuple[Tensor, ...] = ()

    def get(self, config: CombineConfig) -> Callable[..., None]:
        self.configs.append(config)
        return self.launch

    def launch(self, *arguments: Tensor) -> None:
        self.arguments = parts, part_lse, out, lse = arguments
        for x in (parts, out):
            assert x.shape[-1] % 4 == 0 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            assert all(stride % 4 == 0 for stride in x.stride()[:-1])
        merged = combine_parts(parts, part_lse, out.dtype)
        out.copy_(merged[0])
        lse.copy_(merged[1])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from serve_by(StandIn(), monkeypatch, launch)


def parts(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    lse = torch.randn(shape[:-1], generator=generator)
    lse[0] = -math.inf
    return torch.randn(shape, generator=generator), lse


def check(found: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    out, lse = combine_parts(*given, dtype)
    assert torch.equal(found[0], out) and found[0].dtype == dtype and found[0].is_contiguous()
    assert torch.equal(found[1], lse) and found[1].is_contiguous()


@pytest.mark.parametrize("columns", [64, 59, 3])
def test_any_number_of_columns(columns: int, kernel: StandIn) -> None:
    given = parts(3, 2, 5, 4, columns)
    check(combine(*given, BF16), given, BF16)
    assert kernel.configs == [CombineConfig("sm_90a", "bfloat16", few_splits=True)]
    out = torch.full((2, 5, 4, columns), math.nan)
    found, lse = combine(*given, torch.float32, out)
    assert found is out
    check((out, lse), given, torch.float32)


def test_parts_of_any_strides(kernel: StandIn) -> None:
    wide, lse = parts(6, 2, 4, 5, 67)
    given = wide.transpose(2, 3)[::2, ..., 1:65], lse.transpose(2, 3)[::2]
    check(combine(*given, torch.float16), given, torch.float16)
    aligned = wide[..., :64].contiguous().transpose(2, 3), lse.transpose(2, 3)
    check(combine(*aligned, torch.float16), aligned, torch.float16)
    assert kernel.arguments[0].data_ptr() == aligned[0].data_ptr(), "not copied"


def test_packed_rows(kernel: StandIn) -> None:
    given = parts(9, 11, 4, 32)
    check(combine(*given, BF16), given, BF16)
    assert not kernel.configs[-1].few_splits and kernel.arguments[0].shape == (9, 1, 11, 4, 32)
    out = torch.full((11, 4, 32), math.nan, dtype=BF16)
    found, lse = combine(*given, BF16, out)
    assert found is out
    check((out, lse), given, BF16)


def test_out_that_has_no_vectors(kernel: StandIn) -> None:
    given = parts(2, 1, 3, 2, 32)
    whole = torch.full((1, 3, 2, 33), math.nan, dtype=BF16)
    found, _ = combine(*given, BF16, whole[..., 1:])
    assert found.data_ptr() == whole.data_ptr() + 2
    assert torch.equal(whole[..., 1:], combine_parts(*given, BF16)[0]) and whole[..., 0].isnan().all()


@pytest.mark.parametrize("shape", [(3, 0, 5, 4, 64), (3, 2, 0, 4, 64), (3, 2, 5, 4, 0)])
def test_nothing_to_merge(shape: tuple[int, ...], kernel: StandIn) -> None:
    out, lse = combine(torch.zeros(shape), torch.zeros(shape[:-1]), BF16)
    assert out.shape == shape[1:] and lse.shape == shape[1:-1] and kernel.arguments == ()
    assert torch.equal(lse, torch.full(lse.shape, math.log(3.0)))


def test_another_current_gpu(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = pretend(monkeypatch, launch)
    monkeypatch.setattr(launch, "index_of", lambda device: 2)
    given = parts(2, 1, 3, 2, 32)
    check(combine(*given, BF16), given, BF16)
    assert entered == [2]


def test_what_the_kernel_does_not_do() -> None:
    shape = (3, 2, 5, 4, 64)
    assert why_not_combine(shape, BF16, H200) == ""
    assert "is not an NVIDIA GPU" in why_not_combine(shape, BF16, Target("cpu"))
    assert "num_splits is 257, allowed: 1 to 256" in why_not_combine((257, *shape[1:]), BF16, H200)
    assert "dtype is 'int8', allowed: 'float16'" in why_not_combine(shape, torch.int8, H200)
    assert "there are 1073741824 rows, allowed" in why_not_combine((3, 2**15, 2**15, 1, 64), BF16, H200)


def test_what_it_does_not_do_is_refused(kernel: StandIn) -> None:
    given: tuple[Any, ...] = torch.zeros(257, 1, 1, 1, 8), torch.zeros(257, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="num_splits is 257, allowed: 1 to 256; merge in PyTorch"):
        combine(*given, BF16)
