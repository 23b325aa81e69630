"""Which rows of a report also run without a pause: a few, since each takes seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hopper_attention.experiments.bench.results import Cell, Measured
from hopper_attention.experiments.bench.spec import Problem

BUDGET_S = 20.0
"""Seconds of launches without a pause in a run."""

PEERS_OF_A_ROW = 2
"""Our main row, and the fastest other peer of its bursts."""

MIDDLE_HEAD_DIM = 128


@dataclass(frozen=True)
class SustainedRows:
    """Problems of which each of ``peers_of`` runs for so many seconds."""

    seconds: float = 0.0
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[Problem], seconds: float) -> SustainedRows:
        """The longest of each head_dim and mask, as many as ``BUDGET_S`` has room for, one at least; causal ones first,
        and of these head_dim 128."""
        if not seconds:
            return cls()
        longest: dict[tuple[int, bool], Problem] = {}
        for problem in problems:
            kind = problem.head_dim, problem.causal
            if kind not in longest or problem.flops > longest[kind].flops:
                longest[kind] = problem
        rows = max(1, int(BUDGET_S / (PEERS_OF_A_ROW * seconds)))
        return cls(seconds, tuple(sorted(longest.values(), key=_order)[:rows]))

    def peers_of(self, cell: Cell) -> tuple[str, ...]:
        """Who of a cell does, as far as they have a figure; nobody where it is not one of ``problems``."""
        names = (cell.main_row, cell.best_peer) if cell.problem in self.problems else ()
        return tuple(name for name in names if isinstance(cell.peers.get(name), Measured))


def _order(problem: Problem) -> tuple[bool, float]:
    return not problem.causal, abs(math.log2(problem.head_dim / MIDDLE_HEAD_DIM))


NO_ROWS = SustainedRows()
