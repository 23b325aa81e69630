"""Configs of the backward kernel without WGMMA: what is chosen, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_kernels.ampere.backward.config import (
    AmpereBackwardConfig,
    check_ampere_backward_size,
    select_ampere_backward_config,
    shipped_ampere_backward_configs,
    validate_ampere_backward_config,
)
from cute_kernels.ampere.config import ARCH_OF_CAPABILITY, ARCHS

BASE = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_80")


def test_every_problem_has_a_valid_config_that_covers_it() -> None:
    for arch in ARCHS:
        for head_dim in range(8, 257, 8):
            for head_dim_v in range(8, 257, 8):
                config = select_ampere_backward_config("float16", head_dim, head_dim_v, False, arch)
                assert config.head_dim == config.head_dim_v >= max(head_dim, head_dim_v)
                assert config.smem_bytes <= ARCHS[arch].cta


@pytest.mark.parametrize(
    ("head_dims", "native"),
    [((8, 32), 32), ((40, 8), 64), ((64, 72), 96), ((104, 64), 128), ((136, 8), 192), ((8, 200), 256)],
)
def test_the_next_larger_head_dim_serves(head_dims: tuple[int, int], native: int) -> None:
    for arch in ARCHS:
        assert select_ampere_backward_config("float16", *head_dims, True, arch).head_dim == native


def test_shipped_configs_are_distinct_and_serve_every_capability() -> None:
    shipped = shipped_ampere_backward_configs()
    assert len({config.name for config in shipped}) == len(shipped) == 5 * 2 * 6 * 2 * 2
    assert {config.arch for config in shipped} == set(ARCHS) == set(ARCH_OF_CAPABILITY.values())
    assert {config.is_persistent for config in shipped} == {False}


def test_a_fixed_order_of_dq_is_a_config_of_its_own() -> None:
    ordered = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_80", ordered=True)
    assert ordered == replace(BASE, ordered=True) and ordered.name == f"{BASE.name}_ordered"
    assert ordered.counts_per_tile == ordered.dq_parts == ordered.warps


def test_windows_and_packed_sequences_have_the_tiles_of_their_mask() -> None:
    for ordered in (False, True):
        dense = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_80", ordered)
        assert (dense.window, dense.layout, dense.can_miss_queries) == (False, "dense", False)
        for window, layout in ((True, "dense"), (False, "varlen"), (True, "varlen")):
            config = select_ampere_backward_config(
                "bfloat16", 128, 128, True, "sm_80", ordered, window, layout
            )
            assert config == replace(dense, window=window, layout=layout) and config.can_miss_queries
            assert config.name == dense.name + "_window" * window + "_varlen" * (layout == "varlen")
            # A window makes no difference to the steps, packed sequences do.
            for step in ("prepare", "finish"):
                name = dense.step_name(step)
                assert config.step_name(step) == name + "_varlen" * (layout == "varlen")


def test_what_is_too_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 264 and head_dim_v 64: both may be at most 256"):
        select_ampere_backward_config("float16", 264, 64, True, "sm_80")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
        ({"arch": "sm_75"}, "arch is 'sm_75', allowed: sm_80,"),
        ({"head_dim": 72}, "head_dim is 72 and head_dim_v 128, allowed: the same, one of (32, 64,"),
        ({"head_dim_v": 64}, "head_dim is 128 and head_dim_v 64, allowed: the same"),
        ({"warps": 6}, "warps is 6, allowed: 4 or 8"),
        ({"tile_m": 48}, "tile_m is 48, allowed: 32, 64 or 128"),
        ({"tile_n": 256}, "tile_n is 256, allowed: 32, 64 or 128"),
        ({"score_warps": 3}, "score_warps is 3, allowed with these tiles and 8 warps: [2, 4, 8]"),
        ({"gradient_warps": 16}, "gradient_warps is 16, allowed with these tiles and 8 warps: [1, 2, 4, 8]"),
        ({"dq_warps": 8}, "dq_warps is 8, allowed with these tiles and 8 warps: [1, 2, 4]"),
        ({"stages": 3}, "stages is 3, allowed: 1 or 2"),
        ({"layout": "paged"}, "layout is 'paged', allowed: dense, varlen"),
        ({"ctas_per_sm": 2}, "2 CTAs of "),
        ({"arch": "sm_86"}, "of shared memory, allowed on sm_86: 101376 each and 102400 in all"),
    ],
)
def test_an_invalid_field_is_named(change: dict[str, object], message: str) -> None:
    config: AmpereBackwardConfig = replace(BASE, **change)
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_ampere_backward_config(config)


@pytest.mark.parametrize(
    ("batch", "heads", "seqlens", "message"),
    [
        (65_536, (1, 1), (1, 1), "batch is 65536, the backward kernel takes at most 65535: split it"),
        (1, (65_536, 1), (1, 1), "heads is 65536, the backward kernel takes at most 65535: split it"),
        (1, (1, 1), (2**31, 1), "seqlen_q is 2147483648, the backward kernel takes at most 2147483136"),
        (1, (1, 1), (1, 2**31), "seqlen_k is 2147483648, the backward kernel takes at most 2147483136"),
        (
            65_535,
            (65_535, 65_535),
            (1, 1),
            "batch 65535 x kv_heads 65535 x seqlen_k 1 are 4294836225 tiles of 128 keys",
        ),
    ],
)
def test_a_size_that_no_grid_counts_is_named(
    batch: int, heads: tuple[int, int], seqlens: tuple[int, int], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        check_ampere_backward_size(BASE, batch, heads, seqlens)


def test_the_largest_sizes_are_counted() -> None:
    for batch, heads, seqlens in (
        (65_535, (65_535, 32_768), (1, 128)),
        (1, (1, 1), (2**31 - 512, 2**31 - 512)),
    ):
        check_ampere_backward_size(BASE, batch, heads, seqlens)
