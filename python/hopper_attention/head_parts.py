"""Into how many parts a backward kernel divides the query heads that share a head of K and V.

A CTA has a tile of keys and all query heads that share them. Where there are few heads of K and V such tiles leave most
of a GPU idle, and under a causal mask the longest of them is waited for. With the heads divided there are more tiles,
which are shorter. Each part leaves dK and dV in float32 then, which are added up, and that takes time as well. Passes
in any order are counted by ``tile_rounds.py`` under a causal mask, and of packed sequences without one up to head_dim
128; others by the counts below.

Where ``tile_rounds.py`` counts the number of parts need not divide that of heads, and some parts have a head more than
others: 7 heads, of 28 over 4, have no divisors but 1 and 7, and 71 over one are a model's, too. In the other counts it
divides them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.backward.step import MAX_BATCH_OR_HEADS
from hopper.backward.config import (
    CLUSTER_CTAS,
    MAX_HEAD_DIM,
    MAX_UNPAIRED_HEAD_DIM,
)
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.packing_rules import MULTIPROCESSORS
from hopper_attention.problem import GradientProblem
from hopper_attention.scores import PLAIN
from hopper_attention.tile_rounds import (
    CAUSAL,
    GAIN,
    PAIRED,
    TILE,
    UNMASKED,
    Walkers,
    around,
    time_of_rounds,
    time_of_walks,
)

ROWS_OF_A_PART = 320
"""Rows of queries that a key tile could visit in the time in which dK and dV of one are written and added up. Fitted to
backward passes of 28 sizes in all divisions (`backward_divided_heads.json`)."""

ROWS_OF_A_PAIR = 704
"""The same of kernels whose CTAs come in pairs; their grid is not persistent either."""

LEAST_GAIN = 0.95
"""Of the time with fewer parts, above which it is not worth it."""

UNEVEN = 1 / 2
"""Of the longest tile's time, by how much CTAs end at different times."""

ALL_EQUAL, FEW_EQUAL = 1 / 5, 1 / 2
"""How much it counts what packed sequences would take if all had the mean length, and if as few as there may be were
as long as their bound and the others empty, beside what they take if one is as long as their bound and the others have
what is left. A bound may be no length, and graphs may have room for more sequences than there are (by a simulation,
`backward_any_parts.json`)."""

NEARLY_BEST = 1.01
"""Times the least time that is counted, up to which fewer parts are taken. Counts are not as exact, and parts take
memory."""

NEARLY_EQUAL = 0.95
"""Of the longest walk a mean without a mask, above which tiles come in rounds."""

REMEMBERED_LENGTHS = 1024

MOST_COUNTED = 2**30 - 1
"""What is divided times the parts, up to which ``head_of_part`` is exact: heads times parts, or query tiles of a key
tile times pieces, times the parts or pieces again."""


class Walks(NamedTuple):
    """Rows of queries of a head that see a key tile: the most, and the mean of all."""

    longest: float
    mean: float


