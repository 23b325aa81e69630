"""Fakes for the benchmarks' tests: a stopwatch without a clock, and peers whose launches it knows by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.results import Measured
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import Calibration, Interval, Launch


@dataclass
class FakeStopwatch:
    """Launches take as long as ``costs`` says, by the launch's own name; nothing waits."""

    costs: dict[str, Calibration]
    now: float = 0.0
    played: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        pass

    def measure(self, launches: Sequence[Launch], repeats: int, spin_s: float) -> Interval:
        name = launches[0].__name__
        launches[0]()
        start, cost = self.now, self.costs[name]
        self.now += spin_s + (repeats + 1) * cost.device_s
        self.played.append(name)
        return Interval(cost.device_s * (1 + 0.01 * (len(self.played) % 3)), start, self.now)

    def calibrate(self, launches: Sequence[Launch]) -> Calibration:
        return self.costs[launches[0].__name__]


def fake_peer(name: str, scale: float = 1.0, raises: str = "") -> bench_peers.Peer:
    """Plain attention times ``scale``, under a name that the fake stopwatch knows."""

    def prepare(
        problem: Problem, inputs: bench_peers.Inputs, setting: bench_peers.Setting
    ) -> bench_peers.Prepared:
        if raises:
            raise NotImplementedError(raises)
        plain = bench_peers.prepare_torch(problem, inputs, setting).launch

        def launch() -> Tensor:
            return plain() * scale

        launch.__name__ = name
        return bench_peers.Prepared(launch, note="plain")

    available = bench_peers.always_available
    return bench_peers.Peer(name, f"Fake {name}", available, lambda setting: "1.0", prepare)


def measured(us: float) -> Measured:
    """A result of so many microseconds."""
    return Measured(500.0, us * 1e-3, 0.01, 5, 10, 2e-3, 1500.0, 690.0, "config")


def head_of(kind: str, names: Iterable[str]) -> dict[str, Any]:
    """The head of a report on an H200 with these peers."""
    peers = {
        name: {"title": f"The {name}", "version": "1", "unavailable": ""} for name in dict.fromkeys(names)
    }
    head = {"schema": 1, "kind": kind, "date": "2026-01-01T00:00:00Z", "commit": "c0ffee" * 6}
    return head | {"machine": {"gpu": "NVIDIA H200"}, "peers": peers, "method": {"inputs": "N(0, 1)"}}
