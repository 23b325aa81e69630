"""Attention on a key/value cache: FlashAttention-3's functions, and a check of what a cache holds.

Merging of partial results is in ``combine``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, overload

from torch import Tensor

from hopper_attention import cache_again, features
from hopper_attention.api import Window
from hopper_attention.cache_again import CacheGiven
from hopper_attention.checks import FULL_WINDOW, Result
from hopper_attention.kvcache_again import decode_again, remember
from hopper_attention.kvcache_call import CacheExtras, read_call
from hopper_attention.kvcache_checks import CacheOptions, CacheTensors, check_lists
from hopper_attention.kvcache_ops import call_operator
from hopper_attention.launch.kvcache import serve_whole


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    qv: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ...,
    page_table: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    rotary_seqlens: Tensor | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    rotary_interleaved: bool = ...,
    scheduler_metadata: Tensor | None = ...,
    num_splits: int = ...,
    pack_gqa: bool | None = ...,
    sm_margin: int = ...,
    return_softmax_lse: Literal[False] = ...,
    *,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    out: Tensor | None = ...,
    hadamard: bool | int = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    qv: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ...,
    page_table: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    rotary_seqlens: Tensor | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    rotary_interleaved: bool = ...,
    scheduler_metadata: Tensor | None = ...,
    num_splits: int = ...,
    pack_gqa: bool | None = ...,
    sm_margin: int = ...,
    *,
    return_softmax_lse: Literal[True],
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    out: Tensor | None = ...,
    hadamard: bool | int = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    qv: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ...,
    page_table: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    rotary_seqlens: Tensor | None = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    rotary_interleaved: bool = ...,
    scheduler_metadata: Tensor | None = ...,
    num_splits: int = ...,
    pack_gqa: bool | None = ...,
    sm_margin: int = ...,
    return_softmax_lse: bool = ...,
    *,
    sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ...,
    out: Tensor | None = ...,
    hadamard: bool | int = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    out: Tensor | None = None,
    hadamard: bool | int = False,
    backend: str | None = None,
) -> Result:
    """Attention of new queries on keys and values in a cache, to which new ones are added first.

    Sequence b has the first cache_seqlens[b] rows of its place in the cache, and with ``k`` and ``v`` the new tokens
    behind them, which the call writes there. All other rows of the cache are never used, whatever they hold. Nothing is
    read on the host but by the reference, so a CUDA graph takes the lengths, tables and indices that the tensors hold
    when it is replayed. What is out of range in them does not lead out of the cache: no such key is written, and
    lengths end where the cache does; :func:`hopper_attention.kvcache.check_cache` finds it. There is no gradient.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with ``cu_seqlens_q`` (total_q, heads, head_dim); float16, bfloat16
            or float8_e4m3fn; head_dim is a multiple of 8, at most 256.
        k_cache: (batch_cache, seqlen_cache, kv_heads, head_dim), or with ``page_table`` (num_pages, page_size,
            kv_heads, head_dim) with pages of any size; the dtype of q, or float8_e4m3fn; the last stride is 1.
        v_cache: likewise, of head_dim_v columns, at most 512.
        k, v: (batch, seqlen_new, kv_heads, head_dim or head_dim_v), or with ``cu_seqlens_k_new`` (total_new, ...): new
            tokens, written into the caches from row cache_seqlens[b] on. Of q's dtype or the cache's; 16-bit tokens go
            into a cache of e4m3 divided by their descale; those of e4m3 as they are, their scales by token being yours.
        qv: a second query, as for ``flash_attn_func``, in the layout of q; 16 bits.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), a row for each position; float16, bfloat16, float32 or
            q's dtype; with new tokens only. rotary_dim is a multiple of 16, at most head_dim. New token i is rotated
            for position cache_seqlens[b] + i, and so is query i where the call is causal or has a window or a chunk;
            else every query for position cache_seqlens[b].
        cache_seqlens: an int, or int32 (batch,): keys in the cache, without new ones, from row 0 on; all by default.
        cache_batch_idx: int32 (batch,): which sequence of the cache, or row of the page table, is sequence b; b itself
            by default. Sequences that get new tokens are distinct.
        cache_leftpad: int32 (batch,): the first row that is a key; it counts in cache_seqlens. Windows and chunks count
            from it; rows that are written and positions of rotary embedding do not.
        page_table: int32 (batch, pages): the page that has rows page_size i to page_size (i + 1) of a sequence. Entries
            behind its length may be anything.
        cu_seqlens_q: int32 (batch + 1,): where sequences begin in a packed q.
        max_seqlen_q: the most queries of a sequence of a packed q; an upper bound will do, and total_q is the default.
        cu_seqlens_k_new: int32 (batch + 1,): the same for k and v.
        rotary_seqlens: int32 (batch,): positions of rotary embedding begin here, not at cache_seqlens.
        q_descale, k_descale, v_descale: float32 (batch, kv_heads) factors of an e4m3 q and of e4m3 caches; ones by
            default. Those of the caches, both, may instead be by token: (num_pages, page_size, kv_heads), without pages
            (batch_cache, seqlen_cache, kv_heads), a factor for each row and head, to which the call adds those of new
            16-bit tokens, their largest number / 448; or by page: (num_pages, 1, kv_heads), or (batch_cache, 1,
            kv_heads), which a call only reads: what is too large for the scale of a page becomes 448 of it.
        softmax_scale: factor of the scores, from 1e-37 to 1e5; head_dim**-0.5 by default, (head_dim + head_dim_v)**-0.5
            with ``qv``.
        causal, window_size, attention_chunk, softcap, sinks, alibi_slopes: as for ``flash_attn_func``; the last query
            stands at the last key, new ones included.
        rotary_interleaved: rotate columns 2i and 2i + 1; else i and i + rotary_dim / 2.
        scheduler_metadata: what :func:`hopper_attention.get_scheduler_metadata` gave for the calls of a step; it saves
            host time. That of another make does nothing.
        num_splits, sm_margin: hints, which change no result but the order of sums.
        pack_gqa: likewise: True for the kernel that has the query heads of a K/V head as rows of a tile wherever it
            can serve, False for the one that has not wherever it reads the cache in place, None to have it chosen.
        return_softmax_lse: also return the LSE. For an exact one queries of e4m3 are multiplied in 16 bits, so that the
            output has other last bits.
        out: where the output goes; of its shape and dtype, the last stride 1.
        hadamard: keys in the cache are rotated by fixed signs and a Hadamard matrix, which spreads outliers over
            head_dim, so that fewer digits are lost in e4m3. New keys are, behind rotary embedding, and queries too, so
            that no score changes. It is a property of a cache: the same in every call.
        backend: "hopper", "ampere", "torch", "reference", or None to have one chosen.

    Returns:
        out, in the layout of q with head_dim_v columns and its dtype, bfloat16 for a q of e4m3. With
        ``return_softmax_lse``, (out, lse): the natural log of the sum of exp(scores), float32 (batch, heads, seqlen_q),
        or (heads, total_q) of a packed q. A query that sees no key has 0 and -inf, or its sink.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: a feature is not implemented, such as gradients; the message says what to use instead.
    """
    options = (
        max_seqlen_q,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        rotary_interleaved,
        num_splits,
        pack_gqa,
        sm_margin,
        return_softmax_lse,
        backend,
        hadamard,
    )
    if sinks is not None:
        sinks = features.sinks_in_float32(q, sinks)
    decoded = on_cache = None
    if (
        k is v is qv is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is cu_seqlens_k_new
        is rotary_seqlens is alibi_slopes is out is None
    ):  # fmt: skip
        caches, lists = (q, k_cache, v_cache), (cache_seqlens, page_table, cu_seqlens_q)
        found = None
        if q_descale is sinks is None:
            decoded = (*caches, *lists, k_descale, v_descale, scheduler_metadata)
            found = decode_again(decoded, options)
        if found is None and scheduler_metadata is None:
            tables = page_table, cache_seqlens, cu_seqlens_q
            on_cache = CacheGiven(*caches, *tables, q_descale, k_descale, v_descale, sinks)
            found = cache_again.attend(on_cache, options)
        if found is not None:
            return found
    given = CacheTensors(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv,
        rotary_cos,
        rotary_sin,
        cache_seqlens,  # type: ignore[arg-type]  # An int becomes a tensor once it is checked.
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
    checked = read_call(given, CacheExtras(sinks, alibi_slopes, out), CacheOptions(*options))
    call, tensors, scores, is_plain = checked
    if is_plain:
        result, lse = serve_whole(call, tensors, scores, out)
        if decoded is not None:
            remember(decoded, options, checked)
        if on_cache is not None:
            cache_again.remember(on_cache, options, checked)
    else:
        result, lse = call_operator(call, tensors, scores)
        if out is not None:
            result = out.copy_(result)
    return (result, lse) if call.wants_lse else result


def check_cache(
    k_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    seqlen_new: int = 0,
    cu_seqlens_k_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
) -> None:
    """Raise unless the numbers that the tensors hold lie in the cache: for debugging, as it waits for the GPU.

    The call itself cannot see them. It writes no key outside of the cache and reads none, whatever they are.

    Args:
        k_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_k_new: those of
            ``flash_attn_with_kvcache``, before the call.
        seqlen_new: new tokens of each sequence, where they are not packed.

    Raises:
        TypeError: an argument is no tensor, or one of another dtype than the call takes.
        ValueError: its shape is not what the call takes; a sequence is longer than its place in the cache, with its new
            tokens or without; it ends before its leftpad; an index or a page number is none; or two sequences write to
            the same row.
    """
    lists = {"cu_seqlens_k_new": cu_seqlens_k_new, "cache_batch_idx": cache_batch_idx}
    lists |= {"cache_leftpad": cache_leftpad, "page_table": page_table}
    given = {name: x for name, x in lists.items() if x is not None}
    check_lists(k_cache, seqlen_new, {"cache_seqlens": cache_seqlens, **given})
    lengths = cache_seqlens.tolist()
    batch = len(lengths)
    counts = [seqlen_new] * batch
    if cu_seqlens_k_new is not None:
        starts = cu_seqlens_k_new.tolist()
        counts = [stop - start for start, stop in pairwise(starts)]
        if starts[0] != 0 or min(counts, default=0) < 0:
            raise ValueError(
                f"cu_seqlens_k_new is {starts}, allowed: {batch + 1} numbers from 0 that do not fall"
            )
    entries = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
    pads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    pages, rows = k_cache.shape[:2]
    tables = [[page] for page in range(pages)] if page_table is None else page_table.tolist()
    capacity = rows if page_table is None else rows * page_table.shape[1]
    if cache_batch_idx is None and len(tables) < batch:
        whose = "k_cache" if page_table is None else "page_table"
        raise ValueError(
            f"{whose} has {len(tables)} sequences, its first size, allowed without cache_batch_idx: {batch} or "
            "more, those of cache_seqlens"
        )
    written: dict[tuple[int, int], int] = {}
    for b, (length, new, entry, pad) in enumerate(zip(lengths, counts, entries, pads, strict=True)):
        if not 0 <= length <= capacity - new:
            raise ValueError(
                f"cache_seqlens[{b}] is {length}, allowed with {new} new tokens: 0 to {capacity - new}, as the cache "
                f"has room for {capacity} keys a sequence"
            )
        if not 0 <= pad <= length + new:
            raise ValueError(
                f"cache_leftpad[{b}] is {pad}, allowed: 0 to {length + new}, the keys of the sequence"
            )
        if not 0 <= entry < len(tables):
            raise ValueError(f"cache_batch_idx[{b}] is {entry}, allowed: 0 to {len(tables) - 1}")
        first, stop = (pad // rows, -(-(length + new) // rows)) if rows else (0, 0)
        _check_pages(b, tables[entry], first, stop, pages)
        for row in range(length, length + new):
            place = tables[entry][row // rows], row % rows
            other = written.setdefault(place, b)
            if other != b:
                raise ValueError(
                    f"sequences {other} and {b} both write row {place[1]} of page {place[0]}, allowed: different rows"
                )


def _check_pages(b: int, table: list[int], first: int, stop: int, pages: int) -> None:
    """Raise unless the pages of a sequence that have keys are pages of the cache."""
    for i in range(first, stop):
        if not 0 <= table[i] < pages:
            raise ValueError(
                f"page_table has {table[i]} as page {i} of sequence {b}, allowed: 0 to {pages - 1}"
            )
