"""The FP8 kernel against its emulation, which rounds where it rounds, and against float64."""

from __future__ import annotations

import math

import pytest
import torch

from hopper_attention import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.experiments.rmse import RmseExperiment, compute_oracle, draw_problem
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, QuantizedTensor, quantize_qkv
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

LENGTHS = [(1, 1), (1, 239), (113, 203), (799, 3), (640, 640), (1023, 1024)]


def find_differences(parts: QuantizedQKV, causal: bool) -> list[str]:
    """What the kernel has worse than its emulation, measured against float64 on the dequantized inputs."""
    out, lse = flash_attn_quantized_func(parts, None, causal, True, backend="hopper")
    like, like_lse = flash_attn_quantized_func(parts, None, causal, True, backend="reference")
    oracle, _ = attention_naive(*(x.dequantize() for x in (parts.q, parts.k, parts.v)), causal=causal)

    def rms(x: torch.Tensor) -> float:
        return x.double().square().mean().sqrt().item()

    wrong = []
    error, emulated = rms(out.double() - oracle), rms(like.double() - oracle)
    # "not <=" so that NaN counts as wrong.
    if not error <= 1.05 * emulated + 2e-4 * rms(oracle) + 1e-12:
        wrong.append(f"RMS error {error:.3e}, emulation {emulated:.3e}, output {rms(oracle):.3e}")
    visible = like_lse > -math.inf
    if not bool(torch.equal(lse > -math.inf, visible)):
        wrong.append("LSE of rows without keys")
    # Seen so far: 2.0e-3 on N(0, 1), 2.0e-2 where scores are in the tens. Presumably FP8 WGMMA's accumulation, which
    # keeps fewer bits than float32 and which the emulation leaves out; the allowance is not derived from it.
    if not bool(((lse - like_lse)[visible].abs() <= 5e-3 + 2e-3 * like_lse[visible].abs()).all()):
        wrong.append(f"LSE differs by {(lse - like_lse)[visible].abs().max().item():.3e}")
    if not bool((out.transpose(1, 2)[~visible] == 0).all()):
        wrong.append("rows without keys are not 0")
    return wrong


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_kernel_is_as_good_as_its_emulation(draw, head_dim: int, causal: bool, granularity: str) -> None:
    failures = {}
    for seqlens in LENGTHS:
        for heads in ((2, 2), (4, 1)):
            x = draw(torch.bfloat16, 2, seqlens, heads, head_dim)
            c = Fp8Quantization(granularity=granularity, rotate=head_dim != 96)
            wrong = find_differences(quantize_qkv(x.q, x.k, x.v, quantization=c), causal)
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


def test_scales_of_every_block_are_applied(draw) -> None:
    # Each block gets a scale of its own, far from the others', whatever its data would have asked for.
    x = draw(torch.float16, 2, (300, 700), (4, 2), 128)
    parts = quantize_qkv(x.q, x.k, x.v)

    def rescaled(tensor: QuantizedTensor, spread: float) -> QuantizedTensor:
        factors = torch.linspace(-spread, spread, tensor.scale.numel(), device=tensor.scale.device).exp2()
        return QuantizedTensor(tensor.data, tensor.scale * factors.view_as(tensor.scale), tensor.block)

    odd = QuantizedQKV(
        rescaled(parts.q, 0.5),
        rescaled(parts.k, 0.5),
        rescaled(parts.v, 6.0),
        parts.quantization,
        parts.dtype,
    )
    assert find_differences(odd, False) == [] and find_differences(odd, True) == []


def test_head_dim_v_differs(draw) -> None:
    for head_dim, head_dim_v in ((192, 128), (64, 128), (128, 32)):
        x = draw(torch.bfloat16, 1, (333, 517), (2, 1), head_dim, head_dim_v)
        assert find_differences(quantize_qkv(x.q, x.k, x.v), True) == []


def test_growing_scores(draw) -> None:
    x = draw(torch.float16, 1, (256, 2048), (2, 2), 128)
    weights = torch.linspace(0.05, 2.0, 2048, device=x.k.device, dtype=x.k.dtype).view(1, -1, 1, 1)
    for k in (0.02 * x.k + weights, 0.02 * x.k + weights.flip(1)):
        parts = quantize_qkv(x.q.abs() + 0.5, k, x.v, quantization=Fp8Quantization(rotate=False))
        assert find_differences(parts, False) == [] and find_differences(parts, True) == []


def test_twenty_runs_give_the_same_bits(draw) -> None:
    x = draw(torch.bfloat16, 2, (1000, 1000), (4, 2), 128)
    parts = quantize_qkv(x.q, x.k, x.v)
    first = flash_attn_quantized_func(parts, causal=True, backend="hopper")
    assert all(torch.equal(first, flash_attn_quantized_func(parts, causal=True)) for _ in range(19))


def test_rmse_on_the_papers_outlier_inputs(device: str) -> None:
    experiment = RmseExperiment(seqlen=8448, heads=4, head_dim=128, dtype="float16", device=device)
    problem = draw_problem(experiment, seed=0)
    oracle = compute_oracle(problem)

    def rmse(granularity: str, rotate: bool, backend: str) -> float:
        c = Fp8Quantization(granularity=granularity, rotate=rotate)
        out = flash_attn_fp8_func(problem.q, problem.k, problem.v, quantization=c, backend=backend)
        return (out.double() - oracle).square().mean().sqrt().item()

    both, emulated = rmse("block", True, "hopper"), rmse("block", True, "reference")
    assert both <= 9.5e-3 and both <= 1.05 * emulated
