"""Numbers of attention on a key/value cache against plain indexing in float64, with NaN wherever no key is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_with_kvcache
from tests.python.kvcache_cases import FP8, CacheCase, bits, int32

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, FP8: 1.6e-2}
PAGE_SIZES = (0, 1, 3, 16, 64)
NEW = CacheCase(new=(3, 2, 3), packed_new=True)


def run(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = flash_attn_with_kvcache(**call, **options, return_softmax_lse=True)
    return out, lse


def check(case: CacheCase, dtype: torch.dtype = torch.float16, **given: Any) -> tuple[Tensor, Tensor]:
    """Run a case, compare the caches bit by bit where tokens are not rotated, and the results with float64."""
    call = case.build(dtype, **given)
    k_after, v_after = case.caches_after(call)
    out, lse = run(call)
    assert torch.equal(bits(call["v_cache"]), bits(v_after))
    if case.rotary_dim:
        is_key = ~k_after.double().isnan()
        assert torch.equal(~call["k_cache"].double().isnan(), is_key)
        difference = (call["k_cache"].double() - k_after.double())[is_key].abs()
        assert difference.max() <= (0.25 if k_after.dtype == FP8 else 0.02)
        assert (difference > 0).sum() <= 0.02 * difference.numel()
    else:
        assert torch.equal(bits(call["k_cache"]), bits(k_after))
    exact, exact_lse = case.expected(call)
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype) and out.shape == exact.shape
    assert lse.dtype == torch.float32 and lse.shape == exact_lse.shape and lse.is_contiguous()
    assert (out.double() - exact).abs().max() <= TOLERANCE[dtype] * max(1.0, exact.abs().max())
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert (lse.double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= 5e-3
    return out, lse


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_any_size(page_size: int) -> None:
    case = CacheCase(page_size=page_size, capacity=64 if page_size == 64 else 24)
    check(case, causal=True)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_new_tokens_with_rotary_embedding(page_size: int, interleaved: bool) -> None:
    capacity = 64 if page_size == 64 else 24
    case = replace(NEW, page_size=page_size, capacity=capacity, rotary_dim=16, interleaved=interleaved)
    check(case, torch.bfloat16, causal=True)


@pytest.mark.parametrize(
    ("rotary_dim", "options"),
    [
        (16, {}),
        (32, {"causal": True}),
        (32, {"window_size": (3, -1)}),
        (16, {"attention_chunk": 5}),
        (16, {"window_size": (100, 100)}),
    ],
    ids=str,
)
def test_positions_of_queries(rotary_dim: int, options: dict[str, Any]) -> None:
    check(replace(NEW, rotary_dim=rotary_dim, options=options))
    check(replace(NEW, rotary_dim=rotary_dim, rotary_seqlens=(2, 5, 0), options=options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tables_of_cosines_may_have_another_dtype(dtype: torch.dtype) -> None:
    case = replace(NEW, rotary_dim=32)
    call = case.build(torch.bfloat16)
    call |= {name: call[name].to(dtype) for name in ("rotary_cos", "rotary_sin")}
    expected = case.caches_after(call)[0]
    run(call)
    is_key = ~expected.isnan()
    assert (call["k_cache"] - expected)[is_key].abs().max() <= 0.02


LAYOUTS: dict[str, CacheCase] = {
    "dense new tokens": CacheCase(new=(2, 2, 2)),
    "packed queries": CacheCase(queries=(1, 0, 6), packed_q=True),
    "packed queries and tokens": replace(NEW, queries=(0, 4, 2), packed_q=True, page_size=3, rotary_dim=16),
    "no new token of some": CacheCase(new=(0, 4, 0), packed_new=True),
    "batch index": CacheCase(batch_idx=(4, 0, 2), new=(1, 1, 1)),
    "batch index and pages": replace(NEW, batch_idx=(3, 1, 0), page_size=4, rotary_dim=16),
    "leftpad": CacheCase(leftpad=(4, 0, 20)),
    "leftpad, new tokens": replace(NEW, leftpad=(4, 0, 7), rotary_dim=16),
    "leftpad, pages, batch index": replace(NEW, leftpad=(4, 0, 7), page_size=3, batch_idx=(4, 2, 1)),
    "leftpad of all": CacheCase(leftpad=(9, 0, 3)),
    "one query": CacheCase(queries=(1, 1, 1)),
    "one head of keys": CacheCase(heads=(4, 1), page_size=16),
    "a head of keys each": replace(NEW, heads=(3, 3)),
    "full": CacheCase(lengths=(24, 20, 24), new=(0, 4, 0), packed_new=True, page_size=8),
    "wide values": CacheCase(head_dims=(32, 320)),
    "more queries than keys": CacheCase(queries=(11, 11, 11), lengths=(9, 1, 4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(name: str, causal: bool) -> None:
    check(LAYOUTS[name], causal=causal)


SCORES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (4, 1)},
    "causal window": {"window_size": (4, 0), "causal": True},
    "window as a tensor": {"window_size": (0, 2)},
    "chunk": {"attention_chunk": 5, "causal": True},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "slopes": {"alibi_slopes": torch.tensor([[0.5, 0.1, 0.0, 1.0]]).repeat(3, 1), "causal": True},
    "scale": {"softmax_scale": 0.7},
    "all": {"softcap": 9.0, "sinks": torch.zeros(4), "window_size": (6, 0), "softmax_scale": 0.5},
}


@pytest.mark.parametrize("name", SCORES)
def test_what_is_done_to_scores(name: str) -> None:
    check(CacheCase(page_size=3, options=SCORES[name]))
    check(replace(NEW, leftpad=(4, 0, 7), packed_q=True, queries=(5, 1, 2), options=SCORES[name]))


def test_a_side_of_a_window_that_is_a_tensor_is_read_in_every_call() -> None:
    call = CacheCase(page_size=3).build(torch.bfloat16)
    left = torch.tensor(6)
    for side in (6, 1):
        left.fill_(side)
        for one, other in zip(
            run(call, window_size=(left, 0)), run(call, window_size=(side, 0)), strict=True
        ):
            assert torch.equal(one, other)


def test_a_cache_without_lengths_is_full() -> None:
    case = CacheCase(lengths=(8, 8, 8), capacity=8, leftpad=(3, 0, 8))
    call = case.build(torch.float16)
    del call["cache_seqlens"]
    out, lse = run(call)
    exact, exact_lse = case.expected(call)
    assert (out - exact).abs().max() <= 2e-3
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("leftpad", [(), (1, 0, 5)], ids=str)
def test_one_length_for_all(page_size: int, leftpad: tuple[int, ...]) -> None:
    case = CacheCase(lengths=(5, 5, 5), new=(2, 2, 2), page_size=page_size, leftpad=leftpad, rotary_dim=16)
    as_int, as_tensor = case.build(torch.bfloat16, cache_seqlens=5), case.build(torch.bfloat16)
    for one, other in zip(run(as_int, causal=True), run(as_tensor, causal=True), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(bits(as_int["k_cache"]), bits(as_tensor["k_cache"]))


def test_a_second_query() -> None:
    case = CacheCase(heads=(4, 1), head_dims=(16, 64), page_size=4, packed_q=True, queries=(2, 1, 3))
    check(case, qv=torch.randn(6, 4, 64).half(), causal=True)
    case = CacheCase(heads=(4, 1), head_dims=(16, 64), new=(3, 3, 3), rotary_dim=16)
    check(case, qv=torch.randn(3, 3, 4, 64).half())


DESCALES = {name: torch.tensor([[0.5, 2.0], [1.0, 0.25], [4.0, 1.0]]) for name in ("k_descale", "v_descale")}


@pytest.mark.parametrize("page_size", [0, 3])
@pytest.mark.parametrize("descales", [{}, DESCALES], ids=["ones", "descales"])
def test_16_bit_queries_on_a_cache_of_e4m3(page_size: int, descales: dict[str, Tensor]) -> None:
    case = replace(NEW, page_size=page_size)
    check(case, torch.bfloat16, cache_dtype=FP8, causal=True, **descales)
    check(replace(case, rotary_dim=32), torch.bfloat16, cache_dtype=FP8, **descales)


def test_tokens_of_e4m3_are_taken_as_they_are() -> None:
    call = NEW.build(torch.bfloat16, FP8, **DESCALES)
    call |= {name: call[name].to(FP8) for name in ("k", "v")}
    k_after, v_after = NEW.caches_after(call)
    run(call)
    assert torch.equal(bits(call["k_cache"]), bits(k_after)) and torch.equal(
        bits(call["v_cache"]), bits(v_after)
    )


def test_tokens_too_large_for_e4m3_become_its_largest() -> None:
    case = CacheCase(new=(1, 1, 1))
    call = case.build(torch.bfloat16, FP8)
    call["v"][0] = 1e6
    run(call)
    assert (call["v_cache"][0, 9].float() == 448.0).all()


@pytest.mark.parametrize("packed_q", [False, True])
def test_queries_of_e4m3(packed_q: bool) -> None:
    q_descale = torch.tensor([[0.5, 2.0], [1.0, 0.25], [2.0, 1.0]])
    case = replace(NEW, packed_q=packed_q, queries=(3, 3, 1), page_size=3)
    check(case, FP8, q_descale=q_descale, **DESCALES, causal=True)
    check(replace(case, rotary_dim=16), FP8, q_descale=q_descale, causal=True)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)], ids=str)
def test_queries_of_e4m3_of_any_strides(order: tuple[int, ...]) -> None:
    """Heads or the batch may lie in memory in any place, with descales as without."""
    q_descale = torch.tensor([[0.5, 2.0], [1.0, 0.25], [2.0, 1.0]])
    call = CacheCase(page_size=3).build(FP8, q_descale=q_descale, **DESCALES)
    strided = call["q"].view(torch.uint8).permute(order).contiguous().view(FP8)
    strided = strided.permute(*sorted(range(4), key=order.__getitem__))
    assert torch.equal(bits(strided), bits(call["q"])) and strided.stride() != call["q"].stride()
    for found, expected in zip(run(call | {"q": strided}), run(call), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_out_is_written(backend: str | None) -> None:
    case = CacheCase(page_size=4)
    call = case.build(torch.float16)
    wanted, _ = run(call | {"backend": backend})
    room = torch.full((3, 3, 4, 48), math.nan, dtype=torch.float16)
    out = flash_attn_with_kvcache(**call, out=room[..., :24], backend=backend)
    assert out.data_ptr() == room.data_ptr()
    assert torch.equal(room[..., :24], wanted) and room[..., 24:].isnan().all()


def test_hints_change_nothing() -> None:
    call = CacheCase(page_size=4).build(torch.float16)
    wanted, _ = run(call)
    hints = {"num_splits": 3, "pack_gqa": True, "sm_margin": 4, "scheduler_metadata": int32([1, 2])}
    assert torch.equal(flash_attn_with_kvcache(**call, **hints), wanted)
    assert torch.equal(flash_attn_with_kvcache(**call, num_splits=None, pack_gqa=False), wanted)


def test_caches_of_any_strides() -> None:
    case = replace(NEW, page_size=4, rotary_dim=16)
    call = case.build(torch.float16)
    other = case.build(torch.float16)
    both = torch.stack([other["k_cache"][..., :24], other["v_cache"]], 1).transpose(2, 3).contiguous()
    other = case.build(torch.float16)
    k_room = torch.full((other["k_cache"].shape[0], 2, 4, 40), math.nan).half().transpose(1, 2)
    k_room[..., :32] = other["k_cache"]
    other |= {"k_cache": k_room[..., :32], "v_cache": both[:, 1].transpose(1, 2)}
    assert not other["v_cache"].is_contiguous()
    for one, two in zip(run(call), run(other), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(bits(call["v_cache"]), bits(other["v_cache"].contiguous()))
    assert k_room[..., 32:].isnan().all()


def untouched(before: Tensor, after: Tensor, places: set[tuple[int, int]]) -> None:
    """Assert that no other row was written, and each of these was."""
    changed = (bits(before) != bits(after)).flatten(2).any(2)
    assert set(map(tuple, changed.nonzero().tolist())) == places


OUTSIDE: list[tuple[CacheCase, dict[str, Any], set[tuple[int, int]]]] = [
    # Two of four tokens of the last sequence have no room.
    (
        CacheCase(lengths=(1, 0, 6), new=(4, 4, 4), capacity=8),
        {},
        {(0, r) for r in (1, 2, 3, 4)} | {(1, r) for r in range(4)} | {(2, 6), (2, 7)},
    ),
    (
        CacheCase(lengths=(1, 0, 6), new=(1, 1, 1), capacity=8),
        {"cache_seqlens": int32([-5, 8, 1 << 31 - 1])},
        set(),
    ),
    (
        CacheCase(lengths=(1, 0, 6), new=(1, 1, 1), capacity=8),
        {"cache_batch_idx": int32([-1, 2, 3])},
        {(2, 0)},
    ),
    (CacheCase(lengths=(1, 0, 6), new=(1, 1, 1), capacity=8), {"cache_batch_idx": int32([-1, 77, 3])}, set()),
]


@pytest.mark.parametrize("number", range(len(OUTSIDE)))
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_nothing_is_written_outside_of_the_cache(number: int, cache_dtype: torch.dtype) -> None:
    case, given, places = OUTSIDE[number]
    call = case.build(torch.bfloat16, cache_dtype) | given
    before = call["k_cache"].clone(), call["v_cache"].clone()
    run(call)
    for one, other in zip(before, (call["k_cache"], call["v_cache"]), strict=True):
        untouched(one, other, places)


@pytest.mark.parametrize("page", [-1, 1 << 30, -(1 << 31)])
def test_a_page_that_is_none_is_not_written(page: int) -> None:
    case = CacheCase(lengths=(3, 0, 6), new=(2, 2, 2), capacity=8, page_size=4)
    call = case.build(torch.bfloat16)
    call["page_table"][0, 1] = page
    before = call["k_cache"].clone()
    table = call["page_table"]
    run(call)
    places = {(int(table[0, 0]), 3), (int(table[1, 0]), 0), (int(table[1, 0]), 1)}
    untouched(before, call["k_cache"], places | {(int(table[2, 1]), 2), (int(table[2, 1]), 3)})


def test_lengths_beyond_the_cache_end_with_it() -> None:
    case = CacheCase(lengths=(8, 8, 8), capacity=8, page_size=4)
    call = case.build(torch.float16)
    wanted, _ = run(call)
    got, _ = run(call | {"cache_seqlens": int32([9, 1 << 30, 8])})
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "case",
    [
        CacheCase(lengths=(), queries=(0,)),
        CacheCase(queries=(0, 0, 0)),
        CacheCase(capacity=0, lengths=(0, 0, 0)),
        CacheCase(queries=(0, 0, 0), packed_q=True),
    ],
    ids=["batch", "queries", "capacity", "packed"],
)
def test_nothing_to_do(case: CacheCase) -> None:
    call = case.build(torch.float16)
    out, lse = run(call)
    assert not out.any() and out.shape[:-1] == call["q"].shape[:-1]
    assert (lse == -math.inf).all()
