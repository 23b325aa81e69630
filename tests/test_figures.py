"""Figures that a page has by hand, of reports that are made anew from time to time: each is what its report gives.

Figures of ``benchmarks/results/development`` stand beside the name of a report that does not change; rendered pages are
held to their reports by ``test_texts.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.render import read_accuracy
from hopper_attention.experiments.bench.results import (
    Cell,
    ForwardReport,
    geometric_mean,
    grid_cells,
    load_forward,
    ratios,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@cache
def report_text(name: str) -> str:
    return (RESULTS / f"{name}_nvidia_h200.json").read_text()


@cache
def figures(name: str) -> Any:
    return read_accuracy(RESULTS) if name == "rmse" else json.loads(report_text(name))


@cache
def throughput(kind: str) -> ForwardReport:
    return load_forward(report_text(kind), kind.removeprefix("ampere_"))


def cells(kind: str, **wanted: Any) -> list[Cell]:
    """Those of the paper's grid whose problems have these fields."""
    return [
        cell
        for cell in grid_cells(throughput(kind))
        if all(getattr(cell.problem, name) == value for name, value in wanted.items())
    ]


def range_of(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def by_input(way: str, *families: str) -> list[float]:
    """FP8 over FlashAttention-3 by the families of inputs, or of all."""
    rows = figures("fp8_inputs")["cells"]
    return [row["us"]["fa3"] / row["us"][way] for row in rows if not families or row["family"] in families]


def inputs_row(family: str) -> tuple[float, ...]:
    return tuple(geometric_mean(by_input(way, family)) for way in ("ours", "drop_in", "drop_in_lse"))


def means_of_inputs() -> tuple[float, ...]:
    return tuple(geometric_mean(by_input(way)) for way in ("ours", "drop_in", "drop_in_lse"))


def others_by_input() -> tuple[float, float, float]:
    """The least and the largest mean of families that are not N(0, 1), and its mean."""
    families = [family for family in figures("fp8_inputs")["families"] if family != "normal"]
    means = [geometric_mean(by_input("ours", family)) for family in families]
    return min(means), max(means), geometric_mean(by_input("ours", "normal"))


def llama(workload: str, attention: str) -> float:
    """Speed of a model over that with ``sdpa``."""
    rows = figures("models")["rows"]
    (row,) = (row for row in rows if (row["workload"], row["attention"]) == (workload, attention))
    return row["over_sdpa"]


def feature(name: str, figure: str, peer: str = "ours") -> float:
    """``median_ms`` or ``tflops`` of a peer on a workload of the report of features."""
    (cell,) = (cell for cell in figures("features")["cells"] if cell["name"] == name)
    return cell["peers"][peer][figure]


def latent(keys: str) -> float:
    name = f"bf16-1x{keys}-h16-hk1-d64-latent-512-causal-forward"
    return feature(name, "tflops") / feature(name, "tflops", "fa3")


def fp8_gains(**wanted: Any) -> list[float]:
    """FP8 with quantization over our 16-bit kernel."""
    return [cell.gain for cell in cells("fp8", **wanted)]


def drop_ins() -> list[float]:
    return [cell.drop_in for cell in cells("fp8")]


def pre_pass() -> tuple[float, ...]:
    """The least and the most time of it in us, and per cent of a copy's bandwidth."""
    passes = [cell["passes"] for cell in figures("prepass")["cells"]]
    times = [each["quantize"]["median_us"] for each in passes]
    rates = {
        name: [each[name]["moved_bytes"] / each[name]["median_us"] for each in passes]
        for name in ("quantize", "copy")
    }
    shares = [100 * ours / copy for ours, copy in zip(rates["quantize"], rates["copy"], strict=True)]
    return *range_of(times), *range_of(shares)


def problem(report: str, name: str, peer: str = "ours") -> float:
    """TFLOP/s of a peer on a problem of a report of throughput."""
    (cell,) = (cell for cell in throughput(report).cells if cell.problem.name == name)
    return cell.tflops(peer)


PAPERS = "fp16-b4-s8448-h16-d128-full"


def figures_of_the_papers_problem() -> tuple[float, float, float]:
    """TFLOP/s of it in bursts, without a pause, and in the ablation."""
    (cell,) = (cell for cell in throughput("forward").cells if cell.problem.name == PAPERS)
    full = figures("ablation")["rows"][0]["outcome"]["measured"]["tflops"]
    return cell.tflops("ours"), cell.sustained("ours"), full


def ablated(*variants: str) -> list[float]:
    """Of the full kernel's speed, in the ablation."""
    ratios_by = {row["variant"]: row["outcome"]["ratio"] for row in figures("ablation")["rows"]}
    return [ratios_by[variant] for variant in variants]


def rmse(method: str, digits: int = 3) -> float:
    """Error of a row of the accuracy table, in units of 10 to the power of -digits."""
    (row,) = (row for row in figures("rmse")["fp8"]["rows"] if row["method"] == method)
    return row["rmse"] * 10**digits


def swept(sweep: str, keys: int, *methods: str) -> list[float]:
    """Errors at so many keys, in per cent of the output."""
    return errors_in(figures("rmse"), sweep, keys, *methods)


def errors_in(report: dict[str, Any], sweep: str, keys: int, *methods: str) -> list[float]:
    found = {(p["method"], p["seqlen"]): 100 * p["error"] for p in report[sweep]["points"]}
    return [found[method, keys] for method in methods]


def sums_of_one_sign() -> list[float]:
    """Of kernels with runs."""
    report = json.loads((RESULTS / "development" / "rmse_794a6e9.json").read_text())
    lengths = (1024, 4096, 16384, 65536, 131072)
    return [x for keys in lengths for x in errors_in(report, "lengths_offset", keys, *WAYS_OF_V)]


WAYS_OF_V = ("fp8-smooth-v", "fp8-both", "fp8-two-level")
SUMS_OF_ONE_SIGN = " ".join(
    f"| {keys} | {{:.1f}} % | {{:.{digits}f}} % | {{:.1f}} % |"
    for keys, digits in ((1024, 1), (4096, 1), (16384, 0), (65536, 1), (131072, 1))
)

DROPOUT = "bf16-1x16k-h16-d128-full-dropout-0.1"
WORST = "bf16-b1-s16384-h8-d256-full"

CLAIMS: list[tuple[str, str, Callable[[], Any]]] = [
    (
        "README.md",
        "FP8 on other inputs, over FlashAttention-3: {:.2f} to {:.2f} where N(0, 1) has {:.2f}",
        others_by_input,
    ),
    (
        "README.md",
        "a training step at {:.2f} of SDPA's speed, with `fuse_rotary` for ours alone at {:.2f}, `generate` at {:.2f}",
        lambda: (
            llama("train", "hopper_attention"),
            llama("train", "hopper_attention+rotary"),
            llama("generate", "hopper_attention"),
        ),
    ),
    *(
        ("docs/limits.md", f"| {inputs} | {{:.2f}} | {{:.2f}} | {{:.2f}} |", partial(inputs_row, family))
        for inputs, family in (
            ("N(0, 1)", "normal"),
            ("the paper's outliers", "outliers"),
            ("channel means, rotary embedding, a sink", "model"),
            ("the same, values with a mean, that of the sink nearly 0", "sink"),
            ("N(0, 1), queries times 4", "q4"),
            ("N(0, 1), queries times 8", "q8"),
            ("N(0, 1), one key of 128 20 times as large", "tokens"),
        )
    ),
    ("docs/limits.md", "The mean of all is {:.2f}, {:.2f} and {:.2f}.", means_of_inputs),
    (
        "docs/limits.md",
        "nowhere below {:.2f}, which it has at head_dim 256 with queries times 4; "
        "e4m3 tensors are down to {:.2f}",
        lambda: (min(by_input("ours")), min(by_input("drop_in"))),
    ),
    ("docs/limits.md", "with the LSE to {:.2f}.", lambda: (min(by_input("drop_in_lse")),)),
    (
        "docs/limits.md",
        "N(0, 1) the mean of 36 cells is {:.2f} over the best peer",
        lambda: (geometric_mean(ratios(cells("fp8"))),),
    ),
    (
        "docs/limits.md",
        "On N(0, 1) all {:d} cells of the [report](results/fp8.md) are ahead of the best peer, the least by {:.1f} %.",
        lambda: (sum(ratio >= 1 for ratio in drop_ins()), 100 * (min(drop_ins()) - 1)),
    ),
    (
        "docs/limits.md",
        "{:.0f} TFLOP/s forward and {:.0f} backward ([report](results/features.md)), where the "
        "[forward](results/forward.md) without has {:.0f}.",
        lambda: (
            feature(f"{DROPOUT}-forward", "tflops"),
            feature(f"{DROPOUT}-backward", "tflops"),
            problem("forward", "bf16-b1-s16384-h16-d128-full"),
        ),
    ),
    (
        "docs/limits.md",
        "For 32 documents in 32k tokens the backward takes {:.1f} ms ([report](results/features.md))",
        lambda: (
            feature(
                "bf16-packed-32k-in-32-skewed-h16-d128-causal-documents-backward",
                "median_ms",
            ),
        ),
    ),
    (
        "docs/faq.md",
        "took {:.2f} s with nothing cached, and {:.2f} s with the kernel on disk",
        lambda: [
            figures("latency")["first_call_s"][how]["median"] for how in ("nothing cached", "cached on disk")
        ],
    ),
    (
        "docs/faq.md",
        "FP8 with quantization has {:.2f} to {:.2f} of our bf16 kernel's speed at 2k keys, and {:.2f} to {:.2f} at 16k",
        lambda: (
            *range_of(fp8_gains(seqlen_q=2048, causal=True)),
            *range_of(fp8_gains(seqlen_q=16384, causal=True)),
        ),
    ),
    (
        "docs/faq.md",
        "had {:.0f} TFLOP/s in short bursts and {:.0f} in 2 s without a pause",
        lambda: figures_of_the_papers_problem()[:2],
    ),
    (
        "docs/kernels/ablation.md",
        "| TFLOP/s | {:.0f} | {:.0f} | 709 | {:.0f} |",
        figures_of_the_papers_problem,
    ),
    (
        "docs/integrations/diffusers.md",
        "it has {:.2f} of our bf16 kernel's speed with 1024 tokens, {:.2f} with 4096 and {:.2f} with 8192",
        lambda: [fp8_gains(head_dim=128, causal=False, seqlen_q=n)[0] for n in (1024, 4096, 8192)],
    ),
    (
        "docs/integrations/transformers.md",
        "was trained at {:.2f} of sdpa's speed by 16 bits and {:.2f} by FP8; prefill {:.2f} and {:.2f}",
        lambda: [
            llama(workload, attention)
            for workload in ("train", "prefill")
            for attention in ("hopper_attention", "hopper_attention_fp8")
        ],
    ),
    (
        "docs/tutorial/7-fp8.md",
        "from {:.2f} to {:.2f} times the speed of the bf16 kernel",
        lambda: range_of(fp8_gains()),
    ),
    (
        "docs/tutorial/4-warp-specialization.md",
        "the kernel without a producer has {:.3f} of the full one's speed",
        lambda: ablated("no-warp-specialization"),
    ),
    (
        "docs/tutorial/5-overlap.md",
        "| without pipelining | {:.3f} |",
        lambda: ablated("no-pipelining"),
    ),
    (
        "docs/tutorial/5-overlap.md",
        "| without both | {:.3f} |",
        lambda: ablated("neither"),
    ),
    (
        "docs/kernels/forward.md",
        "Without pipelining the kernel has {:.3f} of its speed, without both {:.3f}",
        lambda: ablated("no-pipelining", "neither"),
    ),
    (
        "docs/kernels/ablation.md",
        "## Pipelining: {:.3f}, where the paper has 1.14",
        lambda: [1 / ratio for ratio in ablated("no-pipelining")],
    ),
    (
        "docs/kernels/ablation.md",
        "## Warp specialization: {:.3f}, where the paper has 1.16",
        lambda: [1 / ratio for ratio in ablated("no-warp-specialization")],
    ),
    (
        "docs/tutorial/7-fp8.md",
        "{:.2f}e-2 with one scale for a tensor, {:.2f}e-2 with blocks, {:.2f}e-3 with blocks and rotation",
        lambda: (rmse("fp8-per-tensor", 2), rmse("fp8-block", 2), rmse("fp8-both")),
    ),
    (
        "docs/kernels/fp8-accuracy.md",
        "RMSE {:.2f}e-2 with one scale for a tensor, {:.2f}e-3 with rotation",
        lambda: (rmse("fp8-per-tensor", 2), rmse("fp8-rotation")),
    ),
    (
        "docs/kernels/fp8-accuracy.md",
        "{:.2f}e-3 with both. Without rotation, {:.2f}e-2",
        lambda: (rmse("fp8-both"), rmse("fp8-block", 2)),
    ),
    (
        "docs/kernels/fp8-accuracy.md",
        "FlashAttention-3's kernel on inputs rotated as ours has {:.2f}e-3",
        lambda: (min(rmse("fa3-fp8-head-rotated"), rmse("fa3-fp8-tensor-rotated")),),
    ),
    (
        "docs/kernels/fp8-accuracy.md",
        "The other is {:.1f} % above it",
        lambda: (100 * (rmse("fp8-both") / rmse("fp8-emulated") - 1),),
    ),
    (
        "docs/kernels/fp8-accuracy.md",
        "it is {:.1f} % at 4k and {:.1f} % at 64k keys. The kernel's growth over the emulation's is {:.3f}",
        lambda: (
            *(swept("lengths", keys, "fp8-both")[0] for keys in (4096, 65536)),
            figures("rmse")["lengths"]["summary"]["ratio"],
        ),
    ),
    (
        "docs/limits.md",
        SUMS_OF_ONE_SIGN,
        sums_of_one_sign,
    ),
    (
        "docs/kernels/ampere.md",
        "the forward is {:.2f} of FlashAttention-2's speed and the backward {:.2f}, geometric mean of 36 cells",
        lambda: [geometric_mean(ratios(cells(f"ampere_{kind}"))) for kind in ("forward", "backward")],
    ),
    (
        "docs/kernels/wide.md",
        "it has {:.2f} of FlashAttention-3's speed with `qv` at 4k keys and {:.2f} at 16k",
        lambda: (latent("4k"), latent("16k")),
    ),
    (
        "docs/kernels/forward.md",
        "these kernels take {:.1f} us ([report](../results/features.md))",
        lambda: (1e3 * feature("bf16-1x16k-h32-d64-window-128-forward", "median_ms"),),
    ),
    (
        "docs/kernels/forward.md",
        "the least has {:.3f} of its speed, head_dim 256 without a mask at 16k. The geometric mean is {:.3f}",
        lambda: (min(ratios(cells("forward"))), geometric_mean(ratios(cells("forward")))),
    ),
    (
        "docs/kernels/backward.md",
        "At head_dim 256 this is {:.2f} to {:.2f} of the best peer in each cell",
        lambda: range_of(ratios(cells("backward", head_dim=256))),
    ),
    (
        "docs/kernels/quantizer.md",
        "{:.0f} to {:.0f} us for 16384 tokens, {:.0f} to {:.0f} % of a device copy's bandwidth",
        pre_pass,
    ),
]
"""A page, what it says, and what gives the figures in it."""


@pytest.mark.parametrize(
    ("page", "saying", "values"), CLAIMS, ids=[f"{page}: {saying[:40]}" for page, saying, _ in CLAIMS]
)
def test_a_figure_of_a_page_is_that_of_its_report(page: str, saying: str, values: Callable[[], Any]) -> None:
    given = tuple(values())
    assert given and all(math.isfinite(value) for value in given)
    assert len(given) == len(re.findall(r"\{:", saying))
    assert saying.format(*given) in " ".join((ROOT / page).read_text().split())


def test_cells_that_pages_name_are_those_behind() -> None:
    found = cells("forward")
    assert min(found, key=lambda cell: cell.ratio).problem.name == WORST
    assert all(cell.ratio >= 1 for cell in found)
    assert all(cell.drop_in >= 1 for cell in cells("fp8"))
    assert all(cell.ratio > 1 for cell in cells("backward"))
