"""The mean of V on a GPU: what the kernel finds, and what FP8 attention makes of it by default."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from hopper.mean.config import MOST_LEFT_OF_SMALL, is_sampled
from hopper_attention import Fp8Quantization, flash_attn_fp8_func, quantize_qkv
from hopper_attention.launch.fp8 import EmulationLaunch
from hopper_attention.launch.quantize import mean_of_values
from hopper_attention.quantization_rules import restore_values
from hopper_attention.reference import attention_naive
from hopper_attention.value_mean_rules import mean_worth_subtracting

pytestmark = pytest.mark.gpu

OFFSETS = (0.0, 0.02, -0.3, 1.0, -4.0, 30.0, 0.0, 0.1)


def values(batch: int, keys: int, heads: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """N(m, 1), another m by the column."""
    generator = torch.Generator("cuda").manual_seed(keys)
    v = torch.randn(batch, keys, heads, columns, generator=generator, device="cuda")
    return (v + torch.tensor(OFFSETS, device="cuda").repeat(columns // len(OFFSETS))).to(dtype)


def check(v: Tensor) -> None:
    """The kernel's sums have another order, so that a mean may be rounded to the next step, or to the next number of
    e4m3 away from the first value, as far as that may be for so many keys."""
    found, twin = mean_of_values(v), mean_worth_subtracting(v)
    assert found.shape == twin.shape and bool(found.isfinite().all())
    difference = (found - twin).abs()
    spread = v.float().std(1).nan_to_num(1.0, 1.0)
    counted = v.shape[1] // 4 if is_sampled(v.shape[1]) else v.shape[1]
    assert bool((difference <= (0.08 + 2.5 * (MOST_LEFT_OF_SMALL / counted) ** 0.5) * spread + 1e-6).all())
    assert (difference > 1e-6 * twin.abs()).float().mean() < 0.01
    assert all(torch.equal(mean_of_values(v), found) for _ in range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "keys", "heads", "columns"),
    [
        (1, 16384, 16, 128), (4, 4097, 8, 64), (2, 1000, 3, 256), (1, 65536, 2, 128), (3, 33, 5, 80),
        (200, 96, 4, 16), (2, 1, 2, 64), (1, 5, 1, 192),
    ],
)  # fmt: skip
def test_kernel_finds_what_its_twin_does(
    batch: int, keys: int, heads: int, columns: int, dtype: torch.dtype
) -> None:
    check(values(batch, keys, heads, columns, dtype))


def test_any_strides_and_bad_values() -> None:
    v = values(2, 3000, 8, 128)
    check(v[:, ::3, 2:5, 16:96])
    check(v.transpose(1, 2).contiguous().transpose(1, 2))
    v[0, 5:9, 0], v[1, ::2, 1, 3], v[1, 70, 2] = math.nan, math.inf, 3e4
    found, twin = mean_of_values(v), mean_worth_subtracting(v)
    assert bool(found.isfinite().all()) and found[1, 1, 3] == 0
    assert (found - twin).abs().max() < 0.2


@pytest.mark.parametrize("keys", [1024, 8192, 65536])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("offset", [0.0, 0.1, 1.0, 4.0, "by column"])
def test_the_default_is_as_good_as_its_emulation(head_dim: int, keys: int, offset: float | str) -> None:
    generator = torch.Generator("cuda").manual_seed(keys)
    q, k, v = (
        torch.randn(1, rows, 2, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for rows in (128, keys, keys)
    )
    v = values(1, keys, 2, head_dim) if isinstance(offset, str) else v + offset
    exact, _ = attention_naive(q, k, v)
    out = flash_attn_fp8_func(q, k, v)
    like, _ = EmulationLaunch(False)(quantize_qkv(q, k, v), head_dim**-0.5, False)
    error, of_emulation = ((x.double() - exact).norm() for x in (out, like))
    assert error < 1.5 * of_emulation


@pytest.mark.parametrize("rotate_v", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_lose_a_mean_each(causal: bool, rotate_v: bool) -> None:
    lengths = (1500, 1, 0, 3000, 70, 4096)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    total = sum(lengths) + 50
    q, k, v = values(1, total, 4, 128)[0], values(1, total, 2, 128)[0], values(1, total, 2, 128)[0]
    c = Fp8Quantization(rotate_v=rotate_v)
    named = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 4096, "max_seqlen_k": 4096}
    out = flash_attn_fp8_func(q, k, v, causal=causal, quantization=c, **named)
    parts = quantize_qkv(q, k, v, quantization=c, **named)
    for number, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        if not length:
            assert not parts.mean_v[number].any()
            continue
        rows = slice(start, start + length)
        inputs = [x[None, rows] for x in (q, k, v)]
        alone = mean_of_values(inputs[2])
        torch.testing.assert_close(parts.mean_v[number], alone[0], rtol=0, atol=0.05)
        exact, _ = attention_naive(*inputs, causal=causal)
        dense = flash_attn_fp8_func(*inputs, causal=causal, quantization=c)
        errors = [(x.double() - exact).norm() for x in (out[None, rows], dense)]
        assert errors[0] < 1.2 * errors[1] + 1e-3 * exact.norm()
    assert not out[sum(lengths) :].any()


@pytest.mark.parametrize("keys", [512, 4096])
def test_calls_behind_each_other_do_not_mix_their_means(keys: int) -> None:
    """The quantizer starts before the kernel of the mean has ended."""
    q, k, v = (values(2, keys, 8, 128) for _ in range(3))
    several = [v + i for i in range(4)]
    expected = []
    for x in several:
        expected.append(flash_attn_fp8_func(q, k, x))
        torch.cuda.synchronize()
    found = [[flash_attn_fp8_func(q, k, x) for x in several] for _ in range(5)]
    for turn in found:
        assert all(torch.equal(a, b) for a, b in zip(turn, expected, strict=True))


def test_the_first_value_is_exact_and_the_vector_little() -> None:
    q, k, v = (torch.randn(1, 8192, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    parts = quantize_qkv(q, k, v)
    first = v[:, 0].float()
    # By chance one of 16000 columns has a mean; of few the first value is too large for so many keys.
    is_little = parts.mean_v.abs() <= first.abs() / 16
    assert is_little.float().mean() > 0.99
    values = restore_values(parts.v.row_major().dequantize(), parts, causal=False)
    assert ((values[:, 0] - first).abs() <= 1e-6).float().mean() > 0.95
