"""Sequences of different lengths: results and gradients against float64, and against calls once a sequence."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hopper_attention
from hopper_attention import (
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from tests.python.varlen_cases import CASES, Case, offsets

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (6, -1)},
    {"window_size": (-1, 4)},
    {"window_size": (5, 9), "causal": True},
    {"window_size": (1000, 0)},
]

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EVERY_MASK = pytest.mark.parametrize("mask", MASKS, ids=str)


def of_oracle(mask: dict[str, Any]) -> dict[str, Any]:
    left, right = mask.get("window_size", (-1, -1))
    return {"causal": mask.get("causal", False), "window_left": left, "window_right": right}


def attend(case: Case, tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return flash_attn_varlen_func(*tensors, *case.lengths, return_attn_probs=True, **options)


@EVERY_MASK
@EVERY_CASE
def test_results_and_gradients(case: Case, mask: dict[str, Any]) -> None:
    leaves = [x.requires_grad_() for x in case.tensors(torch.float16)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = attend(case, leaves, **mask)
    wanted, wanted_lse = case.oracle(*exact, **of_oracle(mask))
    assert out.shape == wanted.shape and out.dtype == torch.float16 and out.is_contiguous()
    assert lse.shape == wanted_lse.shape and lse.dtype == torch.float32 and lse.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    unused_rows, unused_keys = case.unused()
    assert (out[unused_rows] == 0).all() and (lse[:, unused_rows] == -math.inf).all()

    # What is of no sequence, or sees no key, may have any gradient.
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).half()
    dlse = torch.randn(lse.shape, generator=generator)
    blind = wanted_lse == -math.inf
    poisoned_dout = dout.masked_fill(unused_rows[:, None, None], math.nan)
    got = torch.autograd.grad((out, lse), leaves, (poisoned_dout, dlse.masked_fill(blind, math.nan)))
    for x, unused in zip(got, (unused_rows, unused_keys, unused_keys), strict=True):
        assert x.dtype == torch.float16 and x.is_contiguous() and (x[unused] == 0).all()
    if wanted.requires_grad:
        live = (dout.double(), dlse.double().masked_fill(blind, 0.0))
        gradients = torch.autograd.grad((wanted, wanted_lse), exact, live)
        for mine, theirs in zip(got, gradients, strict=True):
            assert (mine.double() - theirs).abs().max() <= 4e-3 * max(theirs.abs().max(), 1.0)
    else:
        assert all((x == 0).all() for x in got)


@EVERY_MASK
@EVERY_CASE
def test_the_same_bits_as_a_call_once_a_sequence(case: Case, mask: dict[str, Any]) -> None:
    leaves = [x.requires_grad_() for x in case.tensors(torch.bfloat16)]
    if "window_size" in mask:
        # A window that hides nothing of a short sequence is none to a call of its own, and torch serves that.
        mask = mask | {"backend": "reference"}
    out, lse = attend(case, leaves, **mask)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(3))
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for rows, keys in case.spans():
        q, k, v = (
            x.detach()[None, span].requires_grad_()
            for x, span in zip(leaves, (rows, keys, keys), strict=True)
        )
        alone, alone_lse = flash_attn_func(q, k, v, return_attn_probs=True, **mask)
        assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])
        wanted = torch.autograd.grad((alone, alone_lse), (q, k, v), (dout[None, rows], dlse[None, :, rows]))
        for mine, span, theirs in zip(got, (rows, keys, keys), wanted, strict=True):
            assert torch.equal(mine[span], theirs[0])


def test_one_length_is_a_batch() -> None:
    case = Case((12, 12, 12), (20, 20, 20))
    q, k, v = case.tensors(torch.float16)
    batched = (x.unflatten(0, (3, -1)) for x in (q, k, v))
    out, lse = attend(case, [q, k, v], causal=True, softmax_scale=0.4)
    wanted, wanted_lse = flash_attn_func(*batched, 0.4, True, return_attn_probs=True)
    assert torch.equal(out, wanted.flatten(0, 1))
    assert torch.equal(lse, wanted_lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("learned", [0, 1, 2])
def test_a_gradient_of_the_lse_alone_and_of_one_input(learned: int) -> None:
    case = CASES["used"]
    tensors = case.tensors(torch.float16)
    tensors[learned].requires_grad_()
    _, lse = attend(case, tensors, causal=True)
    seen = lse != -math.inf
    lse[seen].square().sum().backward()
    exact = tensors[learned].detach().double().requires_grad_()
    others = [x.detach().double() for x in tensors]
    others[learned] = exact
    _, wanted = case.oracle(*others, causal=True)
    if learned < 2:
        wanted[seen].square().sum().backward()
    expected = torch.zeros_like(exact) if exact.grad is None else exact.grad
    assert learned == 2 or expected.any()
    torch.testing.assert_close(tensors[learned].grad.double(), expected, rtol=1e-2, atol=1e-2)


def test_bounds_may_be_larger_than_every_length() -> None:
    case = CASES["plain"]
    tensors = case.tensors(torch.float16)
    cu_q, cu_k, longest_q, longest_k, *_ = case.lengths
    for mask in MASKS:
        options = mask | ({"backend": "reference"} if "window_size" in mask else {})
        wanted = flash_attn_varlen_func(*tensors, cu_q, cu_k, longest_q, longest_k, **options)
        assert torch.equal(flash_attn_varlen_func(*tensors, cu_q, cu_k, 10**6, 10**7, **options), wanted)


def test_strides_do_not_matter() -> None:
    case = CASES["rows behind"]
    tensors = case.tensors(torch.bfloat16)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    wanted, got = (attend(case, x, causal=True)[0] for x in (tensors, strided))
    assert torch.equal(got, wanted) and got.is_contiguous()


def test_autocast() -> None:
    case = CASES["plain"]
    leaves = [x.requires_grad_() for x in case.tensors(torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attend(case, leaves)
    halves = [x.detach().bfloat16() for x in leaves]
    assert out.dtype == torch.bfloat16 and torch.equal(out, attend(case, halves)[0])
    out.float().square().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.any() for x in leaves)


# Packed forms


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_forms(mask: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = (7, 0, 20)
    options = {"return_attn_probs": True, **mask}
    qkv = torch.randn(30, 3, 2, 32, generator=generator).half().requires_grad_()
    cu = offsets(lengths)
    wanted = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 20, 20, **options)
    got = flash_attn_varlen_qkvpacked_func(qkv, cu, 20, **options)
    assert all(map(torch.equal, got, wanted))
    gradients = [torch.autograd.grad(x[0].float().square().sum(), qkv)[0] for x in (got, wanted)]
    assert torch.equal(*gradients) and gradients[0].shape == qkv.shape and gradients[0][:27].any()

    grouped = torch.randn(30, 8, 32, generator=generator).half()
    got = flash_attn_varlen_qkvpacked_func(grouped, cu, 20, num_heads_q=4, **options)
    parts = grouped[:, :4], grouped[:, 4:6], grouped[:, 6:]
    assert all(map(torch.equal, got, flash_attn_varlen_func(*parts, cu, cu, 20, 20, **options)))

    cu_q, q = offsets((3, 3, 5)), torch.randn(11, 4, 32, generator=generator).half()
    kv = torch.randn(27, 2, 2, 32, generator=generator).half()
    got = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu, 5, 20, **options)
    assert all(map(torch.equal, got, flash_attn_varlen_func(q, *kv.unbind(1), cu_q, cu, 5, 20, **options)))


# Names


def test_names_and_order_are_those_of_flash_attention_3() -> None:
    names = (
        *(
            "q",
            "k",
            "v",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "seqused_q",
            "seqused_k",
        ),
        *("softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size"),
        *("attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin"),
        "return_attn_probs",
    )
    defaults = (None, None, None, False, None, None, None, None, (-1, -1), 0, 0.0, 1, None, False, 0, False)
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    own = ("alibi_slopes", "sinks", "score_mod", "mask_mod", "dropout_p", "exact_lse", "backend")
    assert tuple(parameters) == (*names, *own) and len(names) == 23
    assert parameters["backend"].kind is inspect.Parameter.KEYWORD_ONLY
    assert tuple(parameters[name].default for name in names[7:]) == defaults


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (flash_attn_varlen_qkvpacked_func, ("qkv", "cu_seqlens", "max_seqlen")),
        (
            flash_attn_varlen_kvpacked_func,
            ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        ),
    ],
)
def test_packed_forms_go_on_as_those_of_one_length(function: Any, first: tuple[str, ...]) -> None:
    dense = getattr(hopper_attention, function.__name__.replace("varlen_", ""))
    theirs = [name for name in inspect.signature(dense).parameters if name not in ("q", "kv", "qkv")]
    theirs.remove("two_level_accumulation")
    assert list(inspect.signature(function).parameters) == [*first, *theirs]


@pytest.mark.parametrize("name", ["", "_qkvpacked", "_kvpacked"])
def test_both_modules_have_them(name: str) -> None:
    function = f"flash_attn_varlen{name}_func"
    assert getattr(flash_attn_interface, function) is getattr(hopper_attention, function)
    assert function in flash_attn_interface.__all__ and function in hopper_attention.__all__
