"""Arguments of the variable-length functions: every error by its message, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from hopper_attention.masks import MAX_WINDOW_LENGTH

Q = torch.zeros(12, 4, 64, dtype=torch.bfloat16)
KV = torch.zeros(20, 2, 64, dtype=torch.bfloat16)
CU_Q = torch.tensor([0, 5, 12], dtype=torch.int32)
CU_K = torch.tensor([0, 9, 20], dtype=torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**changed: Any) -> Any:
    """The function on a small problem of two sequences, with some arguments changed."""
    given: dict[str, Any] = {"q": Q, "k": KV, "v": KV, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    return flash_attn_varlen_func(**given | {"max_seqlen_q": 7, "max_seqlen_k": 11} | changed)


def test_the_small_problem_is_a_good_one() -> None:
    assert call().shape == (12, 4, 64)
    assert call(seqused_q=ints(5, 0), seqused_k=ints(9, 11), max_seqlen_q=5).shape == (12, 4, 64)


BAD_TENSORS = [
    ({"q": [Q]}, TypeError, "q is a list, allowed: a torch.Tensor"),
    ({"v": None}, TypeError, "v is a NoneType, allowed: a torch.Tensor"),
    (
        {"q": Q[None]},
        ValueError,
        "q has 4 dimensions, shape (1, 12, 4, 64), allowed: 3, (total_q, heads, head_dim)",
    ),
    (
        {"k": KV[0]},
        ValueError,
        "k has 2 dimensions, shape (2, 64), allowed: 3, (total_k, kv_heads, head_dim)",
    ),
    (
        {"v": KV[None]},
        ValueError,
        "v has 4 dimensions, shape (1, 20, 2, 64), allowed: 3, (total_k, kv_heads, h",
    ),
    ({"q": Q.float()}, TypeError, "q has dtype torch.float32, allowed: torch.float16, torch.bfloat16"),
    (
        {"q": Q.to(torch.float8_e5m2)},
        TypeError,
        "q has dtype torch.float8_e5m2, allowed: torch.float8_e4m3fn",
    ),
    ({"k": KV.half()}, TypeError, "k has dtype torch.float16, allowed: the dtype of q, torch.bfloat16"),
    ({"v": KV.to("meta")}, ValueError, "v is on meta, allowed: the device of q, cpu"),
    ({"q": Q[..., :60]}, ValueError, "head_dim of q is 60, allowed: multiples of 8 from 8 to 256"),
    (
        {"v": torch.zeros(20, 2, 520).bfloat16()},
        ValueError,
        "head_dim_v, the last size of v, is 520, allowed",
    ),
    (
        {"k": KV[..., :32]},
        ValueError,
        "k has shape (20, 2, 32), allowed with q of shape (12, 4, 64): (total_k, kv_heads, 64)",
    ),
    (
        {"v": KV[:19]},
        ValueError,
        "v has shape (19, 2, 64), allowed with k of shape (20, 2, 64): (20, 2, head_dim_v)",
    ),
    ({"q": Q[:, :3]}, ValueError, "q has 3 heads and k has 2, allowed: a multiple of the heads of k"),
    ({"k": KV[:, :0], "v": KV[:, :0]}, ValueError, "q has 4 heads and k has 0, allowed: a multiple"),
]

BAD_LENGTHS = [
    ({"cu_seqlens_q": [0, 5, 12]}, TypeError, "cu_seqlens_q is a list, allowed: a torch.Tensor"),
    ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k is a NoneType, allowed: a torch.Tensor"),
    ({"seqused_k": [9, 11]}, TypeError, "seqused_k is a list, allowed: a torch.Tensor"),
    ({"cu_seqlens_q": CU_Q.long()}, TypeError, "cu_seqlens_q has dtype torch.int64, allowed: torch.int32"),
    ({"seqused_q": torch.ones(2)}, TypeError, "seqused_q has dtype torch.float32, allowed: torch.int32"),
    (
        {"cu_seqlens_k": CU_K[None]},
        ValueError,
        "cu_seqlens_k has shape (1, 3), allowed: one dimension, the batch size and 1 more",
    ),
    (
        {"seqused_q": ints(3, 4)[:, None]},
        ValueError,
        "seqused_q has shape (2, 1), allowed: one dimension, the batch",
    ),
    ({"cu_seqlens_k": CU_K.to("meta")}, ValueError, "cu_seqlens_k is on meta, allowed: the device of q, cpu"),
    ({"seqused_k": ints(1, 1).to("meta")}, ValueError, "seqused_k is on meta, allowed: the device of q, cpu"),
    (
        {"cu_seqlens_q": ints(0, 0, 5, 5, 12, 12)[::2]},
        ValueError,
        "cu_seqlens_q has stride 2, allowed: 1, as it is not copied; use cu_seqlens_q.contiguous()",
    ),
    (
        {"seqused_k": ints(1, 1, 1, 1)[::2]},
        ValueError,
        "seqused_k has stride 2, allowed: 1, as it is not copied; use seqused_k.contiguous()",
    ),
    (
        {"cu_seqlens_q": CU_Q[:0]},
        ValueError,
        "cu_seqlens_q is empty, allowed: the batch size and 1 more, 1 or more",
    ),
    (
        {"cu_seqlens_k": CU_K[:2]},
        ValueError,
        "cu_seqlens_k has 2 elements, allowed with the 3 of cu_seqlens_q: 3, the batch size and 1 more",
    ),
    (
        {"seqused_q": ints(1, 2, 3)},
        ValueError,
        "seqused_q has 3 elements, allowed with the 3 of cu_seqlens_q: 2, the batch size",
    ),
    (
        {"seqused_k": ints(1)},
        ValueError,
        "seqused_k has 1 elements, allowed with the 3 of cu_seqlens_q: 2, the",
    ),
    ({"max_seqlen_q": 7.0}, TypeError, "max_seqlen_q is a float, 7.0, allowed: an int, as no tensor is read"),
    ({"max_seqlen_k": torch.tensor(11)}, TypeError, "max_seqlen_k is a Tensor, tensor(11), allowed: an int"),
    ({"max_seqlen_k": None}, TypeError, "max_seqlen_k is a NoneType, None, allowed: an int"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q is a bool, True, allowed: an int"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1, allowed: 0 or more, the length of the longest"),
]

BAD_VALUES = [
    ({"cu_seqlens_q": ints(1, 5, 12)}, "cu_seqlens_q begins with 1, allowed: 0"),
    ({"cu_seqlens_k": ints(-3, 9, 20)}, "cu_seqlens_k begins with -3, allowed: 0"),
    ({"cu_seqlens_q": ints(0, 5, 13)}, "cu_seqlens_q ends with 13, allowed: at most the 12 rows of q"),
    ({"cu_seqlens_k": ints(0, 9, 21)}, "cu_seqlens_k ends with 21, allowed: at most the 20 rows of k"),
    ({"cu_seqlens_q": ints(0, 13, 12)}, "cu_seqlens_q falls from 13 to 12, allowed: no falling"),
    ({"cu_seqlens_k": ints(0, 9, 8)}, "cu_seqlens_k falls from 9 to 8, allowed: no falling"),
    (
        {"seqused_q": ints(6, 7)},
        "seqused_q[0] is 6, allowed: 0 to 5, the rows that cu_seqlens_q gives sequence 0",
    ),
    (
        {"seqused_k": ints(9, -1)},
        "seqused_k[1] is -1, allowed: 0 to 11, the rows that cu_seqlens_k gives sequence 1",
    ),
    (
        {"max_seqlen_q": 6},
        "max_seqlen_q is 6, allowed: at least the length of every sequence, and sequence 1 has 7",
    ),
    (
        {"max_seqlen_k": 0},
        "max_seqlen_k is 0, allowed: at least the length of every sequence, and sequence 0 has 9",
    ),
    (
        {"seqused_k": ints(9, 10), "max_seqlen_k": 9},
        "max_seqlen_k is 9, allowed: at least the length of every",
    ),
]

BAD_OPTIONS = [
    ({"causal": 2}, ValueError, "causal is 2, allowed: True or False"),
    ({"deterministic": "no"}, TypeError, "deterministic is a str, 'no', allowed: True or False"),
    ({"return_attn_probs": 3}, ValueError, "return_attn_probs is 3, allowed: True or False"),
    (
        {"backend": "cuda"},
        ValueError,
        "backend is 'cuda', allowed: 'hopper', 'ampere', 'torch', 'reference' or None",
    ),
    ({"backend": "hopper"}, ValueError, "backend is 'hopper', but cpu is not an NVIDIA GPU"),
    ({"sm_margin": -1}, ValueError, "sm_margin is -1, allowed: 0 or more"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0, allowed: a finite number greater than 0"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale is a str, '1', allowed: a number"),
    ({"window_size": 3}, TypeError, "window_size is 3, allowed: a pair (left, right) of ints from -1"),
    (
        {"window_size": (-2, 0)},
        ValueError,
        "window_size is (-2, 0), allowed: a pair (left, right) of ints from",
    ),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0, allowed: 0, which is none"),
    ({"attention_chunk": -1}, ValueError, "attention_chunk is -1, allowed: 0 or more"),
    ({"num_splits": 1.5}, TypeError, "num_splits is a float, 1.5, allowed: an int"),
    ({"pack_gqa": 4}, ValueError, "pack_gqa is 4, allowed: True or False"),
    (
        {"q_descale": torch.ones(2, 2)},
        ValueError,
        "q_descale is given but q has dtype torch.bfloat16, allowed: descales with torch.float8_e4m3fn only",
    ),
]

FP8 = {name: x.to(torch.float8_e4m3fn) for name, x in (("q", Q), ("k", KV), ("v", KV))}
LONG = MAX_WINDOW_LENGTH + 1

MISSING = [
    (FP8 | {"dropout_p": 0.5}, "dropout_p is 0.5: dropout of P of torch.float8_e4m3fn tensors"),
    (
        {"attention_chunk": 5, "max_seqlen_q": LONG},
        "attention_chunk is given for 536870913 queries and 11 keys",
    ),
    ({"window_size": (3, 3), "max_seqlen_q": LONG}, "window_size is given for 536870913 queries and 11 keys"),
    ({"window_size": (3, 3), "max_seqlen_k": LONG}, "window_size is given for 7 queries and 536870913 keys"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD_TENSORS + BAD_LENGTHS + BAD_OPTIONS)
def test_bad_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(**changed)


@pytest.mark.parametrize(("changed", "message"), BAD_VALUES)
@pytest.mark.parametrize("compiled", [False, True])
def test_bad_values_on_a_cpu(changed: dict[str, Any], message: str, compiled: bool) -> None:
    torch._dynamo.reset()
    function = torch.compile(call, backend="eager") if compiled else call
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**changed)


@pytest.mark.parametrize(("changed", "message"), MISSING)
def test_missing_features(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)) as caught:
        call(**changed)
    assert "; use " in str(caught.value)


def test_what_hides_nothing_is_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {
        n: torch.randn(x.shape, generator=generator).bfloat16() for n, x in (("q", Q), ("k", KV), ("v", KV))
    }
    plain, causal = call(**tensors), call(**tensors, causal=True)
    assert not torch.equal(plain, causal)
    for hint in (
        {"num_splits": 4},
        {"pack_gqa": True},
        {"softcap": 0},
        {"window_size": (10, 6)},
        {"sm_margin": 3},
    ):
        assert torch.equal(call(**tensors, **hint), plain), hint
    for hint in ({"attention_chunk": 11}, {"window_size": (10, 1)}):
        assert torch.equal(call(**tensors, causal=True, **hint), causal), hint
    assert torch.equal(call(**tensors, window_size=(None, 0)), causal)
    assert torch.equal(call(**tensors, deterministic=True, backend="torch"), plain)


@pytest.mark.parametrize(
    ("shape", "heads", "message"),
    [
        (
            (12, 2, 4, 64),
            None,
            "qkv has shape (12, 2, 4, 64), allowed: (total, 3, heads, head_dim), or three dim",
        ),
        (
            (12, 8, 64),
            None,
            "qkv has shape (12, 8, 64), allowed: (total, 3, heads, head_dim), or three dimensions",
        ),
        (
            (12, 3, 4, 64),
            4,
            "qkv has shape (12, 3, 4, 64), allowed with num_heads_q: (total, heads, head_dim)",
        ),
        (
            (12, 8, 64),
            3,
            "num_heads_q is 3, allowed with the 8 heads of qkv: above 0, and leaving as many heads",
        ),
        ((12, 8, 64), 8, "num_heads_q is 8, allowed with the 8 heads of qkv"),
    ],
)
def test_bad_qkvpacked(shape: tuple[int, ...], heads: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_varlen_qkvpacked_func(Q.new_zeros(shape), CU_Q, 7, num_heads_q=heads)


BAD_PACKED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: flash_attn_varlen_qkvpacked_func((Q,), CU_Q, 7),
        TypeError,
        "qkv is a tuple, allowed: a torch.T",
    ),
    (
        lambda: flash_attn_varlen_qkvpacked_func(Q.new_zeros(12, 3, 2, 64), [0], 7),
        TypeError,
        "cu_seqlens is a list, allowed: a torch.Tensor",
    ),
    (
        lambda: flash_attn_varlen_qkvpacked_func(Q.new_zeros(12, 3, 2, 64), CU_Q, 7.5),
        TypeError,
        "max_seqlen is a float, 7.5, allowed: an int",
    ),
    (
        lambda: flash_attn_varlen_kvpacked_func(Q, KV, CU_Q, CU_K, 7, 11),
        ValueError,
        "kv has shape (20, 2, 64), allowed: (total_k, 2, kv_heads, head_dim)",
    ),
    (
        lambda: flash_attn_varlen_kvpacked_func(Q, torch.stack([KV, KV], 1), CU_Q, CU_K, 7, 11, softcap=-3),
        ValueError,
        "softcap is -3, allowed: 0, which is none",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_PACKED)
def test_bad_packed(bad: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        bad()
