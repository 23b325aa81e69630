"""Error of the 16-bit forward against float64 on the paper's outlier inputs (section 4.3), peer by peer.

python benchmarks/rmse.py --out rmse.json [--fa3-library PATH] [--peers ours,fa3,fa2]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hopper_attention.experiments.bench import describe_error, describe_run
from hopper_attention.experiments.bench_peers import Inputs, Peer, Setting, inspect_peers, parse_peers
from hopper_attention.experiments.bench_render import target_table
from hopper_attention.experiments.bench_results import Problem, dump_figures, write_text
from hopper_attention.experiments.bench_targets import rmse_targets
from hopper_attention.experiments.bench_timing import stopwatch_for
from hopper_attention.experiments.rmse import RmseExperiment, compute_oracle, draw_problem


def root_mean_square(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt().item())


def measure_errors(peers: list[Peer], experiment: RmseExperiment, setting: Setting) -> dict[str, Any]:
    """Root mean square error by peer, or why it has none."""
    e = experiment
    drawn = draw_problem(e, seed=0)
    problem = Problem(
        e.dtype, e.batch, e.seqlen, e.seqlen, e.heads, e.heads, e.head_dim, e.head_dim, e.causal
    )
    inputs = Inputs(drawn.q, drawn.k, drawn.v)
    oracle = compute_oracle(drawn)
    stopwatch = stopwatch_for(setting.device)
    errors: dict[str, Any] = {}
    for peer in peers:
        try:
            with peer.context():
                out = peer.prepare(problem, inputs, setting).launch()
            stopwatch.synchronize()
            errors[peer.name] = root_mean_square(out.double() - oracle)
        except Exception as error:
            errors[peer.name] = {"failed": describe_error(error)}
    return errors


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="ours,fa3,fa4,cudnn,fa2,torch")
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seqlen", type=int, default=8448)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)

    setting = Setting(options.device, options.fa3_library)
    peers = parse_peers(options.peers)
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    experiment = RmseExperiment(
        seqlen=options.seqlen, heads=options.heads, head_dim=options.head_dim, device=options.device
    )
    figures = {
        **describe_run("rmse", infos, setting, options.commit),
        **asdict(experiment),
        "rmse": measure_errors(present, experiment, setting),
    }
    write_text(options.out, dump_figures(figures))
    for name, value in figures["rmse"].items():
        text = f"{value:.3e}" if isinstance(value, float) else f"failed: {value['failed']}"
        console.print(f"{name:6} {text}", highlight=False, markup=False)
    targets = rmse_targets(figures)
    if targets:
        console.print(target_table(targets))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
