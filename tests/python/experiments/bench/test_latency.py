"""The latency benchmark, with fake clocks and fake graphs; no speed is asserted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import latency as latency_script
from hopper_attention.experiments.bench import latency as bench_latency
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.latency import Calls, CallTimes
from hopper_attention.experiments.bench.render import render_latency
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.tables import latency_table
from hopper_attention.experiments.bench.timing import Calibration
from hopper_attention.experiments.bench.words import latency_problems
from hopper_attention.experiments.reports import dump_figures, load_figures
from tests.python.experiments.fakes import FakeStopwatch, fake_peer

SETTING = bench_peers.Setting("cpu")
TINY = Problem("bfloat16", 1, 16, 16, 1, 1, 32, 32, causal=False)


def test_time_of_calls_is_taken_before_the_queue_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    clock = iter([10.0, 10.0003])

    def now() -> float:
        events.append("clock")
        return next(clock)

    monkeypatch.setattr(bench_latency.time, "perf_counter", now)
    us = bench_latency.time_calls(lambda: events.append("call"), 3, lambda: events.append("wait"))
    assert us == pytest.approx(100.0)
    assert events == ["wait", "clock", "call", "call", "call", "clock", "wait"]


def test_time_to_the_result_includes_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    clock = iter([1.0, 1.00002, 2.0, 2.00004, 3.0, 3.00009])
    monkeypatch.setattr(bench_latency.time, "perf_counter", lambda: events.append("clock") or next(clock))
    us = bench_latency.time_waits(lambda: events.append("call"), 3, lambda: events.append("wait"))
    assert us == pytest.approx(40.0)
    assert events == ["wait", "clock", "call", "wait", "clock"] * 3


class FakeGraph:
    """Counts what was captured and how often it was replayed."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def fake_capture(monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> list[FakeGraph]:
    graphs: list[FakeGraph] = []

    @contextlib.contextmanager
    def capturing(graph: FakeGraph) -> Iterator[None]:
        graphs.append(graph)
        yield
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    return graphs


def test_a_graph_of_many_calls_is_replayed_and_its_time_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, calls = fake_capture(monkeypatch), []
    watch = FakeStopwatch({"replay": Calibration(100e-6, 1e-6)})
    setting = bench_peers.Setting("cuda")
    us, reason = bench_latency.time_graph(lambda: calls.append(1), watch, setting)
    assert (us, reason) == (pytest.approx(100 / 20), "")
    assert len(graphs) == 1 and len(calls) == 20


def test_a_peer_that_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_capture(monkeypatch, fails=True)
    us, reason = bench_latency.time_graph(lambda: None, FakeStopwatch({}), bench_peers.Setting("cuda"))
    assert math.isnan(us)
    assert reason == "RuntimeError: operation not permitted when stream is capturing"
    assert bench_latency.time_graph(lambda: None, FakeStopwatch({}), SETTING)[1].startswith("CUDA graphs")


def test_a_peer_that_fails_has_no_latency() -> None:
    peers = [fake_peer("works"), fake_peer("broken", raises="no such shape")]
    times = bench_latency.measure_calls(TINY, peers, SETTING, Calls(2, 3))
    assert times["broken"] == Failed("NotImplementedError: no such shape")
    works = times["works"]
    assert isinstance(works, CallTimes)
    assert works.host_us > 0 and works.device_us > 0 and works.wait_us > 0 and math.isnan(works.graph_us)


def test_too_few_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="calls is 0, rounds is 11, allowed: 1 or more"):
        Calls(0)


FAKE_FIRST_CALL = """
import json, os, sys
folders = {os.environ[name] for name in ("HOPPER_ATTENTION_CACHE_DIR", "CUTE_DSL_CACHE_DIR")}
assert len(folders) == 1 and sys.argv[1] == "cpu"
marker = os.path.join(folders.pop(), "kernel.o")
cached = os.path.exists(marker)
open(marker, "w").close()
print("a line of someone else")
print(json.dumps({"total": 0.25 if cached else 3.0, "ok": True}))
"""


