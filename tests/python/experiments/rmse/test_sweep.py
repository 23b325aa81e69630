"""Error against the number of keys: the sweep, its summary, its plot, and the promises held against it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hopper_attention.cli import app
from hopper_attention.experiments.rmse.methods import HOPPER_KERNEL, parse_methods
from hopper_attention.experiments.rmse.plot import plot_sweep
from hopper_attention.experiments.rmse.run import LeftOut, RmseExperiment, RmseReport, RmseRow, run_rmse
from hopper_attention.experiments.rmse.sweep import (
    LengthSweep,
    SweepPoint,
    SweepReport,
    parse_lengths,
    run_sweep,
    summarize,
    sweep_as_data,
    sweep_from_data,
)
from hopper_attention.experiments.rmse.tables import sweep_table
from hopper_attention.experiments.rmse.targets import fp8_targets, sweep_targets

TINY = RmseExperiment(seqlen=256, head_dim=32, seeds=2, queries=48)


def synthetic(
    errors: dict[str, tuple[float, ...]], by: dict[str, str], lengths: tuple[int, ...]
) -> SweepReport:
    points = tuple(
        SweepPoint(method, f"label of {method}", length, error, error / 10, by[method])
        for method, curve in errors.items()
        for length, error in zip(lengths, curve, strict=True)
    )
    left_out = (LeftOut("fa2", "16-bit FlashAttention-2", "not asked for"),)
    return SweepReport(LengthSweep(RmseExperiment(seqlen=lengths[-1]), lengths), points, left_out)


ON_GPU = synthetic(
    {"flash": (2e-4, 2e-4, 2e-4), "fp8-both": (0.04, 0.05, 0.06), "fp8-emulated": (0.04, 0.04, 0.05)},
    {"flash": HOPPER_KERNEL, "fp8-both": HOPPER_KERNEL, "fp8-emulated": "emulation on cuda"},
    (4096, 16384, 65536),
)


def test_table_fits_80_columns() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(sweep_table(ON_GPU))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for figure in ("65536", "2.00e-04 ± 2e-05", "6.00e-02 ± 6e-03", "1.200", "emulation on cuda"):
        assert all(word in text for word in figure.split())


def test_summary_is_growth_of_the_kernel_over_that_of_its_emulation() -> None:
    assert summarize(ON_GPU) == pytest.approx({"kernel": 1.5, "emulation": 1.25, "ratio": 1.2})


def test_summary_has_the_growth_of_both_accumulations_and_without_the_mean_of_v() -> None:
    errors = {
        "fp8-both": (0.04, 0.06),
        "fp8-two-level": (0.04, 0.05),
        "fp8-smooth-v": (0.04, 0.044),
        "fp8-emulated": (0.04, 0.04),
    }
    by = dict.fromkeys(errors, HOPPER_KERNEL) | {"fp8-emulated": "emulation on cuda"}
    expected = {"kernel": 1.5, "emulation": 1.0, "ratio": 1.5, "two levels": 1.25, "smooth V": 1.1}
    assert summarize(synthetic(errors, by, (4096, 65536))) == pytest.approx(expected)


def test_summary_of_what_was_measured_only() -> None:
    on_cpu = synthetic({"fp8-both": (0.04, 0.06)}, {"fp8-both": "emulation on cpu"}, (4096, 65536))
    assert summarize(on_cpu) == pytest.approx({"emulation": 1.5})
    short = synthetic({"fp8-both": (0.04, 0.06)}, {"fp8-both": HOPPER_KERNEL}, (4096, 16384))
    assert summarize(short) == {}


def test_points_are_errors_over_the_output() -> None:
    sweep = LengthSweep(TINY, (32, 256))
    seen: list[tuple[int, int, str]] = []
    report = run_sweep(sweep, lambda done, total, label: seen.append((done, total, label)))
    assert report.methods == ("flash", "fp8-both", "fp8-smooth-v")
    assert [entry.method for entry in report.left_out] == ["fp8-two-level", "fp8-emulated"]
    assert report.left_out[0].reason.startswith(
        "only the Hopper kernel has two levels of accumulation: cpu is"
    )
    assert [point.seqlen for point in report.curve("fp8-both")] == [32, 256]
    single = run_rmse(TINY, methods=parse_methods("fp8-both"))
    relative = [e / rms for e, rms in zip(single.rows[0].by_seed, single.rms_by_seed, strict=True)]
    assert report.curve("fp8-both")[1].error == pytest.approx(sum(relative) / 2)
    assert all(0.02 < point.error < 0.15 for point in report.curve("fp8-both"))
    assert all(5e-5 < point.error < 5e-4 for point in report.curve("flash"))
    assert seen[0][2] == "32 keys: float64 oracle" and seen[-1] == (2, 2, "")


def test_queries_are_at_most_the_keys_and_256_unless_given() -> None:
    sweep = LengthSweep(replace(TINY, seqlen=4096, queries=0), (100, 1000))
    assert [sweep.at(length).seqlen_q for length in sweep.lengths] == [100, 256]
    assert [LengthSweep(TINY).at(length).seqlen_q for length in (16, 64)] == [16, 48]


def test_lengths_of_a_sweep() -> None:
    assert parse_lengths("1024, 4096,65536") == (1024, 4096, 65536)
    for text in ("", "4096,", "4k", "-1"):
        with pytest.raises(ValueError, match="allowed: comma-separated numbers"):
            parse_lengths(text)
    for lengths in ((), (0, 5), (5, 5), (9, 5)):
        with pytest.raises(ValueError, match="allowed: ascending numbers from 1"):
            LengthSweep(TINY, lengths)


def test_sweep_survives_json() -> None:
    data = json.loads(json.dumps(sweep_as_data(ON_GPU)))
    assert sweep_from_data(data) == ON_GPU
    assert data["summary"]["ratio"] == pytest.approx(1.2)


def test_plot_shows_every_curve(tmp_path: Path) -> None:
    svg = plot_sweep(ON_GPU, tmp_path / "new" / "sweep.svg").read_text()
    for text in ("label of flash (Hopper kernel)", "label of fp8-emulated (emulation on cuda)", "4k", "64k"):
        assert text in svg


def test_command_prints_writes_and_draws(tmp_path: Path) -> None:
    path, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
    arguments = ["rmse", "--device", "cpu", "--lengths", "64,128", "--queries", "32", "--head-dim", "32"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    report = sweep_from_data(json.loads(path.read_text()))
    assert report.sweep.lengths == (64, 128) and report.sweep.experiment.queries == 32
    assert "32 queries" in result.output and "3 seeds" in result.output
    for point in report.points:
        assert f"{point.error:.2e} ± {point.spread:.0e}" in result.output
    assert plot.read_bytes()[:4] == b"\x89PNG"


def table(**errors: float) -> RmseReport:
    rows = tuple(
        RmseRow(name.replace("_", "-"), name, "FP8", error, 0.0, (error,), 0.05, None, HOPPER_KERNEL, 1.0)
        for name, error in errors.items()
    )
    return RmseReport(RmseExperiment(heads=4), rows, (), (0.2,))


GOOD = {
    "fp8_both": 8.2e-3,
    "fp8_float64": 8.1e-3,
    "fp8_per_tensor": 2.15e-2,
    "fa3_fp8_tensor_rotated": 8.24e-3,
}


def test_fp8_keeps_its_promises() -> None:
    targets = fp8_targets(table(**GOOD, fa3_fp8_head_rotated=8.3e-3))
    assert [target.met for target in targets] == [True] * 4
    assert [target.measured for target in targets] == ["8.20e-03", "1.012", "2.62", "8.200e-03"]
    assert targets[3].required == "<= 8.240e-03"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"fp8_float64": 7.8e-3}, [1]),
        ({"fp8_per_tensor": 2.08e-2}, [2]),
        ({"fa3_fp8_tensor_rotated": 8.1e-3}, [3]),
        ({"fp8_both": 9.2e-3}, [0, 1, 2, 3]),
        ({"fp8_both": 9.14e-3, "fp8_per_tensor": 2.4e-2}, [1, 3]),
    ],
)
def test_a_broken_promise_shows(change: dict[str, float], broken: list[int]) -> None:
    targets = fp8_targets(table(**{**GOOD, **change}))
    assert [i for i, target in enumerate(targets) if not target.met] == broken


def test_promises_are_for_the_kernel_on_the_papers_inputs() -> None:
    report = table(**GOOD)
    assert fp8_targets(replace(report, experiment=RmseExperiment(causal=True))) == []
    emulated = tuple(replace(row, implementation="emulation on cpu") for row in report.rows)
    assert fp8_targets(replace(report, rows=emulated)) == []
    assert len(fp8_targets(table(fp8_both=8e-3))) == 1


def test_the_sweeps_promise() -> None:
    target = sweep_targets(ON_GPU)[0]
    assert target.met and target.measured == "1.200 (kernel 1.500, emulation 1.250)"
    worse = tuple(
        replace(point, error=0.08) if (point.method, point.seqlen) == ("fp8-both", 65536) else point
        for point in ON_GPU.points
    )
    assert sweep_targets(replace(ON_GPU, points=worse))[0].met is False
    assert sweep_targets(replace(ON_GPU, points=())) == []
