"""A second query that multiplies V: the reference against its definition, the public functions, and their errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    compile_cache,
    explain,
    explain_varlen,
    flash_attn_func,
    flash_attn_varlen_func,
)
from hopper_attention.launch import forward
from hopper_attention.reference import attention_naive, attention_standard, attention_tiled
from tests.python.fake_gpu import SMS, forget_launchers, pretend

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(seqlens: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], batch: int = 2) -> Inputs:
    """q, k, v and qv in bfloat16."""
    generator = torch.Generator().manual_seed(hash((seqlens, heads, dims)) % 1000)
    (sq, sk), (h, hk), (d, dv) = seqlens, heads, dims
    shapes = (batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv), (batch, sq, h, dv)
    q, k, v, qv = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return q, k, v, qv


def visible(seqlens: tuple[int, int], causal: bool, window: tuple[int, int]) -> Tensor:
    """Boolean (queries, keys), from the definition."""
    sq, sk = seqlens
    left, right = (math.inf if side < 0 else side for side in window)
    right = 0 if causal else right
    own = torch.arange(sq)[:, None] + sk - sq
    keys = torch.arange(sk)
    return (keys >= own - left) & (keys <= own + right)


def define(
    inputs: Inputs, causal: bool = False, window: tuple[int, int] = (-1, -1), scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse in float64, a product each for q and qv."""
    q, k, v, qv = (x.double().transpose(1, 2) for x in inputs)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = (q.shape[3] + v.shape[3]) ** -0.5 if scale is None else scale
    scores = scale * (q @ k.mT) + scale * (qv @ v.mT)
    seen = visible((q.shape[2], k.shape[2]), causal, window)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(~seen.any(-1)[:, None], 0.0)
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


CASES = [
    ((5, 7), (4, 2), (8, 24), False, (-1, -1), None),
    ((130, 150), (4, 1), (64, 40), True, (-1, -1), None),
    ((33, 20), (2, 2), (16, 512), True, (-1, -1), 0.05),
    ((70, 201), (2, 1), (32, 264), False, (30, 9), None),
    # A single query, whose heads become queries unless the window hides something.
    ((1, 50), (6, 2), (16, 24), True, (-1, -1), None),
    ((1, 50), (6, 2), (16, 24), False, (20, 0), None),
]


@pytest.mark.parametrize(("seqlens", "heads", "dims", "causal", "window", "scale"), CASES)
def test_reference(seqlens, heads, dims, causal, window, scale) -> None:
    inputs = draw(seqlens, heads, dims)
    q, k, v, qv = inputs
    out, lse = define(inputs, causal, window, scale)
    sides = {"window_left": window[0], "window_right": window[1]}
    options = {"causal": causal, "softmax_scale": scale, "qv": qv} | sides
    exact, exact_lse = attention_naive(q, k, v, **options)
    assert torch.allclose(exact, out, rtol=1e-12, atol=1e-12)
    assert torch.allclose(exact_lse, lse, rtol=1e-12, atol=1e-12)
    tiled, tiled_lse = attention_tiled(q, k, v, tile_m=32, tile_n=48, **options)
    assert distance(tiled, out) < 6e-3 and torch.allclose(tiled_lse.double(), lse, atol=2e-5)
    assert distance(attention_standard(q, k, v, **options), out) < 3e-2
    ours, our_lse = flash_attn_func(
        *(q, k, v, scale, causal, qv), window_size=window, return_attn_probs=True, backend="reference"
    )
    assert distance(ours, out) < 6e-3 and torch.allclose(our_lse.double(), lse, atol=2e-5)
    assert ours.is_contiguous() and ours.dtype == torch.bfloat16


def test_second_query_matters_and_zeros_are_none() -> None:
    q, k, v, qv = draw((9, 12), (2, 1), (16, 32))
    plain = flash_attn_func(q, k, v, 0.2, backend="reference")
    assert torch.equal(flash_attn_func(q, k, v, 0.2, qv=torch.zeros_like(qv)), plain)
    assert distance(flash_attn_func(q, k, v, 0.2, qv=qv), plain) > 0.1


