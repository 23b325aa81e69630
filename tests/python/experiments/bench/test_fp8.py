"""The FP8 benchmark: its peers with stand-ins for the libraries, its targets, its reports and its commands."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from benchmarks import forward as forward_script
from benchmarks import fp8 as fp8_script
from benchmarks import render as render_script
from hopper_attention.cli import app
from hopper_attention.experiments.bench import checks as bench_checks
from hopper_attention.experiments.bench import fp8_peers as bench_fp8_peers
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench import render as bench_render
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.fp8_peers import FP8_PEERS, PER_HEAD, PER_TENSOR, CudnnForm
from hopper_attention.experiments.bench.plot import plot_forward
from hopper_attention.experiments.bench.results import (
    Cell,
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    dump_forward,
    is_ours,
    load_forward,
)
from hopper_attention.experiments.bench.spec import Problem, paper_grid
from hopper_attention.experiments.bench.suites import FP8, SUITES
from hopper_attention.experiments.bench.tables import forward_table
from hopper_attention.experiments.bench.targets import fp8_targets, throughput_targets
from hopper_attention.experiments.bench.timing import Effort
from hopper_attention.quantization import E4M3
from tests.python.experiments.fakes import FakeOperator

GROUPED = Problem("bfloat16", 2, 160, 160, 4, 2, 64, 64, causal=True)
SETTING = bench_peers.Setting("cpu")
DEFAULT_ROWS = ["ours", "ours_e2e", "ours_bf16", "ours_drop_in", "fa3", "cudnn"]


def error_of(peer: bench_peers.Peer, problem: Problem, inputs: bench_peers.Inputs, out: Tensor) -> float:
    """Error of the worst head on what the peer was given, all heads within its limits."""
    oracles = bench_checks.compute_oracles(problem, peer.rounding(inputs))
    error, wrong = bench_checks.check_output(problem, out, oracles, peer.limits(problem.dtype))
    assert wrong == ""
    return error


# Peers


def test_six_rows_run_by_default_and_each_says_what_keeps_it_from_running() -> None:
    assert [peer.name for peer in bench_peers.parse_peers(FP8.default_peers, FP8.registry)] == DEFAULT_ROWS
    infos = bench_peers.inspect_peers(tuple(FP8_PEERS.values()), SETTING)
    absent = {name: info.unavailable for name, info in infos.items() if info.unavailable}
    needs_gpu = "needs a CUDA device, this run is on cpu"
    assert absent == dict.fromkeys(("fa3", "cudnn", "cudnn_bshd", "cudnn_lean"), needs_gpu)
    with pytest.raises(ValueError, match=r"peers is 'ours,fa4', allowed: .* out of ours, ours_e2e"):
        bench_peers.parse_peers("ours,fa4", FP8.registry)


def test_two_level_accumulation_is_a_row_on_request() -> None:
    (peer,) = bench_peers.parse_peers("ours_two_level", FP8.registry)
    inputs = bench.draw_inputs(GROUPED, 0, "cpu")
    prepared = peer.prepare(GROUPED, inputs, SETTING)
    expected = FP8_PEERS["ours"].prepare(GROUPED, inputs, SETTING).launch()
    assert torch.equal(prepared.launch(), expected) and is_ours(peer.name)
    _, note = bench_fp8_peers.choose_backend(GROUPED, bench_peers.Setting("cuda"), two_level=True)
    assert note.endswith("_twolevel")


def test_cudnn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = bench_peers.Setting("cuda:0")
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "pip install nvidia-cudnn-frontend" in bench_fp8_peers.why_no_cudnn(on_gpu)
    old = SimpleNamespace(backend_version=lambda: 91900, pygraph=object, __version__="1.0")
    monkeypatch.setitem(sys.modules, "cudnn", old)
    assert bench_fp8_peers.why_no_cudnn(on_gpu) == "cuDNN front end 1.0 has no sdpa_fp8"


@pytest.mark.parametrize(("shared", "scales"), [(PER_HEAD, (2, 1, 2, 1, 1)), (PER_TENSOR, (1, 1, 1, 1, 1))])
def test_scaled_inputs_use_all_of_e4m3(shared: tuple[int, ...], scales: tuple[int, ...]) -> None:
    inputs = bench.draw_inputs(GROUPED, 0, "cpu")
    for scaled, x in zip(bench_fp8_peers.scale_inputs(inputs, shared), vars(inputs).values(), strict=True):
        assert (scaled.data.dtype, scaled.data.shape) == (E4M3, x.shape)
        assert scaled.descale.dtype == torch.float32 and scaled.descale.shape == scales
        by_head = scaled.data.float().abs().unflatten(2, (2, -1)).amax(PER_HEAD)
        assert by_head.max() == 448 and (by_head == 448).all() == (shared == PER_HEAD)
        # An e4m3 has 3 bits of mantissa: rounded by 2^-4 of itself, or below 2^-6 by half a step of 2^-9.
        bound = (x.float().abs() / 16).maximum(scaled.descale.max() * 2**-10) * 1.0001
        assert ((scaled.values() - x.float()).abs() <= bound).all()


FA3_SCHEMA = (
    "sgl_kernel::fwd(Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, int num_splits) "
    "-> (Tensor, Tensor)"
)


class FakeFa3(FakeOperator):
    """Stands for FlashAttention-3's operator: attends to the data times its descales."""

    schema = FA3_SCHEMA

    def compute(self, call: dict[str, Any]) -> tuple[Tensor, ...]:
        tensors = []
        for name in "qkv":
            data, descale = call[name].float(), call[f"{name}_descale"]
            of_head = descale.repeat_interleave(data.shape[2] // descale.shape[1], 1)
            tensors.append(data * of_head[:, None, :, None])
        out = bench_peers.prepare_torch(GROUPED, bench_peers.Inputs(*tensors), SETTING).launch()
        return out.bfloat16(), torch.empty(0)


def test_fa3_gets_e4m3_and_descales_by_batch_and_kv_head(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFa3().installed(monkeypatch)
    inputs = bench.draw_inputs(GROUPED, 0, "cpu")
    prepared = FP8_PEERS["fa3"].prepare(GROUPED, inputs, SETTING)
    out = prepared.read(prepared.launch())
    (call,) = fake.calls
    assert [call[name].dtype for name in "qkv"] == [E4M3] * 3
    assert call["q"].shape == (2, 160, 4, 64) and call["k"].shape == (2, 160, 2, 64)
    for name in ("q_descale", "k_descale", "v_descale"):
        assert call[name].shape == (2, 2) and call[name].dtype == torch.float32
    assert (call["is_causal"], call["softmax_scale"]) == (True, 0.125)
    assert (call["out"], call["window_size_left"], call["num_splits"]) == (None, -1, 1)
    # The stand-in rounds nothing but its output, so a descale in a wrong place would show.
    assert error_of(FP8_PEERS["fa3"], GROUPED, inputs, out) < 4e-3


class FakeTensor:
    """A tensor of a cuDNN graph: remembers what was set."""

    def __init__(self, name: str, **given: Any) -> None:
        self.name, self.given = name, given

    def __getattr__(self, method: str) -> Any:
        if not method.startswith("set_"):
            raise AttributeError(method)

        def setter(value: Any) -> FakeTensor:
            self.given[method[4:]] = value
            return self

        return setter


class FakeGraph:
    """Stands for ``cudnn.pygraph``: the FP8 formula with every scalar where cuDNN's documentation has it."""

    built: ClassVar[list[FakeGraph]] = []

    def __init__(self, **settings: Any) -> None:
        self.settings, self.attention = settings, {}

    def tensor(self, **given: Any) -> FakeTensor:
        return FakeTensor(**given)

    def sdpa_fp8(self, **given: Any) -> list[FakeTensor | None]:
        self.attention = given
        self.results = [FakeTensor(name) for name in ("out", "amax_s", "amax_o")]
        return [self.results[0], None, *self.results[1:]]

    def build(self, modes: Sequence[str]) -> None:
        assert modes == ["A", "FALLBACK"]
        FakeGraph.built.append(self)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, buffers: dict[FakeTensor, Tensor], workspace: Tensor, handle: str) -> None:
        assert handle == "handle" and workspace.dtype == torch.uint8
        for tensor, buffer in buffers.items():
            assert tuple(buffer.shape) == tuple(tensor.given["dim"])
            assert buffer.stride() == tuple(tensor.given["stride"])
        x = {tensor.name: buffer.float() for tensor, buffer in buffers.items()}
        group = x["q"].shape[1] // x["k"].shape[1]
        k, v = (x[name].repeat_interleave(group, 1) for name in "kv")
        scores = x["q"] @ k.mT * x["descale_q"] * x["descale_k"] * self.attention["attn_scale"]
        if self.attention.get("right_bound") == 0:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        rounded = (p * x["scale_s"]).to(E4M3).float()
        o = rounded @ v * x["descale_s"] * x["descale_v"] / p.sum(-1, keepdim=True)
        for tensor, buffer in buffers.items():
            if tensor.name == "out":
                buffer.copy_((o * x["scale_o"]).to(E4M3))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for cuDNN's front end; the list gets the streams that it is told to run on."""
    told: list[int] = []
    fake = SimpleNamespace(
        data_type=SimpleNamespace(FLOAT="FLOAT", FP8_E4M3="FP8_E4M3"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        pygraph=FakeGraph,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: told.append(stream),
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(FakeGraph, "built", [])
    bench_fp8_peers.build_cudnn_plan.cache_clear()
    bench_fp8_peers.cudnn_handle.cache_clear()
    yield told
    bench_fp8_peers.build_cudnn_plan.cache_clear()
    bench_fp8_peers.cudnn_handle.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["cudnn", "cudnn_bshd", "cudnn_lean"])
def test_cudnn_gets_every_scalar_in_its_place(streams: list[int], name: str, causal: bool) -> None:
    problem = replace(GROUPED, causal=causal, head_dim_v=32)
    inputs = bench.draw_inputs(problem, 0, "cpu")
    prepared = FP8_PEERS[name].prepare(problem, inputs, SETTING)
    raw = prepared.launch()
    assert raw.dtype == E4M3 and streams == [7]
    # e4m3 for P and for the output, and nothing else: 3.7e-2 on N(0, 1).
    assert 1e-2 < error_of(FP8_PEERS[name], problem, inputs, prepared.read(raw)) < 4.5e-2
    (graph,) = FakeGraph.built
    assert graph.attention["generate_stats"] is False
    assert graph.attention.get("right_bound") == (0 if causal else None)
    strides = graph.attention["q"].given["stride"]
    assert strides == ((160 * 256, 64, 256, 1) if name == "cudnn_bshd" else (4 * 160 * 64, 160 * 64, 64, 1))
    written = [tensor.name for tensor in graph.results if tensor.given.get("output")]
    assert written == (["out", "amax_o"] if name == "cudnn_lean" else ["out", "amax_s", "amax_o"])


def test_cudnn_builds_one_plan_for_all_input_sets(streams: list[int]) -> None:
    sets = [bench.draw_inputs(GROUPED, seed, "cpu") for seed in (0, 1)]
    first, second = (FP8_PEERS["cudnn"].prepare(GROUPED, inputs, SETTING) for inputs in sets)
    assert len(FakeGraph.built) == 1
    error_of(FP8_PEERS["cudnn"], GROUPED, sets[0], first.read(first.launch()))
    error_of(FP8_PEERS["cudnn"], GROUPED, sets[1], second.read(second.launch()))


def test_cudnn_refuses_a_mask_that_it_would_align_otherwise(streams: list[int]) -> None:
    problem = replace(GROUPED, seqlen_k=200)
    inputs = bench.draw_inputs(problem, 0, "cpu")
    with pytest.raises(NotImplementedError, match="aligned top-left"):
        bench_fp8_peers.prepare_cudnn_fp8(problem, inputs, SETTING, CudnnForm())


# A whole run


@pytest.fixture(scope="module")
def cpu_report() -> ForwardReport:
    """A run of the rows that need no GPU, and of two that are wrong in the ways that the checks must find."""

    def enlarge_v(problem: Problem, inputs: bench_peers.Inputs, setting: bench_peers.Setting) -> Any:
        larger = replace(inputs, v=inputs.v * 1.1)
        return bench_fp8_peers.prepare_ours_fp8(problem, larger, setting)

    def refuse(*arguments: object) -> bench_peers.Prepared:
        raise RuntimeError("no engine for this head_dim\nmore")

    ours = FP8_PEERS["ours"]
    rows = (
        *(FP8_PEERS[name] for name in DEFAULT_ROWS),
        replace(ours, name="scaled", prepare=enlarge_v),
        replace(ours, name="unable", prepare=refuse),
        replace(FP8_PEERS["ours_e2e"], name="too_strict", limits=bench_fp8_peers.kernel_limits),
    )
    small = replace(GROUPED, batch=1, seqlen_q=96, seqlen_k=96, heads=2, heads_kv=1)
    problems = [small, replace(small, causal=False, dtype="float16")]
    effort = Effort(measure_s=1e-6, min_rounds=1, max_rounds=1)
    return bench.run_forward(problems, rows, SETTING, effort, suite=FP8, commit="c0ffee")


def test_rows_of_ours_run_and_are_checked_on_what_they_were_given(cpu_report: ForwardReport) -> None:
    assert cpu_report.kind == "fp8"
    for cell in cpu_report.cells:
        errors = {n: r.error for n, r in cell.peers.items() if isinstance(r, Measured)}
        # Rounding P alone; that and the inputs; rounding to 16 bits.
        assert 1e-2 < errors["ours"] < 3.2e-2 < errors["ours_e2e"] < 7e-2
        assert errors["ours_bf16"] < 6e-3
        assert cell.peers["ours"].note == "reference"
        assert cell.best_peer == "too_strict" and not math.isnan(cell.gain)


def test_failures_are_shown_not_dropped(cpu_report: ForwardReport) -> None:
    cell = cpu_report.cells[0]
    assert cell.peers["unable"] == Failed("RuntimeError: no engine for this head_dim")
    scaled = cell.peers["scaled"]
    assert isinstance(scaled, Failed)
    expected = r"wrong result: batch 0, head 0: error (1\.0|9\.)\S+ against float64, allowed 6.0e-02"
    assert re.fullmatch(expected, scaled.reason)
    assert cpu_report.peers["cudnn"].unavailable == "needs a CUDA device, this run is on cpu"
    lines = bench_render.problems_of(cpu_report)
    assert "cudnn: needs a CUDA device, this run is on cpu" in lines
    assert f"unable on {cell.problem.name}: RuntimeError: no engine for this head_dim" in lines


def test_the_report_says_what_was_given_and_which_error_was_allowed(cpu_report: ForwardReport) -> None:
    method = cpu_report.method
    assert "fa3 with a scale by (batch, kv_head)" in method["inputs"]
    assert (
        "bf16 ours, ours_drop_in, scaled, unable, too_strict: 6.0e-02 of a head, 1.5e-01 of a row"
        in method["allowed error"]
    )
    assert "bf16 ours_e2e: 8.0e-02 of a head" in method["allowed error"]


def test_e4m3_inputs_need_twice_the_sets_to_leave_the_cache() -> None:
    l2_bytes = 60 * 2**20
    assert {bench.count_input_sets(p, l2_bytes, FP8.compression) for p in paper_grid()} == {2}
    assert {bench.count_input_sets(p, l2_bytes) for p in paper_grid()} == {1}


# Targets


def measured(tflops: float) -> Measured:
    return Measured(tflops, 1.0 / 3, 0.0123456, 9, 4, 2.5e-2, 1470.0, 694.0, "config")


SPEEDS = {64: 820.0, 128: 1100.0, 256: 1300.0}


def fake_report(ratio: float = 1.2, gain: float = 1.4, failing: str = "") -> ForwardReport:
    """The grid; ours over cuDNN by ``ratio``, end to end over 16 bits by ``gain``, one row ``failing`` once."""
    cells = []
    for problem in paper_grid():
        ours = SPEEDS[problem.head_dim]
        speeds = {"ours": ours, "ours_e2e": 700.0 * gain, "ours_bf16": 700.0, "fa3": ours / ratio / 1.1}
        speeds["cudnn"] = ours / ratio
        results: dict[str, Measured | Failed] = {name: measured(speed) for name, speed in speeds.items()}
        if problem.name == "bf16-b4-s4096-h16-d128-causal" and failing:
            results[failing] = Failed("no engine")
        cells.append(Cell(problem, 2, 1470.0, 690.0, results))
    info = {name: PeerInfo(f"Peer {name}", "1.0", "") for name in DEFAULT_ROWS}
    machine = {"gpu": "NVIDIA H200", "driver": "580"}
    return ForwardReport(machine, "c0ffee" * 6, "2026-11-20T10:00:00Z", {}, info, tuple(cells), "fp8")


def test_ratio_and_gain_compare_the_right_rows() -> None:
    cell = fake_report(1.2, 1.4).cells[0]
    assert cell.best_peer == "cudnn"  # not a row of ours, although ours_e2e is faster
    assert cell.ratio == pytest.approx(1.2) and cell.gain == pytest.approx(1.4)
    without = replace(cell, peers={**cell.peers, "cudnn": Failed("no engine")})
    assert without.best_peer == "fa3" and without.ratio == pytest.approx(1.32)
    assert math.isnan(replace(cell, peers={**cell.peers, "ours_bf16": Failed("broke")}).gain)


def test_targets_are_those_that_were_promised() -> None:
    targets = fp8_targets(fake_report())
    assert [target.required for target in targets] == [
        ">= 1.00", ">= 1.10", ">= 800 TFLOP/s", ">= 1050 TFLOP/s", ">= 1250 TFLOP/s", ">= 1.30",
    ]  # fmt: skip
    assert all(target.met for target in targets)
    assert targets[3].what == "FP8 kernel, bf16-b1-s16384-h16-d128-full"
    assert targets[3].measured == "1100 TFLOP/s"
    assert targets[5].what.endswith("bf16-b1-s16384-h16-d128-full") and targets[5].measured == "1.40"
    assert throughput_targets(fake_report()) == targets


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({"ratio": 1.05}, [True, False, True, True, True, True]),
        ({"ratio": 0.99}, [False, False, True, True, True, True]),
        ({"gain": 1.29}, [True, True, True, True, True, False]),
        ({"failing": "ours"}, [False, False, True, True, True, True, False]),
        ({"failing": "ours_e2e"}, [True, True, True, True, True, True, False]),
        ({"failing": "cudnn"}, [True, True, True, True, True, True]),
    ],
)
def test_a_promise_that_is_not_kept_shows(change: dict[str, Any], met: list[bool]) -> None:
    targets = fp8_targets(fake_report(**change))
    assert [target.met for target in targets] == met
    if change.get("failing") == "ours_e2e":
        assert targets[-1].measured == "failed: bf16-b4-s4096-h16-d128-causal (ours_e2e)"


