"""Which key tiles of a backward pass are divided among CTAs, by what they visit (``hopper/backward/pieces.py``).

Without a mask every key tile visits as many queries, and a last round of few tiles takes nearly as long as one with a
tile for each multiprocessor. Under a causal mask the first tiles walk the longest, and where there is about one for
each multiprocessor the longest is waited for. So the tiles of the last round, or under a causal mask all tiles, are
divided, where a count of rows says that it saves time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from hopper.backward.config import MAX_UNPAIRED_HEAD_DIM, select_backward_config
from hopper_attention.backward_rules import (
    BackwardProblem,
    Division,
    in_faster_order,
    in_one_tile,
    in_strips,
)
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.head_parts import (
    MAX_BATCH_OR_HEADS,
    MOST_COUNTED,
    REMEMBERED_LENGTHS,
    with_head_parts,
)
from hopper_attention.masks import Sides
from hopper_attention.packing_rules import MULTIPROCESSORS
from hopper_attention.scores import PLAIN
from hopper_attention.tile_rounds import (
    GAIN,
    LONGER_HALF_FROM,
    TILE,
    around,
    causal_walks,
    time_in_order,
    time_of_rounds,
)

MOST_PIECES = 3 * MULTIPROCESSORS
"""In all: each takes 128 KiB at head_dim 128."""

FEWEST_BLOCKS = 2
"""Query tiles of a piece."""

MOST_ROUNDS = 10
"""Of tiles: launches of more are left alone. Four long passes took -1.6 to +1.7 % more time where 2 to 5 % less were
counted. Perhaps at the limit of a GPU's power idle multiprocessors let others run faster."""

PIECES_WITH_A_MASK = 2, 3, 4
TILES_WITH_A_MASK, GAIN_WITH_A_MASK = 3 * MULTIPROCESSORS // 2, 0.93
"""Up to which tiles are divided under a causal mask, with more of them the shortest ones fill what is left; and GAIN
there, where counts are off by up to 7 %, and gains were timed at about a tile a multiprocessor."""

TAIL_ROWS = 65536
"""Queries of all heads, up to which all of more than a few heads are the tail of a launch, whose order is counted
(``hopper/backward/batch.py``)."""


def as_served(problem: BackwardProblem, sides: Sides, has_dlse: bool = False) -> BackwardProblem:
    """A problem as the Hopper kernels serve a whole backward pass of it: in strips, in a fixed order where that is
    faster, in one tile, or with what CTAs share. ``has_dlse`` says that there is a gradient of the LSE."""
    problem = in_strips(in_faster_order(problem), sides)
    alone = in_one_tile(problem)
    return alone if alone.one_tile and not has_dlse else with_shares(problem, sides)


def with_shares(problem: BackwardProblem, sides: Sides) -> BackwardProblem:
    """A problem with what CTAs share so that it is done first: the heads of a key/value head (``with_head_parts``), or
    else the visits of some key tiles. For the Hopper kernels."""
    divided = with_head_parts(problem, sides)
    if not may_divide_visits(problem):
        return divided
    p, (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = problem, problem.q_shape, problem.k_shape
    config = select_backward_config(DTYPE_NAMES[p.dtype], p.q_shape[3], p.v_shape[3], p.causal)
    sizes = batch, (seqlen_q, seqlen_k), (heads, kv_heads)
    division = _fastest(config.tile_m, p.causal, *sizes, divided.head_parts)
    return divided if division is None else problem._replace(division=division)


def may_divide_visits(problem: BackwardProblem) -> bool:
    """Whether there are kernels for it: with plain scores, sums in any order and no mask but a causal one. Under that
    heads which share K and V are divided instead."""
    p, (*_, heads, _), (*_, kv_heads, _) = problem, problem.q_shape, problem.k_shape
    is_changed = p.has_window or p.has_chunk or p.scores != PLAIN or p.deterministic
    if is_changed or p.in_strips or p.one_tile or p.dtype not in DTYPE_NAMES:
        return False
    fits = max(p.q_shape[3], p.v_shape[3]) <= MAX_UNPAIRED_HEAD_DIM and 0 not in (*p.q_shape, *p.k_shape)
    # The grid of `finish` has all heads, and some more.
    return fits and heads < MAX_BATCH_OR_HEADS // 2 and (heads == kv_heads or not p.causal)


@lru_cache(maxsize=REMEMBERED_LENGTHS)
def _fastest(
    tile_m: int,
    causal: bool,
    batch: int,
    seqlens: tuple[int, int],
    heads_of_both: tuple[int, int],
    head_parts: int,
) -> Division | None:
    """Of lengths and heads of Q and of K; None where nothing is gained over ``head_parts``."""
    heads, kv_heads = heads_of_both
    heads_of_keys = batch * kv_heads
    tiles, walk = heads_of_keys * -(-seqlens[1] // TILE), seqlens[0] * (heads // kv_heads)
    if causal:
        is_tail = heads_of_keys < LONGER_HALF_FROM or seqlens[0] * heads_of_keys <= TAIL_ROWS
        if tiles > TILES_WITH_A_MASK or not is_tail:
            return None
        found = _times_with_a_mask(seqlens, heads_of_keys, tile_m)
    else:
        found = _times_without_mask(tiles, walk, head_parts, tile_m)
    (undivided, _), *divided = found
    best, division = min(divided, default=(undivided, None), key=lambda each: each[0])
    other = around(batch, seqlens[0], heads)
    gain = GAIN_WITH_A_MASK if causal else GAIN
    return division if other + best < gain * (other + undivided) else None


Timed = Iterator[tuple[float, Division | None]]
"""Divisions with the time of a launch in rows of queries; the first one is none."""


def _times_without_mask(tiles: int, walk: int, head_parts: int, tile_m: int) -> Timed:
    """Of so many key tiles that all walk over so many queries of all heads, which ``head_parts`` may share."""
    yield time_of_rounds(tiles, walk, head_parts), None
    if tiles * head_parts > MOST_ROUNDS * MULTIPROCESSORS or tiles % MULTIPROCESSORS == 0:
        return
    for more in (0, MULTIPROCESSORS):
        count = tiles % MULTIPROCESSORS + more
        most = _most_pieces(count, walk // tile_m) if count <= tiles else 1
        for each in range(2, most + 1):
            whole = (tiles - count) // MULTIPROCESSORS * walk
            yield whole + time_of_rounds(count, walk, each), Division(tiles - count, count, each)


def _times_with_a_mask(seqlens: tuple[int, int], heads: int, tile_m: int) -> Timed:
    """The same under a causal mask, of so many heads of K and V in all batches."""
    walks = causal_walks(seqlens, heads)
    tiles = len(walks)
    yield time_in_order(walks, 1), None
    for each in PIECES_WITH_A_MASK:
        if each <= _most_pieces(tiles, max(walks) // tile_m):
            pieces = [walk / each for walk in walks for _ in range(each)]
            yield time_in_order(pieces, each), Division(0, tiles, each)


def _most_pieces(tiles: int, blocks: int) -> int:
    """Of each of so many key tiles, which visit so many query tiles at most."""
    counted = math.isqrt(MOST_COUNTED // max(blocks, 1))
    return min(MOST_PIECES // max(tiles, 1), blocks // FEWEST_BLOCKS, counted)
