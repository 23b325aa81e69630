"""What ranks hold, and which rows of Q meet which keys: held to a mask over the whole sequence, pair by pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
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
from hopper_attention.distributed.schedule import Schedule, backward_schedule, forward_schedule
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


def rows_of_the_model() -> list[str]:
    """The table of docs/distributed.md."""
    rows = []
    for tokens, name, gpus, speed, inner in (
        (1 << 16, "64k", 8, 300, 1),
        (1 << 17, "128k", 2, 300, 1),
        (1 << 17, "128k", 8, 300, 1),
        (1 << 20, "1M", 8, 300, 1),
        (1 << 16, "64k", 64, 40, 1),
        (1 << 16, "64k", 64, 40, 8),
        (1 << 20, "1M", 64, 40, 1),
        (1 << 20, "1M", 64, 40, 8),
        (1 << 22, "4M", 64, 40, 8),
        (10 << 20, "10M", 64, 40, 8),
        (10 << 20, "10M", 256, 40, 1),
        (10 << 20, "10M", 256, 40, 8),
        (10 << 20, "10M", 1024, 40, 8),
    ):
        machine = Machine(gbytes_per_s=speed)
        plan = explain_context_parallel(gpus, tokens, 32, 8, 128, causal=True, machine=machine, ulysses=inner)
        chunk = tokens // (2 * gpus // inner)
        rows.append(f"| {name} | {gpus} | {speed} | {chunk:,} | {plan.method} | {plan.efficiency:.2f} |")
    return rows


ROOT = Path(__file__).resolve().parents[2]
METHODS = ("ring", "all_gather", "ulysses")
SHAPES = [(n, h, hk) for n in (1 << 17, 1 << 15) for h, hk in ((16, 16), (32, 8))]
BOTH = "forward + backward"


def table_of_the_page(name: str) -> list[str]:
    page = (ROOT / "docs" / "distributed.md").read_text()
    table = page.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0].strip()
    return table.splitlines()[2:]


RESULTS = ROOT / "benchmarks" / "results"
REPORTS = {2: "context_parallel_nvidia_h200.json", 4: "context_parallel_4_nvidia_h200.json"}
SCHEDULES = "context_schedules_4_nvidia_h200.json"
SHORT = "context_short_4_nvidia_h200.json"
SHORTS = {2: "context_short_2_nvidia_h200.json", 4: SHORT}
SHORT_SHAPES = [(n, h, hk) for n, h, hk in SHAPES if n == 1 << 15]

Cells = dict[tuple[int, int, int], dict[str, dict[str, Any]]]


def measured(gpus: int = 2) -> Cells:
    """Cells of the report on so many GPUs, by shape and by way."""
    return cells_of(REPORTS[gpus])


@lru_cache(maxsize=8)
def cells_of(report: str) -> Cells:
    cells = json.loads((RESULTS / report).read_text())["cells"]
    return {
        (n, h, hk): {c["way"]: c for c in cells if c["shape"] == f"s{n}-h{h}-hk{hk}-d128-causal"}
        for n, h, hk in SHAPES
    }


def name_of(shape: tuple[int, int, int]) -> str:
    return f"{shape[0] >> 10}k, {shape[1]} over {shape[2]}"


def rows_of_efficiency(gpus: int = 2) -> list[str]:
    ways = ("ring", "ring, 8 SMs free", "all_gather", "ulysses") if gpus == 2 else METHODS
    return [
        f"| {name_of(shape)} | {kind} | "
        + " | ".join(f"{measured(gpus)[shape][f'{way}, {kind}']['efficiency']:.3f}" for way in ways)
        + " |"
        for kind in (BOTH, "forward")
        for shape in SHAPES
    ]


def rows_of_four() -> list[str]:
    """FP8 over 16 bits, and memory: two shards of K and V with the output, the ring forward, and both passes of each
    method with the gradients, which are given besides."""
    rows = []
    for shape in SHAPES:
        cells = measured(4)[shape]
        ring = cells[f"ring, {BOTH}"]
        sizes = [2 * ring["kv_shard_bytes"] + ring["out_bytes"], cells["ring, forward"]["extra_bytes"]]
        sizes += [cells[f"{m}, {BOTH}"]["extra_bytes"] for m in METHODS]
        sizes.append(ring["result_bytes"] - ring["out_bytes"])
        fp8 = cells["ring FP8, forward"]["over_16_bits"]
        rows.append(
            f"| {name_of(shape)} | {fp8:.2f} | " + " | ".join(f"{x / 2**30:.2f}" for x in sizes) + " |"
        )
    return rows


def is_attention(kernel: dict[str, Any]) -> bool:
    return "ForwardKernel" in kernel["name"] or "BackwardKernel" in kernel["name"]


def rows_of_timeline() -> list[str]:
    """Of each rank: microseconds in attention kernels, in other kernels of its stream but for the head start, and of
    the transfers of K and V of the forward pass the shortest and the longest."""
    rows = []
    report = json.loads((RESULTS / "context_timeline_4_nvidia_h200.json").read_text())
    for rank in range(4):
        kernels = [k for k in report["kernels"] if k["rank"] == rank and k["name"] != "nccl:coalesced"]
        transfers = [k for k in kernels if k["name"].startswith("nccl")]
        ours = [k for k in kernels if k not in transfers and "spin_kernel" not in k["name"]]
        forward, backward = (
            sum(k["us"] for k in ours if f"{n}Kernel" in k["name"]) for n in ("Forward", "Backward")
        )
        others = sum(k["us"] for k in ours if not is_attention(k))
        moves = [k["us"] for k in transfers[:3]]
        rows.append(
            f"| {rank} | {forward:.0f} | {backward:.0f} | {others:.0f} | {min(moves):.0f} to {max(moves):.0f} |"
        )
    return rows


def rows_beside_others() -> list[str]:
    """FP8 over 16 bits, the ring over torch's better way, and memory."""
    rows = []
    for shape in SHAPES:
        cells = measured()[shape]
        torchs = min((c for way, c in cells.items() if way.startswith("torch")), key=lambda c: c["seconds"])
        fp8 = cells["ring FP8, forward"]["over_16_bits"]
        found = [*(cells[f"{m}, {BOTH}"] for m in METHODS), torchs]
        extra = " | ".join(f"{cell['extra_bytes'] / 2**30:.2f}" for cell in found)
        rows.append(f"| {name_of(shape)} | {fp8:.2f} | {torchs['ours_over_it']:.2f} | {extra} |")
    return rows


