"""Attention kernels, run from their PTX without a GPU, against float64 and against their emulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hopper.backward.config import select_backward_config
from hopper.config import Registers, validate_forward_config
from hopper.forward.fp8.config import Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.forward.tilings import select_forward_config, select_plain_config
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, from_descales, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper import hopper_machine, on_numpy
from tests.hopper.fp8_errors import LAGGING_LSE_ROUNDING, allowed_ratio, emulate
from tests.hopper.hopper_machine import AT_ONCE, Cta, Groups, Timing, Warp, parse
from tests.hopper.on_numpy import backward_on_numpy, forward_on_numpy, fp8_forward_on_numpy
from tests.ptx import ptx_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


LATE = Timing(is_late=True, seed=1)
"""What is asynchronous happens as late as the waits allow: a missing one shows."""


def draw(dtype, seqlens, heads, head_dim, batch=1, head_dim_v=None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    (seqlen_q, seqlen_k), (heads_q, heads_kv) = seqlens, heads
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v or head_dim),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def check_forward(config, inputs: list[torch.Tensor], ctas: int = 1) -> None:
    out, lse = forward_on_numpy(config, *inputs, inputs[0].shape[3] ** -0.5, ctas, LATE)
    exact, exact_lse = attention_naive(*inputs, causal=config.causal)
    assert relative(out, exact) < EPSILON[out.dtype]
    visible = exact_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(1, 2)[~visible] == 0).all())
    assert (lse.double() - exact_lse)[visible].abs().max() < 3e-6


@pytest.mark.parametrize(
    "head_dim,causal,seqlens,heads",
    [
        (64, True, (150, 300), (2, 1)),
        (72, True, (200, 130), (3, 1)),
        (104, True, (200, 130), (2, 2)),
        (256, True, (70, 170), (1, 1)),
    ],
)
def test_forward(head_dim, causal, seqlens, heads) -> None:
    config = select_forward_config("bfloat16", head_dim, head_dim, causal, seqlens[1])
    check_forward(config, draw(torch.bfloat16, seqlens, heads, head_dim), ctas=2)


@pytest.mark.parametrize(
    "dims,causal,seqlens",
    [
        ((40, 40), True, (130, 200)),
        ((72, 72), False, (200, 130)),
        ((104, 104), True, (200, 260)),
        ((224, 224), True, (70, 170)),
        ((128, 72), False, (70, 170)),
        ((64, 8), False, (70, 170)),
    ],
)
def test_products_leave_out_columns_of_zeros(dims, causal, seqlens) -> None:
    config = select_plain_config("bfloat16", *dims, causal, 4096, True)
    assert config.used_head_dim and config.columns_pv == max(dims[1], 16)
    inputs = draw(torch.bfloat16, seqlens, (2, 1), dims[0], head_dim_v=dims[1])
    check_forward(config, inputs, ctas=2)


@pytest.mark.parametrize("head_dim,tile_n", [(64, 64), (128, 144)])
def test_maxima_of_scores_of_any_sign(head_dim, tile_n) -> None:
    """Bits are compared only where a row of the warp has no negative maximum: rows with positive scores only in some
    blocks, or in none, are in all places. Where the last keys, which are visited first, have the largest scores by far,
    no later block has a new maximum, and O is not shrunk there."""
    config = replace(select_forward_config("bfloat16", head_dim, head_dim, True, 16384), tile_n=tile_n)
    q, k, v = draw(torch.bfloat16, (80, 400), (1, 1), head_dim)
    some_rows = torch.where(torch.arange(80).view(1, -1, 1, 1) % 7 == 0, -1, 1).bfloat16()
    later = torch.arange(400).view(1, -1, 1, 1) < 250
    some_keys, large_first = (torch.where(later, x, 1).bfloat16() for x in (-1, 0.25))
    signs = (-q.abs(), k.abs()), (q.abs() * some_rows, k.abs() * some_keys), (q, k * large_first)
    for queries, keys in signs:
        check_forward(config, [queries, keys, v])


def test_output_staged_in_the_memory_of_v_waits_for_it_and_is_waited_for() -> None:
    config = select_forward_config("bfloat16", 192, 192, False, 16384)
    assert config.o_shares_v
    q, k, v = draw(torch.bfloat16, (260, 170), (1, 1), 192)
    for timing in (AT_ONCE, LATE):
        out, _ = forward_on_numpy(config, q, k, v, 192**-0.5, 1, timing)
        assert relative(out, attention_naive(q, k, v)[0]) < EPSILON[out.dtype]


def test_keys_and_values_may_be_views_of_one_tensor() -> None:
    """TMA begins at the first element of each."""
    config = select_forward_config("bfloat16", 64, 64, True, 300)
    q, k, v = draw(torch.bfloat16, (100, 300), (2, 1), 64)
    check_forward(config, [q, *torch.stack((k, v), 2).unbind(2)])


@pytest.mark.parametrize("causal,seqlens", [(False, (260, 170)), (True, (300, 430)), (True, (130, 70))])
def test_output_from_registers_of_several_tiles(causal: bool, seqlens: tuple[int, int]) -> None:
    """O of 16 bits at head_dim 256, whose rows end within a tile. Under a mask the first of each head comes last."""
    config = select_forward_config("bfloat16", 256, 256, causal, 16384)
    assert config.o_from_registers and not config.o_shares_v and not config.o_shares_q
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 1), 256), ctas=2)


@pytest.mark.parametrize("seqlens", [(131, 400), (260, 170), (60, 176)])
def test_a_warpgroup_without_a_query_lets_blocks_pass(seqlens: tuple[int, int]) -> None:
    """In the last tile of each head; O goes from registers."""
    config = select_plain_config("bfloat16", 128, 128, False, 16384)
    assert config.walks_apart and config.o_from_registers
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 1), 128), ctas=2)


@pytest.mark.parametrize("seqlens", [(131, 131), (300, 333), (256, 320), (140, 130), (5, 5)])
def test_query_tiles_from_the_end(seqlens: tuple[int, int]) -> None:
    """Of two sequences, so that what is written in front of the second one's first row would be seen."""
    config = select_plain_config("float16", 256, 256, True, 16384)
    assert config.counts_from_end
    check_forward(config, draw(torch.float16, seqlens, (1, 1), 256, batch=2), ctas=2)


