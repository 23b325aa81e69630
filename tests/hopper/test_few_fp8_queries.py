"""FP8 kernels with the query heads of a K/V head in the rows of a tile, and with its keys in parts, run from their PTX
without a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import DENSE, VARLEN
from cute_kernels.window import NO_LIMIT
from hopper.config import SMEM_BYTES, validate_forward_config
from hopper.field_checks import GROUPS
from hopper.forward.fp8.changes import Changes
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import (
    FEW_QUERIES,
    few_queries_tilings,
    select_fp8_few_queries_config,
    select_fp8_forward_config,
)
from hopper_attention.masks import UNLIMITED
from hopper_attention.packed_quantized import PackedQuantizedQKV
from hopper_attention.quantized import E4M3, QuantizedQKV
from hopper_attention.quantizers import from_descales
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.cute_kernels.packing import Packing
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.packed_fp8 import packed_fp8_forward_on_numpy, packed_fp8_parts_on_numpy
from tests.hopper.split_on_numpy import fp8_parts_on_numpy, in_small_parts
from tests.hopper.test_fp8_packed import with_descales
from tests.hopper.test_grouped import merged

LATE = Timing(is_late=True, seed=1)
SCALES = 0.5, 2.0, 3.0
"""Of q, k and v of the first head; of the second they are twice these."""

LAYOUTS = DENSE, VARLEN


def configs_of(groups: Sequence[int]) -> tuple[Fp8ForwardConfig, ...]:
    """All that may be selected with so many heads in a tile."""
    return tuple(
        select_fp8_few_queries_config(head_dim, head_dim, causal, "bfloat16", group, rows, split, layout)
        for layout in LAYOUTS
        for split in (False, True)
        for head_dim, tiles in few_queries_tilings(layout, split).items()
        for rows in tiles
        for causal in (False, True)
        for group in groups
    )


COMPILED = configs_of((1, 8))


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 112


def test_what_is_selected() -> None:
    """Of each number of heads, and of rows of a tile; selecting validates."""
    every = configs_of((1, *GROUPS))
    assert len({config.name for config in every}) == len(every) == 64 * len(COMPILED) // 2
    for config in every:
        assert config.v_rows and config.lone_scales and config.takes_groups
        assert config.tile_queries == config.tile_m // 64 * (64 // config.group)
        assert config.softmax in (Softmax.EXACT, Softmax.EAGER)
    for layout, split in itertools.product(LAYOUTS, (False, True)):
        for head_dim, tiles in few_queries_tilings(layout, split).items():
            assert set(tiles) == set(FEW_QUERIES[head_dim])
            for size, rows in itertools.product((16, head_dim - 16, head_dim), tiles):
                sizes = (size, head_dim), (head_dim, size)
                chosen = [
                    select_fp8_few_queries_config(*both, False, "bfloat16", 4, rows, split, layout)
                    for both in (*sizes, (head_dim, head_dim))
                ]
                assert chosen[-1].layout == layout and chosen[-1].split == split
                assert (chosen[-1].tile_m, chosen[-1].tile_n) == (rows, tiles[rows].tile_n)
                # They differ in the columns that products leave out, and what transposes these.
                used = min(-(-size // 32) * 32, head_dim)
                columns = [(used, head_dim), (head_dim, used)] if used < head_dim else [(0, 0)] * 2
                assert [(c.used_head_dim, c.used_head_dim_v) for c in chosen] == [*columns, (0, 0)]
                whole = {"used_head_dim": 0, "used_head_dim_v": 0, "registers": chosen[-1].registers}
                assert {replace(c, **whole) for c in chosen} == {chosen[-1]}
    with pytest.raises(ValueError, match="head_dim is 257, allowed: at most 256"):
        select_fp8_few_queries_config(257, 64, False, "bfloat16", 4, 64, False, VARLEN)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_no_kernel_can_be_built_from(layout: str) -> None:
    whole = select_fp8_few_queries_config(128, 128, True, "bfloat16", 8, 64, False, layout)
    for changed in ({"group": 65}, {"group": 128}, {"group": 0}):
        with pytest.raises(ValueError, match=r"group is .* and split False, allowed"):
            validate_forward_config(replace(whole, **changed))
    for group, split in ((8, False), (1, True), (8, True)):
        config = replace(whole, group=group, split=split, lone_scales=False)
        if layout == DENSE:
            validate_forward_config(config)
            continue
        with pytest.raises(ValueError, match=rf"group is {group} and split {split}, .* lone_scales"):
            validate_forward_config(config)
    validate_forward_config(replace(whole, group=1, lone_scales=False))
    validate_forward_config(replace(whole, split=True, window=True))
    half = select_fp8_forward_config(
        128, 128, True, "bfloat16", 2000, v_rows=True, layout=layout, without_lse=True
    )
    assert half.softmax is Softmax.HALF_SCORES and half.lone_scales
    with pytest.raises(ValueError, match=r"group is 8 and split False, .* takes its maximum"):
        validate_forward_config(replace(half, group=8))


def draw(
    head_dim: int, seqlens: tuple[int, int], group: int
) -> tuple[QuantizedQKV, tuple[Tensor, Tensor, Tensor]]:
    """Inputs of two sequences and two K/V heads, and what they stand for."""
    generator, (seqlen_q, seqlen_k) = torch.Generator().manual_seed(0), seqlens
    shapes = (2, seqlen_q, 2 * group, head_dim), *[(2, seqlen_k, 2, head_dim)] * 2
    codes = [torch.randn(shape, generator=generator).to(E4M3) for shape in shapes]
    descales = [torch.tensor([[scale, 2 * scale]] * 2) for scale in SCALES]
    parts = from_descales(*codes, *descales, torch.bfloat16)
    values = [part.dequantize(torch.float32) for part in (parts.q, parts.k, parts.v)]
    return parts, tuple(values)


def check(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    (out, lse), (exact_out, exact_lse) = found, exact
    seen = exact_lse > -math.inf
    assert (out.double() - exact_out).norm() < 5e-2 * exact_out.norm()
    assert torch.equal(lse > -math.inf, seen) and bool((out[~seen.transpose(1, 2)] == 0).all())
    assert (lse.double() - exact_lse)[seen].abs().max() < 5e-2


CASES = [
    # head_dim, rows of a tile, causal, seqlens, group
    (64, 192, True, (21, 350), 8),
    (64, 64, False, (5, 300), 2),
    (64, 64, True, (70, 200), 2),
    (80, 192, False, (3, 300), 64),
    (128, 192, True, (50, 300), 4),
    (128, 64, False, (3, 330), 16),
    (128, 128, False, (19, 260), 8),
    (128, 64, True, (40, 30), 2),
    (256, 64, True, (20, 190), 2),
    (256, 128, True, (40, 190), 2),
    (208, 128, False, (9, 150), 8),
    (64, 192, True, (150, 300), 1),
    (128, 64, True, (33, 300), 1),
    (128, 192, False, (70, 140), 1),
    (256, 64, True, (50, 170), 1),
    (256, 128, True, (90, 170), 1),
    # Heads that do not divide a warpgroup's rows, of which some are nobody's.
    (64, 192, True, (31, 350), 7),
    (80, 64, True, (43, 190), 3),
    (128, 64, False, (9, 330), 12),
    (128, 128, True, (29, 260), 5),
    (256, 64, True, (5, 190), 24),
    (256, 128, False, (3, 190), 40),
]


@pytest.mark.parametrize("head_dim,tile_rows,causal,seqlens,group", CASES)
def test_heads_in_a_tile(
    head_dim: int, tile_rows: int, causal: bool, seqlens: tuple[int, int], group: int
) -> None:
    parts, values = draw(head_dim, seqlens, group)
    config = select_fp8_few_queries_config(
        head_dim, head_dim, causal, "bfloat16", group, tile_rows, split=False
    )
    found = fp8_forward_on_numpy(config, parts, 0.05, LATE)
    check(found, attention_naive(*values, causal=causal, softmax_scale=0.05))


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("head_dim,tile_rows,causal,seqlens,group", [*CASES, (128, 128, True, (90, 300), 1)])
def test_keys_in_parts(
    head_dim: int, tile_rows: int, causal: bool, seqlens: tuple[int, int], group: int, splits: int
) -> None:
    """Where there are fewer blocks than parts, some have no key."""
    parts, values = draw(head_dim, seqlens, group)
    config = select_fp8_few_queries_config(
        head_dim, head_dim, causal, "bfloat16", group, tile_rows, split=True
    )
    found, lse = fp8_parts_on_numpy(config, parts, 0.05, splits, 3, LATE)
    out, lse = merged(found, lse)
    check((out, lse.transpose(1, 2)), attention_naive(*values, causal=causal, softmax_scale=0.05))


@pytest.mark.parametrize(
    "group,sides,splits",
    [
        (4, (60, 9), 0),
        (5, (100, NO_LIMIT), 0),
        (4, (NO_LIMIT, NO_LIMIT, 100), 0),
        (1, (70, 0), 3),
        (8, (130, 20), 2),
    ],
)
def test_heads_and_parts_in_a_window(group: int, sides: tuple[int, ...], splits: int) -> None:
    """A row's window is that of its query, wherever in the tile its head stands."""
    parts, values = draw(128, (29, 290), group)
    changes = Changes(window=True, chunk=len(sides) == 3)
    config = select_fp8_few_queries_config(
        128, 128, False, "bfloat16", group, 64, split=splits > 0, changes=changes
    )
    if splits:
        found, lse = merged(*fp8_parts_on_numpy(config, parts, 0.05, splits, 3, LATE, sides=sides))
        lse = lse.transpose(1, 2)
    else:
        found, lse = fp8_forward_on_numpy(config, parts, 0.05, LATE, sides)
    left, right = (UNLIMITED if side == NO_LIMIT else side for side in sides[:2])
    window = {"window_left": left, "window_right": right, "attention_chunk": sum(sides[2:])}
    check((found, lse), attention_naive(*values, softmax_scale=0.05, **window))


