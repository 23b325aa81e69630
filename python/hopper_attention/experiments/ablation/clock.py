"""How much of an ablation's ratios is clock: rates by cycle, and what the readings of a kernel alone are good for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hopper_attention.experiments.ablation.results import FP8, AblationReport, Row, Won
from hopper_attention.experiments.ablation.variants import FULL
from hopper_attention.experiments.reports import markdown_table, number
from hopper_attention.experiments.roofline.units import TENSOR_FLOPS

HEADINGS = (
    "MHz", "FLOP a cycle and SM", "of the tensor cores' peak", "/ full", "/ full by cycle",
    "alone: MHz", "W", "FLOP a cycle and SM", "/ full", "pJ a FLOP",
)  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """TFLOP/s, the SM clock (MHz) and the board power (W) under which they were reached; NaN for what is not known."""

    tflops: float
    clock_mhz: float
    power_w: float

    def by_cycle(self, sms: int) -> float:
        """FLOP that an SM does in a clock cycle."""
        return self.tflops * 1e6 / (self.clock_mhz * sms) if sms else math.nan

    @property
    def picojoules(self) -> float:
        """Energy of a FLOP."""
        return self.power_w / self.tflops if self.tflops else math.nan


def rate(tflops: float, clock_mhz: float | None, power_w: float | None) -> Rate:
    return Rate(tflops, clock_mhz or math.nan, power_w or math.nan)


def in_rounds(won: Won) -> Rate:
    """Of a row, in the rounds that it shares with all others."""
    return rate(won.measured.tflops, won.measured.clock_mhz, won.measured.power_w)


def alone(won: Won) -> Rate:
    """Of a row, at the end of the time in which it runs alone."""
    return rate(won.soak.tflops, won.soak.clock_mhz, won.soak.power_w)


def clock_spread(report: AblationReport) -> float:
    """Range of the rows' clocks in the rounds over the lowest; NaN if some were not read."""
    clocks = [in_rounds(won).clock_mhz for _, won in report.won()]
    return max(clocks) / min(clocks) - 1 if clocks and not any(map(math.isnan, clocks)) else math.nan


def same_kernel_twice(report: AblationReport) -> list[tuple[Row, Row, float]]:
    """Pairs of rows for which the same kernel stands, with the relative difference of their rates alone."""
    rows = report.won()
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :] if a[1].config == b[1].config]
    return [(a[0], b[0], abs(a[1].soak.tflops / b[1].soak.tflops - 1)) for a, b in pairs]


def render_clock(report: AblationReport) -> list[str]:
    """The part of a page that tells clock from cycles; nothing without readings of the clock or without all rows'."""
    full = report.row(FULL)
    spread = clock_spread(report)
    if full is None or not isinstance(full.outcome, Won) or math.isnan(spread):
        return []
    sms = int(report.machine.get("sms", 0))
    peak = TENSOR_FLOPS[1 if report.precision == FP8 else 2]
    rows = [[row.title, *clock_cells(won, full.outcome, sms, peak)] for row, won in report.won()]
    return [
        "### Clock or cycles",
        markdown_table(["kernel", *HEADINGS], rows),
        f"First in the interleaved rounds, then alone. The peak is {peak} FLOP a cycle and SM. In the rounds the "
        f"clocks of the rows, as the driver reports them, differ by {100 * spread:.1f} % at most: so much of a ratio "
        "may be clock, and no more. A measurement lasts about as long as the pause between two readings, so this holds "
        "for medians over the rounds. Power is not told apart there: the driver averages it over about a second.",
        *repeat_lines(same_kernel_twice(report)),
    ]


def clock_cells(won: Won, full: Won, sms: int, peak: int) -> list[str]:
    """A row's cells, in the order of HEADINGS."""
    ours, base = in_rounds(won), in_rounds(full)
    hot, hot_base = alone(won), alone(full)
    by_cycle = ours.by_cycle(sms)
    return [
        number(ours.clock_mhz),
        number(by_cycle),
        f"{100 * by_cycle / peak:.0f} %" if sms else number(math.nan),
        number(won.ratio, 3),
        number(ours.tflops / ours.clock_mhz / (base.tflops / base.clock_mhz), 3),
        number(hot.clock_mhz),
        number(hot.power_w),
        number(hot.by_cycle(sms)),
        number(hot.tflops / hot_base.tflops, 3),
        number(hot.picojoules, 2),
    ]


def repeat_lines(pairs: Sequence[tuple[Row, Row, float]]) -> list[str]:
    """What two rows of one kernel say about the readings alone."""
    return [
        f"The kernels of *{a.title}* and *{b.title}* are the same; alone they differ by {100 * share:.1f} %. A smaller "
        "difference between two rows alone means nothing."
        for a, b, share in pairs
    ]
