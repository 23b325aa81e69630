"""The kernel that transposes V of e4m3: run from PTX on NumPy it gives the bits of its twin in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import VARLEN
from hopper.transpose.config import (
    KEYS,
    THREADS,
    TransposeConfig,
    TransposeTiling,
    select_transpose_config,
    shipped_transpose_configs,
)
from hopper_attention.packed_quantization import transpose_packed
from hopper_attention.quantized import padded_keys, transpose_for_kernel
from tests.compile_pool import assert_small
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import Arguments, program_of
from tests.hopper.test_fp8_packed import lengths_of
from tests.hopper.test_quantize_compile import wavefronts

POISON = 0xA5


def draw(batch: int, keys: int, heads: int, columns: int) -> Tensor:
    """e4m3 of any bits, NaN among them, with other elements between the heads."""
    generator = torch.Generator().manual_seed(keys)
    shape = batch, keys, 2 * heads, columns
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return bits.view(torch.float8_e4m3fn)[:, :, ::2]


def transpose_on_numpy(v: Tensor) -> Tensor:
    """The bytes that the kernel leaves, with more keys behind those that it should write."""
    config = select_transpose_config(v.shape[3])
    batch, keys, heads, columns = v.shape
    out = torch.full((batch, heads, columns, padded_keys(keys) + 32), POISON, dtype=torch.uint8)
    arguments = Arguments()
    arguments.tensor(v.view(torch.uint8), tuple(v.shape), v.stride()[:-1])
    arguments.tensor(out, tuple(out.shape), out.stride()[:-1])
    tiles = batch * heads * -(-keys // KEYS) * (columns // config.columns)
    arguments.launch(program_of(config), (tiles, 1, 1))
    return out


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "columns"),
    [(1, 200, 2, 128), (2, 33, 3, 64), (1, 128, 1, 256), (1, 1, 1, 96), (1, 150, 1, 80)],
)
def test_kernel_has_the_bits_of_its_twin(batch: int, keys: int, heads: int, columns: int) -> None:
    v = draw(batch, keys, heads, columns)
    found, twin = transpose_on_numpy(v), transpose_for_kernel(v).view(torch.uint8)
    assert torch.equal(found[..., :-32], twin)
    assert bool((found[..., -32:] == POISON).all())


PACKINGS = {
    "every length": Packing.of([(1, 200), (1, 40), (1, 0), (1, 131), (1, 1), (1, 64)], (3, 0)),
    "used": Packing.of([(1, 200), (1, 40), (1, 99)], seqused_q=(1, 1, 1), seqused_k=(170, 0, 99)),
    "rows of no sequence": Packing.of([(1, 33), (1, 300)], (0, 70)),
    "one": Packing.of([(1, 5)]),
}


@pytest.mark.parametrize(("heads", "columns"), [(2, 128), (1, 64), (3, 32), (1, 80)])
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_kernel_has_the_bits_of_its_twin(name: str, heads: int, columns: int) -> None:
    lengths = lengths_of(PACKINGS[name])
    v = draw(1, PACKINGS[name].cu_seqlens_k[-1] + 7, heads, columns)[0]
    twin = transpose_packed(v, lengths).view(torch.uint8)
    out = torch.full((1, *twin.shape[:2], twin.shape[2] + 32), POISON, dtype=torch.uint8)
    found = out[..., :-32]
    config, arguments = select_transpose_config(columns, VARLEN), Arguments()
    arguments.tensor(v[None].view(torch.uint8), (1, *v.shape), v[None].stride()[:-1])
    arguments.tensor(found, tuple(found.shape), found.stride()[:-1])
    used = torch.empty(0, dtype=torch.int32) if lengths.seqused_k is None else lengths.seqused_k
    for numbers in (lengths.cu_seqlens_k, used):
        arguments.tensor(numbers, tuple(numbers.shape), ())
    tiles = heads * -(-twin.shape[2] // KEYS) * (columns // config.columns)
    arguments.launch(program_of(config), (tiles, 1, 1))
    assert torch.equal(found[0], twin)
    assert bool((out[..., -32:] == POISON).all())


def test_kernels_compile_without_spills() -> None:
    assert_small(COMPILED)


COMPILED = shipped_transpose_configs()


def test_configs() -> None:
    widths = {16: 16, 48: 16, 64: 64, 96: 32, 128: 128, 192: 64, 256: 128}
    assert {d: select_transpose_config(d).columns for d in widths} == widths
    assert TransposeConfig(64).name == "hopper_transpose_k128c64"
    assert select_transpose_config(192, VARLEN).name == "hopper_transpose_k128c64_varlen"
    with pytest.raises(
        ValueError, match="columns is 8, allowed: 128, 64, 32, 16; head_dim_v must be a multiple"
    ):
        select_transpose_config(72)
    with pytest.raises(ValueError, match="layout is 'pages', allowed: 'dense', 'varlen'"):
        select_transpose_config(64, "pages")


@pytest.mark.parametrize(("columns", "rows"), [(16, 32), (64, 160), (80, 96), (128, 192), (256, 128)])
def test_the_tiling_has_a_place_for_every_byte(columns: int, rows: int) -> None:
    tiling = TransposeTiling(columns, rows)
    offsets = [
        tiling.offset(row // 16, row % 16, column) + i
        for row in range(rows)
        for column in range(0, columns, 4)
        for i in range(4)
    ]
    assert len(set(offsets)) == columns * rows and max(offsets) < tiling.size
    patches = {tiling.store(index) for index in range(tiling.stores)}
    assert patches == {(run, column) for run in range(rows // 16) for column in range(0, columns, 4)}


@pytest.mark.parametrize("config", [x for x in COMPILED if x.columns >= 64], ids=lambda config: config.name)
def test_reads_by_columns_have_few_bank_conflicts(config: TransposeConfig) -> None:
    tiling = config.tiling
    for first in range(0, THREADS, 32):
        for key in range(16):
            patches = [tiling.store(index) for index in range(first, first + 32)]
            assert wavefronts([tiling.offset(run, key, column) for run, column in patches], 4) <= 2
