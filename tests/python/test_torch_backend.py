"""The backend "torch": torch's fused attention with this package's conventions, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    explain,
    explain_varlen,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
)
from hopper_attention.reference import attention_naive
from hopper_attention.sdpa import attention, operators, products
from hopper_attention.sdpa.attention import Piece, pieces_of
from hopper_attention.sdpa.terms import Terms

BUDGET = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error over the largest value; half a step of the dtype is a quarter of it."""

SHAPES = [
    # seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v
    (33, 33, 4, 2, 64, 64),
    (7, 40, 4, 4, 40, 64),
    (40, 7, 4, 2, 64, 32),
    (1, 33, 4, 1, 64, 64),
    (5, 1, 2, 2, 16, 16),
    (9, 12, 2, 1, 16, 304),
]


def draw(shape: tuple[int, ...], dtype: torch.dtype, batch: int = 2) -> list[Tensor]:
    seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v = shape
    g = torch.Generator().manual_seed(sum(shape))
    sizes = (seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim), (seqlen_k, kv_heads, head_dim_v)
    return [torch.randn(batch, *size, generator=g).to(dtype).requires_grad_() for size in sizes]


def close(ours: Tensor, exact: Tensor, budget: float) -> None:
    """Errors are within budget where numbers are finite, and elsewhere both are the same."""
    finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), finite) and torch.equal(ours[~finite].double(), exact[~finite])
    error = (ours.double() - exact)[finite].abs().max()
    assert error <= budget * exact[finite].abs().max().clamp(min=1.0)


