"""Which calls on a cache the decode kernel serves, and with which config: read by the launcher and by ``explain``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels.problem import DENSE, MAX_SEQLEN, VARLEN
from hopper.decode.config import (
    SWAPPED_TILE_M,
    TILE_N,
    TILE_N_SWAPPED,
    TILE_N_WIDENED,
    DecodeConfig,
    box_rows_of,
    select_decode_config,
    takes_clusters,
    tile_m_of,
    tile_n_of,
)
from hopper_attention.backends import Target
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.device_memory import is_capturing
from hopper_attention.driver import most_clusters
from hopper_attention.kvcache_checks import CacheCall
from hopper_attention.layout import Repair, repair_for

CTA_STEP = 16
"""CTAs are a multiple of it, where there are so many. So K/V heads of a sequence, of which there are 2, 4, 8 or 16 as a
rule, are read at the same keys at the same time (``heads_together``), and what they have side by side in memory is
fetched together. Where there are up to 15 and 16 is no multiple of them, CTAs are a multiple of them: 5, 6 and 10 were
timed, 2 to 4 % faster where lengths differ, 12 as before (``decode_heads.json``)."""

MAX_PARTS = 64
"""Of a tile, for launches of few tiles: beyond that, putting parts together costs more than reading sooner gains."""


WHOLE_TILES = 3
"""Whole tiles that a CTA may have in place of a piece of the same length as others', so that no tile is in parts."""

WHOLE_FROM, WHOLE_FROM_ANY = ((1, 80), (4, 112), (1 << 30, 129)), ((2, 120),)
"""K/V heads at most, and CTAs with whole tiles at least where ``even_ctas`` are 128, and in proportion: where the host
knows that all lengths are alike, and where they may differ (``decode_starts.json``). With more heads, lengths that
differ lose up to 4 %, and with fewer CTAs alike ones 2."""


