"""The decode kernel, and the one that puts parts together, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import E4M3, DecodeConfig, select_decode_config
from hopper.decode.producer import EVICT_FIRST
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference import attention_naive
from tests.hopper import decode_on_numpy as decode_steps
from tests.hopper.decode_on_numpy import Descales, Launch, Queries, decode_on_numpy
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import NO_RULES, Rules
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.test_kernels_on_numpy import EPSILON
from tests.plans import Packed

LATE = Timing(is_late=True, seed=1)

PAGED = DecodeConfig("bfloat16", 64, 64, True, 32, 2, 16, limits_splits=True)
CLUSTERED = replace(PAGED, limits_splits=False, cluster=4)
PADDED = DecodeConfig(
    "bfloat16",
    64,
    64,
    False,
    16,
    3,
    8,
    64,
    window=True,
    paged=False,
    leftpad=True,
    softcap=True,
    sinks=True,
)
PACKED = DecodeConfig("float16", 128, 128, True, 16, 2, 16, layout="varlen", limits_splits=True)
CHUNKED = DecodeConfig("bfloat16", 64, 256, True, 32, 2, 8, window=True, chunk=True, layout="varlen")
PAIRED = replace(PAGED, tile_m=128, softcap=True, sinks=True)
WIDENED = DecodeConfig("bfloat16", 64, 128, True, 32, 2, 16, sinks=True, cache_dtype=E4M3, raw_stages=2)

SWAPPED = replace(WIDENED, tile_n=64, stages=3, raw_stages=0, tile_m=8)
SWAPPED_4 = replace(SWAPPED, tile_m=4, tile_n=128, head_dim=128, box_rows=128, paged=False, leftpad=True)
SWAPPED_16 = replace(SWAPPED, tile_m=16, head_dim=192, head_dim_v=64, window=True, limits_splits=True)


def _config_of_many_rows(head_dim: int, head_dim_v: int) -> DecodeConfig:
    """Of an e4m3 cache."""
    found = select_decode_config(
        "bfloat16", head_dim, head_dim_v, True, 16, 8, 34, sinks=True, cache_dtype=E4M3
    )
    assert found is not None and found.tile_n == 16
    return found


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CAP_AND_SINKS = Rules(softcap=4.0, sinks=SINKS)


@dataclass(frozen=True)
class Case:
    """Queries and keys of each sequence; ``columns`` are those of K and V, where they are fewer than the config's."""

    config: DecodeConfig
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    launch: Launch
    heads: tuple[int, int] = (4, 2)
    columns: tuple[int, int] = (0, 0)
    pads: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    rules: Rules = NO_RULES


def draw(case: Case) -> tuple[Queries, Cache]:
    """Packed queries have rows of no sequence behind them; all others are as many as the first sequence has."""
    c = case.config
    dtype = getattr(torch, c.dtype)
    d, dv = case.columns[0] or c.head_dim, case.columns[1] or c.head_dim_v
    stored = getattr(torch, c.cache_dtype or c.dtype)
    cache = Cache.draw(case.keys, case.page_size, case.heads[1], (d, dv), stored, case.pads)
    generator = torch.Generator().manual_seed(1)
    if c.layout != "varlen":
        shape = len(case.keys), case.queries[0], case.heads[0], d
        return Queries(torch.randn(shape, generator=generator).to(dtype)), cache
    packed = Packed.of(case.queries, behind=9)
    return Queries(torch.randn(packed.total, case.heads[0], d, generator=generator).to(dtype), packed), cache


