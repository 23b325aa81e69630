"""FP8 kernels for few queries of what the quantizer made, whose V is transposed and whose blocks have scales, run from
their PTX without a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES, validate_forward_config
from hopper.field_checks import GROUPS
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.few_tilings import (
    FEW_QUERIES_OF_BLOCKS,
    IN_PARTS,
    select_fp8_few_blocks_config,
    tiling_of_blocks,
)
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.split_on_numpy import fp8_parts_on_numpy
from tests.hopper.test_grouped import merged

LATE = Timing(is_late=True, seed=1)
SCALE = 0.1

TABLES = {False: FEW_QUERIES_OF_BLOCKS, True: IN_PARTS}
"""By whether keys are in parts."""

WIDTHS = [
    (split, head_dim, rows, tiling.tile_n)
    for split, table in TABLES.items()
    for head_dim, tiles in table.items()
    for rows, tilings in tiles.items()
    for tiling in tilings
]
"""Each tiling: in parts or not, head_dim, rows and keys of a tile."""


def config_of(
    width: tuple[bool, int, int, int], causal: bool, group: int, output: str = "bfloat16"
) -> Fp8ForwardConfig:
    split, head_dim, rows, keys = width
    return select_fp8_few_blocks_config((head_dim, head_dim), causal, output, group, rows, split, keys)


def widest(width: tuple[bool, int, int, int]) -> bool:
    """Whether the tiling is the one of blocks of any number of keys."""
    split, head_dim, rows, keys = width
    return TABLES[split][head_dim][rows][0].tile_n == keys


COMPILED = (
    *(
        config_of(width, causal, group)
        for width in filter(widest, WIDTHS)
        for causal, group in itertools.product((False, True), (1, 8))
    ),
    *(config_of(width, True, 8) for width in WIDTHS if not widest(width)),
    *(config_of(width, False, 1, "float16") for width in WIDTHS if not widest(width)),
    *(
        select_fp8_few_blocks_config((size, size), True, "bfloat16", 4, rows, split, 128)
        for size, split in itertools.product((48, 96, 192), (False, True))
        for rows in FEW_QUERIES_OF_BLOCKS[64 if size == 48 else 128 if size == 96 else 256]
    ),
)
"""Of each tiling some, and of rows that fill a tile in part."""


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 92


def test_what_is_selected() -> None:
    """Of each tiling, number of heads and dtype; selecting validates."""
    kinds = [*itertools.product(WIDTHS, (False, True), (1, *GROUPS), ("bfloat16", "float16"))]
    every = [config_of(*kind) for kind in kinds]
    assert len({config.name for config in every}) == len(every) == 14 * 2 * 2 * 64 * 2
    for ((split, head_dim, rows, keys), causal, group, output), config in zip(kinds, every, strict=True):
        assert (config.head_dim, config.head_dim_v, config.tile_m, config.tile_n) == (head_dim,) * 2 + (
            rows,
            keys,
        )
        assert (config.split, config.causal, config.group, config.output) == (split, causal, group, output)
        assert not (config.v_rows or config.lone_scales) and config.takes_groups
        assert config.softmax is Softmax.EAGER and config.tile_queries == rows // 64 * (64 // group)
        assert config.o_from_registers == split and config.ctas_per_sm == 1 + (rows == 64 and head_dim < 256)
        validate_forward_config(config)


def test_what_divides_a_block_of_keys() -> None:
    """The first of the tilings that do: all keys that share a scale are of any number."""
    for (split, table), block_k in itertools.product(TABLES.items(), (0, 64, 96, 128, 192, 256, 320, 384)):
        for head_dim, tiles in table.items():
            for rows, tilings in tiles.items():
                dividing = [tiling for tiling in tilings if block_k % tiling.tile_n == 0]
                found = tiling_of_blocks(head_dim, rows, block_k, split)
                assert found is (dividing[0] if dividing else None)
    narrow = {
        block_k: tiling_of_blocks(64, 64, block_k, split=False).tile_n for block_k in (0, 64, 192, 384, 128)
    }
    assert narrow == {0: 128, 64: 64, 192: 192, 384: 128, 128: 128}
    assert tiling_of_blocks(64, 192, 96, split=True).tile_n == 96
    for head_dim, rows, block_k in ((64, 64, 96), (128, 64, 96), (128, 128, 160), (256, 64, 32)):
        assert tiling_of_blocks(head_dim, rows, block_k, split=False) is None
        with pytest.raises(ValueError, match=f"block_k is {block_k}, allowed in tiles of {rows} rows"):
            select_fp8_few_blocks_config((head_dim,) * 2, True, "bfloat16", 4, rows, False, block_k)


def test_rows_that_fill_a_tile_in_part() -> None:
    """They differ in the columns that products leave out."""
    for head_dim, rows, split in itertools.product((64, 128, 256), (64, 128, 192), (False, True)):
        if rows not in FEW_QUERIES_OF_BLOCKS[head_dim]:
            continue
        for size in (16, head_dim - 16, head_dim):
            for dims in ((size, head_dim), (head_dim, size)):
                config = select_fp8_few_blocks_config(dims, False, "bfloat16", 4, rows, split, 0)
                used = tuple(min(-(-x // 32) * 32, head_dim) for x in dims)
                whole = used == (head_dim, head_dim)
                assert (config.used_head_dim, config.used_head_dim_v) == ((0, 0) if whole else used)
                plain = replace(config, used_head_dim=0, used_head_dim_v=0)
                assert plain == select_fp8_few_blocks_config(
                    (head_dim,) * 2, False, "bfloat16", 4, rows, split, 0
                )
    with pytest.raises(ValueError, match="head_dim is 272, allowed: at most 256"):
        select_fp8_few_blocks_config((64, 272), False, "bfloat16", 4, 64, False, 0)


def test_what_no_kernel_can_be_built_from() -> None:
    for group in (0, 65, 128):
        with pytest.raises(ValueError, match=rf"group is {group} and split True, allowed"):
            select_fp8_few_blocks_config((128, 128), True, "bfloat16", group, 64, True, 128)
    whole = select_fp8_few_blocks_config((128, 128), True, "bfloat16", 8, 64, True, 128)
    validate_forward_config(replace(whole, window=True))
    for changed in ({"layout": "varlen"}, {"two_level": True, "late_rescale": False}):
        with pytest.raises(ValueError, match="group is 8 and split True, allowed"):
            validate_forward_config(replace(whole, **changed))


def draw(
    head_dims: tuple[int, int], seqlens: tuple[int, int], group: int, blocks: tuple[int, int]
) -> tuple[QuantizedQKV, list[Tensor]]:
    """Inputs of two sequences and two K/V heads, and what they stand for but for a mean of V. Rows of Q have scales up
    to 64 times as large as others of their query or head, and blocks of K and of V 4 times; values have an offset of
    their own in every column. 0 keys in a block are all."""
    generator, (seqlen_q, seqlen_k), (block_q, block_k) = torch.Generator().manual_seed(0), seqlens, blocks
    shapes = (2, seqlen_q, 2 * group, head_dims[0]), *[(2, seqlen_k, 2, size) for size in head_dims]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    q *= 2.0 ** torch.randint(-3, 4, (*q.shape[:3], 1), generator=generator)
    keys = torch.arange(seqlen_k)[:, None, None] // 64
    k, v = k * 2.0 ** (keys % 3 - 1), v * 2.0 ** ((keys + 1) % 3 - 1)
    v += 3 + torch.arange(2 * head_dims[1]).view(2, -1) / head_dims[1]
    c = Fp8Quantization(block_q=block_q, block_k=block_k or 2**20, smooth_v=True)
    parts = replace(quantize_qkv(q, k, v, quantization=c), dtype=torch.bfloat16)
    assert parts.mean_v.abs().amin() > 2.0
    return parts, [x.dequantize(torch.float32) for x in (parts.q, parts.k, parts.v)]


def exact_of(parts: QuantizedQKV, values: list[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse in float64; the mean of V is in rows that see a key."""
    out, lse = attention_naive(*values, causal=causal, softmax_scale=SCALE)
    mean = parts.mean_v.double().repeat_interleave(out.shape[2] // parts.mean_v.shape[1], 1)
    seen = (lse > -math.inf).transpose(1, 2)[..., None]
    return out + torch.where(seen, mean[:, None], 0.0), lse


def check(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """Of each row: the errors of one are not hidden by others."""
    (out, lse), (exact_out, exact_lse) = found, exact
    seen = exact_lse > -math.inf
    of_rows = (out.double() - exact_out).norm(dim=-1) / exact_out.norm(dim=-1).clamp(min=1e-3)
    assert torch.equal(lse > -math.inf, seen) and bool((out[~seen.transpose(1, 2)] == 0).all())
    assert of_rows[seen.transpose(1, 2)].max() < 5e-2 and of_rows[seen.transpose(1, 2)].mean() < 1e-2
    assert (lse.double() - exact_lse)[seen].abs().max() < 5e-2


CASES = [
    # head_dims, rows of a tile, rows of Q and keys in a block, causal, seqlens, group
    ((64, 64), 64, (1, 128), False, (5, 300), 2),
    ((64, 64), 64, (1, 192), True, (70, 400), 2),
    ((64, 64), 64, (16, 64), True, (40, 200), 4),
    ((64, 64), 192, (1, 128), True, (21, 350), 8),
    ((64, 64), 192, (1, 96), False, (9, 250), 16),
    ((64, 64), 192, (64, 64), True, (150, 300), 1),
    ((16, 64), 64, (1, 128), True, (3, 170), 64),
    ((80, 80), 64, (1, 128), True, (33, 300), 1),
    ((96, 96), 128, (1, 128), False, (19, 260), 8),
    ((128, 128), 64, (1, 64), False, (3, 330), 16),
    ((128, 128), 128, (16, 64), True, (40, 190), 8),
    ((128, 128), 64, (1, 128), True, (40, 30), 2),
    ((128, 80), 128, (1, 256), True, (300, 140), 1),
    ((128, 128), 128, (1, 0), False, (17, 150), 8),
    ((128, 128), 64, (64, 0), True, (50, 260), 4),
    ((256, 256), 64, (1, 128), False, (20, 190), 2),
    ((256, 256), 64, (1, 64), True, (50, 170), 1),
    ((192, 192), 128, (1, 128), True, (40, 190), 2),
    ((256, 256), 128, (32, 64), False, (9, 150), 16),
    # Heads that do not divide a warpgroup's rows, of which some are nobody's.
    ((64, 64), 64, (1, 128), True, (25, 300), 7),
    ((64, 64), 192, (64, 64), True, (50, 300), 6),
    ((128, 128), 128, (16, 64), True, (40, 190), 12),
    ((256, 256), 64, (1, 128), False, (30, 190), 3),
]


@pytest.mark.parametrize("head_dims,tile_rows,blocks,causal,seqlens,group", CASES)
def test_heads_in_a_tile(
    head_dims: tuple[int, int],
    tile_rows: int,
    blocks: tuple[int, int],
    causal: bool,
    seqlens: tuple[int, int],
    group: int,
) -> None:
    parts, values = draw(head_dims, seqlens, group, blocks)
    of_tile = group, tile_rows, False, blocks[1]
    config = select_fp8_few_blocks_config(head_dims, causal, "bfloat16", *of_tile)
    check(fp8_forward_on_numpy(config, parts, SCALE, LATE), exact_of(parts, values, causal))


@pytest.mark.parametrize(
    "head_dims,tile_rows,blocks,causal,seqlens,group,splits",
    [(*case, splits) for i, case in enumerate(CASES) for splits in ((2, 7), (3,))[i % 2]],
)
def test_keys_in_parts(
    head_dims: tuple[int, int],
    tile_rows: int,
    blocks: tuple[int, int],
    causal: bool,
    seqlens: tuple[int, int],
    group: int,
    splits: int,
) -> None:
    """Where there are fewer blocks than parts, some have no key; the mean of V is in a part that has some."""
    parts, values = draw(head_dims, seqlens, group, blocks)
    of_tile = group, tile_rows, True, blocks[1]
    config = select_fp8_few_blocks_config(head_dims, causal, "bfloat16", *of_tile)
    found, lse = fp8_parts_on_numpy(config, parts, SCALE, splits, 3, LATE)
    assert not found.isnan().any() and not lse.isnan().any()
    out, lse = merged(found, lse)
    check((out, lse.transpose(1, 2)), exact_of(parts, values, causal))


def test_another_scale_of_q_would_be_seen() -> None:
    """What is checked here depends on the scale of every row and head."""
    parts, values = draw((64, 64), (21, 350), 8, (1, 128))
    exact = exact_of(parts, values, causal=True)
    scale = parts.q.scale
    for other in (scale.roll(1, 1), scale.roll(1, 2), scale[:, ::8].repeat_interleave(8, 1)):
        q = replace(parts.q, scale=other).dequantize(torch.float32)
        with pytest.raises(AssertionError):
            check(exact_of(parts, [q, *values[1:]], causal=True), exact)
