"""Decode kernels compile for sm_90a without a GPU, without spills, as the docstring says; which configs there are."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.pipeline import PipelineAsync, PipelineTmaAsync

from hopper.compile import compile_kernel
from hopper.config import BARRIER_BYTES, SMEM_BYTES, WARPGROUP_ROWS
from hopper.decode.config import (
    BOX_ROWS,
    COMBINE_BYTES,
    E4M3,
    HEAD_DIMS,
    PAIRED_TILE_M,
    DecodeConfig,
    box_rows_of,
    select_decode_config,
    validate_decode_config,
)
from hopper.decode.kernel import DecodeKernel
from hopper.decode.schedule import launched_together
from hopper.inspection import ResourceUsage
from tests.compile_pool import usage_of_each
from tests.hopper.docstrings import table, value
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import compile_ptx, ptx_of


def config_of(dtype: str, dims: tuple[int, int], page_size: int, pages: int, **others: Any) -> DecodeConfig:
    """With a causal mask."""
    found = select_decode_config(dtype, *dims, True, page_size, pages, **others)
    assert found is not None
    return found


FLAGS = ("window", "chunk", "leftpad", "softcap", "sinks", "limits_splits")
EVERYTHING = dict.fromkeys(FLAGS, True)

WITHOUT_SOFTCAP = EVERYTHING | {"softcap": False}
WITHOUT_SPLITS = EVERYTHING | {"limits_splits": False}

COMPILED = [
    config_of("bfloat16", (64, 64), 16, 8),
    config_of("bfloat16", (128, 128), 64, 8),
    replace(config_of("float16", (128, 128), 1000, 1, rows=64, leftpad=True, paged=False), causal=False),
    config_of("bfloat16", (256, 256), 16, 8, rows=64),
    config_of("bfloat16", (128, 128), 16, 8, rows=64, layout="varlen", **EVERYTHING),
    config_of("bfloat16", (192, 192), 8, 8, rows=64, layout="varlen", **EVERYTHING),
    config_of("float16", (128, 128), 64, 8, cache_dtype=E4M3),
    config_of("bfloat16", (128, 128), 16, 8, rows=64, layout="varlen", cache_dtype=E4M3, **WITHOUT_SOFTCAP),
    config_of("bfloat16", (128, 128), 64, 8, rows=4, cache_dtype=E4M3),
    config_of("bfloat16", (256, 256), 16, 8, rows=16, cache_dtype=E4M3, e4m3_queries=True),
    config_of("bfloat16", (128, 128), 16, 8, rows=16, layout="varlen", cache_dtype=E4M3, **WITHOUT_SOFTCAP),
    config_of("float16", (192, 192), 16, 8, rows=64, cache_dtype=E4M3),
    config_of("bfloat16", (64, 64), 16, 8, rows=8, cache_dtype=E4M3, row_scales=True),
    config_of("bfloat16", (128, 128), 64, 8, rows=4, cache_dtype=E4M3, row_scales=True),
    config_of("bfloat16", (256, 256), 16, 8, rows=16, cache_dtype=E4M3, e4m3_queries=True, row_scales=True),
    config_of(
        "bfloat16",
        (128, 128),
        16,
        8,
        rows=16,
        layout="varlen",
        cache_dtype=E4M3,
        row_scales=True,
        **WITHOUT_SOFTCAP,
    ),
    config_of("bfloat16", (128, 128), 8192, 1, rows=4, paged=False, cluster=8),
    config_of("bfloat16", (128, 128), 64, 8, rows=32, cluster=2, sinks=True),
    config_of("bfloat16", (128, 128), 64, 8, rows=4, cache_dtype=E4M3, cluster=8),
    config_of("bfloat16", (128, 128), 8, 8, rows=65, layout="varlen", **EVERYTHING),
    config_of("float16", (128, 64), 64, 8, rows=1000),
    config_of("bfloat16", (64, 64), 8, 8, rows=65, layout="varlen", **EVERYTHING),
    *(
        config_of("bfloat16", (128, 128), 64, 8, rows=rows, cache_dtype=E4M3, softcap=True)
        for rows in (4, 8, 16)
    ),
    config_of(
        "bfloat16",
        (64, 64),
        16,
        8,
        rows=8,
        cache_dtype=E4M3,
        e4m3_queries=True,
        softcap=True,
        row_scales=True,
    ),
    config_of("bfloat16", (128, 128), 16, 8, rows=16, layout="varlen", cache_dtype=E4M3, **EVERYTHING),
    config_of("bfloat16", (256, 256), 16, 8, rows=4, cache_dtype=E4M3, softcap=True, window=True, sinks=True),
    config_of(
        "bfloat16",
        (256, 256),
        16,
        8,
        rows=16,
        layout="varlen",
        cache_dtype=E4M3,
        row_scales=True,
        **EVERYTHING,
    ),
    config_of("bfloat16", (128, 128), 64, 8, rows=4, cache_dtype=E4M3, softcap=True, cluster=8),
    config_of("bfloat16", (128, 128), 64, 8, rows=32, cache_dtype=E4M3, softcap=True),
    config_of("float16", (128, 128), 16, 8, rows=64, layout="varlen", cache_dtype=E4M3, **EVERYTHING),
    config_of("bfloat16", (192, 192), 16, 8, rows=64, cache_dtype=E4M3, softcap=True),
]
"""Of head_dim 256 packed queries and windows spill, 4 to 136 bytes of those that were looked at."""

SIDE_BY_SIDE = config_of("bfloat16", (64, 64), 64, 8, rows=4, cache_dtype=E4M3)
"""One of the smaller kernels."""


@pytest.fixture(scope="module")
def usages() -> dict[DecodeConfig, ResourceUsage]:
    return usage_of_each(COMPILED)


@pytest.mark.parametrize("config", COMPILED, ids=lambda config: config.name)
def test_kernels_compile_without_spills(config: DecodeConfig, usages: dict[Any, ResourceUsage]) -> None:
    """And leave room for the kernel that puts parts together, which waits beside them."""
    usage = usages[config]
    assert usage.local_bytes == 0
    assert usage.registers * config.threads <= 65536
    if config.registers:
        r = config.registers
        shared_out = 128 * (config.consumers * r["consumer"] + 2 * r.get("widener", 0) + r["producer"])
        assert shared_out <= usage.registers * config.threads
    assert config.smem_bytes <= SMEM_BYTES - (COMBINE_BYTES if config.cluster == 1 else 0)


def test_no_instruction_touches_a_register_of_a_wgmma_in_flight() -> None:
    config = COMPILED[0]
    count, hazards = find_hazards(ptx_of(config))
    # A block's Q K^T and P V in the loop, the first Q K^T before it and the last P V behind it.
    assert count == 2 * (config.head_dim // 16 + config.tile_n // 16)
    assert hazards == []


def test_ptxas_leaves_wgmmas_beside_each_other() -> None:
    """It does not where a loop leaves some under way for its next turn to wait for."""
    for rows, scaled, capped in ((4, False, False), (16, False, False), (4, True, False), (16, True, True)):
        fields = {"rows": rows, "row_scales": scaled, "softcap": capped}
        config = config_of("bfloat16", (128, 128), 64, 8, cache_dtype=E4M3, **fields)
        report = io.StringIO()
        with contextlib.redirect_stderr(report):
            compile_kernel(config, options="remarks{ptx}")
        assert "Used" in report.getvalue() and "serialized" not in report.getvalue()


def test_kernels_wait_for_what_is_before_them() -> None:
    """The first one for all that it reads, before it lets the second one start, which reads lengths before it waits."""
    combine, kernel = sorted(ptx_of(COMPILED[0]).split(".visible .entry ")[1:])
    before, after = kernel.split("griddepcontrol.wait;")
    assert not re.search(r"(ld|st|red|atom)\.global|cp\.async", before)
    assert "griddepcontrol.launch_dependents" not in before and "griddepcontrol.launch_dependents" in after
    before, after = combine.split("griddepcontrol.wait;")
    assert not re.search(r"st\.global|ld\.global\.v4", before)
    assert "st.global" in after and "ld.global.v4" in after


OF_16_BITS = DecodeConfig("float16", 64, 128, False, 32, 3, 8)
OF_8_BITS = replace(OF_16_BITS, cache_dtype=E4M3, stages=2, raw_stages=4)
SWAPPED = replace(OF_16_BITS, dtype="bfloat16", cache_dtype=E4M3, tile_m=8, tile_n=64)
PAIRED = replace(OF_16_BITS, tile_m=128)


@pytest.mark.parametrize(
    "config",
    [OF_16_BITS, OF_8_BITS, SWAPPED, PAIRED, replace(SWAPPED, row_scales=True)],
    ids=lambda config: config.name,
)
def test_the_docstring_says_what_the_kernel_makes(
    config: DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled_by_tma, filled_by_warps = [], []

    def recording(create: Callable[..., Any], found: list[Any]) -> Any:
        def wrapper(**given: Any) -> Any:
            found.append((given["num_stages"], given.get("tx_count"), given["consumer_group"].size))
            return create(**given)

        return staticmethod(wrapper)

    for kind, found in ((PipelineTmaAsync, filled_by_tma), (PipelineAsync, filled_by_warps)):
        monkeypatch.setattr(kind, "create", recording(kind.create, found))
    kernel = compile_ptx(config).split(".visible .entry")[-2]
    expected = [tuple(value(cell, config) for cell in row[1:4]) for row in table(DecodeKernel, "pipeline")]
    wide, raw = expected[:2], expected[2:]
    assert filled_by_tma == (raw if config.is_widened else wide)
    assert filled_by_warps == [(n, None, warps) for n, _, warps in wide] * config.is_widened
    (threads,) = re.findall(r"\.reqntid (\d+)", kernel)
    assert int(threads) == config.threads and f"{threads} " in (DecodeKernel.__doc__ or "")
    assert set(re.findall(r"bar\.sync\s+([^;]*);", kernel)) == {"0", f"1, {128 * config.consumers}"}
    shared_out = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", kernel)}
    assert shared_out == set(config.registers.values())
    column = 2 if config.is_widened else config.consumers * 2 - 1
    last = int(table(DecodeKernel, "role")[-1][column].split(", ")[-1])
    assert last < config.threads // 32 <= last + 3


def test_every_head_dim_has_a_config_that_covers_it() -> None:
    for d in range(8, max(HEAD_DIMS) + 1, 8):
        for dv in (8, 64, 128, 200, 256):
            for rows in (1, 32, 33, 64, 65, 300):
                config = config_of("float16", (d, dv), 16, 4, rows=rows)
                assert config.head_dim >= d and config.head_dim_v >= dv
                most = PAIRED_TILE_M if max(d, dv) <= 128 and rows > WARPGROUP_ROWS else WARPGROUP_ROWS
                assert min(rows, most) <= config.tile_m <= most
                assert config.smem_bytes <= SMEM_BYTES - COMBINE_BYTES


def test_widened_kernels_have_room_for_their_barriers() -> None:
    for d, dv, rows in product(HEAD_DIMS[:3], HEAD_DIMS[:3], (20, 33)):
        config = config_of("float16", (d, dv), 16, 8, rows=rows, cache_dtype=E4M3)
        # Full and empty, of K and of V, each of 8 bytes.
        assert config.is_widened and 32 * (config.stages + config.raw_stages) <= BARRIER_BYTES


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_boxes_of_few_rows_have_a_stage_more(dtype: str) -> None:
    for d, dv in product(HEAD_DIMS, HEAD_DIMS):
        # 128 columns of K and of V are 64 KB a block.
        is_small = {256: 32, 192: 64}.get(max(d, dv), 128) * (d + dv) * 2 <= 48 * 1024
        for page_size, rows in product((8, 16, 32, 48, 64, 256), (1, 32, 33, 65)):
            config = config_of(dtype, (d, dv), page_size, 4, rows=rows)
            is_in_small_boxes = page_size in (8, 16, 48) and rows <= 32
            assert config.stages == (3 if is_small and is_in_small_boxes else 2)
        assert config_of(dtype, (d, dv), 4096, 1).stages == 2
        assert config_of(dtype, (d, dv), 16, 4, cluster=2).stages == 2


def test_boxes_lie_in_one_page() -> None:
    for tile_n in (32, 64, 128):
        for page_size in range(1, 300):
            rows = box_rows_of(tile_n, page_size, 2)
            fitting = [n for n in BOX_ROWS if page_size % n == 0 and tile_n % n == 0]
            assert rows == max(fitting, default=None)
            assert box_rows_of(tile_n, page_size, 1) == tile_n
    assert select_decode_config("float16", 64, 64, True, 12, 2) is None
    assert config_of("float16", (64, 64), 12, 1).box_rows == 128


def test_names_are_of_one_config_each() -> None:
    base = COMPILED[0]
    changes: list[dict[str, Any]] = [{name: True} for name in FLAGS]
    changes += [
        {"paged": False},
        {"cache_dtype": E4M3, "raw_stages": 2},
        {"cache_dtype": E4M3, "raw_stages": 3},
        {"cache_dtype": E4M3, "tile_m": 4},
        {"cache_dtype": E4M3, "tile_m": 4, "e4m3_queries": True},
        {"cache_dtype": E4M3, "tile_m": 4, "row_scales": True},
    ]
    changes += [
        {"cluster": 2},
        {"cluster": 8},
        {"tile_m": 64},
        {"tile_m": 128},
        {"tile_n": 64},
        {"stages": base.stages + 1},
        {"box_rows": 8},
    ]
    changes += [{"layout": "varlen"}, {"head_dim_v": 128}, {"head_dim": 128}, {"causal": False}]
    changes += [{"dtype": "float16"}]
    names = [base.name, *(replace(base, **change).name for change in changes)]
    assert len(set(names)) == len(names)
    assert base.name == f"hopper_decode_bf16_d64_causal_m32n128s{base.stages}b16_paged"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
        ({"layout": "paged"}, "layout is 'paged', allowed: dense, varlen"),
        ({"chunk": True}, "chunk"),
        ({"head_dim": 96}, "head_dim is 96, allowed: 64, 128, 192, 256"),
        ({"head_dim_v": 512}, "head_dim_v is 512, allowed: 64, 128, 192, 256"),
        ({"head_dim": 256, "cache_dtype": E4M3}, "head_dim is 256, allowed: 64, 128, 192$"),
        ({"tile_m": 256}, "tile_m is 256, allowed: 32, 64, 128$"),
        ({"tile_m": 128, "head_dim_v": 192, "stages": 2}, "tile_m is 128, allowed: 32, 64$"),
        ({"tile_m": 8}, "tile_m is 8, allowed: 32, 64"),
        ({"dtype": "float16", "tile_m": 8, "cache_dtype": E4M3}, "tile_m is 8, allowed: 32, 64"),
        ({"e4m3_queries": True}, "e4m3_queries is True with tile_m 32, allowed: False"),
        ({"tile_n": 24}, "tile_n is 24, allowed: multiples of 16 from 16 to 128"),
        ({"tile_n": 256}, "tile_n is 256, allowed: multiples of 16 from 16 to 128"),
        ({"tile_n": 0}, "tile_n is 0, allowed: multiples of 16 from 16 to 128"),
        ({"box_rows": 4}, r"box_rows is 4, allowed: one of \(128, 64, 32, 16, 8\) that divides tile_n 128"),
        ({"tile_n": 48, "box_rows": 32}, "box_rows is 32, allowed: one of .* that divides tile_n 48"),
        ({"stages": 1}, "stages is 1, allowed: 2 or more"),
        ({"row_scales": True}, "row_scales is True with tile_m 32, allowed: False"),
        ({"cache_dtype": "int8"}, f"cache_dtype is 'int8', allowed: '{E4M3}', or nothing for dtype"),
        ({"cache_dtype": E4M3, "stages": 2}, "raw_stages is 0, allowed: 2 or more with a cache of e4m3"),
        (
            {"raw_stages": 2},
            "raw_stages is 2, allowed: 2 or more with a cache of e4m3 and tile_m 32 or 64, else 0",
        ),
        ({"cluster": 17}, "cluster is 17, allowed: 1 to 16"),
        ({"cluster": 2, "layout": "varlen"}, "cluster is 2, allowed: 1 with packed queries"),
        ({"cluster": 2, "tile_m": 128, "stages": 2}, "cluster is 2, allowed: 1 with .* two consumers"),
        ({"stages": 8}, rf"the tiles need \d+ bytes of shared memory, allowed: {SMEM_BYTES}"),
    ],
    ids=str,
)
def test_what_no_kernel_can_be_built_from(change: dict[str, Any], message: str) -> None:
    validate_decode_config(COMPILED[0])
    config = replace(COMPILED[0], **change)
    with pytest.raises(ValueError, match=message):
        validate_decode_config(config)
    with pytest.raises(ValueError, match=message):
        DecodeKernel(config)


def launches_of(config: DecodeConfig, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the DSL is told of each launch while the kernels of ``config`` are traced."""
    launches = []
    launch = BaseDSL.LaunchConfig.__post_init__

    def recording(self: Any) -> None:
        launch(self)
        launches.append(self)

    monkeypatch.setattr(BaseDSL.LaunchConfig, "__post_init__", recording)
    compile_ptx(config)
    return launches


