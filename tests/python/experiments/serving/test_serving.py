"""The serving benchmark: its workloads and inputs, its check against float64, runs with fake clocks, reports."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import render
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.compare import OVER_BEST, compare
from hopper_attention.experiments.bench.peers import Limits, Setting, always_available
from hopper_attention.experiments.bench.results import Failed, Measured
from hopper_attention.experiments.bench.timing import Calibration, Effort, GpuLostError, Launch
from hopper_attention.experiments.features.run import WorkloadLostError
from hopper_attention.experiments.features.spec import FAMILIES
from hopper_attention.experiments.serving import checks, run, spec
from hopper_attention.experiments.serving.inputs import (
    CacheInputs,
    appended,
    draw_set,
    pages_of,
    plain_of,
)
from hopper_attention.experiments.serving.peers import ServingPeer, Ways
from hopper_attention.experiments.serving.plot import plot_serving
from hopper_attention.experiments.serving.results import (
    HostTime,
    ServingCell,
    ServingReport,
    dump_serving,
    load_serving,
    serving_targets,
)
from hopper_attention.experiments.serving.run import run_serving
from hopper_attention.experiments.serving.spec import ALL_WORKLOADS, WORKLOADS, ServingWorkload
from hopper_attention.experiments.serving.tables import (
    host_table,
    render_serving,
    serving_problems,
    serving_table,
)
from hopper_attention.experiments.workloads.spec import pick_workloads
from tests.python.experiments.fakes import FakeStopwatch, head_of, measured

SETTING, GPU = Setting("cpu"), Setting("cuda:0")
ROOT = Path(__file__).resolve().parents[4]
RAGGED = ServingWorkload(lengths=(70, 9, 33), heads=4, heads_kv=2, head_dim=16, dtype="float32")
EQUAL = replace(RAGGED, lengths=(40, 40))
PAGED = replace(RAGGED, page_size=8, queries=5)
APPENDED = replace(RAGGED, appends=True, page_size=16, queries=3)
SMALL = (RAGGED, EQUAL, PAGED, APPENDED, replace(APPENDED, page_size=0), replace(EQUAL, queries=20))


def drawn(workload: ServingWorkload, family: str = "normal") -> CacheInputs:
    return draw_set(workload, FAMILIES[family], 3, "cpu")


def rotate_plainly(x: Tensor, position: int, base: float = 10_000.0) -> Tensor:
    """(heads, head_dim) at a position, halves rotated as complex numbers."""
    half = x.shape[-1] // 2
    angles = position * base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), -1)


def keys_plainly(workload: ServingWorkload, inputs: CacheInputs, sequence: int) -> list[Tensor]:
    """K and V (length, heads_kv, head_dim) of a sequence, row by row; new ones behind those of the cache."""
    found = []
    for number, cache in enumerate((inputs.k_cache, inputs.v_cache)):
        rows = []
        for i in range(int(inputs.used[sequence])):
            if inputs.table is None:
                rows.append(cache[sequence, i])
            else:
                page = int(inputs.table[sequence, i // workload.page_size])
                rows.append(cache[page, i % workload.page_size])
        for i in range(workload.queries if inputs.new else 0):
            assert inputs.new is not None
            new = (inputs.new.k, inputs.new.v)[number][sequence, i]
            rows.append(rotate_plainly(new, int(inputs.used[sequence]) + i) if number == 0 else new)
        found.append(torch.stack([row.double() for row in rows]))
    return found


def attend_plainly(workload: ServingWorkload, inputs: CacheInputs) -> Tensor:
    """(batch, queries, heads, head_dim), query by query and head by head, in float64."""
    w, out = workload, inputs.q.double()
    for b, length in enumerate(w.lengths):
        k, v = keys_plainly(w, inputs, b)
        assert k.shape[0] == length
        for i in range(w.queries):
            q, seen = inputs.q[b, i].double(), length - w.queries + i + 1
            q = rotate_plainly(q, seen - 1) if inputs.new else q
            for h in range(w.heads):
                of = h * w.heads_kv // w.heads
                weights = torch.softmax(k[:seen, of] @ q[h] / math.sqrt(w.head_dim), 0)
                out[b, i, h] = weights @ v[:seen, of]
    return out


# Workloads


def test_limits_are_those_of_the_peers_table() -> None:
    by_name = {w.name: w for w in ALL_WORKLOADS}
    expected = {
        "bf16-decode-1x1k-q1-h32-hk8-d128": 1.0,
        "bf16-decode-256x8k-q1-h32-hk8-d128": 2022.1,
        "bf16-decode-64x8k-q1-h32-hk8-d128-page64-append": 505.5,
        "bf16-decode-85to47823-q1-h32-hk8-d128": 505.6,
        "bf16-prefill-4x8k-q512-h32-hk8-d128": 269.3,
        "bf16-prefill-4x32k-q512-h32-hk8-d128-page16": 1103.1,
        "bf16-decode-64x8k-q1-h32-hk8-d128-e4m3": 252.8,
    }
    for name, us in expected.items():
        assert by_name[name].limit_us() == pytest.approx(us, abs=0.1), name
    assert by_name["bf16-decode-8x8k-q1-h32-hk1-d128"].kv_bytes == 33_554_432


def test_useful_work_is_that_of_the_keys_that_are_seen() -> None:
    for workload in SMALL:
        last = range(workload.queries)
        pairs = sum(length - workload.queries + i + 1 for length in workload.lengths for i in last)
        assert workload.visible == pairs and workload.flops == 4 * 4 * 16 * pairs
        assert workload.kv_bytes == 2 * sum(workload.lengths) * 2 * 16 * 4
    assert replace(EQUAL, is_fp8=True).kv_bytes == EQUAL.kv_bytes // 4


def test_ragged_lengths_are_drawn_once() -> None:
    lengths = spec.ragged_lengths()
    assert lengths == spec.RAGGED.lengths and (len(lengths), sum(lengths)) == (85, 524_288)
    assert max(lengths) == 47_823 and min(lengths) >= 1 and len(set(lengths)) > 70
    with pytest.raises(ValueError, match="longest is 20, allowed with these sizes"):
        spec.ragged_lengths(1000, 10, 20)


def test_every_workload_has_a_name_and_a_topic() -> None:
    assert len({w.name for w in ALL_WORKLOADS}) == len(ALL_WORKLOADS) == len(WORKLOADS) + 4 + 3
    assert all(sum(belongs(w) for belongs in spec.TOPICS.values()) == 1 for w in (*ALL_WORKLOADS, *SMALL))
    assert not any(w.is_fp8 for w in WORKLOADS)
    assert [w.name for w in pick_workloads("1x64k*e4m3", ALL_WORKLOADS)] == [
        "bf16-decode-1x64k-q1-h32-hk8-d128-e4m3"
    ]
    with pytest.raises(
        ValueError, match=r"only is 'tea', allowed: a part of a name, .* names are bf16-decode"
    ):
        pick_workloads("tea", WORKLOADS)


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths is \(70, 9, 33\), allowed: one or more of queries, 10"):
        replace(RAGGED, queries=10)
    with pytest.raises(ValueError, match="heads_kv is 3, allowed: divisors of heads, 4"):
        replace(RAGGED, heads_kv=3)
    with pytest.raises(ValueError, match="is_fp8 is True, allowed: without pages"):
        replace(PAGED, is_fp8=True)


# Inputs


def test_every_page_belongs_to_one_sequence_and_their_order_is_random() -> None:
    inputs, needed = drawn(PAGED), pages_of(PAGED)
    assert needed == [9, 2, 5] and inputs.k_cache.shape == (16, 8, 2, 16) and inputs.table is not None
    pages = [page for row, count in zip(inputs.table.tolist(), needed, strict=True) for page in row[:count]]
    assert sorted(pages) == list(range(16)) and pages != sorted(pages)
    plain = plain_of(PAGED, inputs)
    assert plain.table is None and plain.k_cache.shape == (3, 70, 2, 16)
    for sequence, length in enumerate(PAGED.lengths):
        for cache, right in zip(
            (plain.k_cache, plain.v_cache), keys_plainly(PAGED, inputs, sequence), strict=True
        ):
            assert torch.equal(cache[sequence, :length].double(), right)


@pytest.mark.parametrize("workload", [APPENDED, replace(APPENDED, page_size=0)], ids=lambda w: w.name)
def test_new_keys_are_rotated_and_written_behind_the_others(workload: ServingWorkload) -> None:
    inputs = drawn(workload)
    before = inputs.k_cache.clone()
    assert inputs.new is not None and inputs.new.cos.shape == (80 if workload.page_size else 70, 8)
    right = [keys_plainly(workload, inputs, b) for b in range(workload.batch)]
    plain = plain_of(workload, inputs)
    assert torch.equal(inputs.k_cache, before) and plain.used.tolist() == list(workload.lengths)
    complete = appended(workload, inputs)
    every = slice(0, 2)
    for b, length in enumerate(workload.lengths):
        for found in (plain, complete):
            k, v = found.rows(b, slice(0, length), every)
            torch.testing.assert_close(k.double(), right[b][0], atol=1e-5, rtol=1e-5)
            assert torch.equal(v.double(), right[b][1])
    assert int((inputs.k_cache != before).flatten(2).any(2).sum()) == 3 * workload.batch
    checks.poison_new_rows(inputs)
    assert int(inputs.k_cache.isnan().flatten(2).all(2).sum()) == 3 * workload.batch


def test_a_cache_in_e4m3_has_a_descale_for_each_sequence_and_head() -> None:
    exact, rounded = drawn(EQUAL), drawn(replace(EQUAL, is_fp8=True))
    assert rounded.descales is not None and rounded.descales.k.shape == (2, 2)
    back = rounded.k_cache.float() * rounded.descales.k[:, None, :, None]
    assert (back - exact.k_cache).abs().max() <= exact.k_cache.abs().max() / 16
    assert rounded.k_cache.float().abs().amax((1, 3)).eq(448).all()
    normal, peaky = drawn(RAGGED), drawn(RAGGED, "peaky")
    assert torch.equal(peaky.q, 4 * normal.q) and torch.equal(peaky.k_cache, normal.k_cache)


# Correctness before speed


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.name)
def test_float64_is_that_of_the_formula(workload: ServingWorkload) -> None:
    inputs = drawn(workload)
    right = attend_plainly(workload, inputs)
    pieces = checks.compute_pieces(workload, inputs)
    assert len(pieces) == len(checks.checked_places(workload)) >= 2
    error, wrong = checks.check_output(workload, right, pieces, Limits(1e-6, 1e-6))
    assert wrong == "" and error < 1e-6


def test_short_middle_and_long_sequences_are_checked_on_different_heads() -> None:
    wide = replace(RAGGED, heads=6, heads_kv=3)
    assert checks.checked_places(wide) == [(1, 0), (2, 1), (0, 2)]
    assert checks.checked_places(replace(wide, lengths=(5,), heads_kv=1)) == [(0, 0)]


@pytest.mark.parametrize("workload", [PAGED, APPENDED], ids=lambda w: w.name)
def test_a_wrong_output_is_found(workload: ServingWorkload) -> None:
    inputs = drawn(workload)
    right = attend_plainly(workload, inputs)
    pieces, limits = checks.compute_pieces(workload, inputs), checks.limits_of(workload, False)
    assert checks.check_output(workload, right, pieces, limits)[1] == ""
    for spoil, words in (
        (lambda x: x[1, 0, 0].mul_(-1.0), "sequence 1, heads from 0: error"),
        (lambda x: x.mul_(1.01), "allowed"),
        (lambda x: x[2, 0, 3].fill_(math.nan), "16 of 960 of out are not finite"),
    ):
        spoiled = right.clone()
        spoil(spoiled)
        error, wrong = checks.check_output(workload, spoiled, pieces, limits)
        assert words.replace("960", str(right.numel())) in wrong and error > 0
    assert "expected (3," in checks.check_output(workload, right[:2], pieces, limits)[1]


def test_one_key_too_many_or_too_few_is_found() -> None:
    inputs = drawn(RAGGED)
    pieces, limits = checks.compute_pieces(RAGGED, inputs), checks.limits_of(RAGGED, False)
    for lengths in ((69, 9, 33), (70, 10, 33), (70, 9, 34)):
        other = replace(inputs, used=torch.tensor(lengths, dtype=torch.int32))
        out = attend_plainly(replace(RAGGED, lengths=lengths), other)
        assert "allowed" in checks.check_output(RAGGED, out, pieces, limits)[1]


def test_errors_allowed_on_e4m3_depend_on_the_queries() -> None:
    half, fp8 = replace(EQUAL, dtype="bfloat16"), replace(EQUAL, dtype="bfloat16", is_fp8=True)
    exact = checks.limits_of(half, False)
    assert exact == checks.limits_of(half, True)
    assert checks.limits_of(fp8, False).head == 2 * exact.head < checks.limits_of(fp8, True).head
    assert checks.limits_of(fp8, True, 4.0).row == 4 * checks.limits_of(fp8, True).row
    assert checks.limits_of(fp8, False, 4.0) == checks.limits_of(fp8, False)


# Runs, with fake clocks


def fake_peer(
    name: str, ways: dict[str, float] | None = None, raises: Exception | None = None
) -> ServingPeer:
    """Plain attention times the factor of each way, under names that the fake stopwatch knows."""

    def bind(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
        if raises is not None:
            raise raises

        def launch_of(way: str, factor: float) -> Launch:
            def launch() -> Tensor:
                if math.isnan(factor):
                    raise NotImplementedError(f"no {way}")
                return attend_plainly(workload, inputs) * factor

            launch.__name__ = f"{name} {way}".strip()
            return launch

        return {way: launch_of(way, factor) for way, factor in (ways or {"": 1.0}).items()}

    takes = {"takes": lambda workload: not workload.is_plain} if name == "ours_plain" else {}
    return ServingPeer(name, f"Fake {name}", always_available, lambda setting: "1.0", bind, **takes)


COSTS = {"ours": 1e-3, "ours_plain": 0.99e-3, "fa3": 1.2e-3, "fa4 slow": 3e-3, "fa4 fast": 1.1e-3}
COSTS |= {"fa4 wrong": 1e-4}
EFFORT = Effort(measure_s=0.004, min_rounds=2, max_rounds=5, budget_s=60.0)


def watch_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of many calls keep the name of the first, and take two times what the costs say."""
    watch = FakeStopwatch({name: Calibration(2 * seconds, 1e-6) for name, seconds in COSTS.items()})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)

    def as_one(launches: Sequence[Launch], setting: Setting) -> tuple[Launch, str]:
        assert len(launches) == 2
        launch = run.in_turn(launches)
        launch.__name__ = launches[0].__name__
        return launch, ""

    monkeypatch.setattr(run, "as_one", as_one)


