"""Attention over many GPUs: the tables of its page are those of the model and the reports, and aims are met or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hopper_attention.distributed import Machine, explain_context_parallel
from hopper_attention.distributed.auto import Sizes
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.schedule import Schedule, backward_schedule, forward_schedule


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
OF_FP8 = "context_fp8_4_nvidia_h200.json"
ON_TWO, PUBLISHED_ON_TWO = (
    f"development/context_{name}.json" for name in ("parts_2_0faffb2", "published_2_94ef559")
)
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


AT_ONCE = "ulysses, all heads at once"
IN_PARTS = "ulysses", "auto", "ulysses in parts, of any length"
"""In the report on two GPUs, where these were one call."""


def rows_of_short_on_two() -> list[str]:
    """As on four; and the least and the most that heads in parts took by their names."""
    rows = []
    for kind, shape in product((BOTH, "forward"), SHORT_SHAPES):
        cells = cells_of(ON_TWO)[shape]
        columns = [f"{cells[f'one GPU, {kind}']['seconds'] * 1e3:.1f}"]
        found = [cells[f"{way}, {kind}"] for way in ("ring", AT_ONCE)]
        columns += [f"{c['seconds'] * 1e3:.2f}, {c['efficiency']:.3f}" for c in found]
        of_parts = [cells[f"{way}, {kind}"] for way in IN_PARTS if f"{way}, {kind}" in cells]
        ends = [pick(c["seconds"] for c in of_parts) * 1e3 for pick in (min, max)]
        columns.append("{:.2f} to {:.2f}".format(*ends))
        rows.append(f"| {name_of(shape)} | {kind} | " + " | ".join(columns) + " |")
    return rows


def rows_of_memory_on_two() -> list[str]:
    """MiB of both passes without dQ, dK and dV, and the buffer of ulysses; and FP8, milliseconds, and over 16 bits."""
    rows = []
    report = json.loads((RESULTS / ON_TWO).read_text())
    for shape in SHORT_SHAPES:
        cells, name = cells_of(ON_TWO)[shape], "s{}-h{}-hk{}-d128-causal".format(*shape)
        ring, at_once, parts = (cells[f"{way}, {BOTH}"] for way in ("ring", AT_ONCE, IN_PARTS[2]))
        held = [c["extra_bytes"] - c["result_bytes"] + c["out_bytes"] for c in (ring, at_once, parts)]
        buffers = [report[f"room_bytes_of_{way}_after_{name}"] for way in (AT_ONCE, IN_PARTS[2])]
        sizes = (
            2 * ring["kv_shard_bytes"] + ring["out_bytes"],
            held[0],
            held[1],
            buffers[0],
            held[2],
            buffers[1],
        )
        fp8 = [cells[f"{way} FP8, forward"]["seconds"] for way in ("ring", "ulysses")]
        columns = [f"{x / 2**20:.0f}" for x in sizes] + [f"{x * 1e3:.2f}" for x in fp8]
        columns.append(f"{cells[f'{AT_ONCE}, forward']['seconds'] / fp8[1]:.2f}")
        rows.append(f"| {name_of(shape)} | " + " | ".join(columns) + " |")
    return rows


STAYS = "development/context_stay_2_0de9ca4.json"


def rows_of_stays() -> list[str]:
    """Of both passes: milliseconds and efficiency where Q, K and V of the heads stay in the buffer and where they are
    copied; and MiB without dQ, dK and dV, with the buffer."""
    report, rows = json.loads((RESULTS / STAYS).read_text()), []
    for tokens, heads in product((1 << 14, 1 << 15), ((16, 16), (32, 8))):
        shape = tokens, *heads
        name = "s{}-h{}-hk{}-d128-causal".format(*shape)
        cells = {c["way"]: c for c in report["cells"] if c["shape"] == name}
        ring, copied, stays = (cells[f"{way}, {BOTH}"] for way in ("ring", "ulysses, heads copied", "auto"))
        columns = [f"{cells[f'one GPU, {BOTH}']['seconds'] * 1e3:.1f}"]
        columns += [f"{c['seconds'] * 1e3:.2f}, {c['efficiency']:.3f}" for c in (ring, copied, stays)]
        held = [c["extra_bytes"] - c["result_bytes"] + c["out_bytes"] for c in (ring, copied, stays)]
        buffer = report[f"room_bytes_after_{name}"]
        sizes = 2 * ring["kv_shard_bytes"] + ring["out_bytes"], held[0], held[1] + buffer, held[2] + buffer
        columns += [f"{x / 2**20:.0f}" for x in sizes]
        rows.append(f"| {name_of(shape)} | " + " | ".join(columns) + " |")
    return rows


WAVES = {gpus: f"development/context_waves_{gpus}_b03fd44.json" for gpus in (2, 4)}


def rows_of_waves() -> list[str]:
    """Efficiency of what `auto` takes and with all heads at once, on idle GPUs and in a row; and of both passes in a
    row how much faster it is than the better of PyTorch's ways and than ring-flash-attn as published."""
    rows = []
    for gpus, shape, kind in product(WAVES, SHORT_SHAPES, (BOTH, "forward")):
        cells = cells_of(WAVES[gpus])[shape]
        ways = [cells[f"{way}, {kind}"] for way in ("auto", "ulysses, heads at once")]
        columns = [f"{cells[f'one GPU, {kind}']['seconds_in_a_row'] * 1e3:.2f}"]
        columns.append(f"{ways[0]['seconds_in_a_row'] * 1e3:.2f}")
        for key in ("efficiency", "efficiency_in_a_row"):
            columns += [f"{c[key]:.3f}" for c in ways]
        beside = ["", ""]
        if kind == BOTH:
            torchs = [c for way, c in cells.items() if way.startswith("torch")]
            best = min(torchs, key=lambda c: c["seconds_in_a_row"])
            beside = [f"{c['ours_over_it_in_a_row']:.2f}" for c in (best, cells[PUBLISHED])]
        rows.append(f"| {gpus} | {name_of(shape)} | {kind} | " + " | ".join([*columns, *beside]) + " |")
    return rows


