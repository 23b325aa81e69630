"""Which FP8 calls on packed sequences are remembered, and where what was kept of them serves, by stand-ins."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import Fp8Quantization, device_memory, packed_at_once, packed_parts_again
from hopper_attention.launch import at_once
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.packed_fp8_calls import apart, check, refuse
from tests.python.packed_parts_calls import (
    attend,
    attend_to_parts,
    call_again,
    check_call,
    draw,
    exact_of,
    exact_of_parts,
    is_nothing_remembered,
    launched,
    make_known,
    options_of,
    parts_of,
    refuse_to_find,
    wide,
)
from tests.python.packed_parts_kernels import PARTS_LAUNCHING, PartsKernels, pretended_parts
from tests.python.varlen_cases import offsets

BF16 = torch.bfloat16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[PartsKernels]:
    """Those of a pretended H200. What is new is NaN."""
    yield from pretended_parts(monkeypatch)


class Strange(Tensor):
    """A subclass with nothing of its own."""


EMPTY = "no keys", "no queries", "no sequences"
NOT_REMEMBERED = ["gradients", "a graph", "rotated values", "heads", "exact lse", "some queries", "no keys"]
NOT_REMEMBERED += [
    "no queries",
    "no sequences",
    "a parameter",
    "a subclass",
    "an address",
    "columns apart",
    "float32",
]


@pytest.mark.parametrize("kind", NOT_REMEMBERED)
def test_what_is_not_remembered(kernels: PartsKernels, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, named = draw("different")
    q, k, v = tensors
    of_kind: dict[str, dict[str, Any]] = {
        "rotated values": {"quantization": Fp8Quantization(rotate_v=True, seed=1)},
        "heads": {"quantization": Fp8Quantization(granularity="head")},
        "exact lse": {"return_attn_probs": True},
        "some queries": {"seqused_q": torch.tensor([40, 0, 33, 9], dtype=torch.int32)},
        "no keys": {"cu_seqlens_k": offsets((0,) * 4)},
        "no queries": {"cu_seqlens_q": offsets((0,) * 4)},
        "no sequences": {"cu_seqlens_q": offsets(()), "cu_seqlens_k": offsets(())},
    }
    of_tensors: dict[str, list[Tensor]] = {
        "gradients": [q.clone().requires_grad_(), k, v],
        "no keys": [q, k[:0], v[:0]],
        "no queries": [q[:0], k, v],
        "a subclass": [q, k, v.as_subclass(Strange)],
        "a parameter": [q, torch.nn.Parameter(k, requires_grad=False), v],
        "an address": [q, apart(k), v],
        "columns apart": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors],
        "float32": [x.float() for x in tensors],
    }
    tensors, named = of_tensors.get(kind, tensors), named | of_kind.get(kind, {})
    if kind == "a graph":
        monkeypatch.setattr(device_memory, "is_capturing", lambda device: True)
    exact = exact_of([x.detach() for x in tensors], named)
    with torch.autocast("cpu", BF16, enabled=kind == "float32"):
        if kind == "float32":
            exact = exact_of([x.to(BF16) for x in tensors], named)
        for _ in range(3):
            found = attend(*tensors, **named)
            check(found if isinstance(found, tuple) else found.detach(), exact)
    assert is_nothing_remembered()
    assert kernels.launches.count("attend") == (0 if kind in EMPTY else 3)


OF_PARTS = "parts with gradients", "rows of values", "codes apart"


@pytest.mark.parametrize("kind", [*NOT_REMEMBERED[1:9], *OF_PARTS])
def test_what_is_not_remembered_of_parts(
    kernels: PartsKernels, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v), named = draw("different")
    if kind == "rotated values":
        named["quantization"] = Fp8Quantization(rotate_v=True, seed=1)
    if kind == "heads":
        named["quantization"] = Fp8Quantization(granularity="head")
    if kind == "exact lse":
        named["return_attn_probs"] = True
    if kind == "some queries":
        named["seqused_q"] = torch.tensor([40, 0, 33, 9], dtype=torch.int32)
    if kind == "no keys":
        k, v, named["cu_seqlens_k"] = k[:0], v[:0], offsets((0,) * 4)
    if kind == "no sequences":
        named |= {"cu_seqlens_q": offsets(()), "cu_seqlens_k": offsets(())}
    if kind == "no queries":
        q, named["cu_seqlens_q"] = q[:0], offsets((0,) * 4)
    parts = parts_of([q, k, v], named)
    exact = exact_of_parts(parts, named)
    if kind == "a graph":
        monkeypatch.setattr(device_memory, "is_capturing", lambda device: True)
    if kind == "parts with gradients":
        parts.k.scale.requires_grad_()
    if kind == "codes apart":
        parts = replace(parts, k=replace(parts.k, data=wide(parts.k.data)))
    if kind == "rows of values":
        parts = replace(parts, v=parts.v.row_major(parts.lengths.cu_seqlens_k))
    kernels.launches.clear()
    for _ in range(3):
        check(attend_to_parts(parts, **options_of(named)), exact)
    assert is_nothing_remembered() and kernels.launches.count("attend") == (0 if kind in EMPTY else 3)


def test_the_mean_of_keys_is_refused_each_time(kernels: PartsKernels) -> None:
    tensors, named = draw("long")
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="smooth_k is True"):
            attend(*tensors, **named, quantization=Fp8Quantization(smooth_k=True))
    assert is_nothing_remembered() and not kernels.launches


@pytest.mark.parametrize("how", ["graph", "mode", "address"])
def test_what_was_found_does_not_serve_elsewhere(
    kernels: PartsKernels, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, named = make_known()
    parts = parts_of(tensors, named)
    if how == "graph":
        monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    elif how == "mode":
        for module in (packed_at_once, packed_parts_again):
            monkeypatch.setattr(module, "may_be_like", lambda: False)
    else:
        tensors = [apart(x) for x in tensors]
        parts = replace(parts, q=replace(parts.q, data=apart(parts.q.data)))
    check(attend(*tensors, **named), exact_of(tensors, named))
    check(attend_to_parts(parts), exact_of_parts(parts, named))
    refuse_to_find(monkeypatch)
    for call in (partial(attend, *tensors, **named), partial(attend_to_parts, parts)):
        with pytest.raises(AssertionError, match="found anew"):
            call()


def test_another_gpu_is_current(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = pretend(monkeypatch, *PARTS_LAUNCHING)
    tensors, named = make_known()
    parts = parts_of(tensors, named)
    entered.clear()
    for _ in range(2):
        for call in (partial(attend, *tensors, **named), partial(attend_to_parts, parts)):
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
            check(call(), exact_of(tensors, named))
    assert set(entered) == {0} and len(entered) >= 4


def test_modes_of_torch(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept without a mode does not serve in it, nor the other way round, and each remembers its own."""
    for mode in (torch.inference_mode, lambda: torch.autocast("cpu", BF16)):
        forget_launchers()
        tensors, named = make_known()
        parts, exact = parts_of(tensors, named), exact_of(tensors, named)
        calls = partial(attend, *tensors, **named), partial(attend_to_parts, parts)
        with mode():
            for call in calls:
                with monkeypatch.context() as patch, pytest.raises(AssertionError, match="found anew"):
                    refuse_to_find(patch)
                    call()
                for number in range(2):
                    with monkeypatch.context() as patch:
                        if number:
                            refuse_to_find(patch)
                        check(call(), exact)
        for call in calls:
            with monkeypatch.context() as patch:
                refuse_to_find(patch)
                check(call(), exact)


