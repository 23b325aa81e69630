"""The FP8 kernels on families of inputs, beside FlashAttention-3, checked against float64.

    python benchmarks/fp8_inputs.py --out F.json [--fa3-library PATH] [--families q4,q8] [--problems NAME,...]

Peers take turns in rounds, launches rotate over inputs that exceed the L2 cache, as in the other benchmarks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from hopper_attention.experiments.bench.checks import compute_row_oracles
from hopper_attention.experiments.bench.fp8_peers import FP8_PEERS
from hopper_attention.experiments.bench.peers import Peer, Setting
from hopper_attention.experiments.bench.results import OURS, OURS_DROP_IN, OURS_DROP_IN_LSE
from hopper_attention.experiments.bench.run import count_input_sets, describe_place
from hopper_attention.experiments.bench.spec import Problem, parse_shapes
from hopper_attention.experiments.bench.timing import Effort, seconds_in_turns, stopwatch_for
from hopper_attention.experiments.families.draws import FAMILIES, Family, draw_family
from hopper_attention.experiments.families.errors import errors_of_draws
from hopper_attention.experiments.families.page import KIND
from hopper_attention.experiments.reports import dump_rows, write_text

PEERS = {"ours": OURS, "drop_in": OURS_DROP_IN, "drop_in_lse": OURS_DROP_IN_LSE, "fa3": "fa3"}
PROBLEMS = (
    "bf16-b4-s4096-h16-d128-full,bf16-b4-s4096-h16-d128-causal,bf16-b1-s16384-h16-d128-causal,"
    "bf16-b2-s8192-h32-d64-causal,bf16-b2-s8192-h8-d256-causal,bf16-b3-s5000-h16-hk4-d128-causal"
)
CHECKED_SCORES = 2**22


def relative_error(problem: Problem, inputs: Any, out: torch.Tensor) -> float:
    """Of the worst checked head, against float64 on the inputs."""
    worst = 0.0
    for oracle in compute_row_oracles(problem, inputs, CHECKED_SCORES):
        found = out[oracle.batch, oracle.rows, oracle.head].double()
        worst = max(worst, ((found - oracle.out).norm() / oracle.out.norm()).item())
    return worst


def measure(
    problem: Problem, family: Family, peers: dict[str, Peer], setting: Setting, draws: int
) -> dict[str, Any]:
    """Microseconds and error of each peer on a problem, and errors of so many draws."""
    effort, stopwatch = Effort(max_rounds=7), stopwatch_for(setting.device)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size if setting.device == "cuda" else 1
    sets = [
        draw_family(family, problem, seed, setting.device)
        for seed in range(count_input_sets(problem, l2_bytes, 2))
    ]
    launches, errors = {}, {}
    for name, peer in peers.items():
        prepared = [peer.prepare(problem, inputs, setting) for inputs in sets]
        launches[name] = [each.launch for each in prepared]
        errors[name] = relative_error(problem, sets[0], prepared[0].read(prepared[0].launch()))
    us = {name: 1e6 * s for name, s in seconds_in_turns(launches, stopwatch, effort).items()}
    of_draws = errors_of_draws(problem, family, range(draws), peers, setting)
    return {"problem": problem.name, "family": family.name, "us": us, "error": errors, "draws": of_draws}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default=PROBLEMS)
    parser.add_argument("--families", default=",".join(family.name for family in FAMILIES))
    parser.add_argument(
        "--draws", type=int, default=8, help="for errors beside FlashAttention-3's on our rotation"
    )
    parser.add_argument("--fa3-library", default="", help="path of sglang-kernel's flash_ops.abi3.so")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    setting = Setting(options.device, options.fa3_library)
    peers = {
        name: FP8_PEERS[key] for name, key in PEERS.items() if not FP8_PEERS[key].why_unavailable(setting)
    }
    wanted = options.families.split(",")
    families = [family for family in FAMILIES if family.name in wanted]
    if len(families) < len(wanted):
        parser.error(f"families is {options.families}, allowed: {', '.join(f.name for f in FAMILIES)}")
    head = {
        **describe_place(KIND, setting.device, options.commit),
        "method": {
            "rounds": "7 in turns, bursts of 5 ms, device time, inputs that rotate through memory",
            "error": "of two heads, evenly spaced rows",
            "draws": f"{options.draws} of each cell, with seeds of their own",
        },
        "families": {family.name: family.what for family in families},
    }
    cells = []
    for problem in parse_shapes(options.problems):
        for family in families:
            cells.append(cell := measure(problem, family, peers, setting, options.draws))
            shown = "  ".join(f"{n} {t:.1f} us {cell['error'][n]:.2e}" for n, t in cell["us"].items())
            print(f"{problem.name:38} {family.name:9} {shown}", flush=True)
            write_text(options.out, dump_rows(head, "cells", cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
