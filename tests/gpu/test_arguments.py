"""Arguments at their limits and in FlashAttention-3's other spellings, on the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    explain,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from hopper_attention.checks import LARGEST_SCALE
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

HALF_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding."""

E4M3_HALF_STEP = 2.0**-4


def gpu_multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


# softmax_scale


@pytest.mark.parametrize("softmax_scale", [0.125, 370.0, 3e3, LARGEST_SCALE])
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_key_gives_its_value(
    draw, attend, head_dim: int, dtype: torch.dtype, softmax_scale: float
) -> None:
    """P of the only key is 2^r, where r is what rounding the scaled maximum took, and P is rounded as any other."""
    x = draw(dtype, 2, (300, 1), (4, 2), head_dim)
    out, lse = attend(x.q, x.k, x.v, softmax_scale, return_attn_probs=True)
    exact = x.v.double().repeat_interleave(2, 2).expand_as(out)
    # Of P and of the output; subnormal numbers of float16 are 2^-24 apart.
    assert ((out.double() - exact).abs() <= 2.01 * HALF_STEP[dtype] * exact.abs() + 2.0**-25).all()
    scores = (x.q.double() * x.k.double().repeat_interleave(2, 2)).sum(-1) * softmax_scale
    sizes = (x.q.double().norm(dim=-1) * x.k.double().norm(dim=-1).repeat_interleave(2, 2)) * softmax_scale
    assert ((lse.double() - scores.transpose(1, 2)).abs() <= 2e-6 * sizes.transpose(1, 2)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_one_key_has_exact_gradients(draw, attend, dtype: torch.dtype, causal: bool) -> None:
    x = draw(dtype, 9, (239, 1), (6, 2), 128)
    tensors = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attend(*tensors, causal=causal)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, tensors, dout)
    seen = dout[:, -1:] if causal else dout
    exact = seen.double().unflatten(2, (2, 3)).sum((1, 3)).unsqueeze(1)
    assert not dq.any() and not dk.any()
    assert (dv.double() - exact).abs().max() <= HALF_STEP[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_at_the_largest_scale_the_largest_score_takes_all(draw, attend, dtype: torch.dtype) -> None:
    x = draw(dtype, 1, (300, 700), (2, 2), 64)
    out = attend(x.q, x.k, x.v, LARGEST_SCALE)
    scores = x.q.double().transpose(1, 2) @ x.k.double().permute(0, 2, 3, 1)
    (first, second), winners = scores.topk(2, -1).values.unbind(-1), scores.argmax(-1)
    # Nearer scores are one to float32 and to the tensor cores.
    decided = first - second > 1e-3
    exact = x.v.double().transpose(1, 2).gather(2, winners.unsqueeze(-1).expand(-1, -1, -1, 64))
    got = out.double().transpose(1, 2)
    assert decided.float().mean() > 0.9 and bool(out.isfinite().all())
    assert ((got - exact).abs() <= 2.01 * HALF_STEP[dtype] * exact.abs() + 2.0**-25)[decided].all()


@pytest.mark.parametrize("softmax_scale", [370.0, LARGEST_SCALE])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_at_large_scales_stays_among_the_values(draw, head_dim: int, softmax_scale: float) -> None:
    x = draw(torch.bfloat16, 1, (300, 700), (2, 2), head_dim)
    e4m3 = [t.to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v)]
    for out in (flash_attn_func(*e4m3, softmax_scale), flash_attn_fp8_func(x.q, x.k, x.v, softmax_scale)):
        assert bool(out.isfinite().all())
        assert out.abs().max() <= (1 + 4 * E4M3_HALF_STEP) * x.v.abs().max()
        assert out.float().std() > 0.7


# sm_margin


