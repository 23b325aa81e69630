"""How long a launch of a backward kernel takes, as a count of the queries that its key tiles walk over.

A CTA takes the next key tile as soon as it has done one. So where tiles are few it is a matter of their walks when the
last CTA ends. Times are in rows of queries, of one head, that a key tile could walk over meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from hopper_attention.packing_rules import MULTIPROCESSORS

TILE = 128
"""Keys of a tile, of all kernels."""

ROWS_OF_A_PIECE = 140
"""What a CTA takes to begin and to end a tile whose heads or queries several CTAs share. These counts were fitted to
divisions of 31 sizes without a mask, and looked at on 39 under a causal one (`backward_pieces.json`)."""

ROWS_TO_ADD, ROWS_IN_TURN = 0.75, 40
"""What all multiprocessors together take to write dK and dV of such a tile and to add them up, and what one takes that
adds up those of a tile, for each of them."""

LAST_ROUND, LAST_ROUND_BY_TILES = 0.7, 1.0
"""A last round that is not full takes LAST_ROUND + LAST_ROUND_BY_TILES * (its tiles / MULTIPROCESSORS) of a full one,
at most 1. Perhaps its tiles find more in L2, and clocks are higher."""

ROWS_OF_A_LAUNCH, ROWS_OF_A_QUERY = 250, 0.0134
"""What ``prepare`` and ``finish`` take: in any case, and for each query of each head."""

GAIN = 0.975
"""Of the time without, above which sharing is not worth it."""


class Walkers(NamedTuple):
    """Of a launch whose key tiles have walks of all lengths: how many tiles are under way, by how much of the longest
    walk the last one ends behind the mean, where heads share K and V, and whether walks that are nearly equal come in
    rounds. By the order of tiles alone the last one would end sooner."""

    at_once: int
    uneven: float
    in_rounds: bool = False


CAUSAL, PAIRED = Walkers(MULTIPROCESSORS, 1 / 4), Walkers(MULTIPROCESSORS // 2, 1 / 2)
"""Under a causal mask: of CTAs of their own, fitted to sizes with shared heads of `backward_pieces.json`, and of pairs,
to the first ones of `backward_any_parts.json`."""

UNMASKED = Walkers(MULTIPROCESSORS, 1 / 2, in_rounds=True)
"""Of packed sequences without a mask, fitted to a simulation (`backward_any_parts.json`)."""

LONGER_HALF_FROM = 5
"""Heads of K and V, from which on those of a tail come one behind the other with the longer half of their tiles, where
each has one of Q (``hopper/backward/batch.py``)."""


def around(batch: int, seqlen_q: int, heads: int) -> float:
    """What comes before the kernel and behind it."""
    return ROWS_OF_A_LAUNCH + ROWS_OF_A_QUERY * batch * seqlen_q * heads


def time_of_rounds(tiles: int, walk: float, each: int) -> float:
    """Of so many tiles that all walk over so many queries, each divided among ``each`` CTAs."""
    rounds, rest = divmod(tiles * each, MULTIPROCESSORS)
    last = min(1, LAST_ROUND + LAST_ROUND_BY_TILES * rest / MULTIPROCESSORS) if rest else 0
    more = ROWS_OF_A_PIECE if each > 1 else 0
    return (rounds + last) * (walk / each + more) + _time_to_add(tiles * each, each)


def time_of_walks(walks: int, longest: float, mean: float, each: int, by: Walkers) -> float:
    """Of so many walks of all lengths up to the longest, where ``each`` are of the same tile."""
    more = ROWS_OF_A_PIECE if each > 1 else 0
    longest, mean = longest + more, mean + more
    return max(longest, walks * mean / by.at_once + by.uneven * longest) + _time_to_add(walks, each)


def time_in_order(walks: Sequence[float], each: int) -> float:
    """Of walks in the order in which CTAs claim them, from the longest on; ``each`` are of the same tile."""
    ends = [0.0] * MULTIPROCESSORS
    more = ROWS_OF_A_PIECE if each > 1 else 0
    for walk in walks:
        heapq.heapreplace(ends, ends[0] + walk + more)
    return max(ends) + _time_to_add(len(walks), each)


def _time_to_add(pieces: int, each: int) -> float:
    return ROWS_TO_ADD * pieces + ROWS_IN_TURN * each if each > 1 else 0.0


def causal_walks(seqlens: tuple[int, int], heads: int) -> list[int]:
    """Those of the key tiles of so many heads, of all batches, in that order, under a causal mask, where each head of K
    and V has one of Q, and all are the tail of a launch."""
    seqlen_q, seqlen_k = seqlens
    tiles = -(-seqlen_k // TILE)
    unseen = (max(n_block * TILE - (seqlen_k - seqlen_q), 0) for n_block in range(tiles))
    walks = [max(seqlen_q - rows, 0) for rows in unseen]
    together = tiles // 2 if heads >= LONGER_HALF_FROM else 0
    return walks[:together] * heads + [walk for walk in walks[together:] for _ in range(heads)]
