"""The ablation: its rows, the choice among candidates, tables, JSON, plot, machine code and command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from hopper.config import ForwardConfig, Registers, validate_forward_config
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.forward.tilings import select_forward_config, select_plain_config
from hopper_attention.cli import app
from hopper_attention.experiments.ablation import run as ablation
from hopper_attention.experiments.ablation.clock import render_clock
from hopper_attention.experiments.ablation.code import MachineCode
from hopper_attention.experiments.ablation.plot import plot_ablation
from hopper_attention.experiments.ablation.render import render_elapsed, render_page, summary
from hopper_attention.experiments.ablation.results import (
    PAPER_SIZES,
    AblationReport,
    Elapsed,
    Row,
    Soak,
    Trial,
    Won,
    ablation_problem,
    ablation_targets,
    dump_ablation,
    elapsed_targets,
    load_ablation,
)
from hopper_attention.experiments.ablation.run import Ablation
from hopper_attention.experiments.ablation.tables import ablation_table, code_table, problems_of
from hopper_attention.experiments.ablation.variants import (
    FP8_TILES,
    FULL,
    PAIRED,
    TILES,
    VARIANTS,
    Variant,
    gather,
    parse_variants,
    with_tile,
)
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.peers import Peer, Setting
from hopper_attention.experiments.bench.results import Failed, Measured
from hopper_attention.experiments.bench.spec import ABLATION, Problem
from hopper_attention.experiments.bench.timing import Calibration, Effort, GpuLostError
from tests.python.experiments.fakes import FakeStopwatch, fake_peer

D128 = select_forward_config("float16", 128, 128, False, 8448)
D256 = select_forward_config("float16", 256, 256, False, 8448)
D64 = select_forward_config("bfloat16", 64, 64, True, 8448)
D192 = select_forward_config("bfloat16", 192, 128, False, 8448)
FP8_D128 = select_fp8_forward_config(128, 128, False, "bfloat16", 8448, half_scores=True)
SHIPPED = (D64, select_forward_config("bfloat16", 96, 96, False, 8448), D128, D192, D256, FP8_D128)
CODE = MachineCode(168, 0, 213_000, {"wgmma": 38, "exp2": 178, "mufu": 187, "spill": 0, "all": 2296})


# The registry


def test_rows_are_the_papers_and_more() -> None:
    assert next(iter(VARIANTS)) == FULL
    papers = {name: variant.paper_tflops for name, variant in VARIANTS.items() if variant.paper_tflops}
    assert papers == {"full": 661.0, "no-pipelining": 582.0, "no-warp-specialization": 570.0}
    assert all(variant.title and variant.differs.endswith(".") for variant in VARIANTS.values())


OFF: dict[str, Callable[[ForwardConfig], bool]] = {
    "no-pipelining": lambda c: not c.pipelined and c.warp_specialized,
    "no-ping-pong": lambda c: not c.ping_pong and c.pipelined and c.warp_specialized,
    "neither": lambda c: not c.pipelined and not c.ping_pong and c.warp_specialized,
    "no-warp-specialization": lambda c: not c.warp_specialized and c.pipelined,
    "one-consumer": lambda c: c.consumers == 1 and c.pipelined and not c.ping_pong,
    "two-consumers": lambda c: c.consumers == 2 and c.pipelined,
    "three-consumers": lambda c: c.consumers == 3 and c.pipelined,
}


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda config: config.name)
@pytest.mark.parametrize("name", OFF)
def test_candidates_lack_what_the_row_is_about_and_nothing_else(name: str, shipped: ForwardConfig) -> None:
    field = gather(VARIANTS[name], shipped)
    if name == "no-ping-pong" and not shipped.ping_pong:
        assert "has no ping-pong" in field.reason and field.configs == ()
        return
    assert field.reason == "" and field.configs
    kept = {"dtype", "head_dim", "head_dim_v", "causal", "late_rescale", "output", "polynomial_pairs"}
    for config in field.configs:
        validate_forward_config(config)
        assert OFF[name](config), config.name
        for entry in fields(config):
            if entry.name in kept:
                assert getattr(config, entry.name) == getattr(shipped, entry.name)


def test_off_variants_get_more_than_the_full_kernels_tile() -> None:
    for shipped in (D64, D128, FP8_D128):
        names = ["no-pipelining", "neither", "no-warp-specialization"]
        for name in names + ["no-ping-pong"] * shipped.ping_pong:
            configs = gather(VARIANTS[name], shipped).configs
            tiles = {(c.tile_m, c.tile_n, c.stages) for c in configs}
            assert (shipped.tile_m, shipped.tile_n, shipped.stages) in tiles
            assert len(tiles) >= 5 and {c.tile_m for c in configs if c.ctas_per_sm == 1} == set(PAIRED)
    assert gather(VARIANTS[FULL], D128).configs == (D128,)
    assert gather(VARIANTS["two-consumers"], D128).configs == (D128,)
    turns = {c.ping_pong for c in gather(VARIANTS["no-warp-specialization"], D128).configs}
    assert turns == {True, False}


def test_without_a_producer_several_ctas_may_share_an_sm() -> None:
    configs = gather(VARIANTS["no-warp-specialization"], D128).configs
    shared = {c.ctas_per_sm: c for c in configs if c.ctas_per_sm > 1}
    assert set(shared) == {2, 3} and not any(c.ping_pong for c in shared.values())
    assert max(c.smem_bytes for c in configs if c.ctas_per_sm == 2) == 115_712
    assert {c.stages for c in configs} == {2, 3, 4}
    for name in set(OFF) - {"no-warp-specialization"}:
        assert all(c.ctas_per_sm == 1 for c in gather(VARIANTS[name], D128).configs)


def test_without_a_producer_nothing_is_redistributed() -> None:
    two = with_tile(D128, (128, 128, 2), warp_specialized=False)
    three = with_tile(D128, (192, 80, 2), warp_specialized=False)
    assert two.registers == Registers(256, 0) and three.registers == Registers(168, 0)
    assert with_tile(D128, (192, 80, 2)).registers == Registers(160, 32)
    shared = with_tile(D128, (64, 80, 2), warp_specialized=False, ping_pong=False, ctas_per_sm=3)
    assert shared.registers == Registers(168, 0)


def test_every_tile_of_the_tables_serves_some_row() -> None:
    for table, base in ((TILES, D128), (FP8_TILES, FP8_D128)):
        for head_dim, tiles in table.items():
            sized = replace(
                base, head_dim=head_dim, head_dim_v=min(head_dim, 128) if head_dim == 192 else head_dim
            )
            for tile in tiles:
                validate_forward_config(with_tile(sized, tile, ping_pong=False))


def test_a_row_that_no_kernel_can_fill_says_why() -> None:
    wide = Variant(
        "wide", "wide", "Too wide.", 0.0, lambda c: (replace(c, tile_n=256), replace(c, tile_m=96))
    )
    field = gather(wide, D128)
    assert field.configs == () and len(field.left_out) == 2
    assert field.reason.startswith("no such kernel: the tiles need ")


def test_rows_are_chosen_by_name() -> None:
    assert parse_variants("") == tuple(VARIANTS.values())
    assert [v.name for v in parse_variants("neither, full,neither")] == ["full", "neither"]
    with pytest.raises(ValueError, match=r"variants is 'fast', allowed: .* out of full, no-pipelining"):
        parse_variants("fast")


def test_the_default_problem_is_the_papers() -> None:
    assert ablation_problem(PAPER_SIZES, "float16", False) == ABLATION
    fp8 = ablation_problem("b1-s512-h4-hk2-d64", "fp8", True)
    assert (fp8.dtype, fp8.causal, fp8.heads_kv) == ("bfloat16", True, 2)
    for text in ("fp16-b4-s8448-h16-d128", "b4-s8448", "paper"):
        with pytest.raises(ValueError, match="allowed: sizes such as b4-s8448-h16-d128"):
            ablation_problem(text, "float16", False)


def test_the_shipped_config_is_the_one_that_serves_the_problem() -> None:
    every = tuple(VARIANTS.values())
    # The kernel that serves these sizes takes no turns; the paper's does, and a row is without them.
    plain = select_plain_config("float16", 128, 128, False, 8448)
    assert Ablation(ABLATION, "float16", every).shipped == replace(plain, ping_pong=True) == D128
    assert not plain.ping_pong
    problem = ablation_problem(PAPER_SIZES, "fp8", False)
    assert Ablation(problem, "fp8", every).shipped == FP8_D128


# A run


SMALL = Problem("float16", 1, 128, 128, 2, 2, 64, 64, causal=False)
FAST, SLOW = 1.0e-3, 2.0e-3


def run_fakes(
    monkeypatch: pytest.MonkeyPatch,
    names: str,
    costs: Callable[[ForwardConfig], float],
    broken: str = "",
    inspect: Callable[[ForwardConfig], MachineCode] = lambda config: CODE,
    watch: FakeStopwatch | None = None,
) -> AblationReport:
    """An ablation whose kernels take as long as ``costs`` says; those whose name holds ``broken`` are wrong."""
    watch = FakeStopwatch({}) if watch is None else watch

    def peer(name: str, config: ForwardConfig) -> Peer:
        watch.costs[name] = Calibration(costs(config), 1e-6)
        return fake_peer(name, scale=1.1 if broken and broken in config.name else 1.0)

    # Few keys have a tile of their own, without variants.
    monkeypatch.setattr(ablation, "select_plain_config", lambda *p: select_forward_config(*p[:4], 8448))
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    monkeypatch.setattr(ablation, "peers_of", lambda configs: [peer(c.name, c) for c in configs])
    monkeypatch.setattr(ablation, "inspect_config", inspect)
    monkeypatch.setattr(
        ablation, "compile_missing",
        lambda configs, jobs, done: {c.name: "no registers" for c in configs if c.tile_n == 192},
    )  # fmt: skip
    effort = Effort(0.004, 5, 5, 60.0)
    spec = Ablation(SMALL, "float16", parse_variants(names), effort, effort, effort, soak_s=0.0)
    return ablation.run_ablation(spec, Setting("cpu"), jobs=1, commit="c0ffee" * 6)


def test_the_fastest_candidate_stands_for_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(config: ForwardConfig) -> float:
        if config.pipelined:
            return FAST
        return 1.25e-3 if (config.tile_m, config.tile_n) == (192, 160) else SLOW

    report = run_fakes(monkeypatch, "no-pipelining", costs)
    full, without = report.rows
    assert isinstance(full.outcome, Won) and full.outcome.label == "shipped"
    assert full.outcome.ratio == 1.0 and full.outcome.ratio_spread == 0.0
    assert isinstance(without.outcome, Won)
    won = without.outcome
    assert won.label == "n160 s2 pipelined=False"
    assert won.ratio == pytest.approx(FAST / 1.25e-3, rel=0.03)
    assert won.code == CODE and won.soak.tflops == pytest.approx(SMALL.flops / 1.25e-3 * 1e-12, rel=0.03)
    assert won.measured.rounds == 5 and won.measured.error < 1e-3
    timed = {trial.label: trial.tflops for trial in without.trials if trial.tflops}
    assert max(timed, key=lambda label: timed[label]) == won.label and len(timed) >= 4
    reasons = {trial.reason for trial in without.trials if not trial.tflops}
    assert reasons == {"does not compile: no registers"}
    # The paper's figures are of its own problem.
    assert not report.is_papers and without.paper_tflops == 0.0
    assert report.slug == "ablation_float16_b1_s128_h2_d64_full"


def test_wrong_candidates_are_out_and_a_row_of_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_fakes(monkeypatch, "neither", lambda config: FAST, broken="nopipe")
    full, neither = report.rows
    assert isinstance(full.outcome, Won)
    assert isinstance(neither.outcome, Failed) and neither.outcome.reason.startswith("wrong result: batch 0")
    assert all(trial.tflops == 0.0 for trial in neither.trials)


def test_without_a_full_kernel_there_are_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_fakes(monkeypatch, "no-pipelining", lambda config: FAST, broken="r160_32")
    full, without = report.rows
    assert isinstance(full.outcome, Failed)
    assert isinstance(without.outcome, Won) and math.isnan(without.outcome.ratio)
    assert load_ablation(dump_ablation(report)).rows[0].outcome == full.outcome


def test_a_hang_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(self: FakeStopwatch) -> None:
        raise GpuLostError("the GPU did not finish within 30 s: a kernel hangs")

    monkeypatch.setattr(FakeStopwatch, "synchronize", hang)
    with pytest.raises(bench.CellLostError, match=r"hopper_fwd_fp16_d64_full_.*: the GPU did not finish"):
        run_fakes(monkeypatch, "neither", lambda config: FAST)


def test_clock_and_power_are_read_without_a_pause_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    soak = ablation.soak

    def note_soak(*arguments: object) -> Soak:
        seen.append("soak")
        return soak(*arguments)  # type: ignore[arg-type]  # handed on as they came

    def note_code(config: ForwardConfig) -> MachineCode:
        seen.append("code")
        return CODE

    monkeypatch.setattr(ablation, "soak", note_soak)
    report = run_fakes(monkeypatch, "neither,one-consumer", lambda config: FAST, inspect=note_code)
    assert len(report.won()) == 3 and seen == ["soak"] * 3 + ["code"] * 3


def test_a_run_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_fakes(monkeypatch, "", lambda config: FAST)
    assert report.elapsed is not None and report.elapsed.seconds > 0 and report.elapsed.compiled == 0
    phases = report.elapsed.phases
    assert next(iter(phases)) == "compiling what is missing" and len(phases) == ablation.PHASES
    assert 0 < sum(phases.values()) <= report.elapsed.seconds
    again = load_ablation(dump_ablation(report))
    assert (
        again.elapsed is not None
        and again.elapsed.compiled == 0
        and list(again.elapsed.phases) == list(phases)
    )
    assert render_elapsed(report).endswith(f", machine code {phases['machine code']:.1f}.")
    assert render_elapsed(replace(report, elapsed=Elapsed(45.0, 0))) == ""
    slow = replace(report, elapsed=Elapsed(45.0, 0))
    assert [(t.what, t.met) for t in elapsed_targets(slow)] == [("whole run, all kernels cached", False)]
    compiled = replace(report, elapsed=Elapsed(45.0, 44))
    assert [(t.what, t.met) for t in elapsed_targets(compiled)] == [("whole run, 44 kernels compiled", True)]
    # A run of some rows answers nothing, and neither does a report that does not say.
    assert elapsed_targets(replace(slow, rows=slow.rows[:2])) == []
    assert elapsed_targets(replace(slow, elapsed=None)) == []


# Reports


def won_row(name: str, tflops: float, spread: float = 0.004) -> Row:
    variant = VARIANTS[name]
    measured = Measured(tflops, 3.3, 0.011, 21, 2, 2.9e-4, 1665.0, 480.0, "config")
    soak = Soak(1.0, tflops * 0.97, 1590.0, 698.0)
    won = Won("config", "n128 changed", measured, tflops / 698.0, spread, soak, CODE)
    trials = (Trial("config", "n128 changed", tflops), Trial("other", "n96", 0.0, "too wide"))
    return Row(name, variant.title, variant.differs, variant.paper_tflops, won, trials)


def fake_report() -> AblationReport:
    """The paper's problem: pipelining is worth what the paper says, warp specialization is not."""
    lost = VARIANTS["one-consumer"]
    rows = (
        won_row(FULL, 698.0, 0.0),
        won_row("no-pipelining", 698.0 * 582 / 661),
        won_row("no-warp-specialization", 690.0, 0.031),
        Row(lost.name, lost.title, lost.differs, 0.0, Failed("no such kernel: tile_m is 64"), ()),
    )
    machine = {"gpu": "NVIDIA H200", "driver": "580"}
    return AblationReport(
        machine, "c0ffee" * 6, "2026-11-20T10:00:00Z", {"l2": "rotated"}, ABLATION, "float16", rows
    )


