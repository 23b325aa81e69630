"""Attention of diffusers' models on our kernels, by its registry and a small transformer with random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention.integrations import diffusers as ours

SIZES: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def relative(ours: Tensor, exact: Tensor) -> float:
    ours, exact = ours.detach().double(), exact.detach().double()
    return float((ours - exact).norm() / exact.norm())


@pytest.fixture
def model() -> Any:
    before = _AttentionBackendRegistry._active_backend
    torch.manual_seed(0)
    yield FluxTransformer2DModel(**SIZES).to(torch.bfloat16)
    _AttentionBackendRegistry.set_active_backend(before)


def test_a_flux_transformer_gives_the_same(
    model: FluxTransformer2DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {
        "hidden_states": draw(1, 24, 4),
        "encoder_hidden_states": draw(1, 8, 32),
        "pooled_projections": draw(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.arange(72.0).reshape(24, 3) % 5,
        "txt_ids": torch.zeros(8, 3),
    }
    calls: list[str] = []
    for name in ("flash_attn_func", "flash_attn_fp8_func"):
        whole = getattr(ours, name)
        monkeypatch.setattr(
            ours, name, lambda *a, _name=name, _whole=whole, **k: calls.append(_name) or _whole(*a, **k)
        )
    found = {}
    for name in ("native", *ours.NAMES):
        model.set_attention_backend(name)
        found[name] = model(**inputs).sample
        found[name].float().square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert calls == ["flash_attn_func"] * 2 + ["flash_attn_fp8_func"] * 2
    exact = model.float()
    exact.set_attention_backend("native")
    with torch.no_grad():
        exact_sample = exact(**{k: x.float() for k, x in inputs.items()}).sample
    in_16_bits = relative(found["native"], exact_sample)
    # What rounding between the layers does to the model is most of the error; attention adds nothing in 16 bits.
    assert relative(found["hopper_attention"], exact_sample) < 1.25 * in_16_bits < 0.02
    assert relative(found["hopper_attention_fp8"], exact_sample) < 0.015


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        (None, False),
        (None, True),
        (torch.arange(9) < torch.tensor([[4], [9]]), False),
        (draw(7, 9) > -0.5, False),
        (draw(2, 4, 7, 9) > -0.5, False),
        (draw(2, 1, 7, 9), False),
        (draw(1, 1, 1, 9), False),
        (torch.zeros(1, 1, 1, 1), False),
    ],
)
def test_masks(mask: Tensor | None, is_causal: bool) -> None:
    q, k, v = draw(2, 7, 4, 16), draw(2, 9, 4, 16), draw(2, 9, 4, 16) + 1
    whole = mask[:, None, None] if mask is not None and mask.shape == (2, 9) else mask
    if whole is not None and whole.dtype != torch.bool:
        whole = whole.double()
    doubles = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = scaled_dot_product_attention(*doubles, whole, is_causal=is_causal, scale=0.3).transpose(1, 2)
    with attention_backend("hopper_attention"):
        out = dispatch_attention_fn(q, k, v, mask, is_causal=is_causal, scale=0.3)
    assert (out.double() - exact).abs().max() < 2e-2


def test_a_boolean_mask_and_a_causal_one_at_once() -> None:
    q, k, v, mask = draw(2, 7, 2, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16), draw(2, 1, 7, 9) > -1
    mask[..., 0] = True
    both = mask & torch.ones(7, 9, dtype=torch.bool).tril()
    exact = scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)), both).transpose(
        1, 2
    )
    assert (ours.attend(q, k, v, mask, is_causal=True).double() - exact).abs().max() < 2e-2


def test_fp8_says_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ours, "warn_once", said.append)
    q, mask = draw(1, 32, 2, 32), torch.ones(1, 32, dtype=torch.bool)
    assert torch.equal(ours.attend_fp8(q, q, q, mask), ours.attend(q, q, q, mask))
    ours.attend_fp8(q, q, q, dropout_p=0.5)
    ours.attend_fp8(q, q[:, :16], q[:, :16], is_causal=True)
    lacking = "attn_mask", "dropout", "causal mask that is aligned top-left"
    assert said == [ours.FP8_LACKS.format(name) for name in lacking]
    assert not torch.equal(ours.attend_fp8(q, q, q), ours.attend(q, q, q))
    assert len(said) == 3


@pytest.mark.parametrize("attend", [ours.attend, ours.attend_fp8])
def test_what_is_refused(attend: Callable[..., Tensor]) -> None:
    q = draw(1, 8, 2, 32)
    with pytest.raises(NotImplementedError, match="return_attn_probs=True"):
        attend(q, q, q, return_lse=True)
    with pytest.raises(NotImplementedError, match="use the backend 'native'"):
        attend(q, q, q, _parallel_config=object())
    with pytest.raises(TypeError, match=r"q has dtype torch\.float32"):
        ours.attend(*[q.float()] * 3)


def test_the_example_of_the_page_runs() -> None:
    before = _AttentionBackendRegistry._active_backend
    page = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "diffusers.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
    names: dict[str, Any] = {}
    exec(compile(example, str(page), "exec"), names)
    _AttentionBackendRegistry.set_active_backend(before)
    assert names["out"].isfinite().all() and names["out"].shape == (1, 64, 4)


def test_the_names_are_members() -> None:
    for name in ours.NAMES:
        member = AttentionBackendName(name)
        assert AttentionBackendName[name.upper()] is member and member in list(AttentionBackendName)
        assert member.value == name and getattr(AttentionBackendName, name.upper()) is member
    count = len(AttentionBackendName)
    ours.register()
    assert len(AttentionBackendName) == count
