"""torch.func and forward mode: reverse mode and vmap give what plain calls give, forward mode is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from hopper_attention import (
    Fp8Quantization,
    flash_attn_combine,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_with_kvcache,
    quantize_qkv,
)
from hopper_attention.reference import attention_naive

Attention = Callable[..., Tensor]

EVERY_OPTION = Fp8Quantization(granularity="head", smooth_k=True, smooth_v=True, rotate_v=True, seed=3)


def sixteen_bit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, 0.2, True)


def fp8(q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization | None = None) -> Tensor:
    return flash_attn_fp8_func(q, k, v, 0.2, True, quantization=quantization or Fp8Quantization())


def in_two_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_quantized_func(quantize_qkv(q, k, v), 0.2, True)


DIFFERENTIABLE = pytest.mark.parametrize(
    "attention",
    [sixteen_bit, fp8, partial(fp8, quantization=EVERY_OPTION)],
    ids=["16 bits", "fp8", "fp8 with every option"],
)
EVERY_FUNCTION = pytest.mark.parametrize("attention", [sixteen_bit, fp8, in_two_steps])


def qkv(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 20, 4, 64), (3, 40, 2, 64), (3, 40, 2, 32)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def loss_of(attention: Attention) -> Attention:
    return lambda *tensors: attention(*tensors).float().square().sum()


def loss_of_one(attention: Attention) -> Attention:
    """The loss of one entry of a batch."""
    return lambda *tensors: loss_of(attention)(*(x[None] for x in tensors))


def gradients(attention: Attention) -> tuple[Tensor, ...]:
    """As autograd gives them."""
    leaves = [x.requires_grad_() for x in qkv()]
    return torch.autograd.grad(loss_of(attention)(*leaves), leaves)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(found) == len(expected) == 3
    assert all(x.any() and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# Reverse mode


@DIFFERENTIABLE
def test_reverse_mode(attention: Attention) -> None:
    expected = gradients(attention)
    assert_same(grad(loss_of(attention), (0, 1, 2))(*qkv()), expected)
    assert_same(jacrev(loss_of(attention), (0, 1, 2))(*qkv()), expected)
    _, pull = vjp(loss_of(attention), *qkv())
    assert_same(pull(torch.tensor(1.0)), expected)


@DIFFERENTIABLE
def test_jacobian_of_the_output(attention: Attention) -> None:
    """A backward pass for each element of the output, all in one."""
    q, k, v = (x[:1, :3] for x in qkv())
    jacobian = jacrev(lambda x: attention(x, k, v)[..., :2])(q)
    leaf = q.clone().requires_grad_()
    out = attention(leaf, k, v)
    for index in ((0, 0, 0, 0), (0, 2, 1, 1), (0, 1, 3, 0)):
        (expected,) = torch.autograd.grad(out[index], leaf, retain_graph=True)
        torch.testing.assert_close(jacobian[index], expected, rtol=0, atol=1e-6)
    assert jacobian.shape == (1, 3, 4, 2, 1, 3, 4, 64) and jacobian.any()


@pytest.mark.parametrize("attend", [flash_attn_func, flash_attn_fp8_func])
def test_gradient_of_the_lse(attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    q, k, v = qkv()

    def loss(x: Tensor) -> Tensor:
        return attend(x, k, v, return_attn_probs=True)[1].square().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(grad(loss)(q), expected) and expected.any()


def test_the_lse_with_smooth_k_has_no_gradient() -> None:
    q, k, v = qkv()
    smooth = Fp8Quantization(smooth_k=True)
    with pytest.raises(NotImplementedError, match="smooth_k=True, whose mean of K is not kept"):
        grad(lambda x: flash_attn_fp8_func(x, k, v, None, False, True, quantization=smooth)[1].sum())(q)


# Samples


@DIFFERENTIABLE
def test_gradients_by_sample(attention: Attention) -> None:
    expected = gradients(attention)
    one = loss_of_one(attention)
    assert_same(vmap(grad(one, (0, 1, 2)))(*qkv()), expected)
    assert_same(grad(lambda *x: vmap(one)(*x).sum(), (0, 1, 2))(*qkv()), expected)


@EVERY_FUNCTION
def test_samples_are_entries_of_a_batch(attention: Attention) -> None:
    q, k, v = qkv()
    expected = attention(q, k, v)
    assert torch.equal(vmap(lambda *x: attention(*(t[None] for t in x))[0])(q, k, v), expected)
    several = torch.stack([q, 2 * q], 2)
    found = vmap(attention, in_dims=(2, None, None), out_dims=1)(several, k, v)
    assert torch.equal(found[:, 0], expected) and torch.equal(found[:, 1], attention(2 * q, k, v))
    nested = vmap(vmap(lambda *x: attention(*(t[None] for t in x))[0]))(*(x[None] for x in (q, k, v)))
    assert torch.equal(nested[0], expected)
    assert vmap(attention)(*(x.new_empty(0, *x.shape) for x in (q, k, v))).shape == (0, *expected.shape)


def test_samples_that_share_a_scale_with_nobody() -> None:
    """One scale for a whole tensor is one for each sample."""
    c = Fp8Quantization(granularity="tensor")
    attention = partial(fp8, quantization=c)
    q, k, v = qkv()
    q = q * torch.tensor([1.0, 4.0, 0.1], dtype=q.dtype)[:, None, None, None]
    alone = [attention(*(x[i : i + 1] for x in (q, k, v)))[0] for i in range(3)]
    assert not torch.equal(attention(q, k, v)[0], alone[0])
    found = vmap(lambda *x: attention(*(t[None] for t in x))[0])(q, k, v)
    assert torch.equal(found, torch.stack(alone))
    scales = vmap(lambda *x: quantize_qkv(*(t[None] for t in x), quantization=c).q.scale)(q, k, v)
    assert scales.shape == (3, 1, 4, 1) and len(scales.unique()) == 3


def test_samples_of_fp8_tensors() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    scale = torch.rand(3, 2) + 0.5
    expected = flash_attn_func(q, k, v, q_descale=scale)

    def one(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return flash_attn_func(q[None], k[None], v[None], q_descale=scale[None])[0]

    assert torch.equal(vmap(one)(q, k, v, scale), expected)


def test_an_ensemble_of_modules() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 3 * 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).half().unflatten(-1, (3, 1, 32)).unbind(2)
            return flash_attn_func(q, k, v)

    layers = [Layer() for _ in range(3)]
    parameters, _ = stack_module_state(layers)
    x = torch.randn(2, 10, 16)
    found = vmap(lambda p: functional_call(layers[0], p, (x,)))(parameters)
    for i, layer in enumerate(layers):
        torch.testing.assert_close(found[i], layer(x), rtol=0, atol=2e-3)


@DIFFERENTIABLE
def test_transforms_are_compiled(attention: Attention) -> None:
    torch._dynamo.reset()
    expected = gradients(attention)
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    assert_same(compiled(grad(loss_of(attention), (0, 1, 2)))(*qkv()), expected)
    assert_same(compiled(vmap(grad(loss_of_one(attention), (0, 1, 2))))(*qkv()), expected)


# Forward mode, and what has no gradient


@EVERY_FUNCTION
def test_forward_mode_is_refused(attention: Attention) -> None:
    q, k, v = qkv()
    refused = pytest.raises(
        NotImplementedError, match=r"forward-mode derivatives.*use reverse mode, torch\.func\.grad"
    )
    with refused:
        jvp(lambda x: attention(x, k, v), (q,), (q,))
    with refused:
        jacfwd(lambda x: loss_of(attention)(q, k, x))(v)
    with refused, forward_ad.dual_level():
        attention(q, forward_ad.make_dual(k, k), v)
    with refused, forward_ad.dual_level():
        torch.compile(attention, backend="aot_eager")(forward_ad.make_dual(q, q), k, v)


@DIFFERENTIABLE
def test_second_derivatives_are_refused(attention: Attention) -> None:
    q, k, v = qkv()

    def loss(x: Tensor) -> Tensor:
        return loss_of(attention)(x, k, v)

    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        hessian(loss)(q)
    with pytest.raises(NotImplementedError, match="differentiated again"):
        grad(lambda x: grad(loss)(x).float().sum())(q)


@EVERY_FUNCTION
def test_a_dual_level_without_dual_tensors_changes_nothing(attention: Attention) -> None:
    expected = attention(*qkv())
    with forward_ad.dual_level():
        assert torch.equal(attention(*qkv()), expected)


def test_what_the_refusals_name_works() -> None:
    q, k, v = (x.double()[:1, :5] for x in qkv())
    _, tangent = jvp(lambda x: attention_naive(x, k, v)[0], (q,), (q,))
    step = 1e-6
    ahead, behind = (attention_naive(q + sign * step * q, k, v)[0] for sign in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=0, atol=1e-7)


def test_quantization_has_no_gradient() -> None:
    """Autograd sees a constant, as ever; torch.func, which would take that for a gradient of zero, is told."""
    q, k, v = qkv()
    leaf = q.clone().requires_grad_()
    assert not quantize_qkv(leaf, k, v).q.scale.requires_grad and not in_two_steps(leaf, k, v).requires_grad
    refused = pytest.raises(
        NotImplementedError, match="which have no gradient: train with flash_attn_fp8_func"
    )
    with refused:
        grad(lambda x: quantize_qkv(x, k, v).q.scale.sum())(q)
    with refused:
        grad(lambda x: loss_of(in_two_steps)(x, k, v))(q)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        jvp(lambda x: quantize_qkv(x, k, v).q.scale, (q,), (q,))
    parts = quantize_qkv(q, k, v)
    parts.q.scale.requires_grad_()
    with refused:
        flash_attn_quantized_func(parts).sum().backward()


def on_a_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_with_kvcache(q, k, v, causal=True)


def appended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    caches = torch.zeros(2, 1, 9, 2, 16, dtype=q.dtype)
    return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0)


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of q as the outputs of two parts and the first columns of k as their LSEs."""
    return flash_attn_combine(
        q.float()[None].repeat(2, 1, 1, 1, 1), k.float()[None, ..., 0].repeat(2, 1, 1, 1)
    )[0]


