"""What the forward kernels must do for a problem, counted from their tiles."""

from __future__ import annotations

import re
from typing import NamedTuple

from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.roofline.units import BlockWork, Work, dealt_balance

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
