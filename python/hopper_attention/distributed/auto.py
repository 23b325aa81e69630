"""Which method serves a problem on several GPUs, from a model of time.

Times are those of a forward and a backward pass of one rank. The model knows a GPU's speed in attention, what one rank
sends a second, and what its memory moves. These are numbers that you give: the defaults are plain assumptions to
compare methods by, and what an exchange costs is from two reports (docs/distributed.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from hopper.backward.config import MAX_UNPAIRED_HEAD_DIM
from hopper_attention.distributed.division import bytes_at_once
from hopper_attention.distributed.heads import MessageExchange
from hopper_attention.distributed.layout import check_divides, parts_of
from hopper_attention.distributed.pieces import (
    Group,
    Piece,
    Problem,
    count_scores,
    groups_between,
    groups_with_all,
    hull,
    length,
)
from hopper_attention.distributed.pushed import MOST_BYTES, PushedExchange
from hopper_attention.distributed.schedule import (
    RowBytes,
    backward_bytes,
    backward_schedule,
    forward_schedule,
)
from hopper_attention.distributed.steps import Step, steps_of
from hopper_attention.launch.addition import MOST_PARTS
from hopper_attention.masks import UNLIMITED

RING, ALL_GATHER, ULYSSES, MESH, AUTO = "ring", "all_gather", "ulysses", "mesh", "auto"
REMEMBERED = 1024
MIB = 1 << 20

METHODS = (RING, ALL_GATHER, ULYSSES, MESH, AUTO)

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products a score: Q K^T and P V; in the backward pass those of P, dP, dV, dK and dQ."""

ADDED_BYTES, ENDS_BYTES, ROUNDED_BYTES, SPAN_BYTES = 10, 12, 6, 16
"""Read and written by a ring for an element: of a partial output, or of gradients that come back, to be added to
float32; to begin with float32 and end with 16 bits; of the only partial output there is, which is added to 16 bits; and
of rows that have sums of dQ beside those of all rows."""

OWN_BYTES, PART_OF_SUM_BYTES = 4, 2
"""The same of gradients that come back from few ranks: of own ones, read and written, and of each part."""

GATHERED_BYTES, GATHERED_OWN_BYTES, PART_BYTES, EXCHANGED_BYTES = 34, 23, 22, 8
"""The same where K and V are gathered, counted from the copies in ``gather.py``: of K and V of the whole sequence, put
in order twice, with float32 sums of gradients that are sorted by owner; of a rank's own K and V besides; of its rows of
Q and of the output, which come in parts of the heads and are joined. And of what ulysses exchanges."""

RETURNED_BYTES, MEETINGS = 4, 2
"""The same where ranks write into each other's memory, of an element that comes back to rows: of the output forward,
and of dQ, dK and dV in the backward pass. And how often all ranks wait for the last of them in a pass."""

QUANTIZED_BYTES = 3
"""Of an element that becomes e4m3: read in 16 bits, and written."""

BOTH_PASSES = FORWARD_PRODUCTS, BACKWARD_PRODUCTS

FP8_SPEED, FP8_STEP_US = 1.8, 700.0
"""Of attention in FP8 over 16 bits, and what an exchange costs besides: its calls, and more and smaller messages.
Fitted to the first reports of two and four GPUs, when it made nine calls. It makes four now, so the model is slow."""

TILE = 128
"""Rows of Q, or in the backward pass keys, that one SM works on at a time."""

GATHERED_ROOM = 12
"""Bytes that an element of a part of the gathered K and V takes: as it comes, in order, and its gradient in float32."""


