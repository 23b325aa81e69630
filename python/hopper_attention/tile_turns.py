"""Calls of many queries whose tiles have the query heads of a K/V head as rows, in 16 bits: where the multiprocessors
have fewer turns then.

A head's last tile is not full. 2098 queries of 8 heads are 136 tiles of 128 rows, which 132 multiprocessors take in two
turns; of 4 groups of 2 heads they are 132 tiles. So turns are counted, with tiles of a head and of a group.
(FlashAttention-3 packs the heads of packed sequences always, of dense ones where that fills a tenth more of the rows.)

Under a causal mask turns do not count: tiles of few keys come last, and fill up what those of many leave. Nor do they
where several CTAs share a multiprocessor, as their tiles are small. Under a window nothing has been timed.

Packed sequences can be counted where they are as long as each other: lengths are not read. Where their tiles are many,
causal or not, each sequence has fewer of them that are not full, and heads share what is loaded: nothing is counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cute_kernels.problem import MAX_HEAD_DIM
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.field_checks import GROUPS
from hopper.group_rows import rows_of_queries
from hopper_attention.backends import HOPPER_CAPABILITY
from hopper_attention.checks import TensorSpec
from hopper_attention.forward_rules import grouped_problem, select_for
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS
from hopper_attention.lengths import Lengths
from hopper_attention.packing_rules import MOST_QUERIES, MULTIPROCESSORS
from hopper_attention.problem import AttentionProblem
from hopper_attention.scores import ScoreKind

NOTE = "tiles have the query heads of a key/value head as rows, which the multiprocessors take in fewer turns"

LEAST_GAIN = 1.1
"""Time of tiles of a head over that of tiles of a group, by count, from which on the latter serve. With ``math.inf``
they never do."""

MANY_TURNS, MOST_OF_MEAN, TIMED_HEAD_DIMS = 2, 4096, (64, 128, 256)
"""Turns of packed sequences, of tiles of a head, beyond which tiles of a group were never slower: 50 random calls of up
to 4500 queries a sequence took 1.00 to 0.83 of the time (`forward_turns.json`); and the mean lengths and head_dims for
which that is known."""

FULL_TILE = 128
"""Rows of a tile with which these turns were counted, at all head_dims."""

SHORT_TILE = 0.6
"""Time of a tile of which half of the warpgroups have no query, over that of a full one (``few_queries_times``)."""


def in_fewer_turns(
    problem: AttentionProblem, q: TensorSpec, k: TensorSpec, sm_margin: int
) -> AttentionProblem:
    """A dense problem of ``problem_of`` that a Hopper kernel serves, with a group where that saves turns."""
    (batch, seqlen_q, heads, _), kv_heads = q.shape, k.shape[2]
    group = heads // kv_heads
    if seqlen_q <= MOST_QUERIES or not may_have_group(problem, group):
        return problem
    grouped = grouped_problem(problem, q, k, group, 0)
    return grouped if saves_turns(problem, grouped, batch * heads, seqlen_q, sm_margin) else problem


def packed_in_fewer_turns(
    problem: AttentionProblem, q: TensorSpec, k: TensorSpec, lengths: Lengths, sm_margin: int
) -> AttentionProblem:
    """The same of a problem of ``packed_problem_of``."""
    (total_q, heads, _), (_, kv_heads, _), batch = q.shape, k.shape, lengths.cu_seqlens_q.shape[0] - 1
    group, seqlen_q = heads // kv_heads, min(lengths.max_seqlen_q, total_q)
    is_known = lengths.seqused_q is None and seqlen_q > MOST_QUERIES
    if not (is_known and may_have_group(problem, group)):
        return problem
    grouped = replace(problem, group=group)
    # Of each sequence the last tile is full by half, by the mean.
    tiles, ctas = heads * (total_q / FULL_TILE + batch / 2), max(MULTIPROCESSORS - sm_margin, 1)
    is_timed = (
        total_q <= MOST_OF_MEAN * batch and max(problem.head_dim, problem.head_dim_v) in TIMED_HEAD_DIMS
    )
    if is_timed and tiles > MANY_TURNS * ctas and WARPGROUP_ROWS % group == 0:
        return grouped
    if problem.causal or batch * seqlen_q != total_q:
        return problem
    return grouped if saves_turns(problem, grouped, batch * heads, seqlen_q, sm_margin) else problem


def may_have_group(problem: AttentionProblem, group: int) -> bool:
    """Whether so many heads may be in a tile of a problem."""
    p, scores = problem, problem.scores
    if p.is_empty or (p.causal and not p.is_packed) or p.has_window or p.head_dim_v > MAX_HEAD_DIM:
        return False
    if p.causal and WARPGROUP_ROWS % group:
        # Of many causal tiles those with rows that are nobody's have not been timed.
        return False
    # What differs by head, a tile of one head has.
    return group in GROUPS and scores == ScoreKind(has_softcap=scores.has_softcap)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def saves_turns(
    problem: AttentionProblem, grouped: AttentionProblem, heads: int, seqlen_q: int, sm_margin: int
) -> bool:
    """Whether ``grouped`` takes less time by count, of so many heads of all sequences."""
    single, several = (select_for(p, "hopper", HOPPER_CAPABILITY) for p in (problem, grouped))
    if not (isinstance(single, ForwardConfig) and isinstance(several, ForwardConfig)):
        return False
    if max(single.ctas_per_sm, several.ctas_per_sm) > 1:
        return False
    ctas = max(MULTIPROCESSORS - sm_margin, 1)
    rows = rows_of_queries(seqlen_q, grouped.group)
    of_group = count_turns(several.tile_m, heads // grouped.group, rows, ctas)
    of_head = count_turns(single.tile_m, heads, seqlen_q, ctas)
    return LEAST_GAIN * several.tile_m * of_group <= single.tile_m * of_head


def count_turns(tile_m: int, heads: int, rows: int, ctas: int) -> float:
    """Turns of full tiles of ``tile_m`` rows that so many CTAs take for ``heads`` with so many rows each. CTAs that had
    a short tile begin another one earlier: the tiles of the last turn, if there are no more, and after many turns all
    begin at different times."""
    tiles, rest = heads * -(-rows // tile_m), rows % tile_m
    turns = -(-tiles // ctas)
    if turns == 1 or not 0 < rest <= tile_m // 2:
        return turns
    saved, last = 1.0 - SHORT_TILE, tiles - (turns - 1) * ctas
    return min(turns - saved if last <= heads else turns, (tiles - saved * heads) / ctas + 0.5)
