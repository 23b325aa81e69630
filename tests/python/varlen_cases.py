"""Batches of sequences of different lengths, and what their attention is, sequence by sequence in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper_attention.reference import attention_naive


def offsets(lengths: tuple[int, ...]) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Case:
    """A batch: the rows given to each sequence, how many of them are used, and rows behind the last."""

    rooms_q: tuple[int, ...]
    rooms_k: tuple[int, ...]
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    behind: int = 0
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (32, 24)

    @property
    def lengths(self) -> tuple[Any, ...]:
        """What the functions take for the lengths."""
        used = (None if x is None else torch.tensor(x, dtype=torch.int32) for x in (self.used_q, self.used_k))
        longest = (max(rooms, default=0) for rooms in (self.rooms_q, self.rooms_k))
        return offsets(self.rooms_q), offsets(self.rooms_k), *longest, *used

    def spans(self) -> list[tuple[slice, slice]]:
        """The used rows of each sequence in q, and in k and v."""
        sides = []
        for rooms, used in ((self.rooms_q, self.used_q), (self.rooms_k, self.used_k)):
            starts = offsets(rooms).tolist()
            sides.append([slice(a, a + n) for a, n in zip(starts, used or rooms, strict=False)])
        return list(zip(*sides, strict=True))

    def unused(self) -> tuple[Tensor, Tensor]:
        """Which rows of q, and of k and v, are of no sequence."""
        q, k = (
            torch.ones(sum(rooms) + self.behind, dtype=torch.bool) for rooms in (self.rooms_q, self.rooms_k)
        )
        for rows, keys in self.spans():
            q[rows], k[keys] = False, False
        return q, k

    def tensors(self, dtype: torch.dtype, poisoned: bool = True, seed: int = 0) -> list[Tensor]:
        """q, k and v, with NaN in every row that is of no sequence."""
        generator = torch.Generator().manual_seed(seed)
        of_q, of_k = self.unused()
        (heads, kv_heads), (head_dim, head_dim_v) = self.heads, self.head_dims
        shapes = ((of_q, heads, head_dim), (of_k, kv_heads, head_dim), (of_k, kv_heads, head_dim_v))
        drawn = []
        for unused, *sizes in shapes:
            x = torch.randn(len(unused), *sizes, generator=generator).to(dtype)
            x[unused] = math.nan if poisoned else 0.0
            drawn.append(x)
        return drawn

    def oracle(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """out (total_q, heads, head_dim_v) and lse (heads, total_q) in float64, differentiable."""
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
        for rows, keys in self.spans():
            part, part_lse = attention_naive(q[None, rows], k[None, keys], v[None, keys], **options)
            out[rows], lse[:, rows] = part[0], part_lse[0]
        return out, lse


CASES = {
    "plain": Case((5, 17, 1, 40), (9, 17, 33, 3)),
    "empty ones": Case((0, 7, 0, 5, 0), (4, 0, 0, 9, 0)),
    "rows behind": Case((6, 13), (21, 2), behind=5),
    "used": Case((8, 8, 20, 3), (16, 8, 4, 9), used_q=(3, 0, 20, 1), used_k=(11, 8, 0, 9), behind=2),
    "used keys": Case((4, 30), (12, 40), used_k=(5, 33)),
    "many tiles": Case((150, 0, 301), (290, 31, 140), heads=(2, 1)),
    "mha": Case((3, 9), (5, 1), heads=(3, 3)),
    "mqa": Case((11, 2), (4, 21), heads=(5, 1), head_dims=(40, 64)),
    "wide v": Case((5, 9), (7, 4), head_dims=(64, 296)),
    "one sequence": Case((19,), (23,)),
    "no sequence": Case((), (), behind=3),
    "no queries": Case((0, 0), (3, 4)),
    "no keys": Case((3, 4), (0, 0)),
    "nothing": Case((0, 0), (0, 0)),
}
