"""The kernel that makes codes of Q and K wider: run from PTX on NumPy, and what reaches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hopper.widen.config import VECTOR, VECTORS_OF_CTA, WidenConfig
from hopper_attention import compile_cache
from hopper_attention.launch import widen as launch
from hopper_attention.launch.widen import widened
from tests.compile_pool import assert_small
from tests.hopper.on_numpy import Arguments, program_of
from tests.python.fake_gpu import forget_launchers, pretend

CODES = 256


def codes(*shape: int, first: int = 0) -> Tensor:
    """e4m3 of all bits in turn, NaN among them."""
    numbers = torch.arange(first, first + torch.Size(shape).numel()) % CODES
    return numbers.to(torch.uint8).view(torch.float8_e4m3fn).view(shape)


def on_numpy(q: Tensor, k: Tensor, wide_q: Tensor, wide_k: Tensor) -> None:
    arguments = Arguments()
    for x in (q, wide_q, k, wide_k):
        assert x.is_contiguous() and x.shape[1] == VECTOR
        arguments.tensor(x, x.shape[:1], (VECTOR,))
    of_q, of_k = (-(-len(x) // VECTORS_OF_CTA) for x in (q, k))
    arguments.add(of_q)
    arguments.launch(program_of(WidenConfig()), (of_q + of_k, 1, 1))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WidenConfig]]:
    """A GPU whose kernel runs on NumPy, and the config of each launch."""
    found: list[WidenConfig] = []

    def get(config: WidenConfig):
        def run(*tensors: Tensor) -> None:
            found.append(config)
            on_numpy(*tensors)

        return run

    pretend(monkeypatch, launch)
    monkeypatch.setattr(compile_cache, "get_quantize", get)
    monkeypatch.setattr(launch, "index_of", lambda device: 0)
    yield found
    forget_launchers()


def check(q: Tensor, k: Tensor) -> None:
    for narrow, wide in zip((q, k), widened(q, k), strict=True):
        assert wide.dtype is torch.float16 and wide.is_contiguous() and wide.shape == narrow.shape
        assert torch.equal(wide.isnan(), narrow.float().isnan())
        assert torch.equal(wide.float().nan_to_num(0.0), narrow.float().nan_to_num(0.0))


def test_every_code_has_its_value(launches: list[WidenConfig]) -> None:
    """More of Q than a CTA has, and of K a part of one."""
    check(codes(1, 130, 2, 64), codes(1, 9, 1, 48, first=100))
    assert launches == [WidenConfig()]


def test_heads_apart_come_together(launches: list[WidenConfig]) -> None:
    check(codes(2, 5, 4, 16)[:, :, ::2], codes(3, 2, 32).transpose(0, 1))
    assert len(launches) == 1


def test_what_the_kernel_cannot_address_or_count_is_left_to_pytorch(
    launches: list[WidenConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = codes(1 + 2 * 16 * 16)[1:].view(1, 2, 16, 16)
    assert odd.data_ptr() % VECTOR
    check(odd, codes(1, 2, 1, 16))
    monkeypatch.setattr(launch, "MAX_VECTORS", 3)
    check(codes(1, 2, 1, 16), codes(1, 1, 1, 16))
    assert not launches


def test_the_kernel_compiles_without_spills() -> None:
    assert_small([WidenConfig()])
    assert WidenConfig().name == "hopper_widen_float16"
