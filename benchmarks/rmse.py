"""Error of the forward against float64 on the paper's outlier inputs (section 4.3), with its targets.

python benchmarks/rmse.py --out rmse.json [--fa3-library PATH] [--peers ours,fa3,fa2] [--lengths 4096,65536]

Three measurements: every 16-bit peer; the paper's table, with the FP8 of every library that is here; and the error
of our FP8, with one level of accumulation, with two, and on a V without its mean, against the number of keys: on these
inputs, and on values with an offset, whose sums grow with the keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hopper_attention.cli import follow
from hopper_attention.cli_parts import progress_bar
from hopper_attention.experiments.bench.peers import PEERS, Inputs, Peer, Setting, inspect_peers, parse_peers
from hopper_attention.experiments.bench.run import describe_run
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.targets import rmse_targets
from hopper_attention.experiments.bench.timing import stopwatch_for
from hopper_attention.experiments.reports import dump_figures, write_text
from hopper_attention.experiments.rmse.methods import METHODS, Attended, Method
from hopper_attention.experiments.rmse.methods import PEERS as OTHERS
from hopper_attention.experiments.rmse.run import (
    Progress,
    RmseExperiment,
    RmseReport,
    ignore_progress,
    report_as_data,
    run_rmse,
)
from hopper_attention.experiments.rmse.sweep import (
    DEFAULT_LENGTHS,
    LengthSweep,
    parse_lengths,
    run_sweep,
    sweep_as_data,
)
from hopper_attention.experiments.rmse.tables import rmse_table, sweep_table
from hopper_attention.experiments.rmse.targets import fp8_targets, sweep_targets
from hopper_attention.experiments.tables import target_table

SWEPT = {"lengths": "outliers", "lengths_offset": "offset"}
"""Inputs of the sweeps over the number of keys, by their name in the report."""


def measure(
    peers: Sequence[Peer], experiment: RmseExperiment, setting: Setting, progress: Progress = ignore_progress
) -> tuple[dict[str, Any], RmseReport]:
    """Error by 16-bit peer, the mean over the seeds or why it has none, and the table; both on the same draws."""
    rows = {peer.name: row_of(peer, setting) for peer in peers}
    report = run_rmse(
        experiment, progress, methods=(*rows.values(), *METHODS), fa3_library=setting.fa3_library
    )
    added = {method.name for method in rows.values()}
    errors = {row.method: row.rmse for row in report.rows} | {
        entry.method: {"failed": entry.reason.removeprefix("failed: ")} for entry in report.left_out
    }
    table = replace(
        report,
        rows=tuple(row for row in report.rows if row.method not in added),
        left_out=tuple(entry for entry in report.left_out if entry.method not in added),
    )
    return {name: errors[method.name] for name, method in rows.items()}, table


def row_of(peer: Peer, setting: Setting) -> Method:
    """A 16-bit peer as a row; one that breaks costs that row."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
        return Attended(run_peer(peer, Inputs(q, k, v), causal, setting), peer.title)

    return Method(f"16-bit {peer.name}", peer.title, OTHERS, run)


def run_peer(peer: Peer, inputs: Inputs, causal: bool, setting: Setting) -> Tensor:
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    (batch, seqlen_q, heads, head_dim), seqlen_k = inputs.q.shape, inputs.k.shape[1]
    problem = Problem(dtype, batch, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim, causal)
    with peer.context():
        out = peer.prepare(problem, inputs, setting).launch()
    stopwatch_for(setting.device).synchronize()
    return out


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="ours,fa3,fa4,cudnn,fa2,torch", help="16-bit ones")
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=8448)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--lengths", default=",".join(map(str, DEFAULT_LENGTHS)), help="of the sweep; empty: none"
    )
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=120)

    setting = Setting(options.device, options.fa3_library)
    peers = parse_peers(options.peers, PEERS)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    experiment = RmseExperiment(
        seqlen=options.seqlen,
        heads=options.heads,
        head_dim=options.head_dim,
        seeds=options.seeds,
        device=options.device,
    )
    with progress_bar() as bar:
        watch = follow(bar)
        errors, table = measure(present, experiment, setting, watch)
        sweeps = [
            # One head: at 131072 keys, drawing the inputs takes longer than all else.
            run_sweep(
                LengthSweep(replace(experiment, heads=1, distribution=name), parse_lengths(options.lengths)),
                watch,
            )
            for name in SWEPT.values()
            if options.lengths
        ]
    figures = {
        **describe_run("rmse", infos, setting, options.commit),
        **asdict(experiment),
        "rmse": errors,
        "fp8": report_as_data(table),
        **{name: sweep_as_data(sweep) for name, sweep in zip(SWEPT, sweeps, strict=False)},
    }
    for name, value in errors.items():
        text = f"{value:.3e}" if isinstance(value, float) else f"failed: {value['failed']}"
        console.print(f"{name:6} {text}", highlight=False, markup=False)
    for view in (rmse_table(table), *map(sweep_table, sweeps)):
        console.print(view, highlight=False)
    targets = (
        rmse_targets(figures) + fp8_targets(table) + [t for sweep in sweeps[:1] for t in sweep_targets(sweep)]
    )
    write_text(options.out, dump_figures(figures))
    if targets:
        console.print(target_table(targets))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
