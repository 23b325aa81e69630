"""Appends to a KV cache on a GPU, in one launch: new keys and values go in, rotated, and queries are rotated too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.append.config import (
    BY_PAGE,
    BY_SEQUENCE,
    BY_TOKEN,
    HALVES,
    INTERLEAVED,
    MAX_SPREAD,
    NONE,
    ROTARY_STEP,
    VECTOR,
    AppendConfig,
    validate_append_config,
)
from cute_kernels.problem import MAX_SEQLEN
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import Target, target_of, why_not_ampere
from hopper_attention.device_memory import make_apart, no_lengths, unit_scales
from hopper_attention.launch.base import REMEMBERED_CALLS, REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import contiguous_copy
from hopper_attention.reference.append import Rotation

MAX_PARTS = 65_535
"""What the second dimension of a CUDA grid can count."""

INSTEAD = "append in PyTorch: reference.append.append_to_cache"
VECTOR_BYTES = 16
"""What addresses are multiples of, at most."""


class Facts(NamedTuple):
    """What of a tensor decides on an append."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_addressable(self) -> bool:
        """Whether vectors of VECTOR elements lie at multiples of their size, from a first one that does."""
        return self.strides[-1] == 1 and not any(stride % VECTOR for stride in self.strides[:-1])


class AppendFacts(NamedTuple):
    """The same of all tensors of a call; ``q``, ``cos`` and ``sin`` are None without a rotation."""

    k: Facts
    v: Facts
    k_cache: Facts
    v_cache: Facts
    table_shape: tuple[int, ...] | None
    q: Facts | None
    cos: Facts | None
    sin: Facts | None
    is_interleaved: bool
    scales: str = BY_SEQUENCE
    hadamard: bool = False


RawFacts = tuple[Any, Any, Any]


def raw_facts(x: Tensor) -> RawFacts:
    """Those of ``Facts``; a plain tuple is made and hashed in half the time."""
    return x.shape, x.stride(), x.dtype


def append_facts(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None = None,
    rotation: Rotation | None = None,
    q: Tensor | None = None,
    k_descale: Tensor | None = None,
    hadamard: bool = False,
) -> AppendFacts:
    """Those of a call of ``append``."""
    return _named(
        *_raw_append_facts(k, v, k_cache, v_cache, page_table, rotation, q),
        _kind_of_scales(k, k_cache, k_descale),
        hadamard,
    )


def _kind_of_scales(k: Tensor, k_cache: Tensor, k_descale: Tensor | None) -> str:
    """What shares a scale by which tokens are divided. Tokens of e4m3 are not."""
    if k_descale is None or k_descale.dim() == 2 or k.dtype == k_cache.dtype:
        return BY_SEQUENCE
    return BY_TOKEN if k_descale.shape[1] == k_cache.shape[1] else BY_PAGE


def _raw_append_facts(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    rotation: Rotation | None,
    q: Tensor | None,
) -> tuple[Any, ...]:
    kv = raw_facts(k), raw_facts(v), raw_facts(k_cache), raw_facts(v_cache)
    table = None if page_table is None else page_table.shape
    if rotation is None:
        return *kv, table, None, None, None, False
    tables = raw_facts(rotation.cos), raw_facts(rotation.sin)
    return *kv, table, None if q is None else raw_facts(q), *tables, rotation.is_interleaved


def _named(*facts: Any) -> AppendFacts:
    named: list[Any] = [
        Facts(*x) if isinstance(x, tuple) and len(x) == len(Facts._fields) else x for x in facts
    ]
    return AppendFacts(*named)


def select_append_config(facts: AppendFacts, target: Target) -> AppendConfig:
    """The config of the kernel that does an append on a GPU that has kernels.

    Raises:
        ValueError, NotImplementedError: there is none.
    """
    rotary, of_rotary = NONE, ("", "")
    if facts.cos is not None:
        rotary = INTERLEAVED if facts.is_interleaved else HALVES
        # Without queries the kernel gets some without rows, of the dtype of K.
        of_rotary = _name(facts.cos.dtype), _name((facts.q or facts.k).dtype)
    config = AppendConfig(
        _arch_of(target),
        _name(facts.k.dtype),
        _name(facts.k_cache.dtype),
        rotary,
        *of_rotary,
        facts.scales,
        facts.hadamard,
    )
    validate_append_config(config)
    return config


def _arch_of(target: Target) -> str:
    major, minor = target.capability
    return ARCH_OF_CAPABILITY[major, minor]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def why_not_append(facts: AppendFacts, target: Target) -> str:
    """What keeps the kernel from doing an append on ``target``; empty if nothing does."""
    blocked = why_not_ampere(target)
    if blocked:
        return blocked
    try:
        select_append_config(facts, target)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return _why_not_of_layout(facts) or _why_too_large(facts)


