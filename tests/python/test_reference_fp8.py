"""The emulator of the FP8 kernel against the oracle, and the error figures of the paper."""

import dataclasses
import math

import pytest
import torch

from hopper.quantize.config import MIN_SCALE
from hopper_attention.quantization import Fp8Quantization, default_block_k, from_descales, quantize_qkv
from hopper_attention.reference import (
    attention_fp8_per_tensor,
    attention_naive,
    attention_standard,
    attention_tiled,
    attention_tiled_fp8,
    fp8,
)
from hopper_attention.reference.tiles import spans
from hopper_attention.rotation import rotate_head_dim

SEQLENS = ((1, 1), (1, 239), (113, 203), (799, 3), (257, 256))


def draw(seqlen_q, seqlen_k, *, heads=4, kv_heads=2, head_dim=32, head_dim_v=32, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    return [
        torch.randn(1, seqlen, count, width, generator=generator).to(dtype)
        for seqlen, count, width in (
            (seqlen_q, heads, head_dim),
            (seqlen_k, kv_heads, head_dim),
            (seqlen_k, kv_heads, head_dim_v),
        )
    ]


def assert_close_to_dequantized(parts, **options):
    """Against attention on the dequantized inputs, only P is rounded: by 2^-4 of itself, or by 2^-10 of 2^8.

    The latter, of e4m3's subnormals, meets the codes of V times the largest of their scales.
    """
    q, k, v = (part.dequantize() for part in (parts.q, parts.k, parts.v))
    out, lse = attention_tiled_fp8(parts, out_dtype=torch.float32, **options)
    expected, expected_lse = attention_naive(q, k, v, **options)
    of_p, _ = attention_naive(q, k, v.abs(), **options)
    largest_v = parts.v.row_major().data.double().abs() * parts.v.scale.amax(-1)[:, None, :, None]
    subnormal = 2.0**-18 * largest_v.sum(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    assert ((out.double() - expected).abs() <= 2.0**-4 * of_p + subnormal + 1e-5).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SEQLENS)
def test_against_the_oracle_on_the_same_fp8_inputs(seqlen_q, seqlen_k, granularity, rotate, causal):
    quantization = Fp8Quantization(
        rotate=rotate, granularity=granularity, block_q=64, block_k=48, smooth_v=False
    )
    q, k, v = draw(seqlen_q, seqlen_k, head_dim=40, head_dim_v=24)
    assert_close_to_dequantized(quantize_qkv(q, k, v, quantization=quantization), causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block_q", [1, 7, 200])
def test_any_rows_of_q_may_share_a_scale(block_q, causal):
    q, k, v = draw(257, 300)
    q *= torch.linspace(0.1, 3.0, 257).view(1, -1, 1, 1)
    c = Fp8Quantization(block_q=block_q, block_k=96, smooth_v=False)
    parts = quantize_qkv(q, k, v, quantization=c)
    assert parts.q.scale.shape == (1, 4, math.ceil(257 / block_q)) and parts.q.scale.unique().numel() > 2
    assert_close_to_dequantized(parts, causal=causal)


def test_tiles_of_queries_do_not_follow_the_scales(monkeypatch):
    seen = []
    monkeypatch.setattr(fp8, "spans", lambda *bounds: seen.append(bounds) or spans(*bounds))
    for block_q in (1, 64):
        attention_tiled_fp8(quantize_qkv(*draw(300, 90), quantization=Fp8Quantization(block_q=block_q)))
    assert seen == [(0, 300, fp8.TILE_QUERIES)] * 2


@pytest.mark.parametrize(
    ("heads", "block_k", "device", "queries"),
    [
        (4, 128, "cpu", 128),
        (4, 128, "cuda", 8192),
        (3, 96, "cuda", 14_464),  # 113 times 128: 4.17 million scores
        (4096, 128, "cuda", 128),
    ],
)
def test_tiles_of_queries_are_taller_where_small_ones_wait_for_the_host(heads, block_k, device, queries):
    assert fp8.queries_of_tile(heads, block_k, torch.device(device)) == queries


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_taller_tiles_change_roundings_alone(causal, monkeypatch):
    parts = quantize_qkv(*draw(300, 400), quantization=Fp8Quantization(block_k=64))
    out, lse = attention_tiled_fp8(parts, causal=causal)
    monkeypatch.setattr(fp8, "queries_of_tile", lambda *shape: 1024)
    tall, tall_lse = attention_tiled_fp8(parts, causal=causal)
    assert (tall_lse - lse).abs().max().item() < 1e-5
    assert (tall.float() - out.float()).square().mean().sqrt() < 1e-3 * out.float().square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_output_dtype(dtype):
    parts = quantize_qkv(*draw(20, 30, dtype=dtype))
    out, lse = attention_tiled_fp8(parts)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert attention_tiled_fp8(parts, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_descales_by_head(causal):
    generator = torch.Generator().manual_seed(3)
    parts = quantize_qkv(
        *draw(113, 203), quantization=Fp8Quantization(rotate=False, granularity="head", smooth_v=False)
    )
    descales = [torch.rand(1, 2, generator=generator) * 0.02 + 0.001 for _ in range(3)]
    data = parts.q.data, parts.k.data, parts.v.row_major().data
    scaled = from_descales(*data, *descales, torch.float16)
    assert_close_to_dequantized(scaled, causal=causal)
    unit = from_descales(*data, None, None, descales[2], torch.float16)
    assert_close_to_dequantized(unit, causal=causal, softmax_scale=1e-6)


def test_queries_without_keys_give_zero_and_minus_infinity():
    out, lse = attention_tiled_fp8(quantize_qkv(*draw(300, 20)), causal=True)
    assert (out[:, :280] == 0).all() and (lse[:, :, :280] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 280:]).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ratio", [0.3, 2.0**-17, 2.0**-40, 2.0**-70, 2.0**-120])
def test_v_blocks_of_very_different_scale(ratio, causal):
    q, k, v = draw(96, 96, dtype=torch.float32)
    v[:, 32:64] *= ratio
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_q=32, block_k=32, smooth_v=False))
    assert parts.v.scale.min() <= max(16 * ratio * parts.v.scale.max(), MIN_SCALE)
    assert_close_to_dequantized(parts, causal=causal)


