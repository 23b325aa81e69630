"""``hopper-attention compile``: fill the kernel cache ahead of time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from hopper_attention.cli_parts import (
    INTERRUPTED,
    NO_FILE,
    JsonPath,
    console_for,
    one_line_errors,
    print_path,
    progress_bar,
    write_json,
)

if TYPE_CHECKING:
    from hopper_attention.compile_cache import Compilation, KernelConfig

SECONDS_A_KERNEL = 5.0
"""What a core takes for a kernel, in the mean."""

ALL = "all"


def compile_kernels(
    jobs: Annotated[
        int, typer.Option(help="Processes; each takes about 1.5 GB. 0: one a core, at most 8.")
    ] = 0,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Configs whose name contains this.")] = "",
    arch: Annotated[
        str,
        typer.Option(
            metavar="ARCH",
            help="sm_80, sm_86, sm_89, sm_90a (Hopper), sm_120, or all. Empty: what the GPUs of this machine need, "
            "and sm_90a where there is none.",
        ),
    ] = "",
    for_model: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A model's config.json, of Hugging Face, or its folder: compile what that model needs, for prompts, "
            "packed sequences and a key/value cache, in 16 bits.",
        ),
    ] = NO_FILE,
    train: Annotated[
        bool, typer.Option("--train", help="With --for-model: its backward passes too.")
    ] = False,
    objects: Annotated[
        str, typer.Option(metavar="FOLDER", help="Also put the plain object files there, to link with.")
    ] = NO_FILE,
    json_path: JsonPath = NO_FILE,
) -> None:
    """Compile kernels ahead of time, in parallel; no GPU is needed. Any other is compiled when it is first
    called. Ctrl-C stops at once, and what was finished stays."""
    with one_line_errors():
        from hopper_attention.checks import check_count
        from hopper_attention.cli_views import compile_summary
        from hopper_attention.compile_cache import cache_dir, read_entry

        archs = parse_archs(arch)
        kernels = [config for each in archs for config in kernels_of_model(for_model, each, train)]
        configs = [config for config in kernels if only in config.name]
        if not configs:
            raise ValueError(f"only is {only!r}, allowed: part of a config's name, as fp16_d64")
        processes = check_count("jobs", jobs, 0) or min(8, os.cpu_count() or 1)
        if objects != NO_FILE:
            # Before minutes of work, if it cannot be made.
            Path(objects).mkdir(parents=True, exist_ok=True)
        console = console_for(json_path)
        console.print(announcement(configs, archs, processes), soft_wrap=True)
        results = compile_and_show(configs, processes)
        if objects != NO_FILE:
            folder = Path(objects)
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


def parse_archs(arch: str) -> tuple[str, ...]:
    """What to compile for: the one that is named, all of them, or those of this machine.

    Raises:
        ValueError: there are no kernels for ``arch``, or, without one, for the GPUs of this machine.
    """
    from cute_kernels.ampere.config import ARCHS
    from hopper_attention.machine import archs_here

    if arch == ALL:
        return tuple(ARCHS)
    if arch and arch not in ARCHS:
        raise ValueError(f"arch is {arch!r}, allowed: {', '.join(ARCHS)} or {ALL}")
    return (arch,) if arch else archs_here()


def kernels_of_model(path: str, arch: str, train: bool) -> tuple[KernelConfig, ...]:
    """The kernels that the model at ``path`` needs on GPUs of ``arch``; without a path, all shipped ones.

    Raises:
        ValueError: there is no path to train, or no model with attention there.
        OSError: there is no such file.
    """
    if path == NO_FILE:
        if train:
            raise ValueError(
                "train is given, allowed: with for-model; all shipped backward kernels are compiled"
            )
        return kernels_for(arch)
    from hopper_attention.model_kernels import kernels_of, read_model

    return kernels_of(read_model(Path(path)), arch, train)


def kernels_for(arch: str) -> tuple[KernelConfig, ...]:
    """The shipped kernels that a GPU of ``arch`` runs unless a call asks for another backend."""
    from cute_kernels.ampere.backward.config import shipped_ampere_backward_kernels
    from cute_kernels.ampere.config import shipped_ampere_forward_configs
    from cute_kernels.launches.config import LaunchesConfig
    from hopper.backward.shipped import shipped_backward_kernels
    from hopper.forward.fp8.tilings import (
        shipped_exact_lse_configs,
        shipped_fp8_forward_configs,
        shipped_long_fp8_forward_configs,
    )
    from hopper.forward.tilings import shipped_forward_configs, shipped_plain_configs
    from hopper.mean.config import shipped_run_means_configs, shipped_value_mean_configs
    from hopper.quantize.config import shipped_long_quantize_configs, shipped_quantize_configs
    from hopper.transpose.config import shipped_transpose_configs
    from hopper.widen.config import WidenConfig
    from hopper_attention._kernels import ARCH

    if arch != ARCH:
        return *shipped_ampere_forward_configs((arch,)), *shipped_ampere_backward_kernels((arch,))
    return (
        *shipped_forward_configs(),
        *shipped_plain_configs(),
        *shipped_fp8_forward_configs(),
        *shipped_long_fp8_forward_configs(),
        *shipped_fp8_forward_configs(two_level=True),
        *shipped_exact_lse_configs(),
        *shipped_quantize_configs(),
        *shipped_long_quantize_configs(),
        *shipped_value_mean_configs(),
        *shipped_run_means_configs(),
        *shipped_transpose_configs(),
        WidenConfig(),
        *shipped_backward_kernels(),
        LaunchesConfig(),
    )


def announcement(configs: Sequence[KernelConfig], archs: Sequence[str], processes: int) -> str:
    """How many kernels there are, for what, and how long they will take."""
    from hopper_attention.compile_cache import cached_kernels

    cached = {path.stem for path in cached_kernels()}
    missing = sum(config.name not in cached for config in configs)
    kernels = f"{len(configs)} kernels for {', '.join(archs)}, {len(configs) - missing} of them cached"
    if not missing:
        return kernels
    seconds = missing * SECONDS_A_KERNEL / min(processes, missing)
    return f"{kernels}; {missing} to compile, {processes} at a time: {duration(seconds)}"


def duration(seconds: float) -> str:
    return f"about {seconds / 60:.0f} minutes" if seconds > 90 else f"about {seconds:.0f} seconds"


def compile_and_show(configs: Sequence[KernelConfig], processes: int) -> tuple[Compilation, ...]:
    """Compile, with a progress bar on stderr, or lines where that is no terminal.

    Raises:
        ValueError: a process died.
        typer.Exit: the user has had enough.
    """
    from hopper_attention import compile_cache

    finished: list[Compilation] = []
    try:
        with progress_bar() as bar:
            show = follow(bar, len(configs), finished)
            return compile_cache.compile_all(configs, processes, show)
    except BrokenProcessPool:
        raise ValueError(
            f"jobs is {processes}, allowed: what fits in memory, at 1.5 GB each (a process died; what was finished is "
            "cached)"
        ) from None
    except KeyboardInterrupt:
        # One may be there of which this process has not been told yet.
        built = compile_cache.count_cached(configs)
        Console(stderr=True).print(
            f"stopped: {built} of {len(configs)} kernels are in {compile_cache.cache_dir()}; the same command goes on "
            "from there",
            soft_wrap=True,
            highlight=False,
        )
        raise typer.Exit(INTERRUPTED) from None


def follow(bar: Progress, total: int, finished: list[Compilation]) -> Callable[[Compilation], None]:
    """A callback that collects what is finished and moves the bar, or prints ten lines in all without a terminal."""
    task = bar.add_task("compiling", total=total)

    def show(result: Compilation) -> None:
        finished.append(result)
        bar.update(task, advance=1, description=result.config.name)
        count = len(finished)
        if not bar.console.is_terminal and 10 * count // total > 10 * (count - 1) // total:
            print(f"{count} of {total}", file=sys.stderr, flush=True)

    return show
