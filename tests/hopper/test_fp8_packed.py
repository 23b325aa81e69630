"""The FP8 kernel on packed sequences, run from its PTX without a GPU: each as if it were alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.config import Registers, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.precision import BlockScaled
from hopper.forward.fp8.tilings import select_fp8_forward_config, with_lone_scales
from hopper_attention.lengths import Lengths
from hopper_attention.masks import UNLIMITED
from hopper_attention.packed_quantization import (
    from_packed_descales,
    quantize_packed_by_torch,
    transpose_packed,
)
from hopper_attention.packed_quantized import PackedQuantizedQKV, PackedTransposedV
from hopper_attention.quantization import Fp8Quantization
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.cute_kernels.packing import Packing
from tests.hopper.fp8_errors import COARSE_LSE_ROUNDING, allowed_ratio, emulate
from tests.hopper.hopper_machine import Timing
from tests.hopper.packed_fp8 import packed_fp8_forward_on_numpy

LATE = Timing(is_late=True, seed=1)
TILE, DIM = 64, 64
LENGTHS = [(70, 200), (0, 40), (33, 0), (129, 131), (1, 1), (5, 330)]
TAIL = (37, 50)


def config_of(causal: bool, softmax: Softmax, window: bool = False) -> Fp8ForwardConfig:
    """One warpgroup, and blocks so narrow that short sequences have some of every kind."""
    config = select_fp8_forward_config(
        DIM, DIM, causal, "bfloat16", 4 * TILE, TILE, window=window, layout="varlen"
    )
    small = {"tile_m": TILE, "ping_pong": False, "late_rescale": True, "registers": Registers(256, 24)}
    config = replace(config, **small, softmax=softmax, polynomial_pairs=3)
    validate_forward_config(config)
    return config


def lengths_of(packing: Packing) -> Lengths:
    used = ((packing.seqused_q, 1), (packing.seqused_k, 1))
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (packing.cu_seqlens_q, packing.cu_seqlens_k))
    given = (torch.tensor(x, dtype=torch.int32) if x else None for x, _ in used)
    return Lengths(*numbers, *given, packing.total_q, packing.total_k)


def draw(packing: Packing, heads: tuple[int, int], head_dim: int = DIM) -> list[Tensor]:
    """q, k and v in bfloat16, with NaN in the rows that are of no sequence."""
    generator = torch.Generator().manual_seed(0)
    rows = (packing.total_q, heads[0]), (packing.total_k, heads[1]), (packing.total_k, heads[1])
    q, k, v = (torch.randn(*shape, head_dim, generator=generator).bfloat16() for shape in rows)
    sequences = range(packing.sequences - 1)
    used_q = {row for i in sequences for row in packing.rows_q(i)}
    used_k = {row for i in sequences for row in packing.rows_k(i)}
    for x, used in ((q, used_q), (k, used_k), (v, used_k)):
        x[[row for row in range(x.shape[0]) if row not in used]] = math.nan
    return [q, k, v]


def check(
    parts: PackedQuantizedQKV,
    packing: Packing,
    config: Fp8ForwardConfig,
    sides: tuple[int, int] | tuple[()] = (),
    ctas: int = 2,
) -> Tensor:
    """Hold each sequence to float64, as closely as its emulation comes to it, and all other rows to 0 and -inf."""
    plan = packing.plan(config.tile_m)
    softmax_scale = parts.q.shape[2] ** -0.5
    out, lse = packed_fp8_forward_on_numpy(config, parts, plan, softmax_scale, ctas, LATE, sides)
    window = sides or (UNLIMITED, UNLIMITED)
    named = {"window_left": window[0], "window_right": window[1]}
    for (rows, keys), of_one in parts.sequences():
        if rows.start == rows.stop:
            continue
        ours, our_lse = out[None, rows.slice], lse[None, :, rows.slice]
        q, k, v = (x.dequantize() for x in (of_one.q, of_one.k, of_one.v))
        v = v + of_one.mean_v if of_one.mean_v.numel() else v
        exact, exact_lse = attention_naive(q, k, v, causal=config.causal, **named)
        visible = exact_lse > -math.inf
        assert torch.equal(our_lse > -math.inf, visible)
        assert not ours.transpose(1, 2)[~visible].any()
        assert bool(((our_lse - exact_lse)[visible].abs() < COARSE_LSE_ROUNDING).all())
        if keys.start == keys.stop:
            continue
        errors = [(x.double() - exact).norm() for x, _ in emulate(of_one, config.causal, True, (*window, 0))]
        error = (ours.double() - exact).norm().item()
        assert error <= allowed_ratio(ours, lagging=True) * max(errors) + 6e-3 * exact.norm().item()
    behind = packing.rows_q(packing.sequences - 1)
    assert not out[behind.start :].any() and bool((lse[:, behind.start :] == -math.inf).all())
    return out


@pytest.mark.parametrize(
    "causal,softmax,sides",
    [
        (True, Softmax.EXACT, ()),
        (False, Softmax.LAGGING, (60, 20)),
        (True, Softmax.HALF_SCORES, ()),
    ],
)
def test_sequences_of_any_lengths(causal: bool, softmax: Softmax, sides: tuple[int, int]) -> None:
    packing = Packing.of(LENGTHS, TAIL)
    c = Fp8Quantization(rotate=False, block_k=TILE)
    q, k, v = draw(packing, (2, 1))
    parts = quantize_packed_by_torch(q, k, v + 2, lengths_of(packing), c)
    assert bool((parts.mean_v[:2] > 1).all()) and not parts.mean_v[2].any()
    check(parts, packing, config_of(causal, softmax, bool(sides)), sides)


def test_places_that_are_read_again_at_the_end_of_a_tile() -> None:
    """Where O has so many columns that consumers do not keep what tells where their tile lies."""
    packing = Packing.of([(70, 200), (0, 40), (33, 0), (1, 1), (65, 64)], TAIL)
    parts, config = with_wide_values(packing)
    assert BlockScaled(config).recomputes_addresses
    check(parts, packing, config, ctas=1)


def with_wide_values(packing: Packing) -> tuple[PackedQuantizedQKV, Fp8ForwardConfig]:
    q, k, v = draw(packing, (2, 1))
    wide = torch.cat((v, -v, v.flip(2)), 2)[..., :144]
    c = Fp8Quantization(rotate=False, block_k=TILE)
    config = replace(config_of(True, Softmax.LAGGING), head_dim_v=144)
    validate_forward_config(config)
    return quantize_packed_by_torch(q, k, wide, lengths_of(packing), c), config


@pytest.mark.parametrize("seed", [2, 3])
def test_neither_the_grid_nor_the_order_of_warps_changes_a_bit(seed: int) -> None:
    """Tiles of 1 to 4 blocks of keys; the second grid is larger than there are tiles."""
    packing = Packing.of([(3, 250), (3, 60), (3, 70), (3, 190)])
    parts, config = with_wide_values(packing)
    few, many = (
        packed_fp8_forward_on_numpy(config, parts, packing.plan(TILE), 0.125, ctas, timing)
        for ctas, timing in ((1, Timing(is_late=True, seed=seed)), (11, Timing()))
    )
    assert all(map(torch.equal, few, many)) and bool(few[0].isfinite().all())


def test_rows_that_are_not_used_and_blocks_of_queries() -> None:
    used = {"seqused_q": (50, 0, 30, 129, 1), "seqused_k": (170, 40, 0, 99, 1)}
    packing = Packing.of(LENGTHS[:5], TAIL, **used)
    c = Fp8Quantization(rotate=False, block_k=TILE, block_q=32)
    parts = quantize_packed_by_torch(*draw(packing, (2, 2)), lengths_of(packing), c)
    out = check(parts, packing, config_of(True, Softmax.EXACT), ctas=1)
    assert bool(out[50:70].isnan().all()), "rows of no sequence before the last one are left to the launcher"


def test_a_nan_stays_in_its_sequence() -> None:
    """V of the next sequence is loaded beside the last keys of one, unless TMA stops there."""
    packing, config = Packing.of([(64, 40), (64, 70), (64, 33)]), config_of(True, Softmax.EXACT)
    q, k, v = draw(packing, (1, 1))
    c = Fp8Quantization(rotate=False, block_k=TILE)
    clean = quantize_packed_by_torch(q, k, v, lengths_of(packing), c)
    k[40:110], v[40:110] = math.nan, math.nan
    parts = quantize_packed_by_torch(q, k, v, lengths_of(packing), c)
    plan = packing.plan(TILE)
    exact, _ = packed_fp8_forward_on_numpy(config, clean, plan, 0.125, 1, LATE)
    out, _ = packed_fp8_forward_on_numpy(config, parts, plan, 0.125, 1, LATE)
    assert torch.equal(out[:64], exact[:64]) and torch.equal(out[128:], exact[128:])
    assert bool(out[64:128].isnan().any()) and not exact.isnan().any()


@pytest.mark.parametrize("half_scores", [True, False])
def test_tiles_that_are_selected(half_scores: bool) -> None:
    """Also of codes that promise nothing, whose queries are lowered where nobody gets the LSE."""
    packing = Packing.of([(150, 300), (40, 20)], TAIL)
    c = Fp8Quantization(block_k=128)
    parts = quantize_packed_by_torch(*draw(packing, (2, 1), 128), lengths_of(packing), c)
    options = {"half_scores": half_scores, "layout": "varlen", "without_lse": not half_scores}
    config = select_fp8_forward_config(128, 128, False, "bfloat16", 0, 128, **options)
    assert config.softmax is Softmax.HALF_SCORES and config.consumers == 3
    assert config.lowers_queries != half_scores
    check(parts, packing, config)


def test_an_exact_lse() -> None:
    packing = Packing.of([(70, 100), (0, 9), (33, 0), (20, 64)], TAIL)
    parts = quantize_packed_by_torch(
        *draw(packing, (2, 1)), lengths_of(packing), Fp8Quantization(block_k=TILE)
    )
    config = select_fp8_forward_config(DIM, DIM, True, "bfloat16", 0, TILE, layout="varlen", exact_lse=True)
    assert config.wide_codes
    check(parts, packing, config)


def with_descales(packing: Packing, heads: tuple[int, int], head_dim: int) -> PackedQuantizedQKV:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(packing, heads, head_dim))
    shape = packing.sequences - 1, heads[1]
    descales = tuple(torch.rand(shape, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3))
    return from_packed_descales(q, k, v, descales, lengths_of(packing), torch.bfloat16)


@pytest.mark.parametrize(
    ("head_dim", "causal", "keys", "softmax"),
    [
        (64, True, 200, Softmax.EAGER),
        (128, False, 1000, Softmax.HALF_SCORES),
        (256, True, 100, Softmax.HALF_SCORES),
    ],
)
def test_tensors_with_a_descale_for_each_sequence(
    head_dim: int, causal: bool, keys: int, softmax: Softmax
) -> None:
    """V comes in rows, which the producer transposes; scales are read once a tile, as many as there are sequences."""
    packing = Packing.of([(70, 200), (33, 0), (90, 150)], TAIL)
    options = {"v_rows": True, "layout": "varlen", "without_lse": True}
    config = select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", keys, 0, **options)
    assert config.softmax is softmax and config.v_rows and config.lone_scales
    check(with_descales(packing, (4, 2), head_dim), packing, config)


def test_values_that_are_transposed_before() -> None:
    """To the bits of the kernel that transposes them on its way: one scale serves all keys in either."""
    packing = Packing.of([(70, 200), (33, 0), (90, 150)], TAIL)
    parts = with_descales(packing, (2, 1), 128)
    options = {"layout": "varlen", "without_lse": True}
    of_rows = select_fp8_forward_config(128, 128, True, "bfloat16", 5000, 0, v_rows=True, **options)
    config = with_lone_scales(select_fp8_forward_config(128, 128, True, "bfloat16", 0, 0, **options))
    assert of_rows.tile_n == config.tile_n and config.lone_scales and not config.v_rows
    data = transpose_packed(parts.v.data, parts.lengths)
    v = PackedTransposedV(data, parts.v.scale, parts.v.block, parts.k.shape[0])
    assert torch.equal(check(replace(parts, v=v), packing, config), check(parts, packing, of_rows))


def test_a_negative_descale() -> None:
    """Makes NaN of its sequence, the last one, and of no row behind."""
    packing = Packing.of([(20, 30), (33, 40)], TAIL)
    parts = with_descales(packing, (1, 1), 64)
    scale = parts.q.scale.clone()
    scale[:, 1] = -1.0
    parts = replace(parts, q=replace(parts.q, scale=scale))
    config = select_fp8_forward_config(64, 64, False, "bfloat16", 0, 0, v_rows=True, layout="varlen")
    out, _ = packed_fp8_forward_on_numpy(config, parts, packing.plan(config.tile_m), 0.125, 1, LATE)
    assert bool(out[:20].isfinite().all()) and bool(out[20:53].isnan().all()) and not out[53:].any()


COMPILED = [
    select_fp8_forward_config(head_dim, head_dim, True, "bfloat16", 0, layout="varlen", **options)
    for head_dim in (128, 256)
    for options in ({}, {"exact_lse": True}, {"exact_lse": True, "window": True, "chunk": True})
]


def of_descales(head_dim: int, causal: bool, keys: int, **options: bool) -> Fp8ForwardConfig:
    options |= {"without_lse": True}
    return with_lone_scales(
        select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", keys, layout="varlen", **options)
    )


COMPILED += [
    of_descales(head_dim, causal, keys, v_rows=v_rows, few_tiles=few_tiles)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for keys in (256, 1000, 5000)
    for v_rows in (False, True)
    for few_tiles in (False, True)
]
"""Whose warp that finds tiles has least registers for it, and those that serve packed tensors with descales."""


def of_short_windows(head_dim: int, causal: bool, lone: bool, sinks: bool, chunk: bool) -> Fp8ForwardConfig:
    """In a window of few keys, which each tile takes the maximum of."""
    options = {"half_scores": not lone, "without_lse": True, "window": True, "chunk": chunk}
    config = select_fp8_forward_config(
        head_dim, head_dim, causal, "bfloat16", 256, 0 if lone else 128, layout="varlen", **options
    )
    assert config.softmax is Softmax.EAGER and config.window
    return replace(with_lone_scales(config) if lone else config, sinks=sinks)


COMPILED += [
    of_short_windows(head_dim, causal, lone, sinks, chunk)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for lone, sinks, chunk in ((True, False, False), (True, True, False), (False, False, True))
]
COMPILED = list(dict.fromkeys(COMPILED))


def test_kernels_compile_without_spills() -> None:
    usages = usage_of_each(COMPILED)
    assert [usages[config].local_bytes for config in COMPILED] == [0] * len(COMPILED)
