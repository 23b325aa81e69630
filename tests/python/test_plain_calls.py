"""Calls that are no plain ones: fake tensors and the like give shapes, and never reach a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from hopper.mean.config import ValueMeanConfig
from hopper.quantize.config import QuantizeConfig
from hopper_attention import (
    Fp8Quantization,
    compile_cache,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    quantize_qkv,
)
from hopper_attention.launch import forward, fp8, quantize
from hopper_attention.plain_calls import are_plain_arguments, is_plain_call, needs_gradient
from hopper_attention.quantization import QuantizedQKV, QuantizedTensor, TransposedV
from tests.python.fake_gpu import forget_launchers, pretend

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_two_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_quantized_func(quantize_qkv(q, k, v))


NAMES = {QuantizeConfig: "quantizer", ValueMeanConfig: "mean"}

EVERY_FUNCTION = (flash_attn_func, flash_attn_fp8_func, in_two_steps)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every device is a Hopper GPU, whose kernels compute nothing; the list gets a name for each launch."""
    seen: list[str] = []

    def kernel(name: str) -> Callable[..., None]:
        return lambda *arguments: seen.append(name)

    pretend(monkeypatch, forward, fp8, quantize)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: kernel("attention"))
    monkeypatch.setattr(compile_cache, "get_quantize", lambda config: kernel(NAMES[type(config)]))
    yield seen
    forget_launchers()


