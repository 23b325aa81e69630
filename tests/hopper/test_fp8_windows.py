"""Windows in the FP8 kernel, run from its PTX without a GPU, against float64 and the emulation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_kernels.window import NO_LIMIT
from hopper.config import Registers, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention.masks import UNLIMITED
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper.fp8_errors import COARSE_LSE_ROUNDING, allowed_ratio, emulate, score_rounding
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy

LATE = Timing(is_late=True, seed=1)
TILE, DIM = 64, 64


def config_of(causal: bool, softmax: Softmax) -> Fp8ForwardConfig:
    """One warpgroup, and blocks so narrow that small problems have some of every kind."""
    config = select_fp8_forward_config(DIM, DIM, causal, "bfloat16", 4 * TILE, TILE, window=True)
    small = {"tile_m": TILE, "ping_pong": False, "late_rescale": True, "registers": Registers(256, 24)}
    config = replace(config, **small, softmax=softmax, polynomial_pairs=3)
    validate_forward_config(config)
    return config


def quantized(
    seqlens: tuple[int, int], heads: tuple[int, int], head_dim: int, block_k: int, smooth_v: bool = False
) -> QuantizedQKV:
    generator = torch.Generator().manual_seed(0)
    (seqlen_q, seqlen_k), (heads_q, heads_kv) = seqlens, heads
    shapes = (seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    q, k, v = (torch.randn(1, *rows, head_dim, generator=generator).bfloat16() for rows in shapes)
    quantization = Fp8Quantization(rotate=False, block_k=block_k, smooth_v=smooth_v)
    return quantize_qkv(q, k, v + smooth_v, quantization=quantization)


def check(parts: QuantizedQKV, config: Fp8ForwardConfig, sides: tuple[int, int]) -> None:
    """Hold out to float64 as closely as the emulation comes to it, and rows without keys to nothing."""
    given = (*sides, NO_LIMIT) if config.chunk else sides
    out, lse = fp8_forward_on_numpy(config, parts, config.head_dim**-0.5, LATE, given)
    window = tuple(UNLIMITED if side == NO_LIMIT else side for side in sides)
    q, k, v = (x.dequantize() for x in (parts.q, parts.k, parts.v))
    if parts.mean_v.numel():
        v = v + parts.mean_v.unsqueeze(1)
    named = {"window_left": window[0], "window_right": window[1]}
    exact, exact_lse = attention_naive(q, k, v, causal=config.causal, **named)
    visible = exact_lse > -math.inf
    assert torch.equal(lse > -math.inf, visible)
    assert not out.transpose(1, 2)[~visible].any()
    rounding = score_rounding(config, config.head_dim)
    allowed = COARSE_LSE_ROUNDING + rounding * exact_lse[visible].abs()
    assert bool(((lse - exact_lse)[visible].abs() < allowed).all())
    errors = [
        (like.double() - exact).norm().item() for like, _ in emulate(parts, config.causal, True, (*window, 0))
    ]
    error = (out.double() - exact).norm().item()
    # What rounded scores do to P goes by their size, which is a few octaves here.
    least = 2e-4 + 4 * rounding
    assert error <= allowed_ratio(out, lagging=True) * max(errors) + least * exact.norm().item()


WINDOWS = [
    (False, (200, 330), (2, 1), (100, 70)),
    (False, (130, 330), (1, 1), (20, NO_LIMIT)),
    (False, (300, 70), (1, 1), (5, 0)),
    (True, (330, 330), (1, 1), (150, 0)),
    (True, (300, 170), (1, 1), (33, 0)),
    (True, (70, 400), (1, 1), (0, 0)),
]


OF_EACH_SOFTMAX = [
    *((Softmax.LAGGING, *window) for window in WINDOWS),
    *((Softmax.HALF_SCORES, *window) for window in WINDOWS if window[0]),
]


@pytest.mark.parametrize("softmax,causal,seqlens,heads,sides", OF_EACH_SOFTMAX)
def test_a_window(softmax: Softmax, causal: bool, seqlens, heads, sides: tuple[int, int]) -> None:
    parts = quantized(seqlens, heads, DIM, TILE, smooth_v=seqlens[0] == 300)
    # Scores in float16 with the kernel of test_a_chunk, and one chunk for all keys.
    config = replace(config_of(causal, softmax), chunk=softmax is Softmax.HALF_SCORES)
    check(parts, config, sides)


@pytest.mark.parametrize("sides", [(20, 30), (NO_LIMIT, 5)])
def test_a_window_with_an_exact_lse(sides: tuple[int, int]) -> None:
    config = select_fp8_forward_config(DIM, DIM, False, "bfloat16", 400, TILE, window=True, exact_lse=True)
    assert config.wide_codes and config.two_level
    check(quantized((100, 200), (1, 1), DIM, TILE), config, sides)


def test_three_warpgroups_walk_apart() -> None:
    """Each over the blocks of its own rows: some rows see no key, and one warpgroup has no query."""
    config = select_fp8_forward_config(DIM, DIM, True, "bfloat16", 16384, window=True, half_scores=True)
    config = replace(config, tile_n=TILE)
    assert config.walks_apart and config.softmax is Softmax.HALF_SCORES
    check(quantized((330, 90), (1, 1), DIM, TILE), config, (30, 0))


class WholeFirstBlock(Fp8ForwardConfig):
    """A config that works on all keys of a tile's first block."""

    @property
    def first_widths(self) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("tile_n,widths", [(192, (64, 128)), (128, (64,))])
