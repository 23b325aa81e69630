"""The softmax that takes few maxima gives what the other one does, on simulated machine code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cutlass import Boolean
from torch import Tensor

from hopper.config import Registers, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.exp2 import is_polynomial
from hopper.forward.fp8.softmax import half, lagging, stale_maximum
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper import on_numpy
from tests.hopper.fp8_errors import (
    LAGGING_LSE_ROUNDING,
    allowed_ratio,
    emulate,
    lse_rounding,
    score_rounding,
)
from tests.hopper.hopper_machine import Timing, parse
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_eager_softmax import signed
from tests.ptx import compile_ptx

LATE = Timing(is_late=True, seed=1)
TILE, DIM, SCALE = 64, 64, 0.125
OCTAVES = SCALE * math.log2(math.e)
"""Of P, for a score of 1."""

PAIRS = 3
POLYNOMIAL, MUFU = 25, 10
"""Columns of a tile: of a group of 8 whose exponentials come from the FMA pipe, and of one whose do not."""

LOUD = 40.0
"""Of K in the column that makes scores jump."""


def config_of(causal: bool = False, lagging: bool = True, pairs: int = PAIRS) -> Fp8ForwardConfig:
    config = select_fp8_forward_config(DIM, DIM, causal, "bfloat16", 4 * TILE, TILE)
    small = {"tile_m": TILE, "ping_pong": False, "late_rescale": True, "registers": Registers(256, 24)}
    softmax = Softmax.LAGGING if lagging else Softmax.EXACT
    config = replace(config, **small, softmax=softmax, polynomial_pairs=pairs)
    validate_forward_config(config)
    return config


def draw(seqlen_q: int, seqlen_k: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, 1, DIM, generator=generator) for n in (seqlen_q, seqlen_k, seqlen_k)]


def quantized(q: Tensor, k: Tensor, v: Tensor, block_k: int = TILE) -> QuantizedQKV:
    quantization = Fp8Quantization(rotate=False, block_q=1, block_k=block_k, smooth_v=False)
    return quantize_qkv(*(x.bfloat16() for x in (q, k, v)), quantization=quantization)


def dequantized(parts: QuantizedQKV) -> tuple[Tensor, ...]:
    return tuple(x.dequantize() for x in (parts.q, parts.k, parts.v))


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def check(parts: QuantizedQKV, causal: bool = False, config: Fp8ForwardConfig | None = None) -> Tensor:
    """Run it and compare with float64: each element with what rounding P may do, all with the emulation's error.

    P below e4m3's normal numbers is rounded by up to 2^-10. Some thread's sum of a row is 2^5 or more, so that this is
    2^-15 of the sum, for each key.
    """
    q, k, v = dequantized(parts)
    config = config or config_of(causal)
    out, lse = fp8_forward_on_numpy(config, parts, q.shape[3] ** -0.5, LATE)
    exact, exact_lse = attention_naive(q, k, v, causal=causal)
    visible = exact_lse > -math.inf
    assert torch.equal(lse > -math.inf, visible) and not out.transpose(1, 2)[~visible].any()
    check_lse(lse[visible], exact_lse[visible], config)
    of_p, _ = attention_naive(q, k, v.abs(), causal=causal)
    of_scores = score_rounding(config, q.shape[3]) * exact_lse.transpose(1, 2).unsqueeze(-1).abs().nan_to_num(
        posinf=0.0
    )
    allowed = (
        (2.0**-4 + 0.014 + of_scores) * of_p
        + 2.0**-15 * v.double().abs().sum(1, keepdim=True)
        + 2.0**-8 * exact.abs()
    )
    assert bool(((out.double() - exact).abs() <= allowed).all())
    worst = max(relative(like, exact) for like, _ in emulate(parts, causal, lagging=True))
    assert relative(out, exact) <= allowed_ratio(out, lagging=True) * worst + of_scores.max() + 2e-4
    return out


def check_lse(lse: Tensor, exact: Tensor, config: Fp8ForwardConfig) -> None:
    assert bool(((lse - exact).abs() < lse_rounding(config, exact)).all())


# maxima of blocks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "negative",
        "negative, then rising",
        "positive, then negative",
        "ever less negative",
        "rows of either sign",
    ],
)
def test_scores_of_any_sign(kind: str, causal: bool) -> None:
    parts = quantized(*signed(kind))
    out = check(parts, causal)
    plain = check(parts, causal, config_of(causal, lagging=False))
    assert relative(out, plain.double()) < 0.05


def jumping(octaves: dict[int, float], keys: dict[int, int], seqlen_k: int = 3 * TILE) -> QuantizedQKV:
    """Scores of a row that jump by some octaves above all others at a key of the row, and nowhere else."""
    q, k, v = draw(TILE, seqlen_k)
    q[..., : len(keys)], k[..., : len(keys)] = 0.0, 0.0
    exponents = OCTAVES * torch.einsum("bihd,bjhd->ij", q, k)
    for i, (row, key) in enumerate(keys.items()):
        k[:, key, :, i] = LOUD
        jump = octaves[row] + exponents[row].max() - exponents[row, key]
        q[:, row, :, i] = jump / (LOUD * OCTAVES)
    return quantized(q, k, v)


def without_jumps(parts: QuantizedQKV) -> QuantizedQKV:
    data = parts.q.data.clone()
    data[..., :2] = 0.0
    return replace(parts, q=replace(parts.q, data=data))


@pytest.mark.parametrize(("column", "pairs"), [(POLYNOMIAL, PAIRS), (MUFU, PAIRS), (MUFU, 0)])
@pytest.mark.parametrize("octaves", [1, 4, 7, 9.5, 11, 12, 30, 122.5, 130, 300])
def test_one_key_above_all_others(octaves: float, column: int, pairs: int) -> None:
    """One row in the second block that is visited and one of another warp in the last one. P is lost from some 11
    octaves on where a polynomial makes it, and from 123 on in float32."""
    assert is_polynomial(POLYNOMIAL // 8, PAIRS) and not is_polynomial(MUFU // 8, PAIRS)
    rows = {5: TILE + column, 40: column}
    parts = jumping({row: octaves for row in rows}, rows)
    config = config_of(pairs=pairs)
    out = check(parts, config=config)
    if octaves > 20:
        values = dequantized(parts)[2]
        for row, key in rows.items():
            # Its P is rounded.
            assert relative(out[0, row, 0], values[0, key, 0].double()) < 2.0**-4
    same, _ = fp8_forward_on_numpy(config, without_jumps(parts), SCALE, LATE)
    warps = torch.arange(TILE) // 16
    others = (warps != 5 // 16) & (warps != 40 // 16)
    assert torch.equal(out[:, others], same[:, others])
    beside = ~others
    beside[list(rows)] = False
    assert relative(out[:, beside], same[:, beside].double()) < 0.03


@pytest.mark.parametrize("octaves", [2.1, 2.3, 2.45, 2.6, 2.7])
@pytest.mark.parametrize("column", [POLYNOMIAL + 2, MUFU + 2])
def test_a_key_that_dominates_is_not_rounded(octaves: float, column: int) -> None:
    """Two keys outweigh all others: the first is 2^6 by then, and the second, of a later block, below 448. In e4m3 it
    would be off by up to a 16th."""
    q, k, v = draw(TILE, 3 * TILE)
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, 7, :, 0] = LOUD
    first, second = 2 * TILE + MUFU, TILE + column
    loud = 20.0 / (LOUD * OCTAVES), (20.0 + octaves) / (LOUD * OCTAVES)
    k[:, first, :, 0], k[:, second, :, 0] = loud
    k[:, [first, second], :, 1:] = 0.0
    parts = quantized(q, k, v)
    q, k, v = (x.double() for x in dequantized(parts))
    scores = q[0, 7, 0] @ k[0, :, 0].T * SCALE
    jump = ((scores[second] - scores[first]) * math.log2(math.e)).item()
    assert 2.0 < jump < 2.8 and not (256.0 * 0.99 < 2.0 ** (6 + jump) < 256.0 * 1.01)
    out = check(parts)
    exact = torch.softmax(scores, 0) @ v[0, :, 0]
    assert relative(out[0, 7, 0], exact) < 0.008


@pytest.mark.parametrize("octaves", [122.2, 122.6, 123.4])
def test_two_keys_whose_sum_float32_lacks(octaves: float) -> None:
    """In either half of a thread's columns, each of which has a finite sum."""
    q, k, v = draw(TILE, 2 * TILE)
    q[..., 0], k[..., 0] = 0.0, 0.0
    k[:, MUFU], k[:, MUFU + 32] = 0.0, 0.0
    k[:, [MUFU, MUFU + 32], :, 0] = LOUD
    exponents = OCTAVES * torch.einsum("bihd,bjhd->ij", q, k)
    q[:, 20, :, 0] = (octaves + exponents[20].max()) / (LOUD * OCTAVES)
    check(quantized(q, k, v))


