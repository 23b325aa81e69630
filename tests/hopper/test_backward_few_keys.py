"""Gradients of packed sequences with few keys, whose delta the kernels find from P and dP in float32, from their PTX
without a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import FEW_KEYS
from hopper.backward.config import BackwardConfig, select_backward_config
from hopper_attention.dropout import kept_steps
from hopper_attention.functions import NO_CAPTURED, trace_functions
from hopper_attention.reference import attention_naive
from tests.function_examples import Example, draw_example, relative_bias
from tests.hopper.on_numpy import NO_RULES, Rules
from tests.hopper.packed_backward import packed_backward_on_numpy
from tests.hopper.test_backward_windows import DTYPES, EPSILON, LATE
from tests.plans import Packed

PHILOX = torch.tensor([0x123456789ABCDEF, 0x7EDCBA9876543210])
LENGTHS_Q, LENGTHS_K = (33, 20, 70, 9, 40), (1, 3, FEW_KEYS, FEW_KEYS + 1, 140)
Q, K = Packed.of(LENGTHS_Q, behind=3), Packed.of(LENGTHS_K, behind=5)
"""Sequences of up to ``FEW_KEYS`` keys and of more, which a caller has promised not to have."""

SLOPES = torch.tensor([[0.5, 0.25], [0.1, 0.7], [0.2, 0.05], [0.3, 0.4], [0.0, 0.6]])
"""Of ALiBi, for each sequence and head."""

OFFSET = 6.0
"""Of V where there are few keys. In 16 bits O loses bits that dP and its mean do not: what they differ by is small."""


def draw(dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    """dout, q, k, v of two heads and one key/value head."""
    generator = torch.Generator().manual_seed(0)
    shapes = (Q.total, 2, head_dim), (Q.total, 2, head_dim), (K.total, 1, head_dim), (K.total, 1, head_dim)
    dout, q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    v[: sum(LENGTHS_K[:3])] += OFFSET
    return [x.to(dtype) for x in (dout, q, k, v)]


def exact_of(
    inputs: list[Tensor], sequence: int, dlse: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv of a sequence in float64, alone."""
    (at_q, rows), (at_k, keys) = Q.rows(sequence), K.rows(sequence)
    dout, q, k, v = (
        x[at : at + number].double()
        for x, at, number in zip(inputs, (at_q, at_q, at_k, at_k), (rows, rows, keys, keys), strict=True)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][: sequence + 1]
    # Dropout, slopes and functions go by the number of a sequence: this one is the last of as many that are alike.
    out, lse = attention_naive(*(x.expand(sequence + 1, *x.shape) for x in leaves), **options)
    of_lse = torch.where(lse[-1] > -torch.inf, dlse[:, at_q : at_q + rows].double(), 0.0)
    lse_or_zero = lse[-1].masked_fill(lse[-1] == -torch.inf, 0.0)
    found = torch.autograd.grad((out[-1] * dout).sum() + (lse_or_zero * of_lse).sum(), leaves)
    return out[-1].detach(), lse[-1].detach(), *found


def run(
    config: BackwardConfig,
    rules: Rules,
    sides: tuple[int, ...],
    has_dlse: bool,
    options: dict[str, Any],
) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """(ours, exact), dq, dk and dv each, of every sequence."""
    dtype = DTYPES[config.dtype]
    inputs = draw(dtype, config.head_dim)
    dlse = torch.zeros(2, Q.total)
    if has_dlse:
        dlse.normal_(generator=torch.Generator().manual_seed(2))
    exact = [exact_of(inputs, i, dlse, options) for i in range(Q.batch)]
    out, lse = torch.zeros_like(inputs[0]), torch.zeros(2, Q.total)
    for i, (of_out, of_lse, *_) in enumerate(exact):
        begin, rows = Q.rows(i)
        out[begin : begin + rows], lse[:, begin : begin + rows] = of_out.to(dtype), of_lse.float()
    given: dict[str, Any] = {"dlse": dlse if has_dlse else None, "sides": sides, "rules": rules}
    ours = packed_backward_on_numpy(config, tuple(inputs), (out, lse), (Q, K), LATE, **given)
    return [(tuple(_rows_of(ours, i)), each[2:]) for i, each in enumerate(exact)]


