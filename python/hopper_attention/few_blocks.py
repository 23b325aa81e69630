"""Few queries on what the quantizer made: tiles with the query heads of a K/V head as rows, and keys in parts.

As ``few_queries`` has them for e4m3 tensors with descales, but with V transposed and scales of blocks. Each part of a
tile's keys is one sum of P V, and has no more keys than a sum may have; so more keys than that are always in parts.

All numbers are microseconds on an H200 (``fp8_few_blocks_ways.json``), as in ``few_e4m3_times``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from cute_kernels.problem import MAX_SEQLEN
from hopper.field_checks import GROUPS
from hopper.forward.fp8.few_tilings import FEW_QUERIES_OF_BLOCKS, tiling_of_blocks
from hopper.forward.fp8.tilings import RUNLESS_KEYS
from hopper.forward.tilings import Tiling
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.few_e4m3_times import (
    MOST_PARTS,
    FewTiles,
    FewTimes,
    UsualTimes,
    cost_of_tiles,
    count_tiles,
    native_size,
    worthwhile_parts,
)
from hopper_attention.few_queries import (
    NOT_FEW,
    FewQueries,
    contiguous_spec,
    has_e4m3_tiles,
    keys_that_count,
    longest_alike,
)
from hopper_attention.few_queries_times import COLUMNS, MOST_SEQUENCES
from hopper_attention.fp8_rules import Fp8Problem, select_for
from hopper_attention.kvcache_checks import NAMES, CacheShape, read_shape
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS
from hopper_attention.masks import MaskSpec
from hopper_attention.packing_rules import MOST_QUERIES, MULTIPROCESSORS
from hopper_attention.problem import Fp8AttentionProblem

FEW = FewTimes(2.9, 1.0, 0.46, 1.24, 0.0087, 3.3, 0.01, 2.4)

KEYS: dict[int, dict[int, float]] = {
    64: {64: 0.0034, 192: 0.0097},
    128: {64: 0.0045, 128: 0.0082},
    256: {64: 0.0081, 128: 0.0116},
}
"""By head_dim and rows of a tile: what a multiprocessor takes for a key of a tile."""

USUAL = UsualTimes(2.4, 1.0, 1.4)
USUAL_KEYS: dict[int, dict[int, float]] = {
    64: {128: 0.0068, 192: 0.0055},
    128: {128: 0.0078, 192: 0.0107},
    256: {128: 0.01, 192: 0.0134},
}
"""The same of the kernels for any number of queries, with a head a tile. At head_dim 256 those of 192 rows are for
narrow V (``hopper.forward.fp8.native``): of the time at head_dim 128, as much more as their products are."""


MARGIN = 1.05
"""By which tiles for few queries are to be faster: kernels of their own are to be compiled."""


def find_few(problem: Fp8Problem) -> FewQueries:
    """What serves a problem, and others like it with up to as many keys."""
    p = problem
    seqlen_q, seqlen_k = p.q_shape[1], p.k_shape[1]
    if not may_serve(p.q_shape) or not 0 < seqlen_k <= MAX_SEQLEN or 0 in (*p.q_shape, *p.v_shape):
        return NOT_FEW
    if p.v_rows or p.two_level or p.exact_lse:
        return NOT_FEW
    if p.block_k != p.block_v or not 1 <= seqlen_q <= MOST_QUERIES:
        return NOT_FEW
    longest = longest_alike(seqlen_k)
    alike = p._replace(
        k_shape=(p.k_shape[0], longest, *p.k_shape[2:]),
        v_shape=(p.v_shape[0], longest, *p.v_shape[2:]),
        block_q=0,
    )
    # Whether tiles are few is asked of the most keys too, so that all that are alike have one answer.
    return _find_few(alike, replace(p.kind, few_tiles=alike.kind.few_tiles))


def may_serve(q_shape: tuple[int, ...]) -> bool:
    """Whether queries may be so few."""
    return q_shape[1] <= MOST_QUERIES


def class_of_keys(q_shape: tuple[int, ...], seqlen_k: int) -> int:
    """The largest seqlen_k that is served as this one, as far as it is decided here; 0 for all."""
    return longest_alike(seqlen_k) if may_serve(q_shape) and 0 < seqlen_k <= MAX_SEQLEN else 0


def kind_of(problem: Fp8Problem, few: FewQueries) -> Fp8AttentionProblem:
    """What of a problem that is served so decides on the kernel."""
    kind = problem.kind
    if not few.tile_rows:
        return kind
    # A single query is the last, and sees all keys under a causal mask.
    causal = kind.causal and problem.q_shape[1] > 1
    split_rows = few.tile_rows if few.splits > 1 else 0
    return replace(kind, causal=causal, group=few.group, split_rows=split_rows, tile_rows=few.tile_rows)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find_few(problem: Fp8Problem, kind: Fp8AttentionProblem) -> FewQueries:
    """``find_few`` of all keys that are served alike, of which ``problem`` has the most."""
    shape = _shape_of(problem)
    if not has_e4m3_tiles(shape):
        return NOT_FEW
    keys, whole = shape.seqlen_k, shape.heads // shape.kv_heads
    found = [(usual_cost(shape, kind) / MARGIN, NOT_FEW)]
    size = native_size(shape)
    for group in {1, whole} if whole in GROUPS else (1,):
        for tile_rows in FEW_QUERIES_OF_BLOCKS[size]:
            one, split = (
                tiling_of_blocks(size, tile_rows, kind.block_k, in_parts) for in_parts in (False, True)
            )
            if one is not None and keys <= RUNLESS_KEYS:
                found.append((few_cost(shape, one, group, 1), FewQueries(None, group, tile_rows=tile_rows)))
            if split is not None:
                found += [
                    (few_cost(shape, split, group, n), FewQueries(None, group, n, tile_rows=tile_rows))
                    for n in numbers_of_parts(shape, split, group)
                ]
    return min(found, key=lambda each: each[0])[1]


def numbers_of_parts(shape: CacheShape, tiling: Tiling, group: int) -> set[int]:
    """Those worth trying, as in ``few_e4m3_times``, and the least that is allowed, without those that are not."""
    filling = MULTIPROCESSORS * _ctas(tiling) / count_tiles(shape, group, tiling.tile_m)
    blocks = -(-shape.seqlen_k // tiling.tile_n)
    least = max(-(-blocks // (RUNLESS_KEYS // tiling.tile_n)), 2)
    tried = {least, *worthwhile_parts(filling, blocks, shape.batch)}
    most = min(blocks, MOST_PARTS, MOST_SEQUENCES // shape.batch)
    return {number for number in tried if least <= number <= most}


def few_cost(shape: CacheShape, tiling: Tiling, group: int, splits: int) -> float:
    """Of tiles of ``group`` heads, with keys in ``splits`` parts."""
    blocks, rows = -(-shape.seqlen_k // tiling.tile_n), tiling.tile_m
    part = shape.seqlen_k if splits == 1 else -(-blocks // splits) * tiling.tile_n
    count = count_tiles(shape, group, rows) * splits
    tiles = FewTiles(rows, count, _ctas(tiling), KEYS[native_size(shape)][rows], (part, part), splits, splits)
    return cost_of_tiles(FEW, tiles, shape, shape.seqlen_k)


def usual_cost(shape: CacheShape, kind: Fp8AttentionProblem) -> float:
    """Of a tile for each head."""
    rows = select_for(kind).tile_m
    turns = -(-count_tiles(shape, 1, rows) // MULTIPROCESSORS)
    columns = USUAL.tile_columns * shape.head_dim / COLUMNS
    keys = turns * shape.seqlen_k * USUAL_KEYS[native_size(shape)][rows]
    return USUAL.start + turns * (USUAL.tile + columns) + keys


def _ctas(tiling: Tiling) -> int:
    """That share a multiprocessor."""
    return int(dict(tiling.fields).get("ctas_per_sm", 1))


def _shape_of(problem: Fp8Problem) -> CacheShape:
    """With as many keys as a tile visits."""
    device, specs = torch.device("cuda"), dict.fromkeys(NAMES)
    shapes = {"q": problem.q_shape, "k_cache": problem.k_shape, "v_cache": problem.v_shape}
    given = specs | {name: contiguous_spec(x, FP8_DTYPE, device) for name, x in shapes.items()}
    shape = read_shape(tuple(given.values()), problem.q_shape[1], -1)
    mask = MaskSpec(problem.causal, *problem.window)
    return replace(shape, seqlen_k=keys_that_count(shape, mask))