@pytest.mark.parametrize("seqlens", [(131, 131), (300, 333), (256, 320), (257, 257), (140, 130), (5, 5)])
def test_a_first_query_tile_that_is_stored_apart(seqlens: tuple[int, int]) -> None:
    config = select_plain_config("bfloat16", 128, 128, True, 16384)
    assert config.stores_first_apart
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 1), 128, batch=2), ctas=2)


FEW = [(131, 131), (257, 257), (272, 272), (200, 200), (300, 329), (130, 257), (256, 259), (321, 450), (3, 3)]
NOT_FEW = [(273, 273), (256, 256), (140, 130), (70, 300)]


@pytest.mark.parametrize("seqlens", [*FEW, *NOT_FEW])
def test_few_keys_behind_a_block(seqlens: tuple[int, int]) -> None:
    config = select_plain_config("bfloat16", 128, 128, True, 4099)
    assert config.few_keys == 16
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 1), 128, batch=2), ctas=2)


@pytest.mark.parametrize("seqlens", [(131, 131), (300, 329)])
def test_few_keys_stay_until_their_product_is_made(seqlens: tuple[int, int], monkeypatch) -> None:
    """Where copies come at once, products as late as they may, and the producer goes on after each step of others."""
    turn = Warp.turn

    def turn_of(warp: Warp) -> bool:
        monkeypatch.setattr(hopper_machine, "QUANTUM", 400 if warp.number == 0 else 1)
        return turn(warp)

    monkeypatch.setattr(Cta, "receive", lambda cta, copy: copy())
    monkeypatch.setattr(Warp, "turn", turn_of)
    config = select_plain_config("bfloat16", 128, 128, True, 4099)
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 2), 128, batch=2))


@pytest.mark.parametrize("keys", [4096, 16384])
def test_short_tiles_of_all_heads_last(keys: int) -> None:
    config = select_plain_config("bfloat16", 128, 128, True, keys)
    assert config.ends_with_short_tiles
    check_forward(config, draw(torch.bfloat16, (300, 333), (2, 1), 128), ctas=2)


