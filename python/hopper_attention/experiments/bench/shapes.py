"""What the forward promises on problems beside the paper's grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hopper_attention.experiments.bench.results import MATMUL, OURS, Cell, ForwardReport, Measured
from hopper_attention.experiments.bench.spec import BETWEEN_TILES, EVEN, IMAGES, LONGEST, RAGGED, SHORT
from hopper_attention.experiments.reports import Target

SHORT_US = dict(zip(SHORT, (10.0, 5.0), strict=True))
"""Microseconds of a launch among others back to back, at most."""

LEAST_RAGGED = 0.98
LEAST_CAUSAL = 0.98
LEAST_OF_MATMUL = 0.97
MATMUL_HEAD_DIMS = (128, 256)


def shape_targets(report: ForwardReport) -> list[Target]:
    """Those whose problems have been run; none for a report of the grid alone."""
    if all(report.cell(problem) is None for problem in (EVEN, RAGGED, *BETWEEN_TILES, IMAGES, *SHORT)):
        return []
    return [
        *_shares("rate", report.cell(EVEN), report.cell(RAGGED), LEAST_RAGGED),
        *_over_best([report.cell(problem) for problem in (*BETWEEN_TILES, IMAGES)]),
        *_short_targets(report),
        *(
            target
            for full, causal in LONGEST.values()
            for target in _shares("rate", report.cell(full), report.cell(causal), LEAST_CAUSAL)
        ),
        *_matmul_targets(report),
    ]


def _shares(what: str, of: Cell | None, cell: Cell | None, least: float) -> list[Target]:
    """TFLOP/s of one cell of ours over those of another."""
    if of is None or cell is None or not of.tflops(OURS):
        return []
    share = cell.tflops(OURS) / of.tflops(OURS)
    name = f"{what} of {cell.problem.name} over {of.problem.name}"
    return [Target(name, f">= {least:.2f}", f"{share:.3f}", share >= least)]


def _over_best(cells: Sequence[Cell | None]) -> list[Target]:
    return [
        Target(
            f"{cell.problem.name} over the best peer",
            ">= 1.00",
            f"{cell.ratio:.3f} ({cell.best_peer})",
            cell.ratio >= 1,
        )
        for cell in cells
        if cell is not None and not math.isnan(cell.ratio)
    ]


def _short_targets(report: ForwardReport) -> list[Target]:
    targets = []
    for problem, limit in SHORT_US.items():
        cell = report.cell(problem)
        ours = cell.peers.get(OURS) if cell else None
        if isinstance(ours, Measured):
            us = ours.median_ms * 1e3
            targets.append(Target(problem.name, f"<= {limit:.0f} us", f"{us:.1f} us", us <= limit))
    return targets


def _matmul_targets(report: ForwardReport) -> list[Target]:
    targets = []
    for head_dim in MATMUL_HEAD_DIMS:
        cell = report.cell(LONGEST[head_dim][0])
        share = cell.quotient(OURS, MATMUL) if cell else math.nan
        if cell is not None and not math.isnan(share):
            name = f"{cell.problem.name} over a matrix product of as many operations"
            targets.append(
                Target(name, f">= {LEAST_OF_MATMUL:.2f}", f"{share:.3f}", share >= LEAST_OF_MATMUL)
            )
    return targets