def test_fp8_with_a_margin_gives_the_same(draw) -> None:
    x = draw(torch.bfloat16, 2, (1000, 1100), (4, 2), 128)
    e4m3 = [t.to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v)]
    expected = flash_attn_func(*e4m3, causal=True)
    multiprocessors = gpu_multiprocessors()
    for margin in (1, 100, multiprocessors - 1):
        assert torch.equal(flash_attn_func(*e4m3, causal=True, sm_margin=margin), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_margin_of_the_whole_gpu_is_refused_by_call_and_explain(draw, dtype: torch.dtype) -> None:
    x = draw(torch.bfloat16, 1, (128, 128), (2, 2), 64)
    tensors = [t.to(dtype) for t in (x.q, x.k, x.v)]
    multiprocessors = gpu_multiprocessors()
    for function in (flash_attn_func, explain):
        for margin in (multiprocessors, 100_000):
            message = f"sm_margin is {margin}, allowed on this GPU: 0 to {multiprocessors - 1}"
            with pytest.raises(ValueError, match=message):
                function(*tensors, sm_margin=margin)
        function(*tensors, sm_margin=multiprocessors - 1)


# other spellings


def test_windows_and_hints_that_change_nothing(draw, attend) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    full, causal = (attend(x.q, x.k, x.v, causal=flag) for flag in (False, True))
    for window in ((None, None), (516, 299), [10**6, 10**6], torch.tensor([-1, -1], device=x.q.device)):
        assert torch.equal(attend(x.q, x.k, x.v, window_size=window), full)
    for window in ((-1, 0), (516, 0), torch.tensor([-1, 0])):
        assert torch.equal(attend(x.q, x.k, x.v, window_size=window), causal)
    for hint in ({"num_splits": 0}, {"num_splits": 3}, {"pack_gqa": True}, {"attention_chunk": 517}):
        assert torch.equal(attend(x.q, x.k, x.v, **hint), full)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows_with_gaps_are_copied(draw, dtype: torch.dtype) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    dense = [t.to(dtype) for t in (x.q, x.k, x.v)]
    by_column = [t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for t in dense]
    assert explain(*by_column).copies != () and by_column[2].stride(3) == 517
    assert torch.equal(flash_attn_func(*by_column, causal=True), flash_attn_func(*dense, causal=True))


def test_gradients_of_rows_with_gaps(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    dense = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    by_column = [
        t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).requires_grad_() for t in (x.q, x.k, x.v)
    ]
    dout = torch.randn_like(x.q)
    gradients = []
    for tensors in (dense, by_column):
        out = flash_attn_func(*tensors, causal=True, deterministic=True)
        gradients.append(torch.autograd.grad(out, tensors, dout))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_e4m3_tensors_that_require_grad(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    e4m3 = [t.to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v)]
    learned = [t.clone().requires_grad_() for t in e4m3]
    out = flash_attn_func(*learned)
    assert torch.equal(out, flash_attn_func(*e4m3))
    with pytest.raises(NotImplementedError, match="have no gradient"):
        out.float().sum().backward()


# V wider than a kernel


@pytest.mark.parametrize("head_dims", [(64, 512), (64, 264), (128, 320), (256, 512)], ids=str)
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_wide_values(draw, check, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    failures = {}
    for seqlens in ((113, 203), (799, 3), (1, 239), (1023, 1024)):
        for causal in (False, True):
            wrong = check(draw(dtype, 2, seqlens, (6, 2), *head_dims), causal)
            if wrong:
                failures[seqlens, causal] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dims", [(64, 512), (128, 264)], ids=str)
def test_gradients_through_wide_values(draw, attend, head_dims: tuple[int, int]) -> None:
    x = draw(torch.bfloat16, 2, (301, 517), (4, 2), *head_dims)
    ours = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    exact = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = attend(*ours, causal=True, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    # Rows of the LSE that see no key are -inf in both; there are none here.
    gradients = torch.autograd.grad((out, lse), ours, (dout, dlse))
    expected_out, expected_lse = attention_naive(*exact, causal=True)
    expected = torch.autograd.grad((expected_out, expected_lse), exact, (dout.double(), dlse.double()))
    assert max(relative_error(g, e) for g, e in zip(gradients, expected, strict=True)) < 1.5e-2


def test_wide_e4m3_values_are_those_of_their_parts(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 64, 512)
    q, k, v = (t.to(torch.float8_e4m3fn) for t in (x.q, x.k, x.v))
    parts = [flash_attn_func(q, k, part, causal=True) for part in v.split(256, 3)]
    assert torch.equal(flash_attn_func(q, k, v, causal=True), torch.cat(parts, 3))


# autocast


@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_float32_inputs_under_autocast(draw, dtype: torch.dtype) -> None:
    x = draw(torch.float32, 2, (300, 517), (4, 2), 128)
    wide = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    narrow = [t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v)]
    dout = torch.randn_like(narrow[0])
    with torch.autocast("cuda", dtype):
        out = flash_attn_func(*wide, causal=True, deterministic=True)
        fp8 = flash_attn_fp8_func(*wide, causal=True)
        packed = flash_attn_qkvpacked_func(torch.stack([wide[1]] * 3, 2))
    expected = flash_attn_func(*narrow, causal=True, deterministic=True)
    assert out.dtype == dtype and torch.equal(out, expected)
    assert torch.equal(fp8, flash_attn_fp8_func(*narrow, causal=True))
    assert torch.equal(packed, flash_attn_func(*[narrow[1]] * 3))
    ours, theirs = torch.autograd.grad(out, wide, dout), torch.autograd.grad(expected, narrow, dout)
    assert all(
        a.dtype == torch.float32 and torch.equal(a, b.float()) for a, b in zip(ours, theirs, strict=True)
    )
    with torch.no_grad(), torch.autocast("cuda", dtype):
        assert torch.equal(flash_attn_func(*wide, causal=True), expected)
        assert torch.equal(flash_attn_func(narrow[0], wide[1], narrow[2], causal=True), expected)


def test_no_heads_have_no_output() -> None:
    k, v = (torch.randn(2, 40, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    none, lengths = k.new_empty(2, 40, 0, 64), torch.tensor([0, 40, 80], dtype=torch.int32, device="cuda")
    for function in (flash_attn_func, flash_attn_fp8_func):
        assert function(none, k, v, causal=True).shape == none.shape
    packed = (x.flatten(0, 1) for x in (none, k, v))
    assert flash_attn_varlen_func(*packed, lengths, lengths, 40, 40).shape == (80, 0, 64)
    assert flash_attn_with_kvcache(none[:, :1], k, v, cache_seqlens=7).shape == (2, 1, 0, 64)
    new = k[:, :1].clone(), v[:, :1].clone()
    assert flash_attn_with_kvcache(none[:, :1], k, v, *new, cache_seqlens=7).shape == (2, 1, 0, 64)
    assert torch.equal(k[:, 7], new[0][:, 0])
    out, lse = flash_attn_func(none[:, :1], k, v, qv=none[:, :1], return_attn_probs=True)
    assert out.shape == (2, 1, 0, 64) and lse.shape == (2, 0, 1)
