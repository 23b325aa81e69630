"""What a run measured of workloads, as data: the part of cells and reports that all have."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from hopper_attention.experiments.bench.results import OURS, Measured, PeerInfo, PeerResult
from hopper_attention.experiments.reports import Target
from hopper_attention.experiments.workloads.spec import WorkloadT


@dataclass(frozen=True)
class WorkloadCell(Generic[WorkloadT]):
    """All peers on one workload, interleaved, launches rotating over ``input_sets`` sets of inputs."""

    OWN: ClassVar[tuple[str, ...]] = (OURS,)
    """Rows that run this library."""

    workload: WorkloadT
    input_sets: int
    clock_mhz: float | None
    power_w: float | None
    peers: dict[str, PeerResult]

    def us(self, peer: str) -> float:
        """Microseconds of a peer; NaN if it has no figure."""
        result = self.peers.get(peer)
        return 1e3 * result.median_ms if isinstance(result, Measured) else math.nan

    def over(self, peer: str) -> float:
        """How many times as fast as a peer ours is; NaN where either has no figure."""
        return self.us(peer) / self.us(OURS)

    @property
    def best_peer(self) -> str:
        """The fastest row that is not ours; empty if there is none."""
        others = [name for name in self.peers if name not in self.OWN and not math.isnan(self.us(name))]
        return min(others, key=self.us, default="")

    @property
    def ratio(self) -> float:
        """How many times as fast as the best peer ours is; NaN where either has no figure."""
        return self.over(self.best_peer)

    def share_of_limit(self, gpu: str) -> float:
        """Of the speed that a GPU's peak rates allow, what ours reaches; NaN without a figure."""
        return self.workload.limit_us(gpu) / self.us(OURS)


CellT = TypeVar("CellT", bound=WorkloadCell[Any])


@dataclass(frozen=True)
class WorkloadReport(Generic[CellT]):
    """One run on one machine; ``head`` is what ``describe_run`` says, with the method."""

    head: dict[str, Any]
    cells: tuple[CellT, ...]

    @property
    def gpu(self) -> str:
        """The name of the GPU."""
        return str(self.head["machine"]["gpu"])

    @property
    def peers(self) -> dict[str, PeerInfo]:
        return {name: PeerInfo(**entry) for name, entry in self.head["peers"].items()}

    @property
    def available(self) -> list[str]:
        """Peers that were there."""
        return [name for name, info in self.peers.items() if not info.unavailable]


def target_of_failures(failed: Iterable[str]) -> list[Target]:
    """That nothing of ours fails, where something does."""
    names = ", ".join(failed)
    return [Target("every workload right", "no failure of ours", f"failed: {names}", False)] if names else []
