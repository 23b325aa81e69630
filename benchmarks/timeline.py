"""Who works when inside a CTA, for the kernel of each row of the ablation, from clocks read in the kernel.

    python benchmarks/timeline.py --out benchmarks/results/timeline_nvidia_h200.json
    python benchmarks/timeline.py --ablation other.json --variants full,neither --out timeline.json

The problem and the kernels are those of a report of ``hopper-attention ablation`` in 16 bits. Each kernel is compiled
again with a clock in it (benchmarks/recording.py), must give the same bits as the kernel that it records, and is
timed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention._kernels import ARCH
from hopper_attention.compile_cache import get_forward
from hopper_attention.experiments.ablation.results import AblationReport, Row, load_ablation
from hopper_attention.experiments.ablation.run import Ablation, all_configs, check_can_run
from hopper_attention.experiments.ablation.variants import VARIANTS, parse_variants
from hopper_attention.experiments.bench.config_peers import count_ctas
from hopper_attention.experiments.bench.machine import repository_root
from hopper_attention.experiments.bench.peers import Inputs, Setting
from hopper_attention.experiments.bench.run import describe_run, draw_inputs, exit_with_lost_gpu
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import CudaStopwatch, GpuLostError
from hopper_attention.experiments.reports import write_text
from hopper_attention.experiments.timeline.spec import (
    KIND,
    Recording,
    TimelineReport,
    busy_share,
    dump_timeline,
    events_of,
    hidden_share,
    middle_blocks,
)

BLOCKS = 6
"""Key blocks that are kept of a tile."""

RECORDED_TILE = 3
"""Number of the recorded tile of the first CTA: by then all CTAs are out of step."""

ROUNDS = 5
REPEATS = 2


def chosen_kernels(report: AblationReport, names: str) -> list[tuple[Row, ForwardConfig]]:
    """The rows of an ablation with the kernels that stand for them, each kernel once.

    Raises:
        ValueError: the report is of FP8, a name is not in the registry, or no row has a kernel.
    """
    variants = {variant.name for variant in parse_variants(names)}
    ablation = Ablation(report.problem, report.precision, tuple(VARIANTS.values()))
    if isinstance(ablation.shipped, Fp8ForwardConfig):
        raise ValueError("the ablation is of fp8, allowed to record: kernels of 16 bits")
    configs = {config.name: config for config in all_configs(ablation.fields())}
    rows: dict[str, Row] = {}
    for row, won in report.won():
        if row.variant in variants and won.config in configs:
            rows.setdefault(won.config, row)
    found = [(row, configs[name]) for name, row in rows.items()]
    if not found:
        raise ValueError(
            "the ablation has no row whose kernel this version can make, allowed: a new report of it"
        )
    return found


class Launches:
    """The kernel of a config and the one that records it, on the same inputs, each with an output of its own."""

    def __init__(self, config: ForwardConfig, problem: Problem, inputs: Inputs) -> None:
        from benchmarks.recording import compile_recording, stamp_shape

        self.config, self.problem, self.inputs = config, problem, inputs
        self.kernel = get_forward(config)
        self.recorder = compile_recording(config, RECORDED_TILE, f"--gpu-arch {ARCH}")
        device = inputs.q.device
        p = problem
        shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        self.outputs = [
            torch.full(shape, float("nan"), dtype=inputs.q.dtype, device=device) for _ in range(2)
        ]
        self.no_lse = torch.empty((p.batch, p.heads, 0), dtype=torch.float32, device=device)
        self.counter = torch.zeros(2, dtype=torch.int32, device=device)
        blocks = -(-p.seqlen_k // config.tile_n)
        self.stamps = torch.zeros(stamp_shape(config, blocks), dtype=torch.int64, device=device)
        self.ctas = count_ctas(config, device)

    def _call(self, function: Callable[..., Any], out: Tensor, *more: Tensor) -> Tensor:
        x, scale = self.inputs, self.problem.head_dim**-0.5
        function(x.q, x.k, x.v, out, self.no_lse, self.counter, *more, scale, self.ctas)
        return out

    def plain(self) -> Tensor:
        return self._call(self.kernel, self.outputs[0])

    def recorded(self) -> Tensor:
        return self._call(self.recorder, self.outputs[1], self.stamps.view(-1))


def record(row: Row, config: ForwardConfig, problem: Problem, inputs: Inputs) -> Recording:
    """Run a kernel with and without a clock.

    Raises:
        ValueError: their outputs differ, or there are too few tiles or key blocks.
        GpuLostError: a kernel hangs or broke the CUDA context.
    """
    launches, stopwatch = Launches(config, problem, inputs), CudaStopwatch()
    plain, recorded = launches.plain(), launches.recorded()
    stopwatch.synchronize()
    if not torch.equal(plain, recorded):
        raise ValueError(f"{config.name} gives other bits with a clock in it, allowed: the same")
    ratios = []
    for _ in range(ROUNDS):
        before = stopwatch.measure([launches.plain], REPEATS, 0.0).seconds
        ratios.append(stopwatch.measure([launches.recorded], REPEATS, 0.0).seconds / before)
    stamps = launches.stamps[:, 1:-1].tolist()
    events = events_of(middle_blocks(stamps, BLOCKS))
    return Recording(row.variant, row.title, config.name, statistics.median(ratios), tuple(events))


def describe_method() -> dict[str, object]:
    return {
        "inputs": "N(0, 1)",
        "recorded": f"tile {RECORDED_TILE} of CTA 0, {BLOCKS} key blocks in its middle, one thread a warpgroup",
        "clock": "clock64 of the SM, read when K and the turn are there for Q K^T, when P V has been issued, when each "
        "wait for a GEMM returns, and as each softmax begins and ends",
        "checked": "the output has the same bits as without a clock",
        "slowdown": f"median of {ROUNDS} rounds of {REPEATS} launches each",
    }


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    committed = repository_root() / "benchmarks" / "results" / "ablation_nvidia_h200.json"
    parser.add_argument("--ablation", type=Path, default=committed, help="report that names the kernels")
    parser.add_argument("--variants", default="", help="comma-separated rows; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> None:
    report = load_ablation(options.ablation.read_text(encoding="utf-8"))
    kernels = chosen_kernels(report, options.variants)
    check_can_run(options.device)
    inputs = draw_inputs(report.problem, 0, options.device)
    head = describe_run(KIND, {}, Setting(options.device), options.commit)
    head |= {"problem": report.problem.name, "method": describe_method()}
    recordings: tuple[Recording, ...] = ()
    for row, config in kernels:
        recordings = (*recordings, record(row, config, report.problem, inputs))
        events = recordings[-1].events
        shares = f"{hidden_share(events):.0%} of the softmax under a GEMM, a GEMM in flight {busy_share(events):.0%}"
        console.print(f"{row.title}: {shares}, slowdown {recordings[-1].slowdown:.3f}", highlight=False)
        write_text(options.out, dump_timeline(TimelineReport(head, recordings)))


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        run(options, Console())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except GpuLostError as error:
        print(f"stopped: {error}", file=sys.stderr)
        exit_with_lost_gpu()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
