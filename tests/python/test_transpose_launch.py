"""What reaches the kernel that transposes V, seen by a stand-in that does its work in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import VARLEN
from hopper.transpose.config import TransposeConfig
from hopper_attention import compile_cache
from hopper_attention.launch import transpose as launch
from hopper_attention.launch.transpose import transpose_packed_values, transpose_values
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantization import transpose_packed
from hopper_attention.quantized import transpose_for_kernel
from tests.python.fake_gpu import forget_launchers, pretend


class StandIn:
    """The kernel, by its twin. It wants what the kernel wants of its tensors."""

    def __init__(self) -> None:
        self.configs: list[TransposeConfig] = []
        self.calls = 0

    def get(self, config: TransposeConfig) -> Callable[..., None]:
        self.configs.append(config)
        return self.launch_packed if config.layout == VARLEN else self.launch

    def launch(self, v: Tensor, transposed: Tensor) -> None:
        self.check(v, transposed)
        transposed.copy_(transpose_for_kernel(v))

    def launch_packed(self, v: Tensor, transposed: Tensor, cu_seqlens: Tensor, seqused: Tensor) -> None:
        self.check(v, transposed)
        assert cu_seqlens.dtype == seqused.dtype == torch.int32
        found = transpose_packed(v[0], lengths_of(cu_seqlens, seqused if seqused.numel() else None))
        transposed.copy_(found[None])

    def check(self, *tensors: Tensor) -> None:
        self.calls += 1
        for x in tensors:
            assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            assert all(stride % 16 == 0 for stride in x.stride()[:-1])


def lengths_of(cu_seqlens: Tensor, used: Tensor | None = None) -> Lengths:
    return Lengths(cu_seqlens, cu_seqlens, used, used, 200, 200)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    pretend(monkeypatch, launch)
    monkeypatch.setattr(compile_cache, "get_quantize", stand_in.get)
    monkeypatch.setattr(launch, "index_of", lambda device: 0)
    yield stand_in
    forget_launchers()


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_all_sizes_of_a_width_share_a_kernel(kernel: StandIn) -> None:
    for shape in ((1, 5, 2, 64), (2, 100, 1, 64)):
        v = draw(*shape)
        assert torch.equal(transpose_values(v).view(torch.uint8), transpose_for_kernel(v).view(torch.uint8))
    assert kernel.calls == 2 and kernel.configs == [TransposeConfig(64)]


def test_what_the_kernel_cannot_address_is_copied(kernel: StandIn) -> None:
    for v in (draw(1, 9, 32, 2).mT, draw(1, 9, 3, 40)[:, 1:, :, 8:]):
        assert torch.equal(transpose_values(v).view(torch.uint8), transpose_for_kernel(v).view(torch.uint8))
    assert kernel.calls == 2


def test_more_tiles_than_the_kernel_counts_are_left_to_pytorch(
    kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_TILES", 3)
    v = draw(2, 129, 1, 16)
    assert torch.equal(transpose_values(v).view(torch.uint8), transpose_for_kernel(v).view(torch.uint8))
    assert kernel.calls == 0


@pytest.mark.parametrize("used", [None, torch.tensor([40, 0, 99], dtype=torch.int32)], ids=["all", "used"])
def test_packed_sequences(kernel: StandIn, used: Tensor | None) -> None:
    lengths = lengths_of(torch.tensor([0, 40, 41, 150], dtype=torch.int32), used)
    for v in (draw(153, 2, 64), draw(153, 3, 96)[:, 1:, 32:]):
        found, twin = transpose_packed_values(v, lengths), transpose_packed(v, lengths)
        assert found.shape == twin.shape and torch.equal(found.view(torch.uint8), twin.view(torch.uint8))
    assert kernel.calls == 2 and kernel.configs == [TransposeConfig(64, VARLEN)]


def test_more_packed_tiles_than_the_kernel_counts_are_left_to_pytorch(
    kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_TILES", 1)
    v, lengths = draw(129, 1, 16), lengths_of(torch.tensor([0, 129], dtype=torch.int32))
    found = transpose_packed_values(v, lengths)
    assert torch.equal(found.view(torch.uint8), transpose_packed(v, lengths).view(torch.uint8))
    assert kernel.calls == 0