def text_of(renderable: object, width: int = 260) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_report_survives_json_line_by_line() -> None:
    report = fake_report()
    text = dump_ablation(report)
    again = load_ablation(text)
    assert dump_ablation(again) == text
    assert again.rows[3] == report.rows[3]
    assert [row.variant for row in again.rows] == [row.variant for row in report.rows]
    won = again.rows[1].outcome
    assert isinstance(won, Won) and won.code == CODE and won.soak.power_w == 698.0
    assert sum(line.startswith('  {"variant"') for line in text.splitlines()) == 4
    assert report.is_papers and report.slug == "ablation"
    with pytest.raises(ValueError, match="allowed: kind 'ablation'"):
        load_ablation(text.replace('"ablation"', '"forward"', 1))


def test_targets_hold_the_report_against_the_paper() -> None:
    targets = {t.what: t for t in ablation_targets(fake_report())}
    assert targets["full"].met and targets["full"].measured == "698 TFLOP/s"
    pipelining = targets["full over without GEMM-softmax pipelining"]
    assert pipelining.met and (pipelining.required[:4], pipelining.measured) == ("1.14", "1.136")
    specialization = targets["full over without warp specialization"]
    assert not specialization.met and specialization.measured == "1.012"
    spread = targets["spread of each ratio to full"]
    assert not spread.met and spread.measured == "3.1 % (without warp specialization)"
    other = replace(fake_report(), problem=replace(ABLATION, causal=True))
    assert [t.what for t in ablation_targets(other)] == ["spread of each ratio to full"]


