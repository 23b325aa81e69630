"""Tables in the docstrings of kernels, whose cells in backticks are expressions of a config's fields."""

from __future__ import annotations

from typing import Any


def table(kernel: type, header: str) -> list[list[str]]:
    """Rows of the table whose first column is ``header``."""
    lines = [line.strip() for line in (kernel.__doc__ or "").splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def value(cell: str, config: Any) -> int:
    """A cell in backticks, evaluated on a config."""
    names = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    return int(eval(cell.strip("`"), {"__builtins__": {}}, names))
