"""A key/value cache in plain PyTorch, on any device: where rows lie, writing them, gathering them.

Nothing is read on the host, so all of it goes into a CUDA graph. Lengths, page numbers and indices that lead out of the
cache are clamped where it is read, and where it is written nothing is written for them. Rotary embedding is in
``append``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention.checks import FP8_DTYPE
from hopper_attention.reference.append import divided, rounded


class Places(NamedTuple):
    """Where rows lie in a cache: page, row in it, and whether that is inside of the cache; of one shape."""

    page: Tensor
    row: Tensor
    is_inside: Tensor


@dataclass(frozen=True, eq=False)
class CacheRows:
    """Where the rows of sequences lie in a cache of shape (pages, page_size, ...).

    A cache without a page table has a page for each sequence.

    Attributes:
        pages, page_size: 1 or more each.
        capacity: rows of a sequence, 1 or more.
        page_table: int32 (sequences, capacity // page_size), or None.
        cache_batch_idx: int32 (batch,): the row of the table, or the page, of each sequence; None: its own number.
    """

    pages: int
    page_size: int
    capacity: int
    page_table: Tensor | None
    cache_batch_idx: Tensor | None

    def locate(self, sequence: Tensor, row: Tensor) -> Places:
        """The places of rows of sequences, int64 that broadcast; those outside are clamped to some inside."""
        is_inside = (row >= 0) & (row < self.capacity)
        row = row.clamp(0, self.capacity - 1)
        entry = sequence
        if self.cache_batch_idx is not None:
            entry = self.cache_batch_idx.long()[sequence]
        page = entry
        if self.page_table is not None:
            entries = self.page_table.shape[0]
            is_inside = is_inside & (entry >= 0) & (entry < entries)
            page = self.page_table[entry.clamp(0, entries - 1), row // self.page_size].long()
            row = row % self.page_size
        is_inside = is_inside & (page >= 0) & (page < self.pages)
        return Places(page.clamp(0, self.pages - 1), row, is_inside)


def as_stored(x: Tensor, dtype: torch.dtype, descale: Tensor | None) -> Tensor:
    """New tokens (total, kv_heads, columns) as a cache of ``dtype`` holds them: divided by their descale, rounded once.

    ``descale`` is float32 (total, kv_heads), or None for ones.
    """
    return rounded(x if descale is None else divided(x, descale), dtype)


def gather_scales(descale: Tensor, rows: CacheRows, batch: int, seqlen: int, first: Tensor | None) -> Tensor:
    """(batch, seqlen, kv_heads): of the rows that ``gather_rows`` copies, from (pages, page_size or 1, kv_heads)."""
    return gather_rows(descale.expand(-1, rows.page_size, -1), rows, batch, seqlen, first)


def write_rows(cache: Tensor, places: Places, values: Tensor) -> None:
    """Write values (total, ...), 1 row or more, of the cache's dtype, to their places in it, (pages, page_size, ...).

    A row whose place is outside is made the same write as the first that is inside. If none is, what is there is
    written once more.
    """
    store, values = (x.view(torch.uint8) if x.dtype == FP8_DTYPE else x for x in (cache, values))
    is_inside = places.is_inside
    first = is_inside.int().argmax().view(1)
    page, row = (torch.where(is_inside, x, x.index_select(0, first)) for x in (places.page, places.row))
    at_first = places.page.index_select(0, first), places.row.index_select(0, first)
    instead = torch.where(is_inside.any(), values.index_select(0, first), store[at_first])
    is_value = is_inside.view(-1, *[1] * (values.dim() - 1))
    store.index_put_((page, row), torch.where(is_value, values, instead))


def gather_rows(cache: Tensor, rows: CacheRows, batch: int, seqlen: int, first: Tensor | None) -> Tensor:
    """A copy (batch, seqlen, ...) of the rows of each sequence, from its row first[b] on, int64 (batch,), or from 0.

    What lies outside of the cache repeats some row of it.
    """
    device = cache.device
    row = torch.arange(seqlen, device=device)[None, :]
    if first is not None:
        row = row + first[:, None]
    places = rows.locate(torch.arange(batch, device=device)[:, None], row)
    page, row = torch.broadcast_tensors(places.page, places.row)
    if cache.dtype == FP8_DTYPE:
        return cache.view(torch.uint8)[page, row].view(FP8_DTYPE)
    return cache[page, row]


def dequantized(x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """e4m3 x (batch, seqlen, heads, columns) times float32 (batch, heads) or (batch, seqlen, heads), or ones, rounded
    once to ``dtype``."""
    x = x.float()
    if descale is not None:
        x = x * (descale[:, None, :, None] if descale.dim() == 2 else descale[..., None])
    return x.to(dtype)
