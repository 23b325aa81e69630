"""Calls on a cache that the forward kernels serve with several heads in a tile, keys in parts, or e4m3 by e4m3, on a
GPU: each sequence against float64, NaN in all rows of the cache that nothing uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import cache_tiles, device_memory, explain_kvcache, flash_attn_with_kvcache
from hopper_attention.few_queries import FewQueries
from hopper_attention.launch import cache_tiles as launcher
from hopper_attention.launch import kvcache
from hopper_attention.reference import attention_naive, attention_standard

pytestmark = pytest.mark.gpu

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
GARBAGE = (-1, 1 << 30, -(1 << 31))
"""Page numbers behind the length of a sequence."""

DESCALES = "q_descale", "k_descale", "v_descale"
ERROR = 6e-2
"""Of an output of e4m3, as a share of it."""


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Each test compiles the kernels that it needs."""


@pytest.fixture(autouse=True)
def poisoned_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for parts of results is NaN before each call."""
    memory = device_memory.stream_memory

    def poisoned(device_index: int, pieces: device_memory.Pieces) -> device_memory.Work:
        work = memory(device_index, pieces)
        for x in work.tensors:
            if x.is_floating_point():
                x.fill_(math.nan)
        return work

    monkeypatch.setattr(device_memory, "stream_memory", poisoned)


Serve = Callable[[FewQueries], None]


def forget() -> None:
    for find in (kvcache.find_way, launcher.find_tiles, cache_tiles.tiles_of):
        getattr(find, "cache_clear", lambda: None)()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Has calls that tiles can serve be served so."""

    def serve_as(few: FewQueries) -> None:
        for module in (cache_tiles, launcher):
            monkeypatch.setattr(module, "tiles_of", lambda call: few)
        forget()

    forget()
    yield serve_as
    monkeypatch.undo()
    forget()


@dataclass(frozen=True)
class Case:
    """A call: sequences with so many keys and queries.

    Attributes:
        few: how tiles serve it.
        page_size: 0 for a cache without pages.
        heads, head_dims: of q and the cache, of Q and V.
        behind: rows of a packed q that are of no sequence; -1 for a q that is not packed, all of queries[0].
        pads, batch_idx: of each sequence, or empty.
        new: new tokens of each sequence, which are its last keys.
        window, softcap, sinks: of the call; sinks of heads, over and over.
        peak: how much larger q is than what is normally distributed.
    """

    few: FewQueries
    lengths: tuple[int, ...] = (1000, 0, 77, 2049)
    queries: tuple[int, ...] = (9, 9, 9, 9)
    page_size: int = 64
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = BF16
    causal: bool = True
    behind: int = -1
    pads: tuple[int, ...] = ()
    batch_idx: tuple[int, ...] = ()
    new: int = 0
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    peak: float = 1.0

    def options(self, device: str | torch.device) -> dict[str, Any]:
        """Of ``attention_naive``."""
        sinks = torch.tensor((self.sinks * self.heads[0])[: self.heads[0]], device=device)
        sides = {"window_left": self.window[0], "window_right": self.window[1]}
        changes = {"softcap": self.softcap, "sinks": sinks if self.sinks else None}
        return sides | changes | {"causal": self.causal}

    @property
    def is_packed(self) -> bool:
        return self.behind >= 0


@dataclass(frozen=True)
class Drawn:
    """Arguments of a call, the rows of keys of each sequence, and where its queries lie in rows of q."""

    given: dict[str, Any]
    keys: list[tuple[Tensor, Tensor]]
    spans: list[slice]


def nan_of(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, math.nan, device=device).to(dtype)


