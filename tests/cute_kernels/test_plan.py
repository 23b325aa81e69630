"""The plan of packed sequences, made by its kernel run from PTX without a GPU, and what kernels read of it."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from itertools import product

import pytest
import torch

from cute_kernels.plan.config import (
    ENTRY,
    MAX_PACKED_ROWS,
    PLAN_HEADER,
    RECORD,
    PlanConfig,
    check_packed_size,
    plan_entries,
    plan_words,
)
from cute_kernels.plan.packed import PackedTileOrder
from cute_kernels.plan.parts import part_of_number, parts_of_number, sequence_of_number
from tests.cute_kernels.list_tiles import THREADS, WORDS, compile_list_tiles
from tests.cute_kernels.packing import UNWRITTEN, Packing, fill_plan_on_numpy, plan_on_numpy
from tests.hopper.hopper_machine import parse
from tests.hopper.on_numpy import Arguments
from tests.plans import InParts
from tests.ptx import ptx_of


def draw_lengths(draw: random.Random, sequences: int) -> list[tuple[int, int]]:
    """Many of them 0 or equal to others."""
    choices = (lambda: 0, lambda: 64, lambda: draw.randrange(400), lambda: draw.randrange(5))
    return [(draw.choice(choices)(), draw.choice(choices)()) for _ in range(sequences)]


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("sequences", [0, 1, 2, 7, 8, 33, 70])
def test_plan_is_that_of_plain_python(sequences: int, of_keys: bool) -> None:
    draw = random.Random(sequences)
    for tile in (32, 128):
        lengths = draw_lengths(draw, sequences)
        used = {}
        if sequences % 2:
            used["seqused_q"] = tuple(draw.randrange(-1, q + 3) for q, _ in lengths)
        if sequences % 3 == 1:
            used["seqused_k"] = tuple(draw.randrange(-1, k + 3) for _, k in lengths)
        packing = Packing.of(lengths, tail=(draw.choice((0, 100)), draw.choice((0, 1))), **used)
        assert torch.equal(plan_on_numpy(packing, tile, of_keys), packing.plan(tile, of_keys))


@pytest.mark.parametrize("of_keys", [False, True])
def test_bad_offsets_stay_within_the_tensors(of_keys: bool) -> None:
    """Offsets that fall, lie outside or overlap. The machine refuses a write outside of the plan."""
    draw = random.Random(0)
    for _ in range(20):
        totals, sequences = (draw.randrange(300), draw.randrange(300)), draw.randrange(1, 12)
        cu = [tuple(draw.randrange(-500, 900) for _ in range(sequences + 1)) for _ in range(2)]
        packing = Packing(*cu, *totals)
        plan = plan_on_numpy(packing, 32, of_keys)
        assert torch.equal(plan, packing.plan(32, of_keys))
        check_in_bounds(plan, packing, of_keys)


def test_overlapping_sequences_whose_tiles_no_int32_counts() -> None:
    """They are counted no further than the plan has room for."""
    packing = Packing((0, MAX_PACKED_ROWS) * 20, (0,) * 40, MAX_PACKED_ROWS, 0)
    room = 50
    plan = torch.full((PLAN_HEADER + RECORD * 40 + ENTRY * room,), UNWRITTEN, dtype=torch.int32)
    fill_plan_on_numpy(plan, packing, tile=1)
    assert int(plan[0]) == room
    check_in_bounds(plan, packing, False)


def test_offsets_whose_difference_no_int32_holds() -> None:
    packing = Packing((-(2**31), 2**31 - 1) * 20, (2**31 - 1, -(2**31)) * 20, 100, 100)
    check_in_bounds(plan_on_numpy(packing, 32), packing, False)


@pytest.mark.parametrize("sequences", [1, 2, 7, 33, 70])
@pytest.mark.parametrize(
    ("heads", "slots", "most"), [(1, 132, 40), (2, 132, 7), (8, 4, 127), (4, 264, 64), (1, 1, 2)]
)
def test_plans_in_parts_are_those_of_plain_python(sequences: int, heads: int, slots: int, most: int) -> None:
    draw = random.Random(sequences)
    lengths = [
        (draw.choice((0, 1, 3, 70, 128)), draw.choice((0, 1, 64, 900, draw.randrange(30_000))))
        for _ in range(sequences)
    ]
    used = {}
    if sequences % 2:
        used["seqused_k"] = tuple(draw.randrange(-1, k + 3) for _, k in lengths)
    packing = Packing.of(lengths, tail=(draw.choice((0, 100)), 1), **used)
    for tile, tile_n in ((8, 128), (64, 64)):
        in_parts = InParts(tile_n, heads, slots, most, seen=2**20 if sequences > 2 else 9)
        expected = packing.plan(tile, in_parts=in_parts)
        assert torch.equal(plan_on_numpy(packing, tile, in_parts=in_parts), expected)
        check_parts(expected, packing, in_parts, tile)


def check_parts(plan: torch.Tensor, packing: Packing, in_parts: InParts, tile: int) -> None:
    """Every tile of every part comes once, and a long sequence has no fewer parts than a shorter one."""
    first_entry = PLAN_HEADER + RECORD * packing.sequences
    entries = plan[first_entry:][: ENTRY * int(plan[0])].view(-1, ENTRY).tolist()
    found = Counter((sequence_of_number(number), part_of_number(number)) for number, _ in entries)
    last, of_length = packing.sequences - 1, {}
    for i in range(packing.sequences):
        tiles, keys = -(-len(packing.rows_q(i)) // tile), 0 if i == last else len(packing.rows_k(i))
        numbers = {number for number, _ in entries if sequence_of_number(number) == i}
        of_length |= {keys: len(numbers)} if tiles else {}
        assert {parts_of_number(number) for number in numbers} <= {len(numbers)}
        assert sorted(map(part_of_number, numbers)) == list(range(len(numbers)))
        assert all(found[i, part] == tiles for part in range(len(numbers)))
        assert 1 <= len(numbers) <= in_parts.most or not tiles
    assert sorted(of_length.values()) == [of_length[keys] for keys in sorted(of_length)]


def test_the_longest_sequence_is_in_more_parts_than_others() -> None:
    """One of 64 blocks beside 15 of 4 on 32 multiprocessors: its parts are about as long as the others."""
    packing = Packing.of([(1, 512)] * 7 + [(1, 8192)] + [(1, 512)] * 8)
    plan = plan_on_numpy(packing, 64, in_parts=InParts(128, 1, 32, 32))
    first_entry = PLAN_HEADER + RECORD * packing.sequences
    entries = plan[first_entry:][: ENTRY * int(plan[0])].view(-1, ENTRY).tolist()
    parts = Counter(sequence_of_number(number) for number, _ in entries)
    assert parts[7] in range(11, 18) and {parts[i] for i in range(16) if i != 7} == {1}
    assert [sequence_of_number(number) for number, _ in entries[: parts[7]]] == [7] * parts[7]


def test_overlapping_sequences_in_parts_stay_within_the_plan() -> None:
    packing = Packing((0, MAX_PACKED_ROWS) * 20, (0, MAX_PACKED_ROWS) * 20, MAX_PACKED_ROWS, MAX_PACKED_ROWS)
    plan = torch.full((PLAN_HEADER + RECORD * 40 + ENTRY * 50,), UNWRITTEN, dtype=torch.int32)
    fill_plan_on_numpy(plan, packing, tile=1, in_parts=InParts(128, 8, 132, 127))
    assert int(plan[0]) == 50
    entries = plan[PLAN_HEADER + RECORD * 40 :].view(-1, ENTRY)
    assert all(sequence_of_number(number) < 40 for number in entries[:, 0].tolist())
    assert bool((entries[:, 1] >= 0).all())


def check_in_bounds(plan: torch.Tensor, packing: Packing, of_keys: bool) -> None:
    first_entry = PLAN_HEADER + RECORD * packing.sequences
    records = plan[PLAN_HEADER:first_entry].view(-1, RECORD).long()
    assert bool((records >= 0).all())
    assert bool((records[:, 0] + records[:, 1] <= packing.total_q).all())
    assert bool((records[:, 2] + records[:, 3] <= packing.total_k).all())
    tiles = int(plan[0])
    assert 0 <= tiles <= (len(plan) - first_entry) // ENTRY
    entries = plan[first_entry:][: ENTRY * tiles].view(-1, ENTRY)
    assert bool((entries[:, 0] >= 0).all()) and bool((entries[:, 0] < packing.sequences).all())
    assert bool((entries[:, 1] >= 0).all()) and bool((entries[:, 1] <= torch.arange(tiles)).all())


def tiles_on_numpy(
    packing: Packing, tile: int, heads: tuple[int, int], longest_first: bool, of_keys: bool
) -> torch.Tensor:
    """(tiles, WORDS), as ``ListTiles`` writes them."""
    plan = packing.plan(tile, of_keys)
    capacity = (len(plan) - PLAN_HEADER - RECORD * packing.sequences) // ENTRY * heads[0]
    tiles = torch.full((WORDS * capacity,), -1, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_80 --keep-ptx --dump-dir {folder}"
        program = parse(compile_list_tiles(tile, longest_first, of_keys, options).__ptx__)
    arguments = Arguments()
    for tensor in (plan, tiles):
        arguments.tensor(tensor, (len(tensor),), ())
    arguments.add(packing.sequences, heads[0], heads[1])
    arguments.launch(program, (-(-capacity // THREADS), 1, 1))
    return tiles.view(-1, WORDS)[: int(plan[0]) * heads[0]]


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("longest_first", [False, True])
def test_every_tile_comes_once(longest_first: bool, of_keys: bool) -> None:
    draw = random.Random(3)
    packing = Packing.of([*draw_lengths(draw, 20), (300, 200), (130, 400)], tail=(90, 70))
    heads, group, tile = 6, (1 if of_keys else 3), 32
    found = tiles_on_numpy(packing, tile, (heads, group), longest_first, of_keys)
    expected = set()
    for i in range(packing.sequences):
        rows = packing.rows_k(i) if of_keys else packing.rows_q(i)
        expected |= set(product(range(-(-len(rows) // tile)), range(heads), [i]))
    tiles = [tuple(row[:3].tolist()) for row in found]
    assert len(tiles) == len(expected) and set(tiles) == expected
    last = packing.sequences - 1
    for (_, _, i), row in zip(tiles, found.tolist(), strict=True):
        q, k = packing.rows_q(i), packing.rows_k(i)
        seqlen_q, seqlen_k = (
            (0 if of_keys and i == last else len(q)),
            (0 if not of_keys and i == last else len(k)),
        )
        assert row[3:7] == [q.start, seqlen_q, k.start, seqlen_k]
    if longest_first:
        first = {}
        for block, _, i in tiles:
            first.setdefault(i, block)
        rows = packing.rows_k if of_keys else packing.rows_q
        assert all(block == -(-len(rows(i)) // tile) - 1 for i, block in first.items())


def test_sequences_with_most_keys_come_first() -> None:
    packing = Packing.of([(100, 10), (64, 500), (1, 500), (70, 0)], tail=(5, 5))
    order = [int(row[2]) for row in tiles_on_numpy(packing, 64, (1, 1), False, False)]
    assert order == [1, 2, 0, 0, 3, 3, 4]


def test_sizes_that_no_kernel_counts_are_refused() -> None:
    check_packed_size("kernel", 8, 100, (MAX_PACKED_ROWS, MAX_PACKED_ROWS), 64)
    with pytest.raises(NotImplementedError, match="total_k is 536870913, the kernel takes at most 536870912"):
        check_packed_size("kernel", 8, 100, (1, MAX_PACKED_ROWS + 1), 64)
    with pytest.raises(
        NotImplementedError, match=r"may be .* tiles of 64 queries, the kernel counts at most"
    ):
        check_packed_size("kernel", 256, 100, (MAX_PACKED_ROWS, 1), 64)


def test_the_grid_is_for_all_that_a_plan_may_hold() -> None:
    plan = torch.empty(plan_words(1000, 7, 64), dtype=torch.int32)
    assert PackedTileOrder.most(plan, 8, 3) == plan_entries(1000, 7, 64) * 3


@pytest.mark.parametrize("in_parts", [False, True])
def test_nothing_is_read_before_the_kernel_in_front_has_ended(in_parts: bool) -> None:
    """Nor is the next kernel let in before, whose CTAs are to find all multiprocessors free."""
    before, after = ptx_of(PlanConfig("sm_90a", in_parts)).split("griddepcontrol.wait;")
    assert ".global" not in before and "griddepcontrol" not in before
    assert (
        after.count("griddepcontrol.launch_dependents;") == 1
        and "ld.global" in after
        and "st.global" in after
    )
    assert "griddepcontrol" not in ptx_of(PlanConfig("sm_80", in_parts))
