"""The roofline page: what was counted, the bound each unit implies at the measured clock, and how near we are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hopper.backward.shipped import shipped_backward_configs
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import FP8_DTYPE
from hopper.forward.fp8.tilings import shipped_fp8_forward_configs
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention.experiments.bench.results import OURS, Cell, ForwardReport, Measured
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.words import WORDINGS, describe
from hopper_attention.experiments.reports import markdown_table, number, page
from hopper_attention.experiments.roofline.backward import (
    ELEMENT_BYTES,
    GEMMS,
    BackwardKernel,
    backward_block_work,
    backward_kernel_of,
    count_backward,
    parse_backward_kernel,
    shared_bytes,
)
from hopper_attention.experiments.roofline.forward import (
    Kernel,
    block_work,
    count_work,
    kernel_of,
    parse_kernel,
)
from hopper_attention.experiments.roofline.units import (
    CONSTANTS,
    TITLES,
    UNITS,
    BlockWork,
    Bounds,
    Work,
    bounds,
    hbm_rate,
)

BACKWARD = "backward"
"""The kind of report whose kernel has small steps on either side."""

FORWARD_GEMMS = 2

SHARED_TITLES = ("Q and dO arrive", "S, dP", "dV, dK", "dQ", "P and dS handed on", "dQ staged")
"""Headings of the fields of ``SharedBytes``."""


@dataclass(frozen=True)
class Standing:
    """A problem that was measured, the kernel that ran, its work, and its bounds at the clock of the run."""

    problem: Problem
    kernel: Kernel | BackwardKernel
    work: Work
    bounds: Bounds
    clock_mhz: float
    measured: Measured

    @property
    def flops(self) -> float:
        """Operations of the problem, as the paper counts them."""
        is_backward = isinstance(self.kernel, BackwardKernel)
        return self.problem.flops * (GEMMS / FORWARD_GEMMS if is_backward else 1)

    @property
    def bound_tflops(self) -> float:
        return self.flops / self.bounds.bound_s * 1e-12

    @property
    def share(self) -> float:
        """What was measured over the bound."""
        return self.measured.tflops / self.bound_tflops

    @property
    def share_in_turn(self) -> float:
        """What was measured over the bound of the steps one after the other."""
        return self.measured.tflops * self.bounds.in_turn_s * 1e12 / self.flops


def work_of(problem: Problem, kernel: Kernel | BackwardKernel) -> tuple[Work, int]:
    """What a kernel does for a problem, and the bytes of an operand's element."""
    if isinstance(kernel, BackwardKernel):
        return count_backward(problem, kernel), ELEMENT_BYTES
    return count_work(problem, kernel), kernel.element_bytes


def stand(cell: Cell, kind: str, hbm_bytes_per_s: float) -> Standing | None:
    """How our kernel stands on a problem; None where it has no figure, no clock or no name."""
    ours = cell.peers.get(OURS)
    clock = ours.clock_mhz or cell.clock_mhz if isinstance(ours, Measured) else None
    if not isinstance(ours, Measured) or clock is None:
        return None
    try:
        kernel = parse_backward_kernel(ours.note) if kind == BACKWARD else parse_kernel(ours.note)
    except ValueError:
        return None
    work, element_bytes = work_of(cell.problem, kernel)
    found = bounds(work, element_bytes, clock, hbm_bytes_per_s)
    return Standing(cell.problem, kernel, work, found, clock, ours)


def standings(report: ForwardReport) -> list[Standing]:
    """Every problem of a report on which our kernel stands somewhere."""
    rate = hbm_rate(report.machine["gpu"])
    found = (stand(cell, report.kind, rate) for cell in report.cells)
    return [standing for standing in found if standing is not None]


def problem_text(problem: Problem) -> str:
    dtype, dims, mask, sizes = describe(problem)
    return f"{dtype} d{dims} {mask}, {sizes}"


def tile_text(kernel: Kernel | BackwardKernel) -> str:
    return f"{kernel.tile_m} × {kernel.tile_n}"


