"""Scores in float16 thousands of octaves from 0, and keys that outweigh all others, on simulated machine code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.quantized import QuantizedQKV
from hopper_attention.reference import attention_naive
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_half_scores import config_of
from tests.hopper.test_lagging_softmax import (
    DIM,
    LATE,
    OCTAVES,
    SCALE,
    TILE,
    dequantized,
    draw,
    quantized,
    relative,
)


def attend(parts: QuantizedQKV, causal: bool, pairs: int = 5) -> tuple[Tensor, Tensor]:
    """(what the kernel finds, what float64 does)."""
    found, _ = fp8_forward_on_numpy(config_of(causal, pairs=pairs), parts, SCALE, LATE)
    return found, attention_naive(*dequantized(parts), causal=causal)[0]


def errors_of_rows(found: Tensor, exact: Tensor) -> Tensor:
    return (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("factor", [64.0, 1000.0])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_that_are_large(causal: bool, factor: float) -> None:
    """One key takes everything, unless float16 cannot tell it from the next: scores have 11 bits."""
    q, k, v = draw(2 * TILE, 6 * TILE)
    parts = quantized(factor * q, factor * k, v)
    found, exact = attend(parts, causal)
    errors = errors_of_rows(found, exact)
    assert errors.median() < 2.0**-8 and (errors > 2.0**-5).float().mean() < 0.02


@pytest.mark.parametrize("pairs", [0, 5])
def test_equal_keys_far_from_0(pairs: int) -> None:
    """Each of some keys has the same share, whichever blocks they are in."""
    q, k, v = draw(TILE, 5 * TILE)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = 1000.0, 1.0
    k[:, ::5, :, 0] = 100.0
    found, exact = attend(quantized(q, k, v), False, pairs)
    assert 1000.0 * 99.0 * OCTAVES > 2000.0
    assert relative(found, exact) < 0.01


def test_far_rows_beside_others() -> None:
    """Rows near 0, of zeros and of NaN share a warp with far ones, whose scores a block may lose."""
    q, k, v = draw(TILE, 6 * TILE)
    q[:, ::3] *= 1e5
    q[:, 10] = 0.0
    parts = quantized(q, k, v)
    found, exact = attend(parts, False)
    assert errors_of_rows(found, exact).median() < 0.03
    assert relative(found[:, 1::3], exact[:, 1::3]) < 0.05
    q[:, 20] = math.nan
    with_nan, _ = attend(quantized(q, k, v), False)
    others = [row for row in range(TILE) if row != 20]
    assert with_nan[:, 20].isnan().all()
    assert relative(with_nan[:, others], exact[:, others]) < 0.05
    beside = errors_of_rows(with_nan, exact)[:, others]
    assert (beside < 0.3).all()


def test_a_row_that_sees_one_key_has_its_value() -> None:
    q, k, v = draw(2 * TILE, 2 * TILE)
    parts = quantized(q, k, v)
    found, exact = attend(parts, True)
    assert relative(found[:, 0], exact[:, 0]) < 2.0**-8  # that of bfloat16
    assert errors_of_rows(found, exact)[0, 1:4].mean() < 0.02


@pytest.mark.parametrize("octaves", [20.0, 40.0, 90.0])
@pytest.mark.parametrize(
    ("column", "pairs"), [(0, 5), (0, 1), (TILE + 6, 5), (12, 5), (TILE + 12, 5), (12, 1)]
)
def test_a_key_that_all_queries_attend_to(column: int, pairs: int, octaves: float) -> None:
    """It raises the maximum of warps that take their maxima first. Shifts are coarse there, so its P is no power of
    two: the sum has it as e4m3 rounds it, in a column by chords, as 0 and 6 are, and in one by MUFU. Without that it
    was 1.1 to 1.9 %."""
    q, k, v = draw(2 * TILE, 3 * TILE)
    towards = torch.nn.functional.normalize(torch.ones(DIM), dim=0)
    q = q + 4.0 * towards
    k[:, column] = towards * octaves / (4.0 * OCTAVES)
    found, exact = attend(quantized(q, k, v), True, pairs)
    rows = slice(max(0, column - TILE), None)
    assert relative(found[:, rows], exact[:, rows]) < 0.008


@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("octaves", [20.0, 90.0])
def test_such_a_key_among_any_codes(octaves: float, lone: bool) -> None:
    """Where the kernel lowers queries: by scales of blocks, and by one of all keys. Else it is 1.0 to 2.0 %."""
    q, k, v = draw(2 * TILE, 3 * TILE)
    towards = torch.nn.functional.normalize(torch.ones(DIM), dim=0)
    q = q + 4.0 * towards
    k[:, 0] = towards * octaves / (4.0 * OCTAVES)
    c = Fp8Quantization(rotate=False, granularity="head" if lone else "block", block_k=TILE, smooth_v=False)
    parts = quantize_qkv(*(x.bfloat16() for x in (q, k, v)), quantization=c)
    config = replace(config_of(True), lowers_queries=True, lone_scales=lone)
    found, _ = fp8_forward_on_numpy(config, parts, SCALE, LATE)
    assert relative(found, attention_naive(*dequantized(parts), causal=True)[0]) < 0.008


@pytest.mark.parametrize("octaves", [26.5, 30.3, 40.1, 41.8])
def test_a_row_whose_neighbours_take_new_maxima(octaves: float) -> None:
    """One key outweighs the others in a wary block. A calm one has another for row 5 alone, whose warp makes P of eight
    rows again: the sums of all still have what e4m3 made of the first key, also where float16 rounds its exponent to
    the border of a step of chords (2.3 to 2.7 % else). Rows whose other keys have 1 to 3 % are off by up to 1.6 %."""
    q, k, v = draw(TILE, 9 * TILE)
    towards, other = torch.ones(DIM) / math.sqrt(DIM), torch.ones(DIM) / math.sqrt(DIM)
    other[::2] *= -1.0
    q = q + 4.0 * towards
    q[:, 5] += 40.0 * other
    k[:, 7 * TILE + 6] = towards * octaves / (4.0 * OCTAVES)
    k[:, 3] = other * (octaves + 24.0) / (40.0 * OCTAVES)
    found, exact = attend(quantized(q, k, v), False)
    errors = errors_of_rows(found, exact)
    assert errors.max() < 0.02 and errors.median() < 0.003


def alike(octaves: Tensor, tile: int) -> QuantizedQKV:
    """Three tiles of keys that are alike, whose scores are ``octaves`` (seqlen_q,) in each row; those of the last tile
    have half the value of others."""
    q, k, v = draw(len(octaves), 3 * tile)
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v)
    q[..., 0], k[..., 0] = 1000.0 / OCTAVES, 1.0
    v[:, -tile:] = 0.5
    parts = quantized(q, k, v, tile)
    (one_q, *_), (one_k, *_) = (x[0, 0, 0] for x in dequantized(parts)[:2])
    of_rows = (octaves / (one_q * one_k * OCTAVES)).to(parts.q.scale.dtype)
    return replace(parts, q=replace(parts.q, scale=parts.q.scale * of_rows))


@pytest.mark.parametrize("octaves", [1996.3, 1999.4, 2001.4])
def test_equal_keys_where_rows_begin_to_be_far(octaves: float) -> None:
    """An offset that rounds to 2000 octaves is beyond them whichever way it is asked for: errors were 7 to 14 %."""
    found, exact = attend(alike(torch.full((TILE,), octaves), TILE), False)
    assert errors_of_rows(found, exact).max() < 2.0**-5


@pytest.mark.parametrize("octaves", [1024.4, 1100.3, 1300.45])
def test_equal_keys_of_rows_beside_far_ones(octaves: float) -> None:
    """Near rows whose shift is so coarse that P of 48 keys pass 448 together have them made again, and need their
    scores for that: outputs were 0 and LSEs infinite."""
    of_rows = torch.full((64,), octaves)
    of_rows[::8] = 4000.0
    parts = alike(of_rows, 192)
    config = select_fp8_forward_config(DIM, DIM, False, "bfloat16", 9000, 192, half_scores=True)
    assert (config.tile_n, config.softmax) == (192, Softmax.HALF_SCORES)
    found, lse = fp8_forward_on_numpy(config, parts, SCALE, LATE)
    assert lse.isfinite().all()
    assert errors_of_rows(found, attention_naive(*dequantized(parts), causal=False)[0]).max() < 0.05