WAYS = {f"one shard at a time, {n} parts": Schedule(n) for n in (1, 2, 4, 8)} | {
    f"all shards at once, {n} parts": Schedule(n, at_once=True) for n in (1, 2)
}
"""The schedules of the report, by its names."""


def way_of(shape: tuple[int, int, int], kind: str) -> str:
    """The schedule of a pass of the ring on four GPUs; both passes have the same."""
    n, h, hk = shape
    problem = Problem(4, n, n, "zigzag", right=0)
    sizes = Sizes(1, h, hk, 128, 128).of_rank(problem)
    chosen = {forward_schedule(problem, sizes), backward_schedule(problem, sizes)}
    (name,) = (name for name, schedule in WAYS.items() if {schedule} == chosen)
    return f"{name}, {kind}"


def rows_of_schedules() -> list[str]:
    """Milliseconds and GiB by every schedule, and the efficiency of the one that is taken."""
    rows = []
    for kind, shape in product((BOTH, "forward"), SHAPES):
        cells = cells_of(SCHEDULES)[shape]
        found = [cells.get(f"{way}, {kind}") for way in WAYS]
        columns = [f"{c['seconds'] * 1e3:.1f}, {c['extra_bytes'] / 2**30:.2f}" if c else "-" for c in found]
        columns.append(f"{cells[way_of(shape, kind)]['efficiency']:.3f}")
        rows.append(f"| {name_of(shape)} | {kind} | " + " | ".join(columns) + " |")
    return rows


def test_short_shards_come_by_the_fastest_schedule_and_long_ones_lose_little() -> None:
    for kind, shape in product((BOTH, "forward"), SHAPES):
        cells = cells_of(SCHEDULES)[shape]
        least = min(cells[f"{way}, {kind}"]["seconds"] for way in WAYS if f"{way}, {kind}" in cells)
        taken = cells[way_of(shape, kind)]["seconds"]
        assert taken <= (1.0 if shape[0] == 1 << 15 else 1.05) * least


def seconds_of(gpus: int, shape: tuple[int, int, int]) -> dict[str, float]:
    """By method, forward and backward. The ring on four GPUs is that of the report of its schedules: the public
    function, but where that did not take the schedule of now."""
    found = {m: measured(gpus)[shape][f"{m}, {BOTH}"]["seconds"] for m in METHODS}
    if gpus == 4:
        of_now = f"ring, {BOTH}" if shape[0] == 1 << 17 else way_of(shape, BOTH)
        found["ring"] = cells_of(SCHEDULES)[shape][of_now]["seconds"]
    return found


