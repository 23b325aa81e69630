"""The throughput benchmarks: who takes part in each, on what, and how it is measured by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hopper_attention.experiments.bench.backward_peers import BACKWARD_PEERS, DEFAULT_BACKWARD_PEERS
from hopper_attention.experiments.bench.checks import OUTPUT, Check
from hopper_attention.experiments.bench.fp8_peers import DEFAULT_FP8_PEERS, FP8_PEERS
from hopper_attention.experiments.bench.gradients import GRADIENTS
from hopper_attention.experiments.bench.peers import DEFAULT_PEERS, PEERS, Peer
from hopper_attention.experiments.bench.results import KINDS


@dataclass(frozen=True)
class Suite:
    """One benchmark.

    Attributes:
        kind: what its reports say they are, one of KINDS; also in their file's name.
        registry: rows that can take part, by name.
        default_peers, default_shapes: what runs if nothing is asked for, comma-separated.
        inputs: of the launches, in words.
        compression: how many times smaller than the 16-bit inputs the smallest ones are that a peer reads.
        budget_s: seconds to measure for, first calls not counted.
        check: how results are held against float64 before anything is timed.
        work: floating-point operations of a launch over those of the forward.
    """

    kind: str
    registry: Mapping[str, Peer]
    default_peers: str
    default_shapes: str
    inputs: str
    compression: int
    budget_s: float
    check: Check = OUTPUT
    work: float = 1.0


FORWARD = Suite(
    kind=KINDS[0],
    registry=PEERS,
    default_peers=",".join(DEFAULT_PEERS),
    default_shapes="paper,ablation",
    inputs="N(0, 1)",
    compression=1,
    budget_s=150.0,
)
FP8 = Suite(
    kind=KINDS[1],
    registry=FP8_PEERS,
    default_peers=",".join(DEFAULT_FP8_PEERS),
    default_shapes="paper",
    inputs="N(0, 1) in 16 bits, from which each peer makes e4m3 before the timing: ours by block and rotated, "
    "fa3 with a scale by (batch, kv_head), cudnn by tensor; ours_e2e within the timing; ours_bf16 not at all",
    compression=2,
    budget_s=60.0,
)
BACKWARD = Suite(
    kind=KINDS[2],
    registry=BACKWARD_PEERS,
    default_peers=",".join(DEFAULT_BACKWARD_PEERS),
    default_shapes="paper",
    inputs="N(0, 1), the gradient of the output too; the forward runs before the timing, and a launch is "
    "torch.autograd.grad of its output",
    compression=1,
    budget_s=150.0,
    check=GRADIENTS,
    work=2.5,
)
SUITES = {suite.kind: suite for suite in (FORWARD, FP8, BACKWARD)}
