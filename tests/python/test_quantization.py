"""The rules by which Q, K and V become e4m3."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from hopper.forward.fp8.config import FP8_KEY_ORDER
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.quantize.config import (
    E4M3_MAX,
    MIN_SCALE,
    MOST_FIT,
    MOST_OF_ELEMENT,
    MOST_SHIFT,
    hadamard_blocks,
)
from hopper_attention import device_memory, flash_attn_fp8_func
from hopper_attention.problem import length_bounds
from hopper_attention.quantization import (
    Fp8Quantization,
    QuantizedTensor,
    TransposedV,
    default_block_k,
    from_descales,
    quantize_qkv,
    to_e4m3,
)
from hopper_attention.quantization_rules import multiply_add_halves, round_rows, round_values
from hopper_attention.quantized import default_block_widths, row_scale, transpose_for_kernel
from hopper_attention.rotation import (
    rotate_back,
    rotate_back_alike,
    rotate_head_dim,
    rotation_signs,
    sign_masks,
)

PLAIN = Fp8Quantization(rotate=False, block_q=16, block_k=32, smooth_v=False)


def draw(seqlen_q=50, seqlen_k=70, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, seqlen, count, head_dim, generator=generator).to(dtype)
        for seqlen, count in ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))
    ]


def test_e4m3_rounds_to_nearest_even_and_saturates():
    values = [448.0, 464.5, 1e9, -1e9, 17.0, 19.0, 2.0**-10, 2.0**-9 * 1.5, 0.0]
    expected = [448.0, 448.0, 448.0, -448.0, 16.0, 20.0, 0.0, 2.0**-8, 0.0]
    assert to_e4m3(torch.tensor(values)).float().tolist() == expected
    assert torch.isnan(to_e4m3(torch.tensor([math.nan, math.inf, -math.inf])).float()).all()


@pytest.mark.parametrize("rows", [2**31, 2**40, 2**62])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_block_may_be_longer_than_memory(rows, is_packed):
    q = torch.randn(1, 70, 2, 32).half()
    lengths = {}
    if is_packed:
        starts = torch.tensor([0, 30, 70], dtype=torch.int32)
        q, lengths = q[0], {f"cu_seqlens_{x}": starts for x in "qk"} | {f"max_seqlen_{x}": 40 for x in "qk"}
    out, expected = (
        flash_attn_fp8_func(q, q, q, quantization=Fp8Quantization(block_q=n, block_k=n), **lengths)
        for n in (rows, 70)
    )
    assert torch.equal(out, expected)
    q = q.bfloat16().requires_grad_()
    found = []
    for n in (rows, 70):
        out = flash_attn_fp8_func(q, q, q, quantization=Fp8Quantization(block_q=n, block_k=n), **lengths)
        found += torch.autograd.grad(out.sum(), q)
    assert torch.equal(*found)


def half_ulp(data):
    """Half the distance of e4m3 numbers around ``data``: 3 mantissa bits, exponents from -6."""
    exponent = torch.frexp(data.float().abs()).exponent - 1
    return torch.exp2(exponent.clamp_min(-6).float() - 4)


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_reconstruction_within_half_an_ulp(granularity, rotate, dtype):
    """V may be shifted by up to MOST_SHIFT of itself before."""
    inputs = draw(dtype=dtype)
    quantization = dataclasses.replace(PLAIN, granularity=granularity, rotate=rotate)
    parts = quantize_qkv(*inputs, quantization=quantization)
    assert parts.dtype == dtype and parts.quantization == quantization
    for name, x, part in zip("qkv", inputs, (parts.q, parts.k, parts.v.row_major()), strict=True):
        exact = rotate_head_dim(x, quantization.seed) if rotate and name != "v" else x.float()
        ones = dataclasses.replace(
            part, data=torch.ones_like(part.data, dtype=torch.float32).to(part.data.dtype)
        )
        allowed = half_ulp(part.data) * ones.dequantize() * (1 + 1e-5)
        if name == "v":
            allowed += (MOST_SHIFT + 2.0**-10) * exact.abs()
        assert ((part.dequantize() - exact).abs() <= allowed).all(), name
        largest = part.data.float().abs().max().item()
        assert part.largest == (E4M3_MAX if name == "v" else 28.0)
        # Blocks of V have a power of 16 for their scale.
        assert largest > E4M3_MAX / 16 if name == "v" and granularity == "block" else largest == part.largest


@pytest.mark.parametrize("head_dim", [32, 64, 72, 96, 128, 256])
@pytest.mark.parametrize("block_q", [1, 64])
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("rotate", [False, True])
def test_codes_keep_their_promise_and_scores_fit_float16(head_dim, block_q, granularity, rotate):
    quantization = Fp8Quantization(rotate=rotate, granularity=granularity, block_q=block_q, block_k=32)
    parts = quantize_qkv(*draw(head_dim=head_dim), quantization=quantization)
    for part in (parts.q, parts.k):
        codes = part.data.float().abs()
        assert codes.max() == part.largest
        if granularity == "block":
            assert all((chunk.amax((1, 3)) == part.largest).all() for chunk in codes.split(part.block, 1))
    of_q, of_k = (256.0 if granularity == "block" and block_q == 1 else 448.0), 448.0
    of_q, of_k = of_q / (16 if head_dim <= 64 else 32), of_k / (16 if head_dim <= 128 else 32)
    assert (parts.q.largest, parts.k.largest) == (of_q, of_k)
    assert of_q * of_k * head_dim <= torch.finfo(torch.float16).max
    assert parts.v.row_major().largest == E4M3_MAX


@pytest.mark.parametrize("seqlen_k", [0, 70])
def test_codes_of_few_or_extreme_values_keep_their_promise(seqlen_k):
    q, k, v = draw(seqlen_k=seqlen_k, head_dim=128, dtype=torch.bfloat16)
    q[0, :10], q[0, 10:20] = 1e-42, torch.finfo(q.dtype).max
    q[1, 0], q[1, 1, :, 3] = 0.0, math.inf
    parts = quantize_qkv(q, k, v, quantization=Fp8Quantization(rotate=False))
    codes = parts.q.data.float()
    assert codes.nan_to_num().abs().max() == parts.q.largest == 8.0 and parts.k.largest == 28.0
    assert (codes[0, 10:20].abs() == 8.0).all() and not codes[1, 0].any()


def test_what_others_quantized_may_have_every_code():
    data, scale = torch.ones(1, 8, 2, 16).to(torch.float8_e4m3fn), torch.ones(1, 2, 2)
    assert QuantizedTensor(data, scale, 4).largest == 448
    parts = from_descales(data, data, data, None, None, None, torch.float16)
    assert parts.q.largest == parts.k.largest == parts.v.largest == 448
    promised = QuantizedTensor(data, scale, 4, largest=28.0)
    assert promised.row_major().largest == dataclasses.replace(promised, scale=2 * scale).largest == 28


def test_scale_is_the_amax_of_its_block_over_the_largest_code():
    q, k, v = draw()
    parts = quantize_qkv(q, k, v, quantization=PLAIN)
    assert parts.q.scale.shape == (2, 4, 4) and parts.k.scale.shape == parts.v.scale.shape == (2, 2, 3)
    assert parts.q.block == 16 and parts.k.block == parts.v.block == 32
    assert parts.q.scale[1, 3, 2].item() == pytest.approx(q[1, 32:48, 3].abs().max().item() / 28, rel=1e-6)
    assert parts.k.scale[0, 1, 2].item() == pytest.approx(k[0, 64:, 1].abs().max().item() / 28, rel=1e-6)
    of_v = v[1, 32:64, 0].abs().max().item() / 448
    assert parts.v.scale[1, 0, 1].item() == 16.0 ** math.ceil(math.log2(of_v) / 4)


def test_each_row_of_q_has_a_scale_unless_told_otherwise():
    q, k, v = draw()
    q[1, 20, 3] = 0.0
    parts = quantize_qkv(q, k, v)
    assert parts.q.block == parts.quantization.block_q == 1 and parts.q.scale.shape == (2, 4, 50)
    rotated = rotate_head_dim(q, parts.quantization.seed)
    amax = rotated.abs().amax(-1).transpose(1, 2)
    assert torch.allclose(parts.q.scale, (amax / 16).clamp_min(MIN_SCALE), rtol=MOST_FIT, atol=0.0)
    assert parts.q.scale[1, 3, 20] == MIN_SCALE and not parts.q.data[1, 20, 3].float().any()
    largest = parts.q.data.float().abs().amax(-1)
    assert (largest == 16.0).sum() == largest.numel() - 1
    by_head = quantize_qkv(q, k, v, quantization=Fp8Quantization(granularity="head"))
    assert by_head.q.block == 50 and by_head.q.scale.shape == (2, 4, 1)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 128, 200, 256])
def test_the_scale_of_a_row_of_q_is_the_best_for_its_codes(head_dim: int):
    """The squared error is least, and less than with the scale by which the row was rounded."""
    q, k, v = (torch.randn(1, 40, 2, head_dim, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q[:, ::2, :, 3] *= 30.0
    parts = quantize_qkv(q, k, v)
    x, codes = rotate_head_dim(q, parts.quantization.seed).double(), parts.q.data.double()
    scale = parts.q.scale.transpose(1, 2).double()
    best = (x * codes).sum(-1) / (codes * codes).sum(-1)
    first = x.abs().amax(-1) / parts.q.largest
    # The share is divided by a reciprocal that is good to an eighth.
    assert ((scale / best - 1).abs() < (first / best - 1).abs() / 7 + 1e-4).all()

    def error(scale: torch.Tensor) -> torch.Tensor:
        return (x - codes * scale[..., None]).square().sum(-1)

    assert (error(scale) < error(first) * (1 + 1e-5)).all()
    # One of head_dim degrees of freedom is gone.
    assert error(scale).sum() < (1 - 0.5 / head_dim) * error(first).sum()


def scaled_rows(head_dim: int, largest: float, seed: int = 0) -> torch.Tensor:
    """Normal rows in blocks of 128, the largest element of each of which is the largest code."""
    x = torch.randn(32, 128, head_dim, generator=torch.Generator().manual_seed(seed))
    return (x * (largest / x.abs().amax((1, 2), keepdim=True))).flatten(0, 1)


@pytest.mark.parametrize(
    ("head_dim", "largest", "most"),
    [(72, 28.0, 0.9), (96, 28.0, 0.87), (128, 28.0, 0.82), (192, 14.0, 0.73), (256, 14.0, 0.68)],
)
def test_rows_of_k_keep_their_length(head_dim: int, largest: float, most: float) -> None:
    """What codes are off along their row is less than by rounding to nearest; single errors grow little."""
    x = scaled_rows(head_dim, largest)
    errors = [codes.float() - x for codes in (round_rows(x, largest), to_e4m3(x))]
    off, off_nearest = (((e * x).sum(-1) / x.square().sum(-1)).square().mean().sqrt() for e in errors)
    assert off < most * off_nearest
    assert errors[0].square().sum() < 1.035 * errors[1].square().sum()


@pytest.mark.parametrize("head_dim", [72, 128, 192, 256])
def test_keys_get_codes_that_keep_their_length_up_to_their_promise(head_dim: int) -> None:
    q, k, v = draw(head_dim=head_dim)
    part = quantize_qkv(q, k, v, quantization=PLAIN).k
    scaled = k * row_scale(part.scale.reciprocal(), part.block, k.shape[1])
    assert torch.equal(part.data.float(), round_rows(scaled, part.largest).float())
    assert (part.data.float() != to_e4m3(scaled).float()).any()
    assert part.data.float().abs().max() == part.largest


@pytest.mark.parametrize("head_dim", [16, 64, 320])
def test_narrow_and_very_wide_keys_are_rounded_to_nearest(head_dim: int) -> None:
    q, k, v = draw(head_dim=head_dim)
    part = quantize_qkv(q, k, v, quantization=PLAIN).k
    scaled = k * row_scale(part.scale.reciprocal(), part.block, k.shape[1])
    assert torch.equal(part.data.float(), to_e4m3(scaled).float())


def test_sums_of_the_twin_are_rounded_once() -> None:
    """As an FMA does: torch rounds float64 to float32 before it rounds to float16."""
    a, b, c = (torch.randn(200_000, generator=torch.Generator().manual_seed(i)) for i in range(3))
    a, b, c = a.half(), (b * 2.0**-9).half(), c.half()
    exact = a.double() * b.double() + c.double()
    assert torch.equal(multiply_add_halves(a, b, c), torch.from_numpy(exact.numpy().astype(np.float16)))
    assert not torch.equal(multiply_add_halves(a, b, c), exact.half())


def test_a_key_with_what_is_no_number_keeps_its_other_codes_near() -> None:
    x = scaled_rows(128, 28.0)[:200]
    codes = round_rows(x, 28.0).float()
    for bad in (math.nan, math.inf, -math.inf):
        x[7, 5], x[9] = bad, bad
        dirty = round_rows(x, 28.0).float()
        assert (
            torch.isnan(dirty).sum() == 1 + 128 and torch.isnan(dirty[7, 5]) and torch.isnan(dirty[9]).all()
        )
        others = [i for i in range(200) if i not in (7, 9)]
        assert torch.equal(dirty[others], codes[others])
        rest = torch.cat([x[7, :5], x[7, 6:]])
        off = torch.cat([dirty[7, :5], dirty[7, 6:]]) - rest
        assert (off.abs() <= rest.abs() * (MOST_OF_ELEMENT + 2.0**-4) + 2.0**-9).all()


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_numbers_down_to_the_limit_keep_their_digits(granularity):
    """docs/limits.md: a power of 16 changes scales alone, small as it is, and from 2^-90 on there is nothing left."""
    c = Fp8Quantization(granularity=granularity)
    q, k, v = (x.bfloat16() for x in draw())
    v = v / v.abs().max()
    # Squares of numbers beyond 2^63, by which a mean and what it may leave are judged, are infinite: V keeps both then.
    without_mean = dataclasses.replace(c, smooth_v=False)
    for power, of_power in ((-68, c), (-40, c), (60, c), (100, without_mean)):
        unit = quantize_qkv(q, k, v, quantization=of_power)
        parts = quantize_qkv(q, k, v * 2.0**power, quantization=of_power)
        assert torch.equal(parts.v.scale, unit.v.scale * 2.0**power)
        assert (parts.v.data.float() - unit.v.data.float()).abs().max() <= 32
    lost = quantize_qkv(q * 2.0**-96, k * 2.0**-96, v * 2.0**-92, quantization=c)
    assert all(
        not part.data.float().any() and (part.scale == MIN_SCALE).all() for part in (lost.q, lost.k, lost.v)
    )


@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_no_number_concerns_its_row_of_q_alone(rotate):
    q, k, v = draw()
    c = Fp8Quantization(rotate=rotate)
    clean = quantize_qkv(q, k, v, quantization=c).q
    q[1, 20, 3, 5], q[0, 7, 2] = math.nan, math.inf
    dirty = quantize_qkv(q, k, v, quantization=c).q
    nan = torch.isnan(dirty.data.float())
    assert nan[0, 7, 2].all() and nan[1, 20, 3].sum() == (16 if rotate else 1)
    others = torch.ones(2, 50, 4, dtype=torch.bool)
    others[1, 20, 3] = others[0, 7, 2] = False
    assert torch.equal(dirty.data.float()[others], clean.data.float()[others])
    scales, of_clean = dirty.scale.transpose(1, 2), clean.scale.transpose(1, 2)
    assert torch.equal(scales[others], of_clean[others]) and scales[0, 7, 2] == MIN_SCALE
    finite = q[1, 20, 3][torch.isfinite(q[1, 20, 3])]
    expected = MIN_SCALE if rotate else (finite.abs().max() / 16).item()
    assert scales[1, 20, 3].item() == pytest.approx(expected, rel=1e-6)


def test_scales_by_tensor_and_by_head():
    q, k, v = draw()
    by_tensor = quantize_qkv(q, k, v, quantization=dataclasses.replace(PLAIN, granularity="tensor"))
    assert by_tensor.q.block == 50 and by_tensor.q.scale.shape == (2, 4, 1)
    assert by_tensor.v.scale.unique().tolist() == pytest.approx([v.abs().max().item() / 448], rel=1e-6)
    by_head = quantize_qkv(q, k, v, quantization=Fp8Quantization(rotate=False, granularity="head"))
    group = q[1, :, 2:4].abs().max().item() / 28
    assert by_head.q.scale[1, 2:, 0].tolist() == pytest.approx([group, group], rel=1e-6)
    assert by_head.k.scale[1, 1].item() == pytest.approx(k[1, :, 1].abs().max().item() / 28, rel=1e-6)


def test_an_all_zero_block_has_the_least_scale():
    q, k, v = draw()
    v[:, 32:64] = 0.0
    v[:, :32] *= 1e-42
    part = quantize_qkv(q, k, v, quantization=PLAIN).v
    assert (part.scale[:, :, :2] == MIN_SCALE).all() and (part.scale[:, :, 2] > 1e-4).all()
    assert (part.dequantize()[:, 32:64] == 0).all()
    assert ((part.dequantize() - v)[:, :32].abs() <= 448 * MIN_SCALE * 2.0**-4).all()


def test_rounded_operations_of_the_definition():
    """In float64, rounded to float32 after each operation: what the fused kernel does too."""
    q, k, v = draw(dtype=torch.bfloat16)
    parts = quantize_qkv(q, k, v, quantization=PLAIN)
    amax = k[1, 32:64, 0].double().abs().max()
    scale = (amax * torch.tensor(1 / 28).double()).float()
    inverse = (1 / scale.double()).float()
    assert parts.k.scale[1, 0, 1] == scale
    scaled = (k[1, 32:64, 0].double() * inverse.double()).float()
    assert torch.equal(parts.k.data[1, 32:64, 0].float(), scaled.to(torch.float8_e4m3fn).float())


def test_blocks_of_keys_follow_the_tile_of_the_kernel():
    for dims in ((64, 64), (128, 64), (80, 256)):
        for seqlen_k in (500, 5000, 50000):
            expected = select_fp8_forward_config(*dims, True, "float16", seqlen_k, half_scores=True).tile_n
            assert default_block_k(*dims, seqlen_k) == expected
    assert default_block_k(320, 64, 500) == 128
    parts = quantize_qkv(*draw(seqlen_k=500))
    tile = default_block_k(16, 16, 500)
    assert parts.quantization == Fp8Quantization(block_k=tile)
    assert parts.k.block == parts.v.block == tile and parts.v.scale.shape == (2, 2, -(-500 // tile))
    assert Fp8Quantization().keys_per_block(64, 64, 9000) == default_block_k(64, 64, 9000)
    assert Fp8Quantization(block_k=96).keys_per_block(64, 64, 9000) == 96


@pytest.mark.parametrize("seqlen", [0, 1, 31, 32, 70])
def test_v_is_transposed_ordered_and_padded(seqlen):
    v = (
        torch.arange(seqlen * 32, dtype=torch.float32)
        .remainder(61)
        .view(1, seqlen, 2, 16)
        .to(torch.float8_e4m3fn)
    )
    moved = transpose_for_kernel(v).float()
    assert moved.shape == (1, 2, 16, -(-seqlen // 32) * 32)
    for slot in range(moved.shape[3]):
        key = slot // 32 * 32 + FP8_KEY_ORDER[slot % 32]
        expected = v[0, key].float() if key < seqlen else torch.zeros(2, 16)
        assert torch.equal(moved[0, :, :, slot], expected), slot


@pytest.mark.parametrize("seqlen", [0, 1, 31, 32, 70])
def test_transposed_v_gives_its_rows_back(seqlen):
    q, k, v = draw(seqlen_k=seqlen)
    parts = quantize_qkv(q, k, v, quantization=PLAIN)
    assert isinstance(parts.v, TransposedV) and parts.v.seqlen == seqlen
    assert parts.v.shape == (2, seqlen, 2, 16) and parts.q.shape == (2, 50, 4, 16)
    rows = parts.v.row_major()
    assert torch.equal(transpose_for_kernel(rows.data).view(torch.uint8), parts.v.data.view(torch.uint8))
    assert torch.equal(rows.data.float(), round_values(v / row_scale(rows.scale, rows.block, seqlen)).float())
    assert torch.equal(parts.v.dequantize(), rows.dequantize()) and rows.row_major() is rows


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_spoils_itself_alone(bad):
    q, k, v = draw()
    clean = quantize_qkv(q, k, v, quantization=PLAIN)
    k[1, 40, 0, 5] = bad
    dirty = quantize_qkv(q, k, v, quantization=PLAIN)
    nan = torch.isnan(dirty.k.data.float())
    assert nan.nonzero().tolist() == [[1, 40, 0, 5]]
    kept = k[1, 32:64, 0][torch.isfinite(k[1, 32:64, 0])]
    assert dirty.k.scale[1, 0, 1].item() == pytest.approx(kept.abs().max().item() / 28, rel=1e-6)
    elsewhere = torch.ones_like(nan)
    elsewhere[1, 32:64, 0] = False
    assert torch.equal(dirty.k.data.float()[elsewhere], clean.k.data.float()[elsewhere])


def test_a_non_finite_element_makes_nan_of_its_rotated_hadamard_block():
    q, k, v = draw(head_dim=24)
    k[1, 40, 0, 20] = math.inf
    data = quantize_qkv(q, k, v).k.data.float()
    assert torch.isnan(data).nonzero().tolist() == [[1, 40, 0, c] for c in range(16, 24)]


@pytest.mark.parametrize(
    ("head_dim", "blocks"), [(64, [64]), (96, [64, 32]), (200, [128, 64, 8]), (256, [256]), (8, [8])]
)
def test_rotation_is_orthogonal_and_keeps_the_scores(head_dim, blocks):
    assert hadamard_blocks(head_dim) == blocks
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 20, 3, head_dim, generator=generator) for _ in range(2))
    matrix = rotate_head_dim(torch.eye(head_dim), 5)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), rtol=0, atol=1e-6)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    rotated = torch.einsum("bihd,bjhd->bhij", rotate_head_dim(q, 5), rotate_head_dim(k, 5))
    torch.testing.assert_close(rotated, scores, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(rotate_head_dim(q, 5), q @ matrix, rtol=0, atol=1e-5)
    at = 0
    for size in blocks:
        block = matrix[at : at + size, at : at + size]
        torch.testing.assert_close(block.abs(), torch.full_like(block, size**-0.5))
        # The first column of a Hadamard matrix is positive, so what is left there are the signs.
        torch.testing.assert_close(block[:, 0] * size**0.5, rotation_signs(head_dim, 5)[at : at + size])
        assert (matrix[at : at + size].count_nonzero(1) == size).all()
        at += size


def test_signs_depend_on_the_seed_alone():
    assert torch.equal(rotation_signs(128, 3), rotation_signs(128, 3))
    assert not torch.equal(rotation_signs(128, 3), rotation_signs(128, 4))
    assert rotation_signs(128, 3).abs().unique().tolist() == [1.0]
    torch.manual_seed(1)
    first = quantize_qkv(*draw()).q.data.float()
    torch.manual_seed(2)
    assert torch.equal(first, quantize_qkv(*draw()).q.data.float())
    assert not torch.equal(first, quantize_qkv(*draw(), quantization=Fp8Quantization(seed=1)).q.data.float())


def test_from_descales_takes_one_scale_a_kv_head():
    parts = quantize_qkv(*draw(), quantization=Fp8Quantization(granularity="head"))
    descales = [part.scale[:, :: part.scale.shape[1] // 2, 0] for part in (parts.q, parts.k, parts.v)]
    data = parts.q.data, parts.k.data, parts.v.row_major().data
    again = from_descales(*data, *descales, torch.bfloat16)
    assert again.dtype == torch.bfloat16 and not again.quantization.rotate
    for part, other in ((parts.q, again.q), (parts.k, again.k), (parts.v, again.v)):
        assert torch.equal(part.dequantize(), other.dequantize())
    ones = from_descales(*data, None, None, None, torch.float16)
    assert torch.equal(ones.k.dequantize(), parts.k.data.float())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda d, s: Fp8Quantization(granularity="row"),
            ValueError,
            "granularity is 'row', allowed: tensor",
        ),
        (lambda d, s: Fp8Quantization(block_k=0), ValueError, "block_k is 0, allowed"),
        (
            lambda d, s: Fp8Quantization(block_k="tiles"),
            ValueError,
            "block_k is 'tiles', allowed: 1 or more, or 'tile'",
        ),
        (
            lambda d, s: TransposedV(d, s, 4, 8),
            ValueError,
            "data has 16 keys, allowed for a seqlen of 8: 32",
        ),
        (
            lambda d, s: TransposedV(d.repeat(1, 1, 1, 2), s, 4, 30),
            ValueError,
            r"scale has shape .*allowed.*\(1, 8, 8\)",
        ),
        (lambda d, s: TransposedV(d.float(), s, 4, 8), TypeError, "data has dtype torch.float32, allowed"),
        (lambda d, s: quantize_qkv(d, d, d), TypeError, "q has dtype torch.float8_e4m3fn, allowed"),
        (lambda d, s: QuantizedTensor(d.float(), s, 4), TypeError, "data has dtype torch.float32, allowed"),
        (lambda d, s: QuantizedTensor(d, s.double(), 4), TypeError, "scale has dtype torch.float64, allowed"),
        (lambda d, s: QuantizedTensor(d, s, 3), ValueError, r"scale has shape .*allowed.*\(1, 2, 3\)"),
        (lambda d, s: QuantizedTensor(d, s, 0), ValueError, "block is 0, allowed"),
        (
            lambda d, s: QuantizedTensor(d, s, 4, 0.0),
            ValueError,
            r"largest is 0.0, allowed: above 0, at most 448",
        ),
        (
            lambda d, s: QuantizedTensor(d, s, 4, 449),
            ValueError,
            "largest is 449, allowed: above 0, at most 448",
        ),
        (lambda d, s: QuantizedTensor(d, s, 4, math.nan), ValueError, "largest is nan, allowed"),
        (lambda d, s: QuantizedTensor(d[0], s, 4), ValueError, r"data has shape \(8, 2, 16\), allowed"),
        (
            lambda d, s: from_descales(*[d.float()] * 3, None, None, None, torch.float16),
            TypeError,
            "q has dtype torch.float32, allowed",
        ),
        (
            lambda d, s: from_descales(d, d, d, None, s, None, torch.float16),
            ValueError,
            r"k_descale has shape \(1, 2, 2\), allowed: \(batch, kv_heads\) = \(1, 2\)",
        ),
        (
            lambda d, s: from_descales(d, d, d, None, None, s[..., 0].half(), torch.float16),
            TypeError,
            "v_descale has dtype torch.float16, allowed",
        ),
    ],
)
def test_bad_input_is_named(make, error, message):
    data = torch.ones(1, 8, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(error, match=message):
        make(data, torch.ones(1, 2, 2))


@pytest.mark.parametrize("head_dim", [16, 24, 96, 128])
def test_rotation_is_undone(head_dim):
    x = torch.randn(3, 5, 2, head_dim, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(rotate_back(rotate_head_dim(x, 7), 7), x, atol=1e-5)


@pytest.mark.parametrize("seqlen", [64, 77])
def test_transposed_values_are_dequantized_in_one_pass_as_rows_are(seqlen: int) -> None:
    v = quantize_qkv(*draw(seqlen_k=seqlen)).v
    assert isinstance(v, TransposedV)
    for dtype in (torch.float32, torch.bfloat16):
        values = v.dequantize(dtype)
        assert values.is_contiguous() and torch.equal(values, v.row_major().dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_16_bits_are_rotated_back_with_one_rounding(head_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 7, 3, head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    x[0, 0, 0, 0] = torch.inf
    exact = rotate_back(x, 7).double()
    actual = rotate_back_alike(x, 7)
    assert actual.dtype == dtype and actual.shape == x.shape
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    error, size = (x[finite].abs() for x in (actual.double() - exact, exact))
    # Beside the rounding there are those of sums of some 10 in float32.
    assert (error <= 0.51 * torch.finfo(dtype).eps * size + 1e-5).all()


def test_smooth_k_takes_out_the_mean_and_remembers_what_it_did_to_the_scores():
    q, k, v = draw(seqlen_k=64)
    k = k + torch.linspace(-20, 20, 16)
    parts = quantize_qkv(q, k, v, quantization=dataclasses.replace(PLAIN, smooth_k=True))
    assert parts.k.dequantize().mean(1).abs().max() < 0.05
    mean = k.mean(1).repeat_interleave(2, 1)
    assert torch.allclose(parts.shift, torch.einsum("bqhd,bhd->bhq", q, mean), atol=1e-3)
    assert quantize_qkv(q, k, v, quantization=PLAIN).shift.numel() == 0
    assert (parts.k.scale < quantize_qkv(q, k, v, quantization=PLAIN).k.scale / 3).all()


def test_signs_do_not_depend_on_the_default_device() -> None:
    expected = rotation_signs(64, 3)
    with torch.device("meta"):
        assert torch.equal(rotation_signs(64, 3), expected)


@pytest.mark.parametrize("find", [rotation_signs, sign_masks])
def test_signs_on_a_gpu_live_as_long_as_a_graph_that_points_to_them(
    find, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, capturing = torch.device("meta"), [False]
    monkeypatch.setattr(device_memory, "constants", device_memory.Constants(limit=4))
    monkeypatch.setattr(device_memory, "is_capturing", lambda device: capturing[0])
    signs = find(64, 5, gpu)
    capturing[0] = True
    assert find(64, 5, gpu) is signs
    with pytest.raises(
        RuntimeError, match="head_dim 64 and seed 6 are not on meta yet: make the same call once"
    ):
        find(64, 6, gpu)
    capturing[0] = False
    for seed in range(100, 200):
        assert find(64, seed, gpu) is find(64, seed, gpu)
    assert find(64, 5, gpu) is signs


@pytest.mark.parametrize(
    "head_dims", [(64, 64), (64, 32), (80, 16), (128, 128), (192, 128), (256, 64), (320, 64)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("two_level", [False, True])
def test_blocks_of_every_length(head_dims: tuple[int, int], causal: bool, two_level: bool) -> None:
    """The steps by length that ``default_block_widths`` gives are those of the tilings, asked for each length."""
    widths = default_block_widths(*head_dims, two_level, causal)
    found = set()
    for seqlen_k in (2**40, *range(1, 10_000, 61), *(n + i for n in length_bounds()[:-1] for i in (0, 1))):
        select = partial(select_fp8_forward_config, *head_dims, causal, "float16", seqlen_k, half_scores=True)
        try:
            expected = select().tile_n
            if two_level and select(expected, two_level=True).tile_n < expected:
                expected = select(two_level=True).tile_n
        except ValueError:
            expected = 128
        assert default_block_k(*head_dims, seqlen_k, two_level, causal) == widths.of(seqlen_k) == expected
        found.add(expected)
    assert widths.narrowest() == min(found)
