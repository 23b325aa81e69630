"""FP8 kernels on the pages of a cache, V transposed on its way: what no kernel is built from, what is compiled, and
what comes of it without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import DENSE, VARLEN
from cute_kernels.window import NO_LIMIT
from hopper.config import SMEM_BYTES, validate_forward_config
from hopper.forward.fp8.changes import NO_CHANGES, Changes
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import (
    FEW_QUERIES,
    select_fp8_few_queries_config,
)
from hopper.forward.tilings import END_TO_END, ONE_PAGE, PAGE_ROWS
from hopper_attention.masks import UNLIMITED
from hopper_attention.quantized import E4M3
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import Timing
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.paged_tiles_on_numpy import paged_tiles_on_numpy
from tests.hopper.rules import Rules
from tests.hopper.test_grouped import merged
from tests.plans import Packed

LATE = Timing(is_late=True, seed=1)


def config_of(
    head_dim: int,
    rows: int,
    page_rows: int,
    *,
    causal: bool = True,
    group: int = 1,
    split: bool = False,
    changes: Changes = NO_CHANGES,
) -> Fp8ForwardConfig:
    """For rows of Q, K and V of one size."""
    sizes = head_dim, head_dim, causal, "bfloat16", group, rows, split
    return select_fp8_few_queries_config(*sizes, VARLEN, page_rows, changes)


PAGED = config_of(128, 64, 16)


@pytest.mark.parametrize(
    "changed",
    [
        {"v_rows": False},
        {"lone_scales": False},
        {"lone_scales": False, "window": True},
    ],
    ids=str,
)
def test_what_pages_are_read_with(changed: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=r"page_box is 16, allowed without v_rows and lone_scales"):
        validate_forward_config(replace(PAGED, **changed))
    if "v_rows" not in changed:
        validate_forward_config(replace(PAGED, page_box=0, **changed))
    for allowed in ({"window": True}, {"softcap": True}, {"sinks": True, "window": True, "group": 5}):
        validate_forward_config(replace(PAGED, **allowed))


@pytest.mark.parametrize("changed", [{"page_box": 4}, {"page_box": 48}, {"layout": DENSE}], ids=str)
def test_boxes_are_parts_of_a_block_of_packed_sequences(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"page_box is .* allowed: 0, or with 'varlen' multiples of 8"):
        validate_forward_config(replace(PAGED, **changed))


def test_boxes_by_what_is_known_of_pages() -> None:
    """Each is within a page and divides a block; a block is no more boxes than a warp has lanes. All else is as where
    sequences lie end to end."""
    found = {}
    for head_dim, tiles in FEW_QUERIES.items():
        for rows in tiles:
            for split in (False, True):
                plain = config_of(head_dim, rows, END_TO_END, split=split)
                assert plain.page_box == 0 and not plain.is_plain
                for page_rows in (*PAGE_ROWS, ONE_PAGE):
                    config = config_of(head_dim, rows, page_rows, split=split)
                    validate_forward_config(config)
                    assert config.tile_n % config.page_box == 0 and config.tile_n <= 32 * config.page_box
                    assert page_rows == ONE_PAGE or page_rows % config.page_box == 0
                    assert replace(config, page_box=0) == plain and not config.has_short_beginnings
                    found[config.tile_n, page_rows] = config.page_box
    assert found[128, 16] == 16 and found[128, 64] == 64 and found[128, ONE_PAGE] == 128
    # 96 keys are no whole pages of 64 or 128.
    assert found[96, 16] == 16 and found[96, 64] == found[96, 128] == 32 and found[96, ONE_PAGE] == 96


COMPILED = {
    (head_dim, rows, page_rows): config_of(
        head_dim,
        rows,
        page_rows,
        causal=rows != 128,
        group=4 if rows == 64 else 1,
        split=page_rows == ONE_PAGE,
    )
    for head_dim, rows in ((64, 64), (64, 192), (128, 64), (128, 128), (256, 64), (256, 128))
    for page_rows in (16, ONE_PAGE)
}
"""Of each head_dim the tiles of fewest rows and of most, whole on pages of 16, and in parts on one page a sequence."""


SOFTCAP = Changes(softcap=True)
WITH_ALL = Changes(window=True, softcap=True, sinks=True)
CHANGED = [
    config_of(
        head_dim, rows, page_rows, causal=causal, group=group, split=changes == SOFTCAP, changes=changes
    )
    for head_dim, rows, page_rows, causal, group, changes in (
        (64, 192, 16, True, 5, WITH_ALL),
        (128, 64, 16, True, 8, WITH_ALL),
        (128, 128, 16, False, 1, Changes(window=True)),
        (128, 192, 16, False, 5, replace(WITH_ALL, chunk=True)),
        (256, 64, 16, True, 1, WITH_ALL),
        (256, 128, 16, True, 8, WITH_ALL),
        (128, 128, ONE_PAGE, False, 5, SOFTCAP),
        (256, 128, 16, True, 5, SOFTCAP),
    )
]


RECORDED = (*COMPILED.values(), *CHANGED)


@pytest.mark.parametrize(
    ("configs", "count"), [(tuple(COMPILED.values()), 12), (tuple(CHANGED), 8)], ids=["plain", "changed"]
)
def test_no_register_is_spilled(configs: tuple[Fp8ForwardConfig, ...], count: int) -> None:
    usages = usage_of_each(configs)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == count


def test_names() -> None:
    names = {key: config.name.removeprefix("hopper_fwd_e4m3_bf16_") for key, config in COMPILED.items()}
    assert names[128, 64, 16] == (
        "d128_causal_m64n128s2_r192_64_nopingpong_late_x2_varlen_pages16_g4_eager_poly3_vrows_lone"
    )
    assert names[128, 128, ONE_PAGE] == (
        "d128_full_m128n128s3_r216_72_nopingpong_late_varlen_pages128_split_eager_poly3_vrows_lone"
    )
    assert len(set(names.values())) == 12


@dataclass(frozen=True)
class Case:
    """Queries and keys of each sequence, a page's rows, and what the config is selected for; sides of a window, sinks
    of heads, over and over, and how much larger Q is than what is normally distributed."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    head_dim: int = 128
    rows: int = 64
    causal: bool = True
    group: int = 1
    splits: int = 1
    pads: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    peak: float = 1.0

    @property
    def changes(self) -> Changes:
        return Changes(bool(self.sides), len(self.sides) > 2, self.softcap > 0, bool(self.sinks))

    @property
    def rules(self) -> Rules:
        """Of two K/V heads."""
        sinks = torch.tensor((self.sinks * 2 * self.group)[: 2 * self.group])
        return Rules(self.softcap, sinks=sinks if self.sinks else None)

    @property
    def config(self) -> Fp8ForwardConfig:
        page_rows = ONE_PAGE if self.pads else next(n for n in PAGE_ROWS if self.page_size % n == 0)
        native = min(size for size in FEW_QUERIES if size >= self.head_dim)
        assert self.rows in FEW_QUERIES[native]
        return config_of(
            self.head_dim,
            self.rows,
            page_rows,
            causal=self.causal,
            group=self.group,
            split=self.splits > 1,
            changes=self.changes,
        )


