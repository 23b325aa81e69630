"""How a call on a cache reaches its kernels, seen on a CPU by stand-ins for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    combine,
    compile_cache,
    explain_kvcache,
    flash_attn_combine,
    flash_attn_with_kvcache,
)
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch import forward
from hopper_attention.launch import kvcache as launch
from hopper_attention.reference.append import append_to_cache, rotate_queries
from hopper_attention.scores import Scores
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.kvcache_cases import FP8, CacheCase, bits, int32
from tests.python.test_paged_forward import Kernels

NEW = CacheCase(new=(3, 2, 3), packed_new=True, page_size=4, rotary_dim=16, interleaved=False)
CASES = {
    "pages": NEW,
    "packed queries": replace(NEW, packed_q=True, queries=(1, 0, 6)),
    "batch index": CacheCase(batch_idx=(4, 0, 2), new=(1, 1, 1)),
    "leftpad": CacheCase(leftpad=(4, 0, 20), new=(3, 3, 3), rotary_dim=32, rotary_seqlens=(2, 0, 5)),
}

Seen = list[tuple[CacheCall, CacheTensors]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What attends on a pretended H200."""
    found: Seen = []

    def attend(call: CacheCall, tensors: CacheTensors, scores: Scores) -> tuple[Tensor, Tensor]:
        found.append((call, tensors))
        return torch.zeros(call.shape.out_shape).to(call.shape.out_dtype), torch.zeros(call.shape.lse_shape)

    pretend(monkeypatch, launch)
    monkeypatch.setattr(launch, "index_of", lambda device: 0)
    for path in launch.PATHS:
        monkeypatch.setitem(launch.PATHS, path, attend)
    launch.find_way.cache_clear()
    yield found
    launch.find_way.cache_clear()


