"""The 16-bit forward kernel on the pages of a cache with several heads in a tile, and with keys in parts, run from its
PTX without a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES, ForwardConfig, validate_forward_config
from hopper.forward.tilings import (
    END_TO_END,
    ONE_PAGE,
    PAGE_ROWS,
    select_paged_config,
    with_group,
    with_parts,
)
from hopper.group_rows import rows_of_queries
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import Timing
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.paged_tiles_on_numpy import paged_tiles_on_numpy
from tests.hopper.test_grouped import merged
from tests.plans import Packed

LATE = Timing(is_late=True, seed=1)


def config_of(
    head_dim: int, page_rows: int, causal: bool, group: int, rows: int = 0, dtype: str = "bfloat16"
) -> ForwardConfig:
    """In parts where ``rows`` are given, which are those of ``with_parts``."""
    config = select_paged_config(dtype, head_dim, head_dim, causal, page_rows)
    return with_parts(config, group, rows, page_rows) if rows else with_group(config, group)


@dataclass(frozen=True)
class Case:
    """Queries and keys of each sequence, a page's rows, and what the config is selected for."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    head_dim: int = 64
    causal: bool = True
    group: int = 4
    splits: int = 1
    pads: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> ForwardConfig:
        """What is selected, but with fewer small boxes to a tile, which compiles in half of the time or less."""
        page_rows = ONE_PAGE if self.pads else next(n for n in PAGE_ROWS if self.page_size % n == 0)
        rows = rows_of_queries(max(self.queries), self.group) if self.splits > 1 else 0
        name = str(self.dtype).removeprefix("torch.")
        config = config_of(self.head_dim, page_rows, self.causal, self.group, rows, name)
        if config.page_box <= 16:
            config = replace(config, tile_n=48)
            validate_forward_config(config)
        return config


CASES = {
    "heads in a tile": Case((21, 5, 3, 0), (300, 0, 37, 129), 16),
    "heads that leave rows": Case((21, 40), (300, 77), 64, causal=False, group=7),
    "parts": Case((9, 3, 5, 0), (320, 0, 37, 129), 16, splits=3),
    "more parts than blocks": Case((40, 1), (130, 20), 64, causal=False, group=1, splits=5),
    "high tiles in parts": Case((40, 9), (290, 300), 32, group=4, splits=2, dtype=torch.float16),
    "d128": Case((20, 7), (290, 40), 128, 128, group=8),
    "d128, in parts": Case((20, 7), (390, 40), 64, 128, group=5, splits=2),
    "d256, in parts": Case((20, 7), (190, 40), 64, 256, group=2, splits=2),
    "from any row of a page on": Case((30, 4, 2), (201, 131, 0), 333, pads=(9, 77, 333)),
    "from any row on, in parts": Case((30, 4), (201, 131), 333, causal=False, splits=2, pads=(9, 77)),
    "more queries than keys": Case((40, 30), (30, 8), 24, group=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numbers(case: Case) -> None:
    cache = Cache.draw(case.keys, case.page_size, 2, (case.head_dim, case.head_dim), case.dtype, case.pads)
    generator, behind = torch.Generator().manual_seed(1), 3
    q = torch.randn(sum(case.queries) + behind, 2 * case.group, case.head_dim, generator=generator)
    q[-behind:] = math.nan
    q, rows = q.to(case.dtype), Packed.of(case.queries, behind)
    scale = case.head_dim**-0.5
    out, lse = merged(*paged_tiles_on_numpy(case.config, q, cache, rows, scale, case.splits, 2, LATE))
    check(case, out, lse, q, cache)


def check(case: Case, out: Tensor, lse: Tensor, q: Tensor, cache: Cache) -> None:
    """Queries that see no key, and rows of no sequence, are 0 and -inf."""
    first = 0
    for rows, keys in zip(case.queries, cache.rows, strict=True):
        own = slice(first, first + rows)
        first += rows
        if not rows:
            continue
        exact, exact_lse = attention_naive(q[None, own], *(x[None] for x in keys), causal=case.causal)
        seen = (exact_lse[0] > -math.inf).T
        assert bool((out[own][~seen] == 0).all()) and bool((lse[own][~seen] == -math.inf).all())
        if bool(seen.any()):
            assert (out[own].double() - exact[0]).norm() < 8e-3 * exact[0].norm()
            assert (lse[own].double() - exact_lse[0].T)[seen].abs().max() < 1e-5
    assert bool((out[first:] == 0).all()) and bool((lse[first:] == -math.inf).all())


def test_boxes_by_what_is_known_of_pages() -> None:
    """Parts at head_dim 64 have blocks of their own, whose boxes are within a page too."""
    for rows, keys in ((64, 96), (128, 128), (192, 128)):
        for page_rows in (*PAGE_ROWS, ONE_PAGE):
            config = config_of(64, page_rows, True, 4, rows)
            assert (config.tile_m, config.tile_n, config.split) == (rows, keys, True)
            assert keys % config.page_box == 0 and (page_rows == ONE_PAGE or page_rows % config.page_box == 0)
        assert config_of(64, ONE_PAGE, True, 4, rows).page_box == keys
        assert config_of(64, END_TO_END, True, 4, rows).page_box == 0
    assert [config_of(64, page_rows, True, 4, 64).page_box for page_rows in PAGE_ROWS] == [32, 32, 32, 16, 8]


COMPILED = tuple(
    config_of(head_dim, page_rows, causal, group, rows)
    for head_dim in (64, 128, 192, 256)
    for page_rows in (16, ONE_PAGE)
    for causal, group, rows in ((True, 4, 0), (True, 4, 64), (False, 1, 128))
)


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 24
