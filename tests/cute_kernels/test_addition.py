"""Adding tensors of 16 bits to one: the kernel run from PTX on NumPy, and what reaches it, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.addition.config import THREADS, VECTOR, AdditionConfig, validate_addition_config
from hopper_attention import compile_cache
from hopper_attention.launch import addition
from hopper_attention.launch.addition import add_parts
from tests.compile_pool import assert_small
from tests.hopper.on_numpy import Arguments, program_of
from tests.python.fake_gpu import forget_launchers, pretend


def draw(parts: int, dtype: torch.dtype = torch.bfloat16, rows: int = 5) -> list[Tensor]:
    """A total and parts (2, rows, 3, 24)."""
    g = torch.Generator().manual_seed(parts)
    return [torch.randn(2, rows, 3, 24, generator=g).to(dtype) for _ in range(1 + parts)]


def on_numpy(config: AdditionConfig, *tensors: Tensor) -> None:
    arguments = Arguments()
    for x in tensors:
        arguments.tensor(x, tuple(x.shape), x.stride()[:-1])
    vectors = tensors[0].numel() // VECTOR
    arguments.launch(program_of(config), (-(-vectors // THREADS), 1, 1))


def check(total: Tensor, given: list[Tensor]) -> None:
    """Within half a unit in the last place of float64, and what float32 adds to it."""
    wanted = sum(x.double() for x in given)
    bound = (0.5 * torch.finfo(total.dtype).eps + 4e-6) * wanted.abs() + 1e-6
    assert bool(((total.double() - wanted).abs() <= bound).all())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[AdditionConfig]:
    """A GPU whose kernel runs on NumPy, and the config of each launch."""
    found: list[AdditionConfig] = []

    def get(config: AdditionConfig):
        def run(*tensors: Tensor) -> None:
            found.append(config)
            on_numpy(config, *tensors)

        return run

    pretend(monkeypatch, addition)
    monkeypatch.setattr(compile_cache, "get_serving", get)
    yield found
    forget_launchers()


@pytest.mark.parametrize(("parts", "dtype"), [(2, torch.float16), (3, torch.bfloat16)])
def test_parts_are_added_and_rounded_once(
    parts: int, dtype: torch.dtype, launched: list[AdditionConfig]
) -> None:
    given = draw(parts, dtype)
    total, *rest = (x.clone() for x in given)
    add_parts(total[:, 1:4], [x[:, 1:4] for x in rest])
    check(total[:, 1:4], [x[:, 1:4] for x in given])
    assert torch.equal(total[:, 0], given[0][:, 0]) and torch.equal(total[:, 4], given[0][:, 4])
    assert launched == [AdditionConfig("sm_90a", str(dtype).removeprefix("torch."), parts)]


@pytest.mark.parametrize("case", ["one", "four", "heads apart", "no rows"])
def test_what_the_kernel_is_not_for_is_added_by_torch(case: str, launched: list[AdditionConfig]) -> None:
    given = draw({"one": 1, "four": 4}.get(case, 2), rows=0 if case == "no rows" else 5)
    if case == "heads apart":
        given = [x[:, :, ::2] for x in given]
    before = [x.clone() for x in given]
    add_parts(given[0], given[1:])
    check(given[0], before)
    assert not launched


COMPILED = [AdditionConfig("sm_80", "float16", 2), AdditionConfig("sm_90a", "bfloat16", 3)]


def test_kernels_compile_without_spills() -> None:
    assert_small(COMPILED)


def test_configs() -> None:
    assert [config.name for config in COMPILED] == ["addition_sm_80_fp16_2", "addition_sm_90a_bf16_3"]
    with pytest.raises(ValueError, match="dtype is 'float32', allowed: 'float16', 'bfloat16'"):
        validate_addition_config(replace(COMPILED[0], dtype="float32"))
    with pytest.raises(ValueError, match="parts is 4, allowed: 2, 3"):
        validate_addition_config(replace(COMPILED[0], parts=4))
