"""The benchmark's own arithmetic and bookkeeping, with fake peers and fake clocks; no speed is asserted."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import forward as forward_script
from hopper_attention.experiments.bench import checks as bench_checks
from hopper_attention.experiments.bench import machine as bench_machine
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench import timing as bench_timing
from hopper_attention.experiments.bench.results import (
    Failed,
    ForwardReport,
    Measured,
    PeerInfo,
    dump_forward,
    geometric_mean,
    load_forward,
    relative_spread,
)
from hopper_attention.experiments.bench.spec import ABLATION, Problem, paper_grid, parse_problem, parse_shapes
from hopper_attention.experiments.bench.sustained import BUDGET_S, PEERS_OF_A_ROW, SustainedRows
from hopper_attention.experiments.bench.timing import (
    Budget,
    Calibration,
    Effort,
    GpuLostError,
    Interval,
    Launch,
    Turn,
)
from tests.python.experiments.fakes import FakeFa3Operator, FakeStopwatch, fake_peer

SMALL = Problem("float32", 1, 24, 24, 4, 2, 16, 16, causal=True)
SETTING = bench_peers.Setting("cpu")


# Problems and arithmetic


def test_flops_are_those_of_both_matrix_products() -> None:
    full = Problem("bfloat16", 2, 1000, 500, 4, 4, 64, 64, causal=False)
    assert full.flops == 4 * 2 * 4 * 1000 * 500 * 64
    assert replace(full, causal=True).flops == full.flops / 2
    assert replace(full, head_dim_v=32).flops == 2 * 2 * 4 * 1000 * 500 * (64 + 32)
    assert ABLATION.flops == 4 * 4 * 16 * 8448**2 * 128


def test_papers_grid_is_36_cells_of_16384_tokens_and_width_2048() -> None:
    grid = paper_grid()
    assert len(grid) == len(set(grid)) == 36
    assert {p.batch * p.seqlen_q for p in grid} == {16384}
    assert {p.heads * p.head_dim for p in grid} == {2048}
    # Each of q, k, v is 64 MiB, so a launch's inputs exceed any Hopper's L2 three times over.
    assert {p.input_bytes for p in grid} == {3 * 64 * 2**20}


@pytest.mark.parametrize(
    "problem", [*paper_grid()[::7], ABLATION, SMALL, replace(SMALL, seqlen_k=7, head_dim_v=8)]
)
def test_a_problem_is_read_back_from_its_name(problem: Problem) -> None:
    assert parse_problem(problem.name) == problem


@pytest.mark.parametrize(
    "text", ["", "bf16-b1-s4-h2", "int8-b1-s4-h2-d64", "bf16-b1-s4-h2-d64-window", "paper2"]
)
def test_a_name_that_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: names such as bf16-b4"):
        parse_problem(text)


def test_shapes_are_groups_and_names_each_once() -> None:
    shapes = parse_shapes(f"ablation, {SMALL.name},{ABLATION.name}")
    assert shapes == (ABLATION, SMALL)
    assert len(parse_shapes("paper,ablation")) == 37
    kept = forward_script.select_problems("paper", "d64-causal,s512-h8-d256-full")
    assert [p.name for p in kept if p.head_dim == 256] == ["bf16-b32-s512-h8-d256-full"]
    assert len(kept) == 7
    with pytest.raises(ValueError, match="only is 'd72'"):
        forward_script.select_problems("paper", "d72")


def test_geometric_mean_and_spread() -> None:
    assert geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    assert geometric_mean([0.9, 1.0]) == pytest.approx(math.sqrt(0.9))
    assert math.isnan(geometric_mean([]))
    assert relative_spread([10.0, 11.0, 12.0, 13.0, 14.0]) == pytest.approx(2 / 12)
    assert relative_spread([3.0]) == 0.0


# Timing


def test_repeats_fill_the_measurement_and_host_bound_peers_get_a_spin() -> None:
    effort = Effort(measure_s=0.004)
    long = bench_timing.plan_turn([], Calibration(device_s=3.1e-3, host_s=20e-6), effort)
    short = bench_timing.plan_turn([], Calibration(device_s=140e-6, host_s=30e-6), effort)
    bound = bench_timing.plan_turn([], Calibration(device_s=140e-6, host_s=190e-6), effort)
    slow_host = bench_timing.plan_turn([], Calibration(device_s=5e-6, host_s=1e-3), effort)
    assert (long.repeats, long.spin_s) == (2, 0.0)
    assert (short.repeats, short.spin_s) == (29, 0.0)
    assert bound.repeats == 29
    assert bound.spin_s >= 29 * 190e-6
    # The spin has an upper bound, so fewer launches are queued behind it.
    assert slow_host.repeats == 20
    assert slow_host.repeats * 1e-3 <= slow_host.spin_s <= bench_timing.MAX_SPIN_S + 1e-9


@pytest.mark.parametrize(("allowed_s", "rounds"), [(1000.0, 9), (0.5, 5), (0.0, 3), (-10.0, 3)])
def test_rounds_fit_the_time_that_is_left(allowed_s: float, rounds: int) -> None:
    turns = [Turn([], 2, 0.0, cost_s=0.04), Turn([], 2, 0.0, cost_s=0.06)]
    effort = Effort(min_rounds=3, max_rounds=9)
    assert bench_timing.plan_rounds(turns, allowed_s, effort) == rounds


def intervals(*seconds: float) -> list[Interval]:
    return [Interval(each, 0.0, each) for each in seconds]


def test_a_median_is_vague_by_the_spread_and_number_of_its_rounds() -> None:
    steady, spread = (intervals(*(1.0 + share * step for step in range(-5, 6))) for share in (1e-3, 1e-2))
    assert not bench_timing.is_vague({"a": steady}) and bench_timing.is_vague({"a": steady, "b": spread})
    # Quartiles at 1 +- 0.025 or 0.03: 0.93 * 0.05 / sqrt(11) is 1.4 %, and with 176 rounds it is 0.4 %.
    assert bench_timing.is_vague({"b": 7 * spread}) and not bench_timing.is_vague({"b": 16 * spread})
    # An outlier or two do not count.
    assert not bench_timing.is_vague({"a": [*steady, *intervals(3.0, 5.0)]})


def test_budget_leaves_out_what_is_paused() -> None:
    clock = iter([0.0, 10.0, 70.0, 80.0])  # start; pause from 10 to 70; asked at 80
    budget = Budget(100.0, now=lambda: next(clock))
    with budget.pause():
        pass
    assert budget.share(4) == pytest.approx((100 - 20) / 4)


def test_peers_take_turns_in_the_order_of_each_round() -> None:
    order: list[str] = []

    def play(name: str, turn: Turn) -> Interval:
        order.append(name)
        return Interval(1.0, 0.0, 1.0)

    turns = {name: Turn([], 1, 0.0, 0.0) for name in "abc"}
    taken = bench_timing.play_rounds(turns, 4, play)
    assert "".join(order) == "abcacbcabcba"
    assert {name: len(intervals) for name, intervals in taken.items()} == {"a": 4, "b": 4, "c": 4}


def test_peers_may_stand_beside_one_of_them() -> None:
    order: list[str] = []

    def play(name: str, turn: Turn) -> Interval:
        order.append(name)
        return Interval(1.0, 0.0, 1.0)

    turns = {name: Turn([], 1, 0.0, 0.0) for name in "fabc"}
    taken = bench_timing.play_rounds(turns, 2, play, bench_timing.beside("f"))
    assert "".join(order) == "fafcfbfcfbfa"
    assert {name: len(intervals) for name, intervals in taken.items()} == {"f": 6, "a": 2, "b": 2, "c": 2}
    # Alone, or with one that is not there, everyone has a turn.
    assert bench_timing.beside("f")(["f"]) == ["f"]
    assert bench_timing.beside("f")(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    "limits", [{"measure_s": 0.0}, {"min_rounds": 0}, {"min_rounds": 5, "max_rounds": 4}]
)
def test_an_effort_that_measures_nothing_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Effort(**limits)


class FakeEvent:
    """Finishes after ``polls`` queries; never, if that is 0."""

    polls = 3

    def __init__(self, enable_timing: bool = False) -> None:
        self.left = FakeEvent.polls

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.left -= 1
        return self.left == 0

    def elapsed_time(self, other: FakeEvent) -> float:
        return 8.0


def test_cuda_stopwatch_queues_one_launch_before_those_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    spins: list[int] = []

    def record(name: str) -> Launch:
        return lambda: launched.append(name) or torch.empty(0)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    watch = bench_timing.CudaStopwatch()
    interval = watch.measure([record("a"), record("b")], repeats=4, spin_s=0.001)
    assert launched == ["b", "a", "b", "a", "b"]
    assert spins == [2_000_000]
    assert interval.seconds == pytest.approx(8e-3 / 4)
    assert interval.start < interval.stop


def test_a_long_launch_is_calibrated_by_one_and_a_slow_host_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def quick() -> torch.Tensor:
        launched.append("quick")
        return torch.empty(0)

    def slow() -> torch.Tensor:
        time.sleep(4e-3)
        return torch.empty(0)

    # Whatever is timed takes 8 ms by the fake events.
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    watch = bench_timing.CudaStopwatch()
    assert watch.calibrate([quick]).device_s == pytest.approx(8e-3)
    assert launched == ["quick"] * 3
    each = 8e-3 / bench_timing.CALIBRATION_LAUNCHES
    cost = watch.calibrate([slow])
    assert cost.device_s == pytest.approx(each) and cost.host_s > 4e-3
    monkeypatch.setattr(bench_timing, "LONG_LAUNCH_S", 0.01)
    assert watch.calibrate([quick]).device_s == pytest.approx(each)


def test_a_kernel_that_hangs_is_reported_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "polls", 0)
    with pytest.raises(GpuLostError, match=r"did not finish within 0\.01 s"):
        bench_timing.CudaStopwatch(deadline_s=0.01).synchronize()


def test_a_broken_context_is_a_lost_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeEvent) -> bool:
        raise torch.AcceleratorError("CUDA error: illegal access\nmore")

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "query", fail)
    with pytest.raises(GpuLostError, match=r"context is lost: CUDA error: illegal access$"):
        bench_timing.CudaStopwatch().synchronize()


# Clocks


class FakeGauge(bench_machine.Nvml):
    def __init__(self, readings: list[tuple[float, float, float]]) -> None:
        self.readings = [bench_machine.Reading(*reading) for reading in readings]

    def read(self) -> bench_machine.Reading:
        if not self.readings:
            raise OSError("no more")
        return self.readings.pop(0)


def test_clock_and_power_are_medians_of_the_readings_within_the_spans() -> None:
    readings = [(1.0, 1980, 300), (2.0, 1500, 690), (2.5, 1400, 700), (3.0, 1450, 698), (9.0, 345, 80)]
    with bench_machine.ClockSampler(FakeGauge(readings), period_s=0.0) as sampler:
        sampler._thread.join(timeout=5)
    assert sampler.window([(1.9, 3.1)]) == (1450, 698)
    assert sampler.window([(0.0, 1.1), (8.0, 9.5)]) == ((1980 + 345) / 2, 190)
    assert sampler.window([(4.0, 5.0)]) == (None, None)


def test_a_machine_without_readings_says_why() -> None:
    gauge = bench_machine.find_gauge("cpu")
    with bench_machine.ClockSampler(gauge) as sampler:
        assert sampler.window([(0.0, 1e12)]) == (None, None)
    assert gauge.describe() == {"clocks": "not read: the device is cpu"}


def test_commit_is_read_from_a_file_where_there_is_no_repository(tmp_path: Path) -> None:
    assert bench_machine.find_commit(tmp_path) == "unknown"
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert bench_machine.find_commit(tmp_path) == "0123abc"


# Peers


class FakeFa3(FakeFa3Operator):
    """By plain attention."""

    def compute(self, named: dict[str, Any]) -> tuple[Tensor, ...]:
        inputs = bench_peers.Inputs(named["q"], named["k"], named["v"])
        out = bench_peers.prepare_torch(SMALL, inputs, SETTING).launch()
        return out, torch.empty(0), torch.empty(0), torch.empty(0)


def test_fa3_gets_every_argument_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFa3().installed(monkeypatch)
    inputs = bench.draw_inputs(SMALL, 0, "cpu")
    out = bench_peers.prepare_fa3(SMALL, inputs, SETTING).launch()
    assert out.shape == (1, 24, 4, 16)
    call = fake.calls[0]
    assert len(call) == 35
    assert call["q"] is inputs.q and call["k"] is inputs.k and call["v"] is inputs.v
    assert call["is_causal"] is True and call["softmax_scale"] == 0.25
    assert (call["window_size_left"], call["window_size_right"], call["num_splits"]) == (-1, -1, 1)
    others = set(call) - {"q", "k", "v", "is_causal", "softmax_scale", *bench_peers.FA3_NEUTRAL}
    assert {name: call[name] for name in others} == dict.fromkeys(others)


def test_a_schema_that_asks_for_more_is_named() -> None:
    schema = torch._C.parse_schema("lib::fwd(Tensor q, int new_knob, int? spare, int width=3) -> Tensor")
    assert bench_peers.positional_arguments(schema, {"q": 1, "new_knob": 2}) == [1, 2, None, 3]
    with pytest.raises(ValueError, match=r"no value for \['int new_knob'\]"):
        bench_peers.positional_arguments(schema, {"q": 1})
    with pytest.raises(ValueError, match=r"no such arguments \['causal'\]"):
        bench_peers.positional_arguments(schema, {"q": 1, "new_knob": 2, "causal": True})


def test_peers_that_cannot_run_are_reported_with_the_reason() -> None:
    infos = bench_peers.inspect_peers(tuple(bench_peers.PEERS.values()), SETTING)
    absent = {name: info.unavailable for name, info in infos.items() if info.unavailable}
    needs_gpu = "needs a CUDA device, this run is on cpu"
    assert absent == dict.fromkeys(("fa3", "fa4", "cudnn", "fa2", "flex", "ampere"), needs_gpu)
    assert infos["torch"].version == f"torch {torch.__version__}"


def test_fa3_says_which_library_is_missing(tmp_path: Path) -> None:
    on_gpu = bench_peers.Setting("cuda:0")
    assert bench_peers.why_no_fa3(on_gpu).startswith("no library: install sglang-kernel, or give")
    missing = tmp_path / "flash_ops.abi3.so"
    assert bench_peers.why_no_fa3(replace(on_gpu, fa3_library=str(missing))) == f"no library at {missing}"
    missing.write_bytes(b"not a library")
    assert "does not load" in bench_peers.why_no_fa3(replace(on_gpu, fa3_library=str(missing)))


def test_unknown_peer_is_refused() -> None:
    assert [peer.name for peer in bench_peers.parse_peers("fa3, ours,fa3", bench_peers.PEERS)] == [
        "fa3",
        "ours",
    ]
    with pytest.raises(ValueError, match=r"peers is 'ours,fa5', allowed: .* out of ours, fa3"):
        bench_peers.parse_peers("ours,fa5", bench_peers.PEERS)


SHAPES = [
    SMALL,
    replace(SMALL, causal=False, seqlen_k=40, head_dim_v=8),
    replace(SMALL, seqlen_q=40, heads_kv=4),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("problem", SHAPES, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "prepare", [bench_peers.prepare_torch, bench_peers.prepare_sdpa, bench_peers.prepare_flex]
)
def test_torchs_peers_agree_with_the_oracle(
    problem: Problem, prepare: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is compiled is the same function; on a CPU that would take a C++ compiler and a minute.
    monkeypatch.setattr(bench_peers, "compile_flex", lambda problem: flex_attention)
    inputs = bench.draw_inputs(problem, 3, "cpu")
    if prepare is bench_peers.prepare_sdpa and problem.causal and problem.seqlen_q != problem.seqlen_k:
        with pytest.raises(NotImplementedError, match="aligned top-left"):
            bench_peers.prepare_sdpa(problem, inputs, SETTING)
        return
    out = prepare(problem, inputs, SETTING).launch()
    oracles, limits = bench_checks.compute_oracles(problem, inputs), bench_peers.ERROR_LIMITS[problem.dtype]
    error, wrong = bench_checks.check_output(problem, out, oracles, limits)
    assert wrong == ""
    assert error < 1e-5


# Correctness before speed


def test_a_wrong_output_is_found() -> None:
    problem = replace(SMALL, seqlen_q=64, seqlen_k=64)
    inputs = bench.draw_inputs(problem, 0, "cpu")
    oracles = bench_checks.compute_oracles(problem, inputs)
    right = bench_peers.prepare_torch(problem, inputs, SETTING).launch().clone()

    def verdict(out: Tensor) -> str:
        return bench_checks.check_output(problem, out, oracles, bench_peers.ERROR_LIMITS[problem.dtype])[1]

    assert [(oracle.batch, oracle.head) for oracle in oracles] == [(0, 0), (0, 2), (0, 3)]
    assert verdict(right) == ""
    assert "expected (1, 64, 4, 16)" in verdict(right[:, 1:])
    unwritten = right.clone()
    unwritten[0, 5, 1] = math.nan  # a head that is not compared
    assert verdict(unwritten) == "16 of 4096 outputs are not finite"
    swapped = right[:, :, [0, 1, 3, 2]]
    assert verdict(swapped).startswith("batch 0, head 2: error")
    assert verdict(right * 1.01).startswith("batch 0, head 0: error 1.00e-02")


@pytest.mark.parametrize("problem", SHAPES, ids=lambda p: p.name)
def test_oracles_of_some_rows_are_rows_of_the_whole_oracles(problem: Problem) -> None:
    inputs = bench.draw_inputs(problem, 5, "cpu")
    whole = bench_checks.compute_oracles(problem, inputs)
    some = bench_checks.compute_row_oracles(problem, inputs, checked_scores=5 * problem.seqlen_k)
    assert [(o.batch, o.head) for o in some] == [(o.batch, o.head) for o in whole]
    for all_rows, rows in zip(whole, some, strict=True):
        assert rows.rows.tolist()[0] == 0 and rows.rows.tolist()[-1] == problem.seqlen_q - 1
        assert len(rows.rows) == 5
        torch.testing.assert_close(rows.out, all_rows.out[rows.rows], atol=1e-12, rtol=1e-12)
    out = torch.stack([o.out for o in whole[:1]], 1)[None].expand(1, -1, problem.heads, -1).float()
    right, limits = [o for o in some if o.head == 0], bench_peers.ERROR_LIMITS["float32"]
    assert bench_checks.check_output(problem, out, right, limits)[1] == ""
    row = int(right[0].rows[3])
    wrong = out.clone()
    wrong[0, row] *= 1.5
    assert f"row {row}:" in bench_checks.check_output(problem, wrong, right, bench_peers.Limits(1.0, 1e-4))[1]


def test_one_wrong_row_among_many_is_found() -> None:
    problem = replace(SMALL, dtype="bfloat16", causal=False, seqlen_q=30_000, seqlen_k=8, heads=1, heads_kv=1)
    inputs = bench.draw_inputs(problem, 0, "cpu")
    oracles = bench_checks.compute_oracles(problem, inputs)
    out = oracles[0].out[None, :, None].to(torch.bfloat16)
    out[0, 17_000] *= 1.2
    verdict = bench_checks.check_output(problem, out, oracles, bench_peers.ERROR_LIMITS["bfloat16"])[1]
    assert verdict.startswith("batch 0, head 0, row 17000: error")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_keeps_the_limits_with_room_to_spare(dtype: str, causal: bool) -> None:
    problem = Problem(dtype, 1, 1024, 1024, 1, 1, 64, 64, causal)
    inputs = bench.draw_inputs(problem, 1, "cpu")
    oracles = bench_checks.compute_oracles(problem, inputs)
    out = bench_peers.prepare_torch(problem, inputs, SETTING).launch()
    limits = bench_peers.ERROR_LIMITS[dtype]
    error, wrong = bench_checks.check_output(problem, out, oracles, limits)
    assert wrong == ""
    assert error < limits.head / 1.3


# A whole run


def absent_peer(name: str) -> bench_peers.Peer:
    return replace(fake_peer(name), why_unavailable=lambda setting: "not installed")


def run_fakes(
    monkeypatch: pytest.MonkeyPatch,
    peers: Sequence[bench_peers.Peer],
    saved: list[ForwardReport],
    **effort: float,
) -> tuple[ForwardReport, FakeStopwatch]:
    watch = FakeStopwatch({"ours": Calibration(1e-3, 1e-5), "fa3": Calibration(2e-3, 1e-5)})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    problems = [SMALL, replace(SMALL, causal=False)]
    settings = {"measure_s": 0.004, "min_rounds": 2, "max_rounds": 5, "budget_s": 60.0, **effort}
    report = bench.run_forward(
        problems, tuple(peers), SETTING, Effort(**settings), commit="c0ffee", save=saved.append
    )
    return report, watch


def test_a_run_checks_times_and_saves_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [
        fake_peer("ours"),
        fake_peer("fa3"),
        fake_peer("wrong", scale=1.1),
        fake_peer("unable", raises="head_dim 16 is too small\nmore"),
        absent_peer("absent"),
    ]
    saved: list[ForwardReport] = []
    report, watch = run_fakes(monkeypatch, peers, saved)
    assert [len(partial.cells) for partial in saved] == [1, 2]
    assert saved[-1] == report
    assert report.kind == "forward"
    limits = "fp32 ours, fa3, wrong, unable: 1.0e-05 of a head, 1.0e-04 of a row"
    assert report.method["allowed error"] == limits
    assert report.peers["absent"] == PeerInfo("Fake absent", "", "not installed")
    assert watch.played.count("ours") == watch.played.count("fa3") == 10
    cell = report.cells[0]
    ours = cell.peers["ours"]
    assert isinstance(ours, Measured)
    assert (ours.rounds, ours.repeats, ours.note) == (5, 4, "plain")
    assert ours.median_ms == pytest.approx(1.0, rel=0.03)
    assert ours.tflops == pytest.approx(SMALL.flops / 1e-3 * 1e-12, rel=0.03)
    assert cell.best_peer == "fa3"
    assert cell.ratio == pytest.approx(2.0, rel=0.05)
    assert cell.peers["unable"] == Failed("NotImplementedError: head_dim 16 is too small")
    wrong = cell.peers["wrong"]
    assert isinstance(wrong, Failed) and wrong.reason.startswith("wrong result: batch 0, head 0: error 1.0")
    assert "absent" not in cell.peers


def test_who_is_missing_is_told_before_anything_runs() -> None:
    """As a run takes minutes, and is of little use without the peer that was forgotten."""
    lines: list[str] = []
    effort = Effort(measure_s=1e-4, min_rounds=1, max_rounds=1)
    peers = fake_peer("ours"), absent_peer("fa3")
    report = bench.run_forward((SMALL,), peers, SETTING, effort, commit="c0ffee", progress=lines.append)
    assert lines == ["without fa3: not installed", f"[1/1] {SMALL.name}"]
    assert report.peers["fa3"].unavailable == "not installed"


def test_peers_also_run_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = FakeStopwatch({"ours": Calibration(1e-3, 1e-5), "fa3": Calibration(2e-3, 1e-5)})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    peers = fake_peer("ours"), fake_peer("fa3"), fake_peer("unable", raises="no kernel")
    effort = Effort(measure_s=0.004, min_rounds=2, max_rounds=2)
    report = bench.run_forward((SMALL,), peers, SETTING, effort, sustained_s=2.0, commit="c0ffee")
    assert watch.played[-2:] == ["ours", "fa3"] and len(watch.played) == 6
    assert report.method["sustained_s"] == 2.0
    cell = load_forward(dump_forward(report)).cells[0]
    ours, fa3 = cell.peers["ours"], cell.peers["fa3"]
    assert isinstance(ours, Measured) and isinstance(fa3, Measured)
    assert ours.sustained.seconds == pytest.approx(2.0, rel=0.03) == fa3.sustained.seconds
    assert ours.sustained.tflops == pytest.approx(SMALL.flops / 1e-3 * 1e-12, rel=0.03)
    assert cell.best_sustained == "fa3" and cell.sustained("unable") == 0.0


@pytest.mark.parametrize(("step", "patience", "rounds"), [(0.2, 3, 12), (0.2, 1, 4), (1e-4, 3, 4)])
def test_vague_cells_have_more_rounds(
    step: float, patience: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"ours": Calibration(1e-3, 1e-5), "fa3": Calibration(2e-3, 1e-5)}
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: FakeStopwatch(costs, step))
    effort = Effort(measure_s=0.004, min_rounds=2, max_rounds=4, patience=patience)
    report = bench.run_forward((SMALL,), (fake_peer("ours"), fake_peer("fa3")), SETTING, effort)
    measured = report.cells[0].peers.values()
    assert [peer.rounds for peer in measured if isinstance(peer, Measured)] == [rounds, rounds]
    assert ("patience" in report.method) == (patience > 1)


def test_few_rows_run_without_a_pause_and_of_these_two_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of each head_dim and mask, within 20 seconds; ours, and who is fastest in bursts."""
    problems = tuple(
        replace(SMALL, batch=1, seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=d, causal=causal)
        for d in (64, 128, 256)
        for n in (256, 512)
        for causal in (False, True)
    )
    longest = [p for p in problems if p.seqlen_k == 512]
    for seconds, rows in ((0.0, 0), (2.0, 5), (10.0, 1), (1.0, 6)):
        chosen = SustainedRows.of(problems, seconds)
        assert len(chosen.problems) == rows and set(chosen.problems) <= set(longest)
        assert rows * PEERS_OF_A_ROW * seconds <= BUDGET_S
    order = [(p.head_dim, p.causal) for p in SustainedRows.of(problems, 2.0).problems]
    assert order[0] == (128, True) and [causal for _, causal in order] == [True] * 3 + [False] * 2

    speeds = {"ours": 1e-3, "fa3": 2e-3, "fa4": 1.5e-3}
    watch = FakeStopwatch({name: Calibration(s, 1e-5) for name, s in speeds.items()})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    effort = Effort(measure_s=0.004, min_rounds=2, max_rounds=2)
    small = (SMALL, replace(SMALL, causal=not SMALL.causal))
    report = bench.run_forward(
        small, tuple(map(fake_peer, speeds)), SETTING, effort, sustained_s=8.0, commit="c0ffee"
    )
    # One row of two peers for 8 seconds each is all that 20 seconds have room for: the causal one.
    assert [[cell.sustained(name) > 0 for name in speeds] for cell in report.cells] == [
        [cell.problem.causal, False, cell.problem.causal] for cell in report.cells
    ]


def test_a_lost_gpu_ends_the_run_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def lose(self: FakeStopwatch) -> None:
        calls.append(1)
        if len(calls) == 4:  # the second peer of the second cell
            raise GpuLostError("a kernel hangs")

    monkeypatch.setattr(FakeStopwatch, "synchronize", lose)
    saved: list[ForwardReport] = []
    with pytest.raises(bench.CellLostError) as lost:
        run_fakes(monkeypatch, [fake_peer("ours"), fake_peer("fa3")], saved)
    assert not lost.value.cell.problem.causal
    last = saved[-1]
    assert isinstance(last.cells[0].peers["ours"], Measured)
    assert last.cells[1].peers["fa3"] == Failed("GpuLostError: fa3: a kernel hangs")
    assert load_forward(dump_forward(last)).cells[1] == last.cells[1]


def test_launches_rotate_over_enough_inputs_to_leave_the_cache() -> None:
    assert bench.count_input_sets(paper_grid()[0], 60 * 2**20) == 1
    assert bench.count_input_sets(replace(paper_grid()[0], batch=8), 60 * 2**20) == 4
    assert bench.count_input_sets(SMALL, 60 * 2**20) == bench.MAX_INPUT_SETS
    assert bench.count_input_sets(SMALL, 0) == 1