def empty(device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = (2, 9, 4, 64), (2, 13, 2, 64), (2, 13, 2, 32)
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def test_plain_tensors_reach_the_kernels(launches: list[str]) -> None:
    """So that the other tests here mean something."""
    flash_attn_fp8_func(*empty("cpu"))
    assert launches == ["mean", "quantizer", "attention"]
    launches.clear()
    in_two_steps(*empty("cpu"))
    assert launches == ["mean", "quantizer", "attention"]


@pytest.mark.parametrize("attention", EVERY_FUNCTION)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fake_tensors_reach_no_kernel(launches: list[str], attention: Attention, device: str) -> None:
    with FakeTensorMode():
        out = attention(*empty(device))
    assert out.shape == (2, 9, 4, 32) and out.dtype == torch.bfloat16 and out.device.type == device
    assert out.is_contiguous() and launches == []


@pytest.mark.parametrize("attention", EVERY_FUNCTION)
def test_fake_tensors_whose_mode_has_ended_reach_no_kernel(launches: list[str], attention: Attention) -> None:
    with FakeTensorMode():
        tensors = empty("cuda")
    assert attention(*tensors).shape == (2, 9, 4, 32) and launches == []


def test_the_lse_of_fake_tensors(launches: list[str]) -> None:
    with FakeTensorMode():
        tensors = empty("cuda")
        for c in (Fp8Quantization(), Fp8Quantization(smooth_k=True)):
            for lse in (
                flash_attn_fp8_func(*tensors, return_attn_probs=True, quantization=c)[1],
                flash_attn_quantized_func(quantize_qkv(*tensors, quantization=c), return_attn_probs=True)[1],
            ):
                assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32 and lse.device.type == "cuda"
    assert launches == []


@pytest.mark.parametrize(
    "c",
    [
        Fp8Quantization(),
        Fp8Quantization(block_q=32, block_k=64, seed=4),
        Fp8Quantization(granularity="head", smooth_k=True, smooth_v=True),
        Fp8Quantization(granularity="tensor", rotate_v=True, smooth_v=True),
    ],
)
@pytest.mark.parametrize("sizes", [(9, 13), (70, 200), (9, 0), (0, 13)])
def test_quantized_fake_tensors_are_as_real_ones(c: Fp8Quantization, sizes: tuple[int, int]) -> None:
    shapes = (2, sizes[0], 4, 64), (2, sizes[1], 2, 64), (2, sizes[1], 2, 32)
    real = quantize_qkv(*(torch.randn(shape).half() for shape in shapes), quantization=c)
    with FakeTensorMode():
        tensors = (torch.empty(shape, dtype=torch.float16, device="cuda") for shape in shapes)
        fake = quantize_qkv(*tensors, quantization=c)
    assert facts(fake) == facts(real)
    assert all(x.device.type == "cuda" for x in tensors_of(fake))


def tensors_of(parts: QuantizedQKV) -> list[Tensor]:
    q, k, v = parts.q, parts.k, parts.v
    return [q.data, q.scale, k.data, k.scale, v.data, v.scale, parts.shift, parts.mean_v]


def facts(parts: QuantizedQKV) -> list[Any]:
    """All that is known of quantized tensors but their values and device."""
    assert isinstance(parts.q, QuantizedTensor) and isinstance(parts.v, TransposedV)
    return [
        *((x.shape, x.stride(), x.dtype) for x in tensors_of(parts)),
        *((x.block, x.largest) for x in (parts.q, parts.k)),
        (parts.v.block, parts.v.seqlen, parts.quantization, parts.dtype),
    ]


def test_wrong_fake_tensors_are_refused_as_real_ones() -> None:
    with FakeTensorMode():
        q, k, v = empty("cpu")
        for attention in (flash_attn_fp8_func, quantize_qkv):
            with pytest.raises(ValueError, match=r"k has shape \(1, 13, 2, 64\)"):
                attention(q, k[:1], v)
            with pytest.raises(TypeError, match=r"q has dtype torch.float64, allowed: torch.float16"):
                attention(q.double(), k.double(), v.double())
        with pytest.raises(ValueError, match="backend is 'fast', allowed: 'fused', 'torch' or None"):
            quantize_qkv(q, k, v, backend="fast")


# the rule


def plain(x: Tensor) -> bool:
    return is_plain_call(x, x, x)


def test_what_is_plain() -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert plain(q) and plain(q.clone().requires_grad_())
    with torch.no_grad(), torch.device("cpu"):
        assert plain(q)
    with torch.inference_mode():
        assert plain(torch.zeros(1))
    assert not is_plain_call([1.0], q, q)
    parameter = torch.nn.Parameter(q)
    assert not (is_plain_call(parameter, q, q) or is_plain_call(q, parameter, q))
    assert not is_plain_call(q, q, parameter)


def test_what_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 1, 8)
    seen: dict[str, bool] = {}

    def look(name: str) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            seen[name] = plain(x)
            return x.float().sum()

        return function

    with FakeTensorMode():
        look("fake")(torch.zeros(1, 1, 1, 8))
    with FlopCounterMode(display=False):
        look("mode")(q)
    torch.func.vmap(look("vmap"))(q)
    torch.func.grad(look("grad"))(q)
    torch.func.jvp(look("jvp"), (q,), (q,))
    torch.func.functionalize(look("functionalize"))(q)
    with forward_ad.dual_level():
        look("dual")(forward_ad.make_dual(q, q))
    torch.jit.trace(look("traced"), (q,), check_trace=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    look("compiled")(q)
    names = ("fake", "mode", "vmap", "grad", "jvp", "functionalize", "dual", "traced", "compiled")
    assert seen == dict.fromkeys(names, False)


def test_who_needs_a_gradient() -> None:
    x, learned = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert needs_gradient(x, learned) and not needs_gradient(x, x)
    with torch.no_grad():
        assert not needs_gradient(x, learned)


def test_which_arguments_of_an_operator_are_plain() -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert are_plain_arguments((q, torch.nn.Parameter(q), None, 0.5, True, 3, "hopper", torch.float16))
    assert not are_plain_arguments((q, [q])) and not are_plain_arguments((q.to("meta"), 0.5))
    with FakeTensorMode():
        assert not are_plain_arguments((torch.zeros(1), 0.5))
    with FlopCounterMode(display=False):
        assert not are_plain_arguments((q, 0.5))
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    # Its memory is that of q, which the wrapper does not have.
    assert type(kept[0]) is Tensor and not are_plain_arguments((q, kept[0]))


def test_a_batch_of_gradients_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(4)
    leaves = [torch.randn(1, 5, 2, 16, generator=generator).half().requires_grad_() for _ in range(3)]
    out = flash_attn_func(*leaves, causal=True)
    douts = torch.randn(3, *out.shape, generator=generator).half()
    batch = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        each = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(x[i], y) for x, y in zip(batch, each, strict=True))
