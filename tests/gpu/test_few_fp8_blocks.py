"""FP8 calls of few queries on a GPU, whose tiles have several heads or whose keys are in parts, on what the quantizer
made: against float64 and the kernels for any number of queries, with NaN around."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import RUNLESS_KEYS
from hopper_attention import (
    Fp8Quantization,
    explain_fp8,
    few_blocks,
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    fp8_at_once,
    parts_again,
    quantize_qkv,
)
from hopper_attention.few_queries import NOT_FEW
from hopper_attention.launch import fp8
from hopper_attention.quantized import E4M3, QuantizedQKV
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

HEADS, PARTS, BOTH, OWN = "heads in a tile", "keys in parts", "heads and parts", "low tiles of a head"
MOST_OF_USUAL = 1.1
"""Errors of these kernels over those of the ones for any number of queries, at most."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """In its context calls of few queries are served as those of many."""

    def forget() -> None:
        for function in (fp8._find_flat, fp8.find_fp8_launch, fp8_at_once.find_at_once):
            function.cache_clear()
        again = parts_again.remembered, parts_again.of_any_length, parts_again.in_memory
        for kept in (*again, fp8_at_once.calls_at_once):
            kept.cache_clear()

    @contextmanager
    def served_as_usual() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(few_blocks, "find_few", lambda problem: NOT_FEW)
            forget()
            yield
        forget()

    yield served_as_usual
    forget()


def kernel_of(config: Any) -> str:
    assert isinstance(config, Fp8ForwardConfig) and not config.v_rows
    if config.group > 1:
        return BOTH if config.split else HEADS
    return PARTS if config.split else OWN


@dataclass(frozen=True)
class Case:
    """Sizes (batch, seqlen_q, seqlen_k), heads and kv_heads, head_dim, and what serves it."""

    sizes: tuple[int, int, int]
    heads: tuple[int, int]
    head_dim: int
    kernel: str

    @property
    def quantization(self) -> Fp8Quantization:
        """With a mean of V, but where it would be one for each run of keys, for which there are no such tiles."""
        return Fp8Quantization(smooth_v=self.sizes[2] <= RUNLESS_KEYS)

    def draw(self, seed: int = 0, peak: float = 1.0, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each in the middle of a tensor of NaN: queries ``peak`` times N(0, 1), whose heads and rows have
        other sizes, and values with an ``offset`` that is another in every column."""
        generator = torch.Generator("cuda").manual_seed(seed)
        (batch, seqlen_q, seqlen_k), (heads, kv_heads), d = self.sizes, self.heads, self.head_dim
        drawn = []
        for rows, count in ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)):
            around = torch.full((batch, rows + 3, count, d), math.nan, device="cuda", dtype=torch.bfloat16)
            inner = around[:, 1 : 1 + rows]
            inner.copy_(torch.randn(inner.shape, generator=generator, device="cuda"))
            drawn.append(inner)
        q, k, v = drawn
        sizes = torch.randint(-3, 1, (*q.shape[:3], 1), generator=generator, device="cuda")
        q.mul_(peak * 2.0**sizes)
        v.add_(offset * (1 + torch.arange(d, device="cuda") / d))
        return q, k, v


CASES = [
    Case((64, 16, 1000), (32, 4), 128, HEADS),
    Case((70, 9, 530), (64, 1), 128, HEADS),
    Case((64, 1, 4001), (32, 8), 128, HEADS),
    Case((64, 8, 3000), (32, 4), 64, HEADS),
    Case((64, 20, 777), (32, 4), 80, HEADS),
    Case((64, 16, 1001), (32, 4), 192, HEADS),
    Case((64, 8, 999), (16, 4), 256, HEADS),
    Case((1, 40, 20_001), (8, 2), 128, BOTH),
    Case((2, 33, 9000), (8, 2), 128, BOTH),
    Case((1, 1, 30_001), (64, 1), 64, BOTH),
    Case((4, 13, 7000), (8, 1), 64, BOTH),
    Case((1, 90, 5000), (8, 2), 96, BOTH),
    Case((2, 21, 5001), (16, 2), 192, BOTH),
    Case((2, 21, 5001), (16, 2), 256, BOTH),
    Case((1, 200, 9999), (2, 2), 128, PARTS),
    Case((1, 40, 6000), (12, 1), 128, BOTH),
    Case((1, 100, 7777), (4, 4), 256, PARTS),
    Case((1, 16, 8001), (8, 8), 64, PARTS),
    Case((128, 33, 700), (4, 4), 128, OWN),
    Case((64, 50, 333), (8, 8), 64, OWN),
    Case((30, 60, 301), (8, 8), 256, OWN),
    Case((2, 3, 34), (2, 2), 80, OWN),
    # Heads that do not divide a warpgroup's rows, of which some are nobody's.
    Case((64, 17, 1000), (28, 4), 128, HEADS),
    Case((64, 8, 999), (12, 2), 256, HEADS),
    Case((1, 40, 5001), (28, 4), 128, BOTH),
    Case((2, 21, 5001), (24, 1), 192, BOTH),
]
IDS = [f"{case.kernel}, {case.sizes}, {case.heads}, {case.head_dim}" for case in CASES]
SOME = CASES[1:22:4]


