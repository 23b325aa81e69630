"""How long the kernels take that may serve a dense call of few queries of e4m3 with descales, by tiles and keys.

All numbers are microseconds on an H200, found by timing 800 random calls, each in up to sixteen ways
(``fp8_few_queries_ways.json``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hopper.forward.fp8.tilings import FEW_QUERIES, FEW_QUERIES_IN_PARTS
from hopper_attention.few_queries_times import COLUMNS, MOST_SEQUENCES, DecodeTimes
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

USUAL_START, USUAL_TILE, USUAL_TILE_COLUMNS = 3.5, 2.1, 0.32
USUAL_KEYS = {64: 0.0069, 128: 0.0095, 256: 0.0124}
"""Of the kernels for any number of queries, with a head a tile; the last by head_dim, for a key of a tile."""

SWAPPED = DecodeTimes(4.0, 1.75, 0.0098)
"""Of the decode kernel, for so few rows that it multiplies them as operand B."""


MOST_PARTS = 127
"""That a number of a tile's sequence has room for (``hopper.forward.split.PART_SHIFT``)."""


def native_size(shape: CacheShape) -> int:
    """The head_dim of the tiles that serve a call."""
    return min(size for size in FEW_QUERIES if size >= max(shape.head_dim, shape.head_dim_v))


def usual_cost(shape: CacheShape) -> float:
    """Of a tile for each head."""
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // FORWARD_ROWS)
    turns = -(-tiles // MULTIPROCESSORS)
    columns = USUAL_TILE_COLUMNS * shape.head_dim / COLUMNS
    return USUAL_START + turns * (USUAL_TILE + columns + shape.seqlen_k * USUAL_KEYS[native_size(shape)])


def swapped_cost(shape: CacheShape) -> float:
    """Of the decode kernel."""
    tiles = shape.batch * shape.kv_heads / MULTIPROCESSORS
    of_keys = tiles * shape.seqlen_k * SWAPPED.key * shape.head_dim / COLUMNS
    return SWAPPED.start + max(tiles, 1.0) * SWAPPED.tile + of_keys


def few_cost(shape: CacheShape, group: int, splits: int, tile_rows: int) -> float:
    """Of tiles of ``tile_rows`` rows, which are of ``group`` heads, with keys in ``splits`` parts."""
    native, wide = native_size(shape), shape.head_dim / COLUMNS
    ctas, key = CTAS[native][tile_rows], KEYS[native][tile_rows]
    tiles = _tiles(shape, group, tile_rows) * splits
    of_one = -(-tiles // MULTIPROCESSORS)
    key *= FEW.alone if of_one < ctas else 1.0
    read = FEW.read * wide * shape.batch * shape.kv_heads * shape.seqlen_k / MULTIPROCESSORS
    of_tile = FEW.tile + wide * FEW.tile_columns * tile_rows / FORWARD_ROWS
    of_keys = max(of_one * _longest_part(shape, tile_rows, splits) * key, read)
    cost = FEW.start + -(-of_one // ctas) * of_tile + of_keys
    if splits > 1:
        columns = splits * shape.heads * shape.total_q * shape.head_dim / 2**20
        cost += FEW.merge + FEW.merge_part * splits + FEW.merge_column * columns
    return cost


def numbers_of_parts(shape: CacheShape, group: int, tile_rows: int) -> set[int]:
    """Those worth trying: one, what fills the multiprocessors in part or several times, what leaves a part few key
    blocks; each is the least whose longest part is as long."""
    slots = MULTIPROCESSORS * CTAS[native_size(shape)][tile_rows]
    filling, blocks = slots / _tiles(shape, group, tile_rows), _blocks_of_parts(shape, tile_rows)
    most = min(MOST_PARTS, blocks, MOST_SEQUENCES // shape.batch)
    tried = {int(filling * share) for share in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)}
    tried |= {-(-blocks // of_a_part) for of_a_part in (1, 2, 3, 4)}
    within = {min(number, most) for number in tried}
    return {1, *(-(-blocks // -(-blocks // number)) for number in within if number > 1)}


def _longest_part(shape: CacheShape, tile_rows: int, splits: int) -> int:
    """Keys of the longest of so many parts, which have whole blocks."""
    if splits == 1:
        return shape.seqlen_k
    tile_n = FEW_QUERIES_IN_PARTS[native_size(shape)][tile_rows].tile_n
    return -(-_blocks_of_parts(shape, tile_rows) // splits) * tile_n


def _blocks_of_parts(shape: CacheShape, tile_rows: int) -> int:
    """Key blocks of a sequence, where keys are in parts."""
    return -(-shape.seqlen_k // FEW_QUERIES_IN_PARTS[native_size(shape)][tile_rows].tile_n)


def _tiles(shape: CacheShape, group: int, tile_rows: int) -> int:
    return shape.batch * (shape.heads // group) * -(-shape.seqlen_q * group // tile_rows)