def test_neighbouring_heads_are_launched_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CTAs of a pair of K/V heads are a cluster, by what the launch finds of their number; those that put parts
    together are none."""
    asked = []

    def asking(together: Any) -> Any:
        asked.append((together, launched_together(together)))
        return asked[-1][1]

    monkeypatch.setattr("hopper.decode.kernel.launched_together", asking)
    decode, combine = launches_of(SIDE_BY_SIDE, monkeypatch)
    ((together, in_cluster),) = asked
    assert decode.has_cluster and decode.cluster[0] is in_cluster and tuple(decode.cluster[1:]) == (1, 1)
    assert decode.grid[0] is together and combine.grid[0] is together
    assert not combine.has_cluster and decode.use_pdl and combine.use_pdl


def test_ctas_that_share_a_tile_are_one_launch_of_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    (decode,) = launches_of(replace(SIDE_BY_SIDE, limits_splits=False, cluster=8), monkeypatch)
    assert decode.has_cluster and tuple(decode.cluster) == (8, 1, 1) and tuple(decode.grid[1:]) == (1, 1)


@pytest.mark.parametrize("page_size", (8, 16, 64, 128))
def test_boxes_are_a_loop(page_size: int) -> None:
    """Of as much code in pages of any size: two instructions of TMA a block of K or V, of whose 128 columns a box has
    64, where a block is guessed and where one is loaded."""
    config = replace(config_of("bfloat16", (128, 128), page_size, 8), causal=False)
    assert config.guesses and config.boxes == 128 // page_size
    assert ptx_of(config).count("cp.async.bulk.tensor") == 2 * 2 * 2
