"""Bounds from counting: what each unit of the chip must do for a problem, and how long it takes.

Pure arithmetic on a problem and a kernel's tile, at the SM clock that was measured. Here are the units and the forward
kernel; ``roofline_backward`` counts the backward's. Time is bounded by the busiest
unit if everything else hides under it. Two things no single unit shows are counted too: scores in whole tiles that
nobody asked for (behind the mask or the end of the sequence), and tiles that 132 SMs cannot share evenly.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention.experiments.bench_results import Problem

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

LANES_PER_ROW = 4
"""Threads that hold a row of scores; each computes the row's factors for itself."""

FACTORS_PER_BLOCK = 1
FACTORS_PER_TILE = 2
"""MUFU results of a thread for each of its rows: a rescaling factor a block; a reciprocal and a logarithm a tile."""

PAIRS = 8
"""``polynomial_pairs`` are so many of 8."""


class Kernel(NamedTuple):
    """What of a config the counts depend on."""

    element_bytes: int
    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    tile_n: int
    polynomial_pairs: int

    @property
    def consumers(self) -> int:
        return self.tile_m // WARPGROUP_ROWS


def kernel_of(config: ForwardConfig) -> Kernel:
    pairs = config.polynomial_pairs if isinstance(config, Fp8ForwardConfig) else 0
    dims = config.element_bytes, config.head_dim, config.head_dim_v
    return Kernel(*dims, config.causal, config.tile_m, config.tile_n, pairs)


NAME = re.compile(
    r"hopper_fwd_(?P<dtype>fp16|bf16|e4m3)(?:_fp16|_bf16)?_d(?P<d>\d+)(?:v(?P<dv>\d+))?_(?P<mask>causal|full)"
    r"_m(?P<m>\d+)n(?P<n>\d+)s\d+(?P<rest>\w*)"
)


def parse_kernel(name: str) -> Kernel:
    """The kernel of a config's name, as a report notes it: what was measured, even if another one ships by now.

    Raises:
        ValueError: the name is not that of a forward config.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"config is {name!r}, allowed: the name of a forward config")
    pairs = re.search(r"_poly(\d+)", match["rest"])
    return Kernel(
        element_bytes=1 if match["dtype"] == "e4m3" else 2,
        head_dim=int(match["d"]),
        head_dim_v=int(match["dv"] or match["d"]),
        causal=match["mask"] == "causal",
        tile_m=int(match["m"]),
        tile_n=int(match["n"]),
        polynomial_pairs=int(pairs[1]) if pairs else 0,
    )


# One key block of one tile


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


def block_work(kernel: Kernel) -> BlockWork:
    """Both products, the exponentials, and the operands of both.

    Shared memory is written once by TMA, and read by every warpgroup: Q and K as operands of the first product, V of
    the second, whose P lies in registers.
    """
    k = kernel
    scores = k.tile_m * k.tile_n
    kv_bytes = k.tile_n * (k.head_dim + k.head_dim_v) * k.element_bytes
    q_bytes = WARPGROUP_ROWS * k.head_dim * k.element_bytes
    exponentials = scores * (PAIRS - k.polynomial_pairs) / PAIRS
    return BlockWork(
        flops=2 * scores * (k.head_dim + k.head_dim_v),
        mufu=exponentials + FACTORS_PER_BLOCK * LANES_PER_ROW * k.tile_m,
        shared_bytes=kv_bytes + k.consumers * (q_bytes + kv_bytes),
        l2_bytes=kv_bytes,
    )


# A whole problem


def tile_blocks(kernel: Kernel, seqlen_q: int, seqlen_k: int) -> list[int]:
    """Key blocks that each query tile of a head visits."""
    k = kernel
    whole = -(-seqlen_k // k.tile_n)
    tiles = range(-(-seqlen_q // k.tile_m))
    if not k.causal:
        return [max(whole, 1) for _ in tiles]
    last_keys = ((m + 1) * k.tile_m + seqlen_k - seqlen_q for m in tiles)
    return [max(min(whole, -(-keys // k.tile_n)), 1) for keys in last_keys]


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


def count_work(problem: Problem, kernel: Kernel) -> Work:
    """The work of a launch on a problem. The LSE, which a call does not ask for, is left out."""
    p, k = problem, kernel
    heads = p.batch * p.heads
    blocks = tile_blocks(k, p.seqlen_q, p.seqlen_k)
    block = block_work(k)
    visits = heads * sum(blocks)
    tiles = heads * len(blocks)
    q_bytes = k.tile_m * k.head_dim * k.element_bytes
    out_bytes = k.tile_m * k.head_dim_v * 2
    inputs = p.input_bytes * k.element_bytes // 2
    outputs = p.batch * p.seqlen_q * p.heads * p.head_dim_v * 2
    return Work(
        flops=float(visits * block.flops),
        mufu=visits * block.mufu + tiles * FACTORS_PER_TILE * LANES_PER_ROW * k.tile_m,
        # A tile's Q is written to shared memory once, and its O once and read once on the way out.
        shared_bytes=float(visits * block.shared_bytes + tiles * (q_bytes + 2 * out_bytes)),
        l2_bytes=float(visits * block.l2_bytes + tiles * (q_bytes + out_bytes)),
        hbm_bytes=float(inputs + outputs),
        balance=dealt_balance(tuple(blocks), heads),
    )


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
