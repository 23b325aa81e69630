"""Random problems for the C library and for Python: the same sizes as fields of a struct and as tensors."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from cute_kernels.problem import DTYPES
from hopper.config import ForwardConfig
from hopper.forward.tilings import NATIVE_HEAD_DIMS
from hopper_attention import c_tables
from hopper_attention.checks import DTYPE_NAMES, TensorSpec
from hopper_attention.features import resolve_mask, resolve_packed_mask
from hopper_attention.kvcache_call import CacheExtras, CacheOptions, read_call
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.masks import MaskSpec
from tests import c_library as c

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ANYWHERE = 1 << 20
"""An address; nothing is read there."""
LENGTHS = (1, 63, 512, 768, 769, 1280, 1281, 1536, 1537, 2000, 2500, 4096, 6144, 6145, 16_384, 2**31 - 512)


def draw_problem(rng: random.Random) -> dict[str, Any]:
    """Sizes and a mask; a fifth of them near the bounds of tilings."""
    heads = rng.choice((1, 2, 8))
    length = rng.choice(LENGTHS) if rng.random() < 0.2 else int(2 ** rng.uniform(0, 18))
    sides = [rng.choice((-1, -1, -1, 0, 1, 100, 700, 1000, 2000, 3000, 10_000)) for _ in range(2)]
    kind = tuple(rng.random() < 0.2 for _ in c_tables.SCORES)
    return {
        "dtype": rng.choice(DTYPES),
        "batch": rng.choice((1, 3)),
        "lengths": (rng.choice((length, int(2 ** rng.uniform(0, 18)))), length),
        "heads": (heads * rng.choice((1, 4)), heads),
        "head_dims": (8 * rng.randint(1, 32), 8 * rng.randint(1, 32)),
        "causal": rng.random() < 0.5,
        "sides": sides,
        "chunk": rng.choice((0, 0, 0, 0, 1, 600, 1000, 2000, 10_000, 20_000)),
        "kind": kind if rng.random() < 0.5 else (False, False, False),
    }


def common_fields(p: dict[str, Any]) -> dict[str, Any]:
    """The fields of a struct that dense and packed problems share."""
    (heads, kv_heads), (head_dim, head_dim_v) = p["heads"], p["head_dims"]
    return {
        "dtype": DTYPES.index(p["dtype"]),
        "batch": p["batch"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": p["causal"],
        "window_left": p["sides"][0],
        "window_right": p["sides"][1],
        "attention_chunk": p["chunk"],
        "scores": scores_of(p["kind"]),
    }


def scores_of(kind: tuple[bool, bool, bool]) -> c.Scores:
    """Softcap, slopes and sinks, where there are some."""
    softcap, alibi, sinks = kind
    return c.Scores(30.0 if softcap else 0.0, ANYWHERE if alibi else None, 0, ANYWHERE if sinks else None)


def without_scores(config: ForwardConfig) -> str:
    """The name of the kernel of the tables."""
    return replace(config, **dict.fromkeys(c_tables.SCORES, False)).name


def mask_of(p: dict[str, Any], seqlen_q: int, seqlen_k: int) -> MaskSpec:
    """That of sequences of one length, as Python has it."""
    q, k = (torch.empty(1, length, 1, 1, device="meta") for length in (seqlen_q, seqlen_k))
    return resolve_mask(q, k, p["causal"], window_size=tuple(p["sides"]), attention_chunk=p["chunk"])


def packed_mask_of(p: dict[str, Any], longest: list[int]) -> MaskSpec:
    return resolve_packed_mask(p["causal"], tuple(p["sides"]), p["chunk"], *longest)


def specs_of(p: dict[str, Any], *rows: tuple[int, ...]) -> list[TensorSpec]:
    """q, k and v with these sizes before the heads."""
    (heads, kv_heads), (head_dim, head_dim_v) = p["heads"], p["head_dims"]
    ends = (heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim_v)
    device, dtype = torch.device("meta"), TORCH_DTYPES[p["dtype"]]
    return [TensorSpec((*row, *end), (), dtype, device) for row, end in zip(rows, ends, strict=True)]


def cache_call(
    p: dict[str, Any], rows: tuple[int, int], pages: tuple[int, int, bool], e4m3: bool, leftpad: bool
) -> CacheCall:
    """A decoding step of ``rows`` (batch, seqlen_q); ``pages`` are their size, how many a sequence has, and whether
    there is a table."""
    softcap, alibi, sinks = p["kind"]
    (batch, seqlen_q), (page_size, count, has_table) = rows, pages
    (heads, kv_heads), (head_dim, head_dim_v) = p["heads"], p["head_dims"]
    dtype, meta = TORCH_DTYPES[p["dtype"]], {"device": "meta"}
    cache = {"dtype": torch.float8_e4m3fn if e4m3 else dtype, **meta}
    lengths = torch.empty(batch, dtype=torch.int32, **meta)
    table = torch.empty(batch, count, dtype=torch.int32, **meta) if has_table else None
    tensors = CacheTensors(
        torch.empty(batch, seqlen_q, heads, head_dim, dtype=dtype, **meta),
        torch.empty(batch * count, page_size, kv_heads, head_dim, **cache),
        torch.empty(batch * count, page_size, kv_heads, head_dim_v, **cache),
        cache_seqlens=lengths,
        page_table=table,
        cache_leftpad=lengths if leftpad else None,
    )
    of_heads = torch.empty(heads, **meta)
    extras = CacheExtras(sinks=of_heads if sinks else None, alibi_slopes=of_heads if alibi else None)
    options = CacheOptions(causal=p["causal"], window_size=tuple(p["sides"]), attention_chunk=p["chunk"])
    return read_call(tensors, extras, options._replace(softcap=30.0 if softcap else 0.0)).call


def draw_fp8_problem(rng: random.Random) -> dict[str, Any]:
    without = {"head_dims": rng.choice(NATIVE_HEAD_DIMS), "kind": (False, False, False)}
    return draw_problem(rng) | without
