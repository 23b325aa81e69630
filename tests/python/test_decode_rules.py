"""Which calls on a cache the decode kernel serves, with which config, and what ``explain_kvcache`` says of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper.decode.config import (
    PAIRED_TILE_M,
    DecodeConfig,
    takes_clusters,
)
from hopper.decode.schedule import Pieces, heads_together
from hopper_attention import decode_rules, driver, explain_kvcache
from hopper_attention.backends import Target
from hopper_attention.decode_rules import (
    CTA_STEP,
    MAX_PARTS,
    ctas_of_pieces,
    even_ctas,
    in_clusters,
    select_decode,
    serving_config,
    why_not_decode,
)
from hopper_attention.kvcache_call import CacheExtras, CacheOptions, read_call
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch.decode import is_aligned, table_of
from tests.python.kvcache_cases import FP8, CacheCase, int32

H200 = Target("fake H200", (9, 0), assume_installed=True)
HOPPER = (9, 0)

PAGES = CacheCase(page_size=8)
CONTIGUOUS = CacheCase()
OF_16_BYTES = replace(PAGES, head_dims=(32, 48))
"""Rows of e4m3 that TMA can address."""


def read(arguments: dict[str, Any]) -> tuple[CacheCall, CacheTensors]:
    """The checked call that ``flash_attn_with_kvcache`` makes of its arguments."""
    arguments = dict(arguments)
    tensors = {name: arguments.pop(name) for name in CacheTensors._fields if name in arguments}
    extras = {name: arguments.pop(name) for name in CacheExtras._fields if name in arguments}
    call, given, _, _ = read_call(CacheTensors(**tensors), CacheExtras(**extras), CacheOptions(**arguments))
    return call, given


def call_of(case: CacheCase, **given: Any) -> CacheCall:
    return read(case.build(torch.bfloat16, **given))[0]


@pytest.mark.parametrize(
    ("heads", "capacity", "others", "room", "cluster"),
    [
        ((32, 8), 2048, {}, 15, 8),
        ((32, 8), 2048, {}, 7, 1),
        ((32, 8), 4096, {}, 15, 1),
        ((32, 32), 8192, {}, 66, 2),
        ((32, 32), 8448, {}, 66, 1),
        ((28, 28), 8192, {}, 66, 1),
        ((28, 28), 1024, {}, 66, 2),
        ((32, 4), 1024, {}, 15, 1),
        ((32, 8), 1024, {"num_splits": 2}, 15, 1),
        ((32, 8), 1024, {"sm_margin": 8}, 15, 1),
    ],
)
def test_clusters_are_for_short_caches_of_one_sequence(
    heads: tuple[int, int],
    capacity: int,
    others: dict[str, Any],
    room: int,
    cluster: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``room``: the clusters of that size that the GPU holds."""
    monkeypatch.setattr(decode_rules, "most_clusters", lambda index, size: room)
    capturing = [False, True]
    monkeypatch.setattr(decode_rules, "is_capturing", lambda device: capturing.pop(0))
    case = CacheCase(lengths=(9,), queries=(1,), heads=heads, head_dims=(128, 128), capacity=capacity)
    call = call_of(case, **others)
    assert serving_config(call) == select_decode(call)
    on_a_gpu = replace(call, shape=replace(call.shape, device=torch.device("cuda", 0)))
    was_asked = len(capturing)
    alone = select_decode(call, cluster)
    assert serving_config(on_a_gpu) == alone
    # In a graph the driver, which may not be asked there, is not.
    assert len(capturing) == was_asked or serving_config(on_a_gpu) == select_decode(call)


