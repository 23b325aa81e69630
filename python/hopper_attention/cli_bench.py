"""The commands that measure: ``bench`` with its kinds, and ``ablation``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from hopper_attention.cli_measure import end_if_lost, line_progress, measurement
from hopper_attention.cli_parts import (
    NO_FILE,
    Device,
    Fa3Library,
    JsonPath,
    PlotPath,
    SuiteBudget,
    Sustained,
    console_for,
    one_line_errors,
    pick_device,
    print_path,
    progress_bar,
    write_json,
    write_json_text,
)

if TYPE_CHECKING:
    from hopper_attention.compile_cache import Compilation
    from hopper_attention.experiments.ablation.run import Ablation

WIDE_PIPE = 200
"""Columns of the ablation's table where there is no terminal to ask."""

DEFAULT_KIND = "forward"
SMALL_SHAPE = "bf16-b1-s256-h2-d64-full"

Precision = Literal["float16", "bfloat16", "fp8"]
Inputs = Literal["normal", "peaky"]
Shapes = Annotated[
    str,
    typer.Option(
        help="paper (36 cells), ablation, random:40 or random:40:7 (so many drawn by a seed), or names such as "
        "bf16-b4-s8192-h16-d128-causal, comma-separated; empty: what the benchmark promises something about."
    ),
]
Peers = Annotated[str, typer.Option(help="Comma-separated; empty: those that are usually compared.")]
Budget = Annotated[float, typer.Option(help="Seconds to measure for, first calls not counted.")]


