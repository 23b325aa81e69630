"""Error against the number of keys: what the accumulators of FP8 attention lose as a row gets longer.

FP8 WGMMA keeps fewer bits of a sum than float32 has. What that costs is the kernel's error against that of its
emulation, which differs from it in nothing else, over lengths; both relative to the output, which gets
smaller as more keys are averaged.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hopper_attention.experiments.rmse.methods import HOPPER_KERNEL, METHODS, Method
from hopper_attention.experiments.rmse.run import (
    LeftOut,
    Progress,
    RmseReport,
    ignore_progress,
    run_rmse,
    spread_of,
)
from hopper_attention.experiments.rmse.spec import RmseExperiment, describe_heads, describe_inputs

SWEPT = ("flash", "fp8-both", "fp8-two-level", "fp8-smooth-v", "fp8-emulated")
"""Rows that are swept unless others are asked for."""

DEFAULT_LENGTHS = (1024, 4096, 16384, 65536, 131072)
DEFAULT_QUERIES = 256

SHORT, LONG = 4096, 65536
"""The two lengths that the growth of the error is stated for."""


@dataclass(frozen=True)
class LengthSweep:
    """An experiment at several numbers of keys, in ascending order; its own ``seqlen`` is not used.

    ``queries`` of the experiment holds for every length that has as many; 0 means ``DEFAULT_QUERIES``.
    """

    experiment: RmseExperiment
    lengths: tuple[int, ...] = DEFAULT_LENGTHS

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        if not self.lengths or self.lengths[0] < 1 or not ascending:
            text = ",".join(map(str, self.lengths))
            raise ValueError(f"lengths is {text!r}, allowed: ascending numbers from 1, as 1024,4096")

    def at(self, length: int) -> RmseExperiment:
        queries = self.experiment.queries or DEFAULT_QUERIES
        return replace(self.experiment, seqlen=length, queries=min(queries, length))


def describe_sweep(sweep: LengthSweep) -> str:
    """The inputs and the shape in one line."""
    e = sweep.experiment
    queries = sweep.at(sweep.lengths[-1]).queries
    seeds = f" · {e.seeds} seeds" if e.seeds > 1 else ""
    return f"{describe_inputs(e)} · {queries} queries · {describe_heads(e)}{seeds}"


def parse_lengths(text: str) -> tuple[int, ...]:
    """Comma-separated numbers of keys.

    Raises:
        ValueError: something else is in the text.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"lengths is {text!r}, allowed: comma-separated numbers, as 1024,4096,16384")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class SweepPoint:
    """Error of one row at one length over the root mean square of the output: its mean and spread over the seeds."""

    method: str
    label: str
    seqlen: int
    error: float
    spread: float
    implementation: str


@dataclass(frozen=True)
class SweepReport:
    sweep: LengthSweep
    points: tuple[SweepPoint, ...]
    left_out: tuple[LeftOut, ...]

    def curve(self, method: str) -> tuple[SweepPoint, ...]:
        """The points of one row by length; empty where there are none."""
        return tuple(point for point in self.points if point.method == method)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.method for point in self.points))


def points_of(report: RmseReport) -> list[SweepPoint]:
    points = []
    for row in report.rows:
        relative = [error / rms for error, rms in zip(row.by_seed, report.rms_by_seed, strict=True)]
        figures = (statistics.fmean(relative), spread_of(relative))
        points.append(
            SweepPoint(row.method, row.label, report.experiment.seqlen, *figures, row.implementation)
        )
    return points


@dataclass(frozen=True)
class ProgressOfLength:
    """Passes the steps of one length on as the step of the sweep that they belong to."""

    progress: Progress
    lengths_done: int
    lengths: int
    length: int

    def __call__(self, done: int, total: int, label: str) -> None:
        if label:
            self.progress(self.lengths_done, self.lengths, f"{self.length} keys: {label}")


def run_sweep(
    sweep: LengthSweep,
    progress: Progress = ignore_progress,
    *,
    methods: Sequence[Method] = (),
    fa3_library: str = "",
) -> SweepReport:
    """Measure the methods (``SWEPT`` by default) at every length; ``progress`` counts the lengths."""
    swept = methods or tuple(method for method in METHODS if method.name in SWEPT)
    points: list[SweepPoint] = []
    left_out: dict[str, LeftOut] = {}
    for done, length in enumerate(sweep.lengths):
        show = ProgressOfLength(progress, done, len(sweep.lengths), length)
        report = run_rmse(sweep.at(length), show, methods=swept, fa3_library=fa3_library)
        points += points_of(report)
        left_out |= {entry.method: entry for entry in report.left_out}
    progress(len(sweep.lengths), len(sweep.lengths), "")
    return SweepReport(sweep, tuple(points), tuple(left_out.values()))


def growth(report: SweepReport, method: str) -> float:
    """Error at ``LONG`` keys over that at ``SHORT``, both relative to the output; 0 where one is missing."""
    errors = {point.seqlen: point.error for point in report.curve(method)}
    return errors[LONG] / errors[SHORT] if {SHORT, LONG} <= set(errors) else 0.0


def summarize(report: SweepReport) -> dict[str, float]:
    """Growth of the error of our FP8 from ``SHORT`` to ``LONG`` keys, as far as it was measured.

    "kernel": the kernel's; "emulation": its emulation's; "ratio": the first over the second; "two levels": the
    kernel's with two-level accumulation; "smooth V": that of FP8 with the mean of V subtracted, on what it ran on.
    """
    on_kernel = any(point.implementation == HOPPER_KERNEL for point in report.curve("fp8-both"))
    factors = {
        "kernel": growth(report, "fp8-both") if on_kernel else 0.0,
        "emulation": growth(report, "fp8-emulated" if on_kernel else "fp8-both"),
    }
    summary = {name: factor for name, factor in factors.items() if factor}
    if len(summary) == len(factors):
        summary["ratio"] = factors["kernel"] / factors["emulation"]
    variants = {"two levels": growth(report, "fp8-two-level"), "smooth V": growth(report, "fp8-smooth-v")}
    return summary | {name: factor for name, factor in variants.items() if factor}


def sweep_as_data(report: SweepReport) -> dict[str, Any]:
    """The report and its summary as JSON's own types."""
    return {
        "experiment": asdict(report.sweep.experiment),
        "lengths": list(report.sweep.lengths),
        "points": [asdict(point) for point in report.points],
        "left_out": [asdict(entry) for entry in report.left_out],
        "summary": summarize(report),
    }


def sweep_from_data(data: dict[str, Any]) -> SweepReport:
    """The report that :func:`sweep_as_data` wrote; the summary follows from it."""
    return SweepReport(
        sweep=LengthSweep(RmseExperiment(**data["experiment"]), tuple(data["lengths"])),
        points=tuple(SweepPoint(**point) for point in data["points"]),
        left_out=tuple(LeftOut(**entry) for entry in data["left_out"]),
    )
