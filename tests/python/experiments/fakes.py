"""Fakes for the benchmarks' tests: a stopwatch without a clock, and peers whose launches it knows by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.results import Measured
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.bench.timing import Calibration, Interval, Launch


@dataclass
class FakeStopwatch:
    """Launches take as long as ``costs`` says, by the launch's own name, or once or twice ``step`` more; none waits."""

    costs: dict[str, Calibration]
    step: float = 0.01
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
        return Interval(cost.device_s * (1 + self.step * (len(self.played) % 3)), start, self.now)

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


FA3_SCHEMA = (
    "sgl_kernel::fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, "
    "Tensor(a!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin, Tensor? sinks) "
    "-> (Tensor(a!), Tensor, Tensor, Tensor)"
)
"""Of sglang-kernel 0.4.3."""


class FakeOperator:
    """Stands for an operator of ``torch.ops.sgl_kernel``, and notes what it is called with, by name."""

    schema: str
    name = "fwd"

    def __init__(self) -> None:
        self._schema = torch._C.parse_schema(self.schema)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *values: object) -> Any:
        call = dict(zip((a.name for a in self._schema.arguments), values, strict=True))
        self.calls.append(call)
        return self.compute(call)

    def compute(self, call: dict[str, Any]) -> Any:
        raise NotImplementedError

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Itself, as the only operator that there is."""
        install(monkeypatch, self)
        return self


class FakeFa3Operator(FakeOperator):
    """Stands for FlashAttention-3's operator, whatever it computes by."""

    schema = FA3_SCHEMA


def install(monkeypatch: pytest.MonkeyPatch, *operators: FakeOperator) -> None:
    namespace = SimpleNamespace(**{fake.name: SimpleNamespace(default=fake) for fake in operators})
    monkeypatch.setattr(torch.ops, "sgl_kernel", namespace, raising=False)
