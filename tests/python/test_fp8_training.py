"""Gradients of FP8 attention on the emulation."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_fp8_func, fp8_training
from hopper_attention.fp8_ops import Options
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import attention_naive
from hopper_attention.rotation import rotate_back, rotate_head_dim

DEFAULT = Fp8Quantization()
NO_DISPATCH_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor")
NO_SCHEMA_CHECK = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""What opcheck can do with FP8 inputs: its schema test multiplies them, which torch cannot do on a CPU."""


def leaves(scale: float = 1.0, seqlens=(70, 130), dtype=torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, seqlens[0], 4, 64), (1, seqlens[1], 2, 64), (1, seqlens[1], 2, 32)
    factors = (scale, scale, 1.0)
    drawn = (f * torch.randn(s, generator=generator) for s, f in zip(shapes, factors, strict=True))
    return [x.to(dtype).requires_grad_() for x in drawn]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "quantization",
    [
        DEFAULT,
        Fp8Quantization(rotate=False, granularity="head"),
        Fp8Quantization(rotate_v=True, smooth_k=True),
        Fp8Quantization(granularity="tensor", seed=3),
        Fp8Quantization(block_q=32),
    ],
)
def test_it_is_the_gradient_of_attention_on_the_dequantized_inputs(quantization, causal: bool) -> None:
    q, k, v = leaves(1.5)
    out = flash_attn_fp8_func(q, k, v, 0.1, causal, quantization=quantization)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    ours = torch.autograd.grad(out, (q, k, v), dout)
    c = quantization
    parts = quantize_qkv(q, k, v, quantization=c)
    exact = [x.dequantize().double().requires_grad_() for x in (parts.q, parts.k, parts.v)]
    turned = rotate_head_dim(dout, c.seed) if c.rotate_v else dout
    rows, _ = attention_naive(*exact, causal=causal, softmax_scale=0.1)
    expected = list(torch.autograd.grad(rows, exact, turned.double()))
    for i in range(2 * c.rotate):
        expected[i] = rotate_back(expected[i], c.seed)
    if c.rotate_v:
        expected[2] = rotate_back(expected[2], c.seed)
    # What is left is the rounding of P to e4m3, which the output and so delta have, and 16 bits.
    for gradient, e, limit in zip(ours, expected, (0.03, 0.03, 0.01), strict=True):
        assert gradient.dtype == torch.float16 and relative(gradient, e.double()) < limit


def test_it_is_near_the_gradient_of_exact_attention() -> None:
    for scale, limit in ((1.0, 0.08), (2.0, 0.16)):
        q, k, v = leaves(scale)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        out = flash_attn_fp8_func(q, k, v, causal=True)
        dout = torch.randn_like(out)
        ours = torch.autograd.grad(out, (q, k, v), dout)
        expected = torch.autograd.grad(attention_naive(*exact, causal=True)[0], exact, dout.double())
        for gradient, e in zip(ours, expected, strict=True):
            assert relative(gradient, e) < limit


def test_the_lse_has_a_gradient() -> None:
    q, k, v = leaves()
    _, lse = flash_attn_fp8_func(q, k, v, None, True, True, quantization=Fp8Quantization(rotate=False))
    finite = lse[lse > -math.inf]
    gradient = torch.autograd.grad(finite.sum(), q, retain_graph=True)[0]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    _, expected_lse = attention_naive(*exact, causal=True)
    expected = torch.autograd.grad(expected_lse[expected_lse > -math.inf].sum(), exact[0])[0]
    assert relative(gradient, expected) < 0.06
    _, lse = flash_attn_fp8_func(q, k, v, None, False, True, quantization=Fp8Quantization(smooth_k=True))
    with pytest.raises(NotImplementedError, match="smooth_k=True, whose mean of K is not kept"):
        lse.sum().backward()


def test_it_gives_what_the_plain_call_gives() -> None:
    q, k, v = leaves()
    with torch.no_grad():
        expected, expected_lse = flash_attn_fp8_func(q, k, v, None, True, True)
    out, lse = flash_attn_fp8_func(q, k, v, None, True, True)
    assert out.requires_grad and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    q, k, v = leaves(seqlens=(5, 0))
    out = flash_attn_fp8_func(q, k, v)
    out.sum().backward()
    assert not out.any() and not q.grad.any() and k.grad.shape == k.shape


