"""Problems beside the paper's grid, what is promised there, and the matrix product beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench import render as bench_render
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.results import Cell, Failed, ForwardReport, Measured, PeerInfo
from hopper_attention.experiments.bench.shapes import SHORT_US, shape_targets
from hopper_attention.experiments.bench.spec import LONGEST, ODD_SHAPES, RAGGED, paper_grid, parse_problem
from hopper_attention.experiments.bench.targets import forward_targets
from hopper_attention.experiments.bench.timing import Effort

SETTING = bench_peers.Setting("cpu")


def measured(tflops: float, ms: float = 0.009) -> Measured:
    return Measured(tflops, ms, 0.01, 9, 4, 1.5e-3, 1470.0, 694.0, "config")


def fake_report(**ours: float) -> ForwardReport:
    """Every row at 600, its peer at 590 and the matrix product at 610; ``ours`` by a part of a name."""
    cells = []
    for problem in ODD_SHAPES:
        figure = next((x for part, x in ours.items() if part in problem.name.replace("-", "_")), 600.0)
        peers = {"ours": measured(figure, 0.0049), "fa3": measured(590), "matmul": measured(610)}
        cells.append(Cell(problem, 1, None, None, peers))
    info = {name: PeerInfo(name, "1", "") for name in ("ours", "fa3", "matmul")}
    return ForwardReport({"gpu": "none"}, "abc", "2026-01-01", {"l2": "none"}, info, tuple(cells))


def missed(report: ForwardReport) -> list[str]:
    return [target.what for target in forward_targets(report) if not target.met]


def test_what_is_promised_beside_the_grid() -> None:
    targets = forward_targets(fake_report())
    assert len(targets) == 1 + 7 + len(SHORT_US) + len(LONGEST) + 2 and not missed(fake_report())
    assert missed(fake_report(s4099=587)) == [f"rate of {RAGGED.name} over bf16-b1-s4096-h32-d128-causal"]
    assert missed(fake_report(d104_full=589)) == ["bf16-b4-s4096-h16-d104-full over the best peer"]
    of_256 = missed(fake_report(h8_d256_full=590))
    assert of_256 == ["bf16-b1-s16384-h8-d256-full over a matrix product of as many operations"]
    assert missed(fake_report(h32_d64_causal=587)) == [
        "rate of bf16-b1-s16384-h32-d64-causal over bf16-b1-s16384-h32-d64-full"
    ]


def test_a_launch_that_takes_longer_and_one_that_failed() -> None:
    report = fake_report()
    short = next(iter(SHORT_US))
    for result, found in ((measured(600, 0.0101), short.name), (Failed("broke"), "every cell right")):
        cells = tuple(
            replace(c, peers=c.peers | {"ours": result}) if c.problem == short else c for c in report.cells
        )
        assert missed(replace(report, cells=cells)) == [found]


def test_a_report_of_the_grid_alone_has_none_of_them() -> None:
    report = fake_report()
    in_grid = tuple(cell for cell in report.cells if cell.problem in paper_grid())
    assert len(in_grid) == 6 and shape_targets(replace(report, cells=in_grid)) == []


def test_a_matrix_product_is_no_rival() -> None:
    cell = fake_report().cells[0]
    assert cell.best_peer == "fa3" and cell.ratio == pytest.approx(600 / 590)
    page = "\n\n".join(bench_render.render_odd_shapes(fake_report()))
    assert "over a matrix product" in page and "bf16 d72 full" in page


def test_a_matrix_product_of_as_many_operations() -> None:
    problem = parse_problem("fp32-b2-s4096-sk5120-h1-d64-dv32-causal")
    inputs = bench_peers.Inputs(*(torch.empty(0) for _ in range(3)))
    launch = bench_peers.prepare_matmul(problem, inputs, SETTING).launch
    left, right = (cell.cell_contents for cell in launch.__closure__ or ())
    assert 2 * left.shape[0] * right.shape[0] * left.shape[1] == problem.flops
    with pytest.raises(
        NotImplementedError, match="sides are 128 and 128, allowed for a matrix product: 4096"
    ):
        bench_peers.prepare_matmul(parse_problem("bf16-b1-s128-h1-d64"), inputs, SETTING)


def test_what_is_no_attention_is_timed_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "LEAST_SIDE", 16)
    problem = parse_problem("bf16-b1-s16-h1-d64-full")
    peers = tuple(bench_peers.PEERS[name] for name in ("ours", "matmul"))
    effort = Effort(measure_s=1e-4, min_rounds=1, max_rounds=1, budget_s=0.1)
    (cell,) = bench.run_forward([problem], peers, SETTING, effort).cells
    assert all(isinstance(result, Measured) for result in cell.peers.values()), cell.peers
    assert cell.best_peer == ""