LENGTHS = [(21, 200), (0, 40), (9, 0), (1, 1), (5, 330)]
TAIL = (7, 13)
PACKED = [
    # head_dim, rows of a tile, causal, group
    (64, 192, True, 8),
    (64, 64, False, 2),
    (80, 64, True, 1),
    (128, 192, True, 4),
    (128, 128, False, 16),
    (128, 64, True, 64),
    (256, 64, False, 4),
    (256, 128, True, 2),
    (208, 128, False, 1),
    (64, 192, True, 7),
    (128, 64, True, 3),
    (128, 128, True, 12),
    (256, 64, False, 5),
    (256, 128, True, 24),
]


def draw_packed(head_dim: int, group: int) -> tuple[PackedQuantizedQKV, Packing]:
    """Of two K/V heads, and of fewer queries where each has many rows; with NaN in rows of no sequence."""
    lengths = LENGTHS if group < 16 else [(rows // 5, keys) for rows, keys in LENGTHS]
    packing = Packing.of(lengths, TAIL if group < 16 else (1, 1))
    return with_descales(packing, (2 * group, 2), head_dim), packing


def check_packed(
    found: tuple[Tensor, Tensor], parts: PackedQuantizedQKV, causal: bool, left: int = UNLIMITED
) -> None:
    """Each sequence alone, of whose keys ``left`` before a query's own are visible; rows of none are 0 and -inf."""
    out, lse = found
    exact = torch.zeros(out.shape, dtype=torch.float64)
    exact_lse = torch.full(lse.shape, -math.inf, dtype=torch.float64)
    for (rows, keys), one in parts.sequences():
        if rows.start < rows.stop and keys.start < keys.stop:
            values = (x.dequantize(torch.float32) for x in (one.q, one.k, one.v))
            of_one = attention_naive(*values, causal=causal, window_left=left)
            exact[rows.slice], exact_lse[:, rows.slice] = of_one[0][0], of_one[1][0]
    check((out[None], lse[None]), (exact[None], exact_lse[None]))


@pytest.mark.parametrize("head_dim,tile_rows,causal,group", PACKED)
def test_heads_in_a_tile_of_packed_sequences(head_dim: int, tile_rows: int, causal: bool, group: int) -> None:
    parts, packing = draw_packed(head_dim, group)
    config = select_fp8_few_queries_config(
        head_dim, head_dim, causal, "bfloat16", group, tile_rows, split=False, layout=VARLEN
    )
    plan = packing.plan(config.tile_queries)
    found = packed_fp8_forward_on_numpy(config, parts, plan, head_dim**-0.5, 3, LATE)
    check_packed(found, parts, causal)


@pytest.mark.parametrize(
    "head_dim,tile_rows,causal,group,splits", [(*case, 2 + 3 * (i % 2)) for i, case in enumerate(PACKED)]
)
def test_keys_of_packed_sequences_in_parts(
    head_dim: int, tile_rows: int, causal: bool, group: int, splits: int
) -> None:
    """Some parts have no key. Scales are those of a sequence, whose number has the part beside it."""
    parts, packing = draw_packed(head_dim, group)
    config = select_fp8_few_queries_config(
        head_dim, head_dim, causal, "bfloat16", group, tile_rows, split=True, layout=VARLEN
    )
    plan = packing.plan(config.tile_queries, in_parts=in_small_parts(config, splits))
    found = packed_fp8_parts_on_numpy(config, parts, plan, head_dim**-0.5, splits, 3, LATE)
    out, lse = merged(*(x[:, 0] for x in found))
    check_packed((out, lse.T), parts, causal)


@pytest.mark.parametrize("group,splits", [(4, 0), (5, 0), (1, 3), (8, 2)])
def test_packed_heads_and_parts_in_a_window(group: int, splits: int) -> None:
    parts, packing = draw_packed(128, group)
    config = select_fp8_few_queries_config(
        128, 128, True, "bfloat16", group, 64, splits > 0, VARLEN, changes=Changes(window=True)
    )
    sides, in_parts = (50, 0), in_small_parts(config, splits) if splits else None
    plan = packing.plan(config.tile_queries, in_parts=in_parts)
    if splits:
        found = packed_fp8_parts_on_numpy(config, parts, plan, 128**-0.5, splits, 3, LATE, sides=sides)
        out, lse = merged(*(x[:, 0] for x in found))
        check_packed((out, lse.T), parts, True, 50)
    else:
        check_packed(
            packed_fp8_forward_on_numpy(config, parts, plan, 128**-0.5, 3, LATE, sides), parts, True, 50
        )
