"""Softcap, ALiBi and sinks from the public functions to the reference and to the place where a kernel takes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from hopper_attention import (
    compile_cache,
    explain,
    explain_varlen,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from hopper_attention.launch import backward, forward, varlen
from hopper_attention.launch.forward import run_forward
from hopper_attention.lengths import Lengths, rows_of_sequences
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores, ScoreSpec
from tests.python.dense_cases import qkv
from tests.python.fake_gpu import SMS
from tests.python.score_formula import COMBINATIONS, draw_scores, formula
from tests.python.varlen_cases import CASES, Case

OPS = torch.ops.hopper_attention
MASKS = ((False, (-1, -1)), (True, (-1, -1)), (False, (5, 2)))


def learned(scores: dict[str, Any]) -> dict[str, Any]:
    """The same with sinks that require a gradient."""
    sinks = scores["sinks"]
    return scores | {"sinks": None if sinks is None else sinks.clone().requires_grad_()}


def leaves_of(inputs: list[Tensor], scores: dict[str, Any]) -> list[Tensor]:
    return inputs if scores["sinks"] is None else [*inputs, scores["sinks"]]


def exact_gradients(
    wanted: tuple[Tensor, Tensor], leaves: list[Tensor], dout: Tensor, dlse: Tensor
) -> tuple[Tensor, ...]:
    """Of the formula, zeros for what has nothing to do with the results."""
    out, lse = wanted
    loss = (out * dout).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()
    return torch.autograd.grad(loss + sum(0.0 * x.sum() for x in leaves), leaves)


def assert_right(
    results: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    leaves: list[Tensor],
    exact_leaves: list[Tensor],
    unused: Any = (),
) -> None:
    """out, LSE and their gradients against the formula; what comes back to ``unused`` rows counts for nothing."""
    torch.testing.assert_close(results[0].double(), wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[1].double(), wanted[1], rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(wanted[0].shape, generator=generator).bfloat16()
    dlse = torch.randn(wanted[1].shape, generator=generator).masked_fill(wanted[1] == -math.inf, 0.0)
    right = exact_gradients(wanted, exact_leaves, dout, dlse)
    if len(unused):
        dout[unused] = math.nan
    for mine, theirs in zip(torch.autograd.grad(results, leaves, (dout, dlse)), right, strict=True):
        most = theirs.abs().max() if theirs.numel() else torch.zeros(())
        assert mine.dtype in (torch.bfloat16, torch.float32)
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=0.0, atol=0.02 * max(float(most), 1.0)
        )


# Numbers


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("lengths", [(21, 33), (33, 21), (9, 1), (7, 0)], ids=str)
@pytest.mark.parametrize("head_dim_v", [24, 264])
def test_results_and_gradients(
    lengths: tuple[int, int], name: str, mask: tuple[bool, tuple[int, int]], head_dim_v: int
) -> None:
    causal, window = mask
    inputs = [x.requires_grad_() for x in qkv(*lengths, head_dim_v)]
    scores, exact_scores = learned(draw_scores(name, 2, 4)), learned(draw_scores(name, 2, 4))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = flash_attn_func(*inputs, causal=causal, window_size=window, return_attn_probs=True, **scores)
    wanted = formula(*exact, scale=32**-0.5, causal=causal, window=window, **exact_scores)
    assert_right(results, wanted, leaves_of(inputs, scores), leaves_of(exact, exact_scores))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("case", ["plain", "empty ones", "used", "mqa", "wide v", "no keys", "no sequence"])
def test_sequences_of_different_lengths(case: str, name: str, mask: tuple[bool, tuple[int, int]]) -> None:
    c, (causal, window) = CASES[case], mask
    inputs = [x.requires_grad_() for x in c.tensors(torch.bfloat16)]
    drawn = draw_scores(name, len(c.rooms_q), c.heads[0])
    scores, exact_scores = learned(drawn), learned(drawn)
    exact = [x.detach().nan_to_num().double().requires_grad_() for x in inputs]
    options = {"causal": causal, "window_size": window, "return_attn_probs": True}
    results = flash_attn_varlen_func(*inputs, *c.lengths, **options, **scores)
    wanted = formula_of_sequences(c, exact, causal, window, exact_scores)
    unused, _ = c.unused()
    assert_right(results, wanted, leaves_of(inputs, scores), leaves_of(exact, exact_scores), unused)


def formula_of_sequences(
    c: Case, tensors: list[Tensor], causal: bool, window: tuple[int, int], scores: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """``formula`` of each sequence; rows of none have 0 and -inf."""
    q, k, v = tensors
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    slopes = scores["alibi_slopes"]
    for b, (rows, keys) in enumerate(c.spans()):
        own = scores | {"alibi_slopes": slopes[b] if slopes is not None and slopes.dim() > 1 else slopes}
        parts = q[None, rows], k[None, keys], v[None, keys]
        options = {"scale": q.shape[2] ** -0.5, "causal": causal, "window": window}
        found, found_lse = formula(*parts, **options, **own)
        out[rows], lse[:, rows] = found[0], found_lse[0]
    return out, lse


def test_every_packed_form_hands_them_on() -> None:
    q, k, v = qkv(21, 21, 32)
    scores = draw_scores("all", 2, 4)
    expected = flash_attn_func(q, k, v, **scores)
    for name in scores:
        assert not torch.equal(
            expected, flash_attn_func(q, k, v, **scores | {name: 0.0 if name == "softcap" else None})
        )
    heads = torch.cat([q, k, v], 2)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **scores), expected)
    assert torch.equal(flash_attn_qkvpacked_func(heads, num_heads_q=4, **scores), expected)
    flat, cu = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 21, 42], dtype=torch.int32)
    wanted = flash_attn_varlen_func(*flat, cu, cu, 21, 21, **scores)
    assert torch.equal(wanted, expected.flatten(0, 1))
    packed = torch.stack(flat[1:], 1)
    assert torch.equal(flash_attn_varlen_kvpacked_func(flat[0], packed, cu, cu, 21, 21, **scores), wanted)
    found = flash_attn_varlen_qkvpacked_func(heads.flatten(0, 1), cu, 21, num_heads_q=4, **scores)
    assert torch.equal(found, wanted)


def test_sinks_of_the_dtype_of_q_and_under_autocast() -> None:
    q, k, v = qkv()
    sinks = draw_scores("sinks", 2, 4)["sinks"].bfloat16().requires_grad_()
    out = flash_attn_func(q, k, v, sinks=sinks)
    assert torch.equal(out, flash_attn_func(q, k, v, sinks=sinks.detach().float()))
    assert torch.autograd.grad(out.float().square().sum(), sinks)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = flash_attn_func(q.float(), k.float(), v.float(), sinks=sinks.detach().float(), softcap=3)
    assert torch.equal(cast, flash_attn_func(q, k, v, sinks=sinks.detach(), softcap=3.0))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_sink_that_has_all_weight(backend: str) -> None:
    q = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    sinks = torch.tensor([math.inf, -math.inf])
    out, lse = flash_attn_func(q, q, q, sinks=sinks, backend=backend, return_attn_probs=True)
    plain, plain_lse = flash_attn_func(q, q, q, backend=backend, return_attn_probs=True)
    assert not out[:, :, 0].any() and torch.equal(lse[:, 0], torch.full((1, 3), math.inf))
    assert torch.equal(out[:, :, 1], plain[:, :, 1]) and torch.equal(lse[:, 1], plain_lse[:, 1])


def test_the_gradient_of_the_sinks_can_be_differentiated_again() -> None:
    inputs, sinks = [x.requires_grad_() for x in qkv()], torch.linspace(-1, 1, 4).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    found = flash_attn_func(*inputs, sinks=sinks).float().square().sum()
    wanted = formula(*exact[:3], scale=32**-0.5, sinks=exact[3])[0].square().sum()
    (first,), (right,) = (
        torch.autograd.grad(x, leaf, create_graph=True) for x, leaf in ((found, sinks), (wanted, exact[3]))
    )
    again = torch.autograd.grad(first.sum(), (sinks, inputs[0]))
    for mine, theirs in zip(again, torch.autograd.grad(right.sum(), (exact[3], exact[0])), strict=True):
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


# Torch


@pytest.mark.parametrize("name", COMBINATIONS)
def test_opcheck(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    scores = learned(draw_scores(name, 2, 4))
    options = (0.2, False, None, 0, False, -1, -1, 0, *scores.values())
    torch.library.opcheck(OPS.forward.default, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    given = draw_scores(name, 2, 4).values()
    out, lse = OPS.forward(q, k, v, *options[:8], *given)
    gradient = (0.2, False, None, False, -1, -1, 0, *given)
    torch.library.opcheck(OPS.backward.default, (torch.randn_like(out), None, q, k, v, out, lse, *gradient))


@pytest.mark.parametrize("name", ["softcap", "all"])
def test_opcheck_of_sequences_of_different_lengths(name: str) -> None:
    case = CASES["plain"]
    q, k, v = (x.requires_grad_() for x in case.tensors(torch.bfloat16))
    cu_q, cu_k, most_q, most_k, *used = case.lengths
    lengths = cu_q, cu_k, *used, most_q, most_k
    scores = learned(draw_scores(name, 4, 4)).values()
    options = (0.2, True, None, 0, False, -1, -1, 0, *scores)
    torch.library.opcheck(OPS.forward_varlen.default, (q, k, v, *lengths, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    given = draw_scores(name, 4, 4).values()
    out, lse = OPS.forward_varlen(q, k, v, *lengths, *options[:8], *given)
    tensors = torch.randn_like(out), None, q, k, v, out, lse
    gradient = (0.2, True, None, False, -1, -1, 0, *given)
    torch.library.opcheck(OPS.backward_varlen.default, (*tensors, *lengths, *gradient))


@pytest.mark.parametrize(("dynamic", "lengths"), [(False, (9,)), (True, (9, 40, 4))])
def test_compiles_as_one_graph(dynamic: bool, lengths: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in lengths:
        for name in ("softcap", "all"):
            scores = learned(draw_scores(name, 2, 4))
            leaves = leaves_of([x.requires_grad_() for x in qkv(seqlen, seqlen)], scores)
            got, wanted = (f(*leaves[:3], window_size=(3, 1), **scores) for f in (compiled, flash_attn_func))
            assert torch.equal(got, wanted)
            gradients = [torch.autograd.grad(x.float().square().sum(), leaves) for x in (got, wanted)]
            for mine, theirs in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_slopes_that_are_no_input_compile_with_any_heads() -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, alibi_slopes=torch.arange(4.0))

    inputs = qkv(9, 9)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), attend(*inputs))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_torch_func(name: str) -> None:
    tensors = [torch.stack([x, 2 * x]) for x in qkv()]
    scores = draw_scores(name, 2, 4)
    sinks = torch.zeros(2, 4) if scores["sinks"] is None else torch.stack([scores["sinks"], -scores["sinks"]])
    constants = {key: value for key, value in scores.items() if key != "sinks"}
    has_sinks = scores["sinks"] is not None

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        given = sinks if has_sinks else None
        return flash_attn_func(q, k, v, sinks=given, **constants).float().square().sum()

    which = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
    found = vmap(grad(loss, which))(*tensors, sinks)
    for i in range(2):
        leaves = [x[i].clone().requires_grad_() for x in (*tensors, sinks)]
        wanted = torch.autograd.grad(loss(*leaves), leaves[: len(which)])
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine[i], theirs, rtol=1e-5, atol=1e-5)


# What is refused

SLOPES, SINKS = torch.ones(4), torch.ones(4)

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"softcap": -1.0}, ValueError, "softcap is -1.0, allowed: 0, which is none, or 1e-30 to 1e+30"),
    ({"softcap": math.nan}, ValueError, "softcap is nan, allowed: 0, which is none"),
    ({"softcap": math.inf}, ValueError, "softcap is inf, allowed: 0, which is none"),
    ({"softcap": 1e-31}, ValueError, "softcap is 1e-31, allowed: 0, which is none"),
    ({"softcap": True}, TypeError, "softcap is a bool, True, allowed: a number"),
    ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes is a float, allowed: a torch.Tensor"),
    (
        {"alibi_slopes": SLOPES.half()},
        TypeError,
        "alibi_slopes has dtype torch.float16, allowed: torch.float32",
    ),
    (
        {"alibi_slopes": torch.ones(2)},
        ValueError,
        "alibi_slopes has shape (2,), allowed: (heads,) or (batch, heads)",
    ),
    ({"alibi_slopes": torch.ones(3, 4)}, ValueError, "(batch, heads), (4,) or (2, 4)"),
    ({"alibi_slopes": torch.ones(1, 4)}, ValueError, "alibi_slopes has shape (1, 4), allowed"),
    (
        {"alibi_slopes": SLOPES.to("meta")},
        ValueError,
        "alibi_slopes is on meta, allowed: the device of q, cpu",
    ),
    (
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        NotImplementedError,
        "alibi_slopes requires a gradient, which is not implemented; use alibi_slopes.detach()",
    ),
    ({"sinks": [1.0]}, TypeError, "sinks is a list, allowed: a torch.Tensor"),
    (
        {"sinks": SINKS.half()},
        TypeError,
        "sinks has dtype torch.float16, allowed: torch.float32 or the dtype of q",
    ),
    ({"sinks": SINKS.double()}, TypeError, "sinks has dtype torch.float64, allowed"),
    ({"sinks": torch.ones(2)}, ValueError, "sinks has shape (2,), allowed: (heads,), (4,)"),
    ({"sinks": torch.ones(2, 4)}, ValueError, "sinks has shape (2, 4), allowed: (heads,), (4,)"),
    ({"sinks": SINKS.to("meta")}, ValueError, "sinks is on meta, allowed: the device of q, cpu"),
]


def call_varlen(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of dense tensors of a batch of 2, which it gets as two packed sequences."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        cu_q, cu_k = (torch.tensor([0, x.shape[1], 2 * x.shape[1]], dtype=torch.int32) for x in (q, k))
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return function(*flat, cu_q, cu_k, q.shape[1], k.shape[1], **options)

    return call


EVERY = (flash_attn_func, explain, call_varlen(flash_attn_varlen_func), call_varlen(explain_varlen))


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_arguments(
    function: Callable[..., Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(*qkv(), **options)


def test_slopes_that_nothing_differentiates_are_taken() -> None:
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.no_grad():
        found = flash_attn_func(*qkv(), alibi_slopes=slopes)
    assert torch.equal(found, flash_attn_func(*qkv(), alibi_slopes=slopes.detach()))


def test_operators_check_too() -> None:
    q, k, v = qkv()
    plain = (0.2, False, None, 0, False, -1, -1, 0)
    for options, message in (
        ((-1.0, None, None), "softcap is -1.0"),
        ((0.0, None, torch.ones(3)), "sinks has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            OPS.forward(q, k, v, *plain, *options)
        out, lse = OPS.forward(q, k, v, *plain)
        with pytest.raises(ValueError, match=message):
            OPS.backward(out, None, q, k, v, out, lse, 0.2, False, None, False, -1, -1, 0, *options)
    slopes = torch.ones(4, requires_grad=True)
    cu = torch.tensor([0, 21, 42], dtype=torch.int32)
    flat = (q.flatten(0, 1), *(x[:, :21].flatten(0, 1) for x in (k, v)))
    packed = (*flat, cu, cu, None, None, 21, 21, *plain)
    for sinks in (None, SINKS):
        for out, _ in (
            OPS.forward(q, k, v, *plain, 0.0, slopes, sinks),
            OPS.forward_varlen(*packed, 0.0, slopes, sinks),
        ):
            with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
                out.float().sum().backward()


# Kernels


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_kernels_that_do_it_are_chosen(backend: str, name: str) -> None:
    scores = draw_scores(name, 2, 4)
    kind = Scores(**scores).kind
    for function in (explain, EVERY[3]):
        tensors = [x.requires_grad_() for x in qkv()]
        plan = function(*tensors, backend=backend, device_capability=(9, 0), **scores)
        assert plan.backend == backend
        found = plan.config.softcap, plan.config.alibi, plan.config.sinks, plan.config.dropout
        assert found == kind[:4]
        (gradient,) = (note for note in plan.notes if note.startswith("the backward pass runs on the "))
        # A sink is in the LSE, and its gradient needs no kernel.
        assert ["softcap" in gradient, "alibi" in gradient, "sinks" in gradient] == [*kind[:2], False]


@pytest.mark.parametrize(("backend", "last"), [("hopper", (3 * SMS,)), ("ampere", ())])
def test_values_reach_a_kernel_and_are_no_part_of_a_key(
    backend: str, last: tuple[int, ...], kernel_calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    select, problems = forward.select_for, []
    monkeypatch.setattr(forward, "select_for", lambda p, *where: problems.append(p) or select(p, *where))
    tensors, sinks = qkv(), SINKS.bfloat16()
    for cap, slopes in ((2.0, torch.ones(2, 4)), (3.0, torch.zeros(4))):
        for window in ((-1, -1, 0), (5, 2, 0)):
            scores = Scores(cap, slopes, sinks)
            run_forward(*tensors, 0.5, False, backend, 0, window=window, scores=scores)
            _, call = kernel_calls[-1]
            sides = () if window == (-1, -1, 0) else window[:2]
            if backend == "hopper":
                sides = (*(sides or (None, None)), *(None,) * 5)
            assert call[: len(call) - len(last) - 5][-1 - len(sides) :] == (0.5, *sides)
            found_cap, found_slopes, found_sinks, *dropout = call[len(call) - len(last) - 5 :][:5]
            assert found_cap == cap and dropout == [None, None] and call[len(call) - len(last) :] == last
            assert torch.equal(found_slopes, slopes.expand(2, 4)) and found_slopes.dtype == torch.float32
            assert torch.equal(found_sinks, torch.ones(4)) and found_sinks.dtype == torch.float32
    assert [(p.has_window, p.scores) for p in problems] == [
        (w, ScoreKind(True, True, True)) for w in (False, True)
    ]
    run_forward(*tensors, 0.5, False, backend, 0, scores=Scores(sinks=sinks))
    _, call = kernel_calls[-1]
    assert call[len(call) - len(last) - 5 :][:2] == (None, None)
    assert problems[-1].scores == ScoreKind(has_sinks=True)


@pytest.mark.parametrize(("backend", "last"), [("hopper", (SMS,)), ("ampere", ())])
def test_values_reach_a_backward_kernel(
    backend: str, last: tuple[int, ...], kernel_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: lambda *a: seen.append(a))
    q, k, v = qkv()
    out, lse, slopes = q[..., :24], torch.zeros(2, 4, 21), torch.rand(4)

    def options_of(scores: Scores, window: tuple[int, int, int] = (-1, -1, 0)) -> tuple[Any, ...]:
        """What the kernel is given behind the tensors."""
        given = {"backend": backend, "scores": scores, "window": window}
        backward.run_backward(out, q, k, v, out, lse, 0.5, False, **given)
        return [call for call in seen if len(call) > 6][-1][10:]

    for window in ((-1, -1, 0), (5, 2, 0)):
        # The kernels of Hopper have a place for whatever a call may have, the others for what it has.
        sides = () if window == (-1, -1, 0) else window[:2]
        if backend == "hopper":
            sides = (*(sides or (None, None)), None, None, None)
        both = options_of(Scores(2.0, slopes), window)
        assert both[: 2 + len(sides)] == (0.5, *sides, 2.0) and both[3 + len(sides) :] == (None, None, *last)
        assert torch.equal(both[2 + len(sides)], slopes.expand(2, 4))
        assert options_of(Scores(2.0, sinks=SINKS), window) == (0.5, *sides, 2.0, None, None, None, *last)
    plain = options_of(NO_SCORES)
    assert plain == (0.5, *last) == options_of(Scores(sinks=SINKS))


def test_rows_behind_the_last_sequence_have_no_sink(
    kernel_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any) -> None:
        """As a kernel to which rows behind the last sequence are rows without keys."""
        out.zero_()
        lse.copy_(others[-4][:, None].expand_as(lse))

    monkeypatch.setattr(
        compile_cache, "get_forward", lambda c: kernel if hasattr(c, "tile_m") else lambda *a: None
    )
    c = CASES["rows behind"]
    cu_q, cu_k, most_q, most_k, *used = c.lengths
    lengths = Lengths(cu_q, cu_k, *used, most_q, most_k)
    tensors, scores = c.tensors(torch.bfloat16), Scores(sinks=torch.arange(4.0))
    _, lse = varlen.run_varlen(*tensors, lengths, 0.2, False, "hopper", 0, scores=scores)
    unused = c.unused()[0]
    assert (lse[:, unused] == -math.inf).all() and unused.any()
    assert torch.equal(lse[:, ~unused], torch.arange(4.0)[:, None].expand(4, int((~unused).sum())))


def test_plain_calls_know_nothing_of_them(kernel_calls: list[Any]) -> None:
    assert Scores.of(0.0, None, None) is NO_SCORES and Scores.of(0, None, None) is NO_SCORES
    run_forward(*qkv(), None, False, None, 0)
    run_forward(*qkv(), None, False, None, 0, scores=NO_SCORES)
    assert len(kernel_calls[0][1]) == len(kernel_calls[1][1]) == 8
    assert forward.find_launch.cache_info().hits == 1


def test_nothing_to_launch() -> None:
    q, k, v = qkv(7, 0)
    out, lse = OPS.forward(q, k, v, 0.2, False, None, 0, False, -1, -1, 0, 2.0, SLOPES, SINKS.bfloat16())
    assert (out == 0).all() and (lse == 1).all() and lse.dtype == torch.float32
    for case in ("no keys", "no queries", "no sequence", "nothing"):
        c = CASES[case]
        tensors = c.tensors(torch.half, poisoned=False)
        cu_q, cu_k, most_q, most_k, *used = c.lengths
        lengths = Lengths(cu_q, cu_k, *used, most_q, most_k)
        scores = Scores(2.0, None, SINKS)
        empty = varlen.EMPTY(*tensors, *lengths, 0.2, -1, -1, 0, True, scores=scores)
        wanted = varlen.run_varlen(*tensors, lengths, 0.2, False, None, 0, scores=scores)
        for mine, theirs in zip(empty, wanted, strict=True):
            assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype and mine.is_contiguous()


@pytest.mark.parametrize("case", CASES)
def test_rows_of_sequences(case: str) -> None:
    c = CASES[case]
    unused = c.unused()
    for side, (cu, used) in enumerate(zip(c.lengths[:2], c.lengths[4:], strict=True)):
        assert torch.equal(rows_of_sequences(cu, used, len(unused[side])), ~unused[side])


# Records and plans


def test_records() -> None:
    assert ScoreSpec(2.0, True, False).kind == ScoreKind(True, True, False)
    assert ScoreKind(True, False, True, True).names == ("softcap", "sinks", "dropout_p") and PLAIN.names == ()
    assert Scores(0.0, SLOPES, None).spec == ScoreSpec(has_alibi=True)
    with pytest.raises(ValueError, match=r"softcap is -2\.0"):
        ScoreSpec(-2.0)


@pytest.mark.parametrize("function", [explain, call_varlen(explain_varlen)])
def test_explain_mentions_them(function: Callable[..., Any]) -> None:
    plan = function(*qkv(), softcap=30, alibi_slopes=SLOPES, sinks=SINKS)
    assert plan.backend == "torch" and plan.notes == (
        "softcap: a score s becomes 30.0 tanh(s / 30.0)",
        "alibi_slopes: scores fall by a slope of their head with the distance of query and key",
        "sinks: a logit of each head joins the sum of a row",
    )
    assert function(*qkv()).notes == ()
