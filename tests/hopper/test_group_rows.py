"""Where the query heads of a K/V head stand in the rows of a tile: any number of them, with rows left over."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES, WARPGROUP_ROWS, ForwardConfig, validate_forward_config
from hopper.field_checks import GROUPS
from hopper.forward.fp8.few_tilings import FEW_QUERIES_OF_BLOCKS, select_fp8_few_blocks_config
from hopper.forward.fp8.tilings import FEW_QUERIES, select_fp8_few_queries_config
from hopper.forward.grouped import NOBODYS_QUERY, place_of_row
from hopper.forward.tilings import select_forward_config, select_plain_config, with_group, with_parts
from hopper.group_rows import queries_of_rows, rows_of_queries, used_rows
from tests.compile_pool import usage_of_each
from tests.hopper import on_numpy
from tests.hopper.hopper_machine import SHARED_BYTES, Cta
from tests.hopper.on_numpy import forward_on_numpy, fp8_forward_on_numpy
from tests.hopper.test_few_fp8_queries import draw as draw_fp8
from tests.hopper.test_grouped import LATE, draw

ODD = 3, 5, 6, 7, 12, 24, 40, 48
"""Groups that do not divide the rows of a warpgroup."""

MOST_QUERIES = 300


def places(group: int, queries: int) -> list[tuple[int, int] | None]:
    """Query and head of each row of the warpgroups that have so many queries; None of rows that are nobody's."""
    each = WARPGROUP_ROWS // group
    found: list[tuple[int, int] | None] = []
    for first in range(0, queries, each):
        rows = [(first + query, head) for query in range(each) for head in range(group)]
        found += [*rows, *[None] * (WARPGROUP_ROWS - len(rows))]
    return found