def test_gradients_of_the_tiled_reference() -> None:
    inputs = [x.double().requires_grad_() for x in draw((12, 17), (4, 2), (8, 16), batch=1)]
    q, k, v, qv = inputs
    dout = torch.randn(1, 12, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    exact = torch.autograd.grad(define((q, k, v, qv), True)[0], inputs, dout)
    ours = torch.autograd.grad(attention_tiled(q, k, v, causal=True, qv=qv)[0], inputs, dout)
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


LENGTHS = [(7, 9), (0, 4), (30, 41), (5, 0), (1, 1)]


def packed(causal: bool) -> tuple[Inputs, Tensor, Tensor]:
    """Packed inputs with NaN behind the last sequence, and the exact out and lse of each row."""
    parts, outs, lses = [], [], []
    for lengths in LENGTHS:
        inputs = draw(lengths, (4, 2), (16, 40), batch=1)
        out, lse = define(inputs, causal)
        parts.append([x[0] for x in inputs])
        outs.append(out[0])
        lses.append(lse[0])
    tensors = [torch.cat(column) for column in zip(*parts, strict=True)]
    q, k, v, qv = (torch.cat([x, torch.full_like(x[:3], math.nan)]) for x in tensors)
    return (q, k, v, qv), torch.cat(outs), torch.cat(lses, 1)


def cumulated(side: int) -> Tensor:
    sizes = torch.tensor([0] + [lengths[side] for lengths in LENGTHS])
    return sizes.cumsum(0).int()


@pytest.mark.parametrize("causal", [False, True])
def test_variable_lengths(causal: bool) -> None:
    (q, k, v, qv), exact, exact_lse = packed(causal)
    lengths = cumulated(0), cumulated(1), 30, 41
    out, lse = flash_attn_varlen_func(q, k, v, *lengths, causal=causal, qv=qv, return_attn_probs=True)
    rows = exact.shape[0]
    assert distance(out[:rows], exact) < 6e-3 and not out[rows:].any()
    assert torch.allclose(lse[:, :rows].double(), exact_lse, atol=2e-5)
    assert bool((lse[:, rows:] == -math.inf).all())


def test_without_keys() -> None:
    q, k, v, qv = draw((3, 0), (2, 1), (16, 32))
    out, lse = flash_attn_func(q, k, v, qv=qv, return_attn_probs=True)
    assert out.shape == qv.shape and not out.any() and bool((lse == -math.inf).all())


def test_one_query_of_no_sequence() -> None:
    q, k, v, qv = (torch.zeros(0, n, 2, 16, dtype=torch.float16) for n in (1, 5, 5, 1))
    out, lse = flash_attn_func(q, k, v, qv=qv, return_attn_probs=True)
    assert out.shape == (0, 1, 2, 16) and lse.shape == (0, 2, 1)


def test_scores_change_as_without_it() -> None:
    q, k, v, qv = draw((20, 33), (4, 2), (16, 32))
    sinks = torch.tensor([0.5, -1.0, 2.0, -math.inf])
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    scores = {"softcap": 3.0, "alibi_slopes": slopes, "sinks": sinks}
    exact, exact_lse = attention_naive(q, k, v, causal=True, qv=qv, **scores)
    out, lse = flash_attn_func(q, k, v, causal=True, qv=qv, return_attn_probs=True, **scores)
    assert distance(out, exact) < 6e-3 and torch.allclose(lse.double(), exact_lse, atol=2e-5)


def test_compiled_and_mapped() -> None:
    q, k, v, qv = draw((20, 33), (4, 2), (16, 32))

    def attend(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, qv=qv) * 2

    expected = attend(q, k, v, qv)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, qv), expected)
    mapped = torch.func.vmap(attend)(*(x[:, None] for x in (q, k, v, qv)))
    assert torch.equal(mapped[:, 0], expected)

    (q, k, v, qv), _, _ = packed(True)

    def attend_packed(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cumulated(0), cumulated(1), 30, 41, causal=True, qv=qv)

    compiled = torch.compile(attend_packed, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, qv), attend_packed(q, k, v, qv))


def test_autocast_casts_it_with_the_others() -> None:
    inputs = [x.float() for x in draw((9, 12), (2, 1), (16, 32))]
    q, k, v, qv = inputs
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k, v, qv=qv)
    assert torch.equal(out, flash_attn_func(*(x.bfloat16() for x in (q, k, v)), qv=qv.bfloat16()))


@pytest.mark.parametrize("learned", range(4))
def test_only_a_backward_pass_is_refused(learned: int) -> None:
    inputs = draw((9, 12), (2, 1), (16, 32))
    inputs[learned].requires_grad_()
    q, k, v, qv = inputs
    out = flash_attn_func(q, k, v, qv=qv)
    with pytest.raises(NotImplementedError, match=re.escape("attention_tiled(..., qv=qv)")):
        out.sum().backward()
    plan = explain(q, k, v, qv=qv, device_capability=(9, 0), backend="reference")
    assert (
        plan.notes[-1] == "a backward pass through the result raises NotImplementedError: qv has no gradient"
    )


