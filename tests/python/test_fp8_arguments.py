"""Arguments of the FP8 functions: what reaches the kernel, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper_attention import (
    Fp8Quantization,
    compile_cache,
    explain_fp8,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_quantized_func,
    quantize_qkv,
)
from hopper_attention.launch import fp8 as fp8_launch
from tests.python.fake_gpu import SMS, forget_launchers, pretend


def qkv(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (1, 33, 4, 64), (1, 70, 2, 64), (1, 70, 2, 64)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


class FakeKernel:
    """Notes the size of the grid, its last argument, and gives zeros."""

    def __init__(self) -> None:
        self.grids: list[int] = []

    def __call__(self, *arguments: Any) -> None:
        self.grids.append(arguments[-1])
        arguments[3].zero_()
        arguments[4].zero_()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    """A Hopper GPU by name, whose tensors are the CPU's and whose kernels are all this one."""
    fake = FakeKernel()
    pretend(monkeypatch, fp8_launch)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: fake)
    yield fake
    forget_launchers()


def test_sm_margin_shrinks_the_grid_of_the_fp8_kernel(kernel: FakeKernel) -> None:
    q, k, v = qkv(torch.float8_e4m3fn)
    calls: tuple[Callable[..., Any], ...] = (
        lambda margin: flash_attn_func(q, k, v, sm_margin=margin),
        lambda margin: flash_attn_kvpacked_func(q, torch.stack([k, v], 2), sm_margin=margin),
        lambda margin: flash_attn_qkvpacked_func(torch.stack([k] * 3, 2), sm_margin=margin),
    )
    for call in calls:
        for margin in (0, 12, 131, 0):
            call(margin)
            assert kernel.grids.pop() == SMS - margin
        with pytest.raises(ValueError, match="sm_margin is 132, allowed on this GPU: 0 to 131"):
            call(132)
        with pytest.raises(ValueError, match="sm_margin is -1, allowed: 0 or more"):
            call(-1)
    assert kernel.grids == []


ANY = qkv()
PARTS = quantize_qkv(*ANY)

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: flash_attn_fp8_func(*ANY, quantization="block"), TypeError, "quantization is 'block', allowed: an Fp8Q"),
    (lambda: flash_attn_fp8_func(*ANY, quantization=None), TypeError, "quantization is None, allowed: an Fp8Q"),
    (lambda: explain_fp8(*ANY, quantization="block"), TypeError, "quantization is 'block', allowed: an Fp8Q"),
    (lambda: explain_fp8(*ANY, causal="no"), TypeError, "causal is a str, 'no', allowed: True or False"),
    (lambda: quantize_qkv(*ANY, quantization="block"), TypeError, "quantization is 'block', allowed: an Fp8Q"),
    (lambda: quantize_qkv(ANY[0], [1], ANY[2]), TypeError, "k is a list, allowed: a torch.Tensor"),
    (lambda: flash_attn_quantized_func((PARTS.q, PARTS.k, PARTS.v)), TypeError, "parts is a tuple, allowed: a Q"),
    (lambda: flash_attn_quantized_func(None), TypeError, "parts is a NoneType, allowed: a QuantizedQKV"),
    (lambda: flash_attn_fp8_func(*ANY, causal="no"), TypeError, "causal is a str, 'no', allowed: True or False"),
    (lambda: flash_attn_quantized_func(PARTS, causal="no"), TypeError, "causal is a str, 'no', allowed: True or"),
    (lambda: flash_attn_fp8_func(*ANY, None, False, "no"), TypeError, "return_attn_probs is a str, 'no', allowed"),
    (lambda: flash_attn_quantized_func(PARTS, None, False, 3), ValueError, "return_attn_probs is 3, allowed: True"),
    (lambda: flash_attn_quantized_func(PARTS, 1e37), ValueError, "softmax_scale is 1e+37, allowed: 1e-37 to 1000"),
    (lambda: Fp8Quantization(seed="x"), TypeError, "seed is 'x', allowed: an int of 64 bits"),
    (lambda: Fp8Quantization(seed=1.5), TypeError, "seed is 1.5, allowed: an int of 64 bits"),
    (lambda: Fp8Quantization(seed=None), TypeError, "seed is None, allowed: an int of 64 bits"),
    (lambda: Fp8Quantization(seed=2**63), ValueError, f"seed is {2**63}, allowed: an int of 64 bits"),
    (lambda: Fp8Quantization(block_q=1.0), TypeError, "block_q is 1.0, allowed: 1 or more"),
    (lambda: Fp8Quantization(block_q=True), TypeError, "block_q is True, allowed: 1 or more"),
    (lambda: Fp8Quantization(block_q="tile"), TypeError, "block_q is 'tile', allowed: 1 or more"),
    (lambda: Fp8Quantization(block_k=None), TypeError, "block_k is None, allowed: 1 or more, or 'tile'"),
    (lambda: Fp8Quantization(block_k=[64]), TypeError, "block_k is [64], allowed: 1 or more, or 'tile'"),
    (lambda: Fp8Quantization(granularity=["block"]), ValueError, "granularity is ['block'], allowed: tensor, head"),
    (lambda: Fp8Quantization(rotate=1), TypeError, "rotate is 1, allowed: True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_bad_arguments_are_named(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_flags_may_be_numbers_and_numpys() -> None:
    expected = flash_attn_fp8_func(*ANY, causal=True)
    for yes in (1, np.True_):
        assert torch.equal(flash_attn_fp8_func(*ANY, causal=yes), expected)
        out, _ = flash_attn_fp8_func(*ANY, causal=yes, return_attn_probs=yes)
        assert torch.equal(out, expected)
    learned = ANY[0].clone().requires_grad_()
    assert torch.equal(flash_attn_fp8_func(learned, *ANY[1:], causal=1), expected)


def test_any_seed_of_64_bits_rotates() -> None:
    for seed in (-(2**63), 2**63 - 1):
        out = flash_attn_fp8_func(*ANY, quantization=Fp8Quantization(seed=seed))
        exact = flash_attn_func(*ANY)
        assert ((out - exact).norm() / exact.norm()).item() < 0.08
