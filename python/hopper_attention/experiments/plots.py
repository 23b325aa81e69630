"""The look that all plots share, and the pieces that more than one of them needs.

Figures are made without pyplot, so that nothing global is touched and no display is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK = "#1c2430"
MUTED = "#6b7686"
RULE = "#dfe4ea"
PAPER = "#ffffff"

PALETTE = {
    "ours": "#1f6f5c",
    "ours-light": "#7fb8a8",
    "blue": "#3f6fb0",
    "blue-light": "#a3bcdc",
    "sand": "#c9a15a",
    "red": "#b5523b",
    "grey": "#a7b0bb",
}
"""Colours by role: ours in green, the strong peers in saturated tones, baselines in grey. They stay apart in
greyscale and for readers who do not tell red from green, since ours is also the darkest."""

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": PAPER,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Everything drawn and saved inside looks alike."""
    with matplotlib.rc_context(STYLE):
        yield


def titled_figure(title: str, subtitle: str, width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of ``width`` x ``height`` inches with one axes below a left-aligned title and subtitle."""
    layout = ConstrainedLayoutEngine(rect=(0.015, 0.02, 0.97, 1 - 0.82 / height))
    figure = Figure(figsize=(width, height), layout=layout)
    figure.text(0.022, 1 - 0.22 / height, title, size=14, weight="bold", va="top")
    figure.text(0.022, 1 - 0.50 / height, subtitle, size=9.5, color=MUTED, va="top")
    return figure, figure.add_subplot()


def scientific(value: float) -> str:
    """``4.1 × 10⁻⁵``, in the characters of the text font."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure (PNG, SVG or PDF by suffix), making the folders on the way; returns where it lies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    return path.resolve()
