"""A key/value cache in plain PyTorch, on any device: where rows lie, rotary embedding, writing, gathering.

Nothing is read on the host, so all of it goes into a CUDA graph. Lengths, page numbers and indices that lead out of the
cache are clamped where it is read, and where it is written nothing is written for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0


class Tokens(NamedTuple):
    """Rows of a tensor (total, ...): the sequence of each, its number there, and whether it is of any.

    Attributes:
        sequence, rank: int64 (total,).
        is_token: bool (total,).
    """

    sequence: Tensor
    rank: Tensor
    is_token: Tensor

    @classmethod
    def dense(cls, batch: int, seqlen: int, device: torch.device) -> Tokens:
        """Of (batch, seqlen, ...), its first two dimensions as one."""
        rows = torch.arange(batch * seqlen, device=device)
        return cls(rows // max(seqlen, 1), rows % max(seqlen, 1), torch.ones_like(rows, dtype=torch.bool))

    @classmethod
    def packed(cls, cu_seqlens: Tensor, total: int) -> Tokens:
        """Of (total, ...), where sequence b, of at least one, has the rows from cu_seqlens[b] on."""
        rows = torch.arange(total, device=cu_seqlens.device)
        starts = cu_seqlens.long()
        sequence = torch.searchsorted(starts, rows, right=True) - 1
        is_token = (sequence >= 0) & (rows < starts[-1:])
        sequence = sequence.clamp(0, starts.shape[0] - 2)
        return cls(sequence, rows - starts[sequence], is_token)


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the first columns of x, computed in float32 and rounded once to the dtype of x.

    Args:
        x: (total, heads, columns).
        cos, sin: (seqlen, rotary_dim / 2): of each position, for each pair of columns.
        positions: int64 (total,); those outside of cos are clamped.
        interleaved: a pair is columns 2i and 2i + 1, else i and i + rotary_dim / 2.
    """
    half = cos.shape[1]
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (table.index_select(0, positions)[:, None, :].float() for table in (_wider(cos), _wider(sin)))
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = rotated.unflatten(-1, (half, 2)) if interleaved else rotated.unflatten(-1, (2, half)).mT
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * c - second * s, first * s + second * c), -1)
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat((_rounded(turned, x.dtype), rest), -1)


def _wider(table: Tensor) -> Tensor:
    """An e4m3 table in float32."""
    return table.float() if table.dtype == FP8_DTYPE else table


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``; what is too large for e4m3 becomes its largest number, on any device."""
    return (x.clamp(-LARGEST_E4M3, LARGEST_E4M3) if dtype == FP8_DTYPE else x).to(dtype)


def as_stored(x: Tensor, dtype: torch.dtype, descale: Tensor | None, sequence: Tensor) -> Tensor:
    """New tokens (total, kv_heads, columns) as a cache of ``dtype`` holds them: itself, or divided by its descale.

    ``descale`` is float32 (batch, kv_heads) or None for ones. Tokens that have the cache's dtype are taken as they are.
    """
    if x.dtype == dtype:
        return x
    x = x.float()
    return _rounded(x if descale is None else x / descale[sequence][:, :, None], dtype)


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
    store.index_put_((page, row), torch.where(is_inside[:, None, None], values, instead))


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
    """e4m3 x (batch, seqlen, heads, columns) times float32 (batch, heads), or ones, rounded once to ``dtype``."""
    x = x.float()
    return (x if descale is None else x * descale[:, None, :, None]).to(dtype)
