"""Every bad argument of the functions of a key/value cache raises before anything is launched or written."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    explain_kvcache,
    flash_attn_combine,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from hopper_attention.kvcache import check_cache
from tests.python.kvcache_cases import FP8, CacheCase, bits, int32

CASE = CacheCase(new=(3, 3, 3), page_size=4, rotary_dim=16, packed_q=True)
BF16 = torch.bfloat16
META = torch.device("meta")


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape).to(dtype)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"q": zeros(9, 4, 32, dtype=torch.float32)},
        TypeError,
        "q has dtype torch.float32, allowed: torch.float16",
    ),
    ({"q": zeros(9, 4, 32, dtype=torch.float8_e5m2)}, TypeError, "e5m2 keeps 2 bits of mantissa"),
    ({"q": zeros(3, 3, 4, 32)}, ValueError, "q has 4 dimensions, shape (3, 3, 4, 32), allowed: 3, (total_q"),
    ({"q": zeros(9, 3, 32)}, ValueError, "q has 3 heads and k has 2, allowed: a multiple"),
    ({"q": zeros(9, 4, 36)}, ValueError, "head_dim of q is 36, allowed: multiples of 8"),
    (
        {"q": zeros(9, 4, 40)},
        ValueError,
        "k_cache has shape (21, 4, 2, 32), allowed with q of shape (9, 4, 40)",
    ),
    ({"q": [1]}, TypeError, "q is a list, allowed: a torch.Tensor"),
    ({"k_cache": None}, TypeError, "k_cache is a NoneType, allowed: a torch.Tensor"),
    (
        {"k_cache": zeros(21, 4, 2, 32, dtype=torch.float16)},
        TypeError,
        "k_cache has dtype torch.float16, allowed with q of dtype torch.bfloat16: torch.bfloat16 or torch.float8",
    ),
    (
        {"v_cache": zeros(21, 4, 2, 24, dtype=FP8)},
        TypeError,
        "v_cache has dtype torch.float8_e4m3fn, allowed: the dtype of k_cache, torch.bfloat16",
    ),
    (
        {"k_cache": zeros(21, 4, 64)},
        ValueError,
        "k_cache has 3 dimensions, shape (21, 4, 64), allowed: 4, (num_pages, page_size, kv_heads, head_dim)",
    ),
    (
        {"v_cache": zeros(20, 4, 2, 24)},
        ValueError,
        "v_cache has shape (20, 4, 2, 24), allowed with k_cache of shape (21, 4, 2, 32): (21, 4, 2, head_dim_v)",
    ),
    (
        {"k_cache": zeros(21, 4, 32, 2).mT},
        ValueError,
        "k_cache has stride 2 in its last dimension, allowed: 1",
    ),
    (
        {"v_cache": zeros(1, 4, 2, 24).expand(21, 4, 2, 24)},
        ValueError,
        "v_cache has shape (21, 4, 2, 24) and strides (0, 48, 24, 1), allowed: a place in memory for each element",
    ),
    ({"k_cache": zeros(0, 4, 2, 32), "v_cache": zeros(0, 4, 2, 24)}, ValueError, "k_cache has no pages"),
    (
        {"k_cache": zeros(21, 0, 2, 32), "v_cache": zeros(21, 0, 2, 24)},
        ValueError,
        "k_cache has pages of 0 rows",
    ),
    (
        {"k_cache": zeros(21, 4, 2, 32).to(META)},
        ValueError,
        "k_cache is on meta, allowed: the device of q, cpu",
    ),
    ({"page_table": zeros(3, 6)}, TypeError, "page_table has dtype torch.bfloat16, allowed: torch.int32"),
    (
        {"page_table": int32([1, 2])},
        ValueError,
        "page_table has 1 dimensions, shape (2,), allowed: 2, (batch, pages)",
    ),
    (
        {"page_table": int32([[1]] * 5)},
        ValueError,
        "page_table has 5 sequences, its first size, allowed without cache_batch_idx: the batch size of q, 3",
    ),
    (
        {"page_table": torch.zeros(6, 3, dtype=torch.int32).mT},
        ValueError,
        "page_table has stride 3 in its last dimension",
    ),
    ({"page_table": int32([[1, 2]] * 3).to(META)}, ValueError, "page_table is on meta"),
    (
        {"page_table": torch.zeros(0, 6, dtype=torch.int32), "cache_batch_idx": int32([0, 1, 2])},
        ValueError,
        "page_table has no sequences",
    ),
    (
        {"cache_seqlens": torch.tensor([1, 2, 3])},
        TypeError,
        "cache_seqlens has dtype torch.int64, allowed: torch.int32",
    ),
    ({"cache_seqlens": int32([1, 2])}, ValueError, "cache_seqlens has shape (2,), allowed: (batch,), (3,)"),
    ({"cache_seqlens": int32([1, 2, 3, 4, 5, 6])[::2]}, ValueError, "cache_seqlens has stride 2, allowed: 1"),
    (
        {"cache_seqlens": 22},
        ValueError,
        "cache_seqlens is 22, allowed: 0 to 21: the cache has room for 24 keys a sequence, with 3 new tokens",
    ),
    ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1, allowed: 0 to 21"),
    ({"cache_seqlens": True}, TypeError, "cache_seqlens is a bool, True, allowed: an int or an int32"),
    ({"cache_seqlens": 2.0}, TypeError, "cache_seqlens is a float, 2.0, allowed"),
    ({"cache_seqlens": None}, ValueError, "cache_seqlens is None, allowed with k and v"),
    (
        {"cache_batch_idx": int32([1, 2])},
        ValueError,
        "cache_batch_idx has shape (2,), allowed: (batch,), (3,)",
    ),
    (
        {"cache_leftpad": torch.zeros(3)},
        TypeError,
        "cache_leftpad has dtype torch.float32, allowed: torch.int32",
    ),
    ({"cache_leftpad": 4}, TypeError, "cache_leftpad is a int, allowed: a torch.Tensor"),
    ({"cu_seqlens_q": int32([])}, ValueError, "cu_seqlens_q is empty"),
    ({"cu_seqlens_q": int32(3)}, ValueError, "cu_seqlens_q has shape (), allowed: (batch + 1,)"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 6, 9])}, TypeError, "cu_seqlens_q has dtype torch.int64"),
    ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q is a float"),
    ({"max_seqlen_q": -3}, ValueError, "max_seqlen_q is -3, allowed: 0 or more"),
    ({"k": None}, ValueError, "v is given without k, allowed: both, or neither"),
    ({"v": None}, ValueError, "k is given without v, allowed: both, or neither"),
    ({"k": zeros(3, 3, 1, 32)}, ValueError, "k has shape (3, 3, 1, 32), allowed: (3, seqlen_new, 2, 32)"),
    ({"k": zeros(2, 3, 2, 32)}, ValueError, "k has shape (2, 3, 2, 32), allowed: (3, seqlen_new, 2, 32)"),
    (
        {"k": zeros(9, 2, 32)},
        ValueError,
        "k has 3 dimensions, shape (9, 2, 32), allowed: 4, (3, seqlen_new, 2, 32)",
    ),
    (
        {"v": zeros(3, 2, 2, 24)},
        ValueError,
        "v has shape (3, 2, 2, 24), allowed with k of shape (3, 3, 2, 32): (3, 3, 2, 24)",
    ),
    (
        {"k": zeros(3, 25, 2, 32), "v": zeros(3, 25, 2, 24)},
        ValueError,
        "k has 25 new tokens a sequence, allowed: up to the 24",
    ),
    (
        {"k": zeros(3, 3, 2, 32, dtype=FP8)},
        TypeError,
        "k has dtype torch.float8_e4m3fn, allowed: the dtype of q or of k_cache, torch.bfloat16",
    ),
    (
        {"v": zeros(3, 3, 2, 24, dtype=FP8)},
        TypeError,
        "v has dtype torch.float8_e4m3fn, allowed: the dtype of k",
    ),
    (
        {"cu_seqlens_k_new": int32([0, 3, 6, 9])},
        ValueError,
        "k has 4 dimensions, shape (3, 3, 2, 32), allowed: 3, (total_new, 2, 32)",
    ),
    (
        {"cu_seqlens_k_new": int32([0, 9]), "k": zeros(9, 2, 32), "v": zeros(9, 2, 24)},
        ValueError,
        "cu_seqlens_k_new has shape (2,), allowed: (batch + 1,), (4,)",
    ),
    ({"rotary_sin": None}, ValueError, "rotary_cos is given without rotary_sin"),
    ({"rotary_cos": None}, ValueError, "rotary_sin is given without rotary_cos"),
    ({"k": None, "v": None}, ValueError, "rotary_cos is given without k and v"),
    ({"rotary_cos": zeros(32)}, ValueError, "rotary_cos has 1 dimensions"),
    (
        {"rotary_sin": zeros(31, 8)},
        ValueError,
        "rotary_sin has shape (31, 8), allowed: that of rotary_cos, (32, 8)",
    ),
    (
        {"rotary_cos": zeros(32, 4), "rotary_sin": zeros(32, 4)},
        ValueError,
        "rotary_cos has 4 columns, a rotary_dim of 8, allowed: multiples of 16 up to the head_dim of q, 32",
    ),
    (
        {"rotary_cos": zeros(32, 24), "rotary_sin": zeros(32, 24)},
        ValueError,
        "a rotary_dim of 48, allowed: multiples of 16",
    ),
    ({"rotary_cos": zeros(0, 8), "rotary_sin": zeros(0, 8)}, ValueError, "rotary_cos has no rows"),
    (
        {"rotary_cos": torch.zeros(32, 8).double()},
        TypeError,
        "rotary_cos has dtype torch.float64, allowed: torch.float16, torch.bfloat16, torch.float32",
    ),
    (
        {"rotary_sin": torch.zeros(32, 8)},
        TypeError,
        "rotary_sin has dtype torch.float32, allowed: the dtype of rotary_cos",
    ),
    ({"rotary_seqlens": int32([1])}, ValueError, "rotary_seqlens has shape (1,), allowed: (batch,), (3,)"),
    ({"q_descale": torch.ones(3, 2)}, ValueError, "q_descale is given but q has dtype torch.bfloat16"),
    ({"k_descale": torch.ones(3, 2)}, ValueError, "k_descale is given but k_cache has dtype torch.bfloat16"),
    ({"qv": zeros(9, 4, 32)}, ValueError, "qv has shape (9, 4, 32), allowed with these q and v"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0"),
    ({"causal": 2}, ValueError, "causal is 2, allowed: True or False"),
    ({"window_size": (1, 2, 3)}, TypeError, "window_size is (1, 2, 3)"),
    ({"attention_chunk": -1}, ValueError, "attention_chunk is -1, allowed: 0 or more"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    ({"rotary_interleaved": "yes"}, TypeError, "rotary_interleaved is a str, 'yes', allowed: True or False"),
    ({"scheduler_metadata": torch.zeros(3)}, TypeError, "scheduler_metadata has dtype torch.float32"),
    (
        {"scheduler_metadata": int32([[1]])},
        ValueError,
        "scheduler_metadata has shape (1, 1), allowed: one dimension",
    ),
    ({"num_splits": -1}, ValueError, "num_splits is -1, allowed: 0 or more"),
    ({"pack_gqa": 3}, ValueError, "pack_gqa is 3"),
    ({"sm_margin": -1}, ValueError, "sm_margin is -1"),
    ({"return_softmax_lse": None}, TypeError, "return_softmax_lse is a NoneType"),
    ({"sinks": torch.zeros(3)}, ValueError, "sinks has shape (3,), allowed: (heads,), (4,)"),
    ({"alibi_slopes": torch.zeros(2, 4)}, ValueError, "alibi_slopes has shape (2, 4)"),
    ({"out": zeros(9, 4, 32)}, ValueError, "out has shape (9, 4, 32), allowed: (9, 4, 24)"),
    (
        {"out": zeros(9, 4, 24, dtype=FP8)},
        TypeError,
        "out has dtype torch.float8_e4m3fn, allowed with q of torch.bfloat16: torch.bfloat16",
    ),
    ({"out": zeros(9, 24, 4).mT}, ValueError, "out has stride 4 in its last dimension, allowed: 1"),
    (
        {"out": zeros(1, 4, 24).expand(9, 4, 24)},
        ValueError,
        "out has shape (9, 4, 24) and strides (0, 24, 1), allowed: a place in memory for each element",
    ),
    ({"backend": "cutlass"}, ValueError, "backend is 'cutlass'"),
    ({"backend": "hopper"}, ValueError, "backend is 'hopper', but cpu is not an NVIDIA GPU"),
    (
        {"q": zeros(9, 4, 32).requires_grad_()},
        NotImplementedError,
        "a tensor requires a gradient: attention on a key/value cache has none",
    ),
    ({"k": zeros(3, 3, 2, 32).requires_grad_()}, NotImplementedError, "a tensor requires a gradient"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_argument(number: int) -> None:
    bad, error, message = BAD[number]
    call = CASE.build(BF16) | bad
    caches = [call[name] for name in ("k_cache", "v_cache") if isinstance(call[name], Tensor)]
    before = [cache.clone() for cache in caches]
    with pytest.raises(error, match=re.escape(message)):
        flash_attn_with_kvcache(**call)
    for was, cache in zip(before, caches, strict=True):
        assert cache.is_meta or torch.equal(bits(was), bits(cache))
    with pytest.raises(error, match=re.escape(message)):
        explain_kvcache(**call)


def test_arguments_of_e4m3() -> None:
    call = CacheCase().build(FP8)
    with pytest.raises(
        TypeError, match=r"k_cache has dtype torch\.float16, allowed with q of dtype torch\.float8_e4m3fn"
    ):
        flash_attn_with_kvcache(**(call | {"k_cache": call["k_cache"].half()}))
    with pytest.raises(
        ValueError, match=r"v_descale has shape \(3,\), allowed: \(batch, kv_heads\), \(3, 2\)"
    ):
        flash_attn_with_kvcache(**call, v_descale=torch.ones(3))
    with pytest.raises(TypeError, match=r"q_descale has dtype torch\.float16, allowed: torch\.float32"):
        flash_attn_with_kvcache(**call, q_descale=torch.ones(3, 2).half())
    with pytest.raises(
        NotImplementedError, match=r"a second query of .* is not implemented; use 16-bit tensors"
    ):
        flash_attn_with_kvcache(**call, qv=torch.zeros(3, 3, 4, 24).to(FP8))


def test_arguments_of_a_cache_without_pages() -> None:
    call = CacheCase().build(BF16)
    with pytest.raises(
        ValueError, match=r"k_cache has 2 sequences, its first size, allowed without cache_batch_idx"
    ):
        flash_attn_with_kvcache(**(call | {name: call[name][:2] for name in ("k_cache", "v_cache")}))
    with pytest.raises(ValueError, match="cu_seqlens_k_new is given without k and v"):
        flash_attn_with_kvcache(**call, cu_seqlens_k_new=int32([0, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"q has 4 dimensions, shape \(3, 3, 4, 32\), allowed: 3"):
        flash_attn_with_kvcache(**call, cu_seqlens_q=int32([0, 1, 2, 3]))


@pytest.mark.parametrize(("rows", "causal"), [(7, False), (8, True)])
def test_too_few_cosines_for_one_length(rows: int, causal: bool) -> None:
    case = CacheCase(lengths=(6, 6, 6), new=(2, 2, 2), rotary_dim=16)
    call = case.build(BF16, cache_seqlens=6, causal=causal)
    tables = {name: call[name][:rows] for name in ("rotary_cos", "rotary_sin")}
    with pytest.raises(
        ValueError, match=rf"rotary_cos has {rows} rows, allowed with cache_seqlens 6, 3 queries"
    ):
        flash_attn_with_kvcache(**(call | tables))
    tables = {name: call[name][: rows + 1] for name in tables}
    flash_attn_with_kvcache(**(call | tables))


SIZES = {
    "batch_size": 3,
    "max_seqlen_q": 1,
    "max_seqlen_k": 64,
    "num_heads_q": 8,
    "num_heads_kv": 2,
    "headdim": 64,
}


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"batch_size": -1}, ValueError, "batch_size is -1, allowed: 0 or more"),
        ({"max_seqlen_k": 2.0}, TypeError, "max_seqlen_k is a float, 2.0, allowed: an int"),
        ({"num_heads_kv": 3}, ValueError, "q has 8 heads and k has 3"),
        ({"headdim": 63}, ValueError, "head_dim of q is 63"),
        ({"qkv_dtype": torch.float32}, TypeError, "q has dtype torch.float32"),
        ({"cache_seqlens": int32([1])}, ValueError, "cache_seqlens has shape (1,), allowed: (3,)"),
        ({"cache_seqlens": 5}, TypeError, "cache_seqlens is a int, allowed: a torch.Tensor"),
        (
            {"cu_seqlens_q": torch.zeros(4)},
            TypeError,
            "cu_seqlens_q has dtype torch.float32, allowed: torch.int32",
        ),
        ({"pack_gqa": 4}, ValueError, "pack_gqa is 4"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_schedule(bad: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = SIZES | {"cache_seqlens": int32([1, 2, 3])} | bad
    with pytest.raises(error, match=re.escape(message)):
        get_scheduler_metadata(**arguments)


CACHE = torch.zeros(6, 4, 2, 32)
TABLE = int32([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 9], {"page_table": TABLE}, "cache_seqlens[1] is 9, allowed with 0 new tokens: 0 to 8"),
        ([5, 7], {"page_table": TABLE, "seqlen_new": 2}, "cache_seqlens[1] is 7, allowed with 2 new tokens: 0 to 6"),
        ([-1, 0], {"page_table": TABLE}, "cache_seqlens[0] is -1"),
        ([0, 7], {"page_table": TABLE, "cu_seqlens_k_new": int32([0, 0, 2])}, "cache_seqlens[1] is 7, allowed with 2"),
        ([0, 7], {"page_table": TABLE, "cu_seqlens_k_new": int32([0, 2, 1])}, "cu_seqlens_k_new is [0, 2, 1]"),
        ([5, 4], {"page_table": int32([[0, 6], [1, 9]])}, "page_table has 6 as page 1 of sequence 0, allowed: 0 to 5"),
        ([4, 4], {"page_table": int32([[0, 6], [-1, 9]])}, "page_table has -1 as page 0 of sequence 1"),
        ([1, 1], {"page_table": int32([[3, 6], [3, 9]]), "seqlen_new": 1}, "sequences 0 and 1 both write row 1"),
        ([1, 1], {"cache_batch_idx": int32([5, 6])}, "cache_batch_idx[1] is 6, allowed: 0 to 5"),
        ([1, 1], {"cache_batch_idx": int32([4, 4]), "seqlen_new": 1}, "sequences 0 and 1 both write row 1 of page 4"),
        ([1, 1], {"cache_leftpad": int32([1, 2])}, "cache_leftpad[1] is 2, allowed: 0 to 1"),
    ],
)  # fmt: skip
def test_what_only_the_device_sees_is_checked_on_demand(
    lengths: list[int], options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cache(CACHE, int32(lengths), **options)


@pytest.mark.parametrize(
    ("cache", "lengths", "options", "error", "message"),
    [
        (CACHE[0], int32([1]), {}, ValueError, "k_cache has 3 dimensions"),
        (CACHE[:1], int32([1, 1]), {}, ValueError, "k_cache has 1 sequences, its first size, allowed without cache_"),
        (CACHE, [1, 1], {}, TypeError, "cache_seqlens is a list, allowed: a torch.Tensor"),
        (CACHE, None, {}, TypeError, "cache_seqlens is a NoneType, allowed: a torch.Tensor"),
        (CACHE, int32([1, 1]).long(), {}, TypeError, "cache_seqlens has dtype torch.int64, allowed: torch.int32"),
        (CACHE, int32([1, 1]).to("meta"), {}, ValueError, "cache_seqlens is on meta, allowed: a device whose numbers"),
        (CACHE, int32([1, 1]), {"seqlen_new": 1.0}, TypeError, "seqlen_new is a float, 1.0, allowed: an int"),
        (CACHE, int32([1, 1]), {"page_table": [[0]]}, TypeError, "page_table is a list, allowed: a torch.Tensor"),
        (CACHE, int32([1, 1]), {"page_table": int32([0, 1])}, ValueError, "page_table has 1 dimensions"),
        (CACHE, int32([1, 1]), {"page_table": TABLE.long()}, TypeError, "page_table has dtype torch.int64, allowed"),
        (CACHE, int32([1, 1]), {"cache_batch_idx": int32([0])}, ValueError, "cache_batch_idx has shape (1,), allowed"),
        (CACHE, int32([1, 1]), {"cache_leftpad": int32([0])}, ValueError, "cache_leftpad has shape (1,), allowed: (ba"),
        (CACHE, int32([1, 1]), {"cu_seqlens_k_new": int32([0])}, ValueError, "cu_seqlens_k_new has shape (1,), allow"),
    ],
)  # fmt: skip
def test_the_check_on_demand_takes_what_a_call_takes(
    cache: Any, lengths: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check_cache(cache, lengths, **options)


def test_a_good_cache_passes() -> None:
    check_cache(CACHE, int32([5, 8]), page_table=TABLE)
    check_cache(CACHE, int32([5, 1]), page_table=int32([[0, 5], [0, 77]]))
    check_cache(CACHE, int32([3, 3]), page_table=TABLE, seqlen_new=5, cache_leftpad=int32([3, 0]))
    check_cache(CACHE, int32([3, 3]), cache_batch_idx=int32([5, 0]), cu_seqlens_k_new=int32([0, 1, 1]))
    check_cache(CACHE[:, :0], int32([0, 0]))  # room for no key


def test_explain_says_what_runs_on_a_hopper_gpu() -> None:
    call = CASE.build(BF16, FP8, softcap=3.0)
    meta = {name: x.to(META) if isinstance(x, Tensor) else x for name, x in call.items()}
    plan = explain_kvcache(**meta, device_capability=(9, 0))
    assert plan.path == "copied" and plan.backend == "hopper" and "varlen" in plan.config.name
    text = str(plan)
    for part in ("9 new tokens", "columns 2i and 2i + 1, by append_sm_90a_bf16_e4m3_interleaved_bf16_qbf16"):
        assert part in text
    assert "queries are rotated, all for one position" in text
    for part in (
        "keys and values in use are copied to bfloat16, by dequantize_sm_90a_bf16",
        "softcap: a score s becomes",
    ):
        assert part in text
    plan = explain_kvcache(**(meta | {"cache_seqlens": 7}), causal=True, device_capability=(8, 0))
    assert "by PyTorch, as arch is sm_80, which has no instructions for float8_e4m3fn" in str(plan)
    assert plan.backend == "ampere" and "10 rows a sequence" in str(plan) and "of its own" in str(plan)


def test_explain_says_what_runs_here() -> None:
    call = CacheCase(head_dims=(16, 64), heads=(4, 1)).build(BF16)
    plan = explain_kvcache(**call, qv=zeros(3, 3, 4, 64))
    assert plan.backend == "reference" and not plan.steps and "qv: a second query" in str(plan)
    assert "before     nothing" in str(plan)


def test_arguments_are_those_of_flash_attention_3_in_its_order() -> None:
    """So that calls by position mean the same; ours come behind them."""
    theirs = [
        "q",
        "k_cache",
        "v_cache",
        "k",
        "v",
        "qv",
        "rotary_cos",
        "rotary_sin",
        "cache_seqlens",
        "cache_batch_idx",
        "cache_leftpad",
        "page_table",
        "cu_seqlens_q",
        "cu_seqlens_k_new",
        "max_seqlen_q",
        "rotary_seqlens",
        "q_descale",
        "k_descale",
        "v_descale",
        "softmax_scale",
        "causal",
        "window_size",
        "attention_chunk",
        "softcap",
        "rotary_interleaved",
        "scheduler_metadata",
        "num_splits",
        "pack_gqa",
        "sm_margin",
        "return_softmax_lse",
    ]
    for function, names in (
        (flash_attn_with_kvcache, theirs),
        (flash_attn_combine, ["out_partial", "lse_partial", "out", "out_dtype"]),
    ):
        assert list(inspect.signature(function).parameters)[: len(names)] == names