def test_calls_in_a_row_meet_the_aims() -> None:
    for gpus, shape in product(WAVES, SHORT_SHAPES):
        cells = cells_of(WAVES[gpus])[shape]
        auto = cells[f"auto, {BOTH}"]
        assert auto["efficiency_in_a_row"] >= 0.94 and auto["efficiency"] >= 0.85
        for peer in (c for way, c in cells.items() if way.startswith(("torch", PUBLISHED))):
            assert min(peer["ours_over_it"], peer["ours_over_it_in_a_row"]) >= 1.15
        # Heads in waves cost no memory.
        assert auto["extra_bytes"] == cells[f"ulysses, heads at once, {BOTH}"]["extra_bytes"]


def over_peer_memory() -> list[tuple[int, tuple[int, int, int], float]]:
    """GPUs, shape and seconds of both passes of ulysses, all heads at once."""
    found = [(2, x, cells_of(ON_TWO)[x][f"{AT_ONCE}, {BOTH}"]["seconds"]) for x in SHORT_SHAPES]
    for report, x in product((SHORT, OF_FP8), SHORT_SHAPES):
        found.append((4, x, cells_of(report)[x][f"ulysses, {BOTH}"]["seconds"]))
    return found


def rows_of_model_over_peer_memory() -> list[str]:
    rows = []
    for gpus, shape, taken in over_peer_memory():
        model = explain_context_parallel(gpus, *shape, 128, causal=True).seconds["ulysses"]
        rows.append(
            f"| {gpus} | {name_of(shape)} | {model * 1e3:.1f} / {taken * 1e3:.1f} | {100 * (model / taken - 1):+.0f} |"
        )
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
    for shape in SHAPES:
        cells = cells_of(OF_FP8)[shape]
        fp8 = cells["ring FP8, forward"]
        if shape[0] == 1 << 17:
            # Of the code before it was 1.46.
            assert fp8["over_16_bits"] >= 1.5 > cells_of(SHORT)[shape]["ring FP8, forward"]["over_16_bits"]
            assert fp8["extra_bytes"] <= 2 * fp8["kv_shard_bytes"] + fp8["out_bytes"]
        else:
            auto, ulysses = (cells[f"{way}, {BOTH}"] for way in ("auto", "ulysses"))
            assert auto["extra_bytes"] == ulysses["extra_bytes"]
            # With 16 heads 0.85 is missed by little in this run.
            assert (auto["efficiency"] >= 0.85) == (shape[1] == 32) and auto["efficiency"] > 0.845


