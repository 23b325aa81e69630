"""The shipped backward kernels without WGMMA compile without a GPU, without spills, and without a newer instruction."""

from __future__ import annotations

import re

import pytest

from cute_kernels.ampere.backward.config import (
    AmpereBackwardConfig,
    select_ampere_backward_config,
    shipped_ampere_backward_configs,
)
from cute_kernels.ampere.backward.kernel import AmpereBackwardKernel
from hopper.inspection import ResourceUsage
from tests.compile_pool import usage_of_each
from tests.cute_kernels.ampere.test_forward_compile import NEWER
from tests.ptx import ptx_of

SHIPPED = shipped_ampere_backward_configs()


@pytest.fixture(scope="module")
def usages() -> dict[AmpereBackwardConfig, ResourceUsage]:
    return usage_of_each([*SHIPPED, *WITH_WINDOW_OR_PACKED])


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_shipped_config_compiles_without_spills(config, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0
    assert usage.registers * config.threads * config.ctas_per_sm <= 65_536


WITH_WINDOW_OR_PACKED = [
    select_ampere_backward_config("bfloat16", head_dim, head_dim, causal, "sm_80", ordered, window, layout)
    for head_dim, causal, ordered, window, layout in (
        (64, True, False, False, "varlen"),
        (64, False, True, True, "varlen"),
        (128, False, False, False, "varlen"),
        (128, True, False, True, "dense"),
        (256, True, True, True, "varlen"),
    )
]


@pytest.mark.parametrize("config", WITH_WINDOW_OR_PACKED, ids=lambda config: config.name)
def test_windows_and_packed_sequences_compile_without_spills(config, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0


def test_kernels_have_no_instruction_newer_than_sm_80() -> None:
    config = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_90a", ordered=True)
    ptx = ptx_of(config)
    assert ".target sm_90a" in ptx and re.findall(NEWER, ptx) == []
    # Five products of 64 queries, 128 keys and 128 columns, shared out among 8 warps.
    assert ptx.count("mma.sync.aligned.m16n8k16") == 5 * (64 // 16) * (128 // 8) * (128 // 16) // 8
    # dQ of a warp: 64 queries by 128 columns, shared out among 8 warps of 32 lanes.
    assert ptx.count("red.global.add.f32") == 64 * 128 // 8 // 32


def test_the_table_of_the_kernel_is_that_of_its_config() -> None:
    """Rows of the docstring whose second column is an expression of fields."""
    config = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_80")
    fields = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    rows = re.findall(r"^ *\| ([^|]+) \| `([^`]+)` \|", AmpereBackwardKernel.__doc__, re.MULTILINE)
    values = {name: eval(expression, {}, fields) for name, expression in rows}
    assert values == {
        "all": 8,
        "sK, sV": 2 * 128 * 128 * 2,
        "sQ, sdO": 2 * 2 * 64 * 128 * 2,
        "sP": 64 * 128 * 2,
        "sdS": 64 * 128 * 2,
        "sLSE, sDelta": 2 * 2 * 64 * 4,
        "acc_dK, acc_dV": 2 * 128 * 128 // 256,
        "acc_S, acc_dP": 2 * 64 * 128 // 256,
        "acc_dQ": 64 * 128 // 256,
    }
    bytes_of_tiles = [value for name, value in values.items() if name.startswith("s")]
    assert sum(bytes_of_tiles) == config.smem_bytes == 164_864