@dataclass(frozen=True)
class Machine:
    """What the model knows of the hardware.

    Attributes:
        tflops: of attention on one GPU, 1e12 a second.
        gbytes_per_s: that one rank sends while it receives as much, 1e9 bytes a second.
        latency_us: of one message.
        memory_gbytes_per_s: that a GPU reads and writes in its own memory.
        room_gbytes: that a method may take on a GPU beside the tensors of the rank.
        sms: streaming multiprocessors of a GPU, among which a kernel's tiles are shared out.
        step_us: that an exchange of the ring costs beside its bytes, where ranks wait for the one that is late and
            for hosts.
        host_gpus: GPUs of a host, which can read each other's memory: up to so many ranks do, where heads are exchanged
            and shards are short.
    """

    tflops: float = 600.0
    gbytes_per_s: float = 300.0
    latency_us: float = 20.0
    memory_gbytes_per_s: float = 2500.0
    room_gbytes: float = 16.0
    sms: int = 132
    step_us: float = 200.0
    host_gpus: int = 8

    def __post_init__(self) -> None:
        for name in ("tflops", "gbytes_per_s", "memory_gbytes_per_s", "sms", "host_gpus"):
            if not getattr(self, name) > 0:  # nor is NaN
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: above 0")
        for name in ("latency_us", "room_gbytes", "step_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: 0 or more")

    def compute_s(self, flops: float) -> float:
        return flops / (self.tflops * 1e12)

    def transfer_s(self, size: float) -> float:
        return self.latency_us * 1e-6 + size / (self.gbytes_per_s * 1e9) if size else 0.0

    def memory_s(self, size: float) -> float:
        return size / (self.memory_gbytes_per_s * 1e9)

    def step_s(self, exchanges: int) -> float:
        return exchanges * self.step_us * 1e-6

    def tail_s(self, flops: float) -> float:
        """What a kernel loses at its end, where SMs run out of tiles: half of one tile's time, given its ``flops``."""
        return self.compute_s(flops) * self.sms / 2


DEFAULT_MACHINE = Machine()
WITHOUT_PEERS = Machine(host_gpus=1)
"""Ranks that cannot read each other's memory, or do not in a call."""


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
    def kv_row(self) -> int:
        """Elements of K and V of one position."""
        return self.batch * self.kv_heads * (self.head_dim + self.head_dim_v)

    @property
    def q_row(self) -> int:
        """Elements of Q, or of the output, of one position."""
        return self.batch * self.heads * max(self.head_dim, self.head_dim_v)

    def of_rank(self, problem: Problem) -> RowBytes:
        """What a rank has of tensors of 16 bits."""
        rows, rows_of_k = problem.seqlen_q // problem.world, problem.seqlen_k // problem.world
        of_out = 2 * self.batch * self.heads * max(self.head_dim, self.head_dim_v)
        return RowBytes(self.batch, rows, rows_of_k, self.heads, self.kv_heads, of_out, 2 * self.kv_row)

    def tails_s(self, groups: tuple[Group, ...], products: int, machine: Machine) -> float:
        """Lost at the ends of the kernels of these groups, one each. A tile has all keys that a row sees, or in the
        backward pass all rows; it is of one head, so that heads do not count."""
        longest = _longest_row if products == FORWARD_PRODUCTS else _longest_column
        scores = TILE * sum(max(map(longest, group.pieces)) for group in groups)
        return machine.tail_s(1.0 * products * scores * (self.head_dim + self.head_dim_v))

    def flops(self, scores: int, products: int = FORWARD_PRODUCTS + BACKWARD_PRODUCTS) -> float:
        return 1.0 * products * scores * self.batch * self.heads * (self.head_dim + self.head_dim_v)


def _longest_row(piece: Piece) -> int:
    """Keys that a row of it sees at most."""
    return min(length(piece.keys), _width(piece))


def _longest_column(piece: Piece) -> int:
    """Rows of it that see a key at most."""
    return min(length(piece.rows), _width(piece))


def _width(piece: Piece) -> int:
    """Of its window."""
    is_open = UNLIMITED in (piece.left, piece.right)
    return length(piece.rows) + length(piece.keys) if is_open else piece.left + piece.right + 1