def rows_of_short() -> list[str]:
    """Milliseconds and efficiency of the ring and of ulysses both ways; what one GPU would take is in the second."""
    rows = []
    for kind, shape in product((BOTH, "forward"), SHORT_SHAPES):
        cells = cells_of(SHORT)[shape]
        found = [cells[f"{way}, {kind}"] for way in ("ring", "ulysses by messages", "ulysses")]
        columns = [f"{cells[f'one GPU, {kind}']['seconds'] * 1e3:.1f}"]
        columns += [f"{c['seconds'] * 1e3:.2f}, {c['efficiency']:.3f}" for c in found]
        rows.append(f"| {name_of(shape)} | {kind} | " + " | ".join(columns) + " |")
    return rows


def rows_of_short_others() -> list[str]:
    """FP8: milliseconds of the ring and of ulysses, and ulysses over its 16 bits; what `auto` takes over torch's better
    way; GiB of both passes."""
    rows = []
    for shape in SHORT_SHAPES:
        cells = cells_of(SHORT)[shape]
        fp8 = [cells[f"{way} FP8, forward"] for way in ("ring", "ulysses")]
        torchs = min((c for way, c in cells.items() if way.startswith("torch")), key=lambda c: c["seconds"])
        found = [f"{c['seconds'] * 1e3:.2f}" for c in fp8]
        found += [f"{x:.2f}" for x in (fp8[1]["over_16_bits"], torchs["ours_over_it"])]
        ways = [cells[f"{way}, {kind}"] for kind in ("forward", BOTH) for way in ("ring", "ulysses")]
        found += [f"{c['extra_bytes'] / 2**30:.2f}" for c in ways]
        rows.append(f"| {name_of(shape)} | " + " | ".join(found) + " |")
    return rows


def fastest(cells: dict[str, dict[str, Any]], begin: str) -> str:
    """How much faster ours is than the fastest of those ways, in turns."""
    found = [c for way, c in cells.items() if way.startswith(begin) and "unavailable" not in c]
    return f"{min(found, key=lambda c: c['seconds'])['ours_over_it']:.2f}"


def rows_of_targets() -> list[str]:
    """Of what `auto` takes: efficiency, against others, FP8 over 16 bits, and GiB: the aim, the forward pass, both
    without dQ, dK and dV, and what a group keeps."""
    rows = []
    for gpus, shape in product(SHORTS, SHAPES):
        report = json.loads((RESULTS / SHORTS[gpus]).read_text())
        cells, name = cells_of(SHORTS[gpus])[shape], "s{}-h{}-hk{}-d128-causal".format(*shape)
        taken = report["auto"][name].partition(":")[0]
        # Memory of the method by its name: that of `auto` was counted while its calls were still new.
        both, forward = (cells[f"{taken}, {kind}"] for kind in (BOTH, "forward"))
        found = [f"{cells.get(f'auto, {BOTH}', both)['efficiency']:.3f}"]
        found += [fastest(cells, "torch"), fastest(cells, "ring-flash-attn")]
        found.append(f"{cells[f'{taken} FP8, forward']['over_16_bits']:.2f}")
        gradients = both["result_bytes"] - both["out_bytes"]
        room = report[f"room_bytes_after_{name}"] if taken == "ulysses" else 0
        sizes = 2 * both["kv_shard_bytes"] + both["out_bytes"], forward["extra_bytes"]
        found += [f"{x / 2**30:.2f}" for x in (*sizes, both["extra_bytes"] - gradients, room)]
        rows.append(f"| {gpus} | {name_of(shape)} | {taken} | " + " | ".join(found) + " |")
    return rows


def test_targets_that_are_met_and_those_that_are_not() -> None:
    for gpus, shape in product(SHORTS, SHAPES):
        cells, is_long = cells_of(SHORTS[gpus])[shape], shape[0] == 1 << 17
        taken = cells["ring, " + BOTH] if is_long else cells["auto, " + BOTH]
        aim = (0.93 if gpus == 2 else 0.90) if is_long else 0.85
        assert taken["efficiency"] > aim, (gpus, shape)
        assert float(fastest(cells, "torch")) >= 1.15
        beside_ring = float(fastest(cells, "ring-flash-attn"))
        assert (beside_ring >= 1.15) == ((gpus, is_long) != (2, True)), (gpus, shape)
    fp8 = {key: cells_of(SHORTS[key[0]])[key[1]]["ring FP8, forward"] for key in product(SHORTS, SHAPES[:2])}
    assert [cell["over_16_bits"] >= 1.5 for cell in fp8.values()] == [True, True, False, False]


