"""The scaling benchmark: its problems, what plain attention needs, and reports, with fake clocks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import Calibration, Effort
from hopper_attention.experiments.scaling import run as bench_scaling
from hopper_attention.experiments.scaling.plot import plot_scaling
from hopper_attention.experiments.scaling.run import LENGTHS, Scaled, Scaling, ScalingReport
from hopper_attention.experiments.scaling.tables import render_scaling, scaling_problems, scaling_table
from tests.python.experiments.fakes import FakeStopwatch, fake_peer

SETTING = bench_peers.Setting("cpu")
SMALL = Scaling((64, 128), tokens=128, heads=1, head_dim=32, dtype="float32")


def test_lengths_run_from_1k_to_1m_in_two_series() -> None:
    series = Scaling().series()
    assert LENGTHS[0] == 1024 and LENGTHS[-1] == 2**20 and len(LENGTHS) == 11
    assert list(series) == ["131072 tokens", "batch 1"]
    fixed = series["131072 tokens"]
    assert {p.batch * p.seqlen_q for p in fixed} == {131_072}
    assert [p.seqlen_q for p in fixed] == list(LENGTHS[:8])
    assert [p.seqlen_q for p in series["batch 1"]] == list(LENGTHS)
    problems = Scaling().problems()
    assert len(problems) == 8 + 11 - 1  # 128k at batch 1 is in both
    assert list(problems) == sorted(problems, key=lambda p: p.flops)


def test_lengths_are_read_with_k_and_m() -> None:
    assert bench_scaling.parse_lengths("") == LENGTHS
    assert bench_scaling.parse_lengths("1k, 3000,1M,1k") == (1024, 3000, 2**20)
    for text in ("1g", "k", "0", "-4", "1.5k", "4,,8"):
        with pytest.raises(ValueError, match="allowed: comma-separated lengths such as 1k"):
            bench_scaling.parse_lengths(text)
    with pytest.raises(ValueError, match="tokens is 0"):
        Scaling(tokens=0)
    with pytest.raises(ValueError, match="lengths is \\(\\)"):
        Scaling(())


def test_plain_attention_needs_two_score_matrices_and_its_masks() -> None:
    problem = Problem("bfloat16", 2, 1000, 2000, 8, 4, 64, 64, causal=False)
    assert bench_scaling.plain_bytes(problem) == 2 * 2 * 2 * 8 * 1000 * 2000 + (2 + 2) * 1000 * 2000
    plain = bench_peers.PEERS["torch"]
    million = Scaling().problem(1, 2**20)
    reason = bench_scaling.too_large(plain, million, 139 * 2**30)
    assert (
        reason == "needs 68608 GiB for its scores, and 139 GiB are free"
    )  # 16 heads x 2^40 scores x 4 bytes, and 3 of mask
    assert bench_scaling.too_large(plain, Scaling().problem(1, 16_384), 139 * 2**30) == ""
    assert bench_scaling.too_large(bench_peers.PEERS["ours"], million, 1.0) == ""
    assert bench_scaling.free_bytes(SETTING) == math.inf


def test_memory_is_the_peak_above_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: order.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1900)
    cuda = bench_peers.Setting("cuda")
    assert bench_scaling.added_memory(lambda: order.append("launch"), cuda) == 1200.0
    assert order == ["wait", "reset", "launch", "wait"]
    assert math.isnan(bench_scaling.added_memory(lambda: None, SETTING))


def run_fakes(
    monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], saved: list[ScalingReport]
) -> tuple[ScalingReport, FakeStopwatch]:
    watch = FakeStopwatch({name: Calibration(seconds, 1e-6) for name, seconds in costs.items()})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    peers = (fake_peer("ours"), replace(fake_peer("slow"), name="torch"), fake_peer("wrong", scale=1.1))
    monkeypatch.setattr(
        bench_scaling, "too_large",
        lambda peer, problem, free: "needs 9 GiB" if peer.name == "torch" and problem.seqlen_q > 64 else "",
    )  # fmt: skip
    effort = Effort(measure_s=0.004, min_rounds=2, max_rounds=5, budget_s=60.0)
    report = bench_scaling.run_scaling(SMALL, peers, SETTING, effort, commit="c0ffee" * 6, save=saved.append)
    return report, watch


def test_a_run_measures_from_small_to_large_and_stops_plain_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[ScalingReport] = []
    report, _ = run_fakes(monkeypatch, {"ours": 1e-3, "slow": 2e-3}, saved)
    assert [len(partial.cells) for partial in saved] == [1, 2, 3]
    first, last = report.cells[0], report.cells[-1]
    assert (first.problem.seqlen_q, first.problem.batch) == (64, 1)
    ours = first.measured("ours")
    assert ours is not None and ours.median_ms == pytest.approx(1.0, rel=0.03)
    assert ours.tflops == pytest.approx(first.problem.flops / 1e-3 * 1e-12, rel=0.03)
    assert ours.rounds == 5 and math.isnan(ours.memory_bytes) and ours.error < 1e-5
    assert isinstance(first.peers["torch"], Scaled)
    assert last.peers["torch"] == Failed("needs 9 GiB")
    wrong = first.peers["wrong"]
    assert isinstance(wrong, Failed) and wrong.reason.startswith("wrong result")


def test_a_long_launch_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    report, watch = run_fakes(monkeypatch, {"ours": 2.0, "slow": 1e-3}, [])
    ours, plain = report.cells[0].measured("ours"), report.cells[0].measured("torch")
    assert ours is not None and ours.rounds == 1
    assert plain is not None and plain.rounds == 5
    assert watch.played.count("ours") == 3  # once for each problem


def test_reports_survive_json_and_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, _ = run_fakes(monkeypatch, {"ours": 1e-3, "slow": 2e-3}, [])
    text = bench_scaling.dump_scaling(report)
    again = bench_scaling.load_scaling(text)
    assert bench_scaling.dump_scaling(again) == text and again.spec == SMALL
    assert again.cells[-1].peers["torch"] == Failed("needs 9 GiB")
    with pytest.raises(ValueError, match="allowed: kind 'scaling'"):
        bench_scaling.load_scaling(text.replace('"scaling"', '"forward"'))
    console = Console(width=160)
    with console.capture() as captured:
        console.print(scaling_table(again))
    shown = captured.get()
    assert "64, batch 2" in shown and "128, batch 1" in shown and "too large" in shown and "1.01 ms" in shown
    assert f"torch on {again.cells[-1].problem.name}: needs 9 GiB" in scaling_problems(again)
    page = render_scaling(again, "scaling.png")
    assert "## 128 tokens" in page and "## batch 1" in page and "![time and memory](scaling.png)" in page
    gib = {"memory_bytes": 2.5 * 2**30}
    weighed = replace(
        again,
        cells=tuple(
            replace(
                c, peers={n: replace(r, **gib) if isinstance(r, Scaled) else r for n, r in c.peers.items()}
            )
            for c in again.cells
        ),
    )
    assert "2.5 GiB" in render_scaling(weighed, "scaling.png")
    drawing = plot_scaling(weighed, tmp_path / "scaling.svg").read_text()
    assert "128 tokens" in drawing and "torch would need" in drawing and "GiB that a call adds" in drawing


def test_what_would_take_a_cpu_hours_is_refused() -> None:
    with pytest.raises(ValueError, match="device is cpu, allowed there"):
        bench_scaling.run_scaling(Scaling(), (fake_peer("ours"),), SETTING, Effort())
