"""What a warp of the forward kernel waits for in its inner loop, by samples of Nsight Compute.

    python benchmarks/stalls.py --head-dim 128 --seqlen 8192 --causal
    python benchmarks/stalls.py --dtype bf16 --head-dim 128 --seqlen 4096 --instructions 20 --json stalls.json

16384 tokens, heads times head_dim is 2048, inputs N(0, 1); FP8 is the kernel alone, on parts quantized before. The
profiler looks at each warp every 32 cycles or so and says at which instruction it is, and why it does not go on. The
inner loop are the instructions that are executed most often: for each, how often a warp was met there tells how long it
stays. A sample in which the warp issues is one cycle, so all others are cycles too. Needs ``ncu`` and a GPU whose
counters it may read; the clock stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopper_attention.experiments.reports import write_text

TOKENS, WIDTH = 16_384, 2048
OFTEN = 0.9
"""Of the inner loop are the instructions that are executed so often, over the one that is executed most often."""

PREFIX, OTHER = "stall_", "no reason given"
TEXT, EXECUTED, SAMPLES = "Source", "Instructions Executed", "# Samples"
MOVES = "MOV", "IMAD.MOV.U32"

REASONS = {
    "selected": "issues an instruction",
    "wait": "a result of fixed latency",
    "not_selected": "could issue, but another warp does",
    "dispatch": "registers, which WGMMA reads too",
    "math": "a pipe that takes several cycles an instruction",
    "barrier": "a barrier, or WGMMAs that are awaited",
    "no_inst": "its next instruction, mostly behind a jump",
    "branch_resolving": "a jump",
    "long_sb": "global memory, or the answer of an mbarrier",
    "short_sb": "shared memory, MUFU, or another unit with a queue",
    "mio": "room in such a queue",
    OTHER: "mostly the tensor cores, at a first WGMMA",
}
"""What the profiler's words mean in these kernels."""


@dataclass(frozen=True)
class Instruction:
    """One of a kernel: how often warps executed it, how often one was met there, and for which reasons."""

    text: str
    executed: float
    samples: float
    stalls: dict[str, float]

    @property
    def opcode(self) -> str:
        return re.sub(r"^@!?U?P[0-9T]+\s+", "", self.text).split()[0]


@dataclass(frozen=True)
class Loop:
    """The inner loop of a kernel. ``unit`` is the number of samples of a cycle of one warp in one round."""

    instructions: tuple[Instruction, ...]
    rounds: float
    unit: float

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Loop:
        """That of all instructions of a kernel.

        Raises:
            ValueError: nothing was executed, or no warp was met while it issued.
        """
        rounds = max((x.executed for x in instructions), default=0.0)
        inner = tuple(x for x in instructions if x.executed > OFTEN * rounds)
        issued = sum(x.stalls.get("selected", 0.0) for x in inner)
        if not rounds or not issued:
            raise ValueError(
                "the profile has no samples of a loop, allowed: one of a kernel that runs for 0.1 ms or more"
            )
        return cls(inner, rounds, issued / len(inner) / rounds)

    def cycles(self, samples: float) -> float:
        """Of a warp in one round."""
        return samples / self.rounds / self.unit

    @property
    def by_reason(self) -> dict[str, float]:
        """Cycles of a round by what the warp waits for, most first."""
        sums: dict[str, float] = {}
        for instruction in self.instructions:
            for reason, samples in instruction.stalls.items():
                sums[reason] = sums.get(reason, 0.0) + samples
        total = sum(x.samples for x in self.instructions)
        sums[OTHER] = max(total - sum(sums.values()), 0.0)
        return {
            reason: self.cycles(x) for reason, x in sorted(sums.items(), key=lambda item: -item[1]) if x > 0
        }

    def described(self) -> dict[str, Any]:
        """For a report."""
        return {
            "instructions": len(self.instructions),
            "moves": sum(x.opcode in MOVES for x in self.instructions),
            "cycles": round(sum(self.by_reason.values())),
            "cycles_by_stall": {reason: round(x, 1) for reason, x in self.by_reason.items()},
        }


def read_kernels(text: str) -> list[tuple[str, list[Instruction]]]:
    """The kernels of what ``ncu --page source --csv`` prints, by name."""
    kernels: list[tuple[str, list[Instruction]]] = []
    columns: dict[str, int] = {}
    for row in csv.reader(text.splitlines()):
        if row[:1] == ["Kernel Name"]:
            kernels.append((row[1], []))
        elif TEXT in row:
            columns = {name: i for i, name in enumerate(row)}
        elif kernels and len(row) == len(columns):
            kernels[-1][1].append(_read_instruction(row, columns))
    return kernels


