"""What the backward kernels must do for a problem, counted from their tiles: the units and bounds are the forward's.

A block is a query tile against the keys of a CTA. Where two CTAs of a cluster share 128 keys, it is what one of them
does, half of the pair's work.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hopper.backward.config import CLUSTER_CTAS, BackwardConfig, PairedBackwardConfig
from hopper.config import WARPGROUP_ROWS
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.roofline.units import SMS, BlockWork, Work, dealt_balance

ELEMENT_BYTES = 2
SUM_BYTES = 4
"""Of an element of dQ, which is summed in float32."""

GEMMS = 5
"""S, dP, dV, dK and dQ; the forward has two."""

CONSUMERS = 2
"""Warpgroups of a CTA that multiply."""


class BackwardKernel(NamedTuple):
    """What of a config the counts depend on. Head dims are one and the same."""

    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    is_paired: bool

    @property
    def ctas(self) -> int:
        """That share the keys of a tile."""
        return CLUSTER_CTAS if self.is_paired else 1

    @property
    def keys(self) -> int:
        """Of a CTA."""
        return self.tile_n // self.ctas


def backward_kernel_of(config: BackwardConfig) -> BackwardKernel:
    is_paired = isinstance(config, PairedBackwardConfig)
    return BackwardKernel(config.used_columns_k, config.causal, config.tile_m, config.tile_n, is_paired)


NAME = re.compile(
    r"hopper_bwd_(?:fp16|bf16)_d(?P<d>\d+)_(?P<mask>causal|full)_m(?P<m>\d+)n(?P<n>\d+)s\d+_r\d+_\d+"
    r"(?:_ordered)?(?:_tile)?(?:_stores)?(?:_divided)?(?:_back)?(?:_pieces)?(?:_used(?P<used>\d+)v\d+)?(?P<pair>_pair)?"
)


def parse_backward_kernel(name: str) -> BackwardKernel:
    """The kernel of a config's name, as a report notes it; of the columns of a tile those count that products have.

    Raises:
        ValueError: the name is not that of a backward config.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"config is {name!r}, allowed: the name of a backward config")
    sizes = int(match["m"]), int(match["n"])
    columns = int(match["used"] or match["d"])
    return BackwardKernel(columns, match["mask"] == "causal", *sizes, match["pair"] is not None)


# One block of a CTA


class SharedBytes(NamedTuple):
    """Bytes of shared memory that a CTA writes and reads for a block, by what for. ``gemms`` are what WGMMA reads:
    B of each GEMM, and A where it does not lie in registers. ``scores`` are P and dS on their way from one warpgroup
    or CTA to another, ``dq`` the staged part of dQ."""

    loads: int
    s_dp: int
    dv_dk: int
    dq_gemm: int
    scores: int
    dq: int


def shared_bytes(kernel: BackwardKernel) -> SharedBytes:
    return paired_bytes(kernel) if kernel.is_paired else unpaired_bytes(kernel)


def unpaired_bytes(kernel: BackwardKernel) -> SharedBytes:
    """Each warpgroup has 64 keys. P and dS are register operands of dV and dK, so that dS is written for dQ alone.

    Of dQ a warpgroup takes some columns, over all rows; or 64 rows, of all columns, where there are as many for each.
    """
    k, e = kernel, ELEMENT_BYTES
    queries = k.tile_m * k.head_dim * e  # Q or dO
    own_keys = WARPGROUP_ROWS * k.head_dim * e  # K or V of a warpgroup
    takes_rows = k.tile_m == CONSUMERS * WARPGROUP_ROWS
    columns = k.head_dim if takes_rows else k.head_dim // CONSUMERS
    return SharedBytes(
        loads=2 * queries,
        s_dp=CONSUMERS * 2 * (own_keys + queries),
        dv_dk=CONSUMERS * 2 * queries,
        dq_gemm=CONSUMERS * (WARPGROUP_ROWS + columns) * k.keys * e,
        scores=k.tile_m * k.keys * e,
        # Written by the warpgroups, read by the bulk reduction.
        dq=2 * k.tile_m * k.head_dim * SUM_BYTES,
    )


