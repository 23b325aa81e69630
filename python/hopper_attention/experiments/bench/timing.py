"""How a launch is timed: device events on a GPU, the wall clock elsewhere, and counts chosen to a budget.

Peers take turns in rounds, so that clock and temperature drift meet them all alike. Each round has an order of its own
(:func:`order_of_round`), so that none always stands behind the same one. One measurement is a short batch of launches
back to back. One launch goes before it untimed, so that the GPU is busy while the host queues the timed ones. Where a
peer's host code is slower than its kernel, the queue would still run dry; then a spin kernel holds the GPU until the
whole batch is queued. What is timed is therefore the device alone;
host time has a benchmark of its own (benchmarks/latency.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from hopper_attention.experiments.bench.results import relative_spread

Launch = Callable[[], Any]
"""Runs what is timed on inputs prepared before; returns its result, mostly out (batch, seqlen_q, heads, head_dim_v)."""

SPIN_HZ = 2.0e9
"""Clock that spin cycles are counted at; above the H200's 1.98 GHz, so that a spin is never too short."""

MAX_SPIN_S = 0.03
CALIBRATION_LAUNCHES = 4
CALIBRATION_SPIN_S = 0.003
LONG_LAUNCH_S = 1e-3
"""A launch that takes this long is calibrated by a single one, unless its host code may be what takes it."""

PATIENCE = 3
"""Times as many rounds as usual that reports have where rounds differ much."""

PRECISION = 0.005
"""Of a median: reports compare peers to a percent. It is asked of spread alone, never of who is ahead."""

MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
"""The standard error of a median over interquartile range / sqrt(count), of normal samples."""

HOST_BOUND = 0.7
"""Share of a launch's device time that the host may take before a spin kernel is put in front."""


class GpuLostError(RuntimeError):
    """The GPU did not finish in time or its context is broken: this process can measure nothing more."""


@contextmanager
def broken_context_is_lost() -> Iterator[None]:
    """Turn a CUDA error, after which no call succeeds any more, into GpuLostError."""
    try:
        yield
    except torch.AcceleratorError as error:
        first_line = str(error).splitlines()[0]
        raise GpuLostError(f"the CUDA context is lost: {first_line}") from error


@dataclass(frozen=True)
class Calibration:
    """Cost of one launch: seconds on the device, and seconds of host time to queue it."""

    device_s: float
    host_s: float


@dataclass(frozen=True)
class Interval:
    """One measurement: seconds a launch, and the wall-clock span (``time.perf_counter``) it lay in."""

    seconds: float
    start: float
    stop: float


class Stopwatch(Protocol):
    """Times batches of launches."""

    def synchronize(self) -> None:
        """Wait until all queued work is done. Raises GpuLostError if it never is."""

    def measure(self, launches: Sequence[Launch], repeats: int, spin_s: float) -> Interval:
        """Time ``repeats`` launches back to back, taking ``launches`` in turn."""

    def calibrate(self, launches: Sequence[Launch]) -> Calibration:
        """Cost of one launch, from a few of them; the peer must be warm."""


@dataclass(frozen=True)
class CudaStopwatch:
    """CUDA events on the current stream. A batch that takes longer than ``deadline_s`` counts as hung."""

    deadline_s: float = 30.0

    def _wait(self, event: Any) -> None:
        deadline = time.perf_counter() + self.deadline_s
        while not event.query():
            if time.perf_counter() > deadline:
                raise GpuLostError(f"the GPU did not finish within {self.deadline_s:g} s: a kernel hangs")
            time.sleep(5e-5)

    def synchronize(self) -> None:
        with broken_context_is_lost():
            event = torch.cuda.Event()
            event.record()
            self._wait(event)

    def measure(self, launches: Sequence[Launch], repeats: int, spin_s: float) -> Interval:
        with broken_context_is_lost():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start = time.perf_counter()
            launches[-1]()
            if spin_s > 0:
                torch.cuda._sleep(int(min(spin_s, MAX_SPIN_S) * SPIN_HZ))
            begin.record()
            for index in range(repeats):
                launches[index % len(launches)]()
            end.record()
            self._wait(end)
            return Interval(begin.elapsed_time(end) * 1e-3 / repeats, start, time.perf_counter())

    def calibrate(self, launches: Sequence[Launch]) -> Calibration:
        repeats = CALIBRATION_LAUNCHES
        for launch in launches[1:]:
            launch()
        once = self.measure(launches[:1], 1, 0.0).seconds
        start = time.perf_counter()
        launches[0]()
        host_s = time.perf_counter() - start
        self.synchronize()
        if once > LONG_LAUNCH_S and host_s < HOST_BOUND / 2 * once:
            return Calibration(once, host_s)
        torch.cuda._sleep(int(CALIBRATION_SPIN_S * SPIN_HZ))
        start = time.perf_counter()
        for index in range(repeats):
            launches[index % len(launches)]()
        host_s = (time.perf_counter() - start) / repeats
        self.synchronize()
        return Calibration(self.measure(launches, repeats, 2 * host_s * repeats).seconds, host_s)


