"""The page of what a call costs on the host: calls in PyTorch, calls in JAX, and the first example of each page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    Target,
    markdown_table,
    measured_on,
    number,
    page,
    section,
    targets_text,
)

Report = Mapping[str, Any]
HOST_KIND, JAX_KIND, FIRST_KIND = "host_time", "jax_calls", "first_results"

MOST_US = {
    "forward, 16 bits": 10.0,
    "forward, on quantized parts": 14.0,
    "quantize_qkv": 20.0,
    "flash_attn_fp8_func": 30.0,
    "forward with gradients": 25.0,
    "backward": 60.0,
    "forward, seqlen_k not seen before": 35.0,
    "decode, with a schedule": 12.0,
}
"""Microseconds that are promised of a call."""

BACKWARD, OF_NOTHING = "backward", "backward of nothing"
"""Begin names of backward passes: ours, and what torch itself takes for one."""

JAX_RATIO, MOST_OF_TORCH = "jax over torch", 1.5


def host_us(report: Report) -> dict[str, float]:
    """Microseconds by call: the least over processes of their medians. Cores that others use make a process slower,
    never faster."""
    return {call: min(median for median, _ in processes) for call, processes in report["us"].items()}


def host_targets(report: Report) -> list[Target]:
    """Of every call in ``MOST_US``: one that is not in the report does not meet it."""
    found, targets = host_us(report), []
    for call, most in MOST_US.items():
        us = found.get(call, math.inf)
        measured = f"{us:.1f} us" if call in found else "not measured"
        targets.append(Target(f"host time, {call}", f"<= {most:.0f} us", measured, us <= most))
    return targets


def jax_targets(report: Report) -> list[Target]:
    ratio = report["host"][JAX_RATIO]
    return [
        Target(
            "a jitted call in JAX over one in PyTorch",
            f"<= {MOST_OF_TORCH}",
            f"{ratio:.2f}",
            ratio <= MOST_OF_TORCH,
        )
    ]


def first_targets(report: Report) -> list[Target]:
    limit = report["limit_s"]
    return [
        Target(
            f"first example of {row['page']}, warm",
            f"< {limit:.0f} s",
            row["failed"] or f"{row['warm_s']:.1f} s",
            not row["failed"] and row["warm_s"] < limit,
        )
        for row in report["rows"]
    ]


def _host_parts(report: Report) -> list[str]:
    found = host_us(report)
    rows = [
        [
            call,
            number(found[call], 1),
            ", ".join(f"{median:.1f}" for median, _ in processes),
            number(min(least for _, least in processes), 1),
            number(MOST_US.get(call), 0),
        ]
        for call, processes in report["us"].items()
    ]
    table = markdown_table(["call", "us", "each process", "best round", "at most"], rows)
    text = (
        f"Tensors are tiny, so the GPU is done first. Method: {report['method']}; {report['cores']} cores. torch makes "
        "a backward pass in a thread that it wakes and waits for, or in the calling one, where "
        "`torch.autograd.set_multithreading_enabled(False)` says so."
    )
    text += _ours_in_backward(found)
    return [section("In PyTorch", f"{_measured(report)}\n\n{text}\n\n{table}")]


def _ours_in_backward(found: Mapping[str, float]) -> str:
    """What of backward passes is not torch's, where the report says it."""
    parts = []
    for call, floor in found.items():
        where = call.removeprefix(OF_NOTHING)
        if where != call:
            ours = found[BACKWARD + where] - floor
            parts.append(f"{floor:.1f} us{where.replace(',', '')}, which leaves {ours:.1f} of ours")
    return f" A pass through a function that computes nothing takes {', and '.join(parts)}." if parts else ""


def _jax_parts(report: Report) -> list[str]:
    names = list(report["host"]["us"])
    rows = [
        [name, *(number(report[where]["us"].get(name), 1) for where in ("host", "device"))] for name in names
    ]
    shapes = " and ".join(str(tuple(report[where]["shape"])) for where in ("host", "device"))
    text = f"Microseconds; q, k and v are {shapes}. `jax addition` is `x + 1`, `jax empty call` a kernel of nothing."
    table = markdown_table(["call", "host", "back to back"], rows)
    return [section("In JAX", f"{_measured(report)}\n\n{text}\n\n{table}")]


def _first_parts(report: Report) -> list[str]:
    rows = [
        [f"`{row['page']}`", *(number(row[key], 1) for key in ("cold_s", "warm_s")), row["failed"] or NOTHING]
        for row in report["rows"]
    ]
    text = "Seconds of a fresh process with a warm compile cache."
    if any(row["cold_s"] is not None for row in report["rows"]):
        text = "Seconds of a fresh process, with a cold compile cache and with a warm one; all pages' cold runs side "
        text += f"by side on {report['cores']} cores."
    if report.get("bytecode"):
        text += " A warm start has its files in memory and Python's bytecode of an earlier one."
    if report.get("alone"):
        text += " Nothing is installed but what the page asks for."
    table = markdown_table(["page", "cold", "warm", "failed"], rows)
    return [section("The first example of each page", f"{_measured(report)}\n\n{text}\n\n{table}")]


def _measured(report: Report) -> str:
    return measured_on(report["date"], report["commit"], report["machine"])


PARTS = {
    HOST_KIND: (_host_parts, host_targets),
    JAX_KIND: (_jax_parts, jax_targets),
    FIRST_KIND: (_first_parts, first_targets),
}


def render_calls(reports: Mapping[str, Report]) -> str:
    """Markdown of the reports that there are, by kind."""
    there = [(PARTS[kind], reports[kind]) for kind in PARTS if kind in reports]
    targets = [target for (_, promised), report in there for target in promised(report)]
    parts = ["# What a call costs on the host", RENDERED, section("Targets", targets_text(targets))]
    return page([*parts, *(text for (render, _), report in there for text in render(report))])