@pytest.mark.parametrize("seqlen_k", [40, 700])
def test_a_v_of_zeros_gives_zeros_and_the_lse_of_any_other(seqlen_k):
    q, k, v = draw(50, seqlen_k)
    c = Fp8Quantization(block_q=32, block_k=32, smooth_v=False)
    out, lse = attention_tiled_fp8(quantize_qkv(q, k, torch.zeros_like(v), quantization=c), causal=True)
    _, expected = attention_tiled_fp8(quantize_qkv(q, k, v, quantization=c), causal=True)
    visible = expected > -math.inf
    assert (out == 0).all() and torch.equal(lse > -math.inf, visible) and visible.any()
    torch.testing.assert_close(lse[visible], expected[visible], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tile", [96, 224])
def test_tiles_need_not_be_powers_of_two(tile):
    quantization = Fp8Quantization(block_k=tile, smooth_v=False)
    assert_close_to_dequantized(quantize_qkv(*draw(113, 700), quantization=quantization), causal=True)


def test_tiles_of_the_kernel_are_the_default():
    parts = quantize_qkv(*draw(64, 700))
    assert parts.quantization.block_k == parts.v.block == default_block_k(32, 32, 700)
    out, _ = attention_tiled_fp8(parts)
    again = dataclasses.replace(parts, quantization=Fp8Quantization())
    assert torch.equal(attention_tiled_fp8(again)[0], out)


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_a_lone_descale_of_v_multiplies_the_output(sign):
    parts = quantize_qkv(*draw(50, 90), quantization=Fp8Quantization(granularity="head", smooth_v=False))
    data = parts.q.data, parts.k.data, parts.v.row_major().data
    descales = [part.scale[:, :: part.shape[2] // 2, 0] for part in (parts.q, parts.k, parts.v)]
    unit, unit_lse = attention_tiled_fp8(from_descales(*data, *descales, torch.float32))
    scaled = from_descales(*data, *descales[:2], sign * descales[2], torch.float32)
    out, lse = attention_tiled_fp8(scaled)
    assert torch.equal(out, sign * unit) and torch.equal(lse, unit_lse)


def test_transposed_v_and_its_rows_are_the_same():
    parts = quantize_qkv(*draw(50, 91), quantization=Fp8Quantization(block_k=32, smooth_v=False))
    rows = dataclasses.replace(parts, v=parts.v.row_major())
    assert torch.equal(attention_tiled_fp8(parts)[0], attention_tiled_fp8(rows)[0])


def test_an_all_zero_v_block_costs_the_others_nothing():
    q, k, v = draw(40, 96)
    v *= 1e-3
    v[:, 32:64] = 0.0
    quantization = Fp8Quantization(block_q=32, block_k=32, smooth_v=False)
    parts = quantize_qkv(q, k, v, quantization=quantization)
    error = (attention_tiled_fp8(parts)[0].double() - attention_naive(q, k, v)[0]).abs().max()
    assert error < 0.05 * v.abs().max()


def test_the_largest_p_of_a_row_is_exact():
    """Where one key takes a row, the output is that row of V: P is then 2^8, exact in e4m3."""
    q, k, v = draw(64, 96, heads=2, dtype=torch.float32)
    v[:, ::2] *= 0.37
    v[:, 32:64] *= 0.1
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_q=32, block_k=32, smooth_v=False))
    out, _ = attention_tiled_fp8(parts, softmax_scale=1000.0)
    scores = torch.einsum("bihd,bjhd->bhij", parts.q.dequantize(), parts.k.dequantize())
    winner = scores.argmax(-1)
    expected = parts.v.dequantize().transpose(1, 2).gather(2, winner[..., None].expand(-1, -1, -1, 32))
    assert winner.unique().numel() > 20
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("p_exponent", [-1.5, 5, fp8.ROUNDED_P_EXPONENT, math.log2(448)])
def test_any_exponent_of_p_gives_the_same_lse(p_exponent):
    parts = quantize_qkv(*draw(113, 203), quantization=Fp8Quantization(block_k=48, smooth_v=False))
    out, lse = attention_tiled_fp8(parts, causal=True, p_exponent=p_exponent)
    like, like_lse = attention_tiled_fp8(parts, causal=True)
    torch.testing.assert_close(lse, like_lse, rtol=1e-6, atol=1e-6)
    assert ((out - like).float().norm() / like.float().norm()).item() < 0.05


def test_a_largest_p_that_is_rounded():
    """Where one key takes a row, the output is off by what its P is: 2.7 %, and e4m3's RMS error over an octave."""
    q, k, v = draw(64, 96, heads=2, dtype=torch.float32)
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(block_k=32, smooth_v=False))
    exact, lse = attention_tiled_fp8(parts, softmax_scale=1000.0)
    out, same = attention_tiled_fp8(parts, softmax_scale=1000.0, p_exponent=fp8.ROUNDED_P_EXPONENT)
    keys = parts.k.dequantize().repeat_interleave(q.shape[2] // k.shape[2], 2)
    top = torch.einsum("bqhd,bkhd->bhqk", parts.q.dequantize(), keys).amax(-1) * 1000.0
    is_alone = (lse - top < 0.01).transpose(1, 2)  # a float32 LSE is off by 0.002 here
    assert is_alone.float().mean() > 0.95
    # Exponents of scores as large as these are rounded too, in float32.
    expected = exact * (160 / 2**fp8.ROUNDED_P_EXPONENT)
    torch.testing.assert_close(out[is_alone], expected[is_alone], rtol=2e-3, atol=0)
    torch.testing.assert_close(same, lse)
    values = torch.linspace(0, 1, 10001, dtype=torch.float64).exp2()
    mean = rmse(values.to(torch.float8_e4m3fn).double() / values, torch.ones(10001))
    assert abs(1 - 160 / 2**fp8.ROUNDED_P_EXPONENT) == pytest.approx(mean, rel=0.03)


def test_a_p_that_e4m3_lacks_is_refused():
    with pytest.raises(ValueError, match=r"p_exponent is 9, allowed: at most log2\(448\)"):
        attention_tiled_fp8(quantize_qkv(*draw(8, 8)), p_exponent=9)


def test_a_tile_must_not_straddle_two_scales():
    parts = quantize_qkv(*draw(64, 64), quantization=Fp8Quantization(block_q=16, block_k=16, smooth_v=False))
    parts = dataclasses.replace(parts, quantization=Fp8Quantization(block_q=16, block_k=32, smooth_v=False))
    with pytest.raises(
        ValueError, match=r"k has blocks of 16 rows, allowed: multiples of 32, quantization.block_k"
    ):
        attention_tiled_fp8(parts)


def outliers(seqlen, head_dim, seed, heads=1):
    """The paper's inputs, N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    generator = torch.Generator().manual_seed(seed)

    def one():
        shape = (1, seqlen, heads, head_dim)
        where = torch.rand(shape, generator=generator) < 0.001
        x = torch.randn(shape, generator=generator)
        return (x + 10.0 * torch.randn(shape, generator=generator) * where).half()

    return one(), one(), one()


def rmse(out, expected):
    return (out.double() - expected).square().mean().sqrt().item()


@pytest.fixture(scope="module")
def papers_errors():
    """RMSE of every method on the paper's inputs at seqlen 2048, head_dim 128, pooled over two seeds."""
    squares: dict[str, float] = {}
    for seed in (0, 1):
        q, k, v = outliers(2048, 128, seed)
        expected, _ = attention_naive(q, k, v)
        outs = {
            "standard": attention_standard(q, k, v),
            "flash": attention_tiled(q, k, v)[0],
            "baseline": attention_fp8_per_tensor(q, k, v),
        }
        for name, rotate, granularity in (
            ("block", False, "block"),
            ("rotation", True, "tensor"),
            ("both", True, "block"),
        ):
            quantization = Fp8Quantization(rotate=rotate, granularity=granularity, smooth_v=False)
            outs[name] = attention_tiled_fp8(quantize_qkv(q, k, v, quantization=quantization))[0]
        for name, out in outs.items():
            squares[name] = squares.get(name, 0.0) + rmse(out, expected) ** 2 / 2
    return {name: math.sqrt(square) for name, square in squares.items()}


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("standard", 1.5e-4, 2.6e-4),
        ("flash", 3.2e-5, 4.8e-5),
        ("baseline", 1.4e-2, 2.2e-2),
        ("block", 1.3e-2, 2.0e-2),
        ("rotation", 8.0e-3, 1.3e-2),
        ("both", 8.0e-3, 1.3e-2),
    ],
)
def test_error_on_the_papers_inputs(papers_errors, method, low, high):
    assert low <= papers_errors[method] <= high


