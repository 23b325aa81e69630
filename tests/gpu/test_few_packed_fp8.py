"""Packed e4m3 tensors with descales and few queries on a GPU, with several heads in a tile or keys in parts, in calls
that are found again too: each sequence against float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import (
    explain_varlen,
    few_packed_queries,
    few_queries,
    flash_attn_varlen_func,
    packed_descaled_again,
)
from hopper_attention.few_queries import FewQueries
from hopper_attention.fp8_rules import select_for
from hopper_attention.masks import MaskSpec
from hopper_attention.reference import attention_naive
from tests.gpu.conftest import compile_together
from tests.gpu.test_fp8_varlen import on_gpu, wrong_results
from tests.gpu.test_packed_descaled import E4M3, HEAD_DIMS, OF_DESCALES, parts_of
from tests.python.test_few_packed_fp8 import LSE, WAYS, Way
from tests.python.varlen_cases import Case, offsets

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Those of ``WAYS``."""
    problems = [
        way.few(head_dim).e4m3_problem((head_dim, head_dim), MaskSpec(causal), is_packed=True)
        for way in WAYS.values()
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    ]
    compile_together(list(dict.fromkeys(map(select_for, problems))))


Serve = Callable[[FewQueries], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Has calls that tiles for few queries can serve be served so."""

    def forget() -> None:
        find = few_packed_queries.find_few_packed, few_packed_queries._find_few_packed
        for cache in (*find, packed_descaled_again.remembered):
            cache.cache_clear()

    def serve_as(few: FewQueries) -> None:
        monkeypatch.setattr(few_queries, "fastest_in_e4m3", lambda call, mean_k: few)
        forget()

    yield serve_as
    forget()


CASES = {
    "mixed": Case((40, 0, 33, 1, 200), (600, 21, 0, 1, 1300), behind=77, heads=(8, 2)),
    "used in part": Case((90, 3, 9), (900, 333, 70), None, (850, 0, 70), heads=(8, 2)),
    "one K/V head": Case((140, 17), (700, 3000), heads=(4, 1), behind=5),
    "more queries than keys": Case((100, 256), (30, 190), heads=(8, 2)),
    "one long": Case((9, 2, 30, 1), (5000, 40, 333, 1), heads=(8, 2)),
    "many sequences": Case((3, 17, 0, 64) * 20, (300, 1, 70, 129) * 20, heads=(8, 2)),
}
SOME = "heads", "a group", "parts of heads", "high parts of a group"
"""Of ``WAYS``, each of its kind."""

ERROR, LSE_ERROR = 6e-2, 8e-2
"""Of an output, as a share of it, and of an LSE that is not exact."""

Given = tuple[Case, list[Tensor], dict[str, Any]]


def draw(case: Case, head_dim: int, seed: int = 0) -> Given:
    """q, k and v, and the other arguments by name."""
    case = replace(case, head_dims=(head_dim, head_dim))
    tensors, named = on_gpu(case, torch.bfloat16, seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = len(case.rooms_q), case.heads[1]
    descales = {name: torch.rand(shape, generator=generator, device="cuda") + 0.5 for name in OF_DESCALES}
    return case, [x.to(E4M3) for x in tensors], named | descales


def attend(tensors: list[Tensor], given: dict[str, Any], **options: Any) -> Any:
    return flash_attn_varlen_func(*tensors, **given, **options)


def check_served(few: FewQueries, tensors: list[Tensor], given: dict[str, Any], **options: Any) -> None:
    config = explain_varlen(*tensors, **given, **options).config
    assert isinstance(config, Fp8ForwardConfig) and config.layout == "varlen" and config.lone_scales
    assert (config.group, config.split, config.tile_m) == (few.group, few.splits > 1, few.tile_rows)


def results_of(tensors: list[Tensor], given: dict[str, Any], causal: bool) -> tuple[Tensor, Tensor]:
    """Of a first call, whose bits others like it are to have, with an LSE and without."""
    packed_descaled_again.remembered.cache_clear()
    alone = [attend(tensors, given, causal=causal) for _ in range(4)]
    out, lse = attend(tensors, given, causal=causal, **LSE)
    for _ in range(3):
        again = attend(tensors, given, causal=causal, **LSE)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    assert all(torch.equal(x, out) for x in alone) and out.is_contiguous() and lse.is_contiguous()
    return out, lse


def wrong_of(case: Case, tensors: list[Tensor], given: dict[str, Any], causal: bool) -> list[Any]:
    """What is wrong with these."""
    found = results_of(tensors, given, causal)
    return wrong_results(parts_of(tensors, given), case, *found, causal, (-1, -1), "hopper")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(serve: Serve, name: str, way: Way, head_dim: int) -> None:
    few, (case, tensors, given) = way.few(head_dim), draw(CASES[name], head_dim)
    serve(few)
    for causal in (False, True):
        check_served(few, tensors, given, causal=causal)
        assert wrong_of(case, tensors, given, causal) == []


@pytest.mark.parametrize("splits", [2, 16, 127])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_any_number_of_parts(serve: Serve, head_dim: int, splits: int) -> None:
    """Of more parts than blocks some have no key."""
    few, (case, tensors, given) = (
        replace(WAYS["parts of a group"].few(head_dim), splits=splits),
        draw(CASES["mixed"], head_dim),
    )
    serve(few)
    check_served(few, tensors, given)
    assert wrong_of(case, tensors, given, True) == []


@pytest.mark.parametrize(
    "heads", [(2, 1), (16, 2), (32, 2), (32, 1), (128, 2), (6, 2), (5, 1), (28, 4), (24, 2), (40, 1)]
)
def test_any_number_of_heads_in_a_tile(serve: Serve, heads: tuple[int, int]) -> None:
    for splits in (1, 3):
        few = FewQueries(group=heads[0] // heads[1], splits=splits, tile_rows=64)
        case, tensors, given = draw(replace(CASES["mixed"], heads=heads), 128)
        serve(few)
        check_served(few, tensors, given, causal=True)
        assert wrong_of(case, tensors, given, True) == []


BY_RULE = {
    f"{rooms_q[:3]} of {len(rooms_q)}, {heads}, {head_dim}": (
        Case(rooms_q, rooms_k, heads=heads, head_dims=(head_dim, head_dim)),
        group,
    )
    for rooms_q, rooms_k, heads, head_dim, group in (
        ((40,), (20_001,), (8, 2), 64, 4),
        ((40,), (20_001,), (8, 2), 128, 4),
        ((40,), (20_001,), (8, 2), 256, 4),
        ((33, 0, 70), (9000, 7, 30_000), (4, 1), 80, 4),
        # Heads that do not divide a warpgroup's rows, of which some are nobody's.
        ((40,), (20_001,), (24, 2), 128, 12),
        ((33, 0, 70), (9000, 7, 30_000), (28, 4), 64, 7),
        ((40,), (20_001,), (40, 8), 256, 5),
        ((16, 3, 0, 14) * 16, (1000, 700, 1, 930) * 16, (6, 2), 128, 3),
        ((16, 3, 9, 14) * 16, (1000, 700, 1, 930) * 16, (32, 4), 128, 8),
        ((16, 3, 9, 14) * 16, (1000, 700, 1, 930) * 16, (32, 4), 64, 8),
        ((16, 3, 9, 14) * 16, (1000, 700, 1, 930) * 16, (32, 4), 256, 8),
    )
}


@pytest.mark.parametrize("name", BY_RULE)
def test_what_takes_least_time(name: str) -> None:
    """With so many keys that sums of P V, which keep fewer bits than float32, are off too."""
    case, group = BY_RULE[name]
    case, tensors, given = draw(case, case.head_dims[0])
    parts = parts_of(tensors, given)
    for causal in (False, True):
        config = explain_varlen(*tensors, **given, causal=causal).config
        assert isinstance(config, Fp8ForwardConfig) and config.group == group
        assert config.split or len(case.rooms_q) == 64
        out, lse = results_of(tensors, given, causal)
        for (rows, _), one in parts.sequences():
            if rows.start == rows.stop:
                continue
            values = (x.dequantize() for x in (one.q, one.k, one.v))
            exact, exact_lse = (x[0] for x in attention_naive(*values, causal=causal))
            ours, our_lse = out[rows.slice], lse[:, rows.slice]
            assert (ours.double() - exact).norm() <= ERROR * exact.norm()
            assert torch.equal(our_lse == -math.inf, exact_lse == -math.inf)
            seen = exact_lse > -math.inf
            assert bool(((our_lse - exact_lse)[seen].abs() <= LSE_ERROR).all())


@pytest.mark.parametrize("kind", ["none", "of q alone", "of keys", "one for all", "columns of others"])
@pytest.mark.parametrize("name", SOME)
def test_descales(serve: Serve, name: str, kind: str) -> None:
    serve(WAYS[name].few(128))
    case, tensors, given = draw(CASES["mixed"], 128)
    scales = [given.pop(name) for name in OF_DESCALES]
    of_q, of_k, _ = scales
    descales: dict[str, dict[str, Tensor]] = {
        "none": {},
        "of q alone": {"q_descale": of_q},
        "of keys": {"k_descale": of_k},
        "one for all": dict.fromkeys(OF_DESCALES, of_k),
        "columns of others": {
            name: torch.stack((x, x + 1), 2)[..., 0] for name, x in zip(OF_DESCALES, scales, strict=True)
        },
    }
    assert wrong_of(case, tensors, given | descales[kind], True) == []


@pytest.mark.parametrize("name", SOME)
def test_lengths_and_descales_are_read_at_each_call(serve: Serve, name: str) -> None:
    """In memory that earlier calls had, beside others on another stream."""
    serve(WAYS[name].few(128))
    case, tensors, given = draw(CASES["many sequences"], 128)
    rng, side, total_q, total_k = random.Random(0), torch.cuda.Stream(), *(len(x) for x in tensors[:2])
    tensors = [torch.randn(x.shape, device="cuda").to(E4M3) for x in tensors]
    for _ in range(6):
        rooms = []
        for total, longest in ((total_q, 90), (total_k, 600)):
            lengths = [rng.randrange(longest) for _ in case.rooms_q]
            while sum(lengths) > total:
                lengths[lengths.index(max(lengths))] //= 2
            rooms.append(tuple(lengths))
        given |= {"cu_seqlens_q": offsets(rooms[0]).cuda(), "cu_seqlens_k": offsets(rooms[1]).cuda()}
        given |= {"max_seqlen_q": 90, "max_seqlen_k": 600}
        given |= {name: torch.rand_like(given[name]) + 0.5 for name in OF_DESCALES}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            beside = attend(tensors, given, causal=True)
        out = attend(tensors, given, causal=True)
        torch.cuda.synchronize()
        assert torch.equal(out, beside)
        behind = total_q - sum(rooms[0])
        ours = Case(*rooms, behind=behind, heads=case.heads, head_dims=case.head_dims)
        found = attend(tensors, given, causal=True, **LSE)
        assert torch.equal(found[0], out)
        parts = parts_of(tensors, given)
        assert wrong_results(parts, ours, *found, True, (-1, -1), "hopper") == []


@pytest.mark.parametrize("name", SOME)
def test_a_graph(serve: Serve, name: str) -> None:
    """Whose lengths, descales and tensors change between replays."""
    serve(WAYS[name].few(128))
    case, tensors, given = draw(CASES["mixed"], 128)
    expected = [attend(tensors, given, causal=True) for _ in range(3)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(tensors, given, causal=True)
    for seed in range(3):
        if seed:
            rooms = [random.Random(seed).sample(x, len(x)) for x in (case.rooms_q, case.rooms_k)]
            other = replace(case, rooms_q=tuple(rooms[0]), rooms_k=tuple(rooms[1]))
            _, drawn, changed = draw(other, 128, seed)
            for x, new in zip(tensors, drawn, strict=True):
                x.view(torch.uint8).copy_(new.view(torch.uint8))
            for key in ("cu_seqlens_q", "cu_seqlens_k", *OF_DESCALES):
                given[key].copy_(changed[key])
            expected = attend(tensors, given, causal=True)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", SOME)
def test_rows_at_odd_addresses_and_far_apart(serve: Serve, name: str) -> None:
    serve(WAYS[name].few(128))
    _, tensors, given = draw(CASES["mixed"], 128)
    expected = attend(tensors, given)
    for step, offset in ((1, 8), (2, 0)):
        apart = []
        for x in tensors:
            memory = torch.zeros(step * x.numel() + 64, dtype=torch.uint8, device="cuda")
            room = memory[offset : offset + step * x.numel()].view(x.shape[0], step * x.shape[1], x.shape[2])
            room[:, ::step] = x.view(torch.uint8)
            apart.append(room[:, ::step].view(E4M3))
        for _ in range(3):
            assert torch.equal(attend(apart, given), expected)


@pytest.mark.parametrize("name", SOME)
def test_compiled_calls_have_the_same_bits(serve: Serve, name: str) -> None:
    serve(WAYS[name].few(128))
    _, tensors, given = draw(CASES["mixed"], 128)
    expected = attend(tensors, given)
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, **given), expected)


def test_other_calls_on_the_same_memory(serve: Serve) -> None:
    """Partial results of calls in turn, whose memory is kept, do not meet."""
    serve(WAYS["parts of a group"].few(128))
    drawn = [draw(case, 128, seed)[1:] for seed, case in enumerate(CASES.values())]
    firsts = [attend(tensors, given, causal=True) for tensors, given in drawn]
    for _ in range(5):
        for (tensors, given), first in zip(drawn, firsts, strict=True):
            assert torch.equal(attend(tensors, given, causal=True), first)


def test_rows_of_other_widths(serve: Serve) -> None:
    """Those of V are not as wide as those of K, nor as the kernel's."""
    for name in SOME:
        for sizes in ((128, 64), (64, 128), (96, 112)):
            serve(WAYS[name].few(128))
            case, tensors, given = draw(CASES["mixed"], max(sizes))
            q, k, v = (x[..., :n].contiguous() for x, n in zip(tensors, (sizes[0], *sizes), strict=True))
            case = replace(case, head_dims=sizes)
            check_served(WAYS[name].few(128), [q, k, v], given, causal=True)
            assert wrong_of(case, [q, k, v], given, True) == []


@pytest.mark.parametrize("name", SOME)
def test_what_these_tiles_do_not_serve(serve: Serve, name: str) -> None:
    """Exact LSEs, and queries that are used in part."""
    serve(WAYS[name].few(128))
    case, tensors, given = draw(CASES["mixed"], 128)
    used = torch.tensor((20, 0, 33, 1, 150), dtype=torch.int32, device="cuda")
    for options in ({"return_attn_probs": True}, {"seqused_q": used}):
        named = {key: x for key, x in given.items() if key not in options}
        config = explain_varlen(*tensors, **named, **options).config
        is_usual = isinstance(config, Fp8ForwardConfig) and (config.group, config.split) == (1, False)
        assert is_usual or isinstance(config, DecodeConfig)
        whole, found = attend(tensors, given), attend(tensors, named, **options)
        out, rows = found[0] if isinstance(found, tuple) else found, slice(None)
        if "seqused_q" in options:
            spans = replace(case, used_q=tuple(used.tolist())).spans()
            rows = torch.cat([torch.arange(a.start, a.stop) for a, _ in spans]).cuda()
        assert (out[rows].double() - whole[rows].double()).norm() <= 2 * ERROR * whole[rows].double().norm()


def test_a_call_that_is_found_again_makes_few_launches(serve: Serve) -> None:
    """The plan, attention, and what adds parts up; no operation of torch but memory."""
    _, tensors, given = draw(CASES["mixed"], 128)
    for way, count in ((WAYS["a group"], 2), (WAYS["parts of a group"], 3)):
        serve(way.few(128))
        for _ in range(3):
            attend(tensors, given, causal=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            attend(tensors, given, causal=True)
            torch.cuda.synchronize()
        kernels = [
            event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        # These tests fill what is to be written with NaN.
        assert len([name for name in kernels if "Fill" not in name]) == count, kernels
