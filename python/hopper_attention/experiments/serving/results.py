"""What a run of the serving benchmark measured, as data: cells, host times, JSON, and the promises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hopper_attention.experiments.bench.results import OURS, Failed, Measured, peer_records, read_peers
from hopper_attention.experiments.reports import Target, dump_rows, load_figures, rounded
from hopper_attention.experiments.serving import spec
from hopper_attention.experiments.serving.spec import ServingWorkload
from hopper_attention.experiments.workloads.results import WorkloadCell, WorkloadReport, target_of_failures
from hopper_attention.experiments.workloads.spec import H200

KIND = "serving"
OURS_PLAIN = "ours_plain"
"""Our call on the same keys without pages, or without new keys."""

OURS_FP8_QUERIES = "ours_fp8q"
"""Our call with queries in e4m3, on a cache in e4m3."""

OURS_KNOWN = "ours_known"
"""Our call with cache_seqlens as an int."""

OWN = (OURS, OURS_PLAIN, OURS_KNOWN, OURS_FP8_QUERIES)
MOST_HOST_US = 12.0
MOST_OF_16_BIT_ERROR = 2.0


@dataclass(frozen=True)
class Promise:
    """What one workload must reach; what is not promised is what everything meets.

    Attributes:
        least_of_best: ours over the best peer, as speeds.
        most_us: microseconds, of 16-bit and of FP8 queries, on an H200.
        least_of_plain: over our call without pages, as speeds.
        most_over_plain_us: microseconds more than our call without new keys.
    """

    least_of_best: float = 0.0
    most_us: float = math.inf
    least_of_plain: float = 0.0
    most_over_plain_us: float = math.inf


NOTHING_PROMISED = Promise()
FASTER = Promise(least_of_best=1.05)
LARGE = tuple(spec.equal(batch, length) for batch, length in ((64, 8), (8, 64), (256, 8)))
SMALL = tuple(spec.equal(8, length) for length in (1, 8))
ALONE = {1: 6.5, 8: 13.0, 64: 64.0, 128: 123.0}
"""Microseconds of one sequence, by thousands of keys."""

PROMISES: dict[ServingWorkload, Promise] = {
    **dict.fromkeys(LARGE, Promise(least_of_best=1.0)),
    **{spec.equal(1, length): Promise(most_us=us) for length, us in ALONE.items()},
    **dict.fromkeys((*SMALL, *spec.OTHER_HEADS), FASTER),
    **dict.fromkeys((w for w in spec.LATENT if w.batch > w.queries == 1), Promise(least_of_best=1.0)),
    **dict.fromkeys((w for w in spec.PAGED if w.batch < 64), Promise(least_of_plain=0.97)),
    **dict.fromkeys(spec.PREFILL, Promise(least_of_best=1.03)),
    **dict.fromkeys(spec.in_pages(*spec.PREFILL), Promise(least_of_best=1.10)),
    **dict.fromkeys(spec.APPENDED, Promise(most_over_plain_us=5.0)),
    **{w: Promise(most_us=us) for w, us in zip(spec.FP8, (36.0, 36.0, 255.0, 1010.0), strict=True)},
}


def promise_of(workload: ServingWorkload, gpu: str = H200) -> Promise:
    """What holds on the GPU of a name: ratios on any, microseconds on an H200."""
    promise = PROMISES.get(workload, NOTHING_PROMISED)
    return promise if H200 in gpu else replace(promise, most_us=math.inf)


@dataclass(frozen=True)
class ServingCell(WorkloadCell[ServingWorkload]):
    """All peers on one workload. A launch is ``calls`` calls, in turn on the sets of inputs; all figures are of one
    call."""

    OWN = OWN

    calls: int

    def gbs(self, peer: str) -> float:
        """GB/s of keys and values that a peer reads; NaN if it has no figure."""
        return self.workload.kv_bytes / self.us(peer) * 1e-3

    def tflops(self, peer: str) -> float:
        """Useful TFLOP/s of a peer; NaN if it has no figure."""
        return self.workload.flops / self.us(peer) * 1e-6


@dataclass(frozen=True)
class HostTime:
    """Microseconds of host time a call: the median over rounds, and their interquartile range over it."""

    median_us: float
    spread: float


@dataclass(frozen=True)
class ServingReport(WorkloadReport[ServingCell]):
    """One run on one machine; ``host`` is the host time of calls on ``spec.SHORT``, by peer."""

    host: Mapping[str, HostTime | Failed]


# Promises


def serving_targets(report: ServingReport) -> list[Target]:
    """What is promised of these workloads, as far as this report can answer."""
    targets = [target for cell in report.cells for target in cell_targets(cell, report.gpu)]
    targets += error_targets(report.cells)
    ours = report.host.get(OURS)
    if isinstance(ours, HostTime):
        met = ours.median_us <= MOST_HOST_US
        required = f"<= {MOST_HOST_US:.0f} us"
        targets.append(
            Target(f"host time a call, {spec.SHORT.name}", required, f"{ours.median_us:.1f} us", met)
        )
    failed = [
        cell.workload.name if name == OURS else f"{cell.workload.name} ({name})"
        for cell in report.cells
        for name, result in cell.peers.items()
        if name in OWN and isinstance(result, Failed)
    ]
    return targets + target_of_failures(failed)


def error_targets(cells: Sequence[ServingCell]) -> list[Target]:
    """That 16-bit queries on a cache in e4m3 add no more error to attention over its values than 16 bits have."""
    ours = {cell.workload: cell.peers.get(OURS) for cell in cells}
    targets, required = [], f"<= {MOST_OF_16_BIT_ERROR:g} times that of 16 bits"
    for workload, result in ours.items():
        in_16_bits = ours.get(replace(workload, is_fp8=False))
        if not workload.is_fp8 or not isinstance(result, Measured) or in_16_bits is None:
            continue
        ratio, measured = math.inf, "16 bits failed"
        if isinstance(in_16_bits, Measured) and in_16_bits.error:
            ratio = result.error / in_16_bits.error
            measured = f"{ratio:.2f}"
        targets.append(Target(f"error of {workload.name}", required, measured, ratio <= MOST_OF_16_BIT_ERROR))
    return targets


def cell_targets(cell: ServingCell, gpu: str) -> list[Target]:
    """Of one workload: those whose figures are there."""
    promise, name, targets = promise_of(cell.workload, gpu), cell.workload.name, []
    if promise.least_of_best and not math.isnan(cell.ratio):
        required, measured = f">= {promise.least_of_best:.2f}", f"{cell.ratio:.3f} of {cell.best_peer}"
        targets.append(Target(name, required, measured, cell.ratio >= promise.least_of_best))
    for peer, what in (
        (OURS, name),
        (OURS_KNOWN, f"{name}, known lengths"),
        (OURS_FP8_QUERIES, f"{name}, FP8 queries"),
    ):
        us, most = cell.us(peer), promise.most_us
        if math.isfinite(most) and not math.isnan(us):
            targets.append(Target(what, f"<= {most:g} us", f"{us:.1f} us", us <= most))
    of_plain, more = cell.over(OURS_PLAIN), cell.us(OURS) - cell.us(OURS_PLAIN)
    if promise.least_of_plain and not math.isnan(of_plain):
        required = f">= {promise.least_of_plain:.2f} of no pages"
        targets.append(Target(name, required, f"{of_plain:.3f}", of_plain >= promise.least_of_plain))
    if math.isfinite(promise.most_over_plain_us) and not math.isnan(more):
        required = f"<= {promise.most_over_plain_us:g} us over no new keys"
        targets.append(Target(name, required, f"{more:.1f} us", more <= promise.most_over_plain_us))
    return targets


# JSON


def cell_record(cell: ServingCell, gpu: str) -> dict[str, Any]:
    w = cell.workload
    derived = {"name": w.name, "flops": w.flops, "kv_bytes": w.kv_bytes, "limit_us": w.limit_us(gpu)}
    counts = {"input_sets": cell.input_sets, "calls": cell.calls}
    gauges = {**counts, "clock_mhz": cell.clock_mhz, "power_w": cell.power_w}
    workload = {**asdict(w), "lengths": list(w.lengths)}
    return rounded({**derived, "workload": workload, **gauges, "peers": peer_records(cell.peers)})


def read_cell(record: dict[str, Any]) -> ServingCell:
    fields = record["workload"]
    workload = ServingWorkload(**{**fields, "lengths": tuple(fields["lengths"])})
    gauges = record["input_sets"], record["clock_mhz"], record["power_w"]
    return ServingCell(workload, *gauges, read_peers(record["peers"]), record["calls"])


def dump_serving(report: ServingReport) -> str:
    """JSON text of a report, one line a cell, with the lengths of its sequences."""
    host = {name: {"ok": isinstance(entry, HostTime), **asdict(entry)} for name, entry in report.host.items()}
    return dump_rows(
        {**report.head, "host": host}, "cells", [cell_record(cell, report.gpu) for cell in report.cells]
    )


def load_serving(text: str) -> ServingReport:
    """Read what :func:`dump_serving` wrote.

    Raises:
        ValueError: the text is not a report of this kind and schema.
    """
    data = load_figures(text, KIND)
    cells = tuple(read_cell(record) for record in data["cells"])
    host: dict[str, HostTime | Failed] = {}
    for name, entry in data["host"].items():
        fields = {key: value for key, value in entry.items() if key != "ok"}
        host[name] = HostTime(**fields) if entry["ok"] else Failed(**fields)
    head = {key: value for key, value in data.items() if key not in ("cells", "host")}
    return ServingReport(head, cells, host)


def with_cell(report: ServingReport, cell: ServingCell) -> ServingReport:
    return replace(report, cells=(*report.cells, cell))