def test_what_was_kept_without_gradients_does_not_serve_with_them(kernels: PartsKernels) -> None:
    tensors, named = draw("long")
    tensors[0].requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            assert not attend(*tensors, **named).requires_grad
    assert attend(*tensors, **named).requires_grad and is_nothing_remembered()
    tensors, named = make_known()
    assert attend(tensors[0].clone().requires_grad_(), *tensors[1:], **named).requires_grad


def test_errors_are_those_of_first_calls(kernels: PartsKernels) -> None:
    tensors, named = make_known()
    parts, launches = parts_of(tensors, named), len(kernels.calls)
    of_both: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale is"),
        ({"causal": 2}, ValueError, "causal is 2"),
        ({"causal": [True]}, TypeError, "causal is a list"),
        ({"return_attn_probs": "yes"}, TypeError, "return_attn_probs is a str"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ]
    for changed, error, message in of_both:
        with pytest.raises(error, match=message):
            attend_to_parts(parts, **changed)
    for changed, error, message in (
        *of_both,
        ({"max_seqlen_k": 1.5}, TypeError, "max_seqlen_k is a float"),
        ({"max_seqlen_q": True}, TypeError, "max_seqlen_q is a bool"),
        ({"max_seqlen_q": None}, ValueError, "max_seqlen_q is None"),
        ({"cu_seqlens_q": [0, 90]}, TypeError, "cu_seqlens_q is a list"),
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k is None"),
        ({"cu_seqlens_k": named["cu_seqlens_k"].long()}, TypeError, "cu_seqlens_k has dtype"),
        ({"cu_seqlens_k": named["cu_seqlens_k"][:-1]}, ValueError, "cu_seqlens_k has 4 elements"),
        ({"seqused_k": 3}, TypeError, "seqused_k is a"),
        ({"quantization": None}, TypeError, "quantization is None"),
        ({"v": None}, TypeError, "v is a NoneType"),
        ({"k": tensors[1].half()}, TypeError, "k has dtype"),
    ):
        with pytest.raises(error, match=message):
            attend(**(dict(zip("qkv", tensors, strict=True)) | named | changed))
    assert len(kernels.calls) == launches