CHUNK = NO_LIMIT, NO_LIMIT, 100
SINKS = 0.5, -math.inf, 60.0, -3.0, 2.0
CASES = {
    "one head a tile": Case((70, 5, 3), (300, 0, 37), 16, group=1),
    "heads in a tile": Case((9, 3, 5, 0), (300, 0, 37, 129), 16, group=4),
    "heads that leave rows": Case((9, 13), (300, 77), 64, rows=128, causal=False, group=7),
    "parts": Case((9, 3, 5, 0), (520, 0, 37, 129), 16, group=4, splits=3),
    "more parts than blocks": Case((40, 1), (130, 20), 64, rows=128, causal=False, splits=5),
    "parts of heads that leave rows": Case((6, 2), (300, 500), 128, rows=128, group=5, splits=2),
    "d64, high tiles": Case((21, 4), (350, 90), 32, 64, 192, group=8),
    "d64, in parts of boxes of 8": Case((21, 4), (350, 90), 24, 64, 64, group=2, splits=2),
    "d80": Case((21, 4), (150, 90), 16, 80, 64, causal=False),
    "d256": Case((20, 7), (190, 40), 16, 256, 64, group=2),
    "d256, in parts": Case((20, 7), (190, 40), 64, 256, 128, group=2, splits=2),
    "from any row of a page on": Case((30, 4, 2), (201, 131, 0), 333, group=4, pads=(9, 77, 333)),
    "from any row on, in parts": Case((30, 4), (201, 131), 333, causal=False, splits=2, pads=(9, 77)),
    "more queries than keys": Case((40, 30), (30, 8), 8, group=2),
    "a window": Case((70, 5, 3), (300, 0, 37), 16, causal=False, sides=(60, 5)),
    "a window of heads that leave rows": Case((9, 13), (300, 77), 64, group=5, sides=(40, NO_LIMIT)),
    "a chunk from any row on": Case((30, 4), (201, 131), 333, group=4, pads=(9, 77), sides=CHUNK),
    "softcap": Case((9, 3, 5, 0), (300, 0, 37, 129), 16, group=4, softcap=15.0, peak=6.0),
    "softcap in parts": Case((9, 3, 5, 0), (520, 0, 37, 129), 16, group=5, splits=3, softcap=30.0),
    "sinks": Case((9, 3, 5, 0), (300, 0, 37, 129), 16, group=8, sinks=SINKS),
    "sinks of heads that leave rows": Case(
        (9, 13), (300, 77), 64, rows=128, causal=False, group=7, sinks=SINKS
    ),
    "all": Case((70, 5, 3), (300, 0, 37), 16, sides=(60, NO_LIMIT), softcap=15.0, sinks=SINKS, peak=6.0),
    "all, d64": Case((21, 4), (350, 90), 32, 64, 192, False, 8, sides=(90, 9), softcap=30.0, sinks=SINKS),
    "all, high tiles": Case(
        (70, 5, 50), (300, 0, 77), 16, rows=192, group=5, sides=(60, 9), softcap=15.0, sinks=SINKS
    ),
    "all, d256": Case((20, 7), (190, 40), 16, 256, 128, group=5, sides=(50, 0), softcap=15.0, sinks=SINKS),
    "all, from any row on": Case(
        (30, 4, 2), (201, 131, 0), 333, group=4, pads=(9, 77, 333), sides=(50, 0), softcap=15.0, sinks=SINKS
    ),
}


