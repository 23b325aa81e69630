"""The tiled forward pass against the float64 oracle, and the oracle against what can be said without it."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import (
    attention_naive,
    attention_standard,
    attention_tiled,
    attention_tiled_fp8,
    tiled_backward,
    tiled_forward,
)

SEQLENS = ((1, 1), (1, 239), (113, 203), (799, 3), (257, 256))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def draw(
    seqlen_q, seqlen_k, *, heads=2, kv_heads=1, head_dim=32, head_dim_v=32, dtype=torch.float32, batch=1
):
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    return [
        torch.randn(batch, seqlen, count, width, generator=generator).to(dtype)
        for seqlen, count, width in (
            (seqlen_q, heads, head_dim),
            (seqlen_k, kv_heads, head_dim),
            (seqlen_k, kv_heads, head_dim_v),
        )
    ]


def by_definition(q, k, v, i, head, keys):
    """Output and LSE of one query, from the first ``keys`` keys, by Python's own sums."""
    kv_head = head // (q.shape[2] // k.shape[2])
    scores = [
        math.fsum(a * b for a, b in zip(q[0, i, head].tolist(), k[0, j, kv_head].tolist(), strict=True))
        / math.sqrt(q.shape[3])
        for j in range(keys)
    ]
    weights = [math.exp(s) for s in scores]
    total = math.fsum(weights)
    out = [
        math.fsum(w * v[0, j, kv_head, c].item() for j, w in enumerate(weights)) / total
        for c in range(v.shape[3])
    ]
    return out, math.log(total)


@pytest.mark.parametrize(
    ("i", "head", "causal", "keys"), [(0, 0, False, 7), (3, 3, False, 7), (0, 1, True, 3), (4, 2, True, 7)]
)
def test_naive_is_the_definition(i, head, causal, keys):
    q, k, v = draw(5, 7, heads=4, kv_heads=2, head_dim=6, head_dim_v=3)
    out, lse = attention_naive(q, k, v, causal=causal)
    expected_out, expected_lse = by_definition(q, k, v, i, head, keys)
    assert out.dtype == lse.dtype == torch.float64
    assert out[0, i, head].tolist() == pytest.approx(expected_out, rel=1e-12)
    assert lse[0, head, i].item() == pytest.approx(expected_lse, rel=1e-12)


def test_naive_does_not_depend_on_the_chunk(monkeypatch):
    q, k, v = draw(37, 41, heads=4, kv_heads=2)
    whole = attention_naive(q, k, v, causal=True)
    monkeypatch.setattr("hopper_attention.reference.naive.CHUNK_SCORES", 4 * 41 * 5)
    for a, b in zip(whole, attention_naive(q, k, v, causal=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SEQLENS)
def test_tiled_within_twice_the_error_of_plain_pytorch(seqlen_q, seqlen_k, kv_heads, causal, dtype):
    q, k, v = draw(seqlen_q, seqlen_k, heads=4, kv_heads=kv_heads, dtype=dtype)
    expected, expected_lse = attention_naive(q, k, v, causal=causal)
    out, lse = attention_tiled(q, k, v, causal=causal)
    assert out.dtype == dtype and lse.dtype == torch.float32
    plain = attention_standard(q, k, v, causal=causal).double()
    rounding = torch.finfo(dtype).eps * expected.abs().max()
    assert (out.double() - expected).abs().max() <= 2 * (plain - expected).abs().max() + rounding
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim_v", [8, 80])
def test_head_dim_v_may_differ(head_dim_v):
    q, k, v = draw(70, 90, kv_heads=2, head_dim=40, head_dim_v=head_dim_v)
    out, _ = attention_tiled(q, k, v, causal=True, softmax_scale=0.3)
    expected, _ = attention_naive(q, k, v, causal=True, softmax_scale=0.3)
    assert out.shape == (1, 70, 2, head_dim_v)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 1), (16, 128), (128, 24), (1000, 1000)])
