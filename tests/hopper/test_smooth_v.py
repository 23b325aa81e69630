"""Smooth V in the FP8 kernel, on NumPy: truncated sums lose less of values without their mean."""

from __future__ import annotations

import pytest
import torch

from hopper.config import select_fp8_forward_config
from hopper_attention.quantization import Fp8Quantization, quantize_qkv, restore_values
from hopper_attention.reference import attention_naive
from tests.hopper import hopper_steps
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


@pytest.mark.parametrize(("causal", "rotate_v"), [(False, False), (True, True)])
def test_one_level_is_as_good_as_two_on_values_with_an_offset(
    causal: bool, rotate_v: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose WGMMA truncates, and scores alike enough for all keys to count."""
    monkeypatch.setattr(hopper_steps, "add_products", add_as_the_tensor_cores)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 1, 64, generator=generator) for rows in (64, 1000, 1000))
    q, k, v = (x.bfloat16() for x in (0.1 * q, k, v + 3))
    exact, _ = attention_naive(q, k, v, causal=causal)

    def error(smooth_v: bool, two_level: bool) -> float:
        c = Fp8Quantization(block_k=128, rotate_v=rotate_v, smooth_v=smooth_v)
        parts = quantize_qkv(q, k, v, quantization=c)
        config = select_fp8_forward_config(64, 64, causal, "bfloat16", 1000, 128, two_level=two_level)
        out, _ = fp8_forward_on_numpy(config, parts, 0.125)
        return relative(restore_values(out, parts, causal).to(out.dtype), exact)

    one_level, two_levels, smooth = error(False, False), error(False, True), error(True, False)
    assert one_level > 4 * two_levels and smooth < two_levels < 3e-3
