"""Calls on a cache that the forward kernels serve with the query heads of a K/V head as the rows of a tile, and keys in
parts: whether, and by which tiles.

The decode kernel shares keys out evenly, whatever the lengths are, and serves few query rows best. From some number on
it starts late and multiplies slowly, and takes e4m3 queries in 16 bits. The forward kernels read a cache where it lies
as well, and multiply e4m3 by e4m3. So both are counted, as for few queries without a cache (``few_queries``): here no
sequence is known to be shorter than the cache has room for, but parts are counted as if some were (``SHARE_OF_ROOM``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cute_kernels.combine.config import FEW_SPLITS
from cute_kernels.plan.config import MAX_PACKED_ROWS
from cute_kernels.problem import MAX_HEAD_DIM, MAX_SEQLEN
from hopper.config import WARPGROUP_ROWS
from hopper.group_rows import rows_of_queries
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.decode_rules import select_decode, why_not_on_hopper
from hopper_attention.few_e4m3_times import (
    FEW_CACHED,
    SWAPPED_OF_CACHE,
    few_cost,
    numbers_of_parts,
    swapped_cost,
    turns_of,
)
from hopper_attention.few_queries import (
    NOT_FEW,
    FewQueries,
    contiguous_spec,
    fastest_forward,
    groups_of,
    has_e4m3_tiles,
    keys_that_count,
    longest_alike,
    tiles_in_e4m3,
    with_room,
)
from hopper_attention.few_queries_times import (
    CACHE_DECODE,
    CACHE_FORWARD,
    COLUMNS,
    NO_TIMES,
    best_splits,
    decode_cost,
    forward_cost,
    turns_of_tiles,
)
from hopper_attention.kvcache_checks import CacheCall, CacheShape
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.paged_forward import page_rows_of_cache, why_not_in_place
from hopper_attention.masks import NO_MASK
from hopper_attention.packing_rules import MOST_QUERIES
from hopper_attention.problem import AttentionProblem, Fp8AttentionProblem

PAGED, NARROW = 1.15, 1.2
"""In 16 bits: time of tiles on pages, and at head_dim 64, where whole tiles have 192 rows, over the count
(``cache_tiles.json``)."""

FEW_ROWS, RAGGED = 32, 1.25
"""The same of calls with so few query rows a K/V head, whose keys the decode kernel shares out as they are: lengths may
be far from the room that there is, and were 0.8 of it where both were timed."""

SHARE_OF_ROOM = 0.5
"""Of the room for keys, that sequences have by the mean where numbers of parts are counted: of others the longest alone
would decide how long a call takes."""

MOST_ROOM, KEYS_OF_ROOM = 32, 512
"""For how many parts there is room at most, where no more were counted, and for how many keys of the cache's room there
is one: ``with_room`` has four times as many as were counted, up to these."""

MOST_TURNS, LEAST_TIME = 1.9, 40.0
"""Of tiles in one part, up to a head_dim of 128: how often they fill the multiprocessors at most, and how many
microseconds they take by count at least, where there is room for parts nevertheless: much is gained if one sequence is
longer than others, and less lost if none is (``short_launches.json``)."""

MOST_COUNTED = 1024
"""Queries of a sequence in 16 bits: of more, a tile for each head fills what there is."""

DECODE_TAKES_LESS = "by count the decode kernel takes less time"
HEADS_TAKE_LESS = "by count a tile for each head takes less time"
COUNTED = DECODE_TAKES_LESS, HEADS_TAKE_LESS
"""What speaks for other kernels where all are counted."""


def why_not_tiles(call: CacheCall, backend: str) -> str:
    """What keeps such tiles from a call, or speaks for another kernel; empty if nothing does."""
    shape = call.shape
    if backend != "hopper":
        return f"its kernels are for Hopper GPUs, and the backend is {backend}"
    if not shape.has_keys or not shape.has_queries or not shape.seqlen_q:
        return "there is no query or no key"
    if shape.batch * shape.capacity > MAX_PACKED_ROWS or shape.capacity > MAX_SEQLEN:
        return f"the cache has room for {shape.batch} x {shape.capacity} keys, of which it counts {MAX_PACKED_ROWS}"
    if shape.has_qv or call.scores.has_alibi:
        return "there is a qv, or there are alibi_slopes"
    if shape.dtype != shape.cache_dtype:
        return f"the cache has dtype {shape.cache_dtype} and q {shape.dtype}, which are multiplied in 16 bits"
    pages = pages_of_a_sequence(call)
    if shape.has_leftpad and pages > 1:
        return "there is a leftpad, which its kernels take for caches of one page a sequence"
    reason = why_not_in_place(*shape.caches, pages)
    if reason:
        return reason
    return _why_not_codes(call) if shape.is_fp8_cache else _why_not_16_bits(call)


def _why_not_codes(call: CacheCall) -> str:
    shape = call.shape
    if not has_e4m3_tiles(shape):
        return f"head_dim {shape.head_dim} or head_dim_v {shape.head_dim_v} is no multiple of 16 up to {MAX_HEAD_DIM}"
    if shape.has_scales_of_rows:
        return f"scales are by {shape.scales}, and its kernel takes one for each head of a sequence"
    if call.wants_lse:
        return "the LSE is wanted, and that of FP8 scores is not exact"
    return _by_count(call)


def _why_not_16_bits(call: CacheCall) -> str:
    shape = call.shape
    if max(shape.head_dim, shape.head_dim_v) > MAX_HEAD_DIM:
        return f"head_dim {shape.head_dim} or head_dim_v {shape.head_dim_v} is above {MAX_HEAD_DIM}"
    if not 1 < shape.seqlen_q <= MOST_COUNTED:
        return f"a sequence has {shape.seqlen_q} queries, and tiles are counted for 2 to {MOST_COUNTED}"
    if call.pack_gqa:
        return "pack_gqa is True, and the decode kernel packs heads of any number"
    if call.scores.has_sinks:
        return "there are sinks, which rows of several heads have in e4m3 alone"
    return _by_count(call)


def _by_count(call: CacheCall) -> str:
    few = tiles_of(call)
    if few.call is not None:
        return DECODE_TAKES_LESS
    return HEADS_TAKE_LESS if few == NOT_FEW else ""


def tiles_of(call: CacheCall) -> FewQueries:
    """Those that take least time by count, or the decode kernel, for a call in which all is of one dtype, and for all
    whose keys are served alike (``few_queries.LENGTHS``)."""
    shape = call.shape
    longest, caches = longest_alike(shape.seqlen_k), shape.caches
    if not shape.is_paged:
        k, v = ((shape.pages, longest, *x.shape[2:]) for x in caches)
        caches = (
            contiguous_spec(k, shape.cache_dtype, shape.device),
            contiguous_spec(v, shape.cache_dtype, shape.device),
        )
    alike = replace(shape, caches=caches, capacity=longest, seqlen_k=longest, total_new=0)
    if shape.is_paged:
        alike = replace(alike, capacity=shape.capacity)
    return _tiles_of(replace(call, shape=alike, softmax_scale=1.0))


@lru_cache(maxsize=REMEMBERED_CALLS)
def _tiles_of(call: CacheCall) -> FewQueries:
    """``tiles_of`` of all calls that are served alike."""
    shape = call.shape
    # A single query is the last, and sees all keys under a causal mask.
    call = replace(call, mask=NO_MASK) if shape.seqlen_q == 1 and not call.mask.has_window else call
    seen = keys_that_count(shape, call.mask)
    packed, keys = replace(shape, is_packed_q=True, seqlen_k=seen), float(seen)
    is_decoded = not why_not_on_hopper(call)
    if shape.dtype == FP8_DTYPE:
        found = tiles_in_e4m3(packed, keys, _groups_of(call), FEW_CACHED)
        if call.num_splits:
            found = [(cost, few) for cost, few in found if few.splits <= call.num_splits]
        if is_decoded and select_decode(call).is_swapped:
            found.append((swapped_cost(shape, keys, SWAPPED_OF_CACHE), FewQueries(call)))
        return _in_more_parts(call, packed, min(found, key=lambda each: each[0])[1])
    few = fastest_forward(replace(call, shape=packed), keys, _groups_of(call), CACHE_FORWARD)
    if 0 < call.num_splits < few.splits:
        rows = few.split_rows if call.num_splits > 1 else 0
        few = replace(few, splits=call.num_splits, split_rows=rows)
    if not is_decoded or call.pack_gqa is False or shape.seqlen_q > MOST_QUERIES:
        return _in_more_parts(call, packed, few)
    config = select_decode(call)
    times = NO_TIMES if call.has_one_length else CACHE_DECODE
    of_decode = decode_cost(call, keys, config.tile_m, config.is_widened, times)
    of_tiles = forward_cost(packed, keys, few.group, few.splits, CACHE_FORWARD)
    of_tiles *= (PAGED if shape.is_paged else 1.0) * (NARROW if shape.head_dim <= WARPGROUP_ROWS else 1.0)
    of_tiles *= RAGGED if config.tile_m <= FEW_ROWS else 1.0
    return FewQueries(call) if of_decode <= of_tiles else _in_more_parts(call, packed, few)


def _in_more_parts(call: CacheCall, shape: CacheShape, few: FewQueries) -> FewQueries:
    """Tiles in as many parts as take least time where lengths differ, and no fewer than before: a plan makes no use of
    those that it has no use for. ``shape`` has the keys that a tile sees."""
    if few.call is not None or shape.batch == 1 or call.mask.has_window:
        return few
    mean = SHARE_OF_ROOM * shape.seqlen_k
    if shape.dtype == FP8_DTYPE:
        group, rows = few.group, few.tile_rows
        numbers = numbers_of_parts(shape, mean, group, rows)
        splits = min(numbers, key=lambda n: few_cost(shape, mean, group, n, rows, FEW_CACHED))
    else:
        splits, rows = best_splits(shape, mean, few.group, CACHE_FORWARD), 0
    splits = max(splits, few.splits, 2 if _is_worth_parts(shape, few) else 1)
    room = min(max(shape.seqlen_k // KEYS_OF_ROOM, FEW_SPLITS), MOST_ROOM)
    splits = with_room(replace(few, splits=splits), shape, room).splits
    splits = min(splits, call.num_splits or splits)
    if splits <= few.splits:
        return few
    rows_of_16_bits = 0 if rows else rows_of_queries(shape.seqlen_q, few.group)
    return replace(few, splits=splits, split_rows=rows_of_16_bits)


def _is_worth_parts(shape: CacheShape, few: FewQueries) -> bool:
    """Whether there may be parts where none pays if all sequences are as long as each other. So few tiles have memory
    for the results of two."""
    if max(shape.head_dim, shape.head_dim_v) > COLUMNS:
        return False
    keys = float(shape.seqlen_k)
    if shape.dtype == FP8_DTYPE:
        turns = turns_of(shape, few.group, few.tile_rows)
        return (
            turns <= MOST_TURNS
            and few_cost(shape, keys, few.group, 1, few.tile_rows, FEW_CACHED) >= LEAST_TIME
        )
    turns = turns_of_tiles(shape, few.group)
    return turns <= MOST_TURNS and forward_cost(shape, keys, few.group, 1, CACHE_FORWARD) >= LEAST_TIME


def _groups_of(call: CacheCall) -> tuple[int, ...]:
    """Those of ``groups_of`` that ``pack_gqa`` allows."""
    allowed = groups_of(call.shape)
    return allowed if call.pack_gqa is None else allowed[-1:] if call.pack_gqa else allowed[:1]


def pages_of_a_sequence(call: CacheCall) -> int:
    shape = call.shape
    return shape.capacity // shape.page_size if shape.is_paged else 1


def page_rows_of_call(call: CacheCall) -> int:
    """``AttentionProblem.page_rows`` of the cache of a call."""
    shape = call.shape
    is_plain = not (shape.is_paged or shape.has_batch_idx or shape.has_leftpad)
    return page_rows_of_cache(*shape.caches, pages_of_a_sequence(call), is_plain=is_plain)


def problem_of_tiles(call: CacheCall, few: FewQueries) -> AttentionProblem | Fp8AttentionProblem:
    """What decides on the kernel of a call that is served as ``few`` says."""
    shape, page_rows = call.shape, page_rows_of_call(call)
    mask = call.mask if shape.seqlen_q > 1 or call.mask.has_window else NO_MASK
    if shape.dtype == FP8_DTYPE:
        head_dims = shape.head_dim, shape.head_dim_v
        of_codes = few.e4m3_problem(head_dims, mask, is_packed=True, scores=call.scores)
        return replace(of_codes, page_rows=page_rows)
    return AttentionProblem(
        shape.dtype,
        shape.dtype,
        shape.head_dim,
        shape.head_dim_v,
        mask.causal,
        has_window=mask.has_window,
        has_chunk=mask.attention_chunk > 0,
        is_packed=True,
        scores=call.scores,
        page_rows=page_rows,
        group=few.group,
        split_rows=few.split_rows,
    )