def test_the_table_shows_figures_clock_code_and_failures() -> None:
    lines = text_of(ablation_table(fake_report())).splitlines()
    row = next(line for line in lines if "without GEMM-softmax" in line)
    for figure in (
        "614.6",
        "1.1 %",
        "0.880 ± 0.4 %",
        "582",
        "0.880",
        "1590",
        "698",
        "168",
        "208 KiB",
        "2.9e-04",
    ):
        assert figure in row, row
    failed = next(line for line in lines if "one consumer" in line)
    assert "failed" in failed and "tile_m is 64" in failed
    problems = problems_of(fake_report())
    assert "one consumer warpgroup: no such kernel: tile_m is 64" in problems
    assert "full, candidate n96: too wide" in problems


def test_the_page_tells_what_differs_and_who_stands_for_a_row() -> None:
    report = fake_report()
    page = render_page([report, replace(report, problem=replace(ABLATION, causal=True))], ["a.png", "b.png"])
    assert page.startswith("# Ablation\n")
    assert "- **without warp specialization**: No producer warp" in page
    assert "## b4 s8448 h16 d128, not causal, float16" in page and "## b4 s8448 h16 d128, causal" in page
    assert "Full over without GEMM-softmax pipelining: **1.136** (paper: 1.14)." in summary(report)
    assert "| without GEMM-softmax pipelining | **n128 changed** 615 |" in page
    assert "![TFLOP/s of each kernel](b.png)" in page
    assert "| one consumer warpgroup | failed | – |" in page