def run_fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[ServingReport, list[ServingReport]]:
    watch_fakes(monkeypatch)
    saved: list[ServingReport] = []
    ways = {"slow": 1.0, "wrong": 1.1, "missing": math.nan, "fast": 1.0}
    absent = replace(fake_peer("cudnn"), why_unavailable=lambda setting: "not today")
    peers = (*map(fake_peer, ("ours", "ours_plain", "fa3")), fake_peer("fa4", ways), absent)
    report = run_serving(
        (RAGGED, EQUAL, PAGED), peers, SETTING, EFFORT, commit="c0ffee" * 6, save=saved.append
    )
    return report, saved


def test_a_run_checks_then_times_the_fastest_right_way(monkeypatch: pytest.MonkeyPatch) -> None:
    report, saved = run_fakes(monkeypatch)
    assert [len(partial.cells) for partial in saved] == [0, 1, 2, 3]
    first, _, paged = report.cells
    ours, fa4 = first.peers["ours"], first.peers["fa4"]
    assert isinstance(ours, Measured) and ours.rounds == 5 and ours.error < 1e-6
    assert first.us("ours") == pytest.approx(1000, rel=0.03) and (first.input_sets, first.calls) == (2, 2)
    assert isinstance(fa4, Measured) and fa4.note == "fast"
    assert first.best_peer == "fa4" and first.ratio == pytest.approx(1.1, rel=0.03)
    assert first.gbs("ours") == pytest.approx(RAGGED.kv_bytes / 1e-3 * 1e-9, rel=0.03)
    assert first.tflops("ours") == pytest.approx(RAGGED.flops / 1e-3 * 1e-12, rel=0.03)
    assert "ours_plain" not in first.peers and paged.over("ours_plain") == pytest.approx(0.99, rel=0.03)
    assert math.isnan(first.us("cudnn")) and report.available == ["ours", "ours_plain", "fa3", "fa4"]
    assert serving_problems(report) == ["cudnn: not today"] and report.host == {}


