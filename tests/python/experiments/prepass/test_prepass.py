"""The benchmark of the FP8 pre-pass: bytes, correctness before speed, and reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.spec import Problem, paper_grid
from hopper_attention.experiments.bench.timing import Effort, WallStopwatch
from hopper_attention.experiments.prepass import run as bench_quantize
from hopper_attention.experiments.prepass.run import COPY, QUANTIZE, Pass, QuantizeReport
from hopper_attention.experiments.prepass.tables import quantize_problems, quantize_table, render_quantize
from hopper_attention.quantization import Fp8Quantization, quantize_qkv

SMALL = Problem("bfloat16", 1, 256, 256, 2, 2, 64, 64, causal=False)
SETTING = Setting("cpu")
QUICK = Effort(1e-4, 2, 2, 1.0)


def test_default_sizes_are_the_papers_without_masks() -> None:
    sizes = bench_quantize.paper_sizes()
    assert len(sizes) == len(paper_grid()) // 2 == 18
    assert not any(problem.causal for problem in sizes)


def test_bytes_are_what_is_read_and_written() -> None:
    inputs = bench.draw_inputs(SMALL, 0, "cpu")
    parts = quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=Fp8Quantization(block_q=128, block_k=64))
    scales = 2 * (256 // 128 + 2 * 256 // 64)
    assert bench_quantize.quantized_bytes(parts) == 3 * 256 * 2 * 64 + 4 * scales
    cell = bench_quantize.measure(SMALL, [inputs], parts.quantization, WallStopwatch(), QUICK)
    assert not isinstance(cell.passes, Failed)
    read = 3 * 256 * 2 * 64 * 2
    assert cell.passes[COPY].moved_bytes == 2 * read
    # V is read for its mean, too.
    assert cell.passes[QUANTIZE].moved_bytes == read + read // 3 + read // 2 + 4 * scales
    rates = {name: p.moved_bytes / p.median_us * 1e-6 for name, p in cell.passes.items()}
    assert cell.share == pytest.approx(rates[QUANTIZE] / rates[COPY])
    assert 1e-2 < cell.error < bench_quantize.ERROR_LIMIT
    by_row = quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=Fp8Quantization(block_k=64))
    assert bench_quantize.quantized_bytes(by_row) == 3 * 256 * 2 * 64 + 4 * 2 * (256 + 2 * 256 // 64)


def test_rates_are_terabytes_a_second() -> None:
    # The paper's shape: 201 MB read and half as much written, in 84 us.
    assert Pass(84.0, 0.0, 5, 302_000_000).tb_per_s == pytest.approx(3.595, abs=1e-3)


@pytest.mark.parametrize("settings", [{}, {"rotate": False}, {"rotate_v": True, "block_k": 32}])
def test_right_parts_pass_and_wrong_ones_do_not(settings: dict) -> None:
    inputs = bench.draw_inputs(SMALL, 1, "cpu")
    parts = quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=Fp8Quantization(**settings))
    assert bench_quantize.quantization_error(parts, inputs) < bench_quantize.ERROR_LIMIT
    swapped = replace(inputs, k=inputs.k.flip(1))
    assert bench_quantize.quantization_error(parts, swapped) > 1.0


def test_a_wrong_pre_pass_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_quantize, "quantization_error", lambda parts, inputs: math.nan)
    inputs = bench.draw_inputs(SMALL, 0, "cpu")
    cell = bench_quantize.measure(SMALL, [inputs], Fp8Quantization(), WallStopwatch(), QUICK)
    assert cell.passes == Failed("wrong result: error nan against the inputs, allowed 4.0e-02")
    assert cell.share == 0.0


def test_the_copy_copies_every_tensor() -> None:
    inputs = bench.draw_inputs(SMALL, 0, "cpu")
    (launch,) = bench_quantize.make_launches([inputs], Fp8Quantization())[COPY]
    torch.testing.assert_close(launch(), inputs.q)


def test_a_run_is_saved_read_back_and_shown() -> None:
    saved: list[QuantizeReport] = []
    problems = [SMALL, replace(SMALL, heads=4, seqlen_q=64)]
    report = bench_quantize.run_quantize(problems, SETTING, QUICK, commit="c0ffee" * 6, save=saved.append)
    assert [len(partial.cells) for partial in saved] == [1, 2]
    broken = replace(report.cells[1], passes=Failed("wrong result"), error=math.nan)
    report = replace(report, cells=(report.cells[0], broken))
    text = bench_quantize.dump_quantize(report)
    again = bench_quantize.load_quantize(text)
    assert bench_quantize.dump_quantize(again) == text
    assert again.cells[1].passes == Failed("wrong result") and math.isnan(again.cells[1].error)
    console = Console(width=140)
    with console.capture() as captured:
        console.print(quantize_table(again))
    assert SMALL.name in captured.get() and "failed" in captured.get()
    assert quantize_problems(again) == [f"{problems[1].name}: wrong result"]
    page = render_quantize(again)
    assert f"| `{SMALL.name}` |" in page and "- quantization: rotate True" in page


def test_what_cannot_be_checked_or_takes_hours_is_refused() -> None:
    with pytest.raises(ValueError, match="quantization has smooth_k True, allowed here: False"):
        bench_quantize.run_quantize([SMALL], SETTING, QUICK, quantization=Fp8Quantization(smooth_k=True))
    with pytest.raises(ValueError, match="device is cpu, allowed there"):
        bench_quantize.run_quantize(bench_quantize.paper_sizes(), SETTING, QUICK)


def test_the_lowest_share_is_held_against_the_promise() -> None:
    def cell(share: float) -> bench_quantize.QuantizeCell:
        passes = {QUANTIZE: Pass(100.0 / share, 0.0, 5, 1_000), COPY: Pass(100.0, 0.0, 5, 1_000)}
        return bench_quantize.QuantizeCell(SMALL, passes, 0.02)

    lost = bench_quantize.QuantizeCell(SMALL, Failed("no memory"), math.nan)
    (target,) = bench_quantize.quantize_targets(QuantizeReport({}, (cell(0.9), cell(0.79), lost)))
    assert not target.met and target.measured.startswith("0.79 (bf16-b1-s256")
    assert bench_quantize.quantize_targets(QuantizeReport({}, (cell(0.9), cell(0.81))))[0].met
    assert bench_quantize.quantize_targets(QuantizeReport({}, (lost,))) == []
