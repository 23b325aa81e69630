"""Appending to a cache: the kernel run from PTX on NumPy, and its reference, against loops in float64."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.append.config import (
    E4M3,
    HALVES,
    INTERLEAVED,
    AppendConfig,
    validate_append_config,
)
from hopper.compile import arch_of
from hopper_attention.reference.append import Rotation, append_to_cache, rotate_queries
from tests.compile_pool import usage_of_each
from tests.cute_kernels.appending import Case, append_on_numpy, check, int32, poisoned
from tests.ptx import ptx_of

BF16, FP16, FP8, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def rotation(
        self,
        positions: int,
        columns: int,
        is_interleaved: bool,
        dtype: torch.dtype,
        first: Tensor | None = None,
    ) -> Rotation:
        angles = 2 * math.pi * torch.rand(positions, columns // 2, generator=self.generator)
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), is_interleaved, first)

    def table(self, entries: int, width: int, pages: int) -> Tensor:
        """No page twice."""
        return torch.randperm(pages, generator=self.generator)[: entries * width].view(entries, width).int()

    def descale(self, batch: int, heads: int) -> Tensor:
        return 0.05 + torch.rand(batch, heads, generator=self.generator)


def check_kernel(case: Case) -> None:
    after = case.copied()
    check(after, case, *append_on_numpy(after))


def check_reference(case: Case) -> None:
    after = case.copied()
    lengths = append_to_cache(
        *(after.k, after.v, after.k_cache, after.v_cache, after.cache_seqlens),
        cu_seqlens_k_new=after.cu_seqlens_k_new,
        cache_batch_idx=after.cache_batch_idx,
        page_table=after.page_table,
        k_descale=after.k_descale,
        v_descale=after.v_descale,
        rotation=after.rotation,
    )
    rotated = None
    if case.rotation is not None:
        options = {"cu_seqlens_q": after.cu_seqlens_q, "per_query_position": after.per_query_position}
        rotated = rotate_queries(after.q, after.rotation, after.cache_seqlens, **options)
    check(after, case, lengths, rotated)


def contiguous() -> Case:
    """Three tokens of four sequences, in six entries of a cache with gaps; the second has room for two, the third for
    none, the last has a length below 0."""
    draw = Draw(0)
    return Case(
        draw.normal(4, 3, 2, 72),
        draw.normal(4, 3, 2, 40),
        poisoned(6, 11, 2, 72, dtype=BF16, gap=8),
        poisoned(6, 11, 2, 40, dtype=BF16),
        int32(0, 9, 40, -2),
        cache_batch_idx=int32(5, 0, 2, 3),
    )


def bytes_alone() -> Case:
    """e4m3 as it is, of many heads, without a batch index and strided tokens."""
    draw = Draw(1)
    k = draw.normal(2, 3, 22, 96, dtype=FP8)[:, 1:, ::2]
    v = draw.normal(2, 3, 11, 96, dtype=FP8)[:, 1:]
    return Case(k, v, *(poisoned(2, 7, 11, 96, dtype=FP8) for _ in "kv"), int32(5, 2))


def paged(page_size: int) -> Case:
    """Pages in any order. Entries of the table that are no pages, and one that no sequence should have."""
    draw = Draw(page_size)
    width = -(-14 // page_size)
    table = draw.table(5, width, 5 * width + 3)
    table[4, 0], table[3, -1] = -1, 5 * width + 3
    return Case(
        draw.normal(5, 4, 1, 32),
        draw.normal(5, 4, 1, 64),
        poisoned(5 * width + 3, page_size, 1, 32, dtype=BF16),
        poisoned(5 * width + 3, page_size, 1, 64, dtype=BF16, gap=64),
        int32(3, width * page_size - 2, 2, width * page_size - 1, 0),
        cache_batch_idx=int32(2, 3, 4, 0, 5),
        page_table=table,
    )


def packed() -> Case:
    """Sequences of 3, 0, 5 and 0 tokens and two rows of none; more than one load of offsets in a lane."""
    draw = Draw(4)
    lengths = [3, 0, 5, 0] + 36 * [0, 1]
    offsets = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    k, v = (draw.normal(int(offsets[-1]) + 2, 2, 16) for _ in "kv")
    seqlens = torch.randint(0, 6, (len(lengths),), generator=draw.generator).int()
    caches = (poisoned(len(lengths), 8, 2, 16, dtype=BF16) for _ in "kv")
    return Case(k, v, *caches, seqlens, cu_seqlens_k_new=offsets)


def halves() -> Case:
    """A part of the columns is rotated, positions are not lengths, and more heads than a CTA takes of Q."""
    draw = Draw(5)
    rotation = draw.rotation(30, 48, False, BF16, first=int32(17, 0, 28))
    return Case(
        draw.normal(3, 2, 3, 80),
        draw.normal(3, 2, 3, 80),
        poisoned(9, 4, 3, 80, dtype=BF16),
        poisoned(9, 4, 3, 80, dtype=BF16),
        int32(1, 6, 3),
        page_table=draw.table(3, 3, 9),
        rotation=rotation,
        q=draw.normal(3, 4, 15, 80),
    )


def interleaved() -> Case:
    """All columns, packed tokens and queries, tables of float32 and of too few positions, queries at one position."""
    draw = Draw(6)
    return Case(
        draw.normal(6, 2, 64, dtype=FP16),
        draw.normal(6, 2, 32, dtype=FP16),
        *(poisoned(3, 16, 2, columns, dtype=FP16) for columns in (64, 32)),
        int32(4, 0, 9),
        cu_seqlens_k_new=int32(0, 2, 2, 6),
        rotation=draw.rotation(11, 64, True, FP32),
        q=draw.normal(7, 4, 64, dtype=FP16),
        cu_seqlens_q=int32(0, 3, 6, 7),
        per_query_position=False,
    )


def scaled(is_interleaved: bool) -> Case:
    """16 bits into a cache of e4m3, with descales of a sequence, some of which make values too large for it."""
    draw = Draw(7)
    k_descale, v_descale = draw.descale(3, 2), draw.descale(3, 1).expand(3, 2)
    k_descale[1, 0] = 1e-3
    dtype = BF16 if is_interleaved else FP16
    return Case(
        *(draw.normal(3, 2, 2, 32, dtype=dtype) for _ in "kv"),
        *(poisoned(3, 5, 2, 32, dtype=FP8) for _ in "kv"),
        int32(0, 3, 2),
        k_descale=k_descale,
        v_descale=v_descale,
        rotation=draw.rotation(20, 16, is_interleaved, FP32),
        q=draw.normal(3, 2, 4, 32, dtype=dtype),
    )


def rotated_bytes() -> Case:
    """Everything in e4m3, rounded again after the rotation."""
    draw = Draw(8)
    return Case(
        *(draw.normal(2, 3, 2, 64, dtype=FP8) for _ in "kv"),
        *(poisoned(2, 9, 2, 64, dtype=FP8) for _ in "kv"),
        int32(4, 6),
        rotation=draw.rotation(20, 32, False, FP8),
        q=draw.normal(2, 3, 2, 64, dtype=FP8),
    )


CASES = {
    "contiguous": contiguous(),
    "bytes": bytes_alone(),
    **{f"pages of {size}": paged(size) for size in (1, 3, 16)},
    "packed": packed(),
    "halves": halves(),
    "interleaved": interleaved(),
    "scaled interleaved": scaled(True),
    "scaled halves": scaled(False),
    "rotated bytes": rotated_bytes(),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_writes_what_it_should_and_nothing_else(name: str) -> None:
    check_kernel(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_reference_does_the_same(name: str) -> None:
    check_reference(CASES[name])


def test_scaled_without_a_rotation() -> None:
    case = replace(scaled(True), rotation=None, q=None)
    check_kernel(case)
    check_reference(case)


def test_offsets_that_make_no_sense_stay_within_the_tensors() -> None:
    """The machine refuses what is outside of all of them. A token in the cache is one of those given."""
    case = packed()
    for seed in range(3):
        offsets = Draw(seed).normal(len(case.cu_seqlens_k_new), dtype=FP32)
        after = replace(case, cu_seqlens_k_new=(offsets * 10).int()).copied()
        append_on_numpy(after)
        written = after.k_cache[~after.k_cache.isnan().any(-1)]
        assert all(bool((row == case.k.flatten(0, 1)).all(-1).any()) for row in written)


def test_lengths_near_the_end_of_int32_are_none() -> None:
    case = replace(contiguous(), cache_seqlens=int32(2**31 - 1, 2**31 - 2, -(2**31), 10))
    check_kernel(case)


COMPILED = [
    AppendConfig("sm_80", "float16", "float16", INTERLEAVED, "float32", "float16"),
    AppendConfig("sm_86", E4M3, E4M3),
    AppendConfig("sm_89", "bfloat16", E4M3, HALVES, "bfloat16", "bfloat16"),
    AppendConfig("sm_90a", "bfloat16", "bfloat16", HALVES, "bfloat16", "bfloat16", launches_next=True),
    AppendConfig("sm_90a", E4M3, E4M3, HALVES, E4M3, E4M3),
    AppendConfig("sm_120", "bfloat16", "bfloat16"),
]


def test_kernels_compile_without_spills() -> None:
    for config, usage in usage_of_each(COMPILED).items():
        assert not usage.spills and usage.stack_bytes == 0, config.name
        assert usage.registers <= 64, config.name


def test_the_next_kernel_is_launched_only_where_it_is_asked_for() -> None:
    early, *_ = (config for config in COMPILED if config.launches_next)
    launches = re.compile(r"griddepcontrol\.launch_dependents")
    assert len(launches.findall(ptx_of(early))) == 1
    assert not launches.findall(ptx_of(replace(early, launches_next=False)))


def test_names_are_of_one_config_each() -> None:
    configs = [*COMPILED, *(case.config() for case in CASES.values())]
    assert len({config.name for config in configs}) == len(set(configs))
    assert COMPILED[3].name == "append_sm_90a_bf16_bf16_halves_bf16_qbf16_pdl"
    assert [arch_of(config) for config in COMPILED] == [config.arch for config in COMPILED]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"dtype": "float32"},
            ValueError,
            "dtype is 'float32', allowed: 'float16', 'bfloat16', 'float8_e4m3fn'",
        ),
        (
            {"cache_dtype": "float16"},
            ValueError,
            "cache_dtype is 'float16', allowed: 'bfloat16', 'float8_e4m3fn'",
        ),
        ({"rotary": "both"}, ValueError, "rotary is 'both', allowed: 'none', 'interleaved', 'halves'"),
        ({"rotary_dtype": "int8"}, ValueError, "rotary_dtype is 'int8', allowed: 'float16', .*, 'float32'"),
        ({"q_dtype": ""}, ValueError, "q_dtype is '', allowed: 'float16'"),
        ({"rotary": "none"}, ValueError, "rotary_dtype is 'float16', allowed: ''"),
        (
            {"arch": "sm_86", "cache_dtype": E4M3},
            NotImplementedError,
            "arch is sm_86, which has no instructions",
        ),
        ({"arch": "sm_89", "launches_next": True}, NotImplementedError, "no programmatic dependent launch"),
    ],
)
def test_what_no_kernel_is_built_from_is_refused(changed: dict, error: type, message: str) -> None:
    config = AppendConfig("sm_90a", "bfloat16", "bfloat16", HALVES, "float16", "bfloat16")
    validate_append_config(config)
    with pytest.raises(error, match=message):
        validate_append_config(replace(config, **changed))
