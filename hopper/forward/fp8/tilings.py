"""Tiles of the FP8 forward kernels as data, and which of them serves a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cute_kernels.problem import DENSE, DTYPES, MAX_HEAD_DIM, VARLEN
from hopper.config import (
    THREE_CONSUMERS_TRANSPOSING,
    TWO_CONSUMERS_OF_WIDE_ROWS,
    TWO_CONSUMERS_TRANSPOSING,
    WARPGROUP_ROWS,
    Registers,
    validate_forward_config,
)
from hopper.forward.fp8.changes import MORE_IN_A_WINDOW, NO_CHANGES, Changes
from hopper.forward.fp8.config import FP8_DTYPE, Fp8ForwardConfig, Softmax
from hopper.forward.fp8.native import BETWEEN, Native, fitted, native_of, native_size, with_used_columns
from hopper.forward.tilings import (
    ANY_LENGTH,
    END_TO_END,
    MANY_TILES,
    PACKED_SEQLEN,
    Tiling,
    box_of_pages,
    tiling,
)

ONE_CONSUMER_TRANSPOSING = Registers(consumer=192, producer=64)
"""Of each of two CTAs an SM."""
LONE_CONSUMER_TRANSPOSING = Registers(consumer=256, producer=56)

exact = partial(tiling, late_rescale=True)
in_order = partial(exact, ping_pong=False)
"""Each maximum, with the least instructions: what two warpgroups gain by ``eager`` they lose at head_dim 256 with V in
rows (`fp8_rows_of_256.json`)."""
eager = partial(exact, softmax=Softmax.EAGER, ping_pong=False)
lagging = partial(exact, softmax=Softmax.LAGGING, ping_pong=False, polynomial_pairs=3)
half_scores = partial(exact, softmax=Softmax.HALF_SCORES, ping_pong=False, polynomial_pairs=5)
"""Scores in float16 leave registers up to head_dim 128: for a third warpgroup, or for more keys."""

two_level = partial(tiling, two_level=True)
"""The second accumulator takes registers that are not there for keys."""


exact_lse = partial(two_level, wide_codes=True, softmax=Softmax.EAGER, ping_pong=False)
"""Everything is added up in float32, and takes its maximum. Where blocks are done in order, turns are what overlaps."""


def rows(tile_m: int, *tiles: Any, **fields: Any) -> Tiling:
    """``exact`` or ``two_level`` for V in rows, whose producers take registers."""
    transposing = TWO_CONSUMERS_TRANSPOSING if tile_m == 2 * WARPGROUP_ROWS else THREE_CONSUMERS_TRANSPOSING
    kind = two_level if fields.get("two_level") else exact
    return kind(tile_m, *tiles, v_rows=True, registers=transposing, **fields)


def wide_rows(kind: Callable[..., Tiling], *tiles: Any, **fields: Any) -> Tiling:
    """``in_order``, ``eager`` or ``half_scores`` for V in rows. If O has no place of its own it goes from registers,
    and with ``half_scores`` by way of the place where rows of V have waited."""
    return kind(*tiles, v_rows=True, **fields)


def _takes_maxima(tiling: Tiling) -> bool:
    """Whether a tiling of ``wide_rows`` is not of ``half_scores``."""
    fields = dict(tiling.fields)
    return fields.get("ping_pong") is False and fields.get("softmax") is not Softmax.HALF_SCORES


FEW_KEYS = {
    64: eager(128, 128, 4, polynomial_pairs=3),
    128: eager(128, 128, 4, polynomial_pairs=3),
    256: eager(128, 128, 2),
}
"""By head_dim, for short sequences, whose tiles are over before a stale maximum pays: each block takes its maximum, and
none has to be repaired (`fp8_short_peaky.json`)."""


FEW_TILES_IN_RUNS = {64: half_scores(128, 192, 4), 128: half_scores(128, 128, 4)}
"""By head_dim, for few tiles of so many keys that P V is added up in runs (``with_runs``), which the softmax of
``FEW_KEYS`` does not know."""


def few_keys(head_dim: int, most: int) -> Tiling:
    """For sequences of up to ``most`` keys."""
    return replace(FEW_KEYS[head_dim], max_seqlen_k=most)


FP8_TILINGS: dict[tuple[int, bool], tuple[Tiling, ...]] = {
    (64, False): (
        few_keys(64, 1024),
        lagging(192, 128, 4, polynomial_pairs=4),
        exact(192, 64, 4, polynomial_pairs=3),
    ),
    (64, True): (
        few_keys(64, 1536),
        lagging(192, 128, 4, polynomial_pairs=4),
        exact(192, 64, 4, polynomial_pairs=3),
    ),
    (128, False): (
        few_keys(128, 1280),
        lagging(128, 192, 3),
        exact(128, 64, 4, polynomial_pairs=2),
    ),
    (128, True): (
        few_keys(128, 4096),
        lagging(128, 192, 3),
        exact(128, 64, 4, polynomial_pairs=2),
    ),
    (256, False): (FEW_KEYS[256], exact(128, 64, 4, ping_pong=False)),
    (256, True): (FEW_KEYS[256], exact(128, 64, 4, ping_pong=False)),
}
"""By head_dim, the larger of both, and causal. A tiling can serve blocks of K and V that its ``tile_n`` divides; of
those that can, the first whose ``max_seqlen_k`` is not exceeded does, or else the last; those of ``NARROW_KEYS`` serve
blocks that no other divides. The width that is chosen for blocks of any size is the one that our quantizer gives its
blocks: that without a mask, unless it is told of one."""

FP8_HALF_SCORES_TILINGS: dict[tuple[int, bool], tuple[Tiling, ...]] = {
    (64, False): (
        few_keys(64, 512),
        half_scores(192, 128, 4, max_seqlen_k=4096),
        half_scores(192, 192, 4),
        *FP8_TILINGS[64, False],
    ),
    (64, True): (
        few_keys(64, 1024),
        half_scores(192, 128, 4, max_seqlen_k=2560),
        half_scores(192, 192, 4),
        half_scores(192, 128, 4),
        *FP8_TILINGS[64, True],
    ),
    (128, False): (
        few_keys(128, 512),
        half_scores(192, 128, 4),
        *FP8_TILINGS[128, False],
    ),
    (128, True): (
        few_keys(128, 1024),
        half_scores(192, 128, 4),
        *FP8_TILINGS[128, True],
    ),
    (256, False): (
        few_keys(256, 640),
        half_scores(128, 128, 2, polynomial_pairs=2),
        *FP8_TILINGS[256, False],
    ),
    (256, True): (
        few_keys(256, 1536),
        half_scores(128, 128, 2, polynomial_pairs=1),
        *FP8_TILINGS[256, True],
    ),
}
"""As ``FP8_TILINGS``, for Q and K whose scores fit float16, or are made to where nobody gets the LSE
(``lowers_queries``)."""

FP8_LOWERED_TILINGS: dict[tuple[int, bool], tuple[Tiling, ...]] = {
    (64, False): (few_keys(64, 1024), *FP8_HALF_SCORES_TILINGS[64, False][1:]),
}
"""In place of those of ``FP8_HALF_SCORES_TILINGS`` where scores are made to fit: that takes part of a tile's time, the
more of it the fewer keys there are."""

FP8_RETURNED_LSE_TILINGS: dict[tuple[int, bool], tuple[Tiling, ...]] = {
    (64, True): (
        few_keys(64, 1536),
        lagging(192, 128, 4, polynomial_pairs=4, max_seqlen_k=2560),
        half_scores(192, 192, 4),
        *FP8_TILINGS[64, True],
    ),
    (128, False): (few_keys(128, 1280), *FP8_HALF_SCORES_TILINGS[128, False]),
    (256, False): (few_keys(256, 768), *FP8_HALF_SCORES_TILINGS[256, False]),
}
"""In place of those of ``FP8_HALF_SCORES_TILINGS`` where scores fit float16 and someone gets the LSE, which scores in
float32 make three times as fine: with scores in float16 the sum of a tile's first block has P as e4m3 rounds them, and
few keys may all be rounded up. Elsewhere one tiling serves both."""

LARGEST_HALF = 65504.0
"""Of float16."""

RUN_KEYS, RUNLESS_KEYS = {64: 6912, 128: 8192, 256: 8192}, 5120
"""Keys of a run (``run_blocks``), at most, by head_dim, and of a problem without runs. Of lognormal values a run of
7680 keys at head_dim 64 has 1.55 times the error of two levels."""

MEAN_KEYS = {64: 1152, 128: 1024, 256: 1024}
"""Keys that may have a mean of V of their own (``mean_blocks``), at most, by head_dim. Means of fewer keys follow
shorter documents, and calls whose means change take longer. At head_dim 64 six tiles have a mean; with five, calls take
0.2 to 1.0 % longer (`fp8_shorter_means.json`)."""

NARROW_KEYS = 64
"""Keys of a tile that is slower than wider ones, but divides most blocks."""

FEW_ROWS = {
    head_dim: wide_rows(eager, 128, 128, 3, polynomial_pairs=3, registers=TWO_CONSUMERS_TRANSPOSING)
    for head_dim in (64, 128)
}
"""``FEW_KEYS`` for V in rows."""

FP8_ROW_TILINGS: dict[int, tuple[Tiling, ...]] = {
    64: (FEW_ROWS[64], rows(192, 64, 3, polynomial_pairs=3)),
    128: (rows(128, 128, 2, polynomial_pairs=2), rows(128, 64, 3, polynomial_pairs=2)),
    256: (rows(128, 64, 2),),
}
"""By head_dim, for V in rows: two blocks of it wait in shared memory for their transposition."""

FP8_HALF_ROW_TILINGS: dict[tuple[int, bool], tuple[Tiling, ...]] = {
    (64, False): FP8_ROW_TILINGS[64],
    (64, True): FP8_ROW_TILINGS[64],
    (128, False): (
        replace(FEW_ROWS[128], max_seqlen_k=512),
        wide_rows(half_scores, 192, 128, 3),
        *FP8_ROW_TILINGS[128],
    ),
    (128, True): (
        replace(FP8_ROW_TILINGS[128][0], max_seqlen_k=384),
        replace(FEW_ROWS[128], max_seqlen_k=1280),
        wide_rows(half_scores, 192, 128, 3),
        *FP8_ROW_TILINGS[128],
    ),
    (256, False): (
        wide_rows(in_order, 128, 128, 2, max_seqlen_k=1024),
        wide_rows(half_scores, 128, 128, 2, polynomial_pairs=2, registers=TWO_CONSUMERS_OF_WIDE_ROWS),
        *FP8_ROW_TILINGS[256],
    ),
    (256, True): (
        wide_rows(in_order, 128, 128, 2, max_seqlen_k=2560),
        wide_rows(half_scores, 128, 128, 2, polynomial_pairs=1, registers=TWO_CONSUMERS_OF_WIDE_ROWS),
        *FP8_ROW_TILINGS[256],
    ),
}
"""By head_dim and causal, for V in rows where nobody gets the LSE and nothing is masked but causally."""

BETWEEN_KEYS = 384
"""Up to how many keys, without a mask, rows of ``BETWEEN`` take each maximum, in the kernel of head_dim 256."""

FP8_RETURNED_LSE_ROW_TILINGS = (wide_rows(in_order, 128, 128, 2),)
"""As ``FP8_HALF_ROW_TILINGS`` above 192 columns, for any number of keys, where the LSE is returned, and not exact, so
that scores are in float32 (`fp8_transposers.json`)."""

PARTS_TRANSPOSING = Registers(consumer=216, producer=72)
"""Where keys are in parts, what finds them takes registers of those who transpose."""

low_rows = partial(
    wide_rows, eager, WARPGROUP_ROWS, ctas_per_sm=2, registers=ONE_CONSUMER_TRANSPOSING, polynomial_pairs=3
)
"""Tiles of 64 rows, and two CTAs an SM."""

high_rows = partial(
    wide_rows, eager, 3 * WARPGROUP_ROWS, registers=THREE_CONSUMERS_TRANSPOSING, polynomial_pairs=3
)

FEW_QUERIES: dict[int, dict[int, Tiling]] = {
    64: {64: low_rows(192, 2), 192: high_rows(128, 3)},
    128: {64: low_rows(128, 2), 128: FEW_ROWS[128], 192: high_rows(96, 3)},
    256: {
        64: wide_rows(eager, 64, 128, 2, registers=LONE_CONSUMER_TRANSPOSING),
        128: wide_rows(eager, 128, 128, 2),
    },
}
"""By head_dim and rows of a tile, for tiles with the query heads of a key/value head (`fp8_few_queries_tiles.json`)."""

FEW_QUERIES_IN_PARTS: dict[int, dict[int, Tiling]] = {
    64: FEW_QUERIES[64],
    128: FEW_QUERIES[128]
    | {128: wide_rows(eager, 128, 128, 3, polynomial_pairs=3, registers=PARTS_TRANSPOSING)},
    256: FEW_QUERIES[256] | {128: wide_rows(eager, 128, 96, 2, registers=TWO_CONSUMERS_TRANSPOSING)},
}
"""The same where keys are in parts."""

FEW_PACKED_QUERIES: dict[int, dict[int, Tiling]] = FEW_QUERIES | {
    256: FEW_QUERIES[256] | {128: wide_rows(eager, 128, 64, 3, registers=TWO_CONSUMERS_TRANSPOSING)}
}
"""``FEW_QUERIES`` of packed sequences, whose consumers keep where a tile lies in registers."""

FEW_PACKED_QUERIES_IN_PARTS: dict[int, dict[int, Tiling]] = FEW_QUERIES_IN_PARTS | {
    128: FEW_QUERIES_IN_PARTS[128] | {192: high_rows(64, 3)}
}
"""The same where keys are in parts."""


def few_queries_tilings(layout: str, split: bool) -> dict[int, dict[int, Tiling]]:
    """By head_dim and rows of a tile, where queries are few and keys in parts or not."""
    if layout == VARLEN:
        return FEW_PACKED_QUERIES_IN_PARTS if split else FEW_PACKED_QUERIES
    return FEW_QUERIES_IN_PARTS if split else FEW_QUERIES


FP8_TWO_LEVEL_TILINGS: dict[int, tuple[Tiling, ...]] = {
    64: (
        two_level(128, 128, 4, polynomial_pairs=3),
        two_level(192, 64, 4, polynomial_pairs=3),
    ),
    128: (
        two_level(128, 128, 4, polynomial_pairs=2),
        two_level(128, 96, 4, polynomial_pairs=2),
        two_level(128, 64, 4, polynomial_pairs=2),
    ),
    256: (two_level(128, 128, 2, pipelined=False), two_level(128, 64, 4, pipelined=False)),
}
"""By head_dim, with and without a causal mask. Every width in ``FP8_TILINGS`` and ``FP8_HALF_SCORES_TILINGS`` is a
multiple of one here, so that what was quantized for one level can be attended to with two. Up to head_dim 128 a
thread has registers for two accumulators of all columns of O, but not for 192 keys beside them; at 256 P V comes in
parts of its columns, after the softmax."""

FP8_TWO_LEVEL_ROW_TILINGS: dict[int, tuple[Tiling, ...]] = {
    64: (rows(128, 128, 3, two_level=True, polynomial_pairs=3),),
    128: (rows(128, 96, 3, two_level=True, polynomial_pairs=2),),
    256: (rows(128, 64, 2, two_level=True, pipelined=False),),
}
"""By head_dim, for V in rows."""

FP8_EXACT_LSE_TILINGS: dict[int, tuple[Tiling, ...]] = {
    64: (exact_lse(128, 192, 3), exact_lse(128, 96, 6), exact_lse(128, 64, 4)),
    128: (exact_lse(128, 128, 3), exact_lse(128, 64, 4)),
    256: (exact_lse(128, 64, 2, pipelined=False, softmax=Softmax.EXACT, ping_pong=True),),
}
"""By head_dim, where the LSE is to be exact, whatever scores fit and however P V is to be added up: few kernels, and
each serves what was quantized for others."""

EXACT_TWO_LEVEL_KEYS = 128
"""The widest block for an exact LSE where two levels are asked for. Within a block P V is added up in 13 bits: of
values around 1, blocks of 192 keys lose 17 % more than the emulation, of 96 keys 4 (`fp8_exact_two_level.json`)."""

FP8_PACKED_ROW_TILINGS: dict[tuple[int, bool], tuple[Tiling, ...]] = FP8_HALF_ROW_TILINGS | {
    (MAX_HEAD_DIM, causal): tuple(
        tiling for tiling in FP8_HALF_ROW_TILINGS[MAX_HEAD_DIM, causal] if not _takes_maxima(tiling)
    )
    for causal in (False, True)
}
"""``FP8_HALF_ROW_TILINGS`` for packed sequences, which leave no registers for 128 keys at head_dim 256 where each block
takes its maximum."""


def are_few_tiles(heads: int, queries: int, causal: bool) -> bool:
    """Whether tiles of ``FEW_KEYS`` are so few that lower ones, which are done sooner, need no more turns of all
    multiprocessors. ``heads`` are those of the whole batch, each with so many ``queries``, of which one that sees half
    of the keys counts half. Under a causal mask tiles take different times, and share multiprocessors otherwise
    (`fp8_few_tiles.json`)."""
    low, high = (heads * -(-queries // (n * WARPGROUP_ROWS)) for n in (2, 3))
    turns_are_same = not causal and -(-low // MANY_TILES) == -(-high // MANY_TILES)
    return low <= MANY_TILES or low == high or turns_are_same


def _in_lower_tiles(chosen: Tiling, lower: Tiling | None, block_k: int) -> Tiling:
    """What serves ``chosen``'s problems where tiles are few: of fewer rows each, so that more multiprocessors have one,
    and all are done sooner."""
    if lower is None or chosen.tile_m <= lower.tile_m or block_k % lower.tile_n:
        return chosen
    return lower


def select_fp8_forward_config(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    output: str,
    seqlen_k: int,
    block_k: int = 0,
    v_rows: bool = False,
    two_level: bool = False,
    half_scores: bool = False,
    window: bool = False,
    layout: str = DENSE,
    chunk: bool = False,
    exact_lse: bool = False,
    without_lse: bool = False,
    few_tiles: bool = False,
) -> Fp8ForwardConfig:
    """The config that serves an e4m3 problem with an output of dtype ``output``.

    ``block_k`` keys share a scale; 0 says that all do. ``v_rows`` says that V comes as (keys, head_dim_v),
    ``two_level`` that P V is to be added to O in float32, and ``half_scores`` that scores fit float16
    (``scores_fit_half``). ``seqlen_k`` are the keys that a query sees at most, 0 for packed sequences that do not tell.
    ``exact_lse`` asks for an LSE to merge partial results by, from V that comes transposed; of packed sequences with a
    window at head_dim 256 the config is then one without a causal mask, and the window's right side is to be 0:
    it hides the same keys, and a thread has the registers. ``without_lse`` says that
    nobody gets the LSE: then scores that may not fit float16 lie in it too, since the kernel lowers queries, and so do
    more of those that fit (``FP8_RETURNED_LSE_TILINGS``). Their LSE would be three times as coarse as that of scores in
    float32. Only then do ``few_tiles`` count, of which ``are_few_tiles`` speaks.

    Raises:
        ValueError: a head dimension is too large, no tiling divides ``block_k``, or V in rows meets ``exact_lse``.
    """
    if exact_lse and v_rows:
        raise ValueError("v_rows is True, allowed with exact_lse: False")
    if max(head_dim, head_dim_v) > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} and head_dim_v {head_dim_v}: both may be at most {MAX_HEAD_DIM}"
        )
    native = native_of(head_dim, head_dim_v, exact_lse or two_level)
    size, is_packed = native.tiles, layout == VARLEN
    if window and causal and size < MAX_HEAD_DIM:
        seqlen_k += seqlen_k // MORE_IN_A_WINDOW
    if exact_lse:
        any_width = FP8_EXACT_LSE_TILINGS[size]
        tilings = tuple(t for t in any_width if not two_level or t.tile_n <= EXACT_TWO_LEVEL_KEYS)
        causal = causal and not (window and is_packed and size == MAX_HEAD_DIM)
    else:
        without_lse = without_lse and not (v_rows and window)
        tilings = _fp8_tilings(size, causal, v_rows, two_level, half_scores, without_lse)
    if native == BETWEEN and v_rows and not causal and seqlen_k > BETWEEN_KEYS:
        tilings = tuple(tiling for tiling in tilings if not _takes_maxima(tiling))
    is_wide = native == native_size(MAX_HEAD_DIM)
    if v_rows and is_wide and not (without_lse or two_level or window or is_packed):
        tilings = FP8_RETURNED_LSE_ROW_TILINGS
    if is_packed and v_rows and without_lse and not two_level:
        tilings = FP8_PACKED_ROW_TILINGS[size, causal]
    elif is_packed:
        seqlen_k = min(seqlen_k or PACKED_SEQLEN, PACKED_SEQLEN)
    dividing = [tiling for tiling in tilings if block_k % tiling.tile_n == 0]
    if not dividing:
        widths = " or ".join(str(width) for width in sorted({tiling.tile_n for tiling in tilings}))
        raise ValueError(f"block_k is {block_k}, allowed at head_dim {size}: multiples of {widths}")
    wide = [tiling for tiling in dividing if tiling.tile_n > NARROW_KEYS] or dividing
    chosen = next((tiling for tiling in wide if seqlen_k <= tiling.max_seqlen_k), wide[-1])
    if few_tiles and without_lse and not two_level:
        is_in_runs = half_scores and not window and seqlen_k > RUNLESS_KEYS
        table = FEW_ROWS if v_rows else FEW_TILES_IN_RUNS if is_in_runs else FEW_KEYS
        chosen = _in_lower_tiles(chosen, table.get(size), block_k)
    if native == BETWEEN and v_rows and _takes_maxima(chosen):
        # O goes from registers where it has no place of its own, which is faster.
        native = native_size(MAX_HEAD_DIM)
    config = build(chosen, native, causal, output)
    lowers = config.softmax is Softmax.HALF_SCORES and (v_rows or not half_scores)
    config = replace(config, window=window, layout=layout, chunk=chunk, lowers_queries=lowers)
    config = with_used_columns(config, head_dim, head_dim_v)
    return with_lone_scales(config) if v_rows else config


def select_fp8_few_queries_config(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    output: str,
    group: int,
    tile_rows: int,
    split: bool,
    layout: str = DENSE,
    page_rows: int = END_TO_END,
    changes: Changes = NO_CHANGES,
) -> Fp8ForwardConfig:
    """The config for few queries of e4m3, dense or packed by ``layout``, V in rows and one scale for all keys of a
    head, and for the queries of ``group`` heads, which stand in the ``tile_rows`` rows of a tile. With ``split``
    several CTAs visit parts of a tile's keys. ``page_rows`` are those of ``hopper.forward.tilings.PAGE_ROWS`` that are
    known of the pages of a cache, where packed queries attend to one. ``changes`` are what is masked and done to
    scores.

    Raises:
        ValueError: a head dimension is too large, or no tile has ``group`` heads.
    """
    native = native_size(max(head_dim, head_dim_v))
    # Where keys are in parts blocks of three warpgroups are short, which leaves registers.
    takes_registers = changes.softcap and (changes.window or changes.sinks)
    is_short = split or (takes_registers and native.tiles == 128)
    tiles = few_queries_tilings(VARLEN if changes.window else layout, is_short)[native.tiles]
    built = replace(build(tiles[tile_rows], native, causal, output), layout=layout)
    box = box_of_pages(built.tile_n, page_rows)
    config = replace(changes.of(with_lone_scales(built)), group=group, split=split, page_box=box)
    config = with_used_columns(config, head_dim, head_dim_v)
    validate_forward_config(config)
    return config


def with_lone_scales(config: Fp8ForwardConfig) -> Fp8ForwardConfig:
    """``config`` for problems in which all rows of a head share a scale in Q, K and V, as those with V in rows do that
    a kernel transposes."""
    return replace(config, lone_scales=config.takes_lone_scales)


def with_runs(config: Fp8ForwardConfig, seqlen_k: int) -> Fp8ForwardConfig:
    """``config``, with runs where there are so many keys that a single sum of P V loses too much: of dense problems
    without a window, on what our quantizer made."""
    is_half = config.softmax is Softmax.HALF_SCORES and config.is_plain
    if seqlen_k <= RUNLESS_KEYS or not is_half or config.v_rows or config.lowers_queries:
        return config
    size = native_size(config.head_dim_v).tiles
    mean_blocks = MEAN_KEYS[size] // config.tile_n
    means = RUN_KEYS[size] // (mean_blocks * config.tile_n)
    return replace(config, run_blocks=means * mean_blocks, mean_blocks=mean_blocks)


def scores_fit_half(largest_q: float, largest_k: float, head_dim: int) -> bool:
    """Whether rows whose elements are no larger than these have products of at most ``LARGEST_HALF``."""
    return largest_q * largest_k * head_dim <= LARGEST_HALF


def shipped_long_fp8_forward_configs() -> tuple[Fp8ForwardConfig, ...]:
    """Every config with runs that serves a problem of one of ``SIZES``: of so many keys one for each head_dim, mask and
    output, and one for few tiles."""
    chosen = [
        select_fp8_forward_config(
            head_dim, head_dim, causal, output, ANY_LENGTH, half_scores=True, without_lse=few, few_tiles=few
        )
        for output in DTYPES
        for head_dim, causal in FP8_TILINGS
        for few in (False, True)
    ]
    return tuple(dict.fromkeys(with_runs(config, ANY_LENGTH) for config in chosen))


def _fp8_tilings(
    head_dim: int, causal: bool, v_rows: bool, two_level: bool, half_scores: bool, without_lse: bool
) -> tuple[Tiling, ...]:
    if two_level:
        return (FP8_TWO_LEVEL_ROW_TILINGS if v_rows else FP8_TWO_LEVEL_TILINGS)[head_dim]
    if v_rows:
        return FP8_HALF_ROW_TILINGS[head_dim, causal] if without_lse else FP8_ROW_TILINGS[head_dim]
    if not (half_scores or without_lse):
        return FP8_TILINGS[head_dim, causal]
    usual = FP8_HALF_SCORES_TILINGS[head_dim, causal]
    if without_lse and half_scores:
        return usual
    special = FP8_LOWERED_TILINGS if without_lse else FP8_RETURNED_LSE_TILINGS
    return special.get((head_dim, causal), usual)


def build(tiling: Tiling, native: Native, causal: bool, output: str) -> Fp8ForwardConfig:
    tiling = fitted(tiling, native)
    dims = {"head_dim": native.head_dim, "head_dim_v": native.head_dim_v}
    return tiling.build(Fp8ForwardConfig, dtype=FP8_DTYPE, causal=causal, output=output, **dims)


def _with_any_codes(config: Fp8ForwardConfig) -> tuple[Fp8ForwardConfig, ...]:
    """That of codes whose scores are known to fit, and that of any others."""
    is_half = config.softmax is Softmax.HALF_SCORES
    return (config, replace(config, lowers_queries=True)) if is_half else (config,)


def shipped_exact_lse_configs() -> tuple[Fp8ForwardConfig, ...]:
    """Every config that ``select_fp8_forward_config`` can return with ``exact_lse``."""
    return tuple(
        build(tiling, native_size(head_dim), causal, output)
        for output in DTYPES
        for head_dim, tilings in FP8_EXACT_LSE_TILINGS.items()
        for tiling in tilings
        for causal in (False, True)
    )


def shipped_fp8_forward_configs(two_level: bool = False) -> tuple[Fp8ForwardConfig, ...]:
    """Every config that ``select_fp8_forward_config`` can return for one of ``SIZES`` and this ``two_level`` without
    ``exact_lse``, each once."""
    transposed = tuple(
        config
        for output in DTYPES
        for head_dim, causal in FP8_TILINGS
        # Which has all tilings of scores in float32 too.
        for tiling in _fp8_tilings(head_dim, causal, False, two_level, True, without_lse=True)
        for config in _with_any_codes(build(tiling, native_size(head_dim), causal, output))
    )
    # FP8 tensors with descales, which are what comes in rows, give bfloat16.
    lone = tuple(with_lone_scales(config) for config in transposed if config.output == "bfloat16")
    rows = tuple(
        with_lone_scales(replace(config, lowers_queries=config.softmax is Softmax.HALF_SCORES))
        for head_dim, causal in FP8_HALF_ROW_TILINGS
        # Which has those of calls with the LSE too.
        for tiling in _fp8_tilings(head_dim, causal, True, two_level, False, without_lse=True)
        for config in (build(tiling, native_size(head_dim), causal, "bfloat16"),)
    )
    return tuple(dict.fromkeys(transposed + lone + rows))