def test_the_page_tells_clock_from_cycles() -> None:
    assert render_clock(replace(fake_report(), rows=())) == []
    report = replace(fake_report(), machine={"gpu": "NVIDIA H200", "sms": 132})
    slower = replace(report.rows[1], outcome=with_clock(report.rows[1], 1332.0))
    heading, table, about, repeat, *others = render_clock(
        replace(report, rows=(report.rows[0], slower, *report.rows[2:]))
    )
    assert heading == "### Clock or cycles" and len(others) == 2
    # 698e12 / (132 * 1665e6) FLOP a cycle, of 4096; the slower clock hides that the row does more a cycle.
    assert "| full | 1665 | 3176 | 78 % | 1.000 | 1.000 | 1590 | 698 | 3226 | 1.000 | 1.03 |" in table
    assert "| without GEMM-softmax pipelining | 1332 | 3495 | 85 % | 0.880 | 1.101 |" in table
    assert "differ by 25.0 % at most" in about and "The peak is 4096 FLOP" in about
    assert "*full* and *without GEMM-softmax pipelining* are the same; alone they differ by 13.6 %" in repeat


def with_clock(row: Row, clock_mhz: float) -> Won:
    assert isinstance(row.outcome, Won)
    return replace(row.outcome, measured=replace(row.outcome.measured, clock_mhz=clock_mhz))