def _why_not_of_layout(facts: AppendFacts) -> str:
    for name, cache in (("k_cache", facts.k_cache), ("v_cache", facts.v_cache)):
        if cache.shape[3] % VECTOR:
            return f"{name} has {cache.shape[3]} columns, and the kernel needs a multiple of {VECTOR}"
        if not cache.is_addressable:
            return (
                f"{name} has strides {tuple(cache.strides)}, and the kernel needs a last stride of 1 and the others in "
                f"multiples of {VECTOR} elements"
            )
    columns = facts.v_cache.shape[3]
    if facts.scales == BY_TOKEN and columns > MAX_SPREAD:
        return f"v_cache has {columns} columns, and the kernel finds scales by token of up to {MAX_SPREAD}"
    if facts.cos is None:
        return ""
    positions, half = facts.cos.shape
    head_dim = facts.k.shape[-1]
    if 2 * half % ROTARY_STEP or not 0 < 2 * half <= head_dim:
        return f"rotary_dim is {2 * half}, and the kernel needs a multiple of {ROTARY_STEP} up to head_dim, {head_dim}"
    return "" if positions else "rotary_cos has no rows, and the kernel needs one or more"


def _why_too_large(facts: AppendFacts) -> str:
    capacity = facts.k_cache.shape[1] * (1 if facts.table_shape is None else facts.table_shape[1])
    new = [x for x in (facts.k, facts.v, facts.q) if x is not None]
    rows = max(prod(x.shape[:-2]) for x in new)
    for name, number in (("keys of a sequence", capacity), ("new tokens or queries", rows)):
        if number > MAX_SEQLEN:
            return f"there may be {number} {name}, and the kernel counts at most {MAX_SEQLEN}"
    columns = sum(x.shape[-2] * x.shape[-1] for x in new)
    if columns > MAX_PARTS * VECTOR:
        return f"a token has {columns} numbers, and the kernel moves at most {MAX_PARTS * VECTOR}"
    return ""


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def known_target(device: torch.device) -> Target:
    """``target_of``, remembered."""
    return target_of(device)


