"""Packed sequences for tests: where their rows lie, and the plan that the kernel run on NumPy makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cute_kernels.plan.config import WARPS_PER_CTA, PlanConfig, plan_words
from tests.hopper.on_numpy import Arguments, program_of
from tests.plans import InParts, Packed, plan_of

UNWRITTEN = -1


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

    @property
    def q(self) -> Packed:
        return Packed(self.cu_seqlens_q, self.total_q, self.seqused_q or None)

    @property
    def k(self) -> Packed:
        return Packed(self.cu_seqlens_k, self.total_k, self.seqused_k or None)

    def rows_q(self, i: int) -> range:
        """Rows of Q of sequence ``i``, or behind all of them."""
        offset, length = self.q.rows(i)
        return range(offset, offset + length)

    def rows_k(self, i: int) -> range:
        offset, length = self.k.rows(i)
        return range(offset, offset + length)

    def plan(self, tile: int, of_keys: bool = False, in_parts: InParts | None = None) -> Tensor:
        """What the kernel should make of it; words that it should not write are ``UNWRITTEN``."""
        return plan_of(self.q, self.k, tile, of_keys, in_parts)


def plan_on_numpy(
    packing: Packing, tile: int, of_keys: bool = False, in_parts: InParts | None = None
) -> Tensor:
    """The plan as the kernel leaves it in memory that was ``UNWRITTEN``."""
    total, parts = packing.total_k if of_keys else packing.total_q, in_parts.most if in_parts else 1
    words = plan_words(total, packing.sequences - 1, tile, parts)
    plan = torch.full((words,), UNWRITTEN, dtype=torch.int32)
    fill_plan_on_numpy(plan, packing, tile, of_keys, in_parts)
    return plan


def fill_plan_on_numpy(
    plan: Tensor, packing: Packing, tile: int, of_keys: bool = False, in_parts: InParts | None = None
) -> None:
    """What the kernel writes to ``plan``, whatever room that has."""
    of_q, of_k = (packing.cu_seqlens_q, packing.seqused_q), (packing.cu_seqlens_k, packing.seqused_k)
    if in_parts is None:
        config, arguments = PlanConfig("sm_80"), Arguments()
        _add_lengths(arguments, *(each for pair in zip(of_q, of_k, strict=True) for each in pair))
        arguments.tensor(plan, (len(plan),), ())
        arguments.add(packing.total_q, packing.total_k, tile, int(of_keys))
    else:
        config, arguments = PlanConfig("sm_80", in_parts=True), Arguments()
        for lengths, total in ((of_q, packing.total_q), (of_k, packing.total_k)):
            _add_lengths(arguments, *lengths)
            arguments.add(total)
        arguments.tensor(plan, (len(plan),), ())
        arguments.add(tile, in_parts.tile_n, in_parts.seen, in_parts.heads, in_parts.slots, in_parts.most)
    ctas = -(-packing.sequences // WARPS_PER_CTA)
    arguments.launch(program_of(config), (ctas, 1, 1))


def _add_lengths(arguments: Arguments, *vectors: tuple[int, ...]) -> None:
    for numbers in vectors:
        arguments.tensor(torch.tensor(numbers, dtype=torch.int32), (len(numbers),), ())
