"""scaled_dot_product_attention on our kernels: what is registered, what is served, and what is left to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention.integrations import torch as ours

flash = torch.ops.aten._scaled_dot_product_flash_attention


def draw(heads: int = 4, seqlen: int = 12, head_dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    g = torch.Generator().manual_seed(heads)
    return torch.randn(2, heads, seqlen, head_dim, generator=g).to(dtype)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"q": draw(seqlen=9), "is_causal": True}, "top-left"),
        ({"q": draw(dtype=torch.float32)}, "dtypes"),
        ({"q": draw(head_dim=12), "k": draw(2, head_dim=12), "v": draw(2, head_dim=12)}, "head dimensions"),
        ({"v": draw(2, head_dim=24)}, "head dimensions"),
        ({"q": draw(seqlen=0)}, "no score"),
        ({"scale": -0.25}, "scale is -0.25"),
        ({"scale": 0.0, "is_causal": True}, "scale is 0.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": 1e6}, "scale is"),
        ({"scale": 0.25}, "cpu is not an NVIDIA GPU"),
        ({}, "cpu is not an NVIDIA GPU"),
    ],
)
def test_what_is_left_to_torch(changed: dict[str, Any], reason: str) -> None:
    given = {"q": draw(), "k": draw(2), "v": draw(2), "dropout_p": 0.0, "is_causal": False} | changed
    assert reason in ours.why_not_kernel(**given)


def test_activating_and_back() -> None:
    key = "aten::_scaled_dot_product_flash_attention", "CUDA"
    had = torch._C._dispatch_has_kernel_for_dispatch_key(*key)
    order = torch._C._get_sdp_priority_order()
    q = draw()
    expected = scaled_dot_product_attention(q, q, q)
    ours.deactivate()
    with ours.activate() as active:
        assert ours.is_active() and ours.activate() is active
        assert attention.current_flash_attention_impl() == ours.NAME
        assert torch._C._dispatch_has_kernel_for_dispatch_key(*key)
        assert torch._C._get_sdp_priority_order()[0] == int(attention.SDPBackend.FLASH_ATTENTION)
        assert torch.equal(scaled_dot_product_attention(q, q, q), expected)
    assert not ours.is_active() and torch._C._dispatch_has_kernel_for_dispatch_key(*key) == had
    assert torch._C._get_sdp_priority_order() == order
    attention.activate_flash_attention_impl(ours.NAME)
    assert ours.is_active()
    ours.deactivate()
    assert not ours.is_active() and attention.current_flash_attention_impl() is None


def test_without_a_registry_or_without_torchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_HAS_REGISTRY", False)
    ours.activate()
    assert ours.is_active() and attention.current_flash_attention_impl() is None
    ours.deactivate()
    assert not ours.is_active()
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(NotImplementedError, match=r"call hopper_attention\.flash_attn_func"):
        ours.activate()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The operators of CPU tensors, as if kernels served them; what runs is the backend of a CPU."""
    monkeypatch.setattr(ours, "_why_no_backend", lambda device, dtype: "")
    monkeypatch.setattr(ours, "has_backward_kernel", lambda *given: True)
    active = ours.Activation("CPU")
    yield active
    active.remove()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_the_operators_give_results_and_gradients(on_cpu: Any, is_causal: bool, layout: str) -> None:
    q, k, v = draw(4), draw(2), draw(2) + 1.0
    if layout == "tokens first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, cum_q, cum_k, max_q, max_k, *_ = flash(q, k, v, 0.0, is_causal, scale=0.3)
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 12, 12)
    assert out.stride() == torch.empty_like(q).stride() and lse.shape == (2, 4, 12)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.autograd.grad(out, leaves, dout)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = scaled_dot_product_attention(*doubles, is_causal=is_causal, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad(exact, doubles, dout.double())
    for a, b in zip((out, *found), (exact, *expected), strict=True):
        assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max()
    for gradient, leaf in zip(found, leaves, strict=True):
        assert gradient.stride() == torch.empty_like(leaf).stride()


def test_the_rest_goes_to_the_kernel_that_was_there(on_cpu: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    class Before:
        def call_boxed(self, keys: Any, *given: Any, **options: Any) -> tuple[int]:
            calls.append((*given, options))
            return (7,)

    kernels = ours.FlashKernels("CPU")
    kernels.forward_before = kernels.backward_before = Before()
    q = draw()
    assert kernels.forward(None, q, q, q, 0.5, scale=0.2) == (7,)
    assert calls[-1][3:] == (0.5, False, False, {"scale": 0.2})
    assert kernels.forward(None, q, q, q, return_debug_mask=True) == (7,)
    for scale in (-0.2, 0.0):
        assert kernels.forward(None, q, q, q, 0.0, True, scale=scale) == (7,)
        assert calls[-1][3:] == (0.0, True, False, {"scale": scale})
        rest = q, q, q, q, q, q, None, None, 12, 12, 0.0, True, q, q
        assert kernels.backward(None, *rest, scale=scale) == (7,)
    rest = q, q, q, q, q, q, None, None, 12, 12, 0.5, False, q, q
    assert kernels.backward(None, *rest) == (7,) and len(calls) == 7
    with pytest.raises(NotImplementedError, match="built without FlashAttention"):
        flash(q, q, q, 0.5)
