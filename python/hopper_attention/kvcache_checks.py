"""What a call on a key/value cache is, and the checks of it, before any launch.

Sizes, strides, dtypes and devices are read, never data: page numbers and lengths on the device are for those who read
and write the cache, and for ``hopper_attention.kvcache.check_cache``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.append.config import BY_SEQUENCE, BY_TOKEN
from hopper_attention import checks
from hopper_attention.checks import FP8_DTYPE, FP8_OUT_DTYPE, FULL_WINDOW, HALF_DTYPES, TensorSpec
from hopper_attention.kvcache_scales import check_descales
from hopper_attention.lengths import check_max_seqlen
from hopper_attention.masks import MaskSpec
from hopper_attention.qv import check_qv
from hopper_attention.scores import ScoreKind

ROTARY_STEP = 16
"""Columns that rotary embedding takes are a multiple of it, as in FlashAttention-3."""

ROTARY_DTYPES = (*HALF_DTYPES, torch.float32)

Specs = tuple[TensorSpec | None, ...]


class CacheTensors(NamedTuple):
    """Those of a call, by FlashAttention-3's names, in its order; None for what is not given."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    qv: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    scheduler_metadata: Tensor | None = None

    @property
    def specs(self) -> Specs:
        return tuple(None if x is None else TensorSpec.of(x) for x in self)


NAMES = CacheTensors._fields


