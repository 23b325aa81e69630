"""Which calls of few queries have several heads in a tile, for heads as models have them: of any number in a group."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cute_kernels.plan.config import plan_entries
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.group_rows import queries_of_rows, rows_of_queries
from hopper_attention import explain, explain_varlen, few_blocks, few_queries
from hopper_attention.few_e4m3_times import count_tiles
from hopper_attention.few_packed_queries import find_few_packed
from hopper_attention.few_queries import FewQueries, contiguous_spec, find_few
from hopper_attention.few_queries_times import forward_cost
from hopper_attention.kvcache_checks import NAMES, CacheShape, read_shape
from hopper_attention.masks import CAUSAL_MASK, NO_MASK
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.scores import PLAIN
from tests.python.test_few_block_rules import problem_with
from tests.python.test_few_packed_fp8 import few_of as few_packed

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS = {7: (28, 4), 5: (40, 8), 6: (12, 2), 3: (24, 8), 12: (96, 8)}
"""By the heads of a group: query heads, and those of K and V, of models."""

MANY_TILES, MANY_KEYS = (64, 16, 1000), (1, 40, 20_000)
"""Sequences, queries and keys: whose tiles fill the multiprocessors with all heads of a group in each, and whose keys
are to be in parts."""

CALLS = [(sizes, group) for group in HEADS for sizes in (MANY_TILES, MANY_KEYS)]
HEAD_DIMS = 64, 128, 256
DENSE = [(*call, n) for call in CALLS for n in HEAD_DIMS if (*call, n) != (MANY_KEYS, 6, 64)]
"""Without a call for which the decode kernel takes less time by count."""


def few_dense(sizes: tuple[int, int, int], group: int, head_dim: int, dtype: torch.dtype, mask: Any) -> Any:
    (batch, seqlen_q, seqlen_k), (heads, kv_heads), device = sizes, HEADS[group], torch.device("cuda")
    q = contiguous_spec((batch, seqlen_q, heads, head_dim), dtype, device)
    k = contiguous_spec((batch, seqlen_k, kv_heads, head_dim), dtype, device)
    return find_few(q, k, k, mask, PLAIN, 0)


def few_packed_bf16(sizes: tuple[int, int, int], group: int, head_dim: int, mask: Any) -> FewQueries:
    (batch, queries, keys), device = sizes, torch.device("cuda")
    q, k = (
        contiguous_spec((1, batch * n, heads, head_dim), BF16, device)
        for n, heads in zip((queries, keys), HEADS[group], strict=True)
    )
    q, k = (x._replace(shape=x.shape[1:], strides=x.strides[1:]) for x in (q, k))
    starts = contiguous_spec((1, 1, 1, batch + 1), torch.int32, device)._replace(
        shape=(batch + 1,), strides=(1,)
    )
    return find_few_packed((q, k, k), (starts, starts, None, None), (queries, keys), mask, PLAIN, 0)


@pytest.mark.parametrize(("sizes", "group", "head_dim"), DENSE)
def test_dense_calls_of_16_bits(sizes: tuple[int, int, int], group: int, head_dim: int) -> None:
    for mask in (NO_MASK, CAUSAL_MASK):
        few = few_dense(sizes, group, head_dim, BF16, mask)
        assert few.call is None and few.group == group and few.tile_rows == 0
        assert (few.splits > 1) == (sizes == MANY_KEYS)
        assert few.split_rows == (rows_of_queries(40, group) if sizes == MANY_KEYS else 0)
    rows = {3: 121, 5: 212, 6: 256, 7: 284, 12: 512}
    assert rows[group] == rows_of_queries(40, group)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("sizes", "group"), CALLS)
def test_packed_calls_of_16_bits(sizes: tuple[int, int, int], group: int, head_dim: int) -> None:
    """A tensor of 40 queries has no sequence of more."""
    for mask in (NO_MASK, CAUSAL_MASK):
        few = few_packed_bf16(sizes, group, head_dim, mask)
        assert few.call is None and few.group == group and (few.splits > 1) == (sizes == MANY_KEYS)
        assert few.split_rows == (rows_of_queries(40, group) if sizes == MANY_KEYS else 0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("sizes", "group"), CALLS)
def test_calls_of_e4m3(sizes: tuple[int, int, int], group: int, head_dim: int) -> None:
    """With descales, dense and packed, and of what the quantizer made."""
    heads, causal = HEADS[group], (False, True)
    found = [few_dense(sizes, group, head_dim, E4M3, mask) for mask in (NO_MASK, CAUSAL_MASK)]
    found += [few_packed(sizes, heads, head_dim, mask=mask) for mask in (NO_MASK, CAUSAL_MASK)]
    found += [few_blocks.find_few(problem_with(sizes, heads, head_dim, mask)) for mask in causal]
    for few in found:
        assert few.call is None and few.group == group and few.tile_rows in (64, 128, 192)
        assert (few.splits > 1) == (sizes == MANY_KEYS)


def shape_of(sizes: tuple[int, int, int], heads: tuple[int, int]) -> CacheShape:
    (batch, seqlen_q, seqlen_k), device = sizes, torch.device("cuda")
    q = contiguous_spec((batch, seqlen_q, heads[0], 128), BF16, device)
    k = contiguous_spec((batch, seqlen_k, heads[1], 128), BF16, device)
    specs = dict.fromkeys(NAMES) | {"q": q, "k_cache": k, "v_cache": k}
    return read_shape(tuple(specs.values()), seqlen_q, -1)


def test_tiles_that_are_counted() -> None:
    """9 queries of 7 heads are a tile of 64 rows, and 10 are two."""
    for queries, (low, high) in {9: (1, 1), 10: (2, 1), 18: (2, 1), 19: (3, 2), 40: (5, 3)}.items():
        shape = shape_of((3, queries, 500), (28, 4))
        assert count_tiles(shape, 7, 64) == 3 * 4 * low and count_tiles(shape, 7, 128) == 3 * 4 * high
    for group, queries, rows in itertools.product((1, 2, *HEADS, 33, 64), (1, 2, 11, 64, 99), (64, 128, 192)):
        shape = shape_of((2, queries, 500), (3 * group, 3))
        each = rows // 64 * (64 // group)
        assert count_tiles(shape, group, rows) == 2 * 3 * -(-queries // each)
        assert queries_of_rows(rows, group) == each
        assert plan_entries(2 * queries, 2, each) >= 2 * -(-queries // each)
    # A warpgroup has all 9 queries of 7 heads, and the other none: a tile takes less time than of 10.
    costs = [forward_cost(shape_of((2, queries, 9000), (28, 4)), 9000, 7) for queries in (9, 10, 18, 19)]
    assert costs[0] < costs[1] == costs[2] == costs[3]


@pytest.mark.parametrize("group", HEADS)
def test_what_explain_says(group: int) -> None:
    (batch, seqlen_q, seqlen_k), (heads, kv_heads) = MANY_TILES, HEADS[group]
    starts = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    for dtype, kind in ((BF16, ForwardConfig), (E4M3, Fp8ForwardConfig)):
        q = torch.empty(batch, seqlen_q, heads, 128, dtype=dtype, device="meta")
        k = torch.empty(batch, seqlen_k, kv_heads, 128, dtype=dtype, device="meta")
        flat = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1))
        plans = (
            explain(q, k, k, causal=True, device_capability=(9, 0)),
            explain_varlen(*flat, starts, starts, seqlen_q, seqlen_k, causal=True, device_capability=(9, 0)),
        )
        for plan in plans:
            config = plan.config
            assert isinstance(config, kind) and config.group == group and plan.backend == "hopper"
            assert config.tile_queries == config.tile_m // 64 * (64 // group)
            assert few_queries.NOTE_ON_GROUPS in plan.notes and " query rows x " in str(plan)


def test_groups_that_no_tile_has() -> None:
    """More heads than a warpgroup has rows, and a head with keys of its own."""
    for heads in ((130, 2), (65, 1), (4, 4)):
        shape, sizes = contiguous_spec, (64, 16, 1000)
        q, k = (
            shape((sizes[0], n, h, 128), dtype, torch.device("cuda"))
            for n, h, dtype in zip(sizes[1:], heads, (BF16, BF16), strict=True)
        )
        assert find_few(q, k, k, NO_MASK, PLAIN, 0).group == 1
        assert few_blocks.find_few(problem_with(sizes, heads)).group == 1


def test_kernels_of_a_model() -> None:
    """Those that a model with 28 heads over 4 is compiled for have 7 heads in a tile, in parts of the keys."""
    found = [c for c in kernels_of(ModelShape(BF16, 28, 4, 128, 128, (True,)), "sm_90a")]
    grouped = [c for c in found if type(c) is ForwardConfig and c.group == 7]
    assert {c.layout for c in grouped} == {"dense", "varlen"} and {c.split for c in grouped} == {True}
    assert {c.tile_queries for c in grouped} <= {9, 18, 27}


@pytest.mark.parametrize(
    ("sizes", "head_dim"), [((64, 38, 9000), 128), ((61, 63, 4800), 256), ((58, 40, 2300), 128)]
)
def test_heads_share_tiles_where_their_rows_fill_more_than_one(
    sizes: tuple[int, int, int], head_dim: int
) -> None:
    """These read keys together too: of many long sequences a tile for each head would read them four times."""
    batch, queries, keys = sizes
    device, (heads, kv_heads) = torch.device("cuda"), (32, 8)
    q, k = (
        contiguous_spec((1, batch * n, h, head_dim), BF16, device)
        for n, h in ((queries, heads), (keys, kv_heads))
    )
    q, k = (x._replace(shape=x.shape[1:], strides=x.strides[1:]) for x in (q, k))
    starts = contiguous_spec((1, 1, 1, batch + 1), torch.int32, device)._replace(
        shape=(batch + 1,), strides=(1,)
    )
    longest = queries, 2 * keys
    few = find_few_packed((q, k, k), (starts, starts, None, None), longest, NO_MASK, PLAIN, 0)
    assert few.call is None and few.group == heads // kv_heads