@dataclass(frozen=True)
class ContextPlan:
    """What ``context_parallel_attention`` would do.

    Attributes:
        method: "ring", "all_gather", "ulysses" or "mesh".
        reason: why.
        seconds: by method, what the model says of a forward and a backward pass; only those that can do it.
        efficiency: of the method, by the model: time of the same share of the work on one GPU over its time.
        transport: what carries ulysses, "peer memory" or "messages"; empty for a method without it.
        held_bytes: what a rank holds at most in both passes with the method, as its schedule reckons, one layer at a
            time: the output and buffers are among it, its Q, K and V, their gradients and LSEs are not. 0 where nothing
            reckons.
        aim_bytes: two shards of K and V, and the output.
    """

    method: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)
    efficiency: float = 1.0
    transport: str = ""
    held_bytes: int = 0
    aim_bytes: int = 0

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


def why_not_all_gather(problem: Problem, sizes: Sizes, machine: Machine) -> str:
    """What keeps it from a problem; empty if nothing."""
    size = GATHERED_ROOM * problem.seqlen_k * sizes.kv_row / len(parts_of(sizes.kv_heads)) * 1e-9
    if size <= machine.room_gbytes:
        return ""
    return f"it takes {size:.0f} GB on each GPU, allowed: room_gbytes, {machine.room_gbytes:.0f}"


def _ring_s(problem: Problem, sizes: Sizes, machine: Machine, passes: tuple[int, ...] = BOTH_PASSES) -> float:
    """Of passes that have so many products a score."""
    total = 0.0
    for products in passes:
        choose = forward_schedule if products == FORWARD_PRODUCTS else backward_schedule
        schedule = choose(problem, sizes.of_rank(problem))
        model = _at_once_s if schedule.at_once and sizes.bytes_each > 1 else _one_by_one_s
        total += model(problem, sizes, machine, products)
    return total


def _one_by_one_s(problem: Problem, sizes: Sizes, machine: Machine, products: int) -> float:
    """The slowest rank of each step holds up all; while it works the keys of the next are on their way, and in the
    backward pass as many bytes of gradients."""
    world = problem.world
    asked = _asked(problem)
    steps = [[groups_between(problem, r, (r - t) % world) for r in asked] for t in range(world)]
    scores = [max(map(count_scores, groups)) for groups in steps]
    rows = [max(map(_rows_merged, groups)) for groups in steps]
    keys = [max(map(_keys_taken, groups)) for groups in steps]
    incoming = [*keys[1:], 0]
    exchanges = sum(1 for count in keys[1:] if count)
    own = problem.seqlen_q // world, problem.seqlen_k // world
    if products == FORWARD_PRODUCTS:
        trips, total = 1, machine.memory_s(_merged(own[0], rows[1:]) * sizes.q_row)
    else:
        spans = {group.rows for groups in chain(*steps) for group in groups if length(group.rows) < own[0]}
        trips, total = 2, machine.memory_s(SPAN_BYTES * sum(map(length, spans)) * sizes.q_row)
        total += machine.memory_s(_summed(own[1], keys[1:]) * sizes.kv_row)
        # A rank's own shard is done in two halves, and gradients are sent after the last step too.
        total += max(sizes.tails_s(groups, products, machine) for groups in steps[0])
        total += machine.step_s(exchanges and 1)
    total += machine.step_s(exchanges)
    for mine, coming, groups_of_ranks in zip(scores, incoming, steps, strict=True):
        total += max(sizes.tails_s(groups, products, machine) for groups in groups_of_ranks)
        transfer = machine.transfer_s(trips * coming * sizes.kv_row * sizes.bytes_each)
        total += max(machine.compute_s(sizes.flops(mine, products)), transfer)
    return total


