"""Whether a call on a cache packs query heads, where ``cache_tiles`` does not count: the decode kernel does, which has
the heads of a K/V head as rows of a tile, and the forward kernel then has a tile for the queries of each head.

Few queries leave most rows of a forward tile empty, and few tiles most of the GPU; the decode kernel fills both, but
each of its tiles reads keys anew. So tiles are counted, each with what it costs for a key of its walk.
"""

from __future__ import annotations

from hopper.config import WARPGROUP_ROWS
from hopper_attention.decode_rules import even_ctas, select_decode
from hopper_attention.kvcache_checks import CacheCall, CacheShape

FORWARD_ROWS = 128
"""Queries of a tile of the forward kernel, as a rule."""

MULTIPROCESSORS = 132
"""Of an H100 or H200. A constant, so that a choice does not depend on where it is asked for."""

MOST_QUERIES = 256
"""Of a sequence, up to which tiles are counted. Of more those of the forward kernel are full, and end at the keys that
they see, where all tiles of the decode kernel walk to the last key."""

TILE_COST = 1.4
"""Time that a tile of the decode kernel takes for a key, over that of a tile of the forward kernel: 1.3 to 1.5 where
there are many of both, of 64 rows with e4m3 as of 128 with 16 bits (``benchmarks/packing.py``)."""

COPY_COST = 2.0
"""The same of a key that is copied for all query heads of a K/V head, by the whole GPU."""


def why_not_packed(call: CacheCall, in_place: bool) -> str:
    """What speaks against the decode kernel for a call that it could serve; empty if nothing does. ``in_place`` is
    whether the forward kernel can read the cache where it lies."""
    if call.pack_gqa is False:
        return "pack_gqa is False, and the forward kernel reads the cache where it lies" if in_place else ""
    rows = call.shape.rows_a_kv_head
    if call.pack_gqa or rows <= WARPGROUP_ROWS:
        return ""
    if call.shape.seqlen_q > MOST_QUERIES:
        return (
            f"a sequence may have {call.shape.seqlen_q} queries, which fill tiles of the forward kernel; "
            "pack_gqa=True packs them all the same"
        )
    packed, unpacked = packed_cost(call), unpacked_cost(call.shape, in_place)
    if packed <= unpacked:
        return ""
    return (
        f"{rows} query rows share a K/V head, and by count its tiles take {packed / unpacked:.2g} times as long as "
        "those of the forward kernel; pack_gqa=True packs them all the same"
    )


def packed_cost(call: CacheCall) -> float:
    """Time of the decode kernel for a key of all sequences, in tiles of the forward kernel on one multiprocessor."""
    shape = call.shape
    tiles = shape.kv_heads * _tiles(shape, shape.heads // shape.kv_heads, select_decode(call).tile_m)
    return TILE_COST * tiles / even_ctas(MULTIPROCESSORS, tiles, shape.kv_heads)


def unpacked_cost(shape: CacheShape, in_place: bool) -> float:
    """The same of the forward kernel, and of a copy of the keys where it cannot read them as they lie."""
    waves = -(-shape.heads * _tiles(shape, 1, FORWARD_ROWS) // MULTIPROCESSORS)
    return waves + (0.0 if in_place else COPY_COST * shape.batch * shape.kv_heads / MULTIPROCESSORS)


def _tiles(shape: CacheShape, heads: int, tile_m: int) -> int:
    """Tiles of all sequences, of so many heads a token, at most."""
    most = -(-shape.seqlen_q * heads // tile_m) * shape.batch
    return min(most, shape.total_q * heads // tile_m + shape.batch)
