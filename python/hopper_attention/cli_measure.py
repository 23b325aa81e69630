"""A measurement that a command runs: what it shows while it runs, what it keeps if it ends early, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from hopper_attention.cli_parts import INTERRUPTED, NO_FILE, STDOUT, progress_bar

Report = TypeVar("Report")


def line_progress(bar: Progress, total: int) -> Callable[[str], None]:
    """A progress callback of the benchmarks, called with a line as each of ``total`` parts starts.

    Where nobody sees the bar, as in a log, it prints the line.
    """
    task = bar.add_task("starting", total=total)
    seen: list[str] = []

    def start(line: str) -> None:
        bar.update(task, completed=len(seen), description=line)
        seen.append(line)
        if not bar.console.is_terminal:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    return start


@dataclass
class Measurement(Generic[Report]):
    """A run of a benchmark.

    Attributes:
        start: its progress callback, called with a line as each part starts.
        dump: a report as JSON.
        json_path: where that is written after each part, so that a run that is cut short leaves what it had. Standard
            output has it once, at the end.
        kept: the latest report, or nothing before there is one.
        lost: how a kernel brought the GPU down, if one did.
        is_interrupted: the user stopped it.
    """

    start: Callable[[str], None]
    dump: Callable[[Report], str]
    json_path: str
    kept: tuple[Report, ...] = ()
    lost: str = ""
    is_interrupted: bool = False

    def save(self, report: Report) -> None:
        """Keep a report that has grown by a part."""
        from hopper_attention.experiments.reports import write_text

        self.kept = (report,)
        if self.json_path not in (NO_FILE, STDOUT):
            write_text(Path(self.json_path), self.dump(report))

    def end(self, console: Console) -> None:
        """End the process, if the run ended before its last part. What it had has been shown and written by then."""
        if self.lost:
            end_if_lost(self.lost, console)
        if self.is_interrupted:
            Console(stderr=True).print("stopped; what had been measured is above")
            raise typer.Exit(INTERRUPTED)


@contextmanager
def measurement(total: int, dump: Callable[[Report], str], json_path: str) -> Iterator[Measurement[Report]]:
    """A run of ``total`` parts in the ``with`` block, which leaves it when the run ends, or is stopped.

    Raises:
        KeyboardInterrupt: the user stopped it before there was anything to keep.
    """
    from hopper_attention.experiments.bench.run import CellLostError
    from hopper_attention.experiments.features.run import WorkloadLostError

    with progress_bar() as bar:
        run: Measurement[Report] = Measurement(line_progress(bar, total), dump, json_path)
        try:
            yield run
        except CellLostError as error:
            run.lost = f"stopped at {error.cell.problem.name}: {error}"
        except WorkloadLostError as error:
            run.lost = f"stopped at {error}"
        except KeyboardInterrupt:
            if not run.kept:
                raise
            run.is_interrupted = True


def end_if_lost(lost: str, console: Console) -> None:
    """End the process if a kernel brought the GPU down."""
    if lost:
        from hopper_attention.experiments.bench.run import exit_with_lost_gpu

        console.print(lost, style="bold red", markup=False)
        exit_with_lost_gpu()
