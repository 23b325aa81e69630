"""Which candidate stands for a row of the ablation: its two heats, and the ratio by which they decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from hopper.config import ForwardConfig
from hopper.forward.tilings import select_forward_config
from hopper_attention.experiments.ablation.choice import SECOND_HEAT, Heats, paired_ratio, survivors
from hopper_attention.experiments.ablation.results import Won
from hopper_attention.experiments.ablation.variants import VARIANTS, gather
from hopper_attention.experiments.bench import run as bench
from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.timing import Interval, Launch
from tests.python.experiments.ablation.test_ablation import D128, FAST, SLOW, run_fakes
from tests.python.experiments.fakes import FakeStopwatch

FULL_D64 = select_forward_config("float16", 64, 64, False, 8448)


@dataclass
class PowerfulStopwatch(FakeStopwatch):
    """A kernel of 160 keys a tile needs more power: right after the full kernel it is slower than it was."""

    def measure(self, launches: Sequence[Launch], repeats: int, spin_s: float) -> Interval:
        name, before = launches[0].__name__, (self.played or [""])[-1]
        interval = super().measure(launches, repeats, spin_s)
        slower = 1.5 if "n160" in name and before == FULL_D64.name else 1.0
        return replace(interval, seconds=slower * interval.seconds)


def test_who_is_fastest_beside_the_full_kernel_stands_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(config: ForwardConfig) -> float:
        if config.pipelined:
            return FAST
        by_tile = {(192, 160): 1.25e-3, (128, 128): 1.30e-3}
        return by_tile.get((config.tile_m, config.tile_n), SLOW)

    report = run_fakes(monkeypatch, "no-pipelining", costs, watch=PowerfulStopwatch({}))
    without = report.rows[1]
    assert isinstance(without.outcome, Won)
    assert without.outcome.label.startswith("m128 s4 ")
    trials = {trial.label.split(" pipelined")[0]: trial for trial in without.trials}
    wide, narrow = trials["n160 s2"], trials["m128 s4 r240/24"]
    # The first heat has the other order; those far behind are in that alone.
    assert wide.tflops > narrow.tflops and wide.ratio == pytest.approx(0.8 / 1.5, rel=0.03)
    assert narrow.ratio == pytest.approx(1 / 1.3, rel=0.03)
    assert {trial.ratio for trial in without.trials} - {wide.ratio, narrow.ratio} == {0.0}
    assert without.outcome.ratio == pytest.approx(narrow.ratio, rel=0.02)


def test_few_near_the_best_are_in_the_second_heat() -> None:
    field = gather(VARIANTS["no-pipelining"], D128)
    names = [config.name for config in field.configs]
    assert survivors(field, dict.fromkeys(names, 600.0)) == names[:SECOND_HEAT]
    rates = dict.fromkeys(names, 500.0) | {names[3]: 600.0, names[5]: 511.0}
    assert survivors(field, rates) == [names[3], names[5]]
    # With one there is nothing to choose.
    assert survivors(field, dict.fromkeys(names, 500.0) | {names[3]: 600.0}) == []
    assert survivors(field, {}) == []


def test_without_a_second_heat_the_first_decides() -> None:
    field = gather(VARIANTS["one-consumer"], D128)
    first, second, third = field.configs
    rates = {first.name: 500.0, second.name: 590.0, third.name: 600.0}
    assert Heats(rates, {}).pick(field) == (third,)
    assert Heats(rates, {second.name: 0.7, third.name: 0.6}).pick(field) == (second,)
    assert Heats({}, {}).pick(field) == ()
    reasons = {first.name: Failed("wrong result")}
    trials = Heats({third.name: 600.0}, {}).trials(field, reasons, D128)
    assert [(t.tflops, t.reason) for t in trials] == [(0.0, "wrong result"), (0.0, "not timed"), (600.0, "")]


def in_turn(*seconds: float) -> list[bench.Interval]:
    """Measurements of the full kernel and of a row in turn, one after the other."""
    return [bench.Interval(s, float(i), i + 1.0) for i, s in enumerate(seconds)]


def test_a_ratio_is_to_the_full_kernel_before_and_after() -> None:
    # The clock falls steadily; a ratio to the neighbours does not notice.
    played = in_turn(1.00, 1.25 * 1.05, 1.10, 1.25 * 1.15, 1.20)
    ratio, spread = paired_ratio(played[0::2], played[1::2])
    assert ratio == pytest.approx(0.8) and spread == pytest.approx(0.0, abs=1e-12)
    # The last has only one neighbour.
    ratio, spread = paired_ratio(in_turn(1.0), in_turn(0.0, 1.25)[1:])
    assert (ratio, spread) == (0.8, 0.0)
    assert all(map(math.isnan, paired_ratio((), played)))


def test_the_spread_of_a_ratio_is_of_single_rounds() -> None:
    played = in_turn(1.0, 1.0, 1.0, 1.25, 1.0, 2.0, 1.0)
    ratio, spread = paired_ratio(played[0::2], played[1::2])
    assert ratio == 0.8 and spread == pytest.approx((0.9 - 0.65) / 0.8)
