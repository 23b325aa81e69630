"""Where the time of a page's first example goes: its first start on a machine, and later ones, statement by statement.

    python benchmarks/first_starts.py docs/integrations/transformers.md --out F.json
    python benchmarks/first_starts.py docs/integrations/jax.md --alone /tmp/e --out F.json   # an environment

An import reads thousands of files. Where they come from a disk, and where Python has to compile them, since their
bytecode is not there or may not be kept, it takes several times as long. So a page is started in turn

    found     as this machine is, with what its variables say about bytecode
    fresh     with its files out of the system's cache and no bytecode: as on a new machine, right after unpacking
    second    once more: files in memory, and the bytecode that "fresh" has left
    third     likewise

all with a warm cache of kernels. Files that other processes have mapped stay in memory in "fresh". Each start also runs
all statements but imports once more, which is no part of the whole. Nothing here imports PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KIND = "first_starts"
ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benchmarks" / "first_starts_child.py"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
STARTS = ("found", "fresh", "second", "third")
NO_BYTECODE, BYTECODE_FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


@dataclass(frozen=True)
class Start:
    """One process.

    Attributes:
        whole_s: seconds from the start of Python to its end, without what was run once more.
        own_s: those until the example was done.
        parts: the text of each statement, and seconds.
        again_s: of all statements but imports, once more.
        loads: how many kernels were loaded, and in how many seconds.
        modules: Python's, of a source; and how many of them have bytecode on the disk.
        failed: the last line of what it said, if it failed.
    """

    page: str
    start: str
    whole_s: float = 0.0
    own_s: float = 0.0
    parts: Sequence[Sequence[Any]] = ()
    again_s: float = 0.0
    loads: Sequence[float] = ()
    modules: int = 0
    with_bytecode: int = 0
    writes_bytecode: bool = True
    failed: str = ""


def with_source(is_alone: bool = False) -> dict[str, str]:
    """Variables of a process that finds this source, and alone nothing else that this one has been told of."""
    paths = [str(ROOT / "python"), str(ROOT)]
    if not is_alone and "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def with_bytecode(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables of a process that keeps its bytecode in ``folder``."""
    others = {name: value for name, value in variables.items() if name != NO_BYTECODE}
    return {**others, BYTECODE_FOLDER: str(folder)}


def forget(files: Iterable[str]) -> None:
    """Take them out of the system's cache, but for pages that a process has mapped."""
    os.sync()
    for path in files:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def start_page(
    page: str, start: str, python: str, bytecode: Path | None, limit_s: float
) -> tuple[Start, list[str]]:
    """Run the first example of a page in a process of its own; also the files that it had open.

    Args:
        bytecode: a folder for it, in place of what this machine does with it.
    """
    variables = with_source(is_alone=python != sys.executable)
    if bytecode is not None:
        variables = with_bytecode(variables, bytecode)
    found = BLOCK.search((ROOT / page).read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page} has no block of Python, allowed: pages with an example")
    with tempfile.TemporaryDirectory() as folder:
        example, out = Path(folder) / "example.py", Path(folder) / "out.json"
        example.write_text(found[1], encoding="utf-8")
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [python, str(CHILD), str(example), str(out)],
                env=variables, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Start(page, start, failed=f"no result after {limit_s:.0f} s"), []
        whole_s = time.perf_counter() - begin
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return Start(page, start, whole_s, failed=said[-1]), []
        report = json.loads(out.read_text(encoding="utf-8"))
    files = report.pop("files")
    return Start(page, start, round(whole_s - report.pop("after_s"), 3), **report), files


def start_in_turn(page: str, python: str, starts: Sequence[str], limit_s: float) -> list[Start]:
    """One of each, in the order of ``STARTS``."""
    found: list[Start] = []
    with tempfile.TemporaryDirectory() as bytecode:
        for name in starts:
            kept = None if name == "found" else Path(bytecode)
            start, files = start_page(page, name, python, kept, limit_s)
            if name == "found":
                forget(files)
            found.append(start)
            print_start(start)
    return found


def print_start(start: Start) -> None:
    facts = f"{start.with_bytecode} of {start.modules} modules with bytecode"
    if not start.writes_bytecode:
        facts += ", which is not written"
    print(f"{start.page} {start.start}: {start.whole_s:.2f} s {start.failed or facts}")
    for name, seconds in start.parts:
        if seconds >= 0.05:
            print(f"  {seconds:7.2f} {name}")
    if start.loads:
        print(f"  {start.loads[1]:7.2f} (in all: {start.loads[0]:.0f} kernels loaded)")
        print(f"  {start.again_s:7.2f} (all but imports, once more)", flush=True)


def environment_of(page: str, folder: Path) -> str:
    """The Python of an environment with what a page installs and nothing else."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.environments import make_environment, requirements_of\n"
        "page, project, folder = map(Path, sys.argv[1:])\n"
        "print(make_environment(folder, requirements_of(page, project))[0])"
    )
    command = [sys.executable, "-c", code, str(ROOT / page), str(ROOT / "pyproject.toml"), str(folder)]
    done = subprocess.run(command, env=with_source(), cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def describe(commit: str) -> dict[str, Any]:
    """The head of a report, made in a process of its own, as it needs PyTorch."""
    code = (
        "import json, sys; from hopper_attention.experiments.bench.run import describe_place\n"
        "import torch; device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "print(json.dumps(describe_place(sys.argv[1], device, sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, KIND, commit]
    done = subprocess.run(command, env=with_source(), cwd=ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> list[Start]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--alone", type=Path, help="a folder for environments with what each page installs")
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--seconds", type=float, default=120.0, help="a start may take")
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    rows: list[Start] = []
    for number, page in enumerate(given.pages):
        python = environment_of(page, given.alone / str(number)) if given.alone else sys.executable
        rows += start_in_turn(page, python, given.starts, given.seconds)
    is_set = {name: os.environ.get(name, "") for name in (NO_BYTECODE, BYTECODE_FOLDER)}
    head = describe(given.commit) | {"cores": os.cpu_count(), "alone": given.alone is not None}
    report = head | {"variables": is_set, "rows": [asdict(row) for row in rows]}
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