def oracle(case: Case, q: Tensor, keys: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    left, right, *chunk = case.sides or (UNLIMITED, UNLIMITED)
    out, lse = attention_naive(
        q[None],
        *(x[None] for x in keys),
        causal=case.config.causal,
        softmax_scale=scale,
        window_left=left,
        window_right=UNLIMITED if case.config.causal else right,
        attention_chunk=chunk[0] if chunk else 0,
        softcap=case.rules.softcap,
        sinks=case.rules.sinks,
    )
    return out[0], lse[0]


def check(case: Case) -> None:
    check_numbers(case, *draw(case))


def check_numbers(case: Case, queries: Queries, cache: Cache) -> None:
    scale = 0.8 * queries.q.shape[-1] ** -0.5
    out, lse = decode_on_numpy(case.config, queries, cache, scale, case.launch, case.sides, case.rules)
    if queries.packed is not None:
        behind = queries.packed.cu_seqlens[-1]
        assert bool((out[behind:] == 0).all()) and bool((lse[:, behind:] == -math.inf).all())
    for number, keys in enumerate(cache.rows):
        q = queries.of(number)
        if not q.shape[0]:
            continue
        exact, exact_lse = oracle(case, q, keys, scale)
        got, got_lse = queries.rows(out, lse, number)
        assert (got.double() - exact).norm() <= EPSILON[out.dtype] * exact.norm(), number
        seen = exact_lse > -math.inf
        assert bool((got_lse[~seen] == -math.inf).all())
        error = (got_lse.double() - exact_lse)[seen].abs()
        assert bool((error <= 3e-6 * exact_lse[seen].abs().clamp(min=1.0)).all()), number


OF_E4M3 = {
    **{
        f"widened, {d} and {dv} columns and blocks that are no whole step of all threads": Case(
            _config_of_many_rows(d, dv), (17,), (40, 16, 5), 16, Launch(5, timing=LATE)
        )
        for d, dv in ((192, 192), (64, 192))
    },
    "widened": Case(WIDENED, (3,), (330, 0, 70), 16, Launch(5, timing=LATE)),
    "swapped": Case(SWAPPED, (3,), (330, 0, 70), 16, Launch(5, timing=LATE)),
    "swapped, one row, a leftpad": Case(
        SWAPPED_4, (1,), (300, 0, 129), 512, Launch(3), (4, 4), (96, 128), pads=(3, 0, 40)
    ),
    "swapped, 12 rows, a window": Case(
        SWAPPED_16, (3,), (200, 5), 16, Launch(7, max_splits=2, timing=LATE), (4, 1), sides=(70, 0)
    ),
    "swapped, clusters": Case(
        replace(SWAPPED_4, cluster=7),
        (1,),
        (300, 0, 129),
        512,
        Launch(84),
        (4, 4),
        (96, 128),
        pads=(3, 0, 40),
    ),
    "swapped, queries of e4m3": Case(
        replace(SWAPPED, e4m3_queries=True, layout="varlen"), (3, 0, 1), (100, 9, 40), 16, Launch(2)
    ),
}


def capped(case: Case, **changes: Any) -> Case:
    """The same with a softcap, in other kernels."""
    return replace(case, config=replace(case.config, softcap=True, **changes))


OF_E4M3 |= {
    **{
        f"{name}, a softcap": capped(OF_E4M3[name])
        for name in (
            "widened",
            "swapped",
            "swapped, one row, a leftpad",
            "swapped, 12 rows, a window",
            "swapped, clusters",
            "swapped, queries of e4m3",
        )
    },
    "widened, a softcap, float16": capped(OF_E4M3["widened"], dtype="float16"),
    "widened, 64 rows, a softcap, a window": capped(
        replace(OF_E4M3["widened"], queries=(17,), sides=(70, 0)), tile_m=64, window=True
    ),
}


def with_rules(case: Case) -> Case:
    """With sinks, and a cap that scores pass, if there is a softcap."""
    return replace(case, rules=Rules(softcap=0.5 if case.config.softcap else 0.0, sinks=SINKS))


@pytest.mark.parametrize("name", OF_E4M3)
def test_a_cache_of_e4m3(name: str) -> None:
    """A factor for each sequence and K/V head, and where queries are of e4m3 for them."""
    case = with_rules(OF_E4M3[name])
    config, (queries, cache) = case.config, draw(case)
    dtype = getattr(torch, config.dtype)
    kv_heads, of_queries = case.heads[1], torch.ones(len(case.keys), case.heads[0], 1)
    generator = torch.Generator().manual_seed(3)
    q_descale, *descales = torch.rand(3, len(case.keys), kv_heads, generator=generator) + 0.5
    if config.e4m3_queries:
        of_queries = q_descale.repeat_interleave(case.heads[0] // kv_heads, 1)[:, :, None]
        queries = replace(queries, q=queries.q.to(torch.float8_e4m3fn))
    given = Descales(*((x,) for x in descales), (q_descale,) if config.e4m3_queries else ())
    out, lse = decode_on_numpy(
        config, queries, cache, 0.1, case.launch, case.sides, case.rules, given, dtype=dtype
    )
    for number, keys in enumerate(cache.rows):
        k, v = (x.double() * of[number, :, None].double() for x, of in zip(keys, descales, strict=True))
        q = queries.of(number).double() * of_queries[number]
        if not q.shape[0]:
            continue
        exact, exact_lse = oracle(case, q, (k, v), 0.1)
        got, got_lse = queries.rows(out, lse, number)
        assert (got.double() - exact).norm() <= EPSILON[out.dtype] * exact.norm()
        assert (got_lse.double() - exact_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("name", OF_E4M3)
def test_keys_whose_descale_is_zero_or_negative(name: str) -> None:
    """The scores of all keys that a query sees are 0; and a scale that is wrong is told by NaN, but under a softcap,
    which takes scores of any sign."""
    case = with_rules(OF_E4M3[name])
    config, (queries, cache) = case.config, draw(case)
    dtype = getattr(torch, config.dtype)
    if config.e4m3_queries:
        queries = replace(queries, q=queries.q.to(torch.float8_e4m3fn))
    ones = torch.ones(len(case.keys), case.heads[1])
    for of_keys in (0.0, -0.5):
        given = Descales((of_keys * ones,), (ones,), (ones,) if config.e4m3_queries else ())
        out, lse = decode_on_numpy(
            config, queries, cache, 0.1, case.launch, case.sides, case.rules, given, dtype=dtype
        )
        for number, (k, v) in enumerate(cache.rows):
            q = queries.of(number).double()
            if not q.shape[0]:
                continue
            exact, exact_lse = oracle(case, q, (of_keys * k.double(), v.double()), 0.1)
            got, got_lse = queries.rows(out, lse, number)
            if of_keys and not config.softcap:
                assert got.isnan().all() and got_lse.isnan().all()
                continue
            assert (got.double() - exact).norm() <= EPSILON[out.dtype] * exact.norm()
            assert (got_lse.double() - exact_lse).abs().max() <= 1e-5


def test_queries_of_which_one_element_is_far_above_the_others() -> None:
    """By 20 octaves, where the keys have a 0: what is left of the other elements makes the scores."""
    config = replace(SWAPPED, causal=False, sinks=False)
    case = Case(config, (1,), (150,), 16, Launch(2), heads=(config.tile_m, 1))
    queries, cache = draw(case)
    queries.q.mul_(torch.exp2(torch.arange(config.tile_m) / 2.0)[:, None])
    queries.q[..., 5] = 2.0**20
    for keys in (cache.k, cache.rows[0][0]):
        keys.view(torch.uint8)[..., 5] = 0
    ones = (torch.ones(1, 1),)
    _, lse = decode_on_numpy(config, queries, cache, 1.0, case.launch, descales=Descales(ones, ones))
    _, exact = oracle(case, queries.q[0].double(), tuple(x.double() for x in cache.rows[0]), 1.0)
    assert exact.max() > 50
    assert bool(((lse[0].double() - exact).abs() <= 3e-6 * exact.abs().clamp(min=1.0)).all())


BY_ROW = {
    "by token": replace(OF_E4M3["swapped"], config=replace(SWAPPED, row_scales=True)),
    "by token, one row, a leftpad": replace(
        OF_E4M3["swapped, one row, a leftpad"], config=replace(SWAPPED_4, row_scales=True)
    ),
    "by token, clusters": replace(
        OF_E4M3["swapped, clusters"], config=replace(SWAPPED_4, row_scales=True, cluster=2), launch=Launch(24)
    ),
    "by page, two tiles of rows, a window": replace(
        OF_E4M3["swapped, 12 rows, a window"], config=replace(SWAPPED_16, row_scales=True), queries=(6,)
    ),
}
BY_ROW |= {
    f"{name}, a softcap": capped(BY_ROW[name])
    for name in ("by token", "by page, two tiles of rows, a window")
}


def draw_scales(case: Case, cache: Cache, by_page: bool) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(pages, page_size, kv_heads) scales of K and V over several powers of ten, some 0, NaN where no key is; those of
    the keys of each sequence, (keys, kv_heads)."""
    generator = torch.Generator().manual_seed(4)
    pages, page_size, kv_heads, _ = cache.k.shape
    pads, tensors, found = cache.leftpad.tolist() or [0] * len(cache.rows), [], []
    for _ in range(2):
        shape = pages, 1 if by_page else page_size, kv_heads
        drawn = 10.0 ** (2.0 * torch.rand(shape, generator=generator) - 1.5)
        drawn[torch.rand(shape, generator=generator) < 0.05] = 0.0
        given, of_sequences = torch.full_like(drawn, math.nan), []
        for number, (keys, pad) in enumerate(zip(cache.lengths, pads, strict=True)):
            rows = torch.arange(pad, pad + keys)
            places = cache.table[number, rows // page_size].long(), rows % page_size % shape[1]
            given[places] = drawn[places]
            of_sequences.append(drawn[places])
        tensors.append(given.expand(pages, page_size, kv_heads))
        found.append(of_sequences)
    return tensors, found


@pytest.mark.parametrize("name", BY_ROW)
def test_scales_of_single_keys(name: str) -> None:
    case = with_rules(BY_ROW[name])
    config, (queries, cache) = case.config, draw(case)
    tensors, scales = draw_scales(case, cache, "page" in name)
    if not config.paged:
        order = cache.table[:, 0].clamp(max=cache.k.shape[0] - 1).long()
        tensors = [x[order] for x in tensors]
    given = Descales(*((x,) for x in tensors))
    out, lse = decode_on_numpy(
        config, queries, cache, 0.1, case.launch, case.sides, case.rules, given, dtype=torch.bfloat16
    )
    for number, keys in enumerate(cache.rows):
        k, v = (x.double() * of[number][..., None].double() for x, of in zip(keys, scales, strict=True))
        exact, exact_lse = oracle(case, queries.of(number).double(), (k, v), 0.1)
        got, got_lse = queries.rows(out, lse, number)
        assert (got.double() - exact).norm() <= EPSILON[out.dtype] * exact.norm()
        assert (got_lse.double() - exact_lse).abs().max() <= 1e-5


CASES = {
    "one CTA, one sequence empty": Case(PAGED, (1,), (70, 0, 33), 16, Launch(1)),
    "parts of tiles, by piece": Case(PAGED, (1,), (170, 0, 33), 16, Launch(3, timing=LATE)),
    "parts of tiles, by tile": Case(PAGED, (1,), (330, 70), 48, Launch(7, row_ctas=1)),
    "a tile in four parts, one for each warp": Case(PAGED, (1,), (330,), 16, Launch(4), (2, 1)),
    "tiles in more than 16 parts and in more than 32": Case(
        PAGED, (1,), (1090, 2150), 16, Launch(50, timing=LATE), (2, 1)
    ),
    "two K/V heads together, by piece": Case(PAGED, (1,), (170, 0, 33, 90), 16, Launch(6, timing=LATE)),
    "four of eight K/V heads together, by tile": Case(PAGED, (1,), (330,), 16, Launch(12), (8, 8)),
    "pieces that begin behind 32 and 64 sequences": Case(
        PAGED, (1,), (5, 0, 17) * 30 + (90, 1), 16, Launch(7, timing=LATE), (1, 1)
    ),
    "pages that are looked up anew, three K/V heads together": Case(
        PAGED, (1,), (700, 1100), 16, Launch(6, timing=LATE), (3, 3)
    ),
    "no tile in parts": Case(PAGED, (1,), (170, 0, 33), 16, Launch(7, max_splits=1)),
    "tiles in two parts at most": Case(PAGED, (1,), (330, 33), 32, Launch(7, max_splits=2, timing=LATE)),
    "more CTAs than blocks, more queries than keys": Case(PAGED, (3,), (40, 2), 16, Launch(11), (6, 2)),
    "two tiles a K/V head, fewer columns": Case(PAGED, (18,), (75, 50), 16, Launch(3), columns=(40, 24)),
    "two consumers, of which one has few rows": Case(
        PAIRED, (37,), (75, 50), 16, Launch(3, timing=LATE), columns=(40, 24), rules=CAP_AND_SINKS
    ),
    "two consumers, three tiles in parts": Case(
        PAIRED, (130,), (170, 0), 16, Launch(5, row_ctas=1), rules=CAP_AND_SINKS
    ),
    "more sequences than four times the lanes": Case(
        PAGED, (1,), (5, 0, 17) * 70 + (90, 1), 16, Launch(7, timing=LATE), (1, 1)
    ),
    "two rows of sequences a lane": Case(PAGED, (1,), (5, 0, 17) * 343 + (90,), 16, Launch(3), (1, 1)),
    "more sequences than lanes": Case(PAGED, (1,), (5, 0, 17) * 11 + (90,), 16, Launch(3), (1, 1)),
    "leftpad, window, softcap and sinks": Case(
        PADDED, (9,), (90, 61), 131, Launch(3, timing=LATE), pads=(7, 50), sides=(30, 4), rules=CAP_AND_SINKS
    ),
    "the same, rows that see nothing": Case(
        PADDED,
        (20,),
        (0, 10, 40),
        60,
        Launch(7, row_ctas=1),
        pads=(0, 3, 20),
        sides=(5, 2),
        rules=CAP_AND_SINKS,
    ),
    "clusters": Case(CLUSTERED, (1,), (330,), 48, Launch(8, timing=LATE)),
    "clusters with few blocks, two tiles a K/V head, fewer columns": Case(
        replace(CLUSTERED, cluster=5), (18,), (75, 0, 50), 16, Launch(60, timing=LATE), columns=(40, 24)
    ),
    "clusters of 2, two full tiles of 64 rows": Case(
        replace(CLUSTERED, tile_m=64, cluster=2), (16,), (70, 9), 16, Launch(4), (4, 1)
    ),
    "clusters of 8, a sequence of 9 blocks, one without keys": Case(
        replace(CLUSTERED, cluster=8), (1,), (260, 0), 16, Launch(16, timing=LATE), (4, 1)
    ),
    "clusters, leftpad, window, softcap and sinks": Case(
        replace(PADDED, tile_m=32, cluster=3),
        (9,),
        (90, 61),
        131,
        Launch(12),
        pads=(7, 50),
        sides=(30, 4),
        rules=CAP_AND_SINKS,
    ),
    "packed, one sequence without queries, one without keys": Case(
        PACKED, (2, 0, 5, 1), (130, 40, 0, 50), 16, Launch(3)
    ),
    "packed, in two parts": Case(PACKED, (1, 20, 0), (100, 65, 3), 16, Launch(7, 2, timing=LATE)),
    "packed, two K/V heads together": Case(PACKED, (1, 20, 0), (100, 65, 3), 16, Launch(6, timing=LATE)),
    "packed, no query at all": Case(PACKED, (0, 0), (40, 20), 16, Launch(3)),
    "chunks, wide values": Case(CHUNKED, (1, 40), (100, 130), 24, Launch(3), sides=(60, 0, 48)),
    "chunks, wide values of fewer columns, late": Case(
        CHUNKED, (4, 0, 3), (64, 40, 170), 8, Launch(7, timing=LATE), columns=(32, 200), sides=(2**29, 0, 100)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("parts of tiles, by piece", {EVICT_FIRST}),
        ("clusters", {EVICT_FIRST}),
        ("packed, in two parts", {EVICT_FIRST}),
    ],
)
def test_keys_of_a_single_tile_leave_l2_first(
    name: str, policies: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, made = [], decode_steps._maps
    monkeypatch.setattr(decode_steps, "_maps", lambda *given: maps.extend(made(*given)) or maps[-2:])
    check(CASES[name])
    assert [x.policies for x in maps] == [policies] * 2


def test_maxima_that_rise_and_fall() -> None:
    """Every block, and so every part of a tile, has another maximum than the one before."""
    case = Case(PAGED, (2,), (300, 90), 16, Launch(5, timing=LATE))
    queries, cache = draw(case)
    steps = torch.arange(cache.table.shape[1]) % 5 * 7.0
    for table in cache.table:
        for page, step in zip(table.tolist(), steps.tolist(), strict=True):
            if page < cache.k.shape[0]:
                cache.k[page] *= 1.0 + step
    rows = [
        ((k.double() * (1.0 + steps.repeat_interleave(16)[: len(k), None, None])).bfloat16(), v)
        for k, v in cache.rows
    ]
    check_numbers(case, queries, replace(cache, rows=rows))


def test_nan_in_a_query_is_that_of_its_row() -> None:
    case = Case(PAGED, (2,), (300, 90), 16, Launch(5))
    queries, cache = draw(case)
    clean = outputs(case, queries, cache)
    queries.q[0, 1, 2, 5] = math.nan
    out, lse = outputs(case, queries, cache)
    assert bool(out[0, 1, 2].isnan().all()) and bool(lse[0, 2, 1].isnan())
    out[0, 1, 2], lse[0, 2, 1] = clean[0][0, 1, 2], clean[1][0, 2, 1]
    assert same((out, lse), clean)


def outputs(case: Case, queries: Queries, cache: Cache, **given: Any) -> tuple[Tensor, Tensor]:
    return decode_on_numpy(case.config, queries, cache, 0.1, case.launch, case.sides, case.rules, **given)


def without_nan(cache: Cache) -> Cache:
    """All rows hold something, which a kernel that reads them shows."""
    generator = torch.Generator().manual_seed(2)
    drawn = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (cache.k, cache.v))
    return replace(cache, k=next(drawn), v=next(drawn))


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(one, other, strict=True))


BIG = 2**31 - 1


def test_pages_out_of_range_are_the_nearest() -> None:
    case = Case(PAGED, (1,), (64, 30), 16, Launch(3))
    queries, cache = draw(case)
    cache = without_nan(cache)
    wild, tame = cache.table.clone(), cache.table.clone()
    last = cache.k.shape[0] - 1
    wild[0], tame[0] = torch.tensor([-5, BIG, -BIG - 1, last + 1]), torch.tensor([0, last, 0, last])
    found = [outputs(case, queries, replace(cache, table=table)) for table in (wild, tame)]
    assert same(*found)


def test_lengths_and_leftpads_out_of_range_are_the_nearest() -> None:
    case = Case(
        PADDED, (3,), (20, 20, 20, 20), 24, Launch(3), pads=(1, 2, 3, 4), sides=(30, 4), rules=CAP_AND_SINKS
    )
    queries, cache = draw(case)
    cache = without_nan(cache)

    def given(filled: tuple[int, ...], pads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        with_pads = replace(cache, leftpad=torch.tensor(pads, dtype=torch.int32))
        return outputs(case, queries, with_pads, filled=filled)

    wild = given((25, -3, 20, BIG), (-7, 4, BIG, 5))
    assert same(wild, given((24, 0, 20, 24), (0, 4, 24, 5)))
    assert not wild[0][1:3].any() and bool(wild[0][0].any()) and bool(wild[0][3].any())


def test_offsets_out_of_range_are_the_nearest() -> None:
    case = Case(PACKED, (2, 0, 3), (20, 20, 20), 16, Launch(3))
    queries, cache = draw(case)
    cache = without_nan(cache)
    total = queries.q.shape[0]
    found = [
        outputs(case, replace(queries, packed=Packed(offsets, total)), cache)
        for offsets in ((-4, 2, BIG, BIG), (0, 2, total, total))
    ]
    assert same(*found)
