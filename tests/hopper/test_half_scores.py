"""The softmax of scores in float16 gives what the others do, on simulated machine code."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.key_blocks import BlockRange
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import Window
from hopper.config import validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.softmax.half import HalfScoresSoftmax
from hopper.forward.fp8.tilings import scores_fit_half, select_fp8_forward_config
from hopper.forward.tilings import ANY_LENGTH
from hopper_attention.quantized import QuantizedQKV
from hopper_attention.reference import attention_naive
from tests.hopper import test_lagging_softmax
from tests.hopper.fp8_errors import COARSE_LSE_ROUNDING, LAGGING_LSE_ROUNDING, score_rounding
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_lagging_softmax import (  # noqa: F401  (pytest runs those cases here too, with the config below)
    DIM,
    LATE,
    LOUD,
    OCTAVES,
    SCALE,
    TILE,
    check,
    check_lse,
    dequantized,
    draw,
    quantized,
    relative,
    test_a_key_that_dominates_is_not_rounded,
    test_a_nan_reaches_who_sees_it,
    test_a_scale_that_is_nan,
    test_a_tile_has_the_bits_that_it_has_alone,
    test_blocks_of_zeros,
    test_many_large_p,
    test_odd_lengths_and_a_scale_for_each_row,
    test_one_key_above_all_others,
    test_rows_beside_one_that_rises_with_every_block,
    test_scores_of_any_sign,
    test_scores_that_rise_with_every_block,
    test_the_bits_do_not_depend_on_timing,
    test_two_keys_whose_sum_float32_lacks,
    test_units_of_o_that_change_with_jumps,
    test_warps_that_are_wary,
)

lagging_config = test_lagging_softmax.config_of


def config_of(causal: bool = False, lagging: bool = True, pairs: int = 5) -> Fp8ForwardConfig:
    """Where cases of the lagging softmax ask for as many polynomials as it has, what is shipped has 5."""
    config = lagging_config(causal, lagging=False, pairs=5 if pairs == test_lagging_softmax.PAIRS else pairs)
    config = replace(config, softmax=Softmax.HALF_SCORES if lagging else Softmax.EXACT)
    validate_forward_config(config)
    return config


@pytest.fixture(autouse=True)
def scores_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_lagging_softmax, "config_of", config_of)


@pytest.mark.parametrize(("head_dim", "causal", "tile_n"), [(112, False, 128)])
def test_tiles_that_are_shipped(head_dim: int, causal: bool, tile_n: int) -> None:
    """Rows of every warpgroup with a key that dominates, and columns of Q and K that TMA fills."""
    generator = torch.Generator().manual_seed(0)
    lengths = 200, 2 * tile_n + 20, 2 * tile_n + 20
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator) for n in lengths)
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, ::5, :, 0] = 20.0 / (LOUD * math.log2(math.e) * head_dim**-0.5)
    k[:, 3::57, :, 0] = LOUD
    parts = quantized(q, k, v, tile_n)
    assert scores_fit_half(parts.q.largest, parts.k.largest, head_dim)
    config = select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", 9000, tile_n, half_scores=True)
    assert config.softmax is Softmax.HALF_SCORES and config.tile_n == tile_n and config.consumers == 3
    check(parts, causal, config)


@pytest.mark.parametrize("pairs", [0, 5])
@pytest.mark.parametrize("octaves", [1000.0, 2.0**17])
def test_scores_that_float16_does_not_reach(octaves: float, pairs: int) -> None:
    """A row whose maximum, scaled, is above or below all of float16, beside rows of common size."""
    q, k, v = draw(TILE, 3 * TILE)
    q[..., 0], k[..., 0] = 0.0, 1.0
    q[:, [3, 20]] = 0.0
    q[:, 3, :, 0], q[:, 20, :, 0] = octaves / OCTAVES, -octaves / OCTAVES
    parts = quantized(q, k, v)
    out, lse = fp8_forward_on_numpy(config_of(pairs=pairs), parts, SCALE, LATE)
    exact, exact_lse = attention_naive(*dequantized(parts))
    others = [row for row in range(TILE) if row not in (3, 20)]
    assert relative(out[:, others], exact[:, others]) < 0.05
    for row in (3, 20):
        assert (lse[0, 0, row] / exact_lse[0, 0, row] - 1).abs() < 2.0**-10
        # Scores of a block are alike, and those of another are far away.
        assert relative(out[0, row], exact[0, row]) < 0.05


@pytest.mark.parametrize("pairs", [0, 5])
@pytest.mark.parametrize("octaves", [-240.0, 14.0, 240.0])
def test_scores_that_have_much_in_common(octaves: float, pairs: int) -> None:
    """Polynomials and MUFU give the same, and the LSE is off by no more than scores are rounded by."""
    q, k, v = draw(TILE, 3 * TILE)
    q[..., 0], k[..., 0] = 16.0, 0.0
    q[..., 1:] /= 16.0
    k[..., 0] = octaves / (16.0 * OCTAVES)
    parts = quantized(q, k, v)
    config = config_of(pairs=pairs)
    out, lse = fp8_forward_on_numpy(config, parts, SCALE, LATE)
    exact, exact_lse = attention_naive(*dequantized(parts))
    assert (lse - exact_lse).abs().max() < 3e-3 + 2.0**-11 * abs(octaves) * math.log(2)
    assert relative(out, exact) < 0.03 + 2.0**-10 * abs(octaves)


@pytest.mark.parametrize("exponent", [-11, -14, -18, -21])
def test_scales_of_which_float16_holds_few_digits(exponent: int) -> None:
    """The largest products that codes promise, with scales that are subnormal once divided by 32, and 0 at last."""
    q, k, v = draw(TILE, 3 * TILE)
    parts = quantized(torch.ones_like(q), torch.ones_like(k), v)
    factors = torch.linspace(0.5, 1.0, parts.q.scale.shape[-1])
    scale = (
        factors.expand(parts.q.scale.shape)
        * 2.0**exponent
        / (parts.k.scale.max() * SCALE * math.log2(math.e))
    )
    parts = replace(parts, q=replace(parts.q, scale=scale.contiguous()))
    out, lse = fp8_forward_on_numpy(config_of(), parts, SCALE, LATE)
    exact, exact_lse = attention_naive(*dequantized(parts))
    rounding = parts.q.largest * parts.k.largest * DIM * 2.0**-20 * math.log(2)
    of_scores = score_rounding(config_of(), DIM) * exact_lse.abs()
    assert ((lse - exact_lse).abs() < LAGGING_LSE_ROUNDING + rounding + of_scores).all()
    assert relative(out, exact) < 0.04


@pytest.mark.parametrize("column", range(2, TILE, 13))
def test_a_key_that_counts_alone_but_does_not_dominate(column: int) -> None:
    """In a later block, so that its P is any number, and by MUFU or by chords."""
    q, k, v = draw(TILE, 2 * TILE)
    q[..., 0], k[..., 0] = 16.0, 0.0
    q[..., 1:] /= 16.0
    k[:, column, :, 0] = 7.3 / (16.0 * OCTAVES)
    parts = quantized(q, k, v)
    out, lse = fp8_forward_on_numpy(config_of(), parts, SCALE, LATE)
    exact, exact_lse = attention_naive(*dequantized(parts))
    assert (lse - exact_lse).abs().max() < COARSE_LSE_ROUNDING
    assert relative(out, exact) < 0.07


@pytest.mark.parametrize("octaves", [52.3, 115.0])
def test_a_key_that_outweighs_all_others_by_far(octaves: float) -> None:
    """Float16 has coarse steps for shifts so large: the largest P is no power of two, and its sum counts it as e4m3
    rounds it."""
    q, k, v = draw(TILE, 2 * TILE)
    q[..., 0], k[..., 0] = 16.0, 0.0
    q[..., 1:] /= 16.0
    k[:, 50, :, 0] = octaves / (16.0 * OCTAVES)
    parts = quantized(q, k, v)
    out, _ = fp8_forward_on_numpy(config_of(), parts, SCALE, LATE)
    exact, _ = attention_naive(*dequantized(parts))
    assert relative(out, exact) < 2.0**-9


@pytest.mark.parametrize(
    ("window", "m_block", "visited", "wary", "settled"),
    [
        (Window(), 0, 32, [30, 29, 28], 30),
        (Window(right=0), 20, 32, [30, 29, 28], 28),
        (Window(right=0), 21, 32, [30, 29], 29),
        (Window(right=0), 1, 3, [1, 0], -1),
        (Window(left=1023, right=0), 20, 10, [30, 29, 28], 28),
        (Window(left=127, right=0), 20, 3, [30, 29], 28),
    ],
)
def test_how_a_tile_begins(window: Window, m_block: int, visited: int, wary: list[int], settled: int) -> None:
    """Of 4096 keys and queries, in blocks of 128 and tiles of 192: without a mask wary in three blocks; else where
    rows have their first keys, and in two blocks behind, of which the second says something of the scores."""
    blocks = BlockRange(192, 128, window).of(m_block, SeqlenInfo(4096, 4096))
    usual: Any = HalfScoresSoftmax
    settled_from, calm_from = usual.how_a_tile_begins(usual, blocks)
    assert blocks.count == visited and settled_from == settled
    assert [n for n in range(blocks.last - 1, blocks.begin - 1, -1) if n > calm_from] == wary


@pytest.mark.parametrize(("head_dim", "wary"), [(128, [0, 0, 1, 1, 3]), (256, [0, 1, 1, 2, 3])])
def test_how_a_short_tile_begins(head_dim: int, wary: list[int]) -> None:
    """With descales, of 4 to 24 whole blocks."""
    config = select_fp8_forward_config(
        head_dim, head_dim, False, "bfloat16", ANY_LENGTH, v_rows=True, without_lse=True
    )
    softmax: Any = SimpleNamespace(blocks_a_wary_block=config.blocks_a_wary_block)
    for count, expected in zip((4, 6, 8, 12, 24), wary, strict=True):
        blocks = BlockRange(128, 128, Window()).of(0, SeqlenInfo(128, 128 * count))
        _, calm_from = HalfScoresSoftmax.how_a_tile_begins(softmax, blocks)
        assert blocks.last - 1 - calm_from == expected


def test_a_scale_that_float16_does_not_hold() -> None:
    """Scores of 2^-14 and less, of which negative ones must not vanish."""
    q, k, v = draw(TILE, 2 * TILE)
    parts = quantized(q, k, v)
    codes_q, codes_k = torch.zeros_like(parts.q.data.float()), torch.zeros_like(parts.k.data.float())
    codes_q[..., 0], codes_q[..., 1] = 16.0, 2.0**-9
    codes_k[:, :TILE, :, 1], codes_k[..., 2] = -(2.0**-9), 28.0
    scale = 80000.0 / OCTAVES
    parts = replace(
        parts,
        q=replace(parts.q, data=codes_q.to(parts.q.data.dtype), scale=torch.full_like(parts.q.scale, scale)),
        k=replace(parts.k, data=codes_k.to(parts.k.data.dtype), scale=torch.ones_like(parts.k.scale)),
    )
    check(parts)


@pytest.mark.parametrize("causal", [False, True])
def test_a_softmax_scale_that_float16_lacks(causal: bool) -> None:
    """Tiny inputs: their product is 0 in float16, as good as are the scores."""
    q, k, v = draw(TILE + 13, 3 * TILE)
    check(quantized(q * 2.0**-40, k, v), causal)


def test_some_columns_must_come_from_mufu() -> None:
    with pytest.raises(ValueError, match="polynomial_pairs is 8, allowed with softmax 'half': 0 to 7"):
        config_of(pairs=8)


def test_scores_that_may_not_fit_are_in_float32_for_an_lse_and_lowered_without() -> None:
    assert scores_fit_half(28.0, 28.0, 64) and scores_fit_half(8.0, 28.0, 128)
    assert not scores_fit_half(448.0, 448.0, 64) and not scores_fit_half(28.0, 28.0, 128)
    for head_dim in (64, 128):
        for causal in (False, True):
            of_call = head_dim, head_dim, causal, "bfloat16", 8192
            config = select_fp8_forward_config(*of_call)
            assert config.softmax is Softmax.LAGGING and not config.lowers_queries
            config = select_fp8_forward_config(*of_call, without_lse=True)
            assert config.softmax is Softmax.HALF_SCORES and config.lowers_queries


def test_a_row_that_sees_one_key_has_its_value() -> None:
    """The sum of a tile's first block has all P as e4m3 rounds them."""
    q, k, v = draw(2 * TILE, 2 * TILE)
    parts = quantized(q, k, v)
    out, _ = fp8_forward_on_numpy(config_of(True), parts, SCALE, LATE)
    exact, _ = attention_naive(*dequantized(parts), causal=True)
    errors = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors[0, 0].max() < 2.0**-9 and errors[0, 1:4].mean() < 0.02


