"""Gradients of the tiled pass: exact in float64, within twice plain PyTorch's error at 16 bits."""

import math

import pytest
import torch

from hopper_attention.reference import attention_naive, attention_tiled, tiled_backward, tiled_forward


def draw(seqlen_q, seqlen_k, *, heads=4, kv_heads=2, head_dim=3, head_dim_v=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(1, seqlen, count, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for seqlen, count, width in (
            (seqlen_q, heads, head_dim),
            (seqlen_k, kv_heads, head_dim),
            (seqlen_k, kv_heads, head_dim_v),
        )
    ]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads", "kv_heads"), [(5, 7, 4, 2), (5, 7, 2, 1), (6, 6, 2, 2)]
)
def test_gradcheck_through_output_and_lse(seqlen_q, seqlen_k, heads, kv_heads, causal):
    inputs = draw(seqlen_q, seqlen_k, heads=heads, kv_heads=kv_heads)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention_tiled(q, k, v, causal=causal, softmax_scale=0.8, tile_m=4, tile_n=3), inputs
    )


def test_gradcheck_with_queries_that_see_no_key():
    inputs = draw(7, 4)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention_tiled(q, k, v, causal=True, tile_m=2, tile_n=3)[0], inputs
    )


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 4), (130, 5), (5, 0), (0, 5)])
def test_queries_without_keys_have_zero_gradients(seqlen_q, seqlen_k):
    q, k, v = draw(seqlen_q, seqlen_k, dtype=torch.float16)
    out, lse = attention_tiled(q, k, v, causal=True)
    empty = max(seqlen_q - seqlen_k, 0)
    # Even an infinite gradient of an LSE of -inf has nowhere to go.
    dlse = torch.ones_like(lse)
    dlse[:, :, :empty] = math.inf
    torch.autograd.backward((out, lse), (torch.ones_like(out), dlse))
    assert (q.grad[:, :empty] == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert k.grad.shape == k.shape and v.grad.dtype == torch.float16


def test_gradient_of_the_lse_alone():
    q, k, v = draw(5, 7)
    attention_tiled(q, k, v, causal=True, tile_m=2, tile_n=3)[1].square().sum().backward()
    ours = [x.grad.clone() for x in (q, k)]
    assert (v.grad == 0).all()
    q.grad = k.grad = None
    attention_naive(q, k, v, causal=True)[1].square().sum().backward()
    for mine, expected in zip(ours, (q.grad, k.grad), strict=True):
        torch.testing.assert_close(mine, expected)


def plain_pytorch(q, k, v, causal):
    """softmax(scale * Q K^T) V with every intermediate in the input dtype."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def gradients(attention, inputs, dout):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*leaves), leaves, dout.to(leaves[0].dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 203), (257, 256 + 1)])
def test_gradients_within_twice_the_error_of_plain_pytorch(seqlen_q, seqlen_k, causal, dtype):
    inputs = draw(seqlen_q, seqlen_k, head_dim=32, head_dim_v=24, dtype=dtype)
    dout = torch.randn(1, seqlen_q, 4, 24, generator=torch.Generator().manual_seed(8)).to(dtype)
    exact = gradients(lambda q, k, v: plain_pytorch(q, k, v, causal), [x.double() for x in inputs], dout)
    plain = gradients(lambda q, k, v: plain_pytorch(q, k, v, causal), inputs, dout)
    ours = gradients(lambda q, k, v: attention_tiled(q, k, v, causal=causal)[0], inputs, dout)
    for name, mine, theirs, expected in zip("qkv", ours, plain, exact, strict=True):
        rounding = torch.finfo(dtype).eps * expected.abs().max()
        error = (mine.double() - expected).abs().max()
        assert error <= 2 * (theirs.double() - expected).abs().max() + rounding, f"d{name}"
        assert mine.dtype == dtype


def test_float32_gradients():
    inputs = draw(113, 203, head_dim=32, head_dim_v=24, dtype=torch.float32)
    dout = torch.randn(1, 113, 4, 24, generator=torch.Generator().manual_seed(8))
    exact = gradients(lambda *x: plain_pytorch(*x, True), [x.double() for x in inputs], dout)
    for mine, expected in zip(
        gradients(lambda *x: attention_tiled(*x, causal=True)[0], inputs, dout), exact, strict=True
    ):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-5)


def test_plain_functions_are_what_autograd_runs():
    q, k, v = draw(20, 30, dtype=torch.bfloat16)
    out, lse = tiled_forward(q, k, v, causal=True)
    assert not out.requires_grad
    expected_out, expected_lse = attention_tiled(q, k, v, causal=True)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    dout = torch.randn_like(out)
    dq, dk, dv = tiled_backward(dout, None, q, k, v, out, lse, causal=True)
    for mine, expected in zip((dq, dk, dv), torch.autograd.grad(expected_out, (q, k, v), dout), strict=True):
        assert torch.equal(mine, expected) and mine.is_contiguous()


def test_nan_in_a_masked_key_leaves_other_gradients_alone():
    q, k, v = draw(70, 70, head_dim=8, dtype=torch.float32)
    dout = torch.randn(1, 70, 4, 2, generator=torch.Generator().manual_seed(9))
    clean = gradients(lambda *x: attention_tiled(*x, causal=True)[0], (q, k, v), dout)[0]
    with torch.no_grad():
        k[:, 50], v[:, 50] = math.nan, math.nan
    dirty = gradients(lambda *x: attention_tiled(*x, causal=True)[0], (q, k, v), dout)[0]
    torch.testing.assert_close(dirty[:, :50], clean[:, :50])
    assert torch.isnan(dirty[:, 50:]).all()


def test_double_backward_is_refused():
    q, k, v = draw(4, 4)
    out, _ = attention_tiled(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward: .* use attention_naive"):
        (dq.square().sum() + out.sum()).backward()
