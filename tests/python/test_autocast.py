"""torch.autocast: float32 inputs are cast, the reference keeps its own dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    apply_rotary,
    explain,
    explain_fp8,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize_qkv,
)
from hopper_attention.autocast import without_autocast
from hopper_attention.reference import (
    attention_fp8_per_tensor,
    attention_naive,
    attention_standard,
    attention_tiled,
    attention_tiled_fp8,
    tiled_backward,
    tiled_forward,
)

BF16 = torch.bfloat16


def region(dtype: torch.dtype = BF16) -> torch.autocast:
    return torch.autocast("cpu", dtype)


def qkv(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = (2, 37, 4, 64), (2, 53, 2, 64), (2, 53, 2, 64)
    drawn = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in drawn)


def backward_by_tiles(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = tiled_forward(q, k, v, causal=True)
    return tiled_backward(q, None, q, k, v, out, lse, causal=True)


REFERENCES: list[Callable] = [
    partial(tiled_forward, causal=True),
    partial(attention_tiled, causal=True),
    backward_by_tiles,
    partial(attention_naive, causal=True),
    partial(attention_standard, causal=True),
    attention_fp8_per_tensor,
    lambda q, k, v: attention_tiled_fp8(quantize_qkv(q, k, v)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", REFERENCES)
def test_the_reference_computes_the_same_under_autocast(compute: Callable, dtype: torch.dtype) -> None:
    tensors = qkv(dtype)
    expected = compute(*tensors)
    with region():
        got = compute(*tensors)
    pairs = [(got, expected)] if isinstance(got, Tensor) else zip(got, expected, strict=True)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_keep_their_dtype_and_their_bits(dtype: torch.dtype) -> None:
    ours, theirs = qkv(dtype, True), qkv(dtype, True)
    expected = flash_attn_func(*theirs, causal=True)
    expected.float().square().sum().backward()
    with region():
        out = flash_attn_func(*ours, causal=True)
        out.float().square().sum().backward()
    assert out.dtype == dtype and torch.equal(out, expected)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attend", [flash_attn_func, flash_attn_fp8_func])
@pytest.mark.parametrize("compiles", [False, True])
def test_float32_inputs_are_cast_and_have_float32_gradients(
    attend: Callable, dtype: torch.dtype, compiles: bool
) -> None:
    wide = qkv(requires_grad=True)
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiles else attend
    with region(dtype):
        out = run(*wide, causal=True)
    expected = attend(*narrow, causal=True)
    assert out.dtype == dtype and torch.equal(out, expected)
    for result in (out, expected):
        result.float().square().sum().backward()
    for x, y in zip(wide, narrow, strict=True):
        assert x.grad.dtype == torch.float32 and torch.equal(x.grad, y.grad.float())
    with torch.no_grad(), region(dtype):
        assert torch.equal(run(*wide, causal=True), expected)


def test_packed_float32_inputs_are_cast() -> None:
    q, k, v = qkv()
    narrow = [x.to(BF16) for x in (q, k, v)]
    expected = flash_attn_func(*narrow)
    kv = torch.stack([k, v], 2).requires_grad_()
    heads = torch.randn(2, 21, 8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with region():
        assert torch.equal(flash_attn_kvpacked_func(q, kv), expected)
        out = flash_attn_qkvpacked_func(heads, num_heads_q=4)
    assert torch.equal(out, flash_attn_qkvpacked_func(heads.to(BF16), num_heads_q=4))
    out.float().sum().backward()
    assert heads.grad.dtype == torch.float32 and heads.grad.abs().sum() > 0


@pytest.mark.parametrize("requires_grad", [False, True])
def test_inputs_of_different_dtypes_get_one(requires_grad: bool) -> None:
    q, k, v = qkv(requires_grad=requires_grad)
    expected = flash_attn_func(q.to(BF16), k.to(BF16), v.to(BF16))
    mixed = q.to(BF16), k, v.to(BF16).float()
    with region():
        assert torch.equal(flash_attn_func(*mixed), expected)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float32, allowed: the dtype of q"):
        flash_attn_func(*mixed)


def test_what_autocast_does_not_cast() -> None:
    q, k, v = qkv()
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    expected = flash_attn_func(*fp8)
    with region():
        assert torch.equal(flash_attn_func(*fp8), expected)
        with pytest.raises(TypeError, match=r"q has dtype torch\.float64"):
            flash_attn_func(q.double(), k.double(), v.double())
        with pytest.raises(
            TypeError, match=r"k has dtype torch\.bfloat16, allowed: the dtype of q, torch\.float8"
        ):
            flash_attn_func(fp8[0], k.to(BF16), v.to(BF16))
    for autocast in (torch.autocast("cpu", enabled=False), torch.autocast("cuda", BF16, enabled=False)):
        with autocast, pytest.raises(TypeError, match=r"q has dtype torch\.float32, allowed: torch\.float16"):
            flash_attn_func(q, k, v)


def test_explain_says_what_is_cast() -> None:
    q, k, v = qkv(requires_grad=True)
    with region(torch.float16):
        plan = explain(q, k, v, device_capability=(9, 0))
        mixed = explain(q.half(), k, v.half(), device_capability=(9, 0))
    assert plan.config.dtype == "float16"
    cast = "is cast to torch.float16, which torch.autocast asks for"
    assert plan.copies == (f"q {cast}", f"k {cast}", f"v {cast}")
    assert any(note.startswith("the backward pass runs on the Hopper kernel") for note in plan.notes)
    assert mixed.copies == (f"k {cast}",)
    with pytest.raises(TypeError, match=r"q has dtype torch\.float32"):
        explain(q, k, v)
    with region():
        fp8 = explain_fp8(q, k.to(BF16), v, device_capability=(9, 0))
    casts = tuple(f"{name} is cast to torch.bfloat16, which torch.autocast asks for" for name in "qv")
    assert fp8.quantizer == "fused" and fp8.attention.copies == casts
    assert explain_fp8(q, k, v, device_capability=(9, 0)).quantizer == "torch"


def test_devices_without_autocast() -> None:
    with without_autocast(torch.device("meta")):
        assert flash_attn_func(*(x.half().to("meta") for x in qkv())).is_meta


def wide_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v.repeat(1, 1, 1, 5))]
    out = flash_attn_func(*leaves, causal=True)
    # The sum is of float32, so that autograd has nothing of its own to cast.
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)


def a_sample_at_a_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = torch.tensor([0, 5, 37], dtype=torch.int32)
    rows = k[0, :37], v[0, :37]
    return torch.vmap(lambda x: flash_attn_varlen_func(x, *rows, bounds, bounds, 37, 37))(q)


def second_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([0, 5, 37], dtype=torch.int32)
    rows, options = (q[0], k[0, :37], v[0, :37]), {"qv": q[0], "backend": "reference"}
    packed = flash_attn_varlen_func(*rows, bounds, bounds, 37, 37, **options)
    return packed, flash_attn_with_kvcache(q, k, v, qv=q, cache_seqlens=3)


def rotated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 3, 53 * 16).view(1, 53, 16)
    return apply_rotary(q, k[:, :37], angle.cos()[:, :37], angle.sin()[:, :37])


@pytest.mark.parametrize("call", [wide_values, a_sample_at_a_time, second_queries, rotated])
@pytest.mark.parametrize(("dtype", "other"), [(BF16, torch.float16), (torch.float16, BF16)])
def test_a_region_of_another_16_bit_dtype_changes_nothing(
    call: Callable, dtype: torch.dtype, other: torch.dtype
) -> None:
    """Where tensors are joined, too: torch refuses to under autocast."""
    inputs = qkv(dtype)
    expected = call(*inputs)
    with region(other):
        found = call(*inputs)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in pairs)