def test_slow_kernels_miss_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPEEDS, 256, 1249.0)
    assert [target.met for target in fp8_targets(fake_report())] == [True, True, True, True, False, True]
    assert fp8_targets(replace(fake_report(), cells=())) == []


# Reports


def text_of(renderable: object) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_report_survives_json_and_is_not_taken_for_another_kind() -> None:
    report = fake_report(failing="cudnn")
    text = dump_forward(report)
    again = load_forward(text, "fp8")
    assert again.kind == "fp8" and dump_forward(again) == text
    assert again.peers == report.peers and len(again.cells) == 36
    failed = [cell.problem.name for cell in again.cells if cell.peers["cudnn"] == Failed("no engine")]
    assert failed == ["bf16-b4-s4096-h16-d128-causal"]
    with pytest.raises(ValueError, match="report is kind 'fp8', schema 1, allowed: kind 'forward'"):
        load_forward(text)


def test_end_to_end_stands_next_to_the_kernel_everywhere() -> None:
    report = fake_report(failing="cudnn")
    table = text_of(forward_table(report))
    assert "Forward, FP8, TFLOP/s" in table and "e2e/bf16" in table
    row = next(line for line in table.splitlines() if "b4 s4096 h16" in line and "causal" in line)
    for figure in ("1100", "980", "700", "833", "failed", "1.32", "1.40"):
        assert figure in row, row

    text = bench_render.render_grid(report) + bench_render.summary(report)
    cells = "1100 (1.20) / 980 | " * 3 + "1100 (1.32) / 980 | " + "1100 (1.20) / 980 | " * 2
    assert f"| 128, causal | {cells.strip()}" in text
    assert "over the fastest of Peer fa3, Peer cudnn in the same interleaved run" in text
    longest = "bf16-b1-s16384-h16-d128-full"
    assert f"geometric mean **1.40**, **1.40** at `{longest}`." in text

    page = bench_render.render_page(report, None, None, "fp8.png")
    assert page.startswith("# Forward, FP8: results\n")
    assert (
        "| problem | ours | ours_e2e | ours_bf16 | ours_drop_in | fa3 | cudnn | ratio | e2e/bf16 | spread of ours, % |"
        in page
    )
    assert "| FP8 forward, geometric mean over the best peer | >= 1.10 | 1.203 of 36 cells | yes |" in page
    assert "- cudnn on bf16-b4-s4096-h16-d128-causal: no engine" in page