def test_what_cannot_run_says_so_and_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_fakes(monkeypatch)
    peers = (
        fake_peer("ours"),
        fake_peer("fa3", raises=NotImplementedError("has no pages")),
        fake_peer("fa4", {"wrong": 1.1, "missing": math.nan}),
        fake_peer("fa2", raises=torch.OutOfMemoryError("too large")),
    )
    report = run_serving((EQUAL,), peers, SETTING, EFFORT)
    (cell,) = report.cells
    failed = {name: result.reason for name, result in cell.peers.items() if isinstance(result, Failed)}
    assert failed["fa3"] == "NotImplementedError: has no pages" and "too large" in failed["fa2"]
    assert failed["fa4"].startswith("wrong result: sequence 0") and "ours" not in failed
    lines = serving_problems(report)
    assert any(line.startswith("fa4 on fp32-decode-2x40-q1-h4-hk2-d16: wrong result") for line in lines)


def test_without_memory_for_inputs_all_fail_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_fakes(monkeypatch)
    real = run.draw_set

    def draw(workload: ServingWorkload, *given: Any) -> CacheInputs:
        if workload is RAGGED:
            raise torch.OutOfMemoryError("no room for the cache")
        return real(workload, *given)

    monkeypatch.setattr(run, "draw_set", draw)
    report = run_serving((RAGGED, EQUAL), (fake_peer("ours"),), SETTING, EFFORT)
    first, second = (cell.peers["ours"] for cell in report.cells)
    assert isinstance(first, Failed) and "no room for the cache" in first.reason
    assert isinstance(second, Measured)
    assert not serving_targets(report)[-1].met