def draw(case: Case, behind: int) -> tuple[Tensor, Cache, list[Tensor]]:
    """Queries of two K/V heads, with NaN in rows of no sequence, a cache that is NaN but for keys, and scales."""
    cache = Cache.draw(case.keys, case.page_size, 2, (case.head_dim, case.head_dim), E4M3, case.pads)
    generator = torch.Generator().manual_seed(1)
    rows = sum(case.queries) + behind
    q = (case.peak * torch.randn(rows, 2 * case.group, case.head_dim, generator=generator)).to(E4M3)
    q[sum(case.queries) :] = torch.full((), math.nan).to(E4M3)
    scales = [torch.rand(len(case.keys), 2, generator=generator) + 0.5 for _ in range(3)]
    return q, cache, scales


def check(case: Case, found: tuple[Tensor, Tensor], q: Tensor, cache: Cache, scales: list[Tensor]) -> None:
    """Each sequence against float64, and each of its heads where some have next to nothing beside a sink; queries that
    see no key, and rows of no sequence, are 0 and -inf, or their sinks."""
    (out, lse), rules = found, case.rules
    left, right, chunk = (*case.sides, *(NO_LIMIT, NO_LIMIT, 0)[len(case.sides) :])
    sides = (UNLIMITED if side == NO_LIMIT else side for side in (left, right))
    options: dict[str, Any] = dict(zip(("window_left", "window_right"), sides, strict=True))
    options |= {
        "causal": case.causal,
        "attention_chunk": chunk,
        "softcap": rules.softcap,
        "sinks": rules.sinks,
    }
    of_rest = torch.full((2 * case.group,), -math.inf) if rules.sinks is None else rules.sinks
    assert bool(cache.k.float().isnan().any()) and bool(cache.v.float().isnan().any())
    first = 0
    for number, (rows, keys) in enumerate(zip(case.queries, cache.rows, strict=True)):
        own = slice(first, first + rows)
        first += rows
        of_q, of_k, of_v = (x[number].double() for x in scales)
        values = q[own].double() * of_q.repeat_interleave(case.group)[:, None]
        k, v = (x.double() * of[:, None] for x, of in zip(keys, (of_k, of_v), strict=True))
        if not rows:
            continue
        exact, exact_lse = attention_naive(values[None], k[None], v[None], **options)
        seen, is_zero = (exact_lse[0] > -math.inf).T, (exact[0] == 0).all(-1)
        assert bool((out[own][is_zero] == 0).all()) and bool((lse[own][~seen] == -math.inf).all())
        if bool(seen.any()):
            summed = (0, 2) if case.sinks else (0, 1, 2)
            error, size = (x.square().sum(summed).sqrt() for x in (out[own].double() - exact[0], exact[0]))
            assert bool((error <= 5e-2 * size).all()), (number, error / size)
            assert (lse[own].double() - exact_lse[0].T)[seen].abs().max() < 5e-2, number
    assert bool((out[first:] == 0).all())
    torch.testing.assert_close(lse[first:].float(), of_rest.expand_as(lse[first:]))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers(case: Case) -> None:
    q, cache, scales = draw(case, behind=3)
    rows = Packed.of(case.queries, 3)
    scale, changes = case.head_dim**-0.5, (case.sides, case.rules)
    assert bool(case.pads) or case.page_size % case.config.page_box == 0
    given = case.splits, 2, LATE, tuple(scales)
    found = paged_tiles_on_numpy(case.config, q, cache, rows, scale, *given, *changes)
    check(case, merged(*found), q, cache, scales)


@pytest.mark.parametrize(
    "case",
    [
        Case((9, 3, 5), (300, 140, 37), 16, group=4, splits=2),
        Case((9, 3, 5), (300, 140, 37), 16, group=5, sides=(60, 0), softcap=15.0, sinks=SINKS[:1]),
    ],
    ids=["parts", "all"],
)
def test_neither_the_grid_nor_the_order_of_warps_changes_a_bit(case: Case) -> None:
    q, cache, scales = draw(case, behind=0)
    rows, changes = Packed.of(case.queries), (tuple(scales), case.sides, case.rules)
    few, many = (
        merged(*paged_tiles_on_numpy(case.config, q, cache, rows, 0.1, case.splits, ctas, timing, *changes))
        for ctas, timing in ((1, Timing(is_late=True, seed=3)), (11, Timing()))
    )
    assert all(map(torch.equal, few, many)) and bool(few[0].isfinite().all())