@pytest.mark.parametrize("keys", [300, 512])
@pytest.mark.parametrize("seqlens", [(131, 400), (260, 100), (131, 384), (70, 128)])
def test_first_products_in_turns(keys: int, seqlens: tuple[int, int]) -> None:
    """Of several tiles a CTA, of which the last one of a head has a warpgroup without a query; the last block has an
    end in it, or is whole."""
    config = select_plain_config("bfloat16", 128, 128, False, keys)
    assert config.begins_in_turn
    check_forward(config, draw(torch.bfloat16, seqlens, (2, 1), 128), ctas=2)


@pytest.mark.parametrize("rest", [1, 64, 65, 112, 113, 176])
def test_the_last_block_is_cut_to_the_keys_that_there_are(rest: int) -> None:
    """Alone, in front of one other block, and of two; with tiles that follow."""
    config = select_forward_config("float16", 128, 128, False, 16384)
    assert config.first_widths == (64, 112) and config.cuts_first_product
    for blocks in range(3):
        check_forward(config, draw(torch.float16, (140, 176 * blocks + rest), (1, 1), 128))


ABLATION = [
    {"pipelined": False, "ping_pong": False, "tile_n": 80},
    {"tile_m": 64, "ping_pong": False, "registers": Registers(256, 24), "tile_n": 80},
    {"warp_specialized": False, "registers": Registers(256, 0), "tile_n": 64, "stages": 3},
    {"warp_specialized": False, "registers": Registers(256, 0), "tile_n": 64, "pipelined": False},
    {
        "warp_specialized": False,
        "registers": Registers(256, 0),
        "tile_n": 48,
        "tile_m": 64,
        "ping_pong": False,
    }
    | {"ctas_per_sm": 2},
]


@pytest.mark.parametrize("change", ABLATION)
def test_schedules_of_the_ablation(change) -> None:
    config = replace(select_forward_config("float16", 128, 128, False, 8192), **change)
    validate_forward_config(config)
    check_forward(config, draw(torch.float16, (140, 420), (2, 1), 128))


def check_fp8(parts: QuantizedQKV, causal: bool, block_k: int = 0, seqlen_k: int = 0) -> torch.Tensor:
    """As good as the emulation, which rounds where the kernel rounds; returns the kernel's output."""
    head_dim = parts.q.data.shape[3]
    dtype = {v: k for k, v in DTYPES.items()}[parts.dtype]
    length = seqlen_k or parts.k.data.shape[1]
    config = select_fp8_forward_config(head_dim, parts.v.shape[3], causal, dtype, length, block_k)
    out, lse = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    lags = config.softmax is Softmax.LAGGING
    emulations = emulate(parts, causal, lags)
    exact, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)
    ratio = allowed_ratio(out, lagging=True) if lags else 1.03
    assert relative(out, exact) <= ratio * max(relative(like, exact) for like, _ in emulations) + 2e-4
    _, like_lse = emulations[0]
    visible = like_lse > -math.inf
    assert bool((lse[~visible] == -math.inf).all()) and bool((out.transpose(1, 2)[~visible] == 0).all())
    # The polynomial's error does not average out over few keys.
    assert (lse - like_lse)[visible].abs().max() < (LAGGING_LSE_ROUNDING if lags else 4e-3)
    return out


@pytest.mark.parametrize(
    "dtype,head_dim,causal,block_k,seqlen_k",
    [
        ("bfloat16", 64, True, 128, 0),
        ("float16", 64, False, 192, 9000),
        ("bfloat16", 128, True, 128, 9000),
        ("bfloat16", 256, False, 128, 0),
    ],
)
def test_fp8_forward_with_block_scales(dtype, head_dim, causal, block_k, seqlen_k) -> None:
    q, k, v = draw(DTYPES[dtype], (200, 460), (2, 1), head_dim)
    k[:, 192:] *= 3
    v[:, :160] *= 2.0**-9
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_q=64, block_k=block_k, smooth_v=False))
    check_fp8(parts, causal, block_k, seqlen_k)


def test_fp8_forward_finds_the_maximum_of_negative_scores() -> None:
    q, k, v = draw(torch.bfloat16, (70, 300), (1, 1), 64)
    k = k.abs() + 0.25
    some_rows = torch.where(torch.arange(70).view(1, -1, 1, 1) % 7 == 0, -1, 1) * q.abs()
    for queries in (-q.abs() - 0.25, some_rows):
        parts = quantize_qkv(
            queries.bfloat16(), k, v, quantization=Fp8Quantization(rotate=False, block_k=128, smooth_v=False)
        )
        check_fp8(parts, False, 128)


