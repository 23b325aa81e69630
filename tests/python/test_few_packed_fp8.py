"""Packed e4m3 tensors with descales and few queries, on tiles of the FP8 forward kernel that have several heads or keys
in parts: what these are given, and calls that are found again, by stand-ins."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import FEW_SPLITS, CombineConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.tilings import FEW_QUERIES
from hopper_attention import (
    compile_cache,
    device_memory,
    few_packed_queries,
    few_queries,
    packed_descaled_again,
    varlen,
)
from hopper_attention.checks import TensorSpec
from hopper_attention.few_e4m3_times import (
    MOST_PARTS,
    few_cost,
    numbers_of_parts,
    usual_cost,
)
from hopper_attention.few_packed_queries import find_few_packed
from hopper_attention.few_queries import NOT_FEW, ROOM_FOR_PARTS, FewQueries, with_room
from hopper_attention.few_queries_times import BYTES_OF_PARTS, MOST_TIMES_MEAN
from hopper_attention.kvcache_checks import CacheCall
from hopper_attention.launch.few_packed_fp8 import FewPackedFp8Launcher, find_packed_with_descales
from hopper_attention.launch.few_packed_queries import FewPackedLaunch
from hopper_attention.lengths import Lengths
from hopper_attention.masks import CAUSAL_MASK, NO_MASK, MaskSpec
from hopper_attention.scores import PLAIN, ScoreKind
from tests.plans import InParts
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.packed_fp8_calls import (
    Bounds,
    apart,
    attend,
    attend_again,
    check,
    check_launches,
    descales,
    draw_call,
    exact_of,
    explain,
    moved,
    plan_of_call,
    refuse,
)
from tests.python.packed_fp8_kernels import E4M3, LAUNCHING, Kernels, pretended
from tests.python.varlen_cases import Case, offsets

HEAD_DIMS = 64, 80, 128, 256
LSE = {"return_attn_probs": True, "exact_lse": False}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200. What is new is NaN."""
    yield from pretended(monkeypatch)


@dataclass(frozen=True)
class Way:
    """How calls are served: heads of a tile, parts of its keys, and whether its rows are the fewest or the most."""

    group: int = 1
    splits: int = 1
    is_low: bool = True

    def few(self, head_dim: int) -> FewQueries:
        rows = FEW_QUERIES[native(head_dim)]
        tile_rows = (min if self.is_low else max)(rows)
        return FewQueries(group=self.group, splits=self.splits, tile_rows=tile_rows)


def native(head_dim: int) -> int:
    return min(size for size in FEW_QUERIES if size >= head_dim)


WAYS = {
    "heads": Way(),
    "high tiles of heads": Way(is_low=False),
    "a group": Way(4),
    "high tiles of half a group": Way(2, is_low=False),
    "parts of heads": Way(1, 3),
    "parts of a group": Way(4, 5),
    "high parts of a group": Way(4, 2, False),
}
CALLS: dict[str, tuple[Case, Bounds]] = {
    "mixed": (Case((5, 0, 33, 1, 20), (60, 21, 0, 1, 130), behind=7, heads=(8, 2)), (40, 200)),
    "used in part": (Case((20, 3, 9), (90, 33, 70), None, (85, 0, 70), heads=(8, 2)), (20, 90)),
    "one K/V head": (Case((40, 17), (70, 300), heads=(4, 1)), (256, 300)),
    "one sequence": (Case((33,), (210,), heads=(8, 2)), (33, 210)),
    "nobody asks": (Case((0, 0, 1), (40, 9, 30), heads=(4, 1), behind=3), (1, 40)),
}


def serve(monkeypatch: pytest.MonkeyPatch, few: Any) -> None:
    """Calls of few queries of e4m3, which the tiles can serve, are served so from now on."""
    monkeypatch.setattr(few_queries, "fastest_in_e4m3", lambda call, mean_k: few)
    monkeypatch.setattr(few_packed_queries, "with_room", lambda few, shape: few)
    forget_launchers()


def draw(name: str, head_dim: int = 64, head_dim_v: int = 0) -> tuple[Case, list[Tensor], dict[str, Any]]:
    """q, k and v, and where their sequences lie."""
    case, bounds = CALLS[name]
    case = replace(case, head_dims=(head_dim, head_dim_v or head_dim))
    return case, *draw_call(case, bounds)


