"""Softcap and sinks of e4m3 tensors with descales on a GPU, dense and packed, under windows too: against float64 of
what the tensors stand for. Calls on a cache are in ``test_cache_tiles``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import explain, explain_varlen, flash_attn_func, flash_attn_varlen_func
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
OF_DESCALES = "q_descale", "k_descale", "v_descale"
ERROR, LSE_ERROR = 6e-2, 5e-2
"""Of an output, as a share of it, and of its LSE."""

HEAD_DIMS = 64, 80, 128, 192, 256
HEADS = (4, 4), (8, 2), (10, 2)
"""Of Q and of K and V: 1, 4 and 5 share one."""

MASKS = (False, (-1, -1)), (True, (-1, -1)), (False, (100, 30)), (True, (100, -1))
CHANGES: dict[str, tuple[float, bool]] = {
    "softcap of 15": (15.0, False),
    "softcap of 50": (50.0, False),
    "sinks": (0.0, True),
    "both": (15.0, True),
}
"""Softcap, and whether there are sinks."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Each test compiles the kernels that it needs."""


@dataclass(frozen=True)
class Call:
    """A call: what is masked and done to scores."""

    change: str
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0

    def given(self, heads: int) -> dict[str, Any]:
        """Arguments of the public functions."""
        softcap, has_sinks = CHANGES[self.change]
        options: dict[str, Any] = {"causal": self.causal, "window_size": self.window, "softcap": softcap}
        if self.chunk:
            options["attention_chunk"] = self.chunk
        return options | ({"sinks": sinks_of(heads)} if has_sinks else {})

    def exact(self, *values: Tensor) -> tuple[Tensor, Tensor]:
        softcap, has_sinks = CHANGES[self.change]
        sinks = sinks_of(values[0].shape[2]) if has_sinks else None
        sides = {"window_left": self.window[0], "window_right": self.window[1]}
        options: dict[str, Any] = sides | {"attention_chunk": self.chunk, "softcap": softcap, "sinks": sinks}
        return attention_naive(*values, causal=self.causal, **options)


def sinks_of(heads: int) -> Tensor:
    """Ordinary ones, none, and one that leaves keys very little."""
    return torch.tensor(((0.5, -math.inf, 30.0, -3.0, 2.0) * heads)[:heads], device="cuda")


