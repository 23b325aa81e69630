"""score_mod and mask_mod from the public functions to the reference and to the place where a kernel takes them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    noop_mask,
    or_masks,
)

from cute_kernels.user_functions import FLOAT, OPERATIONS, UserFunctions
from hopper_attention import explain, flash_attn_func, flash_attn_varlen_func, mods
from hopper_attention.functions import trace_functions
from hopper_attention.reference import attention_naive, attention_tiled
from hopper_attention.reference.function_terms import OPERATIONS as TORCH_OPERATIONS
from hopper_attention.reference.function_terms import work_out
from tests.function_examples import Example, draw_example, relative_bias
from tests.python import dense_cases
from tests.python.varlen_cases import CASES


def qkv(*lengths: int, head_dim_v: int = 24) -> list[Tensor]:
    return [x.requires_grad_() for x in dense_cases.qkv(*lengths, head_dim_v=head_dim_v)]


def close(ours: Tensor, exact: Tensor, error: float = 0.02) -> None:
    most = max(1.0, float(exact.detach().abs().max())) if exact.numel() else 1.0
    torch.testing.assert_close(ours.double(), exact.double(), rtol=0.0, atol=error * most)


def seen_rows(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


# Numbers


OPTIONS = (
    {},
    {"causal": True, "sinks": True},
    {"attention_chunk": 15},
    {"window_size": (9, 4), "softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 1.0])},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(21, 33), (140, 150), (33, 21), (9, 1)], ids=str)
def test_results_and_gradients(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    example, inputs, given = draw_example(), qkv(*lengths), dict(options)
    if given.pop("sinks", False):
        given["sinks"] = torch.tensor([0.3, -1.0, 2.0, 0.0], requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = flash_attn_func(*inputs, return_attn_probs=True, **given, **vars(example))
    sides = dict(zip(("window_left", "window_right"), given.pop("window_size", (-1, -1)), strict=True))
    learned = [given["sinks"]] if "sinks" in given else []
    wanted = attention_naive(*exact, **given, **sides, **vars(example))
    close(results[0], wanted[0])
    close(seen_rows(results[1]), seen_rows(wanted[1]), 1e-4)
    assert torch.equal(results[1] == -math.inf, wanted[1] == -math.inf)
    dout, dlse = (torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in wanted)
    dlse = dlse.masked_fill(wanted[1] == -math.inf, 0.0)
    ours = torch.autograd.grad(results, [*inputs, *learned], (dout.bfloat16(), dlse))
    theirs = torch.autograd.grad(
        (wanted[0], seen_rows(wanted[1])), [*exact, *learned], (dout.double(), dlse.double())
    )
    for mine, right in zip(ours, theirs, strict=True):
        close(mine, right)


@pytest.mark.parametrize("case", ["plain", "empty ones", "used"])
def test_sequences_count_from_0(case: str) -> None:
    c = CASES[case]
    inputs = [x.requires_grad_() for x in c.tensors(torch.bfloat16)]
    example = relative_bias(c.heads[0])
    out = flash_attn_varlen_func(*inputs, *c.lengths, causal=True, **vars(example))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    dout[c.unused()[0]] = 0.0
    ours = torch.autograd.grad(out, inputs, dout)
    exact = [x.detach().nan_to_num().double().requires_grad_() for x in inputs]
    wanted = torch.zeros(out.shape, dtype=torch.float64)
    for b, (rows, keys) in enumerate(c.spans()):

        def score_mod(score, _, *place, b=b):
            return example.score_mod(score, torch.tensor(b), *place)

        parts = exact[0][None, rows], exact[1][None, keys], exact[2][None, keys]
        if rows.start < rows.stop and keys.start < keys.stop:
            part = attention_naive(*parts, causal=True, score_mod=score_mod)[0][0]
            wanted = wanted.index_copy(0, torch.arange(rows.start, rows.stop), part)
    close(out, wanted)
    for mine, right in zip(ours, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        close(mine, right)


def test_a_row_that_sees_nothing_gives_zero_and_finite_gradients() -> None:
    inputs = qkv()
    out, lse = flash_attn_func(
        *inputs, return_attn_probs=True, mask_mod=lambda b, h, q_idx, kv_idx: (q_idx > 3) & (kv_idx < 9)
    )
    assert not out[:, :4].any() and bool((lse[:, :, :4] == -math.inf).all()) and out[:, 4:].any()
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(bool(x.isfinite().all()) for x in gradients) and not gradients[0][:, :4].any()


def test_indices_outside_of_a_tensor_are_taken_for_the_nearest() -> None:
    bias, inputs = torch.tensor([1.0, 2.0, 4.0]), qkv()
    ours = attention_tiled(*inputs, score_mod=lambda s, b, h, q, k: s + bias[k - 3])[0]
    padded = bias[(torch.arange(33) - 3).clamp(0, 2)]
    wanted = attention_naive(*inputs, score_mod=lambda s, b, h, q, k: s + padded[k])[0]
    close(ours, wanted)


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: 3.0 - s * x / (s * s + 1.0),
        lambda s, x: mods.exp(s) + mods.exp2(s * 0.5) + mods.log(s * s + 1.0) * mods.log2(abs(s) + 2.0),
        lambda s, x: mods.sqrt(s * s + 0.5) * mods.rsqrt(abs(s) + 1.0) + mods.sigmoid(s) - mods.tanh(-s),
        lambda s, x: mods.where(s > x, s**3, s**-2 + (s + 9.0) ** 0.5),
        lambda s, x: mods.minimum(s, x) * mods.maximum(s * 2.0, 0.3) + mods.floor(s * 4.0) + s % 0.7,
        lambda s, x: s.clamp(-1.0, 1.0) + torch.relu(s) + torch.square(s) + (s == x) * 2.0,
        lambda s, x: torch.where(s.abs() < 1.0, s, torch.sigmoid(s)) + s.float() + 1 / (2.0 - s),
    ],
)
def test_slopes_are_those_of_torch(f: Callable[..., Any]) -> None:
    captured = trace_functions(lambda s, b, h, q, k: f(s, k * 0.25), None)
    score = (torch.arange(-24, 25, dtype=torch.float64) * 0.137 + 0.011).requires_grad_()
    inputs = {"score": score.detach(), "kv_idx": torch.tensor(3, dtype=torch.int32)}
    inputs |= {name: torch.tensor(0, dtype=torch.int32) for name in ("b", "h", "q_idx")}
    differentiated = captured.functions.with_slope()
    plain = f(score, torch.tensor(0.75, dtype=torch.float64))
    torch.testing.assert_close(
        work_out(captured.functions, captured.functions.score, inputs, ()), plain.detach()
    )
    slope = work_out(differentiated, differentiated.slope, inputs, ())
    torch.testing.assert_close(slope.expand_as(score), torch.autograd.grad(plain.sum(), score)[0])


def test_plain_numbers_give_plain_numbers() -> None:
    assert mods.exp(2.0) == math.exp(2.0) and mods.sqrt(64) == 8.0
    assert mods.maximum(2, 3) == 3 and type(mods.minimum(2, 3)) is int
    assert mods.where(True, 1.5, -1.0) == 1.5 and mods.abs(np.float32(-2.0)) == 2.0
    functions = trace_functions(lambda s, b, h, q, k: s / mods.sqrt(64.0) + mods.minimum(1, 2), None)
    assert not functions.tensors


def test_integers_are_those_of_python() -> None:
    def f(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q // k) * 1000 + q % k * 10 + ((q & 6) | 1) + (q ^ k) + (k << 2) + (q >> 1) + (~q) + (-q)

    captured = trace_functions(f, None)
    for q, k in ((7, 3), (-7, 3), (7, -3), (-6, 3), (0, 5)):
        inputs = {
            name: torch.tensor(value, dtype=torch.int32) for name, value in (("q_idx", q), ("kv_idx", k))
        }
        inputs |= {"b": inputs["q_idx"], "h": inputs["q_idx"], "score": torch.zeros((), dtype=torch.float64)}
        assert work_out(captured.functions, captured.functions.score, inputs, ()).item() == f(0, 0, 0, q, k)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x + y,
        lambda x, y: x + True,
        lambda x, y: ~mods.maximum(x, y),
        lambda x, y: (x * y) == y,
        lambda x, y: ~mods.minimum(x, y) + x,
        lambda x, y: x**2 + y**2,
        lambda x, y: 2 * x + y,
    ],
)
def test_arithmetic_of_truth_values_is_that_of_torch(f: Callable[..., Any]) -> None:
    captured = trace_functions(lambda s, b, h, q, k: f(q > 0, k > 0), None)
    for q, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
        names = {"q_idx": q, "kv_idx": k, "b": 0, "h": 0}
        inputs = {name: torch.tensor(value, dtype=torch.int32) for name, value in names.items()}
        inputs["score"] = torch.zeros((), dtype=torch.float64)
        ours = work_out(captured.functions, captured.functions.score, inputs, ())
        assert ours.item() == float(f(torch.tensor(q > 0), torch.tensor(k > 0)))


def test_every_operation_can_be_worked_out_on_tensors() -> None:
    assert set(OPERATIONS) - {"cast"} == set(TORCH_OPERATIONS)


# What decides on a kernel


def functions_of(score_mod: Any = None, mask_mod: Any = None) -> UserFunctions:
    return trace_functions(score_mod, mask_mod).functions


def test_functions_that_do_the_same_are_equal() -> None:
    def make(factor: float, bias: Tensor) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s * factor + bias[h]

    one = functions_of(make(2.0, torch.rand(4)))
    assert (
        one == functions_of(make(2.0, torch.rand(9)))
        and one.name == functions_of(make(2.0, torch.rand(1))).name
    )
    others = (
        make(3.0, torch.rand(4)),
        make(2.0, torch.rand(4).half()),
        make(2, torch.rand(4)),
        make(True, torch.rand(4)),
    )
    names = {one.name, *(functions_of(other).name for other in others)}
    assert len(names) == 5
    partial = functools.partial(lambda c, s, b, h, q, k: s * c, 2.0)
    assert functions_of(partial) == functions_of(lambda s, b, h, q, k: s * 2.0)


def test_a_slope_of_1_is_known() -> None:
    bias = torch.rand(4)
    assert not functions_of(lambda s, b, h, q, k: s + bias[h] - q).bends
    assert not functions_of(None, lambda b, h, q, k: q > k).bends
    assert functions_of(lambda s, b, h, q, k: s * 1.5).bends
    assert functions_of(lambda s, b, h, q, k: mods.where(q > k, s, -math.inf)).bends


@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_tensors_reach_kernels_as_they_are_now(backend: str, kernel_calls: list[tuple[Any, ...]]) -> None:
    inputs, flags, bias = qkv(), torch.rand(33) > 0.5, torch.rand(4, 9).half().t()

    def attend(n: int) -> Tensor:
        # E731: a lambda, as users write it, made anew each time.
        score_mod = lambda s, b, h, q, k: s * 2.0 + bias[q, h] + n  # noqa: E731
        return flash_attn_func(
            *inputs, backend=backend, score_mod=score_mod, mask_mod=lambda b, h, q, k: flags[k]
        )

    last = 1 if backend == "hopper" else 0
    out = attend(0)
    config, arguments = kernel_calls[-1]
    captured = arguments[len(arguments) - last - 2 : len(arguments) - last]
    assert [x.dtype for x in captured] == [torch.float16, torch.uint8] and captured[0].stride() == (1, 9)
    assert captured[1].data_ptr() == flags.data_ptr() and config.name.endswith(config.functions.name)
    attend(0)
    assert kernel_calls[-1][0] is config
    attend(1)
    assert kernel_calls[-1][0].name != config.name
    torch.autograd.grad(out.sum(), inputs)
    gradient, given = kernel_calls[-2]
    assert gradient.functions == config.functions
    assert given[len(given) - last - 2].data_ptr() == bias.data_ptr()


# What is refused


S, N = torch.rand(3, 4), torch.rand(4)


def branches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s if q > k else 0.0


@pytest.mark.parametrize(
    "score_mod,error,message",
    [
        (branches, TypeError, "score_mod asks in Python for a value that only the kernel knows"),
        (lambda s, b, h, q, k: math.tanh(s), TypeError, "score_mod asks in Python for a value"),
        (lambda s, b, h, q, k: torch.softmax(s, 0), TypeError, "score_mod calls torch.softmax"),
        (lambda s, b, h, q, k: s.cos(), AttributeError, "score_mod uses .cos"),
        (lambda s, b, h, q, k: s.item(), TypeError, r"score_mod uses .item .*; use .*& \| \^ ~ << >>"),
        (lambda s, b, h, q, k: s + S, TypeError, r"score_mod uses a tensor of shape \(3, 4\) as a number"),
        (lambda s, b, h, q, k: s + S[h], TypeError, r"score_mod uses a tensor of shape \(4,\) as a number"),
        (lambda s, b, h, q, k: s + N[h, q], IndexError, "score_mod gives 2 indices"),
        (lambda s, b, h, q, k: s + N[s], TypeError, "score_mod indexes a tensor with a float"),
        (lambda s, b, h, q, k: s + N[h:], TypeError, "score_mod asks in Python for a value"),
        (lambda s, b, h, q, k: s**1.7, TypeError, "score_mod raises to the power of"),
        (lambda s, b, h, q, k: 2**q, TypeError, "score_mod raises to a power that only the kernel knows"),
        (lambda s, b, h, q, k: s & 1, TypeError, "score_mod uses & | "),
        (lambda s, b, h, q, k: s + 2**40, TypeError, "which 32 bits do not hold"),
        (lambda s, b, h, q, k: s + "a", TypeError, "score_mod uses a str"),
        (lambda s, b, h, q, k: None, TypeError, "score_mod gives a NoneType"),
        (lambda s, b, h, q, k: s + N.double()[h], TypeError, "a tensor of dtype torch.float64, allowed"),
        (lambda s, b, h, q, k: s + N[:0][h], ValueError, "allowed: with elements"),
        (
            lambda s, b, h, q, k: s + N.to("meta")[h],
            ValueError,
            "that score_mod or mask_mod reads is on meta",
        ),
        (7, TypeError, "score_mod is a int, allowed: a function"),
        (lambda s: s, TypeError, r"score_mod takes \(s\).*allowed: a function of \('score', 'b', 'h'"),
        (
            lambda s, b, h, q, k: torch.add(s, q, alpha=2),
            TypeError,
            "score_mod calls add with 2 arguments, alpha",
        ),
        (lambda s, b, h, q, k: s.sub(2, q), TypeError, "score_mod calls sub with 3 arguments"),
        (lambda s, b, h, q, k: s.clamp(least=1), TypeError, "score_mod calls clamp with least"),
        (lambda s, b, h, q, k: s + q // 0, TypeError, "score_mod divides an integer by 0"),
        (lambda s, b, h, q, k: s + (q << 32), TypeError, "score_mod shifts by 32"),
        (lambda s, b, h, q, k: s + k.new_ones(3), TypeError, "score_mod makes a tensor of shape 3"),
        (lambda s, b, h, q, k: round(s), TypeError, "score_mod uses Python's round"),
    ],
)
def test_what_cannot_be_traced_is_named(score_mod: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(*qkv(), score_mod=score_mod)


def test_explain_says_what_runs_with_one_key_and_with_wide_values(
    kernel_calls: list[tuple[Any, ...]],
) -> None:
    def twice(s: Any, *place: Any) -> Any:
        return s * 2.0

    inputs = qkv(21, 1)
    torch.autograd.grad(flash_attn_func(*inputs, backend="hopper", score_mod=twice).sum(), inputs)
    names = [config.name for config, _ in kernel_calls]
    plan = explain(*inputs, backend="hopper", device_capability=(9, 0), score_mod=twice)
    assert plan.config.name == names[0] and any(names[2] in note for note in plan.notes)
    wide = [x.detach() for x in qkv(21, 33, head_dim_v=264)]
    for options in ({"score_mod": twice}, {"mask_mod": near}, {"dropout_p": 0.5}):
        kernel_calls.clear()
        flash_attn_func(*wide, backend="hopper", **options)
        plan = explain(*wide, backend="hopper", device_capability=(9, 0), **options)
        assert len(kernel_calls) == 2 and plan.config == kernel_calls[0][0]


def test_gradients_of_what_functions_read_are_refused() -> None:
    bias = torch.rand(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        flash_attn_func(*qkv(), score_mod=lambda s, b, h, q, k: s + bias[h])
    with torch.no_grad():
        flash_attn_func(*qkv(), score_mod=lambda s, b, h, q, k: s + bias[h])
    out = attention_naive(*qkv(), score_mod=lambda s, b, h, q, k: s + bias[h] * k)[0]
    assert torch.autograd.grad(out.sum(), bias)[0].any()


def test_fp8_transforms_and_second_derivatives_are_refused() -> None:
    example, inputs = relative_bias(), qkv()
    with pytest.raises(NotImplementedError, match=r"score_mod is given.*float8_e4m3fn"):
        flash_attn_func(*(x.detach().to(torch.float8_e4m3fn) for x in inputs), score_mod=example.score_mod)
    with pytest.raises(NotImplementedError, match="qv is given: a second query with score_mod"):
        flash_attn_func(*inputs, qv=inputs[0][..., :24], **vars(example))
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.5: dropout with score_mod"):
        flash_attn_func(*inputs, dropout_p=0.5, **vars(example))
    with pytest.raises(NotImplementedError, match=r"score_mod and mask_mod under torch\.func"):
        torch.func.grad(lambda q: flash_attn_func(q, *inputs[1:], **vars(example)).sum())(inputs[0])
    out = flash_attn_func(*inputs, **vars(example))
    (dq,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated again"):
        dq.sum().backward()


@pytest.mark.parametrize("is_inside", [True, False])
def test_fake_tensors_of_a_gpu_are_refused_before_a_kernel_is_launched(is_inside: bool) -> None:
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(3)]
        packed = [x.flatten(0, 1) for x in fakes]
        starts = torch.empty(2, dtype=torch.int32, device="cuda:0")
    options = {"score_mod": lambda s, b, h, q, k: s * 0.5}
    with mode if is_inside else contextlib.nullcontext():
        with pytest.raises(NotImplementedError, match="on fake tensors of a GPU"):
            flash_attn_func(*fakes, **options)
        with pytest.raises(NotImplementedError, match="on fake tensors of a GPU"):
            flash_attn_varlen_func(*packed, starts, starts, 8, 8, **options)


def test_fake_tensors_have_the_shapes_of_a_result() -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x.detach()) for x in qkv()]
    with mode:
        out = flash_attn_func(*fakes, score_mod=lambda s, b, h, q, k: s * 0.5)
    assert type(out) is FakeTensor and out.shape == flash_attn_func(*qkv()).shape


def test_tensors_that_are_changed_before_the_gradient_are_found_out() -> None:
    bias, inputs = torch.rand(4), qkv()
    out = flash_attn_func(*inputs, score_mod=lambda s, b, h, q, k: s * bias[h])
    bias.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_compiles_around_the_call() -> None:
    example, inputs = relative_bias(), [x.detach() for x in qkv()]

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q * 2.0, k, v, **vars(example)) + 1.0

    compiled = torch.compile(twice, backend="eager")
    assert torch.equal(compiled(*inputs), twice(*inputs))


def test_functions_of_flex_attention_are_taken_as_they_are() -> None:
    doc = torch.arange(33) // 10
    example = Example(
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
        lambda b, h, q_idx, kv_idx: (doc[q_idx] == doc[kv_idx]) & torch.logical_not(kv_idx == 5),
    )
    inputs = qkv(33, 33)
    close(flash_attn_func(*inputs, **vars(example)), attention_naive(*inputs, **vars(example))[0])
    assert trace_functions(example.score_mod, None).functions.steps[-1][:2] == ("where", FLOAT)


def test_the_oracle_takes_indices_one_after_the_other() -> None:
    document, table = torch.arange(33).expand(2, -1) // 10, torch.randn(4, 3, 33, requires_grad=True)
    inputs, example = (
        qkv(33, 33),
        Example(
            lambda s, b, h, q_idx, kv_idx: s + table.detach()[h][1, kv_idx] * table.detach()[h][b][q_idx],
            lambda b, h, q_idx, kv_idx: document[b][q_idx] == document[b][kv_idx],
        ),
    )
    exact = attention_naive(*inputs, **vars(example))[0]
    close(flash_attn_func(*inputs, **vars(example)), exact)
    biased = attention_naive(*inputs, score_mod=lambda s, b, h, q, k: s + table[h][1][k])[0]
    together = attention_naive(*inputs, score_mod=lambda s, b, h, q, k: s + table[h, 1, k])[0]
    first, second = (torch.autograd.grad(out.sum(), table)[0] for out in (biased, together))
    assert torch.equal(biased, together) and torch.equal(first, second)


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 9


@pytest.mark.parametrize("combine", [and_masks, or_masks])
def test_masks_that_flex_attention_combines(combine: Callable[..., Any]) -> None:
    inputs = qkv(33, 40)
    mask_mod = combine(near, noop_mask, lambda b, h, q_idx, kv_idx: h + b > 1)
    out = flash_attn_func(*inputs, mask_mod=mask_mod)
    close(out, attention_naive(*inputs, mask_mod=mask_mod)[0])
    assert torch.equal(
        flash_attn_func(*inputs, mask_mod=noop_mask), flash_attn_func(*inputs, backend="reference")
    )


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: (q + k) % 3,
        lambda s, b, h, q, k: q > k,
        lambda s, b, h, q, k: k * 0.1,
        lambda s, b, h, q, k: 0.25,
        lambda s, b, h, q, k: -math.inf,
        lambda s, b, h, q, k: torch.tensor(0.25),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_may_be_left_out(score_mod: Any, causal: bool) -> None:
    inputs = qkv()
    results = flash_attn_func(*inputs, causal=causal, score_mod=score_mod, return_attn_probs=True)
    wanted = attention_naive(*inputs, causal=causal, score_mod=score_mod)
    close(results[0], wanted[0])
    assert torch.equal(results[1] == -math.inf, wanted[1] == -math.inf)
    dq, dk, dv = torch.autograd.grad(results[0].sum(), inputs)
    assert not dq.any() and not dk.any()
    close(dv, torch.autograd.grad(wanted[0].sum(), inputs[2])[0])


def test_numbers_of_numpy_are_numbers() -> None:
    inputs, bias = qkv(), torch.rand(2, 4)
    ours = flash_attn_func(
        *inputs, score_mod=lambda s, b, h, q, k: np.float32(2.0) * s * np.float32(0.5) + bias[np.int64(-1), h]
    )
    assert torch.equal(ours, flash_attn_func(*inputs, score_mod=lambda s, b, h, q, k: s + bias[1, h]))


def test_a_lazy_sign_is_no_lazy_sign_for_a_kernel() -> None:
    lazy = torch.randn(4, dtype=torch.complex64).conj().imag
    (tensor,) = trace_functions(lambda s, b, h, q, k: s + lazy[h], None).tensors
    assert lazy.is_neg() and not tensor.is_neg() and torch.equal(tensor, lazy)


# BlockMask


def block_mask_of(mask_mod: Any, seqlens: tuple[int, int], batch: int | None = 2, block: int = 128) -> Any:
    return create_block_mask(mask_mod, batch, None, *seqlens, device="cpu", BLOCK_SIZE=block)


def in_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 50 + b == kv_idx // 50) | (kv_idx < 3)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (60, 20)}], ids=str)
def test_a_block_mask_is_the_mask_that_it_was_made_of(options: dict[str, Any]) -> None:
    inputs, bias = qkv(200, 300), relative_bias().score_mod
    blocks = block_mask_of(in_documents, (200, 300))
    out = flash_attn_func(*inputs, block_mask=blocks, score_mod=bias, **options)
    wanted = flash_attn_func(*inputs, mask_mod=in_documents, score_mod=bias, **options)
    assert torch.equal(out, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_blocks_that_are_not_listed_are_hidden_and_full_ones_are_not_masked() -> None:
    counts, indices = torch.tensor([[[1, 1]]]).int(), torch.tensor([[[[2, 0, 1], [0, 1, 2]]]]).int()
    full_counts, full_indices = torch.tensor([[[1, 0]]]).int(), torch.tensor([[[[0, 1, 2]] * 2]]).int()
    blocks = BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=128, mask_mod=lambda b, h, q, k: k % 2 == 0
    )
    inputs = qkv(200, 300)
    kinds = (
        torch.tensor([[2, 0, 1], [1, 0, 0]]).repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    )
    visible = (kinds == 2) | ((kinds == 1) & (torch.arange(300) % 2 == 0))
    wanted = attention_naive(*inputs, mask_mod=lambda b, h, q, k: visible[q, k])[0]
    close(flash_attn_func(*inputs, block_mask=blocks), wanted)
    everything = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)
    listed = kinds == 1
    wanted = attention_naive(*inputs, mask_mod=lambda b, h, q, k: listed[q, k])[0]
    close(flash_attn_func(*inputs, block_mask=everything), wanted)


def test_block_masks_that_do_not_fit_are_named() -> None:
    inputs = qkv(200, 300)
    with pytest.raises(TypeError, match="block_mask is a Tensor, allowed"):
        flash_attn_func(*inputs, block_mask=inputs[0])
    blocks = block_mask_of(in_documents, (200, 300))
    with pytest.raises(ValueError, match="mask_mod is given beside block_mask"):
        flash_attn_func(*inputs, block_mask=blocks, mask_mod=in_documents)
    for call in (flash_attn_func, explain):
        with pytest.raises(
            ValueError, match=r"block_mask is for batch 3 and 1 heads, allowed: 1 or 2, and 1 or 4"
        ):
            call(*inputs, block_mask=block_mask_of(in_documents, (200, 300), 3))
        with pytest.raises(ValueError, match="block_mask is for 256 queries and 256 keys, allowed: at least"):
            call(*inputs, block_mask=block_mask_of(in_documents, (200, 200)))
