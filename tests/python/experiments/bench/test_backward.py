"""The backward benchmark: its gradients against autograd, its peers on a CPU, its targets and its reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import backward as backward_script
from benchmarks import forward as forward_script
from benchmarks import render as render_script
from cute_kernels.backward import step
from hopper_attention.backends import Target
from hopper_attention.experiments.bench import backward_peers as bench_backward_peers
from hopper_attention.experiments.bench import gradients as bench_gradients
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench import render as bench_render
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.backward_peers import BACKWARD_PEERS, GRADIENT_LIMITS
from hopper_attention.experiments.bench.compare import compare
from hopper_attention.experiments.bench.peers import Inputs, Limits, Setting, inspect_peers, parse_peers
from hopper_attention.experiments.bench.results import (
    Cell,
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    dump_forward,
    load_forward,
)
from hopper_attention.experiments.bench.spec import Problem, paper_grid
from hopper_attention.experiments.bench.suites import BACKWARD
from hopper_attention.experiments.bench.tables import forward_table
from hopper_attention.experiments.bench.targets import backward_targets, throughput_targets
from hopper_attention.experiments.bench.timing import Effort
from hopper_attention.reference import attention_naive

SETTING = Setting("cpu")
GROUPED = Problem("bfloat16", 2, 70, 90, 4, 2, 64, 48, causal=True)
SQUARE = Problem("bfloat16", 2, 96, 96, 4, 4, 64, 64, causal=True)
DEFAULT_ROWS = ["ours", "ours_deterministic", "fa3", "fa4", "cudnn", "fa2"]


def autograd(problem: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
    """Float64 gradients of whole tensors."""
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    dout = bench_gradients.draw_output_gradient(problem, "cpu").double()
    return torch.autograd.grad(attention_naive(*leaves, causal=problem.causal)[0], leaves, dout)


# The check


@pytest.mark.parametrize(
    "problem",
    [GROUPED, replace(GROUPED, causal=False), replace(GROUPED, seqlen_q=90, seqlen_k=40)],
    ids=lambda problem: problem.name,
)
@pytest.mark.parametrize("chunk_scores", [2**20, 700])
def test_oracles_are_autograds(problem: Problem, chunk_scores: int) -> None:
    inputs = bench.draw_inputs(problem, 0, "cpu")
    right = autograd(problem, inputs)
    oracles = bench_gradients.compute_gradient_oracles(problem, inputs, chunk_scores)
    assert [(oracle.batch, oracle.head_kv) for oracle in oracles] == [(0, 0), (1, 1)]
    error, wrong = bench_gradients.check_gradients(problem, right, oracles, Limits(1e-12, 1e-11))
    assert wrong == "" and error < 1e-12


def test_wrong_gradients_are_found() -> None:
    inputs = bench.draw_inputs(GROUPED, 0, "cpu")
    oracles = bench_gradients.compute_gradient_oracles(GROUPED, inputs)
    right = autograd(GROUPED, inputs)

    def verdict(index: int, change: Any) -> str:
        gradients = [x.clone() for x in right]
        gradients[index] = change(gradients[index])
        return bench_gradients.check_gradients(GROUPED, gradients, oracles, GRADIENT_LIMITS["bfloat16"])[1]

    def no_row(x: Tensor) -> Tensor:
        x[0, 20, 0] = 0.0
        return x

    def one_nan(x: Tensor) -> Tensor:
        x[1, 3, 1, 5] = math.nan
        return x

    for index, name in enumerate(("dq", "dk", "dv")):
        assert verdict(index, lambda x: x) == ""
        assert f"{name} of batch 0, kv head 0: error" in verdict(index, lambda x: x * 1.02)
        assert f"{name} of batch 0, kv head 0: " in verdict(index, no_row)
        assert f"1 of {right[index].numel()} of {name} are not finite" in verdict(index, one_nan)
        assert verdict(index, lambda x: x[:, 1:]).startswith(f"{name} is (2, ")


# Peers


def test_six_rows_run_by_default_and_each_says_what_keeps_it_from_running() -> None:
    assert [peer.name for peer in parse_peers(BACKWARD.default_peers, BACKWARD.registry)] == DEFAULT_ROWS
    infos = inspect_peers(tuple(BACKWARD_PEERS.values()), SETTING)
    absent = {name: info.unavailable for name, info in infos.items() if info.unavailable}
    assert absent.pop("fa3") == "its library (sglang-kernel) has the forward alone"
    assert absent == dict.fromkeys(
        ("fa4", "cudnn", "fa2", "flex", "ampere"), "needs a CUDA device, this run is on cpu"
    )
    with pytest.raises(NotImplementedError, match="has the forward alone"):
        BACKWARD_PEERS["fa3"].prepare(SQUARE, bench.draw_inputs(SQUARE, 0, "cpu"), SETTING)


def test_flex_is_differentiated_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled FlexAttention has no backward on a CPU: SDPA stands for it.
    def attention(q: Tensor, k: Tensor, v: Tensor, block_mask: None, enable_gqa: bool) -> Tensor:
        assert block_mask is None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    monkeypatch.setattr(bench_peers, "compile_flex", lambda problem: attention)
    problem = replace(GROUPED, causal=False)
    inputs = bench.draw_inputs(problem, 0, "cpu")
    prepared = bench_backward_peers.prepare_flex(problem, inputs, SETTING)
    oracles = bench_gradients.compute_gradient_oracles(problem, inputs)
    for _ in range(2):  # a launch may be repeated
        gradients = prepared.read(prepared.launch())
        error, wrong = bench_gradients.check_gradients(
            problem, gradients, oracles, GRADIENT_LIMITS["bfloat16"]
        )
        assert wrong == "" and error > 0


@pytest.mark.parametrize("problem", [GROUPED, SQUARE], ids=lambda problem: problem.name)
@pytest.mark.parametrize("name", ["ours", "torch", "sdpa"])
def test_peers_give_gradients_again_and_again(name: str, problem: Problem) -> None:
    inputs = bench.draw_inputs(problem, 0, "cpu")
    if name == "sdpa":
        if problem.seqlen_q != problem.seqlen_k:
            with pytest.raises(NotImplementedError, match="aligned top-left"):
                BACKWARD_PEERS["cudnn"].prepare(problem, inputs, SETTING)
            return
        prepared = bench_backward_peers.prepare_sdpa(problem, inputs, SETTING, SDPBackend.MATH)
    else:
        prepared = BACKWARD_PEERS[name].prepare(problem, inputs, SETTING)
    oracles = bench_gradients.compute_gradient_oracles(problem, inputs)
    for _ in range(2):
        gradients = prepared.read(prepared.launch())
        error, wrong = bench_gradients.check_gradients(
            problem, gradients, oracles, GRADIENT_LIMITS["bfloat16"]
        )
        assert wrong == "" and error > 1e-4
    assert not inputs.q.requires_grad


def test_on_a_gpu_only_the_kernel_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("fake H200", (9, 0), assume_installed=True)
    monkeypatch.setattr(bench_backward_peers, "target_of", lambda device: target)
    inputs, on_gpu = bench.draw_inputs(SQUARE, 0, "cpu"), Setting("cuda")
    note = bench_backward_peers.describe_ours(SQUARE, inputs, on_gpu)
    assert note == "hopper_bwd_bf16_d64_causal_m64n128s2_r240_24_tile"
    long = replace(SQUARE, seqlen_q=640, seqlen_k=640)
    note = bench_backward_peers.describe_ours(long, bench.draw_inputs(long, 0, "cpu"), on_gpu)
    assert note == "hopper_bwd_bf16_d64_causal_m128n128s2_r240_24"
    wide = replace(SQUARE, head_dim=192, head_dim_v=192)
    note = bench_backward_peers.describe_ours(wide, bench.draw_inputs(wide, 0, "cpu"), on_gpu)
    assert note == "hopper_bwd_bf16_d192_causal_m64n128s2_r240_24_pair"
    monkeypatch.setattr(step, "MAX_BATCH_OR_HEADS", 0)
    with pytest.raises(NotImplementedError, match="the Hopper backward kernel takes at most 0: split it"):
        bench_backward_peers.describe_ours(SQUARE, inputs, on_gpu)


def test_the_kernel_without_wgmma_is_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"cuda": Target("fake H200", (9, 0), assume_installed=True)}
    monkeypatch.setattr(bench_backward_peers, "target_of", lambda device: targets["cuda"])
    asked: list[tuple[str | None, bool]] = []

    def attention(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool, backend: str | None
    ) -> Tensor:
        asked.append((backend, deterministic))
        return attention_naive(q, k, v, causal=causal)[0].to(q.dtype)

    monkeypatch.setattr(bench_backward_peers, "flash_attn_func", attention)
    monkeypatch.setattr(
        bench_backward_peers, "draw_output_gradient", lambda *_: torch.ones(2, 200, 4, 64).bfloat16()
    )
    problem = replace(SQUARE, seqlen_q=200, seqlen_k=200)
    inputs, on_gpu = bench.draw_inputs(problem, 0, "cpu"), Setting("cuda")
    for name, arch in (("ampere", "sm_90a"), ("ours", ""), ("ours_deterministic", "")):
        prepared = BACKWARD_PEERS[name].prepare(problem, inputs, on_gpu)
        assert prepared.note.startswith(
            f"ampere_bwd_{arch}_bf16_d64_causal_" if arch else "hopper_bwd_bf16_d64_"
        )
        assert ("ordered" in prepared.note) == (name == "ours_deterministic")
        assert len(prepared.read(prepared.launch())) == 3
    # Its forward runs on the same backend.
    assert asked == [("ampere", False), (None, False), (None, True)]
    targets["cuda"] = Target("fake A100", (8, 0), assume_installed=True)
    note = bench_backward_peers.describe_ours(problem, inputs, on_gpu)
    assert note.startswith("ampere_bwd_sm_80_bf16_d64_causal_")


def test_the_suite_counts_two_and_a_half_forwards() -> None:
    report = bench.run_forward(
        (SQUARE,), parse_peers("ours,torch", BACKWARD_PEERS), SETTING, Effort(1e-4, 1, 1, 0.1), suite=BACKWARD
    )
    assert report.kind == "backward" and report.method["flops"].startswith("10*b*h*sq*sk*d")
    for result in report.cells[0].peers.values():
        assert isinstance(result, Measured)
        assert result.tflops == pytest.approx(2.5 * SQUARE.flops / result.median_ms * 1e-9)


# Targets and reports


def measured(tflops: float) -> Measured:
    return Measured(tflops, 1.0, 0.01, 5, 3, 2e-3, 1500.0, 600.0)


def fake_report(ratio: float = 1.1, lacking: tuple[int, ...] = (256,)) -> ForwardReport:
    speeds = {64: 580.0, 128: 660.0, 256: 490.0}
    reason = "NotImplementedError: head_dim 256 and head_dim_v 256: both may be at most 128"
    cells = []
    for problem in paper_grid():
        ours = speeds[problem.head_dim]
        results: dict[str, Measured | Failed] = {"ours": measured(ours), "fa4": measured(ours / ratio)}
        if problem.head_dim in lacking:
            results["ours"] = Failed(reason)
        cells.append(Cell(problem, 1, 1500.0, 650.0, results))
    info = {name: PeerInfo(f"Peer {name}", "1.0", "") for name in ("ours", "fa4")}
    info["fa3"] = PeerInfo("Peer fa3", "", "its library has the forward alone")
    machine = {"gpu": "NVIDIA H200"}
    return ForwardReport(machine, "c0ffee" * 6, "2026-11-20T10:00:00Z", {}, info, tuple(cells), "backward")


def test_targets_are_those_that_were_promised() -> None:
    targets = backward_targets(fake_report(lacking=()))
    assert [target.required for target in targets] == [
        ">= 1.00", ">= 1.10", "36 cells", ">= 570 TFLOP/s", ">= 650 TFLOP/s", ">= 480 TFLOP/s",
    ]  # fmt: skip
    assert all(target.met for target in targets)
    assert targets[4].what == "backward, bf16-b1-s16384-h16-d128-causal"
    assert throughput_targets(fake_report(lacking=())) == targets
    assert backward_targets(replace(fake_report(), cells=())) == []


def test_a_head_dim_without_a_kernel_is_shown_and_not_met() -> None:
    targets = backward_targets(fake_report())
    assert [target.met for target in targets] == [False, False, False, True, True, False]
    assert targets[2].measured == "24 of 36 cells; none for head_dim 256"
    assert targets[5].measured == "no kernel"
    broken = fake_report()
    cells = [replace(cell, peers={**cell.peers, "ours": Failed("wrong result")}) for cell in broken.cells[:1]]
    failed = backward_targets(replace(broken, cells=(*cells, *broken.cells[1:])))[-1]
    assert failed.measured == f"failed: {cells[0].problem.name}"


def test_a_fixed_order_may_take_15_percent_more() -> None:
    def report_with(share: float) -> ForwardReport:
        report = fake_report(lacking=())
        first = report.cells[0]
        slower = measured(share * first.tflops("ours"))
        cells = replace(first, peers={**first.peers, "ours_deterministic": slower}), *report.cells[1:]
        return replace(report, cells=cells)

    for share, enough, most in ((0.88, 1, "1.136"), (0.86, 0, "1.163")):
        target = backward_targets(report_with(share))[3]
        assert target.what == "backward, time of deterministic over ours, each cell" and not target.met
        assert target.measured == f"{enough} of 36 cells; most {most} (bf16-b32-s512-h32-d64-full)"


def test_slow_cells_miss() -> None:
    assert [t.met for t in backward_targets(fake_report(1.0, ()))][:2] == [True, False]
    assert [t.met for t in backward_targets(fake_report(0.94, ()))][:2] == [False, False]


def test_tables_show_cells_without_a_kernel() -> None:
    report = load_forward(dump_forward(fake_report()), "backward")
    console = Console(width=160)
    with console.capture() as captured:
        console.print(forward_table(report))
    assert "Backward, 16 bit, TFLOP/s" in captured.get() and captured.get().count("no kernel") == 12
    page = bench_render.render_page(report, None, None, "backward.png")
    assert "2.5 times those of the forward" in page and "over the fastest of Peer fa4 in" in page
    assert "| 256, causal | " + "no kernel | " * 5 + "no kernel |\n" in page
    assert "Geometric mean over the best peer of 24 of 36 cells: **1.100**." in page
    assert "- fa3: its library has the forward alone" in page
    assert "- ours on bf16-b1-s16384-h8-d256-causal: NotImplementedError: head_dim 256" in page
    text = dump_forward(report)
    assert {entry.speedup for entry in compare(text, text)} == {1.0}


def test_rendering_takes_the_backward_report_once_there_is_one(tmp_path: Path) -> None:
    results, arguments = tmp_path / "benchmarks" / "results", ["--root", str(tmp_path)]
    results.mkdir(parents=True)
    forward = replace(fake_report(lacking=()), kind="forward")
    (results / "forward_nvidia_h200.json").write_text(dump_forward(forward))
    (results / "backward_nvidia_h200.json").write_text(dump_forward(fake_report()))
    (tmp_path / "README.md").write_text("\n".join(bench_render.markers("speed")))
    assert render_script.main(arguments) == 0
    assert render_script.main([*arguments, "--check"]) == 0
    folder = tmp_path / "docs" / "results"
    assert (folder / "backward.md").read_text().startswith("# Backward, 16 bit: results")
    assert (folder / "backward.png").stat().st_size > 20_000
    # Nothing in this report says which kernel ran.
    assert "Backward, 16 bit: where we stand" not in (folder / "roofline.md").read_text()


def test_the_script_is_the_forward_script_with_another_suite(tmp_path: Path) -> None:
    assert backward_script.main is forward_script.main
    out = tmp_path / "backward.json"
    small = [
        "--shapes",
        SQUARE.name,
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--budget",
        "0.1",
        "--out",
        str(out),
    ]
    assert forward_script.main([*small, "--peers", "ours,torch"], BACKWARD) == 0
    assert json.loads(out.read_text())["kind"] == "backward"
    assert forward_script.default_path(fake_report()).name == "backward_nvidia_h200.json"
