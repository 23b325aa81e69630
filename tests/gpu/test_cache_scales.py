"""Caches of e4m3 with scales by token or by page, and keys rotated by a Hadamard matrix, against float64.

What is no key is NaN, in the caches and in their scales.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import explain_kvcache, flash_attn_with_kvcache
from hopper_attention.kvcache_rotation import rotate_keys, rotate_queries_alike
from hopper_attention.masks import UNLIMITED
from hopper_attention.reference import attention_naive, attention_standard
from tests.gpu.test_e4m3_cache import FP8, Keys, draw_keys
from tests.python.kvcache_cases import CacheCase
from tests.python.test_kvcache_scales import BY_PAGE, BY_TOKEN, check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Each test compiles the few kernels that it needs."""


def draw_scales(keys: Keys, kind: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Scales of K and V, NaN where no key is, and those of the keys of each sequence, (keys, kv_heads)."""
    pages, page_size, kv_heads, _ = keys.k.shape
    generator, tensors, found = torch.Generator("cuda").manual_seed(5), [], []
    for _ in range(2):
        shape = pages, 1 if kind == BY_PAGE else page_size, kv_heads
        drawn = 4.0 ** (2.0 * torch.rand(shape, generator=generator, device="cuda") - 2.0)
        given, of_sequences = torch.full_like(drawn, math.nan), []
        for number, length in enumerate(keys.lengths.tolist()):
            rows = torch.arange(length, device="cuda")
            places = keys.table[number].long()[rows // page_size], rows % page_size % shape[1]
            given[places] = drawn[places]
            of_sequences.append(drawn[places])
        tensors.append(given)
        found.append(of_sequences)
    return tensors, found


@pytest.mark.parametrize("kind", [BY_TOKEN, BY_PAGE])
@pytest.mark.parametrize(
    ("dims", "heads", "queries", "of_queries", "page_size", "mask"),
    [
        ((128, 128), (8, 2), 1, torch.bfloat16, 64, "causal"),
        ((128, 128), (2, 2), 1, torch.bfloat16, 16, "window"),
        ((64, 64), (8, 1), 1, torch.bfloat16, 64, "causal"),
        ((96, 64), (16, 2), 2, FP8, 24, "window"),
        ((192, 128), (4, 1), 4, torch.bfloat16, 256, "causal"),
        ((256, 256), (8, 2), 3, torch.bfloat16, 8, "causal"),
        ((128, 128), (32, 1), 1, torch.bfloat16, 64, "causal"),
        ((128, 128), (8, 1), 7, torch.bfloat16, 32, "window"),
        ((64, 64), (8, 1), 9, torch.bfloat16, 64, "causal"),
        ((128, 128), (8, 2), 1, torch.float16, 64, "window"),
    ],
    ids=str,
)
def test_decoding(
    dims: tuple[int, int],
    heads: tuple[int, int],
    queries: int,
    of_queries: torch.dtype,
    page_size: int,
    mask: str,
    kind: str,
) -> None:
    """The last has queries that the kernel does not take; before it, rows of several tiles."""
    check_decoding(dims, heads, queries, of_queries, page_size, mask, kind)


@pytest.mark.parametrize("kind", [BY_TOKEN, BY_PAGE])
@pytest.mark.parametrize(
    ("dims", "heads", "queries", "of_queries", "page_size", "mask"),
    [
        ((128, 128), (8, 2), 1, torch.bfloat16, 64, "causal"),
        ((64, 64), (8, 1), 1, FP8, 16, "window"),
        ((256, 256), (8, 2), 3, torch.bfloat16, 64, "causal"),
        ((128, 128), (8, 1), 7, torch.bfloat16, 32, "window"),
    ],
    ids=str,
)
def test_a_softcap(
    dims: tuple[int, int],
    heads: tuple[int, int],
    queries: int,
    of_queries: torch.dtype,
    page_size: int,
    mask: str,
    kind: str,
) -> None:
    """Scales of keys count before it. The last has rows of several tiles."""
    check_decoding(dims, heads, queries, of_queries, page_size, mask, kind, softcap=2.0)


def check_decoding(
    dims: tuple[int, int],
    heads: tuple[int, int],
    queries: int,
    of_queries: torch.dtype,
    page_size: int,
    mask: str,
    kind: str,
    softcap: float = 0.0,
) -> None:
    keys = draw_keys((1000, 0, 77, 4097, 128), page_size, heads[1], dims)
    tensors, scales = draw_scales(keys, kind)
    torch.manual_seed(1)
    q = (torch.randn(5, queries, heads[0], dims[0], device="cuda") * 0.5).to(of_queries)
    dtype = torch.bfloat16 if of_queries == FP8 else of_queries
    sides = (100, 0) if mask == "window" else (-1, -1)
    given: dict[str, Any] = {"causal": True, "window_size": sides, "return_softmax_lse": True}
    given |= {"cache_seqlens": keys.lengths, "page_table": keys.table}
    given |= {"k_descale": tensors[0], "v_descale": tensors[1], "softcap": softcap}
    is_served = dtype == torch.bfloat16
    assert explain_kvcache(q, keys.k, keys.v, **given).path == ("decode" if is_served else "copied")
    out, lse = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
    for _ in range(4):
        again, lse_again = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)
    of_mask = {"causal": True, "softmax_scale": dims[0] ** -0.5, "softcap": softcap}
    of_mask |= {"window_left": 100 if mask == "window" else UNLIMITED}
    for number, rows in enumerate(keys.rows):
        k, v = (x.double() * of[number][..., None].double() for x, of in zip(rows, scales, strict=True))
        exact, exact_lse = attention_naive(q[number].double()[None], k[None], v[None], **of_mask)
        rounded = [x.to(dtype)[None] for x in (q[number], k, v)]
        plain = attention_standard(*rounded, **of_mask)
        of_rounded, _ = attention_naive(*(x.double() for x in rounded), **of_mask)
        allowed = 2 * (plain.double() - of_rounded).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        # Elsewhere keys and values are rounded to 16 bits.
        allowed = allowed if is_served else 3 * allowed
        assert (out[number].double() - exact[0]).abs().max() <= allowed, number
        seen = exact_lse[0] > -math.inf
        assert bool((lse[number][~seen] == -math.inf).all()) and bool((out[number][~seen.T] == 0).all())
        error = (lse[number].double() - exact_lse[0])[seen].abs()
        # The tanh of a softcap has a relative error of 2^-11 in bfloat16.
        least = softcap * 2.0**-11 + (1e-3 if is_served else 2e-2)
        assert bool((error <= least + 2e-4 * exact_lse[0][seen].abs()).all()), number


WIDE = CacheCase(
    lengths=(9, 0, 41), capacity=64, new=(3, 2, 0), packed_new=True, page_size=16, head_dims=(64, 64)
)
APPENDED: dict[str, CacheCase] = {
    "pages": WIDE,
    "narrow heads": replace(WIDE, head_dims=(96, 40), rotary_dim=32, interleaved=False),
    "wide heads": replace(WIDE, head_dims=(256, 128), rotary_dim=256, queries=(1, 1, 1)),
    "no pages": replace(WIDE, page_size=0, rotary_dim=64, queries=(2, 0, 3), packed_q=True),
    "many rows": replace(WIDE, heads=(32, 1), rotary_dim=16),
    "batch index": replace(WIDE, batch_idx=(3, 1, 0), rotary_dim=64, interleaved=False),
}


@pytest.mark.parametrize("name", APPENDED)
@pytest.mark.parametrize(("kind", "hadamard"), [(BY_TOKEN, False), (BY_TOKEN, True), (BY_PAGE, True)])
def test_new_tokens(name: str, kind: str, hadamard: bool) -> None:
    """What is written, its scales, and attention to it, in one call."""
    check(APPENDED[name], kind, device="cuda", causal=True, hadamard=hadamard)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
def test_the_rotation_of_queries(head_dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(3, 5, 4, head_dim, device="cuda").to(dtype)
    found, exact = rotate_queries_alike(q), rotate_keys(q.double().cpu()).double()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, FP8: 2.0**-4}[dtype]
    assert found.dtype == dtype and found.shape == q.shape
    assert bool(((found.double().cpu() - exact).abs() <= 1.1 * step * exact.abs() + 2.0**-9).all())


def test_a_graph_of_steps_writes_and_reads_scales() -> None:
    """A sequence that grows by a token at each replay, against calls without a graph."""
    torch.manual_seed(0)
    table = torch.randperm(8, device="cuda").int().view(2, 4)

    def caches() -> dict[str, Tensor]:
        made = {
            name: torch.full((8, 16, 2, 128), math.nan, device="cuda").to(FP8)
            for name in ("k_cache", "v_cache")
        }
        return made | {
            name: torch.full((8, 16, 2), math.nan, device="cuda") for name in ("k_descale", "v_descale")
        }

    angles = torch.rand(64, 64, device="cuda")
    given = {"page_table": table, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True}
    q, k, v = (torch.randn(2, 1, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    tokens = [[torch.randn_like(x) for x in (q, k, v)] for _ in range(20)]
    lengths, one, other = torch.zeros(2, dtype=torch.int32, device="cuda"), caches(), caches()
    wanted = []
    for step in tokens:
        wanted.append(
            flash_attn_with_kvcache(
                step[0], k=step[1], v=step[2], **one, cache_seqlens=lengths, **given, hadamard=True
            )
        )
        lengths += 1
    lengths.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_attn_with_kvcache(q, k=k, v=v, **other, cache_seqlens=lengths, **given, hadamard=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(q, k=k, v=v, **other, cache_seqlens=lengths, **given, hadamard=True)
        lengths += 1
    for step, expected in zip(tokens, wanted, strict=True):
        for x, new in zip((q, k, v), step, strict=True):
            x.copy_(new)
        graph.replay()
        assert torch.equal(out, expected)
    for name in one:
        assert torch.equal(*(x[name].contiguous().view(torch.uint8) for x in (one, other)))


def test_a_chunk_of_a_prompt_sees_what_decoding_sees() -> None:
    keys = draw_keys((300, 129), 64, 2, (128, 128))
    tensors, _ = draw_scales(keys, BY_TOKEN)
    q = torch.randn(2, 100, 8, 128, device="cuda").bfloat16()  # 400 rows a K/V head
    given = {"cache_seqlens": keys.lengths, "page_table": keys.table, "causal": True}
    given |= {"k_descale": tensors[0], "v_descale": tensors[1]}
    chunk = flash_attn_with_kvcache(q, keys.k, keys.v, **given)
    last = flash_attn_with_kvcache(q[:, -4:], keys.k, keys.v, **given)
    assert explain_kvcache(q[:, -4:], keys.k, keys.v, **given).path == "decode"
    assert (chunk[:, -4:] - last).abs().max() <= 2e-2 * last.abs().max()
