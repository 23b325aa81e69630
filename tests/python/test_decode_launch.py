"""The launcher of the decode kernel: what the kernel is given, and results, by a stand-in that reads the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.window import NO_LIMIT
from hopper.decode.config import PARTS_PER_CTA, DecodeConfig
from hopper.mla.config import MlaConfig
from hopper_attention import (
    compile_cache,
    device_memory,
    explain_kvcache,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from hopper_attention.decode_rules import MAX_PARTS, ctas_of_pieces
from hopper_attention.launch import decode
from hopper_attention.launch import kvcache as launch
from hopper_attention.reference import attention_naive
from tests.python.fake_gpu import SMS, forget_launchers, new_memory, pretend
from tests.python.kvcache_cases import FP8, CacheCase
from tests.python.test_decode_rules import call_of
from tests.python.test_kvcache_scales import build

NAMES = (
    "q", "k", "v", "out", "lse", "lengths", "table", "leftpad", "cu_seqlens_q", "parts", "softmax_scale",
    "max_splits", "left", "right", "chunk", "softcap", "sinks", "q_descale", "k_descale", "v_descale", "num_ctas",
)  # fmt: skip
"""Arguments of the kernel in their order."""

QV_NAMES = tuple(name for name in ("q", "qv", *NAMES[1:]) if "descale" not in name)
"""Those of the kernel of ``qv``."""

Config = DecodeConfig | MlaConfig

UNLIMITED = -1


class DecodeKernels:
    """In place of both decode kernels: notes what they are given, and attends by plain indexing."""

    def __init__(self) -> None:
        self.loaded: list[Config] = []
        self.calls: list[dict[str, Any]] = []

    def load(self, config: Config) -> Any:
        self.loaded.append(config)
        names = QV_NAMES if isinstance(config, MlaConfig) else NAMES
        return lambda *given: self.attend(config, dict(zip(names, given, strict=True)))

    def attend(self, config: Config, given: dict[str, Any]) -> None:
        self.calls.append(given)
        g = given
        for b in range(g["lengths"].shape[0]):
            rows: Any = b
            if g["cu_seqlens_q"] is not None:
                rows = slice(*g["cu_seqlens_q"][b : b + 2].tolist())
            q, qv = self.queries(g, rows, b)[None], g["qv"][rows][None] if "qv" in g else None
            out, lse = attention_naive(
                q, *self.keys(g, b), causal=config.causal, qv=qv, **self.options(config, g)
            )
            g["out"][rows] = out[0].to(g["out"].dtype)
            if config.layout == "varlen":
                g["lse"][:, rows] = lse[0].float()
            else:
                g["lse"][b] = lse[0].float()

    def queries(self, g: dict[str, Any], rows: Any, b: int) -> Tensor:
        if g.get("q_descale") is None:
            return g["q"][rows]
        group = g["q"].shape[-2] // g["k"].shape[2]
        descale = g["q_descale"][b].repeat_interleave(group)[:, None]
        return (g["q"][rows].float() * descale).to(g["out"].dtype)

    def keys(self, g: dict[str, Any], b: int) -> list[Tensor]:
        pad = 0 if g["leftpad"] is None else int(g["leftpad"][b])
        size = g["k"].shape[1]
        last = int(g["lengths"][b])
        # A cache without pages may be shorter than lengths say.
        rows = torch.arange(pad, min(last, size) if g["table"] is None else last)
        pages = torch.full_like(rows, b) if g["table"] is None else g["table"][b, rows // size].long()
        found = []
        for name in ("k", "v"):
            descale, x = g.get(f"{name}_descale"), g[name][pages, rows % size].to(g["out"].dtype)
            if descale is not None:
                of_rows = descale[b] if descale.dim() == 2 else descale[pages, rows % size]
                x = (x * of_rows[..., None]).to(x.dtype)
            found.append(x[None])
        return found

    def options(self, config: Config, g: dict[str, Any]) -> dict[str, Any]:
        """Of the oracle. What the config does not have must be None."""
        assert config.window == (g["left"] is not None) == (g["right"] is not None)
        assert config.chunk == (g["chunk"] is not None) and config.softcap == (g["softcap"] is not None)
        assert config.sinks == (g["sinks"] is not None) and config.leftpad == (g["leftpad"] is not None)
        assert (config.layout == "varlen") == (g["cu_seqlens_q"] is not None)
        assert config.paged == (g["table"] is not None)
        assert config.limits_splits == (g["max_splits"] is not None)
        of_e4m3 = isinstance(config, DecodeConfig) and bool(config.cache_dtype)
        if of_e4m3:
            assert config.row_scales == (g["k_descale"].dim() == 3) == (g["v_descale"].dim() == 3)
        assert of_e4m3 == (g.get("k_descale") is not None) == (g.get("v_descale") is not None)
        e4m3_queries = isinstance(config, DecodeConfig) and config.e4m3_queries
        assert e4m3_queries == (g.get("q_descale") is not None) == (g["q"].dtype == FP8)
        left, right = (UNLIMITED if side in (None, NO_LIMIT) else side for side in (g["left"], g["right"]))
        return {
            "window_left": left,
            "window_right": UNLIMITED if config.causal else right,
            "attention_chunk": g["chunk"] or 0,
            "softcap": g["softcap"] or 0.0,
            "sinks": g["sinks"],
            "softmax_scale": g["softmax_scale"],
        }


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeKernels]:
    """Those of a pretended H200."""
    fake = DecodeKernels()
    pretend(monkeypatch, launch)
    for module in (launch, decode):
        monkeypatch.setattr(module, "index_of", lambda device: 0)
    monkeypatch.setattr(compile_cache, "get_serving", fake.load)
    for path in ("paged", "general"):
        monkeypatch.setitem(launch.PATHS, path, None)
    yield fake
    forget_launchers()


PAGES = CacheCase(page_size=8)

CASES: dict[str, tuple[CacheCase, dict[str, Any]]] = {
    "pages": (PAGES, {"causal": True}),
    "no pages": (CacheCase(), {}),
    "batch index": (CacheCase(batch_idx=(4, 0, 2)), {}),
    "batch index and pages": (replace(PAGES, batch_idx=(3, 1, 0)), {"causal": True}),
    "leftpad": (CacheCase(leftpad=(4, 0, 20)), {"causal": True}),
    "packed queries": (replace(PAGES, queries=(1, 0, 6), packed_q=True), {"causal": True}),
    "window, cap and sinks": (
        PAGES,
        {"window_size": (5, -1), "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    ),
    "chunk": (PAGES, {"attention_chunk": 5, "causal": True}),
    "scale": (PAGES, {"softmax_scale": 0.7}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_comes_of_a_call(name: str, kernels: DecodeKernels) -> None:
    case, given = CASES[name]
    call = case.build(torch.bfloat16, **given)
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    exact, exact_lse = case.expected(call)
    assert (out - exact).abs().max() <= 1.6e-2
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() <= 1e-3
    (seen,) = kernels.calls
    assert seen["k"] is call["k_cache"] and seen["v"] is call["v_cache"]
    assert seen["num_ctas"] == ctas_of_pieces(SMS, 6) and seen["max_splits"] is None
    assert seen["parts"].shape == (PARTS_PER_CTA * seen["num_ctas"], kernels.loaded[0].part_floats)
    assert seen["parts"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("given", [(), ("k_descale",), ("q_descale", "k_descale", "v_descale")], ids=str)
@pytest.mark.parametrize("queries", [3, 12])
def test_a_cache_of_e4m3(
    dtype: torch.dtype, given: tuple[str, ...], queries: int, kernels: DecodeKernels
) -> None:
    """Queries of e4m3 are converted where the tiles are tall, for each of which the cache is widened, and the LSE is
    wanted: else the forward kernel serves."""
    wanted = tuple(name for name in given if dtype == FP8 or name != "q_descale")
    descales = dict.fromkeys(wanted, torch.tensor([[0.5, 2.0], [1.0, 0.25], [2.0, 1.0]]))
    case = replace(PAGES, head_dims=(32, 48), queries=(queries,) * 3)
    call = case.build(dtype, FP8, **descales)
    out, _ = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert (out - case.expected(call)[0]).abs().max() <= 3e-2
    (seen,), (config,) = kernels.calls, kernels.loaded
    assert isinstance(config, DecodeConfig) and config.is_swapped == (queries == 3)
    assert seen["k"] is call["k_cache"] and seen["q"].dtype == (dtype if queries == 3 else torch.bfloat16)
    assert (config.dtype, config.cache_dtype) == ("bfloat16", "float8_e4m3fn")
    ones = torch.ones(3, 2)
    expected = {name: descales.get(name, ones) for name in ("q_descale", "k_descale", "v_descale")}
    if not config.e4m3_queries:
        # That of q is a factor of the scores, as that of k is.
        expected["k_descale"] = expected.pop("q_descale") * expected["k_descale"]
    for name, factors in expected.items():
        assert torch.equal(seen[name], factors) and seen[name].stride(1) == 1


@pytest.mark.parametrize("kind", ["token", "page"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_scales_of_rows_of_a_cache(kind: str, dtype: torch.dtype, kernels: DecodeKernels) -> None:
    """Those by page reach the kernel as if they were by row, without a copy. Calls that come again get theirs."""
    q_descale = {"q_descale": torch.tensor([[0.5, 2.0], [1.0, 0.25], [2.0, 1.0]])} if dtype == FP8 else {}
    case = replace(PAGES, head_dims=(32, 48))
    for _ in range(4):
        call = build(case, kind, dtype, **q_descale)
        out = flash_attn_with_kvcache(**call)
        assert (out - case.expected(call)[0]).abs().max() <= 3e-2
    seen = kernels.calls[-1]
    assert kernels.loaded[-1].row_scales and seen["k_descale"].shape == call["k_cache"].shape[:3]
    assert seen["v_descale"].data_ptr() == call["v_descale"].data_ptr()


def test_scales_of_rows_with_many_queries(kernels: DecodeKernels) -> None:
    """In tiles of 16, but for chunks of a prompt. Queries in float16 are not for its kernel."""
    case = replace(PAGES, head_dims=(32, 48), queries=(12, 12, 12))
    call = build(case, "token")
    assert (flash_attn_with_kvcache(**call) - case.expected(call)[0]).abs().max() <= 3e-2
    assert kernels.loaded[-1].tile_m == 16
    more = explain_kvcache(**build(replace(case, queries=(300, 300, 300)), "token"), device_capability=(9, 0))
    assert more.path == "copied" and "a sequence may have 300 queries" in more.refused[0]
    other = explain_kvcache(**build(PAGES, "page", torch.float16), device_capability=(9, 0))
    assert other.path == "copied"
    assert "scales are by page, which its kernel takes with queries of bfloat16 or e4m3" in other.refused[0]


def test_hints_reach_the_kernel(kernels: DecodeKernels) -> None:
    call = PAGES.build(torch.bfloat16)
    flash_attn_with_kvcache(**call, num_splits=3, sm_margin=40)
    (seen,) = kernels.calls
    assert seen["max_splits"] == 3 and seen["num_ctas"] == ctas_of_pieces(SMS - 40, 6) == 80


@pytest.mark.parametrize("num_splits", [2**31 - 1, 2**32, 2**70])
def test_more_splits_than_32_bits_count_are_no_limit(num_splits: int, kernels: DecodeKernels) -> None:
    """A kernel adds the key blocks of a sequence to them."""
    case = CacheCase(page_size=8, queries=(1, 1, 1))
    call = case.build(torch.bfloat16)
    sizes = 3, 1, 24, *case.heads, case.head_dims[0], call["cache_seqlens"]
    schedule = get_scheduler_metadata(*sizes, headdim_v=case.head_dims[1], page_size=8, num_splits=num_splits)
    for given in ({"num_splits": num_splits}, {"scheduler_metadata": schedule}):
        flash_attn_with_kvcache(**call, **given)
        assert SMS < kernels.calls[-1]["max_splits"] <= 2**24


class Kept:
    """A piece of work memory as kernels take it on a GPU: no tensor of torch."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __setitem__(self, place: Any, values: Tensor) -> None:
        self.x[place] = values


