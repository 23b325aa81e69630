"""Two reports of the same kind, cell by cell: how many times as fast the later one is.

Figures of two runs are of two clocks, and often of two cards: a few percent either way mean nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopper_attention.experiments.bench.results import OURS, geometric_mean, is_ours, load_forward
from hopper_attention.experiments.reports import SCHEMA, number
from hopper_attention.experiments.tables import FittedTable, figures, names

if TYPE_CHECKING:
    from hopper_attention.experiments.workloads.results import WorkloadCell

OVER_BEST = "ours / best peer"
SAME_KEYS = ("gpu", "driver", "torch", "cuda", "cudnn", "cute_dsl")
"""What two machines should have in common for their figures to be compared."""


@dataclass(frozen=True)
class Figure:
    """One measured number. ``who`` is a peer or a row, ``what`` the problem."""

    what: str
    who: str
    value: float
    unit: str
    more_is_better: bool = False


@dataclass(frozen=True)
class Compared:
    """A figure in two reports. ``speedup`` above 1 says that the later one is better."""

    before: Figure
    after: Figure

    @property
    def speedup(self) -> float:
        better, worse = self.after.value, self.before.value
        return better / worse if self.after.more_is_better else worse / better


def throughput_figures(text: str, kind: str) -> Iterable[Figure]:
    for cell in load_forward(text, kind).cells:
        for peer in cell.peers:
            if cell.tflops(peer):
                yield Figure(cell.problem.name, peer, cell.tflops(peer), "TFLOP/s", True)
        if not math.isnan(cell.ratio):
            yield Figure(cell.problem.name, OVER_BEST, cell.ratio, "", True)


def ablation_figures(text: str, kind: str) -> Iterable[Figure]:
    from hopper_attention.experiments.ablation.results import load_ablation

    report = load_ablation(text)
    for row in report.rows:
        if row.tflops:
            yield Figure(report.problem.name, row.variant, row.tflops, "TFLOP/s", True)


def latency_figures(text: str, kind: str) -> Iterable[Figure]:
    data = json.loads(text)
    for peer, entry in data["host_us"].items():
        if "median" in entry:
            yield Figure(data["problem"], peer, entry["median"], "us host")
    for cell in data.get("small", ()):
        for peer, entry in cell["peers"].items():
            for key in ("device_us", "wait_us", "graph_us"):
                if entry["ok"] and entry[key] is not None:
                    yield Figure(cell["problem"], peer, entry[key], f"us {key.removesuffix('_us')}")
    for state, entry in data["first_call_s"].items():
        yield Figure("first call", OURS, entry["median"], f"s, {state}")


def scaling_figures(text: str, kind: str) -> Iterable[Figure]:
    from hopper_attention.experiments.scaling.run import load_scaling

    for cell in load_scaling(text).cells:
        for peer in cell.peers:
            scaled = cell.measured(peer)
            if scaled is not None:
                yield Figure(cell.problem.name, peer, scaled.median_ms, "ms")
                if not math.isnan(scaled.memory_bytes):
                    yield Figure(cell.problem.name, peer, scaled.memory_bytes / 2**20, "MiB")


def quantize_figures(text: str, kind: str) -> Iterable[Figure]:
    from hopper_attention.experiments.bench.results import Failed
    from hopper_attention.experiments.prepass.run import load_quantize

    for cell in load_quantize(text).cells:
        if not isinstance(cell.passes, Failed):
            for name, entry in cell.passes.items():
                yield Figure(cell.problem.name, name, entry.median_us, "us")


def workload_figures(cells: Iterable[WorkloadCell[Any]]) -> Iterable[Figure]:
    """Of every peer on every workload, and of ours over the best of the others."""
    for cell in cells:
        for peer in cell.peers:
            if not math.isnan(cell.us(peer)):
                yield Figure(cell.workload.name, peer, cell.us(peer), "us")
        if not math.isnan(cell.ratio):
            yield Figure(cell.workload.name, OVER_BEST, cell.ratio, "", True)


def feature_figures(text: str, kind: str) -> Iterable[Figure]:
    from hopper_attention.experiments.features.results import load_features

    return workload_figures(load_features(text).cells)


def serving_figures(text: str, kind: str) -> Iterable[Figure]:
    from hopper_attention.experiments.bench.results import Failed
    from hopper_attention.experiments.serving.results import load_serving

    report = load_serving(text)
    yield from workload_figures(report.cells)
    for peer, entry in report.host.items():
        if not isinstance(entry, Failed):
            yield Figure("call", peer, entry.median_us, "us host")


READERS: Mapping[str, Callable[[str, str], Iterable[Figure]]] = {
    "forward": throughput_figures,
    "fp8": throughput_figures,
    "backward": throughput_figures,
    "ablation": ablation_figures,
    "latency": latency_figures,
    "scaling": scaling_figures,
    "prepass": quantize_figures,
    "features": feature_figures,
    "serving": serving_figures,
}


def kind_of(text: str) -> str:
    """The kind of a report.

    Raises:
        ValueError: the text is no report that can be compared.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        kind, schema = data.get("kind"), data.get("schema")
    except (json.JSONDecodeError, AttributeError):
        raise ValueError("report is not a JSON object, allowed: what a benchmark wrote with --json") from None
    if kind not in READERS or schema != SCHEMA:
        raise ValueError(
            f"report is kind {kind!r}, schema {schema!r}, allowed: {', '.join(READERS)}, schema {SCHEMA}"
        )
    return str(kind)


