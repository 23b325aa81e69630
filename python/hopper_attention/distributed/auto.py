"""Which method serves a problem on several GPUs, from a model of time.

Times are those of a forward and a backward pass of one rank. The model knows a GPU's speed in attention and what one
rank sends a second. Both are numbers that you give: the defaults are plain assumptions to compare methods by, not
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hopper_attention.distributed.layout import check_divides
from hopper_attention.distributed.pieces import (
    Group,
    Problem,
    count_scores,
    groups_between,
    groups_with_all,
    hull,
    length,
)

RING, ALL_GATHER, ULYSSES, MESH, AUTO = "ring", "all_gather", "ulysses", "mesh", "auto"
METHODS = (RING, ALL_GATHER, ULYSSES, MESH, AUTO)

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products a score: Q K^T and P V; in the backward pass those of P, dP, dV, dK and dQ."""


@dataclass(frozen=True)
class Machine:
    """What the model knows of the hardware.

    Attributes:
        tflops: of attention on one GPU, 1e12 a second.
        gbytes_per_s: that one rank sends while it receives as much, 1e9 bytes a second.
        latency_us: of one message.
    """

    tflops: float = 600.0
    gbytes_per_s: float = 300.0
    latency_us: float = 20.0

    def compute_s(self, flops: float) -> float:
        return flops / (self.tflops * 1e12)

    def transfer_s(self, size: float) -> float:
        return self.latency_us * 1e-6 + size / (self.gbytes_per_s * 1e9) if size else 0.0


DEFAULT_MACHINE = Machine()


@dataclass(frozen=True)
class Sizes:
    """Of the tensors of the whole problem.

    Attributes:
        batch, heads, kv_heads, head_dim, head_dim_v: as of q, k and v.
        bytes_each: of an element of K and V on the wire: 2, or 1 in e4m3.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    bytes_each: int = 2

    @property
    def kv_row_bytes(self) -> int:
        """Of K and V of one position."""
        return self.batch * self.kv_heads * (self.head_dim + self.head_dim_v) * self.bytes_each

    @property
    def q_row_bytes(self) -> int:
        """Of Q and the output of one position, in 16 bits."""
        return self.batch * self.heads * (self.head_dim + self.head_dim_v) * 2

    def flops(self, scores: int, products: int = FORWARD_PRODUCTS + BACKWARD_PRODUCTS) -> float:
        return 1.0 * products * scores * self.batch * self.heads * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class ContextPlan:
    """What ``context_parallel_attention`` would do.

    Attributes:
        method: "ring", "all_gather", "ulysses" or "mesh".
        reason: why.
        seconds: by method, what the model says of a forward and a backward pass; only those that can do it.
        efficiency: of the method, by the model: time of the same share of the work on one GPU over its time.
    """

    method: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    efficiency: float = 1.0

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in self.seconds.items())
        return f"{self.method}: {self.reason} (model: {times}; efficiency {self.efficiency:.2f})"


def why_not_ulysses(sizes: Sizes, world: int) -> str:
    """What keeps it from a problem; empty if nothing."""
    if sizes.heads % world:
        return f"{sizes.heads} heads of q do not divide among {world} ranks"
    if sizes.kv_heads % world and world % sizes.kv_heads:
        return f"{sizes.kv_heads} key/value heads neither divide among {world} ranks nor divide these"
    return ""


def _ring_s(problem: Problem, sizes: Sizes, machine: Machine) -> float:
    """The slowest rank of each step holds up all; while it works the keys of the next are on their way, and in the
    backward pass as many bytes of gradients."""
    world = problem.world
    # Without windows and documents one of these ranks has the most work at every distance.
    asked = sorted({0, world // 2, world - 1}) if problem.sees_all else range(world)
    steps = [[groups_between(problem, r, (r - t) % world) for r in asked] for t in range(world)]
    scores = [max(map(count_scores, groups)) for groups in steps]
    rows = [0 if not t else max(map(_rows_taken, groups)) for t, groups in enumerate(steps)]
    total = 0.0
    for products, trips in ((FORWARD_PRODUCTS, 1), (BACKWARD_PRODUCTS, 2)):
        for mine, coming in zip(scores, [*rows[1:], 0], strict=True):
            transfer = machine.transfer_s(trips * coming * sizes.kv_row_bytes)
            total += max(machine.compute_s(sizes.flops(mine, products)), transfer)
    return total


def _rows_taken(groups: tuple[Group, ...]) -> int:
    return length(hull([group.keys for group in groups])) if groups else 0


def _all_gather_s(problem: Problem, sizes: Sizes, machine: Machine) -> float:
    """The first part of the heads is waited for, the others come meanwhile; in the backward pass gradients go back."""
    world = problem.world
    scores = max(count_scores(groups_with_all(problem, r)) for r in range(world))
    rows = problem.seqlen_k * (world - 1) // world
    parts = max(n for n in range(1, 5) if sizes.kv_heads % n == 0)
    part = machine.transfer_s(rows * sizes.kv_row_bytes / parts)
    forward, backward = (
        machine.compute_s(sizes.flops(scores, products)) / parts
        for products in (FORWARD_PRODUCTS, BACKWARD_PRODUCTS)
    )
    return part + parts * max(forward, part) + 2 * part + parts * max(backward, 2 * part)


def _ulysses_s(problem: Problem, sizes: Sizes, machine: Machine) -> float:
    """Nothing is hidden: Q, K, V and the output are exchanged, and as much again for the gradients."""
    world = problem.world
    scores = sum(count_scores(groups_with_all(problem, r)) for r in range(world)) / world
    copies = max(1, world // sizes.kv_heads)
    rows = problem.seqlen_q / world * (world - 1) / world
    size = rows * (sizes.q_row_bytes + copies * sizes.kv_row_bytes)
    return machine.compute_s(sizes.flops(int(scores))) + 3 * machine.transfer_s(size)


def plan(problem: Problem, sizes: Sizes, machine: Machine = DEFAULT_MACHINE) -> ContextPlan:
    """The method with the least time by the model of those that can do it.

    Raises:
        ValueError: the lengths do not divide.
    """
    check_divides(problem.seqlen_q, problem.world, problem.layout, "the length of the whole q")
    check_divides(problem.seqlen_k, problem.world, problem.layout, "the length of the whole k")
    seconds = {
        RING: _ring_s(problem, sizes, machine),
        ALL_GATHER: _all_gather_s(problem, sizes, machine),
    }
    blocked = why_not_ulysses(sizes, problem.world)
    if sizes.bytes_each == 1:
        method, reason = RING, "K and V travel in e4m3, which the ring does"
        seconds = {RING: seconds[RING]}
    else:
        if not blocked:
            seconds[ULYSSES] = _ulysses_s(problem, sizes, machine)
        method = min(seconds, key=seconds.__getitem__)
        reason = f"the least time of {len(seconds)} methods by the model"
        if blocked:
            reason += f"; not ulysses: {blocked}"
    scores = sum(count_scores(groups_with_all(problem, r)) for r in range(problem.world)) // problem.world
    ideal = machine.compute_s(sizes.flops(scores))
    return ContextPlan(method, reason, seconds, ideal / seconds[method] if seconds[method] else 1.0)
