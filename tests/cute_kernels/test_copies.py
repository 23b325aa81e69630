"""Several copies in one launch: the kernel run from PTX on NumPy, and what reaches it, against PyTorch's copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.copies.config import TILE, VECTOR, CopiesConfig, validate_copies_config
from hopper_attention import compile_cache
from hopper_attention.launch import copies
from hopper_attention.launch.copies import copy_all, copy_known
from tests.compile_pool import usage_of_each
from tests.hopper.on_numpy import Arguments, program_of
from tests.python.fake_gpu import forget_launchers, pretend


def on_numpy(config: CopiesConfig, *tensors_and_ctas: Any) -> None:
    *tensors, most_ctas = tensors_and_ctas
    arguments = Arguments()
    for x in tensors:
        arguments.tensor(x, tuple(x.shape), x.stride()[:-1])
    most = max(x.numel() for x in tensors) // VECTOR
    arguments.launch(program_of(config), (min(-(-most // TILE), most_ctas), config.copies, 1))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[CopiesConfig]:
    """A GPU whose kernel runs on NumPy, and the config of each launch."""
    found: list[CopiesConfig] = []

    def get(config: CopiesConfig):
        def run(*arguments: Any) -> None:
            found.append(config)
            on_numpy(config, *arguments)

        return run

    pretend(monkeypatch, copies)
    monkeypatch.setattr(compile_cache, "get_serving", get)
    yield found
    forget_launchers()


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-500, 500, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_some_heads_of_all_rows_go_where_they_belong(
    dtype: torch.dtype, launched: list[CopiesConfig]
) -> None:
    # One of more than a tile and one of less; every other chunk of the targets, and columns out of the middle.
    wholes = [draw((2, 3, 40, 7, 64), dtype), draw((1, 2, 5, 3, 24), dtype)]
    sources = [wholes[0][:, ::2, :, 2], wholes[1][:, :, :, 1]]
    into = [torch.zeros(2, 5, 40, 96, dtype=dtype), torch.zeros(1, 2, 5, 40, dtype=dtype)]
    targets = [into[0][:, 1:4:2, :, 16:80], into[1][:, :, :, 8:32]]
    wanted = [torch.zeros_like(x) for x in into]
    wanted[0][:, 1:4:2, :, 16:80] = sources[0]
    wanted[1][:, :, :, 8:32] = sources[1]
    copy_all(targets, sources)
    assert all(map(torch.equal, into, wanted))
    for x in into:
        x.zero_()
    # The same by one CTA a copy, which walks over the tiles.
    copy_known(targets, sources, True, 1)
    assert all(map(torch.equal, into, wanted))
    assert launched == 2 * [CopiesConfig("sm_90a", str(dtype).removeprefix("torch."), 2)]


@pytest.mark.parametrize("case", ["float32", "of two dtypes", "narrow", "no rows"])
def test_what_the_kernel_is_not_for_is_copied_by_torch(case: str, launched: list[CopiesConfig]) -> None:
    sources = [draw((1, 2, 3, 16), torch.float32 if case == "float32" else torch.float16) for _ in range(2)]
    if case == "of two dtypes":
        sources[1] = sources[1].bfloat16()
    if case == "narrow":
        sources[1] = sources[1][..., :4]
    if case == "no rows":
        sources = [x[:, :, :0] for x in sources]
    targets = [torch.zeros_like(x) for x in sources]
    copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources)) and not launched


COMPILED = [CopiesConfig("sm_80", "float16", 2), CopiesConfig("sm_90a", "bfloat16", 12)]


def test_kernels_compile_without_spills() -> None:
    for config, usage in usage_of_each(COMPILED).items():
        assert not usage.spills and usage.stack_bytes == 0, config.name
        assert usage.registers <= 64, config.name


def test_configs() -> None:
    assert [config.name for config in COMPILED] == ["copies_sm_80_fp16_2", "copies_sm_90a_bf16_12"]
    with pytest.raises(ValueError, match="dtype is 'float32', allowed: 'float16', 'bfloat16'"):
        validate_copies_config(replace(COMPILED[0], dtype="float32"))
    with pytest.raises(ValueError, match="copies is 33, allowed: 1 to 32"):
        validate_copies_config(replace(COMPILED[0], copies=33))
