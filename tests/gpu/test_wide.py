"""The kernel for wide values with a second query, ``qv``, on a GPU: dense and packed, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from hopper_attention import explain, flash_attn_func, flash_attn_varlen_func
from hopper_attention.reference import attention_naive
from tests.gpu.test_scores import errors_of, rules_of

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Inputs:
    """q and qv (batch, seqlen_q, heads, ...), k and v (batch, seqlen_k, kv_heads, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor


def draw(
    dtype: torch.dtype,
    seqlens: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int] = (64, 512),
    batch: int = 2,
) -> Inputs:
    """N(0, 1)."""
    generator = torch.Generator("cuda").manual_seed(sum(seqlens) + sum(dims))
    (sq, sk), (h, hk), (d, dv) = seqlens, heads, dims
    shapes = (batch, sq, h, d), (batch, sk, hk, d), (batch, sk, hk, dv), (batch, sq, h, dv)
    return Inputs(*(torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes))


SEQLENS = [
    (1, 1),
    (1, 700),
    (1, 65),
    (63, 64),
    (64, 65),
    (65, 63),
    (200, 130),
    (130, 200),
    (257, 1023),
    (1000, 1000),
]


@pytest.mark.parametrize("dims", [(64, 512), (64, 256), (40, 264), (8, 8)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_against_float64(causal: bool, dims: tuple[int, int]) -> None:
    failures = {}
    for i, seqlens in enumerate(SEQLENS):
        x = draw(DTYPES[i % 2], seqlens, [(2, 2), (4, 1), (6, 2)][i % 3], dims)
        out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, qv=x.qv, return_attn_probs=True)
        wrong = errors_of(x, out, lse, causal=causal, qv=x.qv)
        if wrong:
            failures[seqlens] = wrong
    assert failures == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 512), (24, 264)], ids=str)
def test_without_qv(causal: bool, dims: tuple[int, int]) -> None:
    failures = {}
    for i, seqlens in enumerate(SEQLENS):
        x = draw(DTYPES[i % 2], seqlens, [(2, 2), (4, 1), (6, 2)][i % 3], dims)
        out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
        wrong = errors_of(x, out, lse, causal=causal)
        if wrong:
            failures[seqlens] = wrong
    assert failures == {}


@pytest.mark.parametrize(("causal", "window"), [(True, (100, 0)), (False, (30, 70)), (False, (-1, 5))])
def test_windows(causal: bool, window: tuple[int, int]) -> None:
    for seqlens in ((300, 500), (500, 300)):
        x = draw(torch.bfloat16, seqlens, (2, 1))
        options = {"causal": causal, "qv": x.qv}
        out, lse = flash_attn_func(x.q, x.k, x.v, **options, window_size=window, return_attn_probs=True)
        assert errors_of(x, out, lse, **options, window_left=window[0], window_right=window[1]) == []


def test_chunks() -> None:
    x = draw(torch.bfloat16, (300, 500), (2, 1))
    options = {"causal": True, "qv": x.qv, "attention_chunk": 90}
    out, lse = flash_attn_func(x.q, x.k, x.v, **options, return_attn_probs=True)
    assert errors_of(x, out, lse, **options) == []


@pytest.mark.parametrize("names", ["softcap", "softcap alibi sinks"])
def test_changed_scores(names: str) -> None:
    for dtype in DTYPES:
        x = draw(dtype, (200, 300), (4, 2))
        options = rules_of(names, 2, 4, dtype) | {"causal": True, "qv": x.qv}
        out, lse = flash_attn_func(x.q, x.k, x.v, **options, return_attn_probs=True)
        assert errors_of(x, out, lse, **options) == []


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int().cuda()


PACKED = [
    ((70, 0, 130, 5, 1), (90, 33, 0, 200, 1)),
    ((64,) * 40, (64,) * 40),
    ((1,) * 9, tuple(range(0, 900, 100))),
]