def _asked(problem: Problem) -> list[int]:
    """Ranks of which one has the most work at every distance."""
    world = problem.world
    return sorted({0, world // 2, world - 1}) if problem.sees_all else list(range(world))


def _at_once_s(problem: Problem, sizes: Sizes, machine: Machine, products: int) -> float:
    """A ring whose short shards come in one exchange: the slowest rank holds up all.

    A rank does its own shard while the keys come; in the backward pass one half of it then, and the other while the
    gradients go.
    """
    is_forward = products == FORWARD_PRODUCTS
    exchanges = 1 if is_forward else 2

    def seconds(rank: int) -> float:
        own = groups_between(problem, rank, rank)
        (step,) = steps_of(problem, rank, at_once=True, by_key=not is_forward)
        mine, others = (machine.compute_s(sizes.flops(count_scores(x), products)) for x in (own, step.groups))
        travelling = max(step.keys, sum(length(share.rows) for share in step.gives))
        transfer = machine.transfer_s(travelling * sizes.kv_row * sizes.bytes_each)
        exposed = max(0.0, exchanges * transfer - mine)
        tails = exchanges * sizes.tails_s(own, products, machine)
        tails += sizes.tails_s(step.groups, products, machine)
        moved = (_merged_at_once if is_forward else _summed_at_once)(problem, sizes, step)
        return mine + others + exposed + tails + machine.memory_s(moved)

    return max(map(seconds, _asked(problem))) + machine.step_s(exchanges)


def _merged_at_once(problem: Problem, sizes: Sizes, step: Step) -> int:
    """Bytes of partial outputs, of which no row has more than one beside that of its own keys."""
    return ROUNDED_BYTES * _rows_merged(step.groups) * sizes.q_row


def _summed_at_once(problem: Problem, sizes: Sizes, step: Step) -> int:
    """Bytes of sums of dQ of some rows, and of gradients of keys that come back."""
    rows, keys = problem.seqlen_q // problem.world, problem.seqlen_k // problem.world
    spans = {group.rows for group in step.groups if length(group.rows) < rows}
    of_rows = SPAN_BYTES * sum(map(length, spans)) * sizes.q_row
    return of_rows + _summed(keys, [length(share.rows) for share in step.gives]) * sizes.kv_row


def _fp8_plan(problem: Problem, sizes: Sizes, machine: Machine) -> ContextPlan:
    """Of a forward pass, beside one in 16 bits."""
    faster = replace(machine, tflops=FP8_SPEED * machine.tflops)
    of_ring = replace(faster, step_us=machine.step_us + FP8_STEP_US)
    seconds = {RING: _ring_s(problem, sizes, of_ring, (FORWARD_PRODUCTS,))}
    in_16_bits = replace(sizes, bytes_each=2)
    of_16_bits = _ring_s(problem, in_16_bits, machine, (FORWARD_PRODUCTS,))
    rows, transport = problem.seqlen_q // problem.world, ""
    is_plain = problem.left == UNLIMITED and problem.right in (UNLIMITED, 0) and not problem.documents
    if is_plain and not why_not_ulysses(sizes, problem.world):
        by = transport_of(rows, problem.world, sizes, machine)
        if by == PushedExchange.name:
            seconds[ULYSSES] = _ulysses_s(problem, sizes, faster, (FORWARD_PRODUCTS,))
            of_16_bits = min(of_16_bits, _ulysses_s(problem, in_16_bits, machine, (FORWARD_PRODUCTS,)))
    method = min(seconds, key=seconds.__getitem__)
    if method == ULYSSES:
        transport = PushedExchange.name
        reason = f"heads go by {transport} in 16 bits and become e4m3 there, in a forward pass; "
    else:
        reason = "K and V travel in e4m3, which the ring does, in a forward pass; "
    if seconds[method] < of_16_bits:
        reason += f"in 16 bits it would take {of_16_bits * 1e3:.2f} ms"
    else:
        reason += f"quantization=None would be faster, {of_16_bits * 1e3:.2f} ms, as the sequence is short"
    ideal = faster.compute_s(sizes.flops(_mean_scores(problem), FORWARD_PRODUCTS))
    efficiency = ideal / seconds[method] if seconds[method] else 1.0
    return ContextPlan(method, reason, seconds, efficiency, transport)


def _merged(own: int, parts: list[int]) -> int:
    """Bytes a column to merge partial outputs of so many rows with those of the ``own`` keys."""
    counts = [count for count in parts if count]
    return ROUNDED_BYTES * sum(counts) if len(counts) == 1 else ENDS_BYTES * own + ADDED_BYTES * sum(counts)


def _summed(own: int, parts: list[int]) -> int:
    """Bytes a column to add gradients of so many keys to the ``own`` ones."""
    counts = [count for count in parts if count]
    if len(counts) > MOST_PARTS:
        return ENDS_BYTES * own + ADDED_BYTES * sum(counts)
    return OWN_BYTES * max(counts, default=0) + PART_OF_SUM_BYTES * sum(counts)


def _rows_merged(groups: tuple[Group, ...]) -> int:
    return sum(length(group.rows) for group in groups)


def _keys_taken(groups: tuple[Group, ...]) -> int:
    return length(hull([group.keys for group in groups])) if groups else 0


def _all_gather_s(problem: Problem, sizes: Sizes, machine: Machine) -> float:
    """The first part of the heads is waited for, the others come meanwhile; in the backward pass gradients go back.

    Each part has kernels of its own, in a causal zigzag two, and each kernel its tail.
    """
    world = problem.world
    groups_of_ranks = [groups_with_all(problem, r) for r in range(world)]
    scores = max(map(count_scores, groups_of_ranks))
    rows = problem.seqlen_k * (world - 1) // world
    parts = len(parts_of(sizes.kv_heads))
    part = machine.transfer_s(rows * sizes.kv_row * sizes.bytes_each / parts)
    gathered = (GATHERED_BYTES + GATHERED_OWN_BYTES / world) * problem.seqlen_k * sizes.kv_row
    total = machine.memory_s(gathered + PART_BYTES * problem.seqlen_q // world * sizes.q_row)
    for products, trips in ((FORWARD_PRODUCTS, 1), (BACKWARD_PRODUCTS, 2)):
        compute = machine.compute_s(sizes.flops(scores, products)) / parts
        total += trips * part + parts * max(compute, trips * part)
        total += parts * max(sizes.tails_s(groups, products, machine) for groups in groups_of_ranks)
    return total


def _ulysses_s(
    problem: Problem, sizes: Sizes, machine: Machine, passes: tuple[int, ...] = BOTH_PASSES
) -> float:
    """Nothing is hidden. In FP8 the quantizer reads Q, K and V.

    A causal kernel begins with its longest tiles, and has hardly a tail. It is counted with messages, where it stands
    for what these wait for beside their bytes.
    """
    whole, rows = groups_with_all(replace(problem, world=1), 0), problem.seqlen_q // problem.world
    total = sum(machine.compute_s(sizes.flops(_mean_scores(problem), n)) for n in passes)
    if problem.right != 0 or transport_of(rows, problem.world, sizes, machine) != PushedExchange.name:
        total += sum(sizes.tails_s(whole, n, machine) for n in passes)
    if sizes.bytes_each == 1:
        total += machine.memory_s(QUANTIZED_BYTES * given_bytes(rows, problem.world, sizes) // 2)
    return total + len(passes) * _exchange_s(rows, problem.world, sizes, machine)


def given_bytes(rows: int, ranks: int, sizes: Sizes) -> int:
    """Of Q, K and V that a rank of ulysses gives, with a copy for each rank that reads them."""
    copies = max(1, ranks // sizes.kv_heads)
    return 2 * rows * (sizes.q_row + copies * sizes.kv_row)


def transport_of(rows: int, ranks: int, sizes: Sizes, machine: Machine) -> str:
    """What carries an exchange of heads between so many ranks."""
    is_near = 1 < ranks <= machine.host_gpus and given_bytes(rows, ranks, sizes) <= MOST_BYTES
    return PushedExchange.name if is_near else MessageExchange.name


def _exchange_s(rows: int, ranks: int, sizes: Sizes, machine: Machine) -> float:
    """Of a pass: rows of Q, K, V for heads, and the output for rows; or their gradients the other way."""
    size = given_bytes(rows, ranks, sizes) + 2 * rows * sizes.q_row
    travelling = machine.transfer_s(size * (ranks - 1) / ranks)
    if transport_of(rows, ranks, sizes, machine) == PushedExchange.name:
        waits = (MEETINGS - 1) * machine.latency_us * 1e-6
        # Half of what travels in the two passes.
        return travelling + waits + machine.memory_s(RETURNED_BYTES * size / 4)
    return travelling + machine.memory_s(EXCHANGED_BYTES * size / 2)


def plan_mesh(problem: Problem, inner: int, sizes: Sizes, machines: tuple[Machine, Machine]) -> ContextPlan:
    """What a mesh takes: ``problem`` is that of the ring, ``inner`` the ranks that exchange heads in a place.

    ``machines`` are with the links of the ring, and with those inside of a place.

    Raises:
        ValueError: lengths or heads do not divide.
    """
    blocked = why_not_ulysses(sizes, inner)
    if blocked:
        raise ValueError(f"no mesh with {inner} ranks for ulysses: {blocked}")
    chunk = check_divides(problem.seqlen_q, problem.world, problem.layout, "the length of the whole q")
    own = replace(sizes, heads=sizes.heads // inner, kv_heads=max(1, sizes.kv_heads // inner))
    of_ring, of_heads = machines
    seconds = _ring_s(problem, own, of_ring)
    seconds += 2 * _exchange_s(problem.seqlen_q // problem.world // inner, inner, sizes, of_heads)
    ideal = of_ring.compute_s(own.flops(_mean_scores(problem)))
    reason = f"a ring of {problem.world} places with chunks of {chunk} tokens, {own.heads} heads on each rank"
    transport = transport_of(problem.seqlen_q // problem.world // inner, inner, sizes, of_heads)
    return ContextPlan(MESH, reason, {MESH: seconds}, ideal / seconds if seconds else 1.0, transport)


def _mean_scores(problem: Problem) -> int:
    """Of a rank."""
    return sum(count_scores(groups_with_all(problem, r)) for r in range(problem.world)) // problem.world


@lru_cache(maxsize=REMEMBERED)
def plan(problem: Problem, sizes: Sizes, machine: Machine = DEFAULT_MACHINE) -> ContextPlan:
    """The method with the least time by the model of those that can do it.

    Raises:
        ValueError: the lengths do not divide.
    """
    check_divides(problem.seqlen_q, problem.world, problem.layout, "the length of the whole q")
    check_divides(problem.seqlen_k, problem.world, problem.layout, "the length of the whole k")
    if sizes.bytes_each == 1:
        return _fp8_plan(problem, sizes, machine)
    blocked = {
        ALL_GATHER: why_not_all_gather(problem, sizes, machine),
        ULYSSES: why_not_ulysses(sizes, problem.world),
    }
    models = {RING: _ring_s, ALL_GATHER: _all_gather_s, ULYSSES: _ulysses_s}
    allowed = [name for name in models if not blocked.get(name)]
    seconds = {name: models[name](problem, sizes, machine) for name in allowed}
    method = min(seconds, key=seconds.__getitem__)
    reason = f"the least time of {len(seconds)} methods by the model" + "".join(
        f"; not {name}: {why}" for name, why in blocked.items() if why
    )
    ideal = machine.compute_s(sizes.flops(_mean_scores(problem)))
    rows, transport = problem.seqlen_q // problem.world, ""
    if method == ULYSSES:
        transport = transport_of(rows, problem.world, sizes, machine)
        reason += f"; heads go by {transport}"
    held, aim = _held_bytes(method, transport, problem, sizes), sizes.of_rank(problem).aim
    if held:
        reason += (
            f"; a rank holds up to {held / MIB:.0f} MiB, two shards of K and V and the output {aim / MIB:.0f}"
        )
    if held > aim:
        reason += ": memory='least' holds less and takes longer"
    efficiency = ideal / seconds[method] if seconds[method] else 1.0
    return ContextPlan(method, reason, seconds, efficiency, transport, held, aim)


def _held_bytes(method: str, transport: str, problem: Problem, sizes: Sizes) -> int:
    of_rank = sizes.of_rank(problem)
    if method == RING:
        schedule = backward_schedule(problem, of_rank)
        return of_rank.out + backward_bytes(problem, of_rank, schedule.parts, schedule.at_once)
    # Kernels for more columns read K and V where their gradients would go.
    stays = max(sizes.head_dim, sizes.head_dim_v) <= MAX_UNPAIRED_HEAD_DIM
    return bytes_at_once(of_rank, problem.world, stays) if transport == PushedExchange.name else 0
