"""The kernel for decoding over a latent, run from its PTX without a GPU, against float64; what ptxas makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES
from hopper.inspection import ResourceUsage
from hopper.mla.config import (
    REGISTERS,
    VALUES_REGISTERS,
    MlaConfig,
    box_rows_for,
    holds_values,
    query_box_of,
    select_mla_config,
    validate_mla_config,
)
from hopper.mla.schedule import tiles_together
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.decode_on_numpy import Launch, Queries
from tests.hopper.hopper_machine import Timing
from tests.hopper.mla_on_numpy import mla_on_numpy
from tests.hopper.on_numpy import NO_RULES, Rules
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.test_kernels_on_numpy import EPSILON
from tests.hopper.wgmma_hazards import find_hazards
from tests.plans import Packed
from tests.ptx import ptx_of

LATE = Timing(is_late=True, seed=1)


def config_of(
    dtype: str, causal: bool, rows: int, page_size: int = 64, pages: int = 8, **others: Any
) -> MlaConfig:
    found = select_mla_config(dtype, 512, causal, page_size, pages, rows, **others)
    assert found is not None
    return found


SHORT = config_of("bfloat16", False, 16)
CLUSTER = config_of("bfloat16", True, 128, limits_splits=True)
EVERYTHING = {"window": True, "chunk": True, "layout": "varlen", "softcap": True, "sinks": True}
BOXES = config_of("bfloat16", True, 128, group=128)
SMALL_BOXES = config_of("float16", True, 64, 16, group=16)
PACKED = config_of("bfloat16", True, 128, 16, layout="varlen")
NARROW = replace(
    config_of("float16", True, 64, 1000, 1, paged=False, leftpad=True, **EVERYTHING),
    head_dim_v=256,
    box_rows=16,
)

COMPILED = [
    SHORT,
    CLUSTER,
    config_of("float16", True, 64, 16),
    PACKED,
    config_of("bfloat16", True, 128, 16, limits_splits=True, sinks=True),
    BOXES,
    SMALL_BOXES,
    config_of("bfloat16", True, 128, 16, group=64, window=True, chunk=True, softcap=True, sinks=True),
    replace(NARROW, stages=4),
]
"""With 512 columns and all features together packed queries of a cluster spill two registers."""

SINKS = torch.linspace(-1.0, 2.0, 16)


@pytest.fixture(scope="module")
def usages() -> dict[MlaConfig, ResourceUsage]:
    return usage_of_each(COMPILED)


@pytest.mark.parametrize("config", COMPILED, ids=lambda config: config.name)
def test_kernels_compile_without_spills(config: MlaConfig, usages: dict[Any, ResourceUsage]) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0
    assert usage.registers * config.threads <= 65536
    assert REGISTERS.consumer + VALUES_REGISTERS + REGISTERS.producer <= 3 * usage.registers
    assert usage.shared_bytes <= SMEM_BYTES


@pytest.mark.parametrize("config", [SHORT, CLUSTER, BOXES], ids=lambda config: config.name)
def test_nothing_touches_a_product_in_flight(config: MlaConfig) -> None:
    count, hazards = find_hazards(ptx_of(config))
    # Two sites of S with 36 steps each, and of P V two of each warpgroup.
    assert count >= 2 * 36 and hazards == []


@pytest.mark.parametrize(
    ("page_size", "pages", "rows", "box_rows"),
    [
        (64, 8, 16, 64),
        (64, 8, 65, 32),
        (256, 8, 16, 64),
        (16, 8, 65, 16),
        (24, 8, 16, 8),
        (12, 8, 16, None),
        (7, 1, 16, 64),
    ],
)
def test_rows_of_a_box(page_size: int, pages: int, rows: int, box_rows: int | None) -> None:
    assert box_rows_for(page_size, pages, rows) == box_rows
    config = select_mla_config("bfloat16", 512, True, page_size, pages, rows)
    assert (config is None) == (box_rows is None)


@pytest.mark.parametrize(
    ("columns", "rows", "held"),
    [(512, 32, False), (512, 33, True), (512, 65, True), (256, 64, False), (256, 65, True)],
)
def test_values_are_held_back_by_rows(columns: int, rows: int, held: bool) -> None:
    assert holds_values(columns, rows) == held
    config = select_mla_config("bfloat16", columns, True, 64, 8, rows)
    assert config is not None and config.holds_values == held


@pytest.mark.parametrize(
    ("group", "rows", "layout", "box"),
    [
        (128, 128, "dense", 64),
        (64, 64, "dense", 64),
        (192, 192, "dense", 64),
        (48, 48, "dense", 16),
        (16, 64, "dense", 16),
        (40, 80, "dense", 0),
        (32, 32, "dense", 0),
        (128, 128, "varlen", 0),
    ],
)
def test_boxes_of_queries(group: int, rows: int, layout: str, box: int) -> None:
    assert query_box_of(group, rows, layout) == box
    config = select_mla_config("bfloat16", 512, True, 64, 8, rows, group, layout)
    assert config is not None and config.query_box == box
    assert (f"_q{box}" in config.name) == (box > 0)


@pytest.mark.parametrize(
    ("config", "box"),
    [(BOXES, 32), (SHORT, 16), (replace(BOXES, layout="varlen"), 64), (replace(BOXES, tile_n=32), 64)],
)
def test_boxes_that_there_are_not(config: MlaConfig, box: int) -> None:
    with pytest.raises(ValueError, match=r"^query_box"):
        validate_mla_config(replace(config, query_box=box, box_rows=16))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("dtype", "float32"),
        ("layout", "paged"),
        ("head_dim_v", 384),
        ("tile_n", 48),
        ("cluster", 3),
        ("cta_rows", 16),
        ("box_rows", 128),
        ("stages", 1),
        ("stages", 3),
    ],
)
def test_configs_that_no_kernel_is_built_from(field: str, wrong: Any) -> None:
    named = "the tiles need" if (field, wrong) == ("stages", 3) else field
    with pytest.raises(ValueError, match=f"^{named}"):
        validate_mla_config(replace(SHORT, **{field: wrong}))


@dataclass(frozen=True)
class Case:
    """Queries and keys of each sequence, the columns of K and of V, and the softmax_scale times the root of both."""

    config: MlaConfig
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    launch: Launch
    heads: tuple[int, int]
    columns: tuple[int, int] = (64, 512)
    pads: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    rules: Rules = NO_RULES
    scale: float = 0.8


def draw(case: Case) -> tuple[Queries, Tensor, Cache]:
    """q, qv and a cache; packed queries have rows of no sequence behind them, all others are as many as the first."""
    dtype = getattr(torch, case.config.dtype)
    d, dv = case.columns
    cache = Cache.draw(case.keys, case.page_size, case.heads[1], case.columns, dtype, case.pads)
    generator = torch.Generator().manual_seed(1)
    packed = Packed.of(case.queries, behind=3) if case.config.layout == "varlen" else None
    rows = (len(case.keys), case.queries[0]) if packed is None else (packed.total,)
    both = torch.randn(*rows, case.heads[0], d + dv, generator=generator).to(dtype)
    return Queries(both[..., dv:], packed), both[..., :dv], cache


def check(case: Case) -> None:
    queries, qv, cache = draw(case)
    scale = case.scale * sum(case.columns) ** -0.5
    out, lse = mla_on_numpy(case.config, queries, qv, cache, scale, case.launch, case.sides, case.rules)
    second = replace(queries, q=qv)
    left, right, *chunk = case.sides or (UNLIMITED, UNLIMITED)
    for number, keys in enumerate(cache.rows):
        q = queries.of(number)
        if not q.shape[0]:
            continue
        exact, exact_lse = attention_naive(
            q[None],
            *(x[None] for x in keys),
            causal=case.config.causal,
            softmax_scale=scale,
            window_left=left,
            window_right=UNLIMITED if case.config.causal else right,
            attention_chunk=chunk[0] if chunk else 0,
            softcap=case.rules.softcap,
            sinks=case.rules.sinks,
            qv=second.of(number)[None],
        )
        got, got_lse = queries.rows(out, lse, number)
        assert (got.double() - exact[0]).norm() <= EPSILON[out.dtype] * exact.norm(), number
        seen = exact_lse[0] > -math.inf
        assert bool((got_lse[~seen] == -math.inf).all())
        error = (got_lse.double() - exact_lse[0])[seen].abs()
        assert bool((error <= 3e-6 * exact_lse[0][seen].abs().clamp(min=1.0)).all()), number


def test_few_heads_in_pages() -> None:
    """A tile in several parts, several tiles in a piece, tails of NaN, and a sequence without keys."""
    check(Case(SHORT, (1, 1, 1), (200, 0, 65), 64, Launch(3, timing=LATE), (16, 1)))


def test_a_tile_in_many_parts() -> None:
    """Ten, which the warps of a CTA add up together."""
    check(Case(SHORT, (1,), (630,), 64, Launch(10, timing=LATE), (16, 1)))


@pytest.mark.parametrize(("lengths", "ctas"), [((190, 20), 4), ((370, 10), 7)])
def test_a_tile_in_few_parts(lengths: tuple[int, ...], ctas: int) -> None:
    """Three and six, which a warp adds up by itself, and loads as if they were four or eight."""
    check(Case(SHORT, (1, 1), lengths, 64, Launch(ctas, timing=LATE), (16, 1)))


def test_a_tile_in_many_parts_by_the_rows_of_a_warp() -> None:
    """Nineteen, which a warp adds up by itself, a lane for the sums of each."""
    check(Case(SHORT, (1,), (1200,), 64, Launch(19, timing=LATE), (16, 1)))


@pytest.mark.parametrize(("sequences", "ctas"), [(70, 5), (33, 40)])
def test_more_sequences_than_lanes(sequences: int, ctas: int) -> None:
    """Three or two a lane, the last lanes none; pieces of many tiles, and more pieces than tiles."""
    lengths = tuple(7 * n % 90 for n in range(sequences))
    check(Case(SHORT, (1,) * sequences, lengths, 64, Launch(ctas, timing=LATE), (16, 1)))


def test_more_packed_sequences_than_lanes() -> None:
    """Two a lane, of no, one and two tokens each, in pieces of several tiles."""
    queries, lengths = tuple(n % 3 for n in range(35)), tuple(11 * n % 150 for n in range(35))
    check(Case(PACKED, queries, lengths, 16, Launch(4, timing=LATE), (40, 1)))


def test_tiles_count_as_more_than_their_blocks() -> None:
    """35 blocks in two pieces: two more for each of the two tiles."""
    check(Case(SHORT, (1, 1), (1530, 650), 64, Launch(2, timing=LATE), (16, 1)))


def test_pieces_alike_are_fewer() -> None:
    """16 blocks, and so many pieces of 17: no tile is cut but in like parts, and one CTA has nothing."""
    check(Case(SHORT, (1, 1), (512, 500), 64, Launch(17, timing=LATE), (16, 1)))


def test_a_maximum_that_lags_behind() -> None:
    """Some blocks have maxima that are more than ``LAG`` octaves above those of the blocks before, most have not."""
    check(Case(SHORT, (1, 1), (650, 200), 64, Launch(2, timing=LATE), (16, 1), scale=8.0))


def test_two_ctas_share_keys() -> None:
    """Tokens of a step under a causal mask, 80 rows, of which the second CTA of the cluster has 16."""
    check(Case(CLUSTER, (2, 2), (130, 64), 64, Launch(2, max_splits=2, timing=LATE), (40, 1)))


def test_rows_by_tma() -> None:
    """Two pieces: a whole tile, whose O leaves by TMA, a sequence without keys, and one in two parts."""
    check(Case(BOXES, (1, 1, 1), (330, 0, 520), 64, Launch(2, timing=LATE), (128, 1)))


def test_rows_in_small_boxes_by_tma() -> None:
    """Two tokens of 16 heads for each of two K/V heads: half of the rows of a tile, behind which Q has none."""
    check(Case(SMALL_BOXES, (2, 2), (130, 400), 16, Launch(2, timing=LATE), (32, 2)))


def test_more_tiles_than_one_by_tma() -> None:
    """Three tokens of 48 heads, 144 rows: the second tile of each has 16, and visits the keys with the first."""
    config = replace(BOXES, query_box=16)
    check(Case(config, (3, 3), (70, 64), 64, Launch(2, timing=LATE), (48, 1)))


@pytest.mark.parametrize(
    ("lengths", "clusters"),
    [
        # Two rows of blocks, a piece each: no tile is in parts.
        ((130, 0, 64), 2),
        # In two pieces each, and tiles in parts.
        ((330, 60), 4),
        # More pieces than tiles.
        ((200,), 6),
        # A cluster is left over.
        ((200, 150), 17),
    ],
)
def test_tiles_that_visit_the_same_keys_at_the_same_time(lengths: tuple[int, ...], clusters: int) -> None:
    """Two tokens of 128 heads, under a causal mask: two tiles of each sequence."""
    assert tiles_together(2, clusters) == 2
    queries = (2,) * len(lengths)
    check(Case(BOXES, queries, lengths, 64, Launch(clusters, timing=LATE), (128, 1)))


def test_tiles_of_two_heads_that_visit_the_same_keys_at_the_same_time() -> None:
    """Four tiles of each of two K/V heads, two of them at a time, of which the last has few rows."""
    config = replace(BOXES, query_box=16)
    assert tiles_together(4, 6) == 2
    check(Case(config, (5, 5), (70, 130), 64, Launch(6, timing=LATE), (160, 2)))


def test_everything_at_once() -> None:
    """Columns that TMA fills up, packed queries, one page of any size behind a leftpad, chunks in a window, a cap and
    sinks."""
    rules = Rules(softcap=4.0, sinks=SINKS)
    sides = 20, 0, 64
    launch = Launch(2, timing=LATE)
    check(Case(NARROW, (3, 0, 1), (70, 30, 10), 128, launch, (16, 1), (40, 248), (3, 0, 60), sides, rules))
