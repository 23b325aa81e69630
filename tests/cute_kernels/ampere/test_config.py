"""Configs of the kernels without WGMMA: what is chosen, what is refused, and where tiles lie in shared memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_kernels.ampere.backward.config import select_ampere_backward_config
from cute_kernels.ampere.config import (
    ARCH_OF_CAPABILITY,
    ARCHS,
    select_ampere_forward_config,
    shipped_ampere_forward_configs,
    validate_ampere_forward_config,
)
from cute_kernels.ampere.forward.kernel import AmpereForwardKernel
from cute_kernels.ampere.shared_tile import SharedTile

BASE = select_ampere_forward_config("bfloat16", 128, 128, True, "sm_80")


def test_every_problem_has_a_valid_config_that_covers_it() -> None:
    for arch in ARCHS:
        for head_dim in range(8, 257, 8):
            for head_dim_v in range(8, 257, 8):
                config = select_ampere_forward_config("float16", head_dim, head_dim_v, False, arch)
                assert config.head_dim >= head_dim and config.head_dim_v >= head_dim_v
                assert config.smem_bytes <= ARCHS[arch].cta


def test_shipped_configs_are_distinct_and_serve_every_capability() -> None:
    shipped = shipped_ampere_forward_configs()
    assert len({config.name for config in shipped}) == len(shipped) == 5 * 2 * 2 * 7
    assert {config.arch for config in shipped} == set(ARCHS) == set(ARCH_OF_CAPABILITY.values())


def test_small_shared_memory_gets_smaller_tiles() -> None:
    assert BASE.smem_bytes == (128 * 128 + 2 * 64 * 128) * 2
    small = select_ampere_forward_config("bfloat16", 128, 128, True, "sm_86")
    assert 2 * (small.smem_bytes + 1024) <= 100 * 1024 < 2 * BASE.smem_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
        ({"arch": "sm_75"}, "arch is 'sm_75', allowed: sm_80,"),
        ({"head_dim": 72}, "head_dim is 72, allowed: multiples of 32 from 32 to 256"),
        ({"head_dim_v": 256}, "head_dim_v is 256, allowed: at most head_dim, 128"),
        ({"warps": 6}, "warps is 6, allowed: 4 or 8"),
        ({"tile_m": 192}, "tile_m is 192, allowed with 4 warps: 64 or 128"),
        ({"tile_n": 24}, "tile_n is 24, allowed: multiples of 16"),
        ({"stages": 1}, "stages is 1, allowed: 2 to 8"),
        ({"layout": "paged"}, "layout is 'paged', allowed: dense, varlen"),
        (
            {"stages": 4},
            "2 CTAs of 98304 bytes of shared memory, allowed on sm_80: 166912 each and 167936 in all",
        ),
        ({"arch": "sm_86"}, "2 CTAs of 65536 bytes of shared memory, allowed on sm_86: 101376 each"),
    ],
)
def test_invalid_configs_name_the_field(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        validate_ampere_forward_config(replace(BASE, **change))


def test_windows_and_packed_sequences_have_the_tiles_of_their_mask() -> None:
    for arch in ARCHS:
        for causal in (False, True):
            dense = select_ampere_forward_config("bfloat16", 64, 64, causal, arch)
            assert (dense.window, dense.layout, dense.longest_first) == (False, "dense", causal)
            options = [(True, "dense"), (False, "varlen"), (True, "varlen")]
            names = {dense.name}
            for window, layout in options:
                config = select_ampere_forward_config("bfloat16", 64, 64, causal, arch, window, layout)
                assert config == replace(dense, window=window, layout=layout)
                assert config.longest_first == (causal and not window)
                assert config.name.endswith("_window" * window + "_varlen" * (layout == "varlen"))
                names.add(config.name)
            assert len(names) == 4


def test_a_name_says_what_is_done_to_scores() -> None:
    assert not BASE.changes_scores
    config = replace(BASE, alibi=True, softcap=True)
    assert config.changes_scores and config.name == f"{BASE.name}_softcap_alibi"
    assert replace(BASE, sinks=True).changes_scores and replace(BASE, sinks=True).name == f"{BASE.name}_sinks"
    backward = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_80")
    assert not backward.changes_scores
    assert replace(backward, softcap=True, alibi=True).name == f"{backward.name}_softcap_alibi"
    assert replace(backward, alibi=True).step_name("prepare") == backward.step_name("prepare")


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192, 256])
def test_no_two_rows_of_a_matrix_share_a_bank(columns: int) -> None:
    tile = SharedTile(columns)
    places = [tile.offset(row, chunk) + i * tile.span_bytes for row in range(16) for i in range(tile.spans)
              for chunk in range(tile.span)]  # fmt: skip
    assert sorted(places) == list(range(0, 16 * tile.pitch, 16))
    for chunk in range(tile.span):
        for first in (0, 8):
            banks = {tile.offset(row, chunk) // 16 % 8 for row in range(first, first + 8)}
            assert len(banks) == 8
    for chunk in range(0, tile.span * tile.spans, 2):
        twist, along = tile.step(chunk)
        for row in range(16):
            for odd in (0, 1):
                within, span = (chunk + odd) % tile.span, (chunk + odd) // tile.span
                assert (tile.offset(row, odd) ^ twist) + along == tile.offset(
                    row, within
                ) + span * tile.span_bytes


def test_docstring_tables_of_the_kernel_are_what_a_config_says() -> None:
    names = {name: getattr(BASE, name) for name in dir(BASE) if not name.startswith("_")}
    cells = re.findall(
        r"^\s*\| (sQ|sKV|acc_O|acc_S|Q) \| `([^`]+)` \|", AmpereForwardKernel.__doc__ or "", re.M
    )
    values = {name: eval(text, {"__builtins__": {}}, names) for name, text in cells}
    assert values.pop("sQ") + values.pop("sKV") == BASE.smem_bytes
    assert values == {"acc_O": 128, "acc_S": 64, "Q": 0}
