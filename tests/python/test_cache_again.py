"""Calls on a cache like earlier ones, by tiles, in e4m3 and with sinks: kernels are given what they were before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.plan.config import PlanConfig
from hopper_attention import (
    cache_again,
    cache_tiles,
    compile_cache,
    device_memory,
    flash_attn_with_kvcache,
    kvcache,
)
from hopper_attention.few_queries import FewQueries
from hopper_attention.launch import cache_tiles as launch_of_tiles
from hopper_attention.launch import decode, fp8, packed_fp8
from hopper_attention.launch import forward as launch_of_forward
from hopper_attention.launch import kvcache as launch_on_cache
from tests.python.fake_gpu import forget_launchers, pretend

E4M3, BF16, FLOAT = torch.float8_e4m3fn, torch.bfloat16, torch.float32
BATCH, ROOM = 3, 96
PLAN = 4
"""Its place among the arguments of the kernel that makes it."""


class StandIns:
    """Kernels that note what they are given, and fill what is poisoned."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Any]]] = []

    def get(self, config: Any) -> Callable[..., None]:
        def kernel(*given: Any) -> None:
            if isinstance(config, PlanConfig):
                given[PLAN].fill_(7)
            self.seen.append((type(config).__name__, [facts_of(x) for x in given if not is_result(x)]))
            for number, x in enumerate(given):
                if is_result(x):
                    x.fill_(number + 0.5)

        return kernel


def is_result(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > 0 and bool(torch.isnan(x.float()).any())


def facts_of(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return type(x), x
    # A dimension of size 1 may have any stride, and so may those of no elements.
    strides = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]
    return tuple(x.shape), strides, x.dtype, x.float().flatten().tolist()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    found = StandIns()
    modules = (launch_of_tiles, launch_on_cache, decode, fp8, packed_fp8, launch_of_forward)
    pretend(monkeypatch, *modules)
    for module in modules:
        monkeypatch.setattr(module, "index_of", lambda device: 0, raising=False)
    for name in ("get_forward", "get_serving"):
        monkeypatch.setattr(compile_cache, name, found.get)
    monkeypatch.setattr(cache_again, "current_device", lambda: 0)
    for name in ("cache_again", "descaled_again"):
        monkeypatch.setattr(f"hopper_attention.{name}.kept_argument", lambda x: x)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    # Poison, by which results are told from what is read.
    empty, strided_empty = torch.empty, device_memory.empty_on_gpu
    monkeypatch.setattr(torch, "empty", lambda *a, **b: poisoned(empty(*a, **b)))
    monkeypatch.setattr(device_memory, "empty_on_gpu", lambda *a: poisoned(strided_empty(*a)))
    yield found
    forget_launchers()


def poisoned(x: Tensor) -> Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else -1)


