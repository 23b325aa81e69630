"""Two reports side by side: which figures are compared, and which way is better."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import forward as forward_script
from hopper_attention.experiments.bench import compare as bench_compare
from hopper_attention.experiments.bench.compare import OVER_BEST, Compared, Figure
from hopper_attention.experiments.bench.results import dump_forward
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.prepass.run import Pass, QuantizeCell, QuantizeReport, dump_quantize
from hopper_attention.experiments.reports import dump_figures
from hopper_attention.experiments.scaling.run import (
    Scaled,
    Scaling,
    ScalingCell,
    ScalingReport,
    dump_scaling,
)
from tests.python.experiments.ablation.test_ablation import fake_report as fake_ablation
from tests.python.experiments.bench.test_results import LATENCY, fake_report

PROBLEM = Problem("bfloat16", 1, 64, 64, 1, 1, 64, 64, causal=False)
HEAD = {"schema": 1, "machine": {"gpu": "NVIDIA H200"}, "peers": {}, "method": {}}


def by_key(before: str, after: str) -> dict[tuple[str, str, str], Compared]:
    return {(c.after.what, c.after.who, c.after.unit): c for c in bench_compare.compare(before, after)}


def test_throughput_is_compared_for_every_peer_and_over_the_best() -> None:
    before, after = dump_forward(fake_report(0.8)), dump_forward(fake_report(1.0))
    compared = by_key(before, after)
    name = "bf16-b4-s4096-h16-d128-causal"
    assert compared[name, "ours", "TFLOP/s"].speedup == pytest.approx(1.25)
    assert compared[name, "fa3", "TFLOP/s"].speedup == 1.0
    over = compared[name, OVER_BEST, ""]
    assert (over.before.value, over.after.value) == (pytest.approx(0.8), 1.0)
    assert not any(who == "fa4" for _, who, _ in compared)  # it failed
    ours = bench_compare.of_whom(compared.values(), "")
    assert {c.after.who for c in ours} == {"ours", OVER_BEST} and len(ours) == 2 * 37
    assert {c.after.who for c in bench_compare.of_whom(ours, "ours")} == {"ours"}
    assert len(bench_compare.of_whom(compared.values(), "all")) == 4 * 37
    with pytest.raises(ValueError, match=r"peers is 'fa9', allowed: all, or .* cudnn, fa3, ours"):
        bench_compare.of_whom(compared.values(), "fa9")


def test_less_time_is_better() -> None:
    assert Compared(Figure("p", "ours", 4.0, "us"), Figure("p", "ours", 2.0, "us")).speedup == 2.0
    faster = {**LATENCY, "host_us": {"ours": {"device_us": 6.0, "median": 7.45, "spread": 0.01}}}
    small = {"ok": True, "device_us": 4.0, "wait_us": 30.0, "graph_us": None}
    faster["small"] = [{"problem": "tiny", "peers": {"ours": small, "fa4": {"ok": False}}}]
    slower = {**faster, "small": [{"problem": "tiny", "peers": {"ours": {**small, "device_us": 2.0}}}]}
    compared = by_key(dump_figures({**LATENCY, "small": slower["small"]}), dump_figures(faster))
    assert compared[LATENCY["problem"], "ours", "us host"].speedup == pytest.approx(2.0)
    assert compared["tiny", "ours", "us device"].speedup == 0.5
    assert compared["first call", "ours", "s, cached on disk"].speedup == 1.0
    assert ("tiny", "ours", "us graph") not in compared


def test_scaling_quantization_and_ablation_are_compared() -> None:
    def scaling(ms: float, memory: float) -> str:
        cell = ScalingCell(PROBLEM, {"ours": Scaled(ms, 1.0, 0.0, 5, memory, 1e-3)})
        return dump_scaling(ScalingReport({**HEAD, "kind": "scaling"}, Scaling((64,), 64), (cell,)))

    compared = by_key(scaling(3.0, 2.0**20), scaling(2.0, 2.0**20))
    assert compared[PROBLEM.name, "ours", "ms"].speedup == 1.5
    assert compared[PROBLEM.name, "ours", "MiB"].speedup == 1.0
    assert list(by_key(scaling(3.0, math.nan), scaling(3.0, math.nan))) == [(PROBLEM.name, "ours", "ms")]

    def quantize(us: float) -> str:
        passes = {"quantize": Pass(us, 0.0, 5, 100), "copy": Pass(10.0, 0.0, 5, 100)}
        return dump_quantize(
            QuantizeReport({**HEAD, "kind": "prepass"}, (QuantizeCell(PROBLEM, passes, 0.02),))
        )

    assert by_key(quantize(8.0), quantize(16.0))[PROBLEM.name, "quantize", "us"].speedup == 0.5

    from hopper_attention.experiments.ablation.results import dump_ablation

    report = fake_ablation()
    rows = by_key(dump_ablation(report), dump_ablation(report))
    assert {who for _, who, _ in rows} == {row.variant for row in report.rows if row.tflops}


def test_reports_that_cannot_be_compared_are_refused() -> None:
    forward, latency = dump_forward(fake_report()), dump_figures(LATENCY)
    with pytest.raises(ValueError, match="of kinds 'forward' and 'latency', allowed: the same kind"):
        bench_compare.compare(forward, latency)
    with pytest.raises(ValueError, match="report is kind 'rmse'"):
        bench_compare.kind_of(json.dumps({"kind": "rmse", "schema": 1}))
    for text in ("[]", "no json"):
        with pytest.raises(ValueError, match="report is not a JSON object"):
            bench_compare.kind_of(text)
    empty = dump_forward(replace(fake_report(), cells=()))
    with pytest.raises(ValueError, match="have no figure in common"):
        bench_compare.compare(forward, empty)


def test_machines_that_differ_are_named() -> None:
    report = fake_report()
    other = replace(report, machine={**report.machine, "driver": "590"})
    texts = dump_forward(report), dump_forward(other)
    assert bench_compare.machine_changes(*texts) == ["driver: 580 before, 590 after"]
    assert bench_compare.machine_changes(texts[0], texts[0]) == []


def test_the_table_ends_with_a_mean_for_each_unit() -> None:
    texts = dump_forward(fake_report(0.8)), dump_forward(fake_report(1.0))
    compared = bench_compare.of_whom(bench_compare.compare(*texts), "ours")
    console = Console(width=140)
    with console.capture() as captured:
        console.print(bench_compare.compare_table(compared))
    assert captured.get().count("1.250") == 38
    assert bench_compare.slower_than(compared, 1.2) == []
    assert len(bench_compare.slower_than(compared, 1.3)) == 37


def test_the_script_compares_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, ratio in zip(paths, (0.8, 1.0), strict=True):
        path.write_text(dump_forward(fake_report(ratio)))
    assert forward_script.main(["--compare", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count("1.250") == 2 * 38  # TFLOP/s, and the ratio to the best peer
