"""``attention_chunk`` from the public functions to the reference, and to the place where a kernel takes it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.window import NO_LIMIT
from hopper_attention import (
    explain,
    explain_varlen,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from hopper_attention.launch import backward
from hopper_attention.launch.forward import run_forward
from hopper_attention.masks import MaskSpec
from hopper_attention.reference import attention_tiled, tiled_forward
from hopper_attention.reference.tiles import Mask
from tests.python.dense_cases import (
    assert_defined,
    assert_nan_reaches,
    assert_tiles_hold,
    by_definition,
    sees,
)
from tests.python.fake_gpu import SMS

OPS = torch.ops.hopper_attention
CHUNKS = (1, 7, 64, 100, 128, 1000)
CASES = (
    ((40, 150), (-1, -1)),
    ((150, 40), (20, 9)),
    ((133, 133), (-1, -1)),
    ((1, 90), (5, 3)),
)
"""Lengths and windows."""


def qkv(
    seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (4, 2)
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    shapes = (2, seqlen_q, heads[0], 8), (2, seqlen_k, heads[1], 8), (2, seqlen_k, heads[1], 8)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 1), (4, 3), (16, 16)])
def test_tiles_hold_every_pair_that_is_seen_and_skip_the_others(
    tile_m: int, tile_n: int, causal: bool
) -> None:
    for (sq, sk), chunk in itertools.product(((1, 9), (9, 1), (13, 13), (9, 21), (21, 9)), (1, 2, 5, 16, 64)):
        for window in ((-1, -1), (3, -1), (2, 4)):
            mask, wanted = Mask(sq, sk, causal, *window, chunk), sees(sq, sk, causal, window, chunk)
            assert_tiles_hold(mask, wanted, tile_m, tile_n)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_results_and_gradients(chunk: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(chunk)
    for lengths, window in CASES:
        inputs = [x.requires_grad_() for x in qkv(*lengths)]
        seen = sees(*lengths, causal, window, chunk)
        wanted, wanted_lse = exact_results = by_definition(*inputs, seen)
        sides = {"causal": causal, "window_left": window[0], "window_right": window[1]}
        out, lse = attention_tiled(*inputs, **sides, attention_chunk=chunk, tile_m=32, tile_n=16)
        assert_defined((out, lse), exact_results, seen)
        unseen = ~seen.any(1)
        dout, dlse = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse))
        live = dlse.masked_fill(unseen, 0.0)
        exact = torch.autograd.grad((wanted, wanted_lse.masked_fill(unseen, 0.0)), inputs, (dout, live))
        for mine, theirs in zip(torch.autograd.grad((out, lse), inputs, (dout, dlse)), exact, strict=True):
            torch.testing.assert_close(mine, theirs.nan_to_num(0.0), rtol=1e-10, atol=1e-10)


def test_the_public_function_with_sinks_and_every_packed_form() -> None:
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    for lengths in ((21, 40), (40, 21)):
        q, k, v = qkv(*lengths, torch.bfloat16)
        doubles = [x.double() for x in (q, k, v)]
        for chunk, causal in itertools.product((7, 16, 1000), (False, True)):
            options: dict[str, Any] = {"causal": causal, "attention_chunk": chunk, "return_attn_probs": True}
            seen = sees(*lengths, causal, (-1, -1), chunk)
            for given in (None, sinks):
                out, lse = flash_attn_func(q, k, v, **options, sinks=given)
                wanted, wanted_lse = by_definition(
                    *doubles, seen, sinks=None if given is None else given.double()
                )
                torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    q, k, v = qkv(21, 21, torch.bfloat16)
    expected = flash_attn_func(q, k, v, attention_chunk=6)
    heads = torch.cat([q, k, v], 2)
    assert torch.equal(flash_attn_qkvpacked_func(heads, num_heads_q=4, attention_chunk=6), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_any_lengths(causal: bool) -> None:
    pairs = ((5, 40), (30, 12), (0, 9), (17, 17))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(p[i] for p in pairs)], dtype=torch.int32) for i in (0, 1)
    )
    generator = torch.Generator().manual_seed(8)
    shapes = (52, 4, 8), (78, 2, 8), (78, 2, 8)
    inputs = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes]
    out, lse = flash_attn_varlen_func(
        *inputs, cu_q, cu_k, 64, 64, causal=causal, attention_chunk=7, return_attn_probs=True
    )
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    for b, (sq, sk) in enumerate(pairs):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        leaves = [
            x.detach()[None, part].double().requires_grad_()
            for x, part in zip(inputs, (rows, keys, keys), strict=True)
        ]
        wanted, wanted_lse = by_definition(*leaves, sees(sq, sk, causal, (-1, -1), 7))
        torch.testing.assert_close(out[rows].double(), wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[:, rows].double(), wanted_lse[0], rtol=1e-5, atol=1e-5)
        exact = torch.autograd.grad(wanted.square().sum(), leaves)
        for mine, theirs, part in zip(gradients, exact, (rows, keys, keys), strict=True):
            # A row without keys has no derivative of its LSE by the definition.
            theirs = theirs[0].nan_to_num(0.0)
            assert (
                (mine[part].double() - theirs).abs().max() <= 0.05 * max(theirs.abs().max(), 1.0)
                if sq
                else True
            )


def test_opcheck() -> None:
    mask = MaskSpec.canonical(True, 30, -1, 21, 33, 7)
    assert mask.sides == (-1, -1, 7)
    q, k, v = (x.requires_grad_() for x in qkv(21, 33, torch.bfloat16))
    torch.library.opcheck(OPS.forward.default, (q, k, v, 0.2, True, None, 0, False, *mask.sides))
    with pytest.raises(ValueError, match="attention_chunk is -1, allowed: 0, which is none, to 536870912"):
        OPS.forward(q, k, v, 0.2, True, None, 0, False, -1, -1, -1)


@pytest.mark.parametrize("lengths", [(40, 90), (90, 40)], ids=str)
def test_fp8_tensors(lengths: tuple[int, int]) -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv(*lengths, torch.float32))
    out, lse = flash_attn_func(q, k, v, causal=True, attention_chunk=16, return_attn_probs=True)
    seen = sees(*lengths, True, (-1, -1), 16)
    wanted, wanted_lse = by_definition(*(x.double() for x in (q, k, v)), seen)
    assert (out.double() - wanted).norm() <= 0.05 * wanted.norm()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-3, atol=1e-3)


def test_a_chunk_hides_what_is_not_finite() -> None:
    q, k, v = qkv(40, 40, torch.float32)
    options = {"attention_chunk": 10, "tile_m": 16, "tile_n": 16}
    clean = tiled_forward(q, k, v, **options)
    k[:, 20], v[:, 20] = math.nan, math.nan
    assert_nan_reaches(tiled_forward(q, k, v, **options), clean, 20, 30)


# Kernels


def test_chunks_reach_kernels_and_are_no_part_of_a_key(kernel_calls: list[tuple[Any, ...]]) -> None:
    q, k, v = (torch.randn(2, n, h, 32).bfloat16() for n, h in ((21, 4), (33, 2), (33, 2)))
    for backend in ("hopper", "ampere"):
        configs = set()
        for sides, given in (((-1, -1, 7), (NO_LIMIT, NO_LIMIT, 7)), ((5, -1, 8), (5, NO_LIMIT, 8))):
            run_forward(q, k, v, 0.5, True, backend, 0, window=sides)
            config, arguments = kernel_calls[-1]
            at = next(i for i, x in enumerate(arguments) if isinstance(x, float))
            check_options(backend, arguments[at + 1 :], given)
            configs.add(config)
        (config,) = configs
        assert config.window and config.chunk and "_window_chunk" in config.name
        run_forward(q, k, v, 0.5, True, backend, 0, window=(5, -1, 0))
        assert not kernel_calls[-1][0].chunk
        out, lse = torch.zeros(2, 21, 4, 32).bfloat16(), torch.zeros(2, 4, 21)
        backward.run_backward(out, q, k, v, out, lse, 0.5, True, backend=backend, window=(-1, -1, 7))
        config, arguments = next(call for call in reversed(kernel_calls) if getattr(call[0], "chunk", False))
        check_options(backend, arguments[11:], (NO_LIMIT, NO_LIMIT, 7))


def check_options(backend: str, options: tuple[Any, ...], given: tuple[int, ...]) -> None:
    """What is given behind the scale: the sides, and on Hopper None for all else but the CTAs of the grid."""
    assert tuple(options[:3]) == given
    if backend == "hopper":
        assert set(options[3:-1]) == {None} and options[-1] % SMS == 0
    else:
        assert not options[3:]


def test_explain_names_it() -> None:
    tensors = [x.requires_grad_() for x in qkv(21, 33, torch.bfloat16)]
    for backend in ("hopper", "ampere"):
        plan = explain(*tensors, attention_chunk=7, backend=backend, device_capability=(9, 0))
        assert "attention_chunk: a query sees keys of its own chunk of 7 alone" in plan.notes
        assert plan.config.chunk and "_window_chunk" in plan.notes[-1]
        rows = [x[0] for x in tensors]
        lengths = (torch.tensor([0, n], dtype=torch.int32) for n in (21, 33))
        plan = explain_varlen(
            *rows, *lengths, 21, 33, attention_chunk=7, backend=backend, device_capability=(9, 0)
        )
        assert "attention_chunk: a query sees keys of its own chunk of 7 alone" in plan.notes
        assert plan.config.chunk and "_window_chunk" in plan.notes[-1]
