"""What a benchmark run measured, as data: problems, results, JSON, and the figures drawn from them.

Nothing here needs torch or a GPU. A report is one run on one machine; ``bench_compare`` holds two of them against
each other, but only ratios within one run are safe, because clocks drift.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
KINDS = ("forward", "fp8", "backward")
"""What a throughput report is of: the forward in 16 bits or in FP8, or the backward in 16 bits."""

OURS = "ours"
OURS_END_TO_END = "ours_e2e"
OURS_16_BIT = "ours_bf16"
OURS_TWO_LEVEL = "ours_two_level"
"""Rows of an FP8 report beside our kernel: with the pre-pass, from 16 bits to 16 bits; our 16-bit kernel; and the FP8
kernel with two-level accumulation."""

AMPERE = "ampere"
"""Our kernel without WGMMA, on any GPU that it runs on; a report without a row ``ours`` is about it."""

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LONG_DTYPES = {long: short for short, long in SHORT_DTYPES.items()}

PAPER_TOKENS = 16_384
PAPER_WIDTH = 2_048
PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
PAPER_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Problem:
    """One forward problem: q (batch, seqlen_q, heads, head_dim), k and v with ``heads_kv`` heads."""

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def flops(self) -> float:
        """Operations as the paper counts them (section 4.1): both matrix products, halved if causal."""
        scores = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        products = 2.0 * scores * (self.head_dim + self.head_dim_v)
        return products / 2 if self.causal else products

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v together."""
        size = 4 if self.dtype == "float32" else 2
        queries = self.seqlen_q * self.heads * self.head_dim
        keys = self.seqlen_k * self.heads_kv * (self.head_dim + self.head_dim_v)
        return self.batch * (queries + keys) * size

    @property
    def name(self) -> str:
        """Short name, which :func:`parse_problem` reads back, such as ``bf16-b4-s4096-h16-d128-causal``."""
        parts = [LONG_DTYPES[self.dtype], f"b{self.batch}", f"s{self.seqlen_q}"]
        parts += [f"sk{self.seqlen_k}"] if self.seqlen_k != self.seqlen_q else []
        parts += [f"h{self.heads}"]
        parts += [f"hk{self.heads_kv}"] if self.heads_kv != self.heads else []
        parts += [f"d{self.head_dim}"]
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v != self.head_dim else []
        return "-".join([*parts, "causal" if self.causal else "full"])


ABLATION = Problem("float16", 4, 8448, 8448, 16, 16, 128, 128, causal=False)
"""The shape of the paper's ablation (section 4.2)."""


