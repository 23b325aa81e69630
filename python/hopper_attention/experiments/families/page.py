"""The page of a report on families of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hopper_attention.experiments.bench.results import geometric_mean
from hopper_attention.experiments.families.errors import errors_section
from hopper_attention.experiments.reports import markdown_table, measured_on, method_text, number, page

KIND = "fp8_inputs"
ROWS = {
    "ours": "ours",
    "drop_in": "ours, e4m3 tensors with descales",
    "drop_in_lse": "the same, a fast LSE returned",
    "fa3": "FlashAttention-3",
}
LEADING = ("ours", "drop_in")
"""Rows that every report has."""

PEER = "fa3"
LEAST, MEAN = 1.0, 1.15
"""What is wanted of the kernel: of each cell over FlashAttention-3, and of the geometric mean."""


def ratio(cell: Mapping[str, Any], row: str) -> float:
    """Speed of a row over FlashAttention-3's; NaN where either has none."""
    us = cell["us"]
    return us[PEER] / us[row] if row in us and PEER in us else math.nan


def mean_of(cells: Sequence[Mapping[str, Any]], row: str) -> float:
    """Geometric mean of the ratios that there are; NaN without any."""
    found = [x for cell in cells if not math.isnan(x := ratio(cell, row))]
    return geometric_mean(found) if found else math.nan


def render_families(report: Mapping[str, Any]) -> str:
    """Markdown: ratios by problem and family for both rows of ours, then errors."""
    cells, families = report["cells"], report["families"]
    names = list(families)
    problems = list(dict.fromkeys(cell["problem"] for cell in cells))
    found = {(cell["problem"], cell["family"]): cell for cell in cells}

    def table(figure: Any, last: Any) -> str:
        rows = [
            [
                f"`{problem}`",
                *(figure(found[problem, name]) if (problem, name) in found else "–" for name in names),
            ]
            for problem in problems
        ]
        return markdown_table(["problem", *names], [*rows, *last])

    parts = [
        "# FP8 by input\n\nRendered by `python benchmarks/render.py` from `benchmarks/results/`; do not edit by hand.",
        measured_on(report["date"], report["commit"], report["machine"]),
        "How many times as fast as FlashAttention-3's FP8 kernel ours is, on inputs as models have them and N(0, 1). "
        f"Wanted of the kernel: {LEAST:.2f} in each cell, {MEAN:.2f} in the mean.",
        "\n".join(f"- **{name}**: {what}" for name, what in families.items()),
    ]
    for row, title in (
        ("ours", "The kernel, on parts quantized before"),
        ("drop_in", "e4m3 tensors with descales"),
        ("drop_in_lse", "e4m3 tensors with descales, a fast LSE returned (`exact_lse=False`)"),
    ):
        if row not in LEADING and not any(row in cell["us"] for cell in cells):
            continue
        means = [number(mean_of([c for c in cells if c["family"] == name], row), 2) for name in names]
        whole = mean_of(cells, row)
        ratios = [x for cell in cells if not math.isnan(x := ratio(cell, row))]
        enough = sum(x >= LEAST for x in ratios)
        parts += [
            f"## {title}",
            table(lambda cell, row=row: number(ratio(cell, row), 2), [["geometric mean", *means]]),
            f"Geometric mean of all: **{number(whole, 2)}**; {enough} of {len(ratios)} cells at {LEAST:.2f} or more.",
        ]
    errors = [
        [f"`{problem}`, {ROWS[row]}", *(f"{found[problem, n]['error'][row]:.2e}" for n in names)]
        for problem in problems
        for row in ROWS
        if all((problem, n) in found and row in found[problem, n]["error"] for n in names)
    ]
    parts += [
        "## Error",
        "Relative error against float64 attention on the inputs themselves, quantization included. Ours rotates q and "
        "k and has a scale a row of q and a block of k and v; the others have one scale a head and no rotation.",
        markdown_table(["problem", *names], errors),
        *errors_section(cells, names),
        f"## Method\n\n{method_text(report['method'])}",
    ]
    return page(parts)
