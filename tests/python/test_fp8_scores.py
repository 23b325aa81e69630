"""Softcap, slopes and sinks of e4m3 tensors where 16 bits compute: numbers, what kernels are given, who is told. What
FP8 kernels compute is in ``test_scored_fp8_launch``; here V has 24 columns, which none of them takes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from hopper.config import ForwardConfig
from hopper.wide.config import WideForwardConfig
from hopper_attention import (
    compile_cache,
    explain,
    explain_varlen,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    ops,
    varlen_ops,
)
from hopper_attention.backends import Target
from hopper_attention.launch import dequantized, forward, varlen
from hopper_attention.masks import FULL_SIDES
from hopper_attention.quantization import quantize_qkv
from hopper_attention.reference import attention_naive
from hopper_attention.scores import NO_SCORES
from tests.python import dense_cases
from tests.python.fake_gpu import H200, forget_launchers, pretend
from tests.python.score_formula import COMBINATIONS, draw_scores, formula
from tests.python.test_packed_quantization import lengths_of
from tests.python.varlen_cases import Case

OPS = torch.ops.hopper_attention
E4M3 = torch.float8_e4m3fn
A100 = Target("fake A100", (8, 0), assume_installed=True)
MASKS = ((False, (-1, -1)), (True, (-1, -1)), (False, (5, 2)))
SCORES = pytest.mark.parametrize("name", COMBINATIONS)
CASE = Case((8, 70, 3, 5, 0), (16, 40, 99, 0, 4), used_k=(11, 33, 64, 0, 2), behind=7, head_dims=(32, 16))
NOTICE = (
    "FP8 attention in 16 bits: {} and q has dtype float8_e4m3fn; no FP8 kernel has alibi_slopes, nor a softcap or "
    "sinks with an exact LSE, two levels or a head_dim that is no multiple of 16 up to 256: q, k and v are dequantized "
    "to bfloat16, and the call has the speed of 16 bits; 16-bit inputs do not need the detour"
)


def qkv(seqlen_q: int = 45, seqlen_k: int = 33, head_dim_v: int = 24) -> list[Tensor]:
    return dense_cases.qkv(seqlen_q, seqlen_k, head_dim_v, E4M3)


def descales(batch: int = 2, kv_heads: int = 2) -> dict[str, Tensor]:
    """Of three sizes, as quantizers give them; scores stay those of N(0, 1) and less."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"q_descale": 20.0, "k_descale": 0.05, "v_descale": 448.0}
    return {name: size * torch.rand(batch, kv_heads, generator=generator) for name, size in sizes.items()}


def exact(tensors: list[Tensor], factors: dict[str, Tensor]) -> list[Tensor]:
    """Data times descale in float64, (batch, seqlen, heads, head_dim)."""
    wide = [
        factor.double().repeat_interleave(x.shape[2] // factor.shape[1], 1)
        for x, factor in zip(tensors, factors.values(), strict=True)
    ]
    return [x.double() * factor[:, None, :, None] for x, factor in zip(tensors, wide, strict=True)]


def relative(x: Tensor, wanted: Tensor) -> float:
    return ((x.double() - wanted).norm() / wanted.norm()).item()


def assert_near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    (out, lse), (exact_out, exact_lse) = found, wanted
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert relative(out, exact_out) < 6e-3
    finite = exact_lse > -math.inf
    assert torch.equal(lse > -math.inf, finite) and not out[~finite.mT].any()
    assert (lse - exact_lse)[finite].abs().max() < 0.02


# Numbers


@SCORES
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_they_are_those_of_the_dequantized_tensors(name: str, causal: bool, window: tuple[int, int]) -> None:
    tensors, factors, scores = qkv(), descales(), draw_scores(name, 2, 4)
    options: dict[str, Any] = {"causal": causal, "window_size": window, "return_attn_probs": True} | scores
    found = flash_attn_func(*tensors, 0.2, **factors, **options)
    values = exact(tensors, factors)
    assert_near(found, formula(*values, scale=0.2, causal=causal, window=window, **scores))
    # Each is rounded once.
    same = flash_attn_func(*(x.bfloat16() for x in values), 0.2, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, same, strict=True))