def test_fp8_forward_of_tensors_with_descales_of_any_sign() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(torch.float32, (70, 130), (2, 2), 64))
    descale = torch.tensor([[0.5, 2.0]])
    out = check_fp8(
        from_descales(q, k, v, descale, descale, torch.tensor([[-3.0, 0.0]]), torch.bfloat16), True
    )
    assert not out[:, :, 1].any() and out[:, :, 0].any()


@pytest.mark.parametrize("descale", [0.0, 1e-30])
def test_fp8_forward_of_scores_whose_scale_vanishes(descale: float) -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(torch.float32, (70, 130), (1, 1), 64))
    vanishing = torch.full((1, 1), descale)
    check_fp8(from_descales(q, k, v, vanishing, vanishing, None, torch.bfloat16), True)


def test_fp8_forward_of_zeros_is_the_mean_of_v() -> None:
    q, k, v = draw(torch.bfloat16, (70, 130), (1, 1), 64)
    parts = quantize_qkv(
        q * 0, k * 0, v * 0 + 1, quantization=Fp8Quantization(block_q=64, block_k=128, smooth_v=False)
    )
    assert relative(check_fp8(parts, False, 128), torch.ones(1, 70, 1, 64, dtype=torch.float64)) < 2e-3


@pytest.mark.parametrize("signs", [(-1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)])
def test_fp8_forward_with_a_negative_descale_is_nan(signs: tuple[float, float]) -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(torch.float32, (70, 130), (1, 1), 64))
    parts = from_descales(q, k, v, *(torch.full((1, 1), sign) for sign in signs), None, torch.bfloat16)
    config = select_fp8_forward_config(64, 64, False, "bfloat16", 130, 128)
    out, lse = fp8_forward_on_numpy(config, parts, 0.125)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


@pytest.mark.parametrize("quiet", [0.0, 2.0**-20])
def test_fp8_forward_counts_the_weights_of_quiet_values(quiet: float) -> None:
    """Keys whose values are small take their part of the row sum, though float16 cannot hold what they add to P."""
    q, k, v = draw(torch.bfloat16, (70, 256), (1, 1), 64)
    q[..., 0], k[:, 1, :, 0] = 8, 6
    v[:, :128] *= quiet
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(rotate=False, block_k=128, smooth_v=False))
    check_fp8(parts, False, 128)


@pytest.mark.parametrize(
    "scales", [(2.0**-80, 2.0**-80, 2.0**6), (2.0**-126, 2.0**-126, 1.0), (3.0, 0.7, -1.0)]
)
def test_fp8_forward_with_scales_of_v_that_lie_far_apart(scales: tuple[float, ...]) -> None:
    """The last block is visited first; the quiet ones after it must not blow up what it left. None may be negative."""
    inputs = draw(torch.bfloat16, (70, 384), (1, 1), 64)
    parts = quantize_qkv(*inputs, quantization=Fp8Quantization(block_k=128, smooth_v=False))
    parts = replace(parts, v=replace(parts.v, scale=torch.tensor(scales).view(1, 1, 3)))
    config = select_fp8_forward_config(64, 64, False, "bfloat16", 384, 128)
    out, _ = fp8_forward_on_numpy(config, parts, 0.125)
    if min(scales) < 0:
        assert bool(out.isnan().all())
    else:
        exact, _ = attention_naive(*(x.dequantize().double() for x in (parts.q, parts.k, parts.v)))
        assert relative(out, exact) < 0.05


