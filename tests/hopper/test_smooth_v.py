"""Smooth V in the FP8 kernel, on NumPy: what its epilogue adds, and that truncated sums lose less without a mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention.launch.fp8 import EmulationLaunch
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv, restore_values
from hopper_attention.quantization_rules import paid_by_values, round_values
from hopper_attention.reference import attention_naive
from tests.hopper import wgmma_steps
from tests.hopper.fp8_sums import add_as_the_tensor_cores, wgmma_product
from tests.hopper.on_numpy import fp8_forward_on_numpy


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def test_truncated_sums_of_values_without_their_mean_stay_small() -> None:
    """The sums alone, over as many keys as a kernel test has no time for."""
    generator = torch.Generator().manual_seed(0)
    p = (256 * torch.rand(8, 16384, generator=generator)).to(torch.float8_e4m3fn)
    v = 64 + 64 * torch.randn(8, 16384, generator=generator)
    mean = v.mean(1)
    centred = (v - mean[:, None]).to(torch.float8_e4m3fn)
    weights = p.double().sum(1, keepdim=True)
    exact = p.double() @ v.double().T
    with_mean = wgmma_product(p, v.to(torch.float8_e4m3fn))
    without = wgmma_product(p, centred).double() + weights * mean
    assert relative(with_mean, exact) > 0.02 and relative(without, exact) < 1e-3


FAMILIES = {
    "normal": lambda v: v,
    "a small mean": lambda v: v + 0.02,
    "a mean of 1": lambda v: v + 1.0,
    "a mean of 4": lambda v: v + 4.0,
    "a mean by the column": lambda v: v + torch.where(torch.arange(v.shape[1]) % 8 == 0, 4.0, 0.3),
    "large tokens": lambda v: v * torch.where(torch.arange(v.shape[0]) % 128 == 9, 20.0, 1.0)[:, None] + 1.0,
}


@pytest.mark.parametrize("keys", [8192, 65536])
@pytest.mark.parametrize("family", FAMILIES)
def test_truncated_sums_are_as_exact_as_others_by_default(family: str, keys: int) -> None:
    """P V alone, of values that the quantizer's rules made: within half as much again of sums in float64."""
    generator = torch.Generator().manual_seed(keys)
    scores, normal = (torch.randn(*shape, generator=generator) for shape in ((8, keys), (keys, 16)))
    v = FAMILIES[family](normal).bfloat16()
    parts = quantize_by_rules(v)
    codes = parts.v.row_major().dequantize()[0, :, 0]
    p = scores.exp()
    rounded = (256 * p / p.amax(1, keepdim=True)).to(torch.float8_e4m3fn)
    weights = (256 * p / p.amax(1, keepdim=True)).double().sum(1, keepdim=True)
    exact = p.double() / p.double().sum(1, keepdim=True) @ v.double()
    mean = parts.mean_v[0].double()
    found = wgmma_product(rounded, codes.T.contiguous()).double() / weights + mean
    like = rounded.double() @ codes.double() / weights + mean
    assert relative(found, exact) < 1.5 * relative(like, exact)


SKEWED = {
    "lognormal": (torch.exp, 0.7),
    "one of ten": (lambda v: 5.0 * (v > 1.28) + 0.3 * v, 0.5),
}
"""Kinds of values, and what is left of their bias at most."""


@pytest.mark.parametrize("kind", SKEWED)
def test_skewed_values_pay_for_what_is_cut_off_of_their_sum(kind: str) -> None:
    """8192 keys with the probabilities of normal scores, whose products are cut off on one side more often than on the
    other."""
    draw, left = SKEWED[kind]
    generator = torch.Generator().manual_seed(0)
    v = draw(torch.randn(8192, 64, generator=generator))
    v = v - v.mean(0)
    over_scale = v / 2.0 ** (v.abs().amax() / 448).log2().ceil()
    p = (3 * torch.randn(8, 8192, generator=generator).exp()).to(torch.float8_e4m3fn)
    exact = p.double() @ over_scale.double()
    biases = []
    for pay in (0.0, paid_by_values(65536)):
        codes = round_values(over_scale[None, :, None], pay)[0, :, 0]
        biases.append((wgmma_product(p, codes.T.contiguous()).double() - exact).mean().item())
    assert biases[0] > 0 and abs(biases[1]) < left * biases[0]


@pytest.mark.parametrize("keys", [8192, 16384, 65536])
def test_what_values_pay_is_little(keys: int) -> None:
    """Those that lie evenly about 0 have nearly the errors that they had, one by one and in sums."""
    v = 64 * torch.randn(1, 8192, 1, 64, generator=torch.Generator().manual_seed(1))
    plain, paid = (round_values(v, share).float() - v for share in (0.0, paid_by_values(keys)))
    sums = [error.unflatten(1, (-1, 32)).sum(2).square().mean().sqrt() for error in (plain, paid)]
    assert paid.square().mean() < 1.01 * plain.square().mean() and sums[1] < 1.15 * sums[0]


