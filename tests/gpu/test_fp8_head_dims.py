"""FP8 at head_dims that no table of tiles is for, and packed calls that are found again, on a GPU: against float64 on
what codes stand for, and with the same bits in each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.tilings import select_fp8_forward_config, with_lone_scales, with_runs
from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    quantize_qkv,
)
from hopper_attention.reference import attention_naive
from tests.gpu.conftest import compile_together
from tests.gpu.test_fp8_varlen import on_gpu, wrong_results
from tests.gpu.test_packed_descaled import E4M3
from tests.python.varlen_cases import Case, offsets

pytestmark = pytest.mark.gpu

DIMS = (80, 80), (96, 96), (160, 96), (160, 160), (192, 128), (192, 192), (64, 192), (224, 224)
KEYS = 200, 900, 3000, 6100
"""Few, in the middle, many, and so many that P V of parts is added up in runs."""


def configs_of(dims: tuple[int, int], causal: bool, keys: int) -> list[Any]:
    """Of calls without an LSE on parts, and on e4m3 tensors with V in rows and transposed ahead."""
    sizes = *dims, causal, "bfloat16", keys
    parts = select_fp8_forward_config(*sizes, 128, half_scores=True, without_lse=True)
    ahead = with_lone_scales(select_fp8_forward_config(*sizes, without_lse=True))
    in_rows = select_fp8_forward_config(*sizes, v_rows=True, without_lse=True)
    return [with_runs(parts, keys), ahead, in_rows]


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Those of the calls below, side by side."""
    found = [configs_of(dims, causal, keys) for dims in DIMS for causal in (False, True) for keys in KEYS]
    compile_together(list(dict.fromkeys(config for configs in found for config in configs)))


def same_of_three(call: Callable[[], Tensor]) -> Tensor:
    """What three calls give, in memory that held NaN."""
    found = []
    for _ in range(3):
        torch.full((2**24,), math.nan, device="cuda")
        found.append(call())
    assert all(torch.equal(found[0], other) for other in found[1:])
    return found[0]


def relative(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact.double()).norm() / exact.double().norm())


def draw(dims: tuple[int, int], queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1): four query heads of two K/V heads, two sequences."""
    generator = torch.Generator("cuda").manual_seed(keys)
    shapes = (2, queries, 4, dims[0]), (2, keys, 2, dims[0]), (2, keys, 2, dims[1])
    q, k, v = (torch.randn(x, device="cuda", generator=generator).bfloat16() for x in shapes)
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dense_calls(dims: tuple[int, int], keys: int, causal: bool) -> None:
    """Queries of a length of their own, 300 or as many as keys."""
    q, k, v = draw(dims, min(keys, 300 + keys // 3), keys)
    parts = quantize_qkv(q, k, v)
    exact, _ = attention_naive(*(x.float() for x in (q, k, v)), causal=causal)
    on_parts = same_of_three(lambda: flash_attn_quantized_func(parts, causal=causal, backend="hopper"))
    from_16_bits = same_of_three(lambda: flash_attn_fp8_func(q, k, v, causal=causal, backend="hopper"))
    assert relative(on_parts, exact) < 7e-2 and relative(from_16_bits, exact) < 7e-2
    codes = [x.to(E4M3) for x in (q, k, v)]
    exact, _ = attention_naive(*(x.float() for x in codes), causal=causal)
    out = same_of_three(lambda: flash_attn_func(*codes, causal=causal, backend="hopper"))
    assert relative(out, exact) < 4e-2


CASE = Case((300, 0, 33, 700), (300, 21, 333, 700), behind=7, heads=(4, 2))
OTHER = Case((33, 700, 300, 0), (333, 700, 21, 300), behind=7, heads=(4, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bounds", [(700, 700), (5000, 5000)], ids=str)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (256, 256), (192, 128), (192, 192), (96, 96)], ids=str
)
def test_packed_calls_that_are_found_again(
    dims: tuple[int, int], bounds: tuple[int, int], causal: bool
) -> None:
    """With other lengths in the place of those that they were found with, too."""
    case = Case(CASE.rooms_q, CASE.rooms_k, behind=7, heads=(4, 2), head_dims=dims)
    tensors, named = on_gpu(case, torch.bfloat16)
    named |= {"max_seqlen_q": bounds[0], "max_seqlen_k": bounds[1]}
    parts = quantize_qkv(*tensors, **named)
    options = {"causal": causal, "backend": "hopper"}
    lse = {"return_attn_probs": True, "exact_lse": False}
    on_parts = same_of_three(lambda: flash_attn_quantized_func(parts, **options))
    from_16_bits = same_of_three(lambda: flash_attn_fp8_func(*tensors, **named, **options))
    assert torch.equal(on_parts, from_16_bits)
    for _ in range(3):
        found = flash_attn_quantized_func(parts, **options, **lse)
    assert wrong_results(parts, case, *found, causal, (-1, -1), "hopper") == []
    _, found_lse = found
    assert wrong_results(parts, case, on_parts, found_lse, causal, (-1, -1), "hopper") == []
    other = Case(OTHER.rooms_q, OTHER.rooms_k, behind=7, heads=(4, 2), head_dims=dims)
    drawn, _ = on_gpu(other, torch.bfloat16, seed=1)
    for name, rooms in (("cu_seqlens_q", OTHER.rooms_q), ("cu_seqlens_k", OTHER.rooms_k)):
        named[name].copy_(offsets(rooms))
    moved = quantize_qkv(*drawn, **named)
    out, moved_lse = flash_attn_quantized_func(moved, **options, **lse)
    assert wrong_results(moved, other, out, moved_lse, causal, (-1, -1), "hopper") == []
    again = flash_attn_fp8_func(*drawn, **named, **options)
    assert torch.equal(again, flash_attn_quantized_func(moved, **options))