def paper_grid(dtype: str = "bfloat16") -> tuple[Problem, ...]:
    """The paper's 36 forward cells (section 4.1): 16384 tokens, heads x head_dim = 2048."""
    return tuple(
        Problem(dtype, PAPER_TOKENS // s, s, s, PAPER_WIDTH // d, PAPER_WIDTH // d, d, d, causal)
        for d in PAPER_HEAD_DIMS
        for causal in (False, True)
        for s in PAPER_SEQLENS
    )


def parse_problem(text: str) -> Problem:
    """Read a name such as ``bf16-b4-s8192-h16-hk4-d128-causal``; sk, hk and dv default to s, h and d.

    Raises:
        ValueError: a part is missing or is not one of those.
    """
    sizes: dict[str, int] = {}
    words: list[str] = []
    for part in text.strip().split("-"):
        match = re.fullmatch(r"(b|sk|s|hk|h|dv|d)(\d+)", part)
        if match:
            sizes[match[1]] = int(match[2])
        else:
            words.append(part)
    dtypes = [SHORT_DTYPES[word] for word in words if word in SHORT_DTYPES]
    masks = [word for word in words if word in ("causal", "full")]
    missing = [key for key in ("b", "s", "h", "d") if key not in sizes]
    if missing or len(dtypes) != 1 or len(masks) > 1 or len(dtypes) + len(masks) != len(words):
        raise ValueError(
            f"shape is {text!r}, allowed: names such as bf16-b4-s8192-h16-d128-causal (sk, hk, dv optional), "
            f"a dtype of {', '.join(SHORT_DTYPES)}, and causal or full"
        )
    return Problem(
        dtype=dtypes[0],
        batch=sizes["b"],
        seqlen_q=sizes["s"],
        seqlen_k=sizes.get("sk", sizes["s"]),
        heads=sizes["h"],
        heads_kv=sizes.get("hk", sizes["h"]),
        head_dim=sizes["d"],
        head_dim_v=sizes.get("dv", sizes["d"]),
        causal=masks == ["causal"],
    )


def parse_shapes(text: str) -> tuple[Problem, ...]:
    """Comma-separated problems; ``paper`` stands for the 36 cells, ``ablation`` for the ablation's shape."""
    groups = {"paper": paper_grid(), "ablation": (ABLATION,)}
    problems: list[Problem] = []
    for part in text.split(","):
        problems += groups[part.strip()] if part.strip() in groups else [parse_problem(part)]
    return tuple(dict.fromkeys(problems))


def is_ours(peer: str) -> bool:
    """Whether a row runs this library."""
    return peer in (OURS, OURS_END_TO_END, OURS_16_BIT, OURS_TWO_LEVEL, AMPERE)


def main_row(peers: Iterable[str]) -> str:
    """The row of ours whose speed a report with these rows is about."""
    names = set(peers)
    return AMPERE if AMPERE in names and OURS not in names else OURS


@dataclass(frozen=True)
class Measured:
    """Speed of one peer on one problem.

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


@dataclass(frozen=True)
class Failed:
    """Why a peer has no figure for a problem: it cannot run it, it raised, or its output is wrong."""

    reason: str

    @property
    def lacks_kernel(self) -> bool:
        """Whether the peer says that it has nothing that runs the problem."""
        return self.reason.startswith(NotImplementedError.__name__)


PeerResult = Measured | Failed


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

    @property
    def best_peer(self) -> str:
        """The fastest peer that is not a row of ours; empty if there is none."""
        others = [name for name in self.peers if not is_ours(name) and self.tflops(name) > 0]
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


def rounded(value: Any) -> Any:
    """Five significant digits, which is more than a timing holds, and null for what JSON cannot write."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return value


def _cell_record(cell: Cell) -> dict[str, Any]:
    peers = {
        name: {"ok": isinstance(result, Measured), **asdict(result)} for name, result in cell.peers.items()
    }
    gauges = {"input_sets": cell.input_sets, "clock_mhz": cell.clock_mhz, "power_w": cell.power_w}
    return rounded({**asdict(cell.problem), **gauges, "peers": peers})


def _read_cell(record: dict[str, Any]) -> Cell:
    def read_peer(entry: dict[str, Any]) -> PeerResult:
        fields = {key: value for key, value in entry.items() if key != "ok"}
        return Measured(**fields) if entry["ok"] else Failed(**fields)

    problem = Problem(**{key: record[key] for key in Problem.__dataclass_fields__})
    peers = {name: read_peer(entry) for name, entry in record["peers"].items()}
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


def dump_rows(head: dict[str, Any], name: str, records: Sequence[dict[str, Any]]) -> str:
    """JSON text with a line for each entry of ``head`` and for each record of the list ``name``."""
    lines = [f"{json.dumps(key)}: {json.dumps(rounded(value))}," for key, value in head.items()]
    rows = ",\n".join("  " + json.dumps(rounded(record)) for record in records)
    return "{\n" + "\n".join(lines) + f'\n"{name}": [\n' + rows + "\n]\n}\n"


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


def dump_figures(figures: dict[str, Any]) -> str:
    """JSON text of a latency or accuracy report, one line a key."""
    lines = [f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in figures.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_figures(text: str, kind: str) -> dict[str, Any]:
    """Read what :func:`dump_figures` wrote.

    Raises:
        ValueError: the text is not a report of this kind and schema.
    """
    data: dict[str, Any] = json.loads(text)
    if data.get("kind") != kind or data.get("schema") != SCHEMA:
        found = f"kind {data.get('kind')!r}, schema {data.get('schema')!r}"
        raise ValueError(f"report is {found}, allowed: kind {kind!r}, schema {SCHEMA}")
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a run that is cut short leaves the last complete report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


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
