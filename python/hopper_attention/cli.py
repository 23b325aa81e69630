"""The command line: ``hopper-attention info | explain | rmse | compile | bench | ablation``.

Each command calls one function of the library, shows its result, and with ``--json`` writes the same result
for machines. Each imports what it needs inside itself, so that none waits for another's. (The package imports
torch whatever the command, so that ``import hopper_attention`` alone registers its operators.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import Progress

from hopper_attention.cli_bench import ablation, bench_app
from hopper_attention.cli_compile import compile_kernels
from hopper_attention.cli_explain import explain
from hopper_attention.cli_parts import (
    NO_FILE,
    Device,
    Fa3Library,
    JsonPath,
    PlotPath,
    console_for,
    one_line_errors,
    pick_device,
    print_path,
    progress_bar,
    write_json,
)

if TYPE_CHECKING:
    from hopper_attention.experiments.rmse.methods import Method
    from hopper_attention.experiments.rmse.run import Progress as Watcher
    from hopper_attention.experiments.rmse.spec import RmseExperiment
    from hopper_attention.experiments.rmse.sweep import LengthSweep


def show_version(asked: bool) -> None:
    """Print the version and end, where it was asked for."""
    if asked:
        from hopper_attention.machine import find_version

        print(f"hopper-attention {find_version()}")
        raise typer.Exit()


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FlashAttention-3 for Hopper GPUs in the CuTe Python DSL, with a backend for every other machine."""


Dtype = Literal["float16", "bfloat16"]
Distribution = Literal["outliers", "token-outliers", "channel-outliers", "heavy-tails", "offset", "normal"]


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


app.command()(explain)


@app.command()
def rmse(
    context: typer.Context,
    seqlen: Annotated[int, typer.Option(help="Keys; queries too, unless there are fewer.")] = 8448,
    queries: Annotated[int, typer.Option(help="0: as many as keys, and 256 with --lengths.")] = 0,
    lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Error against the number of keys, as 1024,4096,65536.")
    ] = "",
    head_dim: int = 128,
    heads: int = 1,
    batch: int = 1,
    seeds: Annotated[int, typer.Option(help="Draws of the inputs, for a mean and a spread.")] = 3,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = "float16",
    distribution: Annotated[
        Distribution,
        typer.Option(help="Outliers by element, token or channel; Student's t; N(1, 1); or N(0, 1)."),
    ] = "outliers",
    outlier_std: Annotated[float, typer.Option(help="Standard deviation of an outlier.")] = 10.0,
    methods: Annotated[
        str, typer.Option(metavar="NAME,...", help="Rows to compute; empty: all that can run here.")
    ] = "",
    fa3_library: Fa3Library = NO_FILE,
    device: Device = "auto",
    plot: PlotPath = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Error of each precision on inputs with outliers: the paper's experiment (section 4.3, table 3)."""
    with one_line_errors():
        from hopper_attention.experiments.rmse.methods import parse_methods
        from hopper_attention.experiments.rmse.spec import RmseExperiment
        from hopper_attention.experiments.rmse.sweep import LengthSweep, parse_lengths

        if lengths and given(context, "seqlen"):
            raise ValueError(f"seqlen is {seqlen} and lengths is {lengths!r}, allowed: one of them")
        swept = parse_lengths(lengths) if lengths else ()
        experiment = RmseExperiment(
            batch=batch,
            seqlen=max(swept, default=seqlen),
            heads=heads,
            head_dim=head_dim,
            seeds=seeds,
            causal=causal,
            dtype=dtype,
            device=pick_device(device),
            distribution=distribution,
            outlier_std=outlier_std,
            queries=queries,
        )
        asked = RowsAsked(parse_methods(methods) if methods else (), fa3_library)
        if lengths:
            show_sweep(LengthSweep(experiment, swept), asked, plot, json_path)
        else:
            show_rmse(experiment, asked, plot, json_path)


@dataclass(frozen=True)
class RowsAsked:
    """Rows of the accuracy experiment to compute (none: its own choice), and what FlashAttention-3's need."""

    methods: tuple[Method, ...]
    fa3_library: str


def show_rmse(experiment: RmseExperiment, asked: RowsAsked, plot: str, json_path: str) -> None:
    """Compute the accuracy table, print it, draw it and write it."""
    from hopper_attention.experiments.rmse.methods import METHODS
    from hopper_attention.experiments.rmse.run import report_as_data, run_rmse
    from hopper_attention.experiments.rmse.tables import rmse_table

    with progress_bar() as bar:
        methods = asked.methods or METHODS
        report = run_rmse(experiment, follow(bar), methods=methods, fa3_library=asked.fa3_library)
    console = console_for(json_path)
    console.print(rmse_table(report))
    console.print()
    if plot != NO_FILE:
        from hopper_attention.experiments.rmse.plot import plot_rmse

        print_path(console, "plot", plot_rmse(report, Path(plot)))
    write_json(report_as_data(report), json_path, console)


def show_sweep(sweep: LengthSweep, asked: RowsAsked, plot: str, json_path: str) -> None:
    """Compute error against the number of keys, print it, draw it and write it."""
    from hopper_attention.experiments.rmse.sweep import run_sweep, sweep_as_data
    from hopper_attention.experiments.rmse.tables import sweep_table

    with progress_bar() as bar:
        report = run_sweep(sweep, follow(bar), methods=asked.methods, fa3_library=asked.fa3_library)
    console = console_for(json_path)
    console.print(sweep_table(report))
    console.print()
    if plot != NO_FILE:
        from hopper_attention.experiments.rmse.plot import plot_sweep

        print_path(console, "plot", plot_sweep(report, Path(plot)))
    write_json(sweep_as_data(report), json_path, console)


def follow(bar: Progress) -> Watcher:
    """A progress callback of the experiments that moves the bar."""
    task = bar.add_task("starting", total=None)

    def update(done: int, total: int, label: str) -> None:
        bar.update(task, completed=done, total=total, description=label)

    return update


def given(context: typer.Context, option: str) -> bool:
    """Whether the option stands on the command line, and is not just its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


app.command("compile")(compile_kernels)
app.add_typer(bench_app, name="bench")
app.command()(ablation)