def paired_bytes(kernel: BackwardKernel) -> SharedBytes:
    """One warpgroup computes S, the other dP; each then takes half of the columns of dV and dK, and a quarter of those
    of dQ, over the keys of both CTAs. dQ goes to memory from registers."""
    k, e = kernel, ELEMENT_BYTES
    queries = k.tile_m * k.head_dim * e
    keys = k.keys * k.head_dim * e
    scores = k.tile_m * k.keys * e
    dq_columns = k.head_dim // (k.ctas * CONSUMERS)
    return SharedBytes(
        loads=2 * queries,
        s_dp=2 * (keys + queries),
        # P and dS are A for both warpgroups, and B of both together are all columns of dO and Q.
        dv_dk=2 * (CONSUMERS * scores + queries),
        dq_gemm=CONSUMERS * k.ctas * (scores + k.keys * dq_columns * e),
        # P: written, and read where dS is made of it. dS: written, read to be sent, and the other CTA's received.
        scores=5 * scores,
        dq=0,
    )


def backward_block_work(kernel: BackwardKernel) -> BlockWork:
    """The five GEMMs, an exponential a score, and all that goes through shared memory and the L2.

    From the L2 come Q and dO, by multicast half of each for a CTA of a pair; to it go the additions to dQ, of all
    columns or, of a pair, half of them.
    """
    k = kernel
    scores = k.tile_m * k.keys
    queries = k.tile_m * k.head_dim
    return BlockWork(
        flops=GEMMS * 2 * scores * k.head_dim,
        mufu=float(scores),
        shared_bytes=sum(shared_bytes(k)),
        l2_bytes=(2 * queries * ELEMENT_BYTES + queries * SUM_BYTES) // k.ctas,
    )


# A whole problem


def query_tiles(kernel: BackwardKernel, seqlen_q: int, seqlen_k: int) -> list[int]:
    """Query tiles that each key tile visits, in each query head."""
    k = kernel
    end = -(-seqlen_q // k.tile_m)
    tiles = range(-(-seqlen_k // k.tile_n))
    if not k.causal:
        return [end for _ in tiles]
    return [end - max(n * k.tile_n + seqlen_q - seqlen_k, 0) // k.tile_m for n in tiles]


class HbmBytes(NamedTuple):
    """Of each step, every array once. The sums of dQ are written as zeros and read at the end; the additions between
    are taken to find them in the L2."""

    prepare: int
    zeros: int
    main: int
    finish: int

    @property
    def small_steps(self) -> int:
        """Of all but the main kernel."""
        return self.prepare + self.zeros + self.finish


def hbm_bytes(problem: Problem, kernel: BackwardKernel) -> HbmBytes:
    """What is one number a row, LSE and delta, is left out."""
    p, k = problem, kernel
    rows = p.batch * p.heads * p.seqlen_q
    q, do = (rows * columns * ELEMENT_BYTES for columns in (p.head_dim, p.head_dim_v))
    kv = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v) * ELEMENT_BYTES
    padded = -(-p.seqlen_q // k.tile_m) * k.tile_m
    sums = p.batch * p.heads * padded * k.head_dim * SUM_BYTES
    # The output has the size of dO, the gradients those of q, k and v.
    return HbmBytes(prepare=2 * do, zeros=sums, main=q + do + 2 * kv, finish=sums + q)


def count_backward(problem: Problem, kernel: BackwardKernel) -> Work:
    """The work of all steps on a problem; of the small ones, their bytes from HBM."""
    p, k = problem, kernel
    tiles = query_tiles(k, p.seqlen_q, p.seqlen_k)
    heads = p.batch * p.heads_kv
    group = p.heads // p.heads_kv
    block = backward_block_work(k)
    visits = p.batch * p.heads * sum(tiles) * k.ctas
    ctas = heads * len(tiles) * k.ctas
    # K and V; of a pair, half of the columns of the other CTA's K too.
    kv_bytes = 2 * k.keys * k.head_dim * ELEMENT_BYTES
    loaded = kv_bytes + (kv_bytes // 4 if k.is_paired else 0)
    steps = hbm_bytes(p, k)
    return Work(
        flops=float(visits * block.flops),
        mufu=visits * block.mufu,
        # dK and dV are of the size of K and V, written once and read once on the way out.
        shared_bytes=float(visits * block.shared_bytes + ctas * (loaded + 2 * kv_bytes)),
        l2_bytes=float(visits * block.l2_bytes + ctas * (loaded + kv_bytes)),
        hbm_bytes=float(sum(steps)),
        balance=dealt_balance(tuple(group * visited for visited in tiles), heads, SMS // k.ctas),
        small_steps_bytes=float(steps.small_steps),
    )
