"""Merging of partial results: the kernel run from PTX on NumPy, and its reference, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import (
    COLUMNS,
    END,
    FEW_SPLITS,
    LANES,
    ROWS,
    WARPS,
    CombineConfig,
    select_combine_config,
    validate_combine_config,
)
from cute_kernels.combine.few_kernel import CTAS_PER_SM as CTAS_OF_FEW
from cute_kernels.combine.kernel import CTAS_PER_SM
from hopper.compile import arch_of
from hopper_attention.reference.combine import combine_parts
from tests.compile_pool import usage_of_each
from tests.hopper.on_numpy import Arguments, program_of

INF = math.inf
REGISTERS = 2**16
"""Of a multiprocessor."""
FEW = 0
NAN_OF_END = torch.tensor([END], dtype=torch.int32).view(torch.float32)[0]
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
"""Of a result, relative to its largest: a step."""


def draw(splits: int, shape: tuple[int, int, int], columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Parts laid out as (splits, batch, heads, seqlen, columns), as FlashAttention-3 has them, some of them empty: then
    they hold NaN. The first row has none that is not."""
    generator = torch.Generator().manual_seed(seed)
    batch, seqlen, heads = shape
    parts = torch.randn(2 * splits, batch, heads, seqlen, columns, generator=generator).transpose(2, 3)[
        :splits
    ]
    lse = 3 * torch.randn(splits, batch, 2 * heads, seqlen, generator=generator).transpose(2, 3)[..., :heads]
    lse[torch.rand(lse.shape, generator=generator) < 0.25] = -INF
    lse[:, 0, 0, 0] = -INF
    parts[lse == -INF] = math.nan
    return parts, lse


