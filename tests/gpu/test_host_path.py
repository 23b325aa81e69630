"""Short calls on a GPU: gradients without the dispatcher of torch, and work memory that calls on a stream share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    cache_again,
    dense_again,
    descaled_again,
    device_memory,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fp8_at_once,
    fused_again,
    get_scheduler_metadata,
    kvcache,
    parts_again,
    quantize_qkv,
    varlen_again,
)
from hopper_attention.launch import gradients_again, packed_gradients_again
from hopper_attention.parts_memory import LengthLayout
from hopper_attention.quantized import MEMORY, QuantizedQKV

pytestmark = pytest.mark.gpu

Call = Callable[[], Tensor]
REPEATS = 40


def gradients(inputs, causal: bool = True) -> Tensor:
    """dq, dk and dv in a row; the same bits in every run."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = flash_attn_func(*leaves, causal=causal, deterministic=True)
    return torch.cat([x.flatten() for x in torch.autograd.grad(out, leaves, out.detach())])


def gradients_of_a_tile(inputs) -> Tensor:
    """The same by the kernel that sums dQ in any order, of keys of which there is one tile, so in one order."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k[:, :60], inputs.v[:, :60])]
    out = flash_attn_func(*leaves)
    return torch.cat([x.flatten() for x in torch.autograd.grad(out, leaves, out.detach())])


def decoded(inputs) -> Tensor:
    """One query a sequence on all of its keys but one."""
    lengths = torch.full((len(inputs.q),), inputs.k.shape[1] - 1, dtype=torch.int32, device="cuda")
    return flash_attn_with_kvcache(inputs.q[:, :1], inputs.k, inputs.v, cache_seqlens=lengths)


def calls_on(inputs) -> dict[str, Call]:
    return {
        "backward": partial(gradients, inputs),
        "decode": partial(decoded, inputs),
        "fp8": partial(flash_attn_fp8_func, inputs.q, inputs.k, inputs.v, causal=True),
    }


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_operators(draw, causal: bool) -> None:
    x = draw(torch.bfloat16, 2, (130, 190), (4, 2), 64)
    options = 64**-0.5, causal, None
    out, lse = torch.ops.hopper_attention.forward(x.q, x.k, x.v, *options, 0, True)
    parts = torch.ops.hopper_attention.backward(out, None, x.q, x.k, x.v, out, lse, *options, True)
    assert torch.equal(gradients(x, causal), torch.cat([part.flatten() for part in parts]))


def test_calls_of_different_kinds_take_turns_with_one_work_memory(draw) -> None:
    sizes = (1, (64, 300)), (3, (200, 700)), (1, (64, 300))
    calls = [
        call
        for batch, seqlens in sizes
        for call in calls_on(draw(torch.bfloat16, batch, seqlens, (4, 2), 64)).values()
    ]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        # Queued without waiting, so that a call is made before the one before it has run.
        results = [call() for call in calls]
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def at_an_odd_address(x: Tensor) -> Tensor:
    """A copy that begins an element behind a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def test_kernels_refuse_odd_addresses_of_calls_that_were_seen(draw) -> None:
    # What serves a call again asks no address, as the kernels do before they launch anything.
    x = draw(torch.bfloat16, 2, (128, 60), (4, 2), 64)
    dout, lengths = torch.randn_like(x.q), torch.full((2,), 59, dtype=torch.int32, device="cuda")

    def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves)
        return [flash_attn_func(q, k, v), out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def decode(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q[:, :1].contiguous(), k, v, cache_seqlens=lengths)

    given = x.q, x.k, x.v, dout
    for _ in range(3):
        expected, decoded = results(*given), decode(*given)
    for odd in range(4):
        moved = [at_an_odd_address(x) if i == odd else x for i, x in enumerate(given)]
        assert moved[odd].data_ptr() % 16
        assert all(torch.equal(*pair) for pair in zip(results(*moved), expected, strict=True)), odd
        # A cache at an odd address is not copied: another kernel reads it, and adds up in another order.
        torch.testing.assert_close(decode(*moved), decoded, rtol=2**-7, atol=2**-9)


def test_caches_of_e4m3_at_odd_addresses_are_read_by_another_kernel(draw) -> None:
    x = draw(torch.bfloat16, 2, (1, 500), (8, 2), 128)
    k, v = (y.to(torch.float8_e4m3fn) for y in (x.k, x.v))
    lengths = torch.tensor([499, 130], dtype=torch.int32, device="cuda")
    descales = dict.fromkeys(("k_descale", "v_descale"), torch.full((2, 2), 0.5, device="cuda"))

    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **descales)

    given = x.q, k, v
    expected, *others = [decode(*given) for _ in range(4)]
    assert all(torch.equal(other, expected) for other in others) and expected.abs().max() > 0.1
    for odd in range(3):
        moved = [at_an_odd_address(y) if i == odd else y for i, y in enumerate(given)]
        assert moved[odd].data_ptr() % 16 == given[odd].dtype.itemsize
        for _ in range(3):
            torch.testing.assert_close(decode(*moved), expected, rtol=2**-7, atol=2**-9)
    assert torch.equal(decode(*given), expected)


