"""Values of kinds that nobody expects, where others are compared: an error names the argument, not a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hopper_attention import (
    Fp8Quantization,
    explain_kvcache,
    explain_varlen,
    flash_attn_combine,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    quantize_qkv,
)

TYPES = {"a tensor": torch.ones(3), "an array": np.ones(3), "a list": [1], "a class": int}
QKV = [torch.zeros(2, 6, 2, 32, dtype=torch.bfloat16)] * 3
ROWS = [x[0] for x in QKV]
STARTS = torch.tensor([0, 6], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 6, "max_seqlen_k": 6}
PARTS = torch.zeros(2, 1, 6, 2, 8), torch.zeros(2, 1, 6, 2)


def packed_heads(**options: Any) -> Any:
    return flash_attn_qkvpacked_func(torch.zeros(2, 6, 8, 32, dtype=torch.float16), **options)


def packed_varlen_heads(**options: Any) -> Any:
    qkv = torch.zeros(6, 8, 32, dtype=torch.float16)
    return flash_attn_varlen_qkvpacked_func(qkv, STARTS, 6, **options)


def schedule(**options: Any) -> Any:
    return get_scheduler_metadata(1, 1, 64, 4, 2, 64, STARTS[1:], **options)


CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attention": (
        lambda **options: flash_attn_func(*QKV, **options),
        ("num_splits", "sm_margin", "backend", "window_size"),
    ),
    "varlen": (
        lambda **options: flash_attn_varlen_func(*ROWS, **LENGTHS, **options),
        ("num_splits", "sm_margin", "backend", "window_size"),
    ),
    "cache": (
        lambda **options: flash_attn_with_kvcache(*QKV, **options),
        ("num_splits", "sm_margin", "backend", "window_size"),
    ),
    "FP8": (lambda **options: flash_attn_fp8_func(*QKV, **options), ("backend", "window_size")),
    "quantizer": (lambda **options: quantize_qkv(*QKV, **options), ("backend",)),
    "packed heads": (packed_heads, ("num_heads_q",)),
    "packed heads, varlen": (packed_varlen_heads, ("num_heads_q",)),
    "merging": (lambda **options: flash_attn_combine(*PARTS, **options), ("out_dtype",)),
    "schedule": (schedule, ("qkv_dtype",)),
    "quantization": (Fp8Quantization, ("granularity",)),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("call", CALLS)
def test_error_names_the_argument(call: str, kind: str) -> None:
    function, names = CALLS[call]
    for name in names:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} .*allowed"):
            function(**{name: TYPES[kind]})


def test_what_equals_a_default_is_not_taken_for_it() -> None:
    with pytest.raises(TypeError, match=r"^num_splits is a bool, True, allowed: an int"):
        flash_attn_func(*QKV, num_splits=True)
    with pytest.raises(TypeError, match=r"^sm_margin is a bool, False, allowed: an int"):
        flash_attn_func(*QKV, sm_margin=False)
    with pytest.raises(TypeError, match=r"^out_dtype is a dict"):
        flash_attn_combine(*PARTS, out_dtype={})  # type: ignore[arg-type, call-overload]  # wrong on purpose


def test_a_window_that_has_no_numbers() -> None:
    for window in (torch.ones(2, dtype=torch.int32, device="meta"), torch.ones(2).to_sparse()):
        with pytest.raises(
            TypeError, match=r"^window_size is a tensor on .*no numbers to read, allowed: a pair"
        ):
            flash_attn_func(*QKV, window_size=window)


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_no_heads_have_no_output(backend: str | None) -> None:
    none = torch.zeros(2, 6, 0, 32, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros_like(QKV[1], requires_grad=True)
    outs = [flash_attn_func(none, k, k, softcap=1.0, backend=backend)]
    outs.append(flash_attn_varlen_func(none[0], k[0], k[0], **LENGTHS, backend=backend))
    for out in outs:
        assert out.shape == (*out.shape[:-2], 0, 32)
        (gradient,) = torch.autograd.grad(out.sum(), k)
        assert gradient.shape == k.shape and not gradient.any()
    with torch.no_grad():
        step, lse = flash_attn_with_kvcache(none[:, :1], k, k, return_softmax_lse=True, backend=backend)
    assert step.shape == (2, 1, 0, 32) and lse.shape == (2, 0, 1)


def test_no_kernel_for_a_cache_serves_no_heads() -> None:
    none = torch.zeros(2, 1, 0, 32, dtype=torch.bfloat16)
    for query in ({}, {"qv": none}):
        plan = explain_kvcache(none, *QKV[1:], device_capability=(9, 0), **query)
        assert plan.path == "general"


def test_no_heads_have_no_output_in_fp8() -> None:
    none = torch.zeros(2, 6, 0, 32, dtype=torch.bfloat16)
    for granularity in ("block", "head", "tensor"):
        quantization = Fp8Quantization(granularity=granularity)
        assert flash_attn_fp8_func(none, *QKV[1:], quantization=quantization).shape == none.shape
    codes = [x.to(torch.float8_e4m3fn) for x in (none, *QKV[1:])]
    assert flash_attn_func(*codes).shape == none.shape


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 7], dtype=torch.int32)}, "cu_seqlens_q ends with 7"),
        ({"seqused_k": torch.tensor([-1], dtype=torch.int32)}, r"seqused_k\[0\] is -1"),
        ({"max_seqlen_k": 5}, "max_seqlen_k is 5"),
    ],
)
def test_the_quantizer_reads_lengths_on_a_cpu_as_attention_does(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}, allowed"):
        quantize_qkv(*ROWS, **LENGTHS | changed)


def test_tensors_without_strides() -> None:
    jagged = torch.nested.nested_tensor([QKV[0][0], QKV[0][1, :2]], layout=torch.jagged)
    for call in (flash_attn_func, flash_attn_fp8_func, quantize_qkv, flash_attn_with_kvcache):
        with pytest.raises(
            TypeError, match=r"^q is a nested tensor, allowed: .*go .* to flash_attn_varlen_func"
        ):
            call(jagged, jagged, jagged)
    sparse = QKV[0].to_sparse()
    for call in (flash_attn_func, flash_attn_fp8_func, quantize_qkv):
        with pytest.raises(
            TypeError, match=r"^q is a tensor of layout torch.sparse_coo, allowed: one of layout"
        ):
            call(sparse, sparse, sparse)


def test_no_mapped_call_writes_into_a_cache() -> None:
    q, token = torch.randn(2, 3, 1, 4, 32).half(), torch.randn(2, 3, 1, 2, 32).half()
    cache, lengths = torch.randn(2, 3, 8, 2, 32).half(), torch.tensor([1, 0, 5], dtype=torch.int32)

    def step(q: torch.Tensor, cache: torch.Tensor, *token: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(q, cache, cache, *token, cache_seqlens=lengths)

    assert torch.equal(torch.vmap(step)(q, cache)[1], step(q[1], cache[1]))
    with pytest.raises(
        NotImplementedError, match=r"^k and v are given under torch.func.vmap.*part of the batch"
    ):
        torch.vmap(step)(q, cache, token, token)


def test_numpys_integers_are_ints() -> None:
    six, one, two = np.int64(6), np.int32(1), np.uint8(2)
    starts = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": six, "max_seqlen_k": six}
    rows = [torch.randn_like(x) for x in ROWS]
    for function in (flash_attn_varlen_func, flash_attn_fp8_func):
        assert torch.equal(function(*rows, **starts), function(*rows, **LENGTHS))
    assert torch.equal(
        flash_attn_varlen_func(*rows, **starts, window_size=(two, one), attention_chunk=two, sm_margin=one),
        flash_attn_varlen_func(*rows, **LENGTHS, window_size=(2, 1), attention_chunk=2),
    )
    whole = [x[None] for x in rows]
    decode = whole[0][:, :1], *whole[1:]
    assert torch.equal(
        flash_attn_with_kvcache(*decode, cache_seqlens=two, sm_margin=one, num_splits=two),
        flash_attn_with_kvcache(*decode, cache_seqlens=2),
    )
    packed = {"cu_seqlens_q": STARTS, "max_seqlen_q": six, "cache_seqlens": six}
    assert torch.equal(
        flash_attn_with_kvcache(rows[0], *whole[1:], **packed, causal=True),
        flash_attn_func(*whole, causal=True)[0],
    )
    qkv = torch.randn(6, 8, 32).half()
    assert torch.equal(
        flash_attn_varlen_qkvpacked_func(qkv, STARTS, six, num_heads_q=np.int64(4)),
        flash_attn_varlen_qkvpacked_func(qkv, STARTS, 6, num_heads_q=4),
    )
    assert explain_varlen(*rows, **starts).backend == "torch"
