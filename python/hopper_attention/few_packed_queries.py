"""Packed calls of few queries, which the decode kernel may serve: K and V are a cache of one page then, in which each
sequence has a left pad, where its keys begin, and a length, where they end."""

from __future__ import annotations

from functools import lru_cache

import torch

from cute_kernels.problem import MAX_SEQLEN
from hopper_attention.checks import TensorSpec
from hopper_attention.few_queries import (
    NOT_FEW,
    FewQueries,
    contiguous_spec,
    fastest,
    longest_alike,
    with_room,
)
from hopper_attention.kvcache_checks import NAMES, CacheCall, read_shape
from hopper_attention.launch.base import REMEMBERED_CALLS, REMEMBERED_LAUNCHERS
from hopper_attention.masks import FULL_SIDES, NO_MASK, MaskSpec
from hopper_attention.packing_rules import MOST_QUERIES
from hopper_attention.scores import ScoreKind

Shapes = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of q and v, and the batch."""


def served_alike(longest_q: int, longest_k: int, total_k: int) -> tuple[int, int]:
    """The largest bounds of lengths that are served as these: powers of two of queries."""
    return 1 << (longest_q - 1).bit_length(), longest_alike(min(longest_k, total_k))


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_few_packed(
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    lengths: tuple[TensorSpec | None, ...],
    longest: tuple[int, int],
    mask: MaskSpec,
    scores: ScoreKind,
    sm_margin: int,
    *,
    in_e4m3: bool = False,
) -> FewQueries:
    """As ``few_queries.find_few``, of q, k and v of many sequences; ``lengths`` are those of ``specs_of``, ``longest``
    bounds of their lengths in q and in k."""
    (q, k, v), cu_seqlens_q, seqused_q = specs, lengths[0], lengths[2]
    if cu_seqlens_q is None or seqused_q is not None or longest[0] > MOST_QUERIES:
        return NOT_FEW
    if 0 in longest or not 0 < k.shape[0] <= MAX_SEQLEN:
        return NOT_FEW
    total_k, kv_heads, head_dim_v = v.shape
    shapes = q.shape, (longest_alike(total_k), kv_heads, head_dim_v), cu_seqlens_q.shape[0] - 1
    longest = served_alike(*longest, total_k)
    return _find_few_packed(shapes, longest, q.dtype, q.device, mask, scores, sm_margin, in_e4m3)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find_few_packed(
    shapes: Shapes,
    longest: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    mask: MaskSpec,
    scores: ScoreKind,
    sm_margin: int,
    in_e4m3: bool,
) -> FewQueries:
    """``find_few_packed`` of all keys that are served alike; ``longest`` are queries and keys of a sequence."""
    q_shape, v_shape, batch = shapes
    if scores.functions or scores.has_dropout or 0 in (*q_shape, *v_shape, batch, *longest):
        return NOT_FEW
    head_dim, total_k = q_shape[2], v_shape[0]
    k, v = (contiguous_spec((1, *v_shape[:2], columns), dtype, device) for columns in (head_dim, v_shape[2]))
    q = contiguous_spec((1, *q_shape), dtype, device)
    counts = {
        "cache_seqlens": batch,
        "cache_batch_idx": batch,
        "cache_leftpad": batch,
        "cu_seqlens_q": batch + 1,
    }
    specs = dict.fromkeys(NAMES) | {"q": q._replace(shape=q_shape, strides=q.strides[1:])}
    specs |= {"k_cache": k, "v_cache": v}
    specs |= {name: TensorSpec((n,), (1,), torch.int32, device) for name, n in counts.items()}
    shape = read_shape(tuple(specs.values()), min(longest[0], q_shape[0]), longest[1])
    # A single query is the last, and sees all keys under a causal mask.
    if longest[0] == 1 and mask.sides == FULL_SIDES:
        mask = NO_MASK
    call = CacheCall(
        shape, mask, head_dim**-0.5, scores, backend="hopper", sm_margin=sm_margin, wants_lse=True
    )
    return with_room(fastest(call, min(total_k / batch, shape.seqlen_k), in_e4m3), shape)
