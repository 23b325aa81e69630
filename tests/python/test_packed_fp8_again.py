"""FP8 attention to packed sequences like that of an earlier call, from 16 bits and from parts, by stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import Fp8Quantization
from tests.python.packed_fp8_calls import apart, check
from tests.python.packed_parts_calls import (
    CALLS,
    attend,
    attend_to_parts,
    call_again,
    check_call,
    check_call_of_parts,
    draw,
    draw_case,
    exact_of,
    exact_of_parts,
    launched,
    make_known,
    moved,
    options_of,
    parts_of,
    refuse_to_find,
    wide,
)
from tests.python.packed_parts_kernels import PartsKernels, pretended_parts
from tests.python.varlen_cases import offsets

FP16, BF16 = torch.float16, torch.bfloat16
QUANTIZATIONS = {
    "usual": Fp8Quantization(),
    "with its mean": Fp8Quantization(smooth_v=False),
    "as it is": Fp8Quantization(rotate=False),
    "in blocks": Fp8Quantization(block_q=64, block_k=128, seed=2),
}
KINDS = (64, True, FP16), (64, False, BF16), (128, True, BF16), (128, False, FP16), (256, True, FP16)
KINDS = *KINDS, (256, False, BF16)
WITH_LSE = {"return_attn_probs": True, "exact_lse": False}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[PartsKernels]:
    """Those of a pretended H200. What is new is NaN."""
    yield from pretended_parts(monkeypatch)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("how", QUANTIZATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_results(
    kernels: PartsKernels, name: str, how: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for head_dim, causal, dtype in KINDS:
        tensors, named = draw(name, head_dim, dtype)
        named |= {"quantization": QUANTIZATIONS[how], "causal": causal, **(WITH_LSE if with_lse else {})}
        found = call_again(kernels, monkeypatch, partial(attend, *tensors, **named))
        check_call(kernels, found, tensors, named)
        assert isinstance(found, tuple) == with_lse


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("how", QUANTIZATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_results_of_parts(
    kernels: PartsKernels, name: str, how: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for head_dim, causal, dtype in KINDS:
        tensors, named = draw(name, head_dim, dtype)
        named |= {"quantization": QUANTIZATIONS[how], "causal": causal, **(WITH_LSE if with_lse else {})}
        parts, options = parts_of(tensors, named), options_of(named)
        found = call_again(kernels, monkeypatch, partial(attend_to_parts, parts, **options))
        check_call_of_parts(kernels, found, parts, named)
        assert isinstance(found, tuple) == with_lse


@pytest.mark.parametrize("two_level", [False, True])
def test_heads_of_other_widths_and_two_levels(
    kernels: PartsKernels, two_level: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, bounds = CALLS["long"]
    for head_dims in ((96, 64), (64, 128), (192, 256)):
        tensors, named = draw_case(replace(case, head_dims=head_dims), bounds)
        named |= {"causal": True, "two_level_accumulation": two_level, "softmax_scale": 0.2}
        found = call_again(kernels, monkeypatch, partial(attend, *tensors, **named))
        check_call(kernels, found, tensors, named)
        assert kernels.calls[-1]["config"].two_level == two_level
        parts, options = parts_of(tensors, named), options_of(named)
        found = call_again(kernels, monkeypatch, partial(attend_to_parts, parts, **options))
        check_call_of_parts(kernels, found, parts, named)


@pytest.mark.parametrize("name", CALLS)
def test_other_lengths_in_the_same_place(
    kernels: PartsKernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, named = draw(name)
    named |= {"causal": True, **WITH_LSE}
    for _ in range(2):
        attend(*tensors, **named)
        attend_to_parts(parts_of(tensors, named), **options_of(named))
    refuse_to_find(monkeypatch)
    for number in range(1, 5):
        moved(tensors, named, number)
        check(attend(*tensors, **named), exact_of(tensors, named))
        parts = parts_of(tensors, named)
        check(attend_to_parts(parts, **options_of(named)), exact_of_parts(parts, named))


def test_what_is_found_again(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """By other numbers that a kernel takes, and by bounds of lengths of the same class."""
    tensors, named = make_known()
    refuse_to_find(monkeypatch)
    for changed in ({"softmax_scale": 0.3}, {"max_seqlen_q": 2500}, {"max_seqlen_k": 2900}):
        of_call = named | changed
        check_call(kernels, launched(kernels, attend, tensors, of_call), tensors, of_call)
        parts = parts_of(tensors, of_call)
        kernels.launches.clear()
        check_call_of_parts(kernels, attend_to_parts(parts, **options_of(of_call)), parts, of_call)


def others(tensors: list[Tensor], named: dict[str, Any]) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Tensors and changed arguments of calls that none like these serve."""
    q, k, v = tensors
    starts, used = named["cu_seqlens_q"], torch.tensor([90, 0, 100, 61], dtype=torch.int32)
    few = {"cu_seqlens_q": offsets((30,) * 5), "cu_seqlens_k": offsets((40,) * 5)}
    return [
        *((tensors, changed) for changed in ({"causal": True}, {"causal": 0}, {"backend": "hopper"})),
        (tensors, WITH_LSE),
        (tensors, {"exact_lse": False}),
        (tensors, {"return_attn_probs": True}),
        (tensors, {"two_level_accumulation": True}),
        (tensors, {"window_size": (20, 5)}),
        (tensors, {"max_seqlen_q": 4097}),
        (tensors, {"max_seqlen_k": 300}),
        (tensors, {"cu_seqlens_k": starts}),
        (tensors, few),
        (tensors, {"seqused_k": used}),
        (tensors, {"seqused_q": torch.tensor([80, 7, 0, 31], dtype=torch.int32)}),
        (tensors, {"quantization": Fp8Quantization(smooth_v=False)}),
        (tensors, {"quantization": Fp8Quantization(block_q=64)}),
        ([x.half() for x in tensors], {}),
        ([wide(q), k, v], {}),
        ([q, k, wide(v)], {}),
        ([q[:-1], k, v], {}),
        ([q, k[:-1], v[:-1]], {}),
        ([q[:, :2].contiguous(), k, v], {}),
        ([q, *(x[:, :1].contiguous() for x in (k, v))], {}),
        ([q, k, v[..., :48].contiguous()], {}),
    ]