@pytest.mark.parametrize("group", range(1, 65))
def test_rows_and_queries(group: int) -> None:
    of_warpgroup = places(group, 1)
    assert used_rows(group) == WARPGROUP_ROWS - of_warpgroup.count(None)
    every = places(group, MOST_QUERIES)
    end_of = {place[0]: row + 1 for row, place in enumerate(every) if place is not None}
    assert rows_of_queries(0, group) == 0
    for queries in range(1, MOST_QUERIES + 1):
        # A full last warpgroup counts as a whole.
        is_full = queries % (WARPGROUP_ROWS // group) == 0
        end = -(-end_of[queries - 1] // WARPGROUP_ROWS) * WARPGROUP_ROWS if is_full else end_of[queries - 1]
        assert rows_of_queries(queries, group) == end
    for rows in range(0, len(every), WARPGROUP_ROWS):
        assert queries_of_rows(rows, group) == len({place[0] for place in every[:rows] if place})


@pytest.mark.parametrize("group", range(1, 65))
def test_the_place_of_a_row(group: int) -> None:
    """Rows that are nobody's have a query behind all, and a head that there is."""
    found = [place_of_row(row, group) for row in range(len(places(group, MOST_QUERIES)))]
    for (query, head), place in zip(found, places(group, MOST_QUERIES), strict=True):
        assert (query, head) == place if place else query >= NOBODYS_QUERY and 0 <= head < group
        assert query < 2 * NOBODYS_QUERY


def test_rows_of_some_groups() -> None:
    """By hand: 7 heads have 9 queries in 63 rows of a warpgroup."""
    assert [used_rows(group) for group in (1, 2, 3, 5, 6, 7, 12, 24, 33, 40, 48, 64)] == [
        *(64, 64, 63, 60, 60, 63, 60, 48, 33, 40, 48, 64)
    ]
    assert [rows_of_queries(queries, 7) for queries in (1, 8, 9, 10, 18, 19)] == [7, 56, 64, 71, 128, 135]
    assert [queries_of_rows(rows, 7) for rows in (64, 128, 192)] == [9, 18, 27]
    assert place_of_row(62, 7) == (8, 6) and place_of_row(64, 7) == (9, 0)
    assert place_of_row(63, 7) == (9 + NOBODYS_QUERY, 0)


def test_heads_of_a_tile() -> None:
    plain = select_forward_config("bfloat16", 128, 128, True, 4096)
    assert set(GROUPS) == set(range(2, 65)) and plain.tile_m == 128
    for group in (0, -1, 65, 128):
        with pytest.raises(ValueError, match=rf"group is {group} and split False, allowed: 1 .* to 64"):
            validate_forward_config(replace(plain, group=group))
        with pytest.raises(ValueError, match=rf"group is {group} and split False, allowed"):
            select_fp8_few_queries_config(128, 128, True, "bfloat16", group, 64, False)
        with pytest.raises(ValueError, match=rf"group is {group} and split False, allowed"):
            select_fp8_few_blocks_config((128, 128), True, "bfloat16", group, 64, False, 128)
    for group in range(1, 65):
        config = with_group(plain, group)
        each = WARPGROUP_ROWS // group
        assert config.tile_queries == 2 * each and config.name.endswith(f"g{group}") == (group > 1)
        for rows in (64, 128, 192):
            high: ForwardConfig = replace(plain, tile_m=rows)
            assert replace(high, group=group).tile_queries == rows // 64 * each
    queries = {group: with_group(plain, group).tile_queries for group in (3, 5, 6, 7, 12, 24, 48)}
    assert queries == {3: 42, 5: 24, 6: 20, 7: 18, 12: 10, 24: 4, 48: 2}


def test_the_height_of_tiles_in_parts() -> None:
    """Of 64 columns, by rows: 9 queries of 7 heads are one warpgroup's, and 18 are two's."""
    plain = select_forward_config("bfloat16", 64, 64, True, 4096)
    heights = {n: with_parts(plain, 7, rows_of_queries(n, 7)).tile_m for n in (1, 9, 10, 18, 19, 27, 200)}
    assert heights == {1: 64, 9: 64, 10: 128, 18: 128, 19: 192, 27: 192, 200: 192}


def compiled() -> tuple[ForwardConfig, ...]:
    """Of 16 bits with one group for each head_dim, and of e4m3 with 7 heads."""
    found: list[ForwardConfig] = []
    for head_dim, group in ((64, 7), (96, 12), (128, 3), (192, 6), (256, 5)):
        short = select_plain_config("bfloat16", head_dim, head_dim, False, 1024)
        packed = select_forward_config("bfloat16", head_dim, head_dim, True, 0, layout="varlen")
        found += [with_group(short, group), with_group(packed, group), with_parts(packed, group, 200)]
    for head_dim, rows in ((64, 192), (128, 64), (128, 128), (256, 128)):
        of_tile = 7, rows
        found.append(select_fp8_few_queries_config(head_dim, head_dim, True, "bfloat16", *of_tile, False))
        found.append(
            select_fp8_few_queries_config(head_dim, head_dim, True, "bfloat16", *of_tile, True, "varlen")
        )
        blocks = *of_tile, True, 128
        found.append(select_fp8_few_blocks_config((head_dim, head_dim), True, "bfloat16", *blocks))
    return tuple(found)


COMPILED = compiled()


def test_no_register_is_spilled() -> None:
    """A division by a number that is no power of two takes more of them."""
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 27


def test_tables_have_tiles_for_all_groups() -> None:
    for group in ODD:
        for head_dim, tiles in FEW_QUERIES.items():
            for rows in tiles:
                config = select_fp8_few_queries_config(
                    head_dim, head_dim, True, "bfloat16", group, rows, False
                )
                assert config.tile_queries == rows // 64 * (64 // group)
        for head_dim, rows_of in FEW_QUERIES_OF_BLOCKS.items():
            for rows in rows_of:
                config = select_fp8_few_blocks_config(
                    (head_dim,) * 2, True, "bfloat16", group, rows, True, 128
                )
                assert config.tile_queries == rows // 64 * (64 // group)


GARBAGE = 0xCB, 0x00, 0x7F, 0xFF
"""Bytes that shared memory is full of before: numbers, zeros, and NaN of both signs, of 16 bits and of e4m3."""


def with_garbage(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    def cta(*given, **named) -> Cta:
        return Cta(*given, shared=np.full(SHARED_BYTES, byte, np.uint8), **named)

    monkeypatch.setattr(on_numpy, "Cta", cta)


def same(first: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "head_dim,causal,group", [(64, True, 7), (128, False, 40), (128, True, 12), (256, False, 5)]
)
def test_rows_that_are_nobodys_change_no_other(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool, group: int
) -> None:
    """What they hold is what was in shared memory before."""
    q, k, v = draw(((1, 19, group, head_dim), *[(1, 150, 1, head_dim)] * 2))
    config = with_group(select_plain_config("bfloat16", head_dim, head_dim, causal, 150), group)
    results = []
    for byte in GARBAGE:
        with_garbage(monkeypatch, byte)
        results.append(forward_on_numpy(config, q, k, v, head_dim**-0.5, 2, LATE))
    assert all(same(results[0], other) for other in results[1:])
    assert bool((results[0][1] > -math.inf).all())


@pytest.mark.parametrize("head_dim,rows,causal,group", [(128, 64, True, 7), (256, 128, False, 12)])
def test_rows_of_e4m3_that_are_nobodys_change_no_other(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, rows: int, causal: bool, group: int
) -> None:
    parts, _ = draw_fp8(head_dim, (14, 200), group)
    config = select_fp8_few_queries_config(head_dim, head_dim, causal, "bfloat16", group, rows, False)
    results = []
    for byte in GARBAGE:
        with_garbage(monkeypatch, byte)
        results.append(fp8_forward_on_numpy(config, parts, 0.05, LATE))
    assert all(same(results[0], other) for other in results[1:])