def test_opcheck() -> None:
    tensors = leaves()
    options = (0.125, True, None, False)
    for c in (
        DEFAULT,
        Fp8Quantization(block_k=64, smooth_v=True),
        Fp8Quantization(granularity="head", smooth_k=True),
    ):
        arguments = (*tensors, *Options.of(c), *options)
        operator = torch.ops.hopper_attention.forward_fp8_of_16_bits.default
        torch.library.opcheck(operator, arguments, test_utils=NO_DISPATCH_CHECK)
        with torch.no_grad():
            results = operator(*arguments)
        arguments = (torch.ones_like(results[0]), None, *results, *arguments[3:])
        operator = torch.ops.hopper_attention.backward_fp8_of_16_bits.default
        torch.library.opcheck(operator, arguments, test_utils=NO_SCHEMA_CHECK)


def test_a_compiled_call_without_a_gradient_leaves_out_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plain call, which so has the same kernels."""
    wanted = []
    attend = fp8_training.attend_and_undo
    monkeypatch.setattr(
        fp8_training, "attend_and_undo", lambda *given: wanted.append(given[5]) or attend(*given)
    )

    def call(*x: Tensor) -> Tensor:
        return flash_attn_fp8_func(*x, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = leaves()
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), call(q, k, v))
    assert torch.equal(compiled(q.detach(), k.detach(), v.detach()), call(q.detach(), k.detach(), v.detach()))
    assert wanted == [False, False]
    compiled(q, k, v).sum().backward()
    assert wanted[2] is True and q.grad is not None and q.grad.any()


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_has_any_gradient(strict: bool) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_fp8_func(q, k, v, causal=True)

    tensors = leaves()
    program = torch.export.export(Attention(), tuple(x.detach() for x in tensors), strict=strict)
    expected = torch.autograd.grad(flash_attn_fp8_func(*tensors, causal=True).sum(), tensors)
    found = torch.autograd.grad(program.module()(*tensors).sum(), tensors)
    assert all(map(torch.equal, found, expected))


def test_a_gradient_of_a_call_without_an_lse_is_refused() -> None:
    call = *Options.of(DEFAULT), 0.125, True, None, False, -1, -1, 0, False
    out, lse, *_ = torch.ops.hopper_attention.forward_fp8_of_16_bits(*leaves(), *call, False)
    assert lse.shape[2] == 0
    with pytest.raises(NotImplementedError, match="wants_lse=True"):
        out.sum().backward()


def test_compilation() -> None:
    q, k, v = leaves()
    compiled = torch.compile(
        lambda *x: flash_attn_fp8_func(*x, causal=True), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), flash_attn_fp8_func(q, k, v, causal=True))


LENGTHS = (5, 9, 33, 64, 70, 96, 128, 130, 200, 257, 300, 511)


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_one_graph_serves_every_length(needs_grad: bool, is_marked: bool) -> None:
    """Also across 4096 keys, where blocks get wider at head_dim 64."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        flash_attn_fp8_func, fullgraph=True, dynamic=None if is_marked else True, backend=count
    )
    for seqlen in (*LENGTHS, 4200):
        q, k, v = (x[:, :, :2].detach() for x in leaves(seqlens=(min(seqlen, 600), seqlen + 3)))
        for x in (q, k, v):
            x.requires_grad_(needs_grad)
            if is_marked:
                torch._dynamo.mark_dynamic(x, 1)
        out, expected = compiled(q, k, v), flash_attn_fp8_func(q, k, v)
        assert torch.equal(out, expected)
        if needs_grad and seqlen in (5, 130, 4200):
            found, wanted = (
                torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (out, expected)
            )
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert len(graphs) == 1


def test_bad_arguments_and_second_derivatives_are_refused() -> None:
    q, k, v = leaves()
    with pytest.raises(ValueError, match="softmax_scale is -1"):
        flash_attn_fp8_func(q, k, v, -1)
    with pytest.raises(ValueError, match="backend is 'gpu'"):
        flash_attn_fp8_func(q, k, v, backend="gpu")
    out = flash_attn_fp8_func(q, k, v)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_attention_makes_the_same_blocks(two_level: bool, dynamic: bool) -> None:
    """Also where lengths are symbols; 3000 keys have blocks of 192 with one level of accumulation and 128 with two."""
    q, k, v = (torch.randn(1, n, 1, 128).half() for n in (8, 3000, 3000))
    attention = partial(flash_attn_fp8_func, causal=True, two_level_accumulation=two_level)
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="eager")
    assert torch.equal(compiled(q, k, v), attention(q, k, v))
    q.requires_grad_()
    gradients = [torch.autograd.grad(f(q, k, v).float().sum(), q)[0] for f in (compiled, attention)]
    assert torch.equal(*gradients)
