"""What all reports share: lines of JSON, promises held against them, and the parts of a page. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
NOTHING = "–"
RENDERED = "Rendered by `python benchmarks/render.py` from `benchmarks/results/`; do not edit by hand."


def rounded(value: Any) -> Any:
    """Five significant digits, which is more than a timing holds, and null for what JSON cannot write."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return value


def dump_rows(head: dict[str, Any], name: str, records: Sequence[dict[str, Any]]) -> str:
    """JSON text with a line for each entry of ``head`` and for each record of the list ``name``."""
    lines = [f"{json.dumps(key)}: {json.dumps(rounded(value))}," for key, value in head.items()]
    rows = ",\n".join("  " + json.dumps(rounded(record)) for record in records)
    return "{\n" + "\n".join(lines) + f'\n"{name}": [\n' + rows + "\n]\n}\n"


def dump_figures(figures: dict[str, Any]) -> str:
    """JSON text of a latency or accuracy report, one line a key."""
    lines = [f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in figures.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_figures(text: str, kind: str) -> dict[str, Any]:
    """Read what :func:`dump_figures` wrote.

    Raises:
        ValueError: the text is not a report of this kind and schema.
    """
    data: dict[str, Any] = json.loads(text)
    if data.get("kind") != kind or data.get("schema") != SCHEMA:
        found = f"kind {data.get('kind')!r}, schema {data.get('schema')!r}"
        raise ValueError(f"report is {found}, allowed: kind {kind!r}, schema {SCHEMA}")
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a run that is cut short leaves the last complete report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@dataclass(frozen=True)
class Target:
    """One promise: what is required, what was measured, and whether that meets it."""

    what: str
    required: str
    measured: str
    met: bool


def short_length(seqlen: int) -> str:
    """512, 16k, 1M."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if seqlen % size == 0:
            return f"{seqlen // size}{letter}"
    return str(seqlen)


def number(value: float | None, digits: int = 0) -> str:
    """A figure of fixed digits, a dash where there is none."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}f}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned left and whose others are aligned right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def measured_on(date: str, commit: str, machine: Mapping[str, Any]) -> str:
    """When, at which commit and on what a report was measured."""
    where = ", ".join(f"{key} {value}" for key, value in machine.items() if value != "")
    return f"Measured {date[:10]} at commit `{commit[:12]}` on {where}."


def method_text(method: Mapping[str, Any]) -> str:
    """How it was measured, a line each."""
    return "\n".join(f"- {key}: {value}" for key, value in method.items())


def targets_text(targets: Sequence[Target]) -> str:
    """The promises as a table; empty if there are none."""
    if not targets:
        return ""
    rows = [[t.what, t.required, t.measured, "yes" if t.met else "no"] for t in targets]
    return markdown_table(["what", "required", "measured", "met"], rows)


def lines_text(lines: Sequence[str]) -> str:
    """A list, a line each."""
    return "\n".join(f"- {line}" for line in lines)


def section(title: str, text: str) -> str:
    """A heading and what is below it; empty if there is nothing."""
    return f"## {title}\n\n{text}" if text else ""


def page(parts: Sequence[str]) -> str:
    """A page of these paragraphs; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"
