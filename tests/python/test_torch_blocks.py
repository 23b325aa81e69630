"""What products by blocks add to the backend "torch" on a CPU: windows, chunks, softcap, ALiBi, and large problems."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import explain, flash_attn_func, flash_attn_varlen_func
from hopper_attention.backends import Target
from hopper_attention.problem import AttentionProblem
from hopper_attention.reference import attention_naive
from hopper_attention.scores import ScoreKind
from hopper_attention.sdpa import attention, blocks, products
from hopper_attention.sdpa.blocks import Heads
from hopper_attention.sdpa.terms import Terms
from hopper_attention.torch_rules import why_not_torch
from tests.python.test_torch_backend import BUDGET, close, draw, with_gradients

SLOPES = torch.tensor([[0.5, 0.1, 0.3, 0.05], [0.0, 1.0, 0.2, 0.4]])
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "left": ((70, 70, 4, 2, 16, 24), {"causal": True, "window_size": (9, 0)}),
    "both sides": ((40, 90, 4, 2, 16, 16), {"window_size": (20, 3)}),
    "no keys": ((50, 20, 4, 4, 16, 16), {"causal": True, "window_size": (4, 0)}),
    "chunks": ((70, 90, 4, 1, 16, 16), {"causal": True, "attention_chunk": 16}),
    "softcap": ((33, 40, 4, 2, 16, 16), {"causal": True, "softcap": 2.0}),
    "slopes": ((33, 40, 4, 2, 16, 16), {"causal": True, "alibi_slopes": SLOPES}),
    "all": ((33, 40, 4, 2, 16, 16), {"window_size": (11, 5), "alibi_slopes": SLOPES[0], "softcap": 3.0}),
    "one query": ((1, 40, 4, 2, 16, 16), {"causal": True, "window_size": (9, 0)}),
}


def of_naive(options: dict[str, Any]) -> dict[str, Any]:
    """The same for ``attention_naive``."""
    left, right = options.get("window_size", (-1, -1))
    others = {name: value for name, value in options.items() if name != "window_size"}
    return others | {"window_left": left, "window_right": right}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few queries, several of which make a small problem."""
    monkeypatch.setattr(blocks, "GRID", 8)
    monkeypatch.setattr(blocks, "SCORES", 2**9)
    monkeypatch.setattr(products, "LEAST_WORK", 2**12)
    monkeypatch.setattr(blocks, "MUCH_WORK", 2**13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_float64(
    case: str, dtype: torch.dtype, small_blocks: None
) -> None:
    shape, options = CASES[case]
    leaves = [*draw(shape, dtype), torch.linspace(-1.0, 2.0, shape[2], requires_grad=True)]
    found = with_gradients(
        partial(flash_attn_func, return_attn_probs=True, backend="torch"), leaves, **options
    )
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = with_gradients(attention_naive, doubles, **of_naive(options))
    for a, b in zip(found, exact, strict=True):
        close(a, b, 4 * BUDGET[dtype])
    close(found[0], exact[0], BUDGET[dtype])
    close(found[1], exact[1], 1e-5)


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_large_problems_are_done_by_blocks(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with products of bfloat16, and with those of oneDNN, where a CPU would choose others."""
    monkeypatch.setattr(attention, "has_onednn", lambda: True)
    monkeypatch.setattr(products, "has_onednn", torch.backends.mkldnn.is_available)
    monkeypatch.setattr(blocks, "multiplies_bfloat16", lambda: has_bfloat16)
    for module in (attention, products):
        monkeypatch.setattr(module, "LEAST_WORK", 2**12)
    calls = []
    real = attention.attend_in_blocks
    monkeypatch.setattr(attention, "attend_in_blocks", lambda *given: calls.append(1) or real(*given))
    leaves = draw((40, 70, 4, 2, 32, 16), torch.bfloat16)
    ours = partial(flash_attn_func, return_attn_probs=True, backend="torch")
    found = with_gradients(ours, leaves, causal=True)
    exact = with_gradients(
        attention_naive, [x.detach().double().requires_grad_() for x in leaves], causal=True
    )
    assert calls == [1]
    for a, b in zip(found, exact, strict=True):
        close(a, b, 4 * BUDGET[torch.bfloat16])


def test_blocks_leave_out_the_keys_that_no_query_sees(small_blocks: None) -> None:
    def scores_of(terms: Terms, length: int) -> int:
        q = torch.zeros(1, length, 1, 8)
        sizes = [(b.rows, b.keys) for b in Heads.of(q, q, terms).blocks()]
        assert [rows.start for rows, _ in sizes] == sorted({rows.start for rows, _ in sizes})
        return sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in sizes)

    short, long = (scores_of(Terms(True, 1.0, (7, -1, 0)), n) for n in (128, 256))
    assert 1.9 < long / short < 2.2
    assert scores_of(Terms(False, 1.0), 128) == 128 * 128
    assert scores_of(Terms(True, 1.0), 128) < 0.7 * 128 * 128


def test_packed_sequences_have_windows_and_slopes_of_their_own() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(20, h, 16, generator=g).half().requires_grad_() for h in (4, 2, 2))
    cu = torch.tensor([0, 13, 14, 20], dtype=torch.int32)
    slopes = torch.rand(3, 4, generator=g)
    options: dict[str, Any] = {"causal": True, "window_size": (5, 0), "softcap": 4.0}
    out = flash_attn_varlen_func(q, k, v, cu, cu, 13, 13, alibi_slopes=slopes, backend="torch", **options)
    dout = torch.randn(out.shape, generator=g).half()
    found = torch.autograd.grad(out, (q, k, v), dout)
    for b, (first, last) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        one = [x.detach()[None, first:last].requires_grad_() for x in (q, k, v)]
        alone = flash_attn_func(*one, alibi_slopes=slopes[b], backend="torch", **options)
        assert (out[first:last] - alone[0]).abs().max() < 2e-3
        for a, e in zip(found, torch.autograd.grad(alone, one, dout[None, first:last]), strict=True):
            assert (a[first:last] - e[0]).abs().max() < 4e-3


def test_hidden_numbers_that_are_not_finite_stay_hidden() -> None:
    q, k, v = (x.detach() for x in draw((33, 33, 4, 2, 16, 16), torch.float16))
    options: dict[str, Any] = {"causal": True, "window_size": (4, 0), "backend": "torch"}
    clean = flash_attn_func(q, k, v, **options)
    k[:, 20], v[:, 20] = math.nan, math.inf
    found = flash_attn_func(q, k, v, **options)
    seen = slice(20, 25)
    assert bool(found[:, seen].isnan().all())
    assert (found[:, :20] - clean[:, :20]).abs().max() < 4e-3
    assert (found[:, 25:] - clean[:, 25:]).abs().max() < 4e-3


def test_what_serves_a_window_by_device() -> None:
    q, k, v = draw((33, 33, 4, 2, 16, 16), torch.float16)
    options = {"window_size": (3, 0), "softcap": 5.0, "alibi_slopes": torch.ones(4)}
    assert explain(q, k, v, **options).backend == "torch"
    kind = ScoreKind(has_softcap=True, has_alibi=True, has_dropout=True)
    problem = AttentionProblem(torch.float16, torch.float16, 16, 16, True, has_window=True, scores=kind)
    assert why_not_torch(problem, Target("cpu")) == "torch's fused attention has no dropout_p"
    lacking = "softcap and no alibi_slopes and no dropout_p and no window_size"
    assert why_not_torch(problem, Target("mps")) == f"torch's fused attention has no {lacking}"


def test_a_product_has_the_same_numbers_by_either_library(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 24, 16, generator=g), torch.randn(2, 40, 16, generator=g)
    exact: Tensor = a.double() @ b.mT.double()
    for least in (1, 2**40):
        monkeypatch.setattr(products, "LEAST_WORK", least)
        monkeypatch.setattr(products, "has_onednn", torch.backends.mkldnn.is_available)
        assert (products.rows_by_rows(a, b) - exact).abs().max() < 1e-5
        assert (products.rows_by_rows(a.mT.contiguous().mT, b) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("softcap", [0.5, 30.0, blocks.LARGEST_BY_SIGMOID, 1000.0])
def test_the_tanh_of_a_softcap_is_that_of_float64_from_no_score_to_the_largest(softcap: float) -> None:
    largest = torch.tensor([0.0, 1e-30, 3e38, -3e38, math.inf, -math.inf])
    x = torch.cat((torch.linspace(-400.0, 400.0, 4001), largest))
    found = blocks.tanh_of_share(x.clone(), softcap)
    assert float((found - torch.tanh(x.double() / softcap)).abs().max()) <= 2e-7
    assert found.abs().max() == 1.0


@pytest.mark.parametrize(("threads", "number"), [(1, 5), (20, 1)])
def test_blocks_grow_with_threads_and_results_stay(
    threads: int, number: int, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "threads_at_work", lambda: threads)
    q, k, v = (x.detach() for x in draw((70, 70, 4, 2, 16, 24), torch.bfloat16)[:3])
    terms = Terms(True, 0.25)
    assert len(list(Heads.of(q, k, terms).blocks())) == number
    out, lse = blocks.attend_in_blocks(q, k, v, terms)
    exact, exact_lse = attention_naive(q, k, v, causal=True, softmax_scale=0.25)
    assert float((out - exact).abs().max()) < 0.02 and float((lse - exact_lse).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("factor", "softcap", "is_small"), [(1.0, 0.0, True), (25.0, 0.0, False), (25.0, 30.0, True)]
)
def test_scores_of_any_size(factor: float, softcap: float, is_small: bool, small_blocks: None) -> None:
    """Small ones are exponentiated as they are; of large ones most lie 60 or more below the largest."""
    q, k, v = (x.detach() for x in draw((30, 70, 4, 2, 16, 24), torch.float16)[:3])
    terms = Terms(True, 1.0, softcap=softcap)
    assert Heads.of(factor * q, k, terms).are_small is is_small
    out, lse = blocks.attend_in_blocks(factor * q, k, v, terms)
    exact, exact_lse = attention_naive(factor * q, k, v, causal=True, softmax_scale=1.0, softcap=softcap)
    assert float((out - exact).abs().max()) < BUDGET[torch.float16]
    assert float((lse - exact_lse).abs().max()) < 1e-6 * float(exact_lse.abs().max()) + 1e-5


def test_slopes_have_no_bound() -> None:
    q, k = (x.detach() for x in draw((8, 8, 2, 2, 16, 16), torch.float16)[:2])
    assert not Heads.of(q, k, Terms(True, 0.1, alibi_slopes=torch.ones(2))).are_small