def check_served(kernels: Kernels, few: FewQueries, given: dict[str, Any], case: Case) -> None:
    """The last call ran on these tiles, with a scale of Q for each group of heads."""
    call, (heads, kv_heads) = kernels.calls[-1], case.heads
    config = call["config"]
    assert (config.group, call["splits"], config.tile_m) == (few.group, few.splits, few.tile_rows)
    assert config.layout == "varlen" and config.lone_scales and config.v_rows
    of_q = given.get("q_descale", torch.ones(len(case.rooms_q), kv_heads))
    assert torch.equal(call["scales"][0], of_q[..., None].expand(-1, -1, heads // (kv_heads * few.group)))


@pytest.mark.parametrize("how", ["none", "one", "q", "all", "strided"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_results(kernels: Kernels, way: Way, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of first calls, and of those found again, which launch alike and have the same bits."""
    options = itertools.cycle(({"causal": True}, {"softmax_scale": 0.3}, {}))
    for head_dim, name in itertools.product(HEAD_DIMS, CALLS):
        case, tensors, lengths = draw(name, head_dim)
        few, given, of_scores = way.few(head_dim), descales(how, case), next(options)
        serve(monkeypatch, few)
        named = {**lengths, **given, **of_scores}
        out = attend_again(kernels, monkeypatch, tensors, named)
        check(out, exact_of(case, tensors, given, **of_scores))
        assert out.dtype == torch.bfloat16 and out.is_contiguous() and not out[sum(case.rooms_q) :].any()
        check_served(kernels, few, given, case)
        check_launches(kernels, plan_of_call(tensors, named))
        assert kernels.calls[-1]["scale"] == of_scores.get("softmax_scale", head_dim**-0.5)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_lse(kernels: Kernels, way: Way, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, way.few(64))
    case, tensors, lengths = draw(name)
    given = descales("all", case)
    for options in ({"causal": True}, {"softmax_scale": 0.3}):
        named = {**lengths, **given, **options}
        found = attend_again(kernels, monkeypatch, tensors, named | LSE)
        exact = exact_of(case, tensors, given, **options)
        check(found, exact)
        out, lse = found
        assert lse.shape == (case.heads[0], len(tensors[0])) and lse.dtype == torch.float32
        assert lse.is_contiguous() and torch.equal(lse == -math.inf, exact[1] == -math.inf)
        check_launches(kernels, plan_of_call(tensors, named | LSE))
        check_served(kernels, way.few(64), given, case)
        assert torch.equal(attend(*tensors, **named), out)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_rows_of_other_widths(kernels: Kernels, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of V are not as wide as those of K, nor as the kernel's."""
    for head_dim, head_dim_v in ((128, 64), (80, 48), (64, 256), (208, 112)):
        few, (case, tensors, lengths) = (
            way.few(max(head_dim, head_dim_v)),
            draw("mixed", head_dim, head_dim_v),
        )
        serve(monkeypatch, few)
        given = descales("all", case)
        found = attend_again(kernels, monkeypatch, tensors, lengths | given | LSE)
        check(found, exact_of(case, tensors, given))
        check_served(kernels, few, given, case)
        assert kernels.calls[-1]["config"].head_dim == native(max(head_dim, head_dim_v))


@pytest.mark.parametrize("name", ["mixed", "used in part", "one sequence"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_other_lengths_in_the_same_place(
    kernels: Kernels, way: Way, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls that are found again: lengths and descales are read at each."""
    serve(monkeypatch, way.few(64))
    case, tensors, lengths = draw(name)
    given = descales("all", case)
    attend_again(kernels, monkeypatch, tensors, lengths | given)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    for other, drawn, scales, named in moved(case, lengths, given):
        out = attend(*drawn, **named)
        check(out, exact_of(other, drawn, scales))
        check_served(kernels, way.few(64), scales, other)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tensors_that_are_given_twice(kernels: Kernels, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where queries lie so do keys; and K is V, of which no call is found again."""
    serve(monkeypatch, way.few(64))
    case = Case((50, 0, 33), (50, 0, 33), behind=9, heads=(8, 2), head_dims=(64, 64))
    (q, k, v), starts = (x.to(E4M3) for x in case.tensors(torch.float32)), offsets(case.rooms_q)
    given = descales("all", case)
    named = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 50, "max_seqlen_k": 50, **given}
    out = attend_again(kernels, monkeypatch, [q, k, v], named | {"causal": True})
    check(out, exact_of(case, [q, k, v], given, causal=True))
    for _ in range(3):
        check(attend(q, k, k, **named), exact_of(case, [q, k, k], given))
        check_served(kernels, way.few(64), given, case)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tensors_that_tma_cannot_address(kernels: Kernels, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, way.few(64))
    case, tensors, lengths = draw("mixed")
    given = descales("all", case)
    exact = exact_of(case, tensors, given, causal=True)
    odd = [apart(x) for x in tensors]
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in tensors]
    steps = [torch.stack((x, x), 1)[:, 0] for x in tensors]
    assert all(x.data_ptr() % 16 for x in odd)
    for each in (tensors, odd, turned, steps) * 3:
        check(attend(*each, **lengths, **given, causal=True, **LSE), exact)
        check_served(kernels, way.few(64), given, case)
    assert len(kernels.calls) == 12


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_gpu_is_current(kernels: Kernels, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = pretend(monkeypatch, *LAUNCHING)
    serve(monkeypatch, way.few(64))
    case, tensors, lengths = draw("mixed")
    given = descales("all", case)
    exact = exact_of(case, tensors, given, causal=True)
    for options in ({}, LSE):
        for number in range(4):
            entered.clear()
            if number:
                monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
            check(attend(*tensors, **lengths, **given, causal=True, **options), exact)
            assert set(entered) == {0} if number else entered == []


@pytest.mark.parametrize("how", ["graph", "mode", "address"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_was_found_does_not_serve_elsewhere(
    kernels: Kernels, way: Way, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, way.few(64))
    case, tensors, lengths = draw("mixed")
    named = lengths | descales("all", case)
    attend_again(kernels, monkeypatch, tensors, named)
    if how == "graph":
        monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    elif how == "mode":
        monkeypatch.setattr(packed_descaled_again, "may_be_like", lambda: False)
    else:
        tensors = [apart(x) for x in tensors]
    check(attend(*tensors, **named), exact_of(case, tensors, named))
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    with pytest.raises(AssertionError, match="found anew"):
        attend(*tensors, **named)


NOT_SERVED: dict[str, dict[str, Any]] = {
    "an exact LSE": {"return_attn_probs": True, "exact_lse": True},
    "an LSE": {"return_attn_probs": True},
    "queries used in part": {"seqused_q": torch.tensor((3, 0, 33, 0, 10), dtype=torch.int32)},
    "more queries": {"max_seqlen_q": 257},
    "slopes, in 16 bits": {"alibi_slopes": torch.ones(8)},
}


@pytest.mark.parametrize("what", NOT_SERVED)
def test_what_these_tiles_do_not_serve(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would take least time."""
    serve(monkeypatch, WAYS["parts of a group"].few(64))
    _, tensors, lengths = draw("mixed")
    named = lengths | NOT_SERVED[what]
    config = plan_of_call(tensors, named).config
    assert isinstance(config, DecodeConfig) or (getattr(config, "group", 1), config.split) == (1, False)
    assert plan_of_call(tensors, lengths).config.group == 4
    forget_launchers()


@pytest.mark.parametrize("what", ["an LSE", "queries used in part", "more queries"])
def test_calls_that_these_tiles_do_not_serve(
    kernels: Kernels, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others that they do."""
    serve(monkeypatch, WAYS["parts of a group"].few(64))
    case, tensors, lengths = draw("mixed")
    given, changed = descales("all", case), NOT_SERVED[what]
    used_q = changed["seqused_q"].tolist() if "seqused_q" in changed else None
    exact = exact_of(replace(case, used_q=used_q), tensors, given)
    for number in range(3):
        kernels.calls.clear()
        attend(*tensors, **lengths, **given)
        check_served(kernels, WAYS["parts of a group"].few(64), given, case)
        check(attend(*tensors, **(lengths | given | changed)), exact, 4e-2)
        assert all(not call["config"].split for call in kernels.calls[1:]), number


def test_bounds_of_lengths_decide_on_what_is_found_again(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if more keys were in more parts."""
    ways = {bounds: FewQueries(group=4, splits=bounds // 100, tile_rows=64) for bounds in (200, 700)}
    monkeypatch.setattr(
        few_queries, "fastest_in_e4m3", lambda call, mean_k: ways[200 if call.shape.seqlen_k < 500 else 700]
    )
    monkeypatch.setattr(few_packed_queries, "with_room", lambda few, shape: few)
    case, tensors, lengths = draw("mixed")
    exact = exact_of(replace(case, behind=7), tensors, {})
    k, v = (torch.cat((x, x, x, x)) for x in tensors[1:])
    for longest_k in (200, 700, 256, 600) * 3:
        named = lengths | {"max_seqlen_k": longest_k}
        check(attend(tensors[0], k, v, **named), exact)
        check_served(kernels, ways[200 if longest_k < 500 else 700], {}, case)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_operator(kernels: Kernels, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, way.few(64))
    case, tensors, _ = draw("mixed")
    given = descales("all", case)
    exact, starts = exact_of(case, tensors, given, causal=True, softmax_scale=0.2), case.lengths[:2]
    of_lengths, scales = (*starts, None, None, *CALLS["mixed"][1]), given.values()
    for wants_lse, exact_lse in itertools.product((True, False), repeat=2):
        kernels.calls.clear()
        out, lse = torch.ops.hopper_attention.forward_varlen_fp8(
            *tensors, *scales, *of_lengths, 0.2, True, None, 0, exact_lse=exact_lse, wants_lse=wants_lse
        )
        check((out, lse) if wants_lse else out, exact, 4e-2)
        assert lse.shape == (8, len(out) * wants_lse) and lse.dtype == torch.float32
        of_tiles = [call for call in kernels.calls if call["config"].tile_m == way.few(64).tile_rows]
        assert exact_lse or (len(of_tiles) == len(kernels.calls) == 1)
        if not exact_lse:
            check_served(kernels, way.few(64), given, case)


def test_launchers_that_are_found(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tensors, _ = draw("mixed")
    starts = case.lengths[:2]
    lengths = Lengths(*starts, None, None, *CALLS["mixed"][1])
    for way in WAYS.values():
        serve(monkeypatch, way.few(64))
        for sm_margin, mask in itertools.product((0, 12), (NO_MASK, CAUSAL_MASK)):
            found = find_packed_with_descales(tensors, lengths, mask, "hopper", sm_margin, True)
            assert isinstance(found, FewPackedFp8Launcher) and found.splits == way.splits
            assert len(found.combine) == (way.splits > 1)
            config = found.attention.config
            assert config.group == way.group and config.causal == found.attention.causal == mask.causal
            assert found.attention.num_ctas == (132 - sm_margin) * config.ctas_per_sm
        with pytest.raises(ValueError, match="sm_margin"):
            find_packed_with_descales(tensors, lengths, NO_MASK, None, 132, True)
        for backend in ("reference", "ampere", "torch"):
            assert find_packed_with_descales(tensors, lengths, NO_MASK, backend, 0, True) is None
        found = find_packed_with_descales(tensors, lengths, NO_MASK, None, 0, False)
        assert found is None or isinstance(found, FewPackedLaunch)
        for mask, scores in (
            (MaskSpec(True, 99), PLAIN),
            (MaskSpec(False, -1, -1, 64), PLAIN),
            (NO_MASK, ScoreKind(has_softcap=True, has_sinks=True)),
        ):
            found = find_packed_with_descales(tensors, lengths, mask, None, 0, True, scores)
            assert isinstance(found, FewPackedFp8Launcher)
            config = found.attention.config
            assert (config.window, config.chunk) == (mask.has_window, mask.attention_chunk > 0)
            assert (config.softcap, config.sinks) == (scores.has_softcap, scores.has_sinks)


def test_parts_are_merged_by_the_kernel_for_as_many(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    load = compile_cache.get_serving
    monkeypatch.setattr(compile_cache, "get_serving", lambda config: loaded.append(config) or load(config))
    case, tensors, lengths = draw("used in part")
    for splits in (2, 127):
        serve(monkeypatch, FewQueries(group=4, splits=splits, tile_rows=64))
        out = attend_again(kernels, monkeypatch, tensors, lengths)
        check(out, exact_of(case, tensors, {}))
        assert kernels.calls[-1]["splits"] == splits
        assert isinstance(loaded[-1], CombineConfig) and loaded[-1].dtype == "bfloat16"


def spec(*shape: int, dtype: torch.dtype = E4M3) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype, device="meta"))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[CacheCall, float]]]:
    """Calls of which it is counted what takes least time, with the keys of a sequence."""
    calls: list[tuple[CacheCall, float]] = []
    fastest = few_queries.fastest_in_e4m3

    def noted(call: CacheCall, mean_k: float) -> FewQueries:
        calls.append((call, mean_k))
        return fastest(call, mean_k)

    monkeypatch.setattr(few_queries, "fastest_in_e4m3", noted)
    monkeypatch.setattr(few_packed_queries, "with_room", lambda few, shape: few)
    forget_launchers()
    yield calls
    forget_launchers()


Sizes = tuple[int, int, int]
"""Sequences, and queries and keys of each."""


def few_of(
    sizes: Sizes, heads: tuple[int, int], head_dim: int = 128, longest_k: int = 0, **options: Any
) -> FewQueries:
    """What serves sequences of one length, of which the bound is ``longest_k`` if it is given."""
    (batch, queries, keys), starts = sizes, spec(sizes[0] + 1, dtype=torch.int32)
    q, k = (spec(batch * n, h, head_dim) for n, h in zip((queries, keys), heads, strict=True))
    given = (q, k, k), (starts, starts, None, None), (queries, longest_k or keys)
    usual: dict[str, Any] = {"mask": NO_MASK, "scores": PLAIN, "sm_margin": 0, "in_e4m3": True}
    return find_few_packed(*given, **(usual | options))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("sizes", "heads", "group"),
    [
        ((1, 40, 20_000), (8, 2), 4),
        ((3, 70, 30_000), (4, 1), 4),
        # 12 query heads share a K/V head, which do not divide a warpgroup's rows; nor do 7.
        ((1, 40, 20_000), (24, 2), 12),
        ((3, 30, 20_000), (28, 4), 7),
        ((1, 1, 100_000), (64, 1), 64),
        ((64, 16, 1000), (32, 4), 8),
    ],
)
def test_what_takes_least_time(
    sizes: Sizes, heads: tuple[int, int], group: int, head_dim: int, found: Any
) -> None:
    """By far: whatever times are measured next."""
    few = few_of(sizes, heads, head_dim)
    ((call, mean_k),) = found
    assert few.call is None and few.group == group and (few.splits > 1 or sizes[0] == 64)
    shape, whole = call.shape, heads[0] // heads[1]
    assert 0.5 * sizes[2] < mean_k <= shape.seqlen_k < 2 * sizes[2]
    rows = FEW_QUERIES[native(head_dim)]
    ways = itertools.product({1, whole} if group > 1 else (1,), range(1, MOST_PARTS + 1), rows)
    best = min(few_cost(shape, mean_k, *way) for way in ways)
    cost = few_cost(shape, mean_k, few.group, few.splits, few.tile_rows)
    assert cost <= 1.05 * best and 2 * cost < usual_cost(shape, mean_k)
    assert few.splits in numbers_of_parts(shape, mean_k, few.group, few.tile_rows)
    # Also by their name, on a GPU that is not there.
    q, k = (
        torch.empty(sizes[0] * n, h, head_dim, dtype=E4M3, device="meta")
        for n, h in zip(sizes[1:], heads, strict=True)
    )
    starts = torch.empty(sizes[0] + 1, dtype=torch.int32, device="meta")
    plan = explain(q, k, k, starts, starts, *sizes[1:], causal=True, device_capability=(9, 0))
    config = plan.config
    assert (config.group, config.split, config.tile_m) == (group, few.splits > 1, few.tile_rows)
    assert config.causal and config.layout == "varlen" and not plan.copies
    assert " query rows x " in str(plan) or group == 1


def test_times_of_sequences_of_different_lengths(found: Any) -> None:
    """Calls whose sequences have fewer keys than the longest take less time, but not much less than one of three times
    the mean alone; a bound beyond that changes nothing."""
    few_of((132, 16, 1000), (16, 2), longest_k=64_000)
    ((call, mean_k),) = found
    shape = call.shape
    assert shape.seqlen_k >= 64_000 and 1000 <= mean_k < 2000
    for cost in (
        usual_cost,
        *(lambda *given, way=way: few_cost(*given, *way) for way in ((1, 1, 64), (8, 1, 192), (8, 20, 64))),
    ):
        times = [cost(shape, mean_k * 2**i) for i in range(4)]
        assert times == sorted(times) and times[0] < times[-1]
        longest = int(MOST_TIMES_MEAN * mean_k)
        alone = replace(shape, batch=1, total_q=16, seqlen_k=longest)
        assert times[0] > 0.5 * cost(alone, longest)
        assert times[0] == cost(replace(shape, seqlen_k=10 * shape.seqlen_k), mean_k)


@pytest.mark.parametrize("sizes", [(32, 16, 2000), (64, 4, 2000)])
def test_a_loose_bound_makes_parts_where_lengths_differ(sizes: Sizes) -> None:
    """Of sequences that fill the GPU without parts. Where all have as many keys the plan makes none."""
    tight, loose = (few_of(sizes, (64, 8), longest_k=bound) for bound in (sizes[2], 2**17))
    assert tight.splits == 1 < loose.splits and tight.group == loose.group == 8
    batch, rows, keys = sizes
    in_parts, tiles = InParts(128, 8, 2 * SMS, loose.splits), -(-rows * 8 // loose.tile_rows)
    each = in_parts.blocks_of_a_part([(tiles, keys)] * batch)
    assert in_parts.parts_of(keys, each) == 1
    each = in_parts.blocks_of_a_part([(tiles, keys // 2)] * (batch - 1) + [(tiles, 20 * keys)])
    assert in_parts.parts_of(keys // 2, each) == 1 < in_parts.parts_of(20 * keys, each)


def test_there_is_room_for_more_parts_than_are_counted(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several sequences, as far as there is memory for their results."""
    for sizes, heads, most in (
        ((1, 40, 20_000), (8, 2), 1),
        ((3, 70, 30_000), (4, 1), ROOM_FOR_PARTS),
        ((40, 200, 20_000), (32, 1), 1),
    ):
        counted = few_of(sizes, heads, longest_k=2 * sizes[2])
        counted, shape = replace(counted, splits=3), found[-1][0].shape
        room = with_room(counted, shape)
        assert room == replace(counted, splits=room.splits)
        assert counted.splits <= room.splits <= max(min(most * counted.splits, FEW_SPLITS), counted.splits)
        assert (room.splits > counted.splits) == (most > 1 and counted.splits < FEW_SPLITS)
        of_results = 4 * room.splits * shape.total_q * shape.heads * shape.head_dim_v
        assert of_results <= BYTES_OF_PARTS or room == counted
    whole = few_of((64, 16, 1000), (32, 4))
    assert whole.splits == 1 and with_room(whole, found[-1][0].shape) == whole


def test_results_in_parts_take_no_more_memory_than_they_may() -> None:
    """However loose the bound of lengths is."""
    draw = random.Random(0)
    for _ in range(60):
        sizes = draw.randrange(2, 300), draw.randrange(1, 100), draw.randrange(50, 20_000)
        kv_heads, head_dim = draw.choice((1, 2, 8)), draw.choice((64, 128, 256))
        heads = kv_heads * draw.choice((1, 4, 8)), kv_heads
        few = few_of(sizes, heads, head_dim, sizes[2] * draw.choice((1, 4, 30, 100)))
        of_a_part = 4 * heads[0] * sizes[0] * sizes[1] * head_dim
        assert few.splits == 1 or few.splits * of_a_part <= BYTES_OF_PARTS


def test_no_few_queries() -> None:
    for sizes in ((1, 0, 100), (1, 10, 0), (1, 257, 20_000)):
        assert few_of(sizes, (8, 2)) == NOT_FEW
    of_parts = (1, 40, 20_000), (8, 2)
    assert few_of(*of_parts).splits > 1
    for options in ({"in_e4m3": False}, {"head_dim": 72}):
        assert few_of(*of_parts, **options).tile_rows == 0, options


def test_no_more_parts_than_are_counted() -> None:
    """By numbers of sequences and of parts in one word."""
    for batch in (1, 7, 132, 2**15, 2**19):
        few = few_of((batch, 1, min(2**28 // batch, 2**20)), (2, 1))
        assert few.splits <= max(min(MOST_PARTS, 2**20 // batch), 1)


def test_a_v_of_more_columns_is_served_as_any_other(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, WAYS["a group"].few(64))
    case, tensors, lengths = draw("mixed", 64, 320)
    for _ in range(3):
        check(attend(*tensors, **lengths), exact_of(case, tensors, {}), 4e-2)
    assert all(call["config"].group == 1 for call in kernels.calls)