def test_a_call_that_leaves_new_keys_unwritten_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
        complete = appended(workload, inputs)
        return {"": lambda: attend_plainly(workload, complete)}

    forgets = replace(fake_peer("fa3"), bind=bind)
    (cell,) = run_serving((APPENDED,), (fake_peer("ours"), forgets), SETTING, EFFORT).cells
    found = cell.peers["fa3"]
    assert isinstance(found, Failed) and "of out are not finite" in found.reason
    assert isinstance(cell.peers["ours"], Measured)


def test_a_lost_gpu_ends_the_run_and_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_fakes(monkeypatch)
    saved: list[ServingReport] = []
    peers = (fake_peer("ours"), fake_peer("fa4", raises=GpuLostError("a kernel hangs")))
    with pytest.raises(WorkloadLostError, match=r"fp32-decode-2x40.*fa4: a kernel hangs"):
        run_serving((EQUAL,), peers, SETTING, EFFORT, save=saved.append)
    assert len(saved) == 1 and saved[0].cells == ()
    with pytest.raises(ValueError, match="device is cpu, allowed there"):
        run_serving(WORKLOADS, peers, SETTING, EFFORT)
    with pytest.raises(ValueError, match="inputs is 'flat', allowed: normal, peaky"):
        run_serving((EQUAL,), peers, SETTING, EFFORT, family="flat")