def test_parts_of_a_first_block(tile_n: int, widths: tuple[int, ...]) -> None:
    """The warpgroups of the first tile see 64, 128 and 192 keys, and those behind it other parts; the bits are those of
    whole blocks."""
    config = select_fp8_forward_config(DIM, DIM, True, "bfloat16", 16384, window=True, half_scores=True)
    config = replace(config, tile_n=tile_n)
    assert config.first_widths == widths and config.softmax is Softmax.HALF_SCORES
    parts = quantized((300, 330), (1, 1), DIM, tile_n)
    check(parts, config, (150, 0))
    whole = WholeFirstBlock(**vars(config))
    results = (fp8_forward_on_numpy(each, parts, 0.125, LATE, (150, 0)) for each in (config, whole))
    for narrow, full in zip(*results, strict=True):
        assert torch.equal(narrow, full)


def test_a_tile_that_is_selected() -> None:
    """For V in rows, with tiles that ship. Windows with two levels are tested on a GPU."""
    parts = of_one_scale(quantized((200, 500), (1, 1), 128, 128))
    config = select_fp8_forward_config(128, 128, True, "bfloat16", 500, window=True, v_rows=True)
    check(parts, config, (150, 0))


def of_one_scale(parts: QuantizedQKV) -> QuantizedQKV:
    """The same codes with the first scale of each head, V in rows."""
    seqlen_q, seqlen_k = parts.q.shape[1], parts.k.shape[1]
    q, k, v = (
        replace(part, scale=part.scale[:, :, :1].contiguous(), block=seqlen)
        for part, seqlen in ((parts.q, seqlen_q), (parts.k, seqlen_k), (parts.v.row_major(), seqlen_k))
    )
    return replace(
        parts, q=q, k=k, v=v, quantization=replace(parts.quantization, granularity="head", block_k=128)
    )


def test_a_softmax_that_takes_every_maximum() -> None:
    check(quantized((300, 170), (1, 1), DIM, TILE, smooth_v=True), config_of(True, Softmax.EXACT), (33, 0))


def test_keys_outside_of_the_window_are_not_read() -> None:
    """NaN in blocks that no row of the tile sees, and in a scale of them."""
    config = config_of(False, Softmax.LAGGING)
    parts = quantized((64, 512), (1, 1), DIM, TILE)
    exact, _ = fp8_forward_on_numpy(config, parts, 0.125, LATE, (70, 0))
    k, v = parts.k.data.clone(), parts.v.row_major().data.clone()
    k[:, :256], v[:, :256] = math.nan, math.nan
    scale = parts.k.scale.clone()
    scale[..., :4] = math.nan
    poisoned = replace(parts, k=replace(parts.k, data=k, scale=scale), v=replace(parts.v.row_major(), data=v))
    out, _ = fp8_forward_on_numpy(config, poisoned, 0.125, LATE, (70, 0))
    assert not out.isnan().any() and torch.equal(out, exact)


def test_what_a_window_does_not_go_with() -> None:
    config = config_of(True, Softmax.LAGGING)
    with pytest.raises(ValueError, match=r"softcap is True, allowed for .* does not take its maximum"):
        validate_forward_config(replace(config, softcap=True))
    chosen = select_fp8_forward_config(128, 128, True, "bfloat16", 9000, 128, half_scores=True, window=True)
    assert chosen.window and chosen.softmax is Softmax.HALF_SCORES
    assert chosen.name.endswith("window_half_poly5")


def test_a_chunk() -> None:
    """Of 100 keys, under a causal mask and a left side."""
    config = replace(config_of(True, Softmax.HALF_SCORES), chunk=True)
    parts = quantized((200, 330), (1, 1), DIM, TILE)
    out, lse = fp8_forward_on_numpy(config, parts, 0.125, LATE, (60, NO_LIMIT, 100))
    q, k, v = (x.dequantize() for x in (parts.q, parts.k, parts.v))
    exact, exact_lse = attention_naive(q, k, v, causal=True, window_left=60, attention_chunk=100)
    assert bool(((lse - exact_lse).abs() < COARSE_LSE_ROUNDING + 0.002 * exact_lse.abs()).all())
    errors = [(x.double() - exact).norm() for x, _ in emulate(parts, True, True, (60, UNLIMITED, 100))]
    error, least = (out.double() - exact).norm(), 4e-3 * exact.norm()
    assert bool(error <= allowed_ratio(out, lagging=True) * max(errors) + least)