def _read_instruction(row: Sequence[str], columns: dict[str, int]) -> Instruction:
    # Those without the samples in which another instruction of the warp's scheduler was issued come again.
    stalls = {
        name.removeprefix(PREFIX): float(row[i] or 0)
        for name, i in columns.items()
        if name.startswith(PREFIX) and "(" not in name
    }
    executed, samples = (float(row[columns[name]] or 0) for name in (EXECUTED, SAMPLES))
    return Instruction(row[columns[TEXT]].strip(), executed, samples, {k: x for k, x in stalls.items() if x})


def run_profiler(ncu: str, command: Sequence[str]) -> str:
    """What the profiler has to say of the kernels that a command launches between ``cudaProfilerStart`` and Stop.

    Raises:
        RuntimeError: it could not profile them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "stalls.ncu-rep")
        options = "--profile-from-start off --clock-control none --section SourceCounters --warp-sampling-interval 0"
        for arguments in (
            [ncu, *options.split(), "--force-overwrite", "--export", report, *command],
            [ncu, "--import", report, "--page", "source", "--csv", "--print-units", "base"],
        ):
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
            if done.returncode:
                said = done.stdout[-800:] + done.stderr[-800:]
                raise RuntimeError(f"{' '.join(arguments[:2])} ended with {done.returncode}: {said}")
    return done.stdout


def attend(dtype: str, head_dim: int, seqlen: int, causal: bool) -> None:
    """Launch the kernel once while the profiler looks, and before to warm up."""
    import torch

    from hopper_attention import flash_attn_func, flash_attn_quantized_func, quantize_qkv

    shape = max(TOKENS // seqlen, 1), seqlen, WIDTH // head_dim, head_dim
    kind = torch.bfloat16 if dtype == "fp8" else {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    q, k, v = (torch.randn(shape, device="cuda", dtype=kind) for _ in range(3))
    parts = quantize_qkv(q, k, v) if dtype == "fp8" else None

    def call() -> None:
        if parts is None:
            flash_attn_func(q, k, v, causal=causal)
        else:
            flash_attn_quantized_func(parts, causal=causal)
        torch.cuda.synchronize()

    for _ in range(3):
        call()
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    call()
    runtime.cudaProfilerStop()


def print_loop(name: str, loop: Loop, instructions: int) -> None:
    facts = loop.described()
    print(
        f"{name}: {facts['instructions']} instructions, {facts['moves']} of them moves, {facts['cycles']} cycles"
    )
    for reason, cycles in loop.by_reason.items():
        if round(cycles):
            print(f"  {cycles:6.0f}  {reason:16}  {REASONS.get(reason, '')}")
    for x in sorted(loop.instructions, key=lambda x: -x.samples)[:instructions]:
        met = {**x.stalls, OTHER: x.samples - sum(x.stalls.values())}
        top = sorted(met, key=lambda reason: -met[reason])[:2]
        print(f"  {loop.cycles(x.samples):6.0f}  {x.text:64}  {', '.join(top)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("fp8", "bf16", "fp16"), default="fp8")
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256), default=128)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--instructions", type=int, default=0, help="print so many, where warps stay longest")
    parser.add_argument("--ncu", default="ncu", help="the profiler")
    parser.add_argument("--out", "--json", type=Path, dest="out", help="write a report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.seqlen < 1:
        parser.error(f"--seqlen is {args.seqlen}, allowed: 1 or more")
    problem = {"dtype": args.dtype, "head_dim": args.head_dim, "seqlen": args.seqlen, "causal": args.causal}
    if args.worker:
        attend(**problem)
        return
    if shutil.which(args.ncu) is None:
        parser.error(
            f"--ncu is {args.ncu!r}, which is no program here; allowed: where Nsight Compute's ncu is"
        )
    given = [f"--{name.replace('_', '-')}={x}" for name, x in problem.items() if name != "causal"]
    flags = ["--causal"] if args.causal else []
    text = run_profiler(args.ncu, [sys.executable, str(Path(__file__).resolve()), "--worker", *given, *flags])
    loops = [(name, Loop.of(instructions)) for name, instructions in read_kernels(text)]
    for name, loop in loops:
        print_loop(name, loop, args.instructions)
    if args.out:
        kernels = [{"kernel": name, "block": loop.described()} for name, loop in loops]
        write_text(args.out, json.dumps({"problem": problem, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
