"""Adding a partial result to a sum of such: the kernel run from PTX on NumPy, and PyTorch's way, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.merge.config import WARPS, MergeConfig, validate_merge_config
from hopper.compile import arch_of
from hopper_attention.distributed.merge import Merged
from hopper_attention.reference.tiles import Span
from tests.compile_pool import assert_small
from tests.hopper.on_numpy import Arguments, program_of

INF = math.inf


def draw(shape: tuple[int, int, int], columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A sum and its LSE, a part and its own, (batch, heads, seqlen) the LSEs; some rows without keys in one or both."""
    g = torch.Generator().manual_seed(columns)
    batch, seqlen, heads = shape
    total, part = (torch.randn(*shape, columns, generator=g) for _ in range(2))
    lses = [4 * torch.randn(batch, heads, seqlen, generator=g) for _ in range(2)]
    for x, lse, empty in ((total, lses[0], 0.0), (part, lses[1], 0.0)):
        lse[torch.rand(lse.shape, generator=g) < 0.25] = -INF
        lse[0, 0, 0] = -INF
        x[lse.mT == -INF] = empty
    return total, lses[0], part.to(dtype), lses[1]


def exact(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: out and the LSE."""
    both = torch.stack([lse, part_lse]).double()
    merged = both.logsumexp(0)
    shares = torch.exp(both - merged).nan_to_num(0.0).mT.unsqueeze(-1)
    return shares[0] * total.double() + shares[1] * part.double(), merged


def on_numpy(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """By the kernel, in place."""
    config = MergeConfig("sm_90a", str(part.dtype).removeprefix("torch."), total.dtype == torch.float32)
    arguments = Arguments()
    for x, logs in ((total, lse), (part, part_lse)):
        arguments.tensor(x, tuple(x.shape), x.stride()[:-1])
        arguments.tensor(logs.mT, tuple(logs.mT.shape), logs.mT.stride())
    arguments.launch(program_of(config), (-(-total[..., 0].numel() // WARPS), 1, 1))


@pytest.mark.parametrize(
    ("shape", "columns", "dtype"),
    [((1, 3, 2), 64, torch.bfloat16), ((2, 2, 3), 136, torch.float16), ((1, 5, 1), 256, torch.bfloat16)],
)
def test_a_part_is_added(shape: tuple[int, int, int], columns: int, dtype: torch.dtype) -> None:
    given = draw(shape, columns, dtype)
    wanted, merged = exact(*given)
    of_torch = Merged(given[0].clone(), given[1])
    of_torch.add(Span(0, shape[1]), given[2], given[3])
    on_numpy(*given)
    assert bool((merged == -INF).any())
    for out, lse in ((given[0], given[1]), (of_torch.out, of_torch.lse)):
        assert bool(((out - wanted).abs() <= 2e-6 * (1 + wanted.abs())).all())
        assert torch.equal(lse == -INF, merged == -INF)
        error = (lse.double() - merged).masked_fill(merged == -INF, 0.0).abs()
        assert bool((error <= 2e-6 * merged.masked_fill(merged == -INF, 0.0).abs().clamp(min=1.0)).all())


def test_a_row_that_the_part_has_no_keys_for_is_left_whatever_the_part_holds() -> None:
    total, lse, part, part_lse = draw((1, 4, 1), 64, torch.bfloat16)
    part_lse[:] = -INF
    part[:] = math.nan
    before = total.clone(), lse.clone()
    on_numpy(total, lse, part, part_lse)
    assert torch.equal(total, before[0]) and torch.equal(lse, before[1])


def test_a_row_of_nan_is_nan_and_no_other() -> None:
    given = draw((1, 2, 1), 64, torch.bfloat16)
    given[1][:], given[3][:] = 1.0, 2.0
    given[3][0, 0, 1] = math.nan
    on_numpy(*given)
    assert bool(given[0][0, 1].isnan().all()) and not bool(given[0][0, 0].isnan().any())
    assert bool(given[1][0, 0, 1].isnan()) and not bool(given[1][0, 0, 0].isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    total, lse, part, part_lse = draw((1, 3, 2), 72, dtype)
    total = total.to(dtype)
    wanted, _ = exact(total, lse, part, part_lse)
    of_torch = Merged(total.clone(), lse, dtype)
    of_torch.add(Span(0, 3), part, part_lse)
    on_numpy(total, lse, part, part_lse)
    for out in (total, of_torch.out):
        assert out.dtype == dtype
        # Half a unit in the last place, and what float32 adds to it.
        assert bool(
            ((out - wanted).abs() <= (0.5 * torch.finfo(dtype).eps + 4e-6) * wanted.abs() + 1e-7).all()
        )


COMPILED = [
    MergeConfig("sm_80", "float16"),
    MergeConfig("sm_90a", "bfloat16"),
    MergeConfig("sm_90a", "bfloat16", sums_in_float32=False),
]


def test_kernels_compile_without_spills() -> None:
    assert_small(COMPILED)


def test_configs() -> None:
    assert [arch_of(config) for config in COMPILED] == ["sm_80", "sm_90a", "sm_90a"]
    names = ["merge_sm_80_fp16", "merge_sm_90a_bf16", "merge_sm_90a_bf16_rounded"]
    assert [config.name for config in COMPILED] == names
    with pytest.raises(ValueError, match="dtype is 'float32', allowed: 'float16', 'bfloat16'"):
        validate_merge_config(replace(COMPILED[0], dtype="float32"))
