"""What the command line shows: each result of the library as something that rich can print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hopper_attention.experiments.tables import ACCENT, QUIET

if TYPE_CHECKING:
    from hopper_attention.compile_cache import Compilation
    from hopper_attention.dispatch import Plan
    from hopper_attention.fp8_plan import Fp8Plan
    from hopper_attention.machine import Gpu, Machine

WARNING = "yellow"


def facts(title: str, rows: Sequence[tuple[str, RenderableType]]) -> RenderableType:
    """A heading, and below it one line a fact: its name in dim, then what it is."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True, min_width=17)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    return Group(Text(title, style="bold"), Padding(grid, (0, 0, 0, 2), expand=False), "")


def machine_view(machine: Machine) -> RenderableType:
    """What the machine has, what would run on it, and what is missing with how to get it."""
    m = machine
    software = [
        ("hopper-attention", m.hopper_attention),
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
    line = f"{gpu.name}, compute capability {major}.{minor}, {gpu.parts}, runs "
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


def fp8_plan_view(plan: Fp8Plan) -> RenderableType:
    """How the inputs are quantized, and then the attention on them."""
    from hopper_attention.fp8_plan import describe_options

    rows: list[tuple[str, RenderableType]] = [
        ("quantizer", Text(plan.quantizer, style=ACCENT)),
        ("reason", Text(plan.quantizer_reason)),
    ]
    if plan.quantizer_config is not None:
        rows.append(("kernel", Text(plan.quantizer_config.name)))
    rows += [("scales", Text(text)) for text in plan.scales]
    rows.append(("before that", Text(describe_options(plan.quantization))))
    rows += [("pays", Text(plan.pays))] if plan.pays else []
    return Group(facts("Quantization", rows), plan_view(plan.attention))


def field_text(value: Any) -> str:
    """A field of a config in words; a nested dataclass as its fields, a member of an enum as its value."""
    if is_dataclass(value):
        return ", ".join(f"{field.name} {getattr(value, field.name)}" for field in fields(value))
    if isinstance(value, Enum):
        return str(value.value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def compile_summary(results: Sequence[Compilation], folder: str) -> RenderableType:
    """How many kernels were compiled, found and failed, and why each failure did."""
    failed = [r for r in results if r.error]
    cached = sum(r.was_cached for r in results)
    compiled = len(results) - cached - len(failed)
    line = Text.assemble((f"{compiled} compiled", ACCENT), f", {cached} already cached", f", in {folder}")
    if failed:
        line.append(f", {len(failed)} failed", style="bold red")
    return Group(line, *(Text(f"{r.config.name}: {r.error}", style="red") for r in failed))
