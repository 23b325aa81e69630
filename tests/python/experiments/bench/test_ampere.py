"""The kernels without WGMMA as a row of the forward and backward benchmarks: their reports, pages and targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import render as render_script
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench import render as bench_render
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.plot import plot_forward
from hopper_attention.experiments.bench.results import (
    Cell,
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    dump_forward,
    load_forward,
    main_row,
)
from hopper_attention.experiments.bench.spec import paper_grid, parse_problem
from hopper_attention.experiments.bench.targets import throughput_targets


def measured(tflops: float) -> Measured:
    return Measured(tflops, 1.0, 0.01, 9, 4, 1.5e-3, 1470.0, 694.0, "config")


KINDS = pytest.mark.parametrize("kind", ["forward", "backward"])


def fake_report(ratio: float, kind: str = "forward") -> ForwardReport:
    """The grid; the kernel without WGMMA is ``ratio`` of FA2."""
    cells = [
        Cell(problem, 1, 1470.0, 694.0, {"ampere": measured(300 * ratio), "fa2": measured(300)})
        for problem in paper_grid()
    ]
    info = {name: PeerInfo(f"Peer {name}", "1.0", "") for name in ("ampere", "fa2")}
    machine = {"gpu": "NVIDIA H200"}
    made = "c0ffee" * 6, "2026-11-20T10:00:00Z", {"l2": "rotated"}
    return ForwardReport(machine, *made, info, tuple(cells), kind)


def test_a_report_without_ours_is_about_the_kernel_without_wgmma() -> None:
    assert (main_row(["ampere", "fa2"]), main_row(["ampere", "ours", "fa2"])) == ("ampere", "ours")
    assert main_row(["fa2"]) == "ours"
    beside = replace(fake_report(1.2).cells[0], peers={"ours": measured(600), "ampere": measured(360)})
    assert beside.best_peer == ""
    cell = load_forward(dump_forward(fake_report(1.25))).cells[0]
    assert (cell.best_peer, cell.ratio) == ("fa2", 1.25)


@KINDS
@pytest.mark.parametrize(
    ("ratio", "met"), [(1.11, [True, True]), (1.02, [True, False]), (0.96, [False, False])]
)
def test_targets(ratio: float, met: list[bool], kind: str) -> None:
    targets = throughput_targets(fake_report(ratio, kind))
    assert all(target.what.startswith(f"{kind} without WGMMA, ") for target in targets)
    assert [target.met for target in targets] == met
    required = {"forward": [">= 1.00", ">= 1.10"], "backward": [">= 0.97", ">= 1.05"]}
    assert [target.required for target in targets] == required[kind]


def test_a_failure_is_a_missed_target() -> None:
    report = fake_report(1.2)
    broken = replace(report.cells[0], peers={**report.cells[0].peers, "ampere": Failed("wrong result")})
    targets = throughput_targets(replace(report, cells=(broken, *report.cells[1:])))
    assert [target.met for target in targets] == [False, False, False]
    assert targets[-1].measured == "failed: bf16-b32-s512-h32-d64-full"


@KINDS
def test_page_and_plot(tmp_path: Path, kind: str) -> None:
    report = fake_report(1.2, kind)
    page = bench_render.render_page(report, None, None, "ampere.png")
    assert page.startswith(f"# {kind.capitalize()}, 16 bit, without WGMMA: results")
    assert "Geometric mean over the best peer: **1.200**. Worst cell: 1.20" in page
    assert "| bf16 d64 full, b32 s512 h32 | 360 | 300 | 1.20 | 1.0 | 1470 | 694 |" in page
    assert plot_forward(report, tmp_path / "ampere.png").stat().st_size > 10_000


def test_its_report_is_read_once_there_is_one(tmp_path: Path) -> None:
    assert render_script.read_ampere(tmp_path) == []
    (tmp_path / "ampere_forward_nvidia_h200.json").write_text(dump_forward(fake_report(1.2)))
    assert [report.main_row for report in render_script.read_ampere(tmp_path)] == ["ampere"]
    (tmp_path / "ampere_backward_nvidia_h200.json").write_text(dump_forward(fake_report(1.2, "backward")))
    reports = render_script.read_ampere(tmp_path)
    assert [(report.kind, report.main_row) for report in reports] == [
        ("forward", "ampere"),
        ("backward", "ampere"),
    ]


def test_each_report_has_a_page(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "forward_nvidia_h200.json").write_text(dump_forward(fake_report(1.2)))
    (tmp_path / "README.md").write_text("\n".join((*bench_render.markers("speed"), "")))
    for kind in ("forward", "backward"):
        (results / f"ampere_{kind}_nvidia_h200.json").write_text(dump_forward(fake_report(1.2, kind)))
    texts = {path.name: text for path, text in render_script.render(tmp_path, results).items()}
    assert texts["ampere.md"].startswith("# Forward, 16 bit, without WGMMA: results")
    assert texts["ampere_backward.md"].startswith("# Backward, 16 bit, without WGMMA: results")
    assert "![" in texts["ampere_backward.md"] and "ampere_backward.png" in texts["ampere_backward.md"]


def test_the_row_asks_for_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("hopper_attention.flash_attn_func", lambda *tensors, **options: asked.append(options))
    problem = parse_problem("bf16-b1-s64-h2-d64-causal")
    inputs, setting = bench.draw_inputs(problem, 0, "cpu"), bench_peers.Setting("cpu")
    bench_peers.PEERS["ours"].prepare(problem, inputs, setting).launch()
    with pytest.raises(ValueError, match="ampere"):
        bench_peers.PEERS["ampere"].prepare(problem, inputs, setting)
    assert asked == [{"causal": True, "backend": None}]
