"""Every shipped forward kernel compiles for sm_90a without a GPU, without spills, as its docstring says."""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
import pytest
from cutlass.pipeline import PipelineAsync, PipelineTmaAsync

from hopper.config import ForwardConfig, Registers, validate_forward_config
from hopper.forward.barriers import NamedBarrier
from hopper.forward.fp8.tilings import (
    select_fp8_forward_config,
    shipped_exact_lse_configs,
    shipped_fp8_forward_configs,
    shipped_long_fp8_forward_configs,
)
from hopper.forward.kernel import ForwardKernel
from hopper.forward.tilings import (
    select_forward_config,
    select_plain_config,
    shipped_forward_configs,
    shipped_plain_configs,
)
from hopper.inspection import ResourceUsage
from tests.compile_pool import usage_of_each
from tests.hopper.docstrings import table, value
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import compile_ptx, ptx_of

SHIPPED = (
    *shipped_forward_configs(),
    *shipped_plain_configs(),
    *shipped_fp8_forward_configs(),
    *shipped_long_fp8_forward_configs(),
    *shipped_fp8_forward_configs(two_level=True),
    *shipped_exact_lse_configs(),
)


@pytest.fixture(scope="module")
def usages() -> dict[ForwardConfig, ResourceUsage]:
    return usage_of_each([*SHIPPED, *PLAIN, *NOT_PLAIN, *ABLATED])


PLAIN = tuple(
    dict.fromkeys(
        select_plain_config(dtype, head_dim, head_dim, causal, seqlen_k, True)
        for head_dim in (40, 72, 80, 88, 96, 104, 120, 144, 224)
        for dtype in ("bfloat16", "float16")
        for causal in (False, True)
        for seqlen_k in (257, 4096)
    )
)
"""Those of PLAIN_TILINGS where rows have most columns, and some whose products leave out columns of zeros."""


def registers_suffice(config, usage: ResourceUsage) -> bool:
    """Whether what the roles share out by setmaxnreg is what the launch reserves: who asks for more waits forever."""
    shared_out = 128 * (config.consumers * config.registers.consumer + config.registers.producer)
    return shared_out <= usage.registers * config.threads <= 65536


def general(dtype: str, head_dim: int, causal: bool, *mask: Any, **changes: bool) -> ForwardConfig:
    """``mask`` are window and layout, ``changes`` what is done to scores."""
    return replace(select_forward_config(dtype, head_dim, head_dim, causal, 8192, *mask), **changes)


NOT_PLAIN = [
    general("float16", 64, False, softcap=True),
    general("bfloat16", 64, True, True, alibi=True, sinks=True),
    general("bfloat16", 64, False, True, "varlen", softcap=True, sinks=True),
    general("float16", 128, False, softcap=True, alibi=True),
    general("bfloat16", 128, True, True, "varlen", softcap=True, alibi=True, sinks=True),
    general("float16", 256, False, True, softcap=True),
    general("bfloat16", 256, True, False, "varlen", alibi=True, sinks=True),
]
"""docs/limits.md names the one that spills: everything at once at head_dim 64."""


@pytest.mark.parametrize("config", [*PLAIN, *SHIPPED, *NOT_PLAIN], ids=lambda config: config.name)
def test_kernels_compile_without_spills(config, usages):
    usage = usages[config]
    assert usage.local_bytes == 0
    assert registers_suffice(config, usage)


@pytest.fixture(params=[(64, False), (128, True)], ids=["d64", "d128-causal"])
def traced(request, monkeypatch):
    """A config and what tracing its kernel created: pipelines, register counts."""
    config = select_forward_config("float16", request.param[0], request.param[0], request.param[1], 8192)
    config = replace(config, tile_n=64)  # which compiles in half of the time
    pipelines, registers = [], []

    def recording(create, bytes_of):
        def wrapper(**arguments):
            arrivals = arguments["consumer_group"].size
            pipelines.append((arguments["num_stages"], bytes_of(arguments), arrivals))
            return create(**arguments)

        return staticmethod(wrapper)

    mailbox_bytes, tma_bytes = (lambda arguments: 4), (lambda arguments: arguments["tx_count"])
    monkeypatch.setattr(PipelineAsync, "create", recording(PipelineAsync.create, mailbox_bytes))
    monkeypatch.setattr(PipelineTmaAsync, "create", recording(PipelineTmaAsync.create, tma_bytes))
    for name in ("setmaxregister_decrease", "setmaxregister_increase"):
        original = getattr(cute.arch, name)
        monkeypatch.setattr(cute.arch, name, lambda n, f=original: (registers.append(n), f(n))[1])
    compile_ptx(config)
    return config, pipelines, registers


