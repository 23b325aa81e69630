"""Smooth V: the mean of V is subtracted before it is quantized, and added to the output of rows that see a key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.quantize.config import shipped_quantize_configs
from hopper_attention import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.quantization import (
    Fp8Quantization,
    from_descales,
    mean_of_keys,
    quantize_qkv,
    restore_values,
)
from hopper_attention.reference import attention_naive, attention_tiled_fp8

SMOOTH = Fp8Quantization(smooth_v=True)
WITH_OFFSET = 1.0
OPTIONS = [
    {},
    {"rotate_v": True},
    {"rotate_v": True, "smooth_k": True, "seed": 5},
    {"rotate": False, "block_q": 64, "block_k": 64},
    {"granularity": "head"},
    {"granularity": "tensor", "rotate_v": True},
]


def qkv(
    seqlens: tuple[int, int] = (113, 203), offset: float = WITH_OFFSET, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads on two key/value heads; V is N(offset, 1), and wider than a power of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlens[0], 4, 64), (2, seqlens[1], 2, 64), (2, seqlens[1], 2, 48)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype), k.to(dtype), (v + offset).to(dtype)


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def test_the_default() -> None:
    """The one place that says what it is."""
    assert Fp8Quantization().smooth_v is False
    assert not any(config.smooth_v for config in shipped_quantize_configs())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parts_hold_the_values_less_their_mean(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    parts = quantize_qkv(q, k, v, quantization=replace(SMOOTH, **options))
    assert parts.mean_v.dtype == torch.float32 and torch.equal(parts.mean_v, mean_of_keys(v))
    centred = parts.v.dequantize()
    assert rms(centred.mean(1)) < 5e-3
    values = restore_values(centred.clone(), parts, causal=False)
    # Values as large as 4 would cost 2^-4 of themselves each; these are N(0, 1).
    assert rms(values.double() - v.double()) < 0.03
    plain = quantize_qkv(q, k, v, quantization=replace(SMOOTH, smooth_v=False, **options))
    assert plain.mean_v.numel() == 0
    for name in ("q", "k"):
        ours, other = getattr(parts, name), getattr(plain, name)
        assert torch.equal(ours.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(ours.scale, other.scale)
    assert torch.equal(parts.shift, plain.shift)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_with_an_offset_lose_less(options: dict[str, Any], causal: bool) -> None:
    q, k, v = qkv()
    oracle, _ = attention_naive(q, k, v, causal=causal)
    errors, lses = {}, []
    for smooth_v in (False, True):
        c = Fp8Quantization(**options, smooth_v=smooth_v)
        out, lse = flash_attn_fp8_func(q, k, v, None, causal, True, quantization=c)
        errors[smooth_v] = rms(out.double() - oracle)
        lses.append(lse)
    assert errors[True] < 0.9 * errors[False] and errors[True] < 0.01
    assert torch.equal(*lses)


@pytest.mark.parametrize("rotate_v", [False, True])
def test_what_is_smoothed_comes_back_as_the_emulation_and_the_mean(rotate_v: bool) -> None:
    """With one key the values are their mean, and exact; else the sum is rounded once."""
    c = replace(SMOOTH, rotate_v=rotate_v)
    q, k, v = qkv((5, 1))
    out = flash_attn_fp8_func(q, k, v, quantization=c)
    assert torch.equal(out, v.repeat_interleave(2, 2).expand_as(out))
    parts = quantize_qkv(*qkv(), quantization=SMOOTH)
    rows, _ = attention_tiled_fp8(parts)
    expected = (rows.float() + parts.mean_v.repeat_interleave(2, 1).unsqueeze(1)).bfloat16()
    assert torch.equal(flash_attn_quantized_func(parts), expected)


@pytest.mark.parametrize("rotate_v", [False, True])
def test_rows_without_keys_stay_empty(rotate_v: bool) -> None:
    q, k, v = qkv((113, 10))
    c = replace(SMOOTH, rotate_v=rotate_v)
    out, lse = flash_attn_fp8_func(q, k, v, None, True, True, quantization=c)
    assert not out[:, :103].any() and bool((lse[:, :, :103] == -torch.inf).all())
    oracle, _ = attention_naive(q, k, v, causal=True)
    assert rms(out[:, 103:].double() - oracle[:, 103:]) < 0.05 * rms(oracle[:, 103:])
    # The first row that sees a key sees one only.
    assert rms(out[:, 103].double() - v[:, 0].repeat_interleave(2, 1)) < 0.08
    for causal in (False, True):
        parts = quantize_qkv(q, k[:, :0], v[:, :0], quantization=c)
        assert parts.mean_v.numel() == 0 and not flash_attn_quantized_func(parts, causal=causal).any()
    assert flash_attn_fp8_func(q[:, :0], k, v, quantization=c).shape == (2, 0, 4, 48)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_spoil_their_column_of_their_head(bad: float) -> None:
    q, k, v = qkv((113, 110))
    clean = flash_attn_fp8_func(q, k, v, causal=True, quantization=SMOOTH)
    v[1, 70, 0, 5] = bad
    out = flash_attn_fp8_func(q, k, v, causal=True, quantization=SMOOTH)
    spoilt = torch.zeros(out.shape, dtype=torch.bool)
    spoilt[1, 3:, :2, 5] = True
    assert bool(out[spoilt].isnan().all()) and bool(out[~spoilt].isfinite().all())
    assert not out[1, :3].any()
    # The scale of a block may change with the values that became NaN.
    assert rms((out - clean)[~spoilt]) < 0.02


def test_the_gradient_is_that_of_the_values_with_their_mean() -> None:
    for rotate_v in (False, True):
        c = replace(SMOOTH, rotate_v=rotate_v)
        inputs = [x.requires_grad_() for x in qkv(offset=4.0)]
        out = flash_attn_fp8_func(*inputs, causal=True, quantization=c)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        ours = torch.autograd.grad(out, inputs, dout)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(attention_naive(*exact, causal=True)[0], exact, dout.double())
        for gradient, e in zip(ours, expected, strict=True):
            assert (gradient.double() - e).norm() < 0.07 * e.norm()


def test_empty_problems_have_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in qkv((5, 0)))
    out = flash_attn_fp8_func(q, k, v, quantization=SMOOTH)
    out.sum().backward()
    assert not out.any() and v.grad.shape == v.shape and not q.grad.any()


def test_compiled_and_by_the_operator_it_is_the_same() -> None:
    q, k, v = qkv()
    c = replace(SMOOTH, rotate_v=True)
    expected = flash_attn_fp8_func(q, k, v, causal=True, quantization=c)

    def attend(*x: Tensor) -> Tensor:
        return flash_attn_fp8_func(*x, causal=True, quantization=c)

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), expected)
    q.requires_grad_()
    assert torch.equal(attend(q, k, v), expected)
    gradient = torch.autograd.grad(attend(q, k, v).sum(), q)[0]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(q, k, v).sum(), q)[0], gradient)


def test_fp8_tensors_with_descales_have_no_mean() -> None:
    data = [x.to(torch.float8_e4m3fn) for x in qkv()]
    parts = from_descales(*data, None, None, None, torch.bfloat16)
    assert parts.mean_v.numel() == 0 and not parts.quantization.smooth_v


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="smooth_v is 'yes', allowed: True or False"):
        Fp8Quantization(smooth_v="yes")  # type: ignore[arg-type]  # wrong on purpose
    parts = quantize_qkv(*qkv(), quantization=SMOOTH)
    for mean, error, message in (
        (parts.mean_v.half(), TypeError, "mean_v has dtype torch.float16, allowed: torch.float32"),
        (
            parts.mean_v[:, :1],
            ValueError,
            r"mean_v has shape \(2, 1, 48\), allowed: no elements or .* = \(2, 2, 48\)",
        ),
        (parts.mean_v.to("meta"), ValueError, "mean_v is on meta, allowed: the device of q, cpu"),
    ):
        with pytest.raises(error, match=message):
            replace(parts, mean_v=mean)