def test_calls_are_one_graph_or_eager_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []

    def launch_of(number: int) -> Launch:
        def launch() -> int:
            played.append(number)
            return number

        return launch

    launches = [launch_of(i) for i in range(3)]
    one, note = run.as_one(launches, SETTING)
    assert note == "" and one() == 0 and played == [0, 1, 2]

    def refuse(launches: Sequence[Launch]) -> Launch:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(run, "as_graph", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    one, note = run.as_one(launches, GPU)
    assert note == "eager calls: RuntimeError: not while capturing" and one() == 0 and len(played) == 6


def test_a_graph_is_captured_once_and_returns_what_its_first_call_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []

    class FakeGraph:
        def replay(self) -> None:
            steps.append("replay")

    @contextmanager
    def capture(graph: FakeGraph) -> Iterator[None]:
        steps.append("begin")
        yield
        steps.append("end")

    def launch_of(name: str) -> Launch:
        def launch() -> str:
            steps.append(name)
            return name

        return launch

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    launches = [launch_of("a"), launch_of("b")]
    read_by_replays = [weakref.ref(launch) for launch in launches]
    one, note = run.as_one(launches, GPU)
    del launches
    assert all(reference() is not None for reference in read_by_replays)
    assert note == "" and steps == ["begin", "a", "b", "end"]
    assert one() == one() == "a" and steps[4:] == ["replay", "replay"]


def test_no_call_finds_its_keys_in_l2() -> None:
    for workload in ALL_WORKLOADS:
        sets = run.count_sets(workload, GPU)
        passes = run.count_passes(workload, sets, GPU)
        assert sets >= 2 and sets * workload.kv_bytes > run.KV_BYTES
        assert sets * passes <= run.MAX_CALLS
        assert sets * passes * workload.kv_bytes >= 0.39 * run.READ_BYTES
    assert run.count_sets(spec.equal(64, 8), GPU) == 2
    assert (run.count_sets(EQUAL, SETTING), run.count_passes(EQUAL, 2, SETTING)) == (2, 1)


def test_host_time_is_measured_with_the_short_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "SHORT", EQUAL)
    monkeypatch.setattr(run.measure_host, "__defaults__", (2, 3))
    peers = (
        fake_peer("ours"),
        fake_peer("fa3", raises=NotImplementedError("has no cache")),
        fake_peer("torch"),
    )
    report = run_serving((RAGGED, EQUAL), peers, SETTING, EFFORT)
    ours, fa3 = report.host["ours"], report.host["fa3"]
    assert isinstance(ours, HostTime) and ours.median_us > 0 and set(report.host) == {"ours", "fa3"}
    assert isinstance(fa3, Failed) and "has no cache" in fa3.reason
    assert "host time of fa3: NotImplementedError: has no cache" in serving_problems(report)
    assert load_serving(dump_serving(report)).host["fa3"] == fa3


