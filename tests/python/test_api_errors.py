"""Every error of the public functions names the argument, what it was and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper_attention import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

Q = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16)
KV = torch.zeros(2, 7, 2, 64, dtype=torch.bfloat16)
FP8_Q, FP8_KV = Q.to(torch.float8_e4m3fn), KV.to(torch.float8_e4m3fn)
E5M2_Q, E5M2_KV = Q.to(torch.float8_e5m2), KV.to(torch.float8_e5m2)


def call(*tensors: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A call with q, k and v replaced from the left, to be made on any function."""
    arguments = (*tensors, *(Q, KV, KV)[len(tensors) :])
    return lambda function: function(*arguments, **options)


def head_dim(d: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    return Q.new_zeros(2, 5, 4, d), Q.new_zeros(2, 7, 2, d), Q.new_zeros(2, 7, 2, dv)


BAD_TENSORS = [
    (call([1, 2]), TypeError, "q is a list, allowed: a torch.Tensor"),
    (call(Q, KV, None), TypeError, "v is a NoneType, allowed: a torch.Tensor"),
    (
        call(Q[0]),
        ValueError,
        "q has 3 dimensions, shape (5, 4, 64), allowed: 4, (batch, seqlen_q, heads, head_",
    ),
    (
        call(Q, KV[None]),
        ValueError,
        "k has 5 dimensions, shape (1, 2, 7, 2, 64), allowed: 4, (batch, seqlen_k",
    ),
    (
        call(Q.float()),
        TypeError,
        "q has dtype torch.float32, allowed: torch.float16, torch.bfloat16, torch.fl",
    ),
    (call(Q, KV.half()), TypeError, "k has dtype torch.float16, allowed: the dtype of q, torch.bfloat16"),
    (
        call(Q, KV, FP8_KV),
        TypeError,
        "v has dtype torch.float8_e4m3fn, allowed: the dtype of q, torch.bfloat16",
    ),
    (
        call(E5M2_Q, E5M2_KV, E5M2_KV),
        TypeError,
        "q has dtype torch.float8_e5m2, allowed: torch.float8_e4m3fn",
    ),
    (call(Q, KV.to("meta")), ValueError, "k is on meta, allowed: the device of q, cpu"),
    (call(*head_dim(12, 64)), ValueError, "head_dim of q is 12, allowed: multiples of 8 from 8 to 256"),
    (call(*head_dim(264, 64)), ValueError, "head_dim of q is 264, allowed: multiples of 8 from 8 to 256"),
    (call(*head_dim(0, 64)), ValueError, "head_dim of q is 0, allowed: multiples of 8 from 8 to 256"),
    (call(*head_dim(64, 20)), ValueError, "head_dim_v, the last size of v, is 20, allowed: multiples of 8"),
    (call(*head_dim(64, 520)), ValueError, "is 520, allowed: multiples of 8 from 8 to 512"),
    (
        call(Q, KV[:1]),
        ValueError,
        "k has shape (1, 7, 2, 64), allowed with q of shape (2, 5, 4, 64): (2, seqlen_k",
    ),
    (
        call(Q, KV[..., :32]),
        ValueError,
        "k has shape (2, 7, 2, 32), allowed with q of shape (2, 5, 4, 64): (2, ",
    ),
    (
        call(Q, KV, KV[:, :6]),
        ValueError,
        "v has shape (2, 6, 2, 64), allowed with k of shape (2, 7, 2, 64): (2, 7",
    ),
    (call(Q[:, :, :3]), ValueError, "q has 3 heads and k has 2, allowed: a multiple of the heads of k"),
    (call(Q, KV[:, :, :0], KV[:, :, :0]), ValueError, "q has 4 heads and k has 0, allowed: a multiple"),
]

BAD_OPTIONS = [
    (call(softmax_scale="0.1"), TypeError, "softmax_scale is a str, '0.1', allowed: a number, or None"),
    (call(softmax_scale=True), TypeError, "softmax_scale is a bool, True, allowed: a number, or None"),
    (
        call(softmax_scale=torch.tensor(0.1)),
        TypeError,
        "softmax_scale is a Tensor, tensor(0.1000), allowed: a nu",
    ),
    (call(softmax_scale=1e-46), ValueError, "softmax_scale is 1e-46, allowed: 1e-37 to 100000.0"),
    (call(softmax_scale=1e300), ValueError, "softmax_scale is 1e+300, allowed: 1e-37 to 100000.0"),
    (call(softmax_scale=1e37), ValueError, "softmax_scale is 1e+37, allowed: 1e-37 to 100000.0"),
    (call(softmax_scale=1.1e5), ValueError, "softmax_scale is 110000.0, allowed: 1e-37 to 100000.0"),
    (
        call(softmax_scale=math.nan),
        ValueError,
        "softmax_scale is nan, allowed: a finite number greater than 0",
    ),
    (
        call(softmax_scale=math.inf),
        ValueError,
        "softmax_scale is inf, allowed: a finite number greater than 0",
    ),
    (call(softmax_scale=-0.1), ValueError, "softmax_scale is -0.1, allowed: a finite number greater than 0"),
    (call(softmax_scale=0), ValueError, "softmax_scale is 0, allowed: a finite number greater than 0"),
    (
        call(backend="cuda"),
        ValueError,
        "backend is 'cuda', allowed: 'hopper', 'ampere', 'torch', 'reference' or None",
    ),
    (
        call(backend=["hopper"]),
        ValueError,
        "backend is ['hopper'], allowed: 'hopper', 'ampere', 'torch', 'reference' or None",
    ),
    (
        call(backend="hopper"),
        ValueError,
        "backend is 'hopper', but cpu is not an NVIDIA GPU; allowed here: 'torch",
    ),
    (
        call(backend="ampere"),
        ValueError,
        "backend is 'ampere', but cpu is not an NVIDIA GPU; allowed here: 'torch",
    ),
    (call(causal="no"), TypeError, "causal is a str, 'no', allowed: True or False"),
    (call(causal=None), TypeError, "causal is a NoneType, None, allowed: True or False"),
    (call(causal=1.0), TypeError, "causal is a float, 1.0, allowed: True or False"),
    (call(causal=2), ValueError, "causal is 2, allowed: True or False"),
    (call(causal=torch.tensor(True)), TypeError, "causal is a Tensor, tensor(True), allowed: True or False"),
    (call(causal=np.ones(1, bool)), TypeError, "causal is a ndarray, array([ True]), allowed: True or False"),
    (call(deterministic="yes"), TypeError, "deterministic is a str, 'yes', allowed: True or False"),
    (call(return_attn_probs=[]), TypeError, "return_attn_probs is a list, [], allowed: True or False"),
    (call(window_size=None), TypeError, "window_size is None, allowed: a pair (left, right)"),
    (call(window_size=7), TypeError, "window_size is 7, allowed: a pair (left, right)"),
    (call(window_size=(1, 2, 3)), TypeError, "window_size is (1, 2, 3), allowed: a pair (left, right)"),
    (call(window_size=(1.5, 0)), TypeError, "window_size is (1.5, 0), allowed: a pair (left, right)"),
    (
        call(window_size=(-2, 0)),
        ValueError,
        "window_size is (-2, 0), allowed: a pair (left, right) of ints from -1",
    ),
    (call(attention_chunk=-1), ValueError, "attention_chunk is -1, allowed: 0 or more"),
    (call(attention_chunk=0.5), TypeError, "attention_chunk is a float, 0.5, allowed: an int"),
    (call(softcap="no"), TypeError, "softcap is a str, 'no', allowed: a number"),
    (call(softcap=-1.0), ValueError, "softcap is -1.0, allowed: 0, which is none, or 1e-30 to 1e+30"),
    (call(softcap=10**400), ValueError, "softcap is 10000"),
    (call(softcap=math.nan), ValueError, "softcap is nan, allowed: 0, which is none"),
    (call(softcap=math.inf), ValueError, "softcap is inf, allowed: 0, which is none"),
    (call(num_splits=-1), ValueError, "num_splits is -1, allowed: 0 or more"),
    (call(num_splits=2.0), TypeError, "num_splits is a float, 2.0, allowed: an int"),
    (call(num_splits=False), TypeError, "num_splits is a bool, False, allowed: an int"),
    (call(pack_gqa="yes"), TypeError, "pack_gqa is a str, 'yes', allowed: True or False"),
    (call(sm_margin=-1), ValueError, "sm_margin is -1, allowed: 0 or more"),
    (call(sm_margin=1.5), TypeError, "sm_margin is a float, 1.5, allowed: an int"),
    (
        call(two_level_accumulation=1),
        TypeError,
        "two_level_accumulation is 1, allowed: True or False",
    ),
    (
        call(q_descale=torch.ones(2, 2)),
        ValueError,
        "q_descale is given but q has dtype torch.bfloat16, allowed: d",
    ),
]

FP8 = (FP8_Q, FP8_KV, FP8_KV)
BAD_FP8 = [
    (call(*FP8, k_descale=0.5), TypeError, "k_descale is a float, allowed: a torch.Tensor"),
    (
        call(*FP8, q_descale=torch.ones(2, 4)),
        ValueError,
        "q_descale has shape (2, 4), allowed: (batch, kv_heads), (2",
    ),
    (
        call(*FP8, v_descale=torch.ones(2, 2).half()),
        TypeError,
        "v_descale has dtype torch.float16, allowed: torch.f",
    ),
    (
        call(*FP8, v_descale=torch.ones(2, 2, device="meta")),
        ValueError,
        "v_descale is on meta, allowed: the device",
    ),
]


@pytest.mark.parametrize("function", [flash_attn_func, explain])
@pytest.mark.parametrize("bad,error,message", BAD_TENSORS + BAD_OPTIONS + BAD_FP8)
def test_bad_arguments(function: Callable, bad: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        bad(function)


def test_defaults_written_out_are_accepted() -> None:
    out = flash_attn_func(
        *(Q, KV, KV, None, False, None, None, None, None, [-1, -1], 0, 0.0, 0, False, True, 2, False),
        backend="reference",
    )
    assert torch.equal(out, flash_attn_func(Q, KV, KV))


@pytest.mark.parametrize("learned", ["q", "k", "v", "q_descale", "v_descale"])
def test_fp8_that_requires_grad_runs_and_only_a_backward_pass_is_refused(learned: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(x.shape, generator=generator).to(x.dtype)
        for name, x in zip("qkv", FP8, strict=True)
    }
    tensors |= {name: torch.rand(2, 2, generator=generator) for name in ("q_descale", "v_descale")}
    expected = flash_attn_func(**tensors)
    learned_ones = tensors | {learned: tensors[learned].detach().clone().requires_grad_()}
    out, lse = flash_attn_func(**learned_ones, return_attn_probs=True)
    assert torch.equal(out, expected) and expected.abs().sum() > 0
    for result in (out, lse):
        with pytest.raises(
            NotImplementedError, match=r"float8_e4m3fn tensors, which have no gradient: train with 16"
        ):
            result.float().sum().backward()
    with torch.no_grad():
        assert torch.equal(flash_attn_func(**learned_ones), expected)


def test_fp8_refuses_the_hopper_backend() -> None:
    with pytest.raises(ValueError, match=r"backend is 'hopper', but cpu is not an NVIDIA GPU"):
        flash_attn_func(FP8_Q, FP8_KV, FP8_KV, backend="hopper")


@pytest.mark.parametrize(
    "qkv,heads,message",
    [
        (
            torch.zeros(2, 5, 2, 4, 64),
            None,
            "qkv has shape (2, 5, 2, 4, 64), allowed: (batch, seqlen, 3, heads, he",
        ),
        (
            torch.zeros(2, 5, 12, 64),
            None,
            "qkv has shape (2, 5, 12, 64), allowed: (batch, seqlen, 3, heads, head_d",
        ),
        (
            torch.zeros(2, 5, 3, 4, 64),
            4,
            "qkv has shape (2, 5, 3, 4, 64), allowed with num_heads_q: (batch, seqlen",
        ),
        (
            torch.zeros(2, 5, 8, 64),
            3,
            "num_heads_q is 3, allowed with the 8 heads of qkv: above 0, and leaving",
        ),
        (torch.zeros(2, 5, 8, 64), 8, "num_heads_q is 8, allowed with the 8 heads of qkv"),
        (torch.zeros(2, 5, 8, 64), 0, "num_heads_q is 0, allowed with the 8 heads of qkv"),
    ],
)
def test_bad_qkvpacked(qkv: Tensor, heads: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_qkvpacked_func(qkv.bfloat16(), num_heads_q=heads)


def test_bad_kvpacked() -> None:
    message = re.escape("kv has shape (2, 7, 3, 2, 64), allowed: (batch, seqlen_k, 2, kv_heads, head_dim)")
    with pytest.raises(ValueError, match=message):
        flash_attn_kvpacked_func(Q, Q.new_zeros(2, 7, 3, 2, 64))
    with pytest.raises(TypeError, match=r"kv is a tuple, allowed: a torch\.Tensor"):
        flash_attn_kvpacked_func(Q, (KV, KV))
    with pytest.raises(ValueError, match="softcap is -20"):
        flash_attn_kvpacked_func(Q, torch.stack([KV, KV], 2), softcap=-20)


def test_double_backward_is_refused() -> None:
    q, k, v = (x.clone().normal_().requires_grad_() for x in (Q, KV, KV))
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).float().sum(), q, create_graph=True)
    with pytest.raises(
        NotImplementedError, match=r"double backward.*use hopper_attention.reference.attention_naive"
    ):
        dq.float().sum().backward()
