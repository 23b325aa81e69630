"""How long the kernels take that may serve a call of few queries, by count of tiles, turns and keys.

All numbers are microseconds on an H200, found by timing 800 random calls each of which ran on every kernel that serves
it (``few_queries_kernels.json``, ``few_packed_queries_kernels.json``). Keys are counted for 128 columns of head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from cute_kernels.plan.config import MOST_SEQUENCES_IN_PARTS
from hopper.config import WARPGROUP_ROWS
from hopper.group_rows import rows_of_queries
from hopper_attention.decode_rules import ctas_of_pieces
from hopper_attention.kvcache_checks import CacheCall, CacheShape
from hopper_attention.packing_rules import FORWARD_ROWS, MULTIPROCESSORS

COLUMNS = 128
"""Of head_dim, for which times of a key are."""


@dataclass(frozen=True)
class DecodeTimes:
    """Of the decode kernel: to start, for a tile, for a key of a tile."""

    start: float
    tile: float
    key: float


@dataclass(frozen=True)
class ForwardTimes:
    """Of the forward kernel, and of what adds up its parts.

    Attributes:
        start: of a call; of packed sequences with their plan.
        tile, tile_columns: of a tile, and the same for COLUMNS columns.
        key: of a key of a tile, in a tile of which one warpgroup has all rows ``key_of_half``.
        read: of a key that every multiprocessor reads from memory for itself.
        merge, merge_part: of the second kernel, and for each part.
        merge_column: for 2^20 columns of rows of parts, which are written and read.
    """

    start: float
    tile: float
    tile_columns: float
    key: float
    key_of_half: float
    read: float
    merge: float
    merge_part: float
    merge_column: float


DENSE_FORWARD = ForwardTimes(2.7, 0.92, 0.61, 0.012, 0.0073, 0.0131, 2.9, 0.045, 2.3)
PACKED_FORWARD = ForwardTimes(6.1, 0.96, 0.65, 0.0094, 0.0056, 0.0136, 2.3, 0.047, 2.8)
CACHE_FORWARD = replace(PACKED_FORWARD, key_of_half=PACKED_FORWARD.key)
"""Of calls on a cache (``cache_tiles.json``): a warpgroup without a query gains nothing."""

NO_TIMES: Mapping[int, DecodeTimes] = {}

DENSE_DECODE = {
    32: DecodeTimes(3.1, 1.45, 0.0103),
    64: DecodeTimes(4.0, 3.0, 0.0124),
    128: DecodeTimes(7.0, 2.3, 0.0162),
}
"""By the rows of a tile, of 16 bits."""

PACKED_DECODE = {
    32: DecodeTimes(5.3, 1.9, 0.011),
    64: DecodeTimes(5.3, 5.8, 0.0149),
    128: DecodeTimes(16.0, 3.1, 0.03),
}

CACHE_DECODE = {
    32: DecodeTimes(2.8, 3.4, 0.0103),
    64: DecodeTimes(8.2, 7.2, 0.0108),
    128: DecodeTimes(10.7, 4.7, 0.0153),
}
"""Of calls on a cache whose lengths the host does not know, by its room for keys (``cache_tiles.json``)."""

WIDENED = DecodeTimes(45.0, 2.8, 0.0133)
"""Of e4m3 with more rows than a kernel takes in e4m3: PyTorch widens the queries before, and multiplies descales."""

HIGH_ROWS = 192
"""Of a tile in parts at head_dim 64, where there are so many."""

MOST_SPLITS, LEAST_KEYS, MOST_SEQUENCES = 64, 256, 2**20
"""Parts of a tile at most, keys of a part at least, and sequences of all parts at most."""

BYTES_OF_PARTS = 2**26
"""Memory that the results of packed sequences in parts take at most."""

MOST_TIMES_MEAN = 16
"""The longest of packed sequences counts as no more than so many times their mean: bounds of lengths may be loose."""

PLAN_OF_PARTS, PLAN_OF_A_SEQUENCE = 1.0, 0.02
"""That a plan of parts takes more than one without, and of that for each sequence (``ragged_parts.json``)."""


def decode_cost(
    call: CacheCall,
    mean_k: float,
    tile_m: int,
    is_widened: bool,
    of_rows: Mapping[int, DecodeTimes] = NO_TIMES,
) -> float:
    """Of the decode kernel; ``mean_k`` are the keys of a sequence, ``of_rows`` times by the rows of a tile, in place of
    those of calls without a cache."""
    shape = call.shape
    of_rows = of_rows or (PACKED_DECODE if shape.is_packed_q else DENSE_DECODE)
    times = WIDENED if is_widened else of_rows[tile_m]
    tiles = shape.batch * shape.kv_heads * -(-shape.rows_a_kv_head // tile_m)
    of_a_cta = tiles / ctas_of_pieces(MULTIPROCESSORS, tiles, shape.kv_heads, call.has_one_length)
    wide = shape.head_dim / COLUMNS
    # Rows of parts are added up, which takes longer for wide ones.
    wider = max(wide, 1.0) if tile_m >= WARPGROUP_ROWS else 1.0
    return wider * (times.start + max(of_a_cta, 1.0) * times.tile) + of_a_cta * mean_k * times.key * wide


def forward_cost(
    shape: CacheShape, mean_k: float, group: int = 1, splits: int = 1, times: ForwardTimes | None = None
) -> float:
    """Of the forward kernel with ``group`` heads in a tile, whose keys are in ``splits`` parts. It has a CTA for each
    multiprocessor. The longest sequence is one's. ``times`` are those of calls without a cache by default."""
    times = times or (PACKED_FORWARD if shape.is_packed_q else DENSE_FORWARD)
    longest = longest_counted(shape, mean_k)
    heads, parts = shape.heads // group, parts_by_mean(splits, longest, mean_k)
    wide, rows = shape.head_dim / COLUMNS, rows_of_queries(shape.seqlen_q, group)
    is_high = splits > 1 and rows > FORWARD_ROWS and max(shape.head_dim, shape.head_dim_v) <= WARPGROUP_ROWS
    tile_m = HIGH_ROWS if is_high else FORWARD_ROWS
    tiles = ceil(heads * _tiles_of_head(shape, group, tile_m) * parts)
    turns = -(-tiles // MULTIPROCESSORS)
    # Warpgroups without a query leave tiles that are in one part.
    is_half = rows <= WARPGROUP_ROWS and splits == 1
    key = (times.key_of_half if is_half else times.key) * tile_m / FORWARD_ROWS
    # Heads that share keys read them together, and so do the tiles of a packed sequence.
    read = times.read * tiles / (turns * MULTIPROCESSORS) * shape.kv_heads / heads
    if times is PACKED_FORWARD:
        read /= max(_tiles_of_head(shape, group, tile_m) / shape.batch, 1.0)
    of_keys = max(turns * mean_k / parts * max(key, read), longest / splits * key) * wide
    cost = times.start + turns * (times.tile + wide * times.tile_columns) + of_keys
    if splits > 1:
        columns = parts * shape.heads * shape.total_q * shape.head_dim / 2**20
        cost += times.merge + times.merge_part * splits + times.merge_column * columns + plan_cost(shape)
    return cost


def longest_counted(shape: CacheShape, mean_k: float) -> float:
    """Keys of the longest sequence, as far as that is known."""
    return min(shape.seqlen_k, MOST_TIMES_MEAN * mean_k)


def plan_cost(shape: CacheShape) -> float:
    """That of parts in the plan of packed sequences, beyond that of a plan without."""
    return PLAN_OF_PARTS + PLAN_OF_A_SEQUENCE * shape.batch if shape.is_packed_q else 0.0


def most_in_memory(shape: CacheShape) -> int:
    """Parts of packed sequences for whose results there is memory; one at least."""
    if not shape.is_packed_q:
        return MOST_SEQUENCES
    return max(BYTES_OF_PARTS // (4 * shape.heads * shape.total_q * shape.head_dim_v), 1)


def parts_by_mean(splits: int, longest: float, mean_k: float) -> float:
    """Of a sequence, where the longest is in so many: others have parts as long, and half a part is rounded up."""
    share = mean_k / longest
    return max(splits * share + (1 - share) / 2, 1.0)


def best_splits(shape: CacheShape, mean_k: float, group: int, times: ForwardTimes | None = None) -> int:
    """The number of parts that takes least time, of those that fill the multiprocessors once, twice or three times, or
    nearly, with parts of the longest sequence or of one of average length: trying all would take a call longer than
    what it gains."""
    if shape.is_packed_q and shape.batch > MOST_SEQUENCES_IN_PARTS:
        return 1
    most = min(
        MOST_SPLITS, shape.seqlen_k // LEAST_KEYS, MOST_SEQUENCES // shape.batch, most_in_memory(shape)
    )
    tiles = shape.heads // group * _tiles_of_head(shape, group, FORWARD_ROWS)
    stretches = {1.0, longest_counted(shape, mean_k) / mean_k}
    filling = [turns * MULTIPROCESSORS / tiles * each for turns in (1, 2, 3) for each in stretches]
    tried = {1, *(min(int(number * share), most) for number in filling for share in (0.5, 0.75, 1.0))}
    numbers = sorted(number for number in tried if number >= 1)
    return min(numbers, key=lambda splits: forward_cost(shape, mean_k, group, splits, times))


def turns_of_tiles(shape: CacheShape, group: int) -> float:
    """How often tiles of ``group`` heads, in one part, fill the multiprocessors."""
    return shape.heads // group * _tiles_of_head(shape, group, FORWARD_ROWS) / MULTIPROCESSORS


def _tiles_of_head(shape: CacheShape, group: int, tile_m: int) -> int:
    """Of all sequences, at most: ``seqlen_q`` is a bound where they are packed."""
    tiles = shape.batch * -(-rows_of_queries(shape.seqlen_q, group) // tile_m)
    if shape.is_packed_q:
        tiles = min(tiles, shape.batch + rows_of_queries(shape.total_q, group) // tile_m)
    return tiles
