"""The inputs of the serving benchmark: queries, caches with or without pages, new keys and their rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hopper.quantize.config import E4M3_MAX
from hopper_attention.experiments.features.spec import Family
from hopper_attention.experiments.serving.spec import ServingWorkload
from hopper_attention.quantization import to_e4m3
from hopper_attention.reference.append import Rotation

ROTARY_BASE = 10_000.0
PAGE_SEED = 3


class NewKeys(NamedTuple):
    """What a call appends: k and v (batch, queries, heads_kv, head_dim), and the tables of the rotation, (positions,
    head_dim / 2), which is by halves."""

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor


class Descales(NamedTuple):
    """float32 (batch, heads_kv) factors of a cache in e4m3."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class CacheInputs:
    """One set of inputs.

    Attributes:
        q: (batch, queries, heads, head_dim).
        k_cache, v_cache: (batch, longest, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim). Rows of no
            sequence have values like the others: who reads them is wrong.
        used: int32 (batch,): keys in the cache before the call.
        table: int32 (batch, pages of the longest): the pages of each sequence; None without pages.
        new: what the call appends; None for nothing.
        descales: of a cache in e4m3; None for one of 16 bits.
        qv: (batch, queries, heads, latent), a second query; None without a latent. A row of q lies behind that of qv,
            and one of k_cache behind that of v_cache.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    used: Tensor
    table: Tensor | None
    new: NewKeys | None
    descales: Descales | None
    qv: Tensor | None = None

    @cached_property
    def by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, K and V of a cache without pages, in memory as (batch, heads, rows, head_dim)."""
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q, self.k_cache, self.v_cache))
        return q, k, v

    def rows(self, sequence: int, rows: slice, head: slice) -> tuple[Tensor, Tensor]:
        """K and V (rows, heads, head_dim) of a sequence, as the cache has them."""
        caches = self.k_cache, self.v_cache
        if self.table is None:
            k, v = (cache[sequence, rows, head] for cache in caches)
            return k, v
        size = self.k_cache.shape[1]
        numbers = torch.arange(rows.start, rows.stop, device=self.table.device)
        pages = self.table[sequence].long()[numbers // size]
        k, v = (cache[:, :, head][pages, numbers % size] for cache in caches)
        return k, v

    @property
    def joined(self) -> tuple[Tensor, Tensor]:
        """Queries and a cache of all columns, of a latent and behind it."""
        assert self.qv is not None
        pairs = (self.qv, self.q), (self.v_cache, self.k_cache)
        queries, cache = (
            x.as_strided((*x.shape[:-1], x.shape[-1] + more.shape[-1]), x.stride()) for x, more in pairs
        )
        return queries, cache

    def fill_new_rows(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values (batch, queries, heads_kv, head_dim) where the call appends."""
        steps = torch.arange(k.shape[1], device=k.device)
        numbers = self.used.long()[:, None] + steps
        sequences = torch.arange(k.shape[0], device=k.device)[:, None]
        if self.table is None:
            place = sequences, numbers
        else:
            size = self.k_cache.shape[1]
            place = self.table.long()[sequences, numbers // size], numbers % size
        self.k_cache[place], self.v_cache[place] = k, v


def pages_of(workload: ServingWorkload) -> list[int]:
    """Pages that each sequence needs."""
    return [-(-length // workload.page_size) for length in workload.lengths]


def draw_table(workload: ServingWorkload, device: str) -> Tensor:
    """int32 (batch, most pages): pages in random order, each of one sequence; 0 behind those of a sequence."""
    needed = pages_of(workload)
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(PAGE_SEED)).int()
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for row, pages in zip(table, order.split(needed), strict=True):
        row[: len(pages)] = pages
    return table.to(device)


def rotary_tables(workload: ServingWorkload, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin (rows of a sequence's cache, head_dim / 2) in the dtype of queries."""
    half = workload.head_dim // 2
    rows = max(pages_of(workload)) * workload.page_size if workload.page_size else workload.longest
    rates = ROTARY_BASE ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angles = torch.arange(rows, device=device, dtype=torch.float64)[:, None] * rates
    dtype = getattr(torch, workload.dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """A cache (batch, rows, heads, head_dim) in e4m3, and the descale of each sequence and head."""
    descale = x.abs().amax((1, 3)).float() / E4M3_MAX
    e4m3 = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    for row, of, scale in zip(e4m3, x, descale, strict=True):
        row.copy_(to_e4m3(of.float() / scale[:, None]))
    return e4m3, descale


def draw_set(workload: ServingWorkload, family: Family, seed: int, device: str) -> CacheInputs:
    """One set of inputs, made on the device; the queries as ``family`` says."""
    w = workload
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, w.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, qv = draw(w.batch, w.queries, w.heads, w.key_columns).mul_(family.query_factor), None
    rows = (sum(pages_of(w)), w.page_size) if w.page_size else (w.batch, w.longest)
    if w.latent:
        cache = draw(*rows, w.heads_kv, w.key_columns)
        (qv, q), (v_cache, k_cache) = (x.split((w.latent, w.head_dim), -1) for x in (q, cache))
    else:
        k_cache, v_cache = (draw(*rows, w.heads_kv, w.head_dim) for _ in range(2))
    descales, new = None, None
    if w.is_fp8:
        (k_cache, of_k), (v_cache, of_v) = quantized(k_cache), quantized(v_cache)
        descales = Descales(of_k, of_v)
    if w.appends:
        shape = w.batch, w.queries, w.heads_kv, w.head_dim
        new = NewKeys(draw(*shape), draw(*shape), *rotary_tables(w, device))
    used = torch.tensor(w.lengths, dtype=torch.int32) - (w.queries if w.appends else 0)
    table = draw_table(w, device) if w.page_size else None
    return CacheInputs(q, k_cache, v_cache, used.to(device), table, new, descales, qv)


def appended(workload: ServingWorkload, inputs: CacheInputs) -> CacheInputs:
    """Inputs after the new keys are written, in place, and rotated like the queries; the same if there are none."""
    if inputs.new is None:
        return inputs
    rotation = Rotation(inputs.new.cos, inputs.new.sin, is_interleaved=False)
    steps = torch.arange(workload.queries, device=inputs.q.device)
    positions = (inputs.used[:, None] + steps).flatten()

    def rotate(x: Tensor) -> Tensor:
        return rotation(x.flatten(0, 1), positions).to(x.dtype).view_as(x)

    inputs.fill_new_rows(rotate(inputs.new.k), inputs.new.v)
    return replace(inputs, q=rotate(inputs.q), used=inputs.used + workload.queries, new=None)


def without_pages(workload: ServingWorkload, inputs: CacheInputs) -> CacheInputs:
    """The same keys in a cache (batch, longest, ...)."""
    every = slice(0, workload.heads_kv)
    w = workload
    rows = inputs.k_cache.new_zeros(w.batch, w.longest, w.heads_kv, w.value_columns + w.head_dim)
    v_cache, k_cache = rows.split((w.value_columns, w.head_dim), -1)
    caches = (k_cache, v_cache) if w.latent else (k_cache.contiguous(), v_cache.contiguous())
    for sequence, length in enumerate(workload.lengths):
        for cache, values in zip(caches, inputs.rows(sequence, slice(0, length), every), strict=True):
            cache[sequence, :length] = values
    return replace(inputs, k_cache=caches[0], v_cache=caches[1], table=None)


def plain_of(workload: ServingWorkload, inputs: CacheInputs) -> CacheInputs:
    """The inputs of ``ServingWorkload.plain``, in a cache of their own."""
    if not workload.appends:
        return without_pages(workload, inputs)
    own = replace(inputs, k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    return appended(workload, own)
