"""Runs attention on a key/value cache: new tokens are written, then one of the ways of ``kvcache_rules`` attends.

Nothing is read on the host, apart from what the reference reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.append.config import BY_PAGE, BY_TOKEN
from hopper_attention.backends import KERNELS, target_of
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.kvcache_checks import CacheCall, CacheShape, CacheTensors
from hopper_attention.kvcache_rotation import rotate_keys, rotate_queries_alike
from hopper_attention.kvcache_rules import choose_path
from hopper_attention.launch.append import append as append_by_kernel
from hopper_attention.launch.base import REMEMBERED_CALLS, count_ctas, index_of
from hopper_attention.launch.cache_copy import copy_in_16_bits
from hopper_attention.launch.cache_tiles import find_tiles
from hopper_attention.launch.decode import attend_by, find_decode, full_lengths, is_aligned, table_of
from hopper_attention.launch.paged_forward import paged_forward
from hopper_attention.launch.qv import QvInputs, run_packed_qv
from hopper_attention.launch.varlen import find_varlen_launch, run_by
from hopper_attention.lengths import Lengths, specs_of
from hopper_attention.reference.append import Rotation, rounded, scales_of, tokens_of
from hopper_attention.reference.kvcache import (
    CacheRows,
    Places,
    as_stored,
    dequantized,
    gather_rows,
    gather_scales,
    write_rows,
)
from hopper_attention.scores import NO_SCORES, Scores

Results = tuple[Tensor, Tensor]

Attend = Callable[[CacheCall, CacheTensors, Scores], Results]
"""(call, tensors, scores) -> (out, lse), of ``CacheShape.out_shape`` and ``.lse_shape``; lse may lack its elements
where it is not wanted.