def with_gradients(attend: Callable[..., Any], leaves: list[Tensor], **options: Any) -> list[Tensor]:
    """out, lse and the gradients of both to all leaves: q, k, v and perhaps sinks."""
    q, k, v, *sinks = leaves
    out, lse = attend(q, k, v, sinks=sinks[0] if sinks else None, **options)
    g = torch.Generator().manual_seed(3)
    dout, dlse = (torch.randn(x.shape, generator=g).to(x.dtype) for x in (out, lse))
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    loss = (out * dout).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    for sinks in ([], [torch.linspace(-1.0, 2.0, shape[2], requires_grad=True)]):
        leaves = [*draw(shape, dtype), *sinks]

        ours = partial(flash_attn_func, return_attn_probs=True, backend="torch")

        found = with_gradients(ours, leaves, causal=causal)
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        exact = with_gradients(attention_naive, doubles, causal=causal)
        # dout and dlse are drawn in the dtype of each.
        for a, b in zip(found, exact, strict=True):
            close(a, b, 4 * BUDGET[dtype])
        close(found[0], exact[0], BUDGET[dtype])
        close(found[1], exact[1], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cpu_that_multiplies_tiles_makes_outputs_in_bfloat16(
    shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in float16, and an LSE and gradients in float32."""
    monkeypatch.setattr(products, "has_tiles", lambda: True)
    for module in (attention, operators):
        monkeypatch.setattr(module, "has_tiles", lambda: True)
    chosen: list[str] = []

    def note(*given: Any) -> operators.Operators:
        chosen.append(real(*given).name)
        return real(*given)

    real = attention.operators_for
    monkeypatch.setattr(attention, "operators_for", note)
    leaves = [*draw(shape, torch.bfloat16), torch.linspace(-1.0, 2.0, shape[2], requires_grad=True)]
    q, k, v, sinks = (x.detach() for x in leaves)
    out = flash_attn_func(q, k, v, causal=causal, sinks=sinks, backend="torch")
    assert set(chosen) == {operators.TILES.name}
    exact, _ = attention_naive(*(x.double() for x in (q, k, v)), causal=causal, sinks=sinks.double())
    close(out, exact, BUDGET[torch.bfloat16])
    chosen.clear()
    ours = partial(flash_attn_func, return_attn_probs=True, backend="torch")
    found = with_gradients(ours, leaves, causal=causal)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    for a, b in zip(found, with_gradients(attention_naive, doubles, causal=causal), strict=True):
        close(a, b, 4 * BUDGET[torch.bfloat16])
    flash_attn_func(*draw(shape, torch.float16), causal=causal, backend="torch")
    assert set(chosen) == {operators.CPU.name}


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows with a gap": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "every second column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "columns first": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "rows last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("window", [(-1, -1), (7, 0)])
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("has_tiles", [False, True])
def test_outputs_are_right_whatever_the_strides(
    has_tiles: bool, layout: str, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, attention, operators):
        monkeypatch.setattr(module, "has_tiles", lambda: has_tiles)
    q, k, v = (x.detach() for x in draw((40, 70, 4, 2, 64, 64), torch.bfloat16))
    sides = {"window_left": window[0], "window_right": window[1]}
    exact, _ = attention_naive(*(x.double() for x in (q, k, v)), causal=True, **sides)
    strided = [STRIDED[layout](x) for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in strided)
    out = flash_attn_func(*strided, causal=True, window_size=window, backend="torch")
    close(out, exact, BUDGET[torch.bfloat16])


@pytest.mark.parametrize("layout", STRIDED)
def test_float32_is_right_whatever_the_strides(layout: str) -> None:
    q, k, v = (x.detach() for x in draw((40, 70, 4, 2, 64, 64), torch.float32))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = with_gradients(attention_naive, exact, causal=True)
    g = torch.Generator().manual_seed(3)
    dout, dlse = (torch.randn(x.shape, generator=g) for x in wanted[:2])
    terms, (q, k, v, dout) = Terms(True, 0.125), map(STRIDED[layout], (q, k, v, dout))
    out, lse = attention.attend(q, k, v, terms)
    gradients = attention.differentiate(dout, dlse, q, k, v, STRIDED[layout](out), lse, terms)
    for found, right in zip((out, lse, *gradients), wanted, strict=True):
        close(found, right.detach(), 1e-5)


@pytest.mark.parametrize("threads", [1, 64])
def test_gradients_of_shared_heads_are_the_same_however_many_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators.torch, "get_num_threads", lambda: threads)
    leaves = draw((33, 40, 8, 2, 16, 16), torch.bfloat16)
    ours = partial(flash_attn_func, return_attn_probs=True, backend="torch")
    found = with_gradients(ours, leaves, causal=True)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    for a, b in zip(found, with_gradients(attention_naive, doubles, causal=True), strict=True):
        close(a, b, 4 * BUDGET[torch.bfloat16])


def test_it_is_what_a_cpu_runs() -> None:
    q, k, v = draw(SHAPES[0], torch.bfloat16)
    expected = flash_attn_func(q, k, v, causal=True, backend="torch")
    assert torch.equal(flash_attn_func(q, k, v, causal=True), expected)
    assert not torch.equal(flash_attn_func(q, k, v, causal=True, backend="reference"), expected)
    plan = explain(q, k, v)
    assert (plan.backend, plan.config.name) == ("torch", "torch_sdpa")


def test_a_query_without_a_key_gives_zero() -> None:
    q, k, v = draw((6, 2, 2, 2, 16, 16), torch.float16)
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, backend="torch")
    assert (
        not out[:, :4].any()
        and bool((lse[..., :4] == -math.inf).all())
        and bool(lse[..., 4:].isfinite().all())
    )
    for gradient in torch.autograd.grad(out.float().square().sum() + lse[..., 4:].sum(), (q, k, v)):
        assert bool(gradient.isfinite().all())
    sinks = torch.tensor([1.0, -math.inf])
    out, lse = flash_attn_func(q, k, v, causal=True, sinks=sinks, return_attn_probs=True, backend="torch")
    assert not out[:, :4].any() and torch.equal(lse[0, :, 0], sinks)


def test_the_pieces_see_what_the_mask_shows() -> None:
    for seqlen_q, seqlen_k in ((5, 5), (3, 7), (7, 3), (1, 4), (4, 1)):
        seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
        for piece in pieces_of(seqlen_q, seqlen_k, True):
            part = torch.ones_like(seen[piece.rows, piece.keys])
            seen[piece.rows, piece.keys] += part.tril() if piece.causal else part
            assert not piece.causal or part.shape[0] == part.shape[1]
        assert torch.equal(seen, torch.ones_like(seen).tril(seqlen_k - seqlen_q))
    assert pieces_of(3, 7, False) == (Piece(0, 0, 7, False),)


def test_packed_sequences_are_calls_of_their_own() -> None:
    rows, keys = (0, 4, 4, 9, 12), (0, 6, 8, 8, 15)
    g = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, h, 16, generator=g).half().requires_grad_() for n, h in ((14, 4), (16, 2), (16, 2))
    )
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (rows, keys))
    used = torch.tensor([5, 2, 0, 1], dtype=torch.int32)
    with torch.no_grad():
        k[5], v[15], q[13] = math.nan, math.inf, math.nan
    options: dict[str, Any] = {"seqused_k": used, "causal": True, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, **options)
    dout = torch.randn(out.shape, generator=g).half()
    found = torch.autograd.grad(out, (q, k, v), dout)
    for i in range(4):
        s, t = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i] + int(used[i]))
        one = [x.detach()[None, span].requires_grad_() for x, span in ((q, s), (k, t), (v, t))]
        alone, alone_lse = flash_attn_func(*one, causal=True, return_attn_probs=True)
        assert torch.equal(out[s], alone[0]) and torch.equal(lse[:, s], alone_lse[0])
        for mine, span, theirs in zip(
            found, (s, t, t), torch.autograd.grad(alone, one, dout[None, s]), strict=True
        ):
            assert torch.equal(mine[span], theirs[0])
    assert not out[12:].any() and bool((lse[:, 12:] == -math.inf).all())
    assert not found[0][12:].any() and not found[1][5].any() and not found[2][15].any()
    assert explain_varlen(q, k, v, cu_q, cu_k, 5, 7).backend == "torch"


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"dropout_p": 0.5}, "dropout_p"),
        ({"score_mod": lambda s, b, h, q, k: s * 0.5}, "score_mod"),
    ],
)
def test_what_it_lacks_is_the_references(options: dict[str, Any], lacking: str) -> None:
    q, k, v = draw(SHAPES[0], torch.float16)
    plan = explain(q, k, v, **options)
    assert plan.backend == "reference"
    assert plan.reason == f"cpu is not an NVIDIA GPU, and torch's fused attention has no {lacking}"
    torch.manual_seed(0)
    ours = flash_attn_func(q, k, v, **options)
    torch.manual_seed(0)
    assert torch.equal(ours, flash_attn_func(q, k, v, backend="reference", **options))
    with pytest.raises(NotImplementedError, match=rf"has no {lacking}; use backend='reference' or None"):
        flash_attn_func(q, k, v, backend="torch", **options)


def test_fp8_stays_an_emulation() -> None:
    q, k, v = (x.detach() for x in draw((16, 16, 2, 2, 32, 32), torch.bfloat16))
    ours = flash_attn_fp8_func(q, k, v)
    assert torch.equal(ours, flash_attn_fp8_func(q, k, v, backend="reference"))
    with pytest.raises(NotImplementedError, match="'torch', which has no FP8; use backend='reference'"):
        flash_attn_fp8_func(q, k, v, backend="torch")


def test_numbers_that_are_not_finite() -> None:
    q, k, v = (x.detach() for x in draw(SHAPES[0], torch.float16))
    clean = flash_attn_func(q, k, v, causal=True, backend="torch")
    k[:, 20:], v[:, 20:] = math.nan, math.inf
    found = flash_attn_func(q, k, v, causal=True, backend="torch")
    assert (found[:, :20] - clean[:, :20]).abs().max() < 4e-3 and bool(found[:, 20:].isnan().all())
    q[0, 2, 1] = math.inf
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = flash_attn_func(q, k[:, :20], v[:, :20], return_attn_probs=True, backend="torch")
    assert bool(out[0, 2, 1].isnan().all()) and not bool(lse[0, 1, 2].isfinite())
    dq, dk = torch.autograd.grad(out.float().sum(), (q, k))
    assert bool(dq[0, 2, 1].isnan().all() and dk[0, 0, 0].isnan().all())
    assert bool(dq[0, 3].isfinite().all() and dk[1].isfinite().all())


@pytest.mark.parametrize("causal", [False, True])
def test_the_public_function_gives_the_same(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on devices without an operator of their own, here on a CPU."""
    q, k, v = draw((7, 12, 4, 2, 24, 16), torch.float16)
    expected = with_gradients(flash_attn_func, [q, k, v], causal=causal, return_attn_probs=True)
    monkeypatch.setattr(attention, "operators_for", lambda *given: operators.PUBLIC)
    monkeypatch.setattr(operators, "LSE_ROWS", 3)
    found = with_gradients(flash_attn_func, [q, k, v], causal=causal, return_attn_probs=True)
    for a, b in zip(found, expected, strict=True):
        close(a, b.double(), 4 * BUDGET[torch.float16])


def test_the_operators_of_gpus_get_whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator of FlashAttention-2 takes as many key heads as query heads; one of a CPU stands in for it here."""
    calls = []

    class Aten:
        @staticmethod
        def _scaled_dot_product_flash_attention(q, k, v, p, causal, scale):
            calls.append((k.shape[1], v.shape[1]))
            return (
                *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale),
                None,
            )

        @staticmethod
        def _scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, scale
        ):
            assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return backward(dout, q, k, v, out, lse, p, causal, scale=scale)

    q, k, v = draw((8, 12, 4, 2, 16, 16), torch.bfloat16)
    expected = flash_attn_func(q, k, v, causal=True)
    wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    monkeypatch.setattr(attention, "operators_for", lambda *given: operators.FLASH)
    monkeypatch.setattr(operators, "aten", Aten)
    out = flash_attn_func(q, k, v, causal=True)
    assert calls == [(4, 4), (4, 4)]
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for a, b in zip((out, *found), (expected, *wanted), strict=True):
        close(a.detach(), b.detach().double(), 4 * BUDGET[torch.bfloat16])
