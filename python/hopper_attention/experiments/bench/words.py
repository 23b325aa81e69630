"""What a throughput or latency report says, piece by piece: the texts that its tables and its pages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hopper_attention.experiments.bench.results import (
    AMPERE,
    OURS_END_TO_END,
    Cell,
    Failed,
    ForwardReport,
    PeerInfo,
    is_ours,
)
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.reports import NOTHING, number


@dataclass(frozen=True)
class Wording:
    """What a kind of report is called: in titles, in a sentence, and how the table of the grid is read."""

    title: str
    subject: str
    legend: str


WORDINGS = {
    "forward": Wording(
        "Forward, 16 bit",
        "bf16 forward",
        "In brackets: over the fastest of {peers} in the same interleaved run.",
    ),
    "fp8": Wording(
        "Forward, FP8",
        "FP8 forward",
        "First the kernel alone, in brackets over the fastest of {peers} in the same interleaved run; after the slash "
        "end to end from bf16 to bf16, with the quantization that a user pays for.",
    ),
    "backward": Wording(
        "Backward, 16 bit",
        "bf16 backward",
        "Operations are counted as in the paper, 2.5 times those of the forward. In brackets: over the fastest of "
        "{peers} in the same interleaved run.",
    ),
}


def without_wgmma(wording: Wording) -> Wording:
    """Of the same kind of report, about the kernels without WGMMA."""
    return replace(
        wording, title=f"{wording.title}, without WGMMA", subject=f"{wording.subject} without WGMMA"
    )


def wording_of(report: ForwardReport) -> Wording:
    """What a report is called, by what it is of and whose kernels it is about."""
    wording = WORDINGS[report.kind]
    return without_wgmma(wording) if report.main_row == AMPERE else wording


FAILED = "failed"
NO_KERNEL = "no kernel"
LATENCY_HEADINGS = ("host", "device", "call and wait", "in a graph")


def describe(problem: Problem) -> tuple[str, str, str, str]:
    """Dtype, head dims, mask and sizes of a problem, as table cells."""
    name = problem.name.split("-")
    dims = f"{problem.head_dim}" + (
        f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else ""
    )
    sizes = " ".join(part for part in name[1:-1] if not part.startswith("d"))
    return name[0], dims, "causal" if problem.causal else "full", sizes


def measured_peers(report: ForwardReport) -> list[str]:
    """Peers that were available, rows of ours first."""
    names = [name for name, info in report.peers.items() if not info.unavailable]
    return sorted(names, key=lambda name: not is_ours(name))


def shows_gain(report: ForwardReport) -> bool:
    """Whether the report has end-to-end figures beside those of the kernel."""
    return OURS_END_TO_END in measured_peers(report)


def measured_ratios(report: ForwardReport, cell: Cell) -> list[float]:
    """Of a cell: ours over the best peer and, where there are such figures, end to end over our 16-bit kernel."""
    return [cell.ratio, cell.gain] if shows_gain(report) else [cell.ratio]


def ratio_headings(report: ForwardReport) -> list[str]:
    return ["ratio", "e2e/bf16"] if shows_gain(report) else ["ratio"]


def peer_figure(cell: Cell, peer: str) -> str:
    result = cell.peers.get(peer)
    if result is None:
        return "–"
    if isinstance(result, Failed):
        return NO_KERNEL if result.lacks_kernel else FAILED
    return number(result.tflops) if result.tflops >= 100 else f"{result.tflops:.3g}"


def failures(infos: Mapping[str, PeerInfo], results: Iterable[tuple[str, Mapping[str, object]]]) -> list[str]:
    """What did not run and why, a line each: absent peers, then failures, out of peers' results by problem."""
    lines = [f"{name}: {info.unavailable}" for name, info in infos.items() if info.unavailable]
    for problem, peers in results:
        failed = ((name, result) for name, result in peers.items() if isinstance(result, Failed))
        lines += [f"{name} on {problem}: {result.reason}" for name, result in failed]
    return lines


def problems_of(report: ForwardReport) -> list[str]:
    """The failures of a throughput report."""
    return failures(report.peers, ((cell.problem.name, cell.peers) for cell in report.cells))


def latency_rows(latency: Mapping[str, Any]) -> list[list[str]]:
    """A row for each problem and peer."""
    rows = []
    for cell in latency.get("small", ()):
        for peer, entry in cell["peers"].items():
            if entry["ok"]:
                keys = ("host_us", "device_us", "wait_us", "graph_us")
                rows.append([cell["problem"], peer, *(number(entry[key], 1) for key in keys)])
            else:
                rows.append([cell["problem"], peer, "failed", *[NOTHING] * 3])
    return rows


def latency_problems(latency: Mapping[str, Any]) -> list[str]:
    """What did not run or could not be captured, a line each: absent peers, then failures."""
    infos = latency["peers"].items() if latency.get("small") else ()
    lines = [f"{name}: {info['unavailable']}" for name, info in infos if info["unavailable"]]
    for cell in latency.get("small", ()):
        for peer, entry in cell["peers"].items():
            reason = entry["no_graph"] if entry["ok"] else entry["reason"]
            if reason:
                lines.append(f"{peer} on {cell['problem']}{', graph' if entry['ok'] else ''}: {reason}")
    return lines