Q, K, V, QV = draw((9, 12), (2, 1), (16, 32))
BAD = [
    ({"qv": [1]}, TypeError, "qv is a list, allowed: a torch.Tensor"),
    (
        {"qv": QV[:, :-1]},
        ValueError,
        "qv has shape (2, 8, 2, 32), allowed with these q and v: (batch, seqlen_q",
    ),
    (
        {"qv": QV[..., :16]},
        ValueError,
        "qv has shape (2, 9, 2, 16), allowed with these q and v: (batch, seqlen_q",
    ),
    ({"qv": QV.half()}, TypeError, "qv has dtype torch.float16, allowed: the dtype of q, torch.bfloat16"),
    ({"qv": QV.to("meta")}, ValueError, "qv is on meta, allowed: the device of q, cpu"),
    ({"qv": QV, "softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0, allowed: a finite number"),
    ({"qv": QV, "sinks": torch.zeros(3)}, ValueError, "sinks has shape (3,), allowed: (heads,), (2,)"),
    ({"qv": QV, "q_descale": torch.ones(2, 1)}, ValueError, "q_descale is given but q has dtype"),
    ({"qv": QV, "attention_chunk": -3}, ValueError, "attention_chunk is -3"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
@pytest.mark.parametrize("function", [flash_attn_func, explain])
def test_bad_arguments(function: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(Q, K, V, **options)


def test_bad_packed_arguments() -> None:
    lengths = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32), 9, 12
    for function in (flash_attn_varlen_func, explain_varlen):
        with pytest.raises(
            ValueError, match=re.escape("allowed with these q and v: (total_q, heads, head_dim_v)")
        ):
            function(Q[0], K[0], V[0], *lengths, qv=QV[0, 1:])


TOGETHER = [
    ({"dropout_p": 0.1}, "dropout_p"),
    ({"score_mod": lambda score, b, h, i, j: score * 0.5}, "score_mod"),
    ({"mask_mod": lambda b, h, i, j: i >= j}, "mask_mod"),
]


@pytest.mark.parametrize(("options", "name"), TOGETHER)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], name: str) -> None:
    """Also by the reference, to which the operators do not hand it."""
    lengths = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32), 9, 12
    explained = name == "dropout_p"
    message = (
        "dropout_p is given with qv" if explained else "qv is given: a second query with score_mod, mask_mod"
    )
    for function in (flash_attn_func, explain)[: 1 + explained]:
        with pytest.raises(NotImplementedError, match=message):
            function(Q, K, V, qv=QV, **options)
    for function in (flash_attn_varlen_func, explain_varlen)[: 1 + explained]:
        with pytest.raises(NotImplementedError, match=message):
            function(Q[0], K[0], V[0], *lengths, qv=QV[0], **options)


def test_eight_bits_are_refused() -> None:
    q, k, v, qv = (x.to(torch.float8_e4m3fn) for x in (Q, K, V, QV))
    for function in (flash_attn_func, explain):
        with pytest.raises(
            NotImplementedError, match=re.escape("qv is given: a second query of torch.float8_e4m3fn")
        ):
            function(q, k, v, qv=qv)


NO_KERNEL = [
    ((8, 0), 16, "the kernels without WGMMA have no second query"),
    ((9, 0), 128, "head_dim is 128, and the Hopper kernel with qv takes at most 64"),
]


@pytest.mark.parametrize(("capability", "head_dim", "reason"), NO_KERNEL)
def test_what_no_kernel_does(capability: tuple[int, int], head_dim: int, reason: str) -> None:
    q, k = Q.new_zeros(2, 9, 2, head_dim), K.new_zeros(2, 12, 1, head_dim)
    with pytest.raises(
        NotImplementedError, match=re.escape(f"qv is given: {reason}; use backend='reference'")
    ):
        explain(q, k, V, qv=QV, device_capability=capability)
    plan = explain(q, k, V, qv=QV, device_capability=capability, backend="reference")
    assert plan.backend == "reference" and any(note.startswith("qv: ") for note in plan.notes)


def test_explain_names_the_kernel() -> None:
    plan = explain(Q, K, V, qv=QV, causal=True, window_size=(3, 0), device_capability=(9, 0))
    assert plan.config.name == "hopper_wide_bf16_d64v256_qv_causal_m128n64s4_r232_40_c2_window"
    assert "2 consumers, each with half of the columns of O" in str(plan)
    lengths = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32), 9, 12
    options = {"qv": QV[0].requires_grad_(), "device_capability": (9, 0)}
    packed_plan = explain_varlen(Q[0], K[0], V[0], *lengths, **options)
    assert packed_plan.config.name == "hopper_wide_bf16_d64v256_qv_full_m128n64s4_r232_40_c2_varlen"
    assert (
        "a backward pass through the result raises NotImplementedError: qv has no gradient"
        in packed_plan.notes
    )


