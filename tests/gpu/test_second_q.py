"""A tile has the same bits whether it is the first of its CTA or a later one, whose Q lies in the other stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    quantize_qkv,
)
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

COPIES, HEADS, SEQLEN = 48, 16, 500
"""Of one batch entry: some ten tiles for each CTA."""

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn_func(q, k, v, causal=causal)


def windowed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn_func(q, k, v, causal=causal, window_size=(100, 0 if causal else 60))


def packed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    offsets = torch.arange(0, len(q) * SEQLEN + 1, SEQLEN, dtype=torch.int32, device=q.device)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn_varlen_func(*rows, offsets, offsets, SEQLEN, SEQLEN, causal=causal).view(v.shape)


def quantized(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn_quantized_func(quantize_qkv(q, k, v), causal=causal)


CASES = [
    *((dense, head_dim) for head_dim in (32, 64, 72, 80, 96)),
    *((windowed, head_dim) for head_dim in (64, 80, 96)),
    *((packed, head_dim) for head_dim in (64, 80, 96, 128)),
    (quantized, 128),
]


@pytest.mark.usefixtures("usual_tiles")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("attend", "head_dim"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_copies_have_the_same_bits(attend: Attend, head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(head_dim)
    shape = 1, SEQLEN, HEADS, head_dim
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(3))
    q = 8 * q
    together = attend(*(x.expand(COPIES, *shape[1:]).contiguous() for x in (q, k, v)), causal)
    alone = attend(q, k, v, causal)
    assert torch.isfinite(alone).all()
    assert torch.equal(together, alone.expand_as(together))
    if attend in (dense, packed):
        exact, _ = attention_naive(q.double(), k.double(), v.double(), causal=causal)
        assert ((alone.double() - exact).norm() / exact.norm()).item() < 2.0**-7
