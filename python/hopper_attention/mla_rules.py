"""Which calls on a cache the kernel for decoding over a latent serves, and with which config: read by the launcher and
by ``explain``."""

from __future__ import annotations

from cute_kernels.problem import VARLEN
from hopper.mla.config import HEAD_DIM, STAGES, MlaConfig, box_rows_for, select_mla_config
from hopper_attention.backends import Target
from hopper_attention.decode_rules import MAX_PARTS, even_ctas, fields_of, pages_of, why_not_boxes
from hopper_attention.kvcache_checks import CacheCall

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
    rows = shape.rows_a_kv_head
    if rows > MOST_ROWS:
        return f"{rows} query rows share a K/V head, and its kernel takes {MOST_ROWS}"
    return why_not_boxes(call, box_rows_for(*pages_of(call), rows))


def select_mla(call: CacheCall) -> MlaConfig:
    """The config for a call that ``why_not_mla`` has nothing against."""
    shape = call.shape
    config = select_mla_config(
        str(shape.out_dtype).removeprefix("torch."),
        shape.head_dim_v,
        call.mask.causal,
        *pages_of(call),
        group=shape.heads // shape.kv_heads,
        **fields_of(call),
    )
    assert config is not None
    return config


def pieces_of(config: MlaConfig, call: CacheCall, multiprocessors: int) -> int:
    """Pieces of all keys, each of a cluster; the kernel may take some less (hopper/mla/schedule.py)."""
    shape = call.shape
    tiles = shape.batch * shape.kv_heads * -(-shape.rows_a_kv_head // config.tile_m)
    clusters = multiprocessors // config.cluster
    return even_ctas(clusters, tiles) if config.layout == VARLEN else max(min(clusters, MAX_PARTS * tiles), 1)
