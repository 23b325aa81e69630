"""The order within rounds: each in each place, and right behind each other, equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.suites import SUITES
from hopper_attention.experiments.bench.timing import BALANCED, Calibration, Effort, order_of_round
from hopper_attention.experiments.features import run as features
from hopper_attention.experiments.features.spec import FAMILIES
from hopper_attention.experiments.prepass import run as prepass
from hopper_attention.experiments.scaling import run as scaling
from hopper_attention.experiments.serving import run as serving
from hopper_attention.fp8 import DEFAULT_QUANTIZATION
from tests.python.experiments.fakes import FakeStopwatch, fake_peer


def rounds_of(count: int) -> list[list[str]]:
    """A full set: as many rounds as there are ways, twice as many where their number is odd."""
    names = [f"way {number}" for number in range(count)]
    return [order_of_round(names, number) for number in range(count * (1 + count % 2))]


@pytest.mark.parametrize("count", range(1, 12))
def test_each_stands_in_each_place_equally_often(count: int) -> None:
    rounds = rounds_of(count)
    for place in range(count):
        stood = Counter(row[place] for row in rounds)
        assert set(stood.values()) == {len(rounds) // count}
        assert len(stood) == count


@pytest.mark.parametrize("count", range(2, 12))
def test_each_follows_each_other_equally_often(count: int) -> None:
    rounds = rounds_of(count)
    followed = Counter(pair for row in rounds for pair in pairwise(row))
    assert len(followed) == count * (count - 1)
    assert set(followed.values()) == {len(rounds) // count}


@pytest.mark.parametrize("count", range(3, 12))
def test_none_ends_a_round_and_begins_the_next(count: int) -> None:
    rounds = rounds_of(count)
    assert all(before[-1] != after[0] for before, after in pairwise([*rounds, rounds[0]]))


@pytest.mark.parametrize("count", range(1, 12))
def test_every_round_has_all_once_and_the_first_is_led_by_the_first(count: int) -> None:
    names = [f"way {number}" for number in range(count)]
    assert order_of_round(names, 0)[0] == names[0]
    assert all(sorted(order_of_round(names, number)) == sorted(names) for number in range(50))
    assert order_of_round([], 3) == []


def test_eleven_rounds_of_five_are_as_even_as_they_can_be_but_for_one() -> None:
    names = [f"way {number}" for number in range(5)]
    rounds = [order_of_round(names, number) for number in range(Effort().max_rounds)]
    followed = Counter(pair for row in rounds for pair in pairwise(row))
    assert len(followed) == 20
    assert set(followed.values()) <= {2, 3}


def test_who_is_wrong_or_refuses_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]
    watch = FakeStopwatch({name: Calibration(device_s=0.01, host_s=0.0) for name in names})
    monkeypatch.setattr(bench, "stopwatch_for", lambda device: watch)
    peers = [fake_peer(name) for name in names]
    peers[1:1] = [fake_peer("wrong", scale=1.5), fake_peer("refuses", raises="no")]
    problem = Problem("float32", 1, 24, 24, 4, 2, 16, 16, causal=True)
    report = bench.run_forward([problem], tuple(peers), Setting("cpu"), Effort(max_rounds=6))
    assert report.method["order"] == BALANCED
    results = report.cells[0].peers
    assert isinstance(results["wrong"], Failed) and isinstance(results["refuses"], Failed)
    assert watch.played == [name for number in range(6) for name in order_of_round(names, number)]


def test_every_report_that_times_in_turns_says_the_order() -> None:
    effort = Effort()
    methods = [bench.describe_method(suite, effort) for suite in SUITES.values()]
    methods += [
        features.describe_method(FAMILIES["normal"], effort, "NVIDIA H200"),
        scaling.describe_method(effort),
    ]
    methods += [serving.describe_method(FAMILIES["normal"], effort, "NVIDIA H200")]
    methods += [prepass.describe_method(DEFAULT_QUANTIZATION, effort)]
    assert {method["order"] for method in methods} == {BALANCED}