class Dispatched(TorchDispatchMode):
    """Calls within go through torch's dispatcher, as those of torch.compile do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_call_through_the_dispatcher_leaves_its_lse_in_work_memory(
    kernels: DecodeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(index: int, pieces: device_memory.Pieces) -> device_memory.Work:
        tensors = new_memory(index, pieces).tensors
        return device_memory.Work(tensors, tuple(map(Kept, tensors)))

    monkeypatch.setattr(device_memory, "stream_memory", memory)
    call = PAGES.build(torch.bfloat16)
    wanted = flash_attn_with_kvcache(**call)
    with Dispatched():
        assert torch.equal(flash_attn_with_kvcache(**call), wanted)
    assert len(kernels.calls) == 2 and all(isinstance(seen["lse"], Kept) for seen in kernels.calls)


def test_one_tile_is_in_few_parts(kernels: DecodeKernels) -> None:
    flash_attn_with_kvcache(**CacheCase(lengths=(9,), queries=(1,), heads=(2, 1)).build(torch.bfloat16))
    assert kernels.calls[0]["num_ctas"] == MAX_PARTS


def test_a_cache_without_lengths_is_full(kernels: DecodeKernels) -> None:
    case = CacheCase(lengths=(8, 8, 8), capacity=8)
    call = case.build(torch.bfloat16)
    del call["cache_seqlens"]
    out = flash_attn_with_kvcache(**call)
    assert (out - case.expected(call)[0]).abs().max() <= 1.6e-2
    assert kernels.calls[0]["lengths"].tolist() == [8, 8, 8]


def test_clusters_have_no_memory_for_parts(kernels: DecodeKernels) -> None:
    launcher = decode.find_decode(call_of(PAGES))
    assert launcher.work[0].shape == (PARTS_PER_CTA * launcher.pieces, launcher.config.part_floats)
    clustered = replace(launcher, config=replace(launcher.config, cluster=2))
    assert clustered.work[0].shape == (1, launcher.config.part_floats)


def test_what_tma_cannot_read_of_q_is_copied(kernels: DecodeKernels) -> None:
    call = PAGES.build(torch.bfloat16)
    room = torch.zeros(*call["q"].shape[:-1], 36).bfloat16()
    room[..., :32] = call["q"]
    flash_attn_with_kvcache(**(call | {"q": room[..., :32]}))
    (seen,) = kernels.calls
    assert torch.equal(seen["q"], call["q"]) and seen["q"].is_contiguous()


def test_calls_that_are_alike_have_one_launcher(kernels: DecodeKernels) -> None:
    for lengths in ((9, 0, 21), (3, 24, 1)):
        flash_attn_with_kvcache(**replace(PAGES, lengths=lengths).build(torch.bfloat16))
    assert len(kernels.loaded) == 1 and len(kernels.calls) == 2
    flash_attn_with_kvcache(**PAGES.build(torch.bfloat16), causal=True)
    assert [config.causal for config in kernels.loaded] == [False, True]


def test_what_serves_while_a_graph_is_captured_is_not_remembered(
    kernels: DecodeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = PAGES.build(torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "lasting_config", lambda call: None)
        of_graph = flash_attn_with_kvcache(**call)
    assert torch.equal(flash_attn_with_kvcache(**call), of_graph) and len(kernels.loaded) == 2
    flash_attn_with_kvcache(**call)
    assert len(kernels.loaded) == 2 and len(kernels.calls) == 3


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_second_query(packed: bool, kernels: DecodeKernels) -> None:
    """That begins with the other in rows of both, as in models; so do the caches."""
    queries = (2, 0, 3) if packed else (2, 2, 2)
    case = CacheCase(page_size=8, queries=queries, heads=(40, 1), packed_q=packed)
    call = case.build(torch.bfloat16, causal=True, sinks=torch.linspace(-1.0, 1.0, 40))
    rows = torch.randn(*call["q"].shape[:-1], 56).bfloat16()
    caches = torch.cat((call["v_cache"], call["k_cache"]), -1)
    call |= {
        "q": rows[..., 24:],
        "qv": rows[..., :24],
        "k_cache": caches[..., 24:],
        "v_cache": caches[..., :24],
    }
    out, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    exact, exact_lse = case.expected(call)
    assert (out - exact).abs().max() <= 1.6e-2
    assert (lse - exact_lse).nan_to_num(0.0, neginf=0.0).abs().max() <= 1e-3
    (seen,), (config,) = kernels.calls, kernels.loaded
    assert isinstance(config, MlaConfig) and config.cluster == 2
    assert seen["q"] is call["q"] and seen["qv"] is call["qv"] and seen["v"] is call["v_cache"]
    assert seen["num_ctas"] == (ctas_of_pieces(SMS // 2, 3) if packed else SMS // 2)
    assert seen["parts"].shape == (PARTS_PER_CTA * seen["num_ctas"], 128 * (256 + 4))