class ForwardByDefault(TyperGroup):
    """``bench`` without a kind is ``bench forward``, and ``bench --compare A B`` is ``bench compare A B``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["--compare"]:
            args = ["compare", *args[1:]]
        elif not args or (args[0].startswith("-") and args[0] != "--help"):
            args = [DEFAULT_KIND, *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    cls=ForwardByDefault,
    help="Speed against the installed peers, in interleaved rounds, each output checked first. Without a kind: "
    "forward. --compare A.json B.json: the same as compare. A report that --json puts into benchmarks/results, under "
    "the name that its kind's help gives, is rendered into the README and docs/results by benchmarks/render.py.",
)


def show_problems(lines: list[str], console: Console) -> None:
    """What did not run and why."""
    for line in lines:
        console.print(line, style="yellow", markup=False)


def device_to_measure(device: str) -> str:
    """The device to run a benchmark on.

    Raises:
        ValueError: none was named and there is no GPU, or there is no such device.
    """
    where = pick_device(device)
    if device == "auto" and where == "cpu":
        raise ValueError(
            "bench needs a Hopper GPU (H100, H200, GH200), and torch finds no GPU here; what runs anywhere: "
            "hopper-attention rmse (accuracy), hopper-attention explain --capability 9.0 (what a Hopper GPU would "
            f"run), or small problems, as hopper-attention bench --device cpu --shapes {SMALL_SHAPE}"
        )
    return where


def throughput(
    kind: str,
    shapes: str,
    peers: str,
    fa3_library: str,
    device: str,
    seconds: tuple[float, float],
    plot: str,
    json_path: str,
) -> None:
    """Run a suite, print its table, draw it and write it. ``seconds`` are the budget, 0 for that of the suite, and how
    long two peers of some rows run without a pause."""
    where = device_to_measure(device)
    from hopper_attention.experiments.bench.peers import Setting, parse_peers
    from hopper_attention.experiments.bench.results import dump_forward
    from hopper_attention.experiments.bench.run import check_affordable, run_forward
    from hopper_attention.experiments.bench.spec import parse_shapes
    from hopper_attention.experiments.bench.suites import SUITES
    from hopper_attention.experiments.bench.tables import forward_table
    from hopper_attention.experiments.bench.targets import throughput_targets
    from hopper_attention.experiments.bench.timing import PATIENCE, Effort
    from hopper_attention.experiments.bench.words import problems_of
    from hopper_attention.experiments.tables import target_table

    suite, (budget, sustained) = SUITES[kind], seconds
    problems = parse_shapes(shapes or suite.default_shapes)
    rows = parse_peers(peers or suite.default_peers, suite.registry)
    check_affordable(problems, where)
    console = console_for(json_path)
    with measurement(len(problems), dump_forward, json_path) as run:
        run_forward(
            problems,
            rows,
            Setting(where, fa3_library),
            Effort(budget_s=budget or suite.budget_s, patience=PATIENCE),
            suite=suite,
            sustained_s=sustained,
            progress=run.start,
            save=run.save,
        )
    (report,) = run.kept
    console.print(forward_table(report))
    targets = throughput_targets(report)
    if targets:
        console.print(target_table(targets))
    show_problems(problems_of(report), console)
    if plot != NO_FILE:
        from hopper_attention.experiments.bench.plot import plot_forward

        print_path(console, "plot", plot_forward(report, Path(plot)))
    write_json_text(dump_forward(report), json_path, console)
    run.end(console)


SUITE_HELP = {
    "forward": "Forward throughput in 16 bits. Report: forward_<gpu>.json, page: forward.md.",
    "fp8": "Forward throughput in FP8: the kernel alone, and end to end from 16 bits. Report: fp8_<gpu>.json, page: "
    "fp8.md.",
    "backward": "Backward throughput in 16 bits: the gradients alone, without the forward. Report: "
    "backward_<gpu>.json, page: backward.md.",
}


def add_suite(kind: str, text: str) -> None:
    """The command of one throughput benchmark."""

    def command(
        shapes: Shapes = "",
        peers: Peers = "",
        fa3_library: Fa3Library = NO_FILE,
        device: Device = "auto",
        budget: SuiteBudget = 0.0,
        sustained: Sustained = 0.0,
        plot: PlotPath = NO_FILE,
        json_path: JsonPath = NO_FILE,
    ) -> None:
        with one_line_errors():
            throughput(kind, shapes, peers, fa3_library, device, (budget, sustained), plot, json_path)

    bench_app.command(kind, help=text)(command)


for kind, text in SUITE_HELP.items():
    add_suite(kind, text)


@bench_app.command()
def latency(
    shapes: Annotated[str, typer.Option(help="Names of small problems, comma-separated.")] = "",
    peers: Peers = "",
    fa3_library: Fa3Library = NO_FILE,
    device: Device = "auto",
    calls: Annotated[int, typer.Option(help="Calls a measurement.")] = 300,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 11,
    first_calls: Annotated[
        int, typer.Option(min=0, help="Fresh processes of each kind for the time of the first call.")
    ] = 3,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Host time a call, small shapes, CUDA graph replay, and the first call of a process. Report: latency_<gpu>.json,
    on the page forward.md."""
    with one_line_errors():
        where = device_to_measure(device)
        from hopper_attention.experiments.bench.latency import Calls, parse_small_shapes, run_latency
        from hopper_attention.experiments.bench.peers import DEFAULT_PEERS, PEERS, Setting, parse_peers
        from hopper_attention.experiments.bench.tables import latency_table
        from hopper_attention.experiments.bench.targets import latency_targets
        from hopper_attention.experiments.bench.words import latency_problems
        from hopper_attention.experiments.reports import dump_figures
        from hopper_attention.experiments.tables import target_table

        problems = parse_small_shapes(shapes)
        rows = parse_peers(peers, PEERS, DEFAULT_PEERS)
        setting = Setting(where, fa3_library)
        console = console_for(json_path)
        with progress_bar() as bar:
            figures = run_latency(
                problems,
                rows,
                setting,
                Calls(calls, rounds),
                first_calls=first_calls,
                progress=line_progress(bar, len(problems) + 1),
            )
        console.print(latency_table(figures))
        console.print(target_table(latency_targets(figures)))
        show_problems(latency_problems(figures), console)
        write_json_text(dump_figures(figures), json_path, console)


