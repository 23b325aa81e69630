"""Packed e4m3 tensors with descales on a GPU, in calls that are found again too: each sequence against float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper_attention import explain_varlen, flash_attn_varlen_func, packed_descaled_again, varlen
from hopper_attention.packed_quantization import from_packed_descales, resolve_lengths
from hopper_attention.packed_quantized import PackedQuantizedQKV
from tests.gpu.test_fp8_varlen import on_gpu, wrong_results
from tests.python.packed_fp8_calls import refuse
from tests.python.test_packed_quantization import NAMES
from tests.python.varlen_cases import Case, offsets

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn
OF_DESCALES = ("q_descale", "k_descale", "v_descale")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


CASES = {
    "short": Case((200, 1, 33, 150), (260, 1, 0, 150), heads=(4, 2)),
    "rows with a stale maximum": Case((600, 0, 333, 700), (2000, 40, 333, 1900), heads=(20, 20), behind=77),
    "transposed before": Case((1500, 7, 1024, 600), (1500, 9, 2048, 601), heads=(24, 6), behind=5),
    "few tiles": Case((1500,), (2500,), heads=(4, 1)),
    "few keys of many queries": Case((500,) * 9, (400, 500, 1, 0, 333, 64, 65, 200, 100), heads=(24, 3)),
    "used in part": Case((700, 300), (900, 333), None, (850, 333), heads=(6, 1)),
    "few queries": Case((3, 1, 2, 3), (900, 1, 333, 70), heads=(8, 2)),
}
HEAD_DIMS = 64, 80, 128, 256


def draw(name: str, head_dim: int) -> tuple[Case, list[Tensor], dict[str, Any]]:
    """q, k and v, and the other arguments by name."""
    case = replace(CASES[name], head_dims=(head_dim, head_dim))
    tensors, named = on_gpu(case, torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = len(case.rooms_q), case.heads[1]
    descales = {n: torch.rand(shape, generator=generator, device="cuda") + 0.5 for n in OF_DESCALES}
    return case, [x.to(E4M3) for x in tensors], named | descales


def parts_of(tensors: list[Tensor], given: dict[str, Any]) -> PackedQuantizedQKV:
    lengths = resolve_lengths(*(given.get(name) for name in NAMES))
    assert lengths is not None
    of_q, of_k, of_v = (given.get(name) for name in OF_DESCALES)
    return from_packed_descales(*tensors, (of_q, of_k, of_v), lengths, torch.bfloat16)


def wrong_of(case: Case, tensors: list[Tensor], given: dict[str, Any], causal: bool) -> list[Any]:
    """What is wrong with a first call and with two like it, which are to have its bits; with an LSE and without."""
    parts, wrong = parts_of(tensors, given), []
    lse = None
    for options in ({"return_attn_probs": True, "exact_lse": False}, {"return_attn_probs": True}, {}):
        packed_descaled_again.remembered.cache_clear()
        calls = []
        for _ in range(3):
            found = flash_attn_varlen_func(*tensors, **given, causal=causal, **options)
            calls.append(found if options else (found, lse))
        out, lse = calls[0]
        assert lse is not None and all(torch.equal(out, x) and torch.equal(lse, y) for x, y in calls)
        wrong += wrong_results(parts, case, out, lse, causal, (-1, -1), "hopper")
    return wrong


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, head_dim: int) -> None:
    case, tensors, given = draw(name, head_dim)
    for causal in (False, True):
        assert wrong_of(case, tensors, given, causal) == []


def test_the_kernels_that_serve() -> None:
    expected = {
        "short": (Softmax.EAGER, True),
        "rows with a stale maximum": (Softmax.HALF_SCORES, True),
        "transposed before": (Softmax.HALF_SCORES, False),
        "few tiles": (Softmax.EAGER, True),
        "few keys of many queries": (Softmax.EAGER, True),
    }
    for name, kernel in expected.items():
        _, tensors, given = draw(name, 128)
        config = explain_varlen(*tensors, **given).config
        assert isinstance(config, Fp8ForwardConfig) and config.lone_scales
        assert (config.softmax, config.v_rows) == kernel


WINDOWS: list[dict[str, Any]] = [
    {"window_size": (128, 0)},
    {"window_size": (100, 30)},
    {"window_size": (-1, 3)},
    {"attention_chunk": 200, "causal": True},
    {"window_size": (64, 9), "attention_chunk": 200},
]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_calls_in_a_window_are_found_again(name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in turn, as of a model's layers: with the bits of the first call of each, which was found anew."""
    _, tensors, given = draw(name, head_dim)
    for options in ({}, {"return_attn_probs": True, "exact_lse": False}):
        packed_descaled_again.remembered.cache_clear()
        windows = [{}, *WINDOWS]
        calls = []
        for number in range(4):
            with monkeypatch.context() as patch:
                if number > 1:
                    patch.setattr(varlen, "_call_operator", refuse)
                found = [flash_attn_varlen_func(*tensors, **given, **window, **options) for window in windows]
            calls.append([x if isinstance(x, tuple) else (x,) for x in found])
        first, *others = calls
        for other in others:
            assert all(
                torch.equal(x, y)
                for a, b in zip(first, other, strict=True)
                for x, y in zip(a, b, strict=True)
            )


