"""Schedules of a decode step: what they are for, and calls that are made again with other tensors."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper_attention import (
    compile_cache,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    kvcache,
    kvcache_again,
)
from hopper_attention.kvcache_schedule import schedule_of
from hopper_attention.launch import decode
from hopper_attention.launch import kvcache as launch
from tests.python.fake_gpu import forget_launchers, noting, pretend
from tests.python.kvcache_cases import CacheCase, int32

BF16 = torch.bfloat16
CASE = CacheCase(new=(3, 3, 3), page_size=4, rotary_dim=16, packed_q=True)


def schedule_for_case(call: dict[str, Any], **given: Any) -> Tensor:
    """The schedule of a call of ``CASE``."""
    sizes = {"batch_size": 3, "max_seqlen_q": 3, "max_seqlen_k": 24, "num_heads_q": 4, "num_heads_kv": 2}
    sizes |= {"headdim": 32, "headdim_v": 24, "page_size": 4, "max_seqlen_k_new": 3}
    lists = {name: call[name] for name in ("cache_seqlens", "cu_seqlens_q")}
    return get_scheduler_metadata(**{**sizes, **lists, "causal": True, **given})


def test_a_schedule_can_be_handed_on() -> None:
    call, other = (CASE.build(BF16) for _ in range(2))
    schedule = schedule_for_case(call, num_splits=3, max_seqlen_q=np.int32(3))
    assert schedule.dtype == torch.int32 and schedule.shape == (0,)
    wanted = flash_attn_with_kvcache(**call, causal=True)
    del other["max_seqlen_q"]
    assert torch.equal(flash_attn_with_kvcache(**other, causal=True, scheduler_metadata=schedule), wanted)


def test_a_page_has_rows() -> None:
    with pytest.raises(ValueError, match="page_size is 0, allowed: 1 or more, or None"):
        schedule_for_case(CASE.build(BF16), page_size=0)


@pytest.mark.parametrize(
    ("of_schedule", "of_call", "message"),
    [
        (
            {"batch_size": 4, "cache_seqlens": int32([1] * 4), "cu_seqlens_q": int32([0] * 5)},
            {},
            "batch size",
        ),
        ({"num_heads_q": 8}, {}, "the number of query heads is 4 in the call, allowed with this schedule: 8"),
        ({"num_heads_kv": 4}, {}, "the number of K/V heads is 2"),
        ({"headdim": 64}, {}, "head_dim is 32"),
        ({"headdim_v": None}, {}, "head_dim_v is 24 in the call, allowed with this schedule: 32"),
        ({"qkv_dtype": torch.float16}, {}, "the dtype of q is torch.bfloat16"),
        ({"page_size": None}, {}, "the page size is 4 in the call, allowed with this schedule: 0"),
        ({"max_seqlen_q": 2}, {"max_seqlen_q": 3}, "the number of queries of a sequence is 3"),
        ({"max_seqlen_k_new": 2}, {}, "the number of new tokens of a sequence is 3"),
        ({"causal": False}, {}, "causal is True in the call, allowed with this schedule: False"),
        ({"window_size": (5, 0)}, {}, "window_size is (-1, -1)"),
        ({}, {"window_size": [5, None]}, "window_size is (5, -1)"),
        ({"attention_chunk": 8}, {}, "attention_chunk is 0"),
        ({}, {"softcap": 3.0}, "whether there is a softcap is True"),
        ({"cu_seqlens_q": None}, {}, "whether there is cu_seqlens_q is True"),
        ({"cu_seqlens_k_new": int32([0] * 4)}, {}, "whether there is cu_seqlens_k_new is False"),
        ({"cache_leftpad": int32([0] * 3)}, {}, "whether there is cache_leftpad is False"),
        (
            {"num_splits": 2},
            {"num_splits": 3},
            "num_splits is 3 in the call, allowed with this schedule: 2, or 0",
        ),
        ({"pack_gqa": True}, {"pack_gqa": False}, "pack_gqa is False"),
        ({"sm_margin": 4}, {"sm_margin": 8}, "sm_margin is 8"),
    ],
    ids=str,
)
def test_a_schedule_of_other_calls_is_refused(
    of_schedule: dict[str, Any], of_call: dict[str, Any], message: str
) -> None:
    call = CASE.build(BF16)
    call |= {"scheduler_metadata": schedule_for_case(call, **of_schedule), "causal": True} | of_call
    before = call["v_cache"].clone()
    with pytest.raises(ValueError, match="scheduler_metadata does not fit: .*" + re.escape(message)):
        flash_attn_with_kvcache(**call)
    assert torch.equal(before.nan_to_num(), call["v_cache"].nan_to_num())


def test_what_is_no_schedule_changes_nothing() -> None:
    call = CASE.build(BF16)
    schedule = schedule_for_case(call, num_heads_q=8)
    for other in (schedule[:], schedule.clone(), int32([1, 2])):
        assert schedule_of(other) is None
        flash_attn_with_kvcache(**CASE.build(BF16), causal=True, scheduler_metadata=other)


def test_copies_of_a_schedule_are_the_same_one() -> None:
    call = CASE.build(BF16)
    schedule = schedule_for_case(call)
    kept = schedule_of(schedule)
    assert kept is not None and schedule_of(schedule_for_case(call)) is kept
    assert schedule_of(schedule_for_case(call, max_seqlen_k=12)) is kept
    assert schedule_of(schedule_for_case(call, num_splits=2)) is not kept
    assert schedule_of(copy.deepcopy(schedule)) is kept
    assert schedule_of(pickle.loads(pickle.dumps(schedule))) is kept


# calls that are made again, on a GPU by name

Seen = list[tuple[Any, ...]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Arguments of the decode kernel of a pretended H200."""
    found: Seen = []
    pretend(monkeypatch, launch)
    for module in (decode, launch):
        monkeypatch.setattr(module, "index_of", lambda device: 0)
    monkeypatch.setattr(compile_cache, "get_serving", lambda config: noting(found))
    yield found
    forget_launchers()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that is read and checked."""
    found: list[int] = []
    read = kvcache.read_call

    def counted(*arguments: Any) -> Any:
        found.append(1)
        return read(*arguments)

    monkeypatch.setattr(kvcache, "read_call", counted)
    return found


def layer(batch: int = 2, **given: Any) -> dict[str, Any]:
    """A call of a decode step: 8 heads on 2, 64 columns, pages of 16."""
    q, lengths = torch.zeros(batch, 1, 8, 64).bfloat16(), torch.full((batch,), 9, dtype=torch.int32)
    k, v = (torch.zeros(8, 16, 2, 64).bfloat16() for _ in range(2))
    table = torch.zeros(batch, 4, dtype=torch.int32)
    caches = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "page_table": table}
    return caches | {"causal": True} | given


def schedule_for_layers(batch: int = 2, **given: Any) -> Tensor:
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 8, "num_heads_kv": 2, "headdim": 64}
    lengths = torch.zeros(batch, dtype=torch.int32)
    options = {"cache_seqlens": lengths, "page_size": 16, "causal": True}
    return get_scheduler_metadata(batch, **{**sizes, **options, **given})


@pytest.mark.parametrize("with_schedule", [False, True])
def test_layers_of_a_step_share_what_the_first_one_found(
    with_schedule: bool, seen: Seen, reads: list[int]
) -> None:
    given = {"scheduler_metadata": schedule_for_layers()} if with_schedule else {}
    calls = [layer(**given) for _ in range(3)]
    for call in calls:
        out = flash_attn_with_kvcache(**call)
        assert out.shape == (2, 1, 8, 64) and out.dtype == BF16
    # Without a schedule what is found is kept once sizes come again.
    found = 1 if with_schedule else 2
    assert len(reads) == found and len(seen) == 3
    for call, arguments in zip(calls, seen, strict=True):
        q, k_cache, v_cache, _, _, lengths, table, *others = arguments
        assert q is call["q"] and k_cache is call["k_cache"] and v_cache is call["v_cache"]
        # Lengths are read by the kernel alone, so that they may change.
        assert lengths is call["cache_seqlens"] and table is call["page_table"]
        assert others[3:] == list(seen[0][10:])
    if with_schedule:
        # So does the next step, with a schedule of its own.
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule_for_layers()))
        assert len(reads) == 1
    # A batch of another size does not.
    more = {"scheduler_metadata": schedule_for_layers(3)} if with_schedule else {}
    assert flash_attn_with_kvcache(**layer(3, **more)).shape == (3, 1, 8, 64)
    assert len(reads) == found + 1 and seen[-1][0].shape == (3, 1, 8, 64)


def test_a_schedule_of_another_device_is_refused_behind_calls_too(seen: Seen) -> None:
    # As on two GPUs: everything but the device of a schedule is the same.
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    for _ in range(2):
        with pytest.raises(ValueError, match="scheduler_metadata is on meta"):
            flash_attn_with_kvcache(**layer(scheduler_metadata=schedule_for_layers(cache_seqlens=lengths)))
        for _ in range(3):
            flash_attn_with_kvcache(**layer(scheduler_metadata=schedule_for_layers()))
    assert len(seen) == 6


@pytest.mark.parametrize("with_schedule", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_caches_at_odd_addresses_are_not_those_before(
    name: str, dtype: torch.dtype, with_schedule: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"scheduler_metadata": schedule_for_layers()} if with_schedule else {}
    caches = {cache: torch.zeros(8, 16, 2, 64).to(dtype) for cache in ("k_cache", "v_cache")}
    if dtype != BF16:
        given |= dict.fromkeys(("k_descale", "v_descale"), torch.ones(2, 2))
    for _ in range(3):
        flash_attn_with_kvcache(**layer(**caches, **given))
    assert len(seen) == 3 and seen[-1][1] is caches["k_cache"]
    general: list[Any] = []

    def attend(call: Any, tensors: Any, scores: Any) -> tuple[Tensor, Tensor]:
        general.append(tensors)
        return torch.zeros(call.shape.out_shape).bfloat16(), torch.zeros(call.shape.lse_shape)

    monkeypatch.setattr(launch, "attend_in_general", attend)
    odd = torch.zeros(caches[name].numel() + 1).to(dtype)[1:].view(caches[name].shape)
    for _ in range(3):
        flash_attn_with_kvcache(**layer(**caches | {name: odd}, **given))
    # Another kernel reads them, or they are copied; in no case does one get what TMA cannot address.
    assert len(general) + len(seen) == 6
    caught = [x for launched in seen[3:] for x in launched if isinstance(x, Tensor) and x.dtype == dtype]
    assert not any(x.data_ptr() % 16 for x in caught)
    flash_attn_with_kvcache(**layer(**caches, **given))
    assert seen[-1][1] is caches["k_cache"]


@pytest.mark.parametrize("with_schedule", [False, True])
def test_a_call_that_is_made_again_has_its_own_results(with_schedule: bool, seen: Seen) -> None:
    given = {"scheduler_metadata": schedule_for_layers()} if with_schedule else {}
    calls = [layer(**given, return_softmax_lse=True) for _ in range(3)]
    results = [flash_attn_with_kvcache(**call) for call in calls]
    for (out, lse), arguments in zip(results, seen, strict=True):
        assert out is arguments[3] and lse is arguments[4]
        assert (lse.shape, lse.dtype) == ((2, 8, 1), torch.float32) and lse.is_contiguous()
    assert len({x.data_ptr() for pair in results for x in pair}) == 6


@pytest.mark.parametrize("with_schedule", [False, True])
@pytest.mark.parametrize("in_pages", [False, True])
def test_the_latest_call_is_not_looked_up(
    with_schedule: bool, in_pages: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    if with_schedule:
        given["scheduler_metadata"] = schedule_for_layers(page_size=16 if in_pages else None)
    if not in_pages:
        k, v = (torch.zeros(2, 64, 2, 64).bfloat16() for _ in range(2))
        given |= {"page_table": None, "k_cache": k, "v_cache": v}
    options = {"softmax_scale": 0.5, "sm_margin": 4}
    for _ in range(3):
        flash_attn_with_kvcache(**layer(**given, **options))
    found = kvcache_again._find
    monkeypatch.setattr(kvcache_again, "_find", lambda *call: pytest.fail("looked up"))
    flash_attn_with_kvcache(**layer(**given, **options))
    calls: list[dict[str, Any]] = [
        options | {"softmax_scale": 0.25},
        {},
        {"softmax_scale": 0.5, "sm_margin": 8},
    ]
    calls += [options | {"return_softmax_lse": True}, options | {"causal": 1}, options | {"softcap": 3.0}]
    for other in calls if not with_schedule else calls[:-1]:
        with pytest.raises(pytest.fail.Exception):
            flash_attn_with_kvcache(**layer(**given, **other))
    # Another schedule, or none, serves its own calls.
    with pytest.raises(pytest.fail.Exception):
        other = None if with_schedule else schedule_for_layers(page_size=16 if in_pages else None)
        flash_attn_with_kvcache(**layer(**given | {"scheduler_metadata": other}, **options))
    monkeypatch.setattr(kvcache_again, "_find", found)
    for bad, message in (
        ({"sm_margin": True}, "sm_margin is a bool"),
        ({"num_splits": True}, "num_splits is a"),
    ):
        with pytest.raises(TypeError, match=message):
            flash_attn_with_kvcache(**layer(**given, **options | bad))


def test_packed_queries_are_found_again(seen: Seen, reads: list[int]) -> None:
    starts = int32([0, 1, 3])
    schedule = schedule_for_layers(max_seqlen_q=2, cu_seqlens_q=starts)
    for _ in range(3):
        q = torch.zeros(3, 8, 64).bfloat16()
        out = flash_attn_with_kvcache(**layer(scheduler_metadata=schedule, q=q, cu_seqlens_q=starts))
        assert out.shape == q.shape and seen[-1][0] is q and seen[-1][8] is starts
    # A queries' tensor whose rows do not follow each other is read as it lies, too.
    for _ in range(2):
        q = torch.zeros(3, 16, 64).bfloat16()[:, ::2]
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule, q=q, cu_seqlens_q=starts))
        assert seen[-1][0] is q and seen[-1][3].is_contiguous()
    assert len(reads) == 2


def test_lengths_that_are_an_int_are_read_each_time(seen: Seen, reads: list[int]) -> None:
    for length in (5, 9, 60):
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule_for_layers(), cache_seqlens=length))
        assert seen[-1][5].tolist() == [length, length]
    assert len(reads) == 3


def test_hints_of_a_schedule_reach_the_kernel(seen: Seen, reads: list[int]) -> None:
    schedule = schedule_for_layers(num_splits=3, sm_margin=100, pack_gqa=True)
    for given in ({}, {}, {"num_splits": 3}, {"num_splits": 3}):
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule, **given))
    flash_attn_with_kvcache(**layer())
    *hinted, plain = seen
    assert len(hinted) == 4 and all(arguments[11] == 3 and arguments[-1] == 32 for arguments in hinted)
    assert plain[11] is None and plain[-1] == 128 and len(reads) == 3
    # A schedule without hints leaves them to the call.
    flash_attn_with_kvcache(**layer(scheduler_metadata=schedule_for_layers(), num_splits=5))
    assert seen[-1][11] == 5


def test_a_default_of_numpy_leaves_a_hint_to_the_schedule(seen: Seen) -> None:
    schedule = schedule_for_layers(num_splits=3)
    flash_attn_with_kvcache(**layer(scheduler_metadata=schedule, num_splits=np.int64(0)))
    assert seen[-1][11] == 3
    with pytest.raises(TypeError, match="num_splits is a bool"):
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule_for_layers(), num_splits=False))


def test_layers_with_other_options_take_turns(seen: Seen, reads: list[int]) -> None:
    schedule = schedule_for_layers()
    for _ in range(3):
        for scale in (0.5, 0.25):
            flash_attn_with_kvcache(**layer(scheduler_metadata=schedule, softmax_scale=scale))
            assert seen[-1][10] == scale
    assert len(reads) == 2


def test_layers_with_caches_of_other_strides_take_turns(seen: Seen, reads: list[int]) -> None:
    schedule = schedule_for_layers()
    wide = torch.zeros(8, 16, 2, 128).bfloat16()
    for _ in range(3):
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule))
        flash_attn_with_kvcache(
            **layer(scheduler_metadata=schedule, k_cache=wide[..., :64], v_cache=wide[..., 64:])
        )
    assert len(reads) == 2 and len(seen) == 6
    # One cache for both is read anew each time, and served all the same.
    for _ in range(2):
        call = layer(scheduler_metadata=schedule)
        flash_attn_with_kvcache(**call | {"v_cache": call["k_cache"]})
        assert seen[-1][1] is seen[-1][2] is call["k_cache"]


Change = Callable[[dict[str, Any]], dict[str, Any]]

UNLIKE: dict[str, tuple[Change, str]] = {
    "sequences": (lambda call: {"q": call["q"][:1]}, "cache_seqlens has shape (2,)"),
    "heads": (lambda call: {"q": call["q"][:, :, :4]}, "the number of query heads is 4"),
    "dtype": (lambda call: {"q": call["q"].half()}, "k_cache has dtype torch.bfloat16"),
    "tokens": (lambda call: {"q": call["q"].expand(2, 3, 8, 64)}, "the number of queries of a sequence is 3"),
    "pages": (lambda call: {x: call[x][:, :8] for x in ("k_cache", "v_cache")}, "the page size is 8"),
    "v_cache": (lambda call: {"v_cache": call["v_cache"][:4]}, "v_cache has shape"),
    "lengths": (lambda call: {"cache_seqlens": call["cache_seqlens"].long()}, "dtype torch.int64"),
    "table": (lambda call: {"page_table": call["page_table"].T.contiguous().T}, "page_table has stride 2"),
    "device": (lambda call: {"page_table": call["page_table"].to("meta")}, "page_table is on meta"),
    "gradient": (lambda call: {"q": call["q"].requires_grad_()}, "a tensor requires a gradient"),
    "type": (lambda call: {"q": call["q"].tolist()}, "q is a list"),
    "not paged": (lambda call: {"page_table": None}, "k_cache has 8 sequences"),
    "causal": (lambda call: {"causal": False}, "causal is False"),
    "splits": (lambda call: {"num_splits": True}, "num_splits is a bool"),
}
"""What makes a call another one than was seen, and what is said of it."""


@pytest.mark.parametrize("name", UNLIKE)
def test_a_call_that_is_unlike_those_before_is_refused(name: str, seen: Seen) -> None:
    schedule = schedule_for_layers()
    for _ in range(2):
        flash_attn_with_kvcache(**layer(scheduler_metadata=schedule, num_splits=1))
    call = layer(scheduler_metadata=schedule, num_splits=1)
    change, message = UNLIKE[name]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=re.escape(message)):
        flash_attn_with_kvcache(**call | change(call))
    assert len(seen) == 2


def test_what_is_like_but_for_what_only_its_memory_tells_is_read_again(
    seen: Seen, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedule_for_layers()
    given = {"scheduler_metadata": schedule}
    flash_attn_with_kvcache(**layer(**given))
    room = torch.zeros(2 * 8 * 64 + 1).bfloat16()
    q = room[1:].view(2, 1, 8, 64)
    flash_attn_with_kvcache(**layer(**given, q=q))
    assert len(reads) == 2 and seen[-1][0] is not q and torch.equal(seen[-1][0], q)
    # Its strides are allowed, and not those that were seen.
    wide = torch.zeros(8, 16, 2, 80).bfloat16()[..., :64]
    flash_attn_with_kvcache(**layer(**given, k_cache=wide))
    assert len(reads) == 3 and seen[-1][1] is wide
    # As on a machine where that is another GPU than the tensors'.
    monkeypatch.setattr(decode.DecodeLauncher, "call_there", _refuse)
    with torch.cuda.device(1), pytest.raises(RuntimeError, match="on its own GPU"):
        flash_attn_with_kvcache(**layer(**given, k_cache=wide))
    assert len(reads) == 4


def _refuse(*arguments: Any) -> None:
    raise RuntimeError("to be called on its own GPU")


def test_grad_mode_and_inference_mode_make_no_difference(seen: Seen) -> None:
    schedule = schedule_for_layers()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for _ in range(2):
            with mode():
                out = flash_attn_with_kvcache(**layer(scheduler_metadata=schedule))
            assert out.is_inference() == (mode is torch.inference_mode) and not out.requires_grad
    with torch.no_grad():
        for _ in range(2):
            call = layer(scheduler_metadata=schedule)
            call["q"].requires_grad_()
            flash_attn_with_kvcache(**call)
    # What was seen without gradients is refused where there are some.
    with pytest.raises(NotImplementedError, match="a tensor requires a gradient"):
        flash_attn_with_kvcache(**call)


@pytest.mark.parametrize("with_schedule", [False, True])
@pytest.mark.parametrize("make", [list, torch.tensor])
def test_a_window_that_may_change_in_place_is_read_each_time(
    make: Callable[[list[int]], Any], with_schedule: bool, seen: Seen, reads: list[int]
) -> None:
    given = {"scheduler_metadata": schedule_for_layers(window_size=(3, 0))} if with_schedule else {}
    window = make([3, 0])
    for _ in range(4):
        flash_attn_with_kvcache(**layer(window_size=window, **given))
    assert len(reads) == len(seen) == 4
    window[0] = 7
    if with_schedule:
        with pytest.raises(ValueError, match="window_size is"):
            flash_attn_with_kvcache(**layer(window_size=window, **given))
    else:
        flash_attn_with_kvcache(**layer(window_size=window))
        assert 7 in [x for x in seen[-1] if isinstance(x, int)]