def test_fp8_forward_transposes_v() -> None:
    """In its producer, to the bits of a V that comes transposed, whose scale is published for each block. Other
    head_dims are with windows and two levels."""
    q, k, v = draw(torch.bfloat16, (130, 300), (2, 1), 64)
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(granularity="head", smooth_v=False))
    assert parts.k.scale.shape == parts.v.scale.shape == (1, 1, 1) and parts.k.scale.item() != 1.0
    with_rows = select_fp8_forward_config(64, 64, True, "bfloat16", 300, v_rows=True)
    without = select_fp8_forward_config(64, 64, True, "bfloat16", 300)
    assert with_rows.lone_scales and not without.lone_scales
    assert with_rows.v_rows and not without.v_rows and with_rows.first_widths == without.first_widths
    fields = {"stages": with_rows.stages, "registers": with_rows.registers, "lone_scales": True}
    assert replace(without, v_rows=True, **fields) == with_rows
    out, lse = fp8_forward_on_numpy(with_rows, parts, 0.125, LATE)
    expected, expected_lse = fp8_forward_on_numpy(without, parts, 0.125, LATE)
    # What the compiler contracts to an FMA in the sums of rows differs between the two.
    assert torch.equal(out, expected) and torch.allclose(lse, expected_lse, rtol=1e-6, atol=0.0)


def test_fp8_forward_passes_nan_on_to_those_who_see_it() -> None:
    q, k, v = draw(torch.bfloat16, (128, 300), (1, 1), 64)
    k[0, 250, 0, 3] = math.nan
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_k=128, smooth_v=False))
    config = select_fp8_forward_config(64, 64, True, "bfloat16", 300, 128)
    out, _ = fp8_forward_on_numpy(config, parts, 0.125)
    # The last query sees the last key.
    assert bool(out[0, 78:].isnan().all()) and bool(out[0, :78].isfinite().all())


@pytest.mark.parametrize("key", [0, 130])
def test_fp8_forward_passes_nan_of_any_block_and_column_on(key: int) -> None:
    """Of the block visited first as of later ones; of columns whose exponentials are polynomials as of the others."""
    q, k, v = draw(torch.bfloat16, (64, 256), (1, 1), 64)
    k[0, key, 0, 3] = math.nan
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(rotate=False, block_k=128, smooth_v=False))
    config = select_fp8_forward_config(64, 64, False, "bfloat16", 256, 128)
    assert config.polynomial_pairs > 0
    out, _ = fp8_forward_on_numpy(config, parts, 0.125)
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,heads,ordered",
    [
        ("bfloat16", 128, True, (100, 130), (2, 1), False),
        ("float16", 64, False, (130, 200), (2, 2), True),
        ("bfloat16", 40, True, (200, 130), (4, 2), False),
        ("bfloat16", 64, True, (1, 1), (1, 1), False),
        # Key tiles of several heads in turn.
        ("bfloat16", 128, True, (200, 330), (4, 2), True),
        # Query tiles of which no row sees a key: the first key tile stores their sums all the same.
        ("float16", 128, True, (260, 70), (2, 1), True),
        ("bfloat16", 256, True, (200, 60), (2, 1), True),
        # Pairs of CTAs, two clusters; of the last one, the second CTA has no keys.
        ("bfloat16", 200, True, (150, 150), (2, 1), False),
        ("bfloat16", 200, True, (150, 180), (4, 2), True),
        ("float16", 136, False, (70, 300), (2, 2), True),
    ],
)
def test_backward(dtype, head_dim, causal, seqlens, heads, ordered) -> None:
    config = select_backward_config(dtype, head_dim, head_dim, causal, ordered)
    inputs = draw(DTYPES[dtype], seqlens, heads, head_dim, batch=1 + (head_dim == 64))
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*leaves, causal=causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    exact = torch.autograd.grad(out, leaves, dout.double())
    rounded = out.detach().to(DTYPES[dtype])
    ours = backward_on_numpy(config, (dout, *inputs), rounded, lse.detach().float(), head_dim**-0.5, LATE)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        # A lone key has a probability of 1 and no gradient of scores.
        error = (a.double() - e).norm().item()
        assert error <= EPSILON[DTYPES[dtype]] * e.norm().item() + 1e-5, name


