"""The LSE that FP8 calls return is exact unless they ask for a fast one: against float64 on the e4m3 tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    quantize_qkv,
)
from hopper_attention.experiments.bench.fp8_peers import scaled_by_head
from hopper_attention.experiments.bench.peers import Inputs
from hopper_attention.experiments.bench.spec import Problem, parse_shapes
from hopper_attention.experiments.families.draws import FAMILIES, Family, draw_family
from hopper_attention.masks import MaskSpec
from hopper_attention.packed_quantized import PackedQuantizedQKV
from hopper_attention.quantization import QuantizedQKV, from_descales
from hopper_attention.reference import attention_naive
from tests.gpu.test_fp8 import rms

pytestmark = pytest.mark.gpu

EXACT = 1e-3
"""What partial results that are merged by their LSE may have."""

COARSE = 0.15
"""Twice what was seen of the fast kernel."""

NAMED = [family for family in FAMILIES if family.name in ("normal", "q8", "model", "tokens")]
FULL = (-1, -1)
IN_TURN = (False, None, True)
CELLS = [
    ("fp16-b1-s1500-h2-d64-causal", FULL),
    ("bf16-b1-s2048-h4-hk2-d128-full", FULL),
    ("bf16-b1-s1500-h2-d128-causal", (300, 0)),
    ("bf16-b1-s1500-h2-d256-causal", FULL),
    ("fp16-b1-s1500-h2-d256-full", (100, 30)),
]
LENGTHS = (700, 1, 0, 350, 449)
"""Of packed sequences."""


def draw_cell(name: str, family: Family) -> tuple[Problem, Inputs]:
    (problem,) = parse_shapes(name)
    return problem, draw_family(family, problem, 0, "cuda")


def naive_lse(parts: QuantizedQKV, causal: bool, window: tuple[int, int] = FULL) -> Tensor:
    """float64, of what the parts stand for."""
    mask = MaskSpec.canonical(causal, *window, parts.q.shape[1], parts.k.shape[1])
    sides = {"window_left": mask.window_left, "window_right": mask.window_right}
    q, k, v = (x.dequantize().double() for x in (parts.q, parts.k, parts.v))
    return attention_naive(q, k, v, causal=mask.causal, **sides)[1]


def error_of(lse: Tensor, exact: Tensor) -> float:
    """The largest; rows without a key have -inf in both."""
    visible = exact > -math.inf
    assert torch.equal(visible, lse > -math.inf)
    return (lse.double() - exact)[visible].abs().max().item()


def packed_lengths() -> dict[str, Any]:
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    longest = max(LENGTHS)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, (starts, starts, longest, longest), strict=True))


def packed_naive_lse(parts: PackedQuantizedQKV, causal: bool, window: tuple[int, int]) -> Tensor:
    found = [
        naive_lse(one, causal, window)[0] for (rows, _), one in parts.sequences() if rows.stop > rows.start
    ]
    return torch.cat(found, 1)


def check_turns(call: Any, exact: Tensor) -> tuple[Tensor, Tensor]:
    """``call(exact_lse)`` three times over, each of ``IN_TURN`` in its turn: (out, lse). Returns those by default."""
    found = [(exact_lse, *call(exact_lse)) for exact_lse in 3 * IN_TURN]
    fast, default = found[0], found[1]
    for exact_lse, out, lse in found:
        same = fast if exact_lse is False else default
        assert torch.equal(out, same[1]) and torch.equal(lse, same[2]), exact_lse
    assert error_of(default[2], exact) <= EXACT and error_of(fast[2], exact) <= COARSE
    assert not torch.equal(fast[2], default[2])
    assert rms(fast[1].double() - default[1].double()) <= 0.08 * rms(default[1].double())
    return default[1:]


@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.name)
@pytest.mark.parametrize(("name", "window"), CELLS, ids=str)
def test_calls_in_turn(name: str, window: tuple[int, int], family: Family) -> None:
    problem, x = draw_cell(name, family)
    parts = quantize_qkv(x.q, x.k, x.v)
    options = {"window_size": window, "backend": "hopper"}
    exact = naive_lse(parts, problem.causal, window)
    of_parts = check_turns(
        lambda exact_lse: flash_attn_quantized_func(
            parts, None, problem.causal, True, exact_lse=exact_lse, **options
        ),
        exact,
    )
    # Of the same blocks, which else go by the mask.
    options["quantization"] = parts.quantization
    of_16_bits = check_turns(
        lambda exact_lse: flash_attn_fp8_func(
            x.q, x.k, x.v, None, problem.causal, True, exact_lse=exact_lse, **options
        ),
        exact,
    )
    # Whichever kernel made the codes wide.
    assert all(map(torch.equal, of_parts, of_16_bits))


@pytest.mark.parametrize("exact_lse", IN_TURN)
def test_like_calls_without_the_lse(exact_lse: bool | None) -> None:
    """What is not returned is not made exact, unless it is asked for."""
    _, x = draw_cell("bf16-b1-s2048-h4-hk2-d128-full", NAMED[0])
    parts = quantize_qkv(x.q, x.k, x.v)
    outs = [flash_attn_quantized_func(parts, exact_lse=exact_lse) for _ in range(4)]
    of_16_bits = {"quantization": parts.quantization, "exact_lse": exact_lse}
    fresh = [flash_attn_fp8_func(x.q, x.k, x.v, **of_16_bits) for _ in range(4)]
    exact, _ = flash_attn_quantized_func(parts, return_attn_probs=True)
    for out in outs + fresh:
        assert torch.equal(out, outs[0]) and torch.equal(out, exact) == (exact_lse is True)


@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("name", "window"),
    [
        (f"fp16-b1-s{sum(LENGTHS)}-h2-d64-full", (200, 50)),
        (f"bf16-b1-s{sum(LENGTHS)}-h4-hk2-d128-causal", FULL),
        (f"bf16-b1-s{sum(LENGTHS)}-h2-d256-causal", (200, 0)),
    ],
    ids=str,
)
def test_packed_calls_in_turn(name: str, window: tuple[int, int], family: Family) -> None:
    problem, x = draw_cell(name, family)
    q, k, v = (t[0] for t in (x.q, x.k, x.v))
    lengths, causal = packed_lengths(), problem.causal
    parts = quantize_qkv(q, k, v, **lengths)
    exact = packed_naive_lse(parts, causal, window)
    options = {"window_size": window, "backend": "hopper"}
    check_turns(
        lambda exact_lse: flash_attn_quantized_func(
            parts, None, causal, True, exact_lse=exact_lse, **options
        ),
        exact,
    )
    options |= {"quantization": parts.quantization, **lengths}
    out, lse = flash_attn_fp8_func(q, k, v, None, causal, True, **options)
    assert error_of(lse, exact) <= EXACT and out.dtype == q.dtype


@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("name", "window"),
    [("bf16-b2-s1100-h4-hk2-d128-causal", FULL), ("bf16-b1-s1500-h2-d64-full", (300, 20))],
    ids=str,
)
def test_e4m3_tensors_with_descales(name: str, window: tuple[int, int], family: Family) -> None:
    problem, x = draw_cell(name, family)
    codes, descales = scaled_by_head(x, problem)
    q, k, v = codes.q, codes.k, codes.v
    exact = naive_lse(from_descales(q, k, v, *descales.values(), torch.bfloat16), problem.causal, window)
    options = {
        "causal": problem.causal,
        "window_size": window,
        "return_attn_probs": True,
        "backend": "hopper",
    }
    check_turns(lambda exact_lse: flash_attn_func(q, k, v, exact_lse=exact_lse, **options, **descales), exact)


@pytest.mark.parametrize("family", NAMED, ids=lambda family: family.name)
def test_packed_e4m3_tensors_with_descales(family: Family) -> None:
    problem, x = draw_cell("bf16-b3-s500-h4-hk2-d128-causal", family)
    codes, descales = scaled_by_head(x, problem)
    q, k, v = codes.q, codes.k, codes.v
    exact = naive_lse(from_descales(q, k, v, *descales.values(), torch.bfloat16), True)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    starts = torch.arange(4, dtype=torch.int32, device="cuda") * 500
    options = {"causal": True, "return_attn_probs": True, "backend": "hopper"}
    check_turns(
        lambda exact_lse: flash_attn_varlen_func(
            *rows, starts, starts, 500, 500, exact_lse=exact_lse, **options, **descales
        ),
        exact.transpose(0, 1).flatten(1, 2),
    )


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients(is_packed: bool) -> None:
    """Those of a call that returns the LSE, and of the LSE itself, are those of one that does not but for rounding.

    On N(0, 1): where one key has all the weight, as in other families, the gradient of Q is 0 but for rounding.
    """
    _, x = draw_cell(f"bf16-b1-s{sum(LENGTHS)}-h4-hk2-d128-causal", NAMED[0])
    given = [t[0] if is_packed else t for t in (x.q, x.k, x.v)]
    lengths = packed_lengths() if is_packed else {}
    parts = quantize_qkv(*given, **lengths)
    exact = packed_naive_lse(parts, True, FULL) if is_packed else naive_lse(parts, True)
    gradients = []
    for options in ({}, {"return_attn_probs": True}, {"return_attn_probs": True, "exact_lse": False}):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        of_call = {"causal": True, "quantization": parts.quantization, **options, **lengths}
        found = flash_attn_fp8_func(*leaves, **of_call)
        out, lse = found if options else (found, None)
        if lse is not None:
            assert error_of(lse.detach(), exact) <= (COARSE if "exact_lse" in options else EXACT)
            (of_lse,) = torch.autograd.grad(lse.sum(), leaves[0], retain_graph=True)
            assert bool(of_lse.isfinite().all()) and bool(of_lse.any())
        out.backward(torch.ones_like(out))
        gradients.append([t.grad.double() for t in leaves])
    for others in gradients[1:]:
        for found, base in zip(others, gradients[0], strict=True):
            assert rms(found - base) <= 0.1 * rms(base)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_graph_and_a_compiled_call(is_packed: bool) -> None:
    _, x = draw_cell(f"bf16-b1-s{sum(LENGTHS)}-h4-hk2-d128-causal", NAMED[1])
    given = [t[0] if is_packed else t for t in (x.q, x.k, x.v)]
    lengths = packed_lengths() if is_packed else {}
    static = [torch.randn_like(t) for t in given]

    def call() -> tuple[Tensor, Tensor]:
        return flash_attn_fp8_func(*static, None, True, True, **lengths)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for target, source in zip(static, given, strict=True):
        target.copy_(source)
    graph.replay()
    expected = call()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(), expected, strict=True))