def tensors(
    queries: int = 4,
    heads: int = 4,
    dtype: torch.dtype = E4M3,
    page_size: int = 0,
    packed: bool = False,
    descales: str = "each",
    sinks: torch.dtype | None = None,
    q_dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """q and the caches, of two K/V heads, and the other tensors of a call."""
    kv_heads, pages = 2, BATCH * ROOM // page_size if page_size else BATCH

    def new(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    q = new(BATCH * queries, heads, 64) if packed else new(BATCH, queries, heads, 64)
    q = q.to(q_dtype or dtype)
    caches = [new(pages, page_size or ROOM, kv_heads, 64) for _ in "kv"]
    more: dict[str, Any] = {"cache_seqlens": torch.tensor([ROOM, 50, 70], dtype=torch.int32)}
    if page_size:
        more["page_table"] = torch.randperm(pages, dtype=torch.int32).view(BATCH, -1)
    if packed:
        more["cu_seqlens_q"] = torch.arange(BATCH + 1, dtype=torch.int32) * queries
        more["max_seqlen_q"] = queries
    if dtype == E4M3 and descales != "none":
        one = torch.rand(BATCH, kv_heads)
        for name in ("q_descale", "k_descale", "v_descale"):
            more[name] = one if descales == "one" else torch.rand(BATCH, kv_heads)
    if q_dtype is not None:
        more.pop("q_descale", None)
    if sinks is not None:
        more["sinks"] = torch.randn(heads).to(sinks)
    return [q, *caches], more


TILES = FewQueries(None, 2, 1, tile_rows=64)
PARTS = FewQueries(None, 2, 3, tile_rows=64)
OF_16_BITS = FewQueries(None, 2, 2, split_rows=8)
OF_A_HEAD = FewQueries()
"""In 16 bits those of calls with many queries."""

CASES: dict[str, tuple[FewQueries | None, dict[str, Any], dict[str, Any]]] = {
    "tiles": (TILES, {}, {"causal": True}),
    "tiles in parts": (PARTS, {"descales": "one"}, {"causal": True}),
    "tiles on pages": (TILES, {"page_size": 16, "descales": "none"}, {"causal": True}),
    "parts on pages": (PARTS, {"page_size": 32}, {}),
    "tiles of packed queries": (TILES, {"packed": True}, {"causal": True}),
    "tiles in a window": (TILES, {"page_size": 16}, {"window_size": (20, 0), "softmax_scale": 0.3}),
    "tiles with a softcap": (PARTS, {}, {"causal": True, "softcap": 15.0}),
    "tiles with sinks": (TILES, {"sinks": FLOAT}, {"causal": True}),
    "sinks on pages": (PARTS, {"sinks": FLOAT, "page_size": 16}, {"causal": True, "softcap": 9.0}),
    "tiles of 16 bits": (OF_16_BITS, {"dtype": BF16}, {"causal": True}),
    "tiles of 16 bits on pages": (OF_16_BITS, {"dtype": BF16, "page_size": 32}, {"causal": True}),
    "tiles of 16 bits with a softcap": (OF_16_BITS, {"dtype": BF16}, {"softcap": 15.0}),
    "a tile for each head": (OF_A_HEAD, {"dtype": BF16}, {"causal": True, "softcap": 15.0}),
    "a tile for each head, in a window": (
        OF_A_HEAD,
        {"dtype": BF16, "page_size": 16},
        {"window_size": (9, 0)},
    ),
    "a tile for each head of packed queries": (OF_A_HEAD, {"dtype": BF16, "packed": True}, {"causal": True}),
    "decoding": (None, {"queries": 1}, {}),
    "decoding with one descale": (None, {"queries": 1, "descales": "one"}, {"softcap": 20.0}),
    "decoding without descales": (None, {"queries": 2, "descales": "none"}, {"causal": True}),
    "decoding in a window on pages": (None, {"queries": 1, "page_size": 16}, {"window_size": (20, 0)}),
    "decoding with sinks": (None, {"queries": 1, "sinks": FLOAT}, {}),
    "decoding of packed queries": (None, {"queries": 2, "packed": True}, {"causal": True}),
    "16 bits with sinks": (None, {"dtype": BF16, "sinks": FLOAT}, {"causal": True}),
    "decoding with sinks of 16 bits": (None, {"queries": 1, "sinks": BF16}, {}),
    "tiles with sinks of 16 bits": (TILES, {"sinks": BF16}, {"causal": True}),
    "16 bits with such sinks": (None, {"dtype": BF16, "sinks": BF16}, {"causal": True}),
    "queries of 16 bits, one descale": (None, {"queries": 1, "q_dtype": BF16, "descales": "one"}, {}),
    "sinks and an LSE": (None, {"dtype": BF16, "sinks": FLOAT}, {"return_softmax_lse": True}),
}


def refuse(*given: Any) -> Any:
    raise AssertionError("found anew")


def serve_as(few: FewQueries | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By these tiles, or by the decode kernel."""
    monkeypatch.setattr(cache_tiles, "_tiles_of", lambda call: few or FewQueries(call))


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_given_what_they_were_given_before(
    name: str, kernels: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, sizes, options = CASES[name]
    serve_as(few, monkeypatch)
    calls = [tensors(**sizes) for _ in range(3)]
    for given, more in calls[:2]:
        flash_attn_with_kvcache(*given, **more, **options)
    given, more = calls[2]
    cache_again.remembered.cache_clear()
    kernels.seen.clear()
    wanted = flash_attn_with_kvcache(*given, **more, **options)
    of_first = list(kernels.seen)
    names = [kind for kind, _ in of_first]
    if few is None:
        assert names == ["DecodeConfig"]
    else:
        assert names == ["PlanConfig", names[1], *["CombineConfig"] * (few.splits > 1)]
    for others, rest in calls[:2]:
        flash_attn_with_kvcache(*others, **rest, **options)
    monkeypatch.setattr(kvcache, "read_call", refuse)
    for _ in range(2):
        kernels.seen.clear()
        found = flash_attn_with_kvcache(*given, **more, **options)
        assert kernels.seen == of_first
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        for x, y in pairs:
            assert torch.equal(x, y) and x.dtype == y.dtype and x.shape == y.shape


def make_known(monkeypatch: pytest.MonkeyPatch, few: FewQueries | None = TILES, **sizes: Any) -> Any:
    serve_as(few, monkeypatch)
    given, more = tensors(**sizes)
    for _ in range(2):
        flash_attn_with_kvcache(*given, **more, causal=True)
    return given, more


@pytest.mark.parametrize("few", [TILES, None])
def test_other_calls_are_found_anew(few: FewQueries | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given, more = make_known(monkeypatch, few)
    q, k, v = given
    monkeypatch.setattr(kvcache, "read_call", refuse)
    flash_attn_with_kvcache(*given, **more, causal=True)
    odd = torch.zeros(v.numel() + 1, dtype=E4M3)[1:].view(v.shape)
    others: list[tuple[list[Tensor], dict[str, Any]]] = [
        (tensors(queries=5)[0], {**more, "causal": True}),
        ([q, k, odd], {**more, "causal": True}),
        ([q, k, k], {**more, "causal": True}),
        (given, more),
        (given, {**more, "causal": 1}),
        (given, {**more, "causal": True, "return_softmax_lse": True}),
        (given, {**more, "causal": True, "window_size": (5, 0)}),
        (given, {**more, "causal": True, "softcap": 1.0}),
        (given, {**more, "causal": True, "sinks": torch.zeros(4)}),
        (given, {**more, "causal": True, "cache_leftpad": torch.zeros(BATCH, dtype=torch.int32)}),
        (given, {**more, "causal": True, "cache_seqlens": 50}),
        (given, {**more, "causal": True, "num_splits": 1}),
        (given, {**more, "causal": True, "q_descale": None}),
        (given, {**more, "causal": True, "v_descale": more["q_descale"]}),
        (given, {**more, "causal": True, "v_descale": more["v_descale"].double()}),
        (given, {**more, "causal": True, "v_descale": more["v_descale"].clone().requires_grad_()}),
    ]
    for tensors_, options in others:
        with pytest.raises(AssertionError, match="found anew"):
            flash_attn_with_kvcache(*tensors_, **options)


@pytest.mark.parametrize("how", ["graph", "gpu", "mode"])
def test_what_was_found_does_not_serve_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, more = make_known(monkeypatch)
    monkeypatch.setattr(kvcache, "read_call", refuse)
    if how == "graph":
        monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    elif how == "gpu":
        monkeypatch.setattr(cache_again, "current_device", lambda: 1)
    else:
        monkeypatch.setattr(cache_again, "may_be_like", lambda: False)
    with pytest.raises(AssertionError, match="found anew"):
        flash_attn_with_kvcache(*given, **more, causal=True)


def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose kernels get other tensors than they were given, and those that ``decode_again`` serves."""
    (q, k, v), more = tensors(sinks=FLOAT)
    by_token = {name: torch.rand(BATCH, ROOM, 2) for name in ("k_descale", "v_descale")}
    calls: list[tuple[FewQueries | None, Any, dict[str, Any]]] = [
        (TILES, (q.transpose(0, 1).contiguous().transpose(0, 1), k, v), more),
        (TILES, (q, k, v), {**more, "sinks": more["sinks"].repeat(2)[::2]}),
        (None, (q[:, :1], k, v), {**more, **by_token}),
        (TILES, (q, k, v), {**more, "window_size": [20, 0]}),
        (TILES, (q, k, v), {**more, "cache_seqlens": None}),
        (None, tensors(queries=1, dtype=BF16)[0], tensors(dtype=BF16)[1]),
    ]
    for few, given, options in calls:
        serve_as(few, monkeypatch)
        for _ in range(3):
            flash_attn_with_kvcache(*given, **options)
    assert not cache_again.remembered._calls


def test_sinks_that_are_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As models have them: found again where no gradient is wanted, and refused where one is."""
    serve_as(None, monkeypatch)
    given, more = tensors(queries=1, sinks=BF16)
    more["sinks"] = torch.nn.Parameter(more["sinks"])
    with torch.no_grad():
        for _ in range(2):
            flash_attn_with_kvcache(*given, **more)
        with monkeypatch.context() as patch:
            patch.setattr(kvcache, "read_call", refuse)
            assert not flash_attn_with_kvcache(*given, **more).requires_grad
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        flash_attn_with_kvcache(*given, **more)
    with pytest.raises(TypeError, match="sinks has dtype"):
        flash_attn_with_kvcache(*given, **(more | {"sinks": torch.zeros(4, dtype=torch.float16)}))