def test_any_tile_size_gives_the_same(tile_m, tile_n):
    q, k, v = draw(45, 77, heads=4, kv_heads=2, dtype=torch.float64, batch=2)
    out, lse = tiled_forward(q, k, v, causal=True, tile_m=tile_m, tile_n=tile_n)
    expected, expected_lse = attention_naive(q, k, v, causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_scale_of_zero_or_below():
    q, k, v = draw(40, 50, kv_heads=2)
    for scale in (0.0, -0.7):
        out, lse = attention_tiled(q, k, v, causal=True, softmax_scale=scale, tile_n=16)
        expected, expected_lse = attention_naive(q, k, v, causal=True, softmax_scale=scale)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlen_q", [31, 300])
def test_queries_without_keys_give_zero_and_minus_infinity(seqlen_q):
    q, k, v = draw(seqlen_q, 20, dtype=torch.float16)
    empty = seqlen_q - 20
    for out, lse in (attention_naive(q, k, v, causal=True), attention_tiled(q, k, v, causal=True)):
        assert (out[:, :empty] == 0).all() and (lse[:, :, :empty] == -math.inf).all()
        assert (out[:, empty:] != 0).all() and torch.isfinite(lse[:, :, empty:]).all()
    assert (attention_standard(q, k, v, causal=True)[:, :empty] == 0).all()


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(1, 0, 5), (1, 5, 0), (1, 0, 0), (0, 3, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_sizes(batch, seqlen_q, seqlen_k, causal):
    q, k, v = draw(seqlen_q, seqlen_k, heads=4, head_dim_v=8, dtype=torch.bfloat16, batch=batch)
    for out, lse in (
        attention_naive(q, k, v, causal=causal),
        attention_tiled(q, k, v, causal=causal),
        attention_tiled_fp8(quantize_qkv(q, k, v), causal=causal),
    ):
        assert out.shape == (batch, seqlen_q, 4, 8) and (out == 0).all()
        assert lse.shape == (batch, 4, seqlen_q) and (lse == -math.inf).all()


def test_strides_do_not_matter():
    q, k, v = draw(33, 47, kv_heads=2, dtype=torch.float16)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attention_tiled(q, k, v)[0], attention_tiled(*transposed)[0])


def two_key_problem(dtype):
    """One query and two keys a head: S = (0, -x), V = (0, 1), so that O = P_1 / (1 + P_1)."""
    heads = 256
    x = torch.linspace(0.01, 4.0, heads).to(dtype)
    q = torch.zeros(1, 1, heads, 8, dtype=dtype)
    q[0, 0, :, 0] = -x
    k = torch.zeros(1, 2, heads, 8, dtype=dtype)
    k[0, 1, :, 0] = 1.0
    return q, k, k.clone(), torch.exp(-x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_p_is_rounded_to_the_input_dtype_and_the_row_sum_is_not(dtype):
    q, k, v, p = two_key_problem(dtype)
    out = attention_tiled(q, k, v, softmax_scale=1.0)[0][0, 0, :, 0]
    expected = (p.to(dtype).float() / (1 + p)).to(dtype)
    # exp against exp2 may move a P that lies within 1e-7 of a tie; no more than one head of 256 may differ.
    assert (out != expected).sum() <= 1
    rounded = p.to(dtype).float()
    assert (out != (p / (1 + p)).to(dtype)).sum() > 5
    assert (out != (rounded / (1 + rounded)).to(dtype)).sum() > 5


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and all(tensor.stride()):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_memory_is_linear_in_seqlen():
    seqlen, width, tile = 1024, 8, 64
    q, k, v = draw(seqlen, seqlen, heads=1, head_dim=width, head_dim_v=width, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        out, lse = tiled_forward(q, k, v, tile_m=tile, tile_n=tile)
        tiled_backward(out, lse, q, k, v, out, lse, tile_m=tile, tile_n=tile)
        attention_tiled_fp8(
            quantize_qkv(q, k, v, quantization=Fp8Quantization(block_q=tile, block_k=tile, smooth_v=False))
        )
    assert 0 < largest.numel <= seqlen * width


def test_nan_in_a_masked_key_does_not_reach_the_queries_before_it():
    q, k, v = draw(70, 70, dtype=torch.float16)
    expected, _ = attention_tiled(q, k, v, causal=True)
    k[:, 50], v[:, 50] = math.nan, math.nan
    for attention in (attention_tiled, attention_naive):
        out, lse = attention(q, k, v, causal=True)
        torch.testing.assert_close(out[:, :50].half(), expected[:, :50], rtol=1e-3, atol=1e-3)
        assert torch.isnan(out[:, 50:]).all() and torch.isnan(lse[:, :, 50:]).all()
    c = Fp8Quantization(smooth_v=False)
    out, _ = attention_tiled_fp8(quantize_qkv(q, k, v, quantization=c), causal=True)
    assert torch.isfinite(out[:, :50]).all() and torch.isnan(out[:, 50:]).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 4, 8)}, ValueError, r"q has shape \(1, 4, 8\), allowed"),
        (
            {"k": torch.zeros(1, 4, 3, 8), "v": torch.zeros(1, 4, 3, 8)},
            ValueError,
            "q has 4 heads and k has 3",
        ),
        ({"k": torch.zeros(2, 4, 2, 8)}, ValueError, r"k has shape \(2, 4, 2, 8\), allowed"),
        ({"v": torch.zeros(1, 5, 2, 8)}, ValueError, r"v has shape \(1, 5, 2, 8\), allowed"),
        ({"v": torch.zeros(1, 4, 2, 8).half()}, TypeError, "v has dtype torch.float16, allowed"),
        ({"v": torch.zeros(1, 4, 2, 0)}, ValueError, "head_dim_v is 0, allowed"),
        ({"tile_n": 0}, ValueError, "tile_n is 0, allowed"),
        (
            {name: torch.zeros(1, 4, 2, 8, dtype=torch.int32) for name in "qkv"},
            TypeError,
            "q has dtype torch.int32, allowed",
        ),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {"q": torch.zeros(1, 4, 4, 8), "k": torch.zeros(1, 4, 2, 8), "v": torch.zeros(1, 4, 2, 8)}
    with pytest.raises(error, match=message):
        attention_tiled(**(arguments | change))