def compare(before: str, after: str) -> list[Compared]:
    """Figures that two reports' texts share, in the order of the later one.

    Raises:
        ValueError: they are not reports of the same kind, or have no figure in common.
    """
    kinds = kind_of(before), kind_of(after)
    if kinds[0] != kinds[1]:
        raise ValueError(f"reports are of kinds {kinds[0]!r} and {kinds[1]!r}, allowed: the same kind")
    read = READERS[kinds[0]]
    old = {(figure.what, figure.who, figure.unit): figure for figure in read(before, kinds[0])}
    new = {(figure.what, figure.who, figure.unit): figure for figure in read(after, kinds[0])}
    shared = [Compared(old[key], figure) for key, figure in new.items() if key in old]
    if not shared:
        raise ValueError("reports have no figure in common, allowed: two runs that share problems")
    return shared


def of_whom(compared: Iterable[Compared], names: str) -> list[Compared]:
    """Figures of some peers or rows, comma-separated. Without names: of ours where peers take part, else of all;
    "all" for all.

    Raises:
        ValueError: there is none.
    """
    every = list(compared)
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if wanted == {"all"}:
        return every
    if not wanted:
        own = [c for c in every if is_ours(c.after.who) or c.after.who == OVER_BEST]
        return own or every
    kept = [c for c in every if c.after.who in wanted]
    if not kept:
        whose = sorted({c.after.who for c in every})
        raise ValueError(
            f"peers is {names!r}, allowed: all, or comma-separated names out of {', '.join(whose)}"
        )
    return kept


def machine_changes(before: str, after: str) -> list[str]:
    """What differs between the machines of two reports, a line each."""
    old, new = (json.loads(text).get("machine", {}) for text in (before, after))
    return [
        f"{key}: {old.get(key, '')} before, {new.get(key, '')} after"
        for key in SAME_KEYS
        if old.get(key) != new.get(key)
    ]


def slower_than(compared: Iterable[Compared], least: float) -> list[Compared]:
    """Figures that fell below ``least`` of what they were."""
    return [c for c in compared if c.speedup < least]


def compare_table(compared: Iterable[Compared]) -> FittedTable:
    """Before, after and their ratio; a last line for the geometric mean of each unit."""
    columns = (*names("what", "who"), *figures("before", "after", "times as good"), *names("unit"))
    rows = []
    by_unit: dict[str, list[float]] = {}
    for c in compared:
        by_unit.setdefault(c.after.unit, []).append(c.speedup)
        values = (number(figure.value, digits_for(figure.value)) for figure in (c.before, c.after))
        rows.append((c.after.what, c.after.who, *values, speedup_mark(c.speedup), c.after.unit))
    means = [
        ("geometric mean", "", "", "", f"{geometric_mean(speedups):.3f}", unit)
        for unit, speedups in by_unit.items()
    ]
    return FittedTable("Before and after", columns, [rows, means])


def digits_for(value: float) -> int:
    """Digits after the point that leave three or four in all."""
    return 3 if value < 10 else 1 if value < 1000 else 0


def speedup_mark(speedup: float) -> str:
    colour = "green" if speedup >= 1 else "yellow" if speedup >= 0.97 else "red"
    return f"[{colour}]{speedup:.3f}[/{colour}]"
