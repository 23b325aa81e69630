"""Reports as text: tables for the terminal, Markdown for the README and docs/results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hopper_attention.experiments.bench_results import (
    ABLATION,
    OURS,
    PAPER_HEAD_DIMS,
    PAPER_SEQLENS,
    Cell,
    Change,
    Failed,
    ForwardReport,
    Measured,
    Problem,
    geometric_mean,
    grid_cells,
    ratios,
)
from hopper_attention.experiments.bench_targets import (
    Target,
    forward_targets,
    latency_targets,
    rmse_targets,
    worst_cell,
)

MARKERS = "<!-- results:forward -->", "<!-- /results:forward -->"


def short_length(seqlen: int) -> str:
    """512, 1k, 16k."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def describe(problem: Problem) -> tuple[str, str, str, str]:
    """Dtype, head dims, mask and sizes of a problem, as table cells."""
    name = problem.name.split("-")
    dims = f"{problem.head_dim}" + (
        f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else ""
    )
    sizes = " ".join(part for part in name[1:-1] if not part.startswith("d"))
    return name[0], dims, "causal" if problem.causal else "full", sizes


def number(value: float | None, digits: int = 0) -> str:
    """A figure of fixed digits, a dash where there is none."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def measured_peers(report: ForwardReport) -> list[str]:
    """Peers that were available, ours first."""
    names = [name for name, info in report.peers.items() if not info.unavailable]
    return sorted(names, key=lambda name: name != OURS)


def peer_figure(cell: Cell, peer: str) -> str:
    result = cell.peers.get(peer)
    if result is None:
        return "–"
    if isinstance(result, Failed):
        return "failed"
    return number(result.tflops) if result.tflops >= 100 else f"{result.tflops:.3g}"


def problems_of(report: ForwardReport) -> list[str]:
    """What did not run and why, a line each: absent peers, then failures."""
    lines = [f"{name}: {info.unavailable}" for name, info in report.peers.items() if info.unavailable]
    for cell in report.cells:
        for name, result in cell.peers.items():
            if isinstance(result, Failed):
                lines.append(f"{name} on {cell.problem.name}: {result.reason}")
    return lines


# The terminal


def forward_table(report: ForwardReport) -> Table:
    """TFLOP/s of every peer, ours over the best of the others, spread of ours, clock and power."""
    table = Table(
        title=f"Forward, TFLOP/s · {report.machine['gpu']} · {report.commit[:12]}", title_justify="left"
    )
    for heading in ("dtype", "d", "mask", "sizes"):
        table.add_column(heading)
    peers = measured_peers(report)
    for heading in (*peers, "ratio", "spread", "MHz", "W"):
        table.add_column(heading, justify="right")
    for cell in report.cells:
        ours = cell.peers.get(OURS)
        spread = number(100 * ours.spread, 1) + " %" if isinstance(ours, Measured) else "–"
        figures = [mark(peer_figure(cell, peer)) for peer in peers]
        gauges = number(cell.clock_mhz), number(cell.power_w)
        table.add_row(*describe(cell.problem), *figures, ratio_mark(cell.ratio), spread, *gauges)
    return table


def mark(figure: str) -> str:
    return f"[red]{figure}[/red]" if figure == "failed" else figure


def ratio_mark(ratio: float) -> str:
    if math.isnan(ratio):
        return "–"
    colour = "green" if ratio >= 1 else "yellow" if ratio >= 0.9 else "red"
    return f"[{colour}]{ratio:.2f}[/{colour}]"


def target_table(targets: Sequence[Target]) -> Table:
    """Each promise, what was measured, and whether it is met."""
    table = Table(title="Targets", title_justify="left")
    for heading in ("what", "required", "measured", ""):
        table.add_column(heading)
    for target in targets:
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        table.add_row(target.what, target.required, target.measured, verdict)
    return table


def compare_table(changes: Sequence[Change]) -> Table:
    """Two reports side by side; the last row is the geometric mean of the changes."""
    table = Table(title="Ours, before and after", title_justify="left")
    for heading in ("dtype", "d", "mask", "sizes"):
        table.add_column(heading)
    for heading in ("before", "after", "change", "ratio before", "ratio after"):
        table.add_column(heading, justify="right")
    for change in changes:
        factor = change.after / change.before
        figures = number(change.before), number(change.after), f"{factor:.3f}"
        table.add_row(
            *describe(change.problem), *figures, number(change.ratio_before, 2), number(change.ratio_after, 2)
        )
    mean = geometric_mean(change.after / change.before for change in changes)
    table.add_row("all", "", "", "", "", "", f"{mean:.3f}", "", "")
    return table


# Markdown


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left and whose others are aligned right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def all_targets(
    report: ForwardReport, latency: Mapping[str, Any] | None, rmse: Mapping[str, Any] | None
) -> list[Target]:
    """The promises that these reports can answer."""
    targets = forward_targets(report)
    targets += latency_targets(latency) if latency else []
    targets += rmse_targets(rmse) if rmse else []
    return targets


def grid_table(report: ForwardReport) -> str:
    """The paper's grid: TFLOP/s of ours, in brackets its ratio over the best peer."""
    found = {(c.problem.head_dim, c.problem.causal, c.problem.seqlen_q): c for c in grid_cells(report)}
    rows = []
    for head_dim in PAPER_HEAD_DIMS:
        for causal in (False, True):
            cells = [found.get((head_dim, causal, seqlen)) for seqlen in PAPER_SEQLENS]
            figures = [f"{peer_figure(c, OURS)} ({number(c.ratio, 2)})" if c else "–" for c in cells]
            rows.append([f"{head_dim}, {'causal' if causal else 'full'}", *figures])
    return markdown_table(["head_dim, mask", *map(short_length, PAPER_SEQLENS)], rows)


