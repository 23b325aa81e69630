"""What the command line shows: each result of the library as something that rich can print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hopper_attention.compile_cache import Compilation
    from hopper_attention.dispatch import Plan
    from hopper_attention.experiments.rmse import LeftOut, RmseReport
    from hopper_attention.experiments.rmse_sweep import SweepPoint, SweepReport
    from hopper_attention.machine import Gpu, Machine

ACCENT = "bold green"
QUIET = "dim"
WARNING = "yellow"

OURS = ("flash", "fp8-both")
"""Rows of the accuracy table to point out: what this library would run for you."""


def facts(title: str, rows: Sequence[tuple[str, RenderableType]]) -> RenderableType:
    """A heading, and below it one line a fact: its name in dim, then what it is."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True, min_width=17)
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, value)
    return Group(Text(title, style="bold"), Padding(grid, (0, 0, 0, 2), expand=False), "")


def machine_view(machine: Machine) -> RenderableType:
    """What the machine has, what would run on it, and what is missing with how to get it."""
    m, version = machine, machine.hopper_attention
    software = [
        ("hopper-attention", version if version[0].isdigit() else "run from its source folder"),
        ("Python", m.python),
        ("torch", f"{m.torch}, built for CUDA {m.torch_cuda}" if m.torch_cuda[0].isdigit() else m.torch),
        ("CuTe DSL", m.dsl),
        ("TVM FFI", m.tvm_ffi),
        ("NVIDIA driver", m.driver),
    ]
    gpus = [(f"GPU {gpu.index}", gpu_line(gpu)) for gpu in m.gpus]
    backends = [
        (b.name, Text.assemble(("yes  ", ACCENT) if b.available else ("no   ", WARNING), b.reason))
        for b in m.backends
    ]
    cache = [("folder", m.cache_dir), ("compiled", f"{m.cached_kernels} kernels that this version can use")]
    parts = [
        facts("Software", software),
        facts("Hardware", gpus or [("GPU", "none that torch can use")]),
        facts("Backends", backends),
        facts("Kernel cache", cache),
    ]
    if m.missing:
        missing = [(item.what, Text(item.how)) for item in m.missing]
        parts.append(facts("Missing for the Hopper kernels, and how to get it", missing))
    return Group(*parts)


def gpu_line(gpu: Gpu) -> Text:
    major, minor = gpu.capability
    memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
    line = f"{gpu.name}, compute capability {major}.{minor}, {gpu.multiprocessors} SMs, {memory}, runs "
    return Text.assemble(line, (gpu.backend, ACCENT if gpu.backend == "hopper" else WARNING))


def plan_view(plan: Plan) -> RenderableType:
    """The backend, the reason, and every field of the config with what follows from it."""
    head: list[tuple[str, RenderableType]] = [
        ("backend", Text(plan.backend, style=ACCENT)),
        ("reason", Text(plan.reason)),
    ]
    head += [("copy", Text(text)) for text in plan.copies]
    head += [("note", Text(text, style=WARNING)) for text in plan.notes]
    derived = [name for name in ("consumers", "threads", "smem_bytes") if hasattr(plan.config, name)]
    names = [field.name for field in fields(plan.config)] + derived
    config = [(name, Text(field_text(getattr(plan.config, name)))) for name in names]
    return Group(facts("Plan", head), facts(f"Config {plan.config.name}", config))


