"""The command line: ``hopper-attention info | explain | rmse | compile | bench``.

Each command calls one function of the library, shows its result, and with ``--json`` writes the same result
for machines. Each imports what it needs inside itself, so that none waits for another's. (The package imports
torch whatever the command, so that ``import hopper_attention`` alone registers its operators.)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from hopper_attention.compile_cache import Compilation

app = typer.Typer(
    help="FlashAttention-3 for Hopper GPUs in the CuTe Python DSL, with a backend for every other machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Dtype = Literal["float16", "bfloat16"]
Distribution = Literal["outliers", "token-outliers", "channel-outliers", "normal"]
JsonPath = Annotated[
    str, typer.Option("--json", metavar="PATH", help="Write the result as JSON too; - is standard output.")
]
Device = Annotated[str, typer.Option(help="A torch device; auto is the first GPU, or the CPU.")]

NO_FILE = ""
STDOUT = "-"
PIPE_WIDTH = 120
"""Columns of a table where there is no terminal to ask."""

CPU_FLOPS = 1e11
"""What a benchmark on the CPU may ask for: seconds, not hours."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a user can cause and mend into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


def console_for(json_path: str) -> Console:
    """Where tables go: standard output, unless the JSON goes there."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(stderr=json_path == STDOUT, width=width, highlight=False)


def write_json(data: Any, json_path: str, console: Console) -> None:
    if json_path == NO_FILE:
        return
    text = json.dumps(data, indent=2) + "\n"
    if json_path == STDOUT:
        sys.stdout.write(text)
        return
    path = Path(json_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print_path(console, "JSON", path)


def print_path(console: Console, what: str, path: Path) -> None:
    console.print(f"[dim]{what}[/] {path.resolve()}", soft_wrap=True)


def progress_bar() -> Progress:
    """The bar that every long command shows, on stderr, and that leaves nothing behind."""
    return Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def pick_device(device: str) -> str:
    """The device to run on: ``device`` itself, or for "auto" the first GPU, else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without that kind
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is {device!r}, allowed: auto, cpu, or one that is here ({reason})"
        ) from None
    return device


@app.command()
def info(json_path: JsonPath = NO_FILE) -> None:
    """What this machine has, which backend would run, and what is missing and how to get it."""
    with one_line_errors():
        from hopper_attention.cli_views import machine_view
        from hopper_attention.machine import describe_machine

        machine = describe_machine()
        console = console_for(json_path)
        console.print(machine_view(machine))
        write_json(asdict(machine), json_path, console)


@app.command()
def explain(
    seqlen_q: Annotated[int, typer.Option(min=0)] = 4096,
    seqlen_k: Annotated[int, typer.Option(min=-1, help="-1: as seqlen-q")] = -1,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=-1, help="-1: as heads")] = -1,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    head_dim_v: Annotated[int, typer.Option(min=-1, help="-1: as head-dim")] = -1,
    batch: Annotated[int, typer.Option(min=0)] = 1,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    capability: Annotated[
        str, typer.Option(metavar="X.Y", help="Answer for a GPU of this compute capability instead, as 9.0.")
    ] = "",
    json_path: JsonPath = NO_FILE,
) -> None:
    """Which backend and which kernel config a problem would run on, and why. Computes nothing."""
    with one_line_errors():
        import torch
        from torch._subclasses import FakeTensorMode

        from hopper_attention.cli_views import plan_view
        from hopper_attention.dispatch import explain as explain_call

        where = "meta" if capability else pick_device(device)

        def like(seqlen: int, count: int, width: int) -> torch.Tensor:
            return torch.empty(batch, seqlen, count, width, dtype=getattr(torch, dtype), device=where)

        keys = seqlen_q if seqlen_k < 0 else seqlen_k
        count = heads if kv_heads < 0 else kv_heads
        values = head_dim if head_dim_v < 0 else head_dim_v
        with FakeTensorMode():  # tensors without memory, so that a problem may be larger than the machine
            plan = explain_call(
                like(seqlen_q, heads, head_dim),
                like(keys, count, head_dim),
                like(keys, count, values),
                causal=causal,
                device_capability=parse_capability(capability) if capability else None,
            )
        console = console_for(json_path)
        console.print(plan_view(plan))
        config = {"name": plan.config.name, **asdict(plan.config)}
        write_json({**asdict(plan), "config": config}, json_path, console)


def parse_capability(text: str) -> tuple[int, int]:
    """(9, 0) from "9.0".

    Raises:
        ValueError: it is anything else than two numbers with a point between them.
    """
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"capability is {text!r}, allowed: major.minor, as 9.0")
    return int(major), int(minor)