def bounds_row(standing: Standing) -> list[str]:
    s = standing
    times = [f"{s.bounds.seconds[unit] * 1e6:.0f}" for unit in UNITS]
    times = [
        f"**{time}**" if unit == s.bounds.unit else time for unit, time in zip(UNITS, times, strict=True)
    ]
    figures = [f"{s.bound_tflops:.0f}", f"{s.measured.tflops:.0f}", f"{100 * s.share:.0f} %"]
    if isinstance(s.kernel, BackwardKernel):
        figures += [f"{s.bounds.small_steps_s * 1e6:.0f}", f"{100 * s.share_in_turn:.0f} %"]
    return [problem_text(s.problem), number(s.clock_mhz), *times, f"{s.bounds.balance:.3f}", *figures]


def counts_row(standing: Standing) -> list[str]:
    p, w = standing.problem, standing.work
    return [
        problem_text(p),
        tile_text(standing.kernel),
        f"{standing.flops * 1e-9:.0f}",
        f"{w.flops / standing.flops:.3f}",
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


def cycle_cells(work: BlockWork, element_bytes: int) -> list[str]:
    """Clocks of each unit, the busiest in bold."""
    cycles = work.cycles(element_bytes)
    busiest = max(cycles, key=lambda unit: cycles[unit])
    return [f"**{value:.0f}**" if unit == busiest else f"{value:.0f}" for unit, value in cycles.items()]


def block_row(precision: str, kernel: Kernel) -> list[str]:
    """Clocks of each unit for one key block of a tile."""
    dims = (
        f"{kernel.head_dim}"
        if kernel.head_dim == kernel.head_dim_v
        else f"{kernel.head_dim}/{kernel.head_dim_v}"
    )
    share = f", {kernel.polynomial_pairs}/8 of the exponentials on FMA" if kernel.polynomial_pairs else ""
    work = block_work(kernel)
    cycles = work.cycles(kernel.element_bytes)
    overlap = (cycles["tensor"] + cycles["mufu"]) / max(cycles.values())
    times = cycle_cells(work, kernel.element_bytes)
    return [f"{precision} d{dims}, {tile_text(kernel)}{share}", *times, f"{overlap:.2f}"]


def shipped_backward_kernels() -> list[BackwardKernel]:
    """Backward kernels that ship; those that only differ in what no block depends on, once."""
    kernels = (backward_kernel_of(config)._replace(causal=False) for config in shipped_backward_configs())
    return list(dict.fromkeys(kernels))


def backward_text(kernel: BackwardKernel) -> str:
    return f"d{kernel.head_dim}, {tile_text(kernel)}{' of a pair' if kernel.is_paired else ''}"


def render_backward_blocks(unit_titles: Sequence[str]) -> list[str]:
    """The part of the page about one block of the backward kernels."""
    kernels = shipped_backward_kernels()
    clocks = [[backward_text(k), *cycle_cells(backward_block_work(k), ELEMENT_BYTES)] for k in kernels]
    parts = [(shared_bytes(k), backward_text(k)) for k in kernels]
    shares = [[text, *(f"{b / 1024:.0f}" for b in part), f"{sum(part) / 1024:.0f}"] for part, text in parts]
    return [
        "## One block of the backward",
        "Clocks of one SM that each unit is busy with one query tile against the keys of a CTA: 128, or 64 where a "
        "cluster of two shares them. Counted: five GEMMs; an exponential a score; Q and dO from the L2, and float32 "
        "additions to dQ in it, a CTA of a pair half of each.",
        markdown_table(["kernel", *unit_titles], clocks),
        "KiB that go through shared memory in the same block. `S, dP` to `dQ` is what WGMMA reads: B of every GEMM, "
        "and A unless it lies in registers, as P and dS do for dV and dK where there is no pair. `P and dS handed on`: "
        "dS written for dQ; in a pair also P written and read back to make dS, and dS read to be sent to the other "
        "CTA and received from it. `dQ staged`: written in float32 and read by the bulk reduction; in a pair dQ leaves "
        "from registers. LSE and delta, a number a row each, are counted nowhere.",
        markdown_table(["kernel", *SHARED_TITLES, "together"], shares),
    ]


def shares_text(found: Sequence[Standing]) -> str:
    """Where we stand at best and at worst."""
    nearest, furthest = max(found, key=lambda s: s.share), min(found, key=lambda s: s.share)
    return (
        f"Nearest to its bound: {100 * nearest.share:.0f} % (`{nearest.problem.name}`); furthest: "
        f"{100 * furthest.share:.0f} % (`{furthest.problem.name}`). The busiest unit is in bold."
    )


STEPS_TEXT = (
    "What was measured holds all steps. Bytes of HBM: prepare reads O and dO; zeros of the float32 sums of dQ are "
    "written; the kernel reads Q, K, V and dO and writes dK and dV; finish reads the sums and writes dQ. Each array "
    "crosses once a step; what the L2 keeps from one step to the next may be saved, and the additions to dQ are taken "
    "to find their sums there. The other units are those of the kernel alone; clusters are dealt over 66 pairs of SMs. "
    "`bound` lets the small steps, which are all but the kernel, hide under it. They do not: they run before and "
    "behind. `small steps` is their time on HBM, and `in turn` has it added to the bound of the kernel."
)
"""What the tables of the backward hold beyond those of the forward."""


def in_turn_text(found: Sequence[Standing]) -> str:
    shares = [100 * s.share_in_turn for s in found]
    return f"{STEPS_TEXT} We are at {min(shares):.0f} to {max(shares):.0f} % of that."


def render_report(report: ForwardReport) -> list[str]:
    """The parts of the page about one throughput report; none where nothing in it has a clock and a kernel."""
    found = standings(report)
    if not found:
        return []
    is_backward = report.kind == BACKWARD
    bound_head = ["problem", "MHz", *(f"{TITLES[unit]}, us" for unit in UNITS), "balance"]
    bound_head += ["bound, TFLOP/s", "ours, TFLOP/s", "of the bound"]
    bound_head += ["small steps, us", "of the bound, in turn"] if is_backward else []
    count_head = ["problem", "tile", "GFLOP", "in whole tiles", "10⁹ MUFU", "GB shared", "GB L2", "GB HBM"]
    return [
        f"## {WORDINGS[report.kind].title}: where we stand",
        f"Measured {report.date[:10]} at commit `{report.commit[:12]}` on {report.machine['gpu']}: `{report.kind}.md`. "
        f"{shares_text(found)}",
        in_turn_text(found) if is_backward else "",
        markdown_table(bound_head, [bounds_row(s) for s in found]),
        f"### {WORDINGS[report.kind].title}: what was counted",
        "GFLOP of the problem, as the paper counts them; the factor by which whole tiles exceed that; and what all SMs "
        "do together.",
        markdown_table(count_head, [counts_row(s) for s in found]),
    ]


def render_roofline(reports: Sequence[ForwardReport]) -> str:
    """docs/results/roofline.md: pure arithmetic on the shipped configs and the committed reports."""
    blocks = [block_row(precision, kernel) for precision, kernel in shipped_kernels()]
    unit_titles = [TITLES[unit] for unit in ("tensor", "mufu", "shared", "l2")]
    parts = [
        "# Roofline",
        "Rendered by `python benchmarks/render.py` from `benchmarks/results/`, `hopper/config.py` and "
        "`hopper/backward/config.py`; do not edit by hand. Nothing here is a model of the kernel: work is counted, and "
        "divided by what the chip can do of it at the SM clock that was measured. No schedule is faster than the "
        "busiest unit, and none of whole tiles faster than their best deal over the SMs.",
        "Not counted: instructions issued (the softmax of the forward in 16 bits takes 4.5 a score: maximum, scaling, "
        "exponential, sum, and half a conversion), the rate at which the L2 can add, which is not published, the "
        "latency at the start and the end of a launch, and the clock itself, which power lowers on long problems.",
        "## What the chip does",
        markdown_table(["what", "figure", "source"], CONSTANTS),
        "## One key block of the forward",
        "Clocks of one SM that each unit is busy with one block of keys of one tile. `overlap`: tensor cores and MUFU "
        "one after the other, over the busiest unit; what hiding the softmax under the GEMMs can gain at most.",
        markdown_table(["kernel", *unit_titles, "overlap"], blocks),
        *render_backward_blocks(unit_titles),
    ]
    for report in reports:
        parts += render_report(report)
    return page(parts)