@dataclass(frozen=True)
class AfterOtherWork:
    """A stopwatch whose batches, and the launch that goes before each, come after other work: so what is in L2 then is
    the same for all peers, and is of none of them."""

    stopwatch: Stopwatch
    work: Launch

    def synchronize(self) -> None:
        self.stopwatch.synchronize()

    def measure(self, launches: Sequence[Launch], repeats: int, spin_s: float) -> Interval:
        self.work()
        return self.stopwatch.measure(launches, repeats, spin_s)

    def calibrate(self, launches: Sequence[Launch]) -> Calibration:
        return self.stopwatch.calibrate(launches)


@dataclass(frozen=True)
class WallStopwatch:
    """The wall clock, for devices whose work is done when the call returns. Host and device time are one."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def measure(self, launches: Sequence[Launch], repeats: int, spin_s: float) -> Interval:
        start = time.perf_counter()
        for index in range(repeats):
            launches[index % len(launches)]()
        stop = time.perf_counter()
        return Interval((stop - start) / repeats, start, stop)

    def calibrate(self, launches: Sequence[Launch]) -> Calibration:
        return Calibration(self.measure(launches, 1, 0.0).seconds, 0.0)


def stopwatch_for(device: str) -> Stopwatch:
    """The stopwatch for a torch device."""
    return CudaStopwatch() if torch.device(device).type == "cuda" else WallStopwatch()


@dataclass(frozen=True)
class Effort:
    """At least ``measure_s`` seconds of launches a measurement, and rounds within ``budget_s`` for a run.

    There are up to ``max_rounds``, and ``patience`` times as many while the standard error of a median is above
    PRECISION.
    """

    measure_s: float = 0.005
    min_rounds: int = 3
    max_rounds: int = 11
    budget_s: float = 150.0
    patience: int = 1

    def __post_init__(self) -> None:
        if not (self.measure_s > 0 and self.budget_s > 0):  # of NaN neither is true
            raise ValueError(f"measure_s is {self.measure_s}, budget_s is {self.budget_s}, allowed: above 0")
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(
                f"min_rounds is {self.min_rounds}, max_rounds is {self.max_rounds}, "
                "allowed: 1 or more, and max_rounds no smaller"
            )
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}, allowed: 1 or more")


def describe_effort(effort: Effort) -> dict[str, Any]:
    """Of a report: its numbers, and patience in words, where there is some."""
    found = asdict(effort)
    del found["patience"]
    if effort.patience > 1:
        found["patience"] = (
            f"up to {effort.patience} times max_rounds while the standard error of a median, by the spread of its "
            f"rounds, is above {100 * PRECISION:g} %"
        )
    return found


class Budget:
    """Seconds of wall-clock time for a run, less what is spent inside :meth:`pause`."""

    def __init__(self, total_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._end = now() + total_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here does not count."""
        start = self._now()
        try:
            yield
        finally:
            self._end += self._now() - start

    def share(self, parts: int) -> float:
        """Seconds left for each of ``parts`` equal parts; negative when overdrawn."""
        return (self._end - self._now()) / parts


@dataclass(frozen=True)
class Turn:
    """What one peer does in each round: ``repeats`` launches behind a spin of ``spin_s`` seconds."""

    launches: Sequence[Launch]
    repeats: int
    spin_s: float
    cost_s: float