def test_other_calls_are_found_anew(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, named = make_known()
    with monkeypatch.context() as patch:
        refuse_to_find(patch)
        check(attend(*tensors, **named), exact_of(tensors, named))
        for given, changed in others(tensors, named):
            with pytest.raises(AssertionError, match="found anew"):
                attend(*given, **(named | changed))
    for given, changed in others(tensors, named):
        of_call = named | changed
        for _ in range(3):
            check(attend(*given, **of_call), exact_of(given, of_call))


def test_other_calls_of_parts_are_found_anew(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, named = make_known()
    # Parts do not show how q, k and v lay.
    calls = [
        (given, changed) for given, changed in others(tensors, named) if all(x.is_contiguous() for x in given)
    ]
    for refused in (True, False):
        for given, changed in calls:
            of_call = named | changed
            parts, options = parts_of(given, of_call), options_of(of_call)
            if refused:
                with monkeypatch.context() as patch, pytest.raises(AssertionError, match="found anew"):
                    refuse_to_find(patch)
                    attend_to_parts(parts, **options)
            else:
                for _ in range(3):
                    check(attend_to_parts(parts, **options), exact_of_parts(parts, of_call))


def test_other_parts_are_found_anew(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, named = make_known()
    parts = parts_of(tensors, named)
    scale, mean = parts.q.scale, parts.mean_v
    odd = scale.t().contiguous().t()
    refuse_to_find(monkeypatch)
    check(attend_to_parts(parts), exact_of_parts(parts, named))
    for other in (
        replace(parts, dtype=FP16),
        replace(parts, mean_v=mean[:0]),
        replace(parts, mean_v=apart(mean)),
        replace(parts, k=replace(parts.k, largest=448.0)),
        replace(parts, q=replace(parts.q, scale=odd)),
        replace(parts, q=replace(parts.q, scale=torch.nn.Parameter(scale, requires_grad=False))),
        replace(parts, v=parts.v.row_major(parts.lengths.cu_seqlens_k)),
        replace(parts, quantization=replace(parts.quantization, rotate_v=True)),
    ):
        with pytest.raises(AssertionError, match="found anew"):
            attend_to_parts(other)


def test_layers_of_several_sizes_do_not_drive_each_other_out(
    kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [make_known(name) for name in ("long", "heads of their own", "used in part") * 2]
    refuse_to_find(monkeypatch)
    for tensors, named in calls:
        check(attend(*tensors, **named), exact_of(tensors, named))
        check(attend_to_parts(parts_of(tensors, named)), exact_of(tensors, named))


WINDOWS: list[dict[str, Any]] = [
    {"window_size": (20, 5)},
    {"window_size": (20, 0), "causal": True},
    {"window_size": (-1, 3)},
    {"attention_chunk": 24},
    {"window_size": (9, 2), "attention_chunk": 24, "causal": True},
]


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"), [("different", 64, FP16), ("used in part", 256, torch.bfloat16)]
)
def test_parts_in_a_window(
    kernels: PartsKernels,
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    with_lse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was found for one serves no other, nor calls without a window."""
    tensors, named = draw(name, head_dim, dtype)
    named |= WITH_LSE if with_lse else {}
    parts = parts_of(tensors, named)
    for number, window in enumerate([*WINDOWS, {}]):
        of_call = named | window
        options = options_of(of_call)
        if number:
            with monkeypatch.context() as patch, pytest.raises(AssertionError, match="found anew"):
                refuse_to_find(patch)
                attend_to_parts(parts, **options)
        found = call_again(kernels, monkeypatch, partial(attend_to_parts, parts, **options))
        check(found, exact_of_parts(parts, of_call))
        first, *again = kernels.calls[-3:]
        assert first["config"].window == bool(window) and [x["sides"] for x in again] == [first["sides"]] * 2
        assert [(x["config"], x["scale"]) for x in again] == [(first["config"], first["scale"])] * 2
    refuse_to_find(monkeypatch)
    for window in [*WINDOWS, {"window_size": (3000, 3000)}]:
        of_call = named | window
        check(attend_to_parts(parts, **options_of(of_call)), exact_of_parts(parts, of_call))


def test_16_bit_tensors_in_a_window(kernels: PartsKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized and attended to in one script, each window by what was found for it."""
    tensors, named = draw("different", 64, FP16)
    for window in [*WINDOWS, {}]:
        of_call = named | window
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="found anew"):
            refuse_to_find(patch)
            attend(*tensors, **of_call)
        found = call_again(kernels, monkeypatch, partial(attend, *tensors, **of_call))
        check(found, exact_of(tensors, of_call))
        first, *again = kernels.calls[-3:]
        assert first["config"].window == bool(window) and [x["sides"] for x in again] == [first["sides"]] * 2
    refuse_to_find(monkeypatch)
    for window in [*WINDOWS, {"window_size": (3000, 3000)}]:
        of_call = named | window
        check(attend(*tensors, **of_call), exact_of(tensors, of_call))