# Reports


def report_of(
    *cells: tuple[ServingWorkload, dict[str, float]], host: dict[str, HostTime | Failed] | None = None
) -> ServingReport:
    """A report on an H200 with these times in microseconds."""
    head = head_of("serving", (name for _, times in cells for name in times))
    made = (
        ServingCell(w, 2, 1500.0, None, {n: measured(us) for n, us in times.items()}, 4) for w, times in cells
    )
    return ServingReport(head, tuple(made), host or {})


def workload(part: str) -> ServingWorkload:
    """The one with the shortest name that has this part."""
    return min(pick_workloads(part, ALL_WORKLOADS), key=lambda found: len(found.name))


def test_promises_are_a_ratio_a_time_or_against_the_plain_call() -> None:
    large, short, paged = workload("64x8k-q1"), spec.SHORT, workload("1x128k*page64")
    prefill, new, eight = workload("prefill-4x8k*page16"), workload("64x8k*append"), workload("1x64k*e4m3")
    report = report_of(
        (large, {"ours": 480.0, "fa3": 490.0, "cudnn": 481.0}),
        (short, {"ours": 7.0, "cudnn": 7.5}),
        (paged, {"ours": 128.0, "ours_plain": 125.0, "fa3_best": 130.0}),
        (prefill, {"ours": 450.0, "ours_plain": 400.0, "fa4": 488.0}),
        (new, {"ours": 489.0, "ours_plain": 485.0, "fa3": 508.0}),
        (eight, {"ours": 35.0, "ours_known": 34.0, "ours_fp8q": 37.0, "fa3": 47.0}),
        (RAGGED, {"ours": 1.0, "fa3": 1.0}),
        host={"ours": HostTime(13.0, 0.1), "fa3": Failed("no")},
    )
    found = [(t.what, t.required, t.measured, t.met) for t in serving_targets(report)]
    assert found == [
        (large.name, ">= 1.00", "1.002 of cudnn", True),
        (short.name, "<= 6.5 us", "7.0 us", False),
        (paged.name, ">= 0.97 of no pages", "0.977", True),
        (prefill.name, ">= 1.10", "1.084 of fa4", False),
        (new.name, "<= 5 us over no new keys", "4.0 us", True),
        (eight.name, "<= 36 us", "35.0 us", True),
        (f"{eight.name}, known lengths", "<= 36 us", "34.0 us", True),
        (f"{eight.name}, FP8 queries", "<= 36 us", "37.0 us", False),
        (f"host time a call, {short.name}", "<= 12 us", "13.0 us", False),
    ]
    on_h100 = replace(report, head=report.head | {"machine": {"gpu": "NVIDIA H100 80GB HBM3"}})
    kept = [(t.what, t.required, t.measured, t.met) for t in serving_targets(on_h100)]
    assert kept == [row for row in found if row[1] not in ("<= 6.5 us", "<= 36 us")]
    broken = replace(report.cells[0], peers={"ours_plain": Failed("no")})
    last = serving_targets(replace(report, cells=(broken,)))[-1]
    assert not last.met and f"{large.name} (ours_plain)" in last.measured
    promised = {w for w in ALL_WORKLOADS if serving_targets(report_of((w, dict.fromkeys(PROMISING, 9.0))))}
    assert len(promised) == len(spec.GROUPED) - 2 + 3 + 6 + 8 + 2 + 3 + 4


