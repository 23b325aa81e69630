"""Tiles of the 16-bit forward kernels as data, and which of them serves a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

from cute_kernels import problem
from cute_kernels.problem import DENSE, DTYPES, VARLEN
from hopper.config import (
    COLUMNS_PER_ATOM,
    COLUMNS_PER_STEP,
    ONE_CONSUMER_OF_THREE_CTAS,
    THREE_CONSUMERS,
    TWO_CONSUMERS,
    TWO_CONSUMERS_OF_PAGES,
    WARPGROUP_ROWS,
    ForwardConfig,
    validate_forward_config,
)

Config = TypeVar("Config", bound=ForwardConfig)

NATIVE_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
"""(head_dim, head_dim_v) pairs that have a kernel of their own; any other pair runs on the cheapest
one that covers it, the tail of a row being zero-filled by TMA on load and clipped on store."""

TUNED_HEAD_DIMS = (*NATIVE_HEAD_DIMS, (80, 80), (160, 160))
"""The pairs where scores are not changed by a user's functions and no pages are read: what lies between 64 and 96, and
between 128 and 192, would be a fifth zeros there."""

ANY_LENGTH = 2**62

MANY_TILES = 132
"""Tiles from which on there is one for each SM of an H100 or H200. A persistent grid of fewer leaves some SMs without
work, and high tiles are fewer."""

PACKED_SEQLEN = 2048
"""The seqlen_k that tiles of packed sequences are chosen for, where ``PACKED_TILINGS`` has no row."""


@dataclass(frozen=True)
class Tiling:
    """The tuned part of a config, for keys up to ``max_seqlen_k``: ``fields`` are names and values of its fields.

    With ``many_tiles`` it serves only where a problem has so many tiles as MANY_TILES.
    """

    tile_m: int
    tile_n: int
    stages: int
    max_seqlen_k: int
    fields: tuple[tuple[str, Any], ...]
    many_tiles: bool = False

    def serves(self, seqlen_k: int, has_many_tiles: bool) -> bool:
        return seqlen_k <= self.max_seqlen_k and (has_many_tiles or not self.many_tiles)

    def build(self, kind: type[Config], **problem: Any) -> Config:
        """The config of ``kind`` with these tiles, for the problem that its other fields describe."""
        tiles = {"tile_m": self.tile_m, "tile_n": self.tile_n, "stages": self.stages}
        registers = TWO_CONSUMERS if self.tile_m == 2 * WARPGROUP_ROWS else THREE_CONSUMERS
        config = kind(**{"registers": registers, **tiles, **problem, **dict(self.fields)})
        validate_forward_config(config)
        return config


def tiling(tile_m: int, tile_n: int, stages: int, max_seqlen_k: int = ANY_LENGTH, **fields: Any) -> Tiling:
    """A row of a table; ``fields`` are those of the config that differ from its defaults."""
    return Tiling(tile_m, tile_n, stages, max_seqlen_k, tuple(fields.items()))


def small_tiling(tile_n: int, stages: int, max_seqlen_k: int = ANY_LENGTH) -> Tiling:
    """Tiles of 64 queries, and three CTAs an SM: while one starts or ends a tile, the others compute."""
    fields = {"ctas_per_sm": 3, "ping_pong": False, "registers": ONE_CONSUMER_OF_THREE_CTAS}
    return tiling(WARPGROUP_ROWS, tile_n, stages, max_seqlen_k, **fields)


@dataclass(frozen=True)
class PlainTiling:
    """A tiling for rows of which the wider one, of head_dim and head_dim_v, is in ``head_dims``, and for more keys than
    ``above``."""

    head_dims: range
    above: int
    tiling: Tiling
    dtypes: tuple[str, ...] = DTYPES

    def serves(self, dtype: str, widest: int, seqlen_k: int, has_many_tiles: bool) -> bool:
        return (
            dtype in self.dtypes
            and widest in self.head_dims
            and seqlen_k > self.above
            and self.tiling.serves(seqlen_k, has_many_tiles)
        )


HIGH_UNDER_A_MASK = tiling(192, 128, 3, ping_pong=False)
"""At head_dim 64, for warpgroups that walk apart (``ForwardConfig.walks_apart``)."""


def high_tiling(tile_n: int, stages: int, max_seqlen_k: int = ANY_LENGTH) -> Tiling:
    """Tiles of 192 queries, of which there must be enough, without turns."""
    return replace(tiling(192, tile_n, stages, max_seqlen_k, ping_pong=False), many_tiles=True)


BLOCK_KEYS = 16
"""Keys that a block of keys costs beyond its own, about."""


def least_padded(tilings: Sequence[Tiling], max_seqlen_k: int) -> tuple[Tiling, ...]:
    """Rows up to ``max_seqlen_k``, a multiple of 16, each with the one of ``tilings`` whose blocks cost least there: a
    key past the end costs as much as any other."""

    def cost(tiling: Tiling, seqlen_k: int) -> int:
        return -(-seqlen_k // tiling.tile_n) * (tiling.tile_n + BLOCK_KEYS)

    # Blocks have multiples of 16 keys, so what lies between two multiples costs as much as the upper one.
    lengths = range(16, max_seqlen_k + 1, 16)
    chosen = [min(tilings, key=lambda tiling, n=n: cost(tiling, n)) for n in lengths]
    return tuple(
        replace(tiling, max_seqlen_k=n)
        for n, tiling, after in zip(lengths, chosen, (*chosen[1:], None), strict=True)
        if tiling is not after
    )


TILINGS: dict[tuple[int, int, bool], tuple[Tiling, ...]] = {
    (64, 64, False): (tiling(192, 128, 3, ping_pong=False),),
    (64, 64, True): (
        small_tiling(64, 3, 1280),
        small_tiling(96, 2, 1536),
        replace(HIGH_UNDER_A_MASK, max_seqlen_k=6144, many_tiles=True),
        small_tiling(96, 2, 6144),
        HIGH_UNDER_A_MASK,
    ),
    (80, 80, False): (tiling(128, 128, 3, max_seqlen_k=1280), tiling(192, 112, 3)),
    (80, 80, True): (tiling(128, 128, 3, max_seqlen_k=1280), tiling(192, 112, 3)),
    (96, 96, False): (tiling(128, 192, 2),),
    (96, 96, True): (tiling(128, 128, 2),),
    (128, 128, False): (tiling(128, 128, 2, max_seqlen_k=1280), tiling(128, 176, 2)),
    (128, 128, True): (
        tiling(128, 128, 2, ping_pong=False, max_seqlen_k=6144),
        tiling(128, 160, 2, ping_pong=False),
    ),
    (160, 160, False): (tiling(128, 128, 2, late_rescale=True),),
    (160, 160, True): (tiling(128, 128, 2, late_rescale=True),),
    (192, 128, False): (tiling(128, 128, 2),),
    (192, 128, True): (tiling(128, 128, 2),),
    (192, 192, False): (tiling(128, 112, 2, late_rescale=True),),
    (192, 192, True): (tiling(128, 112, 2, late_rescale=True),),
    (256, 256, False): (tiling(128, 80, 2, ping_pong=False, late_rescale=True),),
    (256, 256, True): (
        tiling(128, 64, 2, ping_pong=False, late_rescale=True, max_seqlen_k=1536),
        tiling(128, 80, 2, ping_pong=False, late_rescale=True),
    ),
}
"""By (head_dim, head_dim_v, causal): the first tiling that ``serves`` is taken. Short
sequences want small tiles (fewer masked or padded scores), and at head_dim 64 several CTAs an SM; long ones want the
widest tile that fits, which reads shared memory least; under a causal mask 160 keys are faster than 176
(`forward_second_row.json`). Late rescaling pays where O has so many columns that rescaling them does not fit under the
exponentials."""

SHORT_TILINGS: dict[tuple[int, int, bool], tuple[Tiling, ...]] = {
    (64, 64, False): least_padded((small_tiling(64, 3), small_tiling(96, 2)), 1280),
    (128, 128, False): least_padded((tiling(128, 128, 2), tiling(128, 176, 2), tiling(128, 96, 3)), 1280),
    (256, 256, False): least_padded(
        tuple(tiling(128, keys, 2, ping_pong=False, late_rescale=True) for keys in (64, 80)), 1280
    ),
}
"""Rows before those of ``TILINGS`` where all keys are seen. Of few keys a last block is a large part: 1025 are nine
blocks of 128, or six of 176 (`forward_short_and_ragged.json` in the development results)."""

FEW_KEYS_APART = tiling(128, 128, 2, max_seqlen_k=6144, ping_pong=False, few_keys=16)
"""At head_dim 128 under a causal mask. Shorter sequences lose where an SM has a tile or two, 2049 keys, 8 heads 4 %."""

PLAIN_TILINGS: dict[tuple[int, int, bool], tuple[PlainTiling, ...]] = {
    **dict.fromkeys(
        ((64, 64, False), (64, 64, True)),
        (
            PlainTiling(range(24, 41, 16), 256, high_tiling(128, 3)),
            PlainTiling(range(56, 57), 768, high_tiling(128, 3)),
        ),
    ),
    (80, 80, False): (
        PlainTiling(range(72, 81), 256, high_tiling(112, 3, 320)),
        PlainTiling(range(72, 73), 320, high_tiling(128, 3, 1280)),
        PlainTiling(range(80, 81), 1280, tiling(192, 112, 3, ping_pong=False)),
    ),
    (80, 80, True): (
        PlainTiling(range(72, 81), 256, high_tiling(112, 3, 320)),
        PlainTiling(range(72, 73), 320, high_tiling(128, 3, 2560)),
        PlainTiling(range(72, 81), 1280, tiling(192, 112, 3, ping_pong=False)),
    ),
    (96, 96, False): (
        PlainTiling(range(88, 89), 256, high_tiling(96, 4)),
        PlainTiling(range(96, 97), 256, high_tiling(96, 4, 320)),
        PlainTiling(range(96, 97), 1280, high_tiling(112, 3, 4096)),
    ),
    (96, 96, True): (
        PlainTiling(range(88, 89), 256, high_tiling(96, 4)),
        PlainTiling(range(96, 97), 256, high_tiling(96, 4, 320)),
        PlainTiling(range(96, 97), 1280, high_tiling(112, 3)),
    ),
    (128, 128, False): (
        PlainTiling(range(104, 105), 1280, high_tiling(96, 3)),
        PlainTiling(range(112, 121), 1280, high_tiling(96, 3, 4096)),
        *(
            PlainTiling(range(128, 129), above, tiling(128, 176, 2, most, ping_pong=False))
            for above, most in ((1024, 1056), (1152, 1232), (1280, ANY_LENGTH))
        ),
    ),
    (128, 128, True): (
        PlainTiling(range(104, 105), 1280, high_tiling(96, 3)),
        PlainTiling(range(128, 129), 4096, FEW_KEYS_APART, ("bfloat16",)),
    ),
    (160, 160, True): (
        PlainTiling(range(144, 161), 2560, tiling(128, 128, 2, ping_pong=False, late_rescale=True)),
    ),
    (192, 192, True): (
        PlainTiling(range(176, 193), 0, tiling(128, 112, 2, ping_pong=False, late_rescale=True)),
    ),
}
"""Rows before all others where sequences have one length, there is no window, and nothing is done to scores. Tiles of
192 queries read K and V less often, which rows that do not fill whole sectors or boxes pay for twice
(`forward_head_dims.json` in the development results). At head_dim 128 without a mask blocks of 176 keys, where they pad
least or keys are many, are visited without turns (`forward_walks.json`)."""

PARTS_OF_SECTORS, WHOLE_BOXES = range(136, 153, 16), 192
"""Head_dims whose rows end within a sector of 32 bytes, which TMA takes longest over where a tile's rows are boxes of
64 bytes, as those of 160 columns are; and columns of which a row is three boxes of 128. Nothing more is multiplied."""

WINDOW_TILINGS: dict[tuple[int, int, bool], tuple[Tiling, ...]] = {
    **dict.fromkeys(
        ((64, 64, False), (64, 64, True)),
        (small_tiling(64, 3, 768), small_tiling(96, 2, 1536), HIGH_UNDER_A_MASK),
    ),
    **dict.fromkeys(((80, 80, False), (80, 80, True)), (tiling(128, 128, 3),)),
    (128, 128, True): (
        tiling(128, 128, 2, ping_pong=False, max_seqlen_k=1536),
        tiling(128, 128, 2, max_seqlen_k=6144),
        tiling(128, 160, 2),
    ),
}
"""The same under a window; ``max_seqlen_k`` are the keys that a query sees. In narrow windows a tile is little more
than its start and its end, and warpgroups that walk apart are worth more than their turns. Where there is no row,
``TILINGS`` has it."""

PACKED_TILINGS: dict[tuple[int, int, bool], Tiling] = {
    (64, 64, False): small_tiling(96, 2),
    (64, 64, True): small_tiling(96, 2),
    (80, 80, False): tiling(128, 128, 3),
    (80, 80, True): tiling(128, 128, 3),
    (128, 128, False): tiling(128, 128, 2),
}
"""The tiles of packed sequences, where those of PACKED_SEQLEN keys lose more with short sequences than they win with
long ones."""

ONE_PAGE = 2**31 - 1
"""In place of rows, where every sequence lies in one page, whatever its size."""

END_TO_END = 2**31
"""In place of rows, where sequences lie end to end, as long as each other: their keys are packed, and in no pages."""

PAGE_ROWS = (128, 64, 32, 16, 8)
"""Rows that may be known to lie together in a page, from the first of the page on: the widest one that divides its size
makes the widest boxes. Fewer than the 8 of a swizzle are no box."""

FUNCTION_TILINGS: dict[tuple[int, int], Tiling] = {
    (64, 64): tiling(128, 128, 4),
    (96, 96): tiling(128, 128, 2),
    (128, 128): tiling(128, 128, 2),
    (192, 128): tiling(128, 128, 2),
    (192, 192): tiling(128, 112, 2, late_rescale=True),
    (256, 256): tiling(128, 64, 2, ping_pong=False, late_rescale=True),
}
"""The tiles where there are a user's functions, by (head_dim, head_dim_v), with any mask, layout and length: functions
need registers, which two warpgroups and narrow tiles leave."""


def cover_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The native (head_dim, head_dim_v) pair of least work that is not smaller in either."""
    return problem.cover_head_dims(NATIVE_HEAD_DIMS, head_dim, head_dim_v)