def plan_turn(launches: Sequence[Launch], cost: Calibration, effort: Effort) -> Turn:
    """Repeats that fill ``effort.measure_s``, at least two; a spin only where the host is the slower side."""
    repeats = max(2, math.ceil(effort.measure_s / max(cost.device_s, 1e-7)))
    host_bound = cost.host_s > HOST_BOUND * cost.device_s
    if host_bound:
        repeats = max(2, min(repeats, int(MAX_SPIN_S / (1.5 * cost.host_s))))
    spin_s = 1.5 * cost.host_s * repeats if host_bound else 0.0
    return Turn(launches, repeats, spin_s, (repeats + 1) * cost.device_s + spin_s)


def without_pause(turn: Turn, seconds: float) -> Turn:
    """Launches that last so long, with nothing before them."""
    launch_s = (turn.cost_s - turn.spin_s) / (turn.repeats + 1)
    repeats = max(2, math.ceil(seconds / max(launch_s, 1e-7)))
    return Turn(turn.launches, repeats, 0.0, (repeats + 1) * launch_s)


BALANCED = (
    "each round has its own; over as many rounds as there are ways, or twice as many where their number is odd, each "
    "way stands in each place, and right behind each other way, equally often"
)
"""What reports say of the order within rounds."""


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round, counted from 0: a row of a Williams square, which is balanced for carry-over.

    The clock of a card follows what it has just run, and a rotation alone leaves each behind the same one. A row is a
    walk of steps 1, -2, 3, -4, ... around the circle of names, and rows differ by where they start; where the number
    of names is odd, every second row is the mirror image of the one before. E. J. Williams, "Experimental designs
    balanced for the estimation of residual effects of treatments", Australian Journal of Scientific Research A 2
    (1949), 149-168.
    """
    count = len(names)
    start, side = (number // 2, 1 - 2 * (number % 2)) if count % 2 else (number, 1)
    walk = ((step + 1) // 2 * (1 if step % 2 else -1) for step in range(count))
    return [names[(side * place - start) % count] for place in walk]


Order = Callable[[Sequence[str]], list[str]]
"""From the peers of a round to the measurements of that round, in which a peer may stand more than once."""


def once_each(names: Sequence[str]) -> list[str]:
    """Every peer once a round."""
    return list(names)


def beside(anchor: str) -> Order:
    """Every peer right after a measurement of ``anchor``, for ratios to it.

    Clock and power drift while a round lasts. Between neighbours they have no time to.
    """

    def order(names: Sequence[str]) -> list[str]:
        others = [name for name in names if name != anchor]
        if anchor not in names or not others:
            return once_each(names)
        return [name for other in others for name in (anchor, other)]

    return order


def plan_rounds(turns: Sequence[Turn], allowed_s: float, effort: Effort) -> int:
    """Rounds that ``allowed_s`` seconds leave time for, within the effort's limits."""
    round_s = sum(turn.cost_s for turn in turns)
    fits = int(allowed_s / round_s) if round_s > 0 else effort.max_rounds
    return max(effort.min_rounds, min(effort.max_rounds, fits))


def is_vague(taken: Mapping[str, Sequence[Interval]]) -> bool:
    """Whether a median has a standard error above PRECISION, by the spread of its rounds."""
    return any(
        MEDIAN_ERROR * relative_spread([interval.seconds for interval in intervals])
        > PRECISION * len(intervals) ** 0.5
        for intervals in taken.values()
    )


def play_rounds(
    turns: dict[str, Turn],
    rounds: int,
    play: Callable[[str, Turn], Interval],
    order: Order = once_each,
    first: int = 0,
) -> dict[str, list[Interval]]:
    """Measure every peer in each round, as ``order`` says of what :func:`order_of_round` gives. The first round counts
    as number ``first``."""
    names = list(turns)
    taken: dict[str, list[Interval]] = {name: [] for name in names}
    for number in range(first, first + rounds):
        for name in order(order_of_round(names, number)):
            taken[name].append(play(name, turns[name]))
    return taken


def seconds_in_turns(
    launches: Mapping[str, Sequence[Launch]], stopwatch: Stopwatch, effort: Effort
) -> dict[str, float]:
    """Median seconds of a launch of each, in ``effort.max_rounds`` interleaved rounds."""
    turns = {name: plan_turn(list(of), stopwatch.calibrate(of), effort) for name, of in launches.items()}

    def play(name: str, turn: Turn) -> Interval:
        return stopwatch.measure(turn.launches, turn.repeats, turn.spin_s)

    taken = play_rounds(turns, effort.max_rounds, play)
    return {name: statistics.median(i.seconds for i in intervals) for name, intervals in taken.items()}