PROMISING = ("ours", "ours_plain", "fa3")


def test_reports_survive_json_and_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, _ = run_fakes(monkeypatch)
    report = replace(report, host={"ours": HostTime(9.5, 0.02), "fa3": Failed("no")})
    text = dump_serving(report)
    again = load_serving(text)
    assert dump_serving(again) == text and [c.workload for c in again.cells] == [RAGGED, EQUAL, PAGED]
    record = json.loads(text)["cells"][0]
    assert record["workload"]["lengths"] == [70, 9, 33] and record["limit_us"] > 0 and record["calls"] == 2
    with pytest.raises(ValueError, match="allowed: kind 'serving'"):
        load_serving(text.replace('"serving"', '"forward"'))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(serving_table(again))
        console.print(host_table(again))
    shown = captured.get()
    assert "3 to 70" in shown and "pages of 8" in shown and f"{again.cells[0].ratio:.3f}" in shown
    assert "9.5" in shown and "12 us" in shown and "failed" in shown
    page = render_serving(again, "serving.png")
    assert "## Pages" not in page and "## Ragged sequences" in page and "## Decode" in page
    assert "Ragged lengths, 3 in all: 70, 9, 33." in page and "- cudnn: not today" in page
    assert "| ours | 9.5 | 2 % | 12 us |" in page and "| fa4 | fast |" in page
    drawing = plot_serving(again, tmp_path / "serving.svg").read_text()
    assert "Ragged sequences" in drawing and "Fake fa4" in drawing and "Prefill" not in drawing
    with pytest.raises(ValueError, match="the report has no cells"):
        plot_serving(replace(again, cells=()), tmp_path / "none.svg")


def test_reports_are_compared_workload_by_workload() -> None:
    times = {"ours": 400.0, "fa3": 440.0}
    before, after = (
        dump_serving(report_of((RAGGED, times | {"ours": us}), host={"ours": HostTime(us / 20, 0.0)}))
        for us in (400.0, 200.0)
    )
    compared = {(c.after.who, c.after.unit): c.speedup for c in compare(before, after)}
    expected = {("ours", "us"): 2.0, ("fa3", "us"): 1.0, (OVER_BEST, ""): 2.0, ("ours", "us host"): 2.0}
    assert compared == expected


def test_the_page_is_rendered_once_there_is_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    results.mkdir()
    shutil.copy(ROOT / "benchmarks" / "results" / f"forward_{render.GPU}.json", results)
    page = ROOT / "docs" / "results" / "serving.md"
    assert page not in render.render(ROOT, results)
    report = report_of((spec.equal(64, 8), {"ours": 480.0, "fa3": 490.0}))
    (results / f"serving_{render.GPU}.json").write_text(dump_serving(report))
    text = render.render(ROOT, results)[page]
    row = "| 64 x 8k | 1 | 32/8 | – | 480.0 | 490.0 | 1.021 | 4474 GB/s | 505.5 | 105 % | ratio 1.00 |"
    assert row in text and "| yes |" in text
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    assert "serving.png" in [path.name for path in render.draw(tmp_path, results)]
