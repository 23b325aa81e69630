"""Dense calls of few queries, which the decode kernel serves as it serves a cache, or the forward kernel with the query
heads of a K/V head in its tiles.

The forward kernel has a tile for the queries of each head. Few queries leave most rows of it empty, and where heads are
few too most of the GPU. Both others have the query heads of a K/V head as the rows of one tile. The decode kernel
shares the keys of all tiles out over the GPU besides; where there are tiles for all of it, the forward kernel is
faster. FlashAttention-2 packs a single query so, FlashAttention-3 any number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from cute_kernels.combine.config import FEW_SPLITS
from cute_kernels.problem import MAX_HEAD_DIM, MAX_SEQLEN
from hopper.field_checks import GROUPS
from hopper.forward.fp8.tilings import FEW_QUERIES
from hopper.group_rows import rows_of_queries
from hopper_attention.checks import FP8_DTYPE, FP8_OUT_DTYPE, TensorSpec
from hopper_attention.decode_rules import select_decode, why_not_on_hopper
from hopper_attention.few_e4m3_times import (
    FewTimes,
    few_cost,
    native_size,
    numbers_of_parts,
    swapped_cost,
    usual_cost,
)
from hopper_attention.few_queries_times import (
    MOST_SEQUENCES,
    ForwardTimes,
    best_splits,
    decode_cost,
    forward_cost,
    most_in_memory,
)
from hopper_attention.fp8_rules import HEAD_DIM_STEP
from hopper_attention.kvcache_checks import NAMES, CacheCall, CacheShape, read_shape
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS
from hopper_attention.masks import FULL_SIDES, NO_MASK, MaskSpec
from hopper_attention.packing_rules import FORWARD_ROWS, MOST_QUERIES
from hopper_attention.problem import Fp8AttentionProblem
from hopper_attention.scores import PLAIN, ScoreKind

NOTE = (
    "few queries: the decode kernel has the query heads of a key/value head as rows of a tile, and shares all keys out "
    "over the GPU"
)
NOTE_ON_GROUPS = "few queries: tiles have the query heads of a key/value head as rows"
NOTE_ON_LENGTHS = "a sequence is in as many parts as its length asks for, up to that number"


MARGIN = 1.1
"""By which the decode kernel is to be faster: it is two launches as a rule, where the forward kernel is one."""

ROOM_FOR_PARTS = 4
"""How many times the parts that were counted there may be."""

LENGTHS = (
    *(32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536),
    *(length for n in range(11, 24) for length in (2**n, 3 * 2 ** (n - 1))),
    2**24,
    MAX_SEQLEN,
)
"""Keys of a sequence up to which all are served alike: one that grows by a key a call is to find what serves it again.
Close where it is decided between two kernels, and multiples of what decides on clusters."""


@dataclass(frozen=True)
class FewQueries:
    """What serves a call of few queries: the decode kernel, as a ``call`` on a cache, or the forward kernel with
    ``group`` query heads in a tile, whose keys are in ``splits`` parts. ``split_rows`` is as in ``AttentionProblem``,
    and of e4m3 ``tile_rows`` as in ``Fp8AttentionProblem``. Without all of these it is served as any other."""

    call: CacheCall | None = None
    group: int = 1
    splits: int = 1
    split_rows: int = 0
    tile_rows: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What ``explain`` says of the forward kernel."""
        of_parts = f"few queries: {self.splits} CTAs visit a part of a tile's keys each, which a second kernel adds up"
        return ((NOTE_ON_GROUPS,) if self.group > 1 else ()) + ((of_parts,) if self.splits > 1 else ())

    @property
    def notes_of_packed(self) -> tuple[str, ...]:
        """The same of packed sequences and of those on a cache."""
        return (*self.notes, NOTE_ON_LENGTHS) if self.splits > 1 else self.notes

    def e4m3_problem(
        self, head_dims: tuple[int, int], mask: MaskSpec, is_packed: bool, scores: ScoreKind = PLAIN
    ) -> Fp8AttentionProblem:
        """That of e4m3 tensors with descales, of which ``tile_rows`` are known; ``head_dims`` are those of Q and V."""
        return Fp8AttentionProblem(
            FP8_DTYPE,
            FP8_OUT_DTYPE,
            *head_dims,
            mask.causal,
            has_window=mask.has_window,
            has_chunk=mask.attention_chunk > 0,
            is_packed=is_packed,
            scores=scores,
            group=self.group,
            split_rows=self.tile_rows if self.splits > 1 else 0,
            v_rows=True,
            transposes=True,
            tile_rows=self.tile_rows,
        )


