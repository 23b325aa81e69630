"""Appending to a cache: the kernel run from PTX on NumPy, and its reference, against loops in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.append.config import (
    BY_PAGE,
    BY_TOKEN,
    E4M3,
    HALVES,
    INTERLEAVED,
    AppendConfig,
    validate_append_config,
)
from hopper.compile import arch_of
from hopper_attention.kvcache_rotation import rotate_keys
from hopper_attention.reference.append import append_to_cache, rotate_queries, rounded
from tests.compile_pool import assert_small
from tests.cute_kernels.append_cases import CASES, Draw, contiguous, packed, scaled
from tests.cute_kernels.appending import Case, append_on_numpy, check, int32


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
        mix=rotate_keys if case.hadamard else None,
    )
    rotated = None
    if case.rotation is not None:
        options = {"cu_seqlens_q": after.cu_seqlens_q, "per_query_position": after.per_query_position}
        turned = rotate_queries(after.q.float(), after.rotation, after.cache_seqlens, **options)
        rotated = rounded(rotate_keys(turned) if case.hadamard else turned, after.q.dtype)
    check(after, case, lengths, rotated)


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
        offsets = Draw(seed).normal(len(case.cu_seqlens_k_new), dtype=torch.float32)
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
    AppendConfig("sm_90a", "bfloat16", "bfloat16", HALVES, "bfloat16", "bfloat16"),
    AppendConfig("sm_90a", E4M3, E4M3, HALVES, E4M3, E4M3),
    AppendConfig("sm_120", "bfloat16", "bfloat16"),
    AppendConfig("sm_90a", "bfloat16", E4M3, HALVES, "bfloat16", "bfloat16", BY_TOKEN),
    AppendConfig("sm_90a", "bfloat16", E4M3, HALVES, "float32", "bfloat16", BY_TOKEN, hadamard=True),
    AppendConfig("sm_89", "float16", E4M3, scales=BY_PAGE, hadamard=True),
]


def test_kernels_compile_without_spills() -> None:
    assert_small(COMPILED)


def test_names_are_of_one_config_each() -> None:
    configs = [*COMPILED, *(case.config() for case in CASES.values())]
    assert len({config.name for config in configs}) == len(set(configs))
    assert COMPILED[3].name == "append_sm_90a_bf16_bf16_halves_bf16_qbf16"
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
        ({"scales": "token"}, ValueError, "scales is 'token', allowed: 'sequence'"),
        (
            {"cache_dtype": E4M3, "scales": ""},
            ValueError,
            "scales is '', allowed: 'sequence', 'page', 'token'",
        ),
        (
            {"arch": "sm_86", "cache_dtype": E4M3},
            NotImplementedError,
            "arch is sm_86, which has no instructions",
        ),
    ],
)
def test_what_no_kernel_is_built_from_is_refused(changed: dict, error: type, message: str) -> None:
    config = AppendConfig("sm_90a", "bfloat16", "bfloat16", HALVES, "float16", "bfloat16")
    validate_append_config(config)
    with pytest.raises(error, match=message):
        validate_append_config(replace(config, **changed))
