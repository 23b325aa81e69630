"""The plan of packed sequences in plain Python, to hold the kernel that makes it to, and to give kernels on NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.plan.config import plan_words
from cute_kernels.plan.parts import number_of
from cute_kernels.plan.parts_kernel import KEYS_OF_A_TILE, KEYS_OF_RESULTS, TRIED, number_tried


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


@dataclass(frozen=True)
class InParts:
    """What ``PartsPlanKernel`` takes beside lengths: keys of a block, heads, tiles that run at a time, parts at most,
    and blocks that a tile visits at most. With ``each`` a part has so many blocks at most, and nothing is counted."""

    tile_n: int
    heads: int
    slots: int
    most: int
    seen: int = 2**20
    each: int = 0

    def parts_of(self, seqlen_k: int, each: int) -> int:
        return min(max(-(-self._blocks(seqlen_k) // each), 1), self.most)

    def _blocks(self, seqlen_k: int) -> int:
        return min(-(-seqlen_k // self.tile_n), self.seen)

    def cost(self, tried: int, sequences: list[tuple[int, int]]) -> float:
        """Of parts of so many blocks at most, in blocks; ``sequences`` are tiles and keys."""
        numbers = [tiles * max(-(-self._blocks(keys) // tried), 1) for tiles, keys in sequences]
        number, of_a_tile = max(sum(numbers), 1), KEYS_OF_A_TILE / self.tile_n
        mean = sum(tiles * self._blocks(keys) for tiles, keys in sequences) / number
        of_all = -(-number * self.heads // self.slots) * (mean + of_a_tile)
        of_results = number * self.heads / self.slots * KEYS_OF_RESULTS / self.tile_n
        return max(tried + of_a_tile, of_all) + of_results

    def blocks_of_a_part(self, sequences: list[tuple[int, int]]) -> int:
        """As the kernel finds them."""
        if self.each:
            return self.each
        longest = max([1, *(self._blocks(keys) for tiles, keys in sequences if tiles)])
        tried = [-(-longest // number_tried(self.most, i)) for i in range(TRIED)]
        return min(tried, key=lambda each: self.cost(each, sequences))


def plan_of(
    q: Packed, k: Packed, tile: int, of_keys: bool = False, in_parts: InParts | None = None
) -> Tensor:
    """What ``PlanKernel`` writes, or ``PartsPlanKernel``; words that it leaves alone are -1."""
    sequences = range(q.batch + 1)
    rows_q, rows_k = [q.rows(i) for i in sequences], [k.rows(i) for i in sequences]
    own, other = (rows_k, rows_q) if of_keys else (rows_q, rows_k)
    costs = [0 if i == q.batch else other[i][1] for i in sequences]
    tiles = [-(-rows // tile) for _, rows in own]
    parts, numbers = [1] * len(sequences), [[i] for i in sequences]
    if in_parts is not None:
        each = in_parts.blocks_of_a_part(list(zip(tiles[:-1], costs[:-1], strict=True)))
        parts = [in_parts.parts_of(cost, each) for cost in costs]
        numbers = [[number_of(i, part, parts[i]) for part in range(parts[i])] for i in sequences]
    entries: list[int] = []
    for i in sorted(sequences, key=lambda i: (-costs[i], i)):
        for number in numbers[i]:
            before = len(entries) // 2
            entries += [number, before] * tiles[i]
    if of_keys:
        rows_q[-1] = (rows_q[-1][0], 0)
    else:
        rows_k[-1] = (rows_k[-1][0], 0)
    records = [word for i in sequences for word in (*rows_q[i], *rows_k[i])]
    words = plan_words((k if of_keys else q).total, q.batch, tile, in_parts.most if in_parts else 1)
    capacity = (words - 4 - len(records)) // 2
    entries = entries[: 2 * capacity]
    plan = [len(entries) // 2, -1, -1, -1, *records, *entries]
    return torch.tensor(plan + [-1] * (words - len(plan)), dtype=torch.int32)