@pytest.mark.parametrize(("rows", "keys"), PACKED)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(rows: tuple[int, ...], keys: tuple[int, ...], causal: bool) -> None:
    x = draw(torch.bfloat16, (sum(rows) + 11, sum(keys) + 7), (4, 2), batch=1)
    q, k, v, qv = (tensor[0] for tensor in (x.q, x.k, x.v, x.qv))
    for tensor, end in ((q, sum(rows)), (qv, sum(rows)), (k, sum(keys)), (v, sum(keys))):
        tensor[end:] = math.nan
    cu_q, cu_k = offsets(rows), offsets(keys)
    lengths = cu_q, cu_k, max(rows), max(keys)
    out, lse = flash_attn_varlen_func(q, k, v, *lengths, causal=causal, qv=qv, return_attn_probs=True)
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(rows)):
        own, seen = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        part = Inputs(q[None, own], k[None, seen], v[None, seen], qv[None, own])
        if rows[i]:
            assert errors_of(part, out[None, own], lse[None, :, own], causal=causal, qv=part.qv) == []
    assert bool((out[sum(rows) :] == 0).all() and (lse[:, sum(rows) :] == -math.inf).all())


def test_the_same_bits_in_every_run_and_with_fewer_sms() -> None:
    x = draw(torch.bfloat16, (1500, 3000), (16, 1))
    options = {"causal": True, "qv": x.qv, "return_attn_probs": True}
    first = flash_attn_func(x.q, x.k, x.v, **options)
    for i in range(20):
        again = flash_attn_func(x.q, x.k, x.v, **options, sm_margin=0 if i % 2 else 50)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_long_and_strided() -> None:
    """More blocks than stages, and inputs that are parts of larger tensors, as a latent and its rope part are."""
    generator = torch.Generator("cuda").manual_seed(1)
    queries = torch.randn(1, 300, 16, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, 9000, 1, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    qv, q, v, k = *queries.split((512, 64), 3), *keys.split((512, 64), 3)
    out, lse = flash_attn_func(q, k, v, causal=True, qv=qv, return_attn_probs=True)
    exact, exact_lse = attention_naive(q, k, v, causal=True, qv=qv)
    joined = attention_naive(torch.cat([q, qv], 3), torch.cat([k, v], 3), v, causal=True)[0]
    assert torch.equal(exact, joined)
    assert float((out.double() - exact).norm() / exact.norm()) < 2.0**-8
    assert float((lse.double() - exact_lse).abs().max()) < 2e-4
    assert explain(q, k, v, causal=True, qv=qv).copies == ()


def test_graph_and_compile() -> None:
    x = draw(torch.bfloat16, (128, 256), (4, 1))
    expected = flash_attn_func(x.q, x.k, x.v, causal=True, qv=x.qv)
    compiled = torch.compile(lambda q, k, v, qv: flash_attn_func(q, k, v, causal=True, qv=qv), fullgraph=True)
    assert torch.equal(compiled(x.q, x.k, x.v, x.qv), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(x.q, x.k, x.v, causal=True, qv=x.qv)
    x.qv.mul_(0.5)
    graph.replay()
    assert torch.equal(out, flash_attn_func(x.q, x.k, x.v, causal=True, qv=x.qv))
    assert not torch.equal(out, expected)


def test_many_tiles_of_every_size() -> None:
    for batch, heads, causal in product((1, 5), ((16, 1), (3, 3)), (False, True)):
        x = draw(torch.float16, (333, 444), heads, batch=batch)
        out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, qv=x.qv, return_attn_probs=True)
        assert errors_of(x, out, lse, causal=causal, qv=x.qv) == []


def test_a_single_query_of_many_heads() -> None:
    for heads, batch, seqlen_k in (((128, 1), 3, 2000), ((16, 2), 5, 77), ((130, 1), 2, 640)):
        x = draw(torch.bfloat16, (1, seqlen_k), heads, batch=batch)
        out, lse = flash_attn_func(x.q, x.k, x.v, causal=True, qv=x.qv, return_attn_probs=True)
        assert errors_of(x, out, lse, causal=True, qv=x.qv) == []


def test_a_backward_pass_is_refused() -> None:
    x = draw(torch.bfloat16, (64, 64), (2, 2))
    out = flash_attn_func(x.q.requires_grad_(), x.k, x.v, qv=x.qv)
    with pytest.raises(NotImplementedError, match="qv"):
        out.sum().backward()
