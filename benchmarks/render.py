"""Render the committed reports: the README's results, docs/results/forward.md and its plot.

python benchmarks/render.py            write them
python benchmarks/render.py --check    fail if the text in the repository is not what the reports give
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hopper_attention.experiments.bench_machine import repository_root
from hopper_attention.experiments.bench_plot import plot_forward
from hopper_attention.experiments.bench_render import render_page, render_readme, splice
from hopper_attention.experiments.bench_results import load_figures, load_forward, write_text

GPU = "nvidia_h200"
"""The machine whose reports the README shows."""

PLOT = "forward.png"


def read_figures(path: Path, kind: str) -> dict[str, Any] | None:
    """A latency or accuracy report; None where none has been committed."""
    return load_figures(path.read_text(encoding="utf-8"), kind) if path.is_file() else None


def render(root: Path, results: Path) -> dict[Path, str]:
    """The text of every rendered file, by path.

    Raises:
        FileNotFoundError: there is no forward report.
        ValueError: a report is of another kind, or the README lacks its markers.
    """
    report = load_forward((results / f"forward_{GPU}.json").read_text(encoding="utf-8"))
    latency = read_figures(results / f"latency_{GPU}.json", "latency")
    rmse = read_figures(results / f"rmse_{GPU}.json", "rmse")
    readme = root / "README.md"
    return {
        readme: splice(readme.read_text(encoding="utf-8"), render_readme(report, latency)),
        root / "docs" / "results" / "forward.md": render_page(report, latency, rmse, PLOT),
    }


def stale(texts: dict[Path, str]) -> list[Path]:
    """Files that do not hold the text they should."""
    return [p for p, text in texts.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a text is stale")
    parser.add_argument("--results", type=Path, help="folder of the reports; default: benchmarks/results")
    parser.add_argument(
        "--root", type=Path, default=repository_root(), help="folder with README.md and docs/"
    )
    options = parser.parse_args(arguments)
    results = options.results or options.root / "benchmarks" / "results"
    try:
        texts = render(options.root, results)
    except (FileNotFoundError, json.JSONDecodeError, ValueError) as error:
        print(f"cannot render: {error}", file=sys.stderr)
        return 2
    if options.check:
        differing = stale(texts)
        for path in differing:
            print(f"{path} is not what the reports give; run python benchmarks/render.py", file=sys.stderr)
        return 1 if differing else 0
    for path, text in texts.items():
        write_text(path, text)
        print(f"wrote {path}")
    report = load_forward((results / f"forward_{GPU}.json").read_text(encoding="utf-8"))
    print(f"wrote {plot_forward(report, options.root / 'docs' / 'results' / PLOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
