"""Bounds from counting: what each unit of the chip does in a clock, and how long a kernel's work takes it.

Pure arithmetic on a problem and a kernel's tile, at the SM clock that was measured; ``forward`` and ``backward`` count
the work of their kernels. Time is bounded by the busiest unit if everything else hides under it. Two things no single
unit shows are counted too: scores in whole tiles that nobody asked for (behind the mask or the end of the sequence),
and tiles that 132 SMs cannot share evenly.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

SMS = 132
TENSOR_FLOPS = {2: 4096, 1: 8192}
"""A clock and SM, by bytes of an operand's element."""

MUFU_RESULTS = 16
SHARED_BYTES = 128
L2_BYTES = 5120
"""A clock, of the whole chip."""

HBM_BYTES_PER_S = {"H200": 4.8e12, "H100": 3.35e12}

CONSTANTS = (
    ("SMs", f"{SMS}", "H100 SXM and H200, NVIDIA's H100 white paper"),
    (
        "dense 16-bit FLOP a clock and SM",
        f"{TENSOR_FLOPS[2]}",
        "the same: 989.4 TFLOP/s at 1830 MHz on 132 SMs",
    ),
    ("dense FP8 FLOP a clock and SM", f"{TENSOR_FLOPS[1]}", "the same: 1978.9 TFLOP/s"),
    (
        "MUFU results a clock and SM",
        f"{MUFU_RESULTS}",
        "CUDA C++ programming guide, arithmetic throughput of compute capability 9.0",
    ),
    (
        "bytes of shared memory a clock and SM",
        f"{SHARED_BYTES}",
        "CUDA C++ programming guide: 32 banks of 4 bytes",
    ),
    (
        "bytes from L2 a clock",
        f"{L2_BYTES}",
        "NVIDIA's A100 white paper; none is published for Hopper, so this one is an assumption",
    ),
    ("bytes from HBM a second, H200", "4.8e12", "NVIDIA's H200 data sheet"),
    ("bytes from HBM a second, H100 SXM", "3.35e12", "NVIDIA's H100 data sheet"),
)
"""What, how much, and where the figure comes from."""


@dataclass(frozen=True)
class BlockWork:
    """What a CTA does for one key block: FLOP, MUFU results, bytes of shared memory, bytes from L2."""

    flops: int
    mufu: float
    shared_bytes: int
    l2_bytes: int

    def cycles(self, element_bytes: int) -> dict[str, float]:
        """Clocks of an SM that each unit is busy. L2's are an SM's share of the whole."""
        return {
            "tensor": self.flops / TENSOR_FLOPS[element_bytes],
            "mufu": self.mufu / MUFU_RESULTS,
            "shared": self.shared_bytes / SHARED_BYTES,
            "l2": self.l2_bytes * SMS / L2_BYTES,
        }


@dataclass(frozen=True)
class Work:
    """What a launch does in all.

    ``flops`` are those of whole tiles; the problem's own are fewer. ``hbm_bytes`` are what cannot be avoided: q, k, v
    read once and the output written once. ``balance`` is the share of SM time in use if tiles are dealt out
    longest first. ``small_steps_bytes`` are those of ``hbm_bytes`` that cross while the kernel itself does not run:
    other launches before and behind it.
    """

    flops: float
    mufu: float
    shared_bytes: float
    l2_bytes: float
    hbm_bytes: float
    balance: float
    small_steps_bytes: float = 0.0


@lru_cache(maxsize=1024)
def dealt_balance(blocks: tuple[int, ...], heads: int, workers: int = SMS) -> float:
    """Mean load of an SM, or of a cluster of them, over the largest, for the tiles of so many heads dealt out longest
    first."""
    tiles = sorted(blocks * heads, reverse=True)
    loads = [0] * workers
    for tile in tiles:
        heapq.heapreplace(loads, loads[0] + tile)
    return sum(tiles) / workers / max(loads)


UNITS = ("tensor", "mufu", "shared", "l2", "hbm")

TITLES = {
    "tensor": "tensor cores",
    "mufu": "MUFU",
    "shared": "shared memory",
    "l2": "L2",
    "hbm": "HBM",
}


@dataclass(frozen=True)
class Bounds:
    """Seconds that each unit is busy, if all SMs were so all the time. ``small_steps_s`` is the part of HBM's time in
    which the kernel itself does not run."""

    seconds: dict[str, float]
    balance: float
    small_steps_s: float = 0.0

    @property
    def unit(self) -> str:
        """The busiest unit."""
        return max(UNITS, key=lambda unit: self.seconds[unit])

    @property
    def bound_s(self) -> float:
        """No launch is faster: the busiest unit, and where that is an SM's own, with the tiles as they can be dealt."""
        return max(self._of_the_kernel, self.seconds["hbm"])

    @property
    def in_turn_s(self) -> float:
        """The same where the kernel waits for the small steps before it, and those behind wait for the kernel."""
        return self.small_steps_s + max(self._of_the_kernel, self.seconds["hbm"] - self.small_steps_s)

    @property
    def _of_the_kernel(self) -> float:
        """The largest of an SM's own units over the balance of the tiles, or the L2: no schedule of whole tiles is
        faster."""
        own = max(self.seconds[unit] for unit in ("tensor", "mufu", "shared"))
        return max(own / self.balance, self.seconds["l2"])


def bounds(work: Work, element_bytes: int, clock_mhz: float, hbm_bytes_per_s: float) -> Bounds:
    """The time that each unit needs at an SM clock. L2 is taken to run at the same one."""
    hz = clock_mhz * 1e6
    seconds = {
        "tensor": work.flops / (SMS * TENSOR_FLOPS[element_bytes] * hz),
        "mufu": work.mufu / (SMS * MUFU_RESULTS * hz),
        "shared": work.shared_bytes / (SMS * SHARED_BYTES * hz),
        "l2": work.l2_bytes / (L2_BYTES * hz),
        "hbm": work.hbm_bytes / hbm_bytes_per_s,
    }
    return Bounds(seconds, work.balance, work.small_steps_bytes / hbm_bytes_per_s)


def hbm_rate(gpu: str) -> float:
    """Bytes a second of a GPU's memory, by its name.

    Raises:
        ValueError: the name is neither an H200's nor an H100's.
    """
    for name, rate in HBM_BYTES_PER_S.items():
        if name in gpu:
            return rate
    raise ValueError(f"gpu is {gpu!r}, allowed: names with {' or '.join(HBM_BYTES_PER_S)}")