@pytest.mark.parametrize("kind", ["none", "of q alone", "one for all", "columns of others"])
def test_descales(kind: str) -> None:
    case, tensors, given = draw("transposed before", 128)
    of_q, of_k, of_v = (given.pop(name) for name in OF_DESCALES)
    descales = {
        "none": {},
        "of q alone": {"q_descale": of_q},
        "one for all": dict.fromkeys(OF_DESCALES, of_k),
        "columns of others": {
            name: torch.stack((x, x + 1), 2)[..., 0]
            for name, x in zip(OF_DESCALES, (of_q, of_k, of_v), strict=True)
        },
    }
    assert wrong_of(case, tensors, given | descales[kind], True) == []


def test_lengths_and_descales_are_read_at_each_call() -> None:
    """In memory that earlier calls had, beside others on another stream."""
    case, tensors, given = draw("transposed before", 128)
    rng, side = random.Random(0), torch.cuda.Stream()
    total = sum(case.rooms_q)
    q, k, v = (x[:total].contiguous() for x in tensors)
    q, k, v = (torch.randn(x.shape, device="cuda").to(E4M3) for x in (q, k, v))
    for _ in range(6):
        cuts = sorted(rng.randrange(total + 1) for _ in range(3))
        rooms = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
        given |= {"cu_seqlens_q": offsets(rooms).cuda(), "cu_seqlens_k": offsets(rooms).cuda()}
        given |= {"max_seqlen_q": 2048, "max_seqlen_k": 2048}
        given |= {name: torch.rand_like(given[name]) + 0.5 for name in OF_DESCALES}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            beside = flash_attn_varlen_func(q, k, v, **given, causal=True)
        out = flash_attn_varlen_func(q, k, v, **given, causal=True)
        torch.cuda.synchronize()
        assert torch.equal(out, beside)
        lse = flash_attn_varlen_func(q, k, v, **given, causal=True, return_attn_probs=True, exact_lse=False)[
            1
        ]
        ours = Case(rooms, rooms, heads=case.heads, head_dims=case.head_dims)
        assert wrong_results(parts_of([q, k, v], given), ours, out, lse, True, (-1, -1), "hopper") == []


def test_a_graph() -> None:
    _, tensors, given = draw("rows with a stale maximum", 128)
    for _ in range(3):
        expected = flash_attn_varlen_func(*tensors, **given, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_varlen_func(*tensors, **given, causal=True)
    for _ in range(2):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_rows_at_odd_addresses_and_far_apart() -> None:
    _, tensors, given = draw("rows with a stale maximum", 128)
    expected = flash_attn_varlen_func(*tensors, **given)
    for step, offset in ((1, 8), (2, 0)):
        apart = []
        for x in tensors:
            memory = torch.zeros(step * x.numel() + 64, dtype=torch.uint8, device="cuda")
            room = memory[offset : offset + step * x.numel()].view(x.shape[0], step * x.shape[1], x.shape[2])
            room[:, ::step] = x.view(torch.uint8)
            apart.append(room[:, ::step].view(E4M3))
        for _ in range(3):
            assert torch.equal(flash_attn_varlen_func(*apart, **given), expected)


def test_compiled_calls_have_the_same_bits() -> None:
    _, tensors, given = draw("short", 128)
    expected = flash_attn_varlen_func(*tensors, **given)
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, **given), expected)


def test_a_call_that_is_found_again_makes_few_launches() -> None:
    """The plan, V transposed and attention; no operation of torch but memory."""
    _, tensors, given = draw("transposed before", 128)
    for _ in range(3):
        flash_attn_varlen_func(*tensors, **given, causal=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flash_attn_varlen_func(*tensors, **given, causal=True)
        torch.cuda.synchronize()
    kernels = [
        event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    # These tests fill what is to be written with NaN.
    assert len([name for name in kernels if "Fill" not in name]) == 3, kernels