SPEED_MARKERS = bench_render.markers("speed")


def test_rendering_takes_the_fp8_report_once_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, arguments = tmp_path / "benchmarks" / "results", ["--root", str(tmp_path)]
    results.mkdir(parents=True)
    sixteen_bit = replace(fake_report(), kind="forward")
    (results / "forward_nvidia_h200.json").write_text(dump_forward(sixteen_bit))
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(["# Title", *SPEED_MARKERS, "last words", ""]))
    assert render_script.main(arguments) == 0
    assert render_script.main([*arguments, "--check"]) == 0
    assert not (tmp_path / "docs" / "results" / "fp8.md").exists()
    assert "FP8 kernel alone" not in readme.read_text()

    (results / "fp8_nvidia_h200.json").write_text(dump_forward(fake_report()))
    assert render_script.main([*arguments, "--check"]) == 1
    assert render_script.main(arguments) == 0
    assert render_script.main([*arguments, "--check"]) == 0

    text = readme.read_text()
    assert text.count("1100 (1.20)") == 8 and text.count("980 (1.40)") == 12
    assert text.endswith("\nlast words\n")
    assert (tmp_path / "docs" / "results" / "fp8.png").stat().st_size > 20_000
    assert (tmp_path / "docs" / "results" / "fp8.md").read_text().startswith("# Forward, FP8: results")
    assert (tmp_path / "docs" / "results" / "forward.md").read_text().startswith("# Forward, 16 bit: results")


