"""Appends that are hard to get right, of every kind of kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hopper_attention.reference.append import Rotation
from tests.cute_kernels.appending import Case, int32, poisoned

BF16, FP16, FP8, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def rotation(
        self,
        positions: int,
        columns: int,
        is_interleaved: bool,
        dtype: torch.dtype,
        first: Tensor | None = None,
    ) -> Rotation:
        angles = 2 * math.pi * torch.rand(positions, columns // 2, generator=self.generator)
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), is_interleaved, first)

    def table(self, entries: int, width: int, pages: int) -> Tensor:
        """No page twice."""
        return torch.randperm(pages, generator=self.generator)[: entries * width].view(entries, width).int()

    def descale(self, batch: int, heads: int) -> Tensor:
        return 0.05 + torch.rand(batch, heads, generator=self.generator)


def contiguous() -> Case:
    """Three tokens of four sequences, in six entries of a cache with gaps; the second has room for two, the third for
    none, the last has a length below 0."""
    draw = Draw(0)
    return Case(
        draw.normal(4, 3, 2, 72),
        draw.normal(4, 3, 2, 40),
        poisoned(6, 11, 2, 72, dtype=BF16, gap=8),
        poisoned(6, 11, 2, 40, dtype=BF16),
        int32(0, 9, 40, -2),
        cache_batch_idx=int32(5, 0, 2, 3),
    )


def bytes_alone() -> Case:
    """e4m3 as it is, of many heads, without a batch index and strided tokens."""
    draw = Draw(1)
    k = draw.normal(2, 3, 22, 96, dtype=FP8)[:, 1:, ::2]
    v = draw.normal(2, 3, 11, 96, dtype=FP8)[:, 1:]
    return Case(k, v, *(poisoned(2, 7, 11, 96, dtype=FP8) for _ in "kv"), int32(5, 2))


def paged(page_size: int) -> Case:
    """Pages in any order. Entries of the table that are no pages, and one that no sequence should have."""
    draw = Draw(page_size)
    width = -(-14 // page_size)
    table = draw.table(5, width, 5 * width + 3)
    table[4, 0], table[3, -1] = -1, 5 * width + 3
    return Case(
        draw.normal(5, 4, 1, 32),
        draw.normal(5, 4, 1, 64),
        poisoned(5 * width + 3, page_size, 1, 32, dtype=BF16),
        poisoned(5 * width + 3, page_size, 1, 64, dtype=BF16, gap=64),
        int32(3, width * page_size - 2, 2, width * page_size - 1, 0),
        cache_batch_idx=int32(2, 3, 4, 0, 5),
        page_table=table,
    )


def packed() -> Case:
    """Sequences of 3, 0, 5 and 0 tokens and two rows of none; more than one load of offsets in a lane."""
    draw = Draw(4)
    lengths = [3, 0, 5, 0] + 36 * [0, 1]
    offsets = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    k, v = (draw.normal(int(offsets[-1]) + 2, 2, 16) for _ in "kv")
    seqlens = torch.randint(0, 6, (len(lengths),), generator=draw.generator).int()
    caches = (poisoned(len(lengths), 8, 2, 16, dtype=BF16) for _ in "kv")
    return Case(k, v, *caches, seqlens, cu_seqlens_k_new=offsets)


def halves() -> Case:
    """A part of the columns is rotated, positions are not lengths, and more heads than a CTA takes of Q."""
    draw = Draw(5)
    rotation = draw.rotation(30, 48, False, BF16, first=int32(17, 0, 28))
    return Case(
        draw.normal(3, 2, 3, 80),
        draw.normal(3, 2, 3, 80),
        poisoned(9, 4, 3, 80, dtype=BF16),
        poisoned(9, 4, 3, 80, dtype=BF16),
        int32(1, 6, 3),
        page_table=draw.table(3, 3, 9),
        rotation=rotation,
        q=draw.normal(3, 4, 15, 80),
    )


def interleaved() -> Case:
    """All columns, packed tokens and queries, tables of float32 and of too few positions, queries at one position."""
    draw = Draw(6)
    return Case(
        draw.normal(6, 2, 64, dtype=FP16),
        draw.normal(6, 2, 32, dtype=FP16),
        *(poisoned(3, 16, 2, columns, dtype=FP16) for columns in (64, 32)),
        int32(4, 0, 9),
        cu_seqlens_k_new=int32(0, 2, 2, 6),
        rotation=draw.rotation(11, 64, True, FP32),
        q=draw.normal(7, 4, 64, dtype=FP16),
        cu_seqlens_q=int32(0, 3, 6, 7),
        per_query_position=False,
    )


def scaled(is_interleaved: bool) -> Case:
    """16 bits into a cache of e4m3, with descales of a sequence, some of which make values too large for it."""
    draw = Draw(7)
    k_descale, v_descale = draw.descale(3, 2), draw.descale(3, 1).expand(3, 2)
    k_descale[1, 0] = 1e-3
    dtype = BF16 if is_interleaved else FP16
    return Case(
        *(draw.normal(3, 2, 2, 32, dtype=dtype) for _ in "kv"),
        *(poisoned(3, 5, 2, 32, dtype=FP8) for _ in "kv"),
        int32(0, 3, 2),
        k_descale=k_descale,
        v_descale=v_descale,
        rotation=draw.rotation(20, 16, is_interleaved, FP32),
        q=draw.normal(3, 2, 4, 32, dtype=dtype),
    )


def by_row(page_size: int, is_by_token: bool, head_dim: int, hadamard: bool, rotary: int) -> Case:
    """Scales by token, NaN before, or by page; heads of 5 and of 12 chunks; a token of zeros, and one of large numbers,
    a sequence without tokens and one that has no room."""
    draw = Draw(head_dim)
    pages = 9
    k, v = draw.normal(7, 3, head_dim), draw.normal(7, 3, 40)
    k[1], v[4, 0] = 0.0, 300.0 * v[4, 0]
    rows = page_size if is_by_token else 1
    descales = torch.rand(2, pages, rows, 3, generator=draw.generator) + 0.01
    if is_by_token:
        descales.fill_(math.nan)
    return Case(
        k,
        v,
        poisoned(pages, page_size, 3, head_dim, dtype=FP8),
        poisoned(pages, page_size, 3, 40, dtype=FP8, gap=8),
        int32(2, 1, 0, 3 * page_size - 1),
        cu_seqlens_k_new=int32(0, 3, 3, 5, 7),
        page_table=draw.table(4, 3, 12).clamp(max=pages),
        k_descale=descales[0],
        v_descale=descales[1],
        rotation=draw.rotation(30, rotary, rotary == 16, FP32) if rotary else None,
        q=draw.normal(9, 6, head_dim) if rotary else None,
        cu_seqlens_q=int32(0, 3, 3, 4, 8) if rotary else None,
        hadamard=hadamard,
    )


def hadamard_alone() -> Case:
    """In 16 bits, dense tokens of more heads than a CTA has."""
    draw = Draw(9)
    return replace(contiguous(), k=draw.normal(4, 3, 2, 72), hadamard=True)


def rotated_bytes() -> Case:
    """Everything in e4m3, rounded again after the rotation."""
    draw = Draw(8)
    return Case(
        *(draw.normal(2, 3, 2, 64, dtype=FP8) for _ in "kv"),
        *(poisoned(2, 9, 2, 64, dtype=FP8) for _ in "kv"),
        int32(4, 6),
        rotation=draw.rotation(20, 32, False, FP8),
        q=draw.normal(2, 3, 2, 64, dtype=FP8),
    )


CASES = {
    "contiguous": contiguous(),
    "bytes": bytes_alone(),
    **{f"pages of {size}": paged(size) for size in (1, 3, 16)},
    "packed": packed(),
    "halves": halves(),
    "interleaved": interleaved(),
    "scaled interleaved": scaled(True),
    "scaled halves": scaled(False),
    "rotated bytes": rotated_bytes(),
    "by token": by_row(4, True, 96, False, 0),
    "by token, rotated": by_row(4, True, 64, True, 32),
    "by page, rotated": by_row(4, False, 96, True, 16),
    "hadamard": hadamard_alone(),
}
