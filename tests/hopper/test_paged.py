"""The forward kernel on the pages of a cache, run from its PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hopper.config import ForwardConfig, validate_forward_config
from hopper.forward.tilings import (
    END_TO_END,
    ONE_PAGE,
    PAGE_ROWS,
    select_forward_config,
    select_paged_config,
)
from hopper.inspection import ResourceUsage
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import NO_RULES, Rules
from tests.hopper.paged_on_numpy import Cache, paged_forward_on_numpy
from tests.hopper.test_kernels_on_numpy import EPSILON, relative
from tests.plans import Packed

LATE = Timing(is_late=True, seed=1)


@dataclass(frozen=True)
class Case:
    """Queries and keys of each sequence; all else has a default."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    head_dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    pads: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    rules: Rules = NO_RULES
    heads: tuple[int, int] = (2, 1)


def config_of(case: Case) -> ForwardConfig:
    """What is selected, but with fewer small boxes to a tile, which compiles in half of the time or less."""
    name = str(case.dtype).removeprefix("torch.")
    page_rows = ONE_PAGE if case.pads else next(n for n in PAGE_ROWS if case.page_size % n == 0)
    config = select_paged_config(name, *case.head_dims, case.causal, page_rows, bool(case.sides))
    if config.page_box <= 16:
        config = replace(config, tile_n=48)
        validate_forward_config(config)
    of_rules = {
        "softcap": bool(case.rules.softcap),
        "alibi": case.rules.slopes is not None,
        "sinks": case.rules.sinks is not None,
    }
    return replace(config, chunk=len(case.sides) > 2, **of_rules)


def oracle(case: Case, q: Tensor, keys: tuple[Tensor, Tensor], number: int) -> tuple[Tensor, Tensor]:
    left, right, *chunk = case.sides or (UNLIMITED, UNLIMITED)
    slopes = case.rules.slopes
    return attention_naive(
        q[None],
        *(x[None] for x in keys),
        causal=case.causal,
        window_left=left,
        window_right=UNLIMITED if case.causal else right,
        attention_chunk=chunk[0] if chunk else 0,
        softcap=case.rules.softcap,
        alibi_slopes=None if slopes is None else slopes[number],
        sinks=case.rules.sinks,
    )


def check(case: Case, ctas: int = 2) -> None:
    config = config_of(case)
    heads, kv_heads = case.heads
    cache = Cache.draw(case.keys, case.page_size, kv_heads, case.head_dims, case.dtype, case.pads)
    behind = 3
    rows = Packed.of(case.queries, behind)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows.total, heads, case.head_dims[0], generator=generator).to(case.dtype)
    scale = case.head_dims[0] ** -0.5
    out, lse = paged_forward_on_numpy(config, q, cache, rows, scale, ctas, LATE, case.sides, case.rules)
    for number, keys in enumerate(cache.rows):
        span = slice(*rows.cu_seqlens[number : number + 2])
        if span.start == span.stop:
            continue
        exact, exact_lse = oracle(case, q[span], keys, number)
        seen = exact_lse > -math.inf
        got, got_lse = out[None, span], lse[None, :, span]
        assert bool((got.transpose(1, 2)[~seen] == 0).all()) and bool((got_lse[~seen] == -math.inf).all())
        if keys[0].shape[0] and bool(seen.any()):
            assert relative(got, exact) < EPSILON[out.dtype], number
            assert (got_lse.double() - exact_lse)[seen].abs().max() < 3e-6
    assert bool((out[-behind:] == 0).all())


SLOPES = torch.tensor([[0.5, 0.125], [0.25, 0.0625]])

