"""Which calls on a cache the kernel for decoding over a latent serves, and with which config: read by the launcher and
by ``explain``."""

from __future__ import annotations

from hopper.mla.config import HEAD_DIM, STAGES, MlaConfig, box_rows_for, select_mla_config
from hopper_attention.backends import Target
from hopper_attention.decode_rules import ctas_of_pieces, pages_of
from hopper_attention.kvcache_checks import CacheCall
from hopper_attention.layout import Repair, repair_for

MOST_ROWS = 1024
"""Query rows of a K/V head. Every tile of them reads all keys, from L2 as a rule; of more than these, a prefill, the
kernels that share keys out by queries are as fast."""


def why_not_mla(call: CacheCall, target: Target, backend: str) -> str:
    """What keeps the kernel from serving a call; empty if nothing does."""
    shape = call.shape
    if not shape.has_qv:
        return "there is no qv"
    if backend != "hopper":
        return f"its kernel is for Hopper GPUs, and the backend is {backend}"
    if shape.is_fp8_cache:
        return f"the cache has dtype {shape.cache_dtype}, and its kernel takes 16 bits"
    for name, size, most in (
        ("head_dim", shape.head_dim, HEAD_DIM),
        ("head_dim_v", shape.head_dim_v, max(STAGES)),
    ):
        if size > most:
            return f"{name} is {size}, and its kernel takes at most {most}"
    if call.scores.has_alibi:
        return "there are alibi_slopes"
    if not shape.has_keys or not shape.has_queries:
        return "there is no query or no key"
    if shape.has_leftpad and pages_of(call)[1] > 1:
        # A box that begins at any row of a page may end in another one.
        return "there is a leftpad, which its kernel takes for caches of one page a sequence"
    rows = shape.rows_a_kv_head
    if rows > MOST_ROWS:
        return f"{rows} query rows share a K/V head, and its kernel takes {MOST_ROWS}"
    if any(repair_for(cache) is Repair.COPY for cache in shape.caches):
        return "TMA cannot address the strides of the cache"
    if box_rows_for(*pages_of(call), rows) is None:
        return f"no 8 rows of a page of {shape.page_size} lie together at multiples of 8"
    return ""


def select_mla(call: CacheCall) -> MlaConfig:
    """The config for a call that ``why_not_mla`` has nothing against."""
    shape = call.shape
    config = select_mla_config(
        str(shape.out_dtype).removeprefix("torch."),
        shape.head_dim_v,
        call.mask.causal,
        *pages_of(call),
        rows=shape.rows_a_kv_head,
        window=call.mask.has_window,
        chunk=call.mask.attention_chunk > 0,
        layout="varlen" if shape.is_packed_q else "dense",
        paged=shape.is_paged or shape.has_batch_idx,
        leftpad=shape.has_leftpad,
        limits_splits=call.num_splits > 0,
        softcap=call.scores.has_softcap,
        sinks=call.scores.has_sinks,
    )
    assert config is not None
    return config


def pieces_of(config: MlaConfig, call: CacheCall, multiprocessors: int) -> int:
    """Pieces of all keys, each of a cluster."""
    shape = call.shape
    tiles = shape.batch * shape.kv_heads * -(-shape.rows_a_kv_head // config.tile_m)
    return ctas_of_pieces(multiprocessors // config.cluster, tiles)
