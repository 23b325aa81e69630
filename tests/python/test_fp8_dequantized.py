"""FP8 on the kernel without WGMMA: what reaches that kernel, seen by a stand-in that computes in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig, select_ampere_forward_config
from hopper_attention import (
    compile_cache,
    explain,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
)
from hopper_attention.backends import Target
from hopper_attention.experiments.rmse import methods as rmse_methods
from hopper_attention.fp8_rules import choose_fp8_backend
from hopper_attention.launch import forward, fp8
from hopper_attention.launch.fp8 import problem_of
from hopper_attention.quantization import Fp8Quantization, from_descales, quantize_qkv
from hopper_attention.reference import attention_naive
from tests.python.fake_gpu import forget_launchers, pretend

pytestmark = pytest.mark.filterwarnings("ignore:FP8 attention in 16 bits")

A100 = Target("fake A100", (8, 0), assume_installed=True)
H200 = Target("fake H200", (9, 0), assume_installed=True)
T4 = Target("fake T4", (7, 5), assume_installed=True)
E4M3 = torch.float8_e4m3fn


class FakeGpu:
    """The CPU under another name. Its kernel is the oracle, which notes its tensors; ``configs`` is what was built."""

    def __init__(self) -> None:
        self.target = A100
        self.configs: list[AmpereForwardConfig] = []
        self.calls: list[tuple[Tensor, ...]] = []

    def get_forward(self, config: AmpereForwardConfig) -> Any:
        self.configs.append(config)
        return lambda *arguments: self.attend(config.causal, *arguments)

    def attend(
        self, causal: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> None:
        self.calls.append((q, k, v))
        exact, exact_lse = attention_naive(q, k, v, causal=causal, softmax_scale=scale)
        out.copy_(exact)
        if lse.numel():
            lse.copy_(exact_lse)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    pretend(monkeypatch, forward, fp8, target=lambda: fake.target, multiprocessors=108)
    monkeypatch.setattr(compile_cache, "get_forward", fake.get_forward)
    yield fake
    forget_launchers()


def qkv(
    seqlen_k: int = 203, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 113, 4, head_dim), (2, seqlen_k, 2, head_dim), (2, seqlen_k, 2, 32)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def values(data: Tensor, scale: Tensor, block: int) -> Tensor:
    """data (b, s, h, d) times the scale of each block, in float64, one row after the other."""
    rows = [
        data[:, i].double() * scale[:, :, i // block].double().unsqueeze(-1) for i in range(data.shape[1])
    ]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("transposed", [True, False], ids=["transposed V", "V in rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "quantization",
    [
        Fp8Quantization(),
        Fp8Quantization(rotate=False, block_q=48, block_k=80),
        Fp8Quantization(granularity="head"),
        Fp8Quantization(granularity="tensor", rotate=False),
        Fp8Quantization(rotate_v=True, smooth_k=True),
    ],
    ids=["block", "odd blocks", "head", "tensor", "all options"],
)
def test_the_kernel_is_given_what_the_parts_stand_for(
    gpu: FakeGpu, quantization: Fp8Quantization, dtype: torch.dtype, transposed: bool
) -> None:
    parts = quantize_qkv(*qkv(dtype=dtype), quantization=quantization)
    if not transposed:
        parts = replace(parts, v=parts.v.row_major())
    flash_attn_quantized_func(parts, backend="ampere")
    rows = parts.v.row_major()
    for given, part in zip(gpu.calls[0], (parts.q, parts.k, rows), strict=True):
        exact = values(part.data, part.scale, part.block)
        assert given.dtype == dtype and given.is_contiguous()
        # Half a unit in the last place, or of the smallest number.
        room = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
        assert ((given.double() - exact).abs() <= room).all()
    assert gpu.configs == [
        select_ampere_forward_config(str(dtype).removeprefix("torch."), 64, 32, False, "sm_80")
    ]


@pytest.mark.parametrize("head_dim", [16, 72])
@pytest.mark.parametrize("spread", [1.0, -3.0])
def test_fp8_tensors_with_descales(gpu: FakeGpu, spread: float, head_dim: int) -> None:
    data = [x.to(E4M3) for x in qkv(head_dim=head_dim)]
    generator = torch.Generator().manual_seed(1)
    q_descale, k_descale, v_descale = (spread * torch.rand(2, 2, generator=generator) for _ in range(3))
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out = flash_attn_func(*data, causal=True, backend="ampere", **descales)
    factors = q_descale.repeat_interleave(2, 1), k_descale, v_descale
    exact = [x.double() * factor.double()[:, None, :, None] for x, factor in zip(data, factors, strict=True)]
    for given, expected in zip(gpu.calls[0], exact, strict=True):
        assert given.dtype == torch.bfloat16
        assert ((given.double() - expected).abs() <= 2.0**-8 * expected.abs()).all()
    assert out.dtype == torch.bfloat16
    assert relative(out, attention_naive(*exact, causal=True)[0]) < 0.01
    flash_attn_func(*data, backend="ampere")
    assert all(torch.equal(given.float(), x.float()) for given, x in zip(gpu.calls[1], data, strict=True))


def test_e4m3_of_any_strides_is_made_contiguous(gpu: FakeGpu) -> None:
    q, k, v = (x.to(E4M3) for x in qkv())
    odd = torch.zeros(2, 203, 2, 67).to(E4M3)[..., :64].copy_(k)
    columns = v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert columns.stride(3) != 1
    flash_attn_quantized_func(from_descales(q, odd, columns, None, None, None, torch.bfloat16))
    for given, expected in zip(gpu.calls[0], (q, k, v), strict=True):
        assert given.is_contiguous() and torch.equal(given.float(), expected.float())


@pytest.mark.parametrize("causal", [False, True])
def test_rotations_cancel_and_the_lse_is_that_of_the_inputs(gpu: FakeGpu, causal: bool) -> None:
    q, k, v = qkv()
    k = (k.float() + 4 * torch.linspace(-1, 1, 64).roll(7)).to(k.dtype)
    oracle, oracle_lse = attention_naive(q, k, v, causal=causal, softmax_scale=0.1)
    for c in (
        Fp8Quantization(),
        Fp8Quantization(rotate=False),
        Fp8Quantization(smooth_k=True),
        Fp8Quantization(smooth_k=True, rotate_v=True, seed=5),
        Fp8Quantization(granularity="tensor", rotate_v=True),
    ):
        out, lse = flash_attn_fp8_func(q, k, v, 0.1, causal, True, quantization=c)
        emulated, emulated_lse = flash_attn_fp8_func(
            q, k, v, 0.1, causal, True, quantization=c, backend="reference"
        )
        # The same e4m3 inputs, but P in more digits.
        assert relative(out, oracle) < 1.02 * relative(emulated, oracle)
        assert relative(out, emulated) < 0.04
        assert (lse - emulated_lse).abs().max() < 0.05
        assert (lse - oracle_lse).abs().max() < 0.5
    assert len(gpu.calls) == 5


def test_empty_problems_launch_nothing(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    c = Fp8Quantization(smooth_k=True, rotate_v=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = flash_attn_fp8_func(q, k[:, :0], v[:, :0], None, False, True, quantization=c)
    assert gpu.calls == [] and not out.any() and bool((lse == -torch.inf).all())


def test_rows_without_keys_stay_empty(gpu: FakeGpu) -> None:
    q, k, v = qkv(seqlen_k=10)
    c = Fp8Quantization(smooth_k=True, rotate_v=True)
    out, lse = flash_attn_fp8_func(q, k, v, None, True, True, quantization=c)
    assert not out[:, :103].any() and bool((lse[:, :, :103] == -torch.inf).all())
    assert bool(lse[:, :, 103:].isfinite().all()) and len(gpu.calls) == 1


def test_it_warns_once_unless_it_was_asked_for(gpu: FakeGpu) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flash_attn_fp8_func(*qkv(), backend="ampere")
        flash_attn_fp8_func(*qkv(), backend="reference")
        assert caught == []
        for seqlen_k in (203, 203, 70):
            for dtype in (torch.float16, torch.bfloat16):
                flash_attn_fp8_func(*qkv(seqlen_k, dtype=dtype))
        flash_attn_func(*(x.to(E4M3) for x in qkv()))
    (message,) = [str(w.message) for w in caught]
    assert message == (
        "FP8 attention in 16 bits: fake A100 has compute capability 8.0; the kernels without WGMMA take FP8 "
        "dequantized to 16 bits, which gives no speed-up; 16-bit inputs do not need the detour"
    )
    assert len(gpu.calls) == 8


def test_gradients_are_those_of_the_same_attention(gpu: FakeGpu) -> None:
    """The forward on the kernel, the backward on what serves the CPU that stands for the GPU: torch's attention, or the
    reference where a kernel is asked for, which rounds P to 16 bits."""
    gradients = {}
    for backend in (None, "ampere", "reference"):
        inputs = [x.requires_grad_() for x in qkv()]
        c = Fp8Quantization(rotate_v=True, smooth_k=True)
        out = flash_attn_fp8_func(*inputs, causal=True, quantization=c, backend=backend)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        gradients[backend] = torch.autograd.grad(out, inputs, dout)
    assert len(gpu.calls) == 2
    for ours, same, emulated in zip(*gradients.values(), strict=True):
        assert bool(ours.any()) and relative(ours, same) < 0.005 and relative(ours, emulated) < 0.03


# the rule


def test_the_fp8_kernel_comes_first_on_hopper(gpu: FakeGpu) -> None:
    problem = problem_of(quantize_qkv(*qkv()), False)
    assert choose_fp8_backend(problem, H200, None).backend == "hopper"
    asked = choose_fp8_backend(problem, H200, "ampere")
    assert (asked.backend, asked.advice) == ("ampere", "")
    assert asked.reason == (
        "asked for with backend='ampere'; fake H200 has compute capability 9.0; the kernels without WGMMA take "
        "FP8 dequantized to 16 bits, which gives no speed-up"
    )
    gpu.target = H200
    flash_attn_fp8_func(*qkv(), backend="ampere")
    assert [config.arch for config in gpu.configs] == ["sm_90a"]


def test_what_16_bit_kernels_cannot_do_is_emulated(gpu: FakeGpu) -> None:
    q, k, v = (x.float() for x in qkv(head_dim=20))
    wide = quantize_qkv(*(torch.zeros(1, 2, 1, 264) for _ in "qkv"))
    for parts, reason in (
        (quantize_qkv(q, k, v), "the kernel writes float16 or bfloat16, not torch.float32"),
        (
            quantize_qkv(q.half(), k.half(), v.half()),
            "head_dim 20 and head_dim_v 32 must be multiples of 8 up",
        ),
        (
            replace(wide, dtype=torch.float16),
            "head_dim 264 and head_dim_v 264 must be multiples of 8 up to 256",
        ),
    ):
        choice = choose_fp8_backend(problem_of(parts, False), A100, None)
        assert choice.backend == "reference" and choice.reason.startswith(reason) and choice.advice
        with pytest.raises(
            ValueError, match=f"backend is 'ampere', but {reason}.*; allowed here: 'reference'"
        ):
            flash_attn_quantized_func(parts, backend="ampere")
    with pytest.warns(UserWarning, match="emulation, which is slow: the kernel writes .* not torch.float32"):
        out = flash_attn_fp8_func(q, k, v)
    assert gpu.calls == [] and torch.equal(out, flash_attn_fp8_func(q, k, v, backend="reference"))


def test_where_no_kernel_runs() -> None:
    for target, reason in (
        (T4, "fake T4 has compute capability 7.5 and the kernels are for 8.0,"),
        (Target("cpu"), "cpu is not an NVIDIA GPU"),
    ):
        problem = problem_of(quantize_qkv(*qkv()), False)
        assert choose_fp8_backend(problem, target, None).reason.startswith(reason)
        with pytest.raises(ValueError, match=f"backend is 'ampere', but {reason}"):
            choose_fp8_backend(problem, target, "ampere")
    with pytest.raises(
        ValueError, match="backend is 'ampere', but cpu is not an NVIDIA GPU; allowed here: 'ref"
    ):
        flash_attn_fp8_func(*qkv(), backend="ampere")
    with pytest.raises(
        ValueError, match=r"backend is 'hopper', but fake A100 .*; allowed here: 'ampere', 'ref"
    ):
        choose_fp8_backend(problem, A100, "hopper")


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((12, 0), "sm_120")]
)
def test_explain_says_what_becomes_of_fp8(capability: tuple[int, int], arch: str) -> None:
    q = torch.empty(1, 128, 2, 72, dtype=E4M3, device="meta")
    plan = explain(q, q, q, causal=True, device_capability=capability)
    assert plan.config == select_ampere_forward_config("bfloat16", 72, 72, True, arch)
    lines = str(plan).splitlines()
    assert lines[:2] == [
        "backend    ampere",
        f"reason     the given GPU has compute capability {capability[0]}.{capability[1]}; the kernels without WGMMA "
        "take FP8 dequantized to 16 bits, which gives no speed-up",
    ]
    assert lines[-2:] == [
        "copies     q, k and v are dequantized to bfloat16 by PyTorch",
        "note       16-bit inputs do not need the detour",
    ]


def test_explain_where_it_is_asked_for() -> None:
    q = torch.empty(1, 128, 2, 64, dtype=E4M3, device="meta")
    plan = explain(q, q, q, device_capability=(9, 0), backend="ampere")
    assert plan.backend == "ampere" and plan.config.name.startswith("ampere_fwd_sm_90a_bf16_d64_full")
    assert plan.reason.startswith("asked for with backend='ampere'; ") and plan.notes == ()
    assert plan.copies == ("q, k and v are dequantized to bfloat16 by PyTorch",)
    with pytest.raises(
        ValueError, match=r"backend is 'ampere', but the given GPU has compute capability 7.5"
    ):
        explain(q, q, q, device_capability=(7, 5), backend="ampere")


def test_the_accuracy_experiment_names_the_kernel(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopper_attention.backends.target_of", lambda device: gpu.target)
    attended = rmse_methods.run_fp8(Fp8Quantization())(*qkv(), True)
    assert attended.by == "16-bit kernel without WGMMA" and len(gpu.calls) == 1
