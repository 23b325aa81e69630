"""New keys and values into a cache, in place, and rotary embeddings, in plain PyTorch on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.checks import FP8_DTYPE

LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Rotation:
    """Rotary embeddings: (x, y) becomes (x cos - y sin, x sin + y cos), in float32.

    Attributes:
        cos, sin: (positions, rotary_dim / 2), of any floating dtype. Columns behind rotary_dim stay as they are, and a
            position that the tables do not have gets the angles of the nearest one.
        is_interleaved: x and y are columns 2i and 2i + 1, else i and i + rotary_dim / 2.
        first_positions: int32 (batch,), of the first new token of each sequence; None for what is in its cache.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    first_positions: Tensor | None = None

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows x (rows, heads, columns) at these positions (rows,), rotated; float32."""
        rows = positions.long().clamp(0, self.cos.shape[0] - 1)
        cos, sin = (table.float()[rows].unsqueeze(1) for table in (self.cos, self.sin))
        half, x = cos.shape[-1], x.float()
        turned = x.clone()
        if self.is_interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., first] * sin + x[..., second] * cos
        return turned

    def first(self, cache_seqlens: Tensor) -> Tensor:
        return cache_seqlens if self.first_positions is None else self.first_positions


def append_to_cache(
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
    mix: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Write new tokens into a cache and return the lengths that it then has, int32 (batch,).

    Args:
        k, v: (batch, seqlen, kv_heads, head_dim or head_dim_v), or (total, ...) of packed sequences with
            ``cu_seqlens_k_new`` int32 (batch + 1,).
        k_cache, v_cache: (entries, capacity, kv_heads, ...), or (pages, page_size, ...) with ``page_table`` int32
            (entries, pages of a sequence). Written at position cache_seqlens[b] + i of entry cache_batch_idx[b], or b.
            What there is no room or no page for is not written. A left padding is part of cache_seqlens.
        k_descale, v_descale: by which 16-bit tokens are divided for a cache of e4m3, float32 (batch, kv_heads), or
            (pages, 1, kv_heads) by page. Of (pages, page_size, kv_heads) it is each token's own, which is written.
        rotation: of K.
        mix: of K behind that, rows (rows, kv_heads, head_dim) to such of float32.
    """
    batch = cache_seqlens.shape[0]
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    sequence, number = tokens_of(k, cu_seqlens_k_new, batch)
    kept = sequence < batch
    sequence, number = sequence[kept], number[kept]
    rows_k, rows_v = (_rows(x, cu_seqlens_k_new)[kept] for x in (k, v))
    if rotation is not None:
        rows_k = rotation(rows_k, rotation.first(cache_seqlens).long()[sequence] + number)
    rows_k = rows_k if mix is None else mix(rows_k)
    position = cache_seqlens.long()[sequence] + number
    page, slot = _place(position, sequence, k_cache, cache_batch_idx, page_table)
    kept = page >= 0
    page, slot, sequence = page[kept], slot[kept], sequence[kept]
    for rows, cache, descale in ((rows_k[kept], k_cache, k_descale), (rows_v[kept], v_cache, v_descale)):
        if descale is not None:
            of_rows = _scales_of_rows(rows, cache, descale, (sequence, page, slot))
            rows = divided(rows, of_rows)
        _bytes_of(cache)[page, slot] = _bytes_of(rounded(rows, cache.dtype))
    new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.long().diff().clamp(min=0)
    return (cache_seqlens.long() + new).clamp(0, capacity).int()


def _scales_of_rows(
    rows: Tensor, cache: Tensor, descale: Tensor, places: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """(rows, kv_heads), for ``places`` of each row: sequence, page and row in it. Those by token are written."""
    sequence, page, slot = places
    if descale.dim() == 2:
        return descale[sequence]
    if descale.shape[1] == cache.shape[1]:
        descale[page, slot] = scales_of(rows)
        return descale[page, slot]
    return descale[page, 0]


def rotate_queries(
    q: Tensor,
    rotation: Rotation,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    per_query_position: bool = True,
) -> Tensor:
    """Queries (batch, seqlen_q, heads, head_dim), or packed (total_q, ...), rotated, in their dtype.

    The first of a sequence has the position of its first new key; so have the others, unless ``per_query_position``.
    Rows of no sequence are zeros.
    """
    batch = cache_seqlens.shape[0]
    sequence, number = tokens_of(q, cu_seqlens_q, batch)
    kept = sequence < batch
    rows = _rows(q, cu_seqlens_q)
    rotated = torch.zeros_like(rows)
    first = rotation.first(cache_seqlens).long()[sequence[kept]]
    turned = rotation(rows[kept], first + number[kept] * int(per_query_position))
    _bytes_of(rotated)[kept] = _bytes_of(rounded(turned, q.dtype))
    return rotated.view(q.shape)


def tokens_of(x: Tensor, cu_seqlens: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """(sequence, number in it) of all rows of x, in order; the sequence is ``batch`` of rows that are in none."""
    if cu_seqlens is None:
        rows = torch.arange(x.shape[0] * x.shape[1], device=x.device)
        return rows // max(x.shape[1], 1), rows % max(x.shape[1], 1)
    rows = torch.arange(x.shape[0], device=x.device)
    offsets = cu_seqlens.long()
    sequence = torch.searchsorted(offsets[1:], rows, right=True)
    number = rows - offsets[sequence.clamp(max=batch - 1)]
    return sequence.where(number >= 0, batch), number


def _rows(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(rows, heads, columns)."""
    return x.flatten(0, 1) if cu_seqlens is None else x


def _place(
    position: Tensor,
    sequence: Tensor,
    cache: Tensor,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(page, row in it) of tokens; page -1 where there is none."""
    pages, page_size = cache.shape[:2]
    entry = sequence if cache_batch_idx is None else cache_batch_idx.long()[sequence]
    entries, width = (pages, 1) if page_table is None else page_table.shape
    exists = (position >= 0) & (position < width * page_size) & (entry >= 0) & (entry < entries)
    page, slot = entry, position
    if page_table is not None:
        slot = position % page_size
        page = torch.full_like(position, -1)
        page[exists] = page_table.long()[entry[exists], position[exists] // page_size]
    return page.where(exists & (page < pages), -1), slot


def scales_of(x: Tensor) -> Tensor:
    """By which tokens x (total, heads, columns) are divided for e4m3, float32 (total, heads): the largest number of a
    token and head becomes that of e4m3. NaN are passed over."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1) / LARGEST_E4M3


def divided(x: Tensor, scales: Tensor) -> Tensor:
    """x (total, heads, columns) by scales (total, heads), float32; zeros by a scale of 0."""
    return torch.where(scales[..., None] == 0.0, 0.0, x.float() / scales[..., None])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``; e4m3 saturates."""
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(dtype) if dtype == FP8_DTYPE != x.dtype else x.to(dtype)


def _bytes_of(x: Tensor) -> Tensor:
    """A view of e4m3 as bytes, which PyTorch can index."""
    return x.view(torch.uint8) if x.dtype == FP8_DTYPE else x
