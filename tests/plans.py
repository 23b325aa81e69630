"""The plan of packed sequences in plain Python, to hold the kernel that makes it to, and to give kernels on NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.plan.config import plan_words


@dataclass(frozen=True)
class Packed:
    """Sequences behind each other; ``used`` says how many rows of each count, or is None for all."""

    cu_seqlens: tuple[int, ...]
    total: int
    used: tuple[int, ...] | None = None

    @staticmethod
    def of(lengths: tuple[int, ...], behind: int = 0, used: tuple[int, ...] | None = None) -> Packed:
        """With ``behind`` rows of no sequence at the end."""
        cu_seqlens = [0]
        for length in lengths:
            cu_seqlens.append(cu_seqlens[-1] + length)
        return Packed(tuple(cu_seqlens), cu_seqlens[-1] + behind, used)

    @property
    def batch(self) -> int:
        return len(self.cu_seqlens) - 1

    def rows(self, sequence: int) -> tuple[int, int]:
        """Offset and length; of number ``batch``, those of no sequence."""
        offset = min(max(self.cu_seqlens[sequence], 0), self.total)
        length = self.total - offset
        if sequence < self.batch:
            length = min(length, max(self.cu_seqlens[sequence + 1] - offset, 0))
            if self.used is not None:
                length = min(length, max(self.used[sequence], 0))
        return offset, length


def plan_of(q: Packed, k: Packed, tile: int, of_keys: bool = False) -> Tensor:
    """What ``PlanKernel`` writes; words that it leaves alone are -1."""
    sequences = range(q.batch + 1)
    rows_q, rows_k = [q.rows(i) for i in sequences], [k.rows(i) for i in sequences]
    own, other = (rows_k, rows_q) if of_keys else (rows_q, rows_k)
    costs = [0 if i == q.batch else other[i][1] for i in sequences]
    entries: list[int] = []
    for i in sorted(sequences, key=lambda i: (-costs[i], i)):
        before = len(entries) // 2
        entries += [i, before] * -(-own[i][1] // tile)
    if of_keys:
        rows_q[-1] = (rows_q[-1][0], 0)
    else:
        rows_k[-1] = (rows_k[-1][0], 0)
    records = [word for i in sequences for word in (*rows_q[i], *rows_k[i])]
    words = plan_words((k if of_keys else q).total, q.batch, tile)
    capacity = (words - 4 - len(records)) // 2
    entries = entries[: 2 * capacity]
    plan = [len(entries) // 2, -1, -1, -1, *records, *entries]
    return torch.tensor(plan + [-1] * (words - len(plan)), dtype=torch.int32)
