"""Where tensors lie and when kernels run: strides, addresses, streams, devices, graphs, repeatability."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper.config import ForwardConfig
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import (
    compile_cache,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from hopper_attention.launch.base import ResultSpec

pytestmark = pytest.mark.gpu

GIB = 2**30
GUARD = 4096
"""Elements before and after an output that no kernel may touch."""


def test_outputs_are_poisoned_in_these_tests(device: str) -> None:
    # The fixture that every test relies on does what it says.
    spec, q = ResultSpec(torch.float16, head_dim_v=8), torch.zeros(1, 2, 3, 8, device=device)
    buffers = spec.empty_out(q), spec.empty_lse(q)
    assert all(bool(buffer.isnan().all()) for buffer in buffers)


@pytest.mark.parametrize("config", shipped_forward_configs(), ids=lambda config: config.name)
def test_every_shipped_kernel_writes_all_of_its_output_and_nothing_else(
    draw, judge, config: ForwardConfig
) -> None:
    dtype = getattr(torch, config.dtype)
    kernel = compile_cache.get_forward(config)
    for shorter in (0, 8):  # the kernel's own head dims, and ones that it fills up with zeros
        x = draw(dtype, 2, (300, 517), (4, 2), config.head_dim - shorter, config.head_dim_v - shorter)
        out, out_memory = guarded((2, 300, 4, config.head_dim_v - shorter), dtype, x.q.device)
        lse, lse_memory = guarded((2, 4, 300), torch.float32, x.q.device)
        counter = torch.zeros(2, dtype=torch.int32, device=x.q.device)
        ctas = torch.cuda.get_device_properties(x.q.device).multi_processor_count
        results = []
        for num_ctas in (ctas, 1):
            out.fill_(math.nan)
            lse.fill_(math.nan)
            kernel(x.q, x.k, x.v, out, lse, counter, x.q.shape[3] ** -0.5, num_ctas)
            assert judge(x, out, lse, config.causal) == []
            assert counter.tolist() == [0, 0]
            for memory in (out_memory, lse_memory):
                assert bool(memory[:GUARD].isnan().all()) and bool(memory[-GUARD:].isnan().all())
            results.append(out.clone())
        assert torch.equal(*results)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A contiguous tensor, and the NaN-filled memory around it."""
    size = math.prod(shape)
    memory = torch.full((GUARD + size + GUARD,), math.nan, dtype=dtype, device=device)
    return memory[GUARD : GUARD + size].view(shape), memory


def with_gap(x: Tensor) -> Tensor:
    """The same values, rows of heads 8 elements apart, NaN between them."""
    wide = torch.full((*x.shape[:3], x.shape[3] + 8), math.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[3]] = x
    return wide[..., : x.shape[3]]


def with_odd_stride(x: Tensor) -> Tensor:
    """The same values with strides that are no multiple of 8 elements."""
    wide = torch.full((*x.shape[:3], x.shape[3] + 3), math.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[3]] = x
    return wide[..., : x.shape[3]]


def misaligned(x: Tensor) -> Tensor:
    """The same values, one element past a multiple of 16 bytes."""
    memory = torch.full((x.numel() + 8,), math.nan, dtype=x.dtype, device=x.device)
    moved = memory[1 : 1 + x.numel()].view(x.shape)
    moved.copy_(x)
    assert moved.data_ptr() % 16 == 2
    return moved