def summary(report: ForwardReport) -> str:
    """Geometric mean, worst cell and the ablation's shape, in a sentence each."""
    cells = grid_cells(report)
    worst, rated, ablation = worst_cell(cells), ratios(cells), report.cell(ABLATION)
    sentences = []
    if worst is not None:
        sentences.append(f"Geometric mean over the best peer: **{geometric_mean(rated):.3f}**.")
        where = f"`{worst.problem.name}`, against {report.peers[worst.best_peer].title}"
        sentences.append(f"Worst cell: {worst.ratio:.2f} ({where}).")
    if ablation is not None and ablation.tflops(OURS):
        fa3 = ablation.tflops("fa3")
        against = f", {ablation.tflops(OURS) / fa3:.3f} of FlashAttention-3" if fa3 else ""
        sentences.append(f"`{ABLATION.name}`: **{ablation.tflops(OURS):.0f} TFLOP/s**{against}.")
    return " ".join(sentences)


def render_readme(report: ForwardReport, latency: Mapping[str, Any] | None) -> str:
    """The README's part: the grid, and what to read from it."""
    others = [f"{report.peers[name].title}" for name in measured_peers(report) if name != OURS]
    parts = [
        f"TFLOP/s of our bf16 forward on one {report.machine['gpu']}, by sequence length; 16384 tokens, "
        "heads × head_dim = 2048, as in the paper. In brackets: over the fastest of "
        f"{', '.join(others)} in the same interleaved run.",
        grid_table(report),
        summary(report),
    ]
    host = latency["host_us"] if latency else {}
    if "median" in host.get(OURS, {}):
        compared = [f"{host[n]['median']:.0f} {n}" for n in host if n != OURS and "median" in host[n]]
        parts.append(
            f"Host time a call: **{host[OURS]['median']:.0f} us** ({', '.join(compared)})."
            if compared
            else f"Host time a call: **{host[OURS]['median']:.0f} us**."
        )
    parts.append("Every peer, clocks and method: [docs/results/forward.md](docs/results/forward.md).")
    return "\n\n".join(parts)


