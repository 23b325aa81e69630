"""Reports as text: tables for the terminal, Markdown for the README and docs/results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from hopper_attention.experiments.bench_results import (
    ABLATION,
    AMPERE,
    OURS_END_TO_END,
    PAPER_HEAD_DIMS,
    PAPER_SEQLENS,
    Cell,
    Failed,
    ForwardReport,
    Measured,
    Problem,
    gains,
    geometric_mean,
    grid_cells,
    is_ours,
    ratios,
)
from hopper_attention.experiments.bench_targets import (
    Target,
    lacks_kernel,
    latency_targets,
    longest_problem,
    rmse_targets,
    throughput_targets,
    worst_cell,
)


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


NOTHING = "–"
FAILED = "failed"
NO_KERNEL = "no kernel"
COLOURS = {FAILED: "red", NO_KERNEL: "yellow"}
LATENCY_HEADINGS = ("host", "device", "call and wait", "in a graph")


def markers(kind: str) -> tuple[str, str]:
    """Lines of the README between which a kind of report is rendered."""
    return f"<!-- results:{kind} -->", f"<!-- /results:{kind} -->"


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
    title = f"{wording_of(report).title}, TFLOP/s · {report.machine['gpu']} · {report.commit[:12]}"
    table = Table(title=title, title_justify="left")
    for heading in ("dtype", "d", "mask", "sizes"):
        table.add_column(heading)
    peers = measured_peers(report)
    for heading in (*peers, *ratio_headings(report), "spread", "MHz", "W"):
        table.add_column(heading, justify="right")
    for cell in report.cells:
        ours = cell.peers.get(cell.main_row)
        spread = number(100 * ours.spread, 1) + " %" if isinstance(ours, Measured) else "–"
        figures = [mark(peer_figure(cell, peer)) for peer in peers]
        figures += [ratio_mark(ratio) for ratio in measured_ratios(report, cell)]
        gauges = number(cell.clock_mhz), number(cell.power_w)
        table.add_row(*describe(cell.problem), *figures, spread, *gauges)
    return table


def mark(figure: str) -> str:
    colour = COLOURS.get(figure)
    return f"[{colour}]{figure}[/{colour}]" if colour else figure


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


# Markdown


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left and whose others are aligned right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def all_targets(
    report: ForwardReport, latency: Mapping[str, Any] | None, rmse: Mapping[str, Any] | None
) -> list[Target]:
    """The promises that these reports can answer."""
    targets = throughput_targets(report)
    targets += latency_targets(latency) if latency else []
    targets += rmse_targets(rmse) if rmse else []
    return targets


def grid_table(report: ForwardReport) -> str:
    """The paper's grid: TFLOP/s of ours, in brackets its ratio over the best peer, and end to end if that was run."""

    def figure(cell: Cell) -> str:
        if lacks_kernel(cell):
            return NO_KERNEL
        kernel = f"{peer_figure(cell, cell.main_row)} ({number(cell.ratio, 2)})"
        return f"{kernel} / {peer_figure(cell, OURS_END_TO_END)}" if shows_gain(report) else kernel

    found = {(c.problem.head_dim, c.problem.causal, c.problem.seqlen_q): c for c in grid_cells(report)}
    rows = []
    for head_dim in PAPER_HEAD_DIMS:
        for causal in (False, True):
            cells = [found.get((head_dim, causal, seqlen)) for seqlen in PAPER_SEQLENS]
            figures = [figure(cell) if cell else "–" for cell in cells]
            rows.append([f"{head_dim}, {'causal' if causal else 'full'}", *figures])
    return markdown_table(["head_dim, mask", *map(short_length, PAPER_SEQLENS)], rows)


def summary(report: ForwardReport) -> str:
    """Geometric mean, worst cell, end to end and the ablation's shape, in a sentence each."""
    cells = grid_cells(report)
    worst, rated, ablation = worst_cell(cells), ratios(cells), report.cell(ABLATION)
    gained, longest = gains(cells), report.cell(longest_problem(128))
    sentences = []
    if worst is not None:
        share = f" of {len(rated)} of {len(cells)} cells" if len(rated) < len(cells) else ""
        sentences.append(f"Geometric mean over the best peer{share}: **{geometric_mean(rated):.3f}**.")
        where = f"`{worst.problem.name}`, against {report.peers[worst.best_peer].title}"
        sentences.append(f"Worst cell: {worst.ratio:.2f} ({where}).")
    if gained:
        whole = f"End to end over our 16-bit kernel: geometric mean **{geometric_mean(gained):.2f}**"
        if longest is not None and longest.tflops(OURS_END_TO_END):
            whole += f", **{number(longest.gain, 2)}** at `{longest.problem.name}`"
        sentences.append(f"{whole}.")
    if ablation is not None and ablation.tflops(ablation.main_row):
        ours, fa3 = ablation.tflops(ablation.main_row), ablation.tflops("fa3")
        against = f", {ours / fa3:.3f} of FlashAttention-3" if fa3 else ""
        sentences.append(f"`{ABLATION.name}`: **{ours:.0f} TFLOP/s**{against}.")
    return " ".join(sentences)


