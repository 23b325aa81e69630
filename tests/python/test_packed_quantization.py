"""Packed sequences in e4m3: each is to the bit what it is by itself, and nothing is read on the host."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper.forward.fp8.config import FP8_KEY_ORDER
from hopper_attention import Fp8Quantization, quantize_qkv
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantization import from_packed_descales, resolve_lengths
from hopper_attention.packed_quantized import (
    PackedQuantizedQKV,
    PackedTransposedV,
    count_units,
    key_of_slot,
    slot_of_key,
)
from hopper_attention.quantization import from_descales
from tests.python.varlen_cases import CASES, Case

PACKED = Case(
    (8, 8, 70, 3, 0), (16, 8, 40, 99, 5), used_q=(3, 0, 70, 1, 0), used_k=(11, 8, 33, 64, 0), behind=40
)
NAMES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")
OPTIONS = [
    Fp8Quantization(block_k=32),
    Fp8Quantization(block_k=64, block_q=32, rotate_v=True),
    Fp8Quantization(rotate=False, block_k=32, block_q=128),
    Fp8Quantization(granularity="head", block_k=32),
]


def lengths_of(case: Case) -> dict[str, Any]:
    return dict(zip(NAMES, case.lengths, strict=True))


def quantized(case: Case, c: Fp8Quantization, dtype: torch.dtype = torch.float16) -> PackedQuantizedQKV:
    return quantize_qkv(*case.tensors(dtype), quantization=c, **lengths_of(case))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("c", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_each_sequence_is_what_it_is_by_itself(c: Fp8Quantization, dtype: torch.dtype) -> None:
    for case in (PACKED, CASES["empty ones"], CASES["many tiles"]):
        tensors = case.tensors(dtype)
        parts = quantize_qkv(*tensors, quantization=c, **lengths_of(case))
        assert parts.dtype == dtype
        for (rows, keys), found in parts.sequences():
            q, k, v = (x[None, s.slice] for x, s in zip(tensors, (rows, keys, keys), strict=True))
            alone = quantize_qkv(q, k, v, quantization=c, backend="torch")
            for ours, own in ((found.q, alone.q), (found.k, alone.k), (found.v, alone.v)):
                assert same_bytes(ours.data, own.data) and torch.equal(ours.scale, own.scale)
                assert ours.block == own.block
            assert (found.q.largest, found.k.largest) == (alone.q.largest, alone.k.largest)


def test_a_scale_for_everything_is_that_of_all_sequences() -> None:
    c = Fp8Quantization(granularity="tensor", rotate=False, block_k=32)
    case = CASES["plain"]
    q, k, v = case.tensors(torch.float32)
    parts = quantize_qkv(q, k, v, quantization=c, **lengths_of(case))
    whole = quantize_qkv(q[None], k[None], v[None], quantization=c)
    for packed, dense in ((parts.q, whole.q), (parts.k, whole.k)):
        assert bool((packed.scale == dense.scale[0, 0, 0]).all()) and same_bytes(packed.data, dense.data[0])


def test_no_nan_of_unused_rows_and_zeros_behind_each_sequence() -> None:
    parts = quantized(PACKED, Fp8Quantization(block_k=32))
    assert isinstance(parts.v, PackedTransposedV)
    for data in (parts.q.data, parts.k.data, parts.v.data):
        assert not data.float().isnan().any()
    steps = parts.v.data.float().unflatten(2, (-1, 32))
    cu, used = parts.lengths.cu_seqlens_k.tolist(), parts.lengths.seqused_k.tolist()
    counted = torch.zeros(steps.shape[2], 32, dtype=torch.bool)
    for b, length in enumerate(used):
        for key in range(length):
            slot = FP8_KEY_ORDER.index(key % 32)
            counted[cu[b] // 32 + b + key // 32, slot] = True
    assert bool((steps[:, :, ~counted] == 0).all())
    assert bool((steps[:, :, counted] != 0).any(1).all())


@pytest.mark.parametrize("c", OPTIONS)
def test_dequantized_it_is_what_the_sequences_are(c: Fp8Quantization) -> None:
    parts = quantized(PACKED, c)
    q, k, v = parts.dequantize()
    for (rows, keys), alone in parts.sequences():
        assert torch.equal(q[rows.slice], alone.q.dequantize(torch.float16)[0])
        assert torch.equal(k[keys.slice], alone.k.dequantize(torch.float16)[0])
        assert torch.equal(v[keys.slice], alone.v.dequantize(torch.float16)[0])


def test_the_order_of_keys() -> None:
    slots = torch.arange(32)
    assert key_of_slot(slots).tolist() == list(FP8_KEY_ORDER)
    assert torch.equal(slot_of_key(key_of_slot(slots)), slots)


def test_nan_and_infinity_spoil_no_other_sequence() -> None:
    case, c = CASES["plain"], Fp8Quantization(block_k=32)
    q, k, v = case.tensors(torch.float16)
    exact = quantize_qkv(q, k, v, quantization=c, **lengths_of(case))
    k[9], v[12] = math.nan, math.inf
    parts = quantize_qkv(q, k, v, quantization=c, **lengths_of(case))
    for number, ((_, ours), (_, own)) in enumerate(zip(parts.sequences(), exact.sequences(), strict=True)):
        is_same = same_bytes(ours.k.data, own.k.data) and same_bytes(ours.v.data, own.v.data)
        assert is_same == (number != 1)


def test_descales_are_those_of_each_sequence() -> None:
    case = replace(PACKED, head_dims=(32, 16))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in case.tensors(torch.float16))
    generator = torch.Generator().manual_seed(1)
    descales = tuple(torch.rand(5, 2, generator=generator) + 0.5 for _ in range(3))
    lengths = resolve_lengths(*(lengths_of(case)[name] for name in NAMES))
    assert lengths is not None
    parts = from_packed_descales(q, k, v, descales, lengths, torch.bfloat16)
    for number, ((rows, keys), found) in enumerate(parts.sequences()):
        own = (x[None, s.slice] for x, s in zip((q, k, v), (rows, keys, keys), strict=True))
        alone = from_descales(*own, *(x[number : number + 1] for x in descales), torch.bfloat16)
        for ours, one in ((found.q, alone.q), (found.k, alone.k), (found.v, alone.v)):
            assert torch.equal(ours.dequantize(), one.dequantize()) or ours.dequantize().isnan().any()
            assert torch.equal(ours.scale, one.scale)


def test_nothing_is_read_on_the_host() -> None:
    """A fake tensor has no values: whatever wants one raises."""
    with FakeTensorMode():
        q, k, v = (torch.empty(n, h, 64, dtype=torch.half) for n, h in ((50, 4), (80, 2), (80, 2)))
        numbers = [torch.empty(n, dtype=torch.int32) for n in (4, 4, 3, 3)]
        from hopper_attention.packed_quantization import quantize_packed_by_torch

        lengths = Lengths(*numbers, 50, 80)
        parts = quantize_packed_by_torch(q, k, v, lengths, Fp8Quantization(block_k=128, rotate=False))
        assert [x.shape for x in parts.dequantize()] == [q.shape, k.shape, v.shape]
        assert parts.v.scale.shape == (2, count_units(80, 3, 128))


# What is refused


def call(**changed: Any) -> Any:
    case = CASES["plain"]
    named = dict(zip(("q", "k", "v"), case.tensors(torch.float16), strict=True)) | lengths_of(case)
    q, k, v, *_ = (named | changed).values()
    options = {name: x for name, x in (named | changed).items() if name not in "qkv"}
    return quantize_qkv(q, k, v, **options)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"cu_seqlens_k": None},
            ValueError,
            "cu_seqlens_k is None, allowed for packed sequences: cu_seqlens_q, ",
        ),
        ({"max_seqlen_q": None}, ValueError, "max_seqlen_q is None, allowed for packed sequences"),
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q is a float, 2.5, allowed: an int"),
        ({"cu_seqlens_q": [0, 3]}, TypeError, "cu_seqlens_q is a list, allowed: a torch.Tensor"),
        ({"seqused_q": torch.ones(4)}, TypeError, "seqused_q has dtype torch.float32, allowed: torch.int32"),
        ({"k": torch.ones(62, 2, 32)}, TypeError, "k has dtype torch.float32, allowed: the dtype of q"),
        ({"q": torch.ones(3, 4, 32).int()}, TypeError, "q has dtype torch.int32, allowed: torch.float16"),
        (
            {"q": torch.ones(1, 3, 4, 32).half()},
            ValueError,
            "q has 4 dimensions, shape (1, 3, 4, 32), allowed: 3",
        ),
        ({"backend": "fused"}, ValueError, "backend is 'fused', but "),
        (
            {"quantization": Fp8Quantization(smooth_k=True)},
            NotImplementedError,
            "smooth_k is True: quantization of packed sequences without the mean of K is not implemented",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(**changed)


def test_lengths_that_only_tell_what_is_used_are_refused() -> None:
    q, k, v = CASES["plain"].tensors(torch.float16)
    with pytest.raises(ValueError, match="cu_seqlens_q is None, allowed for packed sequences"):
        quantize_qkv(q, k, v, seqused_k=torch.ones(3, dtype=torch.int32))


def test_parts_that_do_not_fit_together() -> None:
    parts = quantized(CASES["plain"], Fp8Quantization(block_k=32))
    short = replace(parts.q, scale=parts.q.scale[:, 1:])
    with pytest.raises(
        ValueError, match=re.escape("the scale of q has shape (4, 67), allowed with 63 rows in 4")
    ):
        replace(parts, q=short)
    assert isinstance(parts.v, PackedTransposedV)
    with pytest.raises(
        ValueError, match="the data of v have 96 keys, allowed for 62 rows in 4 sequences: 192"
    ):
        replace(parts, v=replace(parts.v, data=parts.v.data[:, :, :96]))
    with pytest.raises(TypeError, match="data has dtype"):
        replace(parts.k, data=parts.k.data.float())
    with pytest.raises(
        ValueError, match=re.escape("data has shape (63, 4), allowed: (total, heads, head_dim)")
    ):
        replace(parts.q, data=parts.q.data[..., 0])