def field_text(value: Any) -> str:
    """A field of a config in words; a nested dataclass as its fields."""
    if is_dataclass(value):
        return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in fields(value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def rmse_table(report: RmseReport) -> RenderableType:
    """The accuracy table, a row a method, with the paper's figures where they may be compared."""
    from hopper_attention.experiments.rmse import PAPER_NOTE
    from hopper_attention.experiments.rmse_inputs import describe

    has_paper = report.experiment.is_papers
    has_spread = report.experiment.seeds > 1
    table = quiet_table()
    table.add_column("method", min_width=36)
    table.add_column("RMSE", justify="right")
    if has_spread:
        table.add_column("± seeds", justify="right", style=QUIET)
    if has_paper:
        table.add_column("paper", justify="right", style=QUIET)
    table.add_column("median query", justify="right")
    table.add_column("computed by", style=QUIET)
    for above, row in zip((report.rows[0], *report.rows), report.rows, strict=False):
        if row.group != above.group:
            table.add_section()
        figures = [Text(f"{row.rmse:.2e}", style=ACCENT if row.method in OURS else "")]
        figures += [Text(f"{row.spread:.0e}")] * has_spread
        figures += [Text(f"{row.paper:.1e}" if row.paper is not None else "")] * has_paper
        table.add_row(row.label, *figures, f"{100 * row.row_error:.2g} %", row.implementation)
    lines: list[RenderableType] = [
        Text("Attention error against float64", style="bold"),
        Text(f"{describe(report.experiment)} · output RMS {report.oracle_rms:.2g}", style=QUIET),
        table,
        *conclusions(report),
        Text("Median query: |error| over |output| of one query, the median over all.", style=QUIET),
        *left_out_lines(report.left_out),
    ]
    return Group(*lines, *([Text(PAPER_NOTE, style=QUIET)] if has_paper else []))


def quiet_table() -> Table:
    return Table(box=SIMPLE_HEAD, header_style=QUIET, border_style=QUIET, pad_edge=False)


def conclusions(report: RmseReport) -> Iterator[Text]:
    """What the figures of our FP8 come to, as far as its rows are there."""
    from hopper_attention.experiments.rmse import gain_over_baseline

    if report.has("fp8-per-tensor", "fp8-both"):
        papers = "; the paper has 2.6" if report.experiment.is_papers else ""
        times = f"{gain_over_baseline(report):.1f} times"
        yield Text(f"Block scales with rotation: {times} less error than the FP8 baseline{papers}.")
    if report.has("fp8-both", "fp8-float64"):
        ratio = report.row("fp8-both").rmse / report.row("fp8-float64").rmse
        yield Text(f"Ours over its emulation in float64: {ratio:.3f}.")


def left_out_lines(left_out: Sequence[LeftOut]) -> Iterator[Text]:
    """The rows that are not there, one line a reason."""
    for reason in dict.fromkeys(entry.reason for entry in left_out):
        labels = ", ".join(entry.method for entry in left_out if entry.reason == reason)
        yield Text(f"Left out: {labels} ({reason}).", style=QUIET)


def sweep_table(report: SweepReport) -> RenderableType:
    """Error over the output, a line a length, a column a method, and how it grows."""
    from hopper_attention.experiments.rmse_sweep import LONG, SHORT, describe_sweep, summarize

    table = quiet_table()
    table.add_column("keys", justify="right")
    for method in report.methods:
        last = report.curve(method)[-1]
        table.add_column(f"{last.label}\n{last.implementation}", justify="right")
    has_ratio = {"fp8-both", "fp8-emulated"} <= set(report.methods)
    if has_ratio:
        table.add_column("kernel over\nemulation", justify="right", style=ACCENT)
    for length in report.sweep.lengths:
        points = {point.method: point for point in report.points if point.seqlen == length}
        cells = [error_cell(points[name]) if name in points else "" for name in report.methods]
        if has_ratio:
            cells.append(f"{points['fp8-both'].error / points['fp8-emulated'].error:.3f}")
        table.add_row(str(length), *cells)
    growth = ", ".join(f"{name} {factor:.3f}" for name, factor in summarize(report).items())
    growth_line = f"FP8 error at {LONG} keys over that at {SHORT}, relative to the output: {growth}."
    return Group(
        Text("Attention error over the root mean square of the output", style="bold"),
        Text(describe_sweep(report.sweep), style=QUIET),
        table,
        *([Text(growth_line)] if growth else []),
        *left_out_lines(report.left_out),
    )


def error_cell(point: SweepPoint) -> str:
    return f"{point.error:.2e} ± {point.spread:.0e}" if point.spread else f"{point.error:.2e}"


def compile_summary(results: Sequence[Compilation], folder: str) -> RenderableType:
    """How many kernels were compiled, found and failed, and why each failure did."""
    failed = [r for r in results if r.error]
    cached = sum(r.was_cached for r in results)
    compiled = len(results) - cached - len(failed)
    line = Text.assemble((f"{compiled} compiled", ACCENT), f", {cached} already cached", f", in {folder}")
    if failed:
        line.append(f", {len(failed)} failed", style="bold red")
    return Group(line, *(Text(f"{r.config.name}: {r.error}", style="red") for r in failed))
