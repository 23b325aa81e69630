"""Reports of the benchmark: JSON, targets, comparison, and how they are rendered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import render as render_script
from hopper_attention.experiments.bench import render as bench_render
from hopper_attention.experiments.bench.plot import plot_forward
from hopper_attention.experiments.bench.results import (
    Cell,
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    Sustained,
    dump_forward,
    load_forward,
)
from hopper_attention.experiments.bench.spec import ABLATION, paper_grid
from hopper_attention.experiments.bench.tables import forward_table
from hopper_attention.experiments.bench.targets import (
    forward_targets,
    latency_targets,
    rmse_targets,
    worst_cell,
)
from hopper_attention.experiments.reports import dump_figures, load_figures


def measured(tflops: float) -> Measured:
    return Measured(tflops, 1.0 / 3, 0.0123456, 9, 4, 1.5e-3, 1470.0, 694.0, "config")


def fake_report(ratio: float = 1.0, slow: float = 0.0) -> ForwardReport:
    """The grid and the ablation's shape; ours is ``ratio`` of FA3, in one cell ``slow`` of it if not 0."""
    cells = []
    for problem in (*paper_grid(), ABLATION):
        is_slow = bool(slow) and problem.name == "bf16-b4-s4096-h16-d128-causal"
        ours = 680 * (slow if is_slow else ratio)
        peers = {"ours": measured(ours), "fa3": measured(680), "cudnn": measured(600), "fa4": Failed("broke")}
        cells.append(Cell(problem, 1, 1470.0, None, peers))
    info = {name: PeerInfo(f"Peer {name}", "1.0", "") for name in ("ours", "fa3", "fa4", "cudnn")}
    info["fa2"] = PeerInfo("Peer fa2", "", "needs a CUDA device")
    machine = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11"}
    return ForwardReport(machine, "c0ffee" * 6, "2026-11-20T10:00:00Z", {"l2": "rotated"}, info, tuple(cells))


LATENCY = {
    "schema": 1,
    "kind": "latency",
    "problem": "bf16-b1-s128-h2-d128-full",
    "host_us": {
        "ours": {"device_us": 6.0, "median": 14.9, "spread": 0.01},
        "fa3": {"device_us": 6.5, "median": 29.0, "spread": 0.01},
        "fa4": {"failed": "broke"},
    },
    "first_call_s": {
        "nothing cached": {"median": 3.2, "runs": [3.1, 3.2, 3.3]},
        "cached on disk": {"median": 0.61, "runs": [0.6, 0.61, 0.7]},
    },
}
RMSE = {
    "schema": 1,
    "kind": "rmse",
    "date": "2026-11-20T10:00:00Z",
    "commit": "c0ffee" * 6,
    "machine": {"gpu": "NVIDIA H200"},
    "batch": 1,
    "seqlen": 8448,
    "heads": 4,
    "head_dim": 128,
    "dtype": "float16",
    "rmse": {"ours": 4.12e-5, "fa3": 4.11e-5, "fa4": {"failed": "broke"}},
}


def test_a_report_survives_json() -> None:
    report = fake_report()
    text = dump_forward(report)
    again = load_forward(text)
    assert dump_forward(again) == text
    assert [cell.problem for cell in again.cells] == [cell.problem for cell in report.cells]
    assert again.cells[0].peers["fa4"] == Failed("broke")
    assert again.cells[0].peers["ours"] == replace(measured(680), median_ms=0.33333, spread=0.012346)
    assert again.peers == report.peers and again.cells[0].power_w is None
    assert sum(line.startswith('  {"dtype"') for line in text.splitlines()) == 37
    assert load_figures(dump_figures(LATENCY), "latency") == LATENCY


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="report is kind 'latency', schema 1, allowed: kind 'forward'"):
        load_forward(dump_figures(LATENCY))
    with pytest.raises(ValueError, match="allowed: kind 'rmse'"):
        load_figures(dump_figures(LATENCY), "rmse")


def test_targets_are_held_against_the_report() -> None:
    assert [target.met for target in forward_targets(fake_report(1.05))] == [True, True, True]
    one_slow = forward_targets(fake_report(1.05, slow=0.8))
    assert [target.met for target in one_slow] == [False, True, True]
    assert "35 of 36 cells; lowest 0.800 (bf16-b4-s4096-h16-d128-causal, fa3)" in one_slow[0].measured
    assert [target.met for target in forward_targets(fake_report(0.965))] == [False, False, False]
    assert [target.met for target in latency_targets(LATENCY)] == [False, True, False]
    assert [target.met for target in rmse_targets(RMSE)] == [True]
    assert rmse_targets({"rmse": {"ours": 5.0e-5, "fa3": 4.1e-5}})[0].met is False
    worst = worst_cell(list(fake_report(1.0, slow=0.8).cells))
    assert worst is not None and worst.ratio == pytest.approx(0.8)


def test_a_failure_of_ours_is_a_missed_target() -> None:
    report = fake_report()
    broken = replace(report.cells[0], peers={**report.cells[0].peers, "ours": Failed("wrong result")})
    targets = forward_targets(replace(report, cells=(broken, *report.cells[1:])))
    assert [target.met for target in targets] == [False, False, True, False]
    assert targets[-1].measured == "failed: bf16-b32-s512-h32-d64-full"


