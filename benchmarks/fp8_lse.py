"""How exact the LSE of the FP8 kernels is by input, and what an exact one costs.

    python benchmarks/fp8_lse.py --out F.json [--families q4,q8] [--problems NAME,...] [--variants]

Each problem runs without an LSE, with the exact one, and with the LSE that the kernel of the first has anyway. The LSE
is compared with float64 on the dequantized q and k, in evenly spaced rows. ``--variants`` times other ways to make the
exact one as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper_attention.compile_cache import get_forward
from hopper_attention.experiments.bench.run import describe_place
from hopper_attention.experiments.bench.spec import Problem, parse_shapes
from hopper_attention.experiments.bench.timing import Effort, seconds_in_turns, stopwatch_for
from hopper_attention.experiments.families.draws import FAMILIES, draw_family
from hopper_attention.experiments.reports import dump_rows, write_text
from hopper_attention.fp8_rules import select_config
from hopper_attention.launch.base import ResultSpec
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher, attend, problem_of
from hopper_attention.quantization import QuantizedQKV, quantize_qkv
from hopper_attention.quantized import row_scale

PROBLEMS = (
    "bf16-b4-s4096-h16-d128-full,bf16-b4-s4096-h16-d128-causal,bf16-b1-s16384-h16-d128-causal,"
    "bf16-b2-s8192-h32-d64-causal,bf16-b2-s8192-h8-d256-causal"
)
CHECKED_ROWS, CHECKED_HEADS = 128, 2

Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def lse_errors(parts: QuantizedQKV, lse: torch.Tensor, causal: bool) -> tuple[float, float]:
    """The largest and the RMS of some rows, absolute."""
    (_, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, _) = parts.q.shape, parts.k.shape
    q_scale, k_scale = (
        row_scale(parts.q.scale, parts.q.block, seqlen_q),
        row_scale(parts.k.scale, parts.k.block, seqlen_k),
    )
    rows = torch.linspace(0, seqlen_q - 1, CHECKED_ROWS, device=lse.device).long()
    found = []
    for head in torch.linspace(0, heads - 1, CHECKED_HEADS).long().tolist():
        kv_head = head // (heads // kv_heads)
        q = parts.q.data[0, rows, head].double() * q_scale[0, rows, head].double()
        k = parts.k.data[0, :, kv_head].double() * k_scale[0, :, kv_head].double()
        scores = q @ k.T * head_dim**-0.5
        if causal:
            hidden = torch.arange(seqlen_k, device=lse.device) > rows[:, None] + seqlen_k - seqlen_q
            scores = scores.masked_fill(hidden, -torch.inf)
        found.append(lse[0, head, rows] - scores.logsumexp(-1))
    errors = torch.cat(found)
    return errors.abs().max().item(), errors.square().mean().sqrt().item()


def variants(config: Fp8ForwardConfig) -> dict[str, Fp8ForwardConfig]:
    """Other ways to an exact LSE, by what they change."""
    return {
        "turns": replace(config, softmax=Softmax.EXACT, ping_pong=True),
        "one level": replace(config, two_level=False, late_rescale=True, pipelined=True),
    }


def launch_of(config: Fp8ForwardConfig, parts: QuantizedQKV, causal: bool) -> Call:
    device = parts.q.data.device
    launcher = Fp8HopperLauncher(
        kernel=get_forward(config),
        causal=causal,
        result=ResultSpec(parts.dtype, parts.v.shape[3]),
        device_index=device.index or 0,
        num_ctas=torch.cuda.get_device_properties(device).multi_processor_count,
        repairs=(),
        block_k=parts.k.block if parts.k.block < parts.k.shape[1] else ALL_ROWS,
        transposes=False,
        widens=config.wide_codes,
    )
    return partial(launcher, parts, parts.q.shape[3] ** -0.5, True)


def calls_of(parts: QuantizedQKV, causal: bool, with_variants: bool) -> dict[str, Call]:
    scale = parts.q.shape[3] ** -0.5
    call = partial(attend, parts, scale, causal, "hopper", False)
    calls: dict[str, Call] = {
        "without": partial(call, wants_lse=False),
        "as it comes": call,
        "exact": partial(call, exact_lse=True),
    }
    if with_variants:
        exact = select_config(problem_of(parts, causal, exact_lse=True))
        for name, config in variants(exact).items():
            try:
                calls[name] = launch_of(config, parts, causal)
            except (ValueError, RuntimeError) as error:
                print(f"  {name}: {str(error).splitlines()[0][:100]}")
    return calls


def measure(problem: Problem, family: Any, device: str, with_variants: bool) -> dict[str, Any]:
    inputs = draw_family(family, problem, 0, device)
    parts = quantize_qkv(inputs.q, inputs.k, inputs.v)
    calls = calls_of(parts, problem.causal, with_variants)
    effort, stopwatch = Effort(max_rounds=5), stopwatch_for(device)
    errors = {
        name: lse_errors(parts, call()[1], problem.causal)
        for name, call in calls.items()
        if name != "without"
    }
    seconds = seconds_in_turns({name: [call] for name, call in calls.items()}, stopwatch, effort)
    us = {name: 1e6 * s for name, s in seconds.items()}
    return {"problem": problem.name, "family": family.name, "us": us, "lse": errors}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default=PROBLEMS)
    parser.add_argument("--families", default=",".join(family.name for family in FAMILIES))
    parser.add_argument("--variants", action="store_true", help="other kernels with an exact LSE too")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    wanted = options.families.split(",")
    cells = []
    for problem in parse_shapes(options.problems):
        for family in (family for family in FAMILIES if family.name in wanted):
            cells.append(cell := measure(problem, family, "cuda", options.variants))
            shown = "  ".join(
                f"{name} {us:.0f} us"
                + (" {:.1e} {:.1e}".format(*cell["lse"][name]) if name in cell["lse"] else "")
                for name, us in cell["us"].items()
            )
            print(f"{problem.name:38} {family.name:9} {shown}", flush=True)
    head = {
        **describe_place("fp8_lse", "cuda"),
        "method": {
            "lse": "largest and RMS difference from float64, 128 rows of two heads",
            "rounds": "5 in turns",
        },
    }
    write_text(options.out, dump_rows(head, "cells", cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