@pytest.mark.parametrize(
    ("octaves", "pairs"), [(3.2, PAIRS), (5.0, 0), (5.0, PAIRS), (12.0, PAIRS), (40.0, 0)]
)
def test_rows_beside_one_that_rises_with_every_block(octaves: float, pairs: int) -> None:
    """A warp that takes a maximum in each of 48 blocks for one row leaves the others their precision."""
    blocks, row = 48, 1
    q, k, v = draw(TILE, blocks * TILE)
    q[..., 0] = 0.0
    q[:, row, :, 0] = LOUD
    k[..., 0] = (torch.arange(blocks).flip(0).repeat_interleave(TILE) * octaves / (LOUD * OCTAVES)).view(
        1, -1, 1
    )
    parts = quantized(q, k, v)
    config = config_of(pairs=pairs)
    out, lse = fp8_forward_on_numpy(config, parts, SCALE, LATE)
    exact, exact_lse = attention_naive(*dequantized(parts))
    check_lse(lse, exact_lse, config)
    beside = [r for r in range(16) if r != row]
    assert relative(out[:, beside], exact[:, beside]) < 1.25 * relative(out[:, 16:], exact[:, 16:])


@pytest.mark.parametrize("octaves", [3.0, 20.0, 150.0])
def test_scores_that_rise_with_every_block(octaves: float) -> None:
    q, k, v = draw(TILE, 5 * TILE)
    rising = torch.arange(5).flip(0).repeat_interleave(TILE) * octaves
    q[..., 0], k[..., 0] = LOUD, rising.view(1, -1, 1) / (LOUD * OCTAVES)
    check(quantized(q, k, v))


