"""Dense calls of few queries, which the decode kernel serves as it serves a cache.

The forward kernel has a tile for the queries of each head. Few queries leave most rows of it empty, and where heads are
few too most of the GPU. The decode kernel has the query heads of a K/V head as the rows of one tile, and shares the
keys of all tiles out over the GPU. FlashAttention-2 packs a single query so, FlashAttention-3 any number.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import torch

from cute_kernels.problem import MAX_SEQLEN
from hopper_attention.checks import TensorSpec
from hopper_attention.decode_rules import ctas_of_pieces, select_decode, why_not_on_hopper
from hopper_attention.kvcache_checks import NAMES, CacheCall, CacheShape, read_shape
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS
from hopper_attention.masks import FULL_SIDES, NO_MASK, MaskSpec
from hopper_attention.packing_rules import FORWARD_ROWS, MOST_QUERIES, MULTIPROCESSORS
from hopper_attention.scores import ScoreKind

NOTE = (
    "few queries: the decode kernel has the query heads of a key/value head as rows of a tile, and shares all keys out "
    "over the GPU"
)


@dataclass(frozen=True)
class DecodeTimes:
    """What the decode kernel takes to start, for a tile, and for a key of a tile.

    The unit is the time in which a full tile of the forward kernel visits a key. Found by timing 800 calls
    (``few_queries_times.json``, ``few_queries.json``).
    """

    start: float
    tile: float
    key: float


DENSE_TIMES = {
    32: DecodeTimes(200.0, 120.0, 0.8),
    64: DecodeTimes(200.0, 250.0, 1.6),
    128: DecodeTimes(600.0, 300.0, 1.6),
}
"""By the rows of a tile, of 16 bits."""

PACKED_TIMES = {
    32: DecodeTimes(200.0, 120.0, 0.8),
    64: DecodeTimes(600.0, 800.0, 1.6),
    128: DecodeTimes(1800.0, 300.0, 3.0),
}
"""The same of packed sequences (``few_packed_queries_times.json``, ``few_packed_queries.json``)."""

WIDENED_TIMES = DecodeTimes(3200.0, 200.0, 0.95)
"""Of e4m3 with more rows than a kernel takes in e4m3: PyTorch widens the queries before, and multiplies descales."""

FORWARD_PACKED = 150.0
"""The time in which another kernel plans what the forward kernel does to packed sequences."""

FORWARD_TILE = 96.0
"""The time of a tile of the forward kernel, beside its keys."""

MARGIN = 1.1
"""By which the decode kernel is to be faster: it is two launches as a rule, where the forward kernel is one."""

MEMORY_KEY = 1.2
"""The time in which a key comes, where every multiprocessor reads keys of its own."""


LENGTHS = (
    *(32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096),
    *(2**14, 2**16, 2**18, 2**20, 2**24, MAX_SEQLEN),
)
"""Keys of a sequence up to which all are served alike: one that grows by a key a call is to find what serves it again.
Close where it is decided between two kernels, and multiples of what decides on clusters."""


def may_serve(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> bool:
    """Whether queries are so few that the decode kernel is asked for."""
    return len(q_shape) == 4 and len(k_shape) == 4 and q_shape[1] <= MOST_QUERIES


def longest_alike(seqlen_k: int) -> int:
    """The largest seqlen_k that is served as this one."""
    return LENGTHS[bisect_left(LENGTHS, seqlen_k)]


def find_call(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, mask: MaskSpec, scores: ScoreKind, sm_margin: int
) -> CacheCall | None:
    """The call on a cache that serves a checked dense one of the Hopper backend, and others like it; None if the decode
    kernel is not to. Its LSE is wanted, and its scale the default.

    Args:
        q, k, v: of 16 bits, or of e4m3 with a descale for each head.
    """
    if not may_serve(q.shape, k.shape) or not 0 < k.shape[1] <= MAX_SEQLEN:
        return None
    (batch, seqlen_k, kv_heads, _), head_dim_v = k.shape, v.shape[3]
    sizes = q.shape, (batch, longest_alike(seqlen_k), kv_heads, head_dim_v)
    return _find_call(*sizes, q.dtype, q.device, mask, scores, sm_margin)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find_call(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mask: MaskSpec,
    scores: ScoreKind,
    sm_margin: int,
) -> CacheCall | None:
    """``find_call`` of all keys that are served alike."""
    if scores.functions or scores.has_dropout or 0 in (*q_shape, *v_shape):
        return None
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
    is_served = not why_not_on_hopper(call) and is_faster(call, shape.seqlen_k)
    return call if is_served else None


def contiguous_spec(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorSpec:
    """Of a tensor of four dimensions without gaps."""
    _, rows, heads, columns = shape
    return TensorSpec(shape, (rows * heads * columns, heads * columns, columns, 1), dtype, device)


def is_faster(call: CacheCall, mean_k: float) -> bool:
    """Whether the decode kernel takes less time than the forward kernel, by count; ``mean_k`` are the keys of a
    sequence."""
    config = select_decode(call)
    if config.is_swapped:
        return True
    of_rows = PACKED_TIMES if call.shape.is_packed_q else DENSE_TIMES
    times = WIDENED_TIMES if config.is_widened else of_rows[config.tile_m]
    return MARGIN * decode_cost(call, mean_k, config.tile_m, times) <= forward_cost(call.shape, mean_k)


def decode_cost(call: CacheCall, mean_k: float, tile_m: int, times: DecodeTimes) -> float:
    """Time of the decode kernel, as of ``DecodeTimes``."""
    shape = call.shape
    tiles = shape.batch * shape.kv_heads * -(-shape.rows_a_kv_head // tile_m)
    ctas = ctas_of_pieces(MULTIPROCESSORS, tiles, shape.kv_heads, call.has_one_length)
    return times.start + max(tiles / ctas, 1.0) * times.tile + tiles / ctas * mean_k * times.key


def forward_cost(shape: CacheShape, mean_k: float) -> float:
    """The same of the forward kernel, which has a CTA for each multiprocessor. The longest sequence is one's."""
    tiles = shape.batch * shape.heads * -(-shape.seqlen_q // FORWARD_ROWS)
    turns = -(-tiles // MULTIPROCESSORS)
    # Heads that share keys read them together.
    reading = tiles / (turns * MULTIPROCESSORS) * shape.kv_heads / shape.heads
    of_keys = max(turns * mean_k * max(1.0, MEMORY_KEY * reading), shape.seqlen_k)
    return turns * FORWARD_TILE + of_keys + (FORWARD_PACKED if shape.is_packed_q else 0.0)