@app.command()
def rmse(
    seqlen: int = 8448,
    head_dim: int = 128,
    heads: int = 1,
    batch: int = 1,
    seeds: Annotated[int, typer.Option(help="Draws of the inputs; their errors are pooled.")] = 1,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = "float16",
    distribution: Annotated[
        Distribution, typer.Option(help="Single elements, whole tokens, whole channels, or no outliers.")
    ] = "outliers",
    device: Device = "auto",
    plot: Annotated[str, typer.Option(metavar="PATH", help="Draw the table: .png, .svg or .pdf.")] = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Error of each precision on inputs with outliers: the paper's experiment (section 4.3, table 3)."""
    with one_line_errors():
        from hopper_attention.cli_views import rmse_table
        from hopper_attention.experiments.rmse import RmseExperiment, report_as_data, run_rmse

        experiment = RmseExperiment(
            batch=batch,
            seqlen=seqlen,
            heads=heads,
            head_dim=head_dim,
            seeds=seeds,
            causal=causal,
            dtype=dtype,
            device=pick_device(device),
            distribution=distribution,
        )
        with progress_bar() as bar:
            task = bar.add_task("starting", total=None)
            report = run_rmse(
                experiment,
                lambda done, total, label: bar.update(task, completed=done, total=total, description=label),
            )
        console = console_for(json_path)
        console.print(rmse_table(report))
        console.print()
        if plot != NO_FILE:
            from hopper_attention.experiments.rmse_plot import plot_rmse

            print_path(console, "plot", plot_rmse(report, Path(plot)))
        write_json(report_as_data(report), json_path, console)


@app.command("compile")
def compile_kernels(
    jobs: Annotated[
        int, typer.Option(help="Processes; each takes about 1.5 GB. 0: one a core, at most 8.")
    ] = 0,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Configs whose name contains this.")] = "",
    objects: Annotated[
        str, typer.Option(metavar="FOLDER", help="Also put the plain object files there, to link with.")
    ] = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Fill the kernel cache ahead of time, in parallel; no GPU is needed."""
    with one_line_errors():
        from hopper.config import shipped_forward_configs, shipped_fp8_forward_configs
        from hopper_attention.cli_views import compile_summary
        from hopper_attention.compile_cache import cache_dir, compile_all, read_entry

        shipped = (*shipped_forward_configs(), *shipped_fp8_forward_configs())
        configs = [config for config in shipped if only in config.name]
        if not configs:
            raise ValueError(f"only is {only!r}, allowed: part of a shipped config's name, as fp16_d64")
        with progress_bar() as bar:
            task = bar.add_task("compiling", total=len(configs))

            def show(result: Compilation) -> None:
                bar.update(task, advance=1, description=result.config.name)

            results = compile_all(configs, jobs or min(8, os.cpu_count() or 1), show)
        console = console_for(json_path)
        if objects != NO_FILE:
            folder = Path(objects)
            folder.mkdir(parents=True, exist_ok=True)
            for result in results:
                if not result.error:
                    (folder / f"{result.config.name}.o").write_bytes(read_entry(result.path))
            print_path(console, "objects", folder)
        console.print(compile_summary(results, str(cache_dir())), soft_wrap=True)
        rows = [
            {
                "config": r.config.name,
                "path": str(r.path),
                "seconds": round(r.seconds, 3),
                "was_cached": r.was_cached,
                "error": r.error,
            }
            for r in results
        ]
        write_json({"cache_dir": str(cache_dir()), "kernels": rows}, json_path, console)
        if any(result.error for result in results):
            raise typer.Exit(1)


@app.command()
def bench(
    shapes: Annotated[
        str, typer.Option(help="paper (36 cells), ablation, or names such as bf16-b4-s8192-h16-d128-causal.")
    ] = "paper,ablation",
    peers: Annotated[str, typer.Option(help="Comma-separated; empty: all that are known.")] = "",
    fa3_library: Annotated[
        str, typer.Option(metavar="PATH", help="FlashAttention-3's torch ops, where not installed by pip.")
    ] = NO_FILE,
    device: Device = "auto",
    budget: Annotated[float, typer.Option(help="Seconds to measure for, first calls not counted.")] = 300.0,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Forward throughput against the installed peers, in interleaved rounds, each output checked first."""
    with one_line_errors():
        from hopper_attention.experiments.bench import CellLostError, exit_with_lost_gpu, run_forward
        from hopper_attention.experiments.bench_peers import DEFAULT_PEERS, Setting, parse_peers
        from hopper_attention.experiments.bench_render import forward_table, problems_of
        from hopper_attention.experiments.bench_results import ForwardReport, dump_forward, parse_shapes
        from hopper_attention.experiments.bench_timing import Effort

        where = pick_device(device)
        problems = parse_shapes(shapes)
        work = sum(problem.flops for problem in problems)
        if where == "cpu" and work > CPU_FLOPS:
            raise ValueError(
                f"shapes {shapes!r} need {work:.1e} floating-point operations a round and device is cpu, "
                f"allowed there: {CPU_FLOPS:.0e} in all, as in --shapes bf16-b1-s256-h2-d64-full"
            )
        console = console_for(json_path)
        latest: list[ForwardReport] = []
        with progress_bar() as bar:
            task = bar.add_task("starting", total=len(problems))

            def start(line: str) -> None:
                bar.update(task, completed=len(latest), description=line)

            lost = ""
            try:
                run_forward(
                    problems,
                    parse_peers(peers or ",".join(DEFAULT_PEERS)),
                    Setting(where, fa3_library),
                    Effort(budget_s=budget),
                    progress=start,
                    save=latest.append,
                )
            except CellLostError as error:
                lost = f"stopped at {error.cell.problem.name}: {error}"
        report = latest[-1]
        console.print(forward_table(report))
        for line in problems_of(report):
            console.print(line, style="yellow", markup=False)
        write_json(json.loads(dump_forward(report)), json_path, console)
        if lost:
            console.print(lost, style="bold red", markup=False)
            exit_with_lost_gpu()


if __name__ == "__main__":
    app()