def render_peers_table(report: ForwardReport, cells: Sequence[Cell]) -> str:
    """Every peer on some cells, with ratio, spread, clock and power."""
    peers = measured_peers(report)
    rows = []
    for cell in cells:
        dtype, dims, mask, sizes = describe(cell.problem)
        ours = cell.peers.get(OURS)
        spread = number(100 * ours.spread, 1) if isinstance(ours, Measured) else "–"
        figures = [peer_figure(cell, peer) for peer in peers]
        gauges = [number(cell.ratio, 2), spread, number(cell.clock_mhz), number(cell.power_w)]
        rows.append([f"{dtype} d{dims} {mask}, {sizes}", *figures, *gauges])
    head = ["problem", *peers, "ratio", "spread of ours, %", "MHz", "W"]
    return markdown_table(head, rows)


def render_latency(latency: Mapping[str, Any]) -> str:
    """Host time a call of every peer, and the first call of a fresh process."""
    rows = []
    for name, entry in latency["host_us"].items():
        if "median" in entry:
            rows.append([name, f"{entry['median']:.1f}", f"{entry['device_us']:.1f}"])
        else:
            rows.append([name, "failed", entry["failed"]])
    text = markdown_table(["peer", "host time a call, us", "device time a launch, us"], rows)
    first = [
        [state, f"{entry['median']:.2f}", ", ".join(f"{s:.2f}" for s in entry["runs"])]
        for state, entry in latency["first_call_s"].items()
    ]
    table = markdown_table(["first call in a fresh process, beyond torch", "s", "runs"], first)
    return (
        f"Problem: `{latency['problem']}`. Wall clock of a call, the GPU running along.\n\n{text}\n\n{table}"
    )


def render_rmse(rmse: Mapping[str, Any]) -> str:
    """Errors of the 16-bit peers on the outlier inputs."""
    rows = [
        [name, f"{value:.2e}" if isinstance(value, float) else "failed"]
        for name, value in rmse["rmse"].items()
    ]
    shape = f"{rmse['batch']} x {rmse['seqlen']} x {rmse['heads']} x {rmse['head_dim']}, {rmse['dtype']}"
    note = f"Inputs N(0, 1) + N(0, 100) Bernoulli(0.001), {shape}; against float64."
    return f"{note}\n\n{markdown_table(['peer', 'RMSE'], rows)}"


def render_page(
    report: ForwardReport, latency: Mapping[str, Any] | None, rmse: Mapping[str, Any] | None, figure: str
) -> str:
    """docs/results/forward.md: everything that was measured. ``figure`` is the plot's file name beside it."""
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items() if value != "")
    versions = [
        f"- {name}: {info.title}, {info.version}" for name, info in report.peers.items() if info.version
    ]
    method = [f"- {key}: {value}" for key, value in report.method.items()]
    targets = all_targets(report, latency, rmse)
    rows = [[t.what, t.required, t.measured, "yes" if t.met else "no"] for t in targets]
    grid = grid_cells(report)
    others = [cell for cell in report.cells if cell not in grid]
    parts = [
        "# Forward, 16 bit: results",
        "Rendered by `python benchmarks/render.py` from `benchmarks/results/`; do not edit by hand.",
        f"Measured {report.date[:10]} at commit `{report.commit[:12]}` on {machine}.",
        f"![TFLOP/s by sequence length, a panel a head_dim and mask]({figure})",
        summary(report),
        "## Targets",
        markdown_table(["what", "required", "measured", "met"], rows),
        "## Throughput",
        "TFLOP/s; `ratio` is ours over the fastest other peer; `spread` is the interquartile range of the "
        "rounds over their median.",
        render_peers_table(report, [*grid, *others]),
    ]
    if latency:
        parts += ["## Latency", render_latency(latency)]
    if rmse:
        parts += ["## Accuracy", render_rmse(rmse)]
    parts += ["## Peers", "\n".join(versions), "## Method", "\n".join(method)]
    lines = problems_of(report)
    if lines:
        parts += ["## What did not run", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def splice(text: str, body: str) -> str:
    """``text`` with what lies between the two markers replaced by ``body``.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    first, last = MARKERS
    found = re.findall(rf"{re.escape(first)}\n.*?{re.escape(last)}", text, re.S)
    if len(found) != 1 or text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"the text must hold the lines {first} and {last} once each, in this order")
    return text.replace(found[0], f"{first}\n{body}\n{last}")