@SCORES
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_packed_sequences(name: str, causal: bool, window: tuple[int, int]) -> None:
    q, k, v = (x.to(E4M3) for x in CASE.tensors(torch.float32))
    factors, scores = descales(5), draw_scores(name, 5, 4)
    options: dict[str, Any] = {"causal": causal, "window_size": window, "return_attn_probs": True} | scores
    out, lse = flash_attn_varlen_func(q, k, v, softmax_scale=0.2, **lengths_of(CASE), **factors, **options)
    slopes = scores["alibi_slopes"]
    for b, (rows, keys) in enumerate(CASE.spans()):
        if rows.start < rows.stop:
            own = {name: x[b : b + 1] for name, x in factors.items()}
            values = exact([x[None] for x in (q[rows], k[keys], v[keys])], own)
            of_sequence = scores | {
                "alibi_slopes": slopes[b] if slopes is not None and slopes.dim() > 1 else slopes
            }
            wanted = formula(*values, scale=0.2, causal=causal, window=window, **of_sequence)
            if keys.start == keys.stop:
                assert not out[rows].any()
                torch.testing.assert_close(lse[:, rows], wanted[1][0].float())
            else:
                assert_near((out[None, rows], lse[None, :, rows]), wanted)
    unused = CASE.unused()[0]
    assert not out[unused].any() and bool((lse[:, unused] == -math.inf).all())


@pytest.mark.parametrize("causal", [False, True])
def test_chunks(causal: bool) -> None:
    tensors, scores = qkv(20, 33), draw_scores("all", 2, 4)
    options: dict[str, Any] = {"causal": causal, "attention_chunk": 10} | scores
    out, lse = flash_attn_func(*tensors, return_attn_probs=True, **options)
    assert_near((out, lse), attention_naive(*(x.double() for x in tensors), **options))
    packed = [x.flatten(0, 1) for x in tensors]
    lengths = lengths_of(Case((20, 20), (33, 33)))
    again = flash_attn_varlen_func(*packed, **lengths, **options)
    assert torch.equal(again, out.flatten(0, 1))