def heads_first(x: Tensor) -> Tensor:
    """A (batch, seqlen, heads, head_dim) view of (batch, heads, seqlen, head_dim) storage."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_nan(x: Tensor) -> Tensor:
    """The same values in the middle of a larger tensor of NaN, in every dimension but the last."""
    shape = [size + 2 for size in x.shape[:3]]
    larger = torch.full((*shape, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
    middle = larger[1:-1, 1:-1, 1:-1]
    middle.copy_(x)
    return middle


@pytest.mark.parametrize("relay", [heads_first, with_gap, with_odd_stride, misaligned, inside_nan])
@pytest.mark.parametrize("causal", [False, True])
def test_strides_and_addresses_do_not_change_a_bit(draw, check, relay, causal: bool) -> None:
    for head_dim, seqlens in ((64, (113, 203)), (128, (517, 300)), (200, (129, 255))):
        x = draw(torch.bfloat16, 2, seqlens, (4, 2), head_dim)
        expected, expected_lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
        assert check(x, causal) == []
        views = [relay(t) for t in (x.q, x.k, x.v)]
        for mixed in (views, [views[0], x.k, x.v], [x.q, views[1], x.v], [x.q, x.k, views[2]]):
            out, lse = flash_attn_func(*mixed, causal=causal, return_attn_probs=True)
            assert out.is_contiguous()
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_packed_inputs_need_no_copy_and_change_no_bit(draw) -> None:
    x = draw(torch.float16, 2, (300, 300), (4, 4), 128)
    expected = flash_attn_func(x.q, x.k, x.v, causal=True)
    qkv = torch.stack((x.q, x.k, x.v), dim=2)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(flash_attn_kvpacked_func(x.q, qkv[:, :, 1:], causal=True), expected)
    rows = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], dim=-1)
    q, k, v = (part.unflatten(-1, (4, 128)) for part in rows.split(512, dim=-1))
    assert torch.equal(flash_attn_func(q, k, v, causal=True), expected)


def test_expanded_tensors(draw) -> None:
    x = draw(torch.float16, 3, (130, 190), (4, 1), 64)
    expanded = x.k.expand(-1, -1, 4, -1), x.v.expand(-1, -1, 4, -1)
    assert torch.equal(flash_attn_func(x.q, *expanded), flash_attn_func(x.q, x.k, x.v))
    one = x.q[:1].expand(3, -1, -1, -1), x.k[:1].expand(3, -1, -1, -1), x.v[:1].expand(3, -1, -1, -1)
    out = flash_attn_func(*one)
    assert torch.equal(out, flash_attn_func(x.q[:1], x.k[:1], x.v[:1]).expand_as(out))


def test_strides_of_dimensions_of_size_one_are_ignored(draw) -> None:
    x = draw(torch.float16, 1, (130, 190), (1, 1), 64)
    expected = flash_attn_func(x.q, x.k, x.v)
    strange = [t.as_strided(t.shape, (3, 64, 5, 1)) for t in (x.q, x.k, x.v)]
    assert torch.equal(flash_attn_func(*strange), expected)
    one_row = [t[:, :1].as_strided((1, 1, 1, 64), (7, 3, 5, 1)) for t in (x.q, x.k, x.v)]
    assert torch.equal(flash_attn_func(*one_row), one_row[2])


def test_a_side_stream_is_the_one_that_is_used(draw) -> None:
    x = draw(torch.bfloat16, 2, (512, 512), (4, 4), 128)
    expected = flash_attn_func(x.q, x.k, x.v)
    late = torch.full_like(x.q, math.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms: a launch on another stream would read NaN
        late.copy_(x.q)
        out = flash_attn_func(late, x.k, x.v)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_two_streams_at_once(draw) -> None:
    inputs = [draw(torch.bfloat16, 2, (700 + 100 * i, 900), (4, 2), 64) for i in range(2)]
    expected = [flash_attn_func(x.q, x.k, x.v, causal=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for index, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            with torch.cuda.stream(stream):
                results[index].append(flash_attn_func(x.q, x.k, x.v, causal=True))
    torch.cuda.synchronize()
    for index, outs in enumerate(results):
        assert all(torch.equal(out, expected[index]) for out in outs)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2,
    reason="needs a second GPU",
)
def test_another_device_index(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    expected = flash_attn_func(x.q, x.k, x.v, causal=True)
    there = [t.to("cuda:1") for t in (x.q, x.k, x.v)]
    out = flash_attn_func(*there, causal=True)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_twenty_runs_give_the_same_bits(draw, head_dim: int, causal: bool) -> None:
    x = draw(torch.bfloat16, 2, (2049, 3001), (8, 2), head_dim)
    first, first_lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
    for run in range(19):
        out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse), f"run {run + 2} differs"


def needs_memory(device: str, gib: int) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    if total < gib * GIB:
        pytest.skip(f"needs a GPU of {gib} GiB, this one has {total / GIB:.0f}")


BIG = {
    "batch": (4100, (128, 128), (64, 64)),
    "seqlen_q": (1, (1_060_000, 64), (32, 32)),
    "seqlen_k": (1, (64, 1_060_000), (32, 32)),
}
"""Batch, lengths and heads at head_dim 64 of tensors above 2^31 elements, by the dimension that does it."""


@pytest.mark.parametrize("dimension", BIG)
def test_tensors_above_two_to_the_31_elements(draw, judge, device: str, dimension: str) -> None:
    needs_memory(device, 60)
    batch, seqlens, heads = BIG[dimension]
    x = draw(torch.bfloat16, batch, seqlens, heads, 64)
    assert max(x.q.numel(), x.k.numel()) > 2**31
    out, lse = flash_attn_func(x.q, x.k, x.v, return_attn_probs=True)
    # The last rows of the last head lie beyond what 32 bits can address.
    b, rows, h = slice(batch - 1, batch), slice(seqlens[0] - 64, seqlens[0]), slice(heads[0] - 1, heads[0])
    part = type(x)(x.q[b, rows, h].clone(), x.k[b, :, h].clone(), x.v[b, :, h].clone())
    assert judge(part, out[b, rows, h], lse[b, h, rows], False) == []
    assert bool(lse.isfinite().all())
    assert all(bool(piece.isfinite().all()) for piece in out.flatten().split(2**28))


def test_a_captured_graph_computes_on_what_its_inputs_hold_then(draw) -> None:
    static = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    fresh = [draw(torch.bfloat16, 2, (300, 517), (4, 2), 128) for _ in range(3)]
    expected = [flash_attn_func(x.q, x.k, x.v, causal=True) for x in fresh]
    flash_attn_func(static.q, static.k, static.v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(static.q, static.k, static.v, causal=True)
        twice = flash_attn_func(out, static.k, static.v, causal=True)
    for x, wanted in zip(fresh, expected, strict=True):
        for target, source in ((static.q, x.q), (static.k, x.k), (static.v, x.v)):
            target.copy_(source)
        graph.replay()
        assert torch.equal(out, wanted)
        assert torch.equal(twice, flash_attn_func(wanted, x.k, x.v, causal=True))


def test_two_graphs_replayed_at_once(draw) -> None:
    inputs = [draw(torch.bfloat16, 2, (900, 1100), (4, 2), 64) for _ in range(2)]
    expected = [flash_attn_func(x.q, x.k, x.v, causal=True) for x in inputs]
    graphs, outs = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(flash_attn_func(x.q, x.k, x.v, causal=True))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))