BLOCKS = 32
"""As many as look for flat tails at their beginning."""


def over_a_flat_tail(keys: list[int], octaves: float, rows: slice) -> tuple[QuantizedQKV, Tensor]:
    """Keys whose values are 0, so many octaves above all others for some rows, where other rows like all keys alike;
    the values of these are about 1. With the exact output."""
    q, k, v = draw(TILE, BLOCKS * TILE)
    q[:, rows] *= 0.1
    q[:, [i for i in range(TILE) if i not in range(TILE)[rows]]] = 0.0
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, rows, :, 0] = LOUD
    k[:, keys, :, 0] = octaves / (LOUD * OCTAVES)
    v = 1.0 + 0.1 * v
    v[:, keys] = 0.0
    parts = quantized(q, k, v)
    return parts, attention_naive(*dequantized(parts))[0]


@pytest.mark.parametrize(
    ("keys", "octaves"),
    [
        *(([BLOCKS * TILE - 5], octaves) for octaves in (10.0, 11.5, 13.0)),
        *(([BLOCKS * TILE - 5, BLOCKS * TILE // 2], octaves) for octaves in (10.0, 11.5, 13.0)),
        *(([BLOCKS * TILE // 2], octaves) for octaves in (10.0, 11.5, 13.0)),
        ([3], 16.0),
    ],
)
@pytest.mark.parametrize("rows", [slice(0, TILE), slice(5, TILE, 16)])
def test_a_flat_tail_below_single_keys(keys: list[int], octaves: float, rows: slice) -> None:
    """Less is lost than the keys of one block: where such a key is visited first its P is large enough for others to
    have one, behind it a maximum falls again, and where it comes last its P is as large as any may be."""
    parts, exact = over_a_flat_tail(keys, octaves, rows)
    out, lse = fp8_forward_on_numpy(config_of(), parts, SCALE, LATE)
    check_lse(lse, attention_naive(*dequantized(parts))[1], config_of())
    off = (out.double() - exact).abs()[:, rows] / exact.abs()[:, rows]
    assert off.max() < 0.75 / BLOCKS
    others = torch.ones(TILE, dtype=torch.bool)
    others[rows] = False
    if others.any():
        assert relative(out[:, others], exact[:, others]) < 0.04
