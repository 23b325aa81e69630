"""What decides which kernel serves a call, apart from the GPU: all but sizes, strides and addresses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from hopper.forward import tilings
from hopper.forward.fp8 import tilings as fp8_tilings
from hopper.forward.tilings import ANY_LENGTH
from hopper_attention.scores import PLAIN, ScoreKind

ONE_BLOCK = 0
"""``block`` of a tensor in which everything of a head shares a scale."""


@dataclass(frozen=True)
class AttentionProblem:
    """What a kernel is chosen by. Most calls that differ only in batch, heads or lengths share one.

    Attributes:
        dtype, out_dtype: of q, k and v, and of the output.
        head_dim, head_dim_v: sizes of a row of q and k, and of v.
        causal: whether there is a causal mask.
        longest_k: the largest seqlen_k that gets the tiles which this one gets (``longest_alike``).
        is_empty: there is no query or no key.
        has_window: a side of a window is limited, beyond what ``causal`` says, or there are chunks. Its sides are
            arguments of a call.
        has_chunk: there are chunks. How long they are is an argument of a call.
        is_packed: sequences of different lengths lie one after another in one tensor.
        scores: what is done to scores and P. Softcap, slopes, sinks and dropout are arguments of a call.
        has_qv: there is a second query, of head_dim_v columns, that multiplies V.
        has_many_tiles: the tiles of the problem are enough for every SM, where that decides on the kernel.
        group: query heads of a K/V head that stand in the rows of a tile; 1 is a head.
        split_rows: rows that a K/V head has of a sequence at most, where several CTAs visit parts of a tile's keys and
            leave partial results; 0 where each tile is one CTA's.
        page_rows: of a cache in whose pages K and V lie, rows that are known to lie together (``PAGE_ROWS``,
            ``ONE_PAGE``, ``END_TO_END``); 0 where there is none.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    causal: bool
    longest_k: int = ANY_LENGTH
    is_empty: bool = False
    has_window: bool = False
    has_chunk: bool = False
    is_packed: bool = False
    scores: ScoreKind = PLAIN
    has_qv: bool = False
    page_rows: int = 0
    has_many_tiles: bool = False
    group: int = 1
    split_rows: int = 0


@dataclass(frozen=True)
class Fp8AttentionProblem(AttentionProblem):
    """That of e4m3 tensors.

    Attributes:
        block_k, block_v: rows of K and of V that share a scale, or ONE_BLOCK.
        v_rows: V has a row of head_dim_v elements for each key, as FP8 tensors with descales have; else it comes
            transposed.
        lone_scales: V has rows, and all rows of a head share a scale in Q, in K and in V, as with descales.
        transposes: so it is, and so few queries attend to it that a kernel which transposes it on its way is faster
            than one that finds it transposed, and another that does so before.
        two_level: the FP8 kernel is to add P V of its key tiles in float32; everything else does so anyway.
        half_scores: scores fit float16, before they are scaled.
        exact_lse: scores and their sum are to be added up in float32, for an LSE that partial results are merged by. V
            is transposed before.
        without_lse: nobody gets the LSE, so that scores that do not fit float16 may be made to, and more of those that
            fit lie in it (``select_fp8_forward_config``).
        tile_rows: rows of a tile where queries are few (``few_queries.FewQueries``); 0 elsewhere.
        few_tiles: so few queries that tiles of fewer rows leave fewer multiprocessors without one (``are_few_tiles``).
    """

    block_k: int = ONE_BLOCK
    block_v: int = ONE_BLOCK
    v_rows: bool = False
    lone_scales: bool = False
    transposes: bool = False
    two_level: bool = False
    half_scores: bool = False
    exact_lse: bool = False
    without_lse: bool = False
    few_tiles: bool = False
    tile_rows: int = 0


PackedKeys = Literal["few", "usual", "many"]
"""How many keys the longest of packed sequences has, as far as kernels of gradients differ by it."""

USUAL_KEYS: PackedKeys = "usual"


@dataclass(frozen=True)
class GradientProblem(AttentionProblem):
    """That of a backward pass, which has the same tiles for all lengths.

    Attributes:
        deterministic: gradients are to have the same bits in every run.
        in_strips: window, lengths and heads are such that a kernel can write dQ itself (``backward_rules.in_strips``).
        one_tile: the keys are so few that a kernel needs none beside it (``backward_rules.in_one_tile``).
        divides_heads: the query heads of a head of K and V are shared out (``head_parts.with_head_parts``).
        walks_back: so many query heads share a head of K and V in a CTA that it is to visit them all at a time, where
            a kernel can (``backward_rules.walk_back``).
        divides_visits: some key tiles are shared by several CTAs (``visit_pieces.with_shares``).
        keys: of packed sequences, what the bound of their lengths says of the kernel (``backward_rules.keys_within``).
    """

    deterministic: bool = False
    in_strips: bool = False
    one_tile: bool = False
    divides_heads: bool = False
    walks_back: bool = False
    divides_visits: bool = False
    keys: PackedKeys = USUAL_KEYS


@lru_cache(maxsize=1)
def length_bounds() -> tuple[int, ...]:
    """Every seqlen_k up to which some tiling of ``hopper`` serves, in ascending order."""
    tables: tuple[Mapping[Any, tuple[tilings.Tiling, ...]], ...] = (
        tilings.TILINGS,
        tilings.SHORT_TILINGS,
        tilings.WINDOW_TILINGS,
        fp8_tilings.FP8_TILINGS,
        fp8_tilings.FP8_HALF_SCORES_TILINGS,
        fp8_tilings.FP8_LOWERED_TILINGS,
        fp8_tilings.FP8_RETURNED_LSE_TILINGS,
        fp8_tilings.FP8_ROW_TILINGS,
        fp8_tilings.FP8_HALF_ROW_TILINGS,
        fp8_tilings.FP8_TWO_LEVEL_TILINGS,
        fp8_tilings.FP8_TWO_LEVEL_ROW_TILINGS,
        fp8_tilings.FP8_EXACT_LSE_TILINGS,
    )
    rows = [row for table in tables for rows in table.values() for row in rows]
    plain = [row for rows in tilings.PLAIN_TILINGS.values() for row in rows]
    rows += [row.tiling for row in plain]
    bounds = {row.max_seqlen_k for row in rows} | {row.above for row in plain if row.above}
    return tuple(sorted(bounds | {fp8_tilings.RUNLESS_KEYS, ANY_LENGTH}))


def longest_alike(seqlen_k: int) -> int:
    """The largest seqlen_k that every choice of a tiling treats as it does this one."""
    bounds = length_bounds()
    return bounds[bisect_left(bounds, seqlen_k)]