@pytest.mark.parametrize(
    "head_dim,head_dim_v,causal,seqlens",
    [
        (40, 64, True, (130, 70)),
        (64, 8, True, (65, 129)),
        (128, 72, True, (65, 33)),
        (136, 200, True, (80, 40)),
    ],
)
def test_backward_of_other_head_dims_and_of_the_lse(head_dim, head_dim_v, causal, seqlens) -> None:
    """Values of another head_dim, and a gradient of the LSE, which in rows without keys may hold anything."""
    config = select_backward_config("bfloat16", head_dim, head_dim_v, causal)
    inputs = draw(torch.bfloat16, seqlens, (2, 1), head_dim, head_dim_v=head_dim_v)
    leaves = [x.double().requires_grad_() for x in inputs]
    out, lse = attention_naive(*leaves, causal=causal)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).bfloat16()
    dlse = torch.randn(lse.shape, generator=generator)
    hidden = lse == -math.inf
    exact = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double().masked_fill(hidden, 0)))
    dlse[hidden] = math.nan
    rows = out.detach().bfloat16(), lse.detach().float()
    ours = backward_on_numpy(config, (dout, *inputs), *rows, head_dim**-0.5, LATE, dlse)
    for name, x, a, e in zip("qkv", inputs, ours, exact, strict=True):
        assert a.shape == x.shape and relative(a, e) < EPSILON[torch.bfloat16], name
    if causal and seqlens[0] > seqlens[1]:
        assert not ours[0][:, : seqlens[0] - seqlens[1]].any()


@pytest.mark.parametrize("kind", ["forward", "without a producer", "fp8", "backward", "paired backward"])
def test_the_bits_do_not_depend_on_timing(kind: str) -> None:
    q, k, v = draw(torch.bfloat16, (130, 300), (1, 1), 64)
    forward = replace(select_forward_config("bfloat16", 64, 64, True, 8192), tile_n=64)
    if kind == "without a producer":
        forward = replace(forward, warp_specialized=False, tile_m=128, registers=Registers(256, 0))
    out, lse = attention_naive(q, k, v)
    rounded = out.bfloat16()
    quantization = Fp8Quantization(block_k=128, smooth_v=False)
    parts = quantize_qkv(q, k, v, quantization=quantization)
    fp8 = select_fp8_forward_config(64, 64, True, "bfloat16", 300, 128)
    backward = select_backward_config("bfloat16", 64, 64, True)
    if kind == "paired backward":
        # Three query tiles, so that the two buffers of dS are used again.
        q, k, v = draw(torch.bfloat16, (130, 128), (1, 1), 256)
        backward = select_backward_config("bfloat16", 256, 256, True)
        rounded, lse = q, torch.zeros(1, 1, 130)
    results = []
    for timing in (AT_ONCE, LATE, Timing(is_late=True, seed=2)):
        if kind == "fp8":
            results.append(fp8_forward_on_numpy(fp8, parts, 0.125, timing))
        elif "backward" in kind:
            # Of one key tile, since dQ is summed over them in the order in which they come.
            inputs = (rounded, q, k[:, :128], v[:, :128])
            results.append(backward_on_numpy(backward, inputs, rounded, lse.float(), 0.125, timing))
        else:
            results.append(forward_on_numpy(forward, q, k, v, 0.125, 1, timing))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("instruction", ["wgmma.wait_group", "fence.proxy.async"])
def test_a_kernel_without_its_waits_or_fences_is_caught(instruction, monkeypatch) -> None:
    inputs = draw(torch.bfloat16, (70, 300), (1, 1), 64)
    config = select_forward_config("bfloat16", 64, 64, False, 300)
    without = "\n".join(line for line in ptx_of(config).splitlines() if instruction not in line)
    monkeypatch.setattr(on_numpy, "program_of", lambda config: parse(without))
    with pytest.raises(AssertionError):
        check_forward(config, inputs)


def test_a_missing_fence_is_found() -> None:
    cta = Cta({}, {}, (0, 0, 0), (1, 1, 1))
    cta.unfenced.write(0, np.array([16]), 1)
    with pytest.raises(AssertionError, match="without a fence"):
        cta.read_async(np.arange(32))
    assert cta.read_async(np.arange(16)).shape == (16,)
    cta.unfenced.write(1, np.array([16, 17]), 1)
    cta.unfenced.fence(0)
    with pytest.raises(AssertionError, match="without a fence"):
        cta.read_async(np.arange(32))
    cta.unfenced.fence(1)
    assert cta.read_async(np.arange(32)).shape == (32,)


def test_products_are_made_when_they_are_waited_for() -> None:
    done: list[int] = []
    groups = Groups(is_late=True)
    for i in range(3):
        groups.start(lambda i=i: done.append(i))
        groups.commit()
    groups.wait(1)
    assert done == [0, 1]
    groups.wait(0)
    assert done == [0, 1, 2]
