"""Chunks on the kernels, against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hopper_attention import flash_attn_func, flash_attn_varlen_func
from tests.gpu.conftest import Inputs
from tests.gpu.gradients import find_errors_of_call, find_gradient_errors
from tests.python.varlen_cases import offsets

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

DTYPES = (torch.float16, torch.bfloat16)
SEQLENS = ((1, 239), (113, 203), (203, 113), (1023, 1024), (2100, 1700))
CHUNKS = (1, 7, 64, 100, 128, 1000)
WINDOWS = ((-1, -1), (50, 20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_every_chunk_on_odd_lengths(draw, check, head_dim: int, dtype: torch.dtype) -> None:
    failures = {}
    for seqlens, chunk, window, causal in itertools.product(SEQLENS, CHUNKS, WINDOWS, (False, True)):
        wrong = check(draw(dtype, 2, seqlens, (4, 2), head_dim), causal, window=window, chunk=chunk)
        if wrong:
            failures[seqlens, chunk, window, causal] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(draw, check, head_dim: int) -> None:
    for chunk, causal in itertools.product((2048, 3000, 8192), (False, True)):
        x = draw(torch.bfloat16, 1, (9001, 9001), (2, 1), head_dim)
        assert check(x, causal, chunk=chunk) == []


def test_keys_of_other_chunks_are_never_read(draw, backend: str) -> None:
    x = draw(torch.bfloat16, 1, (128, 4096), (2, 2), 128)
    options = {"causal": True, "attention_chunk": 1024, "backend": backend}
    exact = flash_attn_func(x.q, x.k, x.v, **options)
    for tensor in (x.k, x.v):
        # The last chunk begins at 3072, which no key block has to straddle by more than 256.
        tensor[:, : 3072 - 256] = torch.nan
    assert torch.equal(flash_attn_func(x.q, x.k, x.v, **options), exact)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_gradients(draw, backend: str, head_dim: int, deterministic: bool) -> None:
    failures = {}
    lengths = ((113, 203), (203, 113), (1023, 1024), (300, 2500), (2500, 300))
    cases = itertools.product(DTYPES, lengths, ((64, (-1, -1)), (100, (-1, -1)), (1000, (70, 30))))
    for number, (dtype, seqlens, (chunk, window)) in enumerate(cases):
        causal = number % 2 == 0
        x = draw(dtype, 1, seqlens, (4, 2), head_dim)
        options = {"backend": backend, "deterministic": deterministic}
        wrong = find_errors_of_call(x, causal, window, chunk, same_bits=deterministic, **options)
        if wrong:
            failures[dtype, seqlens, causal, chunk, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences(judge, backend: str, head_dim: int, causal: bool, deterministic: bool) -> None:
    rooms_q, rooms_k = (300, 0, 70, 513, 1, 200), (300, 50, 411, 129, 77, 0)
    cu_q, cu_k = offsets(rooms_q).cuda(), offsets(rooms_k).cuda()
    generator = torch.Generator("cuda").manual_seed(5)
    shapes = ((sum(rooms_q), 4), (sum(rooms_k), 2), (sum(rooms_k), 2))
    leaves = [
        torch.randn(*shape, head_dim, generator=generator, device="cuda").bfloat16().requires_grad_()
        for shape in shapes
    ]
    for chunk in (64, 100, 1000):
        options = {"causal": causal, "attention_chunk": chunk, "backend": backend}
        out, lse = flash_attn_varlen_func(
            *leaves, cu_q, cu_k, 513, 411, deterministic=deterministic, return_attn_probs=True, **options
        )
        dout = torch.randn(out.shape, generator=generator, device="cuda").bfloat16()
        gradients = torch.autograd.grad(out, leaves, dout)
        for b in range(len(rooms_q)):
            parts = tuple(slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k, cu_k))
            x = Inputs(*(leaf.detach()[None, part] for leaf, part in zip(leaves, parts, strict=True)))
            rows = parts[0]
            if 0 in (rooms_q[b], rooms_k[b]):
                assert bool((out[rows] == 0).all() and (lse[:, rows] == -math.inf).all())
                continue
            found = out.detach()[None, rows], lse.detach()[None, :, rows]
            assert judge(x, *found, causal, None, (-1, -1), chunk) == []
            ours = tuple(g[None, part] for g, part in zip(gradients, parts, strict=True))
            assert find_gradient_errors(x, ours, dout[None, rows], causal, None, (-1, -1), chunk) == []


def test_with_sinks_softcap_and_slopes(draw, backend: str) -> None:
    for seqlens, chunk in (((300, 517), 100), ((517, 300), 128)):
        x = draw(torch.bfloat16, 2, seqlens, (4, 2), 128)
        terms = {
            "softcap": 20.0,
            "alibi_slopes": torch.rand(4, device="cuda") / 8,
            "sinks": torch.randn(4, device="cuda"),
        }
        options = {"causal": True, "attention_chunk": chunk, "return_attn_probs": True, **terms}
        out, lse = flash_attn_func(x.q, x.k, x.v, **options, backend=backend)
        exact, exact_lse = flash_attn_func(x.q, x.k, x.v, **options, backend="reference")
        torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1e-3)
