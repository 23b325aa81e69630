"""Throughput reports as Markdown: the README's part, and the pages in docs/results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hopper_attention.experiments.bench.results import (
    OURS_END_TO_END,
    Cell,
    ForwardReport,
    Measured,
    gains,
    geometric_mean,
    grid_cells,
    is_ours,
    ratios,
)
from hopper_attention.experiments.bench.shapes import shape_targets
from hopper_attention.experiments.bench.spec import ABLATION, PAPER_HEAD_DIMS, PAPER_SEQLENS
from hopper_attention.experiments.bench.targets import (
    lacks_kernel,
    latency_targets,
    longest_problem,
    rmse_targets,
    throughput_targets,
    worst_cell,
)
from hopper_attention.experiments.bench.words import (
    LATENCY_HEADINGS,
    NO_KERNEL,
    describe,
    latency_problems,
    latency_rows,
    measured_peers,
    measured_ratios,
    peer_figure,
    problems_of,
    ratio_headings,
    shows_gain,
    wording_of,
)
from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    Target,
    lines_text,
    markdown_table,
    measured_on,
    method_text,
    number,
    page,
    section,
    short_length,
    targets_text,
)


def markers(kind: str) -> tuple[str, str]:
    """Lines of the README between which a kind of report is rendered."""
    return f"<!-- results:{kind} -->", f"<!-- /results:{kind} -->"


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


def render_sustained(report: ForwardReport) -> str:
    """Every peer without a pause, beside its bursts; empty where that was not measured."""
    cells = [cell for cell in report.cells if cell.sustained(cell.main_row) > 0]
    if not cells:
        return ""
    peers = [peer for peer in measured_peers(report) if any(cell.sustained(peer) for cell in cells)]
    rows = []
    for cell in cells:
        dtype, dims, mask, sizes = describe(cell.problem)
        ours, best = cell.peers[cell.main_row], cell.best_sustained
        assert isinstance(ours, Measured)
        own = ours.sustained
        figures = [number(cell.sustained(peer) or None) for peer in peers]
        ratio = number(own.tflops / cell.sustained(best) if best else None, 2)
        gauges = [number(own.tflops / ours.tflops, 2), number(own.clock_mhz), number(own.power_w)]
        rows.append([f"{dtype} d{dims} {mask}, {sizes}", *figures, ratio, *gauges])
    legend = (
        f"TFLOP/s in {report.method['sustained_s']:g} s of launches without a pause, one peer behind the other. "
        "`ratio` is ours over the fastest other peer, `of a burst` ours over its short batches above; MHz and W are "
        "of ours, in the second half."
    )
    return f"{legend}\n\n{markdown_table(['problem', *peers, 'ratio', 'of a burst', 'MHz', 'W'], rows)}"


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
    lines = lines_text(latency_problems(latency))
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


def render_odd_shapes(report: ForwardReport) -> list[str]:
    """Problems beside the grid, by a report of their own."""
    return [
        "## Short, odd and long",
        measured_on(report.date, report.commit, report.machine),
        "`matmul` is no attention: one matrix product of as many operations, in turns with the others.",
        render_peers_table(report, report.cells),
        targets_text(shape_targets(report)),
    ]


def render_page(
    report: ForwardReport,
    latency: Mapping[str, Any] | None,
    rmse: Mapping[str, Any] | None,
    figure: str,
    odd_shapes: Sequence[ForwardReport] = (),
) -> str:
    """docs/results/<kind>.md: everything that was measured. ``figure`` is the plot's file name beside it;
    ``odd_shapes`` is a report of ODD_SHAPES, where there is one."""
    versions = [
        f"- {name}: {info.title}, {info.version}" for name, info in report.peers.items() if info.version
    ]
    targets = all_targets(report, latency, rmse)
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
        RENDERED,
        measured_on(report.date, report.commit, report.machine),
        f"![TFLOP/s by sequence length, a panel a head_dim and mask]({figure})",
        "## The paper's grid",
        render_grid(report),
        summary(report),
        section("Targets", targets_text(targets)),
        "## Throughput",
        legend,
        render_peers_table(report, [*grid, *others]),
    ]
    sustained = render_sustained(report)
    if sustained:
        parts += ["## Sustained", sustained]
    for odd in odd_shapes:
        parts += render_odd_shapes(odd)
    if latency:
        parts += ["## Latency", render_latency(latency)]
    if rmse:
        measured = measured_on(rmse["date"], rmse["commit"], rmse["machine"])
        parts += ["## Accuracy", measured, render_rmse(rmse)]
    parts += ["## Peers", "\n".join(versions), "## Method", method_text(report.method)]
    return page([*parts, section("What did not run", lines_text(problems_of(report)))])


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