class CacheOptions(NamedTuple):
    """Arguments of ``flash_attn_with_kvcache`` that are no tensors, as they were given."""

    max_seqlen_q: Any = None
    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = FULL_WINDOW
    attention_chunk: Any = 0
    softcap: Any = 0.0
    rotary_interleaved: Any = True
    num_splits: Any = 0
    pack_gqa: Any = None
    sm_margin: Any = 0
    return_softmax_lse: Any = False
    backend: Any = None
    hadamard: Any = False


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a call and what was given, read off its tensors.

    Attributes:
        dtype, cache_dtype: of q, and of both caches: q's, or e4m3.
        device: of all tensors.
        caches: shape and strides of k_cache and v_cache.
        batch: sequences.
        total_q: rows of q, of all sequences.
        seqlen_q: no sequence has more queries; all have so many where q is not packed.
        heads, kv_heads, head_dim, head_dim_v: of q and the caches.
        pages: first size of the caches: sequences, or pages where there is a page table.
        page_size: rows of a page; 0 without a page table.
        capacity: rows that a sequence can have in the cache.
        seqlen_k: no sequence has more keys, new ones included, of those that can be read.
        total_new: new tokens, of all sequences; 0 for none.
        rotary_dim: columns that are rotated; 0 for none.
        is_packed_q, is_packed_new: whether q, and k and v, are (total, heads, columns).
        has_new, has_lengths, has_batch_idx, has_leftpad, has_qv: whether k and v, cache_seqlens, cache_batch_idx,
            cache_leftpad and qv are given.
        new_dtype: of k and v, or None.
        scales: what shares a scale of a cache of e4m3, of ``kvcache_scales``.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    caches: tuple[TensorSpec, TensorSpec]
    batch: int
    total_q: int
    seqlen_q: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    pages: int
    page_size: int
    capacity: int
    seqlen_k: int
    total_new: int
    rotary_dim: int
    is_packed_q: bool
    is_packed_new: bool
    has_new: bool
    has_lengths: bool
    has_batch_idx: bool
    has_leftpad: bool
    has_qv: bool
    new_dtype: torch.dtype | None = None
    scales: str = BY_SEQUENCE

    @property
    def is_paged(self) -> bool:
        return self.page_size > 0

    @property
    def has_rotary(self) -> bool:
        return self.rotary_dim > 0

    @property
    def is_fp8_cache(self) -> bool:
        return self.cache_dtype == FP8_DTYPE

    @property
    def has_scales_of_rows(self) -> bool:
        """Whether descales are (pages, rows or 1, kv_heads)."""
        return self.scales != BY_SEQUENCE

    @property
    def out_dtype(self) -> torch.dtype:
        """That of q, or bfloat16 for q of e4m3, as in FlashAttention-3."""
        return FP8_OUT_DTYPE if self.dtype == FP8_DTYPE else self.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.is_packed_q:
            return self.total_q, self.heads, self.head_dim_v
        return self.batch, self.seqlen_q, self.heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.is_packed_q:
            return self.heads, self.total_q
        return self.batch, self.heads, self.seqlen_q

    @property
    def seqlen_new(self) -> int:
        """New tokens of each sequence; 0 where they are packed, as they may differ."""
        return 0 if self.is_packed_new else self.total_new // max(self.batch, 1)

    @property
    def rows_a_kv_head(self) -> int:
        """Query rows of a sequence that one K/V head serves: its query heads times the queries, at most."""
        return self.seqlen_q * (self.heads // self.kv_heads)

    @property
    def has_keys(self) -> bool:
        return 0 not in (self.batch, self.pages, self.capacity, self.seqlen_k)

    @property
    def has_queries(self) -> bool:
        return 0 not in (self.total_q, self.heads)


@dataclass(frozen=True)
class CacheCall:
    """A checked call: all that it asks for beside its tensors.

    Attributes:
        mask, scores: which keys a query sees, and what is done to scores; the latter's values come with the tensors.
        softmax_scale: of Q K^T, and of QV V^T.
        rotary_interleaved: pairs are columns 2i and 2i + 1, else i and i + rotary_dim / 2.
        rotates_each_query: query i is rotated for position + i, else every query for position, as where a query sees
            all keys.
        num_splits, pack_gqa: hints; 0 and None leave it to us.
        backend, sm_margin: as for ``flash_attn_func``.
        wants_lse: whether the LSE is returned.
        hadamard: whether keys in the cache are rotated by signs and a Hadamard matrix, behind rotary embedding, so that
            new ones and queries are to be.
        length_is_int: whether cache_seqlens is an int, that of all sequences.
    """

    shape: CacheShape
    mask: MaskSpec
    softmax_scale: float
    scores: ScoreKind
    rotary_interleaved: bool = True
    rotates_each_query: bool = False
    num_splits: int = 0
    pack_gqa: bool | None = None
    backend: str | None = None
    sm_margin: int = 0
    wants_lse: bool = False
    hadamard: bool = False
    length_is_int: bool = False

    @property
    def has_one_length(self) -> bool:
        """Whether the host knows that all sequences have as many keys as each other."""
        shape = self.shape
        if shape.batch == 1:
            return True
        is_known = self.length_is_int or not shape.has_lengths
        return is_known and not shape.has_leftpad and not shape.is_packed_new

    @property
    def writes_scales(self) -> bool:
        """Whether new tokens bring scales of their own, which are written beside them."""
        shape = self.shape
        return shape.has_new and shape.scales == BY_TOKEN and shape.new_dtype != FP8_DTYPE

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of what calls differ in, and no more: calls that are alike are one object, mostly, as they are remembered."""
        shape = self.shape
        sizes = shape.total_q, shape.capacity, shape.seqlen_k, shape.total_new, shape.page_size, shape.pages
        return hash((sizes, self.softmax_scale, self.wants_lse))


def read_shape(specs: Specs, max_seqlen_q: int, max_seqlen_k: int) -> CacheShape:
    """The shape of a call with tensors like these, checked; ``specs`` are ``CacheTensors.specs``.

    Args:
        max_seqlen_q: no sequence has more queries; for a packed q.
        max_seqlen_k: no sequence has more keys, new ones included; -1 for the capacity of the cache.

    Raises:
        ValueError, TypeError: tensors that do not make a call; the message names one, what it was, what is allowed.
        NotImplementedError: a feature is not implemented.
    """
    named = {name: spec for name, spec in zip(NAMES, specs, strict=True) if spec is not None}
    shape = _of_q_and_cache(named, max_seqlen_q)
    for name, spec in named.items():
        checks.check_device(name, spec.device, shape.device)
    shape = _with_tables(shape, named)
    shape = _with_new_tokens(shape, named)
    shape = _with_rotary(shape, named)
    shape = replace(shape, scales=check_descales(shape, named))
    if "scheduler_metadata" in named:
        wanted = "one dimension, what get_scheduler_metadata gave"
        _check_vector("scheduler_metadata", named["scheduler_metadata"], wanted)
    if "qv" in named:
        check_qv(named["q"], named["v_cache"], named["qv"])
    most = shape.capacity if max_seqlen_k < 0 else min(shape.capacity, max_seqlen_k)
    return replace(shape, seqlen_k=most, has_qv="qv" in named)


def _of_q_and_cache(named: dict[str, TensorSpec], max_seqlen_q: int) -> CacheShape:
    q, k, v = named["q"], named["k_cache"], named["v_cache"]
    is_packed = "cu_seqlens_q" in named
    wanted = "(total_q, heads, head_dim) with cu_seqlens_q" if is_packed else checks.DIMENSIONS["q"]
    _check_dims("q", q, 3 if is_packed else 4, wanted)
    is_paged = "page_table" in named
    leading = "(num_pages, page_size" if is_paged else "(batch_cache, seqlen_cache"
    for name, spec, columns in (("k_cache", k, "head_dim"), ("v_cache", v, "head_dim_v")):
        _check_dims(name, spec, 4, f"{leading}, kv_heads, {columns})")
        if spec.shape[-1] > 1 and spec.strides[-1] != 1:
            raise ValueError(
                f"{name} has stride {spec.strides[-1]} in its last dimension, allowed: 1, as a cache is not copied"
            )
    _check_cache_dtypes(q.dtype, k.dtype, v.dtype)
    heads, head_dim = q.shape[-2:]
    pages, rows, kv_heads, _ = k.shape
    checks.check_head_dims(head_dim, v.shape[3])
    if k.shape[3] != head_dim:
        raise ValueError(
            f"k_cache has shape {tuple(k.shape)}, allowed with q of shape {tuple(q.shape)}: {leading}, kv_heads, "
            f"{head_dim})"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v_cache has shape {tuple(v.shape)}, allowed with k_cache of shape {tuple(k.shape)}: "
            f"({pages}, {rows}, {kv_heads}, head_dim_v)"
        )
    checks.check_heads(heads, kv_heads)
    batch = q.shape[0]
    if is_packed:
        _check_vector("cu_seqlens_q", named["cu_seqlens_q"], "(batch + 1,)")
        batch = named["cu_seqlens_q"].shape[0] - 1
        if batch < 0:
            raise ValueError("cu_seqlens_q is empty, allowed: the batch size and 1 more, 1 or more elements")
    return CacheShape(
        dtype=q.dtype,
        cache_dtype=k.dtype,
        device=q.device,
        caches=(k, v),
        batch=batch,
        total_q=q.shape[0] if is_packed else q.shape[0] * q.shape[1],
        seqlen_q=max_seqlen_q if is_packed else q.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        pages=pages,
        page_size=rows if is_paged else 0,
        capacity=rows,
        seqlen_k=rows,
        total_new=0,
        rotary_dim=0,
        is_packed_q=is_packed,
        is_packed_new="cu_seqlens_k_new" in named,
        has_new="k" in named,
        has_lengths="cache_seqlens" in named,
        has_batch_idx="cache_batch_idx" in named,
        has_leftpad="cache_leftpad" in named,
        has_qv=False,
    )


def _check_cache_dtypes(q: torch.dtype, k_cache: torch.dtype, v_cache: torch.dtype) -> None:
    checks.check_dtypes(q, q, q)
    allowed = (q,) if q == FP8_DTYPE else (q, FP8_DTYPE)
    if k_cache not in allowed:
        names = " or ".join(map(str, allowed))
        raise TypeError(f"k_cache has dtype {k_cache}, allowed with q of dtype {q}: {names}")
    if v_cache != k_cache:
        raise TypeError(f"v_cache has dtype {v_cache}, allowed: the dtype of k_cache, {k_cache}")


def _with_tables(shape: CacheShape, named: dict[str, TensorSpec]) -> CacheShape:
    """With the capacity that a page table gives; lengths, tables and indices are checked."""
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens"):
        if name in named:
            _check_vector(name, named[name], "(batch,)", shape.batch)
    rows, whose = shape.pages, "k_cache"
    if "page_table" in named:
        table = named["page_table"]
        _check_table(shape, table)
        rows, whose = table.shape[0], "page_table"
        shape = replace(shape, capacity=table.shape[1] * shape.page_size)
        if not shape.pages and shape.capacity:
            raise ValueError(
                f"k_cache has no pages, allowed with page_table of shape {tuple(table.shape)}: 1 or more"
            )
    if rows != shape.batch and not shape.has_batch_idx:
        raise ValueError(
            f"{whose} has {rows} sequences, its first size, allowed without cache_batch_idx: the batch size of q, "
            f"{shape.batch}"
        )
    if not rows and shape.batch:
        raise ValueError(f"{whose} has no sequences, allowed with {shape.batch} sequences of q: 1 or more")
    return shape


def _check_table(shape: CacheShape, table: TensorSpec) -> None:
    wanted = "(batch, pages), or with cache_batch_idx (batch_cache, pages)"
    _check_dims("page_table", table, 2, wanted)
    if table.dtype != torch.int32:
        raise TypeError(f"page_table has dtype {table.dtype}, allowed: torch.int32")
    if table.shape[1] > 1 and table.strides[1] != 1:
        raise ValueError(
            f"page_table has stride {table.strides[1]} in its last dimension, allowed: 1, as it is not copied"
        )
    if not shape.page_size:
        raise ValueError("k_cache has pages of 0 rows, allowed: a page_size of 1 or more")


def _with_new_tokens(shape: CacheShape, named: dict[str, TensorSpec]) -> CacheShape:
    if ("k" in named) != ("v" in named):
        given, absent = ("k", "v") if "k" in named else ("v", "k")
        raise ValueError(f"{given} is given without {absent}, allowed: both, or neither")
    if "k" not in named:
        if "cu_seqlens_k_new" in named:
            raise ValueError("cu_seqlens_k_new is given without k and v, allowed: with new tokens only")
        return shape
    if not shape.has_lengths:
        raise ValueError(
            "cache_seqlens is None, allowed with k and v: an int or int32 (batch,), where the new tokens begin"
        )
    k, v = named["k"], named["v"]
    leading = "total_new" if shape.is_packed_new else f"{shape.batch}, seqlen_new"
    wanted = f"({leading}, {shape.kv_heads}"
    _check_dims("k", k, 3 if shape.is_packed_new else 4, f"{wanted}, {shape.head_dim})")
    if k.shape[-2:] != (shape.kv_heads, shape.head_dim) or (
        not shape.is_packed_new and k.shape[0] != shape.batch
    ):
        raise ValueError(f"k has shape {tuple(k.shape)}, allowed: {wanted}, {shape.head_dim})")
    if v.shape != (*k.shape[:-1], shape.head_dim_v):
        raise ValueError(
            f"v has shape {tuple(v.shape)}, allowed with k of shape {tuple(k.shape)}: "
            f"{(*k.shape[:-1], shape.head_dim_v)}"
        )
    _check_new_dtypes(shape, k.dtype, v.dtype)
    if shape.is_packed_new:
        _check_vector("cu_seqlens_k_new", named["cu_seqlens_k_new"], "(batch + 1,)", shape.batch + 1)
        return replace(shape, total_new=k.shape[0], new_dtype=k.dtype)
    if k.shape[1] > shape.capacity:
        raise ValueError(
            f"k has {k.shape[1]} new tokens a sequence, allowed: up to the {shape.capacity} of the cache"
        )
    return replace(shape, total_new=k.shape[0] * k.shape[1], new_dtype=k.dtype)


def _check_new_dtypes(shape: CacheShape, k: torch.dtype, v: torch.dtype) -> None:
    allowed = dict.fromkeys((shape.dtype, shape.cache_dtype))
    if k not in allowed:
        names = " or ".join(map(str, allowed))
        raise TypeError(f"k has dtype {k}, allowed: the dtype of q or of k_cache, {names}")
    if v != k:
        raise TypeError(f"v has dtype {v}, allowed: the dtype of k, {k}")


def _with_rotary(shape: CacheShape, named: dict[str, TensorSpec]) -> CacheShape:
    if ("rotary_cos" in named) != ("rotary_sin" in named):
        given, absent = ("cos", "sin") if "rotary_cos" in named else ("sin", "cos")
        raise ValueError(f"rotary_{given} is given without rotary_{absent}, allowed: both, or neither")
    if "rotary_cos" not in named:
        return shape
    if not shape.has_new:
        raise ValueError("rotary_cos is given without k and v, allowed: with new tokens only")
    cos, sin = named["rotary_cos"], named["rotary_sin"]
    _check_dims("rotary_cos", cos, 2, "(seqlen_rotary, rotary_dim / 2)")
    if sin.shape != cos.shape:
        raise ValueError(
            f"rotary_sin has shape {tuple(sin.shape)}, allowed: that of rotary_cos, {tuple(cos.shape)}"
        )
    allowed = dict.fromkeys((*ROTARY_DTYPES, shape.dtype))
    for name, spec in (("rotary_cos", cos), ("rotary_sin", sin)):
        if spec.dtype not in allowed:
            names = ", ".join(map(str, allowed))
            raise TypeError(f"{name} has dtype {spec.dtype}, allowed: {names}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"rotary_sin has dtype {sin.dtype}, allowed: the dtype of rotary_cos, {cos.dtype}")
    rotary_dim = 2 * cos.shape[1]
    if not 0 < rotary_dim <= shape.head_dim or rotary_dim % ROTARY_STEP:
        raise ValueError(
            f"rotary_cos has {cos.shape[1]} columns, a rotary_dim of {rotary_dim}, allowed: multiples of {ROTARY_STEP} "
            f"up to the head_dim of q, {shape.head_dim}"
        )
    if not cos.shape[0]:
        raise ValueError("rotary_cos has no rows, allowed: one for each position, 1 or more")
    return replace(shape, rotary_dim=rotary_dim)


def _check_dims(name: str, spec: TensorSpec, dims: int, wanted: str) -> None:
    if len(spec.shape) != dims:
        raise ValueError(
            f"{name} has {len(spec.shape)} dimensions, shape {tuple(spec.shape)}, allowed: {dims}, {wanted}"
        )


def _check_vector(name: str, spec: TensorSpec, wanted: str, count: int | None = None) -> None:
    if spec.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {spec.dtype}, allowed: torch.int32")
    if len(spec.shape) != 1 or (count is not None and spec.shape[0] != count):
        numbers = "" if count is None else f", ({count},)"
        raise ValueError(f"{name} has shape {tuple(spec.shape)}, allowed: {wanted}{numbers}")
    checks.check_is_dense(name, spec)


def check_lists(k_cache: Any, seqlen_new: Any, lists: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless a call takes tensors of these kinds and shapes; ``cache_seqlens`` is given.

    Args:
        seqlen_new: new tokens of each sequence.
        lists: by name, those of ``flash_attn_with_kvcache``.
    """
    checks.check_are_tensors(k_cache=k_cache, **lists)
    specs = {name: TensorSpec.of(x) for name, x in lists.items()}
    _check_dims("k_cache", TensorSpec.of(k_cache), 4, "a cache of flash_attn_with_kvcache")
    _check_vector("cache_seqlens", specs["cache_seqlens"], "(batch,)")
    batch = specs["cache_seqlens"].shape[0]
    for name, spec in specs.items():
        if spec.device.type == "meta":
            raise ValueError(f"{name} is on meta, allowed: a device whose numbers can be read")
        if name == "page_table":
            _check_dims(name, spec, 2, "(batch, pages), or with cache_batch_idx (batch_cache, pages)")
            if spec.dtype != torch.int32:
                raise TypeError(f"{name} has dtype {spec.dtype}, allowed: torch.int32")
        elif name == "cu_seqlens_k_new":
            _check_vector(name, spec, "(batch + 1,)", batch + 1)
        else:
            _check_vector(name, spec, "(batch,)", batch)
    check_max_seqlen("seqlen_new", seqlen_new)


def check_no_gradient(tensors: tuple[Tensor | None, ...]) -> None:
    """Raise NotImplementedError where autograd would record the call."""
    if not torch.is_grad_enabled():
        return
    for x in tensors:
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                "a tensor requires a gradient: attention on a key/value cache has none, as caches are written in "
                "place; call it under torch.no_grad(), or use flash_attn_varlen_func, which is differentiable"
            )