@pytest.mark.parametrize("octaves", [0.0, 6.0, 40.0])
def test_warps_that_are_wary(octaves: float) -> None:
    """Peaky scores, whose maxima rise in most blocks, and for some rows in each, from far below 0 to far above."""
    q, k, v = draw(TILE + 9, 15 * TILE + 5)
    rising = (torch.arange(k.shape[1]).flip(0) // TILE - 7) * octaves
    q, k = 6 * q, k.clone()
    q[..., 0], k[..., 0] = (
        LOUD * (torch.arange(TILE + 9) % 3 < 1).view(1, -1, 1),
        rising.view(1, -1, 1) / (LOUD * OCTAVES),
    )
    parts = quantized(q, k, v)
    check(parts)
    check(parts, causal=True)


def test_a_tile_has_the_bits_that_it_has_alone() -> None:
    """Which tile a CTA takes next is chance, so a tile must not know of a peaky one before it."""
    q, k, v = draw(2 * TILE, 9 * TILE)
    rising = torch.arange(k.shape[1]).flip(0) // TILE * 20.0
    k[..., 0] = rising.view(1, -1, 1) / (LOUD * OCTAVES)
    for peaky in (slice(0, TILE), slice(TILE, 2 * TILE)):
        q[..., 0] = 3.0
        q[:, peaky, :, 0] = LOUD
        parts = quantized(q, k, v)
        both, _ = fp8_forward_on_numpy(config_of(), parts, SCALE, LATE)
        for rows in (slice(0, TILE), slice(TILE, 2 * TILE)):
            of_tile = replace(
                parts.q, data=parts.q.data[:, rows].clone(), scale=parts.q.scale[..., rows].clone()
            )
            alone, _ = fp8_forward_on_numpy(config_of(), replace(parts, q=of_tile), SCALE, LATE)
            assert torch.equal(alone, both[:, rows])


def test_a_warp_that_is_wary_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that rise once, and then no more, of a tile that begins wary and of one that does not."""
    q, k, v = draw(TILE, 6 * TILE)
    q[..., 0], k[..., 0] = LOUD, 0.0
    k[:, : 5 * TILE, :, 0] = 14.0 / (LOUD * OCTAVES)
    parts = quantized(q, k, v)
    usual = check(parts)
    monkeypatch.setattr(lagging, "KEYS_A_WARY_BLOCK", 1)
    monkeypatch.setattr(half.HalfScoresSoftmax, "blocks_a_wary_block", 1)
    program = parse(compile_ptx(config_of()))
    monkeypatch.setattr(on_numpy, "program_of", lambda _: program)
    wary = check(parts)
    assert not torch.equal(wary, usual) and relative(wary, usual.double()) < 0.05


@pytest.mark.parametrize("octaves", [0.0, 3.5, 9.0, 14.0, 140.0])
def test_many_large_p(octaves: float) -> None:
    """Equal scores in each block, and from the second block on all of them larger: no P may be, but sums are."""
    q, k, v = draw(TILE, 4 * TILE)
    q, k = 0 * q, 0 * k
    q[..., 0] = LOUD
    q[:, 1::2, :, 0] = 0.0
    k[:, : 3 * TILE, :, 0] = octaves / (LOUD * OCTAVES)
    check(quantized(q, k, v))


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlen_k", "tile_n"), [(64, False, 9000, 128), (112, True, 9000, 192)]
)
def test_tiles_that_are_shipped(head_dim: int, causal: bool, seqlen_k: int, tile_n: int) -> None:
    """Rows of every warpgroup whose scores are computed again, and columns of Q and K that TMA fills."""
    generator = torch.Generator().manual_seed(0)
    lengths = 140, 2 * tile_n + 20, 2 * tile_n + 20
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator) for n in lengths)
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, ::5, :, 0] = 20.0 / (LOUD * math.log2(math.e) * head_dim**-0.5)
    k[:, 3::57, :, 0] = LOUD
    config = select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", seqlen_k, tile_n)
    assert config.softmax is Softmax.LAGGING and config.tile_n == tile_n and config.consumers > 1
    check(quantized(q, k, v, tile_n), causal, config)


# units of O, scales of rows, masks


@pytest.mark.parametrize("factor", [2.0, 2.0**-3, 2.0**20])
def test_units_of_o_that_change_with_jumps(factor: float) -> None:
    parts = jumping({5: 6.0, 13: 40.0, 40: 130.0, 50: 2.0}, {5: 70, 13: 130, 40: 79, 50: 3}, 4 * TILE)
    scales = parts.v.scale * factor ** torch.arange(4)
    check(replace(parts, v=replace(parts.v, scale=scales)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlens", [(77, 211), (64, 191), (130, 70), (1, 130)])
def test_odd_lengths_and_a_scale_for_each_row(seqlens: tuple[int, int], causal: bool) -> None:
    """Rows that are 8 apart, which a thread has both of, differ most. Of 191 keys the first query sees two blocks
    whole, which have no mask, and nothing of the one before them."""
    q, k, v = draw(*seqlens)
    q *= (torch.arange(seqlens[0]) // 8 % 2 * 5.0 - torch.arange(seqlens[0]) % 3).exp2().view(1, -1, 1, 1)
    k[:, ::7] *= 4.0
    parts = quantized(q, k, v)
    check(parts, causal)


def test_blocks_of_zeros() -> None:
    for block in (0, 1, 2):
        q, k, v = draw(TILE, 3 * TILE)
        k[:, block * TILE : (block + 1) * TILE] = 0.0
        v[:, block * TILE : (block + 1) * TILE] = 0.0
        check(quantized(q, k, v))


@pytest.mark.parametrize("column", [POLYNOMIAL, MUFU])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_nan_reaches_who_sees_it(block: int, column: int) -> None:
    """Of 128 queries the first half sees the third block through a mask, and the others as a whole."""
    q, k, v = draw(2 * TILE, 4 * TILE)
    key = block * TILE + column
    k[0, key, 0, 3] = math.nan
    out, lse = fp8_forward_on_numpy(config_of(causal=True), quantized(q, k, v), SCALE, LATE)
    first = max(key - 2 * TILE, 0)
    assert bool(out[0, first:].isnan().all()) and bool(lse[0, 0, first:].isnan().all())
    assert bool(out[0, :first].isfinite().all()) and bool(lse[0, 0, :first].isfinite().all())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_scale_that_is_nan(name: str) -> None:
    """Of a row, or of the block that is visited last."""
    parts = quantized(*draw(TILE, 3 * TILE))
    part = getattr(parts, name)
    scale = part.scale.clone()
    scale[..., 0] = math.nan
    out, _ = fp8_forward_on_numpy(
        config_of(), replace(parts, **{name: replace(part, scale=scale)}), SCALE, LATE
    )
    spoilt = out.isnan().all(-1)[0, :, 0]
    assert bool(spoilt[0]) and bool((spoilt[1:] == (name != "q")).all())


# machine code


def test_the_bits_do_not_depend_on_timing() -> None:
    parts = jumping({5: 6.0, 13: 40.0, 40: 130.0}, {5: 70, 13: 130, 40: 79}, 4 * TILE)
    first, *others = (
        fp8_forward_on_numpy(config_of(), parts, SCALE, timing)
        for timing in (LATE, LATE, Timing(is_late=True, seed=2), Timing(is_late=False, seed=3))
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("all_groups", [False, True])
def test_blocks_whose_scores_are_all_computed_again(
    all_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By mma.sync: the same scores, in rows of any scale, and a fresh maximum in every block."""
    q, k, v = draw(77, 211)
    parts = quantized(q * (torch.arange(77) % 5 - 2.0).exp2().view(1, -1, 1, 1), k, v)
    # Before anything is patched: its program is kept for other tests.
    usual, usual_lse = fp8_forward_on_numpy(config_of(), parts, SCALE)
    monkeypatch.setattr(stale_maximum, "LARGEST_P", -1.0)
    monkeypatch.setattr(lagging.LaggingSoftmax, "_has_lost_any", lambda _: Boolean(True))
    if all_groups:
        monkeypatch.setattr(lagging, "RELIABLE", -1.0)
    program = parse(compile_ptx(config_of()))
    monkeypatch.setattr(on_numpy, "program_of", lambda _: program)
    out = check(parts)
    again, lse = fp8_forward_on_numpy(config_of(), parts, SCALE)
    assert torch.equal(again, out) and not torch.equal(lse, usual_lse)
    assert (lse - usual_lse).abs().max() < LAGGING_LSE_ROUNDING and relative(out, usual.double()) < 0.05