def text_of(renderable: object, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_the_terminals_table_shows_figures_and_failures() -> None:
    report = fake_report(1.02)
    lines = text_of(forward_table(report)).splitlines()
    row = next(line for line in lines if "b4 s4096 h16" in line and "causal" in line)
    for figure in ("bf16", "128", "694", "680", "failed", "600", "1.02", "1.2 %", "1470"):
        assert figure in row, row
    assert bench_render.problems_of(report)[0] == "fa2: needs a CUDA device"
    assert "fa4 on bf16-b32-s512-h32-d64-full: broke" in bench_render.problems_of(report)


def test_a_page_holds_grid_and_summary() -> None:
    text = bench_render.render_page(fake_report(1.0, slow=0.8), LATENCY, None, "forward.png")
    assert "| 128, causal | 680 (1.00) | 680 (1.00) | 680 (1.00) | 544 (0.80) |" in text
    assert "Worst cell: 0.80 (`bf16-b4-s4096-h16-d128-causal`, against Peer fa3)." in text
    assert f"Geometric mean over the best peer: **{0.8 ** (1 / 36):.3f}**." in text
    assert "`fp16-b4-s8448-h16-d128-full`: **680 TFLOP/s**, 1.000 of FlashAttention-3." in text
    assert "| ours | 14.9 | 6.0 |" in text


def test_a_page_has_what_holds_without_a_pause() -> None:
    assert "## Sustained" not in bench_render.render_page(fake_report(), None, None, "forward.png")
    report = fake_report()
    speeds = {
        "ours": Sustained(510.0, 2.0, 1410.0, 699.0),
        "fa3": Sustained(500.0, 2.0),
        "cudnn": Sustained(255.0, 2.0),
    }
    peers = dict(report.cells[0].peers)
    for name, speed in speeds.items():
        result = peers[name]
        assert isinstance(result, Measured)
        peers[name] = replace(result, sustained=speed)
    cells = replace(report.cells[0], peers=peers), *report.cells[1:]
    report = replace(report, cells=cells, method={**report.method, "sustained_s": 2.0})
    text = bench_render.render_page(report, None, None, "forward.png").split("## Sustained")[1]
    assert "TFLOP/s in 2 s of launches" in text
    assert "| bf16 d64 full, b32 s512 h32 | 510 | 500 | 255 | 1.02 | 0.75 | 1410 | 699 |" in text


def test_rendering_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    arguments = ["--root", str(tmp_path)]
    assert render_script.main(arguments) == 2
    (results / "forward_nvidia_h200.json").write_text(dump_forward(fake_report()))
    (tmp_path / "README.md").write_text("# Title\n\nno markers\n")
    assert render_script.main(arguments) == 2
    assert "<!-- results:speed -->" in capsys.readouterr().err

    before, after = bench_render.markers("speed")
    (tmp_path / "README.md").write_text(f"# Title\n\n{before}\nold\n{after}\n\nlast words\n")
    assert render_script.main([*arguments, "--check"]) == 1
    assert "README.md is not what the reports give" in capsys.readouterr().err
    assert render_script.main(arguments) == 0
    assert render_script.main([*arguments, "--check"]) == 0

    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("# Title\n\n") and readme.endswith("\n\nlast words\n") and "old" not in readme
    assert (tmp_path / "docs" / "results" / "forward.png").stat().st_size > 20_000
    page = (tmp_path / "docs" / "results" / "forward.md").read_text()
    assert "![TFLOP/s by sequence length, a panel a head_dim and mask](forward.png)" in page
    assert "- fa2: needs a CUDA device" in page
    assert "## Latency" not in page

    (results / "latency_nvidia_h200.json").write_text(dump_figures(LATENCY))
    (results / "rmse_nvidia_h200.json").write_text(dump_figures(RMSE))
    assert render_script.main([*arguments, "--check"]) == 1
    assert render_script.main(arguments) == 0
    page = (tmp_path / "docs" / "results" / "forward.md").read_text()
    assert "| ours | 14.9 | 6.0 |" in page and "| fa4 | failed | broke |" in page
    assert "| RMSE on the paper's outlier inputs, fp16 | <= 4.11e-05 (FA3) | 4.12e-05 | yes |" in page

    newer = RMSE | {
        "date": "2026-11-21T10:00:00Z",
        "machine": {"gpu": "NVIDIA H100"},
        "rmse": {"ours": 3.21e-5},
    }
    (results / "rmse_nvidia_h100_80gb_hbm3.json").write_text(dump_figures(newer))
    assert render_script.main(arguments) == 0
    page = (tmp_path / "docs" / "results" / "forward.md").read_text()
    assert "commit `c0ffeec0ffee` on gpu NVIDIA H100.\n\nInputs N(0, 1) + N(0, 100)" in page
    assert "| ours | 3.21e-05 |" in page


def test_the_plot_leaves_out_peers_that_did_not_run(tmp_path: Path) -> None:
    report = fake_report()
    assert "fa2" not in bench_render.measured_peers(report)
    path = plot_forward(report, tmp_path / "plot.svg")
    drawing = path.read_text()
    assert drawing.count("head_dim ") == 6 + 1  # a title a panel, and the line above them
    assert "Peer fa3" in drawing and "Peer fa2" not in drawing
