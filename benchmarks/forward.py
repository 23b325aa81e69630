"""Forward throughput of every installed peer, on the paper's shapes or any others.

    python benchmarks/forward.py                                   the 36 cells and the ablation's shape
    python benchmarks/forward.py --shapes bf16-b2-s4096-h16-hk4-d128-causal --peers ours,fa3
    python benchmarks/forward.py --compare before.json after.json  two reports side by side; runs nothing

Peers take turns in interleaved rounds; each is checked against float64 before it is timed. The report is
written after every cell, so a run that is cut short leaves what it had. benchmarks/fp8.py is the same for FP8.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from rich.console import Console

from hopper_attention.experiments.bench.compare import compare, compare_table, of_whom
from hopper_attention.experiments.bench.machine import repository_root
from hopper_attention.experiments.bench.peers import Setting, parse_peers
from hopper_attention.experiments.bench.results import ForwardReport, dump_forward
from hopper_attention.experiments.bench.run import (
    CellLostError,
    check_affordable,
    exit_with_lost_gpu,
    run_forward,
)
from hopper_attention.experiments.bench.spec import Problem, parse_shapes
from hopper_attention.experiments.bench.suites import FORWARD, Suite
from hopper_attention.experiments.bench.tables import forward_table
from hopper_attention.experiments.bench.targets import throughput_targets
from hopper_attention.experiments.bench.timing import PATIENCE, Effort
from hopper_attention.experiments.bench.words import problems_of
from hopper_attention.experiments.reports import write_text
from hopper_attention.experiments.tables import target_table

TABLE_WIDTH = 150


def parse_arguments(arguments: list[str], suite: Suite, description: str) -> argparse.Namespace:
    effort = Effort()
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    parser.add_argument("--peers", default=suite.default_peers, help=f"out of {', '.join(suite.registry)}")
    parser.add_argument(
        "--shapes", default=suite.default_shapes, help="paper, ablation, or names; comma-separated"
    )
    parser.add_argument(
        "--only", default="", help="keep shapes whose name holds one of these parts, such as d128-c"
    )
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--budget", type=float, default=suite.budget_s, help="seconds, first calls not counted"
    )
    parser.add_argument(
        "--rounds", type=int, default=effort.max_rounds, help="at most; the budget may allow fewer"
    )
    parser.add_argument(
        "--measure-ms", type=float, default=effort.measure_s * 1e3, help="of launches a measurement"
    )
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    default_out = f"benchmarks/results/{suite.kind}_<gpu>.json"
    parser.add_argument("--out", "--json", type=Path, help=f"default: {default_out}")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    return parser.parse_args(arguments)


def select_problems(shapes: str, only: str) -> list[Problem]:
    """The shapes whose name holds one of the comma-separated parts ``only``; all of them if it is empty.

    Raises:
        ValueError: a shape cannot be read, or none is left.
    """
    parts = [part for part in only.split(",") if part]
    problems = [p for p in parse_shapes(shapes) if not parts or any(part in p.name for part in parts)]
    if not problems:
        raise ValueError(f"only is {only!r}, allowed: parts of the names that shapes {shapes!r} gives")
    return problems


def default_path(report: ForwardReport) -> Path:
    """Where a report is committed: named after the GPU, so that each machine has one."""
    slug = re.sub(r"[^a-z0-9]+", "_", report.machine["gpu"].lower()).strip("_")
    return repository_root() / "benchmarks" / "results" / f"{report.kind}_{slug}.json"


def run(options: argparse.Namespace, suite: Suite, console: Console) -> int:
    problems = select_problems(options.shapes, options.only)
    check_affordable(problems, options.device)
    effort = Effort(
        measure_s=options.measure_ms / 1e3,
        min_rounds=min(3, options.rounds),
        max_rounds=options.rounds,
        budget_s=options.budget,
        patience=PATIENCE,
    )
    saved: list[ForwardReport] = []

    def save(report: ForwardReport) -> None:
        saved[:] = [report]
        write_text(options.out or default_path(report), dump_forward(report))

    lost = ""
    try:
        run_forward(
            problems,
            parse_peers(options.peers, suite.registry),
            Setting(options.device, options.fa3_library),
            effort,
            suite=suite,
            commit=options.commit,
            progress=lambda line: console.print(line, highlight=False, style="dim"),
            save=save,
        )
    except CellLostError as error:
        lost = f"stopped at {error.cell.problem.name}: {error}"
    report = saved[0]
    console.print(forward_table(report))
    for line in problems_of(report):
        console.print(line, style="yellow", markup=False)
    targets = throughput_targets(report)
    if targets:
        console.print(target_table(targets))
    console.print(f"written to {options.out or default_path(report)}", markup=False)
    if lost:
        console.print(lost, style="bold red", markup=False)
        exit_with_lost_gpu()
    return 0


def main(arguments: list[str], suite: Suite = FORWARD, description: str = __doc__) -> int:
    options = parse_arguments(arguments, suite, description)
    # A file or pipe has no width of its own; the table needs one that keeps a cell on a line.
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    try:
        if options.compare:
            before, after = (path.read_text(encoding="utf-8") for path in options.compare)
            console.print(compare_table(of_whom(compare(before, after), "")))
            return 0
        return run(options, suite, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