def codes(shape: tuple[int, ...], seed: int, peak: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (peak * torch.randn(shape, generator=generator, device="cuda")).to(E4M3)


def descales(batch: int, kv_heads: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(9)
    shape = batch, kv_heads
    return {name: torch.rand(shape, generator=generator, device="cuda") + 0.5 for name in OF_DESCALES}


def whole(tensors: list[Tensor], factors: dict[str, Tensor]) -> list[Tensor]:
    """Data times descale, (batch, rows, heads, head_dim), in float64."""
    found = []
    for x, factor in zip(tensors, factors.values(), strict=True):
        of_heads = factor.double().repeat_interleave(x.shape[2] // factor.shape[1], 1)
        found.append(x.double() * of_heads[:, None, :, None])
    return found


def wrong_of(out: Tensor, lse: Tensor, exact: tuple[Tensor, Tensor]) -> list[Any]:
    """What is wrong with results of (batch, rows, heads, columns), head by head."""
    (exact_out, exact_lse), wrong = exact, []
    error, size = (x.square().sum((0, 1, 3)).sqrt() for x in (out.double() - exact_out, exact_out))
    if not bool((error <= ERROR * size).all()):
        wrong.append(("out", (error / size).tolist()))
    seen, is_zero = exact_lse > -math.inf, (exact_out == 0).all(-1)
    if bool(out[is_zero].any()) or bool((lse[~seen] != -math.inf).any()):
        wrong.append("rows that see no key")
    off = (lse.double() - exact_lse)[seen].abs()
    if not bool((off <= LSE_ERROR).all()):
        wrong.append(("lse", float(off.max())))
    return wrong


def results_of(function: Any, tensors: list[Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse, and out without the LSE, which another kernel may make; each of the same bits twice."""
    with_lse = {"return_attn_probs": True, "exact_lse": False}
    out, lse, *_ = function(*tensors, **given, **with_lse)
    again, again_lse, *_ = function(*tensors, **given, **with_lse)
    without, without_again = (function(*tensors, **given) for _ in range(2))
    assert torch.equal(out, again) and torch.equal(lse, again_lse) and torch.equal(without, without_again)
    assert out.dtype == without.dtype == torch.bfloat16 and lse.dtype == torch.float32
    return out, lse, without


def check_dense(
    call: Call,
    heads: tuple[int, int],
    seqlens: tuple[int, int],
    head_dims: tuple[int, int],
    peak: float = 1.0,
) -> list[Any]:
    """What is wrong with a batch of two."""
    (rows, keys), (head_dim, head_dim_v) = seqlens, head_dims
    tensors = [
        codes((2, rows, heads[0], head_dim), 0, peak),
        codes((2, keys, heads[1], head_dim), 1),
        codes((2, keys, heads[1], head_dim_v), 2),
    ]
    given = descales(2, heads[1]) | call.given(heads[0])
    config: Any = explain(*tensors, **given).config
    assert (config.softcap, config.sinks) == (given["softcap"] > 0, "sinks" in given)
    out, lse, without = results_of(flash_attn_func, tensors, given)
    exact = call.exact(*whole(tensors, descales(2, heads[1])))
    return wrong_of(out, lse, exact) + wrong_of(without, lse, exact)


SEQLENS = (113, 203), (203, 113), (700, 1025), (1, 333)
"""Of many rows V is transposed before, and of few on its way."""


@pytest.mark.parametrize("peak", [1.0, 6.0])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dense_tensors(head_dim: int, change: str, peak: float) -> None:
    failures = {}
    for heads, seqlens, (causal, window) in product(HEADS, SEQLENS, MASKS):
        call = Call(change, causal, window)
        wrong = check_dense(call, heads, seqlens, (head_dim, head_dim), peak)
        if wrong:
            failures[heads, seqlens, causal, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dims", [(64, 128), (192, 128), (128, 256), (256, 64)], ids=str)
def test_head_dims_that_differ(head_dims: tuple[int, int]) -> None:
    for causal in (False, True):
        assert check_dense(Call("both", causal), (8, 2), (333, 700), head_dims) == []


@pytest.mark.parametrize("change", CHANGES)
def test_chunks(change: str) -> None:
    for causal, seqlens in product((False, True), SEQLENS):
        assert check_dense(Call(change, causal, chunk=100), (8, 2), seqlens, (128, 128)) == []


LENGTHS = (200, 1, 0, 333, 900), (260, 40, 33, 0, 1500)
"""Queries and keys of each sequence."""
BEHIND = 7


def check_packed(call: Call, heads: tuple[int, int], head_dim: int, peak: float = 1.0) -> list[Any]:
    """What is wrong with sequences of ``LENGTHS``, each by itself; rows of none, which are NaN, are 0 and -inf."""
    starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device="cuda") for n in LENGTHS]
    totals = [sum(n) + BEHIND for n in LENGTHS]
    rows = (totals[0], heads[0]), (totals[1], heads[1]), (totals[1], heads[1])
    tensors = [codes((*n, head_dim), seed, peak if seed == 0 else 1.0) for seed, n in enumerate(rows)]
    for x in tensors:
        x.view(torch.uint8)[-BEHIND:] = 0x7F
    factors, batch = descales(len(LENGTHS[0]), heads[1]), range(len(LENGTHS[0]))
    given = factors | call.given(heads[0])
    given |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    given |= {"max_seqlen_q": max(LENGTHS[0]), "max_seqlen_k": max(LENGTHS[1])}
    config: Any = explain_varlen(*tensors, **given).config
    assert config.layout == "varlen" and config.softcap == (given["softcap"] > 0)
    out, lse, without = results_of(flash_attn_varlen_func, tensors, given)
    wrong: list[Any] = []
    ends = [[0, *accumulate(n)] for n in LENGTHS]
    for b in batch:
        own, keys = (slice(of[b], of[b + 1]) for of in ends)
        if own.start == own.stop:
            continue
        of_one = [x[None, part] for x, part in zip(tensors, (own, keys, keys), strict=True)]
        if keys.start == keys.stop:
            empty = given.get("sinks", torch.full((heads[0],), -math.inf, device="cuda"))
            is_right = not out[own].any() and torch.allclose(lse[:, own], empty[:, None], rtol=1e-5)
            found = [] if is_right else ["rows without keys"]
        else:
            exact = call.exact(*whole(of_one, {name: x[b : b + 1] for name, x in factors.items()}))
            of_lse = lse[None, :, own]
            found = wrong_of(out[None, own], of_lse, exact) + wrong_of(without[None, own], of_lse, exact)
        wrong += [(b, found)] if found else []
    if (
        bool(out[-BEHIND:].any())
        or bool(without[-BEHIND:].any())
        or bool((lse[:, -BEHIND:] != -math.inf).any())
    ):
        wrong.append("rows of no sequence are not 0 with LSE -inf")
    return wrong


@pytest.mark.parametrize("peak", [1.0, 6.0])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_sequences(head_dim: int, change: str, peak: float) -> None:
    failures = {}
    for heads, (causal, window) in product(HEADS, MASKS):
        wrong = check_packed(Call(change, causal, window), heads, head_dim, peak)
        if wrong:
            failures[heads, causal, window] = wrong
    assert failures == {}


def test_chunks_of_packed_sequences() -> None:
    for change, causal in product(CHANGES, (False, True)):
        assert check_packed(Call(change, causal, chunk=100), (8, 2), 128) == []


def test_a_graph_takes_other_sinks() -> None:
    """Values of sinks are read when a graph is replayed."""
    tensors = [codes((2, 333, heads, 128), seed) for seed, heads in enumerate((8, 2, 2))]
    call, factors = Call("both", causal=True), descales(2, 2)
    given = factors | call.given(8)
    flash_attn_func(*tensors, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(*tensors, **given)
    given["sinks"].copy_(torch.linspace(-3, 5, 8))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, flash_attn_func(*tensors, **given))


@pytest.mark.filterwarnings("ignore:FP8 attention in 16 bits")
def test_16_bits_still_serve_an_exact_lse() -> None:
    """The same values, dequantized: as near to float64 as 16 bits come."""
    tensors = [codes((2, 333, heads, 128), seed) for seed, heads in enumerate((8, 2, 2))]
    call, factors = Call("both", causal=True), descales(2, 2)
    out, lse, *_ = flash_attn_func(*tensors, **factors, **call.given(8), return_attn_probs=True)
    exact, exact_lse = call.exact(*whole(tensors, factors))
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()
    assert (lse.double() - exact_lse).abs().max() <= 2e-2
