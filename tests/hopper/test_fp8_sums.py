"""The model of FP8 WGMMA's sums, against fractions and against whole scores."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.hopper.fp8_errors import LSE_ROUNDING
from tests.hopper.fp8_sums import allowed_lse_error, wgmma_product


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(torch.float8_e4m3fn)


def power_of_two(x: Fraction) -> Fraction:
    """The largest power of two that is at most x."""
    power = Fraction(1)
    while power > x:
        power /= 2
    while 2 * power <= x:
        power *= 2
    return power


def one_by_one(q: list[float], k: list[float]) -> Fraction:
    """``wgmma_product`` of two rows in exact arithmetic."""
    total = Fraction(0)
    for start in range(0, len(q), 32):
        pairs = [
            (Fraction(a), Fraction(b)) for a, b in zip(q[start:][:32], k[start:][:32], strict=True) if a * b
        ]
        powers = [power_of_two(abs(a)) * power_of_two(abs(b)) for a, b in pairs]
        powers += [power_of_two(abs(total))] if total else []
        total = truncated(truncated_sum([a * b for a, b in pairs] + [total], max(powers) / 2**13))
    return total


def truncated_sum(terms: list[Fraction], unit: Fraction) -> Fraction:
    return unit * sum(int(term / unit) for term in terms)


def truncated(x: Fraction) -> Fraction:
    """To 13 bits below the leading one."""
    return truncated_sum([x], power_of_two(abs(x)) / 2**13) if x else x


def test_products_are_truncated_as_one_by_one() -> None:
    q, k = e4m3(5, 80), e4m3(7, 80)
    result = wgmma_product(q, k)
    for i, row in enumerate(q.tolist()):
        for j, column in enumerate(k.tolist()):
            assert Fraction(result[i, j].item()) == one_by_one(row, column)


def test_what_lies_below_the_unit_is_lost() -> None:
    q, k = torch.zeros(1, 64), torch.ones(1, 64)
    q[0, 0], q[0, 1], q[0, 32] = 64.0, 2.0**-7, -(2.0**-8)
    assert wgmma_product(q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)).item() == 64 + 2.0**-7
    assert wgmma_product(torch.zeros(1, 32), k[:, :32]).item() == 0


def test_a_sum_that_has_outgrown_its_terms_loses_bits_too() -> None:
    """33 terms of 4 + 2^-9 or so: each has a unit of 2^-11, and their sum, 2^7, one of 2^-6."""
    q, k = torch.full((1, 32), 4.0), torch.ones(1, 32)
    q[0, 0] = 0.0625
    assert wgmma_product(q, k).item() == 124.0625
    q[0, 0] = 4.0625
    assert wgmma_product(q, k).item() == 128.0625
    q[0, 0] = 4.0 + 2.0**-7
    assert wgmma_product(q, k).item() == 128.0 and wgmma_product(-q, k).item() == -128.0


@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_stays_within_what_is_allowed(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 150, heads, 128, generator=generator).half() for heads in (4, 2, 2))
    c = Fp8Quantization(rotate=False, block_q=64, block_k=64)
    parts = quantize_qkv(q.abs() + 0.25, k.abs() + 0.25, v, quantization=c)
    allowed = allowed_lse_error(parts, 0.2)
    assert allowed.shape == (2, 4, 150)
    q32, k32 = parts.q.dequantize(), parts.k.dequantize()
    _, lse = attention_naive(q32, k32, v.float(), causal=causal, softmax_scale=0.2)
    visible = torch.ones(150, 150, dtype=torch.bool)
    scales = parts.q.scale.repeat_interleave(64, 2)[..., :150], parts.k.scale.repeat_interleave(64, 2)
    for head in range(4):
        product = wgmma_product(parts.q.data[1, :, head], parts.k.data[1, :, head // 2])
        scores = 0.2 * product * scales[0][1, head, :, None] * scales[1][1, head // 2, :150]
        scores = scores.masked_fill(~(visible.tril() if causal else visible), -torch.inf)
        error = (scores.double().logsumexp(-1) - lse[1, head]).abs()
        assert bool((error <= allowed[1, head] - LSE_ROUNDING + 1e-5).all()) and error.max() > 1e-3
