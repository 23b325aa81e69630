"""Windows by torch's fused attention for CPUs, as bands, and its backward pass shared out to threads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func
from hopper_attention.reference import attention_naive
from hopper_attention.sdpa import attention, bands, operators, shares
from hopper_attention.sdpa.bands import Bands
from hopper_attention.sdpa.terms import Terms
from tests.python.test_torch_backend import BUDGET, close, draw, with_gradients
from tests.python.test_torch_blocks import CASES, of_naive

WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    name: CASES[name] for name in ("left", "both sides", "no keys")
} | {
    "many bands": ((700, 700, 4, 2, 32, 32), {"causal": True, "window_size": (63, 0)}),
    "wide": ((300, 700, 4, 4, 32, 40), {"causal": True, "window_size": (200, 0)}),
    "more queries": ((700, 300, 4, 1, 32, 40), {"window_size": (100, 7)}),
    "last keys alone": ((130, 700, 4, 1, 32, 40), {"causal": True, "window_size": (5, 0)}),
}


@pytest.fixture
def in_bands(monkeypatch: pytest.MonkeyPatch) -> list[Bands]:
    """A CPU on which they are the fastest; the bands of the calls that took them."""
    monkeypatch.setattr(attention, "has_onednn", lambda: False)
    found = []
    for name in ("attend_in_bands", "differentiate_in_bands"):
        real = getattr(attention, name)

        def call(*given: Any, real: Any = real) -> Any:
            found.extend(x for x in given if isinstance(x, Bands))
            return real(*given)

        monkeypatch.setattr(attention, name, call)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", WINDOWS)
def test_results_and_gradients_are_those_of_float64(
    case: str, dtype: torch.dtype, in_bands: list[Bands]
) -> None:
    """With sinks, whose rows without keys have a LSE that is finite."""
    shape, options = WINDOWS[case]
    leaves = [*draw(shape, dtype), torch.linspace(-1.0, 2.0, shape[2], requires_grad=True)]
    ours = partial(flash_attn_func, return_attn_probs=True, backend="torch")
    found = with_gradients(ours, leaves, **options)
    assert len(in_bands) == 2
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = with_gradients(attention_naive, doubles, **of_naive(options))
    for a, b in zip(found, exact, strict=True):
        close(a, b, 4 * BUDGET[dtype])
    close(found[0], exact[0], BUDGET[dtype])
    close(found[1], exact[1], 1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"alibi_slopes": torch.ones(2)}])
def test_only_plain_scores_go_in_bands(options: dict[str, Any], in_bands: list[Bands]) -> None:
    q, k, v = (x.detach() for x in draw((33, 33, 2, 2, 16, 16), torch.float16))
    ours = partial(flash_attn_func, q, k, v, window_size=(4, 2), backend="torch", **options)
    exact = of_naive({"window_size": (4, 2), **options})
    close(ours(), attention_naive(q.double(), k.double(), v.double(), **exact)[0], BUDGET[torch.float16])
    assert len(in_bands) == (not options)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "terms"),
    [
        (64, 64, Terms(True, 1.0)),
        (64, 64, Terms(True, 1.0, (64, 0, 0))),
        (64, 64, Terms(False, 1.0, (3, -1, 0))),
        (64, 64, Terms(True, 1.0, (3, 0, 16))),
    ],
)
def test_what_has_no_bands(seqlen_q: int, seqlen_k: int, terms: Terms) -> None:
    """No window, one as long as the keys, one of one side, and chunks."""
    assert Bands.of(seqlen_q, seqlen_k, terms) is None


def test_a_mask_that_is_too_large_is_left_to_blocks(
    in_bands: list[Bands], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, _ = (x.detach() for x in draw((200, 200, 2, 1, 16, 16), torch.float16))
    terms = Terms(True, 1.0, (9, 0, 0))
    found = attention.find_bands(q, k, terms)
    assert found is not None and (found.rows, found.number, found.span) == (128, 2, 137)
    monkeypatch.setattr(bands, "MOST_MASKED", 2 * 128 * 137 * 2 - 1)
    assert attention.find_bands(q, k, terms) is None
    assert attention.find_bands(k, k, terms) is not None
    monkeypatch.setattr(attention, "has_onednn", lambda: True)
    monkeypatch.setattr(attention, "has_tiles", lambda: False)
    assert attention.find_bands(k, k, terms) is None


def test_a_default_device_moves_nothing(in_bands: list[Bands]) -> None:
    """Scripts set one for what they make themselves."""
    q, k, v = (torch.randn(1, 300, 2, 32).bfloat16() for _ in range(3))
    expected = flash_attn_func(q, k, v, window_size=(20, 0), backend="torch")
    with torch.device("meta"):
        found = flash_attn_func(q, k, v, window_size=(20, 0), backend="torch")
    assert in_bands and torch.equal(found, expected)


def test_slices_of_keys_share_their_memory_and_their_sums_are_of_each_key() -> None:
    found = Bands.of(150, 170, Terms(True, 1.0, (20, 0, 0)))
    assert found is not None
    k = torch.randn(2, 170, 3, 8)
    cut = found.cut_keys(k, torch.float32, 8)
    assert cut.shape == (6, found.number, found.span, 8)
    assert cut.untyped_storage().nbytes() == 4 * 6 * found.total * 8
    times = found.add_keys(torch.ones_like(cut), 2)
    assert torch.equal(found.add_keys(cut, 2), k * times)
    rows = torch.randn(2, 150, 6, 8)
    assert torch.equal(found.join_rows(found.cut_rows(rows, 3, torch.float32, 8), 2, 2), rows)


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k", "causal", "threads"),
    [
        (1, 2, 512, 512, True, 16),
        (2, 1, 515, 515, True, 7),
        (1, 2, 515, 300, False, 16),
        (1, 1, 257, 257, True, 3),
        (1, 3, 130, 130, True, 16),
    ],
)
def test_a_backward_pass_is_the_same_for_many_threads(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call has at least as many heads as threads, where parts are long enough, and none has more scores."""
    g = torch.Generator().manual_seed(seqlen_q)
    q, dout = (torch.randn(batch, heads, seqlen_q, 16, generator=g) for _ in range(2))
    k, v = (torch.randn(batch, heads, seqlen_k, 16, generator=g) for _ in range(2))
    out, lse = operators.CPU.attend(q, k, v, causal, 0.25)
    calls: list[tuple[int, ...]] = []

    def backward(rows: shares.Rows, k: Tensor, v: Tensor, causal: bool) -> shares.Gradients:
        calls.append((*rows[1].shape[:3], k.shape[2]))
        given = (*rows[:2], k, v, *rows[2:])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, causal, scale=0.25
        )
        return dq, dk, dv

    rows = dout, q, out, lse
    expected = backward(rows, k, v, causal)
    calls.clear()
    found = shares.share_out(backward, rows, k, v, causal, threads)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 4e-6
    rows_of_calls = [rows for _, _, rows, _ in calls]
    assert all(b * h >= threads or rows < 2 * shares.LEAST_ROWS for b, h, rows, _ in calls)
    assert len(calls) == 1 or max(rows_of_calls) < seqlen_q
    if not math.log2(seqlen_q) % 1 and causal:
        scores = sum(b * h * rows * keys for b, h, rows, keys in calls)
        assert scores < batch * heads * seqlen_q * seqlen_k
