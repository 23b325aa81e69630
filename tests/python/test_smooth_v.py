"""Smooth V: a mean of V is subtracted before it is quantized, and added to the output of rows that see a key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper.mean.config import LOG_RUNS, is_sampled
from hopper.quantize.config import CARRY_KEYS, shipped_quantize_configs
from hopper_attention import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.quantization import Fp8Quantization, from_descales, quantize_qkv, restore_values
from hopper_attention.quantization_rules import round_values, to_e4m3
from hopper_attention.reference import attention_naive, attention_tiled_fp8
from hopper_attention.value_mean_rules import mean_worth_subtracting, robust_mean_of_keys

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
    assert Fp8Quantization().smooth_v is True
    assert all(config.smooth_v for config in shipped_quantize_configs())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parts_hold_the_values_less_their_mean(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    parts = quantize_qkv(q, k, v, quantization=replace(SMOOTH, **options))
    assert parts.mean_v.dtype == torch.float32 and torch.equal(parts.mean_v, mean_worth_subtracting(v))
    centred = parts.v.dequantize()
    # What spares the first value is off the mean by up to 1/16 of the distance of that value from it. And where the
    # keys are not a multiple of the segments, a little is left.
    distance = v[:, 0].float() - v.float().mean(1)
    assert rms(v.float().mean(1) - parts.mean_v) < rms(distance) / 16 + 0.02
    assert rms(centred.mean(1)) < 0.05
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
    """With one key the values are their mean, and exact; else the sum is rounded once, if no rotation is undone."""
    c = replace(SMOOTH, rotate_v=rotate_v)
    q, k, v = qkv((5, 1))
    out = flash_attn_fp8_func(q, k, v, quantization=c)
    assert torch.equal(out, v.repeat_interleave(2, 2).expand_as(out))
    parts = quantize_qkv(*qkv(), quantization=SMOOTH)
    rows, _ = attention_tiled_fp8(parts, out_dtype=torch.float32)
    expected = (rows + parts.mean_v.repeat_interleave(2, 1).unsqueeze(1)).bfloat16()
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
def test_bad_values_reach_the_queries_that_see_them(bad: float) -> None:
    """In their column of their head; no other query, although the mean is one of all keys."""
    q, k, v = qkv((113, 110))
    clean = flash_attn_fp8_func(q, k, v, causal=True, quantization=SMOOTH)
    v[1, 70, 0, 5] = bad
    out = flash_attn_fp8_func(q, k, v, causal=True, quantization=SMOOTH)
    spoilt = torch.zeros(out.shape, dtype=torch.bool)
    spoilt[1, 73:, :2, 5] = True
    assert bool(out[spoilt].isnan().all()) and bool(out[~spoilt].isfinite().all())
    assert not out[1, :3].any()
    # The scale of a block and the mean of the column may change with the values that became NaN.
    assert rms((out - clean)[~spoilt]) < 0.02


# the mean


def spread(x: Tensor, mean: Tensor) -> Tensor:
    """How far the mean lies from that of x (b, s, hk, d), at most, in units of what x spreads."""
    return ((mean - x.float().mean(1)).abs() / x.float().std()).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seqlen", [1, 2, 3, 30, 31, 32, 62, 1023, 2047, 9001])
def test_the_robust_mean_is_near_the_mean(seqlen: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, seqlen, 3, 16, generator=torch.Generator().manual_seed(seqlen)).add(4).to(dtype)
    mean = robust_mean_of_keys(x)
    assert mean.shape == (2, 3, 16) and mean.dtype == torch.float32 and mean.is_contiguous()
    if seqlen == 1:
        assert torch.equal(mean, x[:, 0].float())
    else:
        # A sample misses the mean by chance, and what is left out at the end is less than a segment.
        allowed = 6 / (seqlen >> LOG_RUNS) ** 0.5 if is_sampled(seqlen) else 6 * math.sqrt(31) / seqlen
        assert spread(x, mean) < allowed
    assert torch.equal(mean, robust_mean_of_keys(x))
    # Any strides.
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(robust_mean_of_keys(heads_first), mean, rtol=0, atol=1e-5)


def test_the_robust_mean_of_skewed_values_is_no_median() -> None:
    """That of N(0, 1) above 0, else 0, is 0.4 and its median 0; sums of values without that would grow."""
    x = torch.randn(1, 16 * 1536, 2, 16, generator=torch.Generator().manual_seed(0)).relu()
    assert spread(x, robust_mean_of_keys(x)) < 1e-6


@pytest.mark.parametrize(
    "tokens", [[777], [0, 1, 2, 3], list(range(1000, 1500)), list(range(0, 4096, 600))], ids=len
)
@pytest.mark.parametrize("value", [1e4, -1e30, math.nan, math.inf, -math.inf])
def test_outliers_leave_the_robust_mean_where_it_was(tokens: list[int], value: float) -> None:
    """Single ones, those at the start of a sequence, many together, and some far from each other."""
    x = torch.randn(2, 4096, 2, 16, generator=torch.Generator().manual_seed(0)) + 1
    clean = robust_mean_of_keys(x)
    x[0, tokens] = value
    mean = robust_mean_of_keys(x)
    assert torch.equal(mean[1], clean[1])
    assert (mean - clean).abs().max() < 0.2


@pytest.mark.parametrize("seqlen", [3, 40, 64, 95, 128, 300])
@pytest.mark.parametrize("value", [1e4, math.nan])
def test_one_outlier_among_few_keys_leaves_the_robust_mean(seqlen: int, value: float) -> None:
    x = torch.randn(1, seqlen, 2, 16, generator=torch.Generator().manual_seed(0)) + 3
    mean = x.mean(1)
    x[:, seqlen // 2] = value
    assert (robust_mean_of_keys(x) - mean).abs().max() < 4 / seqlen**0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_robust_mean_is_finite(value: float) -> None:
    x = torch.ones(1, 100, 1, 16)
    x[:, ::2, :, :8] = value
    mean = robust_mean_of_keys(x)
    assert not mean[..., :8].any() and bool((mean[..., 8:] == 1).all())
    large = torch.full((1, 100, 1, 16), torch.finfo(torch.bfloat16).max).bfloat16()
    assert bool(robust_mean_of_keys(large).isfinite().all())


@pytest.mark.parametrize(("causal", "rotate_v"), [(False, False), (True, False), (True, True)])
def test_outlier_tokens_cost_the_others_nothing(causal: bool, rotate_v: bool) -> None:
    """Queries before a token of huge values keep the precision that block scales give them."""
    q, k, v = qkv((512, 512), offset=0.0)
    v[:, 400] *= 3e4
    oracle, _ = attention_naive(q, k, v, causal=causal)
    errors = []
    for smooth_v in (False, True):
        c = Fp8Quantization(smooth_v=smooth_v, rotate_v=rotate_v, block_k=64)
        out = flash_attn_fp8_func(q, k, v, causal=causal, quantization=c)
        rows = slice(0, 400) if causal else slice(None)
        errors.append(rms(out[:, rows].double() - oracle[:, rows]))
    assert errors[1] < 1.02 * errors[0]


@pytest.mark.parametrize("spread", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("keys", [300, 2048, 32768])
def test_the_mean_is_off_by_little(spread: float, keys: int) -> None:
    """By what spares the first value, and so little that sums of so many keys are hardly of one sign."""
    generator = torch.Generator().manual_seed(0)
    normal = spread * torch.randn(1, keys, 1, 96, generator=generator)
    counted = keys // 4 if 512 <= keys <= 16384 else keys
    for offset in (0.0, 0.06 * spread, spread, 5.0 * spread):
        v = (normal + offset).bfloat16()
        found, plain = mean_worth_subtracting(v), v.double().mean(1)
        chance, left = 4.0 * spread / counted**0.5, 1.15 * spread * (16.0 / counted) ** 0.5
        assert (found - plain).abs().max() <= left + chance + spread * 2.0**-6


def test_the_first_value_is_exact() -> None:
    """Whatever the mean, and where its own value is nearly nothing beside it: but for codes that are subnormal."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for offset, size in ((0.0, 1.0), (0.3, 0.01), (1.0, 0.01), (3.0, 0.0), (1.0, 1.0)):
            q, k, v = (torch.randn(2, 1000, 2, 64, generator=generator) for _ in range(3))
            v = v + offset
            v[:, 0] = size * torch.randn(2, 2, 64, generator=generator)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            parts = quantize_qkv(q, k, v, quantization=SMOOTH)
            first = restore_values(parts.v.row_major().dequantize(), parts, causal=False)[:, 0]
            error = (first - v[:, 0]).abs()
            exact = error <= 1e-6 * (1 + offset)
            codes, half_step = parts.v.row_major().data[:, 0].float().abs(), 2.0**-10 / 16
            subnormal = (codes <= 2.0**-6) & (error <= half_step)
            assert exact.float().mean() > 0.92 and (exact | subnormal).float().mean() > 0.97
            plain = quantize_qkv(q, k, v, quantization=replace(SMOOTH, smooth_v=False))
            rounded = plain.v.row_major().dequantize()[:, 0] - v[:, 0]
            assert rms(error) < 0.3 * rms(rounded) or size < 1.0


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_sink_leaves_the_output_its_value(offset: float) -> None:
    """A first key with nearly all of the attention and a small value, as language models have."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 64, generator=generator) for rows in (64, 4096, 4096))
    k[:, 0] = 40.0 * torch.nn.functional.normalize(q.mean(1), dim=-1)
    q = 0.3 * q + k[:, :1] / 4
    v = v + offset
    v[:, 0] *= 0.01
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact, _ = attention_naive(q.double(), k.double(), v.double())
    errors = [
        rms(flash_attn_fp8_func(q, k, v, quantization=replace(SMOOTH, smooth_v=smooth)).double() - exact)
        for smooth in (True, False)
    ]
    assert errors[0] < 0.02 * rms(exact) + 1e-4 and errors[0] < 1.05 * errors[1]


def test_errors_of_neighbouring_keys_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 64.0 * torch.randn(2, 200, 2, 96, generator=generator)
    plain, found = (rounded(x).float() - x for rounded in (to_e4m3, round_values))
    sums = [error[:, :192].unflatten(1, (-1, CARRY_KEYS)).sum(2) for error in (plain, found)]
    # Where keys have like weights, sums count; where one key has it all, its own error, which grows with the feedback.
    assert rms(sums[1]) < 0.7 * rms(sums[0])
    assert rms(found) < 1.01 * rms(plain)
    # A value is shifted by no more than 1/32 of itself.
    assert bool((found.abs() <= x.abs() * (1 / 16 + 1 / 32 + 2**-10) + 2.0**-10).all())
    firsts = x[:, ::CARRY_KEYS]
    assert torch.equal(round_values(x)[:, ::CARRY_KEYS].float(), to_e4m3(firsts.half().float()).float())


def test_a_column_with_nan_is_rounded_value_by_value() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 64.0 * torch.randn(1, 6 * CARRY_KEYS, 1, 8, generator=generator)
    broken = {(2, 3): math.nan, (3, 5): math.inf}  # (run, column)
    for (run, column), value in broken.items():
        x[0, run * CARRY_KEYS + 7, 0, column] = value
    by_itself = to_e4m3(x.half().float())
    found, finite, by_itself = (
        codes.float()[0, :, 0].unflatten(0, (6, CARRY_KEYS))
        for codes in (round_values(x), round_values(x.nan_to_num(posinf=1.0)), by_itself)
    )
    assert found.isnan().sum() == 2
    for run in range(6):
        for column in range(8):
            expected = (by_itself if (run, column) in broken else finite)[run, :, column]
            assert torch.equal(found[run, :, column].nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("value", [0.0, 3.1, -1e30])
def test_values_without_a_spread_are_their_mean(value: float) -> None:
    assert torch.equal(
        mean_worth_subtracting(torch.full((1, 300, 1, 4), value)), torch.full((1, 1, 4), value)
    )


def test_a_mean_of_bad_values_is_finite() -> None:
    v = torch.randn(1, 700, 1, 4, generator=torch.Generator().manual_seed(0)) + 2.0
    v[0, 5:, 0, 1], v[0, ::2, 0, 2], v[0, 9, 0, 3] = math.nan, math.inf, -math.inf
    found = mean_worth_subtracting(v)
    assert bool(found.isfinite().all()) and (found[..., [0, 3]] - 2.0).abs().max() < 0.2


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


def test_the_mean_can_be_traced() -> None:
    compiled = torch.compile(mean_worth_subtracting, fullgraph=True, backend="aot_eager")
    for seqlen in (1, 40, 1500):
        x = torch.randn(2, seqlen, 2, 16)
        assert torch.equal(compiled(x), mean_worth_subtracting(x))
    with FakeTensorMode():
        parts = quantize_qkv(
            *(torch.empty(2, 100, 2, 64, dtype=torch.bfloat16) for _ in range(3)), quantization=SMOOTH
        )
        assert parts.mean_v.shape == (2, 2, 64)


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


@pytest.mark.parametrize("offset", [0.5, 1.0, 3.0])
def test_a_first_token_that_most_attend_to_and_whose_value_is_nothing(offset: float) -> None:
    """As language models have it: the output is what little the others leave, and no error of the mean may cover it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (200, 1500, 1500))
    towards = torch.nn.functional.normalize(torch.ones(64), dim=0)
    q, v = q + 4.0 * towards, v + offset
    k[:, 0], v[:, 0] = 24.0 * towards, 0.0
    q, k, v = (x.bfloat16() for x in (q, k, v))
    oracle, _ = attention_naive(q, k, v)
    errors = []
    for smooth_v in (False, True):
        c = Fp8Quantization(smooth_v=smooth_v)
        errors.append(rms(flash_attn_fp8_func(q, k, v, quantization=c).double() - oracle))
    weight = torch.softmax(q[0, :, 0].double() @ k[0, :, 0].double().T / 8.0, -1)[:, 0].mean()
    assert 0.8 < weight < 0.98
    assert errors[1] < 1.1 * errors[0]


def test_a_first_value_that_is_little_beside_the_mean_but_not_beside_the_output() -> None:
    """Most of the attention, and a thirtieth of the mean: less the mean it would be rounded away."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (200, 1500, 1500))
    towards = torch.nn.functional.normalize(torch.ones(64), dim=0)
    q, v = q + 4.0 * towards, v + 0.3
    k[:, 0], v[:, 0] = 36.0 * towards, 0.01 * torch.randn(2, 64, generator=generator)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    oracle, _ = attention_naive(q, k, v)
    errors = [
        rms(flash_attn_fp8_func(q, k, v, quantization=Fp8Quantization(smooth_v=smooth)).double() - oracle)
        for smooth in (False, True)
    ]
    assert errors[1] < 1.1 * errors[0]
