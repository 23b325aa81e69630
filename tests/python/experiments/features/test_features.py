"""The features' benchmark: its workloads, its check against float64, its runs with fake clocks, and its reports."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import render
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.compare import OVER_BEST, compare
from hopper_attention.experiments.bench.peers import Inputs, Limits, Setting, always_available
from hopper_attention.experiments.bench.results import Failed, Measured
from hopper_attention.experiments.bench.timing import Calibration, Effort, GpuLostError
from hopper_attention.experiments.features import checks, spec
from hopper_attention.experiments.features.peers import FeaturePeer, is_dense_batch
from hopper_attention.experiments.features.plot import plot_features
from hopper_attention.experiments.features.results import (
    FeatureCell,
    FeatureReport,
    dump_features,
    feature_targets,
    load_features,
)
from hopper_attention.experiments.features.run import WorkloadLostError, draw_tokens, run_features
from hopper_attention.experiments.features.spec import FAMILIES, WORKLOADS, Workload, backward_of
from hopper_attention.experiments.features.tables import feature_table, render_features
from hopper_attention.experiments.workloads.spec import pick_workloads
from hopper_attention.experiments.workloads.tables import failures_of
from tests.python.experiments.fakes import FakeStopwatch, head_of, measured

SETTING = Setting("cpu")
ROOT = Path(__file__).resolve().parents[4]
PACKED = Workload(lengths=(70, 1, 33, 96), heads=4, heads_kv=2, head_dim=16, is_packed=True, dtype="float32")
EQUAL = replace(PACKED, lengths=(40, 40))
WINDOWED = Workload(
    lengths=(90, 90), heads=2, heads_kv=1, head_dim=16, causal=False, window=(9, 4), dtype="float32"
)
SMALL = (PACKED, EQUAL, WINDOWED, *backward_of(PACKED, WINDOWED))


def masks_of(workload: Workload) -> list[Tensor]:
    """Of each sequence which keys a query sees, in the words of the conventions."""
    left, right = workload.window
    right = 0 if workload.causal else right
    found = []
    for length in workload.lengths:
        distance = torch.arange(length) - torch.arange(length)[:, None]
        sees = torch.ones(length, length, dtype=torch.bool)
        sees &= (distance >= -left) if left != -1 else sees
        sees &= (distance <= right) if right != -1 else sees
        found.append(sees)
    return found


def attend_plainly(workload: Workload, inputs: Inputs) -> Tensor:
    """(tokens, heads, head_dim) by autograd's own operations, in the inputs' dtype."""
    group, rows, parts = workload.heads // workload.heads_kv, 0, []
    for length, sees in zip(workload.lengths, masks_of(workload), strict=True):
        q, k, v = (x[rows : rows + length].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.mT / math.sqrt(workload.head_dim)).masked_fill(~sees, -math.inf)
        parts.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
        rows += length
    return torch.cat(parts)


# Workloads


@pytest.mark.parametrize(
    "workload",
    [PACKED, replace(PACKED, causal=False), WINDOWED, replace(WINDOWED, causal=True), EQUAL]
    + [replace(WINDOWED, window=window) for window in ((-1, 3), (7, -1), (200, 300), (0, 0))],
    ids=lambda w: w.name,
)
def test_useful_work_is_that_of_the_keys_that_are_seen(workload: Workload) -> None:
    visible = sum(int(mask.sum()) for mask in masks_of(workload))
    assert workload.visible == visible
    assert workload.flops == 4 * workload.heads * workload.head_dim * visible
    assert replace(workload, direction="backward").flops == 2.5 * workload.flops
    for length, mask in zip(workload.lengths, masks_of(workload), strict=True):
        seen = mask[length // 3 : length // 2 + 1].any(0).nonzero()
        expected = int(seen.min()), int(seen.max()) + 1
        assert workload.key_range(length, length // 3, length // 2 + 1) == expected


def test_limits_are_those_of_operations_or_of_bytes() -> None:
    by_name = {w.name: w for w in WORKLOADS}
    long = by_name["bf16-1x16k-h16-d128-window-4096-forward"]
    assert long.limit_us() == pytest.approx(486.4, abs=0.05) and long.window == (4095, 0)
    short = by_name["bf16-1x64k-h32-d64-window-128-forward"]
    assert short.limit_us() == pytest.approx(252.6, abs=0.05)
    assert short.moved_bytes == 4 * 65_536 * 32 * 64 * 2 and short.input_bytes == 3 * short.moved_bytes // 4
    gradients = by_name["bf16-1x16k-h16-d128-window-128-backward"]
    assert gradients.limit_us() == pytest.approx(126.3, abs=0.05)
    eight = by_name["fp8-1x16k-h16-d128-window-4096-forward"]
    assert eight.limit_us() == pytest.approx(243.2, abs=0.05) and eight.input_bytes == 3 * 16_384 * 16 * 128
    assert eight.moved_bytes == 5 * 16_384 * 16 * 128
    grouped = by_name["bf16-packed-32k-in-32-skewed-h32-hk8-d128-causal-forward"]
    assert grouped.moved_bytes == 2 * 32_768 * (32 + 8) * 128 * 2


def test_the_lengths_are_drawn_once_and_are_skewed() -> None:
    lengths = spec.skewed_lengths()
    assert lengths == spec.SKEWED.lengths == spec.skewed_lengths()
    assert (sum(lengths), len(lengths)) == (32_768, 32) and min(lengths) >= 1
    assert 1.6 < sum(x * x for x in lengths) / (32 * 1024**2) < 2.4
    assert spec.skewed_lengths(seed=6) != lengths
    assert sum(spec.skewed_lengths(40, 39)) == 40


def test_every_workload_has_a_name_and_a_topic() -> None:
    assert len({w.name for w in WORKLOADS}) == len(WORKLOADS)
    assert all(sum(belongs(w) for belongs in spec.TOPICS.values()) == 1 for w in WORKLOADS)
    assert WINDOWED.name == "fp32-2x90-h2-hk1-d16-window-9-4-forward"


def test_workloads_are_picked_by_a_part_of_their_name() -> None:
    assert pick_workloads("", WORKLOADS) == WORKLOADS
    assert {w.direction for w in pick_workloads("backward", WORKLOADS)} == {"backward"}
    assert [w.name for w in pick_workloads("1x16k*d64*128", WORKLOADS)] == [
        "bf16-1x16k-h32-d64-window-128-forward"
    ]
    with pytest.raises(
        ValueError, match=r"only is 'tea', allowed: a part of a name, .* names are bf16-packed"
    ):
        pick_workloads("tea", WORKLOADS)


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed: 1 or more, all equal unless packed"):
        replace(PACKED, is_packed=False)
    with pytest.raises(ValueError, match=r"lengths is \(\)"):
        replace(PACKED, lengths=())
    with pytest.raises(ValueError, match="direction is 'backward', allowed in FP8: 'forward'"):
        replace(PACKED, direction="backward", is_fp8=True)
    with pytest.raises(ValueError, match="direction is 'sideways', allowed: forward, backward"):
        replace(PACKED, direction="sideways")  # type: ignore[arg-type]  # the mistake


# Correctness before speed


@pytest.mark.parametrize("scores", [1, 200, 2**20])
@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.name)
def test_float64_is_that_of_autograd(
    workload: Workload, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LEAST_CHECKED", 1)
    inputs = draw_tokens(workload, FAMILIES["normal"], 3, "cpu")
    exact = Inputs(*(x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)))
    out = attend_plainly(workload, exact)
    results: tuple[Tensor, ...] = (out.detach(),)
    if workload.is_backward:
        dout = checks.draw_output_gradient(workload, "cpu").double()
        results = torch.autograd.grad(out, (exact.q, exact.k, exact.v), dout)
    pieces = checks.compute_pieces(workload, inputs, scores)
    assert {piece.name for piece in pieces} == ({"dq", "dk", "dv"} if workload.is_backward else {"out"})
    assert len(pieces) == len(checks.checked_places(workload)) * (3 if workload.is_backward else 1)
    for piece in pieces:
        torch.testing.assert_close(results[piece.tensor][piece.rows, piece.heads], piece.right)
    error, wrong = checks.check_result(workload, results, pieces, Limits(1e-9, 1e-9))
    assert wrong == "" and error < 1e-12


def test_short_middle_and_long_sequences_are_checked_on_different_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "LEAST_CHECKED", 20)
    assert checks.checked_places(replace(PACKED, heads=6, heads_kv=3)) == [(2, 0), (0, 1), (3, 2)]
    assert checks.checked_places(replace(PACKED, lengths=(3, 5))) == [(1, 0), (1, 1)]
    assert checks.checked_places(WINDOWED) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("workload", [PACKED, replace(PACKED, direction="backward")], ids=lambda w: w.name)
def test_a_wrong_result_is_found(workload: Workload) -> None:
    inputs = draw_tokens(workload, FAMILIES["normal"], 0, "cpu")
    pieces, limits = checks.compute_pieces(workload, inputs), checks.limits_of(workload)
    heads = (4, 2, 2) if workload.is_backward else (4,)
    right = [torch.zeros(200, of, 16) for of in heads]
    for piece in pieces:
        right[piece.tensor][piece.rows, piece.heads] = piece.right.float()
    assert checks.check_result(workload, right, pieces, limits)[1] == ""
    piece = pieces[-1]
    for spoil, words in (
        (lambda x: x[piece.rows, piece.heads][5].mul_(-1.0), "error"),
        (lambda x: x[piece.rows, piece.heads].mul_(1.02), "allowed"),
        (lambda x: x[0, 0].fill_(math.nan), "are not finite"),
    ):
        spoiled = [x.clone() for x in right]
        spoil(spoiled[piece.tensor])
        error, wrong = checks.check_result(workload, spoiled, pieces, limits)
        assert words in wrong and error > 0
    error, wrong = checks.check_result(workload, [x[1:] for x in right], pieces, limits)
    assert error == math.inf and "expected (200, 4, 16)" in wrong


def test_families_differ_in_their_queries_alone() -> None:
    normal, peaky = (draw_tokens(PACKED, FAMILIES[name], 5, "cpu") for name in ("normal", "peaky"))
    assert torch.equal(peaky.q, 4 * normal.q) and torch.equal(peaky.k, normal.k)
    assert normal.q.shape == (200, 4, 16) and normal.v.shape == (200, 2, 16)
    assert normal.q.std().item() == pytest.approx(1.0, abs=0.05)


# Runs, with fake clocks


def fake_peer(name: str, scale: float = 1.0, raises: str = "", lost: bool = False) -> FeaturePeer:
    """Plain attention times ``scale``, forward only, under a name that the fake stopwatch knows."""

    def bind(workload: Workload, setting: Setting) -> object:
        if raises:
            raise NotImplementedError(raises)
        if lost:
            raise GpuLostError("a kernel hangs")

        def bound(q: Tensor, k: Tensor, v: Tensor) -> object:
            def launch() -> Tensor:
                return attend_plainly(workload, Inputs(q, k, v)) * scale

            launch.__name__ = name
            return launch

        return bound

    takes = {"takes": is_dense_batch} if name == "ours_dense" else {}
    enter = {"enter": lambda workload, x: x}
    return FeaturePeer(name, f"Fake {name}", always_available, lambda setting: "1.0", bind, **takes, **enter)


COSTS = {"ours": 1e-3, "ours_dense": 0.9e-3, "fa3": 1.2e-3, "fa4": 1.1e-3}
EFFORT = Effort(measure_s=0.004, min_rounds=2, max_rounds=5, budget_s=60.0)


def run_fakes(
    monkeypatch: pytest.MonkeyPatch, workloads: tuple[Workload, ...] = (PACKED, EQUAL, WINDOWED)
) -> tuple[FeatureReport, list[FeatureReport]]:
    watch = FakeStopwatch({name: Calibration(seconds, 1e-6) for name, seconds in COSTS.items()})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    saved: list[FeatureReport] = []
    absent = replace(fake_peer("flex"), why_unavailable=lambda setting: "not today")
    peers = (*map(fake_peer, ("ours", "ours_dense", "fa3")), fake_peer("fa4", scale=1.1), absent)
    report = run_features(workloads, peers, SETTING, EFFORT, commit="c0ffee" * 6, save=saved.append)
    return report, saved


def test_a_run_checks_then_times_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    report, saved = run_fakes(monkeypatch)
    assert [len(partial.cells) for partial in saved] == [0, 1, 2, 3]
    first, equal, _ = report.cells
    ours = first.peers["ours"]
    assert isinstance(ours, Measured) and ours.rounds == 5 and ours.error < 1e-5
    assert first.us("ours") == pytest.approx(1000, rel=0.03)
    assert first.tflops("ours") == pytest.approx(PACKED.flops / 1e-3 * 1e-12, rel=0.03)
    wrong = first.peers["fa4"]
    assert isinstance(wrong, Failed) and wrong.reason.startswith("wrong result: out of rows")
    assert first.best_peer == "fa3" and first.ratio == pytest.approx(1.2, rel=0.03)
    assert "ours_dense" not in first.peers and equal.over("ours_dense") == pytest.approx(0.9, rel=0.03)
    assert math.isnan(first.over("ours_dense")) and math.isnan(first.us("flex"))
    assert report.available == ["ours", "ours_dense", "fa3", "fa4"]
    assert "fa4 on fp32-packed-200-in-4-skewed-h4-hk2-d16-causal-forward: wrong result" in "\n".join(
        failures_of(report)
    )
    assert "flex: not today" in failures_of(report)


def test_what_cannot_run_says_so_and_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = FakeStopwatch({"ours": Calibration(1e-3, 1e-6)})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    peers = fake_peer("ours"), fake_peer("fa3", raises="has the forward alone")
    report = run_features((PACKED,), peers, SETTING, EFFORT)
    failed = report.cells[0].peers["fa3"]
    assert isinstance(failed, Failed) and failed.lacks_kernel and "has the forward alone" in failed.reason
    saved: list[FeatureReport] = []
    with pytest.raises(WorkloadLostError, match=r"fp32-packed-200.*fa4: a kernel hangs"):
        run_features((PACKED,), (fake_peer("fa4", lost=True),), SETTING, EFFORT, save=saved.append)
    assert len(saved) == 1 and saved[0].cells == ()


def test_what_would_take_a_cpu_hours_is_refused() -> None:
    with pytest.raises(ValueError, match="device is cpu, allowed there"):
        run_features(WORKLOADS, (fake_peer("ours"),), SETTING, EFFORT)
    with pytest.raises(ValueError, match="inputs is 'flat', allowed: normal, peaky"):
        run_features((PACKED,), (fake_peer("ours"),), SETTING, EFFORT, family="flat")


# Reports


def report_of(*cells: tuple[Workload, dict[str, float]]) -> FeatureReport:
    """A report on an H200 with these times in microseconds."""
    head = head_of("features", (name for _, times in cells for name in times))
    made = (
        FeatureCell(w, 1, 1500.0, None, {n: measured(us) for n, us in times.items()}) for w, times in cells
    )
    return FeatureReport(head, tuple(made))


def workload(part: str) -> Workload:
    (found,) = pick_workloads(part, WORKLOADS)
    return found


def test_promises_are_a_ratio_a_time_or_a_share_of_the_dense_call() -> None:
    skewed = workload("bf16-packed-32k-in-32-skewed-h16-d128-causal-forward")
    equal, eight = (
        workload("32-equal-h16-d128-causal-forward"),
        workload("fp8*skewed-h16-d128-causal-forward"),
    )
    short, long = workload("16k*d128*window-128-forward"), workload("64k*d128*window-128-forward")
    report = report_of(
        (skewed, {"ours": 400.0, "fa3": 440.0, "fa4": 500.0}),
        (equal, {"ours": 200.0, "fa3": 190.0, "ours_dense": 192.0}),
        (short, {"ours": 90.0, "fa3": 95.0}),
        (long, {"ours": 300.0, "fa3": 359.0}),
        (PACKED, {"ours": 1.0, "fa3": 1.0}),
        (eight, {"ours": 100.0, "ours_e2e": 120.0, "ours_bf16": 125.0, "fa3": 110.0}),
    )
    found = [(t.what, t.required, t.measured, t.met) for t in feature_targets(report)]
    assert found == [
        (skewed.name, ">= 1.05", "1.100 of fa3", True),
        (equal.name, ">= 0.97 of our dense call", "0.960", False),
        (short.name, "<= 85 us", "90.0 us", False),
        (long.name, "<= 340 us", "300.0 us", True),
        (eight.name, ">= 1.05", "1.100 of fa3", True),
        (eight.name, ">= 1.3 of our 16 bits", "1.250", False),
    ]
    on_h100 = replace(report, head=report.head | {"machine": {"gpu": "NVIDIA H100 80GB HBM3"}})
    kept = [(t.what, t.required, t.measured, t.met) for t in feature_targets(on_h100)]
    assert kept == [row for row in found if not row[1].endswith(" us")]
    broken = replace(report.cells[0], peers={"ours": Failed("no")})
    last = feature_targets(replace(report, cells=(broken,)))[-1]
    assert not last.met and skewed.name in last.measured


def test_reports_survive_json_and_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, _ = run_fakes(monkeypatch)
    text = dump_features(report)
    again = load_features(text)
    assert dump_features(again) == text and [c.workload for c in again.cells] == [PACKED, EQUAL, WINDOWED]
    record = json.loads(text)["cells"][0]
    assert record["workload"]["lengths"] == [70, 1, 33, 96] and record["limit_us"] > 0
    with pytest.raises(ValueError, match="allowed: kind 'features'"):
        load_features(text.replace('"features"', '"forward"'))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(feature_table(again))
    shown = captured.get()
    assert "200 in 4 skewed" in shown and "window 9, 4" in shown and "failed" in shown
    assert f"{again.cells[0].ratio:.3f}" in shown
    page = render_features(again, "features.png")
    assert "## Packed sequences" in page and "## Windows" in page and "![share of the limit]" in page
    assert "Skewed lengths, 4 in all: 70, 1, 33, 96." in page and "- flex: not today" in page
    drawing = plot_features(again, tmp_path / "features.svg").read_text()
    assert "Packed sequences, forward" in drawing and "Fake ours" in drawing and "backward" not in drawing
    with pytest.raises(ValueError, match="the report has no cells"):
        plot_features(replace(again, cells=()), tmp_path / "none.svg")


def test_reports_are_compared_workload_by_workload() -> None:
    times = {"ours": 400.0, "fa3": 440.0}
    before, after = (dump_features(report_of((PACKED, times | {"ours": us}))) for us in (400.0, 200.0))
    compared = {(c.after.who, c.after.unit): c.speedup for c in compare(before, after)}
    assert compared == {("ours", "us"): 2.0, ("fa3", "us"): 1.0, (OVER_BEST, ""): 2.0}


def test_the_page_is_rendered_once_there_is_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(ROOT / "benchmarks" / "results" / f"forward_{render.GPU}.json", results)
    page = ROOT / "docs" / "results" / "features.md"
    assert page not in render.render(ROOT, results)
    report = report_of((PACKED, {"ours": 400.0, "fa3": 440.0}))
    (results / f"features_{render.GPU}.json").write_text(dump_features(report))
    text = render.render(ROOT, results)[page]
    assert "| forward | 200 in 4 skewed | 4/2 | 16 | causal | – | 400.0 | 440.0 | 1.100 | 500 |" in text
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    drawn = [path.name for path in render.draw(tmp_path, results)]
    assert "features.png" in drawn