def test_docstring_tables_are_what_the_kernel_makes(traced):
    config, pipelines, registers = traced
    expected = [tuple(value(cell, config) for cell in row[1:4]) for row in table(ForwardKernel, "pipeline")]
    assert sorted(pipelines) == sorted(expected)
    assert registers == [value(row[2], config) for row in table(ForwardKernel, "role")]


def test_docstring_table_of_named_barriers():
    rows = table(ForwardKernel, "named barrier")
    assert [row[0].partition(" ")[0] for row in rows] == [barrier.name for barrier in NamedBarrier]
    for row, barrier in zip(rows, NamedBarrier, strict=True):
        assert value(row[1], shipped_forward_configs()[0]) == barrier


ABLATION = [
    {"pipelined": False},
    {"ping_pong": False},
    {"pipelined": False, "ping_pong": False},
    {"tile_m": 64, "ping_pong": False, "registers": Registers(256, 24)},
    {"tile_m": 192, "tile_n": 80, "registers": Registers(160, 32)},
    {"warp_specialized": False, "registers": Registers(256, 0), "tile_n": 128},
    {"warp_specialized": False, "registers": Registers(256, 0), "tile_n": 128, "pipelined": False},
]
ABLATED = [replace(select_forward_config("float16", 128, 128, False, 8192), **change) for change in ABLATION]


@pytest.mark.parametrize("config", ABLATED, ids=lambda config: config.name)
def test_schedules_of_the_ablation_compile_without_spills(config, usages):
    validate_forward_config(config)
    usage = usages[config]
    assert not usage.spills
    assert not config.warp_specialized or registers_suffice(config, usage)


def test_without_a_producer_every_warp_keeps_its_registers():
    config = ABLATED[-2]
    ptx = ptx_of(config)
    assert config.threads == 256 and "setmaxnreg" not in ptx
    assert "cp.async.bulk.tensor" in ptx and find_hazards(ptx)[1] == []


def test_ping_pong_off_emits_no_turn():
    with_turns = replace(select_forward_config("float16", 128, 128, False, 8192), tile_n=64)
    assert with_turns.ping_pong and "bar.arrive" in ptx_of(with_turns)
    assert "bar.arrive" not in ptx_of(replace(with_turns, ping_pong=False))


@pytest.mark.parametrize(
    "config",
    [
        select_forward_config("bfloat16", 64, 64, False, 300),
        select_forward_config("bfloat16", 128, 128, True, 130),
        select_forward_config("bfloat16", 128, 128, False, 3000),
        select_plain_config("bfloat16", 128, 128, True, 4099),
        select_forward_config("bfloat16", 256, 256, True, 170),
        select_fp8_forward_config(128, 128, True, "bfloat16", 9000, 128),
    ],
    ids=lambda config: config.name,
)
def test_no_instruction_touches_a_register_of_a_wgmma_in_flight(config):
    ptx = ptx_of(config)
    steps = 32 // config.element_bytes
    of_block = config.head_dim // steps + config.tile_n // steps
    count, hazards = find_hazards(ptx)
    # First block, last P V, and one block in each loop: with and without a mask. And parts of a first block.
    parts = config.head_dim // steps * len(config.first_widths)
    if config.cuts_first_product:
        # And the block behind each, with P V of the part.
        parts += sum((config.head_dim + width) // steps for width in config.first_widths)
    if config.few_keys:
        # And few keys behind all blocks: under P V of the last one, and their own.
        parts += of_block + config.few_keys // steps
    assert count == of_block * (3 if config.causal else 2) + parts
    assert hazards == []


def test_hazards_are_found():
    wgmma = "wgmma.mma_async.sync.aligned {%f1, %f2}, {%r1}, %rd1, p, 1, 1;"
    flight = [wgmma, "wgmma.commit_group.sync.aligned;"]
    use, wait = "add.f32 %f9, %f1, %f3;", "wgmma.wait_group.sync.aligned 0;"
    assert find_hazards("\n".join([*flight, wait, use])) == (1, [])
    assert find_hazards("\n".join([*flight, use, wait])) == (1, [use])
    overwrite, read = "mov.b32 %r1, %r7;", "mov.b32 %r7, %r1;"
    assert find_hazards("\n".join([*flight, read, overwrite, wait])) == (1, [overwrite])
    second = [wgmma.replace("%f", "%g").replace("%r1", "%r2"), "wgmma.commit_group.sync.aligned;"]
    one_left = "wgmma.wait_group.sync.aligned 1;"
    assert find_hazards("\n".join([*flight, *second, one_left, use, use.replace("%f1", "%g1")]))[1] == [
        use.replace("%f1", "%g1")
    ]
