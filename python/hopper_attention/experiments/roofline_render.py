"""The roofline page: what was counted, the bound each unit implies at the measured clock, and how near we are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hopper.config import (
    FP8_DTYPE,
    ForwardConfig,
    shipped_forward_configs,
    shipped_fp8_forward_configs,
)
from hopper_attention.experiments.bench_render import WORDINGS, describe, markdown_table, number
from hopper_attention.experiments.bench_results import OURS, Cell, ForwardReport, Measured, Problem
from hopper_attention.experiments.roofline import (
    CONSTANTS,
    NAME,
    TITLES,
    UNITS,
    Bounds,
    Kernel,
    Work,
    block_work,
    bounds,
    count_work,
    hbm_rate,
    kernel_of,
    parse_kernel,
)

OF_THE_FORWARD = ("forward", "fp8")
"""Kinds of reports whose kernels are on the page."""


@dataclass(frozen=True)
class Standing:
    """A problem that was measured, the kernel that ran, its work, and its bounds at the clock of the run."""

    problem: Problem
    kernel: Kernel
    work: Work
    bounds: Bounds
    clock_mhz: float
    measured: Measured

    @property
    def bound_tflops(self) -> float:
        return self.problem.flops / self.bounds.bound_s * 1e-12

    @property
    def share(self) -> float:
        """What was measured over the bound."""
        return self.measured.tflops / self.bound_tflops


def stand(cell: Cell, hbm_bytes_per_s: float) -> Standing | None:
    """How our kernel stands on a problem; None where it has no figure, no clock or no name."""
    ours = cell.peers.get(OURS)
    if not isinstance(ours, Measured) or not NAME.fullmatch(ours.note):
        return None
    clock = ours.clock_mhz or cell.clock_mhz
    if clock is None:
        return None
    kernel = parse_kernel(ours.note)
    work = count_work(cell.problem, kernel)
    found = bounds(work, kernel.element_bytes, clock, hbm_bytes_per_s)
    return Standing(cell.problem, kernel, work, found, clock, ours)


def standings(report: ForwardReport) -> list[Standing]:
    """Every problem of a report on which our kernel stands somewhere."""
    rate = hbm_rate(report.machine["gpu"])
    return [standing for cell in report.cells if (standing := stand(cell, rate)) is not None]


def problem_text(problem: Problem) -> str:
    dtype, dims, mask, sizes = describe(problem)
    return f"{dtype} d{dims} {mask}, {sizes}"


def tile_text(kernel: Kernel) -> str:
    return f"{kernel.tile_m} × {kernel.tile_n}"


def bounds_row(standing: Standing) -> list[str]:
    s = standing
    times = [f"{s.bounds.seconds[unit] * 1e6:.0f}" for unit in UNITS]
    times = [
        f"**{time}**" if unit == s.bounds.unit else time for unit, time in zip(UNITS, times, strict=True)
    ]
    figures = [f"{s.bound_tflops:.0f}", f"{s.measured.tflops:.0f}", f"{100 * s.share:.0f} %"]
    return [problem_text(s.problem), number(s.clock_mhz), *times, f"{s.bounds.balance:.3f}", *figures]


def counts_row(standing: Standing) -> list[str]:
    p, w = standing.problem, standing.work
    return [
        problem_text(p),
        tile_text(standing.kernel),
        f"{p.flops * 1e-9:.0f}",
        f"{w.flops / p.flops:.3f}",
        f"{w.mufu * 1e-9:.2f}",
        f"{w.shared_bytes * 1e-9:.2f}",
        f"{w.l2_bytes * 1e-9:.2f}",
        f"{w.hbm_bytes * 1e-9:.3f}",
    ]


def shipped_kernels() -> list[tuple[str, Kernel]]:
    """Kernels that ship, with their precision; those that only differ in what no block depends on, once."""
    configs: Iterable[ForwardConfig] = (*shipped_forward_configs(), *shipped_fp8_forward_configs())
    kernels: dict[tuple[str, Kernel], None] = {}
    for config in configs:
        precision = "FP8" if config.dtype == FP8_DTYPE else "16 bit"
        kernels[precision, kernel_of(config)._replace(causal=False)] = None
    return list(kernels)


def block_row(precision: str, kernel: Kernel) -> list[str]:
    """Clocks of each unit for one key block of a tile."""
    cycles = block_work(kernel).cycles(kernel.element_bytes)
    dims = (
        f"{kernel.head_dim}"
        if kernel.head_dim == kernel.head_dim_v
        else f"{kernel.head_dim}/{kernel.head_dim_v}"
    )
    share = f", {kernel.polynomial_pairs}/8 of the exponentials on FMA" if kernel.polynomial_pairs else ""
    busiest = max(cycles, key=lambda unit: cycles[unit])
    times = [f"**{value:.0f}**" if unit == busiest else f"{value:.0f}" for unit, value in cycles.items()]
    overlap = (cycles["tensor"] + cycles["mufu"]) / max(cycles.values())
    return [f"{precision} d{dims}, {tile_text(kernel)}{share}", *times, f"{overlap:.2f}"]


def render_report(report: ForwardReport) -> list[str]:
    """The parts of the page about one throughput report; none where nothing in it has a clock and a kernel."""
    found = standings(report)
    if not found:
        return []
    nearest = max(found, key=lambda s: s.share)
    furthest = min(found, key=lambda s: s.share)
    bound_head = ["problem", "MHz", *(f"{TITLES[unit]}, us" for unit in UNITS), "balance"]
    bound_head += ["bound, TFLOP/s", "ours, TFLOP/s", "of the bound"]
    count_head = ["problem", "tile", "GFLOP", "in whole tiles", "10⁹ MUFU", "GB shared", "GB L2", "GB HBM"]
    return [
        f"## {WORDINGS[report.kind].title}: where we stand",
        f"Measured {report.date[:10]} at commit `{report.commit[:12]}` on {report.machine['gpu']}: `{report.kind}.md`. "
        f"Nearest to its bound: {100 * nearest.share:.0f} % (`{nearest.problem.name}`); furthest: "
        f"{100 * furthest.share:.0f} % (`{furthest.problem.name}`). The busiest unit is in bold.",
        markdown_table(bound_head, [bounds_row(s) for s in found]),
        f"### {WORDINGS[report.kind].title}: what was counted",
        "GFLOP of the problem, as the paper counts them; the factor by which whole tiles exceed that; and what all SMs "
        "do together.",
        markdown_table(count_head, [counts_row(s) for s in found]),
    ]


def render_roofline(reports: Sequence[ForwardReport]) -> str:
    """docs/results/roofline.md: pure arithmetic on the shipped configs and the committed reports."""
    blocks = [block_row(precision, kernel) for precision, kernel in shipped_kernels()]
    units = ("tensor", "mufu", "shared", "l2")
    parts = [
        "# Roofline of the forward kernels",
        "Rendered by `python benchmarks/render.py` from `benchmarks/results/` and `hopper/config.py`; do not edit by "
        "hand. Nothing here is a model of the kernel: work is counted, and divided by what the chip can do of it at "
        "the SM clock that was measured. No schedule is faster than the busiest unit, and none of whole tiles faster "
        "than their best deal over the SMs.",
        "Not counted: instructions issued (the softmax in 16 bits takes 4.5 a score: maximum, scaling, exponential, "
        "sum, and half a conversion), the latency at the start and the end of a launch, and the clock itself, which "
        "power lowers on long problems.",
        "## What the chip does",
        markdown_table(["what", "figure", "source"], CONSTANTS),
        "## One key block",
        "Clocks of one SM that each unit is busy with one block of keys of one tile. `overlap`: tensor cores and MUFU "
        "one after the other, over the busiest unit; what hiding the softmax under the GEMMs can gain at most.",
        markdown_table(["kernel", *(TITLES[unit] for unit in units), "overlap"], blocks),
    ]
    for report in reports:
        # Only the forward's work is counted.
        if report.kind in OF_THE_FORWARD:
            parts += render_report(report)
    return "\n\n".join(part for part in parts if part) + "\n"
