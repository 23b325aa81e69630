"""Copying a cache of e4m3 to 16 bits: the kernel run from PTX on NumPy, against PyTorch bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels.dequantize.config import DequantizeConfig, validate_dequantize_config
from hopper.compile import arch_of
from hopper_attention.reference.kvcache import CacheRows, dequantized, gather_rows, gather_scales
from tests.compile_pool import usage_of_each
from tests.cute_kernels.append_cases import Draw
from tests.cute_kernels.appending import NO_TABLE, add_words, int32, poisoned
from tests.hopper.on_numpy import Arguments, program_of

FP8 = torch.float8_e4m3fn
HEADS, WIDTHS = 3, (32, 48)


def caches(pages: int, page_size: int) -> tuple[Tensor, ...]:
    found = []
    for seed, columns in enumerate(WIDTHS):
        cache = poisoned(pages, page_size, HEADS, columns, dtype=FP8, gap=16)
        cache.copy_(Draw(seed).normal(*cache.shape, dtype=torch.float32).to(FP8))
        found.append(cache)
    return tuple(found)


def copied(
    dtype: torch.dtype,
    given: tuple[Tensor, ...],
    lengths: Tensor,
    room: int,
    scales: tuple[Tensor, ...] = (),
    **where: Tensor,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The copies, NaN before, by the kernel, and the descales."""
    batch, arguments = len(lengths), Arguments()
    descales = scales or tuple(Draw(seed).descale(batch, HEADS) for seed in (5, 6))
    copies = tuple(torch.full((batch, room, HEADS, x.shape[3]), torch.nan, dtype=dtype) for x in given)
    for x in given:
        arguments.tensor(x, tuple(x.shape), x.stride()[:3])
    add_words(arguments, lengths)
    for name in ("first", "batch_idx"):
        add_words(arguments, where.get(name))
    table = where.get("table", NO_TABLE)
    arguments.tensor(table, tuple(table.shape), table.stride()[:1])
    for x in descales:
        arguments.tensor(x, tuple(x.shape), x.stride())
    for x in copies:
        arguments.tensor(x, tuple(x.shape), x.stride()[:3])
    name = str(dtype).removeprefix("torch.")
    arguments.launch(program_of(DequantizeConfig("sm_90a", name, bool(scales))), (2, batch, 1))
    return copies, descales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pages(dtype: torch.dtype) -> None:
    """As many keys as there are, to the bit; what lies behind them is left as it was."""
    given, lengths, table = caches(12, 4), int32(11, 0, 20), Draw(2).table(3, 4, 12)
    copies, descales = copied(dtype, given, lengths, 16, table=table)
    rows = CacheRows(12, 4, 16, table, None)
    for x, copy, descale in zip(given, copies, descales, strict=True):
        exact = dequantized(gather_rows(x, rows, 3, 16, None), descale, dtype)
        for b, count in enumerate((11, 0, 16)):
            assert torch.equal(copy[b, :count], exact[b, :count])
            assert bool(copy[b, count:].isnan().all())


def test_scales_by_page_and_by_token() -> None:
    given, lengths, table = caches(12, 4), int32(11, 2), Draw(2).table(2, 4, 12)
    rows = CacheRows(12, 4, 16, table, None)
    draw = Draw(7)
    of_tokens = tuple(0.05 + torch.rand(12, 4, HEADS, generator=draw.generator) for _ in range(2))
    for scales in (of_tokens, tuple(x[:, :1].expand(-1, 4, -1) for x in of_tokens)):
        copies, _ = copied(torch.bfloat16, given, lengths, 16, scales, table=table)
        for x, copy, descale in zip(given, copies, scales, strict=True):
            of_rows = gather_scales(descale, rows, 2, 16, None)
            exact = dequantized(gather_rows(x, rows, 2, 16, None), of_rows, torch.bfloat16)
            assert torch.equal(copy[0, :11], exact[0, :11]) and torch.equal(copy[1, :2], exact[1, :2])


def test_a_choice_of_sequences_that_begin_behind_a_pad() -> None:
    given, lengths = caches(5, 9), int32(9, 4)
    where = {"first": int32(0, 5), "batch_idx": int32(3, 1)}
    copies, descales = copied(torch.bfloat16, given, lengths, 9, **where)
    for x, copy, descale in zip(given, copies, descales, strict=True):
        for b, (entry, first, count) in enumerate(((3, 0, 9), (1, 5, 4))):
            exact = dequantized(x[entry, first : first + count][None], descale[b][None], torch.bfloat16)
            assert torch.equal(copy[b, :count], exact[0])


def test_numbers_that_lead_out_of_the_cache_are_zeros() -> None:
    """The machine refuses what is read outside."""
    given, table = caches(4, 4), int32(7, -3, 2, 1).view(2, 2)
    copies, _ = copied(torch.bfloat16, given, int32(8, -5), 8, table=table)
    for copy in copies:
        # A page below 0 and one behind the last are none.
        assert not copy[0].any() and bool(copy[1].isnan().all())


COMPILED = [DequantizeConfig("sm_90a", "bfloat16"), DequantizeConfig("sm_89", "float16", row_scales=True)]


def test_kernels_compile_without_spills() -> None:
    for config, usage in usage_of_each(COMPILED).items():
        assert usage.local_bytes == 0 and usage.registers <= 80, config.name
    assert [arch_of(config) for config in COMPILED] == ["sm_90a", "sm_89"]
    assert [config.name for config in COMPILED] == [
        "dequantize_sm_90a_bf16",
        "dequantize_sm_89_fp16_rowscales",
    ]


def test_what_no_kernel_can_be_built_from() -> None:
    with pytest.raises(ValueError, match="dtype is 'float32', allowed: 'float16', 'bfloat16'"):
        validate_dequantize_config(DequantizeConfig("sm_90a", "float32"))
    with pytest.raises(NotImplementedError, match="arch is sm_80, which has no instructions for e4m3"):
        validate_dequantize_config(DequantizeConfig("sm_80", "bfloat16"))
