"""The operators of a key/value cache under torch's checks, torch.compile and autocast; how paths are chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_attention import flash_attn_with_kvcache, kvcache_ops
from hopper_attention.backends import Target
from hopper_attention.kvcache_call import CacheExtras, CacheOptions, read_call
from hopper_attention.kvcache_checks import NAMES, CacheCall, CacheTensors
from hopper_attention.kvcache_rules import RULES, choose_path
from hopper_attention.launch import kvcache as launch
from hopper_attention.scores import Scores
from tests.python.kvcache_cases import FP8, CacheCase, bits, int32

OPS = torch.ops.hopper_attention
NEW = CacheCase(new=(3, 2, 3), packed_new=True, page_size=4, rotary_dim=16)


def clean(call: dict[str, Any]) -> dict[str, Any]:
    """Without NaN, which opcheck compares."""
    caches = {name: call[name].nan_to_num() for name in ("k_cache", "v_cache")}
    return call | caches


def arguments(call: dict[str, Any], **options: Any) -> tuple[CacheCall, CacheTensors, Scores]:
    tensors = CacheTensors(**{name: x for name, x in call.items() if name in NAMES})
    others = {name: x for name, x in call.items() if name not in NAMES} | options
    extras = CacheExtras(**{name: others.pop(name) for name in CacheExtras._fields if name in others})
    return read_call(tensors, extras, CacheOptions(**others))[:3]


@pytest.mark.parametrize(
    "case",
    [CacheCase(), replace(NEW, packed_q=True, queries=(1, 0, 4)), replace(NEW, batch_idx=(4, 1, 0))],
    ids=["no new tokens", "packed", "batch index"],
)
@pytest.mark.parametrize("wants_lse", [False, True])
def test_opcheck(case: CacheCase, wants_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "append_kvcache" if case.new else "attend_kvcache"
    found: list[Any] = []
    operator = getattr(kvcache_ops, name)
    monkeypatch.setattr(kvcache_ops, name, lambda *given: found.append(given) or operator(*given))
    call, tensors, scores = arguments(
        clean(case.build(torch.bfloat16)), causal=True, sinks=torch.zeros(4), return_softmax_lse=wants_lse
    )
    kvcache_ops.call_operator(call, tensors, scores)
    torch.library.opcheck(getattr(OPS, name).default, found[0])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=str)
def test_compiled_decode_writes_the_cache(cache_dtype: torch.dtype) -> None:
    case = replace(NEW, new=(1, 1, 1), packed_new=False, queries=(1, 1, 1))

    def step(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_with_kvcache(**call, causal=True, return_softmax_lse=True)
        return out + 0.0, lse

    eager, traced = case.build(torch.bfloat16, cache_dtype), case.build(torch.bfloat16, cache_dtype)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for one, other in zip(step(eager), compiled(traced), strict=True):
            assert torch.equal(one, other)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(bits(eager[name]), bits(traced[name]))
        for call in (eager, traced):
            call["cache_seqlens"] = call["cache_seqlens"] + 1


@pytest.mark.parametrize("packed_new", [False, True])
def test_compiled_appending_of_any_batch(packed_new: bool) -> None:
    """Its size is not known where it is traced."""
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (3, 5):
        case = CacheCase(lengths=(5,) * batch, new=(2,) * batch, packed_new=packed_new)
        calls = [case.build(torch.bfloat16) for _ in range(2)]
        got, wanted = (
            run(**call) for run, call in zip((compiled, flash_attn_with_kvcache), calls, strict=True)
        )
        assert torch.equal(got, wanted) and torch.equal(*(bits(call["k_cache"]) for call in calls))


def test_compiled_with_one_length_and_views_of_one_tensor() -> None:
    case = CacheCase(lengths=(5, 5, 5), new=(2, 2, 2), head_dims=(32, 32))

    def step(q: Tensor, both: Tensor, k: Tensor, v: Tensor, room: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, both[0], both[1], k, v, cache_seqlens=5, causal=True, out=room)

    calls = [case.build(torch.bfloat16) for _ in range(2)]
    caches = [torch.stack((call["k_cache"], call["v_cache"])) for call in calls]
    rooms = [torch.full((3, 3, 4, 32), math.nan).bfloat16() for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for run, call, both, room in zip((step, compiled), calls, caches, rooms, strict=True):
        run(call["q"], both, call["k"], call["v"], room)
    assert torch.equal(*rooms) and not rooms[0].isnan().any()
    assert torch.equal(*map(bits, caches))


def test_meta_and_fake_tensors_have_results() -> None:
    call = replace(NEW, packed_q=True).build(FP8)
    meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in call.items()}
    out, lse = flash_attn_with_kvcache(**meta, return_softmax_lse=True)
    assert out.is_meta and out.shape == (9, 4, 24) and out.dtype == torch.bfloat16
    assert lse.shape == (4, 9) and lse.dtype == torch.float32
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        out = flash_attn_with_kvcache(**fake)
    assert isinstance(out, Tensor) and out.shape == (9, 4, 24)


def test_autocast_leaves_the_cache_as_it_is() -> None:
    case = replace(NEW, rotary_dim=0)
    call, wanted = case.build(torch.bfloat16), case.build(torch.bfloat16)
    expected = flash_attn_with_kvcache(**wanted)
    floats = {name: call[name].float() for name in "qkv" if name in call}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_with_kvcache(**(call | floats))
    assert isinstance(out, Tensor) and torch.equal(out, expected)
    assert torch.equal(bits(call["k_cache"]), bits(wanted["k_cache"]))


def test_parameters_do_under_no_grad() -> None:
    call = CacheCase().build(torch.bfloat16)
    wanted = flash_attn_with_kvcache(**call)
    call["q"] = torch.nn.Parameter(call["q"])
    with torch.no_grad():
        assert torch.equal(flash_attn_with_kvcache(**call), wanted)


HERE = Target("a GPU", (9, 0), assume_installed=True)


def test_the_first_path_without_a_reason_serves() -> None:
    def takes_one(call: CacheCall, target: Target, backend: str) -> str:
        return f"it takes one query on {backend}" if call.shape.seqlen_q > 1 else ""

    faster = replace(RULES[-1], path="faster", why_not=takes_one)
    call, _, _ = arguments(NEW.build(torch.bfloat16))
    chosen = choose_path(call, HERE, (faster, *RULES))
    assert chosen.rule.path == RULES[-1].path == "general" and chosen.backend.backend == "hopper"
    assert chosen.refused[0] == "faster: it takes one query on hopper"
    call, _, _ = arguments(replace(NEW, queries=(1, 1, 1)).build(torch.bfloat16))
    assert choose_path(call, HERE, (faster, *RULES)).rule.path == "faster"
    with pytest.raises(NotImplementedError, match="no way to attend to this cache: faster: no"):
        choose_path(call, HERE, (replace(faster, why_not=lambda call, target, backend: "no"),))


def test_every_rule_has_a_path() -> None:
    assert {rule.path for rule in RULES} == set(launch.PATHS)


def test_a_call_answers_what_rules_ask() -> None:
    call, _, _ = arguments(NEW.build(torch.bfloat16, FP8), causal=True, num_splits=3, pack_gqa=True)
    shape = call.shape
    assert shape.is_paged and shape.has_rotary and shape.is_fp8_cache and shape.is_packed_new
    assert (shape.batch, shape.page_size, shape.capacity, shape.total_new) == (3, 4, 24, 8)
    assert shape.rows_a_kv_head == 6 and call.rotates_each_query and call.num_splits == 3 and call.pack_gqa
    one, _, _ = arguments(CacheCase(queries=(1, 1, 1)).build(torch.bfloat16), causal=True)
    assert not one.mask.causal and one.rotates_each_query and not one.shape.is_paged
    length, _, _ = arguments(CacheCase().build(torch.bfloat16, cache_seqlens=7))
    assert length.shape.seqlen_k == 7


def test_new_tokens_are_in_the_cache_before_a_path_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path sees the caches with new tokens and lengths that count them, and none of what wrote them."""
    seen: list[CacheTensors] = []

    def attend(call: CacheCall, tensors: CacheTensors, scores: Scores) -> tuple[Tensor, Tensor]:
        seen.append(tensors)
        return launch.attend_in_general(call, tensors, scores)

    monkeypatch.setitem(launch.PATHS, "general", attend)
    call = NEW.build(torch.float16)
    flash_attn_with_kvcache(**call)
    (tensors,) = seen
    assert tensors.cache_seqlens is not None and torch.equal(tensors.cache_seqlens, int32([12, 2, 24]))
    assert tensors.cache_seqlens.dtype == torch.int32 and tensors.q is not call["q"]
    assert all(getattr(tensors, name) is None for name in ("k", "v", "rotary_cos", "cu_seqlens_k_new"))
    assert tensors.k_cache is call["k_cache"]