@pytest.mark.parametrize(
    ("changes", "given", "cluster"),
    [
        ({}, {"cache_seqlens": 2000}, 2),
        ({}, {"cache_seqlens": None}, 2),
        ({}, {}, 1),
        ({"capacity": 8193}, {"cache_seqlens": 8192}, 2),
        ({"capacity": 8193}, {"cache_seqlens": None}, 1),
        ({"leftpad": (1, *7 * (0,))}, {"cache_seqlens": 2000}, 1),
        ({"new": 8 * (1,)}, {"cache_seqlens": 2000}, 2),
        ({"new": 8 * (1,), "packed_new": True}, {"cache_seqlens": 2000}, 1),
        ({"capacity": 1024, "leftpad": (1, *7 * (0,))}, {}, 2),
        ({"heads": (36, 6)}, {"cache_seqlens": 9}, 1),
        ({"heads": (28, 7)}, {"cache_seqlens": 9}, 2),
        ({"heads": (8, 1)}, {"cache_seqlens": 9}, 8),
        ({"heads": (8, 1)}, {}, 1),
        ({"heads": (8, 1), "capacity": 1024}, {}, 8),
    ],
    ids=str,
)
def test_clusters_are_for_short_caches_and_for_sequences_of_one_length_that_the_host_knows(
    changes: dict[str, Any], given: dict[str, Any], cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_rules, "most_clusters", lambda index, size: 132 // size)
    monkeypatch.setattr(decode_rules, "is_capturing", lambda device: False)
    case = CacheCase(lengths=8 * (9,), queries=8 * (1,), heads=(32, 8), head_dims=(128, 128), capacity=2048)
    call = call_of(replace(case, **changes), **given)
    assert serving_config(call).cluster == 1
    on_a_gpu = replace(call, shape=replace(call.shape, device=torch.device("cuda", 0)))
    assert serving_config(on_a_gpu) == select_decode(call, cluster)


@pytest.mark.parametrize(
    ("case", "given"),
    [
        (CONTIGUOUS, {"causal": True}),
        (PAGES, {"window_size": (4, 1), "softcap": 2.0}),
        (OF_16_BYTES, {"cache_dtype": FP8}),
        (replace(PAGES, head_dims=(256, 256), queries=(40, 40, 40)), {"sinks": torch.zeros(4)}),
        (replace(PAGES, page_size=24, leftpad=(1, 0, 2)), {}),
        (replace(PAGES, queries=(33, 33, 33)), {}),
        (PAGES, {"num_splits": 2}),
    ],
    ids=str,
)
def test_configs_in_clusters_are_those_of_calls(case: CacheCase, given: dict[str, Any]) -> None:
    call = call_of(case, **given)
    plain = select_decode(call)
    expected = [select_decode(call, cluster) for cluster in (2, 8)] if takes_clusters(plain) else []
    assert list(in_clusters(plain, 8)) == expected
    assert list(in_clusters(plain, 9)) == expected[:1]
    assert bool(expected) != (case.queries[0] == 33 or "num_splits" in given)


class Driver:
    """Of a GPU with room for 120 CTAs in clusters; ``refuses`` is what it has nothing for."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.set, self.called = refuses, [], []
        self.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=97)
        self.CUfunction_attribute = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        )
        self.CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4)
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = SimpleNamespace
        self.CUlaunchAttributeValue = lambda: SimpleNamespace(clusterDim=SimpleNamespace())

    def __getattr__(self, name: str) -> Any:
        from cuda.bindings import driver as real

        if not hasattr(real, name):
            raise AttributeError(name)

        def function(*given: Any) -> tuple[Any, ...]:
            self.called.append(name)
            if name == "cuFuncSetAttribute":
                self.set.append(given[1:])
            if name == "cuOccupancyMaxActiveClusters":
                assert given[1].sharedMemBytes == 232_448
                return 0, 120 // given[1].attrs[0].value.clusterDim.x
            return int(name == self.refuses), 232_448

        function.__name__ = name
        return function


def test_room_for_clusters_is_what_the_driver_says() -> None:
    fake = Driver()
    assert driver.count_clusters(fake, 0, 8) == 15
    assert fake.set == [(14, 1), (8, 232_448)]
    assert fake.called[-3:] == ["cuModuleUnload", *LEAVES]
    with pytest.raises(AttributeError, match="cuNoSuchCall"):
        fake.cuNoSuchCall()


LEAVES = ["cuCtxPopCurrent", "cuDevicePrimaryCtxRelease"]


@pytest.mark.parametrize(
    ("refuses", "undone"),
    [
        ("cuDeviceGet", []),
        ("cuModuleLoadData", LEAVES),
        ("cuModuleGetFunction", ["cuModuleUnload", *LEAVES]),
        ("cuFuncSetAttribute", ["cuModuleUnload", *LEAVES]),
    ],
)
def test_a_driver_that_refuses_is_left_as_it_was(refuses: str, undone: list[str]) -> None:
    fake = Driver(refuses)
    with pytest.raises(RuntimeError, match=f"{refuses} gives 1"):
        driver.count_clusters(fake, 0, 8)
    assert fake.called[fake.called.index(refuses) + 1 :] == undone


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_without_an_answer_there_are_no_clusters(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*given: Any) -> int:
        raise error

    monkeypatch.setattr(driver, "_most_clusters", ask)
    assert driver.most_clusters(0, 2) == 0


def test_a_cache_of_more_keys_than_32_bits_count_is_not_for_kernels_that_count_them() -> None:
    call = call_of(PAGES)
    for capacity, reason in ((MAX_SEQLEN, ""), (2**31, "room for 2147483648 keys"), (2**32, "room for")):
        found = why_not_decode(replace(call, shape=replace(call.shape, capacity=capacity)), H200, "hopper")
        assert reason in found and bool(found) == bool(reason)


SERVED: dict[str, tuple[CacheCase, dict[str, Any]]] = {
    "pages": (PAGES, {}),
    "no pages": (CONTIGUOUS, {}),
    "as many rows as a tile has": (replace(PAGES, queries=(32, 32, 32)), {}),
    "packed queries": (replace(PAGES, queries=(32, 0, 1), packed_q=True), {}),
    "more rows than a tile has": (replace(PAGES, queries=(33, 33, 33)), {}),
    "more heads than a tile has": (replace(PAGES, queries=(1, 1, 1), heads=(144, 1)), {}),
    "leftpad in one page": (replace(PAGES, leftpad=(4, 0, 7), page_size=24), {}),
    "batch index": (replace(CONTIGUOUS, batch_idx=(4, 0, 2)), {}),
    "new tokens": (replace(PAGES, new=(1, 1, 1), rotary_dim=16), {}),
    "one page of any size": (replace(PAGES, page_size=27, capacity=27), {}),
    "a cache of e4m3": (OF_16_BYTES, {"cache_dtype": FP8}),
    "a cache of e4m3 and a softcap": (OF_16_BYTES, {"cache_dtype": FP8, "softcap": 2.0}),
    "q and a cache of e4m3": (OF_16_BYTES, {"cache_dtype": FP8, "q": torch.zeros(3, 3, 4, 32).to(FP8)}),
    "wide heads": (replace(PAGES, head_dims=(256, 256)), {}),
    "window, cap, sinks": (PAGES, {"window_size": (5, 0), "softcap": 3.0, "sinks": torch.zeros(4)}),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name: str) -> None:
    case, given = SERVED[name]
    call = call_of(case, **given)
    assert why_not_decode(call, H200, "hopper") == ""
    config, shape = select_decode(call), call.shape
    assert shape.rows_a_kv_head <= config.tile_m or config.tile_m == PAIRED_TILE_M
    assert config.head_dim >= shape.head_dim and config.head_dim_v >= shape.head_dim_v
    page_size = shape.page_size or shape.capacity
    assert page_size == shape.capacity or page_size % config.box_rows == 0


def with_columns(cache: Tensor, room: int) -> Tensor:
    """The same in rows of ``room`` columns."""
    wider = torch.zeros(*cache.shape[:-1], room, dtype=cache.dtype)
    wider[..., : cache.shape[-1]] = cache
    return wider[..., : cache.shape[-1]]


NO_KEYS = CacheCase(lengths=(0, 0, 0), capacity=0)
REFUSED: dict[str, tuple[CacheCase, dict[str, Any], str]] = {
    "qv": (PAGES, {"qv": torch.zeros(3, 3, 4, 24).bfloat16()}, "there is a qv"),
    "wide values": (
        replace(PAGES, head_dims=(32, 264)),
        {},
        "head_dim 32 or head_dim_v 264 is above 256",
    ),
    "slopes": (PAGES, {"alibi_slopes": torch.zeros(3, 4)}, "there are alibi_slopes"),
    "rows of e4m3 of 24 bytes": (PAGES, {"cache_dtype": FP8}, "TMA cannot address the strides of the cache"),
    "leftpad and pages": (
        replace(PAGES, leftpad=(4, 0, 7)),
        {},
        "there is a leftpad, which its kernel takes for caches of one page a sequence",
    ),
    "wide rows of e4m3": (
        replace(PAGES, head_dims=(32, 208), queries=(9, 9, 9)),
        {"cache_dtype": FP8},
        "head_dim 32 or head_dim_v 208 of a cache of e4m3 is above 192",
    ),
    "no keys": (NO_KEYS, {}, "there is no query or no key"),
    "no queries": (replace(PAGES, queries=(0, 0, 0)), {}, "there is no query or no key"),
    "short pages": (
        replace(PAGES, page_size=12),
        {},
        "no 8 rows of a page of 12 lie together at multiples of 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    case, given, reason = REFUSED[name]
    assert why_not_decode(call_of(case, **given), H200, "hopper") == reason
    plan = explain_kvcache(**case.build(torch.bfloat16, **given), device_capability=HOPPER)
    assert plan.path != "decode" and plan.refused[0] == f"decode: {reason}"


def test_other_backends_and_strides_are_refused() -> None:
    call = call_of(PAGES)
    for backend in ("ampere", "reference"):
        expected = f"its kernel is for Hopper GPUs, and the backend is {backend}"
        assert why_not_decode(call, H200, backend) == expected
    arguments = PAGES.build(torch.bfloat16)
    for name in ("k_cache", "v_cache"):
        odd = arguments | {name: with_columns(arguments[name], arguments[name].shape[-1] + 4)}
        assert "strides of the cache" in why_not_decode(read(odd)[0], H200, "hopper")
        fine = arguments | {name: with_columns(arguments[name], arguments[name].shape[-1] + 8)}
        assert why_not_decode(read(fine)[0], H200, "hopper") == ""


def test_the_config_is_of_what_is_asked_for() -> None:
    plain = select_decode(call_of(PAGES))
    assert (plain.dtype, plain.head_dim, plain.head_dim_v, plain.causal) == ("bfloat16", 64, 64, False)
    assert (plain.tile_m, plain.box_rows, plain.layout, plain.leftpad) == (32, 8, "dense", False)
    assert not (plain.window or plain.chunk or plain.softcap or plain.sinks)
    assert plain.paged and not plain.limits_splits and not plain.is_widened
    changes: list[tuple[CacheCase, dict[str, Any], dict[str, Any]]] = [
        (PAGES, {"causal": True}, {"causal": True}),
        (PAGES, {"window_size": (4, 1)}, {"window": True}),
        (PAGES, {"softcap": 2.0}, {"softcap": True}),
        (PAGES, {"sinks": torch.zeros(4)}, {"sinks": True}),
        (replace(PAGES, page_size=24, leftpad=(1, 0, 2)), {}, {"leftpad": True, "box_rows": 128}),
        (replace(PAGES, queries=(1, 2, 0), packed_q=True), {}, {"layout": "varlen"}),
        (replace(PAGES, queries=(17, 17, 17)), {}, {"tile_m": 64}),
        (replace(PAGES, queries=(33, 33, 33)), {}, {"tile_m": 128}),
        (PAGES, {"num_splits": 3}, {"limits_splits": True}),
        (CONTIGUOUS, {}, {"box_rows": 128, "paged": False}),
        (replace(CONTIGUOUS, batch_idx=(4, 0, 2)), {}, {"box_rows": 128}),
        (replace(PAGES, page_size=24), {}, {"box_rows": 128}),
        (replace(PAGES, page_size=24, capacity=48), {}, {"box_rows": 8}),
    ]
    for case, given, expected in changes:
        in_small_boxes = {"tile_m", "box_rows"}.isdisjoint(expected) or expected.get("box_rows") == 8
        stages = {"stages": 3 if in_small_boxes else 2}
        assert select_decode(call_of(case, **given)) == replace(plain, **(expected | stages))
    for tile_m in (4, 8, 16):
        case = replace(OF_16_BYTES, heads=(tile_m // 2, 2), queries=(3, 3, 3))
        swapped = select_decode(call_of(case, cache_dtype=FP8))
        assert (swapped.tile_m, swapped.is_swapped, swapped.raw_stages) == (tile_m, True, 0)
    assert swapped.dtype == "bfloat16" and not swapped.e4m3_queries
    e4m3 = torch.zeros(3, 3, 8, 32).to(FP8)
    assert select_decode(call_of(case, cache_dtype=FP8, q=e4m3)) == replace(swapped, e4m3_queries=True)
    widened = select_decode(call_of(replace(OF_16_BYTES, queries=(9, 9, 9)), cache_dtype=FP8))
    assert widened.is_widened and widened.dtype == "bfloat16" and widened.raw_stages > 1
    chunked = select_decode(call_of(PAGES, attention_chunk=5))
    assert chunked.window and chunked.chunk


@pytest.mark.parametrize(
    ("multiprocessors", "ctas"), [(1, 1), (15, 15), (16, 16), (31, 16), (78, 64), (114, 112), (132, 128)]
)
def test_ctas_of_pieces(multiprocessors: int, ctas: int) -> None:
    assert ctas_of_pieces(multiprocessors, 2) == ctas
    assert ctas_of_pieces(multiprocessors, 1) == min(ctas, MAX_PARTS)
    assert ctas % CTA_STEP == 0 or multiprocessors < CTA_STEP


@pytest.mark.parametrize(
    ("kv_heads", "ctas", "together"),
    [
        (1, 128, 1),
        (4, 128, 4),
        (5, 130, 5),
        (7, 126, 7),
        (8, 128, 8),
        (12, 132, 12),
        (24, 128, 8),
        (32, 128, 16),
    ],
)
def test_ctas_for_all_heads_of_a_sequence(kv_heads: int, ctas: int, together: int) -> None:
    assert ctas_of_pieces(132, 1000, kv_heads) == ctas
    assert heads_together(kv_heads, ctas) == together


@pytest.mark.parametrize(
    ("kv_heads", "tiles", "any_lengths", "one_length"),
    [
        (1, 1, 64, 64),
        (1, 79, 128, 128),
        (1, 80, 128, 80),
        (1, 119, 128, 119),
        (1, 120, 120, 120),
        (1, 132, 132, 132),
        (1, 133, 128, 128),
        (1, 238, 128, 119),
        (1, 240, 120, 120),
        (1, 261, 128, 128),
        (1, 264, 132, 132),
        (1, 396, 132, 132),
        (1, 400, 128, 128),
        (2, 118, 128, 118),
        (2, 130, 130, 130),
        (4, 108, 128, 128),
        (4, 112, 128, 112),
        (4, 264, 128, 132),
        (8, 120, 128, 128),
        (8, 264, 128, 132),
    ],
)
def test_ctas_have_whole_tiles_where_these_are_enough(
    kv_heads: int, tiles: int, any_lengths: int, one_length: int
) -> None:
    assert ctas_of_pieces(132, tiles, kv_heads) == any_lengths
    assert ctas_of_pieces(132, tiles, kv_heads, has_one_length=True) == one_length
    if one_length != even_ctas(132, tiles, kv_heads):
        pieces = Pieces(tiles * 7, one_length)
        assert all(pieces.begin(cta) % 7 == 0 for cta in range(one_length))


def test_no_smaller_gpu_has_more_ctas() -> None:
    """The C library's workspace is for the largest one."""
    for kv_heads, batch in product((1, 2, 3, 8), range(400)):
        most = ctas_of_pieces(132, batch * kv_heads, kv_heads)
        assert all(ctas_of_pieces(sms, batch * kv_heads, kv_heads) <= min(sms, most) for sms in range(1, 132))


def table(arguments: dict[str, Any]) -> Tensor:
    call, tensors = read(arguments)
    found = table_of(tensors)
    assert (
        found is not None
        and found.dtype == torch.int32
        and found.stride(1) == 1
        and found.shape[0] == call.shape.batch
    )
    return found


def test_the_table_of_a_cache() -> None:
    arguments = PAGES.build(torch.bfloat16)
    assert table(arguments) is arguments["page_table"]
    assert table_of(read(CONTIGUOUS.build(torch.bfloat16))[1]) is None
    chosen = replace(CONTIGUOUS, batch_idx=(4, 0, 2)).build(torch.bfloat16)
    assert table(chosen).tolist() == [[4], [0], [2]]
    paged = replace(PAGES, batch_idx=(4, 0, 2)).build(torch.bfloat16)
    assert torch.equal(table(paged), paged["page_table"][[4, 0, 2]])
    paged["cache_batch_idx"] = int32((4, -3, 100))
    assert torch.equal(table(paged), paged["page_table"][[4, 0, -1]])


@pytest.mark.parametrize("strides", [(1, 3), (8, 24), (24, 1)])
def test_a_table_of_one_page_may_have_any_strides(strides: tuple[int, int]) -> None:
    arguments = replace(PAGES, page_size=24).build(torch.bfloat16)
    column = torch.zeros(72, dtype=torch.int32).as_strided((3, 1), strides)
    column.copy_(arguments["page_table"])
    assert torch.equal(table(arguments | {"page_table": column}), column)


def test_caches_that_begin_at_16_bytes_are_aligned() -> None:
    arguments = PAGES.build(torch.bfloat16)
    assert is_aligned(read(arguments)[1])
    for name in ("k_cache", "v_cache"):
        cache = arguments[name]
        room = torch.zeros(cache.numel() + 8, dtype=cache.dtype)
        for offset, expected in ((4, False), (8, True)):
            moved = room[offset : offset + cache.numel()].view(cache.shape)
            assert is_aligned(read(arguments | {name: moved})[1]) is expected


def test_explain_says_that_the_decode_kernel_runs() -> None:
    case = replace(PAGES, new=(1, 1, 1), page_size=8)
    arguments = case.build(torch.bfloat16, causal=True)
    plan = explain_kvcache(**arguments, device_capability=HOPPER)
    assert (plan.path, plan.backend, plan.refused) == ("decode", "hopper", ())
    assert isinstance(plan.config, DecodeConfig) and plan.config == select_decode(read(arguments)[0])
    assert len(plan.steps) == 1 and plan.steps[0].startswith("3 new tokens are written into the cache, by")
    assert "decode: a kernel shares all keys out over the GPU" in str(plan)
    assert plan.config.name in str(plan)
    there = explain_kvcache(**arguments, device_capability=(8, 0))
    assert there.path != "decode" and there.refused[0].endswith("the backend is ampere")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(
    ("heads", "queries", "tile_m"),
    [((4, 1), 1, 4), ((8, 1), 1, 8), ((8, 1), 2, 16), ((32, 1), 1, 32), ((16, 1), 4, 64)],
)
def test_a_softcap_leaves_a_cache_of_e4m3_to_the_decode_kernel(
    heads: tuple[int, int], queries: int, tile_m: int, dtype: torch.dtype
) -> None:
    """With other kernels of the same tiles, whatever else there is, unless more rows of e4m3 are for tiles of the
    forward kernel."""
    case = replace(OF_16_BYTES, heads=heads, queries=(queries,) * 3)
    others: tuple[dict[str, Any], ...] = (
        {},
        {"window_size": (4, 0), "sinks": torch.zeros(heads[0])},
        {"num_splits": 2},
    )
    for given in others:
        plain, capped = (
            explain_kvcache(**case.build(dtype, FP8, softcap=cap, **given), device_capability=HOPPER)
            for cap in (0.0, 50.0)
        )
        if dtype == FP8 and tile_m > 16:
            assert plain.path == capped.path == "tiles"
            continue
        assert capped.path == "decode" and isinstance(capped.config, DecodeConfig)
        assert capped.config.tile_m == max(tile_m, 32 if dtype == torch.float16 else 0)
        assert capped.config.name.endswith("_softcap_sinks" if "sinks" in given else "_softcap")
        if plain.path == "decode":
            assert isinstance(plain.config, DecodeConfig)
            assert capped.config == replace(plain.config, softcap=True)


def test_explain_reads_no_tensor() -> None:
    arguments = PAGES.build(torch.bfloat16, causal=True)
    there = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
    assert str(explain_kvcache(**there, device_capability=HOPPER)) == str(
        explain_kvcache(**arguments, device_capability=HOPPER)
    )
