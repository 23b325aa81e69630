"""What a benchmark run measured, as data: results, JSON, and the figures drawn from them.

Nothing here needs torch or a GPU. A report is one run on one machine; ``bench.compare`` holds two of them against
each other, but only ratios within one run are safe, because clocks drift.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hopper_attention.experiments.bench.spec import Problem, paper_grid
from hopper_attention.experiments.reports import SCHEMA, dump_rows, load_figures, rounded

KINDS = ("forward", "fp8", "backward")
"""What a throughput report is of: the forward in 16 bits or in FP8, or the backward in 16 bits."""

OURS = "ours"
OURS_END_TO_END = "ours_e2e"
OURS_16_BIT = "ours_bf16"
OURS_TWO_LEVEL = "ours_two_level"
OURS_DROP_IN = "ours_drop_in"
OURS_DROP_IN_LSE = "ours_drop_in_lse"
"""Rows of an FP8 report beside our kernel: with the pre-pass, from 16 bits to 16 bits; our 16-bit kernel; the FP8
kernel with two-level accumulation; and FlashAttention-3's own call, on e4m3 tensors with descales, without the LSE and
with it."""

OURS_DETERMINISTIC = "ours_deterministic"
"""The row of a backward report whose sums have a fixed order."""

MATMUL = "matmul"
"""A matrix product of as many operations: no attention, and so no rival, but what the tensor cores reach."""

AMPERE = "ampere"
"""Our kernel without WGMMA, on any GPU that it runs on; a report without a row ``ours`` is about it."""

OTHER_ROWS = (
    *(OURS_END_TO_END, OURS_16_BIT, OURS_TWO_LEVEL, OURS_DROP_IN, OURS_DROP_IN_LSE),
    OURS_DETERMINISTIC,
)


def is_ours(peer: str) -> bool:
    """Whether a row runs this library."""
    return peer in (OURS, *OTHER_ROWS, AMPERE)


def is_rival(peer: str) -> bool:
    """Whether a row is attention by somebody else."""
    return not is_ours(peer) and peer != MATMUL


def main_row(peers: Iterable[str]) -> str:
    """The row of ours whose speed a report with these rows is about."""
    names = set(peers)
    return AMPERE if AMPERE in names and OURS not in names else OURS


@dataclass(frozen=True)
class Sustained:
    """Speed of a peer that has run for ``seconds`` without a pause; 0 where that was not measured. Clock (MHz) and
    power (W) are medians of the second half, None without a reading."""

    tflops: float = 0.0
    seconds: float = 0.0
    clock_mhz: float | None = None
    power_w: float | None = None


NOT_SUSTAINED = Sustained()


@dataclass(frozen=True)
class Measured:
    """Speed of one peer on one problem, in short bursts, and ``sustained``.

    ``spread`` is the interquartile range of the rounds over their median. ``error`` is the relative Frobenius
    error of the checked heads against float64. Clock (MHz) and power (W) are None where no reading fell into
    this peer's launches. ``note`` says what ran, where the peer can tell.
    """

    tflops: float
    median_ms: float
    spread: float
    rounds: int
    repeats: int
    error: float
    clock_mhz: float | None
    power_w: float | None
    note: str = ""
    sustained: Sustained = NOT_SUSTAINED


@dataclass(frozen=True)
class Failed:
    """Why a peer has no figure for a problem: it cannot run it, it raised, or its output is wrong."""

    reason: str

    @property
    def lacks_kernel(self) -> bool:
        """Whether the peer says that it has nothing that runs the problem."""
        return self.reason.startswith(NotImplementedError.__name__)


PeerResult = Measured | Failed


def peer_records(peers: Mapping[str, PeerResult]) -> dict[str, dict[str, Any]]:
    """Results as JSON has them."""
    records = {}
    for name, result in peers.items():
        records[name] = {"ok": isinstance(result, Measured), **asdict(result)}
        if isinstance(result, Measured) and result.sustained == NOT_SUSTAINED:
            del records[name]["sustained"]
    return records


def read_peers(records: Mapping[str, Mapping[str, Any]]) -> dict[str, PeerResult]:
    """What :func:`peer_records` made."""
    peers: dict[str, PeerResult] = {}
    for name, entry in records.items():
        fields = {key: value for key, value in entry.items() if key != "ok"}
        if "sustained" in fields:
            fields["sustained"] = Sustained(**fields["sustained"])
        peers[name] = Measured(**fields) if entry["ok"] else Failed(**fields)
    return peers


@dataclass(frozen=True)
class Cell:
    """All peers on one problem, interleaved, launches rotating over ``input_sets`` sets of q, k, v."""

    problem: Problem
    input_sets: int
    clock_mhz: float | None
    power_w: float | None
    peers: dict[str, PeerResult]

    def tflops(self, peer: str) -> float:
        """TFLOP/s of a peer, 0.0 if it has no figure."""
        result = self.peers.get(peer)
        return result.tflops if isinstance(result, Measured) else 0.0

    def quotient(self, peer: str, other: str) -> float:
        """TFLOP/s of a peer over those of another; NaN where either has no figure."""
        above, below = self.tflops(peer), self.tflops(other)
        return above / below if above and below else math.nan

    def sustained(self, peer: str) -> float:
        """TFLOP/s of a peer without a pause, 0.0 if it has no such figure."""
        result = self.peers.get(peer)
        return result.sustained.tflops if isinstance(result, Measured) else 0.0

    @property
    def best_sustained(self) -> str:
        """As ``best_peer``, without a pause."""
        others = [name for name in self.peers if is_rival(name) and self.sustained(name) > 0]
        return max(others, key=self.sustained, default="")

    @property
    def best_peer(self) -> str:
        """The fastest peer that is not a row of ours; empty if there is none."""
        others = [name for name in self.peers if is_rival(name) and self.tflops(name) > 0]
        return max(others, key=self.tflops, default="")

    @property
    def main_row(self) -> str:
        return main_row(self.peers)

    @property
    def ratio(self) -> float:
        """Ours over the best peer; NaN where either has no figure."""
        return self.quotient(self.main_row, self.best_peer)

    @property
    def gain(self) -> float:
        """FP8 end to end, pre-pass included, over our 16-bit kernel; NaN where either has no figure."""
        return self.quotient(OURS_END_TO_END, OURS_16_BIT)

    @property
    def drop_in(self) -> float:
        """e4m3 tensors with descales, which we transpose V of, over the best peer; NaN where either has no figure."""
        return self.quotient(OURS_DROP_IN, self.best_peer)


@dataclass(frozen=True)
class PeerInfo:
    """A peer as it was on the machine: ``unavailable`` is empty, or says why it did not run."""

    title: str
    version: str
    unavailable: str


@dataclass(frozen=True)
class ForwardReport:
    """One run of a forward benchmark; ``kind`` is one of KINDS."""

    machine: dict[str, Any]
    commit: str
    date: str
    method: dict[str, Any]
    peers: dict[str, PeerInfo]
    cells: tuple[Cell, ...]
    kind: str = KINDS[0]

    @property
    def main_row(self) -> str:
        return main_row(self.peers)

    def cell(self, problem: Problem) -> Cell | None:
        return next((cell for cell in self.cells if cell.problem == problem), None)


def _cell_record(cell: Cell) -> dict[str, Any]:
    gauges = {"input_sets": cell.input_sets, "clock_mhz": cell.clock_mhz, "power_w": cell.power_w}
    return rounded({**asdict(cell.problem), **gauges, "peers": peer_records(cell.peers)})


def _read_cell(record: dict[str, Any]) -> Cell:
    problem = Problem(**{key: record[key] for key in Problem.__dataclass_fields__})
    peers = read_peers(record["peers"])
    return Cell(problem, record["input_sets"], record["clock_mhz"], record["power_w"], peers)


def dump_forward(report: ForwardReport) -> str:
    """JSON text of a report, one line a cell, so that a change of one figure is a change of one line."""
    head = {
        "schema": SCHEMA,
        "kind": report.kind,
        "date": report.date,
        "commit": report.commit,
        "machine": report.machine,
        "method": report.method,
        "peers": {name: asdict(info) for name, info in report.peers.items()},
    }
    return dump_rows(head, "cells", [_cell_record(cell) for cell in report.cells])


def load_forward(text: str, kind: str = KINDS[0]) -> ForwardReport:
    """Read what :func:`dump_forward` wrote.

    Raises:
        ValueError: the text is not a throughput report of this kind and schema.
    """
    data = load_figures(text, kind)
    return ForwardReport(
        machine=data["machine"],
        commit=data["commit"],
        date=data["date"],
        method=data["method"],
        peers={name: PeerInfo(**entry) for name, entry in data["peers"].items()},
        cells=tuple(_read_cell(record) for record in data["cells"]),
        kind=kind,
    )


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN for none of them."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def relative_spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median; 0.0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def ratios(cells: Iterable[Cell]) -> list[float]:
    """Ours over the best peer, for the cells that have both."""
    return [cell.ratio for cell in cells if not math.isnan(cell.ratio)]


def gains(cells: Iterable[Cell]) -> list[float]:
    """FP8 end to end over our 16-bit kernel, for the cells that have both."""
    return [cell.gain for cell in cells if not math.isnan(cell.gain)]


def grid_cells(report: ForwardReport) -> list[Cell]:
    """The report's cells that belong to the paper's grid, in its order."""
    found = (report.cell(problem) for problem in paper_grid())
    return [cell for cell in found if cell is not None]
