"""FP8 kernels with the query heads of a K/V head in the rows of a tile, and with its keys in parts, run from their PTX
without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper.config import SMEM_BYTES
from hopper.forward.fp8.tilings import (
    FEW_QUERIES,
    FEW_QUERIES_IN_PARTS,
    select_fp8_few_queries_config,
)
from hopper_attention.quantized import E4M3, QuantizedQKV
from hopper_attention.quantizers import from_descales
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.split_on_numpy import fp8_parts_on_numpy
from tests.hopper.test_grouped import merged

LATE = Timing(is_late=True, seed=1)
SCALES = 0.5, 2.0, 3.0
"""Of q, k and v of the first head; of the second they are twice these."""

COMPILED = tuple(
    select_fp8_few_queries_config(head_dim, head_dim, causal, "bfloat16", group, rows, split)
    for split, tables in ((False, FEW_QUERIES), (True, FEW_QUERIES_IN_PARTS))
    for head_dim, tiles in tables.items()
    for rows in tiles
    for causal in (False, True)
    for group in (1, 8)
)


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 56


def draw(
    head_dim: int, seqlens: tuple[int, int], group: int
) -> tuple[QuantizedQKV, tuple[Tensor, Tensor, Tensor]]:
    """Inputs of two sequences and two K/V heads, and what they stand for."""
    generator, (seqlen_q, seqlen_k) = torch.Generator().manual_seed(0), seqlens
    shapes = (2, seqlen_q, 2 * group, head_dim), *[(2, seqlen_k, 2, head_dim)] * 2
    codes = [torch.randn(shape, generator=generator).to(E4M3) for shape in shapes]
    descales = [torch.tensor([[scale, 2 * scale]] * 2) for scale in SCALES]
    parts = from_descales(*codes, *descales, torch.bfloat16)
    values = [part.dequantize(torch.float32) for part in (parts.q, parts.k, parts.v)]
    return parts, tuple(values)


def check(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    (out, lse), (exact_out, exact_lse) = found, exact
    seen = exact_lse > -math.inf
    assert (out.double() - exact_out).norm() < 5e-2 * exact_out.norm()
    assert torch.equal(lse > -math.inf, seen) and bool((out[~seen.transpose(1, 2)] == 0).all())
    assert (lse.double() - exact_lse)[seen].abs().max() < 5e-2


CASES = [
    # head_dim, rows of a tile, causal, seqlens, group
    (64, 192, True, (21, 350), 8),
    (64, 64, False, (5, 300), 2),
    (64, 64, True, (70, 200), 2),
    (80, 192, False, (3, 300), 64),
    (128, 192, True, (50, 300), 4),
    (128, 64, False, (3, 330), 16),
    (128, 128, False, (19, 260), 8),
    (128, 64, True, (40, 30), 2),
    (256, 64, True, (20, 190), 2),
    (256, 128, True, (40, 190), 2),
    (208, 128, False, (9, 150), 8),
    (64, 192, True, (150, 300), 1),
    (128, 64, True, (33, 300), 1),
    (128, 192, False, (70, 140), 1),
    (256, 64, True, (50, 170), 1),
    (256, 128, True, (90, 170), 1),
]


@pytest.mark.parametrize("head_dim,tile_rows,causal,seqlens,group", CASES)
def test_heads_in_a_tile(
    head_dim: int, tile_rows: int, causal: bool, seqlens: tuple[int, int], group: int
) -> None:
    parts, values = draw(head_dim, seqlens, group)
    config = select_fp8_few_queries_config(
        head_dim, head_dim, causal, "bfloat16", group, tile_rows, split=False
    )
    found = fp8_forward_on_numpy(config, parts, 0.05, LATE)
    check(found, attention_naive(*values, causal=causal, softmax_scale=0.05))


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("head_dim,tile_rows,causal,seqlens,group", [*CASES, (128, 128, True, (90, 300), 1)])
def test_keys_in_parts(
    head_dim: int, tile_rows: int, causal: bool, seqlens: tuple[int, int], group: int, splits: int
) -> None:
    """Where there are fewer blocks than parts, some have no key."""
    parts, values = draw(head_dim, seqlens, group)
    config = select_fp8_few_queries_config(
        head_dim, head_dim, causal, "bfloat16", group, tile_rows, split=True
    )
    found, lse = fp8_parts_on_numpy(config, parts, 0.05, splits, 3, LATE)
    out, lse = merged(found, lse)
    check((out, lse.transpose(1, 2)), attention_naive(*values, causal=causal, softmax_scale=0.05))