def test_without_readings_of_the_clock_nothing_is_said_of_it() -> None:
    report = fake_report()
    unread = replace(report.rows[1], outcome=with_clock(report.rows[1], math.nan))
    assert render_clock(replace(report, rows=(report.rows[0], unread))) == []


def test_the_plot_has_a_bar_for_each_row_and_the_papers_mark(tmp_path: Path) -> None:
    drawing = plot_ablation(fake_report(), tmp_path / "sub" / "ablation.svg").read_text()
    for row in fake_report().rows:
        assert row.title in drawing
    assert (
        "0.880 of full" in drawing and "no figure" in drawing and "FlashAttention-3 paper, table 2" in drawing
    )
    other = replace(fake_report(), rows=(replace(won_row(FULL, 700.0), paper_tflops=0.0),))
    assert "FlashAttention-3 paper" not in plot_ablation(other, tmp_path / "other.svg").read_text()


def test_rendering_takes_a_report_that_was_committed(tmp_path: Path) -> None:
    from benchmarks import render as render_script
    from hopper_attention.experiments.bench.render import markers
    from hopper_attention.experiments.bench.results import dump_forward
    from hopper_attention.experiments.timeline.spec import dump_timeline
    from tests.python.experiments.bench.test_results import fake_report as fake_forward
    from tests.python.experiments.timeline.test_timeline import fake_report as fake_timeline

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "forward_nvidia_h200.json").write_text(dump_forward(fake_forward()))
    (tmp_path / "README.md").write_text("\n".join([*markers("speed"), *markers("ablation"), ""]))
    page = tmp_path / "docs" / "results" / "ablation.md"
    arguments = ["--root", str(tmp_path)]
    assert render_script.main(arguments) == 0 and not page.exists()
    (results / "ablation_nvidia_h200.json").write_text(dump_ablation(fake_report()))
    assert render_script.main([*arguments, "--check"]) == 1
    assert render_script.main(arguments) == 0
    assert "![TFLOP/s of each kernel](ablation.png)" in page.read_text()
    assert (
        "| without GEMM-softmax pipelining | 615 | 0.880 | 582 | 0.880 |"
        in (tmp_path / "README.md").read_text()
    )
    assert (page.parent / "ablation.png").stat().st_size > 10_000
    assert (page.parent / "roofline.md").is_file()
    assert render_script.main([*arguments, "--check"]) == 0
    # Timelines have a page of their own, and the ablation's leads there.
    assert "(timeline.md)" not in page.read_text()
    (results / "timeline_nvidia_h200.json").write_text(dump_timeline(fake_timeline()))
    assert render_script.main(arguments) == 0
    assert "[timeline](timeline.md)" in page.read_text()
    assert (page.parent / "timeline.md").is_file() and (page.parent / "timeline_full.png").is_file()


