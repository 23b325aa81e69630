"""Host time a call of every peer, small shapes, CUDA graphs, and the time of the first call in a fresh process.

    python benchmarks/latency.py --out latency.json [--fa3-library PATH] [--peers ours,fa3,fa4,cudnn,fa2]

The same as ``hopper-attention bench latency``, with a commit to name in the report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hopper_attention.experiments.bench.latency import Calls, parse_small_shapes, run_latency
from hopper_attention.experiments.bench.peers import DEFAULT_PEERS, PEERS, Setting, parse_peers
from hopper_attention.experiments.bench.tables import latency_table
from hopper_attention.experiments.bench.targets import latency_targets
from hopper_attention.experiments.reports import dump_figures, write_text
from hopper_attention.experiments.tables import target_table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS))
    parser.add_argument("--shapes", default="", help="comma-separated names; default: small ones")
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=300, help="calls a measurement")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--first-calls", type=int, default=3, help="fresh processes of each kind; 0: none")
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)

    def save(figures: dict[str, Any]) -> None:
        write_text(options.out, dump_figures(figures))

    figures = run_latency(
        parse_small_shapes(options.shapes),
        parse_peers(options.peers, PEERS),
        Setting(options.device, options.fa3_library),
        Calls(options.calls, options.rounds),
        first_calls=options.first_calls,
        commit=options.commit,
        save=save,
    )
    console.print(latency_table(figures))
    console.print(target_table(latency_targets(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
