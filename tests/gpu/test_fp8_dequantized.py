"""FP8 dequantized for the kernel without WGMMA, which a Hopper GPU runs if asked to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

LENGTHS = [(1, 1), (1, 239), (113, 203), (799, 3), (640, 640)]
QUANTIZATIONS = {
    "block": Fp8Quantization(),
    "odd blocks": Fp8Quantization(rotate=False, block_q=48, block_k=80),
    "head": Fp8Quantization(granularity="head"),
    "tensor": Fp8Quantization(granularity="tensor", rotate=False),
    "all options": Fp8Quantization(rotate_v=True, smooth_k=True, smooth_v=True),
}
"""Odd blocks are no tiles of the FP8 kernel."""


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def without_undoing(parts: QuantizedQKV) -> QuantizedQKV:
    """Parts whose attention is left as the kernel gives it: V rotated, K and V without their means."""
    return replace(
        parts,
        quantization=replace(parts.quantization, rotate_v=False),
        shift=torch.empty(0, device=parts.shift.device),
        mean_v=torch.empty(0, device=parts.mean_v.device),
    )


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (72, 40), (128, 128), (192, 128), (248, 256)])
def test_it_attends_to_the_dequantized_parts(
    draw, judge, head_dim: int, head_dim_v: int, dtype: torch.dtype, name: str
) -> None:
    failures = {}
    for seqlens in LENGTHS:
        x = draw(dtype, 2, seqlens, (4, 2), head_dim, head_dim_v)
        parts = without_undoing(quantize_qkv(x.q, x.k, x.v, quantization=QUANTIZATIONS[name]))
        q, k, v = (part.dequantize().to(dtype) for part in (parts.q, parts.k, parts.v))
        for part, rounded_once in zip((parts.q, parts.k, parts.v), (q, k, v), strict=True):
            assert torch.equal(part.dequantize(dtype), rounded_once)
        for causal in (False, True):
            out, lse = flash_attn_quantized_func(parts, None, causal, True, backend="ampere")
            wrong = judge(replace(x, q=q, k=k, v=v), out, lse, causal)
            if wrong:
                failures[seqlens, causal] = wrong
    assert failures == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_what_was_done_to_the_inputs_is_undone(draw, head_dim: int, causal: bool) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), head_dim)
    k = (x.k + 4 * torch.linspace(-1, 1, head_dim, device=x.k.device)).to(x.k.dtype)
    oracle, oracle_lse = attention_naive(x.q, k, x.v, causal=causal)
    for c in (
        Fp8Quantization(smooth_k=True),
        Fp8Quantization(smooth_v=True),
        Fp8Quantization(smooth_k=True, rotate_v=True, smooth_v=True, seed=5),
    ):
        out, lse = flash_attn_fp8_func(x.q, k, x.v, None, causal, True, quantization=c, backend="ampere")
        like, like_lse = flash_attn_fp8_func(
            x.q, k, x.v, None, causal, True, quantization=c, backend="reference"
        )
        assert relative(out, oracle) < 1.02 * relative(like, oracle)
        assert relative(out, like) < 0.05
        assert (lse - oracle_lse).abs().max() < 1.1 * (like_lse - oracle_lse).abs().max() + 0.02


def test_gradients_come_from_the_reference(draw) -> None:
    x = draw(torch.bfloat16, 1, (130, 200), (4, 2), 64)
    gradients = {}
    for backend in ("ampere", "reference"):
        inputs = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        out = flash_attn_fp8_func(*inputs, causal=True, backend=backend)
        gradients[backend] = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for ours, emulated in zip(gradients["ampere"], gradients["reference"], strict=True):
        assert relative(ours, emulated) < 0.05


def test_a_graph_of_it_can_be_captured(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    parts = quantize_qkv(x.q, x.k, x.v)
    expected = flash_attn_quantized_func(parts, causal=True, backend="ampere")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_quantized_func(parts, causal=True, backend="ampere")
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
