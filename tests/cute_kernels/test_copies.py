"""Pieces of tensors, copied in one launch: the kernel run from PTX on NumPy, and what reaches it, against PyTorch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.copies.config import THREADS, THREADS_OF_FEW, VECTOR, CopiesConfig, validate_copies_config
from hopper_attention import compile_cache
from hopper_attention.launch import copies
from hopper_attention.launch.copies import Piece, behind_sources
from tests.compile_pool import usage_of_each
from tests.hopper.on_numpy import Arguments, program_of
from tests.python.fake_gpu import forget_launchers, pretend


def on_numpy(config: CopiesConfig, *given: Any) -> None:
    *rest, most_ctas = given
    tensors, places = rest[: config.sources + config.copies], rest[config.sources + config.copies :]
    arguments = Arguments()
    for x in tensors:
        arguments.tensor(x, tuple(x.shape), x.stride()[:-1])
    arguments.values += [struct.pack("<q", n) for n in places]
    most = max(x.numel() for x in tensors[config.sources :]) // VECTOR
    arguments.launch(program_of(config), (min(-(-most // config.tile), most_ctas), config.copies, 1))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopiesConfig]]:
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
@pytest.mark.parametrize(("most_ctas", "threads"), [(1 << 16, THREADS), (1, THREADS), (1, THREADS_OF_FEW)])
def test_some_heads_of_some_rows_go_where_they_belong(
    dtype: torch.dtype, most_ctas: int, threads: int, launched: list[CopiesConfig]
) -> None:
    # Of the first source a piece of more than a tile, with every other chunk of 40 rows, and one of less: of one row.
    # The second begins in the middle of its storage, has other strides, and heads of four columns.
    first, whole = draw((2, 240, 3, 64), dtype), draw((3, 5, 64), dtype)
    second = whole.as_strided((2, 5, 8, 4), (320, 64, 4, 1), 336)
    sources = first, second
    into = [torch.zeros(2, 5, 40, 160, dtype=dtype), torch.zeros(2, 1, 1, 64, dtype=dtype)]
    into += [torch.zeros(2, 1, 5, 24, dtype=dtype), torch.zeros(2, 1, 2, 32, dtype=dtype)]
    rows, columns = first.stride()[1], first.shape[3]
    pieces = [
        [
            Piece(into[0][:, 1:4:2, :, 16:144], 40 * rows + columns, 80 * rows),
            Piece(into[1], 200 * rows + 2 * columns, 40 * rows),
        ],
        [Piece(into[2][..., 8:16], 8, 0), Piece(into[3], 3 * second.stride(1), 0)],
    ]
    wanted = [torch.zeros_like(x) for x in into]
    wanted[0][:, 1:4:2, :, 16:144] = first.view(2, 6, 40, 192)[:, 1:4:2, :, 64:]
    wanted[1][:, 0, 0] = first[:, 200, 2]
    wanted[2][:, 0, :, 8:16] = second.flatten(2)[:, :, 8:16]
    wanted[3][:, 0] = second.flatten(2)[:, 3:]
    # torch's copies of the same pieces.
    for of_source, x in zip(pieces, sources, strict=True):
        assert copies.is_in_vectors(x, of_source)
        for piece in of_source:
            piece.target.copy_(piece.of(x))
    assert all(map(torch.equal, into, wanted))
    for x in into:
        x.zero_()
    launcher = copies.find(dtype, 2, 2, first.device, threads=threads)
    assert launcher is not None
    launcher(sources, behind_sources(pieces, most_ctas))
    assert all(map(torch.equal, into, wanted))
    name = str(dtype).removeprefix("torch.")
    assert launched == [CopiesConfig("sm_90a", name, 2, 2, threads=threads)]
    # And back, into sources of which all else stays as it is.
    back = [first.clone(), whole.clone().as_strided(second.shape, second.stride(), second.storage_offset())]
    for x, of_source in zip(back, pieces, strict=True):
        for piece in of_source:
            piece.of(x).zero_()
    assert not any(map(torch.equal, back, sources))
    launcher = copies.find(dtype, 2, 2, first.device, gathers=True, threads=threads)
    assert launcher is not None
    launcher(back, behind_sources(pieces, most_ctas))
    assert all(map(torch.equal, back, sources))
    assert launched[1:] == [CopiesConfig("sm_90a", name, 2, 2, gathers=True, threads=threads)]


def test_what_the_kernel_is_not_for() -> None:
    device = torch.device("cpu")
    assert copies.find(torch.float32, 1, 2, device) is None
    assert (
        copies.find(torch.float16, 4, 9, device) is None and copies.find(torch.float16, 0, 1, device) is None
    )
    x, into = draw((2, 6, 4, 8), torch.float16), torch.zeros(2, 2, 3, 16, dtype=torch.float16)
    assert copies.is_in_vectors(x, [Piece(into, 16, 96)])
    # A piece that begins or goes on between vectors, is not as wide, or goes to a narrow tensor; and no rows.
    assert not copies.is_in_vectors(x, [Piece(into, 16, 96), Piece(into, 4, 96)])
    assert not copies.is_in_vectors(x, [Piece(into, 16, 100)])
    assert not copies.is_in_vectors(x, [Piece(into[..., :12], 16, 96)])
    assert not copies.is_in_vectors(x, [Piece(torch.zeros(2, 2, 3, 20)[..., :16], 16, 96)])
    assert not copies.is_in_vectors(x[:, :0], [Piece(into[:, :, :0], 16, 96)])
    assert not copies.is_in_vectors(
        torch.zeros(2, 6, 33)[..., :32].unflatten(2, (4, 8)), [Piece(into, 16, 96)]
    )


COMPILED = [
    CopiesConfig("sm_80", "float16", 1, 2),
    CopiesConfig("sm_90a", "bfloat16", 3, 4),
    CopiesConfig("sm_90a", "bfloat16", 3, 4, gathers=True),
    CopiesConfig("sm_90a", "bfloat16", 5, 4),
    CopiesConfig("sm_90a", "bfloat16", 3, 4, threads=THREADS_OF_FEW),
    CopiesConfig("sm_90a", "bfloat16", 5, 4, gathers=True, threads=THREADS_OF_FEW),
]


def test_kernels_compile_without_spills() -> None:
    for config, usage in usage_of_each(COMPILED).items():
        assert not usage.spills and usage.stack_bytes == 0, config.name
        few = config.threads == THREADS_OF_FEW or config.copies <= 12
        assert usage.registers <= (64 if few else 80), config.name


def test_configs() -> None:
    assert [config.name for config in COMPILED] == [
        "copies_sm_80_fp16_1x2",
        "copies_sm_90a_bf16_3x4",
        "copies_sm_90a_bf16_3x4_gathers",
        "copies_sm_90a_bf16_5x4",
        "copies_sm_90a_bf16_3x4_t1024",
        "copies_sm_90a_bf16_5x4_gathers_t1024",
    ]
    with pytest.raises(ValueError, match="threads is 512, allowed: 256, 1024"):
        validate_copies_config(replace(COMPILED[0], threads=512))
    with pytest.raises(ValueError, match="dtype is 'float32', allowed: 'float16', 'bfloat16'"):
        validate_copies_config(replace(COMPILED[0], dtype="float32"))
    with pytest.raises(
        ValueError, match="sources is 1 and pieces 33, allowed: 1 or more, and 32 copies at most"
    ):
        validate_copies_config(replace(COMPILED[0], pieces=33))
