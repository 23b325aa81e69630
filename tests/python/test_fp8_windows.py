"""Windows of FP8 attention on the host side: the emulation, gradients, and what the kernel is given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.window import NO_LIMIT
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper_attention import (
    Fp8Quantization,
    explain,
    explain_fp8,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    quantize_qkv,
)
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.quantized import default_block_k
from hopper_attention.reference import attention_naive
from hopper_attention.rotation import rotate_back
from tests.python.fp8_cases import Recorder, recorded, relative, sides

WINDOWS = [(40, 20), (0, 0), (30, -1), (-1, 7), (5, 0)]


def qkv(seqlens: tuple[int, int] = (113, 203), dtype: torch.dtype = torch.float16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlens[0], 4, 64), (2, seqlens[1], 2, 64), (2, seqlens[1], 2, 32)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("seqlens", [(113, 203), (203, 113)])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_emulation_in_a_window(window: tuple[int, int], seqlens: tuple[int, int]) -> None:
    q, k, v = qkv(seqlens)
    for causal, c in ((False, Fp8Quantization()), (True, Fp8Quantization(smooth_v=True, block_k=32))):
        exact, exact_lse = attention_naive(q, k, v, causal=causal, **sides(window))
        options: dict[str, Any] = {"quantization": c, "window_size": window}
        out, lse = flash_attn_fp8_func(q, k, v, None, causal, True, **options)
        visible = exact_lse > -math.inf
        assert torch.equal(lse > -math.inf, visible)
        assert not out.transpose(1, 2)[~visible].any()
        assert relative(out, exact) < 0.08 and (lse - exact_lse)[visible].abs().max() < 0.2
        parts = quantize_qkv(q, k, v, quantization=c)
        again = flash_attn_quantized_func(parts, causal=causal, window_size=list(window))
        assert relative(again, exact) < 0.08


def test_a_mean_of_v_goes_to_rows_with_keys_alone() -> None:
    q, k, v = qkv((203, 113))
    for c in (Fp8Quantization(smooth_v=True), Fp8Quantization(smooth_v=True, rotate_v=True)):
        out = flash_attn_fp8_func(q, k, v + 3, quantization=c, window_size=(9, 30))
        assert not out[:, : 203 - 113 - 30].any()
        exact, _ = attention_naive(q, k, v + 3, window_left=9, window_right=30)
        assert relative(out, exact) < 0.04


def test_a_window_that_hides_nothing_is_none() -> None:
    q, k, v = qkv()
    plain = flash_attn_fp8_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_fp8_func(q, k, v, window_size=(300, 0)), plain)
    assert torch.equal(flash_attn_fp8_func(q, k, v, causal=True, window_size=(None, 5)), plain)


def test_tensors_with_descales() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    descale = torch.full((2, 2), 0.5)
    out = flash_attn_func(q, k, v, v_descale=descale, window_size=(40, 20))
    exact, _ = attention_naive(*(x.float() for x in (q, k, v)), **sides((40, 20)))
    assert relative(out, 0.5 * exact) < 0.05


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_in_a_window(causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    c = Fp8Quantization(block_k=32)
    out = flash_attn_fp8_func(q, k, v, 0.1, causal, quantization=c, window_size=(50, 3))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    ours = torch.autograd.grad(out, (q, k, v), dout)
    parts = quantize_qkv(q, k, v, quantization=c)
    exact = [x.dequantize().double().requires_grad_() for x in (parts.q, parts.k, parts.v)]
    rows, _ = attention_naive(*exact, causal=causal, softmax_scale=0.1, **sides((50, 3)))
    expected = list(torch.autograd.grad(rows, exact, dout.double()))
    expected[:2] = [rotate_back(x, c.seed) for x in expected[:2]]
    for gradient, e, limit in zip(ours, expected, (0.03, 0.03, 0.01), strict=True):
        assert relative(gradient, e.double()) < limit


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    yield from recorded(monkeypatch, fp8_launch)


def test_the_kernel_is_given_the_sides(recorder: Recorder) -> None:
    parts = quantize_qkv(*qkv(), quantization=Fp8Quantization(block_k=128))
    for window in ((40, 20), (41, 22), (50, -1)):
        flash_attn_quantized_func(parts, window_size=window)
    flash_attn_quantized_func(parts)
    (config, plain), calls = dict.fromkeys(recorder.configs), recorder.calls
    assert isinstance(config, Fp8ForwardConfig) and config.window and not plain.window
    assert config.softmax is Softmax.EAGER and plain.softmax is Softmax.EAGER
    given = [(40, 20), (41, 22), (50, NO_LIMIT)]
    assert [call[-6:-1] for call in calls[:3]] == [(*sides, None, None, None) for sides in given]
    assert len(calls[3]) == len(calls[0]) - 5


def test_blocks_are_as_wide_as_the_tile_under_a_window() -> None:
    for head_dim in (64, 128, 256):
        for seqlen_k in (500, 2000, 9000):
            for causal in (False, True):
                meta = [torch.empty(1, seqlen_k, 2, head_dim, dtype=torch.half, device="meta")] * 3
                plan = explain_fp8(
                    *meta, causal=causal, window_size=(seqlen_k // 2, 0), device_capability=(9, 0)
                )
                config, block_k = plan.attention.config, plan.quantization.block_k
                assert isinstance(config, Fp8ForwardConfig) and config.window
                assert block_k == config.tile_n
                seen = seqlen_k // 2 + 1
                assert block_k == default_block_k(head_dim, head_dim, seen, causal=True)


def test_explain_says_what_a_window_leaves() -> None:
    q, k, v = qkv()
    text = "window: a query sees 40 of the keys before its own and 20 after it"
    assert text in str(explain_fp8(q, k, v, window_size=(40, 20)))
    e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    plan = explain(*e4m3, window_size=(40, 20), device_capability=(9, 0))
    assert plan.config.window and text in str(plan)


def test_what_is_refused() -> None:
    q, k, v = qkv()
    parts = quantize_qkv(q, k, v)
    for call in (
        lambda window: flash_attn_fp8_func(q, k, v, window_size=window),
        lambda window: flash_attn_quantized_func(parts, window_size=window),
        lambda window: explain_fp8(q, k, v, window_size=window),
    ):
        with pytest.raises(ValueError, match=r"window_size is \(-2, 0\), allowed: a pair"):
            call((-2, 0))
        with pytest.raises(TypeError, match="window_size is 5, allowed: a pair"):
            call(5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk(causal: bool) -> None:
    for seqlens in ((113, 203), (203, 113)):
        q, k, v = qkv(seqlens)
        named: dict[str, Any] = {"causal": causal, "attention_chunk": 50}
        exact, exact_lse = attention_naive(q, k, v, window_left=20, **named)
        c = Fp8Quantization(smooth_v=True)
        out, lse = flash_attn_fp8_func(
            q, k, v, window_size=(20, -1), return_attn_probs=True, quantization=c, **named
        )
        visible = exact_lse > -math.inf
        assert torch.equal(lse > -math.inf, visible) and not out.transpose(1, 2)[~visible].any()
        assert relative(out, exact) < 0.08
        again = flash_attn_quantized_func(quantize_qkv(q, k, v), window_size=(20, -1), **named)
        assert relative(again, exact) < 0.08
        e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        rows = flash_attn_func(*e4m3, window_size=(20, -1), **named)
        exact, _ = attention_naive(*(x.float() for x in e4m3), window_left=20, **named)
        assert relative(rows, exact) < 0.05


def test_the_kernel_is_given_the_chunk(recorder: Recorder) -> None:
    flash_attn_fp8_func(*qkv(), causal=True, attention_chunk=50)
    (config,), (call,) = recorder.configs, recorder.calls
    assert config.window and config.chunk and call[-6:-1] == (NO_LIMIT, NO_LIMIT, 50, None, None)
