"""What L2 holds before a batch of the serving benchmark is the same for all peers."""

from __future__ import annotations

from hopper_attention.experiments.bench.timing import AfterOtherWork, Calibration
from hopper_attention.experiments.serving import run
from tests.python.experiments.fakes import FakeStopwatch


def test_a_batch_and_the_launch_before_it_come_after_other_work() -> None:
    watch, done = FakeStopwatch({"launch": Calibration(1e-3, 1e-6)}), []

    def launch() -> None:
        done.append("launch")

    behind = AfterOtherWork(watch, lambda: done.append("other"))
    assert behind.calibrate([launch]) == watch.costs["launch"] and done == []
    interval = behind.measure([launch], 3, 0.0)
    assert done == ["other", "launch"] and watch.played == ["launch"]
    assert interval == FakeStopwatch(watch.costs).measure([launch], 3, 0.0)
    behind.synchronize()


def test_other_memory_fills_l2_twice() -> None:
    watch = FakeStopwatch({})
    assert run.after_others(watch, 0, "cpu") is watch
    behind = run.after_others(watch, 50 << 20, "cpu")
    assert isinstance(behind, AfterOtherWork) and behind.stopwatch is watch and behind.work() == 0
    assert run.other_memory(50 << 20, "cpu").nbytes == 100 << 20