def in_pytorch(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """``launch.append.append`` by its reference."""
    q, cu_seqlens_q, own = (options.pop(name) for name in ("q", "cu_seqlens_q", "per_query_position"))
    assert not options.pop("hadamard")
    if tensors[0].dtype == tensors[2].dtype:
        assert options["k_descale"] is None
    rotation = options["rotation"]
    lengths = append_to_cache(*tensors, **options)
    if rotation is None:
        return lengths, None
    return lengths, rotate_queries(q, rotation, tensors[4], cu_seqlens_q=cu_seqlens_q, per_query_position=own)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_appends_as_pytorch_does(
    name: str, cache_dtype: torch.dtype, causal: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, given = CASES[name], {"causal": causal}
    if cache_dtype == FP8:
        given |= {"k_descale": torch.full((3, 2), 0.5), "v_descale": torch.full((3, 2), 2.0)}
    calls = [case.build(torch.bfloat16, cache_dtype, **given) for _ in range(2)]
    monkeypatch.setattr(launch, "append_by_kernel", in_pytorch)
    flash_attn_with_kvcache(**calls[0])
    flash_attn_with_kvcache(**calls[1], backend="reference")
    (_, ours), (_, theirs) = seen
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None and not one.is_floating_point():
            assert torch.equal(one, other)
    assert torch.equal(bits(ours.q), bits(theirs.q))
    assert torch.equal(bits(ours.k_cache), bits(theirs.k_cache))
    assert torch.equal(bits(ours.v_cache), bits(theirs.v_cache))


def test_what_the_kernel_does_not_do_pytorch_does(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: Tensor, **options: Any) -> Any:
        raise NotImplementedError("not today")

    monkeypatch.setattr(launch, "append_by_kernel", refuse)
    call = NEW.build(torch.bfloat16)
    k_after, v_after = NEW.caches_after(call)
    flash_attn_with_kvcache(**call)
    assert torch.equal(bits(call["v_cache"]), bits(v_after))
    assert (bits(call["k_cache"]) != bits(k_after)).sum() < 10
    assert seen[0][1].cache_seqlens is not None
    assert torch.equal(seen[0][1].cache_seqlens, int32([12, 2, 24]))


def test_no_kernel_appends_where_there_is_nothing_new(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "append_by_kernel", None)
    call = CacheCase(page_size=3).build(torch.bfloat16)
    flash_attn_with_kvcache(**call)
    assert seen[0][1].q is call["q"] and seen[0][1].cache_seqlens is call["cache_seqlens"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sm_margin": SMS}, f"sm_margin is {SMS}, allowed on this GPU"),
        ({"backend": "ampere", "qv": torch.zeros(3, 3, 4, 24).bfloat16()}, "qv is given"),
    ],
)
def test_what_cannot_run_writes_no_cache(given: dict[str, Any], message: str, seen: Seen) -> None:
    call = NEW.build(torch.bfloat16)
    before = call["v_cache"].clone()
    with pytest.raises((ValueError, NotImplementedError), match=message):
        flash_attn_with_kvcache(**call, **given)
    assert torch.equal(bits(before), bits(call["v_cache"])) and not seen


def test_the_kernel_merges_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``merge`` asks whether tensors are on a GPU; this one says so."""

    class OnGpu(Tensor):
        is_cuda = True

    found = []

    def merged(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype, out: Tensor | None) -> Any:
        found.append(dtype)
        return torch.ones(2, 4, 8, dtype=dtype), torch.zeros(2, 4)

    monkeypatch.setattr(combine, "combine_by_kernel", merged)
    parts = torch.zeros(3, 2, 4, 8).as_subclass(OnGpu), torch.zeros(3, 2, 4)
    out, _ = combine.merge(*parts, torch.float16)
    assert found == [torch.float16] and bool((out == 1.0).all())
    out, _ = flash_attn_combine(torch.zeros(3, 2, 4, 8), parts[1])
    assert len(found) == 1 and not out.any()


MANY = CacheCase(page_size=8, queries=(34, 34, 34), options={"pack_gqa": False})
"""More query rows than a tile of the decode kernel has, and not for several of its tiles."""

PAGED = {
    "pages": MANY,
    "packed queries": replace(MANY, packed_q=True, queries=(1, 0, 34)),
    "pages of a batch index": replace(MANY, batch_idx=(3, 1, 0)),
    "no pages": replace(MANY, page_size=0),
    "batch index": replace(MANY, page_size=0, batch_idx=(4, 0, 2)),
    "batch index and leftpad": replace(MANY, page_size=0, batch_idx=(4, 0, 2), leftpad=(4, 0, 20)),
    "new tokens": replace(MANY, new=(1, 3, 2), packed_new=True),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200 that attend to pages."""
    fake = Kernels()
    pretend(monkeypatch, launch, forward)
    monkeypatch.setattr(compile_cache, "get_forward", fake.load)
    monkeypatch.setattr(launch, "append_by_kernel", in_pytorch)
    monkeypatch.setitem(launch.PATHS, "general", None)
    launch.find_way.cache_clear()
    yield fake
    launch.find_way.cache_clear()
    forget_launchers()


@pytest.mark.parametrize("name", PAGED)
def test_a_cache_is_read_where_it_lies(name: str, kernels: Kernels) -> None:
    case = PAGED[name]
    call = case.build(torch.bfloat16)
    for cache in ("k_cache", "v_cache"):
        # The stand-in reads what the kernel does not.
        call[cache] = call[cache].nan_to_num()
    out, lse = flash_attn_with_kvcache(**call, causal=True, sinks=torch.ones(4), return_softmax_lse=True)
    exact, exact_lse = case.expected(call | {"causal": True, "sinks": torch.ones(4)})
    assert (out - exact).abs().max() <= 1.6e-2 and (lse - exact_lse).abs().max() <= 1e-3
    (given,) = kernels.calls
    assert [x.data_ptr() for x in given[1:3]] == [call[name].data_ptr() for name in ("k_cache", "v_cache")]


NOT_PAGED: dict[str, tuple[CacheCase, dict[str, Any], str]] = {
    "e4m3": (MANY, {"cache_dtype": FP8}, "the cache has dtype torch.float8_e4m3fn"),
    "short pages": (replace(MANY, page_size=3), {}, "pages have 3 rows"),
    "leftpad": (replace(MANY, leftpad=(1, 0, 2)), {}, "paged: there is a leftpad"),
    "leftpad, few queries": (CacheCase(page_size=8, leftpad=(1, 0, 2)), {}, "decode: there is a leftpad"),
    "wide values": (replace(MANY, head_dims=(32, 264)), {}, "values of at most 256 columns"),
    "no keys": (CacheCase(lengths=(0, 0, 0), capacity=0), {}, "there is no score"),
    "ampere": (MANY, {"backend": "ampere"}, "the backend 'ampere' has no kernel"),
}


@pytest.mark.parametrize("name", NOT_PAGED)
def test_what_is_not_read_where_it_lies(name: str) -> None:
    case, given, reason = NOT_PAGED[name]
    call = case.build(torch.bfloat16, **given)
    plan = explain_kvcache(**call, device_capability=(8, 0) if name == "ampere" else (9, 0))
    assert plan.path == ("copied" if name == "e4m3" else "general")
    assert any(reason in text for text in plan.refused)


@pytest.mark.parametrize(("case", "path"), [(MANY, "paged"), (CacheCase(page_size=8), "decode")])
def test_explain_says_that_nothing_is_copied(case: CacheCase, path: str) -> None:
    plan = explain_kvcache(**case.build(torch.bfloat16), device_capability=(9, 0))
    assert plan.path == path and plan.steps == () and path in str(plan)
    assert [text.split(":")[0] for text in plan.refused] == ["decode", "mla", "tiles"] * (path == "paged")


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("case", [MANY, CacheCase(page_size=8)], ids=["paged", "decode"])
def test_caches_at_odd_addresses_are_copied(
    case: CacheCase, dtype: torch.dtype, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def attend(call: CacheCall, tensors: CacheTensors, scores: Scores) -> tuple[Tensor, Tensor]:
        found.append(tensors)
        return torch.zeros(call.shape.out_shape).bfloat16(), torch.zeros(call.shape.lse_shape)

    monkeypatch.setattr(launch, "attend_in_general", attend)
    call = case.build(torch.bfloat16, cache_dtype=dtype)
    room = torch.zeros(call["k_cache"].numel() + 1).to(dtype)
    call["k_cache"] = room[1:].view(call["k_cache"].shape)
    flash_attn_with_kvcache(**call)
    assert len(found) == 1 and not kernels.calls
