"""The shipped kernels without WGMMA compile without a GPU, without spills, and without a newer instruction."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_kernels.ampere.config import (
    AmpereForwardConfig,
    select_ampere_forward_config,
    shipped_ampere_forward_configs,
)
from hopper.inspection import ResourceUsage
from tests.compile_pool import usage_of_each
from tests.ptx import ptx_of

SHIPPED = shipped_ampere_forward_configs(("sm_80", "sm_86", "sm_89", "sm_120"))


@pytest.fixture(scope="module")
def usages() -> dict[AmpereForwardConfig, ResourceUsage]:
    return usage_of_each([*SHIPPED, *WITH_WINDOW_OR_PACKED, *WITH_SCORES_CHANGED])


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_shipped_config_compiles_without_spills(config, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0
    assert usage.registers * config.threads * config.ctas_per_sm <= 65_536


WITH_WINDOW_OR_PACKED = [
    select_ampere_forward_config(dtype, head_dim, head_dim, causal, arch, window, layout)
    for dtype, head_dim, causal, arch, window, layout in (
        ("bfloat16", 64, True, "sm_80", False, "varlen"),
        ("bfloat16", 96, False, "sm_80", True, "varlen"),
        ("bfloat16", 128, False, "sm_80", False, "varlen"),
        ("float16", 128, True, "sm_80", True, "dense"),
        ("bfloat16", 128, True, "sm_86", True, "varlen"),
        ("bfloat16", 256, True, "sm_80", True, "varlen"),
    )
]


@pytest.mark.parametrize("config", WITH_WINDOW_OR_PACKED, ids=lambda config: config.name)
def test_windows_and_packed_sequences_compile_without_spills(config, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0


WITH_SCORES_CHANGED = [
    replace(select_ampere_forward_config("bfloat16", 64, 64, True, "sm_80"), softcap=True),
    replace(
        select_ampere_forward_config("bfloat16", 128, 128, True, "sm_80"),
        softcap=True,
        alibi=True,
        sinks=True,
    ),
    replace(select_ampere_forward_config("float16", 128, 128, False, "sm_86"), softcap=True, alibi=True),
]


@pytest.mark.parametrize("config", WITH_SCORES_CHANGED, ids=lambda config: config.name)
def test_changed_scores_compile_without_spills(config, usages) -> None:
    usage = usages[config]
    assert (usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0)


NEWER = r"wgmma|mbarrier|bulk|stmatrix|setmaxnreg|elect\.sync|cluster|griddepcontrol|tensormap"


def test_kernels_have_no_instruction_newer_than_sm_80() -> None:
    config = replace(select_ampere_forward_config("bfloat16", 64, 64, True, "sm_90a"), tile_n=32)
    ptx = ptx_of(config)
    assert ".target sm_90a" in ptx and re.findall(NEWER, ptx) == []
    # S and O of two bands of 16 rows, 32 keys by 64 columns, in the loops with and without a mask.
    assert ptx.count("mma.sync.aligned.m16n8k16") == 2 * 2 * (2 * 4 * 4)
