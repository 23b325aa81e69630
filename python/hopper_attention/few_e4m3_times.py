"""How long the kernels take that may serve a call of few queries of e4m3 with descales, by tiles and keys.

All numbers are microseconds on an H200, found by timing 800 random dense calls, each in up to sixteen ways
(``fp8_few_queries_ways.json``), and 695 of packed tensors (``fp8_few_packed_tiles.json``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from cute_kernels.plan.config import MOST_PARTS, MOST_SEQUENCES_IN_PARTS
from cute_kernels.problem import DENSE, VARLEN
from hopper.forward.fp8.tilings import FEW_QUERIES, few_queries_tilings
from hopper.group_rows import queries_of_rows
from hopper_attention.few_queries_times import (
    COLUMNS,
    MOST_SEQUENCES,
    DecodeTimes,
    longest_counted,
    most_in_memory,
    parts_by_mean,
    plan_cost,
)
from hopper_attention.kvcache_checks import CacheShape
from hopper_attention.packing_rules import FORWARD_ROWS, MULTIPROCESSORS


@dataclass(frozen=True)
class FewTimes:
    """Of tiles for few queries.

    Attributes:
        start: of a call.
        tile, tile_columns: of the tiles that a multiprocessor has at once, and the same for FORWARD_ROWS rows of
            COLUMNS columns.
        alone: what a key takes where a multiprocessor that has room for two CTAs has one, as a share of the time of
            two.
        read: of a key that is read from memory, by all multiprocessors together, for each of them.
        merge, merge_part: of the kernel that adds parts up, and for each part.
        merge_column: for 2^20 columns of rows of parts, which are written and read.
    """

    start: float
    tile: float
    tile_columns: float
    alone: float
    read: float
    merge: float
    merge_part: float
    merge_column: float


FEW = FewTimes(2.8, 2.0, 0.35, 1.5, 0.0064, 3.1, 0.011, 3.1)
FEW_PACKED = FewTimes(6.1, 1.5, 0.3, 1.0, 0.0077, 3.1, 0.011, 3.3)
"""Of packed sequences, with their plan."""
UNEVEN = 1.2
"""Times the mean: where a packed sequence is longer, turns are as long as their tiles, and the last one is filled as
well. By that 42 of 695 calls are counted otherwise, which take 5 % less time by the mean
(``fp8_few_packed_tiles.json``)."""

FEW_CACHED = replace(FEW_PACKED, alone=1.5)
"""Of calls on a cache, by its room for keys (``cache_tiles.json``)."""

KEYS: dict[int, dict[int, float]] = {
    64: {64: 0.004, 192: 0.0101},
    128: {64: 0.0053, 128: 0.0093, 192: 0.0149},
    256: {64: 0.0102, 128: 0.016},
}
"""By head_dim and rows of a tile: what a multiprocessor takes for a key of a tile."""

CTAS: dict[int, dict[int, int]] = {
    head_dim: {rows: dict(tile.fields).get("ctas_per_sm", 1) for rows, tile in tiles.items()}
    for head_dim, tiles in FEW_QUERIES.items()
}
"""The same: CTAs that share a multiprocessor."""


@dataclass(frozen=True)
class UsualTimes:
    """Of the kernels for any number of queries, with a head a tile: to start, and as ``FewTimes`` has them."""

    start: float
    tile: float
    tile_columns: float


USUAL, USUAL_OF_PACKED = UsualTimes(3.5, 2.1, 0.32), UsualTimes(6.9, 2.1, 0.32)
USUAL_KEYS = {64: 0.0069, 128: 0.0095, 256: 0.0124}
"""By head_dim, for a key of a tile of these."""

SWAPPED = DecodeTimes(4.0, 1.75, 0.0098)
"""Of the decode kernel, for so few rows that it multiplies them as operand B."""

SWAPPED_OF_CACHE = DecodeTimes(4.0, 2.0, 0.0075)
"""The same of calls on a cache, whose lengths are not known but for the room that there is. Where they are shorter the
decode kernel takes less time, as it shares out the keys that there are; tiles gained less, as long as the longest
sequence decided how long they take (``fp8_cache_ways.json``)."""

SWAPPED_OF_PACKED = {8: DecodeTimes(6.0, 1.7, 0.007), 16: DecodeTimes(9.0, 1.7, 0.007)}
"""The same of packed sequences, by the rows of that operand."""


def native_size(shape: CacheShape) -> int:
    """The head_dim of the tiles that serve a call."""
    return min(size for size in FEW_QUERIES if size >= max(shape.head_dim, shape.head_dim_v))


def usual_cost(shape: CacheShape, mean_k: float) -> float:
    """Of a tile for each head; ``mean_k`` are the keys of a sequence, of which ``shape`` has a bound."""
    times = USUAL_OF_PACKED if shape.is_packed_q else USUAL
    turns = -(-count_tiles(shape, 1, FORWARD_ROWS) // MULTIPROCESSORS)
    columns = times.tile_columns * shape.head_dim / COLUMNS
    keys = max(turns * mean_k, longest_counted(shape, mean_k))
    return times.start + turns * (times.tile + columns) + keys * USUAL_KEYS[native_size(shape)]


def swapped_cost(shape: CacheShape, mean_k: float, times: DecodeTimes = SWAPPED) -> float:
    """Of the decode kernel."""
    if shape.is_packed_q:
        times = SWAPPED_OF_PACKED[min(rows for rows in SWAPPED_OF_PACKED if rows >= shape.rows_a_kv_head)]
    tiles = shape.batch * shape.kv_heads / MULTIPROCESSORS
    of_keys = tiles * mean_k * times.key * shape.head_dim / COLUMNS
    return times.start + max(tiles, 1.0) * times.tile + of_keys


def few_cost(
    shape: CacheShape,
    mean_k: float,
    group: int,
    splits: int,
    tile_rows: int,
    times: FewTimes | None = None,
) -> float:
    """Of tiles of ``tile_rows`` rows, which are of ``group`` heads, with keys in ``splits`` parts. ``times`` are those
    of calls without a cache by default."""
    native = native_size(shape)
    longest = _longest_part(shape, mean_k, tile_rows, splits)
    parts = parts_by_mean(splits, longest_counted(shape, mean_k), mean_k)
    tiles = FewTiles(
        tile_rows,
        ceil(count_tiles(shape, group, tile_rows) * parts),
        CTAS[native][tile_rows],
        KEYS[native][tile_rows],
        (longest, longest * splits / parts * mean_k / longest_counted(shape, mean_k)),
        splits,
        parts,
    )
    usual = FEW_PACKED if shape.is_packed_q else FEW
    return cost_of_tiles(times or usual, tiles, shape, mean_k)


class FewTiles(NamedTuple):
    """Tiles of few queries.

    Attributes:
        rows: of a tile.
        number: of them, in all parts.
        ctas: that share a multiprocessor.
        key: what a multiprocessor takes for a key of a tile.
        parts: keys of the longest part, and of a part by the mean.
        splits: parts of a tile's keys, of packed sequences those of the longest.
        parts_by_mean: the same of a sequence of average length.
    """

    rows: int
    number: int
    ctas: int
    key: float
    parts: tuple[float, float]
    splits: int
    parts_by_mean: float


def cost_of_tiles(times: FewTimes, tiles: FewTiles, shape: CacheShape, mean_k: float) -> float:
    """Of a call with such tiles."""
    wide, (longest, mean_part) = shape.head_dim / COLUMNS, tiles.parts
    of_one: float = -(-tiles.number // MULTIPROCESSORS)
    if times is FEW_PACKED and longest_counted(shape, mean_k) > UNEVEN * mean_k:
        of_one = max(tiles.number / MULTIPROCESSORS, 1.0)
    key = tiles.key * (times.alone if of_one < tiles.ctas else 1.0)
    read = times.read * wide * shape.batch * shape.kv_heads * mean_k / MULTIPROCESSORS
    of_tile = times.tile + wide * times.tile_columns * tiles.rows / FORWARD_ROWS
    of_keys = max(of_one * mean_part * key, longest * key, read)
    cost = times.start + -(-of_one // tiles.ctas) * of_tile + of_keys
    if tiles.splits > 1:
        columns = tiles.parts_by_mean * shape.heads * shape.total_q * shape.head_dim / 2**20
        cost += (
            times.merge + times.merge_part * tiles.splits + times.merge_column * columns + plan_cost(shape)
        )
    return cost


def numbers_of_parts(shape: CacheShape, mean_k: float, group: int, tile_rows: int) -> set[int]:
    """Those worth trying: one, what fills the multiprocessors in part or several times, what leaves a part few key
    blocks; each is the least whose longest part is as long."""
    if shape.is_packed_q and shape.batch > MOST_SEQUENCES_IN_PARTS:
        return {1}
    slots = MULTIPROCESSORS * CTAS[native_size(shape)][tile_rows]
    tiles, blocks = count_tiles(shape, group, tile_rows), _blocks_of_parts(shape, mean_k, tile_rows)
    stretches = {1.0, longest_counted(shape, mean_k) / mean_k}
    tried = (worthwhile_parts(slots / tiles * each, blocks, shape.batch) for each in stretches)
    most = most_in_memory(shape)
    return {1} | {number for number in set().union(*tried) if number <= most}


def worthwhile_parts(filling: float, blocks: int, batch: int) -> set[int]:
    """The same but one, of tiles of so many key ``blocks``, of which ``filling`` times as many would fill the
    multiprocessors."""
    most = min(MOST_PARTS, blocks, MOST_SEQUENCES // batch)
    tried = {int(filling * share) for share in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)}
    tried |= {-(-blocks // of_a_part) for of_a_part in (1, 2, 3, 4)}
    within = {min(number, most) for number in tried}
    return {-(-blocks // -(-blocks // number)) for number in within if number > 1}


def _longest_part(shape: CacheShape, mean_k: float, tile_rows: int, splits: int) -> float:
    """Keys of the longest of so many parts, which have whole blocks."""
    if splits == 1:
        return longest_counted(shape, mean_k)
    return -(-_blocks_of_parts(shape, mean_k, tile_rows) // splits) * _tile_n_of_parts(shape, tile_rows)


def _blocks_of_parts(shape: CacheShape, mean_k: float, tile_rows: int) -> int:
    """Key blocks of a sequence, where keys are in parts."""
    return ceil(longest_counted(shape, mean_k) / _tile_n_of_parts(shape, tile_rows))


def _tile_n_of_parts(shape: CacheShape, tile_rows: int) -> int:
    layout = VARLEN if shape.is_packed_q else DENSE
    return few_queries_tilings(layout, split=True)[native_size(shape)][tile_rows].tile_n


def turns_of(shape: CacheShape, group: int, tile_rows: int) -> float:
    """How often tiles of so many rows, of ``group`` heads and in one part, fill the multiprocessors."""
    return count_tiles(shape, group, tile_rows) / (MULTIPROCESSORS * CTAS[native_size(shape)][tile_rows])


def count_tiles(shape: CacheShape, group: int, tile_rows: int) -> int:
    """Tiles of all sequences, at most."""
    heads, queries = shape.heads // group, queries_of_rows(tile_rows, group)
    tiles = shape.batch * -(-shape.seqlen_q // queries)
    if shape.is_packed_q:
        tiles = min(tiles, shape.batch + shape.total_q // queries)
    return heads * tiles