def quantize_by_rules(v: torch.Tensor) -> QuantizedQKV:
    """Values (keys, columns) of one head, with Q and K that do not count."""
    other = torch.zeros(1, v.shape[0], 1, 16, dtype=v.dtype)
    return quantize_qkv(other[:, :1], other, v[None, :, None], backend="torch")


def smooth_parts(
    seqlens: tuple[int, int], heads: tuple[int, int], head_dims: tuple[int, int], batch: int = 1
) -> QuantizedQKV:
    """Values with another offset in every column of every head, none of them near 0."""
    generator = torch.Generator().manual_seed(0)
    (seqlen_q, seqlen_k), (of_q, of_kv), (d, dv) = seqlens, heads, head_dims
    shapes = (batch, seqlen_q, of_q, d), (batch, seqlen_k, of_kv, d), (batch, seqlen_k, of_kv, dv)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    offset = 4 + torch.arange(batch * of_kv * dv).view(batch, 1, of_kv, dv) / 16
    parts = quantize_qkv(
        q, k, v + offset, quantization=Fp8Quantization(block_q=64, block_k=128, smooth_v=True)
    )
    return replace(parts, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("head_dims", "causal", "seqlens", "heads", "options"),
    [
        ((64, 64), False, (65, 129), (4, 2), {}),
        ((64, 64), True, (200, 70), (2, 1), {}),
        ((64, 48), False, (3, 1), (1, 1), {}),
        ((96, 80), True, (70, 131), (2, 1), {}),
        ((128, 128), True, (150, 70), (2, 2), {}),
        ((128, 128), False, (65, 130), (2, 1), {"two_level": True}),
        ((64, 48), True, (65, 130), (2, 1), {"v_rows": True}),
        ((256, 256), False, (140, 67), (1, 1), {}),
        ((256, 240), False, (65, 130), (1, 1), {"two_level": True}),
    ],
)
def test_the_epilogue_adds_the_mean(
    head_dims: tuple[int, int],
    causal: bool,
    seqlens: tuple[int, int],
    heads: tuple[int, int],
    options: dict[str, bool],
) -> None:
    """To rows that have a key, in float32, of the head and the batch entry of each."""
    parts = smooth_parts(seqlens, heads, head_dims, batch=2 if heads[0] > heads[1] else 1)
    assert parts.mean_v.abs().min() > 2
    scale = head_dims[0] ** -0.5
    config = select_fp8_forward_config(*head_dims, causal, "bfloat16", seqlens[1], 128, **options)
    out, lse = fp8_forward_on_numpy(config, parts, scale)
    centred, same_lse = fp8_forward_on_numpy(config, replace(parts, mean_v=torch.empty(0)), scale)
    assert torch.equal(lse, same_lse)
    like, _ = EmulationLaunch(causal)(parts, scale, wants_lse=True)
    assert relative(out, like.double()) < 5e-3

    visible = (lse > -torch.inf).transpose(1, 2)
    assert bool((~visible).any()) == (causal and seqlens[0] > seqlens[1])
    assert not out[~visible].any() and not centred[~visible].any()
    added = (out.double() - restore_values(centred.double(), parts, causal))[visible].abs().max()
    # Half a unit of the last of bfloat16's 8 digits, of either output.
    assert added <= 2**-8 * (out.abs().max() + centred.abs().max())


def test_the_mean_is_added_before_the_output_is_rounded() -> None:
    """One key is its own mean: its values less that are 0, and come back with the bits that they had in float32."""
    parts = smooth_parts((70, 1), (2, 1), (64, 64))
    parts = replace(parts, mean_v=parts.mean_v * (1 + 2**-12))
    config = select_fp8_forward_config(64, 64, False, "bfloat16", 1, 128)
    out, _ = fp8_forward_on_numpy(config, parts, 0.125)
    expected = parts.mean_v.repeat_interleave(2, 1).unsqueeze(1).bfloat16()
    assert torch.equal(out, expected.expand_as(out))


@pytest.mark.parametrize(("causal", "rotate_v"), [(False, False), (True, True)])
def test_one_level_is_as_good_as_two_on_values_with_an_offset(
    causal: bool, rotate_v: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose WGMMA truncates, and scores alike enough for all keys to count."""
    monkeypatch.setattr(wgmma_steps, "add_products", add_as_the_tensor_cores)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 1, 64, generator=generator) for rows in (64, 1000, 1000))
    q, k, v = (x.bfloat16() for x in (0.1 * q, k, v + 3))
    exact, _ = attention_naive(q, k, v, causal=causal)

    def error(smooth_v: bool, two_level: bool) -> float:
        c = Fp8Quantization(block_k=128, rotate_v=rotate_v, smooth_v=smooth_v)
        parts = quantize_qkv(q, k, v, quantization=c)
        config = select_fp8_forward_config(64, 64, causal, "bfloat16", 1000, 128, two_level=two_level)
        out, _ = fp8_forward_on_numpy(config, parts, 0.125)
        restored = restore_values(out, parts, causal) if rotate_v else out
        return relative(restored.to(out.dtype), exact)

    one_level, two_levels, smooth = error(False, False), error(False, True), error(True, False)
    assert one_level > 4 * two_levels and smooth < two_levels < 3e-3
