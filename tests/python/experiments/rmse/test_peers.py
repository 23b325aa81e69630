"""Peers' FP8 as rows of the accuracy table: what they are given, and how their output is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention.experiments.bench.peers import FA3_NEUTRAL, Prepared, Setting
from hopper_attention.experiments.rmse import methods as rmse_methods
from hopper_attention.experiments.rmse.run import RmseExperiment, compute_oracle
from hopper_attention.experiments.rmse.spec import draw_problem
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import attention_naive, attention_tiled_fp8
from tests.python.experiments.fakes import FakeOperator

PROBLEM = RmseExperiment(batch=2, seqlen=256, heads=2, head_dim=64)


class FakeFa3(FakeOperator):
    """Stands for FlashAttention-3's operator: float64 attention on what its descales make of its inputs."""

    schema = (
        "sgl_kernel::fwd(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
        "float? softmax_scale, bool is_causal, "
        + ", ".join(f"{'float' if value == 0.0 and name == 'softcap' else 'bool' if value is False else 'int'} {name}"
                    for name, value in FA3_NEUTRAL.items())
        + ") -> (Tensor, Tensor)"
    )  # fmt: skip

    def compute(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = (call[x].double() * call[f"{x}_descale"][:, None, :, None] for x in "qkv")
        out, lse = attention_naive(q, k, v, causal=call["is_causal"], softmax_scale=call["softmax_scale"])
        return out.bfloat16(), lse


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> FakeFa3:
    return FakeFa3().installed(monkeypatch)


def error_of(name: str) -> float:
    p = draw_problem(PROBLEM, 0)
    method = rmse_methods.parse_methods(name)[0]
    attended = method.run(p.q, p.k, p.v, True)
    oracle = compute_oracle(type(p)(p.q, p.k, p.v, True))
    assert attended.by == "FlashAttention-3 kernel" and attended.out.shape == p.q.shape
    return (attended.out.double() - oracle).square().mean().sqrt().item()


@pytest.mark.parametrize(("granularity", "shared"), [("tensor", True), ("head", False)])
def test_fa3_gets_e4m3_with_a_scale_by_tensor_or_by_head(
    fa3: FakeFa3, granularity: str, shared: bool
) -> None:
    error_of(f"fa3-fp8-{granularity}")
    call = fa3.calls[0]
    assert call["softmax_scale"] == 0.125 and call["is_causal"] is True
    p = draw_problem(PROBLEM, 0)
    settings = Fp8Quantization(rotate=False, granularity=granularity, smooth_v=False)
    parts = quantize_qkv(p.q, p.k, p.v, quantization=settings)
    for name, x, part in (("q", p.q, parts.q), ("k", p.k, parts.k), ("v", p.v, parts.v.row_major())):
        data, descale = call[name], call[f"{name}_descale"]
        assert (data.dtype, descale.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert descale.shape == (2, 2) and descale.is_contiguous()
        assert (len(descale.unique()) == 1) == shared
        assert torch.allclose(descale, part.scale[:, :, 0] * (part.largest / 448))
        scale = descale[:, None, :, None]
        # e4m3 rounds by 2^-4 of a number at most, and its subnormal numbers by half of 2^-9.
        assert ((data.float() * scale - x).abs() <= 2**-4 * x.abs() + 2**-10 * 1.001 * scale).all()


def test_our_rotation_is_given_to_fa3_as_well(fa3: FakeFa3) -> None:
    plain, rotated = error_of("fa3-fp8-tensor"), error_of("fa3-fp8-tensor-rotated")
    # Unrounded P makes the fake a little better than ours with the same scales, and no worse.
    p = draw_problem(PROBLEM, 0)
    parts = quantize_qkv(p.q, p.k, p.v, quantization=Fp8Quantization(granularity="tensor", smooth_v=False))
    ours = attention_tiled_fp8(parts, causal=True)[0].double()
    oracle, _ = attention_naive(p.q, p.k, p.v, causal=True)
    with_rounded_p = (ours - oracle).square().mean().sqrt().item()
    assert 0.5 * with_rounded_p < rotated < 1.02 * with_rounded_p
    assert rotated < plain


def test_cudnn_gets_the_problem_and_its_output_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def prepare(problem: Any, inputs: Any, setting: Setting, form: Any) -> Prepared:
        seen.append((problem.name, inputs, setting.device))
        out = attention_naive(inputs.q.double(), inputs.k.double(), inputs.v.double(), causal=True)[0]
        return Prepared(lambda: out / 4, "", lambda result: result * 4)

    monkeypatch.setattr(rmse_methods, "prepare_cudnn_fp8", prepare)
    p = draw_problem(PROBLEM, 0)
    oracle, _ = attention_naive(p.q, p.k, p.v, causal=True)
    for method in rmse_methods.parse_methods("cudnn-fp8,cudnn-fp8-rotated"):
        attended = method.run(p.q, p.k, p.v, True)
        assert attended.by == "cuDNN kernel"
        # A rotation of both q and k changes no score.
        assert (attended.out - oracle).abs().max().item() < 1e-4
    (name, plain, device), (_, rotated, _) = seen
    assert name == "fp16-b2-s256-h2-d64-causal" and device == "cpu"
    assert torch.equal(plain.q, p.q) and not torch.allclose(rotated.q, p.q.float())
    assert torch.equal(rotated.v, p.v)
