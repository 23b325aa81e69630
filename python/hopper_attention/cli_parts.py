"""What every command of the command line needs: errors in one line, tables, progress bars, files, devices."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

SuiteBudget = Annotated[
    float, typer.Option(help="Seconds to measure for, first calls not counted. 0: 150, and 60 for fp8.")
]
# More comes near the time after which a kernel counts as hung.
Sustained = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=10.0,
        help="Seconds that ours and the best peer also run without a pause, of a few rows; 0: none.",
    ),
]
Device = Annotated[str, typer.Option(help="A torch device; auto is the first GPU, or the CPU.")]
Fa3Library = Annotated[
    str, typer.Option(metavar="PATH", help="FlashAttention-3's torch ops, where not installed by pip.")
]

NO_PLOT = "plot needs matplotlib, which is not installed here; install it with: pip install 'hopper-attention[plot]'"
NO_FILE = ""
STDOUT = "-"
PLOT_ENDINGS = (".png", ".svg", ".pdf")
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

PIPE_WIDTH = 120
"""Columns of a table where there is no terminal to ask."""

NO_MEMORY = ("can't allocate memory", "out of memory")
"""What torch says where there is too little of it; on a CPU with no error of its own kind."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a user can cause and mend into one line on stderr and exit code 2, and an interrupt into 130."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise _say_error(NO_PLOT) from None
    except (ValueError, NotImplementedError, OSError) as error:
        raise _say_error(str(error)) from None
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not any(words in reason for words in NO_MEMORY):
            raise
        raise _say_error(f"this needs more memory than there is: {reason}") from None
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        raise typer.Exit(INTERRUPTED) from None


def _say_error(message: str) -> typer.Exit:
    """Put one line on stderr, and give what ends the command."""
    text = Text.assemble(("error:", "bold red"), f" {message}")
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)
    return typer.Exit(2)


def check_file(path: str) -> None:
    """Raise OSError unless a file can be written there; makes nothing."""
    file = Path(path)
    there = next(place for place in (file, *file.absolute().parents) if place.exists())
    if there == file and file.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, allowed: a file", path)
    if there != file and not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder", path)
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, f"{there} cannot be written to", path)


def check_json(path: str) -> str:
    """The path of the JSON, before anything is measured, as of a plot."""
    with one_line_errors():
        if path not in (NO_FILE, STDOUT):
            check_file(path)
    return path


JsonPath = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="PATH",
        callback=check_json,
        help="Write the result as JSON too; - is standard output.",
    ),
]


def check_plot(path: str) -> str:
    """The path of a plot, before anything is measured: one that cannot be drawn would end the command in front of its
    report."""
    with one_line_errors():
        if path != NO_FILE and Path(path).suffix.lower() not in PLOT_ENDINGS:
            raise ValueError(f"plot is {path!r}, allowed: a file that ends with {', '.join(PLOT_ENDINGS)}")
        if path != NO_FILE and find_spec("matplotlib") is None:
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        if path != NO_FILE:
            check_file(path)
    return path


PlotPath = Annotated[
    str,
    typer.Option("--plot", metavar="PATH", callback=check_plot, help="Draw the result: .png, .svg or .pdf."),
]


def console_for(json_path: str, pipe_width: int = PIPE_WIDTH) -> Console:
    """Where tables go: standard output, unless the JSON goes there."""
    width = None if sys.stdout.isatty() else pipe_width
    return Console(stderr=json_path == STDOUT, width=width, highlight=False)


def write_json(data: Any, json_path: str, console: Console) -> None:
    write_json_text(json.dumps(data, indent=2) + "\n", json_path, console)


def write_json_text(text: str, json_path: str, console: Console) -> None:
    """Put JSON where ``--json`` says, if it was given."""
    if json_path == NO_FILE:
        return
    if json_path == STDOUT:
        sys.stdout.write(text)
        return
    path = Path(json_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print_path(console, "JSON", path)


def print_path(console: Console, what: str, path: Path) -> None:
    console.print(f"[dim]{what}[/] {path.resolve()}", soft_wrap=True)


def progress_bar() -> Progress:
    """The bar that every long command shows, on stderr, and that leaves nothing behind."""
    return Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def pick_device(device: str) -> str:
    """The device to run on: ``device`` itself, or for "auto" the first GPU, else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the latter: torch was built without that kind
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is {device!r}, allowed: auto, cpu, or one that is here ({reason})"
        ) from None
    return device
