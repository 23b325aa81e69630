"""torch.set_default_dtype and torch.set_default_device, as programs that load a model set them, change no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    Fp8Quantization,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize_qkv,
)

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 40, heads, 32, generator=GENERATOR).bfloat16() for heads in (4, 2, 2))
PACKED = [x.flatten(0, 1) for x in (Q, K, V)]
CODES = [x.to(torch.float8_e4m3fn) for x in (Q, K, V)]
STARTS = torch.tensor([0, 30, 80], dtype=torch.int32)
BOUNDS = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 50, "max_seqlen_k": 50}
LENGTHS = torch.tensor([7, 30], dtype=torch.int32)
ALL = Fp8Quantization(smooth_k=True, rotate_v=True, granularity="head")
LSE = {"return_attn_probs": True}


def gradients(attend: Callable[..., Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    return list(torch.autograd.grad(attend(*leaves), leaves, Q))


def quantized() -> list[Tensor]:
    parts = quantize_qkv(Q, K, V, quantization=ALL)
    out = flash_attn_quantized_func(parts)
    return [parts.q.scale, parts.k.scale, parts.v.scale, parts.shift, parts.mean_v, out]


CALLS: dict[str, Callable[[], Any]] = {
    "16 bits": lambda: flash_attn_func(Q, K, V, causal=True, softcap=9.0, **LSE),
    "functions": lambda: flash_attn_func(
        Q, K, V, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j), mask_mod=lambda b, h, i, j: i >= j
    ),
    "gradients": lambda: gradients(lambda q, k, v: flash_attn_func(q, k, v, causal=True)),
    "varlen": lambda: flash_attn_varlen_func(*PACKED, **BOUNDS, **LSE),
    "e4m3": lambda: flash_attn_func(*CODES, causal=True, **LSE),
    "e4m3 varlen": lambda: flash_attn_varlen_func(*CODES_PACKED, **BOUNDS),
    "FP8": lambda: flash_attn_fp8_func(Q, K, V, causal=True, **LSE),
    "FP8 of all options": lambda: flash_attn_fp8_func(Q, K, V, quantization=ALL),
    "FP8 varlen": lambda: flash_attn_fp8_func(*PACKED, **BOUNDS),
    "FP8 in two": quantized,
    "FP8 gradients": lambda: gradients(lambda q, k, v: flash_attn_fp8_func(q, k, v, causal=True)),
    "cache": lambda: flash_attn_with_kvcache(Q[:, :1], K, V, cache_seqlens=LENGTHS),
    "cache of e4m3": lambda: flash_attn_with_kvcache(Q[:, :1], *CODES[1:], cache_seqlens=LENGTHS),
    "rotated cache": lambda: flash_attn_with_kvcache(
        Q[:, :1], K.clone(), V.clone(), K[:, 1:2], V[:, 1:2], cache_seqlens=LENGTHS, hadamard=True
    ),
}
CODES_PACKED = [x.flatten(0, 1) for x in CODES]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("call", CALLS)
def test_a_default_of_torch_changes_no_result(call: str, setting: str) -> None:
    with SETTINGS[setting]():
        found = tensors(CALLS[call]())
    for x, expected in zip(found, tensors(CALLS[call]()), strict=True):
        assert (x.dtype, x.device) == (expected.dtype, expected.device)
        assert torch.equal(x, expected)
