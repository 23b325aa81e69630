"""The pages of ``benchmarks/models.py`` and of ``examples/train_gpt.py``, from their reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    Target,
    lines_text,
    markdown_table,
    measured_on,
    method_text,
    number,
    page,
    section,
    targets_text,
)

MODELS_KIND, TRAINING_KIND = "models", "training"
OURS, SDPA, ROTARY = "hopper_attention", "sdpa", "+rotary"

LEAST_OVER_SDPA = {"train": 1.10, "generate": 1.00}
"""Of our speed over that of sdpa, promised by workload."""

MODEL_HEADINGS = (
    "ms",
    "spread",
    "tokens/s",
    "over sdpa",
    "attention, ms",
    "TFLOP/s",
    "peak, MiB",
    "difference",
)
TRAINING_HEADINGS = ("tokens/s", "over sdpa", "step, MiB", "last loss", "from sdpa", "held out", "from sdpa")


def ways_of(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a training report says of each way of attention; the first is what the others are held against."""
    return {key.removeprefix("way "): value for key, value in report.items() if key.startswith("way ")}


# A Llama by Transformers


def models_targets(report: Mapping[str, Any]) -> list[Target]:
    """What is promised of whole models, as far as this report can answer, without and with our rotary embedding."""
    targets = []
    for row in report["rows"]:
        least = LEAST_OVER_SDPA.get(row["workload"])
        if row["attention"] not in (OURS, OURS + ROTARY) or least is None or row["over_sdpa"] is None:
            continue
        ratio = row["over_sdpa"]
        name = row["workload"] + (" with `fuse_rotary`" if row["attention"].endswith(ROTARY) else "")
        targets.append(Target(f"{name}, over sdpa", f">= {least:.2f}", f"{ratio:.2f}", ratio >= least))
    return targets


RATIOS = {
    "ours over torch's FlashAttention-2 (`sdpa_fa2`)": (OURS, "sdpa_fa2"),
    "ours over `sdpa`, both with `fuse_rotary`": (OURS + ROTARY, SDPA + ROTARY),
    "`fuse_rotary`, of ours": (OURS + ROTARY, OURS),
    "`fuse_rotary`, of `sdpa`": (SDPA + ROTARY, SDPA),
}
"""Of speeds, the first over the second."""


def _ratios(report: Mapping[str, Any]) -> list[str]:
    times = {(row["workload"], row["attention"]): row["median_ms"] for row in report["rows"]}
    lines = []
    for name, (one, other) in RATIOS.items():
        found = []
        for workload in dict.fromkeys(workload for workload, _ in times):
            pair = times.get((workload, one)), times.get((workload, other))
            if pair[0] and pair[1]:
                found.append(f"{workload} {pair[1] / pair[0]:.3f}")
        if found:
            lines.append(f"{name}: {', '.join(found)}")
    return lines


def _model_row(row: Mapping[str, Any]) -> list[str]:
    name = [row["workload"], f"`{row['attention']}`"]
    if row["failed"]:
        return [*name, "failed", *[NOTHING] * (len(MODEL_HEADINGS) - 1)]
    speed, difference = row["tokens_a_second"], row["difference"]
    return [
        *name,
        number(row["median_ms"], 2),
        number(100 * row["spread"], 1) + " %",
        NOTHING if speed is None else f"{speed:,.0f}",
        number(row["over_sdpa"], 2),
        number(row["attention_ms"], 2),
        number(row["attention_tflops"]),
        number(row["peak_mib"]),
        NOTHING if difference is None else f"{difference:.1e}",
    ]


def render_models(report: Mapping[str, Any]) -> str:
    """docs/results/models.md."""
    machine = {**report["machine"], "transformers": report["transformers"]}
    shape = ", ".join(f"{key} {value}" for key, value in report["shape"].items())
    failed = [f"{r['workload']}, `{r['attention']}`: {r['failed']}" for r in report["rows"] if r["failed"]]
    clocks = [
        f"{name}: {number(c['clock_mhz'])} MHz, {number(c['power_w'])} W"
        for name, c in report["clocks"].items()
    ]
    targets = models_targets(report)
    chosen = report.get("sdpa_backend")
    parts = [
        "# A Llama by Transformers",
        RENDERED,
        measured_on(report["date"], report["commit"], machine),
        "One model of random weights in bfloat16, whose attention is chosen by name "
        f"([Transformers](../integrations/transformers.md)). {shape}."
        + (f" Of its backends `sdpa` takes `{chosen}` by itself." if chosen else ""),
        markdown_table(
            ["workload", "attention", *MODEL_HEADINGS], [_model_row(row) for row in report["rows"]]
        ),
    ]
    parts += [section("Targets", targets_text(targets)), section("Ratios", lines_text(_ratios(report)))]
    parts += [section("What did not run", lines_text(failed))]
    parts += ["## Clock and power", lines_text(clocks)]
    return page([*parts, "## Method", method_text(report["method"])])


# A small GPT


def _training_row(
    way: str, of_way: Mapping[str, Any], base: Mapping[str, Any], apart: Mapping[str, Any]
) -> list[str]:
    memory = of_way["step_mib"]
    return [
        way,
        f"{of_way['tokens_a_second']:,.0f}",
        number(of_way["tokens_a_second"] / base["tokens_a_second"], 2),
        NOTHING if memory is None else f"{memory:,.0f}",
        number(of_way["last_loss"], 4),
        f"{apart['mean_of_last_tenth']:+.4f}" if apart else NOTHING,
        number(of_way["held_out_loss"], 4),
        f"{apart['held_out']:+.4f}" if apart else NOTHING,
    ]


def render_training(report: Mapping[str, Any], figure: str) -> str:
    """docs/results/training.md, with the plot that lies beside it."""
    ways, apart = ways_of(report), report["differences"]
    base = next(iter(ways.values()))
    rows = [_training_row(way, of_way, base, apart.get(way, {})) for way, of_way in ways.items()]
    options = ", ".join(f"{key} {value}" for key, value in report["options"].items())
    parts = [
        "# A small GPT in training",
        RENDERED,
        measured_on(report["date"], report["commit"], report["machine"]),
        "`examples/train_gpt.py`: the same model on the same batches, by each way of attention. `last loss` is the "
        "mean of the last tenth of the steps, in nats a byte; how far our 16 bits are from sdpa says what rounding "
        f"elsewhere does by itself. {options}.",
        markdown_table(["attention", *TRAINING_HEADINGS], rows),
        f"![Losses by step]({figure})",
    ]
    return page([*parts, "## Method", method_text(report["method"])])