def test_quantizations_that_are_equal(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, named = draw("long")
    equal = [Fp8Quantization(seed=3), Fp8Quantization(seed=3)]
    for c in equal * 2:
        call_again(kernels, monkeypatch, partial(attend, *tensors, **named, quantization=c))
    refuse_to_find(monkeypatch)
    for c in equal:
        of_call = named | {"quantization": c}
        check_call(kernels, launched(kernels, attend, tensors, of_call), tensors, of_call)


def test_a_quantization_lives_as_long_as_what_it_is_found_by(kernels: PartsKernels) -> None:
    tensors, named = draw("long")
    c = Fp8Quantization(seed=1)
    lives = weakref.ref(c)
    for _ in range(2):
        attend(*tensors, **named, quantization=c)
    del c
    gc.collect()
    assert lives() is not None
    forget_launchers()
    gc.collect()
    assert lives() is None


def test_quantizations_that_come_and_go(kernels: PartsKernels) -> None:
    """Most of them where one was that is no more."""
    tensors, named = draw("long")
    for number in range(12):
        flags = {"rotate": number % 2 == 0, "smooth_v": number % 3 == 0}
        found = attend(*tensors, **named, quantization=Fp8Quantization(**flags))
        check(found, exact_of(tensors, named | {"quantization": Fp8Quantization(**flags)}))


@pytest.mark.parametrize("which", ["q", "k"])
def test_strides_of_one_head(kernels: PartsKernels, which: str) -> None:
    """Which count for nothing, and may be what the kernel does not take."""
    tensors, named = draw("one head")
    parts = parts_of(tensors, named)
    exact = exact_of_parts(parts, named)

    part = getattr(parts, which)
    data = part.data.squeeze(1).clone().unsqueeze(-1).movedim(-1, 1)
    assert data.shape == part.shape and data.is_contiguous() and data.stride(1) == 1
    for _ in range(3):
        check(attend_to_parts(replace(parts, **{which: replace(part, data=data)})), exact)


def test_a_call_that_would_not_be_kept_is_not_made_ready(
    kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where K is V, as tensors of which two are one object are like no others."""
    (q, k, _), named = draw("equal")
    monkeypatch.setattr(at_once, "make_script", refuse)
    for _ in range(3):
        check(attend(q, k, k, **named), exact_of([q, k, k], named))
    assert is_nothing_remembered()