def has_many_tiles(
    head_dim: int, head_dim_v: int, causal: bool, seqlens: tuple[int, int], heads: int
) -> bool:
    """Whether a row with ``many_tiles`` serves a dense problem without a window; ``seqlens`` are those of Q and K,
    ``heads`` those of all batches."""
    key = (*problem.cover_head_dims(TUNED_HEAD_DIMS, head_dim, head_dim_v), causal)
    rows = (*_plain_tiling(DTYPES[0], key, (head_dim, head_dim_v), seqlens[1], True), *TILINGS[key])
    chosen = next(tiling for tiling in rows if tiling.serves(seqlens[1], True))
    return chosen.many_tiles and -(-seqlens[0] // chosen.tile_m) * heads >= MANY_TILES


@lru_cache(maxsize=4096)
def select_forward_config(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    seqlen_k: int,
    window: bool = False,
    layout: str = DENSE,
    has_many_tiles: bool = False,
) -> ForwardConfig:
    """The config that serves a problem, at one of TUNED_HEAD_DIMS. Reads sizes only, never a tensor; cached.

    ``seqlen_k`` are the keys that a query sees at most. With packed sequences, whose lengths are not known, it is not
    read: tiles that suit short sequences cost long ones less than the other way round.
    """
    key = (*problem.cover_head_dims(TUNED_HEAD_DIMS, head_dim, head_dim_v), causal)
    rows = TILINGS[key]
    if layout == VARLEN:
        rows, seqlen_k = (PACKED_TILINGS[key],) if key in PACKED_TILINGS else rows, PACKED_SEQLEN
    elif window:
        rows = WINDOW_TILINGS.get(key, rows)
    else:
        rows = (*SHORT_TILINGS.get(key, ()), *rows)
    chosen = next(tiling for tiling in rows if tiling.serves(seqlen_k, has_many_tiles))
    return replace(_build(chosen, dtype, key), window=window, layout=layout)


def _plain_tiling(
    dtype: str, key: tuple[int, int, bool], head_dims: tuple[int, int], seqlen_k: int, has_many_tiles: bool
) -> tuple[Tiling, ...]:
    """The tiling of PLAIN_TILINGS for these head_dims in the tiles of ``key``, if there is one."""
    widest = max(head_dims)
    rows = PLAIN_TILINGS.get(key, ())
    return tuple(row.tiling for row in rows if row.serves(dtype, widest, seqlen_k, has_many_tiles))[:1]


@lru_cache(maxsize=4096)
def select_plain_config(
    dtype: str, head_dim: int, head_dim_v: int, causal: bool, seqlen_k: int, has_many_tiles: bool = False
) -> ForwardConfig:
    """``select_forward_config`` where nothing is done to scores, of sequences of one length without a window: tiles
    that only such problems have, and products without the columns of zeros that rows are filled up with."""
    columns = head_dim, head_dim_v
    if head_dim == head_dim_v and head_dim in PARTS_OF_SECTORS:
        columns = WHOLE_BOXES, WHOLE_BOXES
    config = select_forward_config(dtype, *columns, causal, seqlen_k, has_many_tiles=has_many_tiles)
    pair = config.head_dim, config.head_dim_v
    for tiling in _plain_tiling(dtype, (*pair, causal), columns, seqlen_k, has_many_tiles):
        config = _build(tiling, dtype, (*pair, causal))
    used = -(-head_dim // COLUMNS_PER_STEP) * COLUMNS_PER_STEP
    # O of a single atom of columns would have lost a mode.
    used_v = max(-(-head_dim_v // COLUMNS_PER_ATOM), 2) * COLUMNS_PER_ATOM
    if (used, used_v) != pair:
        # Blocks of 176 keys do without turns for warpgroups that leave some out, which only whole rows have.
        has_turns = config.ping_pong or (config.tile_n == 176 and config.walks_apart)
        config = replace(config, used_head_dim=used, used_head_dim_v=used_v, ping_pong=has_turns, few_keys=0)
        validate_forward_config(config)
    return config


def select_with_functions(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    window: bool = False,
    layout: str = DENSE,
    **others: Any,
) -> ForwardConfig:
    """``select_forward_config`` where there are a user's functions, with further fields, ``functions`` among them."""
    pair = cover_head_dims(head_dim, head_dim_v)
    config = _build(FUNCTION_TILINGS[pair], dtype, (*pair, causal))
    return replace(config, window=window, layout=layout, **others)


PAGED_REGISTERS = {(96, 96): TWO_CONSUMERS_OF_PAGES}
"""Of kernels on pages, by (head_dim, head_dim_v), where they are not those of the tiles."""


_ONE_PAGE_TILING = tiling(128, 160, 2)

PAGED_TILINGS: dict[tuple[int, int, bool], dict[int, Tiling]] = {
    (128, 128, False): {ONE_PAGE: _ONE_PAGE_TILING, 16: tiling(128, 128, 3)},
    (128, 128, True): {ONE_PAGE: _ONE_PAGE_TILING, 16: tiling(128, 128, 3, ping_pong=False)},
}
"""Tiles of kernels on pages by (head_dim, head_dim_v, whether the mask is causal and there is no window) and the rows
of a page from which on they serve, where those of the table do not. 128 keys are whole boxes of wide pages, and a third
stage gives boxes time to arrive. Under a causal mask warpgroups walk apart, with Q in registers
(`ForwardConfig.keeps_q`, `chunk_variants.json`)."""


def select_paged_config(
    dtype: str, head_dim: int, head_dim_v: int, causal: bool, page_rows: int, window: bool = False
) -> ForwardConfig:
    """The config of packed queries on keys and values in the pages of a cache, of which ``page_rows`` are whole boxes
    of rows: one of PAGE_ROWS that divides the page size, ONE_PAGE or END_TO_END.

    Its tiles are those of ``PAGED_TILINGS``, or of the longest sequences: a cache has few queries for its keys, and the
    walks are long. With those of ``TILINGS`` two warpgroups take turns up to head_dim 128: walking apart has not been
    timed there.
    """
    key = (*cover_head_dims(head_dim, head_dim_v), causal)
    of_pages = PAGED_TILINGS.get((*key[:2], causal and not window), {})
    own = [tiles for rows, tiles in of_pages.items() if page_rows >= rows]
    config = _build((*own, TILINGS[key][-1])[0], dtype, key)
    if not own and config.walks_apart and config.consumers == 2 and head_dim <= 128:
        config = replace(config, ping_pong=True)
    if key[:2] in PAGED_REGISTERS:
        config = replace(config, registers=PAGED_REGISTERS[key[:2]])
    return replace(config, window=window, layout=VARLEN, page_box=box_of_pages(config.tile_n, page_rows))


def box_of_pages(tile_n: int, page_rows: int) -> int:
    """``page_box`` of blocks of ``tile_n`` keys."""
    return {ONE_PAGE: tile_n, END_TO_END: 0}.get(page_rows, gcd(tile_n, page_rows))


def with_dropout(config: ForwardConfig) -> ForwardConfig:
    """The config for the same problem with dropout: tile_n is rounded down to a multiple of 32, since the mask is made
    for 32 keys at a time. Two warpgroups take turns over blocks of more than 128 keys: without them the bits that both
    make at a time cost 5 % (`forward_without_waits.json`)."""
    tile_n = config.tile_n // 32 * 32
    has_turns = config.ping_pong or (config.consumers == 2 and tile_n > 128)
    return replace(config, tile_n=tile_n, dropout=True, ping_pong=has_turns)


def with_group(config: ForwardConfig, group: int) -> ForwardConfig:
    """The config for the same problem with ``group`` query heads in the rows of a tile. At head_dim 192 two warpgroups
    take no turns: with them packed kernels under a causal mask spill 4 bytes."""
    has_turns = config.ping_pong and config.head_dim < 192
    config = replace(config, group=group, few_keys=0, ping_pong=has_turns)
    validate_forward_config(config)
    return config


SPLIT_TILINGS = {64: small_tiling(96, 2), 128: tiling(128, 128, 4), 192: tiling(192, 128, 3, ping_pong=False)}
"""At head_dim 64, for tiles in parts, by the most rows that a K/V head has of a sequence; the last one for more."""


def with_parts(config: ForwardConfig, group: int, rows: int, page_rows: int = END_TO_END) -> ForwardConfig:
    """``with_group`` for tiles whose keys several CTAs visit, of so many ``rows`` at most. Warpgroups visit all blocks
    then, and two take turns again up to head_dim 128. ``page_rows`` are those of ``select_paged_config``."""
    if (config.head_dim, config.head_dim_v) == (64, 64):
        chosen = SPLIT_TILINGS[min((most for most in SPLIT_TILINGS if rows <= most), default=192)]
        tiles = _build(chosen, config.dtype, (64, 64, config.causal))
        box = box_of_pages(tiles.tile_n, page_rows)
        config = replace(tiles, layout=config.layout, softcap=config.softcap, page_box=box)
    has_turns = config.consumers == 2 and config.head_dim <= 128
    if config.page_box and config.consumers == 2:
        # The warps that load divide by the group, tell parts from sequences and read the table.
        config = replace(config, registers=TWO_CONSUMERS_OF_PAGES)
    return with_group(replace(config, split=True, ping_pong=has_turns, few_keys=0), group)


def _build(tiling: Tiling, dtype: str, key: tuple[int, int, bool]) -> ForwardConfig:
    head_dim, head_dim_v, causal = key
    return tiling.build(ForwardConfig, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)


def shipped_plain_configs() -> tuple[ForwardConfig, ...]:
    """Those of PLAIN_TILINGS for head_dims that fill their tiles, each once. Others have kernels for each head_dim."""
    rows = [(key, row) for key, rows in PLAIN_TILINGS.items() for row in rows if key[0] in row.head_dims]
    return tuple(
        dict.fromkeys(
            _build(row.tiling, dtype, key) for dtype in DTYPES for key, row in rows if dtype in row.dtypes
        )
    )


def shipped_forward_configs() -> tuple[ForwardConfig, ...]:
    """Every config that ``select_forward_config`` can return, each once."""
    rows = [
        (key, tiling)
        for table in (TILINGS, SHORT_TILINGS)
        for key, tilings in table.items()
        for tiling in tilings
    ]
    return tuple(dict.fromkeys(_build(tiling, dtype, key) for dtype in DTYPES for key, tiling in rows))
