"""What ring and ulysses keep in memory on each rank: the tensors of their steps, without kernels and messages."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hopper_attention import compile_cache
from hopper_attention.distributed import (
    explain_context_parallel,
    gradients,
    over_peers,
    parts_over_peers,
    ring,
    ring_backward,
    wire,
)
from hopper_attention.distributed.attend import Call, Saved
from hopper_attention.distributed.division import bytes_in_parts, divide
from hopper_attention.distributed.exchange import Message, Ranks, Transfer
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.over_peers import LEAST_IN_WAVES, AttentionOverPeers
from hopper_attention.distributed.parts_over_peers import AttentionInParts
from hopper_attention.distributed.peers import PeerMemory
from hopper_attention.distributed.pieces import Group, Problem, length
from hopper_attention.distributed.pushed import LEAST_BYTES, PushedExchange
from hopper_attention.distributed.schedule import (
    RowBytes,
    Schedule,
    backward_bytes,
    backward_schedule,
    forward_bytes,
    forward_schedule,
    fp8_bytes,
    fp8_parts,
    share_own,
)
from hopper_attention.launch import backward
from hopper_attention.launch.gradient_sums import GradientSums
from hopper_attention.quantized import (
    DEFAULT_QUANTIZATION,
    E4M3,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
)
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.file_memory import MemoryWithoutStreams
from tests.python.live_bytes import LiveBytes

HEAD_DIM = 128
CALL = Call(HEAD_DIM**-0.5)
LEAST = CALL._replace(is_least=True)


def nothing(*arguments: Any) -> None:
    """A kernel."""


def attend(q: Tensor, k: Tensor, v: Tensor, group: Group, call: Call) -> tuple[Tensor, Tensor]:
    """What a forward kernel allocates."""
    batch, _, heads, _ = q.shape
    rows = length(group.rows)
    lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
    return q.new_empty(batch, rows, heads, v.shape[3]), lse


def exchange(ranks: Ranks, sends: list[Message], receives: list[Message]) -> Transfer:
    """Holds what it has to."""
    return Transfer(ranks, [], [x for message in (*sends, *receives) for x in message.tensors])


@pytest.fixture
def bare_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(monkeypatch, backward)
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: nothing)
    monkeypatch.setattr(ring, "attend", attend)
    monkeypatch.setattr(ring, "exchange", exchange)
    monkeypatch.setattr(ring_backward, "exchange", exchange)
    monkeypatch.setattr(gradients, "add_parts", nothing)
    monkeypatch.setattr(Merged, "add", nothing)
    yield
    forget_launchers()


class Peaks(NamedTuple):
    """Bytes that the passes of the ring hold at most on a rank, results included, and what they should fit."""

    sizes: RowBytes
    forward: int
    backward: int

    @property
    def gradients(self) -> int:
        return self.sizes.out + self.sizes.shard

    @property
    def aim(self) -> int:
        """Two shards of K and V, and the output."""
        return self.sizes.out + 2 * self.sizes.shard

    @property
    def both(self) -> int:
        """Beside the gradients, with the output, which the backward pass reads."""
        return self.sizes.out + self.backward - self.gradients


def problem_of(world: int, seqlen: int) -> Problem:
    return Problem(world, seqlen, seqlen, "zigzag", right=0)


def tensors_of(world: int, seqlen: int, heads: tuple[int, int]) -> list[Tensor]:
    """q, k, v, out and dout of a rank, of which there are sizes and no elements."""
    counts = heads[0], heads[1], heads[1], heads[0], heads[0]
    shapes = ((1, seqlen // world, n, HEAD_DIM) for n in counts)
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


def peaks(world: int, rank: int, seqlen: int, heads: tuple[int, int], call: Call = CALL) -> Peaks:
    problem = problem_of(world, seqlen)
    q, k, v, out, dout = tensors_of(world, seqlen, heads)
    lse = torch.empty(1, heads[0], q.shape[1], device="meta")
    ranks = Ranks(None, rank, world)  # type: ignore[arg-type]  # no message is sent
    found = []
    for run in (
        lambda: ring.ring_forward(ranks, problem, call, (q, k, v), None),
        lambda: ring_backward.ring_backward(ranks, problem, call, Saved(q, out, lse, dout, None), (k, v)),
    ):
        with LiveBytes() as memory:
            memory.forget(q, k, v, out, dout, lse)
            run()
        found.append(memory.peak)
    return Peaks(RowBytes.of(q, k, v), *found)


@lru_cache(maxsize=8)
def worst(world: int, seqlen: int, heads: tuple[int, int], call: Call = CALL) -> Peaks:
    """Of the ranks that hold the most in either pass."""
    found = [peaks(world, rank, seqlen, heads, call) for rank in range(world)]
    return Peaks(found[0].sizes, max(x.forward for x in found), max(x.backward for x in found))


def row_of(world: int, tokens: int, heads: tuple[int, int], call: Call = CALL) -> str:
    """Of the page, in GiB."""
    found, problem = worst(world, tokens, heads, call), problem_of(world, tokens)
    least = call.is_least
    ways = forward_schedule(problem, found.sizes, least), backward_schedule(problem, found.sizes, least)
    shards = ", ".join("all" if way.at_once else "one" for way in ways)
    sizes = found.aim, found.forward, found.both, found.gradients
    return (
        f"| {world} | {tokens >> 10}k | {heads[0]} over {heads[1]} | {shards} | {ways[0].parts}, {ways[1].parts} | "
        + " | ".join(f"{x / 2**30:.2f}" for x in sizes)
        + " |"
    )


def table_of_the_page(name: str) -> list[str]:
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text()
    return page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0].split("\n")[3:-1]


SHAPES = [(world, n, h) for world in (2, 4) for n in (1 << 17, 1 << 15) for h in ((16, 16), (32, 8))]


def test_what_a_ring_holds_is_as_the_page_says(bare_ring: None) -> None:
    assert table_of_the_page("memory") == [row_of(*shape) for shape in SHAPES]


@pytest.mark.parametrize("heads", [(16, 16), (32, 8)])
@pytest.mark.parametrize("world", [2, 4])
def test_of_128k_tokens_a_ring_holds_no_more_than_two_shards_and_the_output(
    bare_ring: None, world: int, heads: tuple[int, int]
) -> None:
    found = worst(world, 1 << 17, heads)
    assert found.forward <= found.aim and found.both <= found.aim
    problem, slack = problem_of(world, 1 << 17), found.sizes.out // 16
    # What the schedules reckon with is what there is at most, but for LSEs.
    for count, schedule, held in (
        (forward_bytes, forward_schedule, found.forward - found.sizes.out),
        (backward_bytes, backward_schedule, found.both - found.sizes.out),
    ):
        assert held <= count(problem, found.sizes, schedule(problem, found.sizes).parts) + slack


@pytest.mark.parametrize("heads", [(16, 16), (32, 8)])
@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_that_is_to_hold_the_least_keeps_to_that_at_any_length(
    bare_ring: None, world: int, heads: tuple[int, int]
) -> None:
    for seqlen in (1 << 15, 1 << 12):
        found = worst(world, seqlen, heads, LEAST)
        assert found.forward <= found.aim and found.both <= found.aim, seqlen


def test_what_a_ring_holds_at_least_is_as_the_page_says(bare_ring: None) -> None:
    rows = [row_of(*shape, LEAST) for shape in SHAPES if shape[1] == 1 << 15]
    assert table_of_the_page("least memory") == rows


@pytest.mark.parametrize(
    ("problem", "batch", "heads", "forward", "backward", "fp8"),
    [
        (problem_of(1, 1 << 17), 1, (16, 16), Schedule(), Schedule(), 1),
        (problem_of(4, 1 << 17), 1, (16, 16), Schedule(4), Schedule(4), 2),
        (problem_of(4, 1 << 17), 1, (32, 8), Schedule(8), Schedule(8), 4),
        # Few heads: a part of them would not fill the GPU.
        (problem_of(4, 1 << 17), 1, (4, 4), Schedule(), Schedule(), 1),
        # Small, and several entries of the batch do not lie together.
        (problem_of(4, 1 << 15), 2, (16, 16), Schedule(), Schedule(), 1),
        (problem_of(4, 1 << 12), 1, (16, 16), Schedule(at_once=True), Schedule(at_once=True), 1),
        (problem_of(4, 1 << 15), 1, (16, 16), Schedule(at_once=True), Schedule(at_once=True), 1),
        (problem_of(4, 1 << 15), 1, (32, 8), Schedule(at_once=True), Schedule(at_once=True), 1),
        # One row too many, and K and V of three others of 403 MB.
        (problem_of(4, (1 << 15) + 8), 1, (16, 16), Schedule(), Schedule(), 1),
        (problem_of(4, 1 << 15), 1, (32, 32), Schedule(), Schedule(), 1),
        # Under a window few rows of a shard come, and hardly more than the output is held.
        (Problem(4, 1 << 17, 1 << 17, "contiguous", 1023, 0), 1, (16, 16), Schedule(), Schedule(), 2),
    ],
)
def test_heads_go_in_parts_where_memory_asks_for_it(
    problem: Problem, batch: int, heads: tuple[int, int], forward: Schedule, backward: Schedule, fp8: int
) -> None:
    shape = [(batch, problem.seqlen_q // problem.world, n, HEAD_DIM) for n in (heads[0], heads[1], heads[1])]
    sizes = RowBytes.of(*(torch.empty(x, device="meta") for x in shape))
    assert (forward_schedule(problem, sizes), backward_schedule(problem, sizes)) == (forward, backward)
    assert fp8_parts(problem, sizes) == fp8


@pytest.mark.parametrize("keys", [256, 1 << 14, 1 << 16, 1 << 20])
def test_all_of_a_shard_is_shared_out_and_alike_on_ranks_of_more_calls(keys: int) -> None:
    for units, calls, pieces, first, last in product(range(1, 33), (1, 2, 3), (1, 2), *[(False, True)] * 2):
        shares = share_own(units, keys, calls, pieces, first, last)
        assert sum(shares.all) == units and 0 not in shares.all
        assert len(shares.beside) <= calls and len(shares.late) <= pieces
        # Something hides the first keys and the last gradients, where there are two units.
        assert len(shares.early) == first and (shares.late or not last or units < 2)
        # Gradients of K and V go apart on all ranks or on none.
        assert len(shares.late) == len(share_own(units, keys, 1, pieces, first, last).late)
        if first and last:
            assert (len(shares.late) == pieces) == (units > pieces)


def test_what_is_beside_a_call_is_long_itself() -> None:
    assert share_own(16, 1 << 16, 1, 2, is_first=True, is_last=True) == ((7,), (2,), (3, 4))
    assert share_own(16, 1 << 16, 2, 2, is_first=True, is_last=True) == ((6,), (2, 2), (3, 3))
    assert share_own(16, 1 << 14, 1, 1, is_first=True, is_last=True) == ((8,), (), (8,))
    assert share_own(1, 1 << 14, 1, 1, is_first=False, is_last=False) == ((), (1,), ())
    assert share_own(4, 1 << 15, 3, 1, is_first=False, is_last=False) == ((), (4,), ())
    assert share_own(4, 1 << 16, 1, 1, is_first=True, is_last=False) == ((2,), (2,), ())


@pytest.mark.parametrize("heads", [(16, 16), (32, 8)])
@pytest.mark.parametrize("seqlen", [1 << 15, 1 << 17])
def test_two_ranks_hold_what_is_reckoned_with_by_any_schedule(
    bare_ring: None, seqlen: int, heads: tuple[int, int]
) -> None:
    problem = problem_of(2, seqlen)
    for parts, rank in product((1, 2, 4, 8), (0, 1)):
        q, k, v, out, dout = tensors_of(2, seqlen, heads)
        lse, sizes = torch.empty(1, heads[0], q.shape[1], device="meta"), RowBytes.of(q, k, v)
        ranks, saved = Ranks(None, rank, 2), Saved(q, out, lse, dout, None)  # type: ignore[arg-type]  # no message is sent
        with LiveBytes() as memory:
            memory.forget(q, k, v, out, dout, lse)
            schedule = Schedule(parts, halves=True)
            ring_backward.scheduled_backward(ranks, problem, CALL, saved, (k, v), schedule=schedule)
        held = memory.peak - sizes.out - sizes.shard
        assert held <= backward_bytes(problem, sizes, parts) + sizes.out // 16, (parts, rank)


def quantized(tensors: tuple[Tensor, ...], count: int, *options: Any) -> list[QuantizedQKV]:
    """What quantizers give, with blocks of 128 keys and a scale for each row of Q."""

    def e4m3(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=E4M3, device="meta")

    def scales(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    assert count == 1
    q, k, v = tensors
    batch, keys, heads, _ = k.shape
    blocks = batch, heads, keys // 128
    of_q = QuantizedTensor(e4m3(*q.shape), scales(batch, q.shape[2], q.shape[1]), 1)
    of_k = QuantizedTensor(e4m3(*k.shape), scales(*blocks), 128)
    of_v = TransposedV(e4m3(batch, heads, v.shape[3], keys), scales(*blocks), 128, keys)
    return [QuantizedQKV(of_q, of_k, of_v, DEFAULT_QUANTIZATION, q.dtype)]


def attend_in_e4m3(parts: QuantizedQKV, *options: Any, **others: Any) -> tuple[Tensor, Tensor]:
    """What the FP8 kernel allocates."""
    out = torch.empty(parts.q.shape, dtype=parts.dtype, device="meta")
    return out, torch.empty_like(parts.q.scale)


@pytest.mark.parametrize("heads", [(16, 16), (32, 8)])
@pytest.mark.parametrize("world", [2, 4])
def test_in_e4m3_a_ring_holds_no_more_than_in_16_bits_either(
    monkeypatch: pytest.MonkeyPatch, world: int, heads: tuple[int, int]
) -> None:
    monkeypatch.setattr(wire, "quantize_chunks", quantized)
    monkeypatch.setattr(wire, "flash_attn_quantized_func", attend_in_e4m3)
    monkeypatch.setattr(wire, "exchange", exchange)
    monkeypatch.setattr(Merged, "add", nothing)
    problem = problem_of(world, 1 << 17)
    q, k, v, *_ = tensors_of(world, 1 << 17, heads)
    sizes = RowBytes.of(q, k, v)
    counted, slack = fp8_bytes(problem, sizes, fp8_parts(problem, sizes)), sizes.out // 8
    for rank in range(world):
        ranks = Ranks(None, rank, world)  # type: ignore[arg-type]  # no message is sent
        with LiveBytes() as memory:
            memory.forget(q, k, v)
            wire.ring_forward_fp8(ranks, problem, CALL, (q, k, v), None, DEFAULT_QUANTIZATION)
        # The output, and beside it what the schedule reckons with but for scales and LSEs.
        assert memory.peak <= sizes.out + counted + slack, rank
        assert counted <= 2 * sizes.shard


def counts_of(
    monkeypatch: pytest.MonkeyPatch, rank: int, schedules: tuple[Schedule, Schedule]
) -> list[tuple[int, int, int, int]]:
    """Exchanges, messages, attention kernels and merges of both passes of one of four ranks."""
    problem = problem_of(4, 1 << 15)
    q, k, v, out, dout = tensors_of(4, 1 << 15, (32, 8))
    lse = torch.empty(1, 32, q.shape[1], device="meta")
    ranks = Ranks(None, rank, 4)  # type: ignore[arg-type]  # no message is sent
    posted: list[int] = []
    calls: list[str] = []

    def post(ranks: Ranks, sends: list[Message], receives: list[Message]) -> Transfer:
        posted.append(sum(len(m.tensors) for m in (*sends, *receives)))
        return exchange(ranks, sends, receives)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return call(*arguments, **options)

        return made

    for module in (ring, ring_backward):
        monkeypatch.setattr(module, "exchange", post)
    monkeypatch.setattr(ring, "attend", noted("attention", attend))
    monkeypatch.setattr(Merged, "add", noted("merge", nothing))
    monkeypatch.setattr(GradientSums, "add", noted("attention", nothing))
    found = []
    saved = Saved(q, out, lse, dout, None)
    for run in (
        lambda: ring.scheduled_forward(ranks, problem, CALL, (q, k, v), None, schedule=schedules[0]),
        lambda: ring_backward.scheduled_backward(ranks, problem, CALL, saved, (k, v), schedule=schedules[1]),
    ):
        posted.clear()
        calls.clear()
        run()
        exchanges = sum(1 for n in posted if n)
        found.append((exchanges, sum(posted), calls.count("attention"), calls.count("merge")))
    return found


def either(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def test_what_a_ring_holds_is_what_auto_says(bare_ring: None) -> None:
    for world, heads in product((2, 4), ((16, 16), (32, 8))):
        plan = explain_context_parallel(world, 1 << 17, *heads, HEAD_DIM, causal=True)
        found = worst(world, 1 << 17, heads)
        assert plan.method == "ring" and plan.aim_bytes == found.aim
        # With several parts the schedule reckons with buffers that are not all there at a time.
        assert found.both - found.sizes.out // 16 <= plan.held_bytes <= 1.25 * found.both
        assert ("memory='least'" in plan.reason) == (plan.held_bytes > found.aim)


def test_what_is_posted_and_launched_is_as_the_page_says(
    bare_ring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, sizes = problem_of(4, 1 << 15), RowBytes.of(*tensors_of(4, 1 << 15, (32, 8))[:3])
    ways = (Schedule(), Schedule()), (forward_schedule(problem, sizes), backward_schedule(problem, sizes))
    of_ranks = [[counts_of(monkeypatch, rank, way) for rank in range(4)] for way in ways]
    rows = []
    for place, what in enumerate(("exchanges", "messages", "attention kernels", "merges")):
        cells = [[either({found[i][place] for found in way}) for i in range(2)] for way in of_ranks]
        rows.append(f"| {what} | " + " | ".join(", ".join(passes) for passes in cells) + " |")
    assert table_of_the_page("counts") == rows


class BareMemory(MemoryWithoutStreams):
    """Buffers of a size and without elements."""

    def __init__(self, nbytes: int, memory: LiveBytes) -> None:
        self.nbytes = nbytes
        self.meetings = 0
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        memory.forget(self.buffer)

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        return self.buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def meet(self) -> None:
        self.meetings += 1


class UlyssesBytes(NamedTuple):
    """Of a rank: the room of the group, and what passes hold beside it, results included; ``both`` without dQ, dK, dV.

    ``meetings`` are those of a step of one layer, and of two steps of two layers each.
    """

    room: int
    forward: int
    both: int
    meetings: tuple[int, ...]


def attend_to_heads(qkv: tuple[Tensor, ...], mask: Any, call: Call) -> tuple[Tensor, Tensor]:
    q, _, v = qkv
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)


def differentiate_heads(tensors: Any, *options: Any) -> None:
    """What is there beside dQ, dK and dV: the sums of dQ."""
    torch.empty_like(tensors.q, dtype=torch.float32)


def attend_in_place(qkv: tuple[Tensor, ...], mask: Any, call: Call, into: Tensor) -> Tensor:
    batch, rows, heads, _ = qkv[0].shape
    return into.new_empty(batch, heads, rows, dtype=torch.float32)


def ulysses_bytes(
    monkeypatch: pytest.MonkeyPatch, ranks: int, heads: tuple[int, int], in_parts: bool = False
) -> UlyssesBytes:
    """Of 32k tokens."""
    monkeypatch.setattr(parts_over_peers, "attend_heads", attend_in_place)
    monkeypatch.setattr(parts_over_peers, "differentiate_heads", differentiate_heads)
    monkeypatch.setattr(over_peers, "attend_apart", attend_to_heads)
    monkeypatch.setattr(over_peers, "attend_into", nothing)
    monkeypatch.setattr(over_peers, "differentiate_heads", differentiate_heads)
    problem = problem_of(ranks, 1 << 15)
    q, k, v, _, dout = tensors_of(ranks, 1 << 15, heads)
    made: list[BareMemory] = []
    with LiveBytes() as memory:

        def make(nbytes: int) -> PeerMemory:
            made.append(BareMemory(nbytes, memory))
            return made[-1]

        exchange = PushedExchange(Ranks(None, 1, ranks), make(LEAST_BYTES), make)  # type: ignore[arg-type]  # no message is sent

        def attend_once() -> Tensor:
            given, is_kept = (q, k, v, exchange, problem, CALL), torch.is_grad_enabled()
            if not in_parts:
                return AttentionOverPeers.apply(*given, False, is_kept)[0]
            return AttentionInParts.apply(*given, divide(heads[1] // ranks), False, is_kept)[0]

        def step(layers: int) -> None:
            outs = [attend_once() for _ in range(layers)]
            while outs:
                torch.autograd.grad(outs.pop(), (q, k, v), dout)

        memory.forget(q, k, v, dout)
        for x in (q, k, v):
            x.requires_grad_()
        # Of the second one Q, K and V stay in the buffer.
        for _ in range(2):
            step(1)
        peaks_of = []
        for run in (torch.no_grad()(attend_once), lambda: step(1)):
            memory.peak = before = memory.live
            meetings = [made[-1].meetings]
            run()
            peaks_of.append(memory.peak - before)
        meetings.append(made[-1].meetings)
        for _ in range(2):
            step(2)
            meetings.append(made[-1].meetings)
    assert [x.nbytes for x in made] == [LEAST_BYTES, exchange.memory.nbytes]
    forward, both = peaks_of
    own = q.nbytes + k.nbytes + v.nbytes
    return UlyssesBytes(made[-1].nbytes, forward, both - own, tuple(b - a for a, b in pairwise(meetings)))


HEADS = (16, 16), (32, 8)


def row_of_ulysses(ranks: int, heads: tuple[int, int], *sizes: int) -> str:
    return (
        f"| {ranks} | 32k, {heads[0]} over {heads[1]} | "
        + " | ".join(f"{x / 2**20:.0f}" for x in sizes)
        + " |"
    )


def test_what_ulysses_holds_is_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, beside_own = [], []
    for ranks, heads in product((2, 4, 8), HEADS):
        found = ulysses_bytes(monkeypatch, ranks, heads)
        q, k, v, out, _ = tensors_of(ranks, 1 << 15, heads)
        assert found.room == q.nbytes + k.nbytes + v.nbytes + out.nbytes
        # Four, and one where dO takes the room of the output. Of two layers eight, one where a forward pass follows a
        # backward one, and in the first step one where the first layer is copied after all. Where a rank has two
        # key/value heads or more, and bytes enough, one for those that come second: of a single layer, and of the first
        # of two as long as it looks like one.
        in_waves = heads[1] > ranks and q.nbytes + k.nbytes + v.nbytes >= LEAST_IN_WAVES
        assert found.meetings == ((6, 11, 9) if in_waves else (5, 10, 9))
        aim, held = out.nbytes + 2 * (k.nbytes + v.nbytes), found.room + found.both
        rows.append(row_of_ulysses(ranks, heads, aim, found.room, found.forward, found.both, held))
        # What `auto` says is what there is, but for LSEs.
        plan = explain_context_parallel(ranks, 1 << 15, *heads, HEAD_DIM, causal=True)
        assert plan.transport == "peer memory" and plan.aim_bytes == aim
        assert plan.held_bytes <= held <= plan.held_bytes + out.nbytes // 16
        assert f"a rank holds up to {plan.held_bytes >> 20} MiB" in plan.reason
        assert ("memory='least'" in plan.reason) == (heads == (32, 8))
        # The aim and the LSE, which is in float32, where heads of Q take no more than those of K and V.
        if heads == (16, 16):
            assert aim < held <= aim + 4 * out.numel() // HEAD_DIM
        # One GPU's call on the rows of a rank: the output, the LSE, and sums of dQ in float32.
        own = out.nbytes + 4 * out.numel() // HEAD_DIM + 2 * q.nbytes
        beside_own.append(row_of_ulysses(ranks, heads, aim, own, held, held - own))
        assert held - own <= aim
    assert table_of_the_page("ulysses memory") == rows
    assert table_of_the_page("beside one call") == beside_own


def test_what_heads_hold_that_are_copied_is_what_auto_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of more than 128 columns take no places: Q, K and V are copied for the backward pass."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", 256)
    monkeypatch.setattr(over_peers, "_serves", lambda *given: False)
    for heads in HEADS:
        found = ulysses_bytes(monkeypatch, 4, heads)
        out = tensors_of(4, 1 << 15, heads)[3]
        plan, held = explain_context_parallel(4, 1 << 15, *heads, 256, causal=True), found.room + found.both
        assert plan.transport == "peer memory"
        assert plan.held_bytes <= held <= plan.held_bytes + out.nbytes // 16
        assert "memory='least' holds less" in plan.reason


IN_PARTS = [(ranks, heads) for ranks, heads in product((2, 4, 8), HEADS) if heads[1] > ranks]
"""A rank with one key/value head has one part."""


def test_what_ulysses_holds_in_parts_is_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for ranks, heads in IN_PARTS:
        found = ulysses_bytes(monkeypatch, ranks, heads, True)
        q, k, v, out, _ = tensors_of(ranks, 1 << 15, heads)
        aim = out.nbytes + 2 * (k.nbytes + v.nbytes)
        held = found.room + found.both
        rows.append(row_of_ulysses(ranks, heads, aim, found.room, found.forward, found.both, held))
        # What `memory="least"` goes by is what there is, but for LSEs.
        reckoned = bytes_in_parts(RowBytes.of(q, k, v), ranks)
        assert reckoned is not None and reckoned <= held <= reckoned + out.nbytes // 16
        # Four parts of the backward pass keep to it, two do not, nor heads of Q that take more than K and V.
        assert (reckoned <= aim) == (heads == (16, 16) and ranks < 8), ranks
    assert table_of_the_page("ulysses in parts") == rows
    assert divide(1) is None


def test_storages_are_counted_until_nothing_holds_them() -> None:
    with LiveBytes() as memory:
        x = torch.zeros(1000)
        view = x[500:]
        del x
        assert memory.live == 4000
        del view
        assert memory.live == 0
        y = torch.zeros(8).double()
    assert (memory.live, memory.peak) == (y.numel() * 8, 4000)
