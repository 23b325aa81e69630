"""Packed sequences for tests: their lengths, their plan as plain Python works it out, and as the kernel does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cute_kernels.plan.config import ENTRY, PLAN_HEADER, RECORD, WARPS_PER_CTA, PlanConfig, plan_words
from tests.hopper.on_numpy import Arguments, program_of

UNWRITTEN = -77


@dataclass(frozen=True)
class Packing:
    """Offsets of packed sequences in ``total_q`` rows of Q and ``total_k`` of K; how many of each are used, or ()."""

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    total_q: int
    total_k: int
    seqused_q: tuple[int, ...] = ()
    seqused_k: tuple[int, ...] = ()

    @staticmethod
    def of(lengths: Sequence[tuple[int, int]], tail: tuple[int, int] = (0, 0), **used: tuple) -> Packing:
        """Of sequences of these lengths, (of Q, of K), and ``tail`` rows behind them."""
        cu_q, cu_k = (tuple(accumulate((pair[i] for pair in lengths), initial=0)) for i in (0, 1))
        return Packing(cu_q, cu_k, cu_q[-1] + tail[0], cu_k[-1] + tail[1], **used)

    @property
    def sequences(self) -> int:
        """With the one of the rows that belong to none."""
        return len(self.cu_seqlens_q)

    def rows_q(self, i: int) -> range:
        return _rows(self.cu_seqlens_q, self.seqused_q, self.total_q, i)

    def rows_k(self, i: int) -> range:
        return _rows(self.cu_seqlens_k, self.seqused_k, self.total_k, i)

    def plan(self, tile: int, of_keys: bool = False) -> Tensor:
        """What the kernel should make of it; words that it should not write are ``UNWRITTEN``."""
        last = self.sequences - 1
        total = self.total_k if of_keys else self.total_q
        rows = [(self.rows_q(i), self.rows_k(i)) for i in range(self.sequences)]
        tiled = [-(-len(pair[of_keys]) // tile) for pair in rows]
        costs = [len(pair[not of_keys]) for pair in rows[:last]] + [0]
        plan = torch.full((plan_words(total, last, tile),), UNWRITTEN, dtype=torch.int32)
        for i, (q, k) in enumerate(rows):
            lengths = [len(q), len(k)]
            if i == last:
                lengths[not of_keys] = 0
            record = torch.tensor([q.start, lengths[0], k.start, lengths[1]], dtype=torch.int32)
            plan[PLAN_HEADER + RECORD * i :][:RECORD] = record
        order = sorted(range(self.sequences), key=lambda i: (-costs[i], i))
        first_entry = PLAN_HEADER + RECORD * self.sequences
        capacity = (len(plan) - first_entry) // ENTRY
        before = 0
        for i in order:
            for entry in range(before, min(before + tiled[i], capacity)):
                plan[first_entry + ENTRY * entry :][:ENTRY] = torch.tensor([i, before])
            before += tiled[i]
        plan[0] = min(before, capacity)
        return plan


def _rows(offsets: tuple[int, ...], used: tuple[int, ...], total: int, i: int) -> range:
    """Of sequence ``i``, or behind all of them; within the tensor, whatever the offsets say."""
    first = min(max(offsets[i], 0), total)
    end = total
    if i + 1 < len(offsets):
        end = min(max(offsets[i + 1], first), total)
        end = min(end, first + max(used[i], 0)) if used else end
    return range(first, end)


def plan_on_numpy(packing: Packing, tile: int, of_keys: bool = False) -> Tensor:
    """The plan as the kernel leaves it in memory that was ``UNWRITTEN``."""
    total = packing.total_k if of_keys else packing.total_q
    plan = torch.full((plan_words(total, packing.sequences - 1, tile),), UNWRITTEN, dtype=torch.int32)
    fill_plan_on_numpy(plan, packing, tile, of_keys)
    return plan


def fill_plan_on_numpy(plan: Tensor, packing: Packing, tile: int, of_keys: bool = False) -> None:
    """What the kernel writes to ``plan``, whatever room that has."""
    arguments = Arguments()
    for numbers in (packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_q, packing.seqused_k):
        arguments.tensor(torch.tensor(numbers, dtype=torch.int32), (len(numbers),), ())
    arguments.tensor(plan, (len(plan),), ())
    arguments.add(packing.total_q, packing.total_k, tile, int(of_keys))
    ctas = -(-packing.sequences // WARPS_PER_CTA)
    arguments.launch(program_of(PlanConfig("sm_80")), (ctas, 1, 1))
