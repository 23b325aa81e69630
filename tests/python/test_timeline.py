"""The timeline of a CTA, on events made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopper_attention.experiments import timeline
from hopper_attention.experiments.timeline import GEMM_0, GEMM_1, SOFTMAX, Event

EVENTS = [
    Event(0, GEMM_0, 1000, 1100, 3),
    Event(0, SOFTMAX, 1100, 1300, 3),
    Event(1, GEMM_0, 1150, 1250, 3),
    Event(1, SOFTMAX, 1250, 1450, 3),
    Event(0, GEMM_1, 1300, 1400, 3),
]


def test_softmax_is_hidden_where_any_gemm_runs() -> None:
    # Of warpgroup 0's softmax 100 of 200 clocks lie under the other's GEMM, of warpgroup 1's 100 of 200 too.
    assert timeline.hidden_share(EVENTS) == pytest.approx(0.5)
    # GEMMs run in [1000, 1100], [1150, 1250] and [1300, 1400] of [1000, 1450].
    assert timeline.busy_share(EVENTS) == pytest.approx(300 / 450)
    assert timeline.hidden_share(EVENTS[:2]) == 0.0
    assert timeline.hidden_share([]) == timeline.busy_share([]) == 0.0


def test_overlapping_gemms_count_once() -> None:
    both = [Event(0, GEMM_0, 0, 100, 0), Event(1, GEMM_1, 50, 150, 0), Event(1, GEMM_1, 150, 160, 0)]
    assert timeline.merged(both) == [(0, 160)]
    assert timeline.hidden_share([*both, Event(0, SOFTMAX, 40, 200, 0)]) == pytest.approx(120 / 160)


def test_events_survive_json_and_are_checked() -> None:
    assert timeline.load_events(timeline.dump_events(EVENTS)) == EVENTS
    with pytest.raises(ValueError, match="unit is 'tma', allowed: gemm0, softmax, gemm1"):
        Event(0, "tma", 0, 1, 0)
    with pytest.raises(ValueError, match="stop is 4, allowed: 5"):
        Event(0, SOFTMAX, 5, 4, 0)


def test_events_come_from_what_a_kernel_records() -> None:
    first = [[[10, 20], [20, 35], [36, 50]], [[22, 30], [35, 48], [0, 0]]]
    second = [[[0, 0], [0, 0], [60, 70]], [[61, 71], [72, 80], [81, 90]]]
    events = timeline.events_of([first, second])
    assert len(events) == 3 + 2 + 1 + 3
    assert events[0] == Event(0, GEMM_0, 10, 20, 1)
    assert events[4] == Event(0, SOFTMAX, 35, 48, 0)
    assert events[5] == Event(1, GEMM_1, 60, 70, 1)


def test_the_drawing_has_a_row_for_each_warpgroup_and_unit(tmp_path: Path) -> None:
    path = timeline.plot_timeline(EVENTS, tmp_path / "sub" / "timeline.svg", "Two warpgroups", "d128")
    drawing = path.read_text()
    for warpgroup in (0, 1):
        for title in timeline.TITLES.values():
            assert f"warpgroup {warpgroup}   {title}" in drawing
    assert "50 % of the softmax under a GEMM, a GEMM in flight 67 % of the time" in drawing
    with pytest.raises(ValueError, match="events is empty"):
        timeline.plot_timeline([], tmp_path / "none.svg", "Nothing")