def test_order_of_the_methods_on_the_papers_inputs(papers_errors):
    assert papers_errors["standard"] / papers_errors["flash"] > 3
    assert papers_errors["baseline"] / papers_errors["both"] > 1.5
    # Folding the scales of V into P must cost nothing measurable.
    assert papers_errors["both"] / papers_errors["rotation"] < 1.1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scales_of_rows_of_q_are_better_than_those_of_blocks(seed):
    """On the paper's inputs. Rotated, the outliers of Q are spread, and the errors of V hide those of Q in the output:
    there Q itself is compared."""
    q, k, v = outliers(1024, 64, seed, heads=4)
    expected, _ = attention_naive(q, k, v)
    of_q, of_out = {}, {}
    for block_q in (1, 128):
        c = Fp8Quantization(block_q=block_q, block_k=128, smooth_v=False)
        part = quantize_qkv(q, k, v, quantization=c).q
        of_q[block_q] = rmse(part.dequantize(), rotate_head_dim(q, c.seed).double())
        plain = quantize_qkv(q, k, v, quantization=dataclasses.replace(c, rotate=False))
        of_out[block_q] = rmse(attention_tiled_fp8(plain, out_dtype=torch.float32)[0], expected)
    assert of_q[1] < 0.97 * of_q[128]
    assert of_out[1] < 0.95 * of_out[128]


def test_block_scales_keep_the_quiet_part_of_a_sequence():
    """e4m3 spans 2^15 at full precision: a scale for all of V loses what lies further below its maximum."""
    q, k, v = draw(256, 256, kv_heads=4, dtype=torch.float32)
    v[:, :128] *= 1e-5
    expected = attention_naive(q, k, v, causal=True)[0][:, :128]
    relative = {}
    for granularity in ("tensor", "block"):
        parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(granularity=granularity, smooth_v=False))
        out, _ = attention_tiled_fp8(parts, causal=True)
        relative[granularity] = rmse(out[:, :128], expected) / expected.square().mean().sqrt().item()
    assert relative["block"] < 0.06
    assert relative["tensor"] > 0.3
