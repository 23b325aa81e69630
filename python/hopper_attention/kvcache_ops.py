"""The operators of a key/value cache: ``hopper_attention::attend_kvcache``, and ``::append_kvcache`` with new tokens.

The first is functional, the second changes the two caches, ``::append_kvcache_and_scales`` their scales too. Shapes on
fake tensors; no tensor is read to know one.
"""
# No `from __future__ import annotations`: custom_op reads the annotations of its function.

import torch
from torch import Tensor

from hopper_attention.checks import FP8_DTYPE, FP8_OUT_DTYPE
from hopper_attention.kvcache_checks import CacheCall, CacheTensors, read_shape
from hopper_attention.launch.kvcache import serve
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import Scores


def _append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    qv: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    rotary_seqlens: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    scheduler_metadata: Tensor | None,
    longest: list[int],
    softmax_scale: float,
    causal: bool,
    sides: list[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rotary_interleaved: bool,
    rotates_each_query: bool,
    num_splits: int,
    pack_gqa: bool | None,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool,
    hadamard: bool,
) -> tuple[Tensor, Tensor]:
    """Attention with new tokens, which are written into the caches first: out and lse, as ``launch.kvcache.serve``.

    ``longest`` are the most queries and the most keys of a sequence, ``sides`` those of a ``MaskSpec``.
    """
    given = CacheTensors(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        rotary_seqlens,
        q_descale,
        k_descale,
        v_descale,
        scheduler_metadata,
    )
    left, right, chunk = sides
    scores = Scores.of(softcap, alibi_slopes, sinks)
    call = CacheCall(
        read_shape(given.specs, longest[0], longest[1]),
        MaskSpec(causal, left, right, chunk),
        softmax_scale,
        scores.kind,
        rotary_interleaved,
        rotates_each_query,
        num_splits,
        pack_gqa,
        backend,
        sm_margin,
        wants_lse,
        hadamard,
    )
    return serve(call, given, scores)


def _fake_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    qv: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    rotary_seqlens: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    scheduler_metadata: Tensor | None,
    longest: list[int],
    softmax_scale: float,
    causal: bool,
    sides: list[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rotary_interleaved: bool,
    rotates_each_query: bool,
    num_splits: int,
    pack_gqa: bool | None,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool,
    hadamard: bool,
) -> tuple[Tensor, Tensor]:
    return _fake_results(q, v_cache, wants_lse)


CACHES = "k_cache", "v_cache"
append_kvcache = torch.library.custom_op("hopper_attention::append_kvcache", _append, mutates_args=CACHES)
append_kvcache.register_fake(_fake_append)

append_kvcache_and_scales = torch.library.custom_op(
    "hopper_attention::append_kvcache_and_scales", _append, mutates_args=(*CACHES, "k_descale", "v_descale")
)
"""The same with scales by token, of which new tokens bring their own."""
append_kvcache_and_scales.register_fake(_fake_append)


@torch.library.custom_op("hopper_attention::attend_kvcache", mutates_args=())
def attend_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    scheduler_metadata: Tensor | None,
    longest: list[int],
    softmax_scale: float,
    causal: bool,
    sides: list[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    num_splits: int,
    pack_gqa: bool | None,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool,
    hadamard: bool,
) -> tuple[Tensor, Tensor]:
    """``append_kvcache`` without new tokens."""
    given = CacheTensors(
        q,
        k_cache,
        v_cache,
        qv=qv,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        scheduler_metadata=scheduler_metadata,
    )
    left, right, chunk = sides
    scores = Scores.of(softcap, alibi_slopes, sinks)
    call = CacheCall(
        read_shape(given.specs, longest[0], longest[1]),
        MaskSpec(causal, left, right, chunk),
        softmax_scale,
        scores.kind,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        backend=backend,
        sm_margin=sm_margin,
        wants_lse=wants_lse,
        hadamard=hadamard,
    )
    return serve(call, given, scores)


@attend_kvcache.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qv: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    scheduler_metadata: Tensor | None,
    longest: list[int],
    softmax_scale: float,
    causal: bool,
    sides: list[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    num_splits: int,
    pack_gqa: bool | None,
    backend: str | None,
    sm_margin: int,
    wants_lse: bool,
    hadamard: bool,
) -> tuple[Tensor, Tensor]:
    return _fake_results(q, v_cache, wants_lse)


def call_operator(call: CacheCall, tensors: CacheTensors, scores: Scores) -> tuple[Tensor, Tensor]:
    """``serve`` by way of torch's dispatcher."""
    t, shape = tensors, call.shape
    longest = [shape.seqlen_q, shape.seqlen_k]
    common = longest, call.softmax_scale, call.mask.causal, list(call.mask.sides), *scores.changes
    last = call.num_splits, call.pack_gqa, call.backend, call.sm_margin, call.wants_lse, call.hadamard
    if shape.has_new:
        rotary = call.rotary_interleaved, call.rotates_each_query
        operator = append_kvcache_and_scales if call.writes_scales else append_kvcache
        return operator(*t, *common, *rotary, *last)
    tables = t.cache_seqlens, t.cache_batch_idx, t.cache_leftpad, t.page_table, t.cu_seqlens_q
    descales = t.q_descale, t.k_descale, t.v_descale, t.scheduler_metadata
    return attend_kvcache(t.q, t.k_cache, t.v_cache, t.qv, *tables, *descales, *common, *last)


def _fake_results(q: Tensor, v_cache: Tensor, wants_lse: bool) -> tuple[Tensor, Tensor]:
    out_dtype = FP8_OUT_DTYPE if q.dtype == FP8_DTYPE else q.dtype
    out = q.new_empty((*q.shape[:-1], v_cache.shape[3]), dtype=out_dtype)
    *batch, rows, heads, _ = q.shape
    return out, q.new_empty((*batch, heads, rows) if wants_lse else (0,), dtype=torch.float32)
