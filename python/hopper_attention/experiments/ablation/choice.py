"""Which candidate stands for each row of the ablation, found in two heats.

In the first, all candidates are timed one after the other. What it says of one depends on who ran before it, since the
clock follows the power; so it only drops those that are far behind. In the second the others take turns beside the
full kernel, as the rows do afterwards, at the clock and power of the rows: whoever has the best ratio to it stands for
the row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hopper.config import ForwardConfig
from hopper_attention.experiments.ablation.results import Trial
from hopper_attention.experiments.ablation.variants import Field
from hopper_attention.experiments.bench.config_peers import label
from hopper_attention.experiments.bench.results import Failed, relative_spread
from hopper_attention.experiments.bench.run import Admitted, Bench
from hopper_attention.experiments.bench.timing import Budget, Effort, Interval, Turn, beside

FAR_BEHIND = 0.85
"""Share of the best rate of a row below which a candidate is not in the second heat."""

SECOND_HEAT = 4
"""Candidates of a row in the second heat, at most."""


def run_first_heat(
    bench: Bench, admitted: Admitted, turns: dict[str, Turn], effort: Effort
) -> dict[str, float]:
    """TFLOP/s of every candidate, by config name."""
    heat = replace(bench, effort=effort, budget=Budget(effort.budget_s))
    taken = heat.play_turns(admitted.entries, turns, 1)
    work = bench.suite.work * admitted.problem.flops * 1e-12
    return {name: work / statistics.median(i.seconds for i in spans) for name, spans in taken.items()}


def run_second_heat(
    bench: Bench,
    admitted: Admitted,
    turns: dict[str, Turn],
    effort: Effort,
    names: Sequence[str],
    anchor: str,
) -> dict[str, float]:
    """Ratios of some candidates to the config ``anchor``, which must be among the admitted to give any."""
    if not names or anchor not in turns:
        return {}
    order = beside(anchor)
    heat = replace(bench, effort=effort, budget=Budget(effort.budget_s), order=order)
    chosen = {name: turns[name] for name in dict.fromkeys((anchor, *names))}
    taken = heat.play_turns(admitted.entries, chosen, 1)
    return {name: paired_ratio(taken[anchor], taken[name])[0] for name in names}


def survivors(field: Field, rates: Mapping[str, float]) -> list[str]:
    """Who of a row is in the second heat, the fastest first; nobody where there is nothing to choose."""
    names = sorted((c.name for c in field.configs if c.name in rates), key=lambda name: -rates[name])
    near = [name for name in names if rates[name] >= FAR_BEHIND * rates[names[0]]]
    return near[:SECOND_HEAT] if len(near) > 1 else []


@dataclass(frozen=True)
class Heats:
    """Figures of the candidates, by config name: TFLOP/s in the first heat, ratio to the full kernel in the second."""

    rates: Mapping[str, float]
    ratios: Mapping[str, float]

    def pick(self, field: Field) -> tuple[ForwardConfig, ...]:
        """Who stands for a row: of those in the second heat, if there was one, the best; nobody if none has a
        figure."""
        figures = self.ratios if any(c.name in self.ratios for c in field.configs) else self.rates
        timed = [config for config in field.configs if config.name in figures]
        return tuple(sorted(timed, key=lambda config: -figures[config.name])[:1])

    def trials(self, field: Field, failed: Mapping[str, Failed], shipped: ForwardConfig) -> tuple[Trial, ...]:
        """What became of each candidate for a row."""
        found = []
        for config in field.configs:
            name, reason = config.name, ""
            if name not in self.rates:
                reason = failed[name].reason if name in failed else "not timed"
            rate, ratio = self.rates.get(name, 0.0), self.ratios.get(name, 0.0)
            found.append(Trial(name, label(config, shipped), rate, reason, ratio))
        found += [Trial(name, name, 0.0, reason) for name, reason in field.left_out.items()]
        return tuple(found)


def paired_ratio(full: Sequence[Interval], row: Sequence[Interval]) -> tuple[float, float]:
    """Rate of a row over the full kernel's: median of the ratios of each round, and their interquartile range over
    it. The full kernel's time is the mean of its measurements just before and just after. NaN without any."""
    if not full or not row:
        return math.nan, math.nan
    ratios = [statistics.fmean(i.seconds for i in neighbours(full, each)) / each.seconds for each in row]
    return statistics.median(ratios), relative_spread(ratios)


def neighbours(full: Sequence[Interval], interval: Interval) -> list[Interval]:
    """The last of ``full`` that ended before ``interval`` and the first that began after it, as far as there are."""
    before = [each for each in full if each.stop <= interval.start]
    after = [each for each in full if each.start >= interval.stop]
    return before[-1:] + after[:1]
