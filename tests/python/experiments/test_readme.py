"""What of the reports stands in the README: the small table of speeds, the two figures of one problem, the errors."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from hopper_attention.experiments.ablation.render import render_readme as render_ablation_readme
from hopper_attention.experiments.ablation.results import AblationReport, Elapsed, Won
from hopper_attention.experiments.bench.results import Failed, ForwardReport, Measured, Sustained
from hopper_attention.experiments.bench.spec import ABLATION
from hopper_attention.experiments.readme import render_speed, render_two_figures
from hopper_attention.experiments.reports import dump_figures
from hopper_attention.experiments.rmse.render import render_page, render_readme
from hopper_attention.experiments.rmse.run import LeftOut, RmseReport, RmseRow, report_as_data
from hopper_attention.experiments.rmse.spec import RmseExperiment
from hopper_attention.experiments.rmse.sweep import LengthSweep, SweepPoint, SweepReport, sweep_as_data
from tests.python.experiments.ablation.test_ablation import fake_report as fake_ablation
from tests.python.experiments.bench.test_fp8 import fake_report as fake_fp8
from tests.python.experiments.bench.test_results import fake_report as fake_forward

FULL_GRID = replace(fake_forward(1.1, slow=0.5), method={"inputs": "N(0, 1)"})


def cells_of(text: str, row: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_speeds_of_each_kind_stand_at_two_lengths_with_ratio_mean_and_range() -> None:
    text = render_speed([FULL_GRID, fake_fp8(1.2, 1.4)])
    assert cells_of(text, "bf16 forward, full") == ["748 (1.10)"] * 6 + ["1.10 (1.10 to 1.10)"]
    mean = math.exp((17 * math.log(1.1) + math.log(0.5)) / 18)
    assert cells_of(text, "bf16 forward, causal")[-1] == f"{mean:.2f} (0.50 to 1.10)"
    kernel = cells_of(text, "FP8 kernel alone, full")
    assert kernel[2:4] == ["1100 (1.20)", "1100 (1.20)"] and kernel[-1] == "1.20 (1.20 to 1.20)"
    end_to_end = cells_of(text, "FP8 end to end *, causal")
    assert end_to_end == ["980 (1.40)"] * 6 + ["1.40 (1.40 to 1.40)"]
    assert "bf16 backward" not in text and "docs/results/backward.md" not in text
    assert "inputs N(0, 1)" in text and "fp8: Peer fa3, Peer cudnn" in text


def test_a_cell_without_a_figure_has_a_dash_and_no_part_in_the_mean() -> None:
    lost = "bf16-b8-s2048-h16-d128-full"
    cells = [
        replace(cell, peers={**cell.peers, "ours": Failed("broke")}) if cell.problem.name == lost else cell
        for cell in FULL_GRID.cells
    ]
    row = cells_of(render_speed([replace(FULL_GRID, cells=tuple(cells))]), "bf16 forward, full")
    assert row[2] == "–" and row[3] == "748 (1.10)" and row[-1] == "1.10 (1.10 to 1.10)"


def with_figures(figure: Measured, machine: dict[str, float]) -> ForwardReport:
    report = fake_forward()
    cells = [
        replace(cell, peers={**cell.peers, "ours": figure}) if cell.problem == ABLATION else cell
        for cell in report.cells
    ]
    return replace(report, cells=tuple(cells), machine={**report.machine, **machine})


def full_with(figure: Measured, machine: dict[str, float]) -> AblationReport:
    report = fake_ablation()
    won = report.rows[0].outcome
    assert isinstance(won, Won)
    full = replace(report.rows[0], outcome=replace(won, measured=figure))
    return replace(report, rows=(full, *report.rows[1:]), machine={**report.machine, **machine})


def test_two_figures_of_one_problem_are_explained_by_what_the_reports_say() -> None:
    there = Measured(709.0, 3.3, 0.01, 11, 2, 1e-4, 1680.0, 433.0, "config")
    here = Measured(666.0, 3.5, 0.01, 147, 2, 1e-4, 1575.0, 688.0, "config")
    h200 = {"sms": 132, "power_limit_w": 700.0}
    text = render_two_figures(with_figures(there, h200), full_with(here, h200))
    for part in ("**709 TFLOP/s**", "**666**", "11 measurements", "here 147", "1680 MHz and 433 W of 700 W"):
        assert part in text, text
    assert "it is 3197 and 3203 FLOP" in text and text.count("`config`") == 1
    other = render_two_figures(with_figures(there, h200), full_with(replace(here, note="wider"), h200))
    assert "`config` there and `wider` here" in other
    assert "without a pause" not in text
    paused = replace(there, sustained=Sustained(668.8, 2.3, 1455.0, 692.5))
    paused_text = render_two_figures(with_figures(paused, h200), full_with(here, h200))
    assert "In 2 s without a pause it has **669** there, at 1455 MHz." in paused_text


def test_no_explanation_where_a_figure_or_a_clock_is_missing() -> None:
    there = Measured(709.0, 3.3, 0.01, 11, 2, 1e-4, 1680.0, None, "config")
    without_sms = render_two_figures(with_figures(there, {}), full_with(there, {}))
    assert "1680 MHz and – W" in without_sms and "FLOP." not in without_sms
    forward = fake_forward()
    grid_only = replace(forward, cells=tuple(c for c in forward.cells if c.problem != ABLATION))
    assert render_two_figures(grid_only, fake_ablation()) == ""


@pytest.mark.parametrize(
    ("compiled", "words"), [(50, "compiling 50 kernels."), (0, "with all kernels compiled before.")]
)
def test_the_ablation_says_what_it_compiled(compiled: int, words: str) -> None:
    report = replace(fake_ablation(), elapsed=Elapsed(17.4, compiled, {}))
    assert f" The run took 17 s, {words}" in render_ablation_readme(report)


def row(method: str, rmse: float, group: str, paper: float | None = None) -> RmseRow:
    return RmseRow(
        method, f"label of {method}", group, rmse, 1e-4, (rmse,), 0.064, paper, "Hopper kernel", 1.0
    )


def fake_rmse() -> dict[str, object]:
    experiment = RmseExperiment(heads=4, seeds=8)
    rows = (
        row("fp8-per-tensor", 2.4e-2, "FP8", 2.4e-2),
        row("fp8-both", 9.0e-3, "FP8", 9.1e-3),
        row("fp8-two-level", 8.9e-3, "FP8"),
        row("fp8-smooth-v", 9.05e-3, "FP8"),
        row("fp8-float64", 8.8e-3, "emulation"),
        row("fa3-fp8-head-rotated", 9.2e-3, "peers"),
    )
    report = RmseReport(experiment, rows, (LeftOut("cudnn-fp8", "cuDNN", "not here"),), (0.227,))
    points = tuple(
        SweepPoint("fp8-both", "ours", seqlen, error, 0.0, "Hopper kernel")
        for seqlen, error in ((4096, 0.05), (65536, 0.36))
    )
    sweep = SweepReport(LengthSweep(replace(experiment, distribution="offset"), (4096, 65536)), points, ())
    assert asdict(experiment)["distribution"] == "outliers"
    return {
        "machine": {"gpu": "NVIDIA H200"},
        "date": "2026-11-21T08:00:00Z",
        "commit": "c0ffee",
        "fp8": report_as_data(report),
        "lengths_offset": sweep_as_data(sweep),
    }


def test_the_readme_has_the_papers_rows_and_the_other_libraries() -> None:
    text = render_readme(fake_rmse())
    assert cells_of(text, "label of fp8-both") == ["9.00e-03", "1e-04", "9.1e-03", "6.4 %", "Hopper kernel"]
    assert cells_of(text, "label of fa3-fp8-head-rotated")[:3] == ["9.20e-03", "1e-04", "–"]
    assert "fp8-two-level" not in text and "fp8-float64" not in text
    assert "N(0, 1) + N(0, 100) · Bernoulli(0.001)" in text and "**2.7 times**" in text
    assert (
        "The default takes the mean out of V too: 9.05e-03." in text and "label of fp8-smooth-v" not in text
    )


def test_the_page_has_every_row_the_promises_and_the_sweeps() -> None:
    text = render_page(fake_rmse())
    assert cells_of(text, "label of fp8-two-level")[0] == "8.90e-03"
    assert text.index("## Emulated") < text.index("label of fp8-float64")
    assert "| FP8 RMSE on the paper's inputs | <= 9.1e-03 | 9.00e-03 | yes |" in text
    assert "### Inputs N(1, 1)" in text and cells_of(text, "65536") == ["36 %"]
    assert text.startswith("# Accuracy of FP8") and text.endswith("|\n")
    assert dump_figures({"page": text})


@pytest.mark.parametrize("missing", ["fp8-both", "fp8-per-tensor", "fp8-smooth-v"])
def test_a_report_without_our_rows_says_so(missing: str) -> None:
    rmse = fake_rmse()
    rows = rmse["fp8"]["rows"]  # type: ignore[index]  # a report as JSON: dictionaries of anything
    rmse["fp8"]["rows"] = [entry for entry in rows if entry["method"] != missing]  # type: ignore[index]  # likewise
    with pytest.raises(ValueError, match=missing):
        render_readme(rmse)