def test_code_is_shown_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Ablation(ABLATION, "float16", parse_variants("one-consumer"))
    monkeypatch.setattr(ablation, "inspect_config", lambda config: CODE)
    monkeypatch.setattr(
        ablation, "compile_missing", lambda configs, jobs, done: {spec.shipped.name: "no registers"}
    )
    inspected = ablation.inspect_variants(spec, 1)
    assert inspected[0].code == Failed("does not compile: no registers")
    assert {entry.variant for entry in inspected} == {"full", "one-consumer"}
    text = text_of(code_table(inspected))
    for figure in ("does not compile", "m64 n128 s3", "208.0 KiB", "2296", "38", "178", "187"):
        assert figure in text
    narrow = text_of(code_table(inspected), 80)
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow
    for figure in ("2296", "208.0 KiB", "168", "38"):
        assert figure in narrow


# The command


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["ablation", *arguments])


def test_without_a_gpu_the_command_says_so() -> None:
    result = call("--device", "cpu")
    assert result.exit_code == 2
    assert "a Hopper GPU (cpu is not an NVIDIA GPU); with --compile-only" in result.stderr
    assert "Traceback" not in result.output


def test_compile_only_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ablation, "inspect_config", lambda config: CODE)
    monkeypatch.setattr(ablation, "compile_missing", lambda configs, jobs, done: {})
    out = tmp_path / "code.json"
    result = call("--compile-only", "--variants", "no-pipelining", "--dtype", "fp8", "--json", str(out))
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["problem"] == "bf16-b4-s8448-h16-d128-full" and data["precision"] == "fp8"
    assert data["candidates"][0]["config"] == FP8_D128.name
    assert data["candidates"][1]["code"]["instructions"]["wgmma"] == 38
    assert "pipelined=False" in result.output


def test_a_run_prints_draws_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ablation, "check_can_run", lambda device: None)
    monkeypatch.setattr(ablation, "run_ablation", lambda spec, setting, **more: fake_report())
    out, plot = tmp_path / "ablation.json", tmp_path / "ablation.svg"
    result = call("--device", "cpu", "--json", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert load_ablation(out.read_text()).rows[1].title in result.output
    assert "1.136" in result.output and plot.stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "b4"), "shape is 'b4', allowed: sizes such as"),
        (("--variants", "slow"), "variants is 'slow', allowed"),
        (("--device", "cuda:99"), "device is 'cuda:99', allowed"),
        (("--shape", "b1-s64-h1-d264", "--compile-only"), "head_dim 264"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and message in result.stderr
