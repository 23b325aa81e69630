"""The timeline of a CTA, on events made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import recording
from benchmarks import timeline as script
from hopper.forward.tilings import select_forward_config
from hopper_attention.experiments.ablation.results import load_ablation
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.machine import repository_root
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import WallStopwatch
from hopper_attention.experiments.reports import SCHEMA
from hopper_attention.experiments.timeline import spec as timeline
from hopper_attention.experiments.timeline.plot import plot_recording, plot_timeline
from hopper_attention.experiments.timeline.render import render_timeline
from hopper_attention.experiments.timeline.spec import (
    GEMM_0,
    GEMM_1,
    SOFTMAX,
    Event,
    Recording,
    TimelineReport,
)
from hopper_attention.reference.tiled import attention_tiled

EVENTS = [
    Event(0, GEMM_0, 1000, 1100, 3),
    Event(0, SOFTMAX, 1100, 1300, 3),
    Event(1, GEMM_0, 1150, 1250, 3),
    Event(1, SOFTMAX, 1250, 1450, 3),
    Event(0, GEMM_1, 1300, 1400, 3),
]


def test_softmax_is_hidden_where_any_gemm_runs() -> None:
    # Of warpgroup 0's softmax 100 of 200 clocks lie under the other's GEMM, of warpgroup 1's 100 of 200 too.
    assert timeline.hidden_share(EVENTS) == pytest.approx(0.5)
    # GEMMs run in [1000, 1100], [1150, 1250] and [1300, 1400] of [1000, 1450].
    assert timeline.busy_share(EVENTS) == pytest.approx(300 / 450)
    assert timeline.hidden_share(EVENTS[:2]) == 0.0
    assert timeline.hidden_share([]) == timeline.busy_share([]) == 0.0


def test_overlapping_gemms_count_once() -> None:
    both = [Event(0, GEMM_0, 0, 100, 0), Event(1, GEMM_1, 50, 150, 0), Event(1, GEMM_1, 150, 160, 0)]
    assert timeline.merged(both) == [(0, 160)]
    assert timeline.hidden_share([*both, Event(0, SOFTMAX, 40, 200, 0)]) == pytest.approx(120 / 160)


def fake_report() -> TimelineReport:
    recordings = (
        Recording("full", "full", "kernel_a", 1.02, tuple(EVENTS)),
        Recording("neither", "without both", "kernel_b", 1.01, tuple(EVENTS[:1])),
    )
    head = {
        "schema": SCHEMA,
        "kind": "timeline",
        "date": "2026-11-20T10:00:00Z",
        "commit": "c0ffee" * 6,
        "machine": {"gpu": "NVIDIA H200"},
        "problem": "fp16-b4-s8448-h16-d128-full",
        "method": {"clock": "clock64"},
    }
    return TimelineReport(head, recordings)


def test_a_report_survives_json_line_by_line_and_events_are_checked() -> None:
    report = fake_report()
    text = timeline.dump_timeline(report)
    assert timeline.load_timeline(text) == report
    assert sum(line.startswith('  {"variant"') for line in text.splitlines()) == 2
    with pytest.raises(ValueError, match="allowed: kind 'timeline'"):
        timeline.load_timeline(text.replace('"timeline"', '"ablation"', 1))
    with pytest.raises(ValueError, match="unit is 'tma', allowed: gemm0, softmax, gemm1"):
        Event(0, "tma", 0, 1, 0)
    with pytest.raises(ValueError, match="stop is 4, allowed: 5"):
        Event(0, SOFTMAX, 5, 4, 0)


def test_events_come_from_what_a_kernel_records() -> None:
    first = [[[10, 20], [20, 35], [36, 50]], [[22, 30], [35, 48], [0, 0]]]
    second = [[[0, 0], [0, 0], [60, 70]], [[61, 71], [72, 80], [81, 90]]]
    events = timeline.events_of([first, second])
    assert len(events) == 3 + 2 + 1 + 3
    assert events[0] == Event(0, GEMM_0, 10, 20, 1)
    assert events[4] == Event(0, SOFTMAX, 35, 48, 0)
    assert events[5] == Event(1, GEMM_1, 60, 70, 1)


def test_the_drawing_has_a_row_for_each_warpgroup_and_unit(tmp_path: Path) -> None:
    path = plot_timeline(EVENTS, tmp_path / "sub" / "timeline.svg", "Two warpgroups", "d128")
    drawing = path.read_text()
    for warpgroup in (0, 1):
        for title in timeline.TITLES.values():
            assert f"warpgroup {warpgroup}   {title}" in drawing
    assert "50 % of the softmax under a GEMM, a GEMM in flight 67 % of the time" in drawing
    with pytest.raises(ValueError, match="events is empty"):
        plot_timeline([], tmp_path / "none.svg", "Nothing")


def test_the_middle_of_a_tile_is_kept() -> None:
    stamps = [
        [[[10 * visit + unit, 10 * visit + unit + 1] for unit in range(1, 4)] for visit in range(8)]
    ] * 2
    kept = timeline.middle_blocks(stamps, 4)
    assert [len(visits) for visits in kept] == [4, 4] and kept[0][0] == stamps[0][2]
    assert timeline.clocks_of_a_block(timeline.events_of(kept)) == 10.0
    assert math.isnan(timeline.clocks_of_a_block([]))
    with pytest.raises(ValueError, match="a tile has 8 key blocks, allowed to record 7 of: 9 or more"):
        timeline.middle_blocks(stamps, 7)
    with pytest.raises(ValueError, match="the first CTA had too few tiles to record one"):
        timeline.middle_blocks([[[[0, 0]] * 3] * 8], 4)


def test_the_page_has_a_drawing_for_each_kernel(tmp_path: Path) -> None:
    report = fake_report()
    page = render_timeline(report)
    assert page.startswith("# Timeline\n") and "`kernel_b` |" in page
    for each in report.recordings:
        assert f"]({each.figure})" in page
        assert plot_recording(report, each, tmp_path).stat().st_size > 10_000
    assert (tmp_path / "timeline_neither.png").is_file()


# The script that records


COMMITTED = load_ablation(
    (repository_root() / "benchmarks" / "results" / "ablation_nvidia_h200.json").read_text(encoding="utf-8")
)


def test_the_kernels_are_those_that_stand_for_the_rows() -> None:
    kernels = script.chosen_kernels(COMMITTED, "")
    names = [config.name for _, config in kernels]
    assert names[0] == COMMITTED.won()[0][1].config and len(set(names)) == len(names)
    assert kernels[0][0].variant == "full" and {"neither", "one-consumer"} <= {
        row.variant for row, _ in kernels
    }
    assert [row.variant for row, _ in script.chosen_kernels(COMMITTED, "neither")] == ["full", "neither"]
    with pytest.raises(ValueError, match="variants is 'fast', allowed"):
        script.chosen_kernels(COMMITTED, "fast")
    with pytest.raises(ValueError, match="is of fp8, allowed to record: kernels of 16 bits"):
        script.chosen_kernels(replace(COMMITTED, precision="fp8"), "")
    with pytest.raises(ValueError, match="no row whose kernel this version can make"):
        script.chosen_kernels(replace(COMMITTED, rows=()), "")


def test_without_a_gpu_the_script_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "timeline.json"
    assert script.main(["--device", "cpu", "--out", str(out)]) == 2 and not out.exists()
    assert capsys.readouterr().err.startswith(
        "error: device is 'cpu', allowed for timing kernels: a Hopper GPU"
    )


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The tiled reference in place of both kernels; the one with a clock adds ``changed`` to its output."""
    settings = {"changed": 0.0}

    def kernel(q, k, v, out, lse, counter, softmax_scale, num_ctas) -> None:
        assert lse.shape[2] == 0 and counter.shape == (2,) and num_ctas == 132
        out.copy_(attention_tiled(q, k, v, softmax_scale=softmax_scale)[0])

    def recorder(q, k, v, out, lse, counter, stamps, softmax_scale, num_ctas) -> None:
        kernel(q, k, v, out, lse, counter, softmax_scale, num_ctas)
        out.add_(settings["changed"])
        stamps.copy_(torch.arange(stamps.numel()) + 1)

    monkeypatch.setattr(script, "get_forward", lambda config: kernel)
    monkeypatch.setattr(recording, "compile_recording", lambda config, tile, options: recorder)
    monkeypatch.setattr(script, "CudaStopwatch", WallStopwatch)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    return settings


def test_a_kernel_is_recorded_if_its_clock_changes_no_bit(kernels_on_cpu: dict[str, float]) -> None:
    problem = Problem("float16", 1, 128, 8 * 128, 1, 1, 64, 64, causal=False)
    row = COMMITTED.rows[0]
    config = select_forward_config("float16", 64, 64, False, 8448)
    inputs = bench.draw_inputs(problem, 0, "cpu")
    recorded = script.record(row, config, problem, inputs)
    assert (recorded.variant, recorded.config) == ("full", config.name) and recorded.slowdown > 0
    assert len(recorded.events) == config.consumers * script.BLOCKS * 3
    # One block of 6 words is spare, and one more is the first of the 8; then come 6 of them.
    assert recorded.events[0] == Event(0, GEMM_0, 13, 14, script.BLOCKS - 1)
    kernels_on_cpu["changed"] = 0.5
    with pytest.raises(ValueError, match="gives other bits with a clock in it"):
        script.record(row, config, problem, inputs)