@bench_app.command()
def scaling(
    lengths: Annotated[str, typer.Option(metavar="N,N,...", help="Empty: 1k to 1M, doubling.")] = "",
    tokens: Annotated[int, typer.Option(help="Of the series in which the batch shrinks.")] = 131_072,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    peers: Peers = "",
    fa3_library: Fa3Library = NO_FILE,
    device: Device = "auto",
    budget: Budget = 30.0,
    plot: PlotPath = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Time, TFLOP/s and memory by length of the sequence, beside plain PyTorch as far as that fits. Report:
    scaling_<gpu>.json, page: scaling.md."""
    with one_line_errors():
        where = device_to_measure(device)
        from hopper_attention.experiments.bench.peers import PEERS, Setting, parse_peers
        from hopper_attention.experiments.bench.timing import Effort
        from hopper_attention.experiments.scaling.run import (
            DEFAULT_PEERS,
            Scaling,
            dump_scaling,
            parse_lengths,
            run_scaling,
        )
        from hopper_attention.experiments.scaling.tables import scaling_problems, scaling_table

        spec = Scaling(parse_lengths(lengths), tokens, heads, head_dim, causal=causal)
        rows = parse_peers(peers or DEFAULT_PEERS, PEERS)
        setting = Setting(where, fa3_library)
        console = console_for(json_path)
        effort = Effort(budget_s=budget)
        with measurement(len(spec.problems()), dump_scaling, json_path) as run:
            run_scaling(spec, rows, setting, effort, progress=run.start, save=run.save)
        for report in run.kept:
            console.print(scaling_table(report))
            show_problems(scaling_problems(report), console)
            if plot != NO_FILE:
                from hopper_attention.experiments.scaling.plot import plot_scaling

                print_path(console, "plot", plot_scaling(report, Path(plot)))
            write_json_text(dump_scaling(report), json_path, console)
        run.end(console)


@bench_app.command()
def features(
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Workloads with this in their name; * is anything.")
    ] = "",
    inputs: Annotated[Inputs, typer.Option(help="N(0, 1); or with queries times 4.")] = "normal",
    peers: Peers = "",
    fa3_library: Fa3Library = NO_FILE,
    device: Device = "auto",
    budget: Budget = 120.0,
    plot: PlotPath = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Packed sequences, windows and changed scores, forward and backward: us of each peer, and ours over the best.
    Report: features_<gpu>.json, page: features.md."""
    with one_line_errors():
        where = device_to_measure(device)
        from hopper_attention.experiments.bench.peers import Setting, parse_peers
        from hopper_attention.experiments.bench.timing import PATIENCE, Effort
        from hopper_attention.experiments.features.peers import DEFAULT_FEATURE_PEERS, FEATURE_PEERS
        from hopper_attention.experiments.features.results import (
            dump_features,
            feature_targets,
        )
        from hopper_attention.experiments.features.run import run_features
        from hopper_attention.experiments.features.spec import WORKLOADS
        from hopper_attention.experiments.features.tables import feature_table
        from hopper_attention.experiments.tables import target_table
        from hopper_attention.experiments.workloads.spec import pick_workloads
        from hopper_attention.experiments.workloads.tables import failures_of

        workloads = pick_workloads(only, WORKLOADS)
        rows = parse_peers(peers, FEATURE_PEERS, DEFAULT_FEATURE_PEERS)
        setting, effort = Setting(where, fa3_library), Effort(budget_s=budget, patience=PATIENCE)
        console = console_for(json_path, WIDE_PIPE)
        with measurement(len(workloads), dump_features, json_path) as run:
            run_features(workloads, rows, setting, effort, family=inputs, progress=run.start, save=run.save)
        (report,) = run.kept
        console.print(feature_table(report))
        targets = feature_targets(report)
        if targets:
            console.print(target_table(targets))
        show_problems(failures_of(report), console)
        if plot != NO_FILE and report.cells:
            from hopper_attention.experiments.features.plot import plot_features

            print_path(console, "plot", plot_features(report, Path(plot)))
        write_json_text(dump_features(report), json_path, console)
        run.end(console)


@bench_app.command()
def serving(
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Workloads with this in their name; * is anything.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Those with an e4m3 cache as well.")] = False,
    inputs: Annotated[Inputs, typer.Option(help="N(0, 1); or with queries times 4.")] = "normal",
    peers: Peers = "",
    fa3_library: Fa3Library = NO_FILE,
    device: Device = "auto",
    budget: Budget = 60.0,
    plot: PlotPath = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Attention on a key/value cache: decode, pages, chunked prefill, new keys; us of each peer, ours over the best,
    and host time. Report, written after each workload: serving_<gpu>.json, page: serving.md."""
    with one_line_errors():
        where = device_to_measure(device)
        from hopper_attention.experiments.bench.peers import Setting, parse_peers
        from hopper_attention.experiments.bench.timing import PATIENCE, Effort
        from hopper_attention.experiments.serving import spec
        from hopper_attention.experiments.serving.peers import DEFAULT_SERVING_PEERS, SERVING_PEERS
        from hopper_attention.experiments.serving.results import dump_serving, serving_targets
        from hopper_attention.experiments.serving.run import run_serving
        from hopper_attention.experiments.serving.tables import host_table, serving_problems, serving_table
        from hopper_attention.experiments.tables import target_table
        from hopper_attention.experiments.workloads.spec import pick_workloads

        workloads = pick_workloads(only, spec.ALL_WORKLOADS if every else spec.WORKLOADS)
        rows = parse_peers(peers, SERVING_PEERS, DEFAULT_SERVING_PEERS)
        setting, effort = Setting(where, fa3_library), Effort(budget_s=budget, patience=PATIENCE)
        console = console_for(json_path, WIDE_PIPE)
        with measurement(len(workloads), dump_serving, json_path) as run:
            run_serving(workloads, rows, setting, effort, family=inputs, progress=run.start, save=run.save)
        (report,) = run.kept
        console.print(serving_table(report))
        if report.host:
            console.print(host_table(report))
        targets = serving_targets(report)
        if targets:
            console.print(target_table(targets))
        show_problems(serving_problems(report), console)
        if plot != NO_FILE and report.cells:
            from hopper_attention.experiments.serving.plot import plot_serving

            print_path(console, "plot", plot_serving(report, Path(plot)))
        write_json_text(dump_serving(report), json_path, console)
        run.end(console)


@bench_app.command()
def quantize(
    shapes: Annotated[
        str, typer.Option(help="As for forward, without regard to the mask; empty: the paper's sizes.")
    ] = "",
    device: Device = "auto",
    budget: Budget = 20.0,
    json_path: JsonPath = NO_FILE,
) -> None:
    """The FP8 pre-pass against a device copy in the same run: TB/s of each, and their ratio. Report:
    prepass_<gpu>.json, page: prepass.md."""
    with one_line_errors():
        where = device_to_measure(device)
        from hopper_attention.experiments.bench.peers import Setting
        from hopper_attention.experiments.bench.spec import parse_shapes
        from hopper_attention.experiments.bench.timing import Effort
        from hopper_attention.experiments.prepass.run import (
            dump_quantize,
            paper_sizes,
            quantize_targets,
            run_quantize,
        )
        from hopper_attention.experiments.prepass.tables import quantize_problems, quantize_table
        from hopper_attention.experiments.tables import target_table

        problems = parse_shapes(shapes) if shapes else paper_sizes()
        setting = Setting(where)
        console = console_for(json_path)
        with measurement(len(problems), dump_quantize, json_path) as run:
            run_quantize(problems, setting, Effort(budget_s=budget), progress=run.start, save=run.save)
        for report in run.kept:
            console.print(quantize_table(report))
            console.print(target_table(quantize_targets(report)))
            show_problems(quantize_problems(report), console)
            write_json_text(dump_quantize(report), json_path, console)
        run.end(console)


@bench_app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="A.json")],
    after: Annotated[str, typer.Argument(metavar="B.json")],
    peers: Annotated[str, typer.Option(help="Whose figures; empty: ours; all for all.")] = "",
    least: Annotated[
        float, typer.Option(help="Exit with 1 if a figure fell below this share of what it was.")
    ] = 0.0,
) -> None:
    """Two reports of one kind, cell by cell. Runs nothing and writes nothing."""
    with one_line_errors():
        from hopper_attention.experiments.bench.compare import (
            compare as compare_texts,
        )
        from hopper_attention.experiments.bench.compare import (
            compare_table,
            machine_changes,
            of_whom,
            slower_than,
        )

        texts = [Path(path).read_text(encoding="utf-8") for path in (before, after)]
        compared = of_whom(compare_texts(*texts), peers)
        console = console_for(NO_FILE)
        console.print(compare_table(compared))
        show_problems(machine_changes(*texts), console)
        slower = slower_than(compared, least)
        for entry in slower:
            where = f"{entry.after.who} on {entry.after.what}"
            console.print(f"slower: {where}, {entry.speedup:.3f} of before", style="red", markup=False)
    if slower:
        raise typer.Exit(1)


def ablation(
    shape: Annotated[str, typer.Option(help="Sizes; sk, hk and dv may follow.")] = "b4-s8448-h16-d128",
    dtype: Annotated[Precision, typer.Option(help="Of the kernels.")] = "float16",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    variants: Annotated[
        str, typer.Option(metavar="NAME,...", help="Rows to measure beside the full kernel; empty: all.")
    ] = "",
    compile_only: Annotated[
        bool,
        typer.Option(
            "--compile-only", help="Compile all candidates and show their machine code; needs no GPU."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile. 0: one a core, at most 16.")] = 0,
    device: Device = "auto",
    plot: PlotPath = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """What each optimisation is worth: the paper's ablation (section 4.2, table 2), with more rows. Report:
    ablation_<gpu>.json, page: ablation.md."""
    with one_line_errors():
        from hopper_attention.experiments.ablation.results import ablation_problem
        from hopper_attention.experiments.ablation.run import Ablation, check_can_run
        from hopper_attention.experiments.ablation.variants import parse_variants

        problem = ablation_problem(shape, dtype, causal)
        asked = Ablation(problem, dtype, parse_variants(variants))
        workers = jobs or min(16, os.cpu_count() or 1)
        if compile_only:
            show_code(asked, workers, json_path)
        else:
            where = pick_device(device)
            check_can_run(where)
            show_ablation(asked, workers, where, plot, json_path)


def compile_bar(bar: Progress) -> Callable[[Compilation], None]:
    """A callback for each kernel that was compiled."""
    task = bar.add_task("compiling", total=None)
    return lambda result: bar.update(task, advance=1, description=result.config.name)


def show_code(asked: Ablation, jobs: int, json_path: str) -> None:
    """Compile every candidate, print its machine code and write it."""
    from hopper_attention.experiments.ablation.code import INSTALL_NVDISASM, find_nvdisasm
    from hopper_attention.experiments.ablation.run import inspect_variants, inspected_as_data
    from hopper_attention.experiments.ablation.tables import code_table

    with progress_bar() as bar:
        inspected = inspect_variants(asked, jobs, compile_bar(bar))
    console = console_for(json_path, WIDE_PIPE)
    console.print(code_table(inspected))
    if not find_nvdisasm():
        console.print(f"Instructions are not counted without nvdisasm: {INSTALL_NVDISASM}", style="yellow")
    write_json(inspected_as_data(asked, inspected), json_path, console)


def show_ablation(asked: Ablation, jobs: int, device: str, plot: str, json_path: str) -> None:
    """Measure, print the table, draw it and write it."""
    from hopper_attention.experiments.ablation.results import ablation_targets, dump_ablation
    from hopper_attention.experiments.ablation.run import PHASES, run_ablation
    from hopper_attention.experiments.ablation.tables import ablation_table, problems_of
    from hopper_attention.experiments.bench.peers import Setting
    from hopper_attention.experiments.bench.run import CellLostError
    from hopper_attention.experiments.tables import target_table

    console = console_for(json_path, WIDE_PIPE)
    try:
        with progress_bar() as bar:
            report = run_ablation(
                asked,
                Setting(device),
                jobs=jobs,
                progress=line_progress(bar, PHASES),
                on_compiled=compile_bar(bar),
            )
    except CellLostError as error:
        end_if_lost(f"stopped: {error}", console)
        return
    console.print(ablation_table(report))
    targets = ablation_targets(report)
    if targets:
        console.print(target_table(targets))
    show_problems(problems_of(report), console)
    if plot != NO_FILE:
        from hopper_attention.experiments.ablation.plot import plot_ablation

        print_path(console, "plot", plot_ablation(report, Path(plot)))
    write_json_text(dump_ablation(report), json_path, console)
