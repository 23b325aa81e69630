"""The accuracy experiment: its inputs, its oracles, its figures, its table and its plot."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from hopper_attention.cli import app
from hopper_attention.experiments.plots import scientific
from hopper_attention.experiments.rmse import oracle as rmse_oracle
from hopper_attention.experiments.rmse import run as rmse
from hopper_attention.experiments.rmse import spec as rmse_inputs
from hopper_attention.experiments.rmse.methods import (
    FP8,
    METHODS,
    SIXTEEN_BIT,
    Method,
    parse_methods,
    peer,
    run_fp8,
)
from hopper_attention.experiments.rmse.plot import plot_rmse
from hopper_attention.experiments.rmse.run import RmseExperiment, RmseReport, RmseRow
from hopper_attention.experiments.rmse.tables import rmse_table
from hopper_attention.quantization import Fp8Quantization, quantize_qkv, restore_values
from hopper_attention.reference import attention_naive, attention_tiled_fp8
from hopper_attention.reference.fp8 import P_EXPONENT

SMALL = RmseExperiment(seqlen=1024, head_dim=128, seeds=1)
PAPERS_KEYS = RmseExperiment(seqlen=8448, queries=512, heads=2, head_dim=128, seeds=3)

ON_CPU = (
    "standard",
    "fa2",
    "flash",
    "fp8-per-tensor",
    "fp8-block",
    "fp8-rotation",
    "fp8-both",
    "fp8-smooth-v",
    "fp8-float64",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiles are small: on a busy machine several threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(distribution: str, seqlen: int = 4096, head_dim: int = 128, seed: int = 0) -> torch.Tensor:
    return rmse_inputs.draw((1, seqlen, 2, head_dim), distribution, torch.Generator().manual_seed(seed))


# Inputs


def test_normal_inputs_have_no_outliers() -> None:
    x = draw("normal")
    assert x.std().item() == pytest.approx(1.0, abs=0.01)
    assert x.abs().max().item() < 6.0


def test_papers_outliers_are_one_element_in_a_thousand_with_standard_deviation_ten() -> None:
    x = draw("outliers")
    # Var = 1 + 0.001 * 100, and an outlier is beyond 6 with probability P(|N(0, 101)| > 6) = 0.5505.
    assert x.var().item() == pytest.approx(1.1, abs=0.02)
    assert (x.abs() > 6).float().mean().item() == pytest.approx(0.001 * 0.5505, rel=0.1)


def test_token_outliers_are_whole_tokens() -> None:
    x = draw("token-outliers", seqlen=16_384)
    spread = x.std(-1)
    outlier = spread > 4
    assert spread[outlier].mean().item() == pytest.approx(math.sqrt(101), rel=0.1)
    assert spread[~outlier].max().item() < 1.5
    assert outlier.float().mean().item() == pytest.approx(0.001, rel=0.5)


@pytest.mark.parametrize(("head_dim", "channels"), [(64, 1), (128, 2), (96, 2)])
def test_channel_outliers_are_the_same_channels_of_every_token(head_dim: int, channels: int) -> None:
    spread = draw("channel-outliers", head_dim=head_dim).std(1)
    assert (spread > 5).sum(-1).tolist() == [[channels, channels]]
    assert spread[spread <= 5].max().item() < 1.1


def test_heavy_tails_are_students_t_with_unit_variance() -> None:
    x = draw("heavy-tails")
    # With x in units of the standard deviation, P(|x| < c) = 2/pi (c / (1 + c^2) + arctan c).
    assert (x.abs() < 1).float().mean().item() == pytest.approx(0.8183, abs=0.002)
    assert (x.abs() > 5).float().mean().item() == pytest.approx(0.00324, rel=0.05)
    assert x.var().item() == pytest.approx(1.0, abs=0.1)
    assert x.mean().item() == pytest.approx(0.0, abs=0.01)


def test_offset_inputs_are_normal_ones_with_a_mean_of_1() -> None:
    assert torch.equal(draw("offset"), draw("normal") + 1)


def test_outlier_std_is_that_of_the_outliers() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = rmse_inputs.draw((1, 16_384, 2, 64), "token-outliers", generator, 1e4).std(-1)
    assert spread[spread > 100].mean().item() == pytest.approx(1e4, rel=0.1)
    assert spread[spread < 100].max().item() < 2.0


def test_a_spec_gives_the_same_inputs_again_and_a_seed_others() -> None:
    first, again, other = (rmse_inputs.draw_problem(SMALL, seed).q for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.dtype, tuple(first.shape)) == (torch.float16, (1, 1024, 1, 128))


@pytest.mark.parametrize(("cores", "numbers", "ahead"), [(1, 1 << 28, 1), (16, 1 << 28, 5), (16, 3000, 2)])
def test_seeds_drawn_ahead_are_those_drawn_alone(
    cores: int, numbers: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rmse_inputs.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(rmse_inputs, "DRAWN_NUMBERS", numbers)
    experiment = RmseExperiment(seqlen=20, head_dim=32, queries=6, seeds=5)  # 32 x 46 = 1472 numbers a seed
    assert rmse_inputs.drawers(experiment) == ahead
    drawn = list(rmse_inputs.draw_problems(experiment))
    assert len(drawn) == 5
    for seed, problem in enumerate(drawn):
        alone = rmse_inputs.draw_problem(experiment, seed)
        assert all(torch.equal(getattr(problem, name), getattr(alone, name)) for name in "qkv")


def test_fewer_queries_than_keys() -> None:
    problem = rmse_inputs.draw_problem(replace(SMALL, queries=3), 0)
    assert [x.shape[1] for x in (problem.q, problem.k, problem.v)] == [3, 1024, 1024]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlen": 0}, "seqlen is 0, allowed: 1 or more"),
        ({"seeds": -1}, "seeds is -1, allowed: 1 or more"),
        ({"head_dim": 12}, "head_dim is 12, allowed: multiples of 8 from 8 to 256"),
        ({"head_dim": 264}, "head_dim is 264, allowed"),
        ({"queries": 8449}, "queries is 8449, allowed: 0 (all) to seqlen, 8448"),
        ({"dtype": "float32"}, "dtype is 'float32', allowed: float16, bfloat16"),
        ({"distribution": "cauchy"}, "distribution is 'cauchy', allowed: outliers, "),
        ({"outlier_std": 2e4}, "outlier_std is 20000, allowed with float16: 0 to 1e+04"),
        ({"outlier_std": math.nan}, "outlier_std is nan, allowed with float16"),
        ({"device": "nowhere"}, "device is 'nowhere', allowed: a torch device"),
    ],
)
def test_a_bad_spec_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(RmseExperiment(), **change)
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpus_report_can_be_read_where_none_is_but_not_run() -> None:
    with pytest.raises(ValueError, match="device is 'cuda:0', but torch finds no CUDA GPU here"):
        rmse_inputs.draw_problem(replace(SMALL, device="cuda:0"), 0)


def test_spec_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SMALL.seqlen = 1  # type: ignore[misc]  # frozen, which is what is tested


# Oracles


@pytest.mark.parametrize(("causal", "queries"), [(False, 0), (True, 0), (True, 150), (False, 7)])
def test_oracle_in_pieces_is_the_oracle(causal: bool, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmse_oracle, "ORACLE_ROWS", 96)  # does not divide 250
    shape = RmseExperiment(batch=2, seqlen=250, heads=2, head_dim=32, causal=causal, queries=queries)
    problem = rmse_inputs.draw_problem(shape, 0)
    steps: list[int] = []
    pieces = rmse.compute_oracle(problem, lambda: steps.append(1))
    whole, _ = attention_naive(problem.q, problem.k, problem.v, causal=causal)
    assert (pieces - whole).abs().max().item() < 1e-14
    assert len(steps) == rmse.oracle_steps(shape) == 2 * 2 * math.ceil((queries or 250) / 96)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotate_v", [False, True])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_float64_emulation_rounds_as_the_emulation_does(
    causal: bool, rotate_v: bool, smooth_v: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rmse_oracle, "ORACLE_ROWS", 96)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 150, 4, 64), (2, 250, 2, 64), (2, 250, 2, 48))
    q, k, v = (rmse_inputs.draw(shape, "outliers", generator) for shape in shapes)
    settings = Fp8Quantization(block_q=64, block_k=64, rotate_v=rotate_v, smooth_v=smooth_v)
    parts = quantize_qkv(q, k, v, quantization=settings)
    exact = rmse_oracle.attention_fp8_float64(parts, causal=causal, tile_n=64)
    tiled = attention_tiled_fp8(parts, causal=causal)[0].double()
    tiled = restore_values(tiled, parts, causal)
    oracle = attention_naive(q, k, v, causal=causal)[0]
    error = (exact - oracle).square().mean().sqrt().item()
    # Float32 may round a P that lies between two e4m3 numbers the other way; all else agrees to 1e-6.
    assert (exact - tiled).square().mean().sqrt().item() < 0.03 * error
    assert 0.02 < error / oracle.square().mean().sqrt().item() < 0.1


def test_float64_emulation_is_its_definition_where_one_tile_holds_all_keys() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (rmse_inputs.draw((1, 96, 1, 32), "outliers", generator) for _ in range(3))
    v[:, 40:] *= 50.0  # so that the scales of V's blocks differ
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_q=64, block_k=32, smooth_v=False))
    out = rmse_oracle.attention_fp8_float64(parts, tile_n=96)[0, :, 0]

    rounded_q, rounded_k, rounded_v = (x.dequantize()[0, :, 0].double() for x in (parts.q, parts.k, parts.v))
    largest = [v[0, i : i + 32].abs().max().item() for i in (0, 32, 64)]
    assert parts.v.scale[0, 0].tolist() == [16.0 ** math.ceil(math.log2(amax / 448) / 4) for amax in largest]
    scores = rounded_q @ rounded_k.T / math.sqrt(32) / math.log(2)
    p = torch.exp2(scores - scores.amax(1, keepdim=True) + P_EXPONENT)
    rounded_p = p.to(torch.float8_e4m3fn).double()
    expected = (rounded_p @ rounded_v) / p.sum(1, keepdim=True)
    assert (out - expected).abs().max().item() < 1e-4 * expected.abs().max().item()


# Figures


@pytest.fixture(scope="module")
def small() -> tuple[RmseReport, list[tuple[int, int, str]]]:
    seen: list[tuple[int, int, str]] = []
    return rmse.run_rmse(SMALL, lambda done, total, label: seen.append((done, total, label))), seen


def test_figures_of_the_small_experiment(small: tuple[RmseReport, list]) -> None:
    report = small[0]
    errors = {row.method: row.rmse for row in report.rows}
    assert tuple(errors) == ON_CPU
    # Rounding the scores and probabilities to 16 bits costs several times what tiling does.
    assert errors["flash"] == pytest.approx(3.1e-5, rel=0.15)
    assert errors["fa2"] == pytest.approx(errors["flash"], rel=0.1)
    assert 2.0 < errors["standard"] / errors["flash"] < 10.0
    assert errors["fp8-per-tensor"] == pytest.approx(1.25e-2, rel=0.25)
    assert 1.4 < errors["fp8-per-tensor"] / errors["fp8-rotation"] < 4.0
    assert rmse.gain_over_baseline(report) == errors["fp8-per-tensor"] / errors["fp8-both"] > 1.3
    assert errors["fp8-both"] == pytest.approx(errors["fp8-float64"], rel=0.01)
    relative = {row.method: row.row_error for row in report.rows}
    assert 0.02 < relative["fp8-both"] < 0.08 and 1e-4 < relative["flash"] < 4e-4


def test_rotation_is_what_helps_on_the_papers_inputs() -> None:
    names = "fp8-per-tensor,fp8-block,fp8-rotation,fp8-both"
    report = rmse.run_rmse(PAPERS_KEYS, methods=parse_methods(names))
    errors = {row.method: row.rmse for row in report.rows}
    # Table 3: 2.4e-2 for the baseline and without rotation, 9.3e-3 without block scales, 9.1e-3 with both.
    assert errors["fp8-both"] == pytest.approx(8.1e-3, rel=0.1)
    assert 2.1 < rmse.gain_over_baseline(report) < 3.1
    # The paper's block scales alone gain nothing. A scale for each row of Q makes the outlier of a row exact.
    assert 0.6 < errors["fp8-block"] / errors["fp8-per-tensor"] < 0.9
    assert errors["fp8-rotation"] == pytest.approx(errors["fp8-both"], rel=0.1)


def test_block_scales_help_where_the_tokens_of_other_blocks_are_far_larger() -> None:
    tokens = replace(SMALL, dtype="bfloat16", distribution="token-outliers", seeds=2)
    # A mean of V would bring the large tokens to the quiet ones.
    by_tensor, by_block = (
        Fp8Quantization(granularity=granularity, smooth_v=False) for granularity in ("tensor", "block")
    )
    methods = (
        Method("by-tensor", "one scale", FP8, run_fp8(by_tensor)),
        Method("by-block", "block scales", FP8, run_fp8(by_block)),
    )

    def gains(std: float) -> tuple[float, float]:
        rows = rmse.run_rmse(replace(tokens, outlier_std=std), methods=methods).rows
        return rows[0].row_error / rows[1].row_error, rows[0].rmse / rows[1].rmse

    # One scale leaves the quiet tokens 1e5 / 28672 below the smallest number that e4m3 holds in full.
    typical, whole = gains(1e5)
    assert typical > 4.0 and whole > 3.0
    # Outliers of the paper's size are within e4m3's range: there is nothing to gain.
    assert 0.9 < gains(10.0)[0] < 1.1


def test_rows_say_what_computed_them(small: tuple[RmseReport, list]) -> None:
    by = {row.method: row.implementation for row in small[0].rows}
    assert by["standard"] == "plain PyTorch on cpu" and by["fa2"] == "torch SDPA on cpu"
    assert by["flash"] == by["fp8-both"] == by["fp8-per-tensor"] == "emulation on cpu"
    assert by["fp8-float64"] == "float64 emulation on cpu"
    assert all(row.seconds > 0 for row in small[0].rows)


def test_rows_that_cannot_run_are_left_out_with_the_reason(small: tuple[RmseReport, list]) -> None:
    reasons = {entry.method: entry.reason for entry in small[0].left_out}
    assert set(reasons) | set(ON_CPU) == {method.name for method in METHODS}
    assert reasons["fp8-rotation-head"] == "with one head it is the same as per tensor"
    assert reasons["fp8-emulated"] == "ours is the emulation here: cpu is not an NVIDIA GPU"
    assert reasons["fa3-fp8-head-rotated"] == "needs a CUDA device, this run is on cpu"
    assert reasons["cudnn-fp8"] == "needs a CUDA device, this run is on cpu"


def test_fa2_is_left_out_where_torchs_mask_is_another_one() -> None:
    fewer = replace(SMALL, seqlen=64, queries=32, causal=True)
    report = rmse.run_rmse(fewer, methods=parse_methods("fa2,flash"))
    assert [row.method for row in report.rows] == ["flash"]
    assert "aligned top-left" in report.left_out[0].reason


def test_progress_counts_every_step_once(small: tuple[RmseReport, list[tuple[int, int, str]]]) -> None:
    _, seen = small
    total = rmse.oracle_steps(SMALL) + len(ON_CPU)
    assert {of for _, of, _ in seen} == {total}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1] == (total, total, "")


def test_seeds_give_a_mean_and_a_spread() -> None:
    experiment = RmseExperiment(seqlen=128, head_dim=64, seeds=3)
    row = rmse.run_rmse(experiment, methods=parse_methods("standard")).row("standard")
    single = [error_of_seed(experiment, seed) for seed in range(3)]
    assert row.by_seed == pytest.approx(single)
    assert row.rmse == pytest.approx(sum(single) / 3)
    assert row.spread == pytest.approx(statistics.stdev(single))
    assert rmse.run_rmse(replace(experiment, seeds=1), methods=parse_methods("standard")).rows[0].spread == 0


def error_of_seed(experiment: RmseExperiment, seed: int) -> float:
    p = rmse_inputs.draw_problem(experiment, seed)
    out = METHODS[0].run(p.q, p.k, p.v, p.causal).out
    return (out.double() - rmse.compute_oracle(p)).square().mean().sqrt().item()


def test_median_row_error() -> None:
    oracle = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]]).double()
    difference = torch.tensor([[0.3, 0.4], [0.0, 0.0], [0.0, 1.0]]).double()
    assert rmse.median_row_error(difference, oracle) == pytest.approx(0.1)


def broken(*_: object) -> torch.Tensor:
    raise RuntimeError("no such shape\nand more")


def test_a_peer_that_fails_loses_its_row_and_ours_must_not_fail() -> None:
    experiment = RmseExperiment(seqlen=64, head_dim=32, seeds=2)
    theirs = peer("theirs", "FP8 theirs", "a kernel", broken, lambda setting: "")
    report = rmse.run_rmse(experiment, methods=(METHODS[0], theirs))
    assert [row.method for row in report.rows] == ["standard"]
    assert report.left_out == (rmse.LeftOut("theirs", "FP8 theirs", "failed: no such shape"),)
    with pytest.raises(RuntimeError, match="no such shape"):
        rmse.run_rmse(experiment, methods=(Method("ours", "ours", SIXTEEN_BIT, broken),))  # type: ignore[arg-type]  # it only raises


def test_papers_figures_stand_only_beside_its_own_inputs(small: tuple[RmseReport, list]) -> None:
    assert {row.paper for row in small[0].rows} == {None}
    assert RmseExperiment().is_papers
    for change in (
        {"seqlen": 4096},
        {"dtype": "bfloat16"},
        {"causal": True},
        {"distribution": "normal"},
        {"outlier_std": 11.0},
        {"queries": 512},
    ):
        assert not replace(RmseExperiment(), **change).is_papers
    printed = {m.name: m.paper for m in METHODS if m.paper is not None}
    assert printed == {
        "standard": 3.2e-4,
        "fa2": 1.9e-4,
        "flash": 1.9e-4,
        "fp8-per-tensor": 2.4e-2,
        "fp8-block": 2.4e-2,
        "fp8-rotation": 9.3e-3,
        "fp8-both": 9.1e-3,
    }


def test_report_survives_json(small: tuple[RmseReport, list]) -> None:
    data = json.loads(json.dumps(rmse.report_as_data(small[0])))
    assert rmse.report_from_data(data) == small[0]
    assert data["experiment"]["seqlen"] == 1024
    assert data["oracle_rms"] == small[0].rms_by_seed[0]


def test_row_of_another_name_is_named(small: tuple[RmseReport, list]) -> None:
    with pytest.raises(ValueError, match="method is 'fp9', allowed: standard, "):
        small[0].row("fp9")


# Table and plot


def synthetic(with_paper: bool) -> RmseReport:
    rows = tuple(
        RmseRow(
            m.name, m.label, m.group, (m.paper or 8e-3) / 2, 1e-5, (), 0.05,
            m.paper if with_paper else None, "Hopper kernel", 1.0,
        )
        for m in METHODS
    )  # fmt: skip
    experiment = RmseExperiment() if with_paper else RmseExperiment(causal=True)
    return RmseReport(experiment, rows, (), (0.2,))


def text_of(view: object, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


@pytest.mark.parametrize("with_paper", [True, False])
def test_table_shows_every_row(with_paper: bool) -> None:
    report = synthetic(with_paper)
    report = replace(report, left_out=(rmse.LeftOut("x", "X", "gone"), rmse.LeftOut("y", "Y", "gone")))
    text = text_of(rmse_table(report))
    for row in report.rows:
        assert row.label in text and f"{row.rmse:.2e}" in text
    assert "Hopper kernel" in text and "5 %" in text
    assert "Left out: x, y (gone)." in text
    assert ("the paper has 2.6" in text) == ("9.1e-03" in text) == with_paper
    assert "Ours over its emulation in float64: 1.137." in text


@pytest.mark.parametrize("with_paper", [True, False])
def test_table_fits_80_columns(with_paper: bool) -> None:
    report = synthetic(with_paper)
    text = text_of(rmse_table(report), 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in text
    for row in report.rows:
        assert any(f" {row.rmse:.2e} " in line and "5 %" in line for line in lines)
        assert all(word in text for word in (*row.label.split(), *row.implementation.split()))


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


@pytest.mark.parametrize("with_paper", [True, False])
def test_plot_shows_every_row(with_paper: bool, tmp_path: Path) -> None:
    report = synthetic(with_paper)
    path = plot_rmse(report, tmp_path / "new" / "rmse.png")
    assert path == tmp_path / "new" / "rmse.png"
    width, height = png_size(path)
    assert width == 1880 and height > 100 * len(METHODS)
    svg = plot_rmse(report, tmp_path / "rmse.svg").read_text()
    for row in report.rows:
        assert row.label in svg and scientific(row.rmse) in svg
    assert ("table 3" in svg) == with_paper


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.12e-5, "4.1 × 10⁻⁵"), (9.99e-3, "1.0 × 10⁻²"), (2.0, "2.0 × 10⁰"), (3e12, "3.0 × 10¹²")],
)
def test_scientific(value: float, text: str) -> None:
    assert scientific(value) == text


# Command line


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rmse", "--device", "cpu", *map(str, arguments)])


def test_command_computes_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rmse.json"
    shape = ("--seqlen", 192, "--queries", 64, "--head-dim", 32, "--seeds", 2, "--causal")
    inputs = ("--distribution", "token-outliers", "--outlier-std", 100)
    result = call(*shape, *inputs, "--methods", "fp8-both, flash", "--json", path)
    assert result.exit_code == 0, result.output
    report = rmse.report_from_data(json.loads(path.read_text()))
    assert [row.method for row in report.rows] == ["flash", "fp8-both"]
    assert report.experiment == RmseExperiment(
        seqlen=192,
        queries=64,
        head_dim=32,
        seeds=2,
        causal=True,
        distribution="token-outliers",
        outlier_std=100,
    )
    assert "64 queries, 192 keys" in result.output and "token-outliers of std 100" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--methods", "fp8-both,nothing"),
            "methods is 'fp8-both,nothing', allowed: comma-separated names out of",
        ),
        (("--queries", 9000), "queries is 9000, allowed: 0 (all) to seqlen, 8448"),
        (("--outlier-std", 1e6), "outlier_std is 1e+06, allowed with float16"),
        (("--lengths", "1k,4k"), "lengths is '1k,4k', allowed: comma-separated numbers"),
        (("--lengths", "4096,1024"), "lengths is '4096,1024', allowed: ascending numbers"),
        (
            ("--lengths", "64,128", "--seqlen", 64),
            "seqlen is 64 and lengths is '64,128', allowed: one of them",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple, message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output