class KeyTiles(NamedTuple):
    """Of a launch: how many there are, of how many heads of K and V, those of all batches, and how many query heads
    share one of these."""

    number: int
    kv_heads: int
    shared: int

    @property
    def most_parts(self) -> int:
        """Of a head of K and V: no more than a GPU has CTAs under way."""
        exact = math.isqrt(MOST_COUNTED // (self.kv_heads * self.shared))
        return max(min(self.shared, MULTIPROCESSORS, exact), 1)


class PackedSizes(NamedTuple):
    """Of packed sequences: shapes of q and k, how many sequences, and max_seqlen_q and max_seqlen_k."""

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    sequences: int
    bounds: tuple[int, int]


def with_head_parts(problem: BackwardProblem, sides: Sides) -> BackwardProblem:
    """A problem with the number of parts with which it is done first, where scores are plain. ``sides`` are those of
    its window. For the Hopper kernels."""
    p, (_, seqlen_q, heads, _), (batch, seqlen_k, kv_heads, _) = problem, problem.q_shape, problem.k_shape
    if 0 in (*p.q_shape, *p.k_shape) or not _may_be_divided(p.kind, heads, kv_heads):
        return p
    walks = _walks((seqlen_q, seqlen_k), p.causal, sides)
    tiles = batch * kv_heads * -(-seqlen_k // TILE)
    if _is_counted_by_walks(p.kind):
        counted = KeyTiles(tiles, batch * kv_heads, heads // kv_heads)
        times = _times_of_walks(counted, walks, around(batch, seqlen_q, heads), _walkers(p.kind))
        return p._replace(head_parts=_best_of(times))
    return p._replace(head_parts=_fastest(p.kind, tiles, walks, heads // kv_heads))


def with_all_parts(problem: BackwardProblem) -> BackwardProblem:
    """A problem each of whose query heads is a part, if heads may be divided: it has the kernels of any division."""
    heads, kv_heads = problem.q_shape[2], problem.k_shape[2]
    may_be = _may_be_divided(problem.kind, heads, kv_heads)
    return problem._replace(head_parts=heads // kv_heads) if may_be else problem


def packed_with_head_parts(
    problem: GradientProblem, sizes: PackedSizes, sides: Sides
) -> tuple[GradientProblem, int]:
    """The same of packed sequences, and the number of parts."""
    parts = _packed_parts(problem, sizes, sides)
    return (replace(problem, divides_heads=True), parts) if parts > 1 else (problem, 1)


@lru_cache(maxsize=REMEMBERED_LENGTHS)
def _packed_parts(problem: GradientProblem, sizes: PackedSizes, sides: Sides) -> int:
    (total_q, heads, _), (total_k, kv_heads, _), sequences, bounds = sizes
    is_empty = 0 in (total_q, total_k, sequences)
    if is_empty or problem.keys == "few" or not _may_be_divided(problem, heads, kv_heads):
        return 1
    # Lengths are on the GPU. Between equal lengths and a single long one the mean walk lies anywhere.
    longest, totals = (min(bounds[0], total_q), min(bounds[1], total_k)), (total_q, total_k)
    if _is_counted_by_walks(problem):
        return _best_of(_mean_times(problem, sizes, longest))
    tiles, means = kv_heads * _tiles_of(total_k, sequences), _mean_lengths(totals, sequences)
    of_longest, of_means = (_walks(lengths, problem.causal, sides) for lengths in (longest, means))
    walks = Walks(of_longest.longest, (of_longest.mean + of_means.mean) / 2)
    return _fastest(problem, tiles, walks, heads // kv_heads)


def _mean_times(problem: GradientProblem, sizes: PackedSizes, longest: tuple[int, int]) -> dict[int, float]:
    """Of packed sequences by each number of parts: the geometric mean over the lengths that they may have."""
    causal, by, sequences = problem.causal, _walkers(problem), sizes.sequences
    (total_q, heads, _), (total_k, kv_heads, _) = sizes.q_shape, sizes.k_shape
    totals, other = (total_q, total_k), around(1, total_q, heads)
    fewest = max(-(-total // max(most, 1)) for total, most in zip(totals, longest, strict=True)) or 1
    guesses = (
        (1.0, sequences, _walks_of_one_long(causal, longest, totals, sequences)),
        (ALL_EQUAL, sequences, _walks(_mean_lengths(totals, sequences), causal, FULL_SIDES)),
        (FEW_EQUAL, fewest, _walks(_mean_lengths(totals, fewest), causal, FULL_SIDES)),
    )
    mean: dict[int, float] = {}
    for weight, number, walks in guesses:
        tiles = KeyTiles(kv_heads * _tiles_of(total_k, number), kv_heads, heads // kv_heads)
        for parts, time in _times_of_walks(tiles, walks, other, by).items():
            mean[parts] = mean.get(parts, 1.0) * time ** (weight / (1 + ALL_EQUAL + FEW_EQUAL))
    return mean


def _tiles_of(total_k: int, sequences: int) -> int:
    """Key tiles of packed sequences: each ends within one, by the mean half of it."""
    return -(-total_k // TILE) + (sequences - 1) // 2


def _mean_lengths(totals: tuple[int, int], sequences: int) -> tuple[int, int]:
    return max(totals[0] // sequences, 1), max(totals[1] // sequences, 1)


def _is_counted_by_walks(problem: GradientProblem) -> bool:
    """Whether ``tile_rounds.py`` counts."""
    if problem.deterministic or problem.has_window:
        return False
    return problem.causal or (problem.is_packed and not _is_paired(problem))


def _is_paired(problem: GradientProblem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > MAX_UNPAIRED_HEAD_DIM


def _walkers(problem: GradientProblem) -> Walkers:
    if not problem.causal:
        return UNMASKED
    return PAIRED if _is_paired(problem) else CAUSAL


def _walks_of_one_long(
    causal: bool, longest: tuple[int, int], totals: tuple[int, int], sequences: int
) -> Walks:
    """Of packed sequences of which one has the longest queries and keys, and the others as many each as are left."""
    others, of_longest = sequences - 1, _walks(longest, causal, FULL_SIDES)
    if others == 0:
        return of_longest
    rest_q, rest_k = (max((total - most) // others, 1) for total, most in zip(totals, longest, strict=True))
    tiles, other_tiles = -(-longest[1] // TILE), others * (rest_k / TILE + 1 / 2)
    of_others = _walks((rest_q, rest_k), causal, FULL_SIDES)
    mean = (tiles * of_longest.mean + other_tiles * of_others.mean) / (tiles + other_tiles)
    return Walks(of_longest.longest, mean)


def _may_be_divided(problem: GradientProblem, heads: int, kv_heads: int) -> bool:
    p = problem
    # The grid of `finish` has all of these. With a chunk some kernels would spill.
    fits = heads + 2 * kv_heads <= MAX_BATCH_OR_HEADS and max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM
    is_plain = p.scores == PLAIN and p.dtype in DTYPE_NAMES and not (p.one_tile or p.has_chunk)
    return heads > kv_heads and fits and is_plain


def _walks(seqlens: tuple[int, int], causal: bool, sides: Sides) -> Walks:
    (seqlen_q, seqlen_k), (left, right, _) = seqlens, sides
    right = 0 if causal else right
    if left >= 0:
        longest = min(seqlen_q, left + right + TILE) if right >= 0 else seqlen_q
        return Walks(longest, longest)
    if right != 0:
        return Walks(seqlen_q, seqlen_q)
    # Of keys and queries that are level with each other half of the pairs are seen, and of queries in front none.
    level = min(seqlen_q, seqlen_k)
    return Walks(level, level - level * level / (2 * max(seqlen_k, 1)))


def _times_of_walks(tiles: KeyTiles, walks: Walks, other: float, by: Walkers) -> dict[int, float]:
    """Of each number of parts, sums in any order. ``other`` is what comes before the kernel and behind it."""
    times = {}
    for parts in range(1, tiles.most_parts + 1):
        longest, mean = walks.longest * -(-tiles.shared // parts), walks.mean * tiles.shared / parts
        if by.in_rounds and mean > NEARLY_EQUAL * longest:
            times[parts] = other + time_of_rounds(tiles.number, longest * parts, parts)
        else:
            times[parts] = other + time_of_walks(tiles.number * parts, longest, mean, parts, by)
    return times


def _best_of(times: dict[int, float]) -> int:
    """Of these times by numbers of parts, the fewest of those that are nearly the best, or 1."""
    least = min(times.values())
    if least >= GAIN * times[1]:
        return 1
    return min(parts for parts, time in times.items() if parts > 1 and time <= NEARLY_BEST * least)


def _fastest(problem: GradientProblem, tiles: int, walks: Walks, shared: int) -> int:
    """The number of parts that is done first, of ``shared`` query heads each and so many key tiles of all heads."""
    is_paired = _is_paired(problem)
    at_once = MULTIPROCESSORS // (CLUSTER_CTAS if is_paired else 1)
    of_a_part = ROWS_OF_A_PAIR if is_paired else ROWS_OF_A_PART
    best, least = 1, _time(tiles, at_once, walks, (shared, 0))
    for parts in range(2, shared + 1):
        if shared % parts == 0:
            time = _time(tiles * parts, at_once, walks, (shared // parts, of_a_part))
            if time < LEAST_GAIN * least:
                best, least = parts, time
    return best


def _time(tiles: int, at_once: int, walks: Walks, of_a_tile: tuple[int, int]) -> float:
    """Until the last of so many key tiles is done, in rows of queries. ``of_a_tile`` are its heads, and the rows that
    its part of dK and dV is worth."""
    heads, of_a_part = of_a_tile
    longest, mean = (walk * heads + of_a_part for walk in walks)
    if longest == mean:
        return -(-tiles // at_once) * longest
    return max(longest, tiles * mean / at_once + longest * UNEVEN)