CASES = {
    "pages of 16, shuffled, one sequence empty": Case((70, 5, 3), (300, 0, 37), 16),
    "pages of 128, more keys than a page": Case((9, 66), (130, 300), 128),
    "one page each, from an odd row on": Case((70, 4), (201, 131), 333, pads=(9, 77)),
    "pages of 24 in boxes of 8, a window": Case((80,), (290,), 24, sides=(70, 0)),
    "pages of 64 in two boxes, a chunk, both sides": Case(
        (80, 40), (290, 33), 64, causal=False, sides=(50, 20, 96), dtype=torch.float16
    ),
    "d128 in pages of 16, three heads a key": Case((66,), (370,), 16, (128, 128), heads=(3, 1)),
    "d128 in pages of 128, Q in registers": Case((100, 7), (300, 129), 128, (128, 128), torch.float16),
    "d256, scores changed": Case(
        (40, 30), (170, 90), 16, (256, 256), rules=Rules(20.0, SLOPES, torch.tensor([0.5, -1.0]))
    ),
    "other columns of values, smaller than the tile": Case((30,), (150,), 32, (104, 40), causal=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("seed", [2, 3])
def test_neither_the_grid_nor_the_order_of_warps_changes_a_bit(seed: int) -> None:
    """Tiles of 1 to 4 blocks of 48 keys; the second grid is larger than there are tiles."""
    case = Case((3, 3, 3, 3), (180, 40, 60, 130), 16)
    cache = Cache.draw(case.keys, case.page_size, 1, case.head_dims, case.dtype)
    rows = Packed.of(case.queries)
    q = torch.randn(rows.total, 2, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    few, many = (
        paged_forward_on_numpy(config_of(case), q, cache, rows, 0.125, ctas, timing)
        for ctas, timing in ((1, Timing(is_late=True, seed=seed)), (11, Timing()))
    )
    assert all(map(torch.equal, few, many)) and bool(few[0].isfinite().all())


def test_numbers_of_pages_out_of_range_are_those_of_the_nearest() -> None:
    """And left pads end with their page, so that nothing outside of the cache is read."""
    case = Case((20,), (150,), 16)
    cache = Cache.draw(case.keys, case.page_size, 1, case.head_dims, case.dtype)
    cache.k[cache.k.isnan()], cache.v[cache.v.isnan()] = 0.5, 0.25
    last = cache.k.shape[0] - 1
    wild, tame = cache.table.clone(), cache.table.clone()
    wild[0, :4], tame[0, :4] = (
        torch.tensor([-5, 2**31 - 1, -(2**31), last + 1]),
        torch.tensor([0, last, 0, last]),
    )
    q = torch.randn(20, 1, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = [
        paged_forward_on_numpy(config_of(case), q, replace(cache, table=table), Packed.of((20,)), 0.125)
        for table in (wild, tame)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)) and bool(
        results[0][0].isfinite().all()
    )
    contiguous = Cache.draw((60,), 64, 1, case.head_dims, case.dtype, (4,))
    config = config_of(replace(case, pads=(4,)))
    for pad in (-7, 64, 2**31 - 1):
        leftpad = torch.tensor([pad], dtype=torch.int32)
        wild_pad = replace(contiguous, leftpad=leftpad)
        out, _ = paged_forward_on_numpy(config, q, wild_pad, Packed.of((20,)), 0.125)
        assert bool((out == 0).all()) or pad < 0


COMPILED = [
    select_paged_config("bfloat16", 96, 96, True, 16),
    select_paged_config("bfloat16", 128, 128, True, 16),
    select_paged_config("bfloat16", 128, 128, True, 128),
    select_paged_config("float16", 128, 128, True, 64),
    select_paged_config("bfloat16", 128, 128, True, ONE_PAGE),
    replace(select_paged_config("bfloat16", 128, 128, True, 16), softcap=True, alibi=True, sinks=True),
    select_paged_config("bfloat16", 192, 128, True, 128),
    select_paged_config("bfloat16", 256, 256, True, 16, True),
    replace(
        select_paged_config("bfloat16", 128, 128, True, 16, True),
        softcap=True,
        alibi=True,
        sinks=True,
        chunk=True,
    ),
]


@pytest.fixture(scope="module")
def usages() -> dict[ForwardConfig, ResourceUsage]:
    return usage_of_each(COMPILED)


@pytest.mark.parametrize("config", COMPILED, ids=lambda config: config.name)
def test_kernels_compile_without_spills(config, usages) -> None:
    usage = usages[config]
    assert usage.local_bytes == 0


def test_queries_are_kept_in_registers_where_that_is_faster() -> None:
    """On pages under a causal mask alone, at head_dim 128; turns stay where they have not been timed against."""
    for dtype in ("bfloat16", "float16"):
        configs = [select_paged_config(dtype, 128, 128, True, rows) for rows in (16, 64, 128)]
        assert all(c.keeps_q and c.walks_apart and (c.tile_n, c.stages) == (128, 3) for c in configs)
    kept = configs[0]
    changed = [replace(kept, **{name: True}) for name in ("softcap", "alibi", "sinks")]
    assert all(c.walks_apart and not c.keeps_q for c in changed)
    others = [
        *(select_paged_config("bfloat16", 128, 128, True, rows) for rows in (8, ONE_PAGE, END_TO_END)),
        select_paged_config("bfloat16", 128, 128, True, 64, True),
        select_paged_config("bfloat16", 128, 128, False, 64),
    ]
    assert all(c.ping_pong and not c.keeps_q for c in others)
    assert not select_paged_config("bfloat16", 64, 64, True, 64).keeps_q
    assert not select_forward_config("bfloat16", 128, 128, True, 4096).keeps_q


@pytest.mark.parametrize(
    "change", [{"page_box": 24}, {"page_box": 4}, {"page_box": 256}, {"layout": "dense"}], ids=str
)
def test_boxes_that_no_kernel_has(change: dict[str, object]) -> None:
    config = select_paged_config("bfloat16", 64, 64, True, 16)
    with pytest.raises(ValueError, match=r"page_box is .* allowed: 0, or with 'varlen' multiples of 8"):
        validate_forward_config(replace(config, **change))