def _rows_of(gradients: tuple[Tensor, ...], sequence: int) -> list[Tensor]:
    places = Q.rows(sequence), K.rows(sequence), K.rows(sequence)
    return [x[at : at + number] for x, (at, number) in zip(gradients, places, strict=True)]


def is_near(a: Tensor, exact: Tensor) -> bool:
    """Whether a gradient is as good as one that is rounded at its end and on its way."""
    return bool((a.double() - exact).norm() <= 1.5 * EPSILON[a.dtype] * exact.norm() + 1e-5)


CASES = {
    "d128": (("bfloat16", 128, False), {}),
    "d128 in a fixed order": (("bfloat16", 128, True), {"ordered": True}),
    "d128 float16, of the lse": (("float16", 128, False), {"has_dlse": True}),
    "d96 in a window": (("bfloat16", 96, False), {"window": (2, 1)}),
    "d64 causal, of the lse": (("float16", 64, True), {"has_dlse": True}),
    "d128 softcap": (("bfloat16", 128, True), {"softcap": 2.0}),
    "d64 dropout": (("bfloat16", 64, False), {"dropout_p": 0.25}),
    "d64 dropout, softcap": (("float16", 64, False), {"dropout_p": 0.25, "softcap": 2.0}),
    "d192 softcap in a window": (("float16", 192, False), {"softcap": 2.0, "window": (3, 2)}),
    "d192 causal, of the lse": (("bfloat16", 192, True), {"has_dlse": True}),
    "d256 dropout": (("bfloat16", 256, False), {"dropout_p": 0.25}),
    "d96 softcap and slopes": (("float16", 96, True), {"softcap": 2.0, "alibi": True}),
    "d128 functions that bend": (("bfloat16", 128, False), {"functions": draw_example(2, Q.batch)}),
    "d64 softcap, bent again": (
        ("float16", 64, True),
        {"functions": draw_example(2, Q.batch), "softcap": 2.0},
    ),
    "d256 softcap, a bias": (("bfloat16", 256, True), {"functions": relative_bias(2), "softcap": 2.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    (dtype, head_dim, causal), changes = CASES[name]
    window, p, softcap = changes.get("window"), changes.get("dropout_p", 0.0), changes.get("softcap", 0.0)
    slopes, example = SLOPES if "alibi" in changes else None, changes.get("functions", Example())
    captured = NO_CAPTURED
    if example.score_mod:
        captured = trace_functions(example.score_mod, example.mask_mod)
    features = {"window": window is not None, "softcap": bool(softcap), "dropout": bool(p)}
    features |= {"ordered": changes.get("ordered", False), "alibi": slopes is not None}
    features |= {"functions": captured.functions}
    config = select_backward_config(dtype, head_dim, head_dim, causal, layout="varlen", **features)
    config = replace(config, few_keys=True, clears_ahead=False, stores_first=False)
    rules = replace(NO_RULES, softcap=softcap, slopes=slopes, captured=captured)
    rules = replace(rules, **({"philox": PHILOX, "kept": kept_steps(p)} if p else {}))
    options: dict[str, Any] = {"causal": causal, "softcap": softcap, "dropout_p": p, **vars(example)}
    options |= {"philox": PHILOX} if p else {}
    options |= {} if slopes is None else {"alibi_slopes": slopes}
    options |= dict(zip(("window_left", "window_right"), window or (), strict=False))
    has_dlse = changes.get("has_dlse", False)
    for sequence, (ours, exact) in enumerate(run(config, rules, window or (), has_dlse, options)):
        for gradient, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
            assert is_near(a, e), (gradient, sequence)
        if LENGTHS_K[sequence] == 1 and not has_dlse and not p:
            assert not ours[0].any() and not ours[1].any(), "P of a single key is 1 whatever its score"


def test_a_delta_of_rounded_rows_is_not_as_good() -> None:
    """As it is of a call with sinks."""
    config = select_backward_config("bfloat16", 128, 128, False, layout="varlen")
    found = run(config, NO_RULES, (), False, {})
    dq_is_near = [is_near(ours[0], exact[0]) for ours, exact in found]
    assert dq_is_near == [False, False, False, True, True]