@pytest.mark.parametrize("call", [on_a_cache, appended, merged])
@pytest.mark.parametrize("which", [0, 1])
def test_forward_mode_is_refused_where_there_is_no_gradient_at_all(call: Attention, which: int) -> None:
    """Operators that know no tangents took these for constants: the derivative was 0."""
    g = torch.Generator().manual_seed(3)
    given = [torch.randn(1, 9, 2, 16, generator=g).bfloat16() for _ in range(3)]

    def of(x: Tensor) -> Tensor:
        return call(*given[:which], x, *given[which + 1 :])

    x = given[which]
    refused = partial(
        pytest.raises, NotImplementedError, match=r"^forward-mode derivatives of (att|mer).*attention_naive"
    )
    with refused():
        jvp(of, (x,), (x,))
    with refused():
        jacfwd(of)(x)
    with refused():
        jvp(lambda y: grad(lambda z: (z * of(y)).sum())(x.float()), (x,), (x,))
    with refused(), forward_ad.dual_level():
        of(forward_ad.make_dual(x, x))
    with refused(), forward_ad.dual_level():
        torch.compile(of, backend="eager")(forward_ad.make_dual(x, x))
    expected = of(x)
    value, tangent = jvp(lambda y: y.sum() + of(x), (x,), (x,))
    assert torch.equal(value, x.sum() + expected)
    assert torch.equal(tangent, x.sum().expand_as(tangent))
    with forward_ad.dual_level():
        assert torch.equal(of(x), expected)
