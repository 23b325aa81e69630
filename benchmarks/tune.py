"""Compare variants of the shipped forward configs, each compiled, checked and timed in interleaved rounds.

    python benchmarks/tune.py --shapes bf16-b2-s8192-h16-d128-causal --vary tile_n=128,144 --vary stages=2,3
    python benchmarks/tune.py --shapes paper --only d64 --vary ping_pong=true,false --peers fa3

``--vary`` takes a field of ForwardConfig and its values; registers are written consumer/producer, as 240/24.
All combinations are tried on the config that each problem ships with, which is always among them. Compiling
runs in parallel processes and fills the compile cache; ``--compile-only`` stops after it and needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.forward import select_problems
from hopper.config import ForwardConfig, Registers
from hopper.forward.tilings import select_forward_config
from hopper_attention.experiments.bench.config_peers import (
    BASE,
    compile_missing,
    label,
    variant_peer,
    why_invalid,
)
from hopper_attention.experiments.bench.peers import PEERS, Setting, parse_peers
from hopper_attention.experiments.bench.results import Cell, Failed, ForwardReport, dump_forward
from hopper_attention.experiments.bench.run import CellLostError, exit_with_lost_gpu, run_forward
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import Effort
from hopper_attention.experiments.reports import number, write_text
from hopper_attention.experiments.tables import FittedTable, figures, names, spare


def parse_value(field: str, text: str, shipped: Any) -> Any:
    """A field's value from text, of the type that the shipped config holds.

    Raises:
        ValueError: the text is no such value.
    """
    if isinstance(shipped, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{field} is {text!r}, allowed: true or false")
        return text.lower() == "true"
    if isinstance(shipped, Registers):
        consumer, _, producer = text.partition("/")
        if not consumer.isdigit() or not producer.isdigit():
            raise ValueError(f"{field} is {text!r}, allowed: consumer/producer, such as 240/24")
        return Registers(int(consumer), int(producer))
    try:
        return type(shipped)(text)
    except ValueError:
        raise ValueError(f"{field} is {text!r}, allowed: {type(shipped).__name__}") from None


def parse_vary(options: Sequence[str], shipped: ForwardConfig) -> dict[str, list[Any]]:
    """Values to try by field, from options such as ``tile_n=128,144``.

    Raises:
        ValueError: a field or value is not one of ForwardConfig.
    """
    varied: dict[str, list[Any]] = {}
    for option in options:
        field, _, values = option.partition("=")
        if field not in ForwardConfig.__dataclass_fields__:
            allowed = ", ".join(ForwardConfig.__dataclass_fields__)
            raise ValueError(f"vary is {option!r}, allowed: FIELD=VALUE,... with a field out of {allowed}")
        varied[field] = [parse_value(field, text, getattr(shipped, field)) for text in values.split(",")]
    return varied


@dataclass(frozen=True)
class Variants:
    """Configs to try on one problem by label, the shipped one first, and why others were left out."""

    problem: Problem
    configs: dict[str, ForwardConfig]
    skipped: dict[str, str]


def make_variants(problem: Problem, options: Sequence[str]) -> Variants:
    """All combinations of the varied values on the config that the problem ships with."""
    p = problem
    shipped = select_forward_config(p.dtype, p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
    varied = parse_vary(options, shipped)
    configs, skipped = {BASE: shipped}, {}
    for values in itertools.product(*varied.values()):
        config = replace(shipped, **dict(zip(varied, values, strict=True)))
        reason = why_invalid(config)
        if reason:
            skipped[label(config, shipped)] = reason
        else:
            configs[label(config, shipped)] = config
    return Variants(problem, configs, skipped)


def compile_variants(all_variants: Sequence[Variants], jobs: int, console: Console) -> dict[str, str]:
    """Compile every config that is not cached, in parallel; returns why some failed, by config name."""
    configs = {config.name: config for variants in all_variants for config in variants.configs.values()}
    console.print(f"compiling {len(configs)} configs in {jobs} processes", highlight=False)
    failures = compile_missing(configs.values(), jobs)
    for name, error in failures.items():
        console.print(f"{name}: {error}", style="red", markup=False)
    return failures


def result_table(cell: Cell, others: Sequence[str]) -> FittedTable:
    """Variants from fast to slow, each over the shipped config and over the other peers."""
    over = [f"/ {name}" for name in others]
    columns = (
        *names("variant"),
        *figures("TFLOP/s", "us", "spread", "/ shipped", *over),
        *spare(*figures("MHz", "W"), *names("config")),
    )
    rows: list[list[str]] = []
    for name in sorted(cell.peers, key=cell.tflops, reverse=True):
        result = cell.peers[name]
        if isinstance(result, Failed):
            rows.append([name, "[red]failed[/red]", *[""] * (5 + len(others)), result.reason])
            continue
        bases = (cell.tflops(base) for base in (BASE, *others))
        factors = [number(result.tflops / base, 3) if base else "–" for base in bases]
        gauges = number(result.clock_mhz), number(result.power_w)
        timing = f"{result.tflops:.1f}", f"{result.median_ms * 1e3:.1f}", f"{100 * result.spread:.1f} %"
        rows.append([name, *timing, *factors, *gauges, result.note])
    return FittedTable(cell.problem.name, columns, [rows])


def tune(options: argparse.Namespace, console: Console) -> int:
    problems = select_problems(options.shapes, options.only)
    all_variants = [make_variants(problem, options.vary) for problem in problems]
    for variants in all_variants:
        for name, reason in variants.skipped.items():
            console.print(f"{variants.problem.name}: {name} left out: {reason}", style="yellow", markup=False)
    failures = compile_variants(all_variants, options.jobs, console)
    if options.compile_only:
        return 1 if failures else 0
    setting = Setting("cuda", options.fa3_library)
    others = [peer for peer in parse_peers(options.peers, PEERS) if not peer.why_unavailable(setting)]
    effort = Effort(options.measure_ms / 1e3, min(3, options.rounds), options.rounds, options.budget)
    cells: list[Cell] = []
    for variants in all_variants:
        rows = [variant_peer(n, c) for n, c in variants.configs.items() if c.name not in failures]
        report: list[ForwardReport] = []

        def save(latest: ForwardReport, kept: list[ForwardReport] = report) -> None:
            kept[:] = [latest]

        lost = ""
        try:
            share = replace(effort, budget_s=effort.budget_s / len(all_variants))
            run_forward(
                [variants.problem], (*rows, *others), setting, share, commit=options.commit, save=save
            )
        except CellLostError as error:
            lost = f"stopped: {error}"
        cells += report[0].cells
        if options.out:
            write_text(options.out, dump_forward(replace(report[0], cells=tuple(cells))))
        console.print(result_table(report[0].cells[0], [peer.name for peer in others]))
        if lost:
            console.print(lost, style="bold red", markup=False)
            exit_with_lost_gpu()
    return 0


def main(arguments: list[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--shapes", required=True, help="paper, ablation, or names; comma-separated")
    add("--only", default="", help="keep shapes whose name holds one of these parts")
    add("--vary", action="append", default=[], metavar="FIELD=VALUE,...", help="may be given several times")
    add("--peers", default="fa3", help="peers to time along with the variants")
    add("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    add("--compile-only", action="store_true", help="fill the compile cache and stop; needs no GPU")
    add("--rounds", type=int, default=9)
    add("--measure-ms", type=float, default=4.0)
    add("--budget", type=float, default=120.0, help="seconds for all problems, first calls not counted")
    add("--commit", default="")
    add("--out", type=Path, help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    return tune(options, Console() if sys.stdout.isatty() else Console(width=150))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
