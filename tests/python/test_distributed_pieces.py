"""What ranks hold, and which rows of Q meet which keys: held to a mask over the whole sequence, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.distributed import Machine, explain_context_parallel, shard_zigzag, unshard_zigzag
from hopper_attention.distributed.auto import Sizes
from hopper_attention.distributed.gather import by_owner
from hopper_attention.distributed.layout import check_divides, positions_of, shard, unshard
from hopper_attention.distributed.pieces import (
    Group,
    Piece,
    Problem,
    count_scores,
    groups_between,
    groups_with_all,
    rows_of_none,
)
from hopper_attention.distributed.steps import Share, distances_of, steps_of
from hopper_attention.distributed.wire import (
    packed,
    pieces_of,
    quantize_chunks,
    travelling,
    unpacked,
    visible_chunks,
)
from hopper_attention.masks import UNLIMITED
from hopper_attention.quantized import Fp8Quantization
from hopper_attention.reference.tiles import Mask, Span

LAYOUTS = ("zigzag", "contiguous")


def whole_mask(p: Problem) -> Tensor:
    """Which keys each position sees, (seqlen_q, seqlen_k)."""
    rows = torch.arange(p.seqlen_q)[:, None] + p.seqlen_k - p.seqlen_q
    keys = torch.arange(p.seqlen_k)
    seen = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool)
    if p.left >= 0:
        seen &= keys >= rows - p.left
    if p.right >= 0:
        seen &= keys <= rows + p.right
    if p.documents:
        starts = torch.tensor(p.documents)
        of_row, of_key = (torch.searchsorted(starts, x, right=True) for x in (rows[:, 0], keys))
        seen &= (of_row[:, None] == of_key) & (keys < starts[-1])
    return seen


def mask_of(groups: tuple[Group, ...], rows: int, keys: int) -> Tensor:
    """How often each pair of a local row and a key is computed."""
    counts = torch.zeros(rows, keys, dtype=torch.int64)
    for piece in (piece for group in groups for piece in group.pieces):
        m, n = (span.stop - span.start for span in (piece.rows, piece.keys))
        sides = piece.mask.causal, *piece.mask.window, 0
        visible = Mask(m, n, *sides).visible(Span(0, m), Span(0, n), 1, torch.device("cpu"))
        seen = torch.ones(m, n, dtype=torch.int64) if visible is None else visible.long()
        counts[piece.rows.start : piece.rows.stop, piece.keys.start : piece.keys.stop] += seen
    return counts


PROBLEMS = [
    Problem(world, 48, 48, layout, *sides, documents)
    for world in (1, 2, 3, 4)
    for layout in LAYOUTS
    for sides in ((-1, -1), (-1, 0), (5, 0), (17, 0), (3, 9), (-1, 4), (20, -1), (0, 0))
    for documents in ((), (0, 48), (0, 1, 2, 13, 13, 37, 41))
] + [Problem(2, 16, 48, layout, *sides) for layout in LAYOUTS for sides in ((-1, 0), (5, 0), (6, 3))]


def test_pieces_are_the_mask_of_the_whole_sequence() -> None:
    for p in PROBLEMS:
        wanted = whole_mask(p).long()
        for rank in range(p.world):
            rows = wanted[positions_of(rank, p.world, p.seqlen_q, p.layout)]
            of_all = groups_with_all(p, rank)
            assert torch.equal(mask_of(of_all, *rows.shape), rows), (p, rank)
            assert count_scores(of_all) == rows.sum(), (p, rank)
            for other in range(p.world):
                keys = rows[:, positions_of(other, p.world, p.seqlen_k, p.layout)]
                groups = groups_between(p, rank, other)
                assert torch.equal(mask_of(groups, *keys.shape), keys), (p, rank, other)
                assert count_scores(groups) == keys.sum(), (p, rank, other)


def test_a_causal_zigzag_takes_one_call_a_step_and_the_same_work_on_all_ranks() -> None:
    p = Problem(4, 64, 64, "zigzag", right=0)
    work = {(r, s): groups_between(p, r, s) for r in range(4) for s in range(4)}
    assert {len(groups) for groups in work.values()} == {1}
    assert {len(groups[0].pieces) for groups in work.values()} == {1}
    assert {count_scores(groups) for (r, s), groups in work.items() if r != s} == {128}
    assert {count_scores(groups) for (r, s), groups in work.items() if r == s} == {136}


def test_of_the_shard_of_a_rank_before_half_travels() -> None:
    p = Problem(4, 64, 64, "zigzag", right=0)
    # From rank 0, which is before, its first chunk; from ranks 3 and 2 both.
    assert [step.takes for step in steps_of(p, 1)] == [((0, (0, 8)),), ((3, (0, 16)),), ((2, (0, 16)),)]
    for rank, at_once in product(range(4), (False, True)):
        for step in steps_of(p, rank, at_once):
            for share in step.takes:
                gives = [give for there in steps_of(p, share.rank, at_once) for give in there.gives]
                assert Share(rank, share.rows) in gives


@pytest.mark.parametrize("by_key", [False, True])
def test_shards_that_come_at_once_are_met_as_each_by_itself(by_key: bool) -> None:
    for p in (p for p in PROBLEMS if p.world > 2):
        wanted = whole_mask(p).long()
        for rank in range(p.world):
            rows = wanted[positions_of(rank, p.world, p.seqlen_q, p.layout)]
            for step in steps_of(p, rank, at_once=True, by_key=by_key):
                held = [
                    rows[:, positions_of(owner, p.world, p.seqlen_k, p.layout)[start:stop]]
                    for owner, (start, stop) in step.takes
                ]
                keys = torch.cat(held, 1) if held else rows[:, :0]
                assert step.keys == keys.shape[1]
                assert torch.equal(mask_of(step.groups, *keys.shape), keys), (p, rank)


def test_in_a_causal_zigzag_all_at_once_is_two_calls() -> None:
    p = Problem(4, 64, 64, "zigzag", right=0)
    of_rows = [[(g.rows, g.keys) for g in steps_of(p, r, True)[0].groups] for r in range(4)]
    # The later half of the rows sees all that comes, the first half the chunks before it.
    assert of_rows[0] == [((8, 16), (0, 48))]
    assert of_rows[1] == [((0, 8), (0, 8)), ((8, 16), (0, 40))]
    assert of_rows[3] == [((0, 16), (0, 24))]
    of_keys = [[(g.rows, g.keys) for g in steps_of(p, r, True, True)[0].groups] for r in range(4)]
    assert of_keys[1] == [((0, 16), (0, 8)), ((8, 16), (8, 40))]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain_context_parallel(0, 64, 4, 2, 64), "world is 0, allowed: 1 or more"),
        (lambda: explain_context_parallel(-2, 64, 4, 2, 64), "world is -2, allowed: 1 or more"),
        (lambda: explain_context_parallel(2, -64, 4, 2, 64), "seqlen is -64, allowed: 0 or more"),
        (lambda: explain_context_parallel(2, 64, 4, 0, 64), "kv_heads is 0, allowed: 1 or more"),
        (lambda: explain_context_parallel(2, 64, 3, 2, 64), "q has 3 heads and k has 2, allowed: a multiple"),
        (lambda: explain_context_parallel(2, 64, 4, 2, 0), "head_dim is 0, allowed: 1 or more"),
        (lambda: explain_context_parallel(2, 64, 4, 2, 64, batch=0), "batch is 0, allowed: 1 or more"),
        (lambda: explain_context_parallel(2, 64, 4, 2, 64, ulysses=0), "ulysses is 0, allowed: 1 or more"),
        (lambda: explain_context_parallel(4, 64, 4, 2, 64, ulysses=3), "ulysses is 3, allowed: a divisor"),
        (lambda: explain_context_parallel(2, 64.0, 4, 2, 64), "seqlen is a float, 64.0, allowed: an int"),
        (lambda: Machine(tflops=0), "tflops is 0, allowed: above 0"),
        (lambda: Machine(gbytes_per_s=math.nan), "gbytes_per_s is nan, allowed: above 0"),
        (lambda: Machine(latency_us=-1.0), "latency_us is -1.0, allowed: 0 or more"),
        (lambda: shard_zigzag(torch.arange(16), 0, 4), r"dim is 1, allowed with x of shape \(16,\): below 1"),
        (lambda: shard_zigzag(torch.arange(16), 0, 4, -2), "dim is -2, allowed: -1 or more"),
        (lambda: shard_zigzag([1], 0, 4, 0), "x is a list, allowed: a torch.Tensor"),
        (lambda: shard_zigzag(torch.arange(16), 4, 4, 0), "rank is 4, allowed: 0 to 3"),
        (lambda: unshard_zigzag(torch.arange(16), 0, 0), "world is 0, allowed: 1 or more"),
    ],
)
def test_what_cannot_be_planned_or_cut_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def test_under_a_window_only_neighbours_talk() -> None:
    p = Problem(8, 128, 128, "contiguous", left=10, right=0)
    assert distances_of(p) == (1,)
    assert [step.takes for step in steps_of(p, 3)] == [((2, (6, 16)),)]
    assert [step.takes for step in steps_of(p, 0)] == [()]
    both = Problem(8, 128, 128, "contiguous", left=10, right=3)
    assert distances_of(both) == (1, 7)
    assert steps_of(both, 3, at_once=True)[0].takes == ((2, (6, 16)), (4, (0, 3)))


def test_rows_behind_the_documents_are_of_none() -> None:
    p = Problem(2, 16, 16, "zigzag", documents=(0, 5, 11))
    assert rows_of_none(p, 0) == [Span(4, 8)]
    assert rows_of_none(p, 1) == [Span(7, 8)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_put_together_again(layout: str) -> None:
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = [shard(x, r, 4, layout) for r in range(4)]
    assert torch.equal(unshard(torch.cat(parts, 1), 4, layout), x)
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, positions_of(rank, 4, 24, layout)])


def test_zigzag_pairs_the_first_chunk_with_the_last() -> None:
    x = torch.arange(8)
    parts = [shard_zigzag(x, r, 2, 0) for r in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert torch.equal(unshard_zigzag(torch.cat(parts), 2, 0), x)


def test_a_length_that_does_not_divide_is_refused_with_one_that_does() -> None:
    with pytest.raises(
        ValueError, match=r"seqlen is 50, allowed with 4 ranks .* multiples of 8; pad .* to 56"
    ):
        check_divides(50, 4, "zigzag")
    with pytest.raises(ValueError, match="layout is 'spiral'"):
        check_divides(48, 4, "spiral")
    with pytest.raises(ValueError, match="rank is 4, allowed: 0 to 3"):
        positions_of(4, 4, 48, "zigzag")


def test_auto_says_what_it_chooses_and_why() -> None:
    long = explain_context_parallel(8, 1 << 20, 32, 8, 128, causal=True)
    assert set(long.seconds) == {"ring", "all_gather", "ulysses"}
    assert long.method == min(long.seconds, key=long.seconds.__getitem__)
    assert "model" in str(long) and 0.9 < long.efficiency <= 1.0
    odd = explain_context_parallel(8, 1 << 14, 12, 4, 128)
    assert "ulysses" not in odd.seconds and "12 heads of q do not divide among 8 ranks" in odd.reason
    huge = explain_context_parallel(64, 10 << 20, 32, 32, 128, causal=True)
    assert huge.method == "ring" and "not all_gather: it takes 258 GB on each GPU" in huge.reason
    slow = Machine(gbytes_per_s=40)
    mesh = explain_context_parallel(64, 1 << 20, 32, 8, 128, causal=True, machine=slow, ulysses=8)
    assert mesh.method == "mesh" and "8 places with chunks of 65536 tokens, 4 heads" in mesh.reason
    with pytest.raises(ValueError, match="ulysses is 3, allowed: a divisor of the 8 ranks"):
        explain_context_parallel(8, 1 << 16, 32, 8, 128, ulysses=3)
    with pytest.raises(ValueError, match="no mesh with 8 ranks for ulysses: 12 heads"):
        explain_context_parallel(64, 1 << 16, 12, 4, 128, ulysses=8)
    narrow = explain_context_parallel(
        8, 1 << 17, 12, 12, 128, window_size=(1023, 0), layout="contiguous", machine=Machine(gbytes_per_s=40)
    )
    assert narrow.method == "ring"
    assert explain_context_parallel(4, 1 << 17, 16, 16, 128, causal=True, fp8=True).method == "ring"


def test_a_tail_is_that_of_the_longest_tile_whatever_the_heads() -> None:
    machine = Machine(tflops=1.0, sms=100)
    group = Group((Piece(Span(0, 512), Span(0, 2048), UNLIMITED, 0),))
    narrow = Group((Piece(Span(0, 512), Span(0, 2048), 99, 0),))
    for heads in (4, 64):
        sizes = Sizes(2, heads, 4, 128, 64)
        # Half of 128 rows by 2048 keys, two products of 128 and 64 columns, 100 SMs sharing 1 TFLOP/s.
        forward = 0.5 * 128 * 2048 * 2 * (128 + 64) * 100 * 1e-12
        assert sizes.tails_s((group,), 2, machine) == pytest.approx(forward)
        assert sizes.tails_s((group, group), 2, machine) == pytest.approx(2 * forward)
        assert sizes.tails_s((group,), 5, machine) == pytest.approx(forward * 5 / 2 / 4)
        assert sizes.tails_s((narrow,), 2, machine) == pytest.approx(forward * 100 / 2048)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_sorted_by_owner(layout: str) -> None:
    x = torch.randn(2, 24, 3, 4)
    assert torch.equal(by_owner(x, 3, layout), torch.stack([shard(x, r, 3, layout) for r in range(3)]))


def test_by_the_model_slower_links_cost_efficiency() -> None:
    fast, slow = (
        explain_context_parallel(8, 1 << 15, 16, 16, 128, causal=True, machine=Machine(gbytes_per_s=g))
        for g in (300.0, 5.0)
    )
    assert slow.efficiency < 0.7 * fast.efficiency


@pytest.mark.parametrize("smooth_v", [False, True])
def test_keys_of_e4m3_travel_in_one_message(smooth_v: bool) -> None:
    quantization = Fp8Quantization(smooth_v=smooth_v)
    tensors = tuple(torch.randn(2, 80, heads, 64).bfloat16() for heads in (4, 2, 2))
    first, second = quantize_chunks(tensors, 2, quantization, "reference")
    (whole,) = quantize_chunks(tensors, 1, quantization, "reference")
    for chunk, like, keys in ((first, second, 40), (whole, whole, 80), (whole, whole, 64)):
        sent = travelling(chunk, keys)
        buffer = packed(sent)
        assert buffer.dtype == torch.uint8 and buffer.is_contiguous()
        for got, x in zip(unpacked(buffer, travelling(like, keys)), sent, strict=True):
            assert got.dtype == x.dtype and torch.equal(got.float(), x.float())
            assert not got.numel() or not (got.data_ptr() - buffer.data_ptr()) % 256


def test_a_step_in_e4m3_is_one_call_as_in_16_bits() -> None:
    p = Problem(4, 256, 256, "zigzag", right=0)
    assert pieces_of(p, Fp8Quantization()) == 1
    for rank, other in product(range(4), range(4)):
        ((_, _, piece),) = visible_chunks(p, rank, other, 1)
        (group,) = groups_between(p, rank, other)
        assert (piece,) == group.pieces and piece.keys.start == 0
        # Of a rank before the first half of the keys, of one after all for the second half of the rows.
        assert piece.keys.stop == (32 if other < rank else 64)
        assert piece.rows.start == (32 if other > rank else 0)
    # Blocks of rows would be cut, or keys that change places, or a scale is one of all rows.
    assert pieces_of(p, Fp8Quantization(block_q=64)) == 2
    assert pieces_of(replace(p, seqlen_q=240, seqlen_k=240), Fp8Quantization()) == 2
    assert pieces_of(p, Fp8Quantization(granularity="head")) == 2
    assert pieces_of(replace(p, layout="contiguous"), Fp8Quantization(granularity="head")) == 1
    assert len(visible_chunks(p, 1, 1, 2)) == 3
