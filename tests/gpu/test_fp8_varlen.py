"""FP8 attention of packed sequences on the kernels: each as if it were alone, all lengths read on the GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Softmax
from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    quantize_qkv,
)
from hopper_attention.fp8_rules import select_for
from hopper_attention.launch.packed_fp8 import packed_problem_of
from hopper_attention.launch.transpose import transpose_packed_values
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantization import from_packed_descales, resolve_lengths, transpose_packed
from hopper_attention.packed_quantized import PackedQuantizedQKV
from hopper_attention.quantization import Fp8Quantization
from hopper_attention.reference import attention_naive
from tests.gpu import test_varlen
from tests.gpu.test_fp8 import rms
from tests.gpu.test_fp8_windows import compare
from tests.python.test_packed_quantization import NAMES
from tests.python.varlen_cases import CASES, Case, offsets

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

MASKS = ((False, (-1, -1)), (True, (-1, -1)), (True, (100, 0)), (False, (50, 90)))


@pytest.mark.parametrize("shape", [(5, 128), (1, 80), (3, 64), (2, 256)], ids=str)
@pytest.mark.parametrize(
    "seqlens", [(200, 40, 0, 131, 1, 64, 1000), (1,) * 300, (4096, 7), (33,) * 9], ids=lambda x: str(len(x))
)
def test_a_kernel_transposes_v_of_packed_sequences(seqlens: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Any bits, NaN among them, rows of no sequence, and gaps between rows."""
    starts = torch.tensor((0, *seqlens), device="cuda").cumsum(0).int()
    bits = torch.randint(0, 256, (int(starts[-1]) + 5, 2 * shape[0], shape[1]), device="cuda").byte()
    v = bits[:, ::2].view(torch.float8_e4m3fn)
    for used in (None, starts.diff() * 3 // 4):
        lengths = Lengths(starts, starts, used, used, max(seqlens), max(seqlens))
        found, twin = transpose_packed_values(v, lengths), transpose_packed(v, lengths)
        assert torch.equal(found.view(torch.uint8), twin.view(torch.uint8))


def on_gpu(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, NaN in rows of no sequence, and the lengths by name."""
    tensors, lengths = test_varlen.on_gpu(case, dtype, seed)
    return tensors, dict(zip(NAMES, lengths, strict=True))


random_case = partial(test_varlen.random_case, sequences=7)


def wrong_of(
    parts: PackedQuantizedQKV, case: Case, causal: bool, window: tuple[int, int], backend: str, **options: Any
) -> list[Any]:
    """What is wrong with attention on packed tensors: sequence by sequence, and in rows of none; with the LSE, with an
    exact one, and without where that kernel is another."""
    options |= {"window_size": window, "backend": backend}
    found = [
        flash_attn_quantized_func(parts, None, causal, True, **options, exact_lse=exact_lse)
        for exact_lse in (False, True)
    ]
    without_lse, (out, lse) = flash_attn_quantized_func(parts, None, causal, **options), found[0]
    if not torch.equal(without_lse, out):
        found.append((without_lse, lse))
    return [
        wrong for results in found for wrong in wrong_results(parts, case, *results, causal, window, backend)
    ]


def wrong_results(
    parts: PackedQuantizedQKV, case: Case, out: Tensor, lse: Tensor, causal: bool, window, backend: str
) -> list[Any]:
    wrong: list[Any] = []
    for number, ((rows, keys), one) in enumerate(parts.sequences()):
        if rows.start == rows.stop:
            continue
        ours = out[None, rows.slice], lse[None, :, rows.slice]
        if keys.start == keys.stop:
            found = [] if not ours[0].any() and bool((ours[1] == -math.inf).all()) else ["rows without keys"]
        else:
            found = compare(one, *ours, causal, window, backend)
        wrong += [(number, found)] if found else []
    unused, _ = case.unused()
    if not bool((out[unused] == 0).all() and (lse[:, unused] == -math.inf).all()):
        wrong.append("rows of no sequence are not 0 with LSE -inf")
    return wrong


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_small_batches(backend: str, name: str, causal: bool) -> None:
    case = replace(CASES[name], head_dims=(64, 32))
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    parts = quantize_qkv(q, k, v, **lengths)
    assert wrong_of(parts, case, causal, (-1, -1), backend) == []


@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_random_batches(backend: str, head_dim: int) -> None:
    failures = {}
    for seed in range(5):
        case = random_case(seed, head_dim)
        (q, k, v), lengths = on_gpu(case, (torch.float16, torch.bfloat16)[seed % 2])
        c = Fp8Quantization(block_q=(1, 64)[seed % 2], rotate=head_dim != 96)
        parts = quantize_qkv(q, k, v, quantization=c, **lengths)
        for causal, window in MASKS:
            wrong = wrong_of(parts, case, causal, window, backend)
            if wrong:
                failures[seed, causal, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_levels(head_dim: int) -> None:
    case = random_case(3, head_dim)
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    parts = quantize_qkv(q, k, v, **lengths)
    for causal, window in MASKS:
        assert wrong_of(parts, case, causal, window, "hopper", two_level_accumulation=True) == []


@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("block_q", [1, 32, 128])
def test_the_quantizer_gives_the_bits_of_the_rules(head_dim: int, block_q: int) -> None:
    for seed, rotate_v in ((0, False), (1, True), (2, False)):
        case = random_case(seed, head_dim)
        (q, k, v), lengths = on_gpu(case, torch.bfloat16)
        # A mean by the kernel may be another in its last bit: tests/gpu/test_value_mean.py.
        c = Fp8Quantization(block_q=block_q, rotate_v=rotate_v, smooth_v=False)
        options = {"quantization": c, **lengths}
        fused, plain = (quantize_qkv(q, k, v, backend=name, **options) for name in ("fused", "torch"))
        for (_, a), (_, b) in zip(fused.sequences(), plain.sequences(), strict=True):
            for ours, own in ((a.q, b.q), (a.k, b.k), (a.v, b.v)):
                assert torch.equal(ours.data.view(torch.uint8), own.data.view(torch.uint8))
                assert torch.equal(ours.scale, own.scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equal_lengths_give_the_bits_of_a_dense_batch(draw, head_dim: int, causal: bool) -> None:
    # At 2048 keys packed sequences have the tiles of dense ones.
    x = draw(torch.bfloat16, 3, (2048, 2048), (4, 2), head_dim)
    c = Fp8Quantization(block_k=128)
    options = {"causal": causal, "return_attn_probs": True, "quantization": c}
    dense = flash_attn_fp8_func(x.q, x.k, x.v, **options)
    bounds = offsets((2048,) * 3).cuda()
    lengths = dict(zip(NAMES, (bounds, bounds, 2048, 2048), strict=False))
    q, k, v = (tensor.flatten(0, 1) for tensor in (x.q, x.k, x.v))
    out, lse = flash_attn_fp8_func(q, k, v, **options, **lengths)
    assert torch.equal(out, dense[0].flatten(0, 1))
    assert torch.equal(lse, dense[1].transpose(0, 1).flatten(1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tensors_with_descales(backend: str, head_dim: int) -> None:
    for seed in range(3):
        case = random_case(seed, head_dim)
        tensors, named = on_gpu(case, torch.bfloat16)
        q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors)
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = len(case.rooms_q), case.heads[1]
        descales = tuple(torch.rand(shape, generator=generator, device="cuda") + 0.5 for _ in range(3))
        lengths = resolve_lengths(*(named[name] for name in NAMES))
        assert lengths is not None
        parts = from_packed_descales(q, k, v, descales, lengths, torch.bfloat16)
        factors = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        for causal, window in MASKS:
            options = {
                "causal": causal,
                "window_size": window,
                "backend": backend,
                "exact_lse": False,
                **factors,
            }
            out, lse = flash_attn_varlen_func(q, k, v, **named, **options, return_attn_probs=True)
            assert wrong_results(parts, case, out, lse, causal, window, backend) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_codes_that_promise_nothing(head_dim: int) -> None:
    """As those of other quantizers: scores in float32, but where nobody gets the LSE."""
    case = random_case(4, head_dim)
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    parts = quantize_qkv(q, k, v, **lengths)
    parts = replace(parts, q=replace(parts.q, largest=448.0))
    for causal, window in MASKS:
        problem = packed_problem_of(parts, causal, False, (*window, 0))
        assert select_for(problem).softmax is not Softmax.HALF_SCORES
        config = select_for(replace(problem, without_lse=True))
        assert config.lowers_queries and config.softmax is Softmax.HALF_SCORES
        assert wrong_of(parts, case, causal, window, "hopper") == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_nan_stays_in_its_sequence(head_dim: int) -> None:
    case = Case((200, 300, 100), (70, 333, 129), heads=(2, 1), head_dims=(head_dim, head_dim))
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    exact = flash_attn_fp8_func(q, k, v, **lengths)
    k[70:403], v[70:403] = math.nan, math.inf
    out = flash_attn_fp8_func(q, k, v, **lengths)
    assert torch.equal(out[:200], exact[:200]) and torch.equal(out[500:], exact[500:])
    assert bool(out[200:500].isnan().any()) and not exact.isnan().any()


def test_many_short_sequences() -> None:
    rng = random.Random(0)
    rooms = tuple(rng.randrange(40) for _ in range(20_000))
    bounds = offsets(rooms).cuda()
    total = int(bounds[-1])
    q, k, v = (torch.randn(total, heads, 64, device="cuda").bfloat16() for heads in (2, 1, 1))
    lengths = dict(zip(NAMES, (bounds, bounds, 40, 40), strict=False))
    out = flash_attn_fp8_func(q, k, v, causal=True, **lengths)
    assert bool(torch.isfinite(out).all())
    sixteen = flash_attn_varlen_func(q, k, v, *lengths.values(), causal=True)
    assert rms(out.double() - sixteen.double()) < 0.08 * rms(sixteen)


def test_nothing_waits_for_the_gpu_and_no_length_compiles(backend: str) -> None:
    case = random_case(1, 64)
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    options = {"causal": True, "backend": backend, **lengths}
    flash_attn_fp8_func(q, k, v, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_fp8_func(q, k, v, **options)
        flash_attn_fp8_func(q[1:], k[1:], v[1:], **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_takes_other_lengths_at_each_replay(backend: str) -> None:
    total, batch = 3000, 5
    q, k, v = (torch.randn(total, heads, 128, device="cuda").bfloat16() for heads in (4, 2, 2))
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    lengths = dict(zip(NAMES, (bounds, bounds, total, total), strict=False))

    def attend() -> tuple[Tensor, Tensor]:
        return flash_attn_fp8_func(q, k, v, None, True, True, backend=backend, **lengths)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    rng = random.Random(0)
    for _ in range(4):
        cuts = sorted(rng.randrange(total + 1) for _ in range(batch))
        bounds.copy_(torch.tensor([0, *cuts], dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        fresh, fresh_lse = attend()
        assert torch.equal(out, fresh) and torch.equal(lse, fresh_lse)
        for start, stop in zip([0, *cuts], cuts, strict=False):
            if start < stop:
                rows = slice(start, stop)
                exact, _ = attention_naive(q[None, rows], k[None, rows], v[None, rows], causal=True)
                assert rms(out[rows].double() - exact[0]) < 0.08 * rms(exact)
        assert bool((out[cuts[-1] :] == 0).all())


def test_offsets_that_make_no_sense_stay_in_the_tensors() -> None:
    q, k, v = (torch.randn(1000, 2, 64, device="cuda").bfloat16() for _ in range(3))
    guarded = torch.full((3000, 2, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    for wild in ([0, 5000, 100, 2000], [-50, 20, 2**30, 10], [900, 500, 100, 0]):
        bounds = torch.tensor(wild, dtype=torch.int32, device="cuda")
        lengths = dict(zip(NAMES, (bounds, bounds, 1000, 1000), strict=False))
        flash_attn_fp8_func(q, k, v, **lengths)
        torch.cuda.synchronize()
    assert bool((guarded == 7.0).all())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients(backend: str, head_dim: int) -> None:
    case = random_case(2, head_dim, 900)
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    for causal, window in MASKS:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"causal": causal, "window_size": window, "backend": backend}
        out = flash_attn_fp8_func(*leaves, **options, **lengths)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, dout)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        sides = {"window_left": window[0], "window_right": window[1]}
        right, _ = case.oracle(*(x.cpu() for x in exact), causal=causal, **sides)
        expected = torch.autograd.grad(right, exact, dout.double().cpu())
        unused_q, unused_k = case.unused()
        for ours, own, unused in zip(found, expected, (unused_q, unused_k, unused_k), strict=True):
            assert rms(ours[~unused].double() - own[~unused]) < 0.1 * rms(own[~unused])
            assert not ours[unused].any()