class Call(NamedTuple):
    """What a kernel is called with."""

    config: str
    arguments: tuple[Any, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Of kernels on a Hopper GPU by name, which fill out and lse with 1."""
    found: list[Call] = []

    def get(config: Any) -> Any:
        def kernel(*arguments: Any) -> None:
            found.append(Call(getattr(config, "name", ""), arguments))
            for result in arguments[4:6] if "wide" in config.name else ():
                result.fill_(1)

        return kernel

    pretend(monkeypatch, forward)
    monkeypatch.setattr(compile_cache, "get_forward", get)
    yield found
    forget_launchers()


def test_launch(calls: list[Call]) -> None:
    sinks = torch.tensor([0.5, 1.0]).bfloat16()
    strided = QV.transpose(1, 2).contiguous().transpose(1, 2)
    options = {"qv": strided, "window_size": (4, 2), "sinks": sinks, "sm_margin": 2}
    out, lse = flash_attn_func(Q, K, V, return_attn_probs=True, **options)
    assert bool((out == 1).all()) and bool((lse == 1).all()) and out.shape == QV.shape
    (name, (q, k, v, qv, _, _, _, scale, *rest)) = calls[-1]
    assert name == "hopper_wide_bf16_d64v256_qv_full_m128n64s4_r232_40_c2_window_sinks"
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, qv), (Q, K, V, QV), strict=True))
    assert scale == 48**-0.5
    *sides, plan, sequences, softcap, slopes, given, ctas = rest
    assert sides == [4, 2, None]
    assert (plan, sequences, softcap, slopes, ctas) == (None, None, None, None, SMS - 2)
    assert given.dtype == torch.float32 and torch.equal(given, sinks.float())
    # An expanded tensor, which TMA cannot address, is copied.
    flash_attn_func(Q, K, V, qv=QV[:1].expand(2, -1, -1, -1))
    assert calls[-1].arguments[3].stride(0) > 0


def test_heads_of_a_single_query_are_queries_of_a_launch(calls: list[Call]) -> None:
    q, k, v, qv = draw((1, 30), (6, 2), (16, 32))
    wide = torch.zeros(2, 1, 6, 64, dtype=torch.bfloat16)
    wide[..., 8:24] = q
    out, lse = flash_attn_func(wide[..., 8:24], k, v, causal=True, qv=qv, return_attn_probs=True)
    assert out.shape == (2, 1, 6, 32) and lse.shape == (2, 6, 1) and out.is_contiguous()
    name, arguments = calls[-1]
    assert name == "hopper_wide_bf16_d64v256_qv_full_m128n64s4_r232_40_c2"
    for folded, x in ((arguments[0], q), (arguments[3], qv)):
        assert torch.equal(folded, x.unflatten(2, (2, 3))[:, 0].transpose(1, 2))
    assert arguments[0].data_ptr() == wide[..., 8:24].data_ptr()
    plan = explain(q, k, v, causal=True, qv=qv, device_capability=(9, 0))
    assert plan.config.name == name
    assert plan.notes[-1].startswith("the query heads of a key/value head become queries of one")
    # Slopes tell heads apart.
    flash_attn_func(q, k, v, causal=True, qv=qv, alibi_slopes=torch.ones(6))
    assert calls[-1].arguments[0].shape == q.shape and "causal_" in calls[-1].config


def test_packed_launch(calls: list[Call]) -> None:
    (q, k, v, qv), _, _ = packed(True)
    lengths, used = (cumulated(0), cumulated(1)), torch.tensor([1, 0, 2, 3, 1]).int()
    flash_attn_varlen_func(q, k, v, *lengths, 30, 41, used, causal=True, qv=qv, sinks=torch.ones(4))
    (plan_call, (name, arguments)) = calls[-2:]
    assert name == "hopper_wide_bf16_d64v256_qv_causal_m128n64s4_r232_40_c2_varlen_sinks"
    assert plan_call.arguments[5:] == (q.shape[0], k.shape[0], 128, 0)
    left, right, chunk, plan, sequences, *_, ctas = arguments[8:]
    assert (left, right, chunk, sequences, ctas) == (
        None,
        None,
        None,
        6,
        SMS,
    ) and plan is plan_call.arguments[4]
    assert arguments[4].shape == qv.shape and arguments[5].shape == (4, q.shape[0])


def test_packed_launch_of_wide_values_without_it(calls: list[Call]) -> None:
    (q, k, _, _), _, _ = packed(True)
    v = torch.zeros(k.shape[0], 2, 264, dtype=torch.bfloat16)
    flash_attn_varlen_func(q, k, v, cumulated(0), cumulated(1), 30, 41, window_size=(-1, 3))
    name, arguments = calls[-1]
    assert name == "hopper_wide_bf16_d64v512_full_m128n64s2_r232_40_c2_window_varlen"
    assert arguments[3] is None and arguments[2] is v and arguments[7:11] == (0.25, 1 << 29, 3, None)
