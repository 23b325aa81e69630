"""How long a launch of a backward kernel takes, as a count of the queries that its key tiles walk over.

A CTA takes the next key tile as soon as it has done one. So where tiles are few it is a matter of their walks and their
order when the last CTA ends. Times are in rows of queries, of one head, that a key tile could walk over meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hopper_attention.packing_rules import MULTIPROCESSORS

TILE = 128
"""Keys of a tile, of all kernels."""

ROWS_OF_A_PIECE = 140
"""What a CTA takes to begin and to end a tile whose heads or queries several CTAs share. These counts were fitted to
227 divisions of 31 sizes without a mask, and to 95 under a causal one, of queries and of heads
(`backward_pieces.json`)."""

ROWS_TO_ADD, ROWS_IN_TURN = 0.75, 40
"""What all multiprocessors together take to write dK and dV of such a tile and to add them up, and what one takes that
adds up those of a tile, for each of them."""

LAST_ROUND, LAST_ROUND_BY_TILES = 0.7, 1.0
"""Of the time of a round of tiles that of a last one with few of them: in any case, and times the part of the
multiprocessors that have one, up to 1. Where others have none, these find more in L2, and clocks are higher."""

ROWS_OF_A_LAUNCH, ROWS_OF_A_QUERY = 250, 0.0134
"""What ``prepare`` and ``finish`` take: in any case, and for each query of each head."""

GAIN = 0.975
"""Of the time without, above which sharing is not worth it."""

CTAS_UNDER_WAY, TAIL_ROWS, TAIL_HEADS = 132, 65536, 4
"""By which ``hopper/backward/batch.py``, which has the reasons, orders tiles under a causal mask."""


def around(batch: int, seqlen_q: int, heads: int) -> float:
    """What comes before the kernel and behind it."""
    return ROWS_OF_A_LAUNCH + ROWS_OF_A_QUERY * batch * seqlen_q * heads


def time_of_rounds(tiles: int, walk: int, each: int) -> float:
    """Of so many tiles that all walk over so many queries, each divided among ``each`` CTAs."""
    rounds, rest = divmod(tiles * each, MULTIPROCESSORS)
    last = min(1, LAST_ROUND + LAST_ROUND_BY_TILES * rest / MULTIPROCESSORS) if rest else 0
    if each == 1:
        return (rounds + last) * walk
    return (rounds + last) * (walk / each + ROWS_OF_A_PIECE) + _time_to_add(tiles * each, each)


def time_in_order(walks: Sequence[float], each: int) -> float:
    """Of walks in their order, where ``each`` are of the same tile."""
    ends = [0.0] * MULTIPROCESSORS
    more = ROWS_OF_A_PIECE if each > 1 else 0
    for walk in walks:
        heapq.heapreplace(ends, ends[0] + walk + more)
    return max(ends) + (_time_to_add(len(walks), each) if each > 1 else 0)


def _time_to_add(pieces: int, each: int) -> float:
    return ROWS_TO_ADD * pieces + ROWS_IN_TURN * each


def causal_walks(seqlens: tuple[int, int], heads: int, shared: int) -> list[int]:
    """Those of key tiles of so many heads of K and V, of all batches, in the order in which CTAs claim them under a
    causal mask; ``shared`` query heads are walked over with each."""
    seqlen_q, seqlen_k = seqlens
    tiles = -(-seqlen_k // TILE)
    unseen = (max(n_block * TILE - (seqlen_k - seqlen_q), 0) for n_block in range(tiles))
    walks = [max(seqlen_q - rows, 0) * shared for rows in unseen]
    least = -(-CTAS_UNDER_WAY // tiles) if shared > 1 else 0
    tail = min(max(TAIL_ROWS // (seqlen_q * shared), least, TAIL_HEADS), heads)
    together = tiles // 2 if tail > TAIL_HEADS and shared == 1 else 0
    in_turn = [walk for walk in walks[together:] for _ in range(tail)]
    return walks * (heads - tail) + walks[:together] * tail + in_turn
