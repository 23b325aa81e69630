"""What a run of the features' benchmark measured, as data: cells, JSON, and the promises held against them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hopper_attention.experiments.bench.results import (
    AMPERE,
    OURS,
    OURS_16_BIT,
    OURS_END_TO_END,
    Failed,
    Measured,
    peer_records,
    read_peers,
)
from hopper_attention.experiments.features.spec import WORKLOADS, Workload
from hopper_attention.experiments.reports import Target, dump_rows, load_figures, rounded
from hopper_attention.experiments.workloads.results import WorkloadCell, WorkloadReport, target_of_failures
from hopper_attention.experiments.workloads.spec import H200

KIND = "features"
OURS_DENSE = "ours_dense"
"""Our dense call on packed sequences of equal lengths."""

OWN = (OURS, OURS_DENSE, OURS_END_TO_END, OURS_16_BIT, AMPERE)
LEAST_RATIO = 1.05
"""Ours over the best peer, promised wherever no other promise is."""

LEAST_OF_DENSE = 0.97
"""Of the speed of our dense call, promised for packed sequences of equal lengths."""

LEAST_OVER_16_BITS = 1.3
"""Of FP8, over our kernels of 16 bits."""

LEAST_RATIOS = {"softcap": 1.0, "alibi": 1.1, "sinks": LEAST_RATIO}
"""The same where scores or P are changed, by what changes them."""

LEAST_WITH_DROPOUT = {"forward": 1.5, "backward": 1.2}

SHORT_WINDOW = 128
MOST_US = {("forward", 128): 85.0, ("forward", 64): 110.0, ("backward", 128): 280.0}
"""Microseconds for 16k tokens, by pass and head_dim, with a window of SHORT_WINDOW keys: there the host and the edges
decide, and no multiple of a peer."""

MOST_US_WITH_SINKS = 100.0
"""The same of a forward with sinks, for 8k tokens of 64 heads."""


@dataclass(frozen=True)
class FeatureCell(WorkloadCell[Workload]):
    """All peers on one workload."""

    OWN = OWN

    def tflops(self, peer: str) -> float:
        """Useful TFLOP/s of a peer; NaN if it has no figure."""
        result = self.peers.get(peer)
        return result.tflops if isinstance(result, Measured) else math.nan


@dataclass(frozen=True)
class FeatureReport(WorkloadReport[FeatureCell]):
    """One run on one machine."""


# Promises


def feature_targets(report: FeatureReport) -> list[Target]:
    """What is promised of these workloads, as far as this report can answer."""
    targets = [target for cell in report.cells for target in cell_targets(cell, report.gpu)]
    failed = [c.workload.name for c in report.cells if isinstance(c.peers.get(OURS), Failed)]
    return targets + target_of_failures(failed)


def cell_targets(cell: FeatureCell, gpu: str) -> list[Target]:
    """Of a workload of the list: a time, or a ratio to the best peer, and one to our dense call."""
    if cell.workload not in WORKLOADS or math.isnan(cell.us(OURS)):
        return []
    name, targets = cell.workload.name, []
    most, least = most_us(cell.workload), least_ratio(cell.workload)
    if not math.isnan(most):
        if H200 in gpu:
            met = cell.us(OURS) <= most
            targets.append(Target(name, f"<= {most:.0f} us", f"{cell.us(OURS):.1f} us", met))
    elif cell.best_peer and OURS_DENSE not in cell.peers:
        measured = f"{cell.ratio:.3f} of {cell.best_peer}"
        targets.append(Target(name, f">= {least:.2f}", measured, cell.ratio >= least))
    of_dense = cell.over(OURS_DENSE)
    if not math.isnan(of_dense):
        required, measured = f">= {LEAST_OF_DENSE:.2f} of our dense call", f"{of_dense:.3f}"
        targets.append(Target(name, required, measured, of_dense >= LEAST_OF_DENSE))
    over_16 = cell.over(OURS_16_BIT)
    if cell.workload.is_fp8 and not math.isnan(over_16):
        required, measured = f">= {LEAST_OVER_16_BITS:.1f} of our 16 bits", f"{over_16:.3f}"
        targets.append(Target(name, required, measured, over_16 >= LEAST_OVER_16_BITS))
    return targets


def most_us(workload: Workload) -> float:
    """Microseconds that are promised on an H200; NaN where a ratio is."""
    if workload.window[0] != SHORT_WINDOW - 1:
        return math.nan
    if workload.sinks:
        return MOST_US_WITH_SINKS
    return MOST_US.get((workload.direction, workload.head_dim), math.nan) * workload.tokens / 16_384


def least_ratio(workload: Workload) -> float:
    """To the best peer."""
    if workload.dropout:
        return LEAST_WITH_DROPOUT[workload.direction]
    ratios = [least for name, least in LEAST_RATIOS.items() if getattr(workload, name)]
    return min(ratios, default=LEAST_RATIO)


# JSON


def cell_record(cell: FeatureCell, gpu: str) -> dict[str, Any]:
    w = cell.workload
    derived = {"name": w.name, "flops": w.flops, "moved_bytes": w.moved_bytes, "limit_us": w.limit_us(gpu)}
    gauges = {"input_sets": cell.input_sets, "clock_mhz": cell.clock_mhz, "power_w": cell.power_w}
    workload = {**asdict(w), "lengths": list(w.lengths), "window": list(w.window)}
    return rounded({**derived, "workload": workload, **gauges, "peers": peer_records(cell.peers)})


def read_cell(record: dict[str, Any]) -> FeatureCell:
    fields = record["workload"]
    lists = {"lengths": tuple(fields["lengths"]), "window": tuple(fields["window"])}
    gauges = record["input_sets"], record["clock_mhz"], record["power_w"]
    return FeatureCell(Workload(**{**fields, **lists}), *gauges, read_peers(record["peers"]))


def dump_features(report: FeatureReport) -> str:
    """JSON text of a report, one line a cell, with the lengths of its sequences."""
    return dump_rows(report.head, "cells", [cell_record(cell, report.gpu) for cell in report.cells])


def load_features(text: str) -> FeatureReport:
    """Read what :func:`dump_features` wrote.

    Raises:
        ValueError: the text is not a report of this kind and schema.
    """
    data = load_figures(text, KIND)
    cells = tuple(read_cell(record) for record in data["cells"])
    return FeatureReport({key: value for key, value in data.items() if key != "cells"}, cells)
