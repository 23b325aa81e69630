"""Which calls on a cache the decode kernel serves, and with which config: read by the launcher and by ``explain``."""

from __future__ import annotations

from hopper.config import WARPGROUP_ROWS
from hopper.decode.config import HEAD_DIMS, DecodeConfig, box_rows_of, select_decode_config, tile_n_of
from hopper_attention.backends import Target
from hopper_attention.kvcache_checks import CacheCall
from hopper_attention.layout import Repair, repair_for

UNLIMITED_SPLITS = 2**20
"""More parts than a tile can be in."""

CTA_STEP = 16
"""Pieces are a multiple of it. So heads of a sequence, of which there are 2, 4, 8 or 16 as a rule, are read at the same
keys at the same time, and what they have side by side in memory is fetched together."""


def ctas_of_pieces(multiprocessors: int) -> int:
    """CTAs among which the keys of a launch are shared out."""
    return max(multiprocessors // CTA_STEP * CTA_STEP, 1)


def why_not_decode(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps the decode kernel from serving a call; empty if nothing does."""
    shape = call.shape
    if backend != "hopper":
        return f"its kernel is for Hopper GPUs, and the backend is {backend}"
    if shape.has_qv:
        return "there is a qv"
    if shape.is_fp8_cache or shape.dtype != shape.cache_dtype:
        return "q or the cache is of e4m3"
    if max(shape.head_dim, shape.head_dim_v) > max(HEAD_DIMS):
        return f"head_dim {shape.head_dim} or head_dim_v {shape.head_dim_v} is above {max(HEAD_DIMS)}"
    if call.scores.has_alibi:
        return "there are alibi_slopes"
    if not shape.has_keys or not shape.total_q:
        return "there is no query or no key"
    if shape.has_leftpad and _pages(call)[1] > 1:
        # A box that begins at any row of a page may end in another one.
        return "there is a leftpad, which its kernel takes for caches of one page a sequence"
    rows = shape.rows_a_kv_head
    if rows > WARPGROUP_ROWS:
        return f"{rows} query rows share a K/V head, and its tiles have {WARPGROUP_ROWS}"
    if any(repair_for(cache) is Repair.COPY for cache in shape.caches):
        return "TMA cannot address the strides of the cache"
    if _box_rows(call) is None:
        return f"no 8 rows of a page of {shape.page_size} lie together at multiples of 8"
    return ""


def select_decode(call: CacheCall) -> DecodeConfig:
    """The config for a call that ``why_not_decode`` has nothing against."""
    shape = call.shape
    config = select_decode_config(
        str(shape.dtype).removeprefix("torch."),
        shape.head_dim,
        shape.head_dim_v,
        call.mask.causal,
        *_pages(call),
        rows=shape.rows_a_kv_head,
        window=call.mask.has_window,
        chunk=call.mask.attention_chunk > 0,
        layout="varlen" if shape.is_packed_q else "dense",
        leftpad=shape.has_leftpad,
        softcap=call.scores.has_softcap,
        sinks=call.scores.has_sinks,
    )
    assert config is not None
    return config


def _pages(call: CacheCall) -> tuple[int, int]:
    """Rows of a page, and pages of a sequence."""
    shape = call.shape
    page_size = shape.page_size or shape.capacity
    return page_size, max(shape.capacity // max(page_size, 1), 1) if shape.is_paged else 1


def _box_rows(call: CacheCall) -> int | None:
    shape = call.shape
    return box_rows_of(tile_n_of(shape.head_dim, shape.head_dim_v), *_pages(call))
