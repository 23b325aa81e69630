"""Error of the forward against float64 on the paper's outlier inputs (section 4.3), with its targets.

python benchmarks/rmse.py --out rmse.json [--fa3-library PATH] [--peers ours,fa3,fa2] [--lengths 4096,65536]

Three measurements: every 16-bit peer; the paper's table, with the FP8 of every library that is here; and the error
of our FP8, with one level of accumulation, with two, and on a V without its mean, against the number of keys: on these
inputs, and on values with an offset, whose sums grow with the keys.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hopper_attention.experiments.bench.peers import PEERS, Inputs, Peer, Setting, inspect_peers, parse_peers
from hopper_attention.experiments.bench.run import describe_error, describe_run
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.targets import rmse_targets
from hopper_attention.experiments.bench.timing import stopwatch_for
from hopper_attention.experiments.reports import dump_figures, write_text
from hopper_attention.experiments.rmse.run import (
    RmseExperiment,
    compute_oracle,
    draw_problem,
    report_as_data,
    root_mean_square,
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


def measure_errors(peers: list[Peer], experiment: RmseExperiment, setting: Setting) -> dict[str, Any]:
    """Root mean square error by 16-bit peer, the mean over the seeds, or why it has none."""
    errors: dict[str, list[float]] = {peer.name: [] for peer in peers}
    failures: dict[str, Any] = {}
    for seed in range(experiment.seeds):
        drawn = draw_problem(experiment, seed)
        oracle = compute_oracle(drawn)
        for peer in peers:
            try:
                out = run_peer(peer, Inputs(drawn.q, drawn.k, drawn.v), drawn.causal, setting)
                errors[peer.name].append(root_mean_square(out.double() - oracle))
            except Exception as error:  # a peer that breaks costs its own row
                failures[peer.name] = {"failed": describe_error(error)}
    return {name: failures.get(name) or statistics.fmean(figures) for name, figures in errors.items()}


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
    figures = {
        **describe_run("rmse", infos, setting, options.commit),
        **asdict(experiment),
        "rmse": measure_errors(present, experiment, setting),
    }
    for name, value in figures["rmse"].items():
        text = f"{value:.3e}" if isinstance(value, float) else f"failed: {value['failed']}"
        console.print(f"{name:6} {text}", highlight=False, markup=False)
    targets = rmse_targets(figures)

    table = run_rmse(experiment, fa3_library=options.fa3_library)
    figures["fp8"] = report_as_data(table)
    targets += fp8_targets(table)
    console.print(rmse_table(table), highlight=False)
    if options.lengths:
        # One head: at 131072 keys, drawing the inputs takes longer than all else.
        one_head, lengths = replace(experiment, heads=1), parse_lengths(options.lengths)
        sweep = run_sweep(LengthSweep(one_head, lengths))
        offset = run_sweep(LengthSweep(replace(one_head, distribution="offset"), lengths))
        figures["lengths"], figures["lengths_offset"] = sweep_as_data(sweep), sweep_as_data(offset)
        targets += sweep_targets(sweep)
        for report in (sweep, offset):
            console.print(sweep_table(report), highlight=False)
    write_text(options.out, dump_figures(figures))
    if targets:
        console.print(target_table(targets))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
