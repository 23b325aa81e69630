"""Decode kernels that guess their first key block by what they find before they may read it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from tests.hopper.decode_on_numpy import NOT_OLDER, Descales, Launch, Older, Queries, decode_on_numpy
from tests.hopper.hopper_machine import AT_ONCE
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.test_decode import (
    BIG,
    CAP_AND_SINKS,
    CLUSTERED,
    LATE,
    PADDED,
    Case,
    check,
    draw,
    same,
    without_nan,
)
from tests.ptx import ptx_of

IN_PAGES = Case(CLUSTERED, (1,), (330, 31, 64), 16, Launch(24, timing=LATE))
WITH_PADS = Case(
    replace(PADDED, tile_m=32, cluster=3),
    (9,),
    (90, 61),
    131,
    Launch(12, timing=LATE),
    pads=(7, 50),
    sides=(30, 4),
    rules=CAP_AND_SINKS,
)
IN_PIECES = Case(
    DecodeConfig("bfloat16", 128, 128, True, 128, 2, 16), (1,), (330, 31, 64), 16, Launch(6, timing=LATE)
)
SHARED_OUT = {"clusters": IN_PAGES, "pieces": IN_PIECES}
FILLED = {
    "a token fewer": (329, 30, 63),
    "none": (0, 0, 0),
    "others'": (64, 330, 31),
    "more than there is room for": (BIG, BIG, BIG),
    "no lengths": (-1, -BIG - 1, -7),
    "one block fewer": (298, 0, 32),
}


def found(case: Case, queries: Queries, cache: Cache, older: Older = NOT_OLDER) -> tuple[Tensor, Tensor]:
    given = case.sides, case.rules, Descales(), (), None, older
    return decode_on_numpy(case.config, queries, cache, 0.1, case.launch, *given)


def drawn(case: Case) -> tuple[Queries, Cache]:
    queries, cache = draw(case)
    return queries, without_nan(cache)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("timing", (LATE, AT_ONCE), ids=("late", "at once"))
@pytest.mark.parametrize("case", SHARED_OUT.values(), ids=SHARED_OUT)
def test_lengths_that_change_meanwhile(case: Case, name: str, timing: object) -> None:
    """What a guess finds is used where it is right, and loaded anew where it is not: the same bits."""
    assert case.config.guesses
    case = replace(case, launch=replace(case.launch, timing=timing))
    queries, cache = drawn(case)
    assert same(found(case, queries, cache, Older(ints(*FILLED[name]))), found(case, queries, cache))


@pytest.mark.parametrize("case", SHARED_OUT.values(), ids=SHARED_OUT)
def test_pages_that_change_meanwhile(case: Case) -> None:
    queries, cache = drawn(case)
    expected = found(case, queries, cache)
    others = (
        torch.roll(cache.table, 1, 0),
        torch.full_like(cache.table, -5),
        torch.full_like(cache.table, BIG),
    )
    for table in others:
        assert same(found(case, queries, cache, Older(table=table.contiguous())), expected)


def test_left_pads_that_change_meanwhile() -> None:
    queries, cache = drawn(WITH_PADS)
    expected = found(WITH_PADS, queries, cache)
    for pads, filled in (
        ((50, 7), (97, 111)),
        ((-3, BIG), (97, 111)),
        ((131, 0), (0, 131)),
        ((7, 50), (96, 110)),
    ):
        assert same(found(WITH_PADS, queries, cache, Older(ints(*filled), leftpad=ints(*pads))), expected)


@pytest.mark.parametrize("case", SHARED_OUT.values(), ids=SHARED_OUT)
def test_a_block_that_is_not_the_first_one_is_not_seen(case: Case) -> None:
    """Wrong guesses load other keys here, and NaN where there are none: neither reaches the results."""
    queries, cache = draw(case)
    clean = found(case, queries, cache)
    for filled in FILLED.values():
        assert same(found(case, queries, cache, Older(ints(*filled))), clean)


def test_more_pieces_than_blocks() -> None:
    """CTAs that have none guess none, or that of another."""
    case = replace(IN_PIECES, launch=Launch(16, timing=LATE))
    check(case)
    queries, cache = drawn(case)
    expected = found(case, queries, cache)
    for filled in FILLED.values():
        assert same(found(case, queries, cache, Older(ints(*filled))), expected)


def test_nothing_but_lists_is_read_before_the_wait() -> None:
    """Keys may be written by what is before, and so may be what is written here read by it."""
    for case in (IN_PAGES, WITH_PADS, IN_PIECES):
        (kernel, *_) = ptx_of(case.config).split(".visible .entry ")[1:]
        before, after = kernel.split("griddepcontrol.wait;")
        loads = re.findall(r"^\s*((?:ld|st|red|atom)\.\S*global\S*|cp\.async\S*)", before, re.MULTILINE)
        assert loads and set(loads) == {"ld.relaxed.gpu.global.b32"}
        assert "griddepcontrol.launch_dependents" not in before and "ld.relaxed" not in after
        lists = 1 + int(case.config.paged) + int(case.config.leftpad)
        assert len(set(re.findall(r"ld\.relaxed\S* \S+ \[(%rd\d+)\]", before))) >= lists