def exact_of(tensors: tuple[Tensor, ...], **options: Any) -> Tensor:
    return attention_naive(*(x.double() for x in tensors), **options)[0]


def error_of(out: Tensor, exact: Tensor) -> float:
    assert out.dtype == torch.bfloat16 and out.shape == exact.shape and out.is_contiguous()
    return ((out.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_serves_each(case: Case, causal: bool) -> None:
    config = explain_fp8(*case.draw(), causal=causal, quantization=case.quantization).attention.config
    assert kernel_of(config) == case.kernel, config.name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_errors_are_those_of_other_kernels(
    case: Case, causal: bool, usual: Callable[[], AbstractContextManager[None]]
) -> None:
    """Of N(0, 1), of peaky scores, and of values with an offset; calls again have the same bits."""
    for peak, offset in ((1.0, 0.0), (8.0, 0.0), (1.0, 5.0), (8.0, 2.0)):
        errors: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(3):
            tensors = case.draw(seed, peak, offset)
            exact = exact_of(tensors, causal=causal)
            outs = [flash_attn_fp8_func(*tensors, causal=causal) for _ in range(4)]
            parts = quantize_qkv(*tensors)
            outs_of_parts = [flash_attn_quantized_func(parts, causal=causal) for _ in range(4)]
            for first, *others in (outs, outs_of_parts):
                assert all(torch.equal(first, out) for out in others)
                errors[False].append(error_of(first, exact))
            with usual():
                errors[True].append(error_of(flash_attn_fp8_func(*tensors, causal=causal), exact))
                errors[True].append(error_of(flash_attn_quantized_func(parts, causal=causal), exact))
        # Where few keys count, e4m3 itself is off by 0.16, and by 0.2 in a single query.
        largest = 0.1 if peak == 1.0 else max(0.2, 1.02 * max(errors[True]))
        assert max(errors[False]) <= largest, (peak, offset, errors)
        assert sum(errors[False]) <= MOST_OF_USUAL * sum(errors[True]), (peak, offset, errors)


@pytest.mark.parametrize("case", SOME, ids=[IDS[CASES.index(case)] for case in SOME])
def test_parts_in_every_form(case: Case) -> None:
    """Where they lie in memory, taken out of it, and with codes that TMA cannot address: the same bits."""
    tensors = case.draw(1, offset=3.0)
    expected = flash_attn_quantized_func(quantize_qkv(*tensors).opened(), causal=True)
    for _ in range(4):
        parts: QuantizedQKV = quantize_qkv(*tensors)
        assert torch.equal(flash_attn_quantized_func(parts, causal=True), expected)
        assert torch.equal(flash_attn_quantized_func(parts.opened(), causal=True), expected)
    opened = parts.opened()
    odd = torch.zeros(opened.q.data.numel() + 1, device="cuda", dtype=torch.uint8)[1:]
    odd = odd.view(opened.q.data.shape).copy_(opened.q.data.view(torch.uint8)).view(E4M3)
    turned = opened.k.data.transpose(1, 2).contiguous().transpose(1, 2)
    other = replace(
        opened, q=replace(opened.q, data=odd, largest=opened.q.largest), k=replace(opened.k, data=turned)
    )
    for _ in range(3):
        assert torch.equal(flash_attn_quantized_func(other, causal=True), expected)


@pytest.mark.parametrize("case", SOME, ids=[IDS[CASES.index(case)] for case in SOME])
@pytest.mark.parametrize(
    "options",
    [
        {"block_q": 16},
        {"granularity": "head"},
        {"granularity": "tensor"},
        {"rotate_v": True},
        {"smooth_v": False},
        {"block_k": 64},
        {"block_k": 384},
    ],
    ids=str,
)
def test_other_ways_to_quantize(
    case: Case, options: dict[str, Any], usual: Callable[[], AbstractContextManager[None]]
) -> None:
    tensors, c = case.draw(2, offset=1.0), Fp8Quantization(**options)
    exact = exact_of(tensors, causal=True)
    out = flash_attn_fp8_func(*tensors, causal=True, quantization=c)
    with usual():
        of_usual = flash_attn_fp8_func(*tensors, causal=True, quantization=c)
    assert error_of(out, exact) <= MOST_OF_USUAL * error_of(of_usual, exact)


@pytest.mark.parametrize("case", SOME, ids=[IDS[CASES.index(case)] for case in SOME])
def test_graphs_streams_and_compiled_calls(case: Case) -> None:
    tensors = case.draw()

    def attend(*x: Tensor) -> Tensor:
        return flash_attn_fp8_func(*x, causal=True, quantization=case.quantization)

    def attend_to_parts() -> Tensor:
        return flash_attn_quantized_func(quantize_qkv(*tensors, quantization=case.quantization), causal=True)

    expected = [attend(*tensors) for _ in range(3)][-1]
    assert torch.equal(torch.compile(attend, fullgraph=True)(*tensors), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            assert torch.equal(attend(*tensors), expected)
            assert torch.equal(attend_to_parts(), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors)
    for seed in (3, 4):
        for x, new in zip(tensors, case.draw(seed), strict=True):
            x.copy_(new)
        graph.replay()
        assert torch.equal(out, attend(*tensors))


@pytest.mark.parametrize("case", SOME, ids=[IDS[CASES.index(case)] for case in SOME])
def test_odd_addresses_and_strides(case: Case) -> None:
    tensors = case.draw(offset=2.0)
    expected = flash_attn_fp8_func(*tensors)
    odd, turned = [], []
    for x in tensors:
        flat = torch.zeros(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape)
        odd.append(flat.copy_(x))
        turned.append(x.transpose(1, 3).contiguous().transpose(1, 3))
    for _ in range(3):
        for each in (odd, turned, tensors):
            assert torch.equal(flash_attn_fp8_func(*each), expected)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("sizes", [(64, 60, 50), (2, 200, 33), (1, 256, 120)], ids=str)
def test_rows_without_keys(sizes: tuple[int, int, int], head_dim: int) -> None:
    """They are 0: the mean of V is not added."""
    tensors = Case(sizes, (16, 4), head_dim, HEADS).draw(offset=4.0)
    exact, empty = exact_of(tensors, causal=True), sizes[1] - sizes[2]
    for _ in range(4):
        for out in (
            flash_attn_fp8_func(*tensors, causal=True),
            flash_attn_quantized_func(quantize_qkv(*tensors), causal=True),
        ):
            assert not out[:, :empty].any() and error_of(out, exact) <= 5e-2


def test_parts_without_keys_leave_no_trace() -> None:
    """Of more parts than there are blocks, as where keys are fewer than the most of their class, whatever lies behind
    the scales."""
    for head_dim in (64, 128, 256):
        for keys in (1025, 2049, 4097, 8193):
            tensors = Case((1, 20, keys), (8, 2), head_dim, BOTH).draw(offset=2.0)
            for causal in (False, True):
                exact = exact_of(tensors, causal=causal)
                for filler in (0xFF, 0x80, 0xBF):
                    noise = [
                        torch.full((2**16,), filler, dtype=torch.uint8, device="cuda") for _ in range(64)
                    ]
                    del noise
                    out = flash_attn_quantized_func(quantize_qkv(*tensors).opened(), causal=causal)
                    assert error_of(out, exact) <= 5e-2, (head_dim, keys, causal)


def test_tiles_of_other_heads_follow_each_other() -> None:
    """A CTA has tiles of heads with other means of V one after another: each has its own, in every run."""
    for case in (case for case in CASES if case.sizes[0] <= 4):
        q, k, v = case.draw(5)
        batch, _, kv_heads, _ = v.shape
        v.add_(torch.arange(batch * kv_heads, device="cuda").view(batch, 1, kv_heads, 1) * 3.0)
        exact = exact_of((q, k, v))
        first = flash_attn_fp8_func(q, k, v)
        assert error_of(first, exact) <= 5e-2
        for _ in range(50):
            assert torch.equal(flash_attn_fp8_func(q, k, v), first)


def test_keys_that_grow() -> None:
    q, k, v = Case((2, 33, 9000), (8, 2), 128, BOTH).draw(offset=1.0)
    for rows in (8900, 8901, 8902, 9000, 8901, 8193, 8192, 8191, 4096):
        tensors = q, k[:, :rows], v[:, :rows]
        exact = exact_of(tensors, causal=True)
        assert error_of(flash_attn_fp8_func(*tensors, causal=True), exact) <= 5e-2
        assert error_of(flash_attn_quantized_func(quantize_qkv(*tensors), causal=True), exact) <= 5e-2


def test_other_calls_on_the_same_memory() -> None:
    """Partial results of calls in turn, whose memory is kept, do not meet."""
    drawn = [case.draw(1) for case in CASES if case.kernel in (BOTH, PARTS)]
    firsts = [flash_attn_fp8_func(*tensors) for tensors in drawn]
    for _ in range(5):
        for tensors, first in zip(drawn, firsts, strict=True):
            assert torch.equal(flash_attn_fp8_func(*tensors), first)
