"""Scores in float16 of any codes: rows of Q that the kernel lowers first, on simulated machine code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper.config import THREE_CONSUMERS, TWO_CONSUMERS, validate_forward_config
from hopper.forward.fp8 import precision
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.lowered_queries import LARGEST_CODE, LARGEST_PRODUCT
from hopper.forward.fp8.softmax.any_codes import HalfScoresOfAnyCodes
from hopper.forward.fp8.tilings import scores_fit_half, select_fp8_forward_config
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper import on_numpy
from tests.hopper.fp8_errors import lse_rounding
from tests.hopper.hopper_machine import parse
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_lagging_softmax import LATE, dequantized, relative
from tests.ptx import compile_ptx

E4M3 = torch.float8_e4m3fn
LARGEST, SMALLEST = 448.0, 2.0**-9

ZERO, OPPOSED, TINY, LONE, WITH_NAN = range(5)
"""Rows of Q that are not like the others."""


def config_of(head_dim: int, causal: bool) -> Fp8ForwardConfig:
    config = select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", 16384, without_lse=True)
    assert config.softmax is Softmax.HALF_SCORES and config.lowers_queries
    return config


def parts_of(head_dim: int, seqlen_q: int, seqlen_k: int) -> QuantizedQKV:
    """A scale for each head, so that codes reach 448, and some rows of Q beyond what a quantizer makes."""
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator) for n in (seqlen_q, seqlen_k, seqlen_k))
    quantization = Fp8Quantization(rotate=False, granularity="head", smooth_v=False)
    parts = quantize_qkv(*(x.bfloat16() for x in (q, k, v)), quantization=quantization)
    codes, keys = (LARGEST / x.largest * x.data.float() for x in (parts.q, parts.k))
    assert codes.abs().max() == keys.abs().max() == LARGEST
    codes[:, ZERO] = 0.0
    keys[:, 7] = LARGEST * torch.sign(torch.randn(head_dim, generator=generator))
    codes[:, OPPOSED] = -keys[:, 7]
    codes[:, TINY] = SMALLEST * torch.sign(codes[:, TINY])
    codes[:, LONE] = 2.0 * torch.sign(codes[:, LONE])
    codes[:, LONE, :, 3] = LARGEST
    q, k = (
        replace(x, data=data.to(E4M3), scale=x.scale * (x.largest / LARGEST), largest=LARGEST)
        for x, data in ((parts.q, codes), (parts.k, keys))
    )
    return replace(parts, q=q, k=k)


def lowered(parts: QuantizedQKV) -> QuantizedQKV:
    """With rows of Q lowered as the kernel is to do it, and a scale for each that undoes it."""
    q = parts.q.data.double()
    most = q.norm(dim=-1) * LARGEST_CODE * math.sqrt(q.shape[3]) / LARGEST_PRODUCT
    halvings = torch.where(most >= 1, most.log2().floor() + 1, 0.0)
    data = torch.ldexp(q.float(), -halvings[..., None].int()).to(E4M3)
    scale = parts.q.scale.expand(1, 1, q.shape[1]) * halvings.float().exp2().transpose(1, 2)
    return replace(parts, q=replace(parts.q, data=data, scale=scale.contiguous(), block=1))


def run_unlowered(
    monkeypatch, config: Fp8ForwardConfig, parts: QuantizedQKV, softmax_scale: float, **options
):
    """The kernel that lowers no query, with the softmax of the one that does."""
    plain = replace(config, lowers_queries=False)
    validate_forward_config(plain)
    with monkeypatch.context() as patch:
        patch.setitem(precision.SOFTMAXES, Softmax.HALF_SCORES, HalfScoresOfAnyCodes)
        program = parse(compile_ptx(plain))
        patch.setattr(on_numpy, "program_of", lambda _: program)
        return fp8_forward_on_numpy(plain, parts, softmax_scale, LATE, **options)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, False)])
def test_scores_of_codes_up_to_448(monkeypatch, head_dim: int, causal: bool) -> None:
    """The bits are those of rows that were lowered before; no score is lost, though products reach 448^2 head_dim."""
    config = config_of(head_dim, causal)
    parts = parts_of(head_dim, config.tile_m + 9, config.tile_n + 40)
    assert not scores_fit_half(parts.q.largest, parts.k.largest, head_dim)
    out, lse = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    before = lowered(parts)
    products = before.q.data[0, :, 0].double() @ parts.k.data[0, :, 0].double().T
    assert 28672.0 < products.abs().max() < LARGEST_PRODUCT * 1.01
    expected = run_unlowered(monkeypatch, config, before, head_dim**-0.5)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    exact, exact_lse = attention_naive(*dequantized(parts), causal=causal)
    assert_near(config, out, lse, exact, exact_lse)


def assert_near(config: Fp8ForwardConfig, out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor) -> None:
    """The LSE, which nobody gets, tells whether the sums are right."""
    rows = [row for row in range(out.shape[1]) if row != OPPOSED]
    assert relative(out[:, rows], exact[:, rows]) < 0.04
    assert relative(out[:, OPPOSED], exact[:, OPPOSED]) < 0.1
    assert ((lse - exact_lse).abs() <= lse_rounding(config, exact_lse)).all()


@pytest.mark.parametrize(
    ("head_dim", "causal", "keys", "seqlens"),
    [(128, True, 1024, (200, 140)), (256, False, 1025, (130, 140)), (256, True, 1024, (130, 140))],
)
def test_v_in_rows(head_dim: int, causal: bool, keys: int, seqlens: tuple[int, int]) -> None:
    """To the bits of a V that comes transposed, also where O of a tile lies in the place of the next one's rows."""
    config = select_fp8_forward_config(
        head_dim, head_dim, causal, "bfloat16", keys, v_rows=True, without_lse=True
    )
    assert config.v_rows and config.o_shares_rows == (head_dim == 256 and not causal) and config.tile_n == 128
    parts = parts_of(head_dim, *seqlens)
    found = fp8_forward_on_numpy(config, parts, head_dim**-0.5, LATE)
    registers = TWO_CONSUMERS if config.consumers == 2 else THREE_CONSUMERS
    before = replace(config, v_rows=False, registers=registers)
    expected = fp8_forward_on_numpy(before, parts, head_dim**-0.5, LATE)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_window(monkeypatch) -> None:
    """The first scores of a tile are those of another block there, and masked on both sides."""
    config = select_fp8_forward_config(64, 64, False, "bfloat16", 16384, window=True, without_lse=True)
    assert config.window and config.lowers_queries
    parts = parts_of(64, 200, 500)
    found = fp8_forward_on_numpy(config, parts, 0.125, LATE, sides=(150, 60))
    expected = run_unlowered(monkeypatch, config, lowered(parts), 0.125, sides=(150, 60))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    exact, exact_lse = attention_naive(*dequantized(parts), window_left=150, window_right=60)
    assert_near(config, *found, exact, exact_lse)


def test_a_code_that_is_nan() -> None:
    """Reaches its row and no other."""
    config = config_of(64, False)
    parts = parts_of(64, 20, 70)
    codes = parts.q.data.float()
    codes[:, WITH_NAN, :, 40] = math.nan
    out, lse = fp8_forward_on_numpy(
        config, replace(parts, q=replace(parts.q, data=codes.to(E4M3))), 0.125, LATE
    )
    others = [row for row in range(20) if row != WITH_NAN]
    expected = fp8_forward_on_numpy(config, parts, 0.125, LATE)
    assert out[:, WITH_NAN].isnan().all() and lse[..., WITH_NAN].isnan().all()
    assert torch.equal(out[:, others], expected[0][:, others])
    assert torch.equal(lse[..., others], expected[1][..., others])


def test_only_scores_in_float16_ask_for_it() -> None:
    config = select_fp8_forward_config(128, 128, False, "bfloat16", 4096, half_scores=True)
    assert config.softmax is Softmax.HALF_SCORES and not config.lowers_queries
    lagging = replace(config, softmax=Softmax.LAGGING, lowers_queries=True)
    with pytest.raises(ValueError, match="lowers_queries is True, allowed with softmax 'lagging': False"):
        validate_forward_config(lagging)