PUBLISHED = "ring-flash-attn, as published: FlashAttention-2 both ways"


def rows_of_published() -> list[str]:
    """ring-flash-attn as it is published: milliseconds, ours in turns with it, and how much faster that is."""
    reports = {2: PUBLISHED_ON_TWO, 4: OF_FP8}
    found = [(n, x, cells_of(reports[n])[x].get(PUBLISHED)) for n, x in product(reports, SHAPES)]
    return [
        f"| {gpus} | {name_of(shape)} | {c['seconds'] * 1e3:.1f} | "
        f"{c['ours_seconds'] * 1e3:.1f} | {c['ours_over_it']:.2f} |"
        for gpus, shape, c in found
        if c is not None
    ]


def rows_in_e4m3() -> list[str]:
    """Forward by the ring on four: milliseconds in 16 bits and in e4m3, and how much faster that is, and GiB."""
    rows = []
    for shape in SHAPES:
        plain, fp8 = (cells_of(OF_FP8)[shape][f"{way}, forward"] for way in ("ring", "ring FP8"))
        found = [f"{c['seconds'] * 1e3:.2f}" for c in (plain, fp8)] + [f"{fp8['over_16_bits']:.2f}"]
        found += [
            f"{(2 * fp8['kv_shard_bytes'] + fp8['out_bytes']) / 2**30:.2f}",
            f"{fp8['extra_bytes'] / 2**30:.2f}",
        ]
        rows.append(f"| {name_of(shape)} | " + " | ".join(found) + " |")
    return rows


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
        ("published", rows_of_published),
        ("waves", rows_of_waves),
        ("short of two", rows_of_short_on_two),
        ("memory of two", rows_of_memory_on_two),
        ("stays of two", rows_of_stays),
        ("model over peer memory", rows_of_model_over_peer_memory),
        ("in e4m3", rows_in_e4m3),
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
@pytest.mark.parametrize("gpus", [2, 4])
def test_auto_takes_peer_memory_where_it_was_fastest(gpus: int, shape: tuple[int, int, int]) -> None:
    cells, of_16_bits = (cells_of(ON_TWO), AT_ONCE) if gpus == 2 else (cells_of(SHORT), "ulysses")
    for kind, fp8 in ((BOTH, False), ("FP8, forward", True)):
        plan = explain_context_parallel(gpus, *shape, 128, causal=True, fp8=fp8)
        assert (plan.method, plan.transport) == ("ulysses", "peer memory")
        ways = (
            [f"{way} {kind}" for way in ("ring", "ulysses")]
            if fp8
            else [f"ring, {kind}", f"{of_16_bits}, {kind}"]
        )
        ring, pushed = (cells[shape][way]["seconds"] for way in ways)
        assert pushed < ring
        # And the model knows how long it takes, of a GPU that does 600 TFLOP/s; less well in FP8.
        assert pushed / plan.seconds["ulysses"] == pytest.approx(1.0, abs=0.25 if fp8 else 0.1)


def test_parts_take_longer_than_all_heads_at_once_on_two() -> None:
    for shape in SHORT_SHAPES:
        cells = cells_of(ON_TWO)[shape]
        at_once = cells[f"{AT_ONCE}, {BOTH}"]
        assert at_once["efficiency"] > 0.92
        assert all(cells[f"{way}, {BOTH}"]["seconds"] > at_once["seconds"] for way in IN_PARTS)
    # They keep to two shards and the output, the buffer among it, where heads of Q are as many as those of K and V.
    sizes = [[int(x) for x in row.split("|")[2:8]] for row in rows_of_memory_on_two()]
    assert [held + buffer <= aim for aim, *_, held, buffer in sizes] == [True, False]


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("gpus", REPORTS)
def test_the_model_knows_where_fp8_pays(gpus: int, shape: tuple[int, int, int]) -> None:
    n, h, hk = shape
    plan = explain_context_parallel(gpus, n, h, hk, 128, causal=True, fp8=True, machine=BY_MESSAGES)
    paid = measured(gpus)[shape]["ring FP8, forward"]["over_16_bits"] > 1.0
    assert ("quantization=None would be faster" in plan.reason) != paid
    assert ("in 16 bits it would take" in plan.reason) == paid