def exact(parts: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, row by row over the parts that are not empty."""
    out = torch.zeros(parts.shape[1:], dtype=torch.float64)
    sums = torch.full(lse.shape[1:], -INF, dtype=torch.float64)
    for row in torch.cartesian_prod(*(torch.arange(size) for size in sums.shape)).tolist():
        logs = lse[(slice(None), *row)].double()
        used = logs > -INF
        if bool(used.any()):
            sums[tuple(row)] = logs[used].logsumexp(0)
            weights = torch.exp(logs[used] - sums[tuple(row)])
            out[tuple(row)] = (weights[:, None] * parts[(used, *row)].double()).sum(0)
    return out, sums


def combine_on_numpy(
    parts: Tensor, lse: Tensor, dtype: torch.dtype, ways: int, has_ends: bool = False
) -> tuple[Tensor, Tensor]:
    """out and lse as the kernel leaves them, NaN before; ``ways`` warps share a row, with FEW none has a row alone."""
    config = CombineConfig("sm_90a", str(dtype).removeprefix("torch."), ways == FEW, has_ends)
    shape, columns = lse.shape[1:], parts.shape[-1]
    out = torch.full((*shape, columns), math.nan, dtype=dtype)
    # With a gap behind each number.
    merged = torch.full((*shape, 2), math.nan)[..., 0]
    arguments = Arguments()
    arguments.tensor(parts, tuple(parts.shape), parts.stride()[:-1])
    arguments.tensor(lse, tuple(lse.shape), lse.stride())
    arguments.tensor(out, tuple(out.shape), out.stride()[:-1])
    arguments.tensor(merged, tuple(merged.shape), merged.stride())
    blocks = -(-columns // COLUMNS)
    if ways == FEW:
        warps = -(-shape.numel() // ROWS) * blocks
    else:
        warps = shape.numel() * blocks * ways
        arguments.add(WARPS // ways)
    arguments.launch(program_of(config), (-(-warps // WARPS), 1, 1))
    return out, merged


def check(found: tuple[Tensor, Tensor], parts: Tensor, lse: Tensor) -> None:
    """Twice the largest error of the same formula in plain PyTorch, float32, and a step of the result."""
    out, sums = exact(parts, lse)
    plain = combine_parts(parts, lse, torch.float32)[0].double()
    allowed = ROUNDING[found[0].dtype] * out.abs().amax(-1, keepdim=True) + 2 * (plain - out).abs().max()
    assert bool(((found[0].double() - out).abs() <= allowed).all())
    empty = sums == -INF
    assert bool(empty.any()) and bool((found[1][empty] == -INF).all()) and bool((found[0][empty] == 0).all())
    assert bool(((found[1].double() - sums)[~empty].abs() <= 2e-6 * sums[~empty].abs().clamp(min=1.0)).all())


CASES = [
    (1, (1, 3, 2), 64, torch.bfloat16, FEW),
    (3, (2, 2, 3), 96, torch.float16, FEW),
    (4, (3, 1, 7), 256, torch.float32, FEW),
    (5, (1, 7, 1), 128, torch.bfloat16, FEW),
    (8, (1, 1, 5), 512, torch.bfloat16, FEW),
    (8, (1, 1, 5), 512, torch.bfloat16, 1),
    (9, (1, 3, 3), 100, torch.float32, 4),
    (9, (1, 3, 3), 100, torch.float32, 1),
    (33, (1, 2, 2), 64, torch.float16, 1),
    (33, (1, 2, 2), 64, torch.float16, 4),
    (70, (2, 1, 3), 128, torch.float32, 4),
    (256, (1, 2, 1), 192, torch.float32, 4),
]


@pytest.mark.parametrize(("splits", "shape", "columns", "dtype", "ways"), CASES)
def test_kernel_merges_parts(
    splits: int, shape: tuple[int, int, int], columns: int, dtype: torch.dtype, ways: int
) -> None:
    parts, lse = draw(splits, shape, columns, seed=splits)
    check(combine_on_numpy(parts, lse, dtype, ways), parts, lse)
    check(combine_parts(parts, lse, dtype), parts, lse)


@pytest.mark.parametrize("ways", [1, 4])
@pytest.mark.parametrize("used", [1, 8, 9, 32, 33, 100])
def test_what_is_behind_the_last_part_with_keys_counts_nothing(used: int, ways: int) -> None:
    """It is NaN."""
    parts, lse = draw(120, (1, 2, 2), 64, seed=used)
    parts[used:], lse[used:] = math.nan, -INF
    lse[used - 1, 0, 1, 1], parts[used - 1, 0, 1, 1] = 2.0, 1.0
    check(combine_on_numpy(parts, lse, torch.bfloat16, ways), parts, lse)


@pytest.mark.parametrize(("splits", "ways"), [(3, FEW), (8, FEW), (20, 1), (32, 4), (100, 1), (100, 4)])
def test_what_is_behind_the_end_of_a_row_counts_nothing(splits: int, ways: int) -> None:
    """It is anything: numbers, NaN, ends of earlier calls."""
    parts, lse = draw(splits, (1, 3, 3), 64, seed=splits)
    lse[0, 0, 1:, :], parts[0, 0, 1:, :] = 0.5, 2.0
    stored = parts.clone(), lse.clone()
    number = torch.randint(1, splits + 1, (3, 3), generator=torch.Generator().manual_seed(splits))
    number[1, 1], number[2, 2] = 1, splits
    for query, head in torch.cartesian_prod(torch.arange(3), torch.arange(3)).tolist():
        end = int(number[query, head])
        lse[end:, 0, query, head], parts[end:, 0, query, head] = -INF, math.nan
        for i in range(end, splits):
            is_end = i == end or i % 5 == 4
            stored[1][i, 0, query, head] = NAN_OF_END if is_end else (7.0, math.nan, 1e30)[i % 3]
    check(combine_on_numpy(*stored, torch.bfloat16, ways, has_ends=True), parts, lse)


@pytest.mark.parametrize("ways", [FEW, 1])
def test_without_ends_their_bits_are_nan(ways: int) -> None:
    parts, lse = draw(4, (1, 2, 2), 64, seed=3)
    lse[1, 0, 1, 1] = NAN_OF_END
    out, _ = combine_on_numpy(parts, lse, torch.bfloat16, ways)
    assert bool(out[0, 1, 1].isnan().all()) and not bool(out[0, 0].isnan().any())


@pytest.mark.parametrize("ways", [FEW, 1])
def test_a_row_of_nan_is_nan_and_no_other(ways: int) -> None:
    parts, lse = draw(5, (1, 2, 2), 64, seed=1)
    lse[2, 0, 1, 0], parts[4, 0, 1, 1] = math.nan, math.nan
    lse[4, 0, 1, 1] = 1.0
    out, merged = combine_on_numpy(parts, lse, torch.bfloat16, ways)
    assert bool(out[0, 1].isnan().all()) and not bool(out[0, 0].isnan().any())
    assert bool(merged[0, 1, 0].isnan()) and not bool(merged[0, 1, 1].isnan())


@pytest.mark.parametrize("ways", [FEW, 1, 4])
def test_behind_a_part_of_nan_nothing_is_read(ways: int) -> None:
    """The machine refuses what lies behind the last part."""
    parts, lse = draw(3, (1, 2, 2), 64, seed=5)
    lse[1, 0, 1, 1] = math.nan
    out, _ = combine_on_numpy(parts.clone(), lse.clone(), torch.bfloat16, ways)
    assert bool(out[0, 1, 1].isnan().all()) and not bool(out[0, 0].isnan().any())


def test_large_log_sums_do_not_overflow() -> None:
    parts, lse = draw(4, (1, 2, 2), 64, seed=2)
    for ways in (FEW, 1):
        check(combine_on_numpy(parts, lse + 5000.0, torch.bfloat16, ways), parts, lse + 5000.0)
        check(combine_on_numpy(parts, lse - 5000.0, torch.bfloat16, ways), parts, lse - 5000.0)


COMPILED = [
    CombineConfig("sm_80", "float16", few_splits=True),
    CombineConfig("sm_80", "float32", few_splits=False),
    CombineConfig("sm_90a", "bfloat16", few_splits=True),
    CombineConfig("sm_90a", "bfloat16", few_splits=False),
    CombineConfig("sm_90a", "bfloat16", few_splits=True, has_ends=True),
    CombineConfig("sm_90a", "bfloat16", few_splits=False, has_ends=True),
    CombineConfig("sm_120", "float32", few_splits=True),
    CombineConfig("sm_120", "float32", few_splits=False),
]


def test_kernels_compile_without_spills() -> None:
    for config, usage in usage_of_each(COMPILED).items():
        of_sm = CTAS_OF_FEW if config.few_splits else CTAS_PER_SM
        assert usage.local_bytes == 0 and usage.registers * WARPS * LANES * of_sm <= REGISTERS, config.name


def test_configs() -> None:
    assert select_combine_config("bfloat16", FEW_SPLITS, "sm_90a") == CombineConfig(
        "sm_90a", "bfloat16", True
    )
    assert select_combine_config("float32", FEW_SPLITS + 1, "sm_80").name == "combine_sm_80_fp32"
    assert [arch_of(config) for config in COMPILED[::2]] == ["sm_80", "sm_90a", "sm_90a", "sm_120"]
    for splits in (0, 257):
        with pytest.raises(ValueError, match=f"num_splits is {splits}, allowed: 1 to 256"):
            select_combine_config("float32", splits, "sm_80")
    with pytest.raises(ValueError, match="dtype is 'int8', allowed: 'float16', 'bfloat16', 'float32'"):
        validate_combine_config(replace(COMPILED[0], dtype="int8"))