def test_the_plot_shows_all_rows(tmp_path: Path) -> None:
    drawing = plot_forward(fake_report(), tmp_path / "plot.svg").read_text()
    assert "Attention, FP8 forward" in drawing
    assert [name for name in DEFAULT_ROWS if f"Peer {name}" not in drawing] == []


# Commands


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_runs_small_shapes_anywhere(tmp_path: Path) -> None:
    out = tmp_path / "fp8.json"
    shape = ("--shapes", "bf16-b1-s96-h1-d64-causal", "--device", "cpu", "--budget", 0.1)
    result = call("bench", "fp8", *shape, "--json", out)
    assert result.exit_code == 0, result.output
    report = load_forward(json.dumps(json.loads(out.read_text())), "fp8")
    assert set(report.peers) == set(DEFAULT_ROWS) and len(report.cells) == 1
    assert "e2e/bf16" in result.output and "cudnn: needs a CUDA device" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("bench", "fp8", "--device", "cpu"),
            "device is cpu, allowed there: small ones, as bf16-b1-s256-h2-d64-full",
        ),
        (("bench", "fp8", "--device", "cuda:99"), "device is 'cuda:99', allowed"),
        (("bench", "fp8", "--peers", "fa4", "--device", "cpu", "--shapes", "bf16-b1-s8-h1-d64"), "fa4"),
        (
            ("bench", "forward", "--device", "cpu"),
            "device is cpu, allowed there: small ones, as bf16-b1-s256-h2-d64-full",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and result.stderr.count("error: ") == 1


def test_an_unknown_benchmark_is_refused() -> None:
    assert call("bench", "fp4").exit_code == 2
    assert set(SUITES) == {"forward", "fp8", "backward"}


def test_the_script_is_the_forward_script_with_another_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fp8_script.main is forward_script.main
    assert forward_script.main(["--device", "cpu"], FP8) == 2
    assert "error: the problems are" in capsys.readouterr().err
    out = tmp_path / "fp8.json"
    small = ["--shapes", "bf16-b1-s96-h1-d64-full", "--device", "cpu", "--rounds", "1", "--budget", "0.1"]
    assert forward_script.main([*small, "--peers", "ours,ours_bf16", "--out", str(out)], FP8) == 0
    report = load_forward(out.read_text(), "fp8")
    assert list(report.peers) == ["ours", "ours_bf16"]
    assert forward_script.default_path(fake_report()).name == "fp8_nvidia_h200.json"
    assert forward_script.main(["--compare", str(out), str(out)], FP8) == 0
    assert capsys.readouterr().out.count("1.000") == 3  # two rows of ours, and their mean
