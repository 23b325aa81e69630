"""How long each page's first example takes in a fresh process, with a cold compile cache and with a warm one.

    python benchmarks/first_results.py --out F.json
    python benchmarks/first_results.py --warm ~/.cache/hopper-attention --out F.json   # no cold runs
    python benchmarks/first_results.py --alone --out F.json   # with nothing installed but what each page asks for

The cold runs of all pages are made side by side, each with a cache of its own, as they mostly compile; those with the
warm cache one after the other, and the shortest counts. Python's bytecode is kept from start to start, as it is where
nobody forbids it: with ``--warm`` too all pages are run side by side first, which is not timed. So a warm run has its
files in memory, bytecode and kernels; ``first_starts.py`` has the starts before, and what each is made of. The time is
that of the whole process: Python, imports, loading of kernels, the example, and the end of what it asked of the GPU. An
example that fails is a row that says why.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.environments import make_environment, requirements_of
from benchmarks.first_starts import with_bytecode
from hopper_attention.compile_cache import CACHE_DIR_VARIABLE
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.run import describe_run
from hopper_attention.experiments.calls import FIRST_KIND
from hopper_attention.experiments.reports import dump_rows, write_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("quickstart", "api", "serving")),
    *(f"docs/integrations/{name}.md" for name in ("transformers", "torch", "diffusers", "jax")),
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)

LIMIT_S = 10.0
"""What is promised of a warm cache on a Hopper GPU."""

AT_THE_END = """
import sys
if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
    sys.modules["torch"].cuda.synchronize()
"""


@dataclass(frozen=True)
class Row:
    """Seconds of a page's first example; ``failed`` is the last line of what it said."""

    page: str
    cold_s: float | None = None
    warm_s: float | None = None
    failed: str = ""


def first_example(page: Path) -> str:
    """The first block of Python of a page.

    Raises:
        ValueError: it has none.
    """
    found = BLOCK.search(page.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page} has no block of Python, allowed: pages with an example")
    return found[1]


class Place(NamedTuple):
    """The Python that runs an example, and the variables that it gets beside those of this process."""

    python: str = sys.executable
    variables: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def alone(cls, page: Path, folder: Path) -> Place:
        """An environment with what the page installs, and this source."""
        python, missing = make_environment(folder, requirements_of(page, ROOT / "pyproject.toml"))
        if missing:
            print(f"{page.name}: not installed here: {', '.join(missing)}", flush=True)
        return cls(str(python), {"PYTHONPATH": os.pathsep.join((str(ROOT / "python"), str(ROOT)))})


def seconds_of(program: str, cache: Path, bytecode: Path, limit_s: float, place: Place) -> tuple[float, str]:
    """Of a process that runs it, and why it failed; nothing if it did not."""
    variables = {**os.environ, **place.variables, CACHE_DIR_VARIABLE: str(cache)}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [place.python, "-c", program + AT_THE_END],
            env=with_bytecode(variables, bytecode),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return time.perf_counter() - begin, f"no result after {limit_s:.0f} s"
    seconds = time.perf_counter() - begin
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return seconds, said[-1] if done.returncode else ""


def measure(
    pages: Sequence[Path], runs: int, limit_s: float, warm: Path | None = None, is_alone: bool = False
) -> list[Row]:
    """A row for each page: cold side by side, then warm in turns; warm alone with a cache that is."""
    with tempfile.TemporaryDirectory() as folder:
        bytecode = Path(folder) / "bytecode"

        def job_of(number: int) -> Callable[[], tuple[float, str]]:
            page = pages[number]
            place = Place.alone(page, Path(folder) / f"environment {number}") if is_alone else Place()
            cache = warm.resolve() if warm else Path(folder) / str(number)
            return partial(seconds_of, first_example(page), cache, bytecode, limit_s, place)

        jobs = [job_of(number) for number in range(len(pages))]
        with ThreadPoolExecutor(len(jobs)) as pool:
            first = list(pool.map(lambda job: job(), jobs))
        # With a cache that is warm these leave bytecode, and files in memory.
        cold = [(None if warm else seconds, failed) for seconds, failed in first]
        rows = []
        for page, job, (cold_s, failed) in zip(pages, jobs, cold, strict=True):
            name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
            found = [] if failed else [job() for _ in range(runs)]
            failed = failed or next((why for _, why in found if why), "")
            if failed:
                rows.append(Row(name, failed=failed))
            else:
                seconds = None if cold_s is None else round(cold_s, 2)
                rows.append(Row(name, seconds, round(min(s for s, _ in found), 2)))
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("page", "cold, s", "warm, s", f"below {LIMIT_S:.0f} s", title="First example of each page")
    for row in rows:
        times = ("–" if x is None else str(x) for x in (row.cold_s, row.warm_s))
        is_met = row.warm_s is not None and row.warm_s < LIMIT_S
        table.add_row(row.page, *times, row.failed or ("yes" if is_met else "no"))
    return table


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, help="default: all with an example for one process")
    parser.add_argument("--runs", type=int, default=2, help="with a warm cache, of which the shortest counts")
    parser.add_argument("--seconds", type=float, default=120.0, help="a run may take")
    parser.add_argument("--warm", type=Path, help="a compile cache that has the kernels: no cold runs")
    parser.add_argument(
        "--alone", action="store_true", help="with nothing installed but what a page asks for"
    )
    parser.add_argument("--commit", default="", help="default: what git or a file COMMIT says")
    parser.add_argument("--out", "--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    pages = [page.resolve() for page in given.pages] or [ROOT / name for name in PAGES]
    rows = measure(pages, given.runs, given.seconds, given.warm, given.alone)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = describe_run(FIRST_KIND, {}, Setting(device, ""), given.commit) | {"cores": os.cpu_count()}
    head |= {"alone": given.alone, "bytecode": True}
    write_text(given.out, dump_rows(head | {"limit_s": LIMIT_S}, "rows", [asdict(row) for row in rows]))
    Console(width=None if sys.stdout.isatty() else 150).print(table_of(rows))
    return rows


if __name__ == "__main__":
    main()