def render_grid(report: ForwardReport) -> str:
    """The grid of the paper with what its figures are: the part of a page that is read first."""
    others = [report.peers[name].title for name in measured_peers(report) if not is_ours(name)]
    wording = wording_of(report)
    legend = (
        f"TFLOP/s of our {wording.subject} on one {report.machine['gpu']}, by sequence length; 16384 tokens, "
        f"heads × head_dim = 2048, as in the paper. {wording.legend.format(peers=', '.join(others))}"
    )
    return f"{legend} Inputs: {report.method.get('inputs', NOTHING)}.\n\n{grid_table(report)}"


def render_peers_table(report: ForwardReport, cells: Sequence[Cell]) -> str:
    """Every peer on some cells, with ratio, spread, clock and power."""
    peers = measured_peers(report)
    rows = []
    for cell in cells:
        dtype, dims, mask, sizes = describe(cell.problem)
        ours = cell.peers.get(cell.main_row)
        spread = number(100 * ours.spread, 1) if isinstance(ours, Measured) else "–"
        figures = [peer_figure(cell, peer) for peer in peers]
        figures += [number(ratio, 2) for ratio in measured_ratios(report, cell)]
        gauges = [spread, number(cell.clock_mhz), number(cell.power_w)]
        rows.append([f"{dtype} d{dims} {mask}, {sizes}", *figures, *gauges])
    head = ["problem", *peers, *ratio_headings(report), "spread of ours, %", "MHz", "W"]
    return markdown_table(head, rows)


def measured_at(latency: Mapping[str, Any]) -> str:
    """Which commit a latency report is of: it need not be that of the report beside which it stands."""
    return f", measured at commit `{latency['commit'][:12]}`" if latency.get("commit") else ""


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
    intro = (
        f"Problem: `{latency['problem']}`. Wall clock of a call, the GPU running along{measured_at(latency)}."
    )
    return "\n\n".join(part for part in (intro, text, table, render_small_shapes(latency)) if part)


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


def render_small_shapes(latency: Mapping[str, Any]) -> str:
    """The part of a page about small shapes; empty where the report has none."""
    rows = latency_rows(latency)
    if not rows:
        return ""
    legend = (
        "Microseconds a call. `host`: to queue it. `device`: on the device, calls back to back. `call and wait`: from "
        "the call until its result is there. `in a graph`: on the device, in a replayed CUDA graph of 20 calls."
    )
    merged = [[f"`{row[0]}` {row[1]}", *row[2:]] for row in rows]
    lines = "\n".join(f"- {line}" for line in latency_problems(latency))
    parts = [
        "### Small shapes",
        legend,
        markdown_table(["problem and peer", *LATENCY_HEADINGS], merged),
        lines,
    ]
    return "\n\n".join(part for part in parts if part)


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
    """docs/results/<kind>.md: everything that was measured. ``figure`` is the plot's file name beside it."""
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items() if value != "")
    versions = [
        f"- {name}: {info.title}, {info.version}" for name, info in report.peers.items() if info.version
    ]
    method = [f"- {key}: {value}" for key, value in report.method.items()]
    targets = all_targets(report, latency, rmse)
    rows = [[t.what, t.required, t.measured, "yes" if t.met else "no"] for t in targets]
    grid = grid_cells(report)
    others = [cell for cell in report.cells if cell not in grid]
    legend = (
        "TFLOP/s; `ratio` is ours over the fastest other peer; `spread` is the interquartile range of the "
        "rounds over their median."
    )
    if shows_gain(report):
        legend += (
            " Figures of `ours` and of the other peers are those of the kernel alone; those of `ours_e2e` hold the "
            "quantization too, and `e2e/bf16` is their ratio to our 16-bit kernel's."
        )
    parts = [
        f"# {wording_of(report).title}: results",
        "Rendered by `python benchmarks/render.py` from `benchmarks/results/`; do not edit by hand.",
        f"Measured {report.date[:10]} at commit `{report.commit[:12]}` on {machine}.",
        f"![TFLOP/s by sequence length, a panel a head_dim and mask]({figure})",
        "## The paper's grid",
        render_grid(report),
        summary(report),
        "## Targets",
        markdown_table(["what", "required", "measured", "met"], rows),
        "## Throughput",
        legend,
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


def splice(text: str, body: str, kind: str) -> str:
    """``text`` with what lies between this kind's two markers replaced by ``body``.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    first, last = markers(kind)
    found = re.findall(rf"{re.escape(first)}\n.*?{re.escape(last)}", text, re.S)
    if len(found) != 1 or text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"the text must hold the lines {first} and {last} once each, in this order")
    return text.replace(found[0], f"{first}\n{body}\n{last}")