@dataclass(frozen=True)
class AppendLauncher(Launcher):
    """An append of one kind, for all sizes."""

    config: AppendConfig
    kernel: Kernel

    def __call__(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """As ``append``."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(*tensors, **options)
        return self._launch(*tensors, **options)

    def _launch(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        *,
        cu_seqlens_k_new: Tensor | None,
        cache_batch_idx: Tensor | None,
        page_table: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        rotation: Rotation | None,
        q: Tensor | None,
        cu_seqlens_q: Tensor | None,
        per_query_position: bool,
    ) -> tuple[Tensor, Tensor | None]:
        device, batch = k.device, cache_seqlens.shape[0]
        lengths = torch.empty(batch, dtype=torch.int32, device=device)
        rotated = (
            None if q is None or rotation is None else torch.empty(q.shape, dtype=q.dtype, device=device)
        )
        if not batch:
            return lengths, None if rotated is None else rotated.zero_()
        self.kernel(
            _rows(k, cu_seqlens_k_new),
            _rows(v, cu_seqlens_k_new),
            k_cache,
            v_cache,
            _words(cache_seqlens, device),
            _words(cu_seqlens_k_new, device),
            _words(cache_batch_idx, device),
            _table(page_table, device),
            lengths,
            *self._descales(k, k_descale, v_descale, lengths.shape[0], k_cache.shape[1]),
            *self._rotary(k, rotation, q, rotated, cu_seqlens_q, per_query_position),
        )
        return lengths, rotated

    def _descales(
        self, k: Tensor, k_descale: Tensor | None, v_descale: Tensor | None, batch: int, page_size: int
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self.config.is_scaled:
            return None, None
        if k_descale is not None and v_descale is not None:
            if self.config.scales == BY_PAGE:
                return k_descale.expand(-1, page_size, -1), v_descale.expand(-1, page_size, -1)
            return k_descale, v_descale
        ones = unit_scales(batch, k.shape[-2], k.device)[:, :, 0]
        return ones if k_descale is None else k_descale, ones if v_descale is None else v_descale

    def _rotary(
        self,
        k: Tensor,
        rotation: Rotation | None,
        q: Tensor | None,
        rotated: Tensor | None,
        cu_seqlens_q: Tensor | None,
        per_query_position: bool,
    ) -> tuple[Any, ...]:
        """The last seven arguments of the kernel."""
        if rotation is None:
            return (None,) * 7
        tables = rotation.cos, rotation.sin
        positions = _words(rotation.first_positions, k.device)
        if q is None or rotated is None:
            none = no_queries(k.shape[-1], k.dtype, k.device)
            return *tables, positions, none, none, no_lengths(k.device), 0
        rows = _rows(q, cu_seqlens_q), rotated if cu_seqlens_q is None else rotated.unsqueeze(0)
        return *tables, positions, *rows, _words(cu_seqlens_q, k.device), int(per_query_position)


def _rows(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(batch, seqlen, heads, columns), one sequence where x is packed."""
    return x if cu_seqlens is None else x.unsqueeze(0)


def _words(x: Tensor | None, device: torch.device) -> Tensor:
    return no_lengths(device) if x is None else x.contiguous()


def _table(x: Tensor | None, device: torch.device) -> Tensor:
    if x is None:
        return no_table(device)
    return x if x.stride(1) == 1 else x.contiguous()


@lru_cache(maxsize=64)
def no_table(device: torch.device) -> Tensor:
    """int32 (0, 0), which tells the kernel that a cache has no pages."""
    return make_apart(lambda: torch.empty(0, 0, dtype=torch.int32, device=device))


@lru_cache(maxsize=REMEMBERED_CALLS)
def no_queries(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(0, 0, 0, head_dim)."""
    return make_apart(lambda: torch.empty(0, 0, 0, head_dim, dtype=dtype, device=device))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(config: AppendConfig, device: torch.device) -> AppendLauncher:
    """The launcher of a config; compiles or loads its kernel the first time."""
    return AppendLauncher(index_of(device), config, compile_cache.get_serving(config))


@lru_cache(maxsize=REMEMBERED_CALLS)
def _find_for(device: torch.device, *facts: Any) -> tuple[AppendLauncher, bool]:
    """The launcher for a call, and whether all that it reads is addressable but for its address.

    Raises:
        NotImplementedError: the kernel does not do it.
    """
    named, target = _named(*facts), known_target(device)
    reason = why_not_append(named, target)
    if reason:
        raise NotImplementedError(f"{reason}; {INSTEAD}")
    read = (named.k, named.v, named.q, named.cos, named.sin)
    is_addressable = all(x.is_addressable for x in read if x is not None)
    return find(select_append_config(named, target), device), is_addressable


def _addressable(x: Tensor) -> Tensor:
    """x, or a copy that can be read in vectors."""
    is_aligned = not x.data_ptr() % VECTOR_BYTES
    return x if is_aligned and Facts(*raw_facts(x)).is_addressable else contiguous_copy(x)


def _check_addresses(**caches: Tensor) -> None:
    for name, cache in caches.items():
        past = cache.data_ptr() % VECTOR_BYTES
        if past:
            raise NotImplementedError(
                f"{name} begins {past} bytes past a multiple of {VECTOR_BYTES}, and the kernel needs none; {INSTEAD}"
            )


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    rotation: Rotation | None = None,
    q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    per_query_position: bool = True,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Write new tokens into a cache, in place, and rotate queries, on torch's current stream, in one launch.

    Nothing is read on the host. The arguments are checked before (shapes, dtypes, devices); those that they have in
    common are those of ``reference.append.append_to_cache`` and ``rotate_queries``, which say what is computed. What a
    length, a page number or an index of the batch leads out of the cache is not written.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or (total_q, ...) with ``cu_seqlens_q``; only with a ``rotation``.
        k_descale, v_descale: float32 of a cache of e4m3 for 16-bit tokens, (batch, kv_heads), None for ones; or both by
            page, (pages, 1, kv_heads); or both by token, (pages, page_size, kv_heads), which are written.
        hadamard: multiply K by ``kvcache_rotation.rotate_keys``' matrix, and q where there is a rotation.

    Returns:
        The lengths that the cache then has, int32 (batch,), and q rotated, a new tensor, or None.

    Raises:
        NotImplementedError: the kernel does not do it (``why_not_append``); the message says why, and what does.
    """
    facts = _raw_append_facts(k, v, k_cache, v_cache, page_table, rotation, q)
    scales = _kind_of_scales(k, k_cache, k_descale)
    launcher, is_addressable = _find_for(k.device, *facts, scales, hadamard)
    addresses = k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    if rotation is not None:
        addresses |= rotation.cos.data_ptr() | rotation.sin.data_ptr() | (0 if q is None else q.data_ptr())
    if not is_addressable or addresses % VECTOR_BYTES:
        _check_addresses(k_cache=k_cache, v_cache=v_cache)
        k, v, q = _addressable(k), _addressable(v), None if q is None else _addressable(q)
        if rotation is not None:
            tables = _addressable(rotation.cos), _addressable(rotation.sin)
            rotation = replace(rotation, cos=tables[0], sin=tables[1])
    return launcher(
        k,
        v,
        k_cache,
        v_cache,
        cache_seqlens,
        cu_seqlens_k_new=cu_seqlens_k_new,
        cache_batch_idx=cache_batch_idx,
        page_table=page_table,
        k_descale=k_descale,
        v_descale=v_descale,
        rotation=rotation,
        q=q,
        cu_seqlens_q=cu_seqlens_q,
        per_query_position=per_query_position,
    )