NOT_FEW = FewQueries()


def may_serve(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> bool:
    """Whether queries are so few that the decode kernel is asked for."""
    return len(q_shape) == 4 and len(k_shape) == 4 and q_shape[1] <= MOST_QUERIES


def longest_alike(seqlen_k: int) -> int:
    """The largest seqlen_k that is served as this one."""
    return LENGTHS[bisect_left(LENGTHS, seqlen_k)]


def find_few(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    mask: MaskSpec,
    scores: ScoreKind,
    sm_margin: int,
    in_e4m3: bool = True,
) -> FewQueries:
    """What serves a checked dense call of the Hopper backend, and others like it. The LSE of its ``call`` is wanted,
    and its scale the default.

    Args:
        q, k, v: of 16 bits, or of e4m3 with a descale for each head.
        in_e4m3: whether the FP8 kernel may have several heads in a tile and keys in parts, whose LSE is not exact, and
            whose P V is one sum.
    """
    if not may_serve(q.shape, k.shape) or not 0 < k.shape[1] <= MAX_SEQLEN:
        return NOT_FEW
    (batch, seqlen_k, kv_heads, _), head_dim_v = k.shape, v.shape[3]
    sizes = q.shape, (batch, longest_alike(seqlen_k), kv_heads, head_dim_v)
    return _find_few(*sizes, q.dtype, q.device, mask, scores, sm_margin, in_e4m3)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find_few(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mask: MaskSpec,
    scores: ScoreKind,
    sm_margin: int,
    in_e4m3: bool,
) -> FewQueries:
    """``find_few`` of all keys that are served alike."""
    if scores.functions or scores.has_dropout or 0 in (*q_shape, *v_shape):
        return NOT_FEW
    head_dim = q_shape[3]
    q, k, v = (contiguous_spec(x, dtype, device) for x in (q_shape, (*v_shape[:3], head_dim), v_shape))
    specs = dict.fromkeys(NAMES) | {"q": q, "k_cache": k, "v_cache": v}
    shape = read_shape(tuple(specs.values()), q_shape[1], -1)
    # A single query is the last, and sees all keys under a causal mask.
    if shape.seqlen_q == 1 and mask.sides == FULL_SIDES:
        mask = NO_MASK
    call = CacheCall(
        shape, mask, head_dim**-0.5, scores, backend="hopper", sm_margin=sm_margin, wants_lse=True
    )
    return fastest(call, shape.seqlen_k, in_e4m3)


def fastest(call: CacheCall, mean_k: float, in_e4m3: bool) -> FewQueries:
    """What takes least time for a call, by count; ``mean_k`` are the keys of a sequence, ``in_e4m3`` is that of
    ``find_few``."""
    if call.shape.dtype == FP8_DTYPE and in_e4m3 and not call.scores.has_alibi and has_e4m3_tiles(call.shape):
        return fastest_in_e4m3(call, mean_k)
    of_forward = fastest_forward(call, mean_k)
    is_served = not why_not_on_hopper(call) and is_faster(call, mean_k, of_forward)
    return FewQueries(call) if is_served else of_forward


def with_room(few: FewQueries, shape: CacheShape, room: int = FEW_SPLITS) -> FewQueries:
    """Tiles of packed sequences in more parts than were counted, up to ``room``, if there is memory for them: lengths
    are known on the GPU, and a sequence is in as many as its own asks for. More than a warp adds up at once cost more
    than they gain where the mean of lengths is known (``short_launches.json``)."""
    if few.splits == 1 or shape.batch == 1:
        return few
    most = min(room, MOST_SEQUENCES // shape.batch, most_in_memory(shape))
    return replace(few, splits=max(min(ROOM_FOR_PARTS * few.splits, most), few.splits))


def groups_of(shape: CacheShape) -> tuple[int, ...]:
    """Heads that a tile may have: one, or all of a K/V head."""
    whole = shape.heads // shape.kv_heads
    return (1, whole) if whole in GROUPS else (1,)


def fastest_forward(
    call: CacheCall, mean_k: float, groups: Iterable[int] = (), times: ForwardTimes | None = None
) -> FewQueries:
    """How the forward kernel takes least time: with all heads of a K/V head in a tile, or one, or as ``groups`` says,
    in how many parts. ``times`` are those of ``forward_cost``."""
    shape, scores = call.shape, call.scores
    widest = max(shape.head_dim, shape.head_dim_v)
    if shape.dtype == FP8_DTYPE or widest > MAX_HEAD_DIM or scores.has_alibi or scores.has_sinks:
        return NOT_FEW
    found = []
    for group in groups or groups_of(shape):
        splits = 1 if call.mask.has_window else best_splits(shape, mean_k, group, times)
        rows = rows_of_queries(shape.seqlen_q, group) if splits > 1 else 0
        found.append(
            (forward_cost(shape, mean_k, group, splits, times), FewQueries(None, group, splits, rows))
        )
    return min(found, key=lambda each: each[0])[1]


def has_e4m3_tiles(shape: CacheShape) -> bool:
    """Whether there are tiles of e4m3 for few queries of such rows."""
    sizes = shape.head_dim, shape.head_dim_v
    return max(sizes) <= MAX_HEAD_DIM and not any(size % HEAD_DIM_STEP for size in sizes)


def keys_that_count(shape: CacheShape, mask: MaskSpec) -> int:
    """Keys that a tile visits, at most: those that its queries see."""
    seen = mask.most_keys(shape.seqlen_k, shape.seqlen_q)
    return min(shape.seqlen_k, seen + min(shape.seqlen_q, FORWARD_ROWS))


def fastest_in_e4m3(call: CacheCall, mean_k: float) -> FewQueries:
    """``fastest`` of e4m3 tensors with descales."""
    seen = keys_that_count(call.shape, call.mask)
    shape, mean_k = replace(call.shape, seqlen_k=seen), min(mean_k, float(seen))
    found = [(usual_cost(shape, mean_k), NOT_FEW), *tiles_in_e4m3(shape, mean_k)]
    if not why_not_on_hopper(call) and select_decode(call).is_swapped:
        found.append((swapped_cost(shape, mean_k), FewQueries(call)))
    return min(found, key=lambda each: each[0])[1]


def tiles_in_e4m3(
    shape: CacheShape, mean_k: float, groups: Iterable[int] = (), times: FewTimes | None = None
) -> list[tuple[float, FewQueries]]:
    """Tiles for few queries of e4m3, and what each takes by count; with so many heads each as ``groups`` says, or those
    of ``groups_of``. ``times`` are those of ``few_cost``."""
    return [
        (few_cost(shape, mean_k, group, splits, rows, times), FewQueries(None, group, splits, tile_rows=rows))
        for group in groups or groups_of(shape)
        for rows in FEW_QUERIES[native_size(shape)]
        for splits in numbers_of_parts(shape, mean_k, group, rows)
    ]


def is_faster(call: CacheCall, mean_k: float, of_forward: FewQueries) -> bool:
    """Whether the decode kernel takes less time than the forward kernel does so."""
    config = select_decode(call)
    if config.is_swapped:
        return True
    cost = decode_cost(call, mean_k, config.tile_m, config.is_widened)
    return MARGIN * cost <= forward_cost(call.shape, mean_k, of_forward.group, of_forward.splits)


def contiguous_spec(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorSpec:
    """Of a tensor of four dimensions without gaps."""
    _, rows, heads, columns = shape
    return TensorSpec(shape, (rows * heads * columns, heads * columns, columns, 1), dtype, device)