def ctas_of_pieces(multiprocessors: int, tiles: int, kv_heads: int = 1, has_one_length: bool = False) -> int:
    """CTAs among which the keys of a launch of so many tiles are shared out: those that have whole tiles, as many as
    each other, if they are nearly as many as ``even_ctas`` or more."""
    even = even_ctas(multiprocessors, tiles, kv_heads)
    of_a_cta = max(-(-tiles // multiprocessors), 1)
    rows = WHOLE_FROM if has_one_length else WHOLE_FROM_ANY
    least = next((least for most, least in rows if kv_heads <= most), 0)
    is_enough = least and 128 * (tiles // of_a_cta) >= least * even
    return tiles // of_a_cta if is_enough and of_a_cta <= WHOLE_TILES and tiles % of_a_cta == 0 else even


def even_ctas(multiprocessors: int, tiles: int, kv_heads: int = 1) -> int:
    """CTAs whose pieces of the keys of so many tiles begin at like keys in every head."""
    step = kv_heads if kv_heads < CTA_STEP and CTA_STEP % kv_heads else CTA_STEP
    most = multiprocessors // step * step or multiprocessors
    return max(min(most, MAX_PARTS * tiles), 1)


def why_not_decode(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps the decode kernel from serving a call; empty if nothing does."""
    if backend != "hopper":
        return f"its kernel is for Hopper GPUs, and the backend is {backend}"
    return why_not_on_hopper(call)


def why_not_on_hopper(call: CacheCall) -> str:
    """``why_not_decode`` on the backend that has the kernel."""
    shape = call.shape
    if shape.has_qv:
        return "there is a qv"
    if shape.has_scales_of_rows and not _is_swapped(call):
        taken = "with queries of bfloat16 or e4m3"
        return f"scales are by {shape.scales}, which its kernel takes {taken}, not {shape.dtype}"
    widest = max(_tile_n(call))
    if max(shape.head_dim, shape.head_dim_v) > widest:
        of_e4m3 = " of a cache of e4m3" if shape.is_fp8_cache else ""
        return f"head_dim {shape.head_dim} or head_dim_v {shape.head_dim_v}{of_e4m3} is above {widest}"
    return why_not_boxes(call, _box_rows(call))


def why_not_boxes(call: CacheCall, box_rows: int | None) -> str:
    """What keeps a kernel that loads a cache in boxes of ``box_rows`` from a call, whatever its sizes."""
    shape = call.shape
    if call.scores.has_alibi:
        return "there are alibi_slopes"
    if not shape.has_keys or not shape.has_queries:
        return "there is no query or no key"
    if shape.capacity > MAX_SEQLEN:
        return f"a sequence has room for {shape.capacity} keys, and the kernel counts at most {MAX_SEQLEN}"
    if shape.has_leftpad and pages_of(call)[1] > 1:
        # A box that begins at any row of a page may end in another one.
        return "there is a leftpad, which its kernel takes for caches of one page a sequence"
    if any(repair_for(cache) is Repair.COPY for cache in shape.caches):
        return "TMA cannot address the strides of the cache"
    if box_rows is None:
        return f"no 8 rows of a page of {shape.page_size} lie together at multiples of 8"
    return ""


def select_decode(call: CacheCall, cluster: int = 1) -> DecodeConfig:
    """The config for a call that ``why_not_decode`` has nothing against, with clusters of so many CTAs."""
    shape = call.shape
    config = select_decode_config(
        str(shape.out_dtype).removeprefix("torch."),
        shape.head_dim,
        shape.head_dim_v,
        call.mask.causal,
        *pages_of(call),
        **(fields_of(call) | {"rows": _rows_of_a_tile(call)}),
        cache_dtype=_cache_dtype(call),
        e4m3_queries=shape.dtype == FP8_DTYPE,
        row_scales=shape.has_scales_of_rows,
        cluster=cluster,
    )
    assert config is not None
    return config


CLUSTERS = (8, 49, 64, 2), (2, 64, 64, 32), (2, 49, 63, 4), (2, 97, 128, 32)
"""CTAs of a cluster for each tile; CTAs of all clusters, at least and at most; and the most key blocks that one CTA may
have: measured with 8, 32, 56 and 64 tiles (``decode_clusters_83dc9f9.json``, ``decode_clusters_b5de2d1.json``). 64 CTAs
read longer caches more slowly than all SMs do by more than a second kernel takes; fewer are not measured."""

ANY_LENGTHS = 8
"""Key blocks that a sequence may have whatever the others' lengths are: even where one has them all, two CTAs read them
in less time than a second kernel takes. With twice as many they do not."""


def serving_config(call: CacheCall) -> DecodeConfig:
    """The config of the kernel that serves a call: ``select_decode``, with clusters where these are faster, as far as
    the host knows of lengths, and the GPU has room for those of all at once; without, while a graph is captured."""
    return lasting_config(call) or select_decode(call)


def lasting_config(call: CacheCall) -> DecodeConfig | None:
    """``serving_config``, if it may be remembered: None while a graph is captured, where clusters may be faster. To ask
    the driver for their room loads a module, which breaks a capture."""
    shape, config = call.shape, select_decode(call)
    if shape.device.type != "cuda" or call.sm_margin or not takes_clusters(config):
        return config
    tiles = shape.batch * shape.kv_heads * -(-shape.rows_a_kv_head // config.tile_m)
    for cluster, least, most, blocks in CLUSTERS:
        is_wide = least <= tiles * cluster <= most
        most_blocks = blocks * cluster
        if not call.has_one_length:
            most_blocks = min(most_blocks, ANY_LENGTHS)
        if not is_wide or shape.seqlen_k > most_blocks * config.tile_n:
            continue
        if is_capturing(shape.device):
            return None
        if most_clusters(shape.device.index or 0, cluster) >= tiles:
            return select_decode(call, cluster)
    return config


def in_clusters(config: DecodeConfig, kv_heads: int) -> Iterator[DecodeConfig]:
    """The configs with clusters that may serve in place of one without, in a model of so many K/V heads."""
    c = config
    sizes = sorted({cluster for cluster, _, most, _ in CLUSTERS if kv_heads * cluster <= most})
    for cluster in sizes if takes_clusters(c) else ():
        found = select_decode_config(
            c.dtype,
            c.head_dim,
            c.head_dim_v,
            c.causal,
            # Of pages that hold a box and no longer one.
            c.box_rows,
            2,
            c.tile_m,
            window=c.window,
            chunk=c.chunk,
            layout=c.layout,
            paged=c.paged,
            leftpad=c.leftpad,
            softcap=c.softcap,
            sinks=c.sinks,
            cache_dtype=c.cache_dtype,
            e4m3_queries=c.e4m3_queries,
            row_scales=c.row_scales,
            cluster=cluster,
        )
        assert found is not None
        yield found


def fields_of(call: CacheCall) -> dict[str, Any]:
    """What decides on a kernel that decodes beside dtypes, head_dims and pages."""
    shape = call.shape
    return {
        "rows": shape.rows_a_kv_head,
        "window": call.mask.has_window,
        "chunk": call.mask.attention_chunk > 0,
        "layout": VARLEN if shape.is_packed_q else DENSE,
        "paged": shape.is_paged or shape.has_batch_idx,
        "leftpad": shape.has_leftpad,
        "limits_splits": call.num_splits > 0,
        "softcap": call.scores.has_softcap,
        "sinks": call.scores.has_sinks,
    }


def pages_of(call: CacheCall) -> tuple[int, int]:
    """Rows of a page, and pages of a sequence."""
    shape = call.shape
    page_size = shape.page_size or shape.capacity
    return page_size, max(shape.capacity // max(page_size, 1), 1) if shape.is_paged else 1


def _box_rows(call: CacheCall) -> int | None:
    shape = call.shape
    dtype, rows = str(shape.out_dtype).removeprefix("torch."), _rows_of_a_tile(call)
    tile_n = tile_n_of(dtype, shape.head_dim, shape.head_dim_v, rows, _cache_dtype(call))
    return box_rows_of(tile_n, *pages_of(call))


def _tile_n(call: CacheCall) -> dict[int, int]:
    """Keys of a block by head_dim, of the kernels that are for a call's dtypes and rows."""
    shape = call.shape
    if not shape.is_fp8_cache:
        return TILE_N
    return TILE_N_SWAPPED if _is_swapped(call) else TILE_N_WIDENED


def _is_swapped(call: CacheCall) -> bool:
    shape = call.shape
    dtype = str(shape.out_dtype).removeprefix("torch.")
    return tile_m_of(dtype, _rows_of_a_tile(call), _cache_dtype(call)) in SWAPPED_TILE_M


def _rows_of_a_tile(call: CacheCall) -> int:
    """Query rows of a K/V head that are to be in one tile: all, but for scales by page or token, which only kernels
    with few rows take. These read keys once for each tile then."""
    rows = call.shape.rows_a_kv_head
    return min(rows, max(SWAPPED_TILE_M)) if call.shape.has_scales_of_rows else rows


def _cache_dtype(call: CacheCall) -> str:
    """Of the config: empty where it is that of q."""
    return str(call.shape.cache_dtype).removeprefix("torch.") if call.shape.is_fp8_cache else ""