def draw(case: Case, device: str, lengths: tuple[int, ...] = (), seed: int = 0) -> Drawn:
    """``lengths`` in place of the case's, no longer than these."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths, batch = lengths or case.lengths, len(case.lengths)
    pads, entries = case.pads or (0,) * batch, case.batch_idx or tuple(range(batch))
    # No whole number of blocks, or of eight rows.
    room = max(n + pad for n, pad in zip(case.lengths, pads, strict=True)) + 13
    rows, sequences = case.page_size or room, max(entries) + 1
    a_sequence = -(-room // rows)
    count = sequences * a_sequence + 3 * (case.page_size > 0)
    table = torch.arange(count, device=device)
    if case.page_size:
        table = torch.randperm(count, generator=generator, device=device)
    table = table[: sequences * a_sequence].view(sequences, a_sequence).int()
    heads, kv_heads = case.heads
    caches = [nan_of((count, rows, kv_heads, d), case.dtype, device) for d in case.head_dims]
    keys, new = [], []

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    for entry, length, pad in zip(entries, lengths, pads, strict=True):
        own = [normal(length, kv_heads, d) for d in case.head_dims]
        at = torch.arange(length - case.new, device=device) + pad
        for cache, x in zip(caches, own, strict=True):
            bits = cache.view(torch.uint8 if case.dtype == FP8 else torch.int16)
            bits[table[entry, at // rows].long(), at % rows] = x.view(bits.dtype)[: length - case.new]
        keys.append((own[0], own[1]))
        new.append([x[length - case.new :] for x in own])
        first_unused = -(-(length + pad) // rows)
        for page in range(first_unused, a_sequence if case.page_size else 0):
            table[entry, page] = GARBAGE[page % 3]
    ends = [sum(case.queries[: b + 1]) for b in range(batch)]
    total = ends[-1] + max(case.behind, 0)
    q = (case.peak * normal(total, heads, case.head_dims[0]).float()).to(case.dtype)
    q[ends[-1] :] = math.nan
    given: dict[str, Any] = {"k_cache": caches[0], "v_cache": caches[1], "causal": case.causal}

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    given["cache_seqlens"] = ints([n + pad - case.new for n, pad in zip(lengths, pads, strict=True)])
    if case.is_packed:
        given |= {"q": q, "cu_seqlens_q": ints([0, *ends]), "max_seqlen_q": max(case.queries)}
    else:
        given["q"] = q.view(batch, -1, *q.shape[1:])
    changes = case.options(device)
    if case.window != (-1, -1):
        given["window_size"] = case.window
    given |= {name: changes[name] for name in ("softcap", "sinks") if changes[name] is not None}
    if case.page_size:
        given["page_table"] = table
    if case.batch_idx:
        given["cache_batch_idx"] = ints(case.batch_idx)
    if case.pads:
        given["cache_leftpad"] = ints(case.pads)
    if case.new:
        given |= {name: torch.stack([x[i] for x in new]) for i, name in enumerate("kv")}
    if case.dtype == FP8:
        shape = batch, kv_heads
        given |= {x: torch.rand(shape, generator=generator, device=device) + 0.5 for x in DESCALES}
    spans = [slice(end - n, end) for end, n in zip(ends, case.queries, strict=True)]
    return Drawn(given, keys, spans)


def wrong_results(case: Case, drawn: Drawn, out: Tensor, lse: Tensor | None) -> list[Any]:
    """What is wrong with these, by sequence; of e4m3 with sinks, of which some leave keys very little, head by head."""
    group, wrong, options = case.heads[0] // case.heads[1], [], case.options(out.device)
    q = drawn.given["q"].flatten(0, -3)
    assert out.shape == (*drawn.given["q"].shape[:-1], case.head_dims[1])
    out = out.flatten(0, -3)
    if lse is not None:
        lse = lse if case.is_packed else lse.transpose(0, 1).flatten(1, 2)
        assert lse.shape == (case.heads[0], q.shape[0]) and lse.dtype == torch.float32
    for b, (own, (k, v)) in enumerate(zip(drawn.spans, drawn.keys, strict=True)):
        if own.start == own.stop:
            continue
        values = [x.double()[None] for x in (q[own], k, v)]
        if case.dtype == FP8:
            of_q, of_k, of_v = (drawn.given[name][b].double()[:, None] for name in DESCALES)
            values = [values[0] * of_q.repeat_interleave(group, 0), values[1] * of_k, values[2] * of_v]
        exact, exact_lse = attention_naive(*values, **options)
        seen, error = exact_lse[0] > -math.inf, out[own].double() - exact[0]
        is_zero = (exact[0] == 0).all(-1)
        if case.dtype == FP8:
            of_heads = (0, 2) if case.sinks else (0, 1, 2)
            off, size = (x.square().sum(of_heads).sqrt() for x in (error, exact[0]))
            is_right = bool((off <= ERROR * size).all())
        else:
            rounded = [x.to(case.dtype) for x in values]
            plain = attention_standard(*rounded, **options)
            allowed = 2 * (plain.double() - exact).abs().max() if bool(seen.any()) else 0.0
            allowed = allowed + torch.finfo(case.dtype).eps * exact.abs().max()
            is_right = bool(error.abs().max() <= allowed)
        if not is_right or bool(out[own][is_zero].any()):
            wrong.append((b, "out", float(error.abs().max()), float(error.norm() / exact.norm())))
        if lse is not None:
            off = (lse[:, own].double() - exact_lse[0])[seen].abs()
            # One instruction's tanh, for bfloat16, is good to 2^-11 of the cap.
            near = bool((off <= 2e-4 + 2.0**-11 * case.softcap + 1e-5 * exact_lse[0][seen].abs()).all())
            if not near or bool((lse[:, own][~seen] != -math.inf).any()):
                wrong.append((b, "lse", float(off.max()) if off.numel() else math.nan))
    behind = slice(drawn.spans[-1].stop, None)
    if bool(out[behind].any()) or (lse is not None and bool((lse[:, behind] != -math.inf).any())):
        wrong.append("rows of no sequence are not 0 with LSE -inf")
    return wrong


def results_of(given: dict[str, Any], wants_lse: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    found = flash_attn_with_kvcache(**given, return_softmax_lse=wants_lse, **options)
    return found if wants_lse else (found, None)


def check(case: Case, wants_lse: bool, device: str = "cuda", backend: str | None = None) -> None:
    """Three calls, of the same bits each, are right."""
    drawn = draw(case, device)
    if backend is None:
        given = drawn.given | {"return_softmax_lse": wants_lse}
        plan = explain_kvcache(**given)
        assert plan.path == "tiles", plan
        config: Any = plan.config
        assert (config.group, config.split) == (case.few.group, case.few.splits > 1)
        assert plan.steps == () or case.new
    caches = {name: drawn.given[name].clone() for name in ("k_cache", "v_cache")}
    out, lse = results_of(drawn.given, wants_lse, backend=backend)
    for _ in range(2):
        # Where new tokens are written, into a cache that does not have them.
        given = drawn.given | {name: x.clone() for name, x in caches.items()}
        again, again_lse = results_of(given, wants_lse, backend=backend)
        assert torch.equal(again, out) and (lse is None or torch.equal(again_lse, lse))
    assert out.dtype == (BF16 if case.dtype == FP8 else case.dtype)
    assert wrong_results(case, drawn, out, lse) == []


def heads(group: int, **options: Any) -> Case:
    return Case(FewQueries(group=group), heads=(2 * group, 2), **options)


def parts(group: int, splits: int, **options: Any) -> Case:
    """Rows of a K/V head up to 128."""
    few = FewQueries(group=group, splits=splits, split_rows=128)
    return Case(few, heads=(2 * group, 2), **options)


def codes(group: int, splits: int = 1, tile_rows: int = 64, **options: Any) -> Case:
    few = FewQueries(group=group, splits=splits, tile_rows=tile_rows)
    return Case(few, heads=(2 * group, 2), dtype=FP8, **options)


PACKED: dict[str, Any] = {"queries": (40, 0, 33, 250), "behind": 5}
ONE_ROW: dict[str, Any] = {"page_size": 0, "pads": (7, 5, 0, 100)}
IN_16_BITS = {
    "4 heads, end to end": heads(4, page_size=0),
    "5 heads, pages of 8": heads(5, page_size=8, causal=False),
    "7 heads, pages of 16": heads(7, page_size=16, **PACKED),
    "8 heads, pages of 128": heads(8, page_size=128, dtype=FP16),
    "16 heads, one of many pages": heads(16, page_size=256, batch_idx=(3, 0, 5, 1)),
    "parts, end to end": parts(1, 3, page_size=0, queries=(70,) * 4),
    "parts, pages of 8": parts(4, 5, page_size=8, causal=False),
    "parts, pages of 16, packed": parts(4, 3, page_size=16, **PACKED),
    "parts of 5 heads, pages of 128": parts(5, 7, page_size=128, dtype=FP16),
    "parts of 7 heads, pages of 256": parts(7, 2, page_size=256, queries=(2,) * 4),
    "parts of 16 heads, from any row on": parts(16, 3, **ONE_ROW),
    "heads, from any row on": heads(4, batch_idx=(4, 0, 2, 3), **ONE_ROW),
    "parts, more than blocks": parts(8, 9, lengths=(130, 1, 0, 260), queries=(3,) * 4),
    "d64": heads(4, head_dims=(64, 64), page_size=16),
    "d64, parts": parts(4, 3, head_dims=(64, 64), page_size=64),
    "d96, parts": parts(4, 3, head_dims=(96, 96), page_size=16),
    "d192, other values, parts": parts(8, 4, head_dims=(192, 128)),
    "d256, parts": parts(2, 3, head_dims=(256, 256), page_size=32),
    "more queries than keys": parts(4, 2, lengths=(20, 3, 0, 300), queries=(25, 25, 25, 25)),
    "new tokens": parts(4, 3, new=3, lengths=(1000, 3, 77, 2049), page_size=16),
    "a window": heads(4, page_size=0, window=(100, 20), causal=False),
    "a window of 5 heads, pages of 16": heads(5, page_size=16, window=(300, -1)),
    "softcap, parts, pages of 64": parts(4, 3, softcap=2.5),
    "softcap of 5 heads, parts": parts(5, 3, page_size=0, softcap=2.5, **PACKED),
    "softcap and a window, from any row on": heads(4, softcap=2.5, window=(100, 0), **ONE_ROW),
}


@pytest.mark.parametrize("case", IN_16_BITS.values(), ids=IN_16_BITS)
def test_16_bits(case: Case, serve: Serve) -> None:
    serve(case.few)
    check(case, wants_lse=True)


SINKS = 0.5, -math.inf, 30.0, -3.0, 2.0
IN_E4M3 = {
    "one head, end to end": codes(1, page_size=0, queries=(70,) * 4),
    "one head, pages of 16": codes(1, page_size=16, tile_rows=128, queries=(200,) * 4),
    "4 heads, end to end": codes(4, page_size=0),
    "5 heads, pages of 8": codes(5, page_size=8, causal=False),
    "7 heads, pages of 16, packed": codes(7, page_size=16, tile_rows=128, **PACKED),
    "8 heads, pages of 128": codes(8, page_size=128),
    "16 heads, one of many pages": codes(16, page_size=256, batch_idx=(3, 0, 5, 1)),
    "high tiles, pages of 64": codes(4, tile_rows=192, queries=(100,) * 4),
    "parts, end to end": codes(1, 3, page_size=0, queries=(70,) * 4),
    "parts, pages of 8": codes(4, 5, page_size=8, causal=False),
    "parts, pages of 16, packed": codes(4, 3, page_size=16, **PACKED),
    "parts of 5 heads, pages of 128": codes(5, 7, tile_rows=128, page_size=128),
    "parts of 7 heads, pages of 256": codes(7, 2, page_size=256, queries=(2,) * 4),
    "parts of 16 heads, from any row on": codes(16, 3, **ONE_ROW),
    "heads, from any row on": codes(4, batch_idx=(4, 0, 2, 3), **ONE_ROW),
    "parts, more than blocks": codes(8, 9, lengths=(130, 1, 0, 260), queries=(3,) * 4),
    "d64": codes(4, head_dims=(64, 64), page_size=16, tile_rows=192),
    "d64, parts": codes(4, 3, head_dims=(64, 64), page_size=64),
    "d96, parts": codes(4, 3, head_dims=(96, 96), page_size=16),
    "d192, other values, parts": codes(8, 4, head_dims=(192, 128)),
    "d256": codes(2, head_dims=(256, 256), page_size=32),
    "d256, parts": codes(2, 3, tile_rows=128, head_dims=(256, 256), page_size=16),
    "more queries than keys": codes(4, 2, lengths=(20, 3, 0, 300), queries=(25, 25, 25, 25)),
    "new tokens": codes(4, 3, new=3, lengths=(1000, 3, 77, 2049), page_size=16),
    "a window": codes(4, page_size=0, window=(100, 20), causal=False),
    "a window of 5 heads, pages of 16": codes(5, page_size=16, window=(300, -1), peak=6.0),
    "softcap, parts": codes(4, 3, page_size=0, softcap=15.0, peak=6.0),
    "softcap of 5 heads, parts, pages of 16": codes(5, 3, page_size=16, softcap=30.0, **PACKED),
    "sinks": codes(4, page_size=0, sinks=SINKS),
    "sinks of 5 heads, pages of 64": codes(5, tile_rows=128, sinks=SINKS, peak=6.0),
    "sinks of packed queries": codes(8, page_size=16, sinks=SINKS, **PACKED),
    "all": codes(4, page_size=0, window=(100, 20), causal=False, softcap=15.0, sinks=SINKS),
    "all, pages of 16": codes(5, page_size=16, window=(100, -1), softcap=30.0, sinks=SINKS, peak=6.0),
    "all, from any row on": codes(4, window=(100, 0), softcap=15.0, sinks=SINKS, **ONE_ROW),
    "all, high tiles": codes(
        4, tile_rows=192, queries=(100,) * 4, window=(200, 0), softcap=15.0, sinks=SINKS
    ),
    "all, d64": codes(7, head_dims=(64, 64), page_size=16, window=(99, 3), softcap=15.0, sinks=SINKS),
    "all, d80": codes(1, head_dims=(80, 80), page_size=0, window=(99, 3), softcap=15.0, sinks=SINKS),
    "all, d192": codes(8, head_dims=(192, 128), window=(99, 0), softcap=15.0, sinks=SINKS),
    "all, d256": codes(2, head_dims=(256, 256), page_size=16, window=(99, 0), softcap=50.0, sinks=SINKS),
    "all, d256, high tiles": codes(
        5, tile_rows=128, head_dims=(256, 256), page_size=16, window=(99, 0), softcap=50.0, sinks=SINKS
    ),
    "more queries than keys, sinks": codes(4, lengths=(20, 3, 0, 300), queries=(25, 25, 25, 25), sinks=SINKS),
}


@pytest.mark.parametrize("case", IN_E4M3.values(), ids=IN_E4M3)
def test_e4m3(case: Case, serve: Serve) -> None:
    serve(case.few)
    check(case, wants_lse=False)


@pytest.mark.parametrize(
    "case", [IN_16_BITS["parts, pages of 16, packed"], IN_E4M3["parts, pages of 8"]], ids=str
)
def test_a_graph_takes_other_lengths(case: Case, serve: Serve) -> None:
    """Lengths, pages and keys change between replays of one graph."""
    serve(case.few)
    drawn, wants_lse = draw(case, "cuda"), case.dtype != FP8
    results_of(drawn.given, wants_lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = results_of(drawn.given, wants_lse)
    for seed, lengths in enumerate(((5, 900, 0, 2049), (999, 1, 2000, 64), case.lengths)):
        other = draw(case, "cuda", lengths, seed)
        for name, x in drawn.given.items():
            if isinstance(x, Tensor):
                x.copy_(other.given[name])
        graph.replay()
        torch.cuda.synchronize()
        assert wrong_results(case, other, out, lse) == [], lengths
        plain, _ = results_of(drawn.given, wants_lse)
        assert torch.equal(plain, out)


@pytest.mark.parametrize("case", [IN_16_BITS["parts, end to end"], IN_E4M3["parts, end to end"]], ids=str)
def test_on_other_streams(case: Case, serve: Serve) -> None:
    """Work memory and counters of each are its own."""
    serve(case.few)
    drawn, wants_lse = draw(case, "cuda"), case.dtype != FP8
    expected, _ = results_of(drawn.given, wants_lse)
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(results_of(drawn.given, wants_lse)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in found)
    assert wrong_results(case, drawn, expected, None) == []


@pytest.mark.parametrize("case", [IN_16_BITS["parts, pages of 8"], IN_E4M3["4 heads, end to end"]], ids=str)
@pytest.mark.parametrize("lengths", [None, 700, (5000, 0, 3000, 2062)], ids=str)
def test_lengths_that_are_no_tensor_or_too_long(case: Case, lengths: Any, serve: Serve) -> None:
    """They end where the cache does."""
    serve(case.few)
    full = replace(case, lengths=(700 if lengths == 700 else 2048,) * 4, page_size=0)
    drawn = draw(full, "cuda")
    if lengths is None or lengths != 700:
        # All rows of the cache are keys.
        for name in ("k_cache", "v_cache"):
            drawn.given[name] = drawn.given[name][:, :2048].clone()
    if isinstance(lengths, tuple):
        used = [min(n, 2048) for n in lengths]
        drawn = replace(drawn, keys=[(k[:n], v[:n]) for (k, v), n in zip(drawn.keys, used, strict=True)])
        lengths = torch.tensor(lengths, dtype=torch.int32, device=drawn.given["q"].device)
    given = drawn.given | {"cache_seqlens": lengths}
    out, lse = results_of(given, wants_lse=case.dtype != FP8)
    assert wrong_results(full, drawn, out, lse) == []


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("page_size", [0, 64])
def test_what_count_chooses(page_size: int, dtype: torch.dtype) -> None:
    """A part of a prompt of one long sequence."""
    forget()
    lengths, sizes = (30000,), {"queries": (64,), "heads": (32, 8)}
    case = Case(FewQueries(), lengths, page_size=page_size, dtype=dtype, **sizes)
    drawn, wants_lse = draw(case, "cuda"), dtype != FP8
    plan = explain_kvcache(**drawn.given, return_softmax_lse=wants_lse)
    config: Any = plan.config
    if page_size and dtype == BF16:
        assert plan.path == "decode"
    else:
        assert plan.path == "tiles" and config.split
    assert wrong_results(case, drawn, *results_of(drawn.given, wants_lse)) == []