def check_not_mapped(tensors: CacheTensors) -> None:
    """Raise NotImplementedError where torch.func.vmap is at work on a call that writes into the caches."""
    if tensors.k is None or not torch._C._are_functorch_transforms_active():
        return
    if any(torch._C._functorch.is_batchedtensor(x) for x in tensors if x is not None):
        raise NotImplementedError(
            "k and v are given under torch.func.vmap, which knows no rule for tensors that are written in place; make "
            "the mapped dimension a part of the batch, or add the tokens to the cache outside of vmap"
        )


def check_out(spec: TensorSpec, shape: CacheShape) -> None:
    """Raise unless ``out`` can hold the output of a call."""
    if spec.dtype != shape.out_dtype:
        raise TypeError(f"out has dtype {spec.dtype}, allowed with q of {shape.dtype}: {shape.out_dtype}")
    if tuple(spec.shape) != shape.out_shape:
        raise ValueError(f"out has shape {tuple(spec.shape)}, allowed: {shape.out_shape}")
    checks.check_device("out", spec.device, shape.device)
    if spec.shape[-1] > 1 and spec.strides[-1] != 1:
        raise ValueError(f"out has stride {spec.strides[-1]} in its last dimension, allowed: 1")
    checks.check_can_be_written("out", spec)


def check_can_be_rotated(shape: CacheShape) -> None:
    """Raise NotImplementedError for queries or new tokens of e4m3, which a Hadamard matrix takes out of their range."""
    for name, dtype in (("q", shape.dtype), ("k", shape.new_dtype)):
        if dtype == FP8_DTYPE:
            raise NotImplementedError(
                f"hadamard is True and {name} has dtype {dtype}, allowed: 16 bits, as numbers that are rotated may be "
                "too large for their scale"
            )


def check_length(cache_seqlens: int, shape: CacheShape) -> None:
    """Raise unless the cache has room for sequences of one length, which is given as an int, and for new tokens."""
    seqlen_new = shape.seqlen_new
    most = shape.capacity - seqlen_new
    if not 0 <= cache_seqlens <= most:
        beside = f", with {seqlen_new} new tokens" if seqlen_new else ""
        raise ValueError(
            f"cache_seqlens is {cache_seqlens}, allowed: 0 to {most}: the cache has room for {shape.capacity} keys a "
            f"sequence{beside}"
        )


def check_rotary_rows(cache_seqlens: int, rows: int, shape: CacheShape, rotates_each_query: bool) -> None:
    """Raise unless rotary_cos has all positions of sequences of one length, which is given as an int."""
    if shape.is_packed_new or shape.is_packed_q:
        return
    needed = cache_seqlens + max(shape.seqlen_new, shape.seqlen_q if rotates_each_query else 1)
    if rows < needed:
        raise ValueError(
            f"rotary_cos has {rows} rows, allowed with cache_seqlens {cache_seqlens}, {shape.seqlen_q} queries and "
            f"{shape.seqlen_new} new tokens: {needed} or more"
        )
