"""The machine code of a kernel, by nvdisasm: its loops around key blocks, and what is other in them than before.

    python benchmarks/machine_code.py bf16_d96_full_m128n192
    python benchmarks/machine_code.py bf16_d96_full_m128n192 --loop 0 --listing
    python benchmarks/machine_code.py bf16_d96_full_m128n192 --keep before.txt
    python benchmarks/machine_code.py bf16_d96_full_m128n192 --against before.txt

The kernel is compiled here, for which no GPU is needed; a part of its name that no other kernel has, or the whole name,
says which. A loop around key blocks is one with WGMMAs that has no other such loop in it. Of each are printed how many
instructions it has, in all and by opcode. ptxas may order the same instructions in another way after a change
elsewhere, which can be worth 2 % of a call: ``--against`` says how much of the order is kept (1 is all), and which
opcodes there are more or fewer of. nvdisasm is of the CUDA toolkit, or of ``pip install nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from hopper.compile import HOPPER_ARCH, compile_kernel
from hopper_attention.cli_compile import kernels_for
from hopper_attention.experiments.reports import write_text

LABEL = re.compile(r"^\s*(\.L\w+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
JUMP = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")
PREDICATE = re.compile(r"^@!?U?P[0-9T]+\s+")
SAME = (
    (re.compile(r"\bU?R\d+\b"), "R"),
    (re.compile(r"\bU?P\d\b"), "P"),
    (re.compile(r"`\(.*?\)|0x[0-9a-f]+"), "#"),
    (re.compile(r"\.reuse"), ""),
)
"""What is left out where instructions are compared: which registers, which place and which constant."""

WGMMA = "GMMA"


@dataclass(frozen=True)
class Loop:
    """Instructions from where a jump goes back to, up to the jump."""

    instructions: tuple[str, ...]

    @property
    def opcodes(self) -> Counter[str]:
        """How many there are of each, by the first part of its name."""
        return Counter(opcode_of(x).split(".")[0] for x in self.instructions)

    @property
    def wgmmas(self) -> int:
        return sum(WGMMA in opcode for opcode in self.opcodes.elements())

    def likeness(self, other: Loop) -> float:
        """Which part of the instructions comes in the same order, whatever their registers: 1 for all."""
        ours, theirs = ([alike(x) for x in loop.instructions] for loop in (self, other))
        return SequenceMatcher(None, ours, theirs, autojunk=False).ratio()

    def described(self) -> dict[str, Any]:
        """For a report."""
        return {"instructions": len(self.instructions), "opcodes": dict(self.opcodes.most_common())}


def opcode_of(instruction: str) -> str:
    """Without what it depends on: ``FADD`` of ``@P0 FADD R1, R2, R3``."""
    return PREDICATE.sub("", instruction).split()[0]


def alike(instruction: str) -> str:
    """What two instructions have in common that do the same on other registers."""
    for pattern, text in SAME:
        instruction = pattern.sub(text, instruction)
    return instruction


def loops_of(listing: str) -> list[Loop]:
    """Those around key blocks, in the order of the machine code; ``listing`` is what ``nvdisasm -c`` prints."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            instructions.append(found[2])
    spans = []
    for end, text in enumerate(instructions):
        jump = JUMP.search(text)
        begin = labels.get(jump[1], end + 1) if jump else end + 1
        if begin <= end:
            spans.append((begin, end))
    # What is seldom done lies behind the rest, and jumps back into a loop: that is none.
    loops = [
        (begin, end)
        for begin, end in spans
        if any(WGMMA in x for x in instructions[begin:end])
        and not any(first < begin <= last < end for first, last in spans)
    ]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [Loop(tuple(instructions[begin : end + 1])) for begin, end in sorted(inner)]


def find_disassembler() -> str | None:
    """nvdisasm of the toolkit, or of the package."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, packaged), None)


def disassemble(config: Any, program: str) -> str:
    """The listing of a kernel, compiled now.

    Raises:
        RuntimeError: nvdisasm could not read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compile_kernel(config, f"--keep-cubin --dump-dir={folder}").__cubin__)
        done = subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm ended with {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def print_loop(number: int, loop: Loop) -> None:
    most = ", ".join(f"{count} {opcode}" for opcode, count in loop.opcodes.most_common(8))
    print(f"loop {number}: {len(loop.instructions)} instructions, {loop.wgmmas} WGMMAs; {most}")


def compare(number: int, loop: Loop, before: Loop) -> dict[str, Any]:
    """Print, and return for a report, what is other in a loop than in the one before."""
    ours, theirs = loop.opcodes, before.opcodes
    other = {x: (theirs[x], ours[x]) for x in sorted(ours | theirs) if ours[x] != theirs[x]}
    likeness = round(loop.likeness(before), 3)
    words = ", ".join(f"{opcode} {a} to {b}" for opcode, (a, b) in other.items()) or "the same instructions"
    print(f"loop {number}: {words}; {likeness} of the order is kept")
    return {"opcodes": other, "likeness": likeness}


def choose(part: str) -> Any:
    """The config of a Hopper kernel whose name has this part in it.

    Raises:
        ValueError: no name has it, or several do and it is none of them.
    """
    configs = {config.name: config for config in kernels_for(HOPPER_ARCH)}
    found = [name for name in configs if part in name]
    if part in configs:
        found = [part]
    if len(found) != 1:
        some = ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
        raise ValueError(
            f"kernel is {part!r}, which {len(found)} kernels have in their name ({some or 'none'}), allowed: a part "
            "that only one has, or a whole name"
        )
    return configs[found[0]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", help="a part of its name that no other has, or the whole")
    parser.add_argument("--loop", type=int, help="only this one, counted from 0")
    parser.add_argument("--listing", action="store_true", help="print the instructions, too")
    parser.add_argument("--keep", type=Path, help="write what nvdisasm prints")
    parser.add_argument("--against", type=Path, help="compare with what was kept before")
    parser.add_argument("--nvdisasm", default=find_disassembler(), help="the program")
    parser.add_argument("--out", "--json", type=Path, dest="out", help="write a report")
    args = parser.parse_args(arguments)
    if args.nvdisasm is None or shutil.which(args.nvdisasm) is None:
        parser.error(
            f"--nvdisasm is {args.nvdisasm!r}, which is no program here; allowed: that of a CUDA toolkit, or of "
            "`pip install nvidia-cuda-nvdisasm`"
        )
    if args.against and not args.against.is_file():
        parser.error(f"--against is {str(args.against)!r}, allowed: a file that --keep has written")
    try:
        config = choose(args.kernel)
    except ValueError as error:
        parser.error(str(error))
    listing = disassemble(config, args.nvdisasm)
    if args.keep:
        write_text(args.keep, listing)
    loops = loops_of(listing)
    if args.loop is not None and not 0 <= args.loop < len(loops):
        parser.error(f"--loop is {args.loop}, allowed for {config.name}: 0 to {len(loops) - 1}")
    numbers = range(len(loops)) if args.loop is None else [args.loop]
    before = loops_of(args.against.read_text()) if args.against else []
    print(f"{config.name}: {len(loops)} loops around key blocks")
    report: dict[str, Any] = {"kernel": config.name, "loops": [loop.described() for loop in loops]}
    for i in numbers:
        print_loop(i, loops[i])
        if args.listing:
            print("\n".join(f"    {x}" for x in loops[i].instructions))
    if args.against and len(before) != len(loops):
        parser.error(f"--against has {len(before)} loops, allowed: one of a kernel with {len(loops)}")
    if args.against:
        report["against"] = [compare(i, loops[i], before[i]) for i in numbers]
    if args.out:
        write_text(args.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
