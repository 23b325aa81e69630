"""Losses of a training run by step, of each way of attention, and how far they are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hopper_attention.experiments.plots import PALETTE, house_style, save_figure

COLORS = (PALETTE["grey"], PALETTE["blue"], PALETTE["ours"])


def plot_losses(ways: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> Path:
    """The losses of all ways, and below them how far each is from the first; returns where the plot lies."""
    base, *others = ways
    with house_style():
        figure = Figure(figsize=(8, 5.4), layout="constrained")
        losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for (way, of_way), color in zip(ways.items(), COLORS, strict=False):
            losses.plot(of_way["losses"], color=color, lw=1.2, label=way)
            if way in others:
                pairs = zip(of_way["losses"], ways[base]["losses"], strict=True)
                apart.plot([a - b for a, b in pairs], color=color, lw=0.9)
        losses.set(ylabel="loss, nats a byte", title=title)
        apart.set(xlabel="step", ylabel=f"from {base}")
        losses.legend()
        for axes in (losses, apart):
            axes.grid(axis="y")
        return save_figure(figure, path)


def title_of(options: Mapping[str, Any]) -> str:
    """Of the plot, from the options of a run."""
    sizes = options["layers"], options["width"], options["context"], options["batch"]
    return "{} layers of {}, {} tokens, batch {}".format(*sizes)