New tokens are in the cache already: cache_seqlens, None for a full cache, has the keys of each sequence with these,
from the first row of the cache on, q is rotated, and k, v, cu_seqlens_k_new and what is for rotary embedding are None.
"""


def serve(
    call: CacheCall, tensors: CacheTensors, scores: Scores = NO_SCORES, out: Tensor | None = None
) -> Results:
    """Attention of a checked call: new tokens go into the caches, then every query attends.

    Args:
        scores: whose kind is that of ``call``.
        out: of ``CacheShape.out_shape``: where the output goes; None for a new tensor.

    Returns:
        out and lse (float32), of ``CacheShape.out_shape`` and ``.lse_shape``. Without ``CacheCall.wants_lse`` the lse
        has no elements.
    """
    result, lse = serve_whole(call, tensors, scores, out)
    # What a kernel leaves may be no tensor of torch.
    return result, lse if call.wants_lse else result.new_empty(0, dtype=torch.float32)


def serve_whole(
    call: CacheCall, tensors: CacheTensors, scores: Scores = NO_SCORES, out: Tensor | None = None
) -> Results:
    """``serve`` with whatever a kernel leaves as lse where none is wanted: an empty one takes a microsecond."""
    # Found before a cache is written: what no path can run leaves it as it was.
    way = find_way(call)
    if call.shape.has_new:
        _check_written_scales(call, tensors)
        tensors = append(call, tensors, way.backend)
    elif call.hadamard:
        tensors = tensors._replace(q=rotate_queries_alike(tensors.q))
    result, lse = PATHS[way.path](call, tensors, scores)
    return result if out is None else out.copy_(result), lse


def _check_written_scales(call: CacheCall, t: CacheTensors) -> None:
    """Raise ValueError where the scales of new values would take the place of those of new keys."""
    if not call.writes_scales:
        return
    of_k, of_v = _given(t.k_descale), _given(t.v_descale)
    is_one = of_k.numel() > 0 and of_k.data_ptr() == of_v.data_ptr()
    # Caches that are one have the same numbers, and so the same scales.
    if is_one and t.k_cache.data_ptr() != t.v_cache.data_ptr():
        raise ValueError(
            "v_descale is the memory of k_descale, allowed with new tokens, whose scales are written: another tensor"
        )


class Way(NamedTuple):
    """How a call is served: the name of a path, and the backend."""

    path: str
    backend: str


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_way(call: CacheCall) -> Way:
    """How a call is served.

    Raises:
        ValueError, NotImplementedError: the backend cannot run it, or ``sm_margin`` leaves it no multiprocessor.
    """
    device = call.shape.device
    chosen = choose_path(call, target_of(device))
    if chosen.backend.backend in KERNELS:
        count_ctas(index_of(device), call.sm_margin)
    return Way(chosen.rule.path, chosen.backend.backend)


def append(call: CacheCall, tensors: CacheTensors, backend: str) -> CacheTensors:
    """Write the new tokens, rotated, into the caches, and rotate q: what an ``Attend`` takes.

    Token i of sequence b goes to row cache_seqlens[b] + i, leftpad or not, and nowhere if the cache has no such row.
    """
    rotation = None
    if call.shape.has_rotary:
        tables = _given(tensors.rotary_cos), _given(tensors.rotary_sin)
        rotation = Rotation(*tables, call.rotary_interleaved, tensors.rotary_seqlens)
    lengths, q = _append(call, tensors, rotation, backend)
    return tensors._replace(
        q=q,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        rotary_seqlens=None,
        cu_seqlens_k_new=None,
        cache_seqlens=lengths,
    )


def _append(
    call: CacheCall, t: CacheTensors, rotation: Rotation | None, backend: str
) -> tuple[Tensor, Tensor]:
    """The lengths with new tokens, and q as it attends; by the kernel where there is one for this."""
    if backend not in KERNELS:
        return append_in_pytorch(call, t, rotation)
    k, v = _given(t.k), _given(t.v)
    try:
        lengths, rotated = append_by_kernel(
            k,
            v,
            t.k_cache,
            t.v_cache,
            _given(t.cache_seqlens),
            cu_seqlens_k_new=t.cu_seqlens_k_new,
            cache_batch_idx=t.cache_batch_idx,
            page_table=t.page_table,
            k_descale=t.k_descale,
            v_descale=t.v_descale,
            rotation=rotation,
            q=None if rotation is None else t.q,
            cu_seqlens_q=t.cu_seqlens_q,
            per_query_position=call.rotates_each_query,
            hadamard=call.hadamard,
        )
    except NotImplementedError:
        # Its way to say that it does not do this one.
        return append_in_pytorch(call, t, rotation)
    if rotated is None:
        rotated = rotate_queries_alike(t.q) if call.hadamard else t.q
    return lengths, rotated


def append_in_pytorch(
    call: CacheCall, tensors: CacheTensors, rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    """``launch.append.append`` of any call: int32 (batch,) lengths, within the cache, and q, rotated."""
    shape, begin = call.shape, _given(tensors.cache_seqlens).long()
    q, new = tensors.q, torch.full_like(begin, shape.seqlen_new)
    if tensors.cu_seqlens_k_new is not None:
        new = tensors.cu_seqlens_k_new.long().diff().clamp(min=0)
    if shape.batch:
        if rotation is not None:
            rows = _as_rows(q, shape.is_packed_q)
            sequence, number = tokens_of(q, tensors.cu_seqlens_q, shape.batch)
            sequence = sequence.clamp(max=shape.batch - 1)
            first = rotation.first(begin).long()[sequence]
            turned = rotation(rows, first + number if call.rotates_each_query else first)
            turned = rotate_keys(turned) if call.hadamard else turned
            q = rounded(turned, q.dtype).view(q.shape)
        elif call.hadamard:
            q = rotate_queries_alike(q)
        if shape.total_new and shape.capacity:
            _write(call, tensors, rotation, begin)
    return (begin + new).clamp(0, shape.capacity).int(), q


def _write(call: CacheCall, tensors: CacheTensors, rotation: Rotation | None, begin: Tensor) -> None:
    """The new tokens into the caches; ``begin`` are cache_seqlens."""
    shape = call.shape
    k, v = _given(tensors.k), _given(tensors.v)
    sequence, number = tokens_of(k, tensors.cu_seqlens_k_new, shape.batch)
    is_token = sequence < shape.batch
    sequence = sequence.clamp(max=shape.batch - 1)
    places = _rows_of(shape, tensors).locate(sequence, begin[sequence] + number)
    places = places._replace(is_inside=places.is_inside & is_token)
    # Tokens of the cache's own dtype are in its scale already.
    is_scaled = k.dtype == tensors.k_cache.dtype
    k, v = (_as_rows(x, shape.is_packed_new) for x in (k, v))
    if rotation is not None:
        k = rotation(k, rotation.first(begin).long()[sequence] + number)
    if call.hadamard:
        k = rotate_keys(k)
    for cache, values, descale in (
        (tensors.k_cache, k, tensors.k_descale),
        (tensors.v_cache, v, tensors.v_descale),
    ):
        of_tokens = None
        if not is_scaled and descale is not None:
            of_tokens = _scales_of_tokens(shape, values, descale, places, sequence)
        write_rows(cache, places, as_stored(values, cache.dtype, of_tokens))


def _scales_of_tokens(
    shape: CacheShape, values: Tensor, descale: Tensor, places: Places, sequence: Tensor
) -> Tensor:
    """(total, kv_heads), by which new tokens are divided. Those by token are their own, and written."""
    if shape.scales == BY_TOKEN:
        own = scales_of(values)
        write_rows(descale, places, own)
        return own
    return descale[places.page, 0] if shape.scales == BY_PAGE else descale[sequence]


def attend_in_general(call: CacheCall, tensors: CacheTensors, scores: Scores) -> Results:
    """By the kernels of sequences in one tensor, and on any device: an ``Attend`` for every call.

    Keys are copied, as many rows for each sequence as any can have, where they lie in pages, begin behind a leftpad,
    belong to a choice of the cache's sequences, or are e4m3. Rows of no key are never used, whatever they hold.
    """
    shape = call.shape
    q = _query(shape, tensors)
    k, v, room = _keys_and_values(call, tensors)
    steps = torch.arange(shape.batch + 1, dtype=torch.int32, device=shape.device)
    cu_seqlens_q = steps * shape.seqlen_q if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q
    used = _lengths_of_keys(shape, tensors).clamp(max=room).int()
    lengths = Lengths(cu_seqlens_q, steps * room, None, used, shape.seqlen_q, room)
    sides = call.mask.sides
    if tensors.qv is not None:
        inputs = QvInputs(q, k, v, _as_rows(tensors.qv, shape.is_packed_q))
        options = call.softmax_scale, call.mask.causal, call.backend, call.sm_margin
        out, lse = run_packed_qv(inputs, lengths, *options, sides, scores)
    else:
        specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
        window = call.mask.has_window, call.mask.attention_chunk > 0
        of_kind = call.mask.causal, window, call.backend, call.sm_margin, scores.kind
        # By the forward kernel, which ``explain_kvcache`` names for this way.
        launch = find_varlen_launch(specs, specs_of(lengths), *of_kind)
        out, lse = run_by(launch, (q, k, v), lengths, call.softmax_scale, call.wants_lse, sides, scores)
    return _as_returned(call, out, lse)


def _as_returned(call: CacheCall, out: Tensor, lse: Tensor) -> Results:
    """Results of packed sequences as an ``Attend`` has them."""
    shape = call.shape
    if call.wants_lse and not shape.is_packed_q:
        lse = lse.view(shape.heads, shape.batch, shape.seqlen_q).transpose(0, 1).contiguous()
    return out.view(shape.out_shape), lse


def attend_by_decode(call: CacheCall, tensors: CacheTensors, scores: Scores) -> Results:
    """By the decode kernel, or that of ``qv``, but for caches that begin where TMA cannot, which nothing but their
    address tells."""
    if not is_aligned(tensors):
        return attend_in_general(call, tensors, scores)
    return attend_by(find_decode(call), tensors, scores)


def attend_to_copy(call: CacheCall, tensors: CacheTensors, scores: Scores) -> Results:
    """By the same kernel on a copy of the keys in use in 16 bits, which is a cache of its own."""
    shape, t = call.shape, tensors
    lengths, first = full_lengths(shape) if t.cache_seqlens is None else t.cache_seqlens, None
    if t.cache_leftpad is not None:
        lengths, first = _lengths_of_keys(shape, t).int(), _first_rows(shape, t).int()
    copied = copy_in_16_bits(shape, t, lengths, first)
    if copied is None:
        return attend_in_general(call, tensors, scores)
    return paged_forward(
        _query(shape, t).view(t.q.shape),
        *copied,
        page_table=None,
        lengths=lengths,
        cu_seqlens_q=t.cu_seqlens_q,
        mask=call.mask,
        scores=scores,
        softmax_scale=call.softmax_scale,
        return_lse=call.wants_lse,
        sm_margin=call.sm_margin,
    )


def attend_to_pages(call: CacheCall, tensors: CacheTensors, scores: Scores) -> Results:
    """By the kernel of packed sequences that reads a cache where it lies, likewise."""
    shape, t = call.shape, tensors
    if not is_aligned(t):
        return attend_in_general(call, tensors, scores)
    lengths = t.cache_seqlens
    if t.cache_leftpad is not None:
        lengths = _lengths_of_keys(shape, tensors).int()
    return paged_forward(
        t.q,
        t.k_cache,
        t.v_cache,
        page_table=table_of(t),
        lengths=lengths,
        leftpad=t.cache_leftpad,
        cu_seqlens_q=t.cu_seqlens_q,
        mask=call.mask,
        scores=scores,
        softmax_scale=call.softmax_scale,
        return_lse=call.wants_lse,
        sm_margin=call.sm_margin,
    )


def attend_by_tiles(call: CacheCall, tensors: CacheTensors, scores: Scores) -> Results:
    """By the forward kernels with tiles of several heads, or keys in parts."""
    if not is_aligned(tensors):
        return attend_in_general(call, tensors, scores)
    if tensors.cache_leftpad is not None:
        tensors = tensors._replace(cache_seqlens=_lengths_of_keys(call.shape, tensors).int())
    out, lse = find_tiles(call)(call, tensors, scores)
    return _as_returned(call, out, lse)


PATHS: dict[str, Attend] = {
    "tiles": attend_by_tiles,
    "decode": attend_by_decode,
    "mla": attend_by_decode,
    "paged": attend_to_pages,
    "copied": attend_to_copy,
    "general": attend_in_general,
}
"""By the names of ``kvcache_rules.RULES``."""


def _query(shape: CacheShape, tensors: CacheTensors) -> Tensor:
    """q as (total_q, heads, head_dim) of 16 bits."""
    q = _as_rows(tensors.q, shape.is_packed_q)
    if q.dtype != FP8_DTYPE:
        return q
    if tensors.q_descale is None or not shape.batch:
        return q.to(shape.out_dtype)
    if not shape.is_packed_q:
        groups = tensors.q.unflatten(2, (shape.kv_heads, -1)).float()
        return (groups * tensors.q_descale[:, None, :, None, None]).to(shape.out_dtype).reshape(q.shape)
    descale = tensors.q_descale.repeat_interleave(shape.heads // shape.kv_heads, 1)
    sequence, _ = tokens_of(tensors.q, tensors.cu_seqlens_q, shape.batch)
    sequence = sequence.clamp(max=shape.batch - 1)
    return (q.float() * descale[sequence][:, :, None]).to(shape.out_dtype)


def _keys_and_values(call: CacheCall, tensors: CacheTensors) -> tuple[Tensor, Tensor, int]:
    """K and V of 16 bits as (batch * room, kv_heads, columns), and room, the rows that each sequence has there."""
    shape = call.shape
    if shape.is_fp8_cache and find_way(call).backend in KERNELS:
        first = None if tensors.cache_leftpad is None else _first_rows(shape, tensors).int()
        found = copy_in_16_bits(shape, tensors, _lengths_of_keys(shape, tensors).int(), first)
        if found is not None:
            return found[0].flatten(0, 1), found[1].flatten(0, 1), shape.seqlen_k
    caches = tensors.k_cache, tensors.v_cache
    if not shape.has_keys:
        k, v = (x.new_empty((0, *x.shape[2:]), dtype=shape.out_dtype) for x in caches)
        return k, v, 0
    room, first = shape.capacity, None
    rows = _rows_of(shape, tensors)
    if shape.is_paged or shape.has_batch_idx or shape.has_leftpad:
        room = shape.seqlen_k
        if tensors.cache_leftpad is not None:
            first = _first_rows(shape, tensors)
        k, v = (gather_rows(x, rows, shape.batch, room, first) for x in caches)
    else:
        k, v = caches
    if shape.is_fp8_cache:
        room = shape.seqlen_k
        descales: list[Tensor | None] = [tensors.k_descale, tensors.v_descale]
        if shape.has_scales_of_rows:
            descales = [gather_scales(_given(x), rows, shape.batch, room, first) for x in descales]
        k, v = (
            dequantized(x[:, :room], descale, shape.out_dtype)
            for x, descale in zip((k, v), descales, strict=True)
        )
    return k.flatten(0, 1), v.flatten(0, 1), room


def _lengths_of_keys(shape: CacheShape, tensors: CacheTensors) -> Tensor:
    """int64 (batch,): keys of each sequence, from its leftpad on, that the cache has."""
    if tensors.cache_seqlens is None:
        lengths = torch.full((shape.batch,), shape.capacity, device=shape.device)
    else:
        lengths = tensors.cache_seqlens.long().clamp(0, shape.capacity)
    if tensors.cache_leftpad is not None:
        lengths = (lengths - _first_rows(shape, tensors)).clamp(min=0)
    return lengths


def _first_rows(shape: CacheShape, tensors: CacheTensors) -> Tensor:
    return _given(tensors.cache_leftpad).long().clamp(0, shape.capacity)


def _rows_of(shape: CacheShape, tensors: CacheTensors) -> CacheRows:
    page_size = shape.page_size or shape.capacity
    return CacheRows(shape.pages, page_size, shape.capacity, tensors.page_table, tensors.cache_batch_idx)


def _as_rows(x: Tensor, is_packed: bool) -> Tensor:
    """(batch, seqlen, ...) as (total, ...)."""
    return x if is_packed else x.flatten(0, 1)


def _given(x: Tensor | None) -> Tensor:
    """A tensor that the checks found to be there."""
    assert x is not None
    return x