BY_MESSAGES = Machine(host_gpus=1)
"""As ulysses exchanged heads in these reports."""


def rows_of_model_and_measurement() -> list[str]:
    rows = []
    for gpus, shape in product(REPORTS, SHAPES):
        (n, h, hk), cells = shape, measured(gpus)[shape]
        found = seconds_of(gpus, shape)
        plan = explain_context_parallel(gpus, n, h, hk, 128, causal=True, machine=BY_MESSAGES)
        fp8 = explain_context_parallel(gpus, n, h, hk, 128, causal=True, fp8=True)
        times = [(plan.seconds[m], found[m]) for m in METHODS]
        times.append((fp8.seconds["ring"], cells["ring FP8, forward"]["seconds"]))
        pairs = " | ".join(f"{model * 1e3:.1f} / {taken * 1e3:.1f}" for model, taken in times)
        rows.append(f"| {gpus} | {name_of(shape)} | {pairs} | {plan.method} |")
    return rows


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("model", rows_of_the_model),
        ("efficiency", rows_of_efficiency),
        ("others", rows_beside_others),
        ("efficiency of four", lambda: rows_of_efficiency(4)),
        ("four", rows_of_four),
        ("timeline", rows_of_timeline),
        ("schedules", rows_of_schedules),
        ("short", rows_of_short),
        ("short others", rows_of_short_others),
        ("targets", rows_of_targets),
        ("model and measurement", rows_of_model_and_measurement),
    ],
)
def test_the_tables_of_the_page_are_those_of_the_model_and_the_report(
    name: str, rows: Callable[[], list[str]]
) -> None:
    assert table_of_the_page(name) == rows()


RING_WAS_SLOWER = 2, (1 << 15, 32, 8)
"""The ring of the report on two GPUs had more copies than now."""


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("gpus", REPORTS)
def test_auto_takes_what_was_fastest(gpus: int, shape: tuple[int, int, int]) -> None:
    n, h, hk = shape
    plan = explain_context_parallel(gpus, n, h, hk, 128, causal=True, machine=BY_MESSAGES)
    seconds = seconds_of(gpus, shape)
    allowed = 1.09 if (gpus, shape) == RING_WAS_SLOWER else 1.02
    assert seconds[plan.method] <= allowed * min(seconds.values())
    # What puts all_gather behind is in the model too: its place among the methods is that of the report.
    assert max(plan.seconds, key=plan.seconds.__getitem__) == max(seconds, key=seconds.__getitem__)


@pytest.mark.parametrize("shape", SHORT_SHAPES, ids=name_of)
def test_auto_takes_peer_memory_where_it_was_fastest(shape: tuple[int, int, int]) -> None:
    (n, h, hk), cells = shape, cells_of(SHORT)[shape]
    for kind, fp8 in ((BOTH, False), ("FP8, forward", True)):
        plan = explain_context_parallel(4, n, h, hk, 128, causal=True, fp8=fp8)
        assert (plan.method, plan.transport) == ("ulysses", "peer memory")
        ways = [f"{way} {kind}" if fp8 else f"{way}, {kind}" for way in ("ring", "ulysses")]
        ring, pushed = (cells[way]["seconds"] for way in ways)
        assert pushed < ring
        # And the model knows how long it takes, of a GPU that does 600 TFLOP/s; less well in FP8.
        assert pushed / plan.seconds["ulysses"] == pytest.approx(1.0, abs=0.25 if fp8 else 0.1)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("gpus", REPORTS)
def test_the_model_knows_where_fp8_pays(gpus: int, shape: tuple[int, int, int]) -> None:
    n, h, hk = shape
    plan = explain_context_parallel(gpus, n, h, hk, 128, causal=True, fp8=True, machine=BY_MESSAGES)
    paid = measured(gpus)[shape]["ring FP8, forward"]["over_16_bits"] > 1.0
    assert ("quantization=None would be faster" in plan.reason) != paid
    assert ("in 16 bits it would take" in plan.reason) == paid


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