def test_packed_gradients_of_passes_like_earlier_ones(draw) -> None:
    # One key tile a sequence, so that dQ is the same bits in every pass.
    x = draw(torch.bfloat16, 1, (200, 200), (4, 2), 64)
    starts = torch.tensor([0, 60, 100, 200], dtype=torch.int32, device="cuda")
    dout, others = torch.randn_like(x.q[0]), starts.clone()

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, starts_k: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, starts, starts_k, 100, 100, causal=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    given = x.q[0], x.k[0], x.v[0], dout
    for starts_k in (starts, others):
        expected, *passes = [step(*given, starts_k) for _ in range(REPEATS)]
        odd = [[at_an_odd_address(x) if i == j else x for j, x in enumerate(given)] for i in range(4)]
        passes += [step(*moved, starts_k) for moved in odd]
        assert all(torch.equal(*pair) for found in passes for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_do_not_share_work_memory(draw, own_streams: bool) -> None:
    tasks = [calls_on(draw(torch.bfloat16, 2, (128, 400), (4, 2), 64)) for _ in range(4)]
    expected = [{name: call() for name, call in task.items()} for task in tasks]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(REPEATS):
                for name, call in tasks[number].items():
                    if not torch.equal(call(), expected[number][name]):
                        wrong.append(f"{name} in thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["decode", "fp8"])
def test_a_graph_has_work_memory_of_its_own(draw, name: str) -> None:
    calls, others = (calls_on(draw(torch.bfloat16, 2, (128, 400), (4, 2), 64)) for _ in range(2))
    expected = calls[name]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = calls[name]()
    for _ in range(REPEATS):
        out.zero_()
        others["backward"]()
        graph.replay()
        others[name]()
        assert torch.equal(out, expected)


def packed_gradients(inputs, **options: Any) -> Tensor:
    """Output and gradients of two sequences of different lengths; the same bits in every run."""
    leaves = [x.flatten(0, 1).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    starts_q, starts_k = (torch.tensor([0, 50, x.shape[0]], device="cuda").int() for x in leaves[:2])
    longest = leaves[0].shape[0], leaves[1].shape[0]
    options = {"causal": True, "deterministic": True} | options
    out = flash_attn_varlen_func(*leaves, starts_q, starts_k, *longest, **options)
    return torch.cat([out.flatten(), *(x.flatten() for x in torch.autograd.grad(out, leaves, out.detach()))])


@lru_cache
def starts_of(*rows: int) -> Tensor:
    """Where sequences begin; kept, as a graph that is captured can make no such tensor."""
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def packed_gradients_of_a_tile(inputs) -> Tensor:
    """The same by the kernel that sums dQ in any order, of sequences with one tile of keys, so in one order."""
    tokens = (x.flatten(0, 1)[:n] for x, n in ((inputs.q, 200), (inputs.k, 100), (inputs.v, 100)))
    leaves = [x.detach().requires_grad_() for x in tokens]
    total = len(leaves[0])
    starts = starts_of(0, 40, total), starts_of(0, 60, 100)
    out = flash_attn_varlen_func(*leaves, *starts, total - 40, 60)
    return torch.cat([out.flatten(), *(x.flatten() for x in torch.autograd.grad(out, leaves, out.detach()))])


def quantized(inputs) -> Tensor:
    parts = quantize_qkv(inputs.q, inputs.k, inputs.v)
    of_all = (parts.q, parts.k, parts.v)
    tensors = *(x.data for x in of_all), *(x.scale for x in of_all), parts.mean_v
    return torch.cat([x.view(torch.uint8).flatten() for x in tensors])


def attend_to_parts(inputs) -> Tensor:
    return flash_attn_quantized_func(quantize_qkv(inputs.q, inputs.k, inputs.v), causal=True)


def attend_to_e4m3(inputs, heads: int = 4, repeats: int = 1, **options: Any) -> Tensor:
    """Of tensors that come as e4m3, with descales: so many heads of queries, each so often."""
    q = inputs.q[:, :, :heads].repeat(1, repeats, 1, 1)
    codes = [x.to(torch.float8_e4m3fn) for x in (q, inputs.k, inputs.v)]
    scales = [x.float().abs().amax((1, 3)) for x in (inputs.k, inputs.k, inputs.v)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    results = flash_attn_func(*codes, causal=True, **named, **options)
    return results if isinstance(results, Tensor) else torch.cat([x.flatten().float() for x in results])


def packed_in_a_window(inputs, in_fp8: bool) -> Tensor:
    """Of two sequences of different lengths, without gradients."""
    tensors = [x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v)]
    total_q, total_k = tensors[0].shape[0], tensors[1].shape[0]
    starts = starts_of(0, 50, total_q), starts_of(0, 70, total_k)
    if not in_fp8:
        return flash_attn_varlen_func(*tensors, *starts, total_q, total_k, window_size=(30, 0))
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    named = dict(zip(names, (*starts, total_q, total_k), strict=True))
    return flash_attn_fp8_func(*tensors, window_size=(30, 0), **named)


def attend_to_a_cache(inputs, dtype: torch.dtype, **options: Any) -> Tensor:
    """All queries of a sequence on all of its keys but two."""
    q, k, v = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    lengths = torch.full((len(q),), k.shape[1] - 2, dtype=torch.int32, device="cuda")
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **options)


def with_sinks(inputs) -> Tensor:
    """Of 16 bits, those of a draw."""
    return attend_to_e4m3(inputs, sinks=inputs.q[0, 0, :, 0].contiguous(), window_size=(40, 0))


AGAIN: dict[str, Callable[..., Tensor]] = {
    "forward": lambda x: flash_attn_func(x.q, x.k, x.v, causal=True),
    "gradients": gradients,
    "gradients of a tile": gradients_of_a_tile,
    "packed gradients": packed_gradients,
    "packed gradients of a tile": packed_gradients_of_a_tile,
    "decode": decoded,
    "fp8": lambda x: flash_attn_fp8_func(x.q, x.k, x.v, causal=True),
    "quantizer": quantized,
    "attention to parts": attend_to_parts,
    "e4m3": attend_to_e4m3,
    "e4m3, a key head each": partial(attend_to_e4m3, heads=2),
    "e4m3, V transposed before": partial(attend_to_e4m3, heads=2, repeats=24),
    "e4m3, a window": partial(attend_to_e4m3, window_size=(9, 0)),
    "e4m3, an exact LSE": partial(attend_to_e4m3, return_attn_probs=True),
    "e4m3, sinks": with_sinks,
    "packed gradients in a window": partial(packed_gradients, window_size=(30, 0)),
    "packed, a window": partial(packed_in_a_window, in_fp8=False),
    "fp8, a window": lambda x: flash_attn_fp8_func(x.q, x.k, x.v, window_size=(30, 5)),
    "fp8, packed, a window": partial(packed_in_a_window, in_fp8=True),
    "a cache, 16 bits": partial(attend_to_a_cache, dtype=torch.bfloat16),
    "a cache, e4m3": partial(attend_to_a_cache, dtype=torch.float8_e4m3fn, window_size=(200, 0)),
}


@pytest.mark.parametrize("name", AGAIN)
def test_calls_that_are_made_again_give_what_first_ones_gave(draw, name: str) -> None:
    # From the third call on nothing is found anew. Other sizes between them take their place in work memory.
    call = AGAIN[name]
    inputs = [draw(torch.bfloat16, 2, (128, 384), (4, 2), 64) for _ in range(4)]
    for x in inputs:
        call(draw(torch.bfloat16, 1, (64, 200), (4, 2), 64))
        first = call(x)
        assert all(torch.equal(call(x), first) for _ in range(3))
    results = [call(x) for x in inputs]
    assert not any(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    "name",
    [
        "forward",
        "gradients of a tile",
        "packed gradients of a tile",
        "fp8",
        "quantizer",
        "attention to parts",
        "e4m3",
        "e4m3, V transposed before",
        "e4m3, an exact LSE",
        "packed, a window",
        "fp8, a window",
        "fp8, packed, a window",
        "a cache, 16 bits",
        "a cache, e4m3",
    ],
)
def test_a_graph_outlives_what_is_kept_of_the_calls_before_it(draw, name: str) -> None:
    x, call = draw(torch.bfloat16, 2, (128, 400), (4, 2), 64), AGAIN[name]
    expected = call(x)
    for _ in range(3):
        assert torch.equal(call(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    for kept in (
        cache_again.remembered,
        dense_again.remembered,
        dense_again.of_any_length,
        descaled_again.remembered,
        parts_again.remembered,
        parts_again.of_any_length,
        varlen_again.remembered,
        gradients_again.remembered,
        gradients_again.passes_of,
        packed_gradients_again.remembered,
        packed_gradients_again.packed_passes_of,
    ):
        kept.cache_clear()
    fused_again.quantizing.cache_clear()
    fp8_at_once.calls_at_once.cache_clear()
    device_memory.constants._let_go()
    # What was freed is taken by others, and written.
    others = [torch.full((n,), math.nan, device="cuda") for n in (1, 8, 64, 256, 1024) for _ in range(50)]
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    assert len(others) == 250


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_quantize_and_attend_to_parts_of_their_own(draw, own_streams: bool) -> None:
    inputs = [draw(torch.bfloat16, 2, (128, 400), (4, 2), 64) for _ in range(4)]
    expected = [attend_to_parts(x) for x in inputs]
    for x in inputs:
        attend_to_parts(x)
    torch.cuda.synchronize()

    def run(number: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for _ in range(REPEATS):
                assert torch.equal(attend_to_parts(inputs[number]), expected[number])

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(run, range(len(inputs))))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_of_keys_that_are_new_are_served_as_by_the_operator(draw, requires_grad: bool) -> None:
    x = draw(torch.bfloat16, 2, (64, 600), (4, 2), 128)
    q = x.q.requires_grad_(requires_grad)
    for keys in (*range(33, 140, 3), 600, 1, 130, 599, 33):
        k, v = x.k[:, :keys], x.v[:, :keys]
        wanted, wanted_lse = torch.ops.hopper_attention.forward(q, k, v, 128**-0.5, False, None, 0, True)
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
        shared = torch.ops.hopper_attention.forward(q, k, k, 128**-0.5, False, None, 0, True)[0]
        assert torch.equal(flash_attn_func(q, k, k), shared)


def test_numbers_of_keys_that_are_new_are_quantized_as_by_a_first_call(draw) -> None:
    x = draw(torch.bfloat16, 2, (64, 600), (4, 2), 128)
    lengths = *range(33, 140, 7), 600, 1, 130, 599, 33
    keys = [(x.k[:, :n], x.v[:, :n]) for n in lengths]

    def quantize(k: Tensor, v: Tensor) -> list[Tensor]:
        parts = quantize_qkv(x.q, k, v)
        both = [each for part in (parts.q, parts.k, parts.v) for each in (part.data, part.scale)]
        return [*(each.view(torch.uint8) for each in both), parts.mean_v]

    wanted = []
    for k, v in keys:
        fused_again.quantizing.cache_clear()
        wanted.append(quantize(k, v))
    for _ in range(3):
        for (k, v), of_first in zip(keys, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(quantize(k, v), of_first, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_numbers_of_keys_that_are_new_are_attended_to_as_by_a_first_call(draw, causal: bool) -> None:
    x = draw(torch.bfloat16, 2, (64, 600), (4, 2), 128)
    lengths = *range(33, 140, 7), 600, 1, 130, 599, 33
    parts = [quantize_qkv(x.q, x.k[:, :n], x.v[:, :n]).opened() for n in lengths]
    wanted = []
    for each in parts:
        for kept in (parts_again.remembered, parts_again.of_any_length):
            kept.cache_clear()
        wanted.append(flash_attn_quantized_func(each, None, causal, True, exact_lse=False))
    for _ in range(3):
        for each, (out, lse) in zip(parts, wanted, strict=True):
            found, found_lse = flash_attn_quantized_func(each, None, causal, True, exact_lse=False)
            assert torch.equal(found, out) and torch.equal(found_lse, lse)


@pytest.mark.parametrize("lengths", [(35, 60, 1, 64, 33), (2099, 2048, 2300, 2065)])
def test_parts_of_lengths_that_are_new_are_read_where_they_lie(draw, lengths: tuple[int, ...]) -> None:
    x = draw(torch.bfloat16, 2, (64, 2400), (4, 2), 128)

    def parts_of(n: int) -> QuantizedQKV:
        return quantize_qkv(x.q, x.k[:, :n], x.v[:, :n])

    wanted = [flash_attn_quantized_func(parts_of(n).opened(), causal=True) for n in lengths]
    for kept in (parts_again.remembered, parts_again.of_any_length, parts_again.in_memory):
        kept.cache_clear()
    fused_again.quantizing.cache_clear()
    for n in (lengths[0] + 1, lengths[0] + 2, lengths[0] + 3):
        flash_attn_quantized_func(parts_of(n), causal=True)
    for n, out in zip(lengths, wanted, strict=True):
        parts = parts_of(n)
        assert isinstance(vars(parts)[MEMORY][0], LengthLayout)
        assert torch.equal(flash_attn_quantized_func(parts, causal=True), out) and MEMORY in vars(parts)


def decode_step(inputs, lengths: Tensor, **options) -> Tensor:
    return flash_attn_with_kvcache(inputs.q[:, :1], inputs.k, inputs.v, cache_seqlens=lengths, **options)


def test_layers_of_a_step_share_a_schedule(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [draw(torch.bfloat16, 3, (1, 500), (8, 2), 128) for _ in range(4)]
    lengths = torch.tensor([7, 500, 130], dtype=torch.int32, device="cuda")
    wanted = [decode_step(layer, lengths) for layer in layers]
    sizes = 3, 1, 500, 8, 2, 128
    schedule = get_scheduler_metadata(*sizes, lengths)
    decode_step(layers[0], lengths, scheduler_metadata=schedule)
    monkeypatch.setattr(kvcache, "read_call", None)
    for _ in range(3):
        found = [decode_step(layer, lengths, scheduler_metadata=schedule) for layer in layers]
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    # The next step: other lengths, and a schedule of its own.
    lengths += torch.tensor([1, -90, 1], dtype=torch.int32, device="cuda")
    schedule = get_scheduler_metadata(*sizes, lengths)
    found = [decode_step(layer, lengths, scheduler_metadata=schedule) for layer in layers]
    monkeypatch.undo()
    wanted = [decode_step(layer, lengths, backend="reference") for layer in layers]
    assert all((x - y).abs().max() < 2e-2 for x, y in zip(found, wanted, strict=True))


def test_a_graph_is_captured_with_a_schedule(draw) -> None:
    x = draw(torch.bfloat16, 3, (1, 500), (8, 2), 128)
    lengths = torch.tensor([7, 500, 130], dtype=torch.int32, device="cuda")
    schedule = get_scheduler_metadata(3, 1, 500, 8, 2, 128, lengths)
    for _ in range(2):
        decode_step(x, lengths, scheduler_metadata=schedule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_step(x, lengths, scheduler_metadata=schedule)
    for lengths_now in ([500, 1, 0], [3, 499, 64], [7, 500, 130]):
        lengths.copy_(torch.tensor(lengths_now, dtype=torch.int32))
        # Calls between replays have work memory of their own.
        wanted = decode_step(x, lengths, scheduler_metadata=schedule)
        graph.replay()
        assert torch.equal(out, wanted)