def test_a_wide_v_and_packed_inputs() -> None:
    q, k, v = qkv(head_dim_v=296)
    wanted = formula(*(x.double() for x in (q, k, v)), scale=32**-0.5, softcap=2.0)[0]
    assert relative(flash_attn_func(q, k, v, softcap=2.0), wanted) < 6e-3
    q, k, v = qkv(33, 33, 32)
    together = torch.stack([x.view(torch.uint8) for x in (k, k, v)], 2).view(E4M3)
    found = flash_attn_qkvpacked_func(together, softcap=2.0)
    assert torch.equal(found, flash_attn_func(k, k, v, softcap=2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_of_either_dtype_and_no_keys(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 0.0, -math.inf], dtype=dtype)
    found = flash_attn_func(q, k, v, sinks=sinks, return_attn_probs=True)
    assert_near(found, formula(*(x.double() for x in (q, k, v)), scale=32**-0.5, sinks=sinks))
    out, lse = flash_attn_func(q, k[:, :0], v[:, :0], sinks=sinks, return_attn_probs=True)
    assert not out.any() and torch.equal(lse, sinks.float()[:, None].expand(2, 4, 45))


# What surrounds a call


@pytest.mark.parametrize("name", ["softcap", "all"])
def test_transforms_and_compilation(name: str) -> None:
    scores = draw_scores(name, 2, 4)
    samples = [torch.stack([x, x.flip(1)]) for x in (y.float() for y in qkv())]
    samples = [x.to(E4M3) for x in samples]
    found = vmap(lambda q, k, v: flash_attn_func(q, k, v, **scores))(*samples)
    for i, one in enumerate(found):
        assert torch.equal(one, flash_attn_func(*(x[i] for x in samples), **scores))
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(
            compiled(*qkv(), **scores, **descales()), flash_attn_func(*qkv(), **scores, **descales())
        )


def test_the_operators_say_the_shapes_that_they_give() -> None:
    scores = tuple(draw_scores("all", 5, 4).values())
    checked = {"test_utils": ("test_autograd_registration", "test_faketensor")}
    factors = descales().values()
    sides = -1, -1, 0
    of_two = tuple(draw_scores("all", 2, 4).values())
    for wants_lse in (True, False):
        options = 0.2, True, None, False, 0, wants_lse, False, *sides
        torch.library.opcheck(OPS.forward_fp8.default, (*qkv(), *factors, *options, *of_two), **checked)
    q, k, v = (x.to(E4M3) for x in CASE.tensors(torch.float32, poisoned=False))
    cu_q, cu_k, max_q, max_k, used_q, used_k = CASE.lengths
    lengths = cu_q, cu_k, used_q, used_k, max_q, max_k
    arguments = (q, k, v, *descales(5).values(), *lengths, 0.2, True, None, 0, False, *sides, *scores)
    torch.library.opcheck(OPS.forward_varlen_fp8.default, arguments, **checked)


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of packed sequences, of a batch of one length."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        case = Case((q.shape[1],) * q.shape[0], (k.shape[1],) * k.shape[0])
        return function(*(x.flatten(0, 1) for x in (q, k, v)), **lengths_of(case), **options)

    return call


EVERY = [flash_attn_func, explain, packed(flash_attn_varlen_func), packed(explain_varlen)]
EVERY_FUNCTION = pytest.mark.parametrize(
    "function", EVERY, ids=["call", "explain", "packed", "packed explain"]
)


@EVERY_FUNCTION
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"dropout_p": 0.5},
            NotImplementedError,
            "dropout_p is 0.5: dropout of P of torch.float8_e4m3fn tensors",
        ),
        (
            {"qv": torch.zeros(2, 45, 4, 24).to(E4M3)},
            NotImplementedError,
            "qv is given: a second query of torch.float8",
        ),
        ({"sinks": torch.ones(4).half()}, TypeError, "float32 or the dtype of the output, torch.bfloat16"),
        (
            {"sinks": torch.ones(4).to(E4M3)},
            TypeError,
            "sinks has dtype torch.float8_e4m3fn, allowed: torch.float32 or",
        ),
        ({"sinks": torch.ones(2)}, ValueError, "sinks has shape (2,), allowed: (heads,), (4,)"),
        (
            {"alibi_slopes": torch.ones(3, 4)},
            ValueError,
            "alibi_slopes has shape (3, 4), allowed: (heads,) or",
        ),
        ({"softcap": -2.0}, ValueError, "softcap is -2.0, allowed: 0, which is none"),
        (
            {"backend": "hopper"},
            ValueError,
            "backend is 'hopper', but cpu is not an NVIDIA GPU; allowed here: 'torch",
        ),
    ],
)
def test_what_is_refused(
    function: Callable[..., Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    if function in (EVERY[2], EVERY[3]) and "qv" in options:
        options = {"qv": options["qv"].flatten(0, 1)}
    with pytest.raises(error, match=re.escape(message)):
        function(*qkv(), **{"softcap": 3.0} | options)


@pytest.mark.parametrize("function", [EVERY[0], EVERY[2]], ids=["call", "packed"])
def test_functions_and_gradients_are_refused(function: Callable[..., Any]) -> None:
    functions = {"score_mod": lambda s, b, h, i, j: s * 2, "mask_mod": lambda b, h, i, j: i >= j}
    for name, value in functions.items():
        with pytest.raises(NotImplementedError, match=f"{name} is given: .* of torch.float8_e4m3fn tensors"):
            function(*qkv(), softcap=3.0, **{name: value})
        explains = EVERY[EVERY.index(function) + 1]
        with pytest.raises(NotImplementedError, match=f"{name} is given: .* of torch.float8_e4m3fn tensors"):
            explains(*qkv(), **{name: value})
    sinks = torch.zeros(4, requires_grad=True)
    out = function(*qkv(), sinks=sinks)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn tensors, which have no gradient"):
        out.float().sum().backward()
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
        function(*qkv(), alibi_slopes=sinks)


# Kernels


class FakeGpu:
    """The CPU under another name. Its kernels note their configs and arguments, and give ones."""

    def __init__(self) -> None:
        self.target = H200
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def get(self, config: Any) -> Any:
        def kernel(*arguments: Any) -> None:
            if hasattr(config, "softcap"):
                self.calls.append((config, arguments))
                arguments[3].fill_(1.0)
                arguments[4].zero_()

        return kernel


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    pretend(monkeypatch, dequantized, forward, varlen, ops, varlen_ops, target=lambda: fake.target)
    monkeypatch.setattr(compile_cache, "get_forward", fake.get)
    yield fake
    forget_launchers()


@pytest.mark.filterwarnings("ignore:FP8 attention in 16 bits")
@pytest.mark.parametrize("function", [EVERY[0], EVERY[2]], ids=["call", "packed"])
@pytest.mark.parametrize("target", [H200, A100], ids=["hopper", "ampere"])
def test_a_16_bit_kernel_is_given_data_times_descale(
    gpu: FakeGpu, target: Target, function: Callable[..., Any]
) -> None:
    gpu.target = target
    tensors, factors = qkv(), descales()
    out = function(*tensors, softcap=7.0, window_size=(3, 1), **factors)
    ((config, arguments),) = gpu.calls
    assert (config.dtype, config.softcap, config.alibi, config.window) == ("bfloat16", True, False, True)
    assert isinstance(config, ForwardConfig) == (target is H200)
    assert 7.0 in [x for x in arguments if isinstance(x, float)]
    for given, wanted in zip(arguments[:3], exact(tensors, factors), strict=True):
        assert torch.equal(given, wanted.bfloat16().view(given.shape))
    assert out.dtype == torch.bfloat16 and bool((out == 1).all())


def test_it_is_told_once(gpu: FakeGpu) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for function in (EVERY[0], EVERY[2]):
            for backend in ("ampere", "reference"):
                function(*qkv(), softcap=7.0, backend=backend)
        flash_attn_func(*qkv(0), softcap=7.0)
        assert caught == [] and len(gpu.calls) == 2
        for options in ({"softcap": 7.0}, {"sinks": torch.zeros(4)}, {"softcap": 8.0, "backend": "hopper"}):
            for function in (EVERY[0], EVERY[2]):
                function(*qkv(), **options)
    (message,) = [str(w.message) for w in caught]
    assert message == NOTICE.format("fake H200 has compute capability 9.0") and len(gpu.calls) == 8
    gpu.target = A100
    forget_launchers()
    with pytest.warns(UserWarning, match=re.escape(NOTICE.format("fake A100 has compute capability 8.0"))):
        flash_attn_func(*qkv(), softcap=7.0)


@pytest.mark.parametrize("function", [EVERY[1], EVERY[3]], ids=["explain", "packed explain"])
def test_explain(function: Callable[..., Any]) -> None:
    scores, tensors = draw_scores("all", 2, 4), qkv()
    tensors[1] = tensors[1].mT.contiguous().mT
    for capability, backend in (((9, 0), "hopper"), ((8, 0), "ampere"), ((8, 9), "ampere")):
        same = function(*(x.bfloat16() for x in qkv()), device_capability=capability, **scores)
        plan = function(*tensors, device_capability=capability, **scores)
        assert plan.backend == same.backend == backend and plan.config == same.config
        assert plan.copies == ("q, k and v are dequantized to bfloat16 by PyTorch",)
        major, minor = capability
        text = NOTICE.format(f"the given GPU has compute capability {major}.{minor}")
        assert text == f"FP8 attention in 16 bits: {plan.reason}; {plan.notes[0]}"
        assert plan.notes[1:] == same.notes and any(note.startswith("softcap:") for note in plan.notes)
    asked = function(*tensors, device_capability=(9, 0), backend="ampere", **scores)
    assert asked.reason.startswith("asked for with backend='ampere'; ") and asked.notes == same.notes
    here = function(*tensors, **scores)
    assert here.backend == "torch" and here.config.name == "torch_sdpa"
    assert here.reason.startswith("cpu is not an NVIDIA GPU; no FP8 kernel has alibi_slopes, nor")
    assert here.copies == plan.copies and here.notes == same.notes


def test_explain_of_wide_values() -> None:
    q = torch.empty(1, 128, 2, 64, dtype=E4M3, device="meta")
    v = torch.empty(1, 128, 2, 512, dtype=E4M3, device="meta")
    plan = explain(q, q, v, softcap=3.0, device_capability=(9, 0))
    same = explain(*(x.bfloat16() for x in (q, q, v)), softcap=3.0, device_capability=(9, 0))
    assert plan.config == same.config and isinstance(plan.config, WideForwardConfig)


def test_parts_that_lack_the_mean_of_v_are_refused() -> None:
    """They cannot come here from a public function; forgetting the mean would be a wrong answer without a word."""
    q, k, v = (torch.ones(1, 40, 2, 64) for _ in range(3))
    bounds = torch.tensor([0, 40], dtype=torch.int32)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 40, "max_seqlen_k": 40}
    packed = quantize_qkv(q[0], k[0], v[0], **lengths)
    options = 1.0, False, "reference", 0, FULL_SIDES, NO_SCORES
    for parts, attend in (
        (quantize_qkv(q, k, v), dequantized.attend_dequantized),
        (packed, dequantized.attend_packed_dequantized),
    ):
        with pytest.raises(NotImplementedError, match="V was quantized without its mean"):
            attend(parts, *options)
