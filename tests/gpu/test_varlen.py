"""Packed sequences on the kernels: each against float64, all lengths read on the GPU alone."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func, flash_attn_varlen_func
from tests.gpu.conftest import Inputs
from tests.gpu.gradients import find_packed_errors
from tests.python.varlen_cases import CASES, Case, offsets

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

DTYPES = (torch.float16, torch.bfloat16)


def on_gpu(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], list[object]]:
    """q, k and v, NaN in rows of no sequence, and the lengths."""
    lengths = [x.cuda() if isinstance(x, Tensor) else x for x in case.lengths]
    return [x.cuda() for x in case.tensors(dtype, seed=seed)], lengths


def errors_of(case: Case, dtype: torch.dtype, backend: str, judge, causal: bool, window=(-1, -1)) -> list:
    (q, k, v), lengths = on_gpu(case, dtype)
    options = {"causal": causal, "window_size": window, "backend": backend, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(q, k, v, *lengths, **options)
    wrong = []
    for number, (rows, keys) in enumerate(case.spans()):
        inputs = Inputs(q[None, rows], k[None, keys], v[None, keys])
        found = judge(inputs, out[None, rows], lse[None, :, rows], causal, None, window)
        wrong += [(number, found)] if found else []
    unused, _ = case.unused()
    if not bool((out[unused] == 0).all() and (lse[:, unused] == -math.inf).all()):
        wrong.append("rows of no sequence are not 0 with LSE -inf")
    return wrong


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_small_batches(judge, backend: str, name: str, causal: bool) -> None:
    for dtype in DTYPES:
        assert errors_of(CASES[name], dtype, backend, judge, causal) == []


def random_case(seed: int, head_dim: int, longest: int = 1500, sequences: int = 9) -> Case:
    rng = random.Random(seed)
    rooms = [
        [rng.choice((0, 1, rng.randrange(200), rng.randrange(longest))) for _ in range(sequences)]
        for _ in "qk"
    ]
    used = [[rng.randrange(room + 1) for room in of] if rng.random() < 0.4 else None for of in rooms]
    heads = rng.choice(((4, 4), (4, 2), (6, 1)))
    rows = [tuple(x) if x is not None else None for x in (*rooms, *used)]
    return Case(*rows, behind=rng.choice((0, 0, 77)), heads=heads, head_dims=(head_dim, head_dim))


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_random_batches(judge, backend: str, head_dim: int) -> None:
    failures = {}
    for seed in range(6):
        case = random_case(seed, head_dim)
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (True, (100, 0)), (False, (50, 90))):
            wrong = errors_of(case, DTYPES[seed % 2], backend, judge, causal, window)
            if wrong:
                failures[seed, causal, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_equal_lengths_give_the_bits_of_a_dense_batch(
    draw, backend: str, head_dim: int, causal: bool
) -> None:
    # At these lengths packed sequences have the tiles of dense ones, but for head_dim 64 without a mask, where 132
    # tiles and more have others under a mask too: two sequences are 88.
    seqlen = 2048 if head_dim in (64, 256) else 1024
    batch = 2 if head_dim == 64 else 3
    x = draw(torch.bfloat16, batch, (seqlen, seqlen), (4, 2), head_dim)
    dense = flash_attn_func(x.q, x.k, x.v, causal=causal, backend=backend, return_attn_probs=True)
    bounds = offsets((seqlen,) * batch).cuda()
    q, k, v = (tensor.flatten(0, 1) for tensor in (x.q, x.k, x.v))
    options = {"causal": causal, "backend": backend, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(q, k, v, bounds, bounds, seqlen, seqlen, **options)
    dense_out, dense_lse = dense[0].flatten(0, 1), dense[1].transpose(0, 1).flatten(1)
    if (backend, head_dim, causal) == ("hopper", 64, False):
        torch.testing.assert_close(out, dense_out, rtol=0.01, atol=0.01)
        torch.testing.assert_close(lse, dense_lse, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)


def test_many_short_sequences(judge, backend: str) -> None:
    rng = random.Random(0)
    rooms = tuple(rng.randrange(40) for _ in range(20_000))
    bounds = offsets(rooms).cuda()
    total = int(bounds[-1])
    q, k, v = (torch.randn(total, heads, 64, device="cuda").bfloat16() for heads in (2, 1, 1))
    options = {"causal": True, "backend": backend, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(q, k, v, bounds, bounds, 40, 40, **options)
    for number in (0, 1, 777, 10_000, 19_998, 19_999):
        rows = slice(int(bounds[number]), int(bounds[number + 1]))
        inputs = Inputs(q[None, rows], k[None, rows], v[None, rows])
        assert judge(inputs, out[None, rows], lse[None, :, rows], True) == []
    assert bool(torch.isfinite(out).all())


def test_nothing_waits_for_the_gpu_and_no_length_compiles(backend: str) -> None:
    case = random_case(1, 64)
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    flash_attn_varlen_func(q, k, v, *lengths, causal=True, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_varlen_func(q, k, v, *lengths, causal=True, backend=backend)
        flash_attn_varlen_func(q[1:], k[1:], v[1:], *lengths, causal=True, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_takes_other_lengths_at_each_replay(judge, backend: str) -> None:
    total, batch = 3000, 5
    q, k, v = (torch.randn(total, heads, 128, device="cuda").bfloat16() for heads in (4, 2, 2))
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    options = {"causal": True, "backend": backend, "return_attn_probs": True}

    def attend() -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(q, k, v, bounds, bounds, total, total, **options)

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
        for start, stop in zip([0, *cuts], cuts, strict=False):
            rows = slice(start, stop)
            inputs = Inputs(q[None, rows], k[None, rows], v[None, rows])
            assert judge(inputs, out[None, rows], lse[None, :, rows], True) == []
        assert bool((out[cuts[-1] :] == 0).all())


def test_offsets_that_make_no_sense_stay_in_the_tensors(backend: str) -> None:
    q, k, v = (torch.randn(1000, 2, 64, device="cuda").bfloat16() for _ in range(3))
    guarded = torch.full((3000, 2, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    for wild in ([0, 5000, 100, 2000], [-50, 20, 2**30, 10], [900, 500, 100, 0]):
        bounds = torch.tensor(wild, dtype=torch.int32, device="cuda")
        flash_attn_varlen_func(q, k, v, bounds, bounds, 1000, 1000, backend=backend)
        torch.cuda.synchronize()
    assert bool((guarded == 7.0).all())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_end_whatever_offsets_say(backend: str, head_dim: int, deterministic: bool) -> None:
    """Also where sequences overlap and share query tiles, which key tiles add to in turns: dQ is anything then."""
    q, k, v = (torch.randn(1000, 2, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    for wild in ([0, 400, 900, 0, 0], [0, 600, 300, 900], [0, 5000, 100, 2000], [-50, 20, 2**30, 10]):
        bounds = torch.tensor(wild, dtype=torch.int32, device="cuda")
        options = {"causal": True, "deterministic": deterministic, "backend": backend}
        out = flash_attn_varlen_func(q, k, v, bounds, bounds, 600, 600, **options)
        grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        torch.cuda.synchronize()
        assert all(grad.shape == q.shape for grad in grads)


def test_strides_and_addresses_are_free(judge, backend: str) -> None:
    case = Case((300, 20, 111), (290, 31, 140), heads=(2, 2), head_dims=(64, 64))
    (q, k, v), lengths = on_gpu(case, torch.bfloat16)
    exact = flash_attn_varlen_func(q, k, v, *lengths, backend=backend)
    for spread in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.nn.functional.pad(x, (0, 3))[..., :64],
        lambda x: torch.cat((x, x), 2)[..., 64:],
    ):
        assert torch.equal(flash_attn_varlen_func(*map(spread, (q, k, v)), *lengths, backend=backend), exact)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_gradients(backend: str, head_dim: int, deterministic: bool) -> None:
    failures = {}
    for seed in range(5):
        case, dtype = random_case(seed, head_dim, 900), DTYPES[seed % 2]
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (True, (100, 0)), (False, (50, 90))):
            (q, k, v), lengths = on_gpu(case, dtype)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            options = {"causal": causal, "window_size": window, "backend": backend, "return_attn_probs": True}
            out, lse = flash_attn_varlen_func(*leaves, *lengths, deterministic=deterministic, **options)
            dout, dlse = torch.randn_like(out), torch.randn_like(lse)
            grads = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=deterministic)
            wrong = find_packed_errors(case, leaves, grads, (dout, dlse), causal, window)
            if deterministic:
                again = torch.autograd.grad((out, lse), leaves, (dout, dlse))
                wrong += [] if all(map(torch.equal, grads, again)) else ["other bits the second time"]
            if wrong:
                failures[seed, causal, window] = wrong
    assert failures == {}
