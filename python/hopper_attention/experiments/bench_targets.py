"""What the 16-bit forward promises, held against what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hopper_attention.experiments.bench_results import (
    ABLATION,
    OURS,
    Cell,
    Failed,
    ForwardReport,
    geometric_mean,
    grid_cells,
    paper_grid,
    ratios,
)

CELL_RATIO = 0.90
MEAN_RATIO = 0.97
ABLATION_TFLOPS = 661.0
ABLATION_RATIO = 0.97
HOST_US = 25.0
COLD_S = 4.0
WARM_S = 0.5


@dataclass(frozen=True)
class Target:
    """One promise: what is required, what was measured, and whether that meets it."""

    what: str
    required: str
    measured: str
    met: bool


def worst_cell(cells: list[Cell]) -> Cell | None:
    """The cell with the lowest ratio of ours over the best peer, of those that have one."""
    rated = [cell for cell in cells if not math.isnan(cell.ratio)]
    return min(rated, key=lambda cell: cell.ratio, default=None)


def forward_targets(report: ForwardReport) -> list[Target]:
    """Ratios over the best peer on the paper's grid, and the ablation's shape against FA3."""
    cells = grid_cells(report)
    rated, worst, total = ratios(cells), worst_cell(cells), len(paper_grid())
    targets = []
    if worst is not None:
        enough = sum(ratio >= CELL_RATIO for ratio in rated)
        lowest = (
            f"{enough} of {total} cells; lowest {worst.ratio:.2f} ({worst.problem.name}, {worst.best_peer})"
        )
        met = enough == total
        targets += [Target("forward, each cell over the best peer", f">= {CELL_RATIO:.2f}", lowest, met)]
        mean = geometric_mean(rated)
        figure = f"{mean:.3f} of {len(rated)} cells"
        met = mean >= MEAN_RATIO and len(rated) == total
        targets += [Target("forward, geometric mean over the best peer", f">= {MEAN_RATIO:.2f}", figure, met)]
    ablation = report.cell(ABLATION)
    if ablation is not None:
        ours, fa3 = ablation.tflops(OURS), ablation.tflops("fa3")
        of_fa3 = ours / fa3 if fa3 else math.nan
        targets.append(
            Target(
                ABLATION.name,
                f">= {ABLATION_TFLOPS:.0f} TFLOP/s and >= {ABLATION_RATIO:.2f} of FA3",
                f"{ours:.0f} TFLOP/s, {of_fa3:.3f} of FA3",
                ours >= ABLATION_TFLOPS and of_fa3 >= ABLATION_RATIO,
            )
        )
    failed = [cell.problem.name for cell in report.cells if isinstance(cell.peers.get(OURS), Failed)]
    if failed:
        targets.append(
            Target("every cell right", "no failure of ours", f"failed: {', '.join(failed)}", False)
        )
    return targets


def latency_targets(figures: Mapping[str, Any]) -> list[Target]:
    """Host time a call, and the first call of a fresh process."""
    targets = []
    host = figures["host_us"].get(OURS, {})
    if "median" in host:
        us = host["median"]
        what = f"host time a call ({figures['problem']})"
        targets.append(Target(what, f"<= {HOST_US:.0f} us", f"{us:.1f} us", us <= HOST_US))
    first = figures["first_call_s"]
    for state, limit in (("nothing cached", COLD_S), ("cached on disk", WARM_S)):
        if state in first:
            seconds = first[state]["median"]
            what = f"first call in a fresh process, {state}"
            targets.append(Target(what, f"<= {limit:g} s", f"{seconds:.2f} s", seconds <= limit))
    return targets


def rmse_targets(figures: Mapping[str, Any]) -> list[Target]:
    """Error on the paper's outlier inputs, against FA3's."""
    ours, fa3 = figures["rmse"].get(OURS), figures["rmse"].get("fa3")
    if not isinstance(ours, float) or not isinstance(fa3, float):
        return []
    # Two digits, as the error is printed: the third depends on the draw.
    met = float(f"{ours:.1e}") <= float(f"{fa3:.1e}")
    return [Target("RMSE on the paper's outlier inputs, fp16", f"<= {fa3:.2e} (FA3)", f"{ours:.2e}", met)]