def test_first_calls_are_made_with_an_empty_and_then_a_filled_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "first_call.py"
    script.write_text(FAKE_FIRST_CALL)
    monkeypatch.setattr(bench_latency, "FIRST_CALL", script)
    figures = bench_latency.measure_first_call("cpu", runs=2)
    assert figures == {
        "nothing cached": {"median": 3.0, "runs": [3.0, 3.0]},
        "cached on disk": {"median": 0.25, "runs": [0.25, 0.25]},
    }
    assert bench_latency.measure_first_call("cpu", runs=0) == {}
    script.write_text("raise SystemExit('no kernel')")
    with pytest.raises(RuntimeError, match="the first call failed: no kernel"):
        bench_latency.measure_first_call("cpu", runs=1)


def test_the_first_call_that_is_timed_works_from_its_text() -> None:
    compile(bench_latency.FIRST_CALL.read_text(), "first_call", "exec")
    assert "hopper_attention" in bench_latency.FIRST_CALL.read_text()


def run_small(monkeypatch: pytest.MonkeyPatch) -> tuple[dict, list[dict]]:
    first_calls = {"nothing cached": {"median": 2.5, "runs": [2.5]}}
    monkeypatch.setattr(bench_latency, "measure_first_call", lambda device, runs: first_calls)
    absent = replace(fake_peer("fa3"), why_unavailable=lambda setting: "not installed")
    peers = (fake_peer("ours"), fake_peer("broken", raises="too small"), absent)
    saved: list[dict] = []
    problems = [TINY, replace(TINY, causal=True)]
    figures = bench_latency.run_latency(
        problems, peers, SETTING, Calls(2, 2), commit="c0ffee" * 6, save=saved.append
    )
    return figures, saved


def test_a_run_saves_as_it_goes_and_its_report_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, saved = run_small(monkeypatch)
    assert [len(partial["small"]) for partial in saved] == [1, 2, 2]
    assert figures["problem"] == TINY.name
    assert figures["host_us"]["broken"] == {"failed": "NotImplementedError: too small"}
    assert figures["host_us"]["ours"]["median"] == figures["small"][0]["peers"]["ours"]["host_us"]
    again = load_figures(dump_figures(figures), "latency")
    console = Console(width=140)
    with console.capture() as captured:
        console.print(latency_table(again))
    text = captured.get()
    assert "failed" in text and "2.50 s" in text and text.count("ours") == 3
    lines = latency_problems(again)
    assert lines[0] == "fa3: not installed"
    assert f"broken on {TINY.name}: NotImplementedError: too small" in lines
    page = render_latency(again)
    assert "### Small shapes" in page and f"| `{TINY.name}` broken | failed | – | – | – |" in page


def test_reports_without_small_shapes_are_rendered_as_before() -> None:
    old = {"problem": TINY.name, "host_us": {}, "first_call_s": {}, "peers": {"fa3": {"unavailable": "no"}}}
    assert "Small shapes" not in render_latency(old)


def test_what_would_take_a_cpu_hours_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device is cpu, allowed there"):
        latency_script.main(["--device", "cpu", "--out", str(tmp_path / "latency.json")])
    assert bench_latency.parse_small_shapes("")[0] == bench_latency.PROBLEM
    assert [p.name for p in bench_latency.parse_small_shapes(TINY.name)] == [TINY.name]


def test_the_script_writes_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    arguments = [
        "--shapes",
        TINY.name,
        "--peers",
        "torch",
        "--calls",
        "2",
        "--rounds",
        "1",
        "--first-calls",
        "0",
    ]
    assert latency_script.main([*arguments, "--device", "cpu", "--commit", "abc", "--out", str(out)]) == 0
    data = load_figures(out.read_text(), "latency")
    assert data["commit"] == "abc" and list(data["small"][0]["peers"]) == ["torch"]
