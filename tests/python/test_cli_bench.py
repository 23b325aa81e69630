"""``hopper-attention bench`` and its kinds: what they print and write, and how they fail without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hopper_attention.cli import app
from hopper_attention.experiments.bench import latency as bench_latency
from hopper_attention.experiments.bench import run as bench_run
from hopper_attention.experiments.bench.results import dump_forward
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.features import spec as features_spec
from hopper_attention.experiments.features.spec import Workload
from hopper_attention.experiments.reports import dump_figures
from hopper_attention.experiments.serving import spec as serving_spec
from hopper_attention.experiments.serving.spec import ServingWorkload
from tests.python.experiments.bench.test_results import LATENCY, fake_report

ON_CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="checks what a machine without a GPU says")
TINY = "bf16-b1-s64-h1-d64-full"
SMALL = "bf16-b1-s256-h2-d64-full"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def succeed(*arguments: object) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


def test_help_names_every_kind() -> None:
    output = succeed("--help").output
    for kind in (
        "forward",
        "fp8",
        "backward",
        "latency",
        "scaling",
        "quantize",
        "features",
        "serving",
        "compare",
    ):
        assert kind in output


@pytest.mark.parametrize(
    ("kind", "report", "page"),
    [
        ("forward", "forward_", "forward.md"),
        ("fp8", "fp8_", "fp8.md"),
        ("backward", "backward_", "backward.md"),
        ("latency", "latency_", "forward.md"),
        ("scaling", "scaling_", "scaling.md"),
        ("quantize", "prepass_", "prepass.md"),
        ("features", "features_", "features.md"),
        ("serving", "serving_", "serving.md"),
    ],
)
def test_help_names_the_report_and_its_page(kind: str, report: str, page: str) -> None:
    words = " ".join(succeed(kind, "--help").output.split())
    assert f"{report}<gpu>.json" in words and page in words


@pytest.mark.parametrize("kind", [(), ("forward",)])
def test_forward_is_the_default(kind: tuple[str, ...], tmp_path: Path) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    shape = ("--shapes", TINY, "--peers", "ours,torch", "--device", "cpu", "--budget", 0.2)
    output = succeed(*kind, *shape, "--json", out, "--plot", plot).output
    data = json.loads(out.read_text())
    assert data["kind"] == "forward" and set(data["peers"]) == {"ours", "torch"}
    drawing = plot.read_text()
    assert (
        "head_dim 64, not causal" in drawing and "plain PyTorch" in drawing and "head_dim 128" not in drawing
    )
    assert "TFLOP/s" in output and str(plot) in output


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[str] = []
    run_cell = bench_run.Bench.run_cell

    def stop_at_second(self: bench_run.Bench, problem: Problem, *others: Any) -> Any:
        if cells:
            # What is on the disk by now is what a process that is killed leaves.
            assert [cell["seqlen_q"] for cell in json.loads(out.read_text())["cells"]] == [64]
            raise KeyboardInterrupt
        cells.append(problem.name)
        return run_cell(self, problem, *others)

    monkeypatch.setattr(bench_run.Bench, "run_cell", stop_at_second)
    out = tmp_path / "bench.json"
    result = call(
        "--shapes", f"{TINY},{SMALL}", "--peers", "ours", "--device", "cpu", "--budget", 0.2, "--json", out
    )
    assert result.exit_code == 130 and cells == [TINY]
    assert [cell["seqlen_q"] for cell in json.loads(out.read_text())["cells"]] == [64]
    assert "TFLOP/s" in result.stdout and "stopped; what had been measured is above" in result.stderr
    # No terminal is there that could show a bar.
    assert f"[1/2] {TINY}" in result.stderr and f"[2/2] {SMALL}" in result.stderr


def test_a_run_that_is_interrupted_at_once_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run.Bench, "run_cell", stop)
    result = call("--shapes", TINY, "--peers", "ours", "--device", "cpu", "--json", tmp_path / "bench.json")
    assert result.exit_code == 130 and not list(tmp_path.iterdir()) and "stopped" in result.stderr


def test_latency_of_one_small_shape(tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    few = ("--calls", 2, "--rounds", 1, "--first-calls", 0)
    output = succeed(
        "latency", "--shapes", TINY, "--peers", "torch,fa3", "--device", "cpu", *few, "--json", out
    ).output
    data = json.loads(out.read_text())
    assert data["kind"] == "latency" and data["small"][0]["peers"]["torch"]["ok"]
    assert "fa3: needs a CUDA device" in output and "CUDA graphs need a CUDA device" in output


def test_scaling_of_short_sequences(tmp_path: Path) -> None:
    out, plot = tmp_path / "scaling.json", tmp_path / "scaling.svg"
    sizes = ("--lengths", "64,128", "--tokens", 128, "--heads", 1, "--head-dim", 64, "--causal")
    run = ("--device", "cpu", "--budget", 0.2, "--json", out, "--plot", plot)
    output = succeed("scaling", *sizes, *run).output
    data = json.loads(out.read_text())
    assert [cell["seqlen_q"] for cell in data["cells"]] == [64, 64, 128]
    assert data["spec"]["causal"] is True and "64, batch 2" in output and plot.stat().st_size > 0


def test_quantization_of_a_small_problem() -> None:
    result = succeed("quantize", "--shapes", TINY, "--device", "cpu", "--budget", 0.1, "--json", "-")
    data = json.loads(result.stdout)
    assert data["kind"] == "prepass" and data["cells"][0]["ok"]
    assert set(data["cells"][0]["passes"]) == {"quantize", "copy"}
    assert "share of the copy" in result.stderr and "share of a copy's bandwidth" in result.stderr


def test_features_of_small_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Workload(lengths=(40, 24), heads=2, heads_kv=1, head_dim=16, is_packed=True)
    window = replace(packed, lengths=(50,), is_packed=False, window=(7, 0))
    monkeypatch.setattr(features_spec, "WORKLOADS", (packed, window))
    out, plot = tmp_path / "features.json", tmp_path / "features.svg"
    run = ("--device", "cpu", "--budget", 0.2, "--json", out, "--plot", plot)
    output = succeed("features", *run, "--inputs", "peaky").output
    data = json.loads(out.read_text())
    assert data["kind"] == "features" and {"ours", "ours_dense", "fa3", "fa4"} < set(data["peers"])
    assert [cell["name"].split("-")[1] for cell in data["cells"]] == ["packed", "1x50"]
    assert (
        all(cell["peers"]["ours"]["ok"] for cell in data["cells"])
        and "queries times 4" in data["method"]["inputs"]
    )
    assert "fa4: needs a CUDA device" in output and "window 8" in output and "Windows" in plot.read_text()
    succeed("features", "--only", "window", *run)
    assert [cell["workload"]["window"] for cell in json.loads(out.read_text())["cells"]] == [[7, 0]]


def test_serving_of_small_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = ServingWorkload(lengths=(40, 24), heads=2, heads_kv=1, head_dim=16)
    workloads = decode, replace(decode, page_size=8, queries=3)
    monkeypatch.setattr(serving_spec, "WORKLOADS", workloads)
    fp8 = replace(decode, lengths=(40, 40), is_fp8=True)
    monkeypatch.setattr(serving_spec, "ALL_WORKLOADS", (*workloads, fp8))
    out, plot = tmp_path / "serving.json", tmp_path / "serving.svg"
    run = ("--device", "cpu", "--budget", 0.2, "--json", out, "--plot", plot)
    output = succeed("serving", *run, "--inputs", "peaky").output
    data = json.loads(out.read_text())
    assert data["kind"] == "serving" and {"ours", "ours_plain", "fa3", "fa3_best"} < set(data["peers"])
    assert [cell["workload"]["page_size"] for cell in data["cells"]] == [0, 8]
    assert all(cell["peers"]["ours"]["ok"] for cell in data["cells"])
    assert "queries times 4" in data["method"]["inputs"] and data["cells"][1]["peers"]["ours_plain"]["ok"]
    assert "fa4: needs a CUDA device" in output and "pages of 8" in output
    assert "Ragged sequences" in plot.read_text()
    succeed("serving", "--only", "e4m3", "--all", *run)
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["peers"]["ours_fp8q"]["ok"] and cell["workload"]["is_fp8"]
    assert "only is 'e4m3', allowed" in call("serving", "--only", "e4m3", *run).stderr


def test_backward_of_a_small_problem(tmp_path: Path) -> None:
    out, plot = tmp_path / "backward.json", tmp_path / "backward.svg"
    run = ("--device", "cpu", "--budget", 0.2, "--json", out, "--plot", plot)
    output = succeed("backward", "--shapes", "bf16-b1-s96-h2-hk1-d64-causal", *run).output
    data = json.loads(out.read_text())
    rows = {"ours", "ours_deterministic", "fa3", "fa4", "cudnn", "fa2"}
    assert data["kind"] == "backward" and set(data["peers"]) == rows
    assert data["cells"][0]["peers"]["ours"]["ok"] and data["method"]["flops"].startswith("10*b*h*sq*sk*d")
    assert "fa3: its library (sglang-kernel) has the forward alone" in output
    assert "Attention, bf16 backward" in plot.read_text()


@pytest.mark.parametrize("words", [("compare",), ("--compare",)])
def test_reports_are_compared(words: tuple[str, ...], tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(dump_forward(fake_report(0.8)))
    b.write_text(dump_forward(fake_report(1.0)))
    assert "1.250" in succeed(*words, a, b).output
    assert "0.800" in succeed(*words, b, a, "--peers", "ours").output
    slower = call(*words, b, a, "--least", 0.97)
    assert slower.exit_code == 1
    assert "slower: ours on fp16-b4-s8448-h16-d128-full, 0.800 of before" in slower.output
    assert call(*words, a, b, "--least", 0.97).exit_code == 0


@ON_CPU_ONLY
@pytest.mark.parametrize(
    "kind", ["forward", "fp8", "backward", "latency", "scaling", "quantize", "features", "serving"]
)
def test_without_a_gpu_the_default_run_is_refused_before_anything_else(kind: str) -> None:
    option = {"scaling": "--lengths", "features": "--only", "serving": "--only"}.get(kind, "--shapes")
    for mistakes in ((), (option, "no such")):
        result = call(kind, *mistakes)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: bench needs a Hopper GPU") and "torch finds no GPU here" in line
        for instead in (
            "hopper-attention rmse",
            "explain --capability 9.0",
            f"--device cpu --shapes {SMALL}",
        ):
            assert instead in line
        assert "e+" not in line


def test_the_small_problem_that_is_advised_without_a_gpu_runs() -> None:
    succeed("--device", "cpu", "--shapes", SMALL, "--peers", "ours", "--budget", 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("scaling", "--lengths", "1q", "--device", "cpu"),
            "lengths is '1q', allowed: comma-separated lengths",
        ),
        (("latency", "--shapes", "small", "--device", "cpu"), "shape is 'small', allowed"),
        (("latency", "--calls", 0, "--device", "cpu"), "calls is 0, rounds is 11, allowed: 1 or more"),
        (("fp8", "--peers", "fa9", "--device", "cpu"), "peers is 'fa9', allowed"),
        (("backward", "--peers", "fa9", "--device", "cpu"), "peers is 'fa9', allowed"),
        (("features", "--peers", "fa9", "--device", "cpu"), "peers is 'fa9', allowed"),
        (("features", "--only", "tea", "--device", "cpu"), "only is 'tea', allowed: a part of a name"),
        (("features", "--device", "cpu"), "device is cpu, allowed there: small ones"),
        (("compare", "absent.json", "absent.json"), "absent.json"),
        (("quantize", "--device", "cuda:99"), "device is 'cuda:99', allowed"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[object, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


def test_reports_of_two_kinds_are_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(dump_forward(fake_report()))
    b.write_text(dump_figures(LATENCY))
    assert "allowed: the same kind" in call("compare", a, b).stderr
    assert call("fly").exit_code == 2


def test_the_default_small_shapes_begin_with_the_promised_one() -> None:
    problems = bench_latency.parse_small_shapes("")
    assert problems[0] == bench_latency.PROBLEM and len(problems) == len(bench_latency.SMALL_SHAPES) == 5
    assert any(problem.seqlen_q == 1 for problem in problems)
